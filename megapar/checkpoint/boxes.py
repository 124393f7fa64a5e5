"""Boxes of tensors: those of a flat range, of a parameter's logical tensors, and what two of them share."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from megapar.declare.params import ParamSpec, Piece, Sizes


class FlatBox(NamedTuple):
    """A box [offset, offset + size) of a tensor. Its elements lie in flat order from `position` on."""

    offset: Sizes
    size: Sizes
    position: int


def boxes(shape: Sizes, start: int, stop: int) -> Iterator[FlatBox]:
    """Cut the flat row-major range [start, stop) of a tensor into at most 2 * len(shape) - 1 boxes, in order."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield FlatBox((start,)[: len(shape)], (stop - start,)[: len(shape)], start)
        return
    row = math.prod(shape[1:])
    first_whole = -(-start // row)
    end_whole = stop // row

    def within(number: int, low: int, high: int) -> Iterator[FlatBox]:
        for box in boxes(shape[1:], low, high):
            yield FlatBox((number, *box.offset), (1, *box.size), number * row + box.position)

    if end_whole < first_whole:  # the range begins and ends inside one row
        yield from within(end_whole, start - end_whole * row, stop - end_whole * row)
        return
    if start < first_whole * row:
        yield from within(first_whole - 1, start - (first_whole - 1) * row, row)
    if first_whole < end_whole:
        whole = (end_whole - first_whole, *shape[1:])
        yield FlatBox((first_whole, *(0 for _ in shape[1:])), whole, first_whole * row)
    if end_whole * row < stop:
        yield from within(end_whole, 0, stop - end_whole * row)


def logical_boxes(spec: ParamSpec, start: int, stop: int) -> Iterator[tuple[Piece, FlatBox]]:
    """Cut the flat elements [start, stop) of the local parameter into boxes of its logical tensors.

    Offsets of the boxes count in the logical tensor, positions in the local parameter. Padding rows are in no box.
    """
    for piece, first, last in spec.segments():
        for box in boxes(piece.local_shape, max(start, first) - first, min(stop, last) - first):
            offset = tuple(held + inside for held, inside in zip(piece.held.offset, box.offset, strict=True))
            yield piece, FlatBox(offset, box.size, first + box.position)


def overlap(offset: Sizes, size: Sizes, other_offset: Sizes, other_size: Sizes) -> tuple[Sizes, Sizes] | None:
    """The (first, last + 1) corners of the overlap of two boxes, or None if they share nothing."""
    low = tuple(map(max, offset, other_offset))
    high = tuple(min(o + s, p + t) for o, s, p, t in zip(offset, size, other_offset, other_size, strict=True))
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return None
    return low, high
