"""Ends of a run looking like success, and output going nowhere: each is told, with an exit code."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megapar.checkpoint import save
from megapar.step import divisors
from megapar.train import trainer
from tests.support import program
from tests.support.faults import TWO, Scene, error, metrics, on_rank

EXIT = ("import sys\nsys.exit(0)\n", "SystemExit: 0")
PANIC = ("class Panic(BaseException): pass\nraise Panic('lost')\n", "Panic: lost")
LEAVING = [("parallel.schedule", *EXIT), ("model.family", *EXIT), ("model.family", *PANIC)]


# Code that ends the process


@pytest.mark.parametrize(("option", "text", "words"), LEAVING)
def test_a_module_that_leaves_while_it_is_imported(option: str, text: str, words: str, tmp_path: Path) -> None:
    """Fault module-that-exits."""
    scene = Scene(tmp_path)
    (scene.work / "leaving.py").write_text(text)
    ended = scene.run(f"--{option}", "leaving:X", plant=lambda: sys.path.insert(0, "."))
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"ConfigError: {option}=leaving:X: cannot be imported ({words})")
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("flags", [(), TWO], ids=["one", "two"])
def test_code_that_exits_within_a_step(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Fault module-that-exits: no rank ends with 0 before the run is complete, and the line names the caller."""
    ended = program.run(*flags, cwd=tmp_path, plant=on_rank(len(flags) // 2, 1, lambda _: sys.exit(0)))
    assert ended.code == 70
    assert ended.err.startswith("MegaparError: ")
    assert f"{__file__}:" in ended.err
    assert "called sys.exit(0) before the run was complete" in ended.err
    assert ended.err.count("\n") == 1
    assert error(tmp_path)["class"] == "MegaparError"


def test_help_is_no_early_exit(tmp_path: Path) -> None:
    ended = program.run("--help", cwd=tmp_path)
    assert (ended.code, ended.err) == (0, "")
    assert "--train.steps" in ended.out


class Panic(BaseException):
    """As Rust's, raised by safetensors: no subclass of Exception."""


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_panic_while_a_checkpoint_is_written(asynchronous: bool, tmp_path: Path) -> None:
    """Fault panic-in-a-thread: the ranks do not wait for ever for an ended thread."""

    def plant() -> None:
        def panic(*_: Any) -> None:
            raise Panic("index out of bounds")

        save.save_file = panic

    scene = Scene(tmp_path)
    flags = ("--checkpoint.async_save",) if asynchronous else ()
    ended = scene.run(*TWO, *flags, "--train.steps", "2", plant=plant)
    assert ended.code == 7
    assert ended.err.startswith("StorageError: checkpoint of step 2 not saved (rank 0 and 1 more): ")
    assert "index out of bounds" in ended.err
    assert scene.check_checkpoints() == []


# Output that would go nowhere


def at_third_step(act: Callable[[], object]) -> Callable[[], None]:
    """Plants `act` on the only rank, before its third step is computed."""
    return on_rank(0, 2, lambda _: act())


def test_metrics_that_are_removed_or_renamed_go_on_under_their_name(tmp_path: Path) -> None:
    """Fault removed-metrics: each loss is told once, and each line from then on is in the file of this name."""
    scene = Scene(tmp_path)
    path = Path("run/metrics.jsonl")

    def act(ctx: Any) -> None:
        # A thread writes the lines. Those of the steps before must be there before the file goes.
        lines = {3: 2, 6: 3}.get(ctx.flight.step, 0)
        while lines and (not path.exists() or path.read_bytes().count(b"\n") < lines):
            time.sleep(0.01)
        if ctx.flight.step == 3:
            path.unlink()
        if ctx.flight.step == 6:
            path.rename("run/older.jsonl")

    def plant() -> None:
        real = divisors.count_targets

        def count_targets(batches: Any, ctx: Any) -> Any:
            act(ctx)
            return real(batches, ctx)

        divisors.count_targets = count_targets

    ended = scene.run("--train.steps", "7", plant=plant)
    assert ended.code == 0, ended.err
    first, second = ended.err.splitlines()
    assert first.startswith("run/metrics.jsonl: was removed or replaced; the lines from step 3 on are in ")
    assert second.startswith("run/metrics.jsonl: was removed or replaced; the lines from step 6 on are in ")
    lines = [json.loads(line)["step"] for line in (scene.work / "run/older.jsonl").read_text().splitlines()]
    assert lines == [3, 4, 5]
    assert [line["step"] for line in metrics(scene.work)] == [6, 7]


def test_metrics_that_are_cut_short_hold_no_zeros(tmp_path: Path) -> None:
    """Fault removed-metrics."""
    emptied = at_third_step(lambda: os.truncate("run/metrics.jsonl", 0))
    ended = program.run("--train.steps", "4", cwd=tmp_path, plant=emptied)
    assert ended.code == 0, ended.err
    assert 0 not in (tmp_path / "run/metrics.jsonl").read_bytes()
    assert metrics(tmp_path)[-1]["step"] == 4


def test_a_tensorboard_folder_that_is_removed_is_told(tmp_path: Path) -> None:
    """Fault removed-metrics."""
    ended = program.run(
        "--train.steps", "4", cwd=tmp_path, plant=at_third_step(lambda: shutil.rmtree("run/tensorboard"))
    )
    assert ended.code == 0, ended.err
    assert ended.err.startswith("run/tensorboard: nothing more is written (No such file or directory); the run goes on")
    assert ended.err.count("\n") == 1
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4]


def test_a_tensorboard_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """Fault unwritable-folder: its thread fails while it is made."""

    def plant() -> None:
        real = trainer.Reporter

        def limited(*args: Any, **named: Any) -> Any:
            (Path("run") / "tensorboard").symlink_to("/proc/self")
            return real(*args, **named)

        trainer.Reporter = limited

    ended = program.run(cwd=tmp_path, plant=plant)
    assert ended.code == 7
    assert ended.err.startswith("StorageError: metrics not written: cannot write run/tensorboard: ")
    assert ended.err.count("\n") == 1
