"""Checkpoints through pretrain.py, as a person meets them: exit codes and the one line on stderr."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megapar.base.errors import CheckpointError
from megapar.checkpoint.format import find_complete, read_manifest
from megapar.checkpoint.resume import choose
from megapar.declare import context
from megapar.train.position import position
from tests.support import program
from tests.support.checkpoints import edit_bytes, edit_manifest, flip_bit, save_toy
from tests.support.processes import TINY
from tests.support.program import FEW_LAYERS
from tests.support.sweeps import slow_but

ASYNC = ("--checkpoint.every", "1", "--checkpoint.async_save", "--checkpoint.keep_last", "2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of five steps on two ranks, saved behind after each."""
    folder = tmp_path_factory.mktemp("trained")
    ended = program.run(*ASYNC, "--launch.nproc", "2", cwd=folder)
    assert ended.code == 0, ended.err
    # On a slow disk a save waits for the one before, and says so.
    assert all(line.endswith("which is still being written") for line in ended.err.splitlines()), ended.err
    assert [f"saved run/checkpoints/step_{step:08d}" in ended.out for step in range(1, 6)] == [True] * 5
    return folder


def test_an_asynchronous_run_keeps_what_it_was_asked_to(trained: Path) -> None:
    """Fault resumption-is-bitwise as well: what it saved behind is, but for this option, what a synchronous run in one
    process resumes."""
    names = sorted(path.name for path in (trained / "run/checkpoints").iterdir())
    assert names == ["latest", "step_00000004", "step_00000005"]
    folder = trained.parent / "resumed"
    shutil.copytree(trained, folder)
    shutil.rmtree(folder / "run/checkpoints/step_00000005")
    resumed = ("--launch.nproc", "2", "--checkpoint.every", "1", "--checkpoint.keep_last", "2")
    ended = program.run(*resumed, cwd=folder)
    assert (ended.code, ended.err) == (0, "")
    assert "changed since: checkpoint.async_save: True -> False" in ended.out
    again, first = (next(find_complete(path / "run/checkpoints")) for path in (folder, trained))
    assert again.name == first.name == "step_00000005"
    for shard in first.glob("rank_*"):
        assert shard.read_bytes() == (again / shard.name).read_bytes()


CORRUPTIONS: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped bit": (lambda path: edit_bytes(path, flip_bit), "CRC-32"),
    "edited manifest": (lambda path: edit_manifest(path, lambda b: b.update(step=3), sign=False), "sha256"),
}


@pytest.mark.parametrize("name", slow_but([0], CORRUPTIONS))
def test_a_damaged_checkpoint_ends_the_program(trained: Path, tmp_path: Path, name: str) -> None:
    """Faults flipped-bit, incomplete-checkpoint: exit code 4 and one line; error.json says the same."""
    corrupt, reason = CORRUPTIONS[name]
    shutil.copytree(trained / "run", tmp_path / "run")
    path = tmp_path / "run/checkpoints/step_00000005"
    corrupt(path)
    ended = program.run("--launch.nproc", "2", "--checkpoint.resume", str(path), cwd=tmp_path)
    assert ended.code == 4
    assert ended.err.startswith("CheckpointError: ")
    assert ended.err.count("\n") == 1
    assert reason in ended.err
    assert json.loads((tmp_path / "run/error.json").read_text())["exit_code"] == 4


def test_a_full_disk_ends_the_program_and_costs_no_older_checkpoint(trained: Path, tmp_path: Path) -> None:
    """Faults disk-without-space, save-fails-for-a-while: the last save ends the run with exit code 7, and each failure
    is one line with path and bytes; files may grow to 200 blocks of 1,024 bytes."""
    shutil.copytree(trained / "run", tmp_path / "run")
    program = Path(__file__).parent.parent / "pretrain_scripts/pretrain.py"
    flags = (*TINY, *FEW_LAYERS, "--run_dir", "run", "--train.steps", "7", *ASYNC, "--log.no-tensorboard")
    limited = ["bash", "-c", 'ulimit -f 200; exec "$@"', "bash", sys.executable, str(program), *flags]
    run = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 7, run.stderr
    (first,) = (line for line in run.stdout.splitlines() if line.startswith("save_failed: "))
    assert "checkpoint of step 6 not saved: run/checkpoints/.tmp-step_00000006" in first
    assert "the next save is that of step 7; the newest complete checkpoint is that of step 5, " in first
    assert run.stderr.startswith("StorageError: checkpoint of step 7 not saved: run/checkpoints/.tmp-step_00000007")
    assert run.stderr.count("\n") == 1
    assert "bytes needed" in first
    assert "bytes needed" in run.stderr
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir() if path.name[:5] != ".tmp-")
    assert names == ["latest", "step_00000004", "step_00000005"]


