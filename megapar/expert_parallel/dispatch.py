"""Dispatch: the hidden states of tokens travel to the ranks of their experts, and the results travel back.

A row is the hidden state of one token for one of its experts.

    function    what it does                                                                  axis
    send        copies each token's hidden state once for each of its experts
                sorts these rows by expert
                all-to-all: each row goes to the position of its expert                       ep
    receive     gathers the rows of all ranks with other parts of the same experts            etp
                sorts the rows by expert
    (experts)   `megapar.expert_parallel.experts` computes one result row for each row
    combine     undoes the sort of receive
                sums the parts of each result row on the rank that brought the row            etp
                all-to-all: each result row goes back to the rank of its token                ep
                sums the result rows of each token, multiplied by the weights of its experts

No row is dropped: there is one row for each token and each of its experts. Every rank takes part in every exchange,
even if it has no token, or holds no expert. The weights of experts never travel: the token's rank multiplies by them
when the results are back.

Shapes: t tokens of this rank, k experts of a token, h hidden; E experts of the layer, or e experts of this rank;
p positions of ep, q positions of etp.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from megapar_kernels.dispatch import Implementation
from megapar_kernels.grouped import RowGroups
from megapar_kernels.token_rows import permuted_rows, rows_of_tokens, weighted_sum
from torch import Tensor

from megapar import device, recompute
from megapar.comm import collectives
from megapar.comm.exchange import ArrivingRows, exchange_rows, start_exchange
from megapar.context import Axis
from megapar.expert_load import EVEN, ExpertLoad
from megapar.expert_parallel.route import counts
from megapar.params import cut


@dataclass(frozen=True)
class Dispatch:
    """Where each row goes, there and back. `plan_dispatch` makes it from the experts that tokens chose.

    Numbers of rows are on their way to the host. The first use of one waits for them, so a GPU should have work then.
    A recomputed forward pass uses the Dispatch of the first forward pass again. So it communicates no counts, and
    copies nothing to the host.
    """

    ep: Axis
    etp: Axis
    indices_tk: Tensor
    """int64 [t, k]: the experts of each token."""
    token_of_row: Tensor
    """int64 [t k]: the token of each row. Rows are sorted by expert, and the rows of one expert by token."""
    row_of_choice: Tensor
    """int64 [t, k]: for each choice of each token, its index among these rows."""
    num_experts: int
    arriving_qpe: Tensor
    """int64 [q, p, e], on the device: the rows for this rank's e-th expert received by position q of etp from position
    p of ep."""
    numbers: Callable[[], Tensor]
    """Waits for the numbers on the host: int64 [E], the rows sent by this rank to each expert, then `arriving_qpe`."""

    @cached_property
    def _on_host(self) -> tuple[Tensor, Tensor]:
        sent_e, arriving = self.numbers().split([self.num_experts, self.arriving_qpe.numel()])
        return sent_e, arriving.view(self.arriving_qpe.shape)

    @cached_property
    def sent_rows(self) -> tuple[int, ...]:
        """The number of rows sent by this rank to each position of ep."""
        sent_e, _ = self._on_host
        experts = [experts_of(self.num_experts, replace(self.ep, rank=position)) for position in range(self.ep.size)]
        return tuple(int(sent_e[numbers.start : numbers.stop].sum()) for numbers in experts)

    @cached_property
    def received_rows(self) -> tuple[int, ...]:
        """The number of rows received by this rank from each position of ep."""
        return tuple(self._on_host[1][self.etp.rank].sum(1).tolist())

    @cached_property
    def brought_rows(self) -> tuple[int, ...]:
        """The number of rows received over ep by each position of etp."""
        return tuple(self._on_host[1].sum((1, 2)).tolist())

    @cached_property
    def rows_of_expert(self) -> tuple[int, ...]:
        """The number of rows of each expert of this rank."""
        return tuple(self._on_host[1].sum((0, 1)).tolist())

    @cached_property
    def groups(self) -> RowGroups:
        """The rows of each expert of this rank, on the host and on the device."""
        return RowGroups(self.rows_of_expert, self.arriving_qpe.sum((0, 1)).cumsum(0, dtype=torch.int32))

    @cached_property
    def expert_order(self) -> Tensor | None:
        """int64 [rows]: the indices of the arrived rows in the order of experts. None if rows arrive in this order.

        Rows of one expert stay in their order of arrival.
        """
        arriving_qpe = self.arriving_qpe
        etp_size, ep_size, experts = arriving_qpe.shape
        if etp_size * ep_size == 1 or experts <= 1:
            return None
        expert_qpe = torch.arange(experts, device=arriving_qpe.device).expand(arriving_qpe.shape)
        # The sum is given, because repeat_interleave would otherwise wait for the GPU to read it.
        expert_of_row = torch.repeat_interleave(
            expert_qpe.reshape(-1), arriving_qpe.reshape(-1), output_size=sum(self.brought_rows)
        )
        return torch.argsort(expert_of_row, stable=True)

    @cached_property
    def arrival_order(self) -> Tensor | None:
        """int64 [rows]: the inverse permutation. It brings rows back into their order of arrival."""
        return None if self.expert_order is None else _inverse(self.expert_order)

    @property
    def rows(self) -> int:
        """The number of rows for this rank's experts to work on."""
        return sum(self.rows_of_expert)


def experts_of(num_experts: int, ep: Axis) -> range:
    """The global numbers of this rank's experts. There may be none."""
    return range(*cut(num_experts, ep))


