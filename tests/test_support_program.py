"""The harness of forked programs reports what happened: exit codes, signals, output, and nothing of this process."""

import signal
from pathlib import Path

import pytest

from tests.support import program


def test_output_and_exit_codes_are_those_of_the_program(tmp_path: Path) -> None:
    good = program.run("--train.steps", "2", cwd=tmp_path)
    assert good.code == 0, good.err
    assert "step 2/2" in good.out
    assert (tmp_path / "run/metrics.jsonl").exists()
    bad = program.run("--parallel.tp", "5", cwd=tmp_path)
    assert bad.code == 2
    assert bad.err.startswith("ConfigError:")


def test_a_signal_ends_it_and_is_told(tmp_path: Path) -> None:
    running = program.start("--train.steps", "100000", cwd=tmp_path)
    running.until("/100000 | loss")
    running.send_to_all(signal.SIGKILL)
    assert running.wait().code == -signal.SIGKILL


def test_a_program_that_never_ends_is_killed(tmp_path: Path) -> None:
    running = program.start("--train.steps", "100000", cwd=tmp_path)
    with pytest.raises(AssertionError, match="still running"):
        running.wait(cap_seconds=2)
    assert not running.process.is_alive()
