"""Linear layers: forward, and a backward with communication overlapped with matrix products.

`megapar.linear.products` computes the products. An `InputRegion` says what is communicated before the product in
forward and after it in backward. `megapar.tensor_parallel.regions` has those of tensor parallelism.

A pipeline schedule may defer weight gradients: see `megapar.linear.main_grad`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.comm.pending import NOTHING, Pending
from megapar.linear.converted_weight import ConvertedWeight
from megapar.linear.main_grad import DeferredWeightGradient, MainGrad, is_deferred, main_grad_of
from megapar.linear.products import MatrixProducts, as_2d


class InputRegion(Protocol):
    """What is communicated before a layer's matrix product in forward, and after it in backward.

    Inputs enter as `NumberFormat.convert_input` made them, in any dtype. Gradients leave in the dtype of activations.
    """

    def enter(self, x: Tensor) -> Tensor:
        """The input of the matrix product, given the input of the layer."""

    def enter_async(self, x: Tensor) -> tuple[Tensor, Pending]:
        """Start `enter`. The tensor may be read only after Pending.wait().

        Backward calls it to recompute the input of the matrix product for the weight gradient. If the weight gradient
        is deferred, W calls it.
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
        return x, NOTHING

    def leave_async(self, grad_x: Tensor) -> tuple[Tensor, Pending]:
        return grad_x, NOTHING


LOCAL = Local()


class KeptWeight(NamedTuple):
    """What the backward of a linear layer needs of a weight besides its values."""

    converted: ConvertedWeight
    main_grad: MainGrad | None
    products: MatrixProducts

    @classmethod
    def of(cls, weight: Tensor, products: MatrixProducts) -> "KeptWeight":
        """Read it in forward: under activation checkpointing the tensor that backward unpacks has no attributes."""
        return cls(ConvertedWeight.of(weight), main_grad_of(weight), products)

    def get(self, weight: Tensor) -> Any:
        """The weight as its products get it."""
        return self.converted.get(weight, self.products)


def keep_for_backward(
    ctx: Any,
    x: Tensor,
    weights: Sequence[Tensor],
    region: object,
    products: MatrixProducts,
    *others: Tensor,
) -> None:
    """Keep for the backward of a linear layer what it needs. `x` is the converted input of the layer.

    The saved tensors are x, the weights and the `others`.
    """
    # Not the input of the product. Under sequence parallelism, the gathered input would take tp times the memory.
    ctx.save_for_backward(x, *weights, *others)
    ctx.region = region
    ctx.kept = [KeptWeight.of(weight, products) for weight in weights]


def weight_gradient(
    products: MatrixProducts, main_grad: MainGrad | None, grad_y: Tensor, x: Tensor, region: InputRegion = LOCAL
) -> Tensor | None:
    """The gradient of a weight, or None if it goes to `main_grad`, now or in W.

    `grad_y` and `x` are as the products get them. `x` is the input of the product. If the gradient is deferred, `x` may
    be the input of the layer, which W lets enter through `region`.

    The gradient is one product over all tokens, also where the input gradient is computed in chunks, so that its sums
    have the same order.
    """
    if main_grad is None:
        grad: Tensor = products.weight_gradient(grad_y, x)
        return grad
    DeferredWeightGradient(main_grad, grad_y, x, partial(_add_product, products), region.enter_async).add_or_defer()
    return None


def _add_product(products: MatrixProducts, total: Tensor, grad_y: Tensor, x: Tensor, overwrite: bool) -> None:
    products.add_weight_gradient(total, grad_y, x, overwrite=overwrite)


Gradients = tuple[Tensor | None, list[Tensor | None], Tensor | None]
"""Gradients of a layer's input, of its weights, and of its bias."""


def linear_backward(
    ctx: Any,
    x: Tensor,
    weights: Sequence[Tensor],
    grads_y: Sequence[Tensor],
    needs_weights: Sequence[bool],
    needs_bias: bool,
) -> Gradients:
    """The backward of a layer with one or more products of the same input: their outputs' gradients are `grads_y`.

    Products convert each of them once. x and the weights are saved tensors. The bias is that of the first product. See
    `LinearFunction` for the order.
    """
    grad_x = grad_bias = None
    entering = leaving = NOTHING
    region = ctx.region  # through which x has still to enter
    converted = [kept.products.as_gradient(grad_y) for kept, grad_y in zip(ctx.kept, grads_y, strict=True)]
    if any(needs and not is_deferred(kept.main_grad) for needs, kept in zip(needs_weights, ctx.kept, strict=True)):
        # From here on x is the input of the product, no longer that of the layer. This communication runs during the
        # product of the input gradient.
        x, entering = region.enter_async(x)
        region = LOCAL
    if ctx.needs_input_grad[0]:
        for grad_y, weight, kept in zip(converted, weights, ctx.kept, strict=True):
            part = kept.products.input_gradient(grad_y, kept.get(weight))
            grad_x = part if grad_x is None else grad_x.add_(part)
        entering.wait()
        # This communication runs during the product of the weight gradient.
        grad_x, leaving = ctx.region.leave_async(grad_x)
    entering.wait()  # again, because the input may need no gradient; a second wait does nothing
    grad_weights = [
        weight_gradient(kept.products, kept.main_grad, grad_y, x, region) if needs else None
        for needs, kept, grad_y in zip(needs_weights, ctx.kept, converted, strict=True)
    ]
    if needs_bias:
        grad_bias = as_2d(grads_y[0]).sum(0)
    leaving.wait()
    return grad_x, grad_weights, grad_bias


class LinearFunction(torch.autograd.Function):
    """y = region.enter(x) W^T + b: [..., out], from x [..., in], weight [out, in] and bias [out] or None.

    `products` convert x first: ranks send it, and keep it for backward, in their format. The weight's gradient is added
    straight to the fp32 main gradient if the weight has one. Backward overlaps communication with matrix products:

    1. enter_async recomputes the input of the product, while the input gradient is computed.
    2. leave_async communicates the input gradient, while the gradients of weight and bias are computed.

    If the weight gradient is deferred, the layer's input is kept for W, and enters the product there.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, region: InputRegion, products: MatrixProducts
    ) -> Tensor:
        x = products.as_input(x)
        keep_for_backward(ctx, x, [weight], region, products)
        return products.forward(region.enter(x), ctx.kept[0].get(weight), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        x, weight = ctx.saved_tensors
        grad_x, grad_weights, grad_bias = linear_backward(ctx, x, [weight], [grad_y], [needs_weight], needs_bias)
        return grad_x, grad_weights[0], grad_bias, None, None
