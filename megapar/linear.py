"""The matrix products of every linear layer: forward, input gradient and weight gradient.

`MatrixProducts` computes them. For another number format, write another class with the same methods. To defer weight
gradients, as zero-bubble schedules do, change `_weight_gradient` alone.

A region says what is communicated around a product. `megapar.tensor_parallel.regions` has all regions.

    function        in forward                               region
    linear          enter, then one product                  InputRegion
    gather_linear   chunks enter while others are computed   ChunkedInputRegion
    linear_reduce   chunks leave while others are computed   OutputRegion

The chunks follow Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep
Learning Models" (ASPLOS 2023), with a collective for each chunk in place of a ring of transfers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from megapar_kernels import apex
from megapar_kernels.dispatch import Implementation
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.comm import Pending
from megapar.params import main_grad_of


class InputRegion(Protocol):
    """What is communicated before a layer's matrix product in forward, and after it in backward."""

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of the matrix product, given the input of the layer."""

    def enter_async(self, x: Tensor) -> tuple[Tensor, Pending]:
        """Start `enter`. The tensor may be read only after Pending.wait().

        Backward calls it to recompute the input of the matrix product, which the weight gradient needs.
        """

    def leave_async(self, grad_x: Tensor) -> tuple[Tensor, Pending]:
        """Start computing the gradient of the layer's input. The tensor may be read only after Pending.wait().

        `grad_x` is this rank's gradient of the input of the matrix product. The region may overwrite it.
        """


class ChunkedInputRegion(InputRegion, Protocol):
    """An InputRegion whose input can also enter in chunks.

    The input of the product is [slices * t, in]: `slices` slices of t tokens each, one from each rank. A chunk has the
    same tokens of every slice.
    """

    @property
    def slices(self) -> int: ...

    def enter_in_chunks(self, x_2d: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield (tokens of a slice, chunk [slices, tokens, in]), given this rank's slice [t, in].

        While the caller uses a chunk, the next one is on its way.
        """


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
        """Return the gradient of the product's output, and the tokens of a slice for each chunk, in order of arrival.

        A chunk of the gradient may be read when the iteration has come to it.
        """


