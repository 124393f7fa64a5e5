"""The conversion of a layer's input to the number format of its products, as a step of its own for autograd."""

from functools import partial
from typing import Any

import torch
from megapar_kernels.dispatch import apply_function
from megapar_kernels.packed import Packed
from torch import Tensor

from megapar.activations import recompute
from megapar.linear.number_format import NumberFormat


class _Convert(torch.autograd.Function):
    """x as the products of a layer convert it. Backward takes the gradient as if nothing had been rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, products: NumberFormat) -> Tensor:
        return products.carry(products.convert_input(x), like=x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def converted(x: Tensor, products: NumberFormat) -> Tensor:
    """Return x as the `products` of a layer convert it: once, also if several layers of this format read the result.

    With train.recompute light backward converts again rather than to keep what was converted.
    """
    if not products.converts or isinstance(x, Packed):
        return x
    return recompute.remade(partial(_convert, products), x)


def _convert(products: NumberFormat, x: Tensor) -> Tensor:
    y: Tensor = apply_function(_Convert, x, products)
    return y
