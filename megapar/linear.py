"""The matrix products of every linear layer: forward, input gradient and weight gradient.

`MatrixProducts` computes them. For another number format, write another class with the same methods. An `InputRegion`
says what is communicated before the product in forward and after it in backward. `megapar.tensor_parallel.regions` has
all regions.

A pipeline schedule may defer weight gradients: see `megapar.main_grad`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from megapar_kernels import apex
from megapar_kernels.dispatch import Implementation, main_grad_of
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.comm.pending import Pending
from megapar.main_grad import WeightGradient, is_put_off, main_grad_of
from megapar.comm.collectives import Pending
from megapar.main_grad import DeferredWeightGradient, is_deferred


class InputRegion(Protocol):
    """What is communicated before a layer's matrix product in forward, and after it in backward."""

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of the matrix product, given the input of the layer."""

    def enter_async(self, x: Tensor) -> tuple[Tensor, Pending]:
        """Start `enter`. The tensor may be read only after Pending.wait().

        Backward calls it to recompute the input of the matrix product, which the weight gradient needs. If the weight
        gradient is deferred, W calls it.
        """

    def leave_async(self, grad_x: Tensor) -> tuple[Tensor, Pending]:
        """Start computing the gradient of the layer's input. The tensor may be read only after Pending.wait().

        `grad_x` is this rank's gradient of the input of the matrix product. The region may overwrite it.
        """


@dataclass(frozen=True)
class Local:
    """The region without communication: the input is this rank's slice already, or there is only one rank."""

    def enter(self, x: Tensor) -> Tensor:
        return x

    def enter_async(self, x: Tensor) -> tuple[Tensor, Pending]:
        return x, Pending()

    def leave_async(self, grad_x: Tensor) -> tuple[Tensor, Pending]:
        return grad_x, Pending()


LOCAL = Local()


@dataclass(frozen=True)
class MatrixProducts:
    """The three products of y = x W^T, in the dtype of the inputs.

    The methods ending in `_into` serve the output head in chunks (`megapar.tensor_parallel.linear_cross_entropy`).

    `impl` selects whether torch or apex adds the weight gradient of 16-bit inputs to the fp32 main gradient.

    The methods with `grouped` in their names serve experts. They loop over the groups. torch's grouped_mm takes only
    rows of a multiple of 16 bytes, and rounds weight gradients to the dtype of the inputs.
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
        if grad_2d.dtype == total.dtype:
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

    def grouped_forward(self, x_2d: Tensor, weights_goi: Tensor, rows: Sequence[int]) -> Tensor:
        """y = x W^T with a matrix for each group of rows: [tokens, out], from x_2d [tokens, in] and [groups, out, in].

        The first rows[0] rows are multiplied by weights_goi[0], the next rows[1] by weights_goi[1], and so on.
        """
        y = x_2d.new_empty(x_2d.shape[0], weights_goi.shape[1])
        for part, x, weight in zip(y.split(rows), x_2d.split(rows), weights_goi, strict=True):
            self.forward_into(part, x, weight)
        return y

    def grouped_input_gradient(self, grad_2d: Tensor, weights_goi: Tensor, rows: Sequence[int]) -> Tensor:
        """Gradient of x in `grouped_forward`: [tokens, in], from grad_2d [tokens, out]."""
        grad_x = grad_2d.new_empty(grad_2d.shape[0], weights_goi.shape[2])
        for part, grad, weight in zip(grad_x.split(rows), grad_2d.split(rows), weights_goi, strict=True):
            self.input_gradient_into(part, grad, weight)
        return grad_x

    def add_grouped_weight_gradient(
        self, totals_goi: Tensor, grad_2d: Tensor, x_2d: Tensor, rows: Sequence[int], *, overwrite: bool = False
    ) -> None:
        """`add_weight_gradient` of each group of rows in `grouped_forward`.

        A group without rows adds nothing. With `overwrite` its total becomes zero.
        """
        for total, grad, x in zip(totals_goi, grad_2d.split(rows), x_2d.split(rows), strict=True):
            if len(grad):
                self.add_weight_gradient(total, grad, x, overwrite=overwrite)
            elif overwrite:
                total.zero_()


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


def keep_for_backward(ctx: Any, x: Tensor, weight: Tensor, region: object, products: MatrixProducts) -> None:
    """Keep for the backward of a linear layer what it needs."""
    # Save the input of the layer, not that of the product. Under sequence parallelism, the gathered input would take tp
    # times the memory.
    ctx.save_for_backward(x, weight)
    ctx.region = region
    ctx.products = products
    # Read here, not in backward: under activation checkpointing the tensor that backward unpacks has no attributes.
    ctx.main_grad = main_grad_of(weight)


def weight_gradient(ctx: Any, grad_y: Tensor, x: Tensor, region: InputRegion = LOCAL) -> Tensor | None:
    """The gradient of the weight, or None if it goes to the main gradient, now or in W.

    `x` is the input of the product. If the gradient is deferred, `x` may be the input of the layer, which W lets enter
    through `region`.

    The gradient is one product over all tokens, also where the input gradient is computed in chunks, so that its sums
    have the same order.
    """
    if ctx.main_grad is None:
        grad: Tensor = ctx.products.weight_gradient(_as_2d(grad_y), _as_2d(x))
        return grad
    add = partial(_add_product, ctx.products)
    DeferredWeightGradient(ctx.main_grad, grad_y, x, add, region.enter_async).add_or_defer()
    return None


def _add_product(products: MatrixProducts, total: Tensor, grad_y: Tensor, x: Tensor, overwrite: bool) -> None:
    products.add_weight_gradient(total, _as_2d(grad_y), _as_2d(x), overwrite=overwrite)


def _as_2d(x: Tensor) -> Tensor:
    """[tokens, features], from [..., features]."""
    return x.reshape(-1, x.shape[-1])


class LinearFunction(torch.autograd.Function):
    """y = region.enter(x) W^T + b: [..., out], from x [..., in], weight [out, in] and bias [out] or None.

    The weight's gradient is added straight to the fp32 main gradient if the weight has one. Backward overlaps
    communication with matrix products:

    1. enter_async recomputes the input of the product, while the input gradient is computed.
    2. leave_async communicates the input gradient, while the gradients of weight and bias are computed.

    If the weight gradient is deferred, the layer's input is kept for W, and enters the product there.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, region: InputRegion, products: MatrixProducts
    ) -> Tensor:
        keep_for_backward(ctx, x, weight, region, products)
        return products.forward(region.enter(x), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        entering = Pending()  # an empty Pending: its wait returns at once
        leaving = Pending()
        region = ctx.region  # through which x has still to enter
        if needs_weight and not is_deferred(ctx.main_grad):
            # From here on x is the input of the product, no longer that of the layer. This communication runs during
            # the product of the input gradient.
            x, entering = region.enter_async(x)
            region = LOCAL
        if needs_x:
            grad_x = ctx.products.input_gradient(grad_y, weight)
            entering.wait()
            # This communication runs during the product of the weight gradient.
            grad_x, leaving = ctx.region.leave_async(grad_x)
        entering.wait()  # again, because the input may need no gradient; a second wait does nothing
        if needs_weight:
            grad_weight = weight_gradient(ctx, grad_y, x, region)
        if needs_bias:
            grad_bias = grad_y.reshape(-1, grad_y.shape[-1]).sum(0)
        leaving.wait()
        return grad_x, grad_weight, grad_bias, None, None