ONE = ("--checkpoint.every", "2", "--log.no-tensorboard", "--train.steps")


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("four_steps")
    assert program.run(*ONE, "4", cwd=folder).code == 0
    return folder


def test_a_run_goes_on_with_the_function_that_it_trained(four_steps: Path, tmp_path: Path) -> None:
    """Fault options-fixed-on-resumption: refused on a resumption, told of weights to start another run from."""
    shutil.copytree(four_steps / "run", tmp_path / "run")
    other = ("--model.rms_norm_eps", "0.001", "--model.rope_theta", "500")
    refused = program.run(*ONE, "6", *other, cwd=tmp_path)
    assert refused.code == 4, refused.err
    assert refused.err.startswith(
        "CheckpointError: run/checkpoints/step_00000004 does not fit this run (checkpoint | run): "
        "model.rms_norm_eps (1e-05 | 0.001), model.rope_theta (10000.0 | 500.0): the model would compute "
        "something else; resume with the values of the checkpoint"
    )
    assert refused.err.count("\n") == 1
    weights = ("--checkpoint.init_from", "run/checkpoints/step_00000004", "--run_dir", "other")
    told = program.run(*ONE, "2", *other, *weights, cwd=tmp_path)
    assert told.code == 0, told.err
    assert "computes something else than the checkpoint's model: model.rope_theta (10000.0 | 500.0)\n" in told.out


def link_shard(path: Path) -> None:
    (path / "rank_00000.safetensors").rename(path.parents[2] / "elsewhere")
    (path / "rank_00000.safetensors").symlink_to(path.parents[2] / "elsewhere")


def link_manifest(path: Path) -> None:
    (path / "manifest.json").rename(path.parents[2] / "manifest")
    (path / "manifest.json").symlink_to(path.parents[2] / "manifest")


def reseal_newer(path: Path) -> None:
    """As a later version might: the SHA-256 is of something else, and tensors are written otherwise."""
    edit_manifest(path, lambda body: body.update(format=2, tensors=[]), sign=False)


