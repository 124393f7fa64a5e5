"""Which positions of a sample each context-parallel rank holds, and which of them attend to which. Pure arithmetic.

A sample is cut into 2 cp chunks of equal length, and rank r holds the chunks r and 2 cp - 1 - r ("zigzag"). Under a
causal mask every rank then has the same number of pairs of a query and a key. With one chunk a rank, the last rank
would have nearly all of them twice (Llama 3, arXiv 2407.21783, section 3.3.2).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

Ranges = Sequence[tuple[int, int]]
"""Ascending, disjoint ranges (start, stop) of positions. A rank holds their positions in this order."""


def chunks(length: int, cp: int, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The two ranges of positions of `rank`. Raises ValueError unless the length divides by 2 cp."""
    if length % (2 * cp):
        raise ValueError(f"length {length} does not divide by 2 * cp {cp}")
    size = length // (2 * cp)
    late = 2 * cp - 1 - rank
    return (rank * size, (rank + 1) * size), (late * size, (late + 1) * size)


def positions(length: int, cp: int, rank: int) -> list[int]:
    """The positions of `rank`, ascending. A single rank holds all, whatever their number."""
    if cp == 1:
        return list(range(length))
    return [position for start, stop in chunks(length, cp, rank) for position in range(start, stop)]


def holders(cp: int) -> list[tuple[int, int]]:
    """For each chunk of a sample: the rank that holds it, and whether it is the rank's first chunk (0) or second (1).

    It gives the order of positions both ways: from the ranks' parts to the sample, and back.
    """
    return [(chunk, 0) for chunk in range(cp)] + [(chunk, 1) for chunk in reversed(range(cp))]


class Block(NamedTuple):
    """Queries of some samples that attend a run of keys, as slices of the local rows.

    They attend all of the keys. If `causal`, only the last query does, the one before it attends all but the last key,
    and so on.
    """

    samples: slice
    queries: slice
    keys: slice
    causal: bool


def blocks(queries: Ranges, keys: Ranges, length: int, starts: Sequence[int] | None = None) -> list[Block]:
    """The blocks in which queries at the positions `queries` attend keys at the positions `keys`.

    A query attends the positions of its document up to its own. `starts` are the starts of documents as in
    `MicroBatch.starts`, of samples of `length` positions. None means that each sample is one document. A query's own
    position is among `keys` for all queries or for none.
    """
    if starts is None:
        return _blocks_of_samples(slice(None), queries, keys, (0, length))
    found = []
    for sample, bounds in enumerate(documents(length, starts)):
        found += _blocks_of_samples(slice(sample, sample + 1), queries, keys, bounds)
    return found


def documents(length: int, starts: Sequence[int]) -> Iterator[list[int]]:
    """For each sample, the positions within it at which documents start, and `length` at the end."""
    for first in range(0, starts[-1], length):
        inner = starts[bisect_left(starts, first) : bisect_left(starts, first + length)]
        yield [start - first for start in inner] + [length]


def _blocks_of_samples(samples: slice, queries: Ranges, keys: Ranges, bounds: Sequence[int]) -> list[Block]:
    """The blocks of samples whose documents lie between neighboring `bounds`."""
    found: list[Block] = []
    for start, stop in queries:
        for document, end in pairwise(bounds):
            first = max(start, document)
            last = min(stop, end)
            if first >= last:
                continue
            rows = slice(_held_before(queries, first), _held_before(queries, last))
            # A document is a run of positions, so those of its keys that are held are a run of rows too.
            columns = slice(_held_before(keys, document), _held_before(keys, last))
            if columns.start == columns.stop:
                continue
            causal = _held_before(keys, first) < columns.stop
            _append(found, Block(samples, rows, columns, causal))
    return found


def _held_before(ranges: Ranges, position: int) -> int:
    """How many positions before `position` the ranges hold."""
    return sum(min(max(position - start, 0), stop - start) for start, stop in ranges)


def _append(found: list[Block], block: Block) -> None:
    """Append `block`, or make the last one longer if that means the same."""
    if found:
        last = found[-1]
        more_keys = block.queries.stop - block.queries.start if block.causal else 0
        continues = (
            last.causal == block.causal
            and last.queries.stop == block.queries.start
            and last.keys.start == block.keys.start
            and last.keys.stop + more_keys == block.keys.stop
        )
        if continues:
            found[-1] = block._replace(queries=slice(last.queries.start, block.queries.stop))
            return
    found.append(block)


def square(found: Sequence[Block]) -> list[Block]:
    """The same attention, where causal blocks have as many keys as queries. A full block of earlier keys follows."""
    parts = []
    for block in found:
        number = block.queries.stop - block.queries.start
        earlier = slice(block.keys.start, block.keys.stop - number)
        if block.causal and earlier.start < earlier.stop:
            parts.append(block._replace(keys=slice(earlier.stop, block.keys.stop)))
            parts.append(block._replace(keys=earlier, causal=False))
        else:
            parts.append(block)
    return parts


def attended_pairs(length: int, cp: int, rank: int, starts: Sequence[int] | None = None) -> int:
    """The pairs of a query of `rank` and a key that it attends, in one sample, or in all samples of `starts`."""
    pairs = 0
    for block in blocks(chunks(length, cp, rank), [(0, length)], length, starts):
        number = block.queries.stop - block.queries.start
        pairs += number * (block.keys.stop - block.keys.start)
        if block.causal:
            pairs -= number * (number - 1) // 2
    return pairs


@dataclass(frozen=True)
class Ring:
    """How far the keys and values of each rank travel in a ring, in which each rank sends to the next one.

    `attended_at[source]` are the distances from the rank `source`, ascending and above 0, of the ranks with queries
    that attend its keys. Keys travel to the farthest of them. Their gradients begin to travel at the nearest one, and
    go on until they are home again, after cp hops.
    """

    attended_at: tuple[tuple[int, ...], ...]

    def keys_arrive(self, source: int, distance: int) -> bool:
        """Whether the keys of `source` are sent to the rank at `distance` from it."""
        return any(other >= distance for other in self.attended_at[source])

    def gradients_leave(self, source: int, distance: int) -> bool:
        """Whether the gradients of the keys of `source` are sent on by the rank at `distance` from it."""
        return any(other <= distance for other in self.attended_at[source])


def ring(length: int, cp: int, starts: Sequence[int] | None = None) -> Ring:
    """The ring of cp ranks for samples of `length` positions. `starts` are as for `blocks`."""
    size = length // (2 * cp)
    # For each chunk: the end of the document of its last position, in the sample where it reaches farthest.
    ends = [length] * (2 * cp)
    if starts is not None:
        ends = [0] * (2 * cp)
        for bounds in documents(length, starts):
            for chunk in range(2 * cp):
                last = (chunk + 1) * size - 1
                ends[chunk] = max(ends[chunk], bounds[bisect_right(bounds, last)])

    def attends(rank: int, source: int) -> bool:
        return any(
            query[0] >= key[1] and query[0] < ends[key[0] // size]
            for query in chunks(length, cp, rank)
            for key in chunks(length, cp, source)
        )

    return Ring(
        tuple(
            tuple(distance for distance in range(1, cp) if attends((source + distance) % cp, source))
            for source in range(cp)
        )
    )
