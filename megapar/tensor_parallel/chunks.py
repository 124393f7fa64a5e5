"""Linear layers that communicate in chunks under their products (parallel.tp_overlap_chunks).

    function        in forward                               region
    gather_linear   chunks enter while others are computed   ChunkedGather
    gather_adapted  the same, of a weight and an adapter     ChunkedGather
    linear_reduce   chunks leave while others are computed   OutputRegion: ChunkedReduce or ChunkedScatterSum

After Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models"
(ASPLOS 2023), with a collective for each chunk in place of a ring of transfers. `megapar.linear.function` has the
layers without chunks.

A chunk has the same tokens of every rank's slice of the sequence. So every rank contributes to every chunk, and its
collective uses all links. The whole sequence is in the order of ranks, so the chunk's tokens lie apart in it: viewed
as [tp, t, features] they are [:, tokens]. No copy is needed for that, because the product reads or writes this view
(`MatrixProducts.forward_slices`), and the collective has the product's other side, a contiguous tensor. The exception
is the gradient of ChunkedScatterSum: NCCL copies its chunks into their places.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.comm.pending import Pending
from megapar.linear.function import KeptWeight, LinearFunction, keep_for_backward, weight_gradient
from megapar.linear.low_rank import AdaptedLinear, LowRank, keep_adapted
from megapar.linear.products import MatrixProducts
from megapar.tensor_parallel.regions import Gather

_Result = TypeVar("_Result")


def cut_in_chunks(tokens: int, chunks: int) -> list[slice]:
    """Cut `tokens` tokens into `chunks` ranges, or into `tokens` if these are fewer. Lengths differ by one at most.

    There is at least one range: an empty one if there are no tokens.
    """
    number = max(1, min(chunks, tokens))
    edges = [tokens * i // number for i in range(number + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def _one_ahead(
    chunks: Sequence[slice], begin: Callable[[slice], tuple[_Result, Pending]]
) -> Iterator[tuple[slice, _Result]]:
    """Yield (chunk, result of begin(chunk)) when the chunk's communication has ended. The next one's has begun by then.

    Only one begins ahead, so the memory of few chunks is in use.
    """
    begun = begin(chunks[0])
    for position, chunk in enumerate(chunks):
        result, pending = begun
        if position + 1 < len(chunks):
            begun = begin(chunks[position + 1])
        pending.wait()
        yield chunk, result


@dataclass(frozen=True)
class ChunkedGather(Gather):
    """g in chunks.

    The input of the product is [slices * t, in]: `slices` slices of t tokens each, one from each rank.
    """

    chunks: int

    @property
    def slices(self) -> int:
        return self.tp.size

    def enter_in_chunks(self, x_2d: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield (tokens of a slice, chunk [slices, tokens, in]), given this rank's slice [t, in].

        While the caller uses a chunk, the next one is on its way.
        """

        def begin(tokens: slice) -> tuple[Tensor, Pending]:
            gathered, pending = collectives.all_gather_async(x_2d[tokens], self.tp)
            return gathered.view(self.tp.size, -1, x_2d.shape[1]), pending

        return _one_ahead(cut_in_chunks(x_2d.shape[0], self.chunks), begin)


@dataclass(frozen=True)
class ChunkedReduce:
    """f bar in chunks, an OutputRegion: the ranks' partial results are summed on every rank."""

    tp: Axis
    chunks: int

    slices = 1

    def leave_in_chunks(self, y_2d: Tensor) -> Iterator[tuple[slice, Tensor]]:
        leaving = []
        for tokens in cut_in_chunks(y_2d.shape[0], self.chunks):
            # The product is written into the output, and summed there.
            yield tokens, y_2d[None, tokens]
            leaving.append(collectives.all_reduce_async(y_2d[tokens], self.tp))
        for pending in leaving:
            pending.wait()

    def enter_gradient(self, grad_y: Tensor) -> tuple[Tensor, Iterable[slice]]:
        # Each rank's part enters the sum once, so its gradient is that of the sum. It is here already: one chunk.
        return grad_y.contiguous(), [slice(None)]


