"""Dispatch: the hidden states of tokens travel to the ranks of their experts, and the results travel back.

A row is the hidden state of one token for one of its experts. Rows travel in chunks (`row_counts`), often just one.

    function    what it does                                                                  axis
    send        converts each token's hidden state, if the experts' products do (`NumberFormat.convert_input`)
                copies it once for each of its experts
                sorts these rows by chunk, and by expert
                all-to-all of all weights, sorted by expert                                   ep
                all-to-all of each chunk: each row goes to the position of its expert         ep
    compute     for one chunk after the other:
                gathers the rows of all ranks with other parts of the same experts            etp
                sorts the rows by expert
                computes one result row for each row (`megapar.expert_parallel.experts`)
                undoes the sort
                sums the parts of each result row on the rank that brought the row            etp
                all-to-all: each result row goes back to the rank of its token                ep
    combine     sums the result rows of each token

Through shared memory, without etp, the all-to-alls themselves sort rows by expert and undo it: one copy less each way.

All chunks leave at once, and arrive one by one. The results of a chunk travel while the experts work on the next one.
Autograd runs the same backward: all gradients of results leave at once.

No row is dropped: there is one row for each token and each of its experts. Every rank takes part in every exchange,
even if it has no token, or holds no expert. The weight of a row travels with it, in a message of its own: the expert
multiplies by it before its last product. If the token's rank multiplied the results, it would keep them for the
gradient of the weights: as many numbers as the rows that were sent, and 0.1% of them travel as weights instead.

Shapes: t tokens of this rank, k experts of a token, h hidden; E experts of the layer, or e experts of this rank;
p positions of ep, q positions of etp.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megapar_kernels.dispatch import Implementation
from megapar_kernels.grouped import RowGroups
from megapar_kernels.packed import moved
from megapar_kernels.token_rows import permuted_rows, rows_of_tokens, sums_of_rows
from torch import Tensor

from megapar.activations import recompute
from megapar.base.expert_load import EVEN, ExpertLoad
from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.declare.params import cut
from megapar.expert_parallel.exchange import ArrivingRows, ExchangeMemory, all_arrived, exchange_rows, start_exchanges
from megapar.expert_parallel.route import counts
from megapar.expert_parallel.row_counts import RowChunk, RowCounts, experts_of, inverse_of
from megapar.linear.convert import converted
from megapar.linear.meanwhile import Meanwhile
from megapar.linear.products import MatrixProducts
from megapar.linear.torch_products import TORCH_PRODUCTS
from megapar.system import device


@dataclass(frozen=True)
class Dispatch:
    """Where each row goes, there and back. `plan_dispatch` makes it from the experts that tokens chose.

    A recomputed forward pass uses the Dispatch of the first forward pass again. So it communicates no counts, and
    copies nothing to the host.
    """

    ep: Axis
    etp: Axis
    meanwhile: Meanwhile
    """Weight gradients that this rank computes while it waits for rows."""
    indices_tk: Tensor
    """int64 [t, k]: the experts of each token."""
    chosen_e: Tensor
    """int64 [E]: how often this rank's tokens chose each expert."""
    token_of_row: Tensor
    """int64 [t k]: the token of each row. Rows are sorted by chunk and expert, and the rows of one expert by token."""
    row_of_choice: Tensor
    """int64 [t, k]: for each choice of each token, its index among these rows."""
    choice_of_weight: Tensor
    """int64 [t k]: the choice of each weight as it is sent, where token i has the choices i k to i k + k - 1. Weights
    are sorted by expert alone: those of all chunks travel together."""
    weight_of_choice: Tensor
    """int64 [t, k]: the inverse."""
    chunks: Sequence[RowChunk]
    whole: RowChunk
    """All experts as one chunk, as weights travel."""

    @property
    def rows(self) -> int:
        """The number of rows for this rank's experts to work on."""
        return sum(chunk.rows for chunk in self.chunks)


@dataclass(frozen=True)
class Arriving:
    """What is on its way to the experts: the rows [rows, h] of each chunk, and the weights [rows, 1] of all."""

    rows: Sequence[ArrivingRows]
    weights: ArrivingRows


