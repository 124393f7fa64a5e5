"""tools/status.py: how a run is, from its files alone."""

import fcntl
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from megapar_tools.dashboard.status import look

from megapar.base.errors import DataError
from tests.support import program
from tools import status

START = 1_000_000.0


def lines_of(steps: int, seconds: float = 2.0) -> list[dict[str, Any]]:
    return [
        {"step": step, "loss": 5.0 - step / 10, "step_seconds": seconds, "tokens_per_second": 100.0}
        for step in range(1, steps + 1)
    ]


def write(folder: Path, metrics: list[dict[str, Any]], events: list[dict[str, Any]], age: float, cut: str = "") -> None:
    """A run folder with 10 steps whose newest line was written `age` seconds before START + 100."""
    (folder / "config.toml").write_text("[train]\nsteps = 10\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics) + cut)
    os.utime(folder / "metrics.jsonl", (START + 100 - age,) * 2)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def event(name: str, after: float, **fields: Any) -> dict[str, Any]:
    return {"time": START + after, "event": name, **fields}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


FAULT = event("fault", 40, rank=1, host="node-\x1b[31mb", step=9, **{"class": "CommunicationError"}, message="gone\nx")


def test_a_run_at_work_says_when_it_ends(tmp_path: Path) -> None:
    write(tmp_path, lines_of(6), [event("start", 0)], 1, cut='{"step": 7, "lo')
    with locked(tmp_path):
        found = look(tmp_path, START + 100)
    assert (found.state, found.step, found.steps) == ("at work", 6, 10)
    assert (found.step_seconds, found.seconds_left, found.silent_seconds) == (2.0, 8.0, 1.0)
    assert found.goodput == pytest.approx(12 / 100)
    assert status.in_words(found)[0] == f"{tmp_path}: at work | step 6/10 | loss 4.4000"
    assert "  left      8.0 s" in status.in_words(found)


def test_steps_lost_to_faults_and_pauses_are_not_productive(tmp_path: Path) -> None:
    """By hand: 10 steps of 2 s in 50 s. Steps 7 and 8 were computed twice, and their first lines are cut off."""
    restarted = [FAULT, event("restart", 42, attempt=1), event("start", 44), event("saved", 49, step=10)]
    write(tmp_path, lines_of(10), [event("start", 0), *restarted, event("exit", 50, code=0)], 52)
    found = look(tmp_path, START + 1000)
    assert (found.state, found.restarts, found.saved_step, found.wall_seconds) == ("done", 1, 10, 50.0)
    assert found.goodput == pytest.approx(0.4)
    assert "  fault     rank 1 on node- [31mb, step 9: CommunicationError: gone x" in status.in_words(found)


def test_saves_that_failed_are_counted_since_the_newest(tmp_path: Path) -> None:
    """Fault save-fails-for-a-while: a checkpoint on a local disk does not mend the run folder."""
    failed = [event("save_failed", time, step=6, reason="no space") for time in (26, 30)]
    saved = event("saved", 20, step=4, tier="shared")
    local = event("saved", 31, step=8, tier="local")
    write(tmp_path, lines_of(8), [event("start", 0), failed[0], saved, *failed, local], 1)
    found = look(tmp_path, START + 100)
    assert (found.saved_step, found.failed_saves) == (8, 2)
    assert "  failed    2 saves, since the newest in the run folder" in status.in_words(found)


def test_the_speed_agrees_with_itself(tmp_path: Path) -> None:
    """The last step took four times as long: tokens a second are those of the median step, too."""
    lines = lines_of(30)
    lines[-1] |= {"step_seconds": 8.0, "tokens_per_second": 25.0}
    write(tmp_path, lines, [event("start", 0)], 1)
    found = look(tmp_path, START + 100)
    assert (found.step_seconds, found.tokens_per_second, found.speed_steps) == (2.0, 100.0, (11, 30))
    assert "  speed     2 s a step, 100 tokens/s (steps 11 to 30)" in status.in_words(found)


@pytest.mark.parametrize(("last", "seconds"), [([event("exit", 50, code=0)], 50.0), ([], 34.0)])
def test_a_copy_of_a_folder_has_the_goodput_of_the_run(
    last: list[dict[str, Any]], seconds: float, tmp_path: Path
) -> None:
    """By hand: 10 steps of 2 s. A killed run has no end on file: it ended 4 steps' time after it saved step 6."""
    write(tmp_path, lines_of(10), [event("start", 0), event("saved", 26, step=6), *last], -1e6)
    found = look(tmp_path, START + 2e6)
    assert (found.wall_seconds, found.goodput) == (seconds, pytest.approx(20 / seconds))


@pytest.mark.parametrize(
    ("events", "runs", "age", "state"),
    [
        ([], True, 1, "at work"),
        ([], True, 61, "stands still"),
        ([], False, 1, "gone"),
        ([FAULT], False, 1, "failed"),
        ([FAULT, event("restart", 41), event("start", 42)], True, 1, "at work"),
        ([event("exit", 50, code=75)], False, 1, "stopped"),
        ([event("exit", 50, code=0)], False, 500, "done"),
    ],
)
def test_each_state_is_told(events: list[dict[str, Any]], runs: bool, age: float, state: str, tmp_path: Path) -> None:
    write(tmp_path, lines_of(5), [event("start", 0), *events], age)
    if runs:
        with locked(tmp_path):
            assert look(tmp_path, START + 100).state == state
    else:
        (tmp_path / ".lock").touch()
        assert look(tmp_path, START + 100).state == state


def test_slow_steps_are_waited_for(tmp_path: Path) -> None:
    write(tmp_path, lines_of(5, seconds=30.0), [event("start", 0)], 90)
    with locked(tmp_path):
        assert look(tmp_path, START + 100).state == "at work"


def test_a_long_file_is_summed_whole_and_shown_by_its_end(tmp_path: Path) -> None:
    write(tmp_path, lines_of(20_000, seconds=0.5), [event("start", 0)], 1)
    found = look(tmp_path, START + 100)
    assert (found.step, found.seconds["steps"]) == (20_000, 10_000.0)


def test_a_folder_that_is_none_and_odd_lines_are_no_error(tmp_path: Path) -> None:
    assert look(tmp_path / "nowhere", START).state == "no run"
    (tmp_path / "metrics.jsonl").write_bytes(b'\xff\n[1]\n{"step": "x"}\n{"step": 3}\n' + b"[" * 100_000 + b"\n")
    (tmp_path / "events.jsonl").write_bytes(b'{"event": "start"}\nnull\n{"event": 3}\n')
    (tmp_path / "config.toml").write_text("[train]\nsteps = 'x'\n")
    assert look(tmp_path, START).state == "gone"
    os.remove(tmp_path / "metrics.jsonl")
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(DataError, match=r"metrics\.jsonl: is a FIFO"):
        look(tmp_path, START)


def test_real_runs_are_seen_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that ends well, and one that is stopped by SIGTERM."""
    assert program.run("--train.steps", "3", "--log.no-tensorboard", cwd=tmp_path).code == 0
    monkeypatch.setattr(sys, "argv", ["status.py", str(tmp_path / "run"), "--json"])
    assert status.main() == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["state"], found["step"], found["steps"], found["saved_step"]) == ("done", 3, 3, 3)
    assert 0 < found["goodput"] < 1

    flags = ("--train.steps", "100000", "--log.every", "10", "--log.no-tensorboard", "--run_dir", "long")
    running = program.start(*flags, cwd=tmp_path)
    running.until("10/100000 |")
    monkeypatch.setattr(sys, "argv", ["status.py", str(tmp_path / "long")])
    assert status.main() == 0
    assert ": at work | step " in capfd.readouterr().out
    running.send(signal.SIGTERM)
    running.wait(60)
    assert status.main() == 1
    assert ": stopped | step " in capfd.readouterr().out
