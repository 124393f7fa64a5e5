"""Saves that fail while a run goes on: what is told, what stays, what is tried again, and what still ends the run."""

import errno
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from megapar.base.errors import StorageError
from megapar.checkpoint import folder as folders
from megapar.checkpoint import save as saving
from megapar.checkpoint.format import checkpoint_folders
from megapar.checkpoint.tiers import FOLDER
from megapar.config.options import CheckpointConfig, Config
from megapar.step.state import TrainState
from megapar.system import events
from megapar.train import trainer
from megapar.train.savers import Lost, Saved, Savers
from tests.support import faults
from tests.support.checkpoints import files_limited_to, outcome
from tests.support.distributed import run_ranks
from tests.support.faults import TWO, Scene
from tests.support.small_training import make_config, make_state, step
from tests.support.sweeps import slow_but


def config_of(steps: int, dp: int = 1, **options: Any) -> Config:
    config = make_config(dp=dp)
    return replace(config, train=replace(config.train, steps=steps), checkpoint=CheckpointConfig(**options))


def told(savers: Savers, found: list[Saved | Lost]) -> list[str]:
    """The steps that were saved, and the lines about those that were not, without the times."""
    lines = []
    for one in found:
        line = savers.change(one)
        lines.append(re.sub(r"\d+ s old", "0 s old", line) if isinstance(one, Lost) else one.path.name)
    return lines


def save(savers: Savers, state: TrainState, *, wait: bool, stopping: bool = False, limit: int = -1) -> list[str]:
    """Save as the loop does. With `wait`, wait for the save too, as if the next step took so long.

    Files are limited to `limit` bytes meanwhile; -1: they are not.
    """
    with files_limited_to(limit):
        found = told(savers, list(savers.save(state, stopping=stopping, ready=lambda: None)))
        under_way = [begun for saver in savers._savers for begun, _ in saver._saves]
        for begun in under_way if limit > 0 else []:
            begun.join()
    # Not under the limit: ranks may need more memory to share, which counts as a file.
    while wait and any(saver._saves for saver in savers._savers):
        found += told(savers, list(savers.completed(wait=state.step == savers._steps)))
    return found


def fail_on_one_rank(root: str, asynchronous: bool) -> tuple[list[list[str]], tuple[str, int, str], list[str]]:
    """Rank 1 of two cannot write from step 4 on, can at step 8, and cannot at step 10, the last one."""
    config = config_of(10, dp=2, every=2, keep_last=1, async_save=asynchronous)
    state = make_state(config)
    found = []
    kept = []
    with Savers(state, Path(root)) as savers:
        for number in (2, 4, 6, 8):
            step(state)
            state.step = number
            fails = number in (4, 6) and state.ctx.world.rank == 1
            found.append(save(savers, state, wait=True, limit=300 if fails else -1))
            savers._savers[0]._last.settle()  # type: ignore[union-attr]
            kept.append(",".join(path.name[-1] for path in sorted((Path(root) / FOLDER).iterdir())))
        step(state)
        state.step = 10
        end = outcome(lambda: save(savers, state, wait=True, limit=300 if state.ctx.world.rank == 1 else -1))
    return found, end, kept


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_every_rank_goes_on_alike_and_the_last_save_ends_all(asynchronous: bool, tmp_path: Path) -> None:
    """Fault save-fails-for-a-while: the line has step, cause, what happens next and the newest checkpoint; this one
    stays until there is another, and nothing half is left."""
    first, second = run_ranks(2, fail_on_one_rank, str(tmp_path), asynchronous)
    assert first == second
    (saved, (lost,), (again,), after), (kind, code, message), kept = first
    assert (saved, after) == (["step_00000002"], ["step_00000008"])
    cause = r"\(rank 1\): \S*/rank_00001.safetensors: .*File too large.* bytes needed.*"
    on = r"the run goes on, and the next save is that of step"
    newest = "the newest complete checkpoint is that of step 2, 0 s old"
    assert re.fullmatch(rf"checkpoint of step 4 not saved {cause}; {on} 6; {newest}", lost), lost
    often = "2 saves have failed in a row"
    assert re.fullmatch(rf"checkpoint of step 6 not saved {cause}; {often}; {on} 8; {newest}", again), again
    assert (kind, code) == ("StorageError", StorageError.exit_code)
    assert re.match(rf"checkpoint of step 10 not saved {cause}", message)
    assert kept == ["t,2", "t,2", "t,2", "t,8"]
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["latest", "step_00000008"]


