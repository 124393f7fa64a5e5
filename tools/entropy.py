"""Computes unigram and bigram entropies of held-out tokens, in nats per token. A trained model should be below them."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from megapar.data.entropy import cross_entropies
from megapar.data.indexed import IndexedDataset
from megapar.data.tokenizer import load_tokenizer
from megapar.errors import ConfigError, DataError
from megapar.launch.reporting import reported


@dataclass
class Arguments:
    """Compute the cross entropy of validation tokens under counts of training tokens and of their pairs
    (megapar/data/entropy.py)."""

    train: Path
    """Prefix of the .bin/.idx pair to count."""
    validation: Path
    """Prefix of the .bin/.idx pair to score."""
    tokenizer: str
    """The tokenizer that made both: bytes, spm:FILE, hf:FILE or tiktoken:FILE."""
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


def main() -> None:
    with reported():
        args = tyro.cli(Arguments, description=__doc__, use_underscores=True)
        if args.validation_tokens < 0:
            raise ConfigError(f"--validation_tokens {args.validation_tokens}: give 0 for all, or how many to score")
        vocab_size = load_tokenizer(args.tokenizer).vocab_size
        held_out = IndexedDataset(args.validation).tokens[: args.validation_tokens or None]
        entropies = cross_entropies(IndexedDataset(args.train).tokens, held_out, vocab_size)
        targets = len(held_out) - 1  # the first token has no predecessor to be predicted from
        print(f"unigram {entropies.unigram:.4f}, bigram {entropies.bigram:.4f} nats per token ({targets:,} targets)")
        if args.run_dir:
            loss = last_held_out_loss(args.run_dir)
            print(
                f"held-out loss {loss:.4f} nats per token: {entropies.unigram - loss:+.4f} below unigram, "
                f"{entropies.bigram - loss:+.4f} below bigram"
            )
        if args.json:
            args.json.write_text(json.dumps({**asdict(entropies), "targets": targets}) + "\n")


if __name__ == "__main__":
    main()
