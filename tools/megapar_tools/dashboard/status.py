"""How a run is, from the files of its folder alone."""

import os
import tomllib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from megapar.base.errors import DataError, reason_of
from megapar.system import events
from megapar.system.regular_files import read_regular
from megapar.system.typed import is_of
from megapar_tools.dashboard import words
from megapar_tools.dashboard.curves import Curves

MOST_OPTIONS = 1 << 18  # bytes of config.toml, ten times as many as of all options
LOCK = ".lock"  # a run holds the kernel's lock on it
_NEWEST = 20  # steps whose median is the speed
_STILL_SECONDS = 60.0
_STILL_STEPS = 10  # without a line for so many steps' time, a run stands still
_ENDS = ("exit", "fault")  # the events after which nothing runs, but for a restart
HEALTHY = ("at work", "starts", "done")


@dataclass
class Status:
    """How a run is. Seconds and bytes as in metrics.jsonl; None where the folder does not say."""

    run: str
    state: str
    """at work, starts, stands still, done, stopped, failed, gone (no end is on file, and nothing runs), no run"""
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    step_seconds: float | None = None
    """Median of the newest steps, from `speed_steps[0]` to `speed_steps[1]`. Both speeds below are of this time."""
    tokens_per_second: float | None = None
    mfu: float | None = None
    speed_steps: tuple[int, int] | None = None
    peak_memory_bytes: float | None = None
    seconds_left: float | None = None
    silent_seconds: float | None = None
    """Since the newest line of metrics.jsonl, or since the end of a run that is over."""
    saved_step: int | None = None
    failed_saves: int = 0
    """Saves to the run folder that have failed since the newest one that did not."""
    restarts: int = 0
    fault: str = ""
    """The newest one: its rank, host and message."""
    slow_ranks: list[int] = field(default_factory=list)
    wall_seconds: float = 0.0
    """From the first start to the end, or to now."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What the time from the first start went into: steps, data, saving, between starts, other. Steps and data are
    those whose result the run still has: steps lost to faults are in other."""

    @property
    def goodput(self) -> float | None:
        """The share of the time since the first start that went into steps whose result the run still has."""
        return self.seconds["steps"] / self.wall_seconds if self.seconds and self.wall_seconds > 0 else None


def is_locked(run_dir: Path) -> bool:
    """Whether a process of this host holds the run's lock. Looking takes no lock: a start would find it taken."""
    with suppress(OSError):
        file = os.stat(run_dir / LOCK)
        device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
        return any(device in line.split() for line in Path("/proc/locks").read_text().splitlines())
    return False


class Options:
    """The number of steps in a config.toml, which is parsed when the file has changed."""

    def __init__(self, path: Path):
        self.path = path
        self._seen: tuple[int, ...] = ()
        self._steps: int | None = None

    def steps(self) -> int | None:
        """train.steps; None if there is no file, or none that can be read."""
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        seen = found.st_ino, found.st_size, found.st_mtime_ns
        if seen != self._seen:
            self._seen, self._steps = seen, None
            with suppress(OSError, ValueError, RecursionError):
                train = tomllib.loads(read_regular(self.path, MOST_OPTIONS, os.O_RDONLY | os.O_NOFOLLOW).decode()).get(
                    "train"
                )
                steps = train.get("steps") if isinstance(train, dict) else None
                self._steps = steps if is_of(steps, int) else None
        return self._steps


def shown(text: object) -> str:
    """In one line, without what would steer a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text))


def timed_events(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of events.jsonl that have a time, oldest first. Raises DataError if the file cannot be read."""
    try:
        return [event for event in events.read(run_dir) if "time" in event]
    except OSError as error:
        raise DataError(f"{run_dir / events.FILE}: {reason_of(error)}") from error


def look(run_dir: Path, now: float, curves: Curves | None = None, options: Options | None = None) -> Status:
    """How the run of a folder is. `now` is in seconds since 1970.

    `curves` and `options` are those of an earlier look at this folder. Raises DataError if files of the folder cannot
    be read.
    """
    curves = curves or Curves(run_dir / "metrics.jsonl")
    curves.update()
    options = options or Options(run_dir / "config.toml")
    status = Status(str(run_dir), "no run", steps=options.steps())
    past = timed_events(run_dir)
    starts = [position for position, event in enumerate(past) if event["event"] == "start"]
    newest = max(curves.changed, past[starts[-1]]["time"] if starts else 0.0)
    if not newest:
        return status
    _add_metrics(status, curves)
    _add_events(status, past)
    since = past[starts[-1] :] if starts else []
    running = is_locked(run_dir)
    ended = None if running else _ended(since, curves)
    over = ended is not None and since[-1]["event"] in _ENDS
    status.silent_seconds = max(0.0, now - (since[-1]["time"] if over else newest))
    status.state = _state(status, since, running=running)
    if starts:
        status.wall_seconds = max(0.0, (now if ended is None else ended) - past[starts[0]]["time"])
        if not curves.bytes_left_out:  # else the sum of all steps is not known
            status.seconds = _seconds(curves, past, starts, status.wall_seconds)
    if status.steps and status.step_seconds and status.state == "at work":
        status.seconds_left = (status.steps - status.step) * status.step_seconds
    return status