@dataclass(frozen=True)
class ChunkedScatterSum:
    """g bar in chunks, an OutputRegion: each rank gets its slice of the sum."""

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
            _, pending = collectives.reduce_scatter_async(partial.flatten(0, 1), self.tp, out=y_chunk)
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
            return None, collectives.all_gather_slices_async(grad_2d[tokens], places, self.tp)

        arrivals = _one_ahead(cut_in_chunks(grad_2d.shape[0], self.chunks), begin)
        return whole, (tokens for tokens, _ in arrivals)


class OutputRegion(Protocol):
    """What is communicated after a layer's matrix product in forward, and before it in backward, in chunks.

    The output of the product is [slices * t, out]: `slices` slices of t tokens each. A chunk has the same tokens of
    every slice. The output of the layer has t tokens.
    """

    @property
    def slices(self) -> int: ...

    def leave_in_chunks(self, y_2d: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield (tokens of a slice, memory [slices, tokens, out]) for the caller to write the product of a chunk into.

        When the caller asks for the next chunk, the communication of the one before starts. When there are no more,
        `y_2d` [t, out] holds the output of the layer.
        """

    def enter_gradient(self, grad_y: Tensor) -> tuple[Tensor, Iterable[slice]]:
        """The gradient of the product's output, and the tokens of a slice for each chunk, in order of arrival.

        A chunk of the gradient may be read when the iteration has come to it.
        """


def output_region(tp: Axis, sequence_parallel: bool, chunks: int) -> OutputRegion:
    """The region through which the output of a row-parallel layer leaves in chunks."""
    if sequence_parallel:
        return ChunkedScatterSum(tp, chunks)
    return ChunkedReduce(tp, chunks)


def _in_slices(x: Tensor, slices: int) -> Tensor:
    """View contiguous x [s, ..., features] as [slices, tokens of a slice, features]."""
    return x.view(slices, -1, x.shape[-1])


def _empty(like: Tensor, length: int, features: int) -> Tensor:
    """Memory [length, ..., features] in the dtype of `like` [s, ..., any]."""
    return torch.empty(length, *like.shape[1:-1], features, dtype=like.dtype, device=like.device)


class _GatherLinear(torch.autograd.Function):
    """LinearFunction with its input entering in chunks in forward. Its backward is the same: this hides all it can."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, region: ChunkedGather, products: MatrixProducts
    ) -> Tensor:
        y = _empty(x, region.slices * x.shape[0], weight.shape[0])
        y_slices = _in_slices(y, region.slices)
        x = products.as_input(x)
        keep_for_backward(ctx, x, [weight], region, products)
        converted = ctx.kept[0].get(weight)
        for tokens, chunk in region.enter_in_chunks(x.reshape(-1, x.shape[-1])):
            products.forward_slices(y_slices[:, tokens], chunk, converted, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        return LinearFunction.backward(ctx, grad_y)


class _GatherAdapted(torch.autograd.Function):
    """AdaptedLinear with its input entering in chunks in forward, as in `_GatherLinear`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        region: ChunkedGather,
        products: MatrixProducts,
        rule: LowRank,
    ) -> Tensor:
        y, z = (_empty(x, region.slices * x.shape[0], len(matrix)) for matrix in (weight, a))
        y_slices, z_slices = _in_slices(y, region.slices), _in_slices(z, region.slices)
        x = products.as_input(x)
        of_weight = KeptWeight.of(weight, products).get(weight)
        of_a = KeptWeight.of(a, products.plain).get(a)
        for tokens, chunk in region.enter_in_chunks(x.reshape(-1, x.shape[-1])):
            products.forward_slices(y_slices[:, tokens], chunk, of_weight, bias)
            dropped = rule.dropped_chunk(products.restore(chunk), region.slices, tokens)
            products.plain.forward_slices(z_slices[:, tokens], dropped, of_a, None)
        rule.add(y, z, b)
        keep_adapted(ctx, x, [weight, a], region, products, z, b, rule)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        return AdaptedLinear.backward(ctx, grad_y)


class _LinearReduce(torch.autograd.Function):
    """y = region.leave(x W^T). Forward communicates a chunk of the output while the product of the next is computed.

    Backward receives a chunk of the output's gradient while the input gradient of the one before is computed. With an
    adapter, s B z is added before a chunk leaves: z, B and `rule` are as in `megapar.linear.low_rank.LowRank`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        region: OutputRegion,
        products: MatrixProducts,
        z: Tensor | None,
        b: Tensor | None,
        rule: LowRank | None,
    ) -> Tensor:
        y = _empty(x, x.shape[0] // region.slices, weight.shape[0])
        x = products.as_input(x)
        if z is None or b is None or rule is None:
            keep_for_backward(ctx, x, [weight], region, products)
        else:
            keep_adapted(ctx, x, [weight], region, products, z, b, rule)
        x_slices = _in_slices(x.contiguous(), region.slices)
        converted = ctx.kept[0].get(weight)
        for tokens, partial in region.leave_in_chunks(y.view(-1, y.shape[-1])):
            products.forward_slices(partial, x_slices[:, tokens], converted, None)
            if z is not None and b is not None and rule is not None:
                rule.add(partial, _in_slices(z, region.slices)[:, tokens], b)
        return y

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_y: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, Tensor | None, Tensor | None, None]:
        x, weight, *factors = ctx.saved_tensors
        needs_x, needs_weight, _, _, _, needs_b, _ = ctx.needs_input_grad
        slices = ctx.region.slices
        grad_x = _empty(grad_y, x.shape[0], weight.shape[1]) if needs_x else None
        of_weight = ctx.kept[0]
        # From here on grad_y is the gradient of the product's output, no longer that of the layer's.
        of_layer = grad_y
        grad_y, chunks = ctx.region.enter_gradient(of_weight.products.as_gradient(grad_y))
        converted = of_weight.get(weight)
        for tokens in chunks:
            if grad_x is not None:
                places = _in_slices(grad_x, slices)[:, tokens]
                of_weight.products.input_gradient_slices(places, _in_slices(grad_y, slices)[:, tokens], converted)
        grad_weight = weight_gradient(of_weight.products, of_weight.main_grad, grad_y, x) if needs_weight else None
        grad_z = grad_b = None
        if factors:
            z, b = factors
            values = of_weight.products.numbers(grad_y, like=of_layer)
            grad_z = ctx.rule.inner_gradient(values, b)
            grad_b = ctx.rule.b_gradient(ctx.main_grad_b, values, z, b) if needs_b else None
        return grad_x, grad_weight, None, None, grad_z, grad_b, None


