"""Dropout and residual add, with masks computed from row key and column alone.

A mask is never stored. MurmurHash3's 32-bit finalizer (Appleby, 2011) computes it from a row's key and the column, and
gives the same mask on every device and in every layout. In bf16 the forward moves 6 bytes for each element, the
backward 4.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar_kernels.dispatch import Implementation, fused, launches, next_power_of_2, tl, triton

_MASK = 0xFFFFFFFF
_FIRST_BIT = 1 << 31
_ROUNDS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))  # shift and factor


Number = TypeVar("Number", int, Tensor)


def mix(x: Number) -> Number:
    """MurmurHash3's 32-bit finalizer of an int, or of an int64 tensor, with values from 0 to 2^32 - 1."""
    # torch has no uint32 arithmetic. An int64 product may wrap, but its lower 32 bits are right.
    for shift, factor in _ROUNDS:
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 16)


def _mix_int32(x: Tensor) -> Tensor:
    """`mix` of int32 numbers with the bits of uint32, in place. A CPU takes a tenth of the time of int64."""
    # Products wrap to the bits of uint32. A shift to the right copies the sign, so the copies are masked.
    shifted = torch.empty_like(x)
    for shift, factor in _ROUNDS:
        torch.bitwise_right_shift(x, shift, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed(factor))
    torch.bitwise_right_shift(x, 16, out=shifted)
    return x.bitwise_xor_(shifted.bitwise_and_(0xFFFF))


def keys_from_column(keys: Tensor, first: int) -> Tensor:
    """Keys of the same rows for a part of their columns: column 0 of the part is column `first` of the row."""
    return (keys + first * 0x9E3779B1) & _MASK


def keep_mask(keys: Tensor, columns: int | Tensor, p: float) -> Tensor:
    """The mask of rows with the given keys: bool [*keys.shape, columns], False with probability `p`.

    `keys` are int64 with values of 32 bits. `columns` is the number of columns, or their numbers as int64.
    """
    if isinstance(columns, int):
        columns = torch.arange(columns, device=keys.device)
    # 0x9E3779B1 is 2^32 divided by the golden ratio. It spreads neighboring columns over all 32 bits.
    bits = _mix_int32(_as_int32(keys)[..., None] + _as_int32(columns * 0x9E3779B1))
    # With the first bit flipped, signed numbers have the order of unsigned ones.
    return bits.bitwise_xor_(_signed(_FIRST_BIT)) >= _signed(threshold(p) ^ _FIRST_BIT)


def threshold(p: float) -> int:
    """An element is kept if its 32 bits are a number of this size, or a greater one."""
    return int(p * 2**32)


def _signed(bits: int) -> int:
    """The int32 with these 32 bits."""
    return bits - (1 << 32) if bits >> 31 else bits


def _as_int32(x: Tensor) -> Tensor:
    """The lower 32 bits of int64 numbers."""
    return ((x & _MASK) ^ _FIRST_BIT).sub_(_FIRST_BIT).to(torch.int32)


@dataclass(frozen=True)
class RowDropout:
    """Dropout of attention's probabilities [b, n, q, k]: they are multiplied by keep / (1 - p).

    `keys` are those of the rows, int64 [b, n, q] with values of 32 bits. `columns` are the numbers of the columns in
    a row, int64 [k]: positions of keys.
    """

    keys: Tensor
    columns: Tensor
    p: float

    def keep(self) -> Tensor:
        """The `keep_mask`, bool [b, n, q, k]."""
        return keep_mask(self.keys, self.columns, self.p)

    def of(self, queries: slice, keys: slice) -> "RowDropout":
        """Return the dropout of some rows and columns of the scores."""
        return replace(self, keys=self.keys[:, :, queries], columns=self.columns[keys])


@triton.jit
def mix_bits(x):  # type: ignore[no-untyped-def]
    """`mix` of uint32 numbers."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def kept(keys, columns, THRESHOLD: tl.constexpr):  # type: ignore[no-untyped-def]
    """`keep_mask` of keys and columns that broadcast against each other."""
    bits = mix_bits(keys.to(tl.uint32) + columns.to(tl.uint32) * 0x9E3779B1)
    return bits >= tl.full((), THRESHOLD, tl.uint32)


@triton.jit
def _dropout_add_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, keys_ptr, y_ptr, rows, columns, scale,
    THRESHOLD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = residual + x * scale for elements that are kept. The backward has no residual: y = x * scale."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keys = tl.load(keys_ptr + row, mask=row < rows, other=0)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    offset = row[:, None] * columns + column[None, :]
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.where(kept(keys[:, None], column[None, :], THRESHOLD), scale, 0.0)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=inside)


def config(columns: int) -> tuple[int, int, int]:
    """The rows and columns of a program's tile, and its warps. A thread has 16 elements."""
    block = min(next_power_of_2(columns), 2048)
    return 2048 // block, block, 4


def _launch(x: Tensor, residual: Tensor | None, keys: Tensor, p: float) -> Tensor:
    """The kernel's y, in the wider dtype of x and the residual."""
    x = x.contiguous()
    keys = keys.contiguous()
    dtype = x.dtype
    if residual is not None:
        residual = residual.contiguous()
        dtype = torch.promote_types(x.dtype, residual.dtype)
    y = torch.empty_like(x, dtype=dtype)
    if not launches(y, x, residual, keys):
        return y
    rows = keys.numel()
    columns = x.shape[-1]
    tile_rows, block, warps = config(columns)
    grid = triton.cdiv(rows, tile_rows), triton.cdiv(columns, block)
    _dropout_add_kernel[grid](
        x, residual, keys, y, rows, columns, 1.0 / (1.0 - p),
        THRESHOLD=threshold(p), ROWS=tile_rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return y


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, keys: Tensor, p: float) -> Tensor:
        # The keys alone: the backward computes the mask again.
        ctx.save_for_backward(keys)
        ctx.p = p
        ctx.dtypes = (x.dtype, residual.dtype)
        return _launch(x, residual, keys, p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_dtype, residual_dtype = ctx.dtypes
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _launch(dy, None, ctx.saved_tensors[0], ctx.p).to(x_dtype)
        return dx, dy.to(residual_dtype), None, None


def dropout(x: Tensor, keys: Tensor, p: float, impl: Implementation = "torch") -> Tensor:
    """x * keep / (1 - p), with the `keep_mask` of `keys`, int64 [x.shape[:-1]].

    Autograd does not see it: a function with a backward of its own calls it on x, and on the gradient.
    """
    if not fused(impl, x):
        return x * keep_mask(keys, x.shape[-1], p) / (1.0 - p)
    return _launch(x, None, keys, p)


def dropout_add(x: Tensor, residual: Tensor, keys: Tensor | None, p: float, impl: Implementation = "torch") -> Tensor:
    """residual + x * keep / (1 - p), with the `keep_mask` of `keys`, int64 [x.shape[:-1]]; None drops nothing.

    Raises ValueError if `x` and `residual` differ in shape, or if the shape of `keys` does not fit.
    """
    if x.shape != residual.shape or (keys is not None and keys.shape != x.shape[:-1]):
        shapes = [tuple(t.shape) for t in (x, residual, keys) if t is not None]
        raise ValueError(
            f"dropout_add: x, residual and keys have shapes {shapes}: need x's twice, and x's without its last"
        )
    if keys is None:
        return residual + x
    if not fused(impl, x):
        return residual + x * keep_mask(keys, x.shape[-1], p) / (1.0 - p)
    return _DropoutAdd.apply(x, residual, keys, p)
