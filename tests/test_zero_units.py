"""Units of a few elements: what a rank holds of their weights and gradients."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.build import build_stages
from torch import Tensor, nn

from megapar.base.grid import Grid
from megapar.checkpoint.format import folder_name
from megapar.comm.axis import Axis
from megapar.config.options import AdapterConfig, CheckpointConfig, Config
from megapar.data_parallel.layout import FlatLayout
from megapar.data_parallel.units import UnitGradients, UnitWeights
from megapar.declare import context, random
from megapar.declare.context import ParallelContext
from megapar.declare.params import ONES, Init, ParamSpec, Piece, parameter, shared_piece
from megapar.declare.random import initial_values
from megapar.step.state import TrainState
from megapar.step.step import train_step
from megapar.train.saver import Saver
from megapar.train.trainer import initializes_by_unit, start
from tests.support.distributed import run_ranks
from tests.support.grid import ONE_KV_HEAD, Layout, micro_batches
from tests.support.runs import assert_bitwise, bits

TINY = [(1,), (2, 1), (3,), (5,), (7,), (1, 1)]


class Tiny(nn.Module):
    def __init__(self, names: Sequence[str], grad_axis: Axis, shared: nn.Parameter | None = None):
        super().__init__()
        for number, name in enumerate(names):
            self.register_parameter(name, tiny(name, TINY[number % len(TINY)], grad_axis))
        if shared is not None:
            self.shared = shared


def tiny(name: str, shape: tuple[int, ...], grad_axis: Axis) -> nn.Parameter:
    spec = ParamSpec((shared_piece(name, shape, context.single().tp),), ONES, decay=True, grad_axis=grad_axis)
    param = parameter(spec, shape, dtype=torch.float32, device="cpu")
    param.data.copy_(values(name, shape))
    return param


def values(name: str, shape: tuple[int, ...], rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + sum(name.encode()))
    return torch.rand(shape, generator=generator) + 1


def modules(ctx: ParallelContext) -> list[Tiny]:
    """Two fine stages with the same last parameter."""
    shared = tiny("shared", (4,), ctx.grad)
    return [Tiny(names, ctx.grad, shared) for names in ("abcdef", "gh")]


def gather_and_reduce() -> None:
    """Fails on a rank if its weights are not those before, or its gradients not the sum over all ranks."""
    ctx = context.create(Grid(dp=3))
    stages = modules(ctx)
    layout = FlatLayout.of_units(stages)
    shapes = {slot.name: tuple(slot.param.shape) for slot in layout.slots}
    assert [layout.buckets_of(stage) for stage in stages] == [[1, 2], [0, 1]]
    weights, gradients = UnitWeights(layout, ctx.device), UnitGradients(layout, ctx.device)
    assert weights.flat.numel() * 3 == layout.numel
    for unit, bucket in enumerate(layout.buckets):
        slots = layout.slots[bucket.first_param : bucket.end_param]
        assert all(slot.param.untyped_storage().nbytes() == 0 for slot in slots)
        weights.gather_unit(unit)
        weights.wait_for(unit)
        for slot in slots:
            assert torch.equal(slot.param.data, values(slot.name, shapes[slot.name])), slot.name
        weights.release(unit)
    for microbatch in range(2):
        if microbatch == 0:
            gradients.zero()
        for unit in range(len(layout.buckets)):
            gradients.open(unit)
            for slot in layout.slots:
                unused = slot.name in "ag" and microbatch == 1
                if slot.bucket_index == unit and not unused:
                    slot.param.main_grad.add(values(slot.name, shapes[slot.name], ctx.grad.rank))  # type: ignore[attr-defined]
            gradients.reduce(unit)
            gradients.add(unit)
    gradients.finish()
    found = torch.zeros(layout.numel)
    for bucket in layout.buckets:
        start, stop = layout.shard(bucket)
        found[start:stop] = gradients.part(start, stop)
    for start, stop in layout.shards():
        for slot in layout.slots:
            shape = shapes[slot.name]
            total = sum(values(slot.name, shape, rank) for rank in range(3)) * (1 if slot.name in "ag" else 2)
            assert isinstance(total, Tensor)
            expected = torch.zeros(layout.numel)
            expected[slot.start : slot.stop] = total.flatten()
            first, last = max(start, slot.start), min(stop, slot.end)
            if first < last:
                torch.testing.assert_close(found[first:last], expected[first:last])


def test_parameters_of_a_few_elements_are_sharded_whole() -> None:
    """Faults zero-tiny-parameters, zero-unused-parameters. With parameters of two fine stages, some of them without a
    gradient in one micro-batch."""
    run_ranks(3, gather_and_reduce)


def one_rank() -> tuple[FlatLayout, UnitGradients]:
    layout = FlatLayout.of_units(modules(context.single()))
    return layout, UnitGradients(layout, torch.device("cpu"))


def test_a_parameter_without_any_gradient_counts_as_zero() -> None:
    """Fault zero-unused-parameters: memory of the step before, or of others, is not its gradient."""
    layout, gradients = one_rank()
    gradients.flat.fill_(math.nan)
    gradients.zero()
    gradients.open(0)
    unused, *used = layout.slots[: layout.buckets[0].end_param]
    unused.param.main_grad.tensor.fill_(math.nan)  # type: ignore[attr-defined]
    for slot in used:
        slot.param.main_grad.add(torch.ones(slot.param.shape))  # type: ignore[attr-defined]
    gradients.reduce(0)
    gradients.add(0)
    gradients.finish()
    assert gradients.flat.isfinite().all()
    assert gradients.flat.sum() == sum(slot.param.numel() for slot in used)


def test_a_gradient_that_the_plan_does_not_collect_is_refused() -> None:
    layout, gradients = one_rank()
    (slot, *_) = layout.slots
    gradients.zero()
    with pytest.raises(RuntimeError, match="while the plan does not collect it"):
        slot.param.main_grad.note_added()  # type: ignore[attr-defined]
    gradients.open(slot.bucket_index)
    slot.param.main_grad.add(torch.ones(slot.param.shape))  # type: ignore[attr-defined]
    for call in (gradients.zero, gradients.finish):
        with pytest.raises(RuntimeError, match="the plan must reduce them first"):
            call()
    gradients.reduce(slot.bucket_index)
    with pytest.raises(RuntimeError, match="while the plan does not collect it"):
        slot.param.main_grad.note_added()  # type: ignore[attr-defined]


def test_a_rank_never_holds_more_than_one_unit_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its weights equal those of a rank initialized as a whole."""
    config = Layout(ONE_KV_HEAD, zero_stage=3, micro_batch_size=6).config()
    assert initializes_by_unit(config)
    ctx = context.single(torch.device("cpu"))
    expected, _ = start(config, ctx, build_stages(config, ctx))
    stages = build_stages(config, ctx, allocate=False)
    params = {id(param): param for stage in stages.values() for param in stage.parameters()}.values()

    def live() -> int:
        return sum({(x := p.untyped_storage())._cdata: x.nbytes() for p in params}.values())

    assert live() == 0
    most = []

    def noted(piece: Piece, init: Init, seed: int, **how: Any) -> Tensor:
        most.append(live())
        return initial_values(piece, init, seed, **how)

    monkeypatch.setattr(random, "initial_values", noted)
    state, _ = start(config, ctx, stages)
    assert isinstance(state.weights, UnitWeights)
    units = [state.weights.nbytes_of(unit) for unit in range(len(state.weights.layout.buckets))]
    assert max(most) == max(units) < sum(units) / 2
    assert torch.equal(state.weights.flat, expected.weights.flat)
    assert live() == 0


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_what_a_file_holds_is_not_drawn(zero_stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to resume nor to start from weights. New adapters are drawn, and so are weights that may not fit."""
    config = replace(Layout(ONE_KV_HEAD, zero_stage=zero_stage).config("fp32"), run_dir=str(tmp_path / "first"))
    ctx = context.single(torch.device("cpu"))
    drawn: set[str] = set()

    def noted(piece: Piece, init: Init, seed: int, **how: Any) -> Tensor:
        drawn.add(piece.name)
        return initial_values(piece, init, seed, **how)

    def begin(config: Config) -> tuple[TrainState, set[str]]:
        drawn.clear()
        state, _ = start(config, ctx, build_stages(config, ctx, allocate=not initializes_by_unit(config)))
        return state, set(drawn)

    monkeypatch.setattr(random, "initial_values", noted)
    first, everything = begin(config)
    train_step(first, micro_batches(config, ctx, 0))
    with Saver(first, tmp_path / "first") as saver:
        saver.save(first)
    resumed, none = begin(config)
    assert not none
    assert_bitwise(bits(resumed), bits(first), "resumed")
    path = str(tmp_path / "first/checkpoints" / folder_name(1))
    based = replace(config, run_dir=str(tmp_path / "second"), checkpoint=CheckpointConfig(init_from=path))
    began, none = begin(based)
    assert not none
    assert torch.equal(began.weights.flat, first.weights.flat)
    assert begin(replace(based, checkpoint=replace(based.checkpoint, strict=False)))[1] == everything
    adapters = begin(replace(based, adapter=AdapterConfig(rank=2)))[1]
    assert {name.rpartition(".")[2] for name in adapters} == {"lora_a", "lora_b"}
