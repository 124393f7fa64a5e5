"""log.alert_command: what a run sees reaches the user's command, and no command holds up a run."""

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megapar.comm.flight import Flight
from megapar.observe import watch
from megapar.observe.watch import Watch
from megapar.system import alert_command
from megapar.system.alert_command import Alerts
from megapar.train import trainer
from tests.support import program

QUIET = ("--log.no-tensorboard", "--checkpoint.no-save_last")


def into(path: Path) -> str:
    """A command that appends its standard input to a file."""
    return f"sh -c 'cat >> {path}'"


def alerts_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def at_step(number: int, action: Callable[[Any], None]) -> Callable[[], None]:
    """A plant that calls `action` with the state of each rank before a step is queued."""

    def plant() -> None:
        real = trainer.queue_step

        def queue_step(state: Any, *args: Any, **named: Any) -> Any:
            if state.step + 1 == number:
                action(state)
            return real(state, *args, **named)

        trainer.queue_step = queue_step

    return plant


def poison(state: Any) -> None:
    state.weights.flat.fill_(float("nan"))


def die(state: Any) -> None:
    if state.ctx.world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


# Runs


@pytest.mark.parametrize("launcher", [(), ("--launch.nproc", "2")], ids=["alone", "launcher"])
def test_a_run_that_ends_well_is_told_once(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    run = program.run(
        *QUIET, *launcher, "--train.steps", "2", "--log.alert_command", into(tmp_path / "a"), cwd=tmp_path
    )
    assert (run.code, run.err) == (0, "")
    (alert,) = alerts_in(tmp_path / "a")
    assert (alert["event"], alert["code"], alert["step"]) == ("end", 0, 2)
    assert alert["message"] == "all steps are done"
    assert alert["run_dir"] == str(tmp_path / "run")
    assert alert["time"] == pytest.approx(time.time(), abs=60)


@pytest.mark.parametrize("launcher", [(), ("--launch.nproc", "2")], ids=["alone", "launcher"])
def test_a_loss_that_is_not_finite_is_told(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    flags = (*QUIET, *launcher, "--train.steps", "4", "--log.alert_command", into(tmp_path / "a"))
    run = program.run(*flags, cwd=tmp_path, plant=at_step(2, poison))
    assert run.code == 5
    first, *end = alerts_in(tmp_path / "a")
    assert (first["event"], first["code"], first["step"]) == ("not_finite", 5, 2)
    assert "loss nan" in first["message"]
    assert [alert["event"] for alert in end] == ["end"] * bool(launcher)


def test_a_rank_that_is_killed_is_told_by_the_launcher(tmp_path: Path) -> None:
    flags = (*QUIET, "--launch.nproc", "2", "--train.steps", "4", "--log.alert_command", into(tmp_path / "a"))
    run = program.run(*flags, cwd=tmp_path, plant=at_step(3, die))
    assert run.code == 6
    fault, end = alerts_in(tmp_path / "a")
    assert (fault["event"], fault["rank"], fault["step"], fault["code"]) == ("fault", 1, 3, 6)
    assert (end["event"], end["code"]) == ("end", 6)


def test_a_command_that_hangs_holds_up_the_end_for_seconds_alone(tmp_path: Path) -> None:
    """And neither it nor what it has started is left."""
    mark = f"86{os.getpid()}"
    command = f"sh -c 'sleep {mark} & sleep {mark}'"
    start = time.monotonic()
    run = program.run(*QUIET, "--train.steps", "2", "--log.alert_command", command, cwd=tmp_path)
    assert run.code == 0
    assert time.monotonic() - start < 25
    said = "log.alert_command: killed, it took too long, for the event end; the run goes on"
    assert said in run.out.splitlines()
    left = subprocess.run(["pgrep", "-f", f"sleep {mark}"], capture_output=True, text=True, check=False)
    assert left.stdout == ""


# The command


def sent(command: str, events: int = 1) -> list[str]:
    """The warnings after so many events."""
    said: list[str] = []
    alerts = Alerts(command, said.append)
    for number in range(events):
        alerts.send({"event": "test", "number": number})
    alerts.close()
    return said


def test_no_shell_reads_the_command(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert sent(f"""sh -c 'echo "$1" > {path}' x '$(touch {tmp_path}/boom); `id`' > {tmp_path}/b""") == []
    assert path.read_text() == f"$(touch {tmp_path}/boom); `id`\n"
    assert sorted(tmp_path.iterdir()) == [path]


def test_events_come_in_order_and_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a"
    command = (
        f"sh -c 'test ! -e {tmp_path}/lock && touch {tmp_path}/lock && cat >> {path}; sleep 0.02; rm {tmp_path}/lock'"
    )
    assert sent(command, 8) == []
    assert [alert["number"] for alert in alerts_in(path)] == list(range(8))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("false", "exit code 1"),
        ("/nowhere/to/be/found", "not started (No such file or directory)"),
        ("sh -c 'kill -9 $$'", "exit code -9"),
        ("  ", "failed (IndexError: list index out of range)"),
        ("sh -c 'head -c 100000000 /dev/zero; exit 3'", "exit code 3"),  # what it prints goes nowhere
    ],
)
def test_a_command_that_fails_is_one_line(command: str, said: str) -> None:
    assert sent(command) == [f"log.alert_command: {said}, for the event test; the run goes on"]


def test_a_slow_command_keeps_no_step_waiting_and_events_are_bounded() -> None:
    said: list[str] = []
    alerts = Alerts("sleep 50", said.append)
    start = time.monotonic()
    for _ in range(100):
        alerts.send({"event": "test"})
    assert time.monotonic() - start < 0.5
    assert said[0] == "log.alert_command: test not sent, 16 events wait for the command"
    assert len(said) in (83, 84), "16 wait, and one is called"
    assert threading.active_count() < 50
    alerts._end = time.monotonic()  # as at the end of a run
    alerts.close()


def test_a_call_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alert_command, "_LIMIT_SECONDS", 0.3)
    assert sent("sleep 50") == ["log.alert_command: killed, it took too long, for the event test; the run goes on"]


