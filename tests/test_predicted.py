"""--gpu: a dry run says whether the layout fits, and a run predicts its step, or says in one line why not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megapar_models.registry import validate
from megapar_tools.plan import fits, hardware, memory, target
from megapar_tools.plan.hardware import write

from megapar.base.errors import ConfigError
from megapar.config.options import Config
from megapar.declare import context
from tests.support.options import load
from tests.support.plans import PARTS

SMALL = ["--model.vocab_size", "256", "--train.precision", "bf16"]


def planned(*flags: str) -> Config:
    return load(["--dry_run", *SMALL, *flags]).config


def show(given: Config) -> None:
    fits.show_verdict(given, validate(given, 1), PARTS, lambda config: validate(config, 1))


def test_a_layout_that_fits_says_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    show(planned("--gpu", "h100-80g"))
    assert capsys.readouterr().out.startswith("fits on h100-80g of 79.10 GiB: the fullest rank needs ")


def test_a_layout_that_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = planned("--gpu", "h100-80g", "--train.micro_batch_size", "8", "--train.global_batch_size", "8")
    fullest = memory.fullest_rank(validate(given, 1), PARTS).total
    card = replace(hardware.load("h100-80g"), name="card", memory_gib=(fullest - 1) / 2**30, reserve_gib=0.0)
    write(card, tmp_path / "card.toml")
    show(replace(given, gpu=str(tmp_path / "card.toml")))
    text = capsys.readouterr().out
    assert text.startswith("does not fit on card of ")
    assert "; would fit: train.micro_batch_size 4 (" in text or "; would fit: kernels.loss_chunk" in text


def test_without_a_machine_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    show(planned())
    assert capsys.readouterr().out == ""


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hardware h100: unknown.*did you mean h100-80g"):
        show(planned("--gpu", "h100"))


def test_a_run_on_a_named_machine_has_a_prediction() -> None:
    config = validate(load([*SMALL, "--gpu", "h100-80g"]).config, 1)
    found = fits.prediction_of(config, PARTS, context.single())
    assert found is not None
    assert found.machine == "h100-80g"
    assert 0 < found.seconds < 1
    assert fits.prediction_of(replace(config, gpu="auto"), PARTS, context.single()) is None  # a CPU has no name


def test_a_machine_that_cannot_be_asked_costs_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Neither a mistyped name nor a precision that the machine lacks ends a run."""
    machine = hardware.load("h100-80g")
    write(replace(machine, peak_tflops={"fp32": 60.0}), tmp_path / "old.toml")
    for gpu in ("h100", str(tmp_path / "old.toml")):
        config = validate(load([*SMALL, "--gpu", gpu]).config, 1)
        assert fits.prediction_of(config, PARTS, context.single()) is None
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("no prediction of the step: hardware ")


@pytest.mark.parametrize(
    ("described", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24g"),
        ("NVIDIA B200", "b200-180g"),
        ("NVIDIA GB200", "gb200-186g"),
        ("NVIDIA B300 SXM6 AC", "b300-270g"),
        ("NVIDIA GB300", "gb300-279g"),
        ("Tesla T4", ""),
    ],
)
def test_gpus_are_known_by_their_names(described: str, name: str) -> None:
    assert hardware.name_of(described) == name
    assert not name or name in hardware.names()


def test_a_run_is_planned_for_its_own_device() -> None:
    """--gpu moves the plan of a dry run to GPUs, and not the memory report of a run on CPUs."""
    given = load([*SMALL, "--gpu", "h100-80g"]).config
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, so both are planned for it")
    assert target.planned_device(given) == "cpu"
    assert target.planned_device(replace(given, dry_run=True)) == "cuda"
