"""Which curve of a tracking service a start of a run goes on with. Its id is kept in tracking.json of the run folder.

A resumed run goes on with its curve, as long as the service has none of the steps to come. Steps that are computed
again would be drawn twice: services such as W&B and MLflow cannot remove them. So after a cut of metrics.jsonl, and
in a copy of a run folder, a new curve begins. It gets the lines of metrics.jsonl first.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megapar.base.errors import storing
from megapar.system.atomic_files import write_json
from megapar.system.regular_files import read_regular

FILE = "tracking.json"
_MOST_REPLAYED = 10_000  # lines of steps: a curve has no more points to show


def curve_of(run_dir: Path, lineage: Sequence[tuple[str, int]], *, cut: bool) -> tuple[str, bool]:
    """The id of the curve, and whether it is a new one that lacks the lines so far.

    `lineage` are the starts of the run (`megapar.checkpoint.lineage`). `cut`: steps after the resumed one were taken
    out of metrics.jsonl. Raises StorageError if the id cannot be kept.
    """
    path = run_dir / FILE
    root = lineage[0][0] if lineage else "start"
    folder = str(run_dir.resolve())
    kept = _read(path)
    if not cut and kept.get("root") == root and kept.get("folder") == folder and isinstance(kept.get("curve"), str):
        return kept["curve"], False
    curve = lineage[-1][0] if lineage else "start"
    write_json(path, {"curve": curve, "root": root, "folder": folder})
    return curve, len(lineage) > 1


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    with storing(path):
        try:
            kept = json.loads(read_regular(path))
        except (ValueError, RecursionError):
            return {}
    return kept if isinstance(kept, dict) else {}


def replayed(run_dir: Path, last_step: int) -> Iterator[dict[str, Any]]:
    """Yield the lines of metrics.jsonl up to `last_step`: all evaluations, and at most 10,000 steps, evenly."""
    path = run_dir / "metrics.jsonl"
    stride = max(1, -(-last_step // _MOST_REPLAYED))
    with open(path, "rb") as file:
        for text in file:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):  # a full disk may have cut it short
                continue
            step = line.get("step", last_step + 1) if isinstance(line, dict) else last_step + 1
            if step <= last_step and (step % stride == 0 or step == last_step or "loss" not in line):
                yield line
