"""log.profile and tools/profile.py: sleeps of known length appear in their parts, on real ranks."""

import errno
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_tools.trace import profile, profile_report
from megapar_tools.trace.profile import RankAxis, RankRecord

from megapar.base.errors import DataError
from megapar.base.grid import Grid
from megapar.comm import collectives
from megapar.comm.transport_shared_memory import SharedMemory
from megapar.declare import context
from megapar.linear.main_grad import WeightGradientQueue
from megapar.observe import metrics
from megapar.observe.prediction import Prediction
from megapar.optimizer.optimizers import Optimizers
from megapar.pipeline.runtime import _Execution
from megapar.system.device import DeviceClock
from megapar.system.recorder import Recorder
from megapar.train import trainer
from tests.support import program
from tests.support.distributed import run_ranks
from tests.support.source_tree import ROOT

# Seconds of sleep.
DATA, UPDATE, REPORT, FORWARD, BACKWARD, WEIGHTS, REDUCE = 0.02, 0.03, 0.01, 0.15, 0.004, 0.006, 0.025
SLOW_RANK = 1  # of the four: data 2 x pipeline 2, so it is the second replica's first pipeline rank
MICROBATCHES = 3
FLAGS = (
    *("--launch.nproc", "4", "--parallel.pp", "2", "--parallel.dp", "2", "--parallel.schedule", "zb-h1"),
    *("--train.global_batch_size", "12", "--log.profile", "2-3", "--train.steps", "4"),
)


def delayed(owner: Any, name: str, seconds: Callable[..., float]) -> None:
    """Replace a method by one that sleeps first, for `seconds` of its arguments."""
    whole = getattr(owner, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds(*args))
        return whole(*args, **kwargs)

    setattr(owner, name, slow)


