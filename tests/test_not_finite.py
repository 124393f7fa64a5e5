"""A non-finite step ends on every rank with the first bad tensor, its rank, micro-batch and samples."""

import io
import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.attention import Attention
from megapar_models.build import build_stages
from megapar_models.mlp import GatedMLP
from torch import Tensor

from megapar.base.errors import NumericError
from megapar.base.grid import Grid
from megapar.config.options import LogConfig
from megapar.data.delivery import Delivery
from megapar.declare import context
from megapar.step import not_finite
from megapar.step.state import TrainState
from megapar.train.data import open_loaders
from megapar.train.trainer import TrainingRun, start, train
from tests.support.distributed import rank_device, run_ranks
from tests.support.grid import LLAMA, SAMPLES, Layout
from tests.support.runs import behind_the_host
from tests.support.sweeps import slow_but

Plant = Callable[[pytest.MonkeyPatch, TrainState], None]
FIVE_LAYERS = replace(LLAMA, num_hidden_layers=5)
# Rank 0: first replica, layers 0-2. 1: second replica, layers 0-2. 2 and 3: the same replicas, layers 3-4 and the head.
LAYOUT = Layout(FIVE_LAYERS, pp=2, dp=2, micro_batch_size=3, recompute="full", partition=(3, 2))


def in_a_weight(_: pytest.MonkeyPatch, state: TrainState) -> None:
    """Of one replica."""
    if state.ctx.world.rank == 3:
        (slot,) = (slot for slot in state.grads.layout.slots if slot.name == "layers.3.mlp.down.weight")
        slot.param.data[5, 7] = math.nan


def in_an_activation(patch: pytest.MonkeyPatch, _: TrainState) -> None:
    """Of one sample in the second replica's second micro-batch of the second step."""
    forward = Attention.forward

    def planted(self: Attention, x_sbh: Tensor, info: Any) -> Tensor:
        y = forward(self, x_sbh, info)
        bad = (info.batch.sample_ids_b == SAMPLES + 10) & (self.number == 1)
        return y.masked_fill(bad[None, :, None], math.inf)

    patch.setattr(Attention, "forward", planted)


def in_a_gradient(patch: pytest.MonkeyPatch, state: TrainState) -> None:
    """Of a layer's output, while all forwards are finite."""
    forward = GatedMLP.forward

    def planted(self: GatedMLP, x_sbh: Tensor, info: Any) -> Tensor:
        y = forward(self, x_sbh, info)
        if state.step == 1 and self is state.stages[0].layers["2"].mlp and y.requires_grad:  # type: ignore[index,union-attr]
            y.register_hook(lambda grad: grad * math.nan)
        return y

    if state.ctx.world.rank == 0:
        patch.setattr(GatedMLP, "forward", planted)


def in_a_reduction(patch: pytest.MonkeyPatch, state: TrainState) -> None:
    """Once, on one rank: what a bad cable or memory module does."""
    finish = state.grads.finish

    def planted() -> None:
        finish()
        if state.step == 1 and state.ctx.world.rank == 2:
            state.grads.part(*state.grads.layout.shards()[0])[0] = math.nan

    patch.setattr(state.grads, "finish", planted)


def by_the_learning_rate(_: pytest.MonkeyPatch, state: TrainState) -> None:
    for slot in state.grads.layout.slots:
        slot.param.data.mul_(1e25)


CASES: dict[str, tuple[Plant, str]] = {
    "weight": (
        in_a_weight,
        r"first not finite: the output of layers\.3\.mlp\.down in the forward pass of micro-batch 0 \(samples 15, 16, "
        r"17\) on rank 3; the weights were not finite before the step: layers\.3\.mlp\.down\.weight on rank 3\. ",
    ),
    "activation": (
        in_an_activation,
        r"first not finite: the output of layers\.1\.attention in the forward pass of micro-batch 1 \(samples 21, 22, "
        r"23\) on rank 1; all weights were finite before the step\. ",
    ),
    "gradient": (
        in_a_gradient,
        r"first not finite: the gradient of the output of layers\.2\.mlp in the backward pass of micro-batch 0 "
        r"\(samples 12, 13, 14\) on rank 0; all weights were finite before the step\. ",
    ),
    "reduction": (
        in_a_reduction,
        r"first not finite: none: a second pass over the same samples was finite, so suspect this machine's hardware; "
        r"all weights were finite before the step\. ",
    ),
    "learning rate": (
        by_the_learning_rate,
        r"first not finite: the (in|out)put of layers\.0\.[a-z._]+ in the forward pass of micro-batch 0 \(samples 12, "
        r"13, 14\) on rank 0; all weights were finite before the step\. ",
    ),
}


