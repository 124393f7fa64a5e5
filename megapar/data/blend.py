"""The blend: the source of the sample at each position of a run.

It is a pure function of seed and position, as is the order inside a source.
Positions are cut into blocks of a thousand. A period is a thousand blocks. Weights are rounded to millionths, so a
period holds a whole number of samples of each source. Every block holds its share of a source, rounded up or down. So
do the first b blocks of a period together, for every b. Only the counts of one period are stored.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapar.data.order import permute

BLEND_VERSION = "blocks-v1"  # names everything below that decides an order; a test freezes its values
BLOCK = 1000  # samples in a block, and blocks in a period
PARTS = BLOCK * BLOCK  # samples in a period


def parts_of(weights: Sequence[float]) -> NDArray[np.int64]:
    """`weights` in millionths of their sum, int64. They sum to PARTS: the largest remainders are rounded up.

    A weight too small for a part gets 0.
    """
    shares = np.array(weights, np.float64) / sum(weights) * PARTS
    parts = np.floor(shares + 1e-6).astype(np.int64)  # 0.29 * 100 is 28.999999999999996 in floats
    largest = np.argsort(parts - shares, kind="stable")
    parts[largest[: PARTS - parts.sum()]] += 1
    return parts


def block_counts(parts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of samples of each source in each block of a period, [blocks, sources].

    Each block gets the whole part of a source's share. The remainders are dealt by PD2 (Anderson and Srinivasan 2000),
    and meet all deadlines: after b blocks, a source of weight w has had less than one sample more or less than
    1000 w b.
    """
    whole, rest = np.divmod(parts, BLOCK)
    counts = np.tile(whole, (BLOCK, 1))
    active = np.flatnonzero(rest)
    weight = rest[active]
    per_block = rest.sum() // BLOCK
    turn = np.ones_like(weight)  # the i-th extra sample of a source may come from block release on, before deadline
    for block in range(BLOCK if per_block else 0):
        release = (turn - 1) * BLOCK // weight
        deadline = -(-turn * BLOCK // weight)
        overlaps = turn * BLOCK % weight > 0
        # PD2's group deadline, for sources with a weight of 1/2 and more: the end of a run of overlapping windows of
        # length 2. It is ceil(ceil(deadline (1 - w)) / (1 - w)) with w = weight / BLOCK.
        slack = BLOCK - weight
        windows = -(-deadline * slack // BLOCK)
        cascade = np.where(2 * weight >= BLOCK, -(-windows * BLOCK // slack), 0)
        urgent = np.lexsort((-cascade, ~overlaps, deadline, release > block))[:per_block]
        counts[block, active[urgent]] += 1
        turn[urgent] += 1
    return counts


class BlendPhase(NamedTuple):
    """A weight for each source, from position `first` of the run on."""

    first: int
    weights: tuple[float, ...]


class _Period(NamedTuple):
    """A stage, and the counts of one of its periods."""

    first: int  # position of the stage
    taken: NDArray[np.int64]  # [sources] samples of the stages before
    counts: NDArray[np.int64]  # [blocks, sources]
    before: NDArray[np.int64]  # [blocks + 1, sources] exclusive sums of counts


class Blend:
    """The blend of a run, stage after stage. The first stage begins at position 0.

    In each stage, the sources go on where the stage before left them.
    """

    def __init__(self, stages: Sequence[BlendPhase], seed: int):
        self._seed = seed
        self._stages = list[_Period]()
        taken = np.zeros(len(stages[0].weights), np.int64)
        for first, weights in stages:
            if self._stages:
                taken = self.taken(first)
            counts = block_counts(parts_of(weights))
            before = np.concatenate([np.zeros_like(counts[:1]), counts.cumsum(axis=0)])
            self._stages.append(_Period(first, taken, counts, before))

    def taken(self, position: int) -> NDArray[np.int64]:
        """The number of samples of each source before `position`, [sources]."""
        number = self._stage(position)
        block, offset = divmod(position - self._stages[number].first, BLOCK)
        sources, _ = self._block(number, block)
        inside = np.bincount(sources[:offset], minlength=len(self._stages[number].taken))
        return self._before(number, block) + inside

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each of `positions` [n], and the number of earlier samples of the same source, [n]."""
        sources = np.empty_like(positions)
        turns = np.empty_like(positions)
        starts = np.array([stage.first for stage in self._stages])
        stages = np.searchsorted(starts, positions, "right") - 1
        blocks, offsets = np.divmod(positions - starts[stages], BLOCK)
        # A step lies in few blocks, and a block is the unit that `_block` computes.
        for number, block in sorted(set(zip(stages.tolist(), blocks.tolist(), strict=True))):
            here = (stages == number) & (blocks == block)
            block_sources, block_turns = self._block(number, block)
            sources[here] = block_sources[offsets[here]]
            turns[here] = (self._before(number, block)[block_sources] + block_turns)[offsets[here]]
        return sources, turns

    def _stage(self, position: int) -> int:
        """The number of the stage around `position`."""
        return sum(stage.first <= position for stage in self._stages) - 1

    def _before(self, number: int, block: int) -> NDArray[np.int64]:
        """The number of samples of each source before a block of stage `number`, [sources]."""
        stage = self._stages[number]
        periods, inside = divmod(block, BLOCK)
        return stage.taken + periods * stage.before[-1] + stage.before[inside]

    def _block(self, number: int, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each sample of a block, and how many of the same source precede it there."""
        counts = self._stages[number].counts[block % BLOCK]
        dealt = np.repeat(np.arange(len(counts)), counts)
        sources = dealt[permute(np.arange(BLOCK), BLOCK, (self._seed, number, block))]
        by_source = np.argsort(sources, kind="stable")  # stable: the samples of a source keep their order
        turns = np.empty_like(sources)
        turns[by_source] = np.arange(BLOCK) - (counts.cumsum() - counts)[dealt]
        return sources, turns
