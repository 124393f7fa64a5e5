"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467) and LayerNorm (Ba et al., arXiv 1607.06450) over the last dimension,
alone or after the residual's addition.

Bytes an element of bf16 moved at least: forward 4, backward 6; with the residual 8 and 8. Statistics are fp32; backward
keeps the normalized input and a row's statistics, never y. The weight may be wider than the input, as fp32 beside bf16.
A program holds tiles of whole rows in registers; rows too wide for that are walked in blocks, twice, and their weight's
gradient takes a pass of its own (10 bytes). The same kernels serve both norms: given a
pointer for the means, they subtract the mean as LayerNorm does.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar_kernels import apex
from megapar_kernels.dispatch import (
    Implementation,
    MainGrad,
    fused,
    launches,
    main_grad_of,
    multiprocessors,
    next_power_of_2,
    tl,
    triton,
)

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]

MOST_WARPS = 32  # of a program, and of a multiprocessor as long as a thread takes 64 registers
WIDE_BLOCK = 512 * MOST_WARPS  # columns at once of wide rows; one program a multiprocessor, so that rows stay in the L2
WIDE_WARPS = MOST_WARPS
GRADIENT_TILE = 8, 512  # rows and columns of the pass for the weight's gradient of wide rows
GRADIENT_WARPS = 8


def _torch_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """RMSNorm without a bias, LayerNorm with one; in the wider of the dtypes, since torch fuses only equal ones."""
    wide = torch.promote_types(x.dtype, weight.dtype)
    x_wide = x.to(wide)
    weight = weight.to(wide)
    if bias is None:
        return F.rms_norm(x_wide, weight.shape, weight, eps).to(x.dtype)
    return F.layer_norm(x_wide, weight.shape, weight, bias.to(wide), eps).to(x.dtype)


@triton.jit
def _read(pointers, inside):  # type: ignore[no-untyped-def]
    return tl.load(pointers, inside, other=0.0).to(tl.float32)


@triton.jit
def _read_for(EVICTION: tl.constexpr, pointers, inside):  # type: ignore[no-untyped-def]
    return tl.load(pointers, inside, other=0.0, eviction_policy=EVICTION).to(tl.float32)


