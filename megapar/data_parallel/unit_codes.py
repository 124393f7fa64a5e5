"""The FP8 codes of parameters that products read in blocks of 128 x 128: ZeRO-3 gathers them instead of weights.

Ranks send half the bytes of bf16, and get the codes that `quantize_blocks` makes of the gathered weights, bit for bit.
After each update a rank takes the largest magnitudes of its own elements by block. One reduction finds those of whole
blocks: 4 bytes for 16,384 weights. With them each rank makes the codes of its own elements. A largest element is the
same in any order, so the codes do not depend on where shards are cut.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from megapar_kernels.quantize import BIAS, GROUP, Quantized, encode, exponents_of
from torch import Tensor, nn

from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.data_parallel.buckets import Bucket
from megapar.data_parallel.layout import FlatLayout, Slot
from megapar.linear.converted_weight import ConvertedWeight


def kept_nbytes(layout: FlatLayout) -> int:
    """The bytes that a rank keeps between steps: the codes of its shards, and the exponents of all blocks."""
    kept = 0
    for bucket in layout.buckets:
        if layout.is_quantized(bucket):
            start, stop = layout.shard(bucket)
            slots = layout.slots[bucket.first_param : bucket.end_param]
            kept += stop - start + sum(math.prod(_blocks(slot.param)) for slot in slots)
    return kept


def _blocks(param: nn.Parameter) -> tuple[int, int]:
    """Rows and columns of the blocks of a matrix."""
    rows, columns = param.shape
    return rows // GROUP, columns // GROUP


@dataclass(frozen=True)
class _OwnPart:
    """This rank's elements of a matrix: consecutive pieces of 1 x 128, `weights` and `codes` [pieces, 128].

    They lie in the rows of blocks [first, stop). `skipped` pieces of the first of these rows lie on other ranks.
    `blocks` are all blocks of the matrix, among those of its axis.
    """

    weights: Tensor
    codes: Tensor
    blocks: slice
    width: int
    """Blocks in a row."""
    first: int
    stop: int
    skipped: int

    @classmethod
    def of(cls, slot: Slot, begin: int, weights: Tensor, codes: Tensor, blocks: slice) -> "_OwnPart":
        """The part of a slot that begins at its element `begin`. `weights` and `codes` are 1-D."""
        _, width = _blocks(slot.param)
        row = GROUP * width  # pieces in a row of blocks
        piece = begin // GROUP
        pieces = weights.view(-1, GROUP)
        first = piece // row
        stop = -(-(piece + len(pieces)) // row)
        return cls(pieces, codes.view(-1, GROUP), blocks, width, first, stop, piece - first * row)

    def note_largest(self, of_axis: Tensor) -> None:
        """Write the largest magnitudes of the elements into `of_axis`, fp32 [blocks]. Others' blocks stay zero."""
        pieces = of_axis.new_zeros((self.stop - self.first) * GROUP * self.width)
        pieces[self.skipped : self.skipped + len(self.weights)] = self.weights.abs().amax(-1)
        self._rows(of_axis).copy_(pieces.view(-1, GROUP, self.width).amax(1))

    def write_codes(self, largest: Tensor, exponents: Tensor) -> None:
        """Make the codes from the largest magnitudes and the exponents of all blocks of the axis."""
        self.codes.copy_(encode(self.weights, self._of_pieces(largest), self._of_pieces(exponents)))

    def _rows(self, of_axis: Tensor) -> Tensor:
        """What `of_axis` [blocks] has for the rows of blocks: [stop - first, width]."""
        return of_axis[self.blocks].view(-1, self.width)[self.first : self.stop]

    def _of_pieces(self, of_axis: Tensor) -> Tensor:
        """What `of_axis` [blocks] has for each piece: [pieces, 1]."""
        of_rows = self._rows(of_axis)[:, None].expand(-1, GROUP, -1).reshape(-1, 1)
        return of_rows[self.skipped : self.skipped + len(self.weights)]


class _OfAxis(NamedTuple):
    """What a reduction finds: the exponents of all blocks whose gradients are summed over an axis, and their use."""

    axis: Axis
    exponents: Tensor
    """uint8 [blocks]."""
    parts: Sequence[_OwnPart]

    def encode(self) -> None:
        """Make the exponents of all blocks and the codes of this rank's elements. A collective over the axis."""
        largest = torch.zeros(len(self.exponents), dtype=torch.float32, device=self.exponents.device)
        for part in self.parts:
            part.note_largest(largest)
        # A reduction may lose NaN. A block with infinity has codes of NaN too.
        largest.masked_fill_(largest.isnan(), math.inf)
        collectives.all_reduce(largest, self.axis, "max")
        exponents = exponents_of(largest)
        self.exponents.copy_(exponents + BIAS)
        for part in self.parts:
            part.write_codes(largest, exponents)