@torch.no_grad()
def plan_dispatch(
    indices_tk: Tensor,
    num_experts: int,
    ep: Axis,
    etp: Axis,
    layer: int = 0,
    load: ExpertLoad = EVEN,
    chunks: int = 1,
    place_e: Tensor | None = None,
    meanwhile: Meanwhile | None = None,
) -> Dispatch:
    """Plan where the rows of this rank's tokens go. `indices_tk` are their experts. A collective over ep and over etp.

    Only numbers of rows are communicated: int64 [E] over ep, and int64 [p, e] over etp. One copy brings them to the
    host, because the sizes of messages must be known there. Without ep and etp no rows travel, and where all experts
    are multiplied in one launch nobody waits for the copy. On the meta device they have no values: `load` says them
    for the `layer`. `place_e` is what `place_of_expert` says for this number of chunks.
    `meanwhile` has weight gradients to compute while this rank waits for rows of its ep peers.
    """
    top_k = indices_tk.shape[1]
    chosen = indices_tk.reshape(-1)
    chosen_e = counts(chosen, num_experts)
    # They travel while this rank sorts.
    chosen_pe, arriving = collectives.all_gather_async(chosen_e, ep)
    choice_of_weight = torch.argsort(chosen, stable=True)
    weight_of_choice = inverse_of(choice_of_weight).view(indices_tk.shape)
    choice_of_row, row_of_choice = choice_of_weight, weight_of_choice
    if place_e is not None:
        choice_of_row = torch.argsort(place_e[chosen], stable=True)
        row_of_choice = inverse_of(choice_of_row).view(indices_tk.shape)
    waiting = meanwhile or Meanwhile()
    waiting.run_until(arriving.has_arrived)
    arriving.wait()
    arriving_qpe = _arriving_rows(chosen_pe.view(ep.size, -1), ep, etp)
    if chosen.is_meta:
        chosen_qpe = load.chosen(layer, chosen.numel(), num_experts, ep.size, etp.size)
        of_experts = chosen_qpe[..., slice(*cut(num_experts, ep))]
        counted = torch.cat([chosen_qpe[etp.rank, ep.rank], of_experts.reshape(-1)])
        numbers: Callable[[], Tensor] = partial(_same, counted)
    else:
        # Begun here and waited for behind the copies of rows: a GPU would be idle while the host gets it.
        copy = device.HostCopy(torch.cat([chosen_e, arriving_qpe.reshape(-1)]))
        numbers = partial(_awaited, copy, ep if ep.size > 1 else etp)
    row_counts = RowCounts(ep, etp, num_experts, chosen.numel(), arriving_qpe, numbers)
    whole = RowChunk(row_counts, 0, 1)
    return Dispatch(
        ep,
        etp,
        waiting,
        indices_tk=indices_tk,
        chosen_e=chosen_e,
        token_of_row=choice_of_row // top_k,
        row_of_choice=row_of_choice,
        choice_of_weight=choice_of_weight,
        weight_of_choice=weight_of_choice,
        chunks=[whole] if chunks == 1 else [RowChunk(row_counts, number, chunks) for number in range(chunks)],
        whole=whole,
    )


def _awaited(copy: device.HostCopy, axis: Axis) -> Tensor:
    """The numbers of rows on the host, gathered over `axis`. A rank that sends none is missed here first."""
    with collectives.held(axis):
        return copy.wait()


def _same(x: Tensor) -> Tensor:
    return x


def _arriving_rows(chosen_pe: Tensor, ep: Axis, etp: Axis) -> Tensor:
    """The numbers of arriving rows, int64 [q, p, e]. Tokens of position p choose experts chosen_pe[p] times, int64 [E].

    The element [q, p, e] is the number of rows for this rank's e-th expert received by position q of etp from position
    p of ep.
    """
    experts = experts_of(chosen_pe.shape[1], ep)
    received_pe = chosen_pe[:, experts.start : experts.stop]
    if not len(experts):
        # There is nothing to gather over etp. Its ranks hold parts of the same experts, so all of them leave it out.
        return received_pe.expand(etp.size, ep.size, 0)
    return collectives.all_gather(received_pe.contiguous(), etp).view(etp.size, ep.size, len(experts))


def send(
    x_th: Tensor,
    weights_tk: Tensor,
    plan: Dispatch,
    impl: Implementation = "torch",
    products: MatrixProducts = TORCH_PRODUCTS,
) -> Arriving:
    """Start to send each token's rows to the ranks of its experts, and the weights of the token's experts.

    Rows travel as the `products` of the experts convert them: once for a token, and not once for each of its rows. What
    runs before `compute` overlaps the transfer.
    """
    x_th = converted(x_th, products)
    # Before the numbers of rows are waited for. The experts keep the rows if they do not travel.
    copied = partial(rows_of_tokens, impl=impl)
    rows = recompute.remade(copied, x_th, plan.token_of_row, plan.row_of_choice)
    # By torch's ops: our kernel is for rows of many numbers.
    weights = permuted_rows(weights_tk.reshape(-1, 1), plan.choice_of_weight, plan.weight_of_choice.view(-1))
    # Before all rows, because the first chunk needs some of them. They are few bytes, but a message a chunk would cost
    # its latency each time.
    (arriving_weights,) = start_exchanges(weights, [plan.whole.to_experts], plan.ep, meanwhile=plan.meanwhile)
    counts = [chunk.to_experts for chunk in plan.chunks]
    return Arriving(start_exchanges(rows, counts, plan.ep, meanwhile=plan.meanwhile), arriving_weights)


