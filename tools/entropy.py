"""Computes unigram and bigram entropies of held-out tokens, in nats per token. A trained model should be below them."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tyro
from numpy.typing import NDArray

from megapar.base.errors import ConfigError, DataError
from megapar.data.indexed import IndexedDataset
from megapar.data.tokenizer import fetch_tokenizer, load_tokenizer
from megapar.launch.reporting import reported
from megapar.system.atomic_files import write_json


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


@dataclass
class Arguments:
    """Compute the cross entropy of validation tokens under counts of training tokens and of their pairs."""

    train: Path
    """Prefix of the .bin/.idx pair to count."""
    validation: Path
    """Prefix of the .bin/.idx pair to score."""
    tokenizer: str
    """The tokenizer that made both, as in data.tokenizer."""
    validation_tokens: int = 0
    """Score this many tokens from the start: N samples of S tokens are N * S + 1. 0 scores all."""
    run_dir: Path | None = None
    """Also print how far the last held-out loss of this run is below the entropies."""
    json: Path | None = None
    """Also write the numbers to this file."""


def last_held_out_loss(run_dir: Path) -> float:
    """The newest validation loss in the run's metrics. Raises DataError if it has none."""
    metrics = run_dir / "metrics.jsonl"
    lines = []
    if metrics.is_file():
        lines = [json.loads(text) for text in metrics.read_text().splitlines()]
    losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
    if not losses:
        raise DataError(f"{metrics} has no validation_loss: train with data.validation")
    return losses[-1]


def beside(loss: float, entropy: float) -> str:
    return f"{abs(loss - entropy):.4f} {'below' if loss < entropy else 'above'}"


def main() -> None:
    with reported():
        args = tyro.cli(Arguments, description=__doc__, use_underscores=True)
        if args.validation_tokens < 0:
            raise ConfigError(f"--validation_tokens {args.validation_tokens}: give 0 for all, or how many to score")
        vocab_size = load_tokenizer(fetch_tokenizer(args.tokenizer)).vocab_size
        held_out = IndexedDataset(args.validation).tokens[: args.validation_tokens or None]
        entropies = cross_entropies(IndexedDataset(args.train).tokens[:], held_out, vocab_size)
        targets = len(held_out) - 1  # the first token has no predecessor to be predicted from
        print(f"unigram {entropies.unigram:.4f}, bigram {entropies.bigram:.4f} nats per token ({targets:,} targets)")
        if args.run_dir:
            loss = last_held_out_loss(args.run_dir)
            print(
                f"held-out loss {loss:.4f} nats per token: {beside(loss, entropies.unigram)} unigram, "
                f"{beside(loss, entropies.bigram)} bigram"
            )
        if args.json:
            write_json(args.json, {**asdict(entropies), "targets": targets})


if __name__ == "__main__":
    main()
