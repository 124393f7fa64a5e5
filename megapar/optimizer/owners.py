"""Which rank updates which whole matrix, and which elements ranks send each other for it.

The parts of a matrix lie on the ranks of a plane: tp x grad, or etp x expert_grad for experts. Tensor ranks have other
rows or columns, and the ranks of the axis of gradients have other slices of these by ZeRO. All of it is arithmetic on
what ranks declare, so every rank of a plane comes to the same result.
"""

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megapar.comm.axis import Axis
from megapar.data_parallel.buckets import Range, intersect
from megapar.data_parallel.layout import FlatLayout, Update
from megapar.declare.params import Box, Piece, Sizes, flat_ranges


def cost(shape: Sizes) -> int:
    """The FLOPs of a step of Newton-Schulz for a matrix, of m x n with m <= n: 4 m^2 n + 2 m^3."""
    m, n = sorted(shape)
    return 4 * m * m * n + 2 * m**3


def owners(shapes: Mapping[str, Sizes], ranks: int) -> dict[str, int]:
    """The owner of each matrix among so many ranks. The costliest go first, each to the rank with the least so far."""
    loads = [(0, rank) for rank in range(ranks)]
    found = {}
    for name in sorted(shapes, key=lambda name: (-cost(shapes[name]), name)):
        load, rank = loads[0]
        found[name] = rank
        heapq.heapreplace(loads, (load + cost(shapes[name]), rank))
    return found


@dataclass(frozen=True)
class MatrixPart:
    """A tensor rank's part of the matrix `name`, as `Piece` has it. Its elements begin at `start` of their bucket.

    ZeRO cuts the bucket, of `bucket_numel` elements, into equal slices. The ranks of an axis of gradients have equal
    buckets of its parameters. Where a bucket lies in a rank's layout is that rank's own: the rank may have more experts
    before it than another one.
    """

    name: str
    shape: Sizes
    held: Box
    owned: Box | None
    start: int
    bucket_numel: int

    @classmethod
    def of(cls, piece: Piece, start: int, bucket_numel: int) -> "MatrixPart":
        return cls(piece.name, piece.shape, piece.held, piece.owned, start, bucket_numel)

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> "MatrixPart":
        """The part of the lists in `to_json`."""
        name, shape, held, owned, start, bucket_numel = fields
        box = None if owned is None else Box(*map(tuple, owned))
        return cls(name, tuple(shape), Box(*map(tuple, held)), box, start, bucket_numel)

    def to_json(self) -> list[Any]:
        return [self.name, self.shape, self.held, self.owned, self.start, self.bucket_numel]

    def owned_ranges(self) -> list[Range]:
        """The flat elements of the part that no other tensor rank sends."""
        if self.owned is None:
            return []
        inside = tuple(owned - held for owned, held in zip(self.owned.offset, self.held.offset, strict=True))
        return list(flat_ranges(self.held.size, Box(inside, self.owned.size)))


def parts_of(
    layout: FlatLayout, updates: Update, axis_name: str, *, by_block: bool = False
) -> list[tuple[MatrixPart, int]]:
    """The parts of matrices with this update, and with the gradient axis of this name, in the order of the layout.

    Beside each part is where its bucket begins in the layout. With `by_block` each block of a piece is a matrix
    (`Piece.blocks`).
    """
    found: list[tuple[MatrixPart, int]] = []
    for slot in layout.slots:
        if slot.update == updates and slot.spec.grad_axis.name == axis_name:
            bucket = layout.buckets[slot.bucket_index]
            for piece, start, _ in slot.spec.segments():
                part = MatrixPart.of(piece, slot.start + start - bucket.start, bucket.numel)
                parts = _blocks(part, piece.blocks) if by_block and piece.blocks else [part]
                found += [(each, bucket.start) for each in parts]
    return found


