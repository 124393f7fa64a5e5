"""An average of the weights over the steps (optimizer.ema): its values, its life in checkpoints, and its uses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.registry import validate
from megapar_tools.plan.memory import report_rank
from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError
from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.load import Reader
from megapar.checkpoint.tiers import FOLDER
from megapar.config.options import Config
from megapar.declare.params import AVERAGE, MAIN
from megapar.step.evaluation import averaged, evaluate
from megapar.step.state import TrainState
from megapar.step.step import train_step
from megapar.train.checkpoints import find, resume
from megapar.train.saver import Saver
from tests.support.distributed import run_ranks
from tests.support.grid import GPT, LLAMA, MIXTRAL, Layout, make_state, micro_batches, name
from tests.support.plans import PARTS
from tests.support.sweeps import slow_but
from tools.convert_checkpoint import COMMANDS

DECAY = 0.75
STEPS = 3


def averaging(layout: Layout, precision: str = "fp32", **options: Any) -> Config:
    config = layout.config(precision)
    return replace(config, optimizer=replace(config.optimizer, ema=DECAY, **options))


def trained(state: TrainState, steps: int = STEPS) -> TrainState:
    for _ in range(steps):
        train_step(state, micro_batches(state.config, state.ctx, state.step))
        state.weights.wait()
    return state


def save(state: TrainState, run_dir: Path) -> Path:
    with Saver(state, run_dir) as saver:
        saver.save(state)
    return run_dir / FOLDER / f"step_{state.step:08d}"


def stored(path: Path, state: str) -> dict[str, Tensor]:
    """The logical tensors of one state in a checkpoint."""
    manifest = read_manifest(path)
    with Reader(path, manifest) as reader:
        names = [key for key in manifest.tensors if key.startswith(f"{state}.")]
        return {key.partition(".")[2]: reader.tensor(key) for key in names}


def saved_by_step(layout: Layout, run_dir: str, precision: str, options: dict[str, Any]) -> None:
    """Write a checkpoint before the first step and after each."""
    state = make_state(averaging(layout, precision, **options))
    save(state, Path(run_dir))
    for _ in range(STEPS):
        save(trained(state, 1), Path(run_dir))


def folders(run_dir: Path) -> list[Path]:
    return sorted((run_dir / FOLDER).glob("step_*"))


LAYOUTS = [
    Layout(LLAMA),
    Layout(GPT, tp=2),
    Layout(LLAMA, dp=2, zero_stage=3),
    Layout(LLAMA, dp=2, zero_stage=0),
    Layout(MIXTRAL, dp=2, ep=2, zero_stage=2),
    Layout(LLAMA, pp=2, vpp=2, schedule="interleaved"),
]


@pytest.mark.parametrize("options", slow_but([1], [{}, {"offload": 0.5}]), ids=["device", "offload"])
@pytest.mark.parametrize("precision", slow_but([0], ["fp32", "bf16"]))
@pytest.mark.parametrize("layout", slow_but([2], LAYOUTS), ids=name)
def test_it_is_that_of_all_main_weights_so_far(
    layout: Layout, precision: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """In fp64, of the main weights in the checkpoints of all steps: so it is right in a layout if these are."""
    run_ranks(layout.world, saved_by_step, layout, str(tmp_path), precision, options)
    first, *others = folders(tmp_path)
    expected = {key: values.double() for key, values in stored(first, MAIN).items()}
    assert all(torch.equal(stored(first, AVERAGE)[key].double(), values) for key, values in expected.items())
    for path in others:
        main = stored(path, MAIN)
        found = stored(path, AVERAGE)
        assert found.keys() == expected.keys() == main.keys()
        for key in found:
            expected[key] = DECAY * expected[key] + (1 - DECAY) * main[key].double()
            torch.testing.assert_close(found[key].double(), expected[key], rtol=1e-6, atol=1e-7)
            assert not torch.equal(found[key], main[key])


def evaluated(layout: Layout, precision: str, options: dict[str, Any]) -> tuple[float, float, float, bool, float]:
    """Losses with the trained weights, with their average, and with a model that has the average as its weights.

    Then whether training goes on as if nothing had been evaluated.
    """
    config = averaging(layout, precision, **options)
    config = replace(config, train=replace(config.train, eval_weights="average"))
    state = trained(make_state(config))
    batches = micro_batches(config, state.ctx, 7)
    before = state.weights.flat.clone(), [part.tensors[AVERAGE].clone() for part in state.optimizer.slices()]
    by_trained = evaluate(state, batches).loss
    with averaged(state):
        by_average = evaluate(state, batches).loss
    parts = [part.tensors[AVERAGE] for part in state.optimizer.slices()]
    same = torch.equal(state.weights.flat, before[0]) and all(map(torch.equal, parts, before[1]))
    other = make_state(config)
    for mine, theirs in zip(other.optimizer.slices(), state.optimizer.slices(), strict=True):
        mine.tensors[MAIN].copy_(theirs.tensors[AVERAGE])
    other.optimizer.refresh_params_from_main()
    by_other = evaluate(other, batches).loss
    trained(state, 1)
    alone = trained(make_state(config), STEPS + 1)
    same = same and torch.equal(state.weights.flat, alone.weights.flat)
    return by_trained, by_average, by_other, same, evaluate(state, batches).loss


@pytest.mark.parametrize("precision", slow_but([1], ["fp32", "bf16"]))
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param(Layout(LLAMA), {}, marks=pytest.mark.slow),
        (Layout(LLAMA), {"offload": 1.0}),
        pytest.param(Layout(LLAMA, dp=2, zero_stage=1), {"overlap_param_gather": True}, marks=pytest.mark.slow),
        pytest.param(Layout(LLAMA, dp=2, zero_stage=3), {}, marks=pytest.mark.slow),
    ],
    ids=["one process", "offload", "zero 1, gathers under the forward pass", "zero 3"],
)
def test_evaluations_use_it_and_leave_no_trace(layout: Layout, options: dict[str, Any], precision: str) -> None:
    for by_trained, by_average, by_other, same, _ in run_ranks(layout.world, evaluated, layout, precision, options):
        assert by_average == by_other != by_trained
        assert same


def test_a_run_resumes_it_bitwise_begins_with_it_and_drops_it(tmp_path: Path) -> None:
    state = trained(make_state(averaging(Layout(LLAMA))), 2)
    save(state, tmp_path)
    again = make_state(state.config)
    notes = resume(again, tmp_path, find(again.config, tmp_path, again.ctx))
    assert not any("average" in note for note in notes)
    for mine, theirs in zip(trained(again, 1).optimizer.slices(), trained(state, 1).optimizer.slices(), strict=True):
        assert torch.equal(mine.tensors[AVERAGE], theirs.tensors[AVERAGE])
    without = make_state(Layout(LLAMA).config())
    notes = resume(without, tmp_path, find(without.config, tmp_path, without.ctx))
    assert "the average of the weights of the checkpoint is left out: optimizer.ema is 0" in notes
    other = tmp_path / "without"
    save(trained(without, 1), other)
    begins = make_state(state.config)
    notes = resume(begins, other, find(begins.config, other, begins.ctx))
    assert "the average of the weights begins with the weights of this step" in notes
    for part in begins.optimizer.slices():
        assert torch.equal(part.tensors[AVERAGE], part.tensors[MAIN])


def test_a_skipped_update_is_not_averaged() -> None:
    state = trained(make_state(averaging(Layout(LLAMA))), 1)
    before = [part.tensors[AVERAGE].clone() for part in state.optimizer.slices()]
    average = state.optimizer.average
    assert average is not None
    average.update(torch.ones(()))
    assert all(torch.equal(part.tensors[AVERAGE], x) for part, x in zip(state.optimizer.slices(), before, strict=True))
    average.update(torch.zeros(()))
    assert not all(map(torch.equal, [part.tensors[AVERAGE] for part in state.optimizer.slices()], before))


def convert(src: Path, dst: Path) -> None:
    options, run = COMMANDS["average"]
    run(options(src, dst))


def test_a_checkpoint_of_it_is_made(tmp_path: Path) -> None:
    """Of what was trained. Frozen weights stay as they are."""
    config = averaging(Layout(LLAMA, trainable=("*.mlp.*",)))
    path = save(trained(make_state(config)), tmp_path)
    convert(path, tmp_path / "average")
    main, average, made = stored(path, MAIN), stored(path, AVERAGE), stored(tmp_path / "average", MAIN)
    assert {key for key in main if ".mlp." in key} == average.keys() < main.keys() == made.keys()
    assert all(torch.equal(made[key], average.get(key, main[key])) for key in made)
    without = save(trained(make_state(Layout(LLAMA).config())), tmp_path / "without")
    with pytest.raises(CheckpointError, match=r"has no average of weights; train with optimizer\.ema, such as 0\.999"):
        convert(without, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_plan_has_its_bytes(precision: str) -> None:
    config = averaging(Layout(LLAMA, zero_stage=1), precision)
    planned = report_rank(replace(config, launch=replace(config.launch, device="cpu")), PARTS, 0)
    without = report_rank(replace(config, optimizer=replace(config.optimizer, ema=0.0)), PARTS, 0)
    state = make_state(config)
    assert planned.optimizer == state.optimizer.nbytes
    assert planned.optimizer - without.optimizer == 4 * state.weights.layout.numel


@pytest.mark.parametrize(
    ("optimizer", "train", "words"),
    [
        ({"ema": 1.0}, {}, "optimizer.ema=1.0: must be at least 0 and below 1"),
        ({"ema": -0.5}, {}, "optimizer.ema=-0.5: must be at least 0 and below 1"),
        ({}, {"eval_weights": "average"}, "there is no average of the weights; set optimizer.ema, such as 0.999"),
    ],
)
def test_what_makes_no_sense_is_refused(optimizer: dict[str, Any], train: dict[str, Any], words: str) -> None:
    config = Layout(LLAMA).config()
    config = replace(config, optimizer=replace(config.optimizer, **optimizer), train=replace(config.train, **train))
    with pytest.raises(ConfigError, match=words):
        validate(config, 1)
