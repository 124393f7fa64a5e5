"""A run folder as JSON types, for a page: how the run is, its curves, and what else its files say."""

import base64
import math
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

from megapar.base.errors import DataError, MegaparError, reason_of
from megapar.observe.memory_report import ALL
from megapar.system.atomic_files import finite
from megapar.system.typed import Shape, read_bytes, read_json
from megapar_tools.dashboard import experts, words
from megapar_tools.dashboard.curves import Curves
from megapar_tools.dashboard.options import read_options
from megapar_tools.dashboard.status import MOST_OPTIONS, Options, Status, look, timed_events
from megapar_tools.trace import profile

ENTROPIES = "entropies.json"
_MOST_EVENTS = 400  # the newest ones
_ALL_STEPS = (0, 1 << 62)


class RunFolder:
    """A run folder that is looked at again and again."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = Lock()  # curves are read further by one request at a time
        self._curves = Curves(path / "metrics.jsonl")
        self._options = Options(path / "config.toml")
        self._details: tuple[float, dict[str, Any]] = (-math.inf, {})
        self._problems: list[str] = []  # of the files of the newest details
        self._profile: tuple[int, dict[str, Any]] = (0, {})  # what was made of the newest records, and their time

    def record(self, now: float, points: int, steps: tuple[int, int] | None = None) -> dict[str, Any]:
        """How the run is, with its curves in at most `points` points each, of the steps from `steps[0]` to `steps[1]`.

        Files that cannot be read become the text `error`. `now` is in seconds since 1970.
        """
        with self._lock:
            try:
                return self._record(now, points, steps)
            except Exception as error:  # one folder must not take down the page of all
                empty = Status(str(self.path), "no run")
                found: dict[str, Any] = {"name": self.path.name, "status": asdict(empty), "goodput": None}
                nothing: dict[str, Any] = {name: {} for name in ("curves", "words", "sums", "experts", "ranks")}
                return {**found, **nothing, "events": [], "error": _in_words(error)}

    def _record(self, now: float, points: int, steps: tuple[int, int] | None) -> dict[str, Any]:
        problems = list(self._problems)
        status = Status(str(self.path), "no run")
        past: list[dict[str, Any]] = []
        try:
            status = look(self.path, now, self._curves, self._options)
            past = timed_events(self.path)[-_MOST_EVENTS:]
            if self._curves.bytes_left_out:
                problems.append(f"metrics.jsonl is long: its first {self._curves.bytes_left_out:,} bytes are left out")
        except MegaparError as unread:
            problems.append(str(unread))
        first, last = steps or _ALL_STEPS
        curves = {name: curve for name, curve in self._curves.by_name.items() if not experts.is_layer(name)}
        ranks = {key: self._curves.newest.get(f"rank_{key}", []) for key in ("compute_seconds", "peak_memory_bytes")}
        record: dict[str, Any] = finite(
            {
                "name": self.path.resolve().name,
                "status": asdict(status),
                "goodput": status.goodput,
                "curves": {name: curve.thinned(first, last, points) for name, curve in curves.items()},
                "words": {name: words.name_metric(name) for name in curves},
                "sums": {name: curve.thinned(first, last, points) for name, curve in self._curves.sums.items()},
                "experts": self._experts(first, last),
                "events": [{**event, "text": words.tell_event(event)} for event in past],
                "ranks": ranks,
                "error": "; ".join(problems),
            }
        )
        return record

    def _experts(self, first: int, last: int) -> dict[str, Any]:
        """The load of a mixture's experts by layer and step, and that of each expert in the newest logged step."""
        newest = experts.tabulate_newest(self._curves.newest)
        newest = newest and {**newest, "step": self._curves.counted_step}
        return {"fullest": experts.tabulate_fullest(self._curves.by_name, first, last), "newest": newest}

    def details(self, age: float = 0.0) -> dict[str, Any]:
        """What else the folder says, at most `age` seconds ago. What is missing is empty.

        What cannot be read is empty too, and in the text `error` of the next records.
        """
        with self._lock:
            if time.monotonic() - self._details[0] > age:
                self._problems = []
                parts: dict[str, tuple[Callable[[], Any], Any]] = {
                    "options": (self._read_options, {}),
                    "entropies": (self._entropies, {}),
                    "environment": (self._environment, {}),
                    "ranks": (self._ranks, []),
                    "peak_memory_bytes": (self._memory, []),
                }
                found = {name: self._part(read, empty) for name, (read, empty) in parts.items()}
                self._details = time.monotonic(), {**found, **self._part(self._profiled, {})}
            return self._details[1]

    def _part(self, read: Callable[[], Any], empty: Any) -> Any:
        """What `read` returns; `empty` without its file. Any other failure becomes a problem."""
        try:
            return finite(read())
        except FileNotFoundError:
            return empty
        except Exception as error:  # one file must not take down the page of all runs
            self._problems.append(_in_words(error))
            return empty

    def _read_options(self) -> dict[str, tuple[str, str]]:
        # A link is refused: it could lead to a secret, and pages are passed on.
        found = read_bytes(self.path / "config.toml", MOST_OPTIONS, os.O_NOFOLLOW)
        return read_options(found.decode(errors="replace"))

    def _entropies(self) -> dict[str, float]:
        """The levels that `megapar entropy --json` has written into the folder."""
        found = read_json(self.path / ENTROPIES, {"unigram": float, "bigram": float}, flags=os.O_NOFOLLOW)
        return {name: found[name] for name in ("unigram", "bigram") if name in found}

    def _environment(self) -> dict[str, Any]:
        found: dict[str, Any] = read_json(self.path / "environment.json", dict, flags=os.O_NOFOLLOW)
        return found

    def _ranks(self) -> list[dict[str, Any]]:
        found = read_json(self.path / "ranks.json", {"ranks": [dict]}, flags=os.O_NOFOLLOW)
        return list(found.get("ranks", []))

    def _memory(self) -> list[float | None]:
        shape: Shape = {"bytes_by_rank": [{"measured": {ALL: float}}]}
        found = read_json(self.path / "memory.json", shape, flags=os.O_NOFOLLOW)
        return [rank.get("measured", {}).get(ALL) for rank in found.get("bytes_by_rank", [])]

    def _profiled(self) -> dict[str, Any]:
        """Where the time of the recorded steps went by rank, and a picture of the pipeline."""
        folder = self.path / "profile"
        changed = max((path.lstat().st_mtime_ns for path in folder.glob("*")), default=0)
        if changed != self._profile[0]:
            self._profile = changed, {}
            with suppress(DataError):  # a run that is about to write them
                self._profile = changed, _profiled(self.path)
        return self._profile[1]


def _profiled(run_dir: Path) -> dict[str, Any]:
    from megapar_tools.trace import timeline  # matplotlib: 0.3 s at the end of each run, and few runs record steps

    records = profile.read(run_dir)
    rows = [{"rank": of.rank, "parts": of.parts, "exposed": of.exposed} for of in profile.account(records)]
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "timeline.svg"
        timeline.draw(profile.events(records), picture, f"step {max(records[0].steps)}")
        return {"profile": rows, "timeline": base64.b64encode(picture.read_bytes()).decode()}


def _in_words(error: Exception) -> str:
    """The error in one line: what a file holds is not as expected."""
    if isinstance(error, MegaparError):
        return str(error)
    return f"{type(error).__name__}: {reason_of(error)}"
