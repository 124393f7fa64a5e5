"""The positions of a sample on each context-parallel rank, and the positions they attend to. Without tensors.

A sample is cut into 2 cp chunks of equal length. Rank r holds the chunks r and 2 cp - 1 - r ("zigzag"; Llama 3, arXiv
2407.21783, section 3.3.2). Under a causal mask every rank then has the same number of pairs of a query and a key. If
each rank held one run of positions, the last rank would have nearly twice the mean, and all others would wait for it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

Ranges = Sequence[tuple[int, int]]
"""Ascending, disjoint ranges (start, stop) of positions. The local rows of a rank are these positions in order."""


def chunks(length: int, cp: int, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The two ranges of positions of `rank`, ascending. Raises ValueError unless 2 * cp divides the length."""
    if length % (2 * cp):
        raise ValueError(f"length {length} does not divide by 2 * cp {cp}")
    size = length // (2 * cp)
    second = 2 * cp - 1 - rank
    return (rank * size, (rank + 1) * size), (second * size, (second + 1) * size)


def positions(length: int, cp: int, rank: int) -> list[int]:
    """The positions of `rank`, ascending. A single rank holds all of them, also if the length is odd."""
    if cp == 1:
        return list(range(length))
    first, second = chunks(length, cp, rank)
    return [*range(*first), *range(*second)]


def holders(cp: int) -> list[tuple[int, int]]:
    """For each chunk of a sample in order: its rank, and 0 or 1 for the rank's first or second chunk.

    `order.whole_of` and `order.parts_of` use it to put the ranks' chunks into the order of positions, and back.
    """
    first_chunks = [(rank, 0) for rank in range(cp)]
    second_chunks = [(rank, 1) for rank in reversed(range(cp))]
    return first_chunks + second_chunks


class KeyBlock(NamedTuple):
    """Queries attending the same run of keys, in some samples. `queries` and `keys` are slices of local rows.

    If `causal`, only the last query attends all of the keys. The query before it attends all but the last key, and so
    on. Otherwise each query attends all of the keys.

    With `documents` it stands for several causal blocks of one sample, one after another in queries and in keys. These
    are their bounds among the rows of `queries` and of `keys`, from 0 on.
    """

    samples: slice
    queries: slice
    keys: slice
    causal: bool
    documents: tuple[tuple[int, ...], tuple[int, ...]] | None = None


def blocks(queries: Ranges, keys: Ranges, length: int, starts: Sequence[int] | None = None) -> list[KeyBlock]:
    """The blocks of queries at the positions `queries`, attending keys at the positions `keys`.

    A query attends the positions of its document up to its own. `starts` are the starts of documents as in
    `MicroBatch.starts`, for samples of `length` positions. With None each sample is one document.

    `keys` must hold the positions of all queries, or of none of them.
    """
    if starts is None:
        return _blocks_of_samples(slice(None), queries, keys, (0, length))
    found = []
    for sample, bounds in enumerate(documents(length, starts)):
        found += _blocks_of_samples(slice(sample, sample + 1), queries, keys, bounds)
    return found


def documents(length: int, starts: Sequence[int]) -> Iterator[list[int]]:
    """Yield the bounds of the documents of each sample: the positions of their starts, and then `length`."""
    # `starts` counts positions through all samples, and ends with their number.
    for first in range(0, starts[-1], length):
        starts_in_sample = starts[bisect_left(starts, first) : bisect_left(starts, first + length)]
        yield [start - first for start in starts_in_sample] + [length]


def _blocks_of_samples(samples: slice, queries: Ranges, keys: Ranges, bounds: Sequence[int]) -> list[KeyBlock]:
    """The blocks of `samples`. Each of their documents goes from one of the `bounds` to the next."""
    found: list[KeyBlock] = []
    for start, stop in queries:
        for document_start, document_stop in pairwise(bounds):
            # The queries of this range that are in this document.
            first = max(start, document_start)
            end = min(stop, document_stop)
            if first >= end:
                continue
            query_rows = slice(_held_before(queries, first), _held_before(queries, end))
            # The keys of the document up to the last query. They are a run of positions, so their rows are a run too.
            key_rows = slice(_held_before(keys, document_start), _held_before(keys, end))
            if key_rows.start == key_rows.stop:
                continue
            # The queries' own positions are among the keys. Otherwise all keys are earlier than all queries.
            causal = _held_before(keys, first) < key_rows.stop
            _append(found, KeyBlock(samples, query_rows, key_rows, causal))
    return found


def _held_before(ranges: Ranges, position: int) -> int:
    """The number of positions in `ranges` below `position`. It is also the local row of `position`."""
    return sum(min(max(position - start, 0), stop - start) for start, stop in ranges)


def _append(found: list[KeyBlock], block: KeyBlock) -> None:
    """Append `block`. If it continues the last block, make that one longer instead: fewer kernels run then."""
    if found and _continues(found[-1], block):
        found[-1] = block._replace(queries=slice(found[-1].queries.start, block.queries.stop))
    else:
        found.append(block)


