"""Dispatch: the rows of tokens travel to the ranks that hold their experts, and the results travel back.

    function    what it does to rows                                                          over
    send        copies each token's row once for each of its experts, sorts copies by expert
                all-to-all: each row goes to the position that holds its expert               ep
    receive     each rank gets the rows of all ranks that hold other parts of its experts     etp
                sorts rows by expert
    (experts)   `megapar.expert_parallel.experts` computes one row for each row
    combine     undoes the sort
                sums the parts of each row, where the row came from                           etp
                all-to-all: each row goes back to its token's rank                            ep
                sums the rows of each token, multiplied by the weights of its experts

No row is dropped: buffers have as many rows as tokens chose experts. Every rank takes part in every exchange, also if
it has no token, or holds no expert. Weights never travel, because rows are multiplied by them after their return.

Shapes: t tokens of this rank, k experts of a token, E experts, h hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar import comm
from megapar.context import Axis
from megapar.exchange import ArrivingRows, exchange_rows, start_exchange
from megapar.expert_parallel.route import counts
from megapar.params import cut


@dataclass(frozen=True)
class Dispatch:
    """Where each row goes, for both directions. `plan_dispatch` makes it from the experts that tokens chose.

    A recomputed forward pass can use the Dispatch of the first one, and so needs neither counts nor a copy to the host.
    """

    ep: Axis
    etp: Axis
    indices_tk: Tensor
    """int64 [t, k]: the experts of each token."""
    token_of_row: Tensor
    """int64 [t k]: the token of each row, where rows are sorted by expert, and rows of an expert by token."""
    row_of_choice: Tensor
    """int64 [t, k]: where each choice of each token is among these rows."""
    sent_rows: tuple[int, ...]
    """The number of rows that this rank sends to each position of ep."""
    received_rows: tuple[int, ...]
    """The number of rows that this rank receives from each position of ep."""
    brought_rows: tuple[int, ...]
    """The number of rows that each position of etp has received over ep."""
    rows_of_expert: tuple[int, ...]
    """The number of rows of each expert of this rank."""
    order: Tensor | None
    """int64 [rows]: which arrived row is at each place after the sort by expert. None: rows arrive sorted."""
    place: Tensor | None
    """int64 [rows]: the inverse of `order`."""

    @property
    def rows(self) -> int:
        """The number of rows that this rank's experts work on."""
        return sum(self.rows_of_expert)


def experts_of(num_experts: int, ep: Axis) -> range:
    """The global numbers of the experts that this rank holds. There may be none."""
    return range(*cut(num_experts, ep))


@torch.no_grad()
def plan_dispatch(indices_tk: Tensor, num_experts: int, ep: Axis, etp: Axis) -> Dispatch:
    """Plan where the rows of this rank's tokens go. `indices_tk` are their experts. A collective over ep and over etp.

    Only numbers of rows are communicated: int64 [E] over ep, and [ep, experts of the rank] over etp. They are copied to
    the host once, because the sizes of messages must be known there.
    """
    chosen = indices_tk.reshape(-1)
    top_k = indices_tk.shape[1]
    by_expert = torch.argsort(chosen, stable=True)
    mine_e, table_qpe = _count_tables(chosen, num_experts, ep, etp)
    sent_e, rows_qpe = _on_host(mine_e, table_qpe)
    borders = [experts_of(num_experts, replace(ep, rank=position)) for position in range(ep.size)]
    brought = rows_qpe.sum((1, 2)).tolist()
    order = _order_by_expert(table_qpe, sum(brought), indices_tk.device)
    return Dispatch(
        ep,
        etp,
        indices_tk=indices_tk,
        token_of_row=by_expert // top_k,
        row_of_choice=_inverse(by_expert).view(indices_tk.shape),
        sent_rows=tuple(int(sent_e[experts.start : experts.stop].sum()) for experts in borders),
        received_rows=tuple(rows_qpe[etp.rank].sum(1).tolist()),
        brought_rows=tuple(brought),
        rows_of_expert=tuple(rows_qpe.sum((0, 1)).tolist()),
        order=order,
        place=None if order is None else _inverse(order),
    )


def _count_tables(chosen: Tensor, num_experts: int, ep: Axis, etp: Axis) -> tuple[Tensor, Tensor]:
    """The rows of this rank by expert, [E]. The rows that arrive, by position of etp, of ep, and by expert of the rank.

    Position q of etp receives table[q, p, e] rows of this rank's e-th expert from its position p of ep.
    """
    experts = experts_of(num_experts, ep)
    if chosen.is_meta:
        # A dry run computes shapes alone. It counts with tokens that spread evenly over the experts.
        borders = torch.arange(num_experts + 1) * chosen.numel() // num_experts
        mine = borders.diff()
        return mine, mine[experts.start : experts.stop].expand(etp.size, ep.size, len(experts))
    mine = counts(chosen, num_experts)
    over_ep = comm.all_gather(mine, ep).view(ep.size, num_experts)[:, experts.start : experts.stop]
    # Ranks of etp hold parts of the same experts, so all of them leave out an empty message.
    if not len(experts):
        return mine, over_ep.expand(etp.size, ep.size, 0)
    return mine, comm.all_gather(over_ep.contiguous(), etp).view(etp.size, ep.size, len(experts))