@triton.jit
def _norm_forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr, rows, columns, eps,
    ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of whole rows a program."""
    row = tl.program_id(0).to(tl.int64) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)[:, None]
    column = tl.arange(0, COLUMN_BLOCK)[None, :]
    in_row = row < rows
    in_column = column < columns
    inside = in_row & in_column
    offset = row * columns + column
    x = _read(x_ptr + offset, inside)
    if residual_ptr is not None:
        rounded = (x + _read(residual_ptr + offset, inside)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + offset, rounded, inside)
        x = rounded.to(tl.float32)
    if mean_ptr is not None:
        mean = tl.sum(x, 1, keep_dims=True) / columns
        tl.store(mean_ptr + row, mean, in_row)
        x = tl.where(in_column, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / columns + eps)
    tl.store(rstd_ptr + row, rstd, in_row)
    y = x * rstd * _read(weight_ptr + column, in_column)
    if bias_ptr is not None:
        y += _read(bias_ptr + column, in_column)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def _norm_forward_wide_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr, rows, columns, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program, walked once for its statistics and once for y."""
    row = tl.program_id(0).to(tl.int64)
    mean, squares = 0.0, 0.0  # squares: of deviations from the mean
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = _read(x_ptr + row * columns + column, inside)
        if residual_ptr is not None:
            rounded = (x + _read(residual_ptr + row * columns + column, inside)).to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + row * columns + column, rounded, inside)
            x = rounded.to(tl.float32)
        if mean_ptr is not None:  # join the block's mean and squares to those before it (Chan et al., 1979)
            number = tl.minimum(columns - start, BLOCK)
            block_mean = tl.sum(x, 0) / number
            x = tl.where(inside, x - block_mean, 0.0)
            delta = block_mean - mean
            share = number / (start + number)
            squares += delta * delta * share * start
            mean += delta * share
        squares += tl.sum(x * x, 0)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean)
    rstd = tl.rsqrt(squares / columns + eps)
    tl.store(rstd_ptr + row, rstd)
    source_ptr = x_ptr
    if residual_ptr is not None:
        source_ptr = sum_ptr
        tl.debug_barrier()  # what other threads of this program stored is read
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = _read(source_ptr + row * columns + column, inside)
        y = (x - mean) * rstd * _read(weight_ptr + column, inside)
        if bias_ptr is not None:
            y += _read(bias_ptr + column, inside)
        tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def _norm_backward_kernel(  # type: ignore[no-untyped-def]
    grad_y_ptr, grad_sum_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, grad_x_ptr, grad_weight_ptr, grad_bias_ptr,
    rows, columns, ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr,
):  # fmt: skip
    """Every so many tiles a program, and one line of partial sums [programs, columns] of the weight's gradient.

    A tile is read twice, from memory for the sums over its rows and then from the L1: the registers that would hold it
    meanwhile are needed for the weight's gradient. The policies tell the L1 so, and the compiler not to merge both.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMN_BLOCK)[None, :]
    in_column = column < columns
    grad_weight = tl.zeros((ROW_BLOCK, COLUMN_BLOCK), tl.float32)
    grad_bias = tl.zeros((ROW_BLOCK, COLUMN_BLOCK), tl.float32)
    for first in range(program * ROW_BLOCK, rows, tl.num_programs(0) * ROW_BLOCK):
        row = first + tl.arange(0, ROW_BLOCK)[:, None]
        in_row = row < rows
        inside = in_row & in_column
        offset = row * columns + column
        grad_hat = _read_for("evict_last", grad_y_ptr + offset, inside)
        grad_hat *= _read_for("evict_last", weight_ptr + column, in_column)
        x = _read_for("evict_last", x_ptr + offset, inside)
        if grad_sum_ptr is not None:
            # Loaded before the sums over rows, so that it arrives while threads wait at their barriers. It stays in its
            # dtype until it is added: bf16 takes half the registers of fp32.
            grad_sum = tl.load(grad_sum_ptr + offset, inside, other=0.0, eviction_policy="evict_first")
        rstd = _read(rstd_ptr + row, in_row)
        mean = 0.0
        shift = 0.0
        if mean_ptr is not None:
            mean = _read(mean_ptr + row, in_row)
            shift = tl.sum(grad_hat, 1, keep_dims=True) / columns
        along = tl.sum(grad_hat * (x - mean), 1, keep_dims=True) * rstd / columns

        grad_y = _read_for("evict_first", grad_y_ptr + offset, inside)
        grad_hat = grad_y * _read(weight_ptr + column, in_column)
        x_hat = (_read_for("evict_first", x_ptr + offset, inside) - mean) * rstd
        grad_weight += grad_y * x_hat
        if grad_bias_ptr is not None:
            grad_bias += grad_y
        grad_x = (grad_hat - shift - x_hat * along) * rstd
        if grad_sum_ptr is not None:
            grad_x += grad_sum.to(tl.float32)
        tl.store(grad_x_ptr + offset, grad_x.to(grad_x_ptr.dtype.element_ty), inside)
    tl.store(grad_weight_ptr + program * columns + column, tl.sum(grad_weight, 0, keep_dims=True), in_column)
    if grad_bias_ptr is not None:
        tl.store(grad_bias_ptr + program * columns + column, tl.sum(grad_bias, 0, keep_dims=True), in_column)


@triton.jit
def _norm_backward_wide_kernel(  # type: ignore[no-untyped-def]
    grad_y_ptr, grad_sum_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, grad_x_ptr, rows, columns, BLOCK: tl.constexpr
):  # fmt: skip
    """One row a program, walked once for its sums and once for x's gradient."""
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    shift = 0.0
    along = 0.0
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = _read(x_ptr + row * columns + column, inside)
        grad_hat = _read(grad_y_ptr + row * columns + column, inside) * _read(weight_ptr + column, inside)
        along += tl.sum(grad_hat * (x - mean), 0)
        if mean_ptr is not None:
            shift += tl.sum(grad_hat, 0)
    along = along * rstd / columns
    shift = shift / columns
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x_hat = (_read(x_ptr + row * columns + column, inside) - mean) * rstd
        grad_hat = _read(grad_y_ptr + row * columns + column, inside) * _read(weight_ptr + column, inside)
        grad_x = (grad_hat - shift - x_hat * along) * rstd
        if grad_sum_ptr is not None:
            grad_x += _read(grad_sum_ptr + row * columns + column, inside)
        tl.store(grad_x_ptr + row * columns + column, grad_x.to(grad_x_ptr.dtype.element_ty), inside)


