"""The run's folder: one job at a time, checks before the first step, what killed saves leave, and what is kept."""

import json
import multiprocessing
import os
import shutil
import socket
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from megapar_models.registry import validate

from megapar.base.grid import Grid
from megapar.checkpoint import folder as folders
from megapar.checkpoint import save as saving
from megapar.checkpoint.folder import Keep, check, exclusive, prune, sweep
from megapar.checkpoint.format import checkpoint_folders, find_complete
from megapar.checkpoint.tiers import FOLDER
from megapar.config.options import CheckpointConfig, Config
from megapar.declare import context
from megapar.train.checkpoints import lock_run_dir
from tests.support.checkpoints import killed_at, load_toy, outcome, save_toy, toy_slices
from tests.support.distributed import run_ranks

ALONE = context.single()


def steps(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in checkpoint_folders(root))


def test_the_newest_and_the_milestones_stay(tmp_path: Path) -> None:
    """Fault retention-keeps-complete-checkpoints: ten incomplete folders neither count nor go, nor do later steps of a
    run gone back."""
    for step in (10, 20, 30, 40, 50, 90):
        save_toy(tmp_path, step)
    incomplete = [tmp_path / f"step_{step:08d}" for step in range(51, 61)] + [tmp_path / ".tmp-step_00000061-abc"]
    for path in incomplete:
        path.mkdir()
    prune(tmp_path, 50, Keep())
    assert len(steps(tmp_path)) == 16
    prune(tmp_path, 50, Keep(last=2, every=20))
    assert [step for step in steps(tmp_path) if step not in range(51, 61)] == [20, 40, 50, 90]
    prune(tmp_path, 60, Keep(last=2))
    assert [step for step in steps(tmp_path) if step not in range(51, 61)] == [40, 50, 90]
    assert all(path.exists() for path in incomplete)
    prune(tmp_path, 50, Keep(last=1))
    (tmp_path / "step_00000050/manifest.json").unlink()
    prune(tmp_path, 50, Keep(last=1))
    assert [path.name for path in find_complete(tmp_path)] == ["step_00000090"]
    shutil.rmtree(tmp_path / "step_00000050")
    (tmp_path / "step_00000090/manifest.json").unlink()
    save_toy(tmp_path, 5)
    prune(tmp_path, 100, Keep(last=1))
    assert [path.name for path in find_complete(tmp_path)] == ["step_00000005"], "the last complete one never goes"


def test_a_checkpoint_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(f"not allowed: {path.name}")

    for step in (1, 2):
        save_toy(tmp_path, step)
    monkeypatch.setattr(folders, "_remove", refuse)
    prune(tmp_path, 2, Keep(last=1))
    assert "step_00000001 not removed: not allowed" in caplog.text
    monkeypatch.undo()
    sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000002"]


COMMITS = [(saving, "_write_file"), (saving, "write_manifest"), (saving, "sync_folder"), (Path, "rename")]
COMMITS += [(saving.shutil, "rmtree"), (Path, "replace")]


@pytest.mark.parametrize(("again", "number"), product((False, True), range(6)))
def test_a_kill_at_each_commit_point(tmp_path: Path, again: bool, number: int) -> None:
    """Fault killed-between-commits: the newest complete checkpoint loads after a sweep, and nothing else is left; a
    step being replaced is there as it was or as it will be."""
    save_toy(tmp_path, 1)
    if again:
        save_toy(tmp_path, 2)
    killed = killed_at(COMMITS, number, lambda: save_toy(tmp_path, 2))
    points = 6 if again else 5  # file, manifest, [rename of the old one,] rename, sync, [rmtree,] latest
    assert killed == (number < points + again)
    sweep(tmp_path)
    names = [path.name for path in tmp_path.iterdir()]
    assert {"latest", "step_00000001"} <= set(names) <= {"latest", "step_00000001", "step_00000002"}
    newest = next(find_complete(tmp_path))
    assert newest.name == ("step_00000002" if again or number >= 3 else "step_00000001")
    load_toy(newest, toy_slices(9))


def test_a_second_job_is_refused_and_a_dead_ones_lock_is_not(tmp_path: Path) -> None:
    """Fault second-job-in-folder: the message names host and process; a lock ends with its process, however it
    ended."""
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)

    def hold() -> None:
        with lock_run_dir(tmp_path, ALONE):
            send.send(os.getpid())
            fork.Event().wait()

    holder = fork.Process(target=hold)
    holder.start()
    assert receive.poll(30)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / ".tmp-step_00000001-its").mkdir()
    kind, code, message = outcome(lambda: lock_run_dir(tmp_path, ALONE).__enter__())
    assert (kind, code) == ("StorageError", 7)
    assert f'"pid": {receive.recv()}' in message
    assert socket.gethostname() in message
    assert "\n" not in message
    assert (tmp_path / FOLDER / ".tmp-step_00000001-its").exists(), "what a live job writes is not swept"
    holder.kill()
    holder.join()
    with lock_run_dir(tmp_path, ALONE):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
        assert not (tmp_path / FOLDER / ".tmp-step_00000001-its").exists()
    with lock_run_dir(tmp_path, ALONE):
        pass


def test_a_sweep_that_fails_leaves_the_folder_to_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process goes on, so a lock's file left open would refuse every later start in the folder."""

    def fail(_: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(folders, "sweep", fail)
    before = len(os.listdir("/proc/self/fd"))
    kind, code, message = outcome(lambda: lock_run_dir(tmp_path, ALONE).__enter__())
    assert (kind, code) == ("StorageError", 7)
    assert "Input/output error" in message
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.undo()
    with lock_run_dir(tmp_path, ALONE):
        pass


def check_in_turn(root: str) -> list[tuple[str, int, str]]:
    ctx = context.create(Grid(tp=1, dp=2, pp=1))
    file = Path(root) / "file"
    found = [
        outcome(lambda: check(file / "checkpoints", 0, ctx)),
        outcome(lambda: check(Path("/proc/no/checkpoints"), 0, ctx)),
        outcome(lambda: check(Path(root) / "checkpoints", 10**15, ctx)),
        outcome(lambda: check(Path(root) / "checkpoints", 1000, ctx)),
        outcome(lambda: exclusive(file, file, ctx).__enter__()),
    ]
    other = Path(root) / "checkpoints" if ctx.world.first else Path(root) / "of_another_node"
    return [*found, outcome(lambda: check(other, 0, ctx))]


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """Fault unwritable-folder: a file at the path, no permission, no space, a rank on another disk; the same words
    everywhere."""
    (tmp_path / "file").write_text("")
    ranks = run_ranks(2, check_in_turn, str(tmp_path))
    assert ranks[0] == ranks[1]
    words = ["file", "/proc/no", "free some space", "", "file", "(rank 1): "]
    for (kind, code, message), word in zip(ranks[0], words, strict=True):
        assert (kind, code) == (("StorageError", 7) if word else ("", 0))
        assert word in message
        assert "\n" not in message
    assert "all ranks must see the same folder" in ranks[0][-1][2]
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep_every": 5}, "checkpoint.keep_every=5, checkpoint.keep_last=0: all checkpoints are kept"),
        ({"strict": False}, "checkpoint.strict=false, checkpoint.init_from=none: only the weights"),
        ({"init_from": "a", "resume": "b"}, "checkpoint.init_from=a, checkpoint.resume=b: both name"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match="checkpoint") as caught:
        validate(Config(checkpoint=CheckpointConfig(**options)), 1)
    assert str(caught.value).startswith(said)
