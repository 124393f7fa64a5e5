"""Checkpoints through pretrain.py, as a person meets them: exit codes and the one line on stderr."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megapar.checkpoint.format import find_complete
from tests.test_checkpoint_format import edit_bytes, edit_manifest, flip_bit
from tests.test_program import TINY, finish, start

ASYNC = ("--checkpoint.every", "1", "--checkpoint.async_save", "--checkpoint.keep_last", "2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of five steps on two ranks, saved behind after each."""
    folder = tmp_path_factory.mktemp("trained")
    code, out, err = finish(start(*ASYNC, "--launch.nproc", "2", cwd=folder))
    assert (code, err) == (0, "")
    assert [f"saved run/checkpoints/step_{step:08d}" in out for step in range(1, 6)] == [True] * 5
    return folder


def test_an_asynchronous_run_keeps_what_it_was_asked_to(trained: Path) -> None:
    """Row 43 as well: what it saved behind is, but for this option, what a synchronous run in one process resumes."""
    names = sorted(path.name for path in (trained / "run/checkpoints").iterdir())
    assert names == ["latest", "step_00000004", "step_00000005"]
    folder = trained.parent / "resumed"
    shutil.copytree(trained, folder)
    shutil.rmtree(folder / "run/checkpoints/step_00000005")
    resumed = ("--launch.nproc", "2", "--checkpoint.every", "1", "--checkpoint.keep_last", "2")
    code, out, err = finish(start(*resumed, cwd=folder))
    assert (code, err) == (0, "")
    assert "changed since: checkpoint.async_save: True -> False" in out
    again, first = (next(find_complete(path / "run/checkpoints")) for path in (folder, trained))
    assert again.name == first.name == "step_00000005"
    for shard in first.glob("rank_*"):
        assert shard.read_bytes() == (again / shard.name).read_bytes()


CORRUPTIONS: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped bit": (lambda path: edit_bytes(path, flip_bit), "CRC-32"),
    "edited manifest": (lambda path: edit_manifest(path, lambda b: b.update(step=3), sign=False), "sha256"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_damaged_checkpoint_ends_the_program(trained: Path, tmp_path: Path, name: str) -> None:
    """K3, K4: exit code 4 and one line; error.json says the same."""
    corrupt, reason = CORRUPTIONS[name]
    shutil.copytree(trained / "run", tmp_path / "run")
    path = tmp_path / "run/checkpoints/step_00000005"
    corrupt(path)
    code, _, err = finish(start("--launch.nproc", "2", "--checkpoint.resume", str(path), cwd=tmp_path))
    assert code == 4
    assert err.startswith("CheckpointError: ")
    assert err.count("\n") == 1
    assert reason in err
    assert json.loads((tmp_path / "run/error.json").read_text())["exit_code"] == 4


def test_a_full_disk_ends_the_program_and_costs_no_older_checkpoint(trained: Path, tmp_path: Path) -> None:
    """K7: exit code 7 and one line with path and bytes; files may grow to 200 blocks of 1,024 bytes."""
    shutil.copytree(trained / "run", tmp_path / "run")
    program = Path(__file__).parent.parent / "pretrain_scripts/pretrain.py"
    flags = (*TINY, "--run_dir", "run", "--train.steps", "7", *ASYNC, "--log.no-tensorboard")
    limited = ["bash", "-c", 'ulimit -f 200; exec "$@"', "bash", sys.executable, str(program), *flags]
    run = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 7, run.stderr
    assert run.stderr.startswith("StorageError: checkpoint of step 6 not saved: run/checkpoints/.tmp-step_00000006")
    assert run.stderr.count("\n") == 1
    assert "bytes needed" in run.stderr
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir() if path.name[:5] != ".tmp-")
    assert names == ["latest", "step_00000004", "step_00000005"]