@triton.jit
def _norm_weight_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_y_ptr, x_ptr, mean_ptr, rstd_ptr, grad_weight_ptr, grad_bias_ptr, rows, columns,
    ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of columns and every so many rows a program; one line of partial sums [programs of axis 1, columns]."""
    column = tl.program_id(0).to(tl.int64) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)[None, :]
    line = tl.program_id(1).to(tl.int64)
    in_column = column < columns
    grad_weight = tl.zeros((ROW_BLOCK, COLUMN_BLOCK), tl.float32)
    grad_bias = tl.zeros((ROW_BLOCK, COLUMN_BLOCK), tl.float32)
    for first in range(line * ROW_BLOCK, rows, tl.num_programs(1) * ROW_BLOCK):
        row = first + tl.arange(0, ROW_BLOCK)[:, None]
        in_row = row < rows
        inside = in_row & in_column
        x = _read(x_ptr + row * columns + column, inside)
        grad_y = _read(grad_y_ptr + row * columns + column, inside)
        if mean_ptr is not None:
            x -= _read(mean_ptr + row, in_row)
            grad_bias += grad_y
        grad_weight += grad_y * x * _read(rstd_ptr + row, in_row)
    tl.store(grad_weight_ptr + line * columns + column, tl.sum(grad_weight, 0, keep_dims=True), in_column)
    if mean_ptr is not None:
        tl.store(grad_bias_ptr + line * columns + column, tl.sum(grad_bias, 0, keep_dims=True), in_column)


def _tile(columns: int, elements_a_thread: int) -> tuple[int, int, int] | None:
    column_block = next_power_of_2(columns)
    elements_a_warp = 32 * elements_a_thread
    if column_block > elements_a_warp * MOST_WARPS:
        return None
    row_block = min(2048 // column_block, 64) if column_block <= 256 else 1  # a row of several warps has them alone
    return row_block, column_block, max(row_block * column_block // elements_a_warp, 1)


def forward_config(columns: int) -> tuple[int, int, int] | None:
    """Rows and columns of a tile and the warps that share it; None: too wide for one."""
    return _tile(columns, 8) or _tile(columns, 16) or _tile(columns, 32)


def backward_config(columns: int, bytes_an_element: int, layer_norm: bool) -> tuple[int, int, int] | None:
    """As `forward_config`. Two sums a column, or inputs of four bytes, leave registers for 8 elements a thread."""
    return _tile(columns, 8) or (None if layer_norm or bytes_an_element > 2 else _tile(columns, 16))


def _programs(device: torch.device, warps: int) -> int:
    """As many as run at once; two where they are interpreted, so that they walk over tiles there as well."""
    return multiprocessors(device) * (MOST_WARPS // warps) if device.type == "cuda" else 2


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """y, what was normalized, its mean (LayerNorm's alone) and inverse deviation [rows], of contiguous tensors."""
    columns = x.shape[-1]
    rows = x.shape[:-1].numel()
    y = torch.empty_like(x)
    rstd = x.new_empty(rows, dtype=torch.float32)
    mean = None if bias is None else torch.empty_like(rstd)
    total = x if residual is None else torch.empty_like(x)
    tensors = x, residual, weight, bias, y, None if residual is None else total, mean, rstd
    config = forward_config(columns)
    if not launches(x):
        return y, total, mean, rstd
    if config is None:
        _norm_forward_wide_kernel[(rows,)](*tensors, rows, columns, eps, WIDE_BLOCK, num_warps=WIDE_WARPS)
    else:
        row_block, column_block, warps = config
        grid = (triton.cdiv(rows, row_block),)
        _norm_forward_kernel[grid](*tensors, rows, columns, eps, row_block, column_block, num_warps=warps)
    return y, total, mean, rstd


def _backward(
    grad_y: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x, in its dtype, and of weight and bias [1 or 2, columns] in fp32, of contiguous tensors."""
    columns = weight.numel()
    rows = rstd.numel()
    grad_x = torch.empty_like(x)
    kinds = 1 if mean is None else 2
    config = backward_config(columns, x.element_size(), mean is not None)
    if not x.numel():
        return grad_x, weight.new_zeros(kinds, columns, dtype=torch.float32)
    if config is not None:
        row_block, column_block, warps = config
        programs = min(triton.cdiv(rows, row_block), _programs(x.device, warps))
        partial = x.new_empty(kinds, programs, columns, dtype=torch.float32)
        _norm_backward_kernel[(programs,)](
            grad_y, grad_total, x, weight, mean, rstd, grad_x, partial[0], None if mean is None else partial[1],
            rows, columns, row_block, column_block, num_warps=warps,
        )  # fmt: skip
        return grad_x, partial.sum(1)
    _norm_backward_wide_kernel[(rows,)](
        grad_y, grad_total, x, weight, mean, rstd, grad_x, rows, columns, WIDE_BLOCK, num_warps=WIDE_WARPS
    )
    row_block, column_block = GRADIENT_TILE
    blocks = triton.cdiv(columns, column_block)
    lines = min(triton.cdiv(rows, row_block), max(_programs(x.device, GRADIENT_WARPS) // blocks, 2))
    partial = x.new_empty(kinds, lines, columns, dtype=torch.float32)
    _norm_weight_gradient_kernel[(blocks, lines)](
        grad_y, x, mean, rstd, partial[0], None if mean is None else partial[1],
        rows, columns, row_block, column_block, num_warps=GRADIENT_WARPS,
    )  # fmt: skip
    return grad_x, partial.sum(1)


def _give(grad: Tensor, main_grad: MainGrad | None, dtype: torch.dtype) -> Tensor | None:
    """Add a parameter's fp32 gradient to its main gradient; without one return it for autograd, in `dtype`."""
    if main_grad is None:
        return grad.to(dtype)
    main_grad.add(grad)
    return None


class _Norm(torch.autograd.Function):
    """(y, x + residual), or y alone where there is no residual; RMSNorm where there is no bias.

    The gradients of weight and bias go to their main gradients where they have them (`dispatch.MainGrad`).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.main_grads = main_grad_of(weight), main_grad_of(bias)
        tensors = (None if t is None else t.contiguous() for t in (x, residual, weight, bias))
        x, residual, weight, bias = tensors  # type: ignore[assignment]
        y, total, mean, rstd = _forward(x, residual, weight, bias, eps)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, weight, mean, rstd)
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, grad_total: Tensor | None = None) -> tuple[Tensor | None, ...]:
        total, weight, mean, rstd = ctx.saved_tensors
        _, needs_residual, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if grad_y is None:  # the sum alone was used
            return grad_total, grad_total if needs_residual else None, None, None, None
        grad_total = None if grad_total is None else grad_total.contiguous()
        grad_x, grads = _backward(grad_y.contiguous(), grad_total, total, weight, mean, rstd)
        weight_main_grad, bias_main_grad = ctx.main_grads
        grad_weight = _give(grads[0], weight_main_grad, weight.dtype) if needs_weight else None
        grad_bias = _give(grads[1], bias_main_grad, weight.dtype) if needs_bias else None
        return grad_x, grad_x if needs_residual else None, grad_weight, grad_bias, None


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, impl: Implementation) -> Tensor:
    _check(x, None, weight, bias)
    return _Norm.apply(x, None, weight, bias, eps) if fused(impl, x) else _unfused_norm(x, weight, bias, eps, impl)


def _add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, impl: Implementation
) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight, bias)
    if fused(impl, x):
        return _Norm.apply(x, residual, weight, bias, eps)
    total = (x + residual).to(x.dtype)
    return _unfused_norm(total, weight, bias, eps, impl), total


def _unfused_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, impl: Implementation) -> Tensor:
    if impl != "apex":
        return _torch_norm(x, weight, bias, eps)
    return apex.rms_norm(x, weight, eps) if bias is None else apex.layer_norm(x, weight, bias, eps)


def _check(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> None:
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"the residual {tuple(residual.shape)} has not the shape of x {tuple(x.shape)}")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} {tuple(vector.shape)} does not fit x {tuple(x.shape)}: it must be [{x.shape[-1]}]"
            )


def rms_norm(x: Tensor, weight: Tensor, eps: float, impl: Implementation = "torch") -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight of [..., h] and [h], in x's dtype."""
    return _norm(x, weight, None, eps, impl)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, impl: Implementation = "torch") -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias of [..., h] and [h], in x's dtype."""
    return _norm(x, weight, bias, eps, impl)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, impl: Implementation = "torch"
) -> tuple[Tensor, Tensor]:
    """rms_norm(sum) and sum = x + residual, rounded to x's dtype: the residual stream that goes on."""
    return _add_norm(x, residual, weight, None, eps, impl)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, impl: Implementation = "torch"
) -> tuple[Tensor, Tensor]:
    """layer_norm(sum) and sum = x + residual, rounded to x's dtype: the residual stream that goes on."""
    return _add_norm(x, residual, weight, bias, eps, impl)
