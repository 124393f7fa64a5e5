"""Autograd collectives over the tensor-parallel axis.

They are the f and g of Megatron (Shoeybi et al., arXiv 1909.08053, section 3) and those of sequence parallelism
(Korthikanti et al., arXiv 2205.05198, section 4.2).

    region or function       forward          backward
    Copy            (f)      identity         all-reduce
    reduce_from_tp  (f bar)  all-reduce       identity
    Gather          (g)      all-gather       reduce-scatter
    scatter_sum     (g bar)  reduce-scatter   all-gather
    scatter_sequence         own slice        all-gather
    exchange_rows            all-to-all       all-to-all

f and g are objects, because a linear layer overlaps their communication with its products (`megapar.linear`). So are
`ChunkedGather`, `ChunkedReduce` and `ChunkedScatterSum`, which are g, f bar and g bar in chunks. Gathers and scatters
are along dimension 0, the sequence. At tp size 1 every one is the identity.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from megapar import comm
from megapar.comm import Pending
from megapar.context import Axis
from megapar.linear import InputRegion, OutputRegion

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Local:
    """No communication: the input is this rank's slice already, or there is only one rank."""

    def enter(self, x: Tensor) -> Tensor:
        return x

    def enter_async(self, x: Tensor) -> tuple[Tensor, Pending]:
        return x, Pending()

    def leave_async(self, grad_x: Tensor) -> tuple[Tensor, Pending]:
        return grad_x, Pending()


@dataclass(frozen=True)
class Copy(Local):
    """f: the input is the same on every rank. Each rank's gradient of the input is a part of the sum."""

    tp: Axis

    def leave_async(self, grad_x: Tensor) -> tuple[Tensor, Pending]:
        return grad_x, comm.all_reduce_async(grad_x, self.tp)


@dataclass(frozen=True)
class Gather:
    """g: each rank has a slice [s/tp, ...] of the input [s, ...]. Each rank's gradient of it is a part of the sum."""

    tp: Axis

    def enter(self, x: Tensor) -> Tensor:
        return comm.all_gather(x, self.tp)

    def enter_async(self, x: Tensor) -> tuple[Tensor, Pending]:
        return comm.all_gather_async(x, self.tp)

    def leave_async(self, grad_x: Tensor) -> tuple[Tensor, Pending]:
        return comm.reduce_scatter_async(grad_x, self.tp)


def cut_in_chunks(tokens: int, chunks: int) -> list[slice]:
    """Cut `tokens` tokens into `chunks` slices whose lengths differ by one at most, or into fewer if there are fewer.

    There is at least one slice, which is empty if there are no tokens.
    """
    number = max(1, min(chunks, tokens))
    edges = [tokens * i // number for i in range(number + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def _one_ahead(
    chunks: Sequence[slice], begin: Callable[[slice], tuple[_Result, Pending]]
) -> Iterator[tuple[slice, _Result]]:
    """Yield (chunk, result of begin(chunk)) when its communication has ended. That of the next chunk has begun then.

    No more than one begins ahead, so that the memory of few chunks is in use.
    """
    begun = begin(chunks[0])
    for position, chunk in enumerate(chunks):
        result, pending = begun
        if position + 1 < len(chunks):
            begun = begin(chunks[position + 1])
        pending.wait()
        yield chunk, result


# A chunk has the same tokens of every rank's slice of the sequence. So every rank contributes to every chunk, and its
# collective uses all links. The whole sequence is in the order of ranks, so the chunk's tokens lie apart in it: viewed
# as [tp, t, features] they are [:, tokens]. No copy is needed for that, because the product reads or writes this view
# (`MatrixProducts.forward_slices`), and the collective has the product's other side, which is contiguous. The exception
# is the gradient of ChunkedScatterSum: NCCL copies its chunks into their places.


@dataclass(frozen=True)
class ChunkedGather(Gather):
    """g, whose input may also enter in `chunks` chunks (`megapar.linear.ChunkedInputRegion`)."""

    chunks: int

    @property
    def slices(self) -> int:
        return self.tp.size

    def enter_in_chunks(self, x_2d: Tensor) -> Iterator[tuple[slice, Tensor]]:
        def begin(tokens: slice) -> tuple[Tensor, Pending]:
            gathered, pending = comm.all_gather_async(x_2d[tokens], self.tp)
            return gathered.view(self.tp.size, -1, x_2d.shape[1]), pending

        return _one_ahead(cut_in_chunks(x_2d.shape[0], self.chunks), begin)


@dataclass(frozen=True)
class ChunkedReduce:
    """f bar in `chunks` chunks (`megapar.linear.OutputRegion`): the ranks' partial results are summed on every rank."""

    tp: Axis
    chunks: int

    slices = 1

    def leave_in_chunks(self, y_2d: Tensor) -> Iterator[tuple[slice, Tensor]]:
        leaving = []
        for tokens in cut_in_chunks(y_2d.shape[0], self.chunks):
            # The product is written into the output, and summed there.
            yield tokens, y_2d[None, tokens]
            leaving.append(comm.all_reduce_async(y_2d[tokens], self.tp))
        for pending in leaving:
            pending.wait()

    def enter_gradient(self, grad_y: Tensor) -> tuple[Tensor, Iterable[slice]]:
        # Each rank's part enters the sum once, so its gradient is that of the sum. It is here already: one chunk.
        return grad_y.contiguous(), [slice(None)]


