"""Cuts a flat buffer into buckets, and buckets into the shards of ranks.

A range is [start, stop) in elements. A list of ranges is sorted and disjoint.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Range = tuple[int, int]

ALIGNMENT = 64
"""In elements. Parameters and shards start at multiples of it.

Vectorized code handles the elements that do not fill a vector with scalar code, and scalar code rounds differently.
With this alignment only padding is left for the scalar code, so rounding does not depend on where the buffer is cut.
"""


class Bucket(NamedTuple):
    """Contiguous elements of the buffers, reduced in one collective.

    They are the elements [start, stop), padding included. The bucket holds the parameters [first_param, end_param), by
    position in the layout.
    """

    start: int
    stop: int
    first_param: int
    end_param: int

    @property
    def numel(self) -> int:
        """The number of elements, padding included."""
        return self.stop - self.start

    def shard(self, rank: int, size: int) -> Range:
        """The slice of position `rank` if the bucket is cut into `size` equal slices."""
        length = (self.stop - self.start) // size
        return self.start + rank * length, self.start + (rank + 1) * length


@dataclass(frozen=True)
class BucketGroup:
    """Parameters allowed to share buckets.

    `sizes` are their numbers of elements. Each bucket is cut into `shards` equal slices. With `whole`, no parameter may
    lie in two slices. Parameters and slices start at multiples of `alignment`, from the start of the bucket. It is a
    multiple of ALIGNMENT.
    """

    sizes: Sequence[int]
    shards: int
    whole: bool = False
    alignment: int = ALIGNMENT


def lay_out(groups: Sequence[BucketGroup], bucket_elements: int) -> tuple[list[int], list[Bucket]]:
    """Place parameters in buckets. Returns the offset of each parameter, in the given order, and the buckets.

    A bucket holds parameters of one group only. Parameters are added to it until it has `bucket_elements` elements or
    more. A group's last bucket may have fewer. Padding makes each bucket divide into equal, aligned slices.
    """
    starts: list[int] = []
    buckets: list[Bucket] = []
    end = 0
    for group in groups:
        open_from = 0  # position in the group of the first parameter of the open bucket
        filled = 0
        for position, size in enumerate(group.sizes):
            filled += _round_up(size, group.alignment)
            is_last = position == len(group.sizes) - 1
            if filled < bucket_elements and not is_last:
                continue
            sizes = group.sizes[open_from : position + 1]
            offsets_of = _offsets_of_whole if group.whole else _offsets
            offsets, length = offsets_of(sizes, group.shards, group.alignment)
            buckets.append(Bucket(end, end + length, len(starts), len(starts) + len(sizes)))
            starts += [end + offset for offset in offsets]
            end += length
            open_from = position + 1
            filled = 0
    return starts, buckets


def _offsets(sizes: Sequence[int], shards: int, alignment: int) -> tuple[list[int], int]:
    """Offset of each parameter in its bucket, and the bucket's length. Slices may cut parameters."""
    offsets = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += _round_up(size, alignment)
    return offsets, _round_up(end, alignment * shards)


def _offsets_of_whole(sizes: Sequence[int], shards: int, alignment: int) -> tuple[list[int], int]:
    """Return the offset of each parameter and the bucket's length, with no parameter in two slices.

    Slices are as short as the order of parameters allows.
    """
    padded = [_round_up(size, alignment) for size in sizes]
    # Binary search: the least slice length for which at most `shards` slices suffice.
    low = max(max(padded), _round_up(_divide_up(sum(padded), shards), alignment))
    high = sum(padded)
    while low < high:
        middle = (low + high) // 2 // alignment * alignment
        if _slices_needed(padded, middle) <= shards:
            high = middle
        else:
            low = middle + alignment
    slice_length = low
    offsets = []
    end = 0
    for size in padded:
        # A parameter that would cross into the next slice starts there.
        if end // slice_length != (end + size - 1) // slice_length:
            end = _round_up(end, slice_length)
        offsets.append(end)
        end += size
    return offsets, slice_length * shards


def _slices_needed(sizes: Sequence[int], length: int) -> int:
    """The number of slices of `length` elements needed for parameters of these sizes in order, none of them cut."""
    needed = 1
    filled = 0
    for size in sizes:
        if filled + size > length:
            needed += 1
            filled = 0
        filled += size
    return needed


def _divide_up(dividend: int, divisor: int) -> int:
    """dividend / divisor, rounded up."""
    return (dividend + divisor - 1) // divisor


def _round_up(size: int, multiple: int) -> int:
    """The least multiple of `multiple` not below `size`."""
    return _divide_up(size, multiple) * multiple


def merge(ranges: Iterable[Range]) -> list[Range]:
    """Join adjacent ranges. Returns the same elements in as few ranges as possible."""
    merged: list[Range] = []
    for start, stop in ranges:
        # Ranges come in ascending order, so only the last one can be adjacent.
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return merged


def intersect(left: Sequence[Range], right: Sequence[Range]) -> list[Range]:
    """The elements in both lists of ranges."""
    common = []
    i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        stop = min(left[i][1], right[j][1])
        if start < stop:
            common.append((start, stop))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common
