"""The base of a run's adapters: the frozen weights, which the run's checkpoints do not hold.

A checkpoint names its base by a hash. A resumed run gets the base from where it got it at first: from the checkpoint of
checkpoint.init_from, or drawn by train.seed. Another base is refused, because the adapters would compute something
else on it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megapar.base.errors import CheckpointError
from megapar.checkpoint.load import verified_manifest
from megapar.config.compatible import saved_adapter
from megapar.config.options import Config
from megapar.declare.agreement import from_first, on_all_ranks
from megapar.declare.context import ParallelContext


def identity(config: Config, ctx: ParallelContext) -> dict[str, Any]:
    """What the manifest says of the base, as JSON types; empty in a run without adapters. A collective.

    Raises CheckpointError on every rank if checkpoint.init_from is not complete.
    """
    if not config.adapter.rank:
        return {}
    if config.checkpoint.init_from == "none":
        return {"seed": config.train.seed}
    manifest = verified_manifest(Path(config.checkpoint.init_from), ctx)
    # Rank 0 alone: of a large checkpoint, to read all entries takes seconds.
    digest = on_all_ranks(
        lambda: manifest.weights_digest() if ctx.world.first else "", ctx, CheckpointError, "base of adapters not read"
    )
    return {"weights": from_first(digest, ctx)}


def require_same(saved: object, now: dict[str, Any], path: Path, config: Config) -> None:
    """Raise CheckpointError on every rank unless the base of a checkpoint's adapters, `saved`, is that of the run."""
    if saved == now:
        return
    reason = (
        f"its adapters are of another base ({in_words(saved)}) than checkpoint.init_from={config.checkpoint.init_from} "
        f"({in_words(now)}): name the base that they were trained on"
    )
    if saved is None:
        reason = "it holds no adapters; start from its weights with --checkpoint.init_from in another --run_dir"
    problem = CheckpointError(f"{path} does not fit this run: {reason}")
    problem.everywhere = True
    raise problem


def require_same_products(saved: Mapping[str, Any], path: Path, config: Config) -> None:
    """Raise CheckpointError on every rank unless rank, s and dora of saved adapters are those of the run.

    `saved` are the flattened options of the checkpoint `path`.
    """
    then, now = saved_adapter(saved), config.adapter
    different = [
        f"{name} ({before:g} | {after:g})"
        for name, before, after in (
            ("adapter.rank", then.rank, now.rank),
            ("the scale s", then.scale, now.scale),
            ("adapter.dora", then.dora, now.dora),
        )
        if before != after
    ]
    if different:
        problem = CheckpointError(
            f"{path} does not fit this run (checkpoint | run): {', '.join(different)}: give adapter.rank, alpha, "
            "rslora and dora as they were"
        )
        problem.everywhere = True
        raise problem


def in_words(base: object) -> str:
    """A base in a message."""
    if isinstance(base, dict) and "weights" in base:
        return f"weights {str(base['weights'])[:12]}"
    if isinstance(base, dict) and "seed" in base:
        return f"drawn by train.seed {base['seed']}"
    return "none"