@dataclass(frozen=True)
class ChunkedScatterSum:
    """g bar in `chunks` chunks (`megapar.linear.OutputRegion`): each rank gets its slice of the sum."""

    tp: Axis
    chunks: int

    @property
    def slices(self) -> int:
        return self.tp.size

    def leave_in_chunks(self, y_2d: Tensor) -> Iterator[tuple[slice, Tensor]]:
        leaving = []
        for tokens in cut_in_chunks(y_2d.shape[0], self.chunks):
            y_chunk = y_2d[tokens]
            partial = y_2d.new_empty(self.tp.size, *y_chunk.shape)
            yield tokens, partial
            _, pending = comm.reduce_scatter_async(partial.flatten(0, 1), self.tp, out=y_chunk)
            leaving.append(pending)
        for pending in leaving:
            pending.wait()

    def enter_gradient(self, grad_y: Tensor) -> tuple[Tensor, Iterable[slice]]:
        # The weight gradient needs the whole, so the chunks are gathered into their places in it.
        whole = grad_y.new_empty(self.tp.size * grad_y.shape[0], *grad_y.shape[1:])
        grad_2d = grad_y.reshape(-1, grad_y.shape[-1])
        slices = whole.view(self.tp.size, *grad_2d.shape).unbind()

        def begin(tokens: slice) -> tuple[None, Pending]:
            places = [x[tokens] for x in slices]
            return None, comm.all_gather_slices_async(grad_2d[tokens], places, self.tp)

        arrivals = _one_ahead(cut_in_chunks(grad_2d.shape[0], self.chunks), begin)
        return whole, (tokens for tokens, _ in arrivals)


LOCAL = Local()


def input_region(tp: Axis, sequence_parallel: bool) -> InputRegion:
    """The region through which activations between layers enter a column-parallel layer."""
    if tp.size == 1:
        return LOCAL
    return Gather(tp) if sequence_parallel else Copy(tp)


def output_region(tp: Axis, sequence_parallel: bool, chunks: int) -> OutputRegion:
    """The region through which the output of a row-parallel layer leaves in chunks."""
    return ChunkedScatterSum(tp, chunks) if sequence_parallel else ChunkedReduce(tp, chunks)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: InputRegion) -> Tensor:
        ctx.region = region
        entered = region.enter(x)
        # autograd would take an input that is returned as it is for one that was changed in place. A view is not.
        return x.view_as(x) if entered is x else entered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # The reduction writes into its tensor, and autograd may use `grad` elsewhere too, so reduce a copy.
        grad_x, leaving = ctx.region.leave_async(grad.clone(memory_format=torch.contiguous_format))
        leaving.wait()
        return grad_x, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        # A copy, because the reduction writes into its tensor and autograd does not know that `x` changes.
        return comm.all_reduce(x.clone(memory_format=torch.contiguous_format), tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Each rank's part enters the sum once, so its gradient is that of the sum.
        return grad, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return comm.reduce_scatter(x, tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return comm.all_gather(grad, ctx.tp), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        if x.shape[0] % tp.size:
            raise ValueError(f"sequence parallel: length {x.shape[0]} does not divide by tp {tp.size}")
        # Every rank has all of `x`, so nothing is sent.
        return x.chunk(tp.size)[tp.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return comm.all_gather(grad, ctx.tp), None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], axis: Axis) -> Tensor:
        ctx.sent = sent
        ctx.received = received
        ctx.axis = axis
        return comm.all_to_all(x, sent, received, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return comm.all_to_all(grad, ctx.received, ctx.sent, ctx.axis), None, None, None


def copy_to_tp(x: Tensor, tp: Axis) -> Tensor:
    """f: `x`, the same on every rank, enters tensor-parallel work. Backward sums the ranks' gradients of it."""
    if tp.size == 1:
        return x
    return _Enter.apply(x, Copy(tp))


def gather_sequence(x: Tensor, tp: Axis) -> Tensor:
    """g: gather [s/tp, ...] to [s, ...] for tensor-parallel work. Backward is a reduce-scatter."""
    if tp.size == 1:
        return x
    return _Enter.apply(x, Gather(tp))


def reduce_from_tp(x: Tensor, tp: Axis) -> Tensor:
    """f bar: sum the partial results of the ranks. Every rank gets the sum."""
    if tp.size == 1:
        return x
    return _Reduce.apply(x, tp)


def scatter_sum(x: Tensor, tp: Axis) -> Tensor:
    """g bar: sum the partial results [s, ...] of the ranks. Each rank gets its slice [s/tp, ...] of the sum."""
    if tp.size == 1:
        return x
    return _ScatterSum.apply(x, tp)


def scatter_sequence(x: Tensor, tp: Axis) -> Tensor:
    """This rank's slice [s/tp, ...] of `x` [s, ...], which is the same on every rank.

    Raises ValueError if tp does not divide s.
    """
    if tp.size == 1:
        return x
    return _ScatterSequence.apply(x, tp)


def exchange_rows(x: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int], axis: Axis) -> Tensor:
    """Send rows of `x` [rows, ...] to every position of `axis`. Returns the rows that arrive here.

    The first `sent_rows[0]` rows go to position 0, the next `sent_rows[1]` to position 1, and so on. `received_rows[i]`
    rows arrive from position i. Backward sends the gradient of each row back to where the row came from.
    """
    if axis.size == 1:
        return x
    # Copies of the counts: backward needs them, and the caller may change its lists.
    return _ExchangeRows.apply(x, tuple(sent_rows), tuple(received_rows), axis)
