"""Reference losses: the cross entropy of held-out text under counts of single tokens and of pairs of tokens."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megapar.errors import DataError


@dataclass(frozen=True)
class Entropies:
    """Cross entropies of held-out tokens, in nats per token. A model with a higher loss has learned nothing."""

    unigram: float
    bigram: float


def cross_entropies(train: NDArray[np.integer], held_out: NDArray[np.integer], vocab_size: int) -> Entropies:
    """Score every token of `held_out` but the first, as a model would, by counts c of the N tokens of `train`.

    Unigram, add-one smoothed: p(t) = (c(t) + 1) / (N + vocab_size).
    Bigram, interpolated with the unigram as Witten and Bell (1991) do:
    p(t | u) = (c(ut) + d(u) p(t)) / (c(u) + d(u)). Here c(u) is the number of pairs (u, .), and d(u) is the number of
    different tokens after u. If c(u) is 0, p(t | u) = p(t).
    Both streams are 1-D. Pairs cross the ends of documents. Sorting the pairs takes seconds for 10 million tokens.
    Raises DataError if a stream has no pair or an id from `vocab_size` on.
    """
    if min(len(train), len(held_out)) < 2:
        raise DataError(f"entropies need two tokens a stream; train has {len(train)}, held-out text {len(held_out)}")
    largest = max(train.max(), held_out.max())
    if largest >= vocab_size:
        raise DataError(
            f"entropies: token id {largest} is outside the vocabulary of {vocab_size}: another tokenizer's file"
        )
    counts = np.bincount(train, minlength=vocab_size)
    unigram_p = (counts + 1) / (len(train) + vocab_size)

    # Only the pairs that occur are kept. A table of all pairs would hold vocab_size^2 counts.
    pairs, pair_counts = np.unique(_pairs(train, vocab_size), return_counts=True)
    begun = np.bincount(pairs // vocab_size, weights=pair_counts, minlength=vocab_size)
    followers = np.bincount(pairs // vocab_size, minlength=vocab_size)

    wanted = _pairs(held_out, vocab_size)
    at = np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)  # a pair above all others would index past the end
    seen = np.where(pairs[at] == wanted, pair_counts[at], 0)
    before = held_out[:-1]
    target_p = unigram_p[held_out[1:]]
    # Where no pair begins with u, all counts are 0. A weight of 1 then gives p(t) instead of 0 / 0.
    weight = np.where(begun[before] > 0, followers[before], 1)
    bigram_p = (seen + weight * target_p) / (begun[before] + weight)
    return Entropies(float(-np.log(target_p).mean()), float(-np.log(bigram_p).mean()))


def _pairs(tokens: NDArray[np.integer], vocab_size: int) -> NDArray[np.int64]:
    """Each token and the next as one number, first * vocab_size + second. int64 holds vocab_size^2."""
    return tokens[:-1].astype(np.int64) * vocab_size + tokens[1:]