def _on_host(mine_e: Tensor, table_qpe: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors in host memory, by one copy."""
    both = torch.cat([mine_e, table_qpe.reshape(-1)]).cpu()
    return both[: mine_e.numel()], both[mine_e.numel() :].view(table_qpe.shape)


def _order_by_expert(table_qpe: Tensor, rows: int, device: torch.device) -> Tensor | None:
    """The order that sorts arrived rows by expert, on `device`. None if they arrive sorted.

    Rows of one expert stay in the order in which they arrive.
    """
    etp_size, ep_size, experts = table_qpe.shape
    if etp_size * ep_size == 1 or experts <= 1:
        return None
    expert_qpe = torch.arange(experts, device=table_qpe.device).expand(table_qpe.shape)
    # The sum is given, because repeat_interleave would otherwise wait for a GPU to read it.
    expert_of_row = torch.repeat_interleave(expert_qpe.reshape(-1), table_qpe.reshape(-1), output_size=rows)
    return torch.argsort(expert_of_row, stable=True).to(device)  # a dry run counts on the CPU


def _inverse(permutation: Tensor) -> Tensor:
    places = torch.arange(permutation.numel(), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, places)


def send(x_th: Tensor, plan: Dispatch) -> ArrivingRows:
    """Send each token's row to the ranks of its experts. What runs before `receive` runs while the rows travel."""
    rows = _CopyRows.apply(x_th, plan.token_of_row, plan.row_of_choice)
    return start_exchange(rows, plan.sent_rows, plan.received_rows, plan.ep)


def receive(arriving: ArrivingRows, plan: Dispatch) -> Tensor:
    """The rows for this rank's experts, [rows, h], sorted by expert."""
    rows = _gather_rows(arriving.wait(), plan.brought_rows, plan.etp)
    return _reorder(rows, plan.order, plan.place)


def combine(rows: Tensor, weights_tk: Tensor, plan: Dispatch) -> Tensor:
    """Send the experts' results [rows, h] back, and sum them by token with `weights_tk`: [t, h].

    With etp above 1 `rows` are this rank's parts of the results, whose sum is the result. Sums are at least fp32, and
    the result has the dtype of `rows`.
    """
    rows = _reorder(rows, plan.place, plan.order)
    rows = _sum_rows(rows, plan.brought_rows, plan.etp)
    rows = exchange_rows(rows, plan.received_rows, plan.sent_rows, plan.ep)
    return _WeightedSum.apply(rows, weights_tk, plan.token_of_row, plan.row_of_choice)


def _gather_rows(rows: Tensor, brought_rows: Sequence[int], etp: Axis) -> Tensor:
    """The rows of all ranks of etp, one after the other. Backward sums the ranks' gradients of each row."""
    if etp.size == 1:
        return rows
    # Numbers of rows differ, so that an all-gather does not do. Each rank sends a copy to each rank, itself included.
    copies = rows.expand(etp.size, *rows.shape).reshape(-1, rows.shape[1])
    return exchange_rows(copies, [len(rows)] * etp.size, brought_rows, etp)


def _sum_rows(parts: Tensor, brought_rows: Sequence[int], etp: Axis) -> Tensor:
    """The inverse: the sum of all ranks' parts of the rows that this rank brought, in the order of ranks."""
    if etp.size == 1:
        return parts
    mine = brought_rows[etp.rank]
    arrived = exchange_rows(parts, brought_rows, [mine] * etp.size, etp)
    return arrived.view(etp.size, mine, parts.shape[1]).sum(0)


class _CopyRows(torch.autograd.Function):
    """The row of each choice's token, sorted by expert: [t k, h] from [t, h]."""

    @staticmethod
    def forward(ctx: Any, x_th: Tensor, token_of_row: Tensor, row_of_choice: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_choice)
        return x_th.index_select(0, token_of_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (row_of_choice,) = ctx.saved_tensors
        # Not index_add, which sums in any order on a GPU: a token's gradients are summed in the order of its choices.
        first, *others = row_of_choice.unbind(1)
        total = grad.index_select(0, first).to(_sum_dtype(grad))
        for rows in others:
            total += grad.index_select(0, rows)
        return total.to(grad.dtype), None, None


class _WeightedSum(torch.autograd.Function):
    """The sum of each token's rows, multiplied by the weights of its choices: [t, h] from [t k, h] sorted by expert."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights_tk: Tensor, token_of_row: Tensor, row_of_choice: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights_tk, token_of_row, row_of_choice)
        columns = weights_tk.to(_sum_dtype(rows)).split(1, dim=1)
        first, *others = zip(row_of_choice.unbind(1), columns, strict=True)
        choice, weight = first
        total = rows.index_select(0, choice) * weight
        for choice, weight in others:
            total.addcmul_(rows.index_select(0, choice), weight)
        return total.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights_tk, token_of_row, row_of_choice = ctx.saved_tensors
        grad_rows = torch.empty_like(rows)
        weight_of_row = weights_tk.new_empty(rows.shape[0], 1)
        weight_of_row.index_copy_(0, row_of_choice.view(-1), weights_tk.reshape(-1, 1))
        grad_of_weight = torch.empty_like(weight_of_row)
        # As many rows at a time as there are tokens: all of them would take k times the memory, in fp32.
        parts = (x.split(len(grad)) for x in (token_of_row, rows, weight_of_row, grad_rows, grad_of_weight))
        for tokens, part, weight, grad_part, grad_weight in zip(*parts, strict=True):
            grad_sum = grad.index_select(0, tokens).to(_sum_dtype(grad))
            grad_weight.copy_((part * grad_sum).sum(-1, keepdim=True))
            grad_part.copy_(grad_sum * weight)
        return grad_rows, grad_of_weight[row_of_choice, 0], None, None


class _Reorder(torch.autograd.Function):
    """Rows in another order. `place` is the inverse of `order`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place), None, None


def _reorder(rows: Tensor, order: Tensor | None, place: Tensor | None) -> Tensor:
    if order is None:
        return rows
    return _Reorder.apply(rows, order, place)


def _sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums over choices: fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)
