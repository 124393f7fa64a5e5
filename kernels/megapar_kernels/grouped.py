"""Rows in groups, and the weight gradients of all groups, added to their fp32 main gradients in one launch.

torch's grouped_mm rounds them to the dtype of its inputs. Here each is computed in fp32 and added in place, so a number
of a main gradient is read and written once. An expert without rows adds nothing.

Shapes: g groups (experts), o outputs and i inputs of a matrix. Rows are sorted by group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megapar_kernels.dispatch import tl, triton

__all__ = ["CAPABILITIES", "RowGroups", "add_weight_gradients"]

# The GPUs on which experts are multiplied in one launch, with torch's grouped_mm. On older ones it copies the sizes of
# groups to the host, and on Blackwell some versions of it fail.
CAPABILITIES = ((9, 0),)


@dataclass(frozen=True)
class RowGroups:
    """Rows sorted by group, such as those of experts: first the rows of group 0, then those of group 1, and so on."""

    number: int
    """Of groups."""
    ends: Tensor
    """int32 [groups], on the device of the rows: the end of each group among the rows."""
    on_host: Callable[[], Sequence[int]]
    """The number of rows of each group. A GPU may have to be waited for."""

    @classmethod
    def of(cls, sizes: Sequence[int], device: torch.device | None = None) -> "RowGroups":
        """Groups of these sizes. To a GPU they are copied."""
        ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(len(sizes), ends.to(device), lambda: sizes)

    @cached_property
    def sizes(self) -> list[int]:
        """The number of rows of each group, on the host."""
        return list(self.on_host())


@triton.jit
def _add_tile(  # type: ignore[no-untyped-def]
    totals_ptr, product, has_output, inputs, columns,
    OVERWRITE: tl.constexpr, OUT_BLOCK: tl.constexpr, IN_BLOCK: tl.constexpr,
):  # fmt: skip
    """Add `product` to the tile of totals that begins at the pointer. A row of totals has `inputs` numbers.

    `columns` of them are left from the pointer on.
    """
    column = tl.arange(0, IN_BLOCK)
    place = tl.arange(0, OUT_BLOCK)[:, None] * inputs + column[None, :]
    inside = has_output[:, None] & (column < columns)[None, :]
    if not OVERWRITE:
        product += tl.load(totals_ptr + place, inside, other=0.0)
    tl.store(totals_ptr + place, product, inside)


@triton.jit
def _weight_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, x_ptr, ends_ptr, totals_ptr, outputs, inputs,
    OVERWRITE: tl.constexpr, OUT_BLOCK: tl.constexpr, IN_BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of one group's gradient: the sum over the group's rows of grad^T x."""
    tile = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    before = tl.load(ends_ptr + tl.maximum(group - 1, 0)).to(tl.int64)
    first = tl.where(group > 0, before, 0)
    last = tl.load(ends_ptr + group).to(tl.int64)
    if not OVERWRITE and first == last:
        return
    in_blocks = tl.cdiv(inputs, IN_BLOCK)
    first_output = tile // in_blocks * OUT_BLOCK
    first_input = tile % in_blocks * IN_BLOCK
    row = tl.arange(0, ROW_BLOCK)
    output = tl.arange(0, OUT_BLOCK)
    column = tl.arange(0, IN_BLOCK)
    # Offsets within a tile have 32 bits, which halves the registers for addresses.
    grad_tile = row[:, None] * outputs + output[None, :]
    x_tile = row[:, None] * inputs + column[None, :]
    grad_ptr += first * outputs + first_output
    x_ptr += first * inputs + first_input
    has_output = first_output + output < outputs
    has_column = first_input + column < inputs
    rows = (last - first).to(tl.int32)
    product = tl.zeros([OUT_BLOCK, IN_BLOCK], tl.float32)
    for start in range(0, rows, ROW_BLOCK):
        inside = (row < rows - start)[:, None]
        grad = tl.load(grad_ptr + grad_tile, inside & has_output[None, :], other=0.0)
        x = tl.load(x_ptr + x_tile, inside & has_column[None, :], other=0.0)
        product = tl.dot(tl.trans(grad), x, product)
        grad_ptr += ROW_BLOCK * outputs
        x_ptr += ROW_BLOCK * inputs
    totals_ptr += (group * outputs + first_output) * inputs + first_input
    # Added in halves: a whole tile of totals would take as many registers as the products, and one program would fill a
    # multiprocessor.
    halves = tl.permute(tl.reshape(product, [OUT_BLOCK, 2, IN_BLOCK // 2]), [0, 2, 1])
    left, right = tl.split(halves)
    half: tl.constexpr = IN_BLOCK // 2
    columns = inputs - first_input
    _add_tile(totals_ptr, left, has_output, inputs, columns, OVERWRITE, OUT_BLOCK, half)
    _add_tile(totals_ptr + half, right, has_output, inputs, columns - half, OVERWRITE, OUT_BLOCK, half)


def config() -> tuple[int, int, int, int, int]:
    """The outputs, inputs and rows of a program's tiles, its warps, and how many tiles of rows are on their way."""
    # Two programs fit on a multiprocessor: one multiplies while the other adds to the main gradient.
    return 128, 128, 64, 8, 3


def add_weight_gradients(
    totals_goi: Tensor, grad_2d: Tensor, x_2d: Tensor, ends_g: Tensor, *, overwrite: bool = False
) -> None:
    """Add grad^T x of each group's rows to `totals_goi`, fp32 and contiguous.

    `grad_2d` [rows, o] and `x_2d` [rows, i] are in 16 bits. `ends_g`, int32 or int64 on the device, has the end of each
    group among the rows. With `overwrite` the values of `totals_goi` count as zero, even if they are NaN.
    """
    groups, outputs, inputs = totals_goi.shape
    if totals_goi.is_meta:
        torch.ops.megapar.grouped_weight_gradients(totals_goi, grad_2d, x_2d)
        return
    if not totals_goi.numel():
        return
    out_block, in_block, row_block, warps, stages = config()
    grid = triton.cdiv(outputs, out_block) * triton.cdiv(inputs, in_block), groups
    _weight_gradient_kernel[grid](
        grad_2d.contiguous(), x_2d.contiguous(), ends_g, totals_goi, outputs, inputs,
        overwrite, out_block, in_block, row_block, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    # Autograd does not see what a Triton kernel writes.
    torch.autograd.graph.increment_version(totals_goi)