def _add_metrics(status: Status, curves: Curves) -> None:
    def newest(name: str) -> float | None:
        return curves.by_name[name].values[-1] if name in curves.by_name else None

    if "loss" in curves.by_name:
        status.step = curves.by_name["loss"].steps[-1]
    _add_speed(status, curves)
    for name in ("loss", "validation_loss", "peak_memory_bytes"):
        setattr(status, name, newest(name))


def _add_speed(status: Status, curves: Curves) -> None:
    """Set the speeds of the newest steps, so that tokens a second x seconds a step are the tokens of a step."""
    if "step_seconds" not in curves.by_name:
        return
    timed = curves.by_name["step_seconds"]
    seconds = dict(zip(timed.steps[-_NEWEST:], timed.values[-_NEWEST:], strict=True))
    status.speed_steps = min(seconds), max(seconds)
    status.step_seconds = median(seconds.values())
    for name in ("tokens_per_second", "mfu"):
        curve = curves.by_name.get(name)
        rates = zip(curve.steps[-_NEWEST:], curve.values[-_NEWEST:], strict=True) if curve else ()
        of_steps = [rate * seconds[step] for step, rate in rates if step in seconds]
        if of_steps and status.step_seconds:
            setattr(status, name, median(of_steps) / status.step_seconds)


def _ended(since: Sequence[Mapping[str, Any]], curves: Curves) -> float | None:
    """When a run ended that runs no more, by what the folder says: a copy's files have other times.

    Without an event of the end, the run ended as many steps' time after its last event as it has steps after it.
    """
    if not since:
        return None
    last: float = since[-1]["time"]
    if since[-1]["event"] in (*_ENDS, "restart"):
        return last
    step = max((event["step"] for event in since if "step" in event), default=0)
    timed = curves.by_name.get("step_seconds")
    return last + (sum(timed.values[bisect_right(timed.steps, step) :]) if timed else 0.0)


def _add_events(status: Status, past: Sequence[Mapping[str, Any]]) -> None:
    for event in past:
        name = event["event"]
        status.restarts += name == "restart"
        if name == "saved":
            step = event.get("step")
            status.saved_step = step if type(step) is int else None  # a text could steer a terminal
            if event.get("tier") != "local":
                status.failed_saves = 0
        elif name == "save_failed":
            status.failed_saves += 1
        elif name == "fault":
            status.fault = shown(words.tell_fault(event))
        elif name == "straggler" and "rank" in event and event["rank"] not in status.slow_ranks:
            status.slow_ranks.append(event["rank"])


def _seconds(
    curves: Curves, past: Sequence[Mapping[str, Any]], starts: Sequence[int], wall_seconds: float
) -> dict[str, float]:
    saving = [event["seconds"] for event in past if event["event"] == "saved" and "seconds" in event]
    found = {
        "steps": curves.step_seconds - curves.data_seconds,
        "data": curves.data_seconds,
        "saving": sum(saving),
        "between starts": sum(max(0.0, past[start]["time"] - past[start - 1]["time"]) for start in starts if start),
    }
    return {**found, "other": max(0.0, wall_seconds - sum(found.values()))}


def _state(status: Status, since: Sequence[Mapping[str, Any]], *, running: bool) -> str:
    """The state, from the events since the last start."""
    assert status.silent_seconds is not None
    if running:
        patience = max(_STILL_SECONDS, _STILL_STEPS * (status.step_seconds or 0.0))
        if status.silent_seconds > patience:
            return "stands still"
        return "at work" if status.step else "starts"
    ends = [event for event in since if event["event"] in _ENDS]
    if not ends:
        return "gone"
    if ends[-1]["event"] == "fault":
        return "failed"
    return "done" if ends[-1].get("code") == 0 else "stopped"
