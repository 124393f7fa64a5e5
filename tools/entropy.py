"""Unigram and bigram entropies of held-out tokens, in nats per token: what a validation loss has to beat."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from megapar.data.entropy import cross_entropies
from megapar.data.indexed import IndexedDataset
from megapar.data.tokenizer import load_tokenizer
from megapar.errors import ConfigError, reported


@dataclass
class Arguments:
    """Cross entropy of validation tokens under counts of training tokens and of pairs (megapar/data/entropy.py)."""

    train: Path
    """Prefix of the .bin/.idx pair to count."""
    validation: Path
    """Prefix of the .bin/.idx pair to score."""
    tokenizer: str
    """The tokenizer that made both: bytes, or spm:FILE."""
    validation_tokens: int = 0
    """Score this many tokens from the start: N samples of S tokens are N * S + 1. 0 scores all."""
    json: Path | None = None
    """Also write the numbers to this file."""


def main() -> None:
    args = tyro.cli(Arguments, description=__doc__, use_underscores=True)
    with reported():
        if args.validation_tokens < 0:
            raise ConfigError(f"--validation_tokens {args.validation_tokens}: give 0 for all, or how many to score")
        vocab_size = load_tokenizer(args.tokenizer).vocab_size
        held_out = IndexedDataset(args.validation).tokens[: args.validation_tokens or None]
        entropies = cross_entropies(IndexedDataset(args.train).tokens, held_out, vocab_size)
        targets = len(held_out) - 1
        print(f"unigram {entropies.unigram:.4f}, bigram {entropies.bigram:.4f} nats per token ({targets:,} targets)")
        if args.json:
            args.json.write_text(json.dumps({**asdict(entropies), "targets": targets}) + "\n")


if __name__ == "__main__":
    main()
