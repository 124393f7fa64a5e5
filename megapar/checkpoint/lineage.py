"""Lineage: it tells the checkpoints of a run's current branch from those of abandoned branches.

Each start of a run has a random id. A checkpoint's lineage lists the starts leading to it, each with the step it went
on from: [["a1b2c3d4", 0], ["0f0f0f0f", 200]]. A start that goes back to step 100, or begins anew, makes a branch. The
checkpoints not leading to this branch are then moved to the folder abandoned-<id of the start>. One branch is left, and
a resumption goes on from its newest step. Nothing is deleted.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megapar.base.errors import CheckpointError
from megapar.checkpoint.format import checkpoint_folders, open_manifest, step_of, sync_folder, write_latest
from megapar.system.atomic_files import replace_file
from megapar.system.regular_files import read_regular

Lineage = list[tuple[str, int]]

PLAN = ".abandoning"  # this file holds the new lineage while checkpoints are being moved


def new_id() -> str:
    """A random id for a start of a run."""
    return uuid.uuid4().hex[:8]


def lineage_of(trainer: Mapping[str, Any]) -> Lineage:
    """The lineage in a manifest's trainer section. It is empty for checkpoints older than lineages.

    Raises CheckpointError if it is not a list of (id, step).
    """
    entries = trainer.get("lineage", [])
    if not isinstance(entries, list):
        raise CheckpointError(f"trainer.lineage is {entries!r}, not a list")
    for entry in entries:
        # `type`, because True is an instance of int.
        if not (isinstance(entry, list) and [type(value) for value in entry] == [str, int]):
            raise CheckpointError(f"trainer.lineage holds {entry!r}, not an id and a step")
    return [(start, step) for start, step in entries]


def leads_to(step: int, older: Lineage, lineage: Lineage) -> bool:
    """Whether a checkpoint of `step` with the lineage `older` leads to `lineage`."""
    if older != lineage[: len(older)]:
        return False
    # The next start of `lineage` went on from some step. Checkpoints up to that step lead to it.
    following = lineage[len(older) :]
    return not following or step <= following[0][1]


def set_aside(root: Path, lineage: Lineage) -> list[str]:
    """Move the checkpoints not leading to `lineage`, the lineage of the run now starting, to another folder.

    Returns a line with their names, or no line if there are none.
    """
    abandoned = abandoned_by(root, lineage)
    if not abandoned:
        return []
    # The plan is on disk before the first checkpoint is moved. After a kill, the next start completes it.
    replace_file(root / PLAN, json.dumps({"lineage": lineage}).encode(), sync=True)
    sync_folder(root)
    complete_plan(root)
    names = ", ".join(path.name for path in reversed(abandoned))
    return [f"set aside, as they are of an abandoned branch: {names}, now in {_folder(root, lineage)}"]


def complete_plan(root: Path) -> None:
    """Move the checkpoints named by a plan on disk, if there is a plan, and then remove the plan."""
    plan = root / PLAN
    if not plan.exists():
        return
    lineage: Lineage = [(str(start), int(step)) for start, step in json.loads(read_regular(plan))["lineage"]]
    folder = _folder(root, lineage)
    for path in abandoned_by(root, lineage):
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)
    remaining = checkpoint_folders(root)
    write_latest(root, remaining[0].name if remaining else None)
    sync_folder(root)  # the moves must be on the disk before the plan goes
    plan.unlink()


def _folder(root: Path, lineage: Lineage) -> Path:
    return root / f"abandoned-{lineage[-1][0]}"


def abandoned_by(root: Path, lineage: Lineage) -> Sequence[Path]:
    """The checkpoints the run would replace, and those of another branch, newest first.

    A checkpoint with an unreadable manifest stays if its step is not later, because it may be mended.
    """
    step = lineage[-1][1]
    return [path for path in checkpoint_folders(root) if step_of(path) > step or not _leads_to(path, lineage)]


def _leads_to(path: Path, lineage: Lineage) -> bool:
    try:
        older = lineage_of(open_manifest(path).trainer)
    except CheckpointError:
        return True
    return leads_to(step_of(path), older, lineage)