# What is seen

RESULT: Any = None  # a watch reads the line of a step alone


def watching(folder: Path, said: list[str]) -> Watch:
    return Watch(folder, into(folder / "a"), Flight(), said.append, speaks=True)


def test_a_run_that_stands_still_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(watch, "_LEAST_STALL_SECONDS", 1.0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100, 0, 50))
    said: list[str] = []
    with watching(tmp_path, said) as seen:
        seen._flight.enter("forward")
        for step in (1, 2):
            seen.after_line(RESULT, {"step": step, "loss": 2.0, "step_seconds": 0.01})
            time.sleep(0.2)
            assert said == []
        end = time.monotonic() + 30
        while not said and time.monotonic() < end:
            time.sleep(0.05)
        assert len(said) == 1
        assert re.match("stall: no step for [0-9]+ s, after step 2; rank 0 is in forward", said[0])
        seen.after_line(RESULT, {"step": 3, "loss": 2.0, "step_seconds": 0.01})
        seen._flight.enter("save")
        time.sleep(1.3)
        assert len(said) == 1, "a save may take longer"
    assert [alert["event"] for alert in alerts_in(tmp_path / "a")] == ["stall"]
    assert [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()] == ["stall"]


Usage = namedtuple("Usage", "total used free")


def test_a_disk_that_is_nearly_full_is_told_once_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    large = 2**50
    with watching(tmp_path, said) as seen:
        for free in (large, large // 100, 2**36, 2**36, large, 2**36):
            monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(large, 0, free))
            seen._look()
    text = f"disk: 64.0 GiB of 1048576.0 are free at {tmp_path}"
    assert said == [text, text]
    assert [alert["event"] for alert in alerts_in(tmp_path / "a")] == ["disk", "disk"]