def in_a_shard(_: pytest.MonkeyPatch, state: TrainState) -> None:
    """With ZeRO-3, of a weight on this rank alone."""
    if state.ctx.world.rank == 2:
        (slot,) = (slot for slot in state.grads.layout.slots if slot.name == "layers.3.mlp.down.weight")
        state.weights.part(slot.start, slot.start + 1).fill_(math.nan)


# With ZeRO-3 every replica gathers the bad shard, so that the first of them names it first.
WITH_ZERO_3: dict[str, tuple[Plant, str]] = {
    "shard": (
        in_a_shard,
        r"first not finite: the output of layers\.3\.mlp\.down in the forward pass of micro-batch 0 \(samples 12, 13, "
        r"14\) on rank 2; the weights were not finite before the step: layers\.3\.mlp\.down\.weight on rank 2\. ",
    ),
    **{name: CASES[name] for name in ("activation", "reduction")},
}


def messages(
    folder: Path, late: bool, layout: Layout = LAYOUT, cases: Mapping[str, tuple[Plant, str]] = CASES
) -> dict[str, str]:
    """What this rank raises in the second step of each case; `late`: when the third one is queued."""
    said = {}
    for name, (plant, _) in cases.items():
        config = layout.config()
        run_dir = folder / name
        run_dir.mkdir(exist_ok=True)
        config = replace(config, log=LogConfig(tensorboard=False), run_dir=str(run_dir))
        config = replace(config, checkpoint=replace(config.checkpoint, save_last=False))
        where = rank_device(torch.distributed.get_rank())
        ctx = context.create(Grid(dp=2, pp=2), device=where)
        state, _ = start(config, ctx, build_stages(config, ctx))
        data, _ = open_loaders(config, ctx)
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()):
            plant_before_step_2(data, patch, plant, state)
            with pytest.raises(NumericError) as caught, behind_the_host() if late else nullcontext():
                train(TrainingRun(state, data, {}, run_dir, flops_per_token=1))
        assert (state.step, state.consumed_samples, state.optimizer.step_count) == (1, SAMPLES, 1)
        assert ctx.flight.step == 2, "error.json names the step that failed"
        assert data.consumed_samples == (3 if late else 2) * SAMPLES
        assert not [hook for stage in state.stages.values() for m in stage.modules() for hook in m._forward_hooks]
        said[name] = str(caught.value)
    return said


def plant_before_step_2(data: Delivery, patch: pytest.MonkeyPatch, plant: Plant, state: TrainState) -> None:
    read = data.next_step

    def next_step() -> Any:
        if state.step == 1:
            plant(patch, state)
        return read()

    patch.setattr(data, "next_step", next_step)


# The gather after the second step has replaced the bad weight by the other replica's copy.
LATE = {**{name: words for name, (_, words) in CASES.items()}, "weight": CASES["reduction"][1]}


@pytest.mark.parametrize("late", slow_but([1], [False, True]), ids=["in time", "late"])
def test_a_bad_step_names_the_first_bad_tensor_its_rank_micro_batch_and_samples(tmp_path: Path, late: bool) -> None:
    """Fault non-finite-step. On every rank in the same words, whatever it was; nobody hangs. Nothing is seen of a step
    queued before this verdict was known."""
    first, *others = run_ranks(4, messages, tmp_path, late)
    assert all(said == first for said in others)
    for name, (_, expected) in CASES.items():
        assert re.search(r"^step 2: loss \S+, gradient norm (nan|inf); ", first[name]), first[name]
        assert re.search(LATE[name] if late else expected, first[name]), f"{name}: {first[name]}"
        assert "No weight was changed: they are those of step 1." in first[name]
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [(line["step"], line["consumed_samples"]) for line in lines] == [(1, SAMPLES), (2, SAMPLES)]


def test_zero_3_names_the_first_bad_tensor_too(tmp_path: Path) -> None:
    """Fault non-finite-step."""
    first, *others = run_ranks(4, messages, tmp_path, False, replace(LAYOUT, zero_stage=3), WITH_ZERO_3)
    assert all(said == first for said in others)
    for name, (_, expected) in WITH_ZERO_3.items():
        assert re.search(expected, first[name]), f"{name}: {first[name]}"


def test_a_good_step_pays_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(not_finite, "explain")
    config = replace(LAYOUT, pp=1, dp=1, partition=()).config()
    config = replace(config, train=replace(config.train, steps=2), run_dir=str(tmp_path))
    config = replace(config, log=LogConfig(tensorboard=False))
    ctx = context.single()
    state, _ = start(config, ctx, build_stages(config, ctx))
    data, _ = open_loaders(config, ctx)
    with redirect_stdout(io.StringIO()):
        train(TrainingRun(state, data, {}, tmp_path, flops_per_token=1))
    assert state.step == 2
