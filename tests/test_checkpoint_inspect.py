"""The inspection tool: what it says of a checkpoint, and its exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from megapar.base.errors import CheckpointError
from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.save import save
from megapar.declare import context
from tests.support.checkpoints import MODEL, STATE, edit_bytes, edit_tensor, flip_bit, save_toy, toy_slices
from tools.inspect_checkpoint import Options, describe, inspect, show

TOOL = Path(__file__).parents[1] / "tools" / "inspect_checkpoint.py"


def test_the_report_says_what_is_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_toy(tmp_path, 3)
    report = tmp_path / "report.json"
    assert inspect(Options(path, verify="crc", json=report)) == 0
    found = json.loads(report.read_text())
    assert (found["step"], found["consumed_samples"], found["parameters"], found["verified"]) == (3, 24, 37, "crc")
    assert found["bytes"] == (path / "rank_00000.safetensors").stat().st_size
    assert found["model_config"] == MODEL
    assert found["tensors"].keys() == {f"{state}.p{number}" for state in STATE for number in range(2)}
    assert found["tensors"]["exp_avg.p0"] == {"shape": [6, 5], "dtype": "float32", "chunks": 1}
    printed = capsys.readouterr().out
    assert "6 x 5" in printed
    assert "exp_avg, exp_avg_sq, main" in printed
    assert "step 3, 24 samples" in printed


def test_names_are_whole_and_what_all_tensors_have_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_toy(tmp_path, 3)
    report = describe(path, read_manifest(path)) | {"verified": "size", "layout": {"tp": 2, "etp": 0}}
    long = "layers.17.attention.a_projection_with_a_very_long_name_indeed_of_many_words.weight"
    states = ["exp_avg", "exp_avg_sq", "main"]
    report["tensors"] |= {f"{state}.{long}": report["tensors"]["main.p0"] for state in states}
    report["tensors"]["buffer.bias"] = report["tensors"]["main.p1"]
    show(report, Console(width=1000))
    printed = capsys.readouterr().out
    assert f" {long} " in printed
    assert "\u2026" not in printed
    assert printed.count("exp_avg, exp_avg_sq, main") == 1
    assert "states of 3 of 4 tensors: exp_avg, exp_avg_sq, main" in printed
    assert [line for line in printed.splitlines() if " buffer " in line]
    assert "written by tp 2; verified by size" in printed


def test_a_reader_that_stops_reading_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `head` does. The report and the exit code are those of the checkpoint."""
    path = save_toy(tmp_path / "a", 3)
    report = tmp_path / "report.json"
    other = save_toy(tmp_path / "b", 4)
    for compare, code in ((None, 0), (other, CheckpointError.exit_code)):
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w") as closed:
            monkeypatch.setattr(sys, "stdout", closed)
            assert inspect(Options(path, compare=compare, json=report)) == code
        monkeypatch.undo()
    assert json.loads(report.read_text())["differences"]


def test_two_checkpoints_are_compared_bit_by_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same state counts as equal whatever layout wrote it; a sign of zero and a NaN are told apart."""
    first, again = save_toy(tmp_path / "a", 3), save_toy(tmp_path / "b", 3)
    assert inspect(Options(first, compare=again)) == 0
    slices = toy_slices(3)
    slices[0].main[7] += 0.5
    trainer = {"lr": 0.2, "loss_scale": 1 / 3, "config": {"tp": 2}}
    other = save(
        tmp_path / "c",
        slices=slices,
        ctx=context.single(),
        replicated=False,
        step=3,
        model_config={**MODEL, "rope": {"factor": 2.0}},
        data={"seed": 5},
        consumed_samples=32,
        layout={"dp": 2},
        trainer=trainer,
    )
    edit_tensor(other, "exp_avg.p1#0", lambda values: values[2].fill_(torch.nan))
    report = tmp_path / "report.json"
    assert inspect(Options(first, compare=other, json=report)) == 4
    assert json.loads(report.read_text())["differences"] == [
        "consumed_samples: 24 | 32",
        "model_config.rope.factor: 1.0 | 2.0",
        "trainer.lr: 0.1 | 0.2",
        "exp_avg.p1: 1 of 7 elements differ, by at most nan",
        "main.p0: 1 of 30 elements differ, by at most 0.5",
    ]
    slices = toy_slices(3)
    slices[0].main[0] = 0.0
    save_zero = [tmp_path / "d", tmp_path / "e"]
    for folder, zero in zip(save_zero, (0.0, -0.0), strict=True):
        slices[0].main[0] = zero
        save(
            folder,
            slices=slices,
            ctx=context.single(),
            replicated=False,
            step=3,
            consumed_samples=0,
            layout={},
            model_config={},
            trainer={},
            data={},
        )
    with pytest.raises(CheckpointError, match=r"exp_avg\.p1#0: exp_avg\.p1 holds values that are not finite"):
        inspect(Options(other, verify="crc"))
    capsys.readouterr()
    assert inspect(Options(save_zero[0] / "step_00000003", compare=save_zero[1] / "step_00000003")) == 4
    assert "main.p0" in capsys.readouterr().out


def test_damage_ends_with_one_line_and_exit_code_4(tmp_path: Path) -> None:
    """Sizes alone do not show a flipped bit; the CRC does."""
    path = save_toy(tmp_path, 3)
    edit_bytes(path, flip_bit)
    assert inspect(Options(path)) == 0
    run = subprocess.run([sys.executable, TOOL, path, "--verify", "crc"], capture_output=True, text=True)
    assert run.returncode == 4
    assert len(run.stderr.splitlines()) == 1
    assert f"{path}/rank_00000.safetensors: chunk " in run.stderr
    assert "CRC-32" in run.stderr
