"""Puts the chunks of the context-parallel ranks into the order of positions, and back.

Shapes: r ranks, s positions of a rank, r * s positions of a sample, d width.
"""

from typing import Any

import torch
from torch import Tensor

from megapar.context_parallel.deal import holders


def whole_of(parts: Tensor) -> Tensor:
    """The ranks' parts [r, ..., s, d] as whole samples [..., r * s, d], in the order of positions."""
    chunk_size = parts.shape[-2] // 2  # a rank holds two chunks of each sample
    first_and_second = parts.split(chunk_size, dim=-2)
    return torch.cat([first_and_second[half][rank] for rank, half in holders(parts.shape[0])], dim=-2)


def parts_of(whole: Tensor, cp: int) -> Tensor:
    """The inverse of `whole_of`: whole samples [..., r * s, d] as the ranks' parts [r, ..., s, d]."""
    parts = whole.new_empty(cp, *whole.shape[:-2], whole.shape[-2] // cp, whole.shape[-1])
    write_parts(parts, whole)
    return parts


def write_parts(parts: Tensor, whole: Tensor) -> None:
    """`parts_of`, written into `parts` [r, ..., s, d] of any strides."""
    chunk_size = parts.shape[-2] // 2
    first_and_second = parts.split(chunk_size, dim=-2)
    for (rank, half), chunk in zip(holders(parts.shape[0]), whole.split(chunk_size, dim=-2), strict=True):
        first_and_second[half][rank].copy_(chunk)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor) -> Tensor:
        ctx.cp = parts.shape[0]
        return whole_of(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return parts_of(grad, ctx.cp)


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, cp: int) -> Tensor:
        return parts_of(whole, cp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return whole_of(grad), None


def to_whole(parts: Tensor) -> Tensor:
    """`whole_of` with a gradient."""
    return _Whole.apply(parts)


def to_parts(whole: Tensor, cp: int) -> Tensor:
    """`parts_of` with a gradient."""
    return _Parts.apply(whole, cp)