def gather_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, region: ChunkedGather, products: MatrixProducts
) -> Tensor:
    """y = region.enter(x) W^T + b: [slices * s, ..., out], from x [s, ..., in]. A chunk enters under another's product.

    On CPUs in fp32 its products round as those of LinearFunction if a chunk has 16 or more tokens of each slice. MKL
    adds in another order for fewer.
    """
    return _GatherLinear.apply(x, weight, bias, region, products)


def gather_adapted(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    region: ChunkedGather,
    products: MatrixProducts,
    rule: LowRank,
) -> Tensor:
    """`gather_linear` of a layer with an adapter, see `megapar.linear.low_rank.AdaptedLinear`."""
    return _GatherAdapted.apply(x, weight, bias, a, b, region, products, rule)


def linear_reduce(
    x: Tensor,
    weight: Tensor,
    region: OutputRegion,
    products: MatrixProducts,
    z: Tensor | None = None,
    b: Tensor | None = None,
    rule: LowRank | None = None,
) -> Tensor:
    """y = region.leave(x W^T): [s / slices, ..., out], from x [s, ..., in]. Chunks leave under products of later ones.

    With z, b and `rule`, y = region.leave(x W^T + s B z): see `megapar.linear.low_rank.LowRank`. Its products round as
    those of `gather_linear`. Raises ValueError if `slices` does not divide s.
    """
    if x.shape[0] % region.slices:
        raise ValueError(f"sequence parallel: length {x.shape[0]} does not divide by tp {region.slices}")
    return _LinearReduce.apply(x, weight, region, products, z, b, rule)
