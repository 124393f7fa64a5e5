"""A run folder as JSON types, for a page: how the run is, its curves, and what else its files say."""

import base64
import json
import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megapar.dashboard.curves import Curves
from megapar.dashboard.status import Status, look, timed_events
from megapar.errors import MegaparError
from megapar.plan import profile
from megapar.system.regular_files import read_regular
from megapar.train.memory_report import ALL

_MOST_EVENTS = 400  # the newest ones
_ALL_STEPS = (0, 1 << 62)


class RunFolder:
    """A run folder that is looked at again and again."""

    def __init__(self, path: Path):
        self.path = path
        self._curves = Curves(path / "metrics.jsonl")
        self._profile: tuple[int, dict[str, Any]] = (0, {})  # what was made of the newest records, and their time

    def record(self, now: float, points: int, steps: tuple[int, int] | None = None) -> dict[str, Any]:
        """How the run is, with its curves in at most `points` points each, of the steps from `steps[0]` to `steps[1]`.

        Files that cannot be read become the text `error`. `now` is in seconds since 1970.
        """
        error = ""
        status = Status(str(self.path), "no run")
        try:
            status = look(self.path, now, self._curves)
            past = timed_events(self.path)[-_MOST_EVENTS:]
            if self._curves.bytes_left_out:
                error = f"metrics.jsonl is long: its first {self._curves.bytes_left_out:,} bytes are left out"
        except (MegaparError, OSError) as unread:
            error, past = str(unread), []
        first, last = steps or _ALL_STEPS
        ranks = {key: self._curves.newest.get(f"rank_{key}", []) for key in ("compute_seconds", "peak_memory_bytes")}
        return finite(
            {
                "name": self.path.resolve().name,
                "status": asdict(status),
                "goodput": status.goodput,
                "curves": {name: curve.thinned(first, last, points) for name, curve in self._curves.by_name.items()},
                "events": past,
                "ranks": ranks,
                "error": error,
            }
        )

    def details(self) -> dict[str, Any]:
        """What else the folder says. What is missing is empty."""
        members = _json(self.path / "ranks.json").get("ranks", [])
        memory = _json(self.path / "memory.json").get("bytes_by_rank", [])
        config = ""
        with suppress(OSError):
            config = _own(self.path / "config.toml").decode(errors="replace")
        return finite(
            {
                "config": config,
                "environment": _json(self.path / "environment.json"),
                "ranks": [member if isinstance(member, Mapping) else {} for member in members],
                "peak_memory_bytes": [rank["measured"][ALL] for rank in memory],
                **self._profiled(),
            }
        )

    def _profiled(self) -> dict[str, Any]:
        """Where the time of the recorded steps went by rank, and a picture of the pipeline."""
        folder = self.path / "profile"
        changed = max((path.stat().st_mtime_ns for path in folder.glob("*")), default=0)
        if changed != self._profile[0]:
            self._profile = changed, {}
            with suppress(MegaparError, OSError):  # a run that is about to write them
                self._profile = changed, _profiled(self.path)
        return self._profile[1]


def _profiled(run_dir: Path) -> dict[str, Any]:
    from megapar.plan import timeline  # matplotlib: 0.3 s at the end of each run, and few runs record steps

    records = profile.read(run_dir)
    rows = [{"rank": of.rank, "parts": of.parts, "exposed": of.exposed} for of in profile.account(records)]
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "timeline.svg"
        timeline.draw(profile.events(records), picture, f"step {max(records[0].steps)}")
        return {"profile": rows, "timeline": base64.b64encode(picture.read_bytes()).decode()}


def _own(path: Path) -> bytes:
    """The bytes of a file of the folder. A link is refused: it could lead to a secret, and pages are passed on."""
    return read_regular(path, flags=os.O_RDONLY | os.O_NOFOLLOW)


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        value = json.loads(_own(path))
        return value if isinstance(value, dict) else {}
    return {}


def finite(value: Any) -> Any:
    """The value with None for numbers that JSON has not: NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(part) for key, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list | tuple) else value
