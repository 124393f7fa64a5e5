"""Log-probabilities of texts by a trained model, or rewards by a reward model, in any layout.

    megapar score CHECKPOINT --input TEXTS.jsonl --output SCORES.jsonl [--parallel.tp 2 --launch.nproc 2 ...]
    megapar score CHECKPOINT --input PREFIX --output PREFIX.reference

The first writes a line for each text, in order: the sum of its tokens' log-probabilities, and each of them. The second
writes a column beside prepared tokens, such as the references of DPO. Tokens see what comes before them in their own
text; the first one, which may be a start token, has no probability. Flags of pretrain.py choose the layout (parallel,
kernels, launch) and train.seq_length, train.micro_batch_size and train.precision. Everything else is the checkpoint's.
A checkpoint of adapters is scored on its base (checkpoint.init_from), or with --adapters_off the base alone.

A reward model (model.head=score) writes a line for each text or prepared document: its reward, the score of its last
token. It is null for a text without tokens.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import tyro
from megapar_models.convert.saved import texts_of
from megapar_models.judging.scorer import Tokens, config_of, load_pipeline, rows_of, score_rows
from megapar_tools.migrate.hints import hint
from megapar_tools.prepare.preprocess import Reading, read_documents
from megapar_tools.prepare.texts import TextOptions
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from megapar.base.errors import storing
from megapar.checkpoint.format import read_manifest
from megapar.comm.flight import Board
from megapar.config.options import Config
from megapar.data.indexed import IndexedDataset
from megapar.data.scores import DTYPE, writing_scores
from megapar.launch.local import preload, start_local_ranks
from megapar.launch.rank_process import job
from megapar.launch.reporting import open_streams, reported
from megapar.system import environment
from megapar.system.atomic_files import as_json, replacing
from megapar.system.environment import Environment


@dataclass(frozen=True)
class Arguments(TextOptions):
    """Write log-probabilities or rewards of texts. All other flags are those of pretrain.py, such as --parallel.tp."""

    checkpoint: tyro.conf.Positional[Path]
    """Folder of one checkpoint, such as RUN_DIR/checkpoints/step_00000300."""
    input: Path
    """Texts (.jsonl and other files that megapar preprocess reads), or the prefix of a .bin/.idx pair."""
    output: Path
    """File to write. It appears when it is complete."""
    text_field: str = "text"
    """Key of the text in lines of .jsonl; meta.text is the key text within meta."""
    family: str = ""
    """The family of the model, if it is MODULE:NAME of your own: no module is imported because a file names it."""
    adapters_off: bool = False
    """Of a checkpoint of adapters: score what it computes without them, as the reference of DPO does."""

    @property
    def is_prepared(self) -> bool:
        return Path(f"{self.input}.idx").exists()


Write = Callable[[NDArray[np.float32]], None]
"""Writes the scores of the next document."""


@contextmanager
def writer(args: Arguments, config: Config) -> Iterator[Write]:
    """What writes the output on rank 0."""
    line = _line if config.model.head == "vocabulary" else _line_of_reward
    if args.is_prepared and line is _line:
        manifest = read_manifest(args.checkpoint)
        model = {"checkpoint": str(args.checkpoint), "step": manifest.step, "precision": config.train.precision}
        with writing_scores(args.output, IndexedDataset(args.input), model) as file:
            yield lambda scores: _write(args.output, file, scores.astype(DTYPE).tobytes())
        return
    with replacing(args.output) as file:
        yield lambda scores: _write(args.output, file, line(scores))


def _line(scores: NDArray[np.float32]) -> bytes:
    each = [float(score) for score in scores[1:]]
    line = {"log_prob": float(np.sum(scores, dtype=np.float64)), "tokens": len(each), "log_probs": each}
    return (as_json(line) + "\n").encode()


def _line_of_reward(scores: NDArray[np.float32]) -> bytes:
    line = {"reward": float(scores[-1]) if len(scores) else None, "tokens": len(scores)}
    return (as_json(line) + "\n").encode()


def _write(path: Path, file: object, data: bytes) -> None:
    with storing(path):
        file.write(data)  # type: ignore[attr-defined]


@contextmanager
def no_writer() -> Iterator[Write]:
    """Yield a function that writes nothing, for all ranks but the first."""
    yield lambda scores: None


def documents_of(args: Arguments, first: bool) -> Iterator[Tokens]:
    """Yield the tokens of each text. Every rank reads all of them, and the `first` says how."""
    if args.is_prepared:
        dataset = IndexedDataset(args.input)
        yield from (dataset.document(number) for number in range(len(dataset)))
        return
    texts = texts_of(args.checkpoint, args)
    for note in texts.notes if first else ():
        print(note, file=sys.stderr)
    for text in read_documents([args.input], Reading(text_field=args.text_field)):
        yield texts.encode(text)


def run(args: Arguments, config: Config, env: Environment, board: Board | None = None) -> None:
    """Score on one rank. Rank 0 writes."""
    with job(config, env, board) as (ctx, _):
        pipeline = load_pipeline(config, args.checkpoint, ctx, adapters_off=args.adapters_off)
        rows = rows_of(documents_of(args, ctx.world.first), config.train.seq_length, args.input)
        steps = iter(lambda: list(islice(rows, config.train.global_batch_size)), [])
        console = Console(stderr=True)
        count = 0
        with writer(args, config) if ctx.world.first else no_writer() as write:
            for step in track(steps, "scoring", console=console, disable=not ctx.world.first, transient=True):
                for scores in score_rows(step, config, ctx, pipeline):
                    write(scores)
                    count += 1
        if ctx.world.first:
            what = "log-probabilities" if config.model.head == "vocabulary" else "rewards"
            print(f"{args.output}: {what} of {count:,} texts")


def main() -> int:
    open_streams()
    with reported():
        args, flags = tyro.cli(Arguments, description=__doc__, use_underscores=True, return_unknown_args=True)
        env = environment.read()
        config = config_of(args.checkpoint, flags, env, hint, family=args.family, adapters_off=args.adapters_off)
        world = config.launch.nproc
        if env.launched or world <= 1:
            run(args, config, env)
            return 0
        preload(config)
        return start_local_ranks(partial(run, args, config), world, config.run_dir)


if __name__ == "__main__":
    sys.exit(main())
