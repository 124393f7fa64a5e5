"""Which checkpoints of a folder belong to the run as it is now, and what becomes of the others.

Each start of a run has a random id. A checkpoint's lineage lists the starts that led to it, each with the step that it
went on from: [["a1b2c3d4", 0], ["0f0f0f0f", 200]]. A start that goes back to step 100, or begins anew, makes a branch.
The checkpoints that are not on the way to it are then set aside, into abandoned-<id of the start>: what is left is one
branch, of which the newest step is the one to go on from. Nothing is deleted.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megapar.checkpoint.format import checkpoint_folders, open_manifest, step_of, sync_folder, write_latest
from megapar.errors import CheckpointError
from megapar.files import replace_file

Lineage = list[tuple[str, int]]

PLAN = ".abandoning"  # holds the lineage that checkpoints are set aside for, as long as that takes


def new_id() -> str:
    """A name for a start of a run."""
    return uuid.uuid4().hex[:8]


def lineage_of(trainer: Mapping[str, Any]) -> Lineage:
    """The lineage in a manifest's trainer section; empty for checkpoints that are older than lineages.

    Raises CheckpointError if it is not a list of (id, step).
    """
    entries = trainer.get("lineage", [])
    if not isinstance(entries, list):
        raise CheckpointError(f"trainer.lineage is {entries!r}, not a list")
    for entry in entries:
        if not (isinstance(entry, list) and [type(value) for value in entry] == [str, int]):
            raise CheckpointError(f"trainer.lineage holds {entry!r}, not an id and a step")
    return [(start, step) for start, step in entries]


def leads_to(step: int, older: Lineage, lineage: Lineage) -> bool:
    """Whether a checkpoint of `step` with the lineage `older` is on the way to `lineage`."""
    if older != lineage[: len(older)]:
        return False
    following = lineage[len(older) :]
    return not following or step <= following[0][1]


def set_aside(root: Path, lineage: Lineage) -> list[str]:
    """Move the checkpoints that are not on the way to `lineage`, that of the run which starts now, out of the way; a
    line that tells, if there are any.

    A plan is on disk before the first is moved, so that a start after a kill completes it (`complete_plan`).
    """
    abandoned = _abandoned(root, lineage)
    if not abandoned:
        return []
    replace_file(root / PLAN, json.dumps({"lineage": lineage}).encode(), sync=True)
    sync_folder(root)
    complete_plan(root)
    names = ", ".join(path.name for path in reversed(abandoned))
    return [f"set aside, as they are of an abandoned branch: {names}, now in {_folder(root, lineage)}"]


def complete_plan(root: Path) -> None:
    """Move what a plan on disk says, if there is one, then remove it."""
    plan = root / PLAN
    if not plan.exists():
        return
    lineage: Lineage = [(str(start), int(step)) for start, step in json.loads(plan.read_text())["lineage"]]
    folder = _folder(root, lineage)
    for path in _abandoned(root, lineage):
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)
    left = checkpoint_folders(root)
    write_latest(root, left[0].name if left else None)
    sync_folder(root)
    plan.unlink()


def _folder(root: Path, lineage: Lineage) -> Path:
    return root / f"abandoned-{lineage[-1][0]}"


def _abandoned(root: Path, lineage: Lineage) -> Sequence[Path]:
    """Checkpoints that the run would replace, or that belong to another branch, newest first.

    One whose manifest cannot be read stays if its step is not later: it may be mended.
    """
    step = lineage[-1][1]
    found = []
    for path in checkpoint_folders(root):
        if step_of(path) > step or not _leads_to(path, lineage):
            found.append(path)
    return found


def _leads_to(path: Path, lineage: Lineage) -> bool:
    try:
        older = lineage_of(open_manifest(path).trainer)
    except CheckpointError:
        return True
    return leads_to(step_of(path), older, lineage)
