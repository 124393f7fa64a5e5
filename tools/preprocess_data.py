"""Turn text into tokens: .jsonl, .txt, .md and .py files, or folders of them, into a PREFIX.bin / PREFIX.idx pair."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megapar.data.preprocess import Summary, find_files, preprocess
from megapar.errors import reported


@dataclass
class Arguments:
    """Turn text into tokens, in parallel; the result does not depend on the number of workers."""

    input: tuple[Path, ...]
    """Files with one document a line ({"text": ...}, .jsonl) or one a file (.txt, .md, .py), or folders of them."""
    output: Path
    """Prefix of the .bin and .idx files to write."""
    tokenizer: str
    """bytes, or spm:FILE for a sentencepiece model."""
    workers: int = 1
    """Processes that tokenise."""
    append_eod: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """End each document with the tokenizer's end-of-document id."""


def main() -> None:
    args = tyro.cli(Arguments, description=__doc__, use_underscores=True)
    with reported():
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("starting", total=sum(path.stat().st_size for path in find_files(args.input)))

            def show(summary: Summary) -> None:
                speed = summary.num_bytes / 1e6 / max(progress.tasks[0].elapsed or 0.0, 1e-3)
                text = f"{summary.documents:,} documents  {summary.tokens:,} tokens  {speed:.1f} MB/s"
                progress.update(bar, completed=summary.num_bytes, description=text)

            summary = preprocess(
                args.input,
                args.output,
                args.tokenizer,
                workers=args.workers,
                append_eod=args.append_eod,
                on_progress=show,
            )
        left_out = f", {summary.empty:,} empty documents left out" if summary.empty else ""
        print(f"{args.output}.bin: {summary.documents:,} documents, {summary.tokens:,} tokens{left_out}")


if __name__ == "__main__":
    main()
