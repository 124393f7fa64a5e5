"""Train a sentencepiece BPE tokenizer on documents. Runs name it as `spm:FILE`."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro
from megapar_tools.prepare.corpus import Reading
from megapar_tools.prepare.preprocess import read_documents

from megapar.base.errors import ConfigError
from megapar.data.tokenizer import train_sentencepiece
from megapar.launch.reporting import reported


@dataclass
class Arguments:
    """Train a lossless BPE tokenizer (byte fallback, nothing normalized); the same text gives the same file."""

    input: tuple[Path, ...]
    """Files or folders that megapar preprocess takes."""
    output: Path
    """Model file to write."""
    reading: tyro.conf.OmitArgPrefixes[tyro.conf.FlagCreatePairsOff[Reading]]
    vocab_size: int = 4096
    """Number of ids, with those of single bytes and of the end of a document."""
    sample_mb: float = 16.0
    """Megabytes of text to learn from, the first of the input; the input should come shuffled."""


def first_megabytes(documents: Iterator[str], megabytes: float) -> Iterator[str]:
    """Yield documents until they have this many megabytes. The last one is yielded whole."""
    left = megabytes * 1e6
    for text in documents:
        if left <= 0:
            return
        left -= len(text.encode())
        yield text


def main() -> None:
    with reported():
        args = tyro.cli(Arguments, description=__doc__, use_underscores=True)
        if args.sample_mb <= 0:
            raise ConfigError(f"--sample_mb {args.sample_mb}: give a positive number of megabytes")
        start = time.perf_counter()
        texts = first_megabytes(read_documents(args.input, args.reading), args.sample_mb)
        train_sentencepiece(texts, args.vocab_size, args.output)
        print(f"{args.output}: {args.vocab_size:,} ids in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
