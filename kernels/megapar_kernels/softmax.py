"""Softmax of scaled, masked scores, for attention with explicit probabilities.

One program computes a whole row, with statistics in fp32 and one rounding. For a score in bf16 the forward moves 4
bytes and the backward 6. The backward keeps only the result. Causal scores above the diagonal are not read.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar_kernels.dispatch import Implementation, fused, launches, next_power_of_2, tl, triton

LONGEST = 16384  # the most columns that one program holds in registers; torch computes longer rows


def _reference(scores: Tensor, masked: Tensor, scale: float) -> Tensor:
    """The softmax by torch's ops, in fp32 or wider, not rounded. A completely masked row has equal values."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    return wide.masked_fill(masked, torch.finfo(wide.dtype).min).softmax(-1)


@triton.jit
def _last_read(row, columns, queries, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The end of the columns that a row reads: behind its diagonal, rounded up to 16 so that loads stay wide."""
    if CAUSAL:
        return tl.minimum((row % queries + columns - queries + 16) // 16 * 16, columns)
    return columns + 0 * row


@triton.jit
def _softmax_forward_kernel(  # type: ignore[no-untyped-def]
    scores_ptr, mask_ptr, y_ptr, rows, columns, queries, heads, batch_stride, head_stride, query_stride, column_stride,
    scale, CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ROWS rows of the softmax. Row (batch * heads + head) * queries + query; the strides are the mask's."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    offset = row * columns + column
    read = inside & (column < _last_read(row, columns, queries, CAUSAL))
    x = tl.load(scores_ptr + offset, mask=read, other=0.0).to(tl.float32) * scale
    if CAUSAL:
        seen = inside & (column <= row % queries + columns - queries)
    else:
        query = row % queries
        head = row // queries % heads
        batch = row // queries // heads
        mask_row = batch * batch_stride + head * head_stride + query * query_stride
        seen = tl.load(mask_ptr + mask_row + column * column_stride, mask=inside, other=1) == 0
    x = tl.where(seen, x, float("-inf"))
    # A row that is masked completely has maximum -inf and sum 0. The two replacements make it zero, and not NaN.
    largest = tl.max(x, 1)[:, None]
    x = tl.exp(x - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(x, 1)[:, None]
    y = x / tl.where(total == 0.0, 1.0, total)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _softmax_backward_kernel(  # type: ignore[no-untyped-def]
    y_ptr, grad_y_ptr, grad_scores_ptr, rows, columns, queries, scale,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    offset = row * columns + column
    read = inside & (column < _last_read(row, columns, queries, CAUSAL))
    y = tl.load(y_ptr + offset, mask=read, other=0.0).to(tl.float32)
    grad_y = tl.load(grad_y_ptr + offset, mask=read, other=0.0).to(tl.float32)
    grad = scale * y * (grad_y - tl.sum(y * grad_y, 1)[:, None])
    tl.store(grad_scores_ptr + offset, grad.to(grad_scores_ptr.dtype.element_ty), mask=inside)


def config(columns: int) -> tuple[int, int, int]:
    """The rows of a program's tile, its columns, and its warps. A thread has 16 elements."""
    block = next_power_of_2(columns)
    return max(2048 // block, 1), block, max(block // 512, 4)


class _ScaledSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask_bnqk: Tensor | None, scale: float) -> Tensor:
        """The softmax with `mask_bnqk`; without a mask it is causal."""
        scores = scores.contiguous()
        y = torch.empty_like(scores)
        queries, columns = scores.shape[-2:]
        ctx.scale = scale
        ctx.causal = mask_bnqk is None
        if launches(y, scores, mask_bnqk):
            rows, block, warps = config(columns)
            heads = 1
            strides: tuple[int, ...] = (0, 0, 0, 0)
            if mask_bnqk is not None:
                heads = mask_bnqk.shape[1]
                strides = mask_bnqk.stride()
            _softmax_forward_kernel[(triton.cdiv(y.numel() // columns, rows),)](
                scores, mask_bnqk, y, y.numel() // columns, columns, queries, heads, *strides, scale,
                CAUSAL=ctx.causal, ROWS=rows, BLOCK=block, num_warps=warps,
            )  # fmt: skip
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        grad_scores = torch.empty_like(y)
        queries, columns = y.shape[-2:]
        if launches(y, grad_y, grad_scores):
            rows, block, warps = config(columns)
            _softmax_backward_kernel[(triton.cdiv(y.numel() // columns, rows),)](
                y, grad_y.contiguous(), grad_scores, y.numel() // columns, columns, queries, ctx.scale,
                CAUSAL=ctx.causal, ROWS=rows, BLOCK=block, num_warps=warps,
            )  # fmt: skip
        return grad_scores, None, None


def scaled_causal_softmax(scores: Tensor, scale: float, impl: Implementation = "torch") -> Tensor:
    """softmax(scale * scores) over the last dimension of [..., q, k], in their dtype.

    The queries are the last q of the k positions: query i sees the columns up to i + k - q. The others become zero.
    Raises ValueError if q > k.
    """
    queries, columns = scores.shape[-2:]
    if queries > columns:
        raise ValueError(f"scaled_causal_softmax: {queries} queries of {columns} positions: the first would see none")
    if fused(impl, scores) and columns <= LONGEST:
        return _ScaledSoftmax.apply(scores, None, scale)
    future = torch.ones(queries, columns, dtype=torch.bool, device=scores.device).triu(1 + columns - queries)
    return _reference(scores, future, scale).to(scores.dtype)


def scaled_masked_softmax(scores: Tensor, mask: Tensor, scale: float, impl: Implementation = "torch") -> Tensor:
    """softmax(scale * scores) over the last dimension of [b, n, q, k] or fewer dimensions, in their dtype.

    bool `mask` broadcasts against the scores. Scores become zero under a mask of True, and so does every column of a
    completely masked row.
    """
    # The kernel reads the mask by its strides, so an expanded mask takes no memory.
    if fused(impl, scores) and scores.shape[-1] <= LONGEST and 2 <= scores.ndim <= 4:
        mask_bnqk = mask.expand(scores.shape)[(None,) * (4 - scores.ndim)]
        return _ScaledSoftmax.apply(scores, mask_bnqk, scale)
    return _reference(scores, mask, scale).masked_fill(mask, 0.0).to(scores.dtype)
