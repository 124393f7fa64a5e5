"""RMSNorm and LayerNorm over the last dimension, alone or after the addition of the residual.

Sources: Zhang and Sennrich, arXiv 1910.07467; Ba et al., arXiv 1607.06450.

For each element of bf16 the forward moves at least 4 bytes and the backward 6. With the residual both move 8.
Statistics are fp32. The backward keeps the norm's input and the statistics of its rows, never y. The weight may have a
wider dtype than the input, such as fp32 with bf16.

A program has tiles of whole rows in registers. Rows too wide for registers are read in blocks, twice, and the gradient
of their weight takes a pass of its own (10 bytes). The same kernels compute both norms: with a pointer for the means
they subtract the mean, as LayerNorm does.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar_kernels import apex
from megapar_kernels.dispatch import (
    Implementation,
    MainGrad,
    apply_function,
    fused,
    launches,
    main_grad_of,
    next_power_of_2,
    programs_at_once,
    tl,
    triton,
)
from megapar_kernels.norm_formulas import (
    backward_in_one_graph,
    closed_form,
    compiled_forward,
    torch_backward,
    torch_forward,
    torch_norm,
)
from megapar_kernels.quantize import GROUP, as_packed, has_kernels, packed_like, quantized
from megapar_kernels.quantize_kernels import store_tile

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]

MOST_WARPS = 32  # the most of a program, and of a multiprocessor if a thread takes 64 registers
# Columns of a wide row that are read at a time. With all warps in one program a multiprocessor runs one row at a time,
# so that its second reading finds the row in the L2.
WIDE_BLOCK = 512 * MOST_WARPS
WIDE_WARPS = MOST_WARPS
MOST_BACKWARD_COLUMNS = 8192
BACKWARD_BYTES = 3 << 15  # of shared memory for the tiles in flight: what every GPU from sm_80 on has for a program
GRADIENT_TILE = 8, 512  # rows and columns of a tile in the pass for the gradient of a wide row's weight
GRADIENT_WARPS = 8


@triton.jit
def _read(pointers, inside):  # type: ignore[no-untyped-def]
    return tl.load(pointers, inside, other=0.0).to(tl.float32)


@triton.jit
def _norm_forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr, rows, columns, eps, run, run_stride,
    ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, WIDTH: tl.constexpr = 0,
):  # fmt: skip
    """Normalize one tile of whole rows. x has runs of `run` rows without gaps, `run_stride` numbers from each other.

    With a WIDTH y are packed rows of so many bytes.
    """
    row = tl.program_id(0).to(tl.int64) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)[:, None]
    column = tl.arange(0, COLUMN_BLOCK)[None, :]
    in_row = row < rows
    in_column = column < columns
    inside = in_row & in_column
    offset = row * columns + column
    x = _read(x_ptr + row // run * run_stride + row % run * columns + column, inside)
    if residual_ptr is not None:
        # What is normalized is the rounded sum, as when torch adds and normalizes in two steps.
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
    if WIDTH == 0:
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), inside)
    else:
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
        first_row = tl.program_id(0).to(tl.int64) * ROW_BLOCK
        store_tile(y_ptr, y, first_row, 0, rows, columns, WIDTH, ROW_BLOCK, COLUMN_BLOCK)


@triton.jit
def _norm_forward_wide_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr, rows, columns, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize one row. It is read once for its statistics and once for y."""
    row = tl.program_id(0).to(tl.int64)
    mean, squares = 0.0, 0.0  # squares: the sum of squared deviations from the mean
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = _read(x_ptr + row * columns + column, inside)
        if residual_ptr is not None:
            rounded = (x + _read(residual_ptr + row * columns + column, inside)).to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + row * columns + column, rounded, inside)
            x = rounded.to(tl.float32)
        if mean_ptr is not None:
            # Combine the mean and squares of this block with those of the blocks before it (Chan et al., 1979). The
            # mean of the squares less the square of the mean would cancel.
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
        tl.debug_barrier()  # the next loop reads what other threads of this program have stored
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
    rows, columns, run, run_stride,
    ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of the tiles program, program + programs, ... and one row of partial sums of the weight's gradient.

    The partial sums are [programs, columns]. x is in runs, as in the forward.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMN_BLOCK)[None, :]
    in_column = column < columns
    weight = _read(weight_ptr + column, in_column)
    grad_weight = tl.zeros((ROW_BLOCK, COLUMN_BLOCK), tl.float32)
    grad_bias = tl.zeros((ROW_BLOCK, COLUMN_BLOCK), tl.float32)
    # STAGES - 1 tiles are on their way into shared memory while one is computed. Without them threads would wait for
    # the memory at every tile, because a row's sums need all of it.
    for first in tl.range(program * ROW_BLOCK, rows, tl.num_programs(0) * ROW_BLOCK, num_stages=STAGES):
        row = first + tl.arange(0, ROW_BLOCK)[:, None]
        in_row = row < rows
        inside = in_row & in_column
        offset = row * columns + column
        grad_y = _read(grad_y_ptr + offset, inside)
        x_hat = _read(x_ptr + row // run * run_stride + row % run * columns + column, inside)
        if grad_sum_ptr is not None:
            # It stays in its dtype until it is added, because bf16 takes half the registers of fp32.
            grad_sum = tl.load(grad_sum_ptr + offset, inside, other=0.0)
        rstd = _read(rstd_ptr + row, in_row)
        grad_hat = grad_y * weight
        shift = 0.0
        if mean_ptr is not None:
            x_hat -= _read(mean_ptr + row, in_row)
            shift = tl.sum(grad_hat, 1, keep_dims=True) / columns
        x_hat *= rstd
        along = tl.sum(grad_hat * x_hat, 1, keep_dims=True) / columns
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
    """The gradient of one row of x. The row is read once for its sums and once for the gradient."""
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
    """The gradient of a block of columns of the weight, over every n-th tile of rows.

    n is the number of programs of axis 1. Each of them writes a row of the partial sums [n, columns].
    """
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


def _runs(x: Tensor) -> tuple[int, int] | None:
    """How x [..., n, h] lies in memory: the rows of a run without gaps, and the stride of runs. None if not so.

    The heads of queries in a fused projection are such runs, of n rows. A contiguous x has runs of 1.
    """
    columns = x.shape[-1]
    if x.is_contiguous():
        return 1, columns
    if x.ndim < 3 or x.stride()[-2:] != (columns, 1):
        return None
    try:
        return x.shape[-2], x.view(-1, *x.shape[-2:]).stride(0)
    except RuntimeError:  # the runs are not evenly apart
        return None


def _layout(x: Tensor) -> tuple[int, int]:
    """`_runs` of what `_Norm` gives the kernels and keeps. Another layout would be read as if it were one of these."""
    runs = _runs(x)
    assert runs is not None, f"strides {x.stride()} of {tuple(x.shape)} are not those of runs"
    return runs


def _tile(columns: int, elements_a_thread: int) -> tuple[int, int, int] | None:
    """The rows and columns of a tile, and its warps; None if one row takes more than MOST_WARPS."""
    column_block = next_power_of_2(columns)
    elements_a_warp = 32 * elements_a_thread
    if column_block > elements_a_warp * MOST_WARPS:
        return None
    row_block = 1  # a row that takes several warps has the program to itself
    if column_block <= 256:
        row_block = min(2048 // column_block, 64)
    return row_block, column_block, max(row_block * column_block // elements_a_warp, 1)


def forward_config(columns: int, adds: bool) -> tuple[int, int, int] | None:
    """The rows and columns of a tile, and its warps; None if a row is too wide for a tile.

    Rows alone of 2,048 to 8,192 columns have 4 warps, because fewer warps wait for each other at a sum. On an H200
    LayerNorm takes up to 20 % less time so. With the addition (`adds`) more warps take 1 to 3 % less.
    """
    if not adds and 1024 < columns <= 8192:
        return 1, next_power_of_2(columns), 4
    return _tile(columns, 8) or _tile(columns, 16) or _tile(columns, 32)


class BackwardTile(NamedTuple):
    """A tile of the backward: its rows and columns, the warps of a program, and how many tiles are in flight.

    `programs` run on a multiprocessor at a time.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int


def backward_config(columns: int, bytes_an_element: int, tensors: int) -> BackwardTile | None:
    """The tile in which the backward reads `tensors` tensors; None if a row is too wide for one.

    The fastest of those tried on an H200, for 64 to 8,192 columns of bf16. Without the sum of the partial gradients it
    has 86 % of the speed of a copy for 1,024 and 2,048 columns, 90 to 96 % for 4,096, and more for 8,192.
    """
    column_block = next_power_of_2(columns)
    if column_block > MOST_BACKWARD_COLUMNS:
        return None
    rows, warps, programs = 1, min(max(column_block // 512, 1), 8), MOST_BACKWARD_COLUMNS // column_block
    if column_block <= 256:
        rows, programs = min(2048 // column_block, 64), 3
        warps = max(rows * column_block // 256, 1)
    in_flight = BACKWARD_BYTES // (rows * column_block * bytes_an_element * tensors)
    return BackwardTile(rows, column_block, warps, 1 + min(max(in_flight, 1), 2), min(programs, MOST_WARPS // 2))


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, packs: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Normalize contiguous tensors, or x alone in runs (`_runs`).

    Returns y, the tensor that was normalized, its means and its inverse deviations. The last two are [rows]. RMSNorm
    has no means. y are packed rows if `packs`.
    """
    columns = x.shape[-1]
    rows = x.shape[:-1].numel()
    run, run_stride = _layout(x)
    y = packed_like(x) if packs else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = x.new_empty(rows, dtype=torch.float32)
    mean = None if bias is None else torch.empty_like(rstd)
    total = x if residual is None else torch.empty_like(x)
    sum_out = None if residual is None else total
    tensors = x, residual, weight, bias, y, sum_out, mean, rstd
    config = forward_config(columns, residual is not None)
    if not launches(x, residual, weight, bias, y, sum_out, mean, rstd):
        return y, total, mean, rstd
    if config is None:
        _norm_forward_wide_kernel[(rows,)](*tensors, rows, columns, eps, WIDE_BLOCK, num_warps=WIDE_WARPS)
    else:
        row_block, column_block, warps = config
        grid = (triton.cdiv(rows, row_block),)
        _norm_forward_kernel[grid](
            *tensors, rows, columns, eps, run, run_stride,
            row_block, column_block, y.shape[-1] if packs else 0, num_warps=warps,
        )  # fmt: skip
    return y, total, mean, rstd


def _backward(
    grad_y: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of x, in its dtype, and of weight and bias, fp32 [1 or 2, columns]. x is as in `_forward`."""
    columns = weight.numel()
    rows = rstd.numel()
    run, run_stride = _layout(x)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    vectors = 1 if mean is None else 2  # LayerNorm has a weight and a bias
    tile = backward_config(columns, x.element_size(), 2 if grad_total is None else 3)
    if not launches(x, grad_y, grad_total, weight, mean, rstd, grad_x):
        return grad_x, weight.new_zeros(vectors, columns, dtype=torch.float32)
    if tile is not None:
        programs = min(triton.cdiv(rows, tile.rows), programs_at_once(x.device, tile.programs))
        partial = x.new_empty(vectors, programs, columns, dtype=torch.float32)
        _norm_backward_kernel[(programs,)](
            grad_y, grad_total, x, weight, mean, rstd, grad_x, partial[0], None if mean is None else partial[1],
            rows, columns, run, run_stride, tile.rows, tile.columns, tile.stages, num_warps=tile.warps,
        )  # fmt: skip
        # Not by atomic additions, whose order changes: the gradient is the same each time.
        return grad_x, partial.sum(1)
    _norm_backward_wide_kernel[(rows,)](
        grad_y, grad_total, x, weight, mean, rstd, grad_x, rows, columns, WIDE_BLOCK, num_warps=WIDE_WARPS
    )
    row_block, column_block = GRADIENT_TILE
    blocks = triton.cdiv(columns, column_block)
    lines = min(
        triton.cdiv(rows, row_block), max(programs_at_once(x.device, MOST_WARPS // GRADIENT_WARPS) // blocks, 2)
    )
    partial = x.new_empty(vectors, lines, columns, dtype=torch.float32)
    _norm_weight_gradient_kernel[(blocks, lines)](
        grad_y, x, mean, rstd, partial[0], None if mean is None else partial[1],
        rows, columns, row_block, column_block, num_warps=GRADIENT_WARPS,
    )  # fmt: skip
    return grad_x, partial.sum(1)


def _give(grad: Tensor, main_grad: MainGrad | None, dtype: torch.dtype) -> Tensor | None:
    """Add a parameter's fp32 gradient to its main gradient. Without one, return it for autograd, in `dtype`."""
    if main_grad is None:
        return grad.to(dtype)
    main_grad.add(grad)
    return None


class _Passes(NamedTuple):
    """Who computes a norm forward and backward: as `_forward` and `_backward`."""

    forward: Callable[..., tuple[Tensor, Tensor, Tensor | None, Tensor]]
    backward: Callable[..., tuple[Tensor, Any]]


_KERNELS = _Passes(_forward, _backward)
_PACKING = _Passes(partial(_forward, packs=True), _backward)
_TORCH = _Passes(torch_forward, torch_backward)
_COMPILED = _Passes(compiled_forward, backward_in_one_graph)


class _Norm(torch.autograd.Function):
    """(y, x + residual); y alone if there is no residual. Without a bias it is RMSNorm, with one LayerNorm.

    The gradients of weight and bias are added to their main gradients if they have them (`dispatch.MainGrad`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        passes: _Passes,
    ) -> Tensor | tuple[Tensor, Tensor]:
        # Read here: a recomputation gives the backward pass copies of the parameters without attributes.
        ctx.main_grads = main_grad_of(weight), main_grad_of(bias)
        # A copy of queries and keys would be kept beside the projection that they are a part of.
        in_runs = (
            passes in (_KERNELS, _PACKING) and residual is None and x.shape[-1] <= MOST_BACKWARD_COLUMNS and _runs(x)
        )
        x = x if in_runs else x.contiguous()
        residual, weight, bias = (None if t is None else t.contiguous() for t in (residual, weight, bias))  # type: ignore[assignment]
        y, total, mean, rstd = passes.forward(x, residual, weight, bias, eps)
        y = as_packed(y, x.dtype, "triton") if passes is _PACKING else y
        ctx.passes = passes
        ctx.set_materialize_grads(False)  # an output that is not used has gradient None, and not a tensor of zeros
        ctx.save_for_backward(total, weight, mean, rstd)
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, grad_total: Tensor | None = None) -> tuple[Tensor | None, ...]:
        total, weight, mean, rstd = ctx.saved_tensors
        _, needs_residual, needs_weight, needs_bias, _, _ = ctx.needs_input_grad
        if grad_y is None:  # only the sum was used
            grad_residual = grad_total if needs_residual else None
            return grad_total, grad_residual, None, None, None, None
        if grad_total is not None:
            grad_total = grad_total.contiguous()
        grad_x, grads = ctx.passes.backward(grad_y.contiguous(), grad_total, total, weight, mean, rstd)
        weight_main_grad, bias_main_grad = ctx.main_grads
        grad_weight = _give(grads[0], weight_main_grad, weight.dtype) if needs_weight else None
        grad_bias = _give(grads[1], bias_main_grad, weight.dtype) if needs_bias else None
        grad_residual = grad_x if needs_residual else None
        return grad_x, grad_residual, grad_weight, grad_bias, None, None


def _fused_passes(impl: Implementation, x: Tensor) -> _Passes | None:
    """Who computes the norm of `x` in one pass over memory, or None."""
    if impl == "inductor":
        return _COMPILED
    return _KERNELS if fused(impl, x) else None


def _packs(impl: Implementation, x: Tensor) -> bool:
    """Whether one kernel normalizes `x` and quantizes the result."""
    columns = x.shape[-1]
    fits = columns % GROUP == 0 and forward_config(columns, adds=False) is not None
    return fits and fused(impl, x) and has_kernels(impl, x)


def _norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, impl: Implementation, packed: bool = False
) -> Tensor:
    _check(x, None, weight, bias)
    if packed:
        if _packs(impl, x):
            return apply_function(_Norm, x, None, weight, bias, eps, _PACKING)
        return quantized(_norm(x, weight, bias, eps, impl), impl)
    if passes := _fused_passes(impl, x):
        return apply_function(_Norm, x, None, weight, bias, eps, passes)
    return _unfused_norm(x, weight, bias, eps, impl)


def _add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, impl: Implementation, packed: bool
) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight, bias)
    if packed:
        if _packs(impl, x):
            return apply_function(_Norm, x, residual, weight, bias, eps, _PACKING)
        y, total = _add_norm(x, residual, weight, bias, eps, impl, False)
        return quantized(y, impl), total
    if passes := _fused_passes(impl, x):
        return apply_function(_Norm, x, residual, weight, bias, eps, passes)
    if impl == "torch" and x.dtype == residual.dtype and closed_form(x, weight, impl):
        return apply_function(_Norm, x, residual, weight, bias, eps, _TORCH)
    total = (x + residual).to(x.dtype)
    return _unfused_norm(total, weight, bias, eps, impl), total


def _unfused_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, impl: Implementation) -> Tensor:
    if impl != "apex":
        if closed_form(x, weight, impl):
            return apply_function(_Norm, x, None, weight, bias, eps, _TORCH)
        return torch_norm(x, weight, bias, eps)
    if bias is None:
        return apex.rms_norm(x, weight, eps)
    return apex.layer_norm(x, weight, bias, eps)


def _check(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> None:
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"the residual {tuple(residual.shape)} has not the shape of x {tuple(x.shape)}")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} {tuple(vector.shape)} does not fit x {tuple(x.shape)}: it must be [{x.shape[-1]}]"
            )


def rms_norm(x: Tensor, weight: Tensor, eps: float, impl: Implementation = "torch", packed: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight of x [..., h] and weight [h], in x's dtype.

    If `packed`, the result is a `Packed` of `quantize_rows`, which takes h of multiples of 128. Raises ValueError if
    shapes do not fit.
    """
    return _norm(x, weight, None, eps, impl, packed)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, impl: Implementation = "torch", packed: bool = False
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias of x [..., h], weight and bias [h], in x's dtype.

    `packed` is as in `rms_norm`. Raises ValueError if shapes do not fit.
    """
    return _norm(x, weight, bias, eps, impl, packed)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, impl: Implementation = "torch", packed: bool = False
) -> tuple[Tensor, Tensor]:
    """rms_norm(sum) and sum = x + residual, rounded to x's dtype. The sum is the new residual stream.

    `packed` is as in `rms_norm`, and of the norm alone.
    """
    return _add_norm(x, residual, weight, None, eps, impl, packed)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    impl: Implementation = "torch",
    packed: bool = False,
) -> tuple[Tensor, Tensor]:
    """layer_norm(sum) and sum = x + residual, rounded to x's dtype. The sum is the new residual stream.

    `packed` is as in `rms_norm`, and of the norm alone.
    """
    return _add_norm(x, residual, weight, bias, eps, impl, packed)
