"""Runs a share of many cases within a time, as .ci/run does: `--share 7/10 --minutes 40 -m slow`.

This plugin of pytest (`-p tests.support.share`) takes about a tenth of the cases that -m chooses, by a hash of their
names: each sweep gives some of its cases, ten shares give all, and a new case moves no other one into another share.
Cases that would begin after the time are skipped. The last lines count all.
"""

import time
import zlib
from collections import Counter
from typing import Any

import pytest

LATE = "the share's time is over"
COUNTS, UNTIL = pytest.StashKey[tuple[int, int]](), pytest.StashKey[float]()


def _of(text: str) -> tuple[int, int]:
    number, parts = (int(word) for word in text.split("/"))
    return number % parts, parts


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("share")
    group.addoption("--share", type=_of, required=True, metavar="K/N", help="run share K modulo N of N shares")
    group.addoption("--minutes", type=float, required=True, help="skip cases that would begin later")


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", {})
    config.stash[UNTIL] = worker.get("until", time.time() + config.getoption("minutes") * 60)
    config.stash[COUNTS] = (0, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give xdist's processes one time, from the start of all."""
    node.workerinput["until"] = node.config.stash[UNTIL]


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number, parts = config.getoption("share")
    chosen = {item.nodeid for item in items if zlib.crc32(item.nodeid.encode()) % parts == number}
    config.stash[COUNTS] = (len(items), len(chosen))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > item.config.stash[UNTIL]:
        pytest.skip(LATE)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["counts"] = session.config.stash[COUNTS]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take the counts from one of xdist's processes: all of them collect the same cases."""
    counts = getattr(node, "workeroutput", {}).get("counts")
    if counts:
        node.config.stash[COUNTS] = tuple(counts)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    cases, chosen = config.stash[COUNTS]
    stats = terminalreporter.stats
    skipped = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in stats.get("skipped", []))
    ran = len(stats.get("passed", [])) + len(stats.get("failed", []))
    number, parts = config.getoption("share")
    share = f"share {number} of {parts}: {cases} cases, {chosen} chosen, {ran} ran, {sum(skipped.values())} skipped"
    terminalreporter.write_line(share)
    for reason, cases in skipped.most_common():
        terminalreporter.write_line(f"  {cases} skipped: {reason}")
