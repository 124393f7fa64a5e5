"""Products of FP8 numbers in groups that torch has not: of all experts' rows in one launch, and added to fp32.

    y  = x W^T     of rows in groups, each with a matrix of its own
    dx = dy W      the same with W^T, whose bytes are transposed first
    dW = dy^T x    of groups along positions, added to the main gradient in place

A tile multiplies 128 numbers of each row in tensor cores. The sum is multiplied by its two scales and added in fp32,
before the next 128: Hopper's tensor cores keep fewer bits than fp32. Rows have scales of their own, so a group of rows
is neither padded nor does it share a scale with another.

Both operands have the numbers that are summed side by side in memory: Hopper multiplies no other FP8.

Shapes: g groups (experts), o outputs and i inputs of a matrix, p positions of all samples.
"""

import torch
from torch import Tensor

from megapar_kernels.dispatch import launches, next_power_of_2, tl, triton
from megapar_kernels.grouped import RowGroups
from megapar_kernels.quantize import GROUP, Quantized, expanded_scales, transposed_blocks, view_packed
from megapar_kernels.quantize_kernels import scale_of

__all__ = ["add_weight_gradient", "grouped_forward", "grouped_input_gradient"]

_GROUP = tl.constexpr(GROUP)
TILES_OF_ROW = 8  # rows of tiles of a weight gradient that are computed side by side


