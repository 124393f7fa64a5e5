"""Rows of tokens for their experts: copied before the experts, and summed by token behind them.

A token has k rows, one for each expert that it chose. `row_of_choice` [t, k] says which. `token_of_row` [t k] is the
token of each row. The k rows of a token are added in the order of its choices, in fp32, so sums are the same in each
run. Adding rows by their tokens with atomics would give other bits each time.

For an element of a token in bf16 with k rows the copy and the weighted sum move 2 k + 2 bytes, and the backward of the
sum 4 k + 2. With torch's ops each of the k rows is a pass over the sum in fp32.

Shapes: t tokens, k choices of a token, h hidden.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar_kernels.dispatch import Implementation, fused, launches, next_power_of_2, tl, triton


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
    rows_ptr, weights_ptr, row_of_choice_ptr, y_ptr, tokens, columns,
    CHOICES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sums of TOKENS tokens in BLOCK columns. Without weights all are 1."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    exists = token < tokens
    inside = exists & (column < columns)
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        row = tl.load(row_of_choice_ptr + token * CHOICES + choice, mask=exists, other=0)
        x = tl.load(rows_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            x *= tl.load(weights_ptr + token * CHOICES + choice, mask=exists, other=0.0).to(tl.float32)
        total += x
    tl.store(y_ptr + token * columns + column, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _spread_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, rows_ptr, weights_ptr, row_of_choice_ptr, grad_rows_ptr, grad_weights_ptr, columns,
    CHOICES: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The backward of a weighted sum for one token: the gradients of its rows and of its weights. MOST >= CHOICES."""
    token = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, MOST)[:, None]
    exists = choice < CHOICES
    row = tl.load(row_of_choice_ptr + token * CHOICES + choice, mask=exists, other=0)
    weight = tl.load(weights_ptr + token * CHOICES + choice, mask=exists, other=0.0).to(tl.float32)
    products = tl.zeros([MOST, BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = exists & (column < columns)
        grad = tl.load(grad_ptr + token * columns + column, mask=column < columns, other=0.0).to(tl.float32)
        place = row * columns + column
        products += tl.load(rows_ptr + place, mask=inside, other=0.0).to(tl.float32) * grad
        tl.store(grad_rows_ptr + place, (grad * weight).to(grad_rows_ptr.dtype.element_ty), mask=inside)
    grad_weight = tl.sum(products, 1)[:, None]
    tl.store(
        grad_weights_ptr + token * CHOICES + choice, grad_weight.to(grad_weights_ptr.dtype.element_ty), mask=exists
    )


def copy_config(columns: int) -> tuple[int, int]:
    """The columns and warps of a program. A thread has 8 elements, in bf16 one load of 16 bytes."""
    block = min(max(next_power_of_2(columns), 256), 1024)
    return block, block // 256


def sum_config(columns: int) -> tuple[int, int, int]:
    """The tokens and columns of a program's tile, and its warps. A thread has 8 elements of each row."""
    block = min(next_power_of_2(columns), 1024)
    return max(1024 // block, 1), block, 4


def spread_config(columns: int, choices: int) -> tuple[int, int, int]:
    """The rows and columns of a program's tile, and its warps. A thread has 16 elements, 8 of them side by side."""
    most = next_power_of_2(choices)
    block = min(next_power_of_2(columns), max(2048 // most, 128))
    return most, block, max(most * block // 512, 1)


def _copy(x_th: Tensor, token_of_row: Tensor, row_of_choice: Tensor, impl: Implementation) -> Tensor:
    """The tokens as rows: [n, h] from [t, h], where both indices have n numbers."""
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


def _sum(rows: Tensor, weights_tk: Tensor | None, row_of_choice: Tensor, impl: Implementation) -> Tensor:
    """The sum of each token's rows, times their weights if there are any: [t, h] from [t k, h]."""
    if not _is_fused(impl, rows):
        first_rows, *other_rows = row_of_choice.unbind(1)
        if weights_tk is None:
            total = rows.index_select(0, first_rows).to(_sum_dtype(rows))
            for indices in other_rows:
                total += rows.index_select(0, indices)
            return total.to(rows.dtype)
        first_weight, *other_weights = weights_tk.to(_sum_dtype(rows)).split(1, dim=1)
        total = rows.index_select(0, first_rows) * first_weight
        for indices, weight in zip(other_rows, other_weights, strict=True):
            total.addcmul_(rows.index_select(0, indices), weight)
        return total.to(rows.dtype)
    rows, row_of_choice = rows.contiguous(), row_of_choice.contiguous()
    weights_tk = None if weights_tk is None else weights_tk.contiguous()
    tokens, choices = row_of_choice.shape
    columns = rows.shape[1]
    y = rows.new_empty(tokens, columns)
    if launches(y, rows, weights_tk, row_of_choice):
        token_block, block, warps = sum_config(columns)
        _sum_kernel[triton.cdiv(tokens, token_block), triton.cdiv(columns, block)](
            rows, weights_tk, row_of_choice, y, tokens, columns,
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
        return _sum(grad, None, row_of_choice, ctx.impl), None, None, None


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


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights_tk: Tensor,
        token_of_row: Tensor,
        row_of_choice: Tensor,
        impl: Implementation,
    ) -> Tensor:
        ctx.save_for_backward(rows, weights_tk, token_of_row, row_of_choice)
        ctx.impl = impl
        return _sum(rows, weights_tk, row_of_choice, impl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows, weights_tk, token_of_row, row_of_choice = ctx.saved_tensors
        if not _is_fused(ctx.impl, rows):
            return *_spread(grad, rows, weights_tk, token_of_row, row_of_choice), None, None, None
        grad, rows, row_of_choice = grad.contiguous(), rows.contiguous(), row_of_choice.contiguous()
        grad_rows = torch.empty_like(rows)
        grad_weights = torch.empty_like(weights_tk, memory_format=torch.contiguous_format)
        if launches(grad, rows, weights_tk, row_of_choice, grad_rows, grad_weights):
            columns, choices = rows.shape[1], row_of_choice.shape[1]
            most, block, warps = spread_config(columns, choices)
            _spread_kernel[(len(grad),)](
                grad, rows, weights_tk.contiguous(), row_of_choice, grad_rows, grad_weights, columns,
                CHOICES=choices, MOST=most, BLOCK=block, num_warps=warps,
            )  # fmt: skip
        return grad_rows, grad_weights, None, None, None


def _spread(
    grad: Tensor, rows: Tensor, weights_tk: Tensor, token_of_row: Tensor, row_of_choice: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of rows and weights in a weighted sum, by torch's ops."""
    grad_rows = torch.empty_like(rows)
    # The weight of each row, and its gradient, in the order of rows: [t k, 1].
    weights = weights_tk.new_empty(rows.shape[0], 1)
    weights.index_copy_(0, row_of_choice.view(-1), weights_tk.reshape(-1, 1))
    grad_weights = torch.empty_like(weights)
    # t rows at a time. All t k rows at once would take k times the memory for the products in fp32.
    chunks = zip(
        token_of_row.split(len(grad)),
        rows.split(len(grad)),
        weights.split(len(grad)),
        grad_rows.split(len(grad)),
        grad_weights.split(len(grad)),
        strict=True,
    )
    for tokens, row_chunk, weight_chunk, grad_row_chunk, grad_weight_chunk in chunks:
        grad_sum = grad.index_select(0, tokens).to(_sum_dtype(grad))
        grad_weight_chunk.copy_((row_chunk * grad_sum).sum(-1, keepdim=True))
        grad_row_chunk.copy_(grad_sum * weight_chunk)
    return grad_rows, grad_weights[row_of_choice, 0]


def rows_of_tokens(x_th: Tensor, token_of_row: Tensor, row_of_choice: Tensor, impl: Implementation = "torch") -> Tensor:
    """Copies of the tokens' hidden states [t, h] as rows [t k, h]. Backward sums the gradients of a token's rows."""
    return _CopyRows.apply(x_th, token_of_row, row_of_choice, impl)


def permuted_rows(rows: Tensor, order: Tensor, inverse: Tensor, impl: Implementation = "torch") -> Tensor:
    """The rows [n, h] at the indices `order` [n], a permutation whose inverse is `inverse`."""
    return _PermuteRows.apply(rows, order, inverse, impl)


def weighted_sum(
    rows: Tensor, weights_tk: Tensor, token_of_row: Tensor, row_of_choice: Tensor, impl: Implementation = "torch"
) -> Tensor:
    """The sum of each token's rows [t k, h], times `weights_tk`: [t, h] in the dtype of the rows."""
    return _WeightedSum.apply(rows, weights_tk, token_of_row, row_of_choice, impl)