def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_too_little_space_is_a_line_and_costs_no_memory(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault save-fails-for-a-while: found before anything is written; the copy of the state is used again."""
    state = make_state(config_of(9, every=1, async_save=asynchronous))
    with Savers(state, tmp_path) as savers:
        step(state)
        with monkeypatch.context() as full:
            no_room(full)
            (line,) = save(savers, state, wait=True)
        assert line.startswith("checkpoint of step 1 not saved: ")
        assert "1,000 bytes free" in line
        assert line.endswith("the next save is that of step 2; there is no complete checkpoint yet")
        (saver,) = savers._savers
        buffers = [buffer.data_ptr() for buffer in saver._idle]
        step(state)
        assert save(savers, state, wait=True) == ["step_00000002"]
        assert [buffer.data_ptr() for buffer in saver._idle] == buffers
        assert len(buffers) == asynchronous


def test_a_resumed_run_knows_its_newest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state(config_of(9, every=1))
    with Savers(state, tmp_path) as savers:
        step(state)
        save(savers, state, wait=True)
    os.utime(tmp_path / FOLDER / "step_00000001/manifest.json", (0, 0))
    (tmp_path / FOLDER / "step_00000007").mkdir()  # without a manifest: no checkpoint
    with Savers(state, tmp_path) as savers:
        step(state)
        no_room(monkeypatch)
        (line,) = save(savers, state, wait=True)
    assert re.search(r"the newest complete checkpoint is that of step 1, \d{6} h old$", line), line


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"every": 2, "on_failure": "stop"}, 9),
        ({"every": 2, "save_last": False}, 3),  # no further save is due
        ({"every": 2}, 2),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_failed_save_ends_the_run(
    options: dict[str, Any], steps: int, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault save-fails-for-a-while: with checkpoint.on_failure stop, and where no other save would come."""
    state = make_state(config_of(steps, async_save=asynchronous, **options))
    monkeypatch.setattr(saving, "save_file", refuse)
    state.step = 2
    kind, code, message = outcome(lambda: save(Savers(state, tmp_path), state, wait=True))
    assert (kind, code) == ("StorageError", 7)
    assert message.startswith("checkpoint of step 2 not saved: ")


def test_the_save_of_a_preempted_run_is_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault save-fails-for-a-while."""
    state = make_state(config_of(9, every=2))
    monkeypatch.setattr(saving, "save_file", refuse)
    state.step = 1
    kind, _, message = outcome(lambda: save(Savers(state, tmp_path), state, wait=False, stopping=True))
    assert kind == "StorageError"
    assert message.startswith("checkpoint of step 1 not saved: ")


def refuse(*_: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_failures_behind_cost_no_later_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault save-fails-for-a-while: two asynchronous saves fail while the last one waits for the first, and is
    written."""
    state = make_state(config_of(6, every=2, async_save=True))
    real, go = saving.save_file, Event()

    def fail_late(tensors: Any, path: Path) -> None:
        if "step_00000006" not in str(path):
            assert go.wait(30)
            refuse()
        real(tensors, path)

    monkeypatch.setattr(saving, "save_file", fail_late)
    with Savers(state, tmp_path) as savers:
        for number in (2, 4):
            state.step = number
            assert save(savers, state, wait=False) == []
        go.set()
        state.step = 6
        first, *found = [*save(savers, state, wait=False), *told(savers, list(savers.completed(wait=True)))]
    assert re.match("checkpoint of step 2 not saved: .* the next save is that of step 4; ", first), first
    assert re.match("checkpoint of step 4 not saved: .* 2 saves .* the next save is that of step 6; ", found[0]), found
    assert found[1:] == ["step_00000006"]
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["latest", "step_00000006"]


def spoil_beside_a_full_disk(root: str) -> tuple[str, int, str]:
    """Rank 0 cannot write, and rank 1 has a value that is not finite."""
    state = make_state(config_of(9, dp=2, every=1))
    with Savers(state, Path(root)) as savers:
        step(state)
        if state.ctx.world.rank == 1:
            next(state.optimizer.slices()).main[3] = torch.nan
        return outcome(lambda: save(savers, state, wait=False, limit=300 if state.ctx.world.first else -1))


def test_a_value_that_is_not_finite_ends_the_run_beside_a_full_disk(tmp_path: Path) -> None:
    """Faults save-fails-for-a-while, non-finite-state: no rank goes on."""
    for kind, code, message in run_ranks(2, spoil_beside_a_full_disk, str(tmp_path)):
        assert (kind, code) == ("NumericError", 5)
        assert message.startswith("checkpoint of step 1 not saved (rank 1 and 1 more): rank 1: main.")


def test_what_a_disk_did_not_let_go_is_removed_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault save-fails-for-a-while: a half checkpoint takes the room of a whole one."""
    state = make_state(config_of(9, every=1))
    root = tmp_path / FOLDER
    with Savers(state, tmp_path) as savers:
        step(state)
        with monkeypatch.context() as broken:
            broken.setattr(saving, "write_manifest", refuse)
            broken.setattr(saving.shutil, "rmtree", lambda *_, **__: None)
            save(savers, state, wait=True)
        assert [path.name[:5] for path in root.iterdir()] == [".tmp-"]
        step(state)
        save(savers, state, wait=True)
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step_00000002"]


def test_a_save_that_failed_is_tried_again_before_the_interval_of_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault save-fails-for-a-while: with checkpoint.mtbf_hours, at the next multiple of checkpoint.every."""
    state = make_state(config_of(100, every=2, mtbf_hours=1e6))
    with Savers(state, tmp_path) as savers:
        state.step = 2
        with monkeypatch.context() as full:
            full.setattr(saving, "save_file", refuse)
            (line,) = save(savers, state, wait=True)
        assert "the next save is that of step 4; " in line
        assert savers.due(4)
        state.step = 4
        assert save(savers, state, wait=True) == ["step_00000004"]
        assert not savers.due(6)


# Whole runs


STEPS = 8
FLAGS = ("--train.steps", str(STEPS), "--train.global_batch_size", "8", "--train.micro_batch_size", "4")
FLAGS += ("--checkpoint.every", "2", "--log.no-tensorboard", "--launch.timeout_seconds", "30")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    scene = Scene(tmp_path_factory.mktemp("undisturbed"))
    assert scene.run(*FLAGS, *TWO).code == 0
    return scene


def at_steps(acts: dict[int, Callable[[], None]]) -> Callable[[], None]:
    """Plants that rank 0 acts at the beginning of steps."""

    def plant() -> None:
        real = trainer.queue_step

        def queue_step(state: Any, *args: Any, **named: Any) -> Any:
            act = acts.get(state.step + 1)
            if act and state.ctx.world.first:
                act()
            return real(state, *args, **named)

        trainer.queue_step = queue_step

    return plant


def away(case: str) -> None:
    """The run folder is gone, or a file is in the place of its checkpoints."""
    for _ in range(3000):  # an asynchronous save of step 2 may be at its end
        if Path("run/checkpoints/latest").exists():
            break
        time.sleep(0.01)
    if case == "gone":
        shutil.move("run", "away")
    else:
        shutil.move("run/checkpoints", "away")
        Path("run/checkpoints").touch()


def back(case: str) -> None:
    if case == "gone":
        shutil.move("away", "run")
    else:
        Path("run/checkpoints").unlink()
        shutil.move("away", "run/checkpoints")


SYNC, ASYNC = (), ("--checkpoint.async_save",)


@pytest.mark.parametrize(
    ("case", "mode"), slow_but([0, 3], [(case, mode) for case in ("file", "gone") for mode in (SYNC, ASYNC)])
)
def test_a_folder_that_is_away_for_a_while(
    case: str, mode: tuple[str, ...], tmp_path: Path, undisturbed: Scene
) -> None:
    """Fault save-fails-for-a-while: the run ends as one whose folder was always there, bitwise."""
    scene = Scene(tmp_path)
    ended = scene.run(*FLAGS, *TWO, *mode, plant=at_steps({4: lambda: away(case), 7: lambda: back(case)}))
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.out
    lines = [line for line in ended.out.splitlines() if line.startswith("save_failed: ")]
    assert len(lines) == 2, ended.out
    for line, number in zip(lines, (4, 6), strict=True):
        assert f": checkpoint of step {number} not saved" in line
        assert "the newest complete checkpoint is that of step 2" in line
    assert "the next save is that of step 6" in lines[0]
    assert scene.check_checkpoints(ended.out) == [8, 2]
    assert faults.weights(scene.work, STEPS) == faults.weights(undisturbed.work, STEPS)
    metrics = faults.metrics(scene.work)
    assert [line for line in metrics if "loss" in line] == faults.metrics(undisturbed.work)
    assert [line["failed_saves"] for line in metrics if "failed_saves" in line] == [1, 2, 0]
    if case == "file":  # events.jsonl was there all the time
        failed = [event for event in events.read(scene.work / "run") if event["event"] == "save_failed"]
        assert [f"save_failed: {event['reason']}" for event in failed] == lines
    assert not (scene.work / "run/error.json").exists()


def test_a_kill_after_a_failed_save_loses_the_steps_since_the_newest(tmp_path: Path, undisturbed: Scene) -> None:
    """Faults save-fails-for-a-while, killed-saves: a start goes on from what is complete, bitwise."""
    scene = Scene(tmp_path)
    plant = at_steps(
        {
            4: lambda: setattr(saving, "write_manifest", refuse),
            6: lambda: os.killpg(0, signal.SIGKILL),
        }
    )
    ended = scene.run(*FLAGS, *TWO, plant=plant)
    assert ended.code == -signal.SIGKILL
    assert "save_failed: checkpoint of step 4 not saved" in ended.out
    assert scene.check_checkpoints(ended.out) == [2]
    again = scene.run(*FLAGS, *TWO)
    assert again.code == 0, again.err
    assert "resumed step 2 from" in again.out
    assert scene.check_checkpoints(again.out) == [8, 6, 4, 2]
    assert faults.metrics(scene.work) == faults.metrics(undisturbed.work)
    assert faults.weights(scene.work, STEPS) == faults.weights(undisturbed.work, STEPS)
    assert not [path for path in scene.checkpoints.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("back", [True, False], ids=["again", "full"])
def test_a_run_asked_to_stop_after_a_failed_save(back: bool, tmp_path: Path) -> None:
    """Fault save-fails-for-a-while: preempted and saved, or exit code 7 and what was complete."""
    scene = Scene(tmp_path)
    real = saving.write_manifest

    def stop() -> None:
        if back:
            saving.write_manifest = real
        os.kill(os.getpid(), signal.SIGTERM)

    plant = at_steps({4: lambda: setattr(saving, "write_manifest", refuse), 6: stop})
    ended = scene.run(*FLAGS, plant=plant)
    assert "save_failed: checkpoint of step 4 not saved" in ended.out
    if back:
        assert ended.code == 75, ended.err
        assert scene.check_checkpoints(ended.out) == [7, 6, 2]
        return
    assert ended.code == StorageError.exit_code, ended.err
    assert ended.err.startswith("StorageError: checkpoint of step 7 not saved: ")
    assert ended.err.count("\n") == 1
    assert scene.check_checkpoints(ended.out) == [2]
    assert json.loads((scene.work / "run/error.json").read_text())["exit_code"] == StorageError.exit_code


@pytest.mark.parametrize("tier", slow_but([0], ["memory", "local"]))
def test_snapshots_serve_while_the_run_folder_cannot_be_written(tier: str, tmp_path: Path, undisturbed: Scene) -> None:
    """Fault save-fails-for-a-while: a rank is lost meanwhile, and the run goes on from the faster tier, bitwise."""
    local = ("--checkpoint.local_dir", str(tmp_path / "fast"), "--checkpoint.local_every", "1")
    more = ("--checkpoint.memory_every", "1") if tier == "memory" else local
    real = saving.publish

    def publish(temporary: Path, root: Path, *args: Any, **named: Any) -> None:
        if str(root).startswith("run/") and "step_00000004" in temporary.name:
            refuse()
        real(temporary, root, *args, **named)

    def kill() -> None:
        if not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def plant() -> None:
        saving.publish = publish
        at_steps({6: kill})()

    scene = Scene(tmp_path)
    ended = scene.run(*FLAGS, *TWO, *more, "--launch.max_restarts", "3", plant=plant)
    assert ended.code == 0, ended.err
    assert "save_failed: checkpoint of step 4 not saved" in ended.out
    starts = [(event["step"], event["tier"]) for event in events.read(scene.work / "run") if event["event"] == "start"]
    assert starts == [(0, "none"), (5, tier)]
    assert next(path.name for path in checkpoint_folders(scene.checkpoints)) == f"step_{STEPS:08d}"
    assert faults.weights(scene.work, STEPS) == faults.weights(undisturbed.work, STEPS)
