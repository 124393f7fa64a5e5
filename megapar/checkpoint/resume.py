"""Which checkpoint a run goes on from: one answer for the run folder, memory and the disks of hosts."""

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from megapar.base.errors import CheckpointError
from megapar.checkpoint import by_host
from megapar.checkpoint.format import (
    MANIFEST,
    Check,
    ForeignCheckpointError,
    Manifest,
    checkpoint_folders,
    find_complete,
    folder_name,
    is_complete,
    step_of,
)
from megapar.checkpoint.tiers import Tier
from megapar.config.messages import counted
from megapar.declare.agreement import from_first, on_all_ranks
from megapar.declare.context import ParallelContext

_MOST_NEARBY = 5  # checkpoints that a message names


def choose(
    resume: str, root: Path, ctx: ParallelContext, check: Check | None = None, faster: Sequence[Tier] = ()
) -> Path | None:
    """Return the checkpoint that a run goes on from, the same on every rank. A collective over `ctx.world`.

    `resume` is checkpoint.resume: none, auto or the path of a folder. none gives None. auto gives the newest complete
    checkpoint in `root` or in the tiers `faster` that passes `check`, or None if there is no checkpoint, complete or
    not. Of several of one step it gives the one in the first of `faster`; on disks of hosts only a later step counts.
    Raises CheckpointError on every rank in three cases: no folder has a complete checkpoint, but `root` has others; the
    newest is of a later version; the path is not a checkpoint's.
    """

    def pick() -> str | None:
        if not ctx.world.first or resume == "none":
            return None
        if resume == "auto":
            return _newest(root, check, [tier.root for tier in faster if not tier.disks])
        return _named(Path(resume), root)

    # Rank 0 alone looks, so that all ranks go on from the same checkpoint.
    picked_by_first = on_all_ranks(pick, ctx, CheckpointError, f"--checkpoint.resume {resume}")
    picked = from_first(picked_by_first, ctx)
    path = None if picked is None else Path(picked)
    for tier in faster:
        if tier.disks and resume == "auto":
            found = by_host.newest(tier.root, ctx, tier.disks, check or _take_any)
            if found and (path is None or found[0] > step_of(path)):
                path = tier.root / folder_name(found[0])
    return path


def _take_any(_: Manifest) -> None:
    """Refuse no checkpoint."""


def _newest(root: Path, check: Check | None, faster: Sequence[Path]) -> str | None:
    """Return the newest complete checkpoint of all folders, or None if `root` has none. Raises CheckpointError."""
    try:
        found = [path for folder in (*faster, root) for path in islice(find_complete(folder, check), 1)]
    except ForeignCheckpointError as error:
        # If it were passed over, this run would replace it by its own checkpoint of the same step.
        raise CheckpointError(
            f"{error}; read it with the version that wrote it, or name another checkpoint with --checkpoint.resume: "
            "later ones are then set aside"
        ) from None
    if found:
        return str(max(found, key=step_of))  # of equal steps the first
    folders = checkpoint_folders(root)
    if folders:
        # A run that lost its state must not start over without being asked to.
        raise CheckpointError(
            f"{root}: none of {counted(len(folders), 'checkpoint')} is complete; --checkpoint.resume none starts afresh"
        )
    return None


def _named(path: Path, root: Path) -> str:
    """Return the path if it looks like a checkpoint's folder.

    Raises CheckpointError otherwise, with the names of checkpoints nearby.
    """
    if os.path.lexists(path / MANIFEST):
        return str(path)
    # The path may be a folder of checkpoints, a run folder, or a checkpoint's path with a wrong step.
    nearby: list[Path] = []
    for folder in (path, path / root.name, path.parent, root):
        nearby = _complete(folder)
        if nearby:
            break
    names = f"{root} holds none either"
    if nearby:
        names = f"checkpoints: {', '.join(map(str, nearby[:_MOST_NEARBY]))}"
    raise CheckpointError(f"{path}: incomplete or no checkpoint: it has no {MANIFEST}; {names}")


def _complete(root: Path) -> list[Path]:
    """Return the checkpoints in `root` with all their files, newest first."""
    return [folder for folder in checkpoint_folders(root) if is_complete(folder)]