def sleeping_parts() -> None:
    """A plant: each part of a step sleeps, and the forwards of one rank alone."""
    delayed(trainer.Delivery, "next_step", lambda delivery: DATA)
    delayed(Optimizers, "step", lambda *_: UPDATE)
    delayed(metrics.Meter, "line", lambda *_: REPORT)
    delayed(SharedMemory, "reduce_scatter", lambda *_: REDUCE)

    def of_forward(run: Any, *_: Any) -> float:
        # This stage's rank of the second replica.
        return FORWARD if run._runtime.axis.ranks[run._runtime.axis.rank] == SLOW_RANK else 0.0

    delayed(_Execution, "_forward", of_forward)
    delayed(_Execution, "_backward", lambda *_: BACKWARD)
    delayed(WeightGradientQueue, "run", lambda *_: WEIGHTS)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with all sleeps."""
    folder = tmp_path_factory.mktemp("sleeping")
    ended = program.run(*FLAGS, cwd=folder, plant=sleeping_parts)
    assert ended.code == 0, ended.err
    return folder / "run"


@pytest.fixture(scope="module")
def accounts(run_dir: Path) -> list[profile.RankTime]:
    return profile.account(profile.read(run_dir))


def test_the_parts_of_each_rank_sum_to_its_steps(run_dir: Path, accounts: list[profile.RankTime]) -> None:
    assert [found.rank for found in accounts] == [0, 1, 2, 3]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timed = [line["step_seconds"] for line in lines if line["step"] in (2, 3)]
    assert len(timed) == 2
    for found in accounts:
        assert sum(found.parts.values()) + sum(found.exposed.values()) == pytest.approx(found.step_seconds, abs=1e-9)
    # A step of the profile also has the writing of its line.
    assert accounts[0].step_seconds >= sum(timed) / 2
    for step in (2, 3):
        for pieces in profile.segments(profile.read(run_dir), step):
            assert all(before.end == after.start for before, after in itertools.pairwise(pieces))


def test_each_sleep_is_in_its_part(accounts: list[profile.RankTime]) -> None:
    """A sleep may take longer, never less: only lower bounds."""
    for found in accounts:
        assert found.parts["data"] >= DATA
        assert found.parts["optimizer"] >= UPDATE
        assert found.parts["host"] >= REPORT
        assert found.parts["backward"] >= MICROBATCHES * BACKWARD
        assert found.parts["W"] >= MICROBATCHES * WEIGHTS
        assert found.exposed["grad"] >= REDUCE
    assert accounts[SLOW_RANK].parts["forward"] >= MICROBATCHES * FORWARD
    assert accounts[SLOW_RANK].parts["forward"] == max(found.parts["forward"] for found in accounts)


def test_the_sleeping_rank_is_the_slowest_and_its_pipeline_idles(
    accounts: list[profile.RankTime], capsys: pytest.CaptureFixture[str], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowest = profile.straggler(profile.read(run_dir), accounts)
    assert slowest is not None
    assert slowest.rank == SLOW_RANK
    assert slowest.busy >= MICROBATCHES * FORWARD
    assert slowest.waited == sum(found.waited_for[SLOW_RANK] for found in accounts) > 0
    assert accounts[0].parts["slowest"] > accounts[SLOW_RANK].parts["slowest"], "its replica waits for its gradients"
    assert accounts[0].waited_for == {SLOW_RANK: pytest.approx(accounts[0].parts["slowest"])}
    assert accounts[3].parts["idle"] > accounts[2].parts["idle"], "the next stage waits for its outputs"
    monkeypatch.setattr(sys, "argv", ["profile.py", str(run_dir), "--json", str(run_dir / "profile.json")])
    profile_report.main()
    out = capsys.readouterr().out
    assert f"slowest: rank {SLOW_RANK} is busy for" in out
    assert "steps 2 to 3 on 4 ranks" in out
    assert "one clock" in out
    written = json.loads((run_dir / "profile.json").read_text())
    assert written["steps"] == [2, 3]
    assert [row["parts"]["W"] for row in written["ranks"]] == [found.parts["W"] for found in accounts]
    assert (run_dir / "profile/profile.png").read_bytes().startswith(b"\x89PNG")


def test_the_trace_has_every_span_and_whom_it_waited_for(run_dir: Path) -> None:
    records = profile.read(run_dir)
    rows = profile.chrome_trace(records)["traceEvents"]
    spans = [row for row in rows if row["ph"] == "X" and row["cat"] != "step"]
    assert len(spans) == sum(len(step.spans) for record in records for step in record.steps.values())
    assert {row["pid"] for row in spans} == {0, 1, 2, 3}
    assert min(row["ts"] for row in rows if row["ph"] == "X") == 0
    waited = [row["args"]["waited for rank"] for row in spans if row["pid"] == 0 and "waited for rank" in row["args"]]
    assert SLOW_RANK in waited
    begun = [row["id"] for row in rows if row["ph"] == "b"]
    assert sorted(begun) == sorted(row["id"] for row in rows if row["ph"] == "e")


def test_the_timeline_of_the_pipeline_comes_from_it(run_dir: Path) -> None:
    events = profile.events(profile.read(run_dir))
    assert {event.rank for event in events} == {0, 1}
    actions = [event.action for event in events]
    assert len(set(actions)) == len(actions) == 2 * MICROBATCHES * 3, "F, I and W of each"


# Predicted beside measured


def predicting() -> None:
    """A plant: a model of time has told 0.25 s a step, 12% of it idle."""
    whole = trainer.TrainingRun

    def run(*args: Any) -> Any:
        return replace(whole(*args), prediction=Prediction("a laptop", 0.25, 0.12))

    trainer.TrainingRun = run  # type: ignore[assignment, misc]


def test_a_prediction_is_beside_the_measured_step_once_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--train.global_batch_size", "4", "--train.steps", "8", "--log.profile", "7-8")
    ended = program.run(*flags, cwd=tmp_path, plant=predicting)
    assert ended.code == 0, ended.err
    (said,) = [line for line in ended.out.splitlines() if "predicted" in line]
    assert said.startswith("step 6/8 | predicted for a laptop: 0.25 s a step, 12% of it idle; measured: ")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (compared,) = [line for line in lines if "predicted_step_seconds" in line]
    times = [line["step_seconds"] for line in lines if line.get("step_seconds") and 2 <= line["step"] <= 6]
    assert compared["measured_step_seconds"] == statistics.median(times)
    assert len(times) == 5
    monkeypatch.setattr(sys, "argv", ["profile.py", str(tmp_path / "run")])
    profile_report.main()
    assert "predicted for a laptop: 250.0 ms a step, 12% of it idle; recorded: " in capsys.readouterr().out


def test_without_a_prediction_nothing_is_compared(run_dir: Path) -> None:
    assert "predicted" not in (run_dir / "metrics.jsonl").read_text()


# Exposed and hidden


def overlapped() -> dict[str, Any]:
    """An all-reduce under a computation of known length, then one that is waited for at once."""
    ctx = context.create(Grid(dp=2))
    recorder = ctx.flight.recorder = Recorder(clock := DeviceClock(ctx.device), 1)
    pending = collectives.all_reduce_async(torch.ones(8), ctx.dp)
    collectives.barrier(ctx.world)  # now both ranks have started it
    with ctx.flight.span("F", 0, 0):
        time.sleep(0.05)
    pending.wait()
    if ctx.world.first:
        time.sleep(0.04)
    collectives.all_reduce(torch.ones(8), ctx.grad)
    return recorder.finish().as_json(clock)


def test_time_in_flight_under_computing_is_hidden_and_a_late_rank_is_named() -> None:
    axes = {name: RankAxis((0, 1), "shared memory") for name in ("dp", "grad", "world")}
    records = []
    for rank, step in enumerate(run_ranks(2, overlapped)):
        spans = [profile.RecordedSpan._make(row) for row in step["spans"]]
        operations = [profile.RecordedOperation._make(row) for row in step["operations"]]
        steps = {1: profile.TimedStep(step["start"], step["end"], spans, operations)}
        records.append(RankRecord(rank, 0, "cpu", axes, 0.0, steps))
    for found in profile.account(records):
        assert found.hidden["dp"] >= 0.05
        assert found.hidden["dp"] <= found.parts["forward"] + 1e-9
        assert found.hidden["grad"] == 0
    second = profile.account(records)[1]
    assert second.parts["slowest"] >= second.waited_for[0] > 0
    assert second.parts["idle"] == 0, "both are one pipeline rank"


# Clocks


def meetings(seed: int, offset: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Headers of two ranks that have met. The clock of the first one is ahead by `offset`."""
    draw = random.Random(seed)
    headers: list[dict[str, Any]] = [{"boot": "a", "meetings": []}, {"boot": "b", "meetings": []}]
    now = 50.0
    for _ in range(16):
        came = [now + draw.random() * 1e-3 for _ in range(2)]
        left = [max(came) + draw.random() * 1e-3 for _ in range(2)]
        for rank, ahead in enumerate((offset, 0.0)):
            headers[rank]["meetings"].append([came[rank] + ahead, left[rank] + ahead])
        now = max(left)
    return headers[0], headers[1]


