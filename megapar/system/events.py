"""The events of a run, in events.jsonl of its folder: starts, checkpoints, faults, restarts, the end.

Each line is a JSON object with `time` (seconds since 1970) and `event`. docs/run-folder.md lists the events and their
fields. Rank 0 writes, the local launcher while no rank runs, and the process that reports an error.
"""

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from megapar.base.errors import reason_of
from megapar.system.atomic_files import as_json
from megapar.system.regular_files import SMALL, open_regular
from megapar.system.typed import Shape, mismatch

FILE = "events.jsonl"
_FIELDS: dict[str, Shape] = {
    "time": float,
    "event": str,
    **dict.fromkeys(
        ("job", "tier", "path", "class", "message", "host", "phase", "reason", "policy", "action", "matrix", "what"),
        str,
    ),
    **dict.fromkeys(("attempt", "step", "world", "steps_lost", "exit_code", "code", "rank"), int),
    **dict.fromkeys(("seconds", "loss", "grad_norm", "ratio", "free_bytes", "total_bytes", "first", "now"), float),
    "layout": dict,
    "others": [str],
}


def append(run_dir: Path, event: str, **fields: Any) -> None:
    """Append an event. A full disk loses the line, with a message, and not the run."""
    path = run_dir / FILE
    line = as_json({"time": time.time(), "event": event, **fields})
    try:
        descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
        try:
            os.write(descriptor, f"{line}\n".encode())  # in one call: the line of a killed process is whole or missing
        finally:
            os.close(descriptor)
    except OSError as error:
        text = "%s: event %s not written (%s); the run goes on"
        logging.getLogger(__name__).warning(text, path, event, reason_of(error))


def read(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the events, oldest first; of a file above 64 MiB, those in its last 64 MiB.

    Lines that are none are passed over: a full disk may have cut them short. So are those with a field of another type
    than ours. Raises OSError if the file cannot be read.
    """
    path = run_dir / FILE
    try:
        descriptor = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return
    with open(descriptor, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - SMALL))
        content = file.read(SMALL)
    for line in content.splitlines():
        with suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and "event" in event and not mismatch(event, _FIELDS):
                yield event


def past(run_dir: Path) -> list[dict[str, Any]]:
    """The events, oldest first. If the file cannot be read, a warning says so, and there are none."""
    try:
        return list(read(run_dir))
    except OSError as error:
        text = "%s cannot be read (%s): this start knows nothing of those before"
        logging.getLogger(__name__).warning(text, run_dir / FILE, reason_of(error))
        return []


def has_started(run_dir: Path, job: str, restart: int) -> bool:
    """Whether an earlier start of this job has come to its steps: then this one goes on from there."""
    if not job or not restart:
        return False
    starts = [event for event in past(run_dir) if event["event"] == "start"]
    return bool(starts) and starts[-1].get("job") == job


def steps_lost(run_dir: Path, step: int) -> int:
    """The steps completed before the last fault that a start after `step` steps computes again."""
    lost = 0
    for event in past(run_dir):
        if event["event"] == "start":
            lost = 0
        elif event["event"] == "fault" and "step" in event:
            lost = max(0, event["step"] - 1 - step)  # the fault was in a step that was not complete
    return lost
