"""Sums of gradients of which each rank has computed a part, besides the sum over replicas.

Examples: norm weights under sequence parallelism (each tensor rank sees its part of the sequence), key and value heads
that several tensor ranks hold, the copies of a tied embedding on two pipeline stages. `Piece.partial` names the axes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megapar import comm
from megapar.context import Axis
from megapar.data_parallel.layout import FlatLayout, Range, intersect, merge
from megapar.params import Piece, flat_ranges

# Elements. A longer run is summed where it lies; shorter ones are copied into one message.
_LARGE = 1 << 18


@dataclass(frozen=True)
class _Aligned:
    """Runs of elements that lie at the same places on all ranks of `axis`, which hold the same boxes."""

    axis: Axis
    runs: Sequence[Range]

    def sum(self, grads: Tensor) -> None:
        small = [grads[start:stop] for start, stop in self.runs if stop - start < _LARGE]
        for start, stop in self.runs:
            if stop - start >= _LARGE:
                comm.all_reduce(grads[start:stop], self.axis)
        if small:
            packed = grads.new_empty(sum(part.numel() for part in small))
            places = packed.split([part.numel() for part in small])
            for place, part in zip(places, small, strict=True):
                place.copy_(part)
            comm.all_reduce(packed, self.axis)
            for place, part in zip(places, small, strict=True):
                part.copy_(place)


@dataclass(frozen=True)
class _Overlapping:
    """Boxes that differ from rank to rank and overlap, such as heads that two neighbors hold.

    Each rank lays the elements that it has reduced at their places in the whole tensors, zeros elsewhere. All ranks
    then add the same numbers in the same order, so their copies stay bitwise equal. `runs` are (place among all whole
    tensors, start, stop) of elements in this rank's shards; `numel` counts the elements of all whole tensors.
    """

    axis: Axis
    replicas: Axis
    sharded: bool
    runs: Sequence[tuple[int, int, int]]
    numel: int

    def sum(self, grads: Tensor) -> None:
        packed = grads.new_zeros(self.numel)
        for place, start, stop in self.runs:
            packed[place : place + stop - start] = grads[start:stop]
        comm.all_reduce(packed, self.axis)
        if self.sharded:  # another replica's shard may hold what a neighbor needs
            comm.all_reduce(packed, self.replicas)
        for place, start, stop in self.runs:
            grads[start:stop] = packed[place : place + stop - start]


PartialSum = _Aligned | _Overlapping


def partial_sums(layout: FlatLayout) -> list[PartialSum]:
    """The sums of a layout, in the same order on all ranks that take part in one."""
    axes = {axis.name: axis for slot in layout.slots for axis in slot.spec.partial_axes()}
    sums: list[PartialSum] = []
    for name in sorted(axes):
        sums += _aligned(layout, axes[name])
        sums += _overlapping(layout, axes[name])
    return sums


def _aligned(layout: FlatLayout, axis: Axis) -> list[PartialSum]:
    held = [
        (slot.start + first, slot.start + last)
        for slot in layout.slots
        if axis.name in slot.spec.replicated_over()
        for piece, first, last in slot.spec.segments()
        if piece.is_partial_over(axis.name)
    ]
    return [_Aligned(axis, intersect(merge(held), layout.shards()))] if held else []


def _overlapping(layout: FlatLayout, axis: Axis) -> list[PartialSum]:
    by_replicas: dict[str, tuple[Axis, list[tuple[Piece, int]]]] = {}
    for slot in layout.slots:
        if axis.name in slot.spec.replicated_over():
            continue
        for piece, first, _ in slot.spec.segments():
            if piece.is_partial_over(axis.name):
                _, pieces = by_replicas.setdefault(slot.spec.replicas.name, (slot.spec.replicas, []))
                pieces.append((piece, slot.start + first))
    sums: list[PartialSum] = []
    for name in sorted(by_replicas):
        replicas, pieces = by_replicas[name]
        runs: list[tuple[int, int, int]] = []
        numel = 0
        for piece, position in pieces:
            runs += _runs(piece, position, numel, layout.shards())
            numel += math.prod(piece.shape)
        sums.append(_Overlapping(axis, replicas, layout.sharded, runs, numel))
    return sums


def _runs(piece: Piece, position: int, base: int, shards: Sequence[Range]) -> list[tuple[int, int, int]]:
    """(place, start, stop) of the elements of a piece in this rank's shards.

    The piece lies in the buffers from `position` on, and the whole tensor among all of them from `base` on.
    """
    runs = []
    for first, last in flat_ranges(piece.shape, piece.held):
        length = last - first
        for start, stop in intersect([(position, position + length)], shards):
            runs.append((base + first + start - position, start, stop))
        position += length
    return runs
