"""The order of samples: a pure function of (seed, position). So the whole data state of a run is one integer.

Position p of a run is a sample of epoch p // n, of n samples. Inside an epoch a keyed permutation
shuffles range(n). Nothing is stored: there is no index to build, cache or share. Steps cut positions into global
batches, and ranks cut a global batch into micro-batches. So another dp, another micro-batch size or a restart moves
samples between ranks, never between steps.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ORDER_VERSION = "feistel-v1"  # names everything below that decides an order; a test freezes its values
_ROUNDS = 6  # of the Feistel network; part of what ORDER_VERSION names


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64-bit words with the finalizer of splitmix64 (Steele, Lea and Flood 2014), a bijection."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: NDArray[np.int64], n: int, key: Sequence[int]) -> NDArray[np.int64]:
    """The image of each element of `index` (1-D, below n) under a keyed permutation of range(n).

    `key` is a sequence of non-negative integers. The permutation is a Feistel network over pairs (left, right), both
    below ceil(sqrt(n)). A result outside range(n) goes through the network again until it falls inside (cycle walking,
    Black and Rogaway 2002).
    """
    # All arithmetic is on uint64 arrays. Mixed with Python's or signed integers, it would depend on numpy's version.
    side = np.uint64(math.isqrt(n - 1) + 1)
    keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)

    def network(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left = x // side
        right = x % side
        for round_key in keys:
            mixed = (left + mix64(right + round_key) % side) % side
            left = right
            right = mixed
        return left * side + right

    out = network(index.astype(np.uint64))
    # side^2 is little more than n, so few results are outside, and the loop is short.
    outside = np.flatnonzero(out >= np.uint64(n))
    while outside.size:
        out[outside] = network(out[outside])
        outside = outside[out[outside] >= np.uint64(n)]
    return out.astype(np.int64)


def sample_ids(positions: NDArray[np.int64], num_samples: int, seed: int) -> NDArray[np.int64]:
    """The sample at each of `positions` of the run, in range(num_samples). The shape stays.

    Each epoch holds every sample once.
    """
    epochs, offsets = np.divmod(positions.ravel(), num_samples)
    ids = np.empty_like(offsets)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        ids[inside] = permute(offsets[inside], num_samples, (seed, int(epoch)))
    return ids.reshape(positions.shape)


def micro_batch_positions(
    consumed_samples: int, global_batch_size: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> NDArray[np.int64]:
    """The positions [micro-batches, micro_batch_size] of one dp rank in the step after `consumed_samples`.

    The step is [consumed_samples, consumed_samples + global_batch_size). Its micro-batches are dealt in turns: rank i
    takes the i-th, then the (i + dp_size)-th, and so on. If they do not divide evenly, the last ranks have one fewer.
    """
    step = consumed_samples + np.arange(global_batch_size, dtype=np.int64)
    return step.reshape(-1, micro_batch_size)[dp_rank::dp_size]
