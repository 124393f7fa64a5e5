"""Deals query heads, and the key/value heads that they read, to tp ranks."""

import math
from dataclasses import dataclass

from megapar.comm.axis import Axis


@dataclass(frozen=True)
class Heads:
    """The query heads [q_start, q_stop) of a rank and the key/value heads [kv_start, kv_stop) that they read.

    Ranks share key/value heads if there are fewer of them than tp, or if the query heads of one lie on two ranks. The
    first rank with a key/value head owns it: [kv_own_start, kv_stop) are this rank's own. `shared` is the same on every
    rank: whether any two ranks share a head. `kv_heads` has the local key/value head of each local query head.
    `kv_unit` divides the first and the last key/value head + 1 of every rank.
    """

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int
    kv_own_start: int
    shared: bool
    kv_heads: tuple[int, ...]
    kv_unit: int


def _kv_range(rank: int, per_rank: int, group: int) -> tuple[int, int]:
    """The key/value heads [start, stop) of a rank with `per_rank` query heads, `group` query heads to one of them."""
    return rank * per_rank // group, ((rank + 1) * per_rank - 1) // group + 1


def deal_heads(num_heads: int, num_kv_heads: int, tp: Axis) -> Heads:
    """Deal the heads to tp ranks; returns this rank's. `num_heads` must be a multiple of tp and of `num_kv_heads`."""
    per_rank = num_heads // tp.size
    group = num_heads // num_kv_heads
    ranges = [_kv_range(rank, per_rank, group) for rank in range(tp.size)]
    start, stop = ranges[tp.rank]
    previous_stop = ranges[tp.rank - 1][1] if tp.rank else 0
    shared = sum(b - a for a, b in ranges) > num_kv_heads
    return Heads(
        tp.rank * per_rank,
        (tp.rank + 1) * per_rank,
        start,
        stop,
        min(stop, max(start, previous_stop)),
        shared,
        tuple(q // group - start for q in range(tp.rank * per_rank, (tp.rank + 1) * per_rank)),
        math.gcd(*(bound for of_rank in ranges for bound in of_rank)),
    )