class UnitCodes:
    """The codes of this rank's shards, and those of whole units while they are gathered.

    `weights` are the weights of this rank's shard of each unit. Units of weights are left out.
    """

    def __init__(self, layout: FlatLayout, weights: Sequence[Tensor]):
        self._own: dict[int, Tensor] = {}  # of this rank's shards, uint8
        self._whole: dict[int, Tensor] = {}  # of whole units, uint8; without memory unless they are gathered
        self._values: dict[int, list[tuple[nn.Parameter, Quantized]]] = {}  # views of whole units
        self._layout = layout
        buckets = {unit: bucket for unit, bucket in enumerate(layout.buckets) if layout.is_quantized(bucket)}
        # Sorted, so that ranks start the reductions of several axes in the same order.
        axes = {layout.axis(bucket).name: layout.axis(bucket) for bucket in buckets.values()}
        self._axes: list[_OfAxis] = []
        for name in sorted(axes):
            units = [unit for unit, bucket in buckets.items() if layout.axis(bucket).name == name]
            slots = [slot for slot in layout.slots if slot.bucket_index in units]
            blocks = sum(math.prod(_blocks(slot.param)) for slot in slots)
            parts: list[_OwnPart] = []
            exponents = torch.zeros(blocks, dtype=torch.uint8, device=weights[units[0]].device)
            first = 0
            for unit in units:
                first = self._add(unit, buckets[unit], weights[unit], exponents, first, parts)
            self._axes.append(_OfAxis(axes[name], exponents, parts))

    def _add(
        self, unit: int, bucket: Bucket, weights: Tensor, exponents: Tensor, first: int, parts: list[_OwnPart]
    ) -> int:
        """Add a unit, whose blocks begin at `first` of its axis. Returns where the next unit's begin."""
        start, stop = self._layout.shard(bucket)
        # Zeros, because padding is sent too.
        own = self._own[unit] = torch.zeros(stop - start, dtype=torch.uint8, device=weights.device)
        whole = self._whole[unit] = torch.empty(bucket.numel, dtype=torch.uint8, device=weights.device)
        values = self._values[unit] = []
        for slot in self._layout.slots[bucket.first_param : bucket.end_param]:
            shape = _blocks(slot.param)
            blocks = slice(first, first + math.prod(shape))
            first = blocks.stop
            codes = whole[slot.start - bucket.start : slot.stop - bucket.start].view(slot.param.shape)
            found = Quantized(codes.view(torch.float8_e4m3fn), exponents[blocks].view(shape), (GROUP, GROUP))
            values.append((slot.param, found))
            begin, end = max(start, slot.start), min(stop, slot.stop)
            if begin < end:
                mine = slice(begin - start, end - start)
                parts.append(_OwnPart.of(slot, begin - slot.start, weights[mine], own[mine], blocks))
        whole.untyped_storage().resize_(0)
        return first

    def __contains__(self, unit: int) -> bool:
        return unit in self._whole

    @property
    def nbytes(self) -> int:
        """The bytes besides those of gathered units."""
        return sum(x.nbytes for x in (*self._own.values(), *(of_axis.exponents for of_axis in self._axes)))

    @torch.no_grad()
    def encode(self) -> None:
        """Make the codes of the weights of now. A collective over each axis that has some."""
        for of_axis in self._axes:
            of_axis.encode()

    def open(self, unit: int) -> Tensor:
        """Allocate the codes of a whole unit, uint8, and fill in those of this rank."""
        whole = self._whole[unit]
        whole.untyped_storage().resize_(whole.numel())
        bucket = self._layout.buckets[unit]
        start, stop = self._layout.shard(bucket)
        whole[start - bucket.start : stop - bucket.start].copy_(self._own[unit])
        return whole

    def show(self, unit: int) -> None:
        """Let products read the codes of a whole unit, once they are gathered, until `forget_converted`."""
        for param, values in self._values[unit]:
            ConvertedWeight.of(param).set(param, values)

    def close(self, unit: int) -> None:
        """Free the codes of a whole unit."""
        self._whole[unit].untyped_storage().resize_(0)
