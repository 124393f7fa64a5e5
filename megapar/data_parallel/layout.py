"""Where parameters lie in a flat buffer: pure arithmetic over element counts, and ranges of elements.

A range is [start, stop); a list of ranges is sorted and disjoint.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

Range = tuple[int, int]

ALIGNMENT = 64
"""Elements. Parameters and shards start at multiples of it, so that a vectorised optimizer has no scalar remainder
inside them: that rounds differently, and an element's update would depend on where the buffer happens to be cut."""


class Bucket(NamedTuple):
    """A run of the buffer that is reduced in one collective: elements [start, stop), padding included, and the
    positions [first, last) of its parameters."""

    start: int
    stop: int
    first: int
    last: int

    def shard(self, rank: int, size: int) -> Range:
        """The `rank`-th of `size` equal slices."""
        length = (self.stop - self.start) // size
        return self.start + rank * length, self.start + (rank + 1) * length


def lay_out(groups: Sequence[Sequence[int]], bucket_elements: int, shards: int) -> tuple[list[int], list[Bucket]]:
    """The first element of each parameter, in the order given, and the buckets.

    `groups` holds parameters' element counts; a bucket holds parameters of one group only, is closed when it has
    reached `bucket_elements`, and is padded so that `shards` equal, aligned slices make it up.
    """
    starts: list[int] = []
    buckets: list[Bucket] = []
    end = 0
    for counts in groups:
        bucket_start, first = end, len(starts)
        for position, count in enumerate(counts):
            starts.append(end)
            end += _round_up(count, ALIGNMENT)
            if end - bucket_start >= bucket_elements or position == len(counts) - 1:
                end = bucket_start + _round_up(end - bucket_start, ALIGNMENT * shards)
                buckets.append(Bucket(bucket_start, end, first, len(starts)))
                bucket_start, first = end, len(starts)
    return starts, buckets


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def merge(ranges: Iterable[Range]) -> list[Range]:
    """The same elements in as few ranges as possible."""
    merged: list[Range] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return merged


def intersect(left: Sequence[Range], right: Sequence[Range]) -> list[Range]:
    """The elements that are in both."""
    common = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            common.append((start, stop))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common
