"""The one door of matrix products: forward, input gradient and weight gradient of every linear layer.

`MatrixProducts` computes them. Another number format is another class like it. A weight gradient that is computed later
is a change of `_Linear.backward` alone. How the input enters and its gradient leaves tensor-parallel work is an
`InputRegion` (`megapar.tensor_parallel.regions` has them all).
"""

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
    """How a layer's input enters tensor-parallel work in forward, and how its gradient leaves in backward."""

    def enter(self, x: Tensor) -> Tensor:
        """The input that the product takes, from the one that the layer received."""

    def enter_async(self, x: Tensor) -> tuple[Tensor, Pending]:
        """`enter`, of which the result may be read after the wait: for the weight gradient in backward."""

    def leave_async(self, grad_x: Tensor) -> tuple[Tensor, Pending]:
        """The gradient of what the layer received, from this rank's gradient of what the product took. May reuse the
        memory of `grad_x`."""


@dataclass(frozen=True)
class MatrixProducts:
    """The three products of y = x W^T, in the dtype of the inputs.

    `impl` is who adds the weight gradient of 16-bit inputs to the fp32 main gradient: torch or apex.
    """

    impl: Implementation = "torch"

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[..., in] and [out, in] to [..., out]."""
        return F.linear(x, weight, bias)

    def input_gradient(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        """[..., out] and [out, in] to [..., in]."""
        return grad_y @ weight

    def weight_gradient(self, grad_2d: Tensor, x_2d: Tensor) -> Tensor:
        """[tokens, out] and [tokens, in] to [out, in]."""
        return grad_2d.t() @ x_2d

    def add_weight_gradient(self, total: Tensor, grad_2d: Tensor, x_2d: Tensor) -> None:
        """Add the weight gradient to `total`, fp32 [out, in], without rounding it to the inputs' dtype first."""
        if grad_2d.dtype == torch.float32:
            total.addmm_(grad_2d.t(), x_2d)
        elif self.impl == "apex":
            apex.add_outer(total, grad_2d, x_2d)
        elif grad_2d.is_cuda:
            torch.addmm(total, grad_2d.t(), x_2d, out_dtype=torch.float32, out=total)
        else:
            total.addmm_(grad_2d.t().float(), x_2d.float())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, region: InputRegion, products: MatrixProducts
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.region = region
        ctx.products = products
        # Read it here: under activation checkpointing the tensor that backward unpacks has no attributes.
        ctx.main_grad = main_grad_of(weight)
        return products.forward(region.enter(x), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        entering = Pending()
        leaving = Pending()
        if needs_weight:
            x, entering = ctx.region.enter_async(x)  # runs during the next product
        if needs_x:
            grad_x = ctx.products.input_gradient(grad_y, weight)
            entering.wait()
            grad_x, leaving = ctx.region.leave_async(grad_x)  # runs during the weight gradient
        entering.wait()
        grad_2d = grad_y.reshape(-1, grad_y.shape[-1])
        if needs_weight:
            x_2d = x.reshape(-1, x.shape[-1])
            if ctx.main_grad is None:
                grad_weight = ctx.products.weight_gradient(grad_2d, x_2d)
            else:
                ctx.products.add_weight_gradient(ctx.main_grad.view, grad_2d, x_2d)
                ctx.main_grad.added()
        if needs_bias:
            grad_bias = grad_2d.sum(0)
        leaving.wait()
        return grad_x, grad_weight, grad_bias, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, region: InputRegion, products: MatrixProducts) -> Tensor:
    """region.enter(x) W^T + b: [..., out] of [..., in], [out, in] and [out].

    The weight's gradient goes straight into its fp32 main gradient where it has one. The communication of the input's
    gradient runs while the weight gradient is computed.
    """
    return _Linear.apply(x, weight, bias, region, products)
