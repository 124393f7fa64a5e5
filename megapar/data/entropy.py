"""What a loss is worth: how well single tokens and pairs of tokens, counted, predict the same held-out text."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megapar.errors import DataError


@dataclass(frozen=True)
class Entropies:
    """Cross entropy of held-out tokens in nats per token; a model that has learned anything stays below them."""

    unigram: float
    bigram: float


def cross_entropies(train: NDArray[np.integer], held_out: NDArray[np.integer], vocab_size: int) -> Entropies:
    """Score `held_out` by counts c of the N tokens of `train`: every token but the first, as a model would.

    Unigram, add-one smoothed: p(t) = (c(t) + 1) / (N + vocab_size).
    Bigram, interpolated with it as Witten and Bell (1991) do: p(t | u) = (c(ut) + d(u) p(t)) / (c(u) + d(u)), where
    c(u) counts the pairs that u begins and d(u) the different tokens that follow it; p(t) where u begins none.
    Both streams are 1-D and run on over the ends of documents. Sorts the pairs: seconds for 10 million tokens.
    Raises DataError if a stream has no pair or an id that is not below `vocab_size`.
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

    pairs, pair_counts = np.unique(_pairs(train, vocab_size), return_counts=True)
    begun = np.bincount(pairs // vocab_size, weights=pair_counts, minlength=vocab_size)
    followers = np.bincount(pairs // vocab_size, minlength=vocab_size)

    wanted = _pairs(held_out, vocab_size)
    at = np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)
    seen = np.where(pairs[at] == wanted, pair_counts[at], 0)
    before = held_out[:-1]
    target_p = unigram_p[held_out[1:]]
    weight = np.where(begun[before] > 0, followers[before], 1)
    bigram_p = (seen + weight * target_p) / (begun[before] + weight)
    return Entropies(float(-np.log(target_p).mean()), float(-np.log(bigram_p).mean()))


def _pairs(tokens: NDArray[np.integer], vocab_size: int) -> NDArray[np.int64]:
    """Each token and the next as one number, first * vocab_size + second."""
    return tokens[:-1].astype(np.int64) * vocab_size + tokens[1:]
