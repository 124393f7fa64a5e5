"""Choosing heads by number: which key/value head a query head reads."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def are_equal_runs(kv_heads: Sequence[int]) -> bool:
    """Whether each of the key/value heads 0, 1 ... serves the same number of consecutive query heads.

    `kv_heads` has the key/value head of each query head. torch's attention takes such runs only.
    """
    number = kv_heads[-1] + 1
    run = len(kv_heads) // number
    return len(kv_heads) % number == 0 and all(kv == query // run for query, kv in enumerate(kv_heads))


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, numbers: Tensor) -> Tensor:
        ctx.dim = dim
        ctx.size = x.shape[dim]
        # An attribute, not saved for backward: a plan counts what is saved, and all micro-batches share the numbers.
        ctx.numbers = numbers
        return x.index_select(dim, numbers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        shape = list(grad.shape)
        shape[ctx.dim] = ctx.size
        return grad.new_zeros(shape).index_add_(ctx.dim, ctx.numbers, grad), None, None


def select(x: Tensor, dim: int, numbers: Tensor) -> Tensor:
    """The heads of `x` with these `numbers` along `dim`. Gradients of a head that is chosen twice are summed."""
    return _Select.apply(x, dim, numbers)