@torch.no_grad()
def plan_dispatch(
    indices_tk: Tensor, num_experts: int, ep: Axis, etp: Axis, layer: int = 0, load: ExpertLoad = EVEN
) -> Dispatch:
    """Plan where the rows of this rank's tokens go. `indices_tk` are their experts. A collective over ep and over etp.

    Only numbers of rows are communicated: int64 [E] over ep, and int64 [p, e] over etp. One copy brings them to the
    host, because the sizes of messages must be known there. On the meta device they have no values: `load` says them
    for the `layer`.
    """
    top_k = indices_tk.shape[1]
    chosen = indices_tk.reshape(-1)
    sent_e, arriving_qpe = _count_rows(chosen, num_experts, ep, etp)
    if chosen.is_meta:
        chosen_qpe = load.chosen(layer, chosen.numel(), num_experts, ep.size, etp.size)
        of_experts = chosen_qpe[..., slice(*cut(num_experts, ep))]
        counted = torch.cat([chosen_qpe[etp.rank, ep.rank], of_experts.reshape(-1)])
        numbers: Callable[[], Tensor] = partial(_same, counted)
    else:
        # Begun here and waited for behind the copies of rows: a GPU would be idle while the host gets it.
        numbers = device.HostCopy(torch.cat([sent_e, arriving_qpe.reshape(-1)])).wait
    choice_of_row = torch.argsort(chosen, stable=True)
    return Dispatch(
        ep,
        etp,
        indices_tk=indices_tk,
        token_of_row=choice_of_row // top_k,
        row_of_choice=_inverse(choice_of_row).view(indices_tk.shape),
        num_experts=num_experts,
        arriving_qpe=arriving_qpe,
        numbers=numbers,
    )


def _same(x: Tensor) -> Tensor:
    return x


def _count_rows(chosen: Tensor, num_experts: int, ep: Axis, etp: Axis) -> tuple[Tensor, Tensor]:
    """Count the rows sent by this rank, int64 [E] by expert, and the arriving rows, int64 [q, p, e].

    The element [q, p, e] of the second is the number of rows for this rank's e-th expert received by position q of etp
    from position p of ep.
    """
    experts = experts_of(num_experts, ep)
    sent_e = counts(chosen, num_experts)
    received_pe = collectives.all_gather(sent_e, ep).view(ep.size, num_experts)[:, experts.start : experts.stop]
    if not len(experts):
        # There is nothing to gather over etp. Its ranks hold parts of the same experts, so all of them leave it out.
        return sent_e, received_pe.expand(etp.size, ep.size, 0)
    return sent_e, collectives.all_gather(received_pe.contiguous(), etp).view(etp.size, ep.size, len(experts))


def _inverse(permutation: Tensor) -> Tensor:
    indices = torch.arange(permutation.numel(), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, indices)


def send(x_th: Tensor, plan: Dispatch, impl: Implementation = "torch") -> ArrivingRows:
    """Start to send each token's rows to the ranks of its experts. What runs before `receive` overlaps the transfer."""
    # Before the numbers of rows are waited for. The experts keep the rows if they do not travel.
    copied = partial(rows_of_tokens, impl=impl)
    rows = recompute.remade(copied, x_th, plan.token_of_row, plan.row_of_choice)
    return start_exchange(rows, plan.sent_rows, plan.received_rows, plan.ep)


def receive(arriving: ArrivingRows, plan: Dispatch, impl: Implementation = "torch") -> Tensor:
    """The rows for this rank's experts, [rows, h], sorted by expert."""
    rows = _gather_rows(arriving.wait(), plan.brought_rows, plan.etp)
    return _reorder(rows, plan.expert_order, plan.arrival_order, impl)


def combine(rows: Tensor, weights_tk: Tensor, plan: Dispatch, impl: Implementation = "torch") -> Tensor:
    """Send the experts' results [rows, h] back, and sum them by token, multiplied by `weights_tk`: [t, h].

    With etp above 1, each rank of etp has a part of each result, and their sum is the result. Sums over the experts of
    a token are in fp32, or in fp64 for fp64. The returned tensor has the dtype of `rows`.
    """
    rows = _reorder(rows, plan.arrival_order, plan.expert_order, impl)
    rows = _sum_rows(rows, plan.brought_rows, plan.etp)
    rows = exchange_rows(rows, plan.received_rows, plan.sent_rows, plan.ep)
    return weighted_sum(rows, weights_tk, plan.token_of_row, plan.row_of_choice, impl)


def _gather_rows(rows: Tensor, brought_rows: Sequence[int], etp: Axis) -> Tensor:
    """The rows of all ranks of etp, one after the other. Backward sums the ranks' gradients of each row."""
    if etp.size == 1:
        return rows
    # An all-gather needs equal numbers of rows, which ranks do not have. So each rank sends a copy to each rank.
    copies = rows.expand(etp.size, *rows.shape).reshape(-1, rows.shape[1])
    return exchange_rows(copies, [len(rows)] * etp.size, brought_rows, etp)


def _sum_rows(parts: Tensor, brought_rows: Sequence[int], etp: Axis) -> Tensor:
    """The sum, in the order of ranks, of all etp ranks' parts of the rows received by this rank over ep."""
    if etp.size == 1:
        return parts
    own_rows = brought_rows[etp.rank]
    arrived = exchange_rows(parts, brought_rows, [own_rows] * etp.size, etp)
    return arrived.view(etp.size, own_rows, parts.shape[1]).sum(0)


def _reorder(rows: Tensor, order: Tensor | None, inverse: Tensor | None, impl: Implementation) -> Tensor:
    """The rows at the indices `order`, whose inverse permutation is `inverse`. None leaves the order as it is."""
    if order is None or inverse is None:
        return rows
    return permuted_rows(rows, order, inverse, impl)