@dataclass(frozen=True)
class MatrixProducts:
    """The three products of y = x W^T, in the dtype of the inputs.

    The methods ending in `_into` serve the output head in chunks (`megapar.tensor_parallel.linear_cross_entropy`).

    `impl` selects whether torch or apex adds the weight gradient of 16-bit inputs to the fp32 main gradient.
    """

    impl: Implementation = "torch"

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y: [..., out], from x [..., in] and weight [out, in]."""
        return F.linear(x, weight, bias)

    def forward_into(self, out: Tensor, x_2d: Tensor, weight: Tensor) -> Tensor:
        """`forward` of x_2d [tokens, in] without a bias, into the memory of `out`, which is returned."""
        return torch.mm(x_2d, weight.t(), out=out)

    def forward_slices(self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """`forward` of x [slices, tokens, in] into `out` [slices, tokens, out].

        Each slice is contiguous. The slices of `x` and of `out` may lie apart in memory.
        """
        _batched_product(out, x, weight.t(), bias)

    def input_gradient(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        """Gradient of x: [..., in], from grad_y [..., out] and weight [out, in]."""
        return grad_y @ weight

    def input_gradient_into(self, out: Tensor, grad_2d: Tensor, weight: Tensor) -> Tensor:
        """`input_gradient` of grad_2d [tokens, out], into the memory of `out`, which is returned."""
        return torch.mm(grad_2d, weight, out=out)

    def input_gradient_slices(self, out: Tensor, grad: Tensor, weight: Tensor) -> None:
        """`input_gradient` of grad [slices, tokens, out] into `out` [slices, tokens, in].

        Each slice is contiguous. The slices of `grad` and of `out` may lie apart in memory.
        """
        _batched_product(out, grad, weight, None)

    def weight_gradient(self, grad_2d: Tensor, x_2d: Tensor) -> Tensor:
        """Gradient of the weight: [out, in], from grad_2d [tokens, out] and x_2d [tokens, in]."""
        return grad_2d.t() @ x_2d

    def add_weight_gradient(self, total: Tensor, grad_2d: Tensor, x_2d: Tensor, *, overwrite: bool = False) -> None:
        """Add the weight gradient to `total`, fp32 [out, in], without rounding it to the inputs' dtype first.

        With `overwrite` the values of `total` count as zero, even if they are NaN.
        """
        beta = 0.0 if overwrite else 1.0  # addmm multiplies `total` by it, and does not read `total` if it is 0
        if grad_2d.dtype == torch.float32:
            total.addmm_(grad_2d.t(), x_2d, beta=beta)
        elif self.impl == "apex":
            if overwrite:
                total.zero_()  # apex's kernel can only add
            apex.add_weight_gradient(total, grad_2d, x_2d)
        elif grad_2d.is_cuda:
            torch.addmm(total, grad_2d.t(), x_2d, beta=beta, out_dtype=torch.float32, out=total)
        else:
            # On a CPU addmm has no out_dtype, so the inputs are converted.
            total.addmm_(grad_2d.t().float(), x_2d.float(), beta=beta)


def _batched_product(out: Tensor, x: Tensor, matrix: Tensor, bias: Tensor | None) -> None:
    """out[i] = x[i] @ matrix + bias for each slice i. The slices are read and written where they lie.

    One product of all slices would need them side by side, which is a copy of the layer's whole input or output. One
    product for each slice would be too small to fill a GPU.
    """
    matrices = matrix.expand(x.shape[0], -1, -1)  # takes no memory: the stride between the matrices is 0
    if bias is None:
        torch.bmm(x, matrices, out=out)
    else:
        torch.baddbmm(bias, x, matrices, out=out)


def _in_slices(x: Tensor, slices: int) -> Tensor:
    """View contiguous x [s, ..., features] as [slices, tokens of a slice, features]."""
    return x.view(slices, -1, x.shape[-1])


def _keep(ctx: Any, x: Tensor, weight: Tensor, region: InputRegion | OutputRegion, products: MatrixProducts) -> None:
    """Keep for backward what it needs."""
    # Save the input of the layer, not that of the product. Under sequence parallelism, the gathered input would take tp
    # times the memory.
    ctx.save_for_backward(x, weight)
    ctx.region = region
    ctx.products = products
    # Read here, not in backward: under activation checkpointing the tensor that backward unpacks has no attributes.
    ctx.main_grad = main_grad_of(weight)


def _weight_gradient(ctx: Any, grad_y: Tensor, x: Tensor) -> Tensor | None:
    """The gradient of the weight, or None if it has been added to the main gradient. `x` is the product's input.

    It is one product over all tokens, also where the input gradient is computed in chunks, so that its sums have the
    same order.
    """
    grad_2d = grad_y.reshape(-1, grad_y.shape[-1])
    x_2d = x.reshape(-1, x.shape[-1])
    if ctx.main_grad is None:
        grad: Tensor = ctx.products.weight_gradient(grad_2d, x_2d)
        return grad
    main_grad = ctx.main_grad
    ctx.products.add_weight_gradient(main_grad.tensor, grad_2d, x_2d, overwrite=main_grad.is_stale)
    main_grad.note_added()
    return None


class _Linear(torch.autograd.Function):
    """y = region.enter(x) W^T + b. Its backward overlaps communication with matrix products.

    1. enter_async recomputes the input of the product, while the input gradient is computed.
    2. leave_async communicates the input gradient, while the gradients of weight and bias are computed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, region: InputRegion, products: MatrixProducts
    ) -> Tensor:
        _keep(ctx, x, weight, region, products)
        return products.forward(region.enter(x), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        entering = Pending()  # an empty Pending: its wait returns at once
        leaving = Pending()
        if needs_weight:
            # From here on x is the input of the product, no longer that of the layer. This communication runs during
            # the product of the input gradient.
            x, entering = ctx.region.enter_async(x)
        if needs_x:
            grad_x = ctx.products.input_gradient(grad_y, weight)
            entering.wait()
            # This communication runs during the product of the weight gradient.
            grad_x, leaving = ctx.region.leave_async(grad_x)
        entering.wait()  # again, because the input may need no gradient; a second wait does nothing
        if needs_weight:
            grad_weight = _weight_gradient(ctx, grad_y, x)
        if needs_bias:
            grad_bias = grad_y.reshape(-1, grad_y.shape[-1]).sum(0)
        leaving.wait()
        return grad_x, grad_weight, grad_bias, None, None


class _GatherLinear(torch.autograd.Function):
    """`_Linear`, whose input enters in chunks in forward. Its backward is that of `_Linear`, which hides all it can."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, region: ChunkedInputRegion, products: MatrixProducts
    ) -> Tensor:
        _keep(ctx, x, weight, region, products)
        y = x.new_empty(region.slices * x.shape[0], *x.shape[1:-1], weight.shape[0])
        y_slices = _in_slices(y, region.slices)
        for tokens, chunk in region.enter_in_chunks(x.reshape(-1, x.shape[-1])):
            products.forward_slices(y_slices[:, tokens], chunk, weight, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        return _Linear.backward(ctx, grad_y)


class _LinearReduce(torch.autograd.Function):
    """y = region.leave(x W^T). Forward communicates a chunk of the output while the product of the next is computed.

    Backward receives a chunk of the output's gradient while the input gradient of the one before is computed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, region: OutputRegion, products: MatrixProducts) -> Tensor:
        _keep(ctx, x, weight, region, products)
        x_slices = _in_slices(x.contiguous(), region.slices)
        y = x.new_empty(x.shape[0] // region.slices, *x.shape[1:-1], weight.shape[0])
        for tokens, partial in region.leave_in_chunks(y.view(-1, y.shape[-1])):
            products.forward_slices(partial, x_slices[:, tokens], weight, None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        slices = ctx.region.slices
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
        grad_y, chunks = ctx.region.enter_gradient(grad_y)
        for tokens in chunks:
            if grad_x is not None:
                grad_slices = _in_slices(grad_y, slices)
                ctx.products.input_gradient_slices(
                    _in_slices(grad_x, slices)[:, tokens], grad_slices[:, tokens], weight
                )
        grad_weight = _weight_gradient(ctx, grad_y, x) if needs_weight else None
        return grad_x, grad_weight, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, region: InputRegion, products: MatrixProducts) -> Tensor:
    """y = region.enter(x) W^T + b: [..., out], from x [..., in], weight [out, in] and bias [out].

    The weight's gradient is added straight to the fp32 main gradient if the weight has one. The communication of the
    input's gradient runs while the weight gradient is computed.
    """
    return _Linear.apply(x, weight, bias, region, products)


def gather_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, region: ChunkedInputRegion, products: MatrixProducts
) -> Tensor:
    """`linear` of x [s, ..., in], to [slices * s, ..., out]. In forward a chunk enters under the product of another.

    On CPUs in fp32 its products round as those of `linear` if a chunk has 16 or more tokens of each slice. MKL adds in
    another order for fewer.
    """
    return _GatherLinear.apply(x, weight, bias, region, products)


def linear_reduce(x: Tensor, weight: Tensor, region: OutputRegion, products: MatrixProducts) -> Tensor:
    """y = region.leave(x W^T): [s / slices, ..., out], from x [s, ..., in]. Chunks leave under products of later ones.

    Its products round as those of `gather_linear`. Raises ValueError if `slices` does not divide s.
    """
    if x.shape[0] % region.slices:
        raise ValueError(f"sequence parallel: length {x.shape[0]} does not divide by tp {region.slices}")
    return _LinearReduce.apply(x, weight, region, products)