def _blocks(part: MatrixPart, rows: Sequence[int]) -> Iterator[MatrixPart]:
    """The parts of the blocks of a matrix. `rows` are those of each block, in turn."""
    height, width = part.shape
    first = 0
    for number, length in enumerate(itertools.cycle(rows)):
        if first >= height:
            return
        last = min(first + length, height)
        held = _of_rows(part.held, first, last)
        if held is not None:
            owned = None if part.owned is None else _of_rows(part.owned, first, last)
            # Rows of a part follow one another in memory, so the elements of a block do too.
            start = part.start + (first + held.offset[0] - part.held.offset[0]) * part.held.size[1]
            yield MatrixPart(f"{part.name}[{number}]", (last - first, width), held, owned, start, part.bucket_numel)
        first = last


def _of_rows(box: Box, first: int, last: int) -> Box | None:
    """The part of `box` in the rows [first, last) of its matrix, as a box of these rows. None if there is none."""
    start = max(box.offset[0], first)
    stop = min(box.offset[0] + box.size[0], last)
    if start >= stop:
        return None
    return Box((start - first, *box.offset[1:]), (stop - start, *box.size[1:]))


@dataclass(frozen=True)
class PlaneMember:
    """A rank of a plane: the parts of its tensor rank, and which slice of them it updates.

    It has slice `shard` of `shards`, and so do the ranks of other copies. Without ZeRO there is one slice, and each
    rank of the axis of gradients has a copy.
    """

    parts: Sequence[MatrixPart]
    shard: int
    shards: int
    copy: int

    @classmethod
    def at(cls, rank: int, axis: Axis, parts: Sequence[MatrixPart], *, sharded: bool) -> "PlaneMember":
        """The member at position `rank` of an axis of gradients."""
        shards = axis.shards.size if sharded else 1
        return cls(parts, rank % shards, shards, rank // shards)

    def slice(self, part: MatrixPart) -> Range:
        """The flat elements of `part` updated by this rank. Empty if its slice has none."""
        length = part.bucket_numel // self.shards
        first = self.shard * length - part.start
        return min(max(first, 0), part.held.numel), min(max(first + length, 0), part.held.numel)


class Fragment(NamedTuple):
    """Flat elements [start, stop) of a part."""

    part: MatrixPart
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Routes:
    """What the rank at `position` of a plane sends to owners and gets from them. `members` are all ranks of the plane.

    `mine` are the names of the matrices owned by this rank. `out[i]` are fragments of its own parts, sent to owner i.
    `gathered[i]` are fragments of its matrices that rank i sends. The way back is `returned[i]` to rank i, and
    `back[i]` from owner i.
    """

    def __init__(self, members: Sequence[PlaneMember], position: int):
        shapes = {part.name: part.shape for member in members for part in member.parts}
        self.owners = owners(shapes, len(members))
        self.shapes = {name: shapes[name] for name in sorted(shapes) if self.owners[name] == position}
        me = members[position]
        everywhere = range(len(members))
        self.out = [list(self._sent(me, members, owner)) for owner in everywhere]
        self.gathered = [list(self._sent(member, members, position)) for member in members]
        self.returned = [list(self._returned(member, position)) for member in members]
        self.back = [list(self._returned(me, owner)) for owner in everywhere]

    def _sent(self, member: PlaneMember, members: Sequence[PlaneMember], owner: int) -> Iterator[Fragment]:
        """What `member` sends to an owner: one copy of each element goes there, the one of the owner's own copies."""
        if member.copy == members[owner].copy:
            for part in member.parts:
                if self.owners[part.name] == owner:
                    for start, stop in intersect(part.owned_ranges(), [member.slice(part)]):
                        yield Fragment(part, start, stop)

    def _returned(self, member: PlaneMember, owner: int) -> Iterator[Fragment]:
        """What `member` gets from an owner: all that it updates, copies of others included."""
        for part in member.parts:
            start, stop = member.slice(part)
            if self.owners[part.name] == owner and start < stop:
                yield Fragment(part, start, stop)
