"""Judge a checkpoint: perplexity of texts, and tasks of lm-evaluation-harness, in any layout.

    megapar judge CHECKPOINT --texts held_out.txt [--stride 512] [--parallel.tp 2 --launch.nproc 2 ...]
    megapar judge CHECKPOINT --tasks arc_easy hellaswag [--num_fewshot 5] [--output results.json]

Flags of pretrain.py choose the layout (parallel, kernels, launch) and train.seq_length, train.micro_batch_size and
train.precision. Everything else is the checkpoint's. train.seq_length is the longest context. By default it is that of
the model. docs/judging.md explains both.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tyro
from megapar_models.judging.judge import Judge
from megapar_models.judging.perplexity import perplexity
from megapar_models.judging.requests import Answer, answer_with, follow, leading
from megapar_models.judging.scorer import config_of
from megapar_tools.migrate.hints import hint
from megapar_tools.prepare.preprocess import Reading, read_documents
from megapar_tools.prepare.texts import TextOptions

from megapar.base.errors import ConfigError, DataError
from megapar.comm.flight import Board
from megapar.config.options import Config
from megapar.declare.context import ParallelContext
from megapar.launch.local import preload, start_local_ranks
from megapar.launch.rank_process import job
from megapar.launch.reporting import open_streams, reported
from megapar.system import environment
from megapar.system.atomic_files import finite, replacing
from megapar.system.environment import Environment
from megapar.system.say import say

HARNESS = "lm_eval==0.4.13"  # whose interface the tests compare with


@dataclass(frozen=True)
class Arguments(TextOptions):
    """Judge a checkpoint. All other flags are those of pretrain.py, such as --parallel.tp."""

    checkpoint: tyro.conf.Positional[Path]
    """Folder of one checkpoint, such as RUN_DIR/checkpoints/step_00000300."""
    texts: tuple[Path, ...] = ()
    """Files whose perplexity to compute: .txt is one document, .jsonl has one a line, as megapar preprocess reads."""
    stride: int = 0
    """Tokens by which the window moves over a document; 0: by its whole length, so nothing is computed twice."""
    text_field: str = "text"
    """Key of the text in lines of .jsonl; meta.text is the key text within meta."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness by name."""
    include_path: Path | None = None
    """A folder with tasks of your own, as YAML files of the harness."""
    num_fewshot: int | None = None
    """Examples in front of each question; by default what the task says."""
    limit: int | None = None
    """Look at the first so many questions of each task alone."""
    output: Path | None = None
    """File for the numbers as JSON. It appears when it is complete."""
    family: str = ""
    """The family of the model, if it is MODULE:NAME of your own: no module is imported because a file names it."""
    adapters_off: bool = False
    """Of a checkpoint of adapters: judge what it computes without them."""


def check(args: Arguments) -> None:
    """Raise ConfigError for arguments that nothing could be done with."""
    if not args.texts and not args.tasks:
        raise ConfigError("nothing to judge by: give --texts FILE ... or --tasks NAME ...")
    if args.tasks and find_spec("lm_eval") is None:
        raise ConfigError(f"--tasks needs the package lm_eval: pip install {HARNESS}")


def perplexities(args: Arguments, judge: Judge, first: bool) -> dict[str, Any]:
    """The perplexity of each file. All ranks read all of them, and rank 0 says it. A collective."""
    stride = args.stride or judge.longest
    if not 0 < stride <= judge.longest:
        raise ConfigError(f"--stride {args.stride}: must be from 1 to train.seq_length={judge.longest}, or 0")
    found = {}
    for path in args.texts:
        total = perplexity(judge, read_documents([path], Reading(text_field=args.text_field)), stride)
        if not total.tokens:
            raise DataError(f"{path}: no document has any text")
        if first:
            say(f"{path}: {total}")
        found[str(path)] = total.as_json() | {"context": judge.longest, "stride": stride}
    return found


def tasks(args: Arguments, judge: Judge, ctx: ParallelContext) -> dict[str, Any]:
    """What the harness finds on rank 0; nothing on the other ranks. A collective."""
    if not ctx.world.first:
        follow(answer_with(judge), ctx)
        return {}
    with leading(answer_with(judge), ctx) as ask:
        return run_harness(args, judge, ask)


def run_harness(args: Arguments, judge: Judge, ask: Answer) -> dict[str, Any]:
    """Run the harness's tasks, and print its table. Returns its results without what describes this machine."""
    import lm_eval
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table
    from megapar_models.judging.harness import NativeLM

    manager = TaskManager(include_path=str(args.include_path) if args.include_path else None)
    for name in args.tasks:
        if name not in manager.all_tasks:
            near = ", ".join(get_close_matches(name, manager.all_tasks)) or "lm-eval ls tasks lists all"
            raise ConfigError(f"--tasks {name}: no task of lm_eval {lm_eval.__version__} has this name; {near}")
    results = lm_eval.simple_evaluate(
        model=NativeLM(ask, judge.texts, judge.longest),
        tasks=list(args.tasks),
        task_manager=manager,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        log_samples=False,
    )
    say(make_table(results))
    if results.get("groups"):
        say(make_table(results, "groups"))
    wanted = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
    return {name: results[name] for name in wanted if name in results} | {"lm_eval": lm_eval.__version__}


def run(args: Arguments, config: Config, env: Environment, board: Board | None = None) -> None:
    """Judge on one rank. Rank 0 writes."""
    with job(config, env, board) as (ctx, _):
        judge = Judge(config, args.checkpoint, ctx, adapters_off=args.adapters_off, reading=args)
        for note in judge.texts.notes if ctx.world.first else ():
            print(note, file=sys.stderr)
        found: dict[str, Any] = {"checkpoint": str(args.checkpoint)}
        if args.texts:
            found["texts"] = perplexities(args, judge, ctx.world.first)
        if args.tasks:
            found["tasks"] = tasks(args, judge, ctx)
        if args.output and ctx.world.first:
            with replacing(args.output) as file:
                file.write((json.dumps(finite(found), indent=1, default=str, allow_nan=False) + "\n").encode())


def main(argv: Sequence[str] | None = None) -> int:
    open_streams()
    with reported():
        args, flags = tyro.cli(
            Arguments, args=argv, description=__doc__, use_underscores=True, return_unknown_args=True
        )
        check(args)
        env = environment.read()
        config = config_of(
            args.checkpoint, flags, env, hint, family=args.family, adapters_off=args.adapters_off, longest=True
        )
        world = config.launch.nproc
        if env.launched or world <= 1:
            run(args, config, env)
            return 0
        preload(config)
        return start_local_ranks(partial(run, args, config), world, config.run_dir)


if __name__ == "__main__":
    sys.exit(main())