@triton.jit
def _group_of_tile(ends_ptr, tile, groups, GROUPS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The group of a tile of rows, and the number of its tiles before this one. `groups` behind the last tile."""
    number = tl.arange(0, GROUPS)
    exists = number < groups
    ends = tl.load(ends_ptr + number, exists, other=0).to(tl.int32)
    starts = tl.load(ends_ptr + number - 1, exists & (number > 0), other=0).to(tl.int32)
    tiles = tl.where(exists, tl.cdiv(ends - starts, ROWS), 0)
    group = tl.sum((exists & (tl.cumsum(tiles, 0) <= tile)).to(tl.int32), 0)
    return group, tile - tl.sum(tl.where(number < group, tiles, 0), 0)


@triton.jit
def scaled_grouped_kernel(  # type: ignore[no-untyped-def]
    x_ptr, scales_ptr, weight_ptr, exponents_ptr, ends_ptr, y_ptr,
    groups, outputs, inputs, width, all_rows, group_stride, out_stride, in_stride,
    GROUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of y: ROWS rows of one group, and 128 outputs.

    `x_ptr` are packed rows, and `scales_ptr` has their scales in fp32, [inputs / 128, all_rows]. `weight_ptr` has the
    codes of the matrices, [g, outputs, inputs]. The strides are those of their exponents.
    """
    tile = tl.program_id(0).to(tl.int64)
    out_blocks = outputs // _GROUP
    out_block = tile % out_blocks
    group, tile_of_group = _group_of_tile(ends_ptr, (tile // out_blocks).to(tl.int32), groups, GROUPS, ROWS)
    if group >= groups:
        return
    before = tl.load(ends_ptr + tl.maximum(group - 1, 0)).to(tl.int64)
    first = tl.where(group > 0, before, 0) + tile_of_group * ROWS
    rows = (tl.load(ends_ptr + group).to(tl.int64) - first).to(tl.int32)
    group = group.to(tl.int64)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, _GROUP)
    exists = row < rows
    # Offsets within a tile have 32 bits, which halves the registers for addresses.
    x_tile = row[:, None] * width + lane[None, :]
    weight_tile = lane[:, None] * inputs + lane[None, :]
    x_ptr += first * width
    scales_ptr += first
    weight_ptr += (group * outputs + out_block * _GROUP) * inputs
    exponents_ptr += group * group_stride + out_block * out_stride
    total = tl.zeros([ROWS, _GROUP], tl.float32)
    for block in range(0, inputs // _GROUP):
        x = tl.load(x_ptr + x_tile, exists[:, None], other=0.0)
        weight = tl.load(weight_ptr + weight_tile)
        scale = tl.load(scales_ptr + row, exists, other=0.0) * scale_of(tl.load(exponents_ptr + block * in_stride))
        total += tl.dot(x, tl.trans(weight)) * scale[:, None]
        x_ptr += _GROUP
        scales_ptr += all_rows
        weight_ptr += _GROUP
    y_ptr += first * outputs + out_block * _GROUP
    tl.store(y_ptr + row[:, None] * outputs + lane[None, :], total.to(y_ptr.dtype.element_ty), exists[:, None])


@triton.jit
def scaled_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, grad_scales_ptr, x_ptr, x_scales_ptr, total_ptr, outputs, inputs, positions,
    OVERWRITE: tl.constexpr, TILE_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of 128 outputs and COLUMNS inputs. Codes are [outputs, positions] and [inputs, positions].

    Scales are [positions / 128, outputs] and [positions / 128, inputs] in fp32.
    """
    tile = tl.program_id(0).to(tl.int64)
    out_blocks, in_blocks = outputs // _GROUP, inputs // COLUMNS
    # TILE_ROWS rows of tiles, then the next ones: their operands stay in the L2.
    first_out = tile // (TILE_ROWS * in_blocks) * TILE_ROWS
    of_column = tl.minimum(out_blocks - first_out, TILE_ROWS)
    tile = tile % (TILE_ROWS * in_blocks)
    first_row = (first_out + tile % of_column) * _GROUP
    first_column = tile // of_column * COLUMNS
    lane = tl.arange(0, _GROUP)
    column = tl.arange(0, COLUMNS)
    # Offsets within a tile have 32 bits, which halves the registers for addresses.
    grad_tile = lane[:, None] * positions + lane[None, :]
    x_tile = column[:, None] * positions + lane[None, :]
    grad_ptr += first_row * positions
    x_ptr += first_column * positions
    grad_scales_ptr += first_row
    x_scales_ptr += first_column
    total = tl.zeros([_GROUP, COLUMNS], tl.float32)
    for _ in range(0, positions // _GROUP):
        grad = tl.load(grad_ptr + grad_tile)
        x = tl.load(x_ptr + x_tile)
        grad_scale = tl.load(grad_scales_ptr + lane)
        x_scale = tl.load(x_scales_ptr + column)
        total += tl.dot(grad, tl.trans(x)) * grad_scale[:, None] * x_scale[None, :]
        grad_ptr += _GROUP
        x_ptr += _GROUP
        grad_scales_ptr += outputs
        x_scales_ptr += inputs
    total_ptr += first_row * inputs + first_column
    place = lane[:, None] * inputs + column[None, :]
    if not OVERWRITE:
        total += tl.load(total_ptr + place)
    tl.store(total_ptr + place, total)


def grouped_config() -> tuple[int, int, int]:
    """The rows of a program's tile, its warps, and how many tiles of numbers are on their way."""
    return 128, 8, 3


def gradient_config() -> tuple[int, int, int]:
    """The inputs of a program's tile, its warps, and how many tiles of numbers are on their way."""
    # Two programs fit on a multiprocessor: one multiplies while the other scales, or adds to the main gradient.
    return 64, 8, 3


def grouped_forward(x_packed: Tensor, weight: Quantized, groups: RowGroups, dtype: torch.dtype) -> Tensor:
    """Return y = x W^T with a matrix for each group of rows: [rows, o] in bf16 or fp32.

    `x_packed` [rows, width] has packed rows, sorted by group, and `weight` the matrices [g, o, i] in blocks. Groups may
    have any number of rows. Only for GPUs on which `quantize.has_kernels`.
    """
    number, outputs, inputs = weight.codes.shape
    x_packed, codes = x_packed.contiguous(), weight.codes.contiguous()
    x = view_packed(x_packed)
    if x.codes.shape[1] != inputs:
        raise ValueError(f"grouped_forward: rows have {x.codes.shape[1]} numbers, and the matrices {inputs} inputs")
    rows = len(x_packed)
    y = x_packed.new_empty(rows, outputs, dtype=dtype)
    scales = expanded_scales(x.exponents, x.group, "triton")
    if y.is_meta:
        torch.ops.megapar.scaled_product(x_packed, codes, y)
    elif launches(y, x_packed, scales, codes, weight.exponents, groups.ends):
        tile_rows, warps, stages = grouped_config()
        # Each group has at most one tile that is not full. How many rows a group has, only the GPU knows.
        tiles = rows // tile_rows + number
        read = next_power_of_2(max(number, 2))  # Triton's interpreter takes an `other` of a single zero for none
        scaled_grouped_kernel[(tiles * (outputs // GROUP),)](
            x.codes, scales, codes, weight.exponents, groups.ends, y,
            number, outputs, inputs, x_packed.shape[1], rows, *weight.exponents.stride(),
            read, tile_rows, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return y


def grouped_input_gradient(dy_packed: Tensor, weight: Quantized, groups: RowGroups, dtype: torch.dtype) -> Tensor:
    """Return the gradient of x in `grouped_forward`: [rows, i], of packed rows [rows, width] of dy."""
    return grouped_forward(dy_packed, transposed_blocks(weight, "triton"), groups, dtype)


def add_weight_gradient(total_oi: Tensor, dy: Quantized, x: Quantized, *, overwrite: bool = False) -> None:
    """Add dy^T x to `total_oi` [o, i], fp32 and contiguous. Only for GPUs on which `quantize.has_kernels`.

    `dy` [o, p] and `x` [i, p] are in groups along positions (`scaled_products.over_positions` of `transposed_rows`).
    With `overwrite` the values of `total_oi` count as zero, even if they are NaN.
    """
    outputs, inputs = total_oi.shape
    grad_scales, x_scales = (expanded_scales(part.exponents, part.group, "triton") for part in (dy, x))
    operands = dy.codes.contiguous(), grad_scales, x.codes.contiguous(), x_scales
    if total_oi.is_meta:
        torch.ops.megapar.scaled_weight_gradient(dy.codes, x.codes, total_oi)
    elif launches(total_oi, *operands):
        columns, warps, stages = gradient_config()
        scaled_gradient_kernel[(outputs // GROUP * (inputs // columns),)](
            *operands, total_oi, outputs, inputs, dy.codes.shape[1],
            overwrite, TILES_OF_ROW, columns, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        # Autograd does not see what a Triton kernel writes.
        torch.autograd.graph.increment_version(total_oi)
