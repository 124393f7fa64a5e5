"""Sums of partial gradients: each rank has computed only a part. They come in addition to the sum over replicas.

Examples are norm weights under sequence parallelism (each tensor rank sees its part of the sequence), key and value
heads held by several tensor ranks, and the copies of a tied embedding on two pipeline stages. `Piece.partial` names the
axes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.data_parallel.buckets import Range, intersect, merge
from megapar.data_parallel.layout import FlatLayout
from megapar.data_parallel.placement import Placement
from megapar.declare.params import Piece, flat_ranges

# In elements. A run of at least this length is summed where it lies. Shorter runs are copied into one message, because
# many small messages cost more than the copies.
_LARGE = 1 << 18


@dataclass(frozen=True)
class _Aligned:
    """Runs of elements at the same offsets on all ranks of `axis`, because these ranks hold the same boxes."""

    axis: Axis
    runs: Sequence[Range]

    def sum(self, grads: Tensor) -> None:
        """Sum the runs of `grads`, the flat gradients, in place."""
        small = [grads[start:stop] for start, stop in self.runs if stop - start < _LARGE]
        for start, stop in self.runs:
            if stop - start >= _LARGE:
                collectives.all_reduce(grads[start:stop], self.axis)
        if small:
            packed = grads.new_empty(sum(part.numel() for part in small))
            packed_parts = packed.split([part.numel() for part in small])
            for packed_part, part in zip(packed_parts, small, strict=True):
                packed_part.copy_(part)
            collectives.all_reduce(packed, self.axis)
            for packed_part, part in zip(packed_parts, small, strict=True):
                part.copy_(packed_part)


@dataclass(frozen=True)
class _Overlapping:
    """Boxes that differ from rank to rank and overlap, such as heads held by two neighbors.

    Each rank copies its reduced elements to their places in the whole tensors, with zeros elsewhere. All ranks then add
    the same numbers in the same order, so their copies stay bitwise equal. `runs` are (offset among all whole tensors,
    start, stop) of the elements in this rank's shards. `numel` counts the elements of all whole tensors.
    """

    axis: Axis
    grad_axis: Axis
    sharded: bool
    runs: Sequence[tuple[int, int, int]]
    numel: int

    def sum(self, grads: Tensor) -> None:
        """Sum the runs of `grads`, the flat gradients, in place."""
        packed = grads.new_zeros(self.numel)
        for offset, start, stop in self.runs:
            packed[offset : offset + stop - start] = grads[start:stop]
        collectives.all_reduce(packed, self.axis)
        # An element may be in the shard of one replica here, and of another replica on a neighbor.
        if self.sharded:
            collectives.all_reduce(packed, self.grad_axis.shards)
        for offset, start, stop in self.runs:
            grads[start:stop] = packed[offset : offset + stop - start]


PartialSum = _Aligned | _Overlapping


def partial_sums(layout: FlatLayout, placement: Placement) -> list[PartialSum]:
    """The sums needed by a layout, in a buffer of `placement`.

    All ranks taking part in a sum have it in the same order.
    """
    # Sorted by name: ranks that do not agree on the order of their collectives would wait for each other.
    axes = {axis.name: axis for slot in layout.slots for axis in slot.spec.partial_axes()}
    sums: list[PartialSum] = []
    for name in sorted(axes):
        sums += _aligned(layout, placement, axes[name])
        sums += _overlapping(layout, placement, axes[name])
    return sums


def _aligned(layout: FlatLayout, placement: Placement, axis: Axis) -> list[PartialSum]:
    """The sum of pieces held alike by every rank of `axis`, as a list of one sum or none."""
    held = []
    for slot in layout.slots:
        if axis.name not in slot.spec.same_over():
            continue
        for piece, first, last in slot.spec.segments():
            if piece.is_partial_over(axis.name):
                held.append((slot.start + first, slot.start + last))
    if not held:
        return []
    return [_Aligned(axis, placement.ranges_of(intersect(merge(held), layout.shards())))]


def _overlapping(layout: FlatLayout, placement: Placement, axis: Axis) -> list[PartialSum]:
    """The sums of pieces with boxes differing between ranks of `axis`, one for each axis of replicas."""
    by_replicas: dict[str, tuple[Axis, list[tuple[Piece, int]]]] = {}
    for slot in layout.slots:
        if axis.name in slot.spec.same_over():
            continue
        for piece, first, _ in slot.spec.segments():
            if piece.is_partial_over(axis.name):
                _, pieces = by_replicas.setdefault(slot.spec.grad_axis.name, (slot.spec.grad_axis, []))
                pieces.append((piece, slot.start + first))
    sums: list[PartialSum] = []
    for name in sorted(by_replicas):
        grad_axis, pieces = by_replicas[name]
        runs: list[tuple[int, int, int]] = []
        numel = 0
        for piece, position in pieces:
            runs += _runs(piece, position, numel, layout.shards(), placement)
            numel += math.prod(piece.shape)
        sums.append(_Overlapping(axis, grad_axis, layout.sharded, runs, numel))
    return sums


def _runs(
    piece: Piece, position: int, base: int, shards: Sequence[Range], placement: Placement
) -> list[tuple[int, int, int]]:
    """(offset, start, stop) of the elements of a piece in this rank's shards. `start` and `stop` are in the buffer.

    `position` is the piece's first element in the layout. `base` is the offset of its whole tensor among all of them.
    """
    runs = []
    for first, last in flat_ranges(piece.shape, piece.held):
        length = last - first
        for start, stop in intersect([(position, position + length)], shards):
            placed = placement.slice(start, stop)
            runs.append((base + first + start - position, placed.start, placed.stop))
        position += length
    return runs