@pytest.mark.parametrize("offset", [0.0, 1000.0, -0.37])
def test_the_difference_of_two_clocks_is_within_its_stated_error(offset: float) -> None:
    for seed in range(20):
        estimated, error = profile.clock_offset(*meetings(seed, offset))
        assert abs(estimated - offset) <= error
        assert 0 < error < 1e-3, "the shortest meetings took less than 2 ms"


def test_processes_of_one_kernel_have_one_clock_unless_their_meetings_deny_it() -> None:
    for offset, expected in ((0.0, 0.0), (5.0, 5.0)):
        first, second = meetings(0, offset)
        second["boot"] = first["boot"]
        estimated, error = profile.clock_offset(first, second)
        assert estimated == pytest.approx(expected, abs=1e-3)
        assert (error == 0) == (offset == 0)


# Runs that end early, are resumed, or cannot write


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("5-3", "log.profile=5-3: must be A-B with A at least 1 and B at least A, such as 10-12"),
        ("0-2", "log.profile=0-2: must be A-B with A at least 1"),
        ("4-9", "log.profile=4-9, train.steps=5: the run ends after step 5; name steps from 1 to 5"),
        ("3", "log.profile=3: must be the first and the last step, such as 10-12, or none"),
        ("1-99999999999", "log.profile=1-99999999999: must be the first and the last step"),
    ],
)
def test_steps_that_never_come_are_refused(steps: str, said: str, tmp_path: Path) -> None:
    ended = program.run("--log.profile", steps, cwd=tmp_path)
    assert ended.code == 2
    assert said in ended.err
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_records_what_is_left_and_says_if_nothing_is(tmp_path: Path) -> None:
    flags = ("--log.profile", "2-4", "--launch.nproc", "2", "--parallel.tp", "2", "--train.global_batch_size", "4")
    first = program.run(*flags, "--train.steps", "4", "--checkpoint.every", "2", cwd=tmp_path)
    assert first.code == 0, first.err
    assert sorted(profile.read(tmp_path / "run")[1].steps) == [2, 3, 4]
    again = program.run(*flags, "--train.steps", "6", cwd=tmp_path)
    assert "log.profile=2-4: step 4 is done; nothing is profiled" in again.out
    assert sorted(profile.read(tmp_path / "run")[1].steps) == [2, 3, 4], "what was recorded stays"
    back = ("--checkpoint.resume", "run/checkpoints/step_00000002")
    third = program.run(*flags, *back, "--train.steps", "4", cwd=tmp_path)
    assert third.code == 0, third.err
    assert sorted(profile.read(tmp_path / "run")[1].steps) == [3, 4], "of the newest start that recorded steps"


