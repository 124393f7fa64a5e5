"""fp32 numbers in 16 bits: stochastic rounding to bf16, and an fp32 number as a bf16 one and a remainder of 16 bits.

Stochastic rounding adds 16 random bits to the lower half of the fp32 bits and cuts this half off. A number between two
bf16 numbers becomes the nearer one the more often, and the mean of many roundings is the number itself. So updates too
small for bf16 are not lost (Gupta et al., arXiv 1502.02551).

The random bits are a hash of the name of the logical tensor, of the element's index in it, and of the number of the
update. So they are the same in every layout. Torch's ops and the kernels make the same bits.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megapar_kernels.dispatch import tl, triton
from megapar_kernels.dropout import mix, mix_bits

TILE = 1024
"""Elements of a program of a kernel that draws bits."""

_GOLDEN = 0x9E3779B1
_MASK = 0xFFFFFFFF
_QUIET = 0x400000  # a bit of a NaN in its upper half: without it a cut NaN may be an infinity


class Rows(NamedTuple):
    """Elements [start, stop) of a flat shard, and where they lie in their logical tensor.

    They are rows of `width` elements. The first element has the flat index `first` in the logical tensor, and row
    follows row there after `pitch` elements. `start` is negative if the first of these elements lie before the shard.
    `key` has 32 bits, those of the tensor.
    """

    start: int
    stop: int
    first: int
    width: int
    pitch: int
    key: int


@dataclass(frozen=True)
class RandomBits:
    """The random bits of a flat shard. Elements outside of all `rows` are padding and get zeros.

    `table` is int64 [rows, 6] on the device, and `tiles` int32 [tiles, 2]: the rows [first, last) that begin, end or go
    on in a tile.
    """

    rows: tuple[Rows, ...]
    table: Tensor
    tiles: Tensor

    @classmethod
    def of(cls, rows: Iterable[Rows], elements: int, device: torch.device) -> "RandomBits":
        """For a shard of `elements`. `rows` must be sorted and disjoint. Do it once: it copies tables to the device."""
        rows = tuple(rows)
        table = torch.tensor(rows, dtype=torch.int64).view(-1, len(Rows._fields))
        begins = torch.arange(0, elements, TILE)
        first = torch.searchsorted(table[:, 1].contiguous(), begins, right=True)
        last = torch.searchsorted(table[:, 0].contiguous(), begins + TILE)
        return cls(rows, table.to(device), torch.stack((first, last), 1).to(device, torch.int32))

    def draw(self, start: int, stop: int, update: int) -> Tensor:
        """32 bits for each element [start, stop), as int64, of the update number `update`."""
        bits = torch.zeros(stop - start, dtype=torch.int64, device=self.table.device)
        for rows in self.rows:
            low = max(start, rows.start)
            high = min(stop, rows.stop)
            if low < high:
                local = torch.arange(low - rows.start, high - rows.start, device=bits.device)
                index = rows.first + local
                if rows.pitch != rows.width:
                    index += local // rows.width * (rows.pitch - rows.width)
                bits[low - start : high - start] = _hash(index, mix((rows.key + update) & _MASK))
        return bits


def _hash(index: Tensor, key: int) -> Tensor:
    # Mixed twice: keys added to indices alone would make each tensor's bits those of another one, shifted.
    return mix(mix((index + (index >> 32) * _GOLDEN) & _MASK) ^ key)


def round_randomly(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 `x` rounded to bf16, up or down by the lower 16 of `bits`. Signs stay. NaN stays NaN."""
    exact = x.view(torch.int32)
    moved = torch.where(x.isnan(), exact | _QUIET, exact + (bits & 0xFFFF).int())
    return (moved >> 16).to(torch.int16).view(torch.bfloat16)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 `x` as its nearest bf16 numbers, and int16 remainders: the differences of their bits. `join` undoes it.

    A number halfway between two is rounded away from zero. If it were rounded to even, an even bf16 number would have
    65,537 remainders, one too many for 16 bits. Of a NaN only the upper half is kept.
    """
    bits = x.view(torch.int32)
    bits = torch.where(x.isnan(), (bits | _QUIET) & -0x10000, bits)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join(high: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 numbers made of bf16 `high` and its int16 `remainder`."""
    return ((high.view(torch.int16).int() << 16) + remainder).view(torch.float32)


@triton.jit
def draw_bits(rows_ptr, tiles_ptr, offset, update, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """`RandomBits.draw` for the elements `offset` of this program's tile, uint32."""
    program = tl.program_id(0).to(tl.int64)
    begin = program * TILE
    bits = tl.zeros(offset.shape, tl.uint32)
    for number in range(tl.load(tiles_ptr + 2 * program), tl.load(tiles_ptr + 2 * program + 1)):
        row_ptr = rows_ptr + 6 * number
        start = tl.load(row_ptr)
        stop = tl.load(row_ptr + 1)
        width = tl.load(row_ptr + 3)
        key = mix_bits((tl.load(row_ptr + 5) + update).to(tl.uint32))
        # One 64-bit division for a tile. In rows longer than a tile, at most one new row begins in it.
        position = tl.maximum(begin, start)
        column = (position - start) % width
        short = tl.minimum(width, TILE).to(tl.int32)
        column = tl.where(width < TILE, column, tl.maximum(column + TILE - width, 0)).to(tl.int32)
        local = (offset - position).to(tl.int32)
        row = (column + local) // short
        index = position - start + local + tl.load(row_ptr + 2)
        index += ((position - start) // width + row) * (tl.load(row_ptr + 4) - width)
        mixed = mix_bits(index.to(tl.uint32) + (index >> 32).to(tl.uint32) * 0x9E3779B1)
        bits = tl.where((offset >= start) & (offset < stop), mix_bits(mixed ^ key), bits)
    return bits


@triton.jit
def widened(half):  # type: ignore[no-untyped-def]
    """The bits of bf16 numbers, int16, as fp32 numbers."""
    return (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def rounded_randomly(x, bits):  # type: ignore[no-untyped-def]
    """`round_randomly`, as int16. `bits` are uint32."""
    exact = x.to(tl.int32, bitcast=True)
    moved = tl.where(x != x, exact | 0x400000, exact + (bits & 0xFFFF).to(tl.int32))
    return (moved >> 16).to(tl.int16)


@triton.jit
def joined(high, remainder):  # type: ignore[no-untyped-def]
    """`join`. `high` are bits, int16."""
    return ((high.to(tl.int32) << 16) + remainder.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def split_bits(x):  # type: ignore[no-untyped-def]
    """`split`, both as int16."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x != x, (bits | 0x400000) & -0x10000, bits)
    return ((bits + 0x8000) >> 16).to(tl.int16), bits.to(tl.int16)