def _continues(last: KeyBlock, block: KeyBlock) -> bool:
    """Whether one block with the queries of both and the keys of `block` means the same as both."""
    # In a causal block each query attends one key more than the one before it.
    more_keys = block.queries.stop - block.queries.start if block.causal else 0
    return (
        last.causal == block.causal
        and last.queries.stop == block.queries.start
        and last.keys.start == block.keys.start
        and last.keys.stop + more_keys == block.keys.stop
    )


def square(found: Sequence[KeyBlock]) -> list[KeyBlock]:
    """Return blocks for the same attention, with as many keys as queries in each causal block.

    A causal block with more keys is cut in two: its last keys, and then a non-causal block of its earlier keys.
    """
    parts = []
    for block in found:
        num_queries = block.queries.stop - block.queries.start
        earlier_keys = slice(block.keys.start, block.keys.stop - num_queries)
        if block.causal and earlier_keys.start < earlier_keys.stop:
            parts.append(block._replace(keys=slice(earlier_keys.stop, block.keys.stop)))
            parts.append(block._replace(keys=earlier_keys, causal=False))
        else:
            parts.append(block)
    return parts


def together(found: Sequence[KeyBlock]) -> list[KeyBlock]:
    """Join causal blocks of documents that follow one another into one block, for the same attention.

    The queries of a chunk are in one document after another, and so are their keys.
    """
    runs: list[list[KeyBlock]] = []
    for block in found:
        if runs and _follows(runs[-1][-1], block):
            runs[-1].append(block)
        else:
            runs.append([block])
    return [run[0] if len(run) == 1 else _one(run) for run in runs]


def _follows(last: KeyBlock, block: KeyBlock) -> bool:
    """Whether both are causal blocks of the same sample, and `block` begins where `last` ends."""
    sample = block.samples.start is not None and block.samples == last.samples
    causal = last.causal and block.causal
    return sample and causal and last.queries.stop == block.queries.start and last.keys.stop == block.keys.start


def _one(run: Sequence[KeyBlock]) -> KeyBlock:
    """The block that stands for those of `run`."""
    queries = slice(run[0].queries.start, run[-1].queries.stop)
    keys = slice(run[0].keys.start, run[-1].keys.stop)
    query_bounds = (0, *(block.queries.stop - queries.start for block in run))
    key_bounds = (0, *(block.keys.stop - keys.start for block in run))
    return KeyBlock(run[0].samples, queries, keys, True, (query_bounds, key_bounds))


def attended_pairs(length: int, cp: int, rank: int, starts: Sequence[int] | None = None) -> int:
    """The number of pairs of a query of `rank` and a key it attends.

    It is for all samples of `starts`. If `starts` is None, it is for one sample.
    """
    pairs = 0
    for block in blocks(chunks(length, cp, rank), [(0, length)], length, starts):
        num_queries = block.queries.stop - block.queries.start
        num_keys = block.keys.stop - block.keys.start
        pairs += num_queries * num_keys
        if block.causal:
            # The last query attends all keys, the one before it one less, and so on.
            pairs -= num_queries * (num_queries - 1) // 2
    return pairs


@dataclass(frozen=True)
class Ring:
    """How far the keys and values of each rank travel in a ring. Each rank sends to the next one.

    A rank n hops after `source` has the distance n from it. `attended_at[source]` are the distances of the other ranks
    with queries attending the keys of `source`, ascending. The keys travel to the farthest of these ranks. Their
    gradients start at the nearest of them, and travel on around the ring until they are back at `source`.
    """

    attended_at: tuple[tuple[int, ...], ...]

    def keys_arrive(self, source: int, distance: int) -> bool:
        """Whether the keys of `source` are sent to the rank at `distance` from it."""
        return any(other >= distance for other in self.attended_at[source])

    def gradients_leave(self, source: int, distance: int) -> bool:
        """Whether the rank at `distance` from `source` sends on gradients of the keys of `source`."""
        return any(other <= distance for other in self.attended_at[source])


def ring(length: int, cp: int, starts: Sequence[int] | None = None) -> Ring:
    """The ring of cp ranks for samples of `length` positions. `starts` are as for `blocks`."""
    size = length // (2 * cp)
    reach = _reach_of_chunks(length, size, starts)

    def attends(rank: int, source: int) -> bool:
        """Whether a query of `rank` attends a key of `source`, another rank."""
        for query_start, _ in chunks(length, cp, rank):
            for key_start, key_stop in chunks(length, cp, source):
                # A chunk of queries attends a chunk of keys before it if the document of the last key goes on there.
                if key_stop <= query_start < reach[key_start // size]:
                    return True
        return False

    attended_at = []
    for source in range(cp):
        distances = [distance for distance in range(1, cp) if attends((source + distance) % cp, source)]
        attended_at.append(tuple(distances))
    return Ring(tuple(attended_at))


def _reach_of_chunks(length: int, size: int, starts: Sequence[int] | None) -> list[int]:
    """For each chunk of `size` positions, the end of the document of its last position.

    With several samples it is the farthest of their ends.
    """
    num_chunks = length // size
    if starts is None:
        return [length] * num_chunks
    reach = [0] * num_chunks
    for bounds in documents(length, starts):
        for chunk in range(num_chunks):
            last_position = (chunk + 1) * size - 1
            reach[chunk] = max(reach[chunk], bounds[bisect_right(bounds, last_position)])
    return reach