def compute(
    experts: Callable[[Tensor, Tensor, RowGroups, slice], Tensor],
    arriving: Arriving,
    plan: Dispatch,
    impl: Implementation = "torch",
) -> list[ArrivingRows]:
    """Compute the experts' results, and start to send them back.

    `experts` maps the rows [rows, h] of some of this rank's experts, sorted by expert, and their weights [rows, 1] to
    results [rows, h]. With etp above 1, each rank of etp has a part of each result, and their sum is the result.
    """
    returning = []
    memory = ExchangeMemory([sum(chunk.sent_rows) for chunk in plan.chunks])
    # Before any rows, so that in backward the gradients of weights leave behind those of all rows.
    weights = _by_expert(arriving.weights, plan.whole, plan, "torch").split([chunk.rows for chunk in plan.chunks])
    for chunk, weights_of_chunk, arriving_rows in zip(plan.chunks, weights, arriving.rows, strict=True):
        rows = _by_expert(arriving_rows, chunk, plan, impl)
        rows = experts(rows, weights_of_chunk, chunk.groups, chunk.experts)
        rows = _reorder(rows, chunk.arrival_order, chunk.expert_order, impl)
        rows = _sum_rows(rows, chunk.brought_rows, plan.etp)
        counts = [chunk.to_experts.back]
        returning += start_exchanges(rows, counts, plan.ep, (memory, chunk.number), plan.meanwhile)
    return returning


def combine(
    returning: Sequence[ArrivingRows],
    plan: Dispatch,
    impl: Implementation = "torch",
    products: MatrixProducts = TORCH_PRODUCTS,
) -> Tensor:
    """Wait for the experts' results, and sum them by token: [t, h].

    Sums over the experts of a token are in fp32, or in fp64 for fp64. The returned tensor has the dtype of the rows.
    Their gradients travel as the `products` of the experts convert them.
    """
    convert = partial(_converted_gradient, products)
    return sums_of_rows(all_arrived(returning), plan.token_of_row, plan.row_of_choice, impl, convert)


def _converted_gradient(products: MatrixProducts, grad: Tensor) -> Tensor:
    return products.carry(products.as_gradient(grad), like=grad)


def _by_expert(arriving: ArrivingRows, chunk: RowChunk, plan: Dispatch, impl: Implementation) -> Tensor:
    """Wait for what was sent to the experts of a chunk, and sort it by expert: of all etp ranks, [rows, any]."""
    rows = _gather_rows(arriving.wait(), chunk.brought_rows, plan.etp)
    return _reorder(rows, chunk.expert_order, chunk.arrival_order, impl)


def _gather_rows(rows: Tensor, brought_rows: Sequence[int], etp: Axis) -> Tensor:
    """The rows of all ranks of etp, one after the other. Backward sums the ranks' gradients of each row."""
    if etp.size == 1:
        return rows
    # An all-gather needs equal numbers of rows, which ranks do not have. So each rank sends a copy to each rank.
    copies = _CopyToParts.apply(rows, etp.size)
    return exchange_rows(copies, [len(rows)] * etp.size, brought_rows, etp)


def _sum_rows(parts: Tensor, brought_rows: Sequence[int], etp: Axis) -> Tensor:
    """The sum, in the order of ranks, of all etp ranks' parts of the rows received by this rank over ep."""
    if etp.size == 1:
        return parts
    own_rows = brought_rows[etp.rank]
    arrived = exchange_rows(parts, brought_rows, [own_rows] * etp.size, etp)
    total: Tensor = _SumOfParts.apply(arrived, etp.size)
    return total


class _CopyToParts(torch.autograd.Function):
    """Rows [n, h] as often as there are parts: [parts n, h]. Backward sums the gradients of a row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, parts: int) -> Tensor:
        ctx.parts = parts
        return moved(partial(_copies, parts), rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.reshape(ctx.parts, len(grad) // ctx.parts, grad.shape[1]).sum(0), None


class _SumOfParts(torch.autograd.Function):
    """The sum of the parts [parts n, h] of rows: [n, h]. Backward copies the gradient of a row to its parts."""

    @staticmethod
    def forward(ctx: Any, arrived: Tensor, parts: int) -> Tensor:
        ctx.parts = parts
        return arrived.view(parts, len(arrived) // parts, arrived.shape[1]).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return moved(partial(_copies, ctx.parts), grad), None


def _copies(parts: int, rows: Tensor) -> Tensor:
    return rows.expand(parts, *rows.shape).reshape(-1, rows.shape[1])


def _reorder(rows: Tensor, order: Tensor | None, inverse: Tensor | None, impl: Implementation) -> Tensor:
    """The rows at the indices `order`, whose inverse permutation is `inverse`. None leaves the order as it is."""
    if order is None or inverse is None:
        return rows
    return permuted_rows(rows, order, inverse, impl)
