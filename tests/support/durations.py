"""The seconds of each test file: `--keep-durations` writes tests/durations.json, by which the next run is ordered.

A test's CPU seconds are those of its process and of the processes that ended in it, such as ranks. Imports of test
files are not counted.
"""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

FILE = Path("tests/durations.json")  # in pytest's root folder
Seconds = Mapping[str, Mapping[str, float]]
"""The `wall` and `cpu` seconds of each test file, by its name without folder and ending."""


def pytest_addoption(parser: pytest.Parser) -> None:
    told = f"write the seconds of each file to {FILE}, by which the next run is ordered"
    parser.addoption("--keep-durations", action="store_true", help=told)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Clock(), "clock")
    if not hasattr(config, "workerinput"):  # xdist's processes have it: they report to the first one
        config.stash[SUMS] = Sums()
        config.pluginmanager.register(config.stash[SUMS], "sums")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.option.keep_durations and SUMS in session.config.stash:
        keep(session.config.stash[SUMS].files, session.config.rootpath / FILE)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its ended children, in user and in system mode."""
    return sum(os.times()[:4])


def file_of(nodeid: str) -> str:
    """Return the name of a test's file, without folder and ending."""
    return Path(nodeid.partition("::")[0]).stem


class Clock:
    """Notes in each report of a test the CPU seconds since the report before, as `cpu_seconds`."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._seconds = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        before, self._seconds = self._seconds, cpu_seconds()
        report.cpu_seconds = self._seconds - before  # xdist sends it to the process that reports
        return report


class Sums:
    """Adds up the seconds of each file's reports."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, float]] = defaultdict(lambda: {"wall": 0.0, "cpu": 0.0})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = self.files[file_of(report.nodeid)]
        seconds["wall"] += report.duration
        seconds["cpu"] += getattr(report, "cpu_seconds", 0.0)


SUMS = pytest.StashKey[Sums]()


def read(path: Path) -> dict[str, dict[str, float]]:
    """Return the seconds of the test files, as the last run to keep them wrote them; none if there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def keep(files: Seconds, path: Path) -> None:
    """Write the seconds of `files`, and beside them what `path` says of other test files that are still there.

    A line has one file, the longest comes first.
    """
    known = {**read(path), **files}
    there = [name for name in known if path.with_name(f"{name}.py").exists()]
    there.sort(key=lambda name: (-known[name]["wall"], name))
    lines = [
        f'  "{name}": {json.dumps({key: round(value, 1) for key, value in known[name].items()})}' for name in there
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def lanes(stats: Mapping[str, Iterable[Any]], files: Seconds, project: Collection[str]) -> dict[str, str]:
    """Return a line of results for each lane that ran: the cases of each outcome, and the seconds.

    `stats` has pytest's reports of each outcome, `project` the files of the project lane.
    """
    counts: dict[str, Counter[str]] = {"proof": Counter(), "project": Counter()}
    for outcome in ("failed", "error", "passed", "skipped", "xfailed", "xpassed"):
        for report in stats.get(outcome, ()):
            counts["project" if file_of(report.nodeid) in project else "proof"][outcome] += 1
    said = {}
    for lane, found in counts.items():
        if found:
            mine = [seconds for name, seconds in files.items() if (name in project) == (lane == "project")]
            cpu = sum(seconds["cpu"] for seconds in mine)
            said[lane] = ", ".join(f"{number} {outcome}" for outcome, number in found.items()) + f"; {cpu:.0f} s of CPU"
    return said