def full_disk() -> None:
    """A plant: nothing more can be written to the profile once training has begun."""
    whole = metrics.LineWriter._append

    def append(lines: metrics.LineWriter, line: bytes) -> None:
        if lines.path.parent.name == "profile":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(lines, line)

    metrics.LineWriter._append = append  # type: ignore[method-assign]


def test_a_full_disk_loses_the_profile_and_not_the_run(tmp_path: Path) -> None:
    ended = program.run("--log.profile", "2-4", cwd=tmp_path, plant=full_disk)
    assert ended.code == 0, ended.err
    assert "step 5/5" in ended.out
    assert ended.err.count("rank_00000.jsonl: step 2 not written (No space left on device); the run goes on") == 1
    with pytest.raises(DataError, match="describes no rank: the run ended before it had recorded a step"):
        profile.read(tmp_path / "run")


def test_a_file_in_place_of_the_folder_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/profile").write_text("mine")
    ended = program.run("--log.profile", "2-4", "--launch.nproc", "2", "--parallel.tp", "2", cwd=tmp_path)
    assert ended.code == 7
    assert "profile not written" in ended.err
    assert "step 1/5" not in ended.out


def test_what_a_killed_rank_has_recorded_is_read_with_that_of_the_others(run_dir: Path, tmp_path: Path) -> None:
    """Of a rank that was killed the last line is missing, or cut short."""
    shutil.copytree(run_dir / "profile", tmp_path / "profile")
    file = tmp_path / "profile/rank_00002.jsonl"
    header, second, third = file.read_text().splitlines()
    for rest in ("", third[: len(third) // 2]):
        file.write_text(f"{header}\n{second}\n{rest}")
        assert [sorted(record.steps) for record in profile.read(tmp_path)] == [[2]] * 4
    for content, said in (
        (f"{header}\n", "no step is recorded by all 4 ranks"),
        (f"{header}\n{third[:-9]}\n", "is damaged"),
        (f"{header.replace('start', 'begin')}\n", "is of another start of the run"),
    ):
        file.write_text(content)
        with pytest.raises(DataError, match=said):
            profile.read(tmp_path)
    file.unlink()
    with pytest.raises(DataError, match=r"rank_00002\.jsonl is not there"):
        profile.read(tmp_path)


def test_another_program_of_the_folder_finds_the_profiler_of_the_standard_library() -> None:
    """Python looks for modules beside the program, where profile.py has the name of a module that cProfile imports."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); import cProfile, profile; print(profile.__file__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == str(Path(sysconfig.get_path("stdlib")) / "profile.py")
