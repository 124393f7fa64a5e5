"""Spikes of the loss and the gradient norm: seen where there is one, and followed by what guard.on_spike says."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.registry import validate

from megapar.base.errors import Rewind, StorageError
from megapar.base.grid import Grid
from megapar.base.precision import LossScale
from megapar.config.model_options import MoEConfig
from megapar.config.options import GuardConfig
from megapar.data_parallel.reduce import Gradients
from megapar.data_parallel.units import UnitGradients
from megapar.declare import context
from megapar.declare.largest_logits import measuring_modules
from megapar.step import divisors, step
from megapar.step.spikes import FILE, Spikes, compute_again, past_rewinds
from megapar.step.state import StepResult
from megapar.system import events
from tests.support import faults, tiny_models
from tests.support.distributed import run_ranks
from tests.support.faults import Scene
from tests.support.runs import assert_bitwise, stored
from tests.support.small_training import make_config, make_state
from tests.support.sweeps import slow_but

STEPS, AT = 72, 66


def flags_of(policy: str) -> tuple[str, ...]:
    sizes = ("--train.steps", str(STEPS), "--train.global_batch_size", "4", "--train.micro_batch_size", "2")
    quiet = ("--log.no-tensorboard", "--log.every", "1000", "--launch.timeout_seconds", "30")
    return (*sizes, *quiet, "--guard.on_spike", policy, "--checkpoint.every", "18")


def result(number: int, loss: float, norm: float) -> StepResult:
    return StepResult(number, loss, norm, 1e-3, 8.0, 8, 4 * number, LossScale.of("fp32"), False)


def watch(policy: str, folder: Path) -> Spikes:
    return Spikes(replace(make_config(), guard=GuardConfig(on_spike=policy)), folder, past_rewinds(folder))


def feed(spikes: Spikes, losses: list[float], first: int = 1) -> list[str]:
    return [
        spikes.judge(result(number, loss, 1.0 + 0.01 * (number % 7)), spikes.norm_limit(), context.single())
        for number, loss in enumerate(losses, first)
    ]


def test_noise_slow_changes_and_the_first_steps_are_no_spikes(tmp_path: Path) -> None:
    spikes = watch("warn", tmp_path)
    assert not any(feed(spikes, [9.0, 3.0, 8.0] * 16)), "too few steps to judge by"
    falling = [4.0 * 0.99**n + 0.05 * (-1) ** n for n in range(300)]
    rising = [2.0 + 0.002 * n for n in range(300)]
    for losses in (falling, rising):
        assert not any(feed(watch("warn", tmp_path), losses))


def test_a_spike_is_told_with_its_median_and_written(tmp_path: Path) -> None:
    spikes = watch("warn", tmp_path)
    feed(spikes, [2.0, 2.02, 1.98] * 20)
    (line,) = feed(spikes, [2.5], first=61)
    assert line == "spike: loss 2.5 where 2 is the median; the run goes on"
    line = spikes.judge(result(62, 2.0, 9.0), spikes.norm_limit(), context.single())
    assert line.startswith("spike: gradient norm 9 where")
    assert feed(spikes, [2.1], first=63) == [""], "less than a tenth above the median"
    assert [(event["step"], event["action"]) for event in events.read(tmp_path)] == [(61, "none"), (62, "none")]


def test_a_rewind_says_where_to_go_and_gives_up_after_three(tmp_path: Path) -> None:
    for past in range(3):
        spikes = watch("rewind", tmp_path)
        feed(spikes, [2.0, 2.02, 1.98] * 20)
        with pytest.raises(Rewind, match=r"step 61: spike: loss 9 .* of step 51 or before"):
            feed(spikes, [9.0], first=61)
        assert past_rewinds(tmp_path) == [61] * (past + 1)
        assert json.loads((tmp_path / FILE).read_text()) == {"last_step": 51, "consumed_samples": 244}
    spikes = watch("rewind", tmp_path)
    feed(spikes, [2.0, 2.02, 1.98] * 20)
    assert feed(spikes, [9.0], first=61)[0].endswith("the run goes on, as 3 rewinds have not helped")
    with pytest.raises(Rewind, match="step 161: spike"):
        feed(spikes, [9.0], first=161)


def spike_where_a_folder_is_in_the_way(folder: Path) -> tuple[str, bool, str]:
    ctx = context.create(Grid(dp=2))
    spikes = watch("rewind", folder)
    for number in range(1, 61):
        spikes.judge(result(number, 2.0 + 0.01 * (number % 5), 1.0), spikes.norm_limit(), ctx)
    with pytest.raises(StorageError) as raised:
        spikes.judge(result(61, 9.0, 1.0), spikes.norm_limit(), ctx)
    return type(raised.value).__name__, raised.value.everywhere, str(raised.value)


def test_all_ranks_end_alike_if_the_plan_of_a_rewind_cannot_be_written(tmp_path: Path) -> None:
    """Rank 0 alone writes rewind.json, where a folder is in the way."""
    (tmp_path / FILE).mkdir()
    first, second = run_ranks(2, spike_where_a_folder_is_in_the_way, tmp_path)
    assert first == second
    assert first[1]
    words = r"step 61: spike: loss 9 where .*; the next start cannot be told to go back \(rank 0\): cannot write "
    assert re.fullmatch(f"{words}{tmp_path / FILE}: Is a directory", first[2])
    assert past_rewinds(tmp_path) == [], "the run has not gone back"


def plant(
    marks: Path, *, norm: float = 1.0, loss: float = 1.0, always: bool = False, then_dies_at: int = -1
) -> Callable[[], None]:
    """Multiply the gradients, or the loss that is told, of step AT: once, or `always` when it is computed.

    After that a rank dies once at step `then_dies_at`.
    """

    def install() -> None:
        now = {"step": -1}
        count, total = divisors.count_targets, step.sum_of_losses
        marks.mkdir(exist_ok=True)

        def count_targets(batches: Any, ctx: Any) -> Any:
            now["step"] = ctx.flight.step
            now["rank"] = ctx.world.rank
            mark = marks / f"{now['rank']}"
            if now["step"] == then_dies_at and mark.exists() and now["rank"] == 0 and not (marks / "died").exists():
                (marks / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            now["strikes"] = now["step"] == AT and (always or not mark.exists())
            if now["strikes"]:
                mark.touch()
            return count(batches, ctx)

        def sum_of_losses(*args: Any) -> Any:
            return total(*args) * (loss if now["strikes"] else 1.0)

        divisors.count_targets = count_targets
        step.sum_of_losses = sum_of_losses
        for owner in (Gradients, UnitGradients):
            finish = owner.finish

            def spoiled(self: Any, finish: Any = finish) -> None:
                finish(self)
                if now["strikes"]:
                    self.flat.mul_(norm)

            owner.finish = spoiled

    return install


def told(scene: Scene, name: str) -> list[dict[str, Any]]:
    return [event for event in events.read(scene.work / "run") if event["event"] == name]


def test_a_step_computed_again_has_the_same_bits_and_changes_no_state() -> None:
    """Of a mixture, which counts the tokens of its experts and moves a bias by them, and measures its logits."""
    config = make_config()
    model = tiny_models.small("mixtral", 12, 3, 20, head_dim=4, moe=MoEConfig(4, 2, balance="bias"))
    config = validate(replace(config, model=model, optimizer=replace(config.optimizer, qk_clip=9.0)), 1)
    state = make_state(config)
    state.norm_limit = 1e-9  # every step is skipped
    batch = tiny_models.batch(config.model, samples=config.train.global_batch_size, length=config.train.seq_length)
    before = {name: x.clone() for stage in state.stages.values() for name, x in stage.state_dict().items()}
    queued = step.queue_step(state, [batch])
    result = queued.finish()
    assert compute_again(state, queued) == (result.loss, result.grad_norm)
    assert result.grad_norm > 0
    assert all(torch.isneginf(module.maxima).all() for module in measuring_modules(state.stages.values()))
    after = {name: x for stage in state.stages.values() for name, x in stage.state_dict().items()}
    assert before.keys() == after.keys()
    for name, x in after.items():
        assert torch.equal(x, before[name]), name


LAYOUTS = ["one", "tp2pp2", "zero3", "dp2"]


@pytest.mark.parametrize("layout", slow_but([0], LAYOUTS))
def test_a_step_with_a_spike_of_its_norm_is_skipped_on_every_rank(layout: str, tmp_path: Path) -> None:
    """Fault spike-of-the-norm: the run is that of the steps before, and the weights are those before the step."""
    scene = Scene(tmp_path)
    ended = scene.run(*flags_of("skip"), *faults.LAYOUTS[layout], plant=plant(tmp_path / "marks", norm=1000.0))
    assert ended.code == 0, ended.err
    assert f"step {AT}/{STEPS} | spike: gradient norm " in ended.out
    assert "; the weights are not updated; computed again the loss is " in ended.out
    assert "suspect the hardware" in ended.out
    (event,) = told(scene, "spike")
    assert (event["step"], event["policy"], event["action"]) == (AT, "skip", "skipped")
    lines = [line for line in faults.metrics(scene.work) if "loss" in line]
    assert [line["consumed_samples"] for line in lines] == [4 * n for n in range(1, STEPS + 1)]
    around = [line["grad_norm"] for line in lines[AT - 3 : AT + 2]]
    assert around[2] > 100 * max(around[:2])
    assert max(around[3:]) < 3 * max(around[:2]), "the update was not made"
    # Fault guard-forgets-on-restart: from step 54 on, with 12 steps before the spike, it is the same run.
    checkpoints = scene.work / "run/checkpoints"
    whole = stored(checkpoints / f"step_{STEPS:08}")
    shutil.rmtree(checkpoints / f"step_{STEPS:08}")
    other = {"tp2pp2": "one"}.get(layout, layout)
    resumed = scene.run(*flags_of("skip"), *faults.LAYOUTS[other], plant=plant(tmp_path / "again", norm=1000.0))
    assert resumed.code == 0, resumed.err
    assert "resumed step 54" in resumed.out
    assert [event["step"] for event in told(scene, "spike")] == [AT, AT]
    if other == layout:
        assert_bitwise(stored(checkpoints / f"step_{STEPS:08}"), whole, "resumed")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_spike_of_the_data_is_there_when_its_step_is_computed_again(layout: str, tmp_path: Path) -> None:
    """Fault spike-of-the-norm: a step computed again changes nothing of the run."""
    for name in ("again", "once"):
        (tmp_path / name).mkdir()
    scenes = [Scene(tmp_path / name) for name in ("again", "once")]
    always = plant(tmp_path / "marks", norm=1000.0, always=True)
    for scene, planted in zip(scenes, (always, plant(tmp_path / "others", norm=1000.0)), strict=True):
        ended = scene.run(*flags_of("skip"), *faults.LAYOUTS[layout], plant=planted)
        assert ended.code == 0, ended.err
        assert ("computed again it is the same, so it is the data" in ended.out) is (scene is scenes[0])
    again, once = (
        [(line["loss"], line["grad_norm"]) for line in faults.metrics(scene.work) if "loss" in line] for scene in scenes
    )
    assert again == once


@pytest.mark.parametrize("layout", slow_but([3], LAYOUTS))
def test_a_run_goes_back_before_a_spike_and_leaves_its_samples_out(layout: str, tmp_path: Path) -> None:
    """Fault spike-rewound: a checkpoint at least ten steps older, then the samples after the spike's; only once."""
    scene = Scene(tmp_path)
    launch = faults.LAYOUTS[layout] or ("--launch.nproc", "1")
    flags = (*flags_of("rewind"), *launch, "--launch.max_restarts", "2")
    ended = scene.run(*flags, plant=plant(tmp_path / "marks", loss=3.0, then_dies_at=57))
    assert ended.code == 0, ended.err
    assert f"Rewind: step {AT}: spike: loss " in ended.err
    assert "restart 2 of 2" in ended.err
    line = f"went back to step 54 before a spike; {4 * (AT - 54)} samples from there on are left out"
    assert ended.out.count(line) == 2, "a fault before the next checkpoint repeats none of these samples"
    starts = [(start["step"], start["tier"]) for start in told(scene, "start")]
    assert starts == [(0, "none"), (54, "shared"), (54, "shared")]
    lines = [line for line in faults.metrics(scene.work) if "loss" in line]
    assert [line["consumed_samples"] for line in lines] == [
        *(4 * n for n in range(1, 55)),
        *(4 * (n + AT - 54) for n in range(55, STEPS + 1)),
    ]
    assert not (scene.work / "run" / FILE).exists()
    # A later resumption knows the samples that were left out.
    again = scene.run(*[str(STEPS + 2) if flag == str(STEPS) else flag for flag in flags])
    assert again.code == 0, again.err
    assert faults.metrics(scene.work)[-1]["consumed_samples"] == 4 * (STEPS + 2 + AT - 54)