FOREIGN: dict[str, tuple[Callable[[Path], None], str]] = {
    "newer": (lambda path: edit_manifest(path, lambda body: body.update(format=2)), "format 2, this version reads"),
    "newer, sealed otherwise": (reseal_newer, "format 2, this version reads"),
    "linked file": (link_shard, "not a regular file"),
    "linked manifest": (link_manifest, "links are not followed"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_checkpoint_that_is_not_ours_is_neither_passed_over_nor_replaced(
    four_steps: Path, tmp_path: Path, name: str
) -> None:
    """Fault later-checkpoint-format: `auto` stops and says so; an older one asked for by name is gone on from, and it
    is set aside."""
    change, reason = FOREIGN[name]
    shutil.copytree(four_steps / "run", tmp_path / "run")
    path = tmp_path / "run/checkpoints/step_00000004"
    change(path)
    before = (path / "manifest.json").read_bytes()
    stopped = program.run(*ONE, "6", cwd=tmp_path)
    assert stopped.code == 4, stopped.err
    assert stopped.err.startswith("CheckpointError: --checkpoint.resume auto: run/checkpoints/step_00000004/")
    assert reason in stopped.err
    assert stopped.err.count("\n") == 1
    assert (path / "manifest.json").read_bytes() == before
    if name == "newer":
        older = ("--checkpoint.resume", "run/checkpoints/step_00000002", "--checkpoint.keep_last", "1")
        done = program.run(*older, *ONE, "6", cwd=tmp_path)
        assert done.code == 0, done.err
        (aside,) = (tmp_path / "run/checkpoints").glob("abandoned-*/step_00000004")
        assert (aside / "manifest.json").read_bytes() == before


def nest(path: Path) -> None:
    (path / "manifest.json").write_text("[" * 100_000)


def trainer(**changes: Any) -> Callable[[Path], None]:
    return lambda path: edit_manifest(path, lambda body: body["trainer"].update(changes))


def section(name: str, value: Any) -> Callable[[Path], None]:
    return lambda path: edit_manifest(path, lambda body: body.update({name: value}))


SCALE = {"scale": 65536.0, "dynamic": True, "good_steps": 0}
ODD: dict[str, tuple[Callable[[Path], None], str]] = {
    "no updates": (lambda path: edit_manifest(path, lambda b: b["trainer"].pop("updates")), "trainer.updates is None"),
    "no config": (lambda path: edit_manifest(path, lambda b: b["trainer"].pop("config")), "trainer.config is None"),
    "updates in words": (trainer(updates="x"), "trainer.updates is 'x'"),
    "negative updates": (trainer(updates=-5), "trainer.updates is -5"),
    "updates beyond 64 bits": (trainer(updates=10**400), "trainer.updates is 1000"),
    "samples beyond 64 bits": (section("consumed_samples", 10**30), "must be integers of at least 0, below 2^60"),
    "a config that is a list": (trainer(config=[]), "trainer.config is []"),
    "a loss scale in words": (trainer(loss_scale="x"), "trainer.loss_scale is 'x'"),
    "a loss scale with other fields": (trainer(loss_scale={"scale": 1.0}), "trainer.loss_scale is {"),
    "a loss scale of nan": (trainer(loss_scale={**SCALE, "scale": float("nan")}), "loss_scale.scale is nan"),
    "a lineage in words": (trainer(lineage="x"), "trainer.lineage is 'x'"),
    "a trainer that is a list": (section("trainer", []), "trainer must be an object"),
    "data that is text": (section("data", "x"), "data must be an object"),
    "times of data that are a list": (section("data", {"modified": [1]}), "data.modified is no object"),
    "nested deeply": (nest, "not readable as JSON"),
}


def test_an_odd_manifest_is_passed_over_with_a_warning_and_an_error_by_name(
    four_steps: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault odd-manifest."""
    root = tmp_path / "run/checkpoints"
    path = root / "step_00000004"
    for name, (change, reason) in ODD.items():
        shutil.copytree(four_steps / "run", tmp_path / "run")
        change(path)
        caplog.clear()
        assert choose("auto", root, context.single(), check=position) == root / "step_00000002", name
        assert caplog.text.count("checkpoint skipped: ") == 1
        assert reason in caplog.text
        with pytest.raises(CheckpointError, match=re.escape(reason)):
            position(read_manifest(path))
        shutil.rmtree(tmp_path / "run")


def test_an_odd_manifest_ends_the_program_with_one_line(four_steps: Path, tmp_path: Path) -> None:
    """Fault odd-manifest."""
    shutil.copytree(four_steps / "run", tmp_path / "run")
    path = "run/checkpoints/step_00000004"
    edit_manifest(tmp_path / path, lambda body: body["trainer"].update(updates="x"))
    ended = program.run("--checkpoint.resume", path, *ONE, "6", cwd=tmp_path)
    assert (ended.code, ended.err.count("\n")) == (4, 1), ended.err
    assert "trainer.updates is 'x'" in ended.err
    resumed = program.run(*ONE, "6", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert "resumed step 2 from" in resumed.out


def remove_run_folder(again: bool) -> None:
    """After the third step the run folder is gone, or another of its name is there."""
    from megapar.train import trainer

    original = trainer.queue_step

    def queue_step(state: Any, *args: Any, **named: Any) -> Any:
        if state.step == 2:
            shutil.move("run", "moved")
            if again:
                Path("run").mkdir()
                (Path("run") / ".lock").write_text("")
        return original(state, *args, **named)

    trainer.queue_step = queue_step


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "replaced"])
def test_a_run_folder_that_is_taken_away_is_noticed_at_the_next_save(tmp_path: Path, again: bool) -> None:
    """Fault replaced-run-folder: nothing is written into the new folder, for it may be another job's. A deleted one may
    come back, until the run's last save."""
    ended = program.run(*ONE, "6", cwd=tmp_path, plant=lambda: remove_run_folder(again))
    assert ended.code == 7, ended.out
    reason = "not saved: run/.lock is not the file that this run locked"
    assert f"checkpoint of step {4 if again else 6} {reason}" in ended.err
    assert (f"save_failed: checkpoint of step 4 {reason}" in ended.out) == (not again)
    assert "Traceback" not in ended.err
    assert not (tmp_path / "run/checkpoints").exists()
    assert (tmp_path / "moved/checkpoints/step_00000002").exists()


def test_a_pointer_that_cannot_be_replaced_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fault pointer-is-not-trusted: `latest` is for people; the checkpoint beside it is complete."""
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest/x").touch()
    assert save_toy(tmp_path, 3) == tmp_path / "step_00000003"
    assert "latest not written: " in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000003"]
