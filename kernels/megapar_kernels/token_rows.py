"""Rows of tokens for their experts: copied before the experts, and summed by token behind them.

A token has k rows, one for each expert that it chose. `row_of_choice` [t, k] says which. `token_of_row` [t k] is the
token of each row. The k rows of a token are added in the order of its choices, in fp32, so sums are the same in each
run. Adding rows by their tokens with atomics would give other bits each time.

The copy is the backward of the sum, and the sum that of the copy. For an element of a token in bf16 with k rows each
moves 2 k + 2 bytes. With torch's ops each of the k rows is a pass over the sum in fp32.

Shapes: t tokens, k choices of a token, h hidden.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar_kernels.dispatch import Implementation, fused, launches, next_power_of_2, tl, triton
from megapar_kernels.packed import Packed


def _sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums over choices: fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def _is_fused(impl: Implementation, rows: Tensor) -> bool:
    return fused(impl, rows) and rows.dtype != torch.float64


@triton.jit
def _copy_kernel(  # type: ignore[no-untyped-def]
    x_ptr, row_of_choice_ptr, rows_ptr, columns, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy BLOCK columns of one token to its rows. The token is read once, whatever the number of its rows."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + token * columns + column, inside)
    for choice in tl.static_range(CHOICES):
        row = tl.load(row_of_choice_ptr + token * CHOICES + choice)
        tl.store(rows_ptr + row * columns + column, x, inside)


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, row_of_choice_ptr, y_ptr, tokens, columns,
    CHOICES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sums of TOKENS tokens in BLOCK columns."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    exists = token < tokens
    inside = exists & (column < columns)
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        row = tl.load(row_of_choice_ptr + token * CHOICES + choice, mask=exists, other=0)
        total += tl.load(rows_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * columns + column, total.to(y_ptr.dtype.element_ty), mask=inside)


def copy_config(columns: int) -> tuple[int, int]:
    """The columns and warps of a program. A thread has 8 elements, in bf16 one load of 16 bytes."""
    block = min(max(next_power_of_2(columns), 256), 1024)
    return block, block // 256


def sum_config(columns: int) -> tuple[int, int, int]:
    """The tokens and columns of a program's tile, and its warps. A thread has 8 elements of each row."""
    block = min(next_power_of_2(columns), 1024)
    return max(1024 // block, 1), block, 4


def _copy(x_th: Tensor, token_of_row: Tensor, row_of_choice: Tensor, impl: Implementation) -> Tensor:
    """The tokens as rows: [n, h] from [t, h], where both indices have n numbers."""
    if isinstance(x_th, Packed):
        # In 16 bits, of which the kernel moves 16 bytes a thread. Packed rows are multiples of 16 bytes.
        rows = _copy(x_th.rows.view(torch.int16), token_of_row, row_of_choice, impl)
        return x_th.with_rows(rows.view(torch.uint8))
    # The kernel does not compute, so it takes every dtype.
    if not fused(impl, x_th):
        return x_th.index_select(0, token_of_row)
    x_th, row_of_choice = x_th.contiguous(), row_of_choice.contiguous()
    tokens, columns = x_th.shape
    rows = x_th.new_empty(len(token_of_row), columns)
    if launches(rows, x_th, row_of_choice):
        block, warps = copy_config(columns)
        _copy_kernel[tokens, triton.cdiv(columns, block)](
            x_th, row_of_choice, rows, columns, CHOICES=len(rows) // tokens, BLOCK=block, num_warps=warps
        )
    return rows


def _sum(rows: Tensor, row_of_choice: Tensor, impl: Implementation) -> Tensor:
    """The sum of each token's rows: [t, h] from [t k, h]."""
    if not _is_fused(impl, rows):
        first_rows, *other_rows = row_of_choice.unbind(1)
        total = rows.index_select(0, first_rows).to(_sum_dtype(rows))
        for indices in other_rows:
            total += rows.index_select(0, indices)
        return total.to(rows.dtype)
    rows, row_of_choice = rows.contiguous(), row_of_choice.contiguous()
    tokens, choices = row_of_choice.shape
    columns = rows.shape[1]
    y = rows.new_empty(tokens, columns)
    if launches(y, rows, row_of_choice):
        token_block, block, warps = sum_config(columns)
        _sum_kernel[triton.cdiv(tokens, token_block), triton.cdiv(columns, block)](
            rows, row_of_choice, y, tokens, columns,
            CHOICES=choices, TOKENS=token_block, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return y


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_th: Tensor, token_of_row: Tensor, row_of_choice: Tensor, impl: Implementation) -> Tensor:
        ctx.save_for_backward(row_of_choice)
        ctx.impl = impl
        return _copy(x_th, token_of_row, row_of_choice, impl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (row_of_choice,) = ctx.saved_tensors
        return _sum(grad, row_of_choice, ctx.impl), None, None, None


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, impl: Implementation) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.impl = impl
        return _copy(rows, order, inverse, impl)  # to one row each: row i goes where `order` is i

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        order, inverse = ctx.saved_tensors
        # Not the backward of torch's index_select, which adds with atomics.
        return _copy(grad, inverse, order, ctx.impl), None, None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        token_of_row: Tensor,
        row_of_choice: Tensor,
        impl: Implementation,
        convert: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(token_of_row, row_of_choice)
        ctx.impl = impl
        ctx.convert = convert
        return _sum(rows, row_of_choice, impl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        token_of_row, row_of_choice = ctx.saved_tensors
        return _copy(ctx.convert(grad), token_of_row, row_of_choice, ctx.impl), None, None, None, None


def _same(x: Tensor) -> Tensor:
    return x


def rows_of_tokens(x_th: Tensor, token_of_row: Tensor, row_of_choice: Tensor, impl: Implementation = "torch") -> Tensor:
    """Copies of the tokens' hidden states [t, h] as rows [t k, h]. Backward sums the gradients of a token's rows."""
    return _CopyRows.apply(x_th, token_of_row, row_of_choice, impl)


def permuted_rows(rows: Tensor, order: Tensor, inverse: Tensor, impl: Implementation = "torch") -> Tensor:
    """The rows [n, h] at the indices `order` [n], a permutation whose inverse is `inverse`."""
    return _PermuteRows.apply(rows, order, inverse, impl)


def sums_of_rows(
    rows: Tensor,
    token_of_row: Tensor,
    row_of_choice: Tensor,
    impl: Implementation = "torch",
    convert: Callable[[Tensor], Tensor] = _same,
) -> Tensor:
    """The sum of each token's rows [t k, h]: [t, h] in the dtype of the rows. It keeps no row for backward.

    Backward may `convert` the gradient of a sum before it copies the gradient to the token's rows, such as to a
    `Packed`: one conversion instead of k.
    """
    return _SumRows.apply(rows, token_of_row, row_of_choice, impl, convert)
