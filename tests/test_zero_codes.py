"""ZeRO-3 gathers FP8 codes of the matrices that products read in blocks: the same codes, in half the bytes."""

import itertools
import math
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_kernels.quantize import Quantized, quantize_blocks
from megapar_models.build import build_stages
from megapar_tools.plan.memory import report_rank
from megapar_tools.plan.parts import LayerPart
from torch import Tensor, nn

from megapar.base.grid import Grid
from megapar.checkpoint.format import folder_name
from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.config.model_options import ModelConfig
from megapar.config.options import CheckpointConfig, Config
from megapar.data_parallel.layout import FlatLayout
from megapar.data_parallel.unit_codes import UnitCodes
from megapar.data_parallel.units import UnitWeights
from megapar.declare import context
from megapar.declare.params import ONES, ParamSpec, parameter, shared_piece
from megapar.linear.converted_weight import ConvertedWeight
from megapar.linear.torch_products import TORCH_PRODUCTS
from megapar.pipeline.sharding_plan import UnitAction
from megapar.step.evaluation import evaluate
from megapar.step.state import TrainState
from megapar.step.step import train_step
from megapar.train.saver import Saver
from megapar.train.trainer import initializes_by_unit, start
from tests.support import grid, program
from tests.support.built_plan import built_report
from tests.support.distributed import run_ranks
from tests.support.grid import Layout, make_context, make_state, micro_batches
from tests.support.plans import PARTS
from tests.support.runs import assert_bitwise, bits

# Units alone

SHAPES = {"a": (256, 384), "b": (128, 128), "c": (384, 128), "norm": (200,), "d": (128, 128), "head": (131, 128)}
QUANTIZED = "abcd"


class Matrices(nn.Module):
    """Four matrices read in blocks of FP8, and two parameters that are not."""

    def __init__(self, grad_axis: Axis, names: Sequence[str] = tuple(SHAPES), step: int = 0):
        super().__init__()
        for name in names:
            shape = SHAPES[name]
            piece = shared_piece(name, shape, context.single().tp)
            spec = ParamSpec((piece,), ONES, decay=True, grad_axis=grad_axis, quantized=name in QUANTIZED)
            param = parameter(spec, shape, dtype=torch.bfloat16, device="cpu")
            param.data.copy_(values(name, step))
            self.register_parameter(name, param)


def values(name: str, step: int) -> Tensor:
    """bf16, with blocks of zeros, of tiny numbers, and ones that are not finite."""
    generator = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
    x = torch.randn(SHAPES[name], generator=generator)
    if name == "a":
        x[:128, :128] = 0
        x[:128, 128:256] *= 1e-37
        x[128:, :128] *= torch.logspace(-8, 4, 128)[:, None]
        x[250, 140] = -math.inf if step == 1 else 0
    if name in QUANTIZED and step == 1:
        x[5, -1] = math.nan
    return x.bfloat16()


def same(found: Quantized, expected: Quantized) -> bool:
    return torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8)) and torch.equal(
        found.exponents, expected.exponents
    )


def gathered(weights: UnitWeights) -> dict[str, Quantized | Tensor]:
    """What products read of each parameter in a step."""
    found: dict[str, Quantized | Tensor] = {}
    for unit in range(len(weights.layout.buckets)):
        weights.gather_unit(unit)
        weights.wait_for(unit)
        for slot in weights.layout.slots:
            if slot.bucket_index == unit:
                value = ConvertedWeight.of(slot.param).get(slot.param, TORCH_PRODUCTS)
                if isinstance(value, Quantized):
                    assert slot.param.untyped_storage().nbytes() == 0
                    found[slot.name] = Quantized(value.codes.clone(), value.exponents.clone(), value.group)
                else:
                    found[slot.name] = value.detach().clone()
        weights.release(unit)
        assert all(slot.param.untyped_storage().nbytes() == 0 for slot in weights.layout.slots)
    return found


def check_codes(weights: UnitWeights, step: int, what: str) -> None:
    """Fails unless steps gather the codes of the values of `step`, and the values of the other parameters."""
    found = gathered(weights)
    for name, value in found.items():
        expected = values(name, step)
        if isinstance(value, Quantized):
            assert name in QUANTIZED, what
            assert same(value, quantize_blocks(expected)), f"{what}: {name}"
        else:
            assert name not in QUANTIZED, what
            assert torch.equal(value, expected), f"{what}: {name}"


def write(weights: UnitWeights, step: int) -> None:
    """Update this rank's shards to the values of `step`, as an optimizer does."""
    for slot in weights.layout.slots:
        start, stop = weights.layout.shard(weights.layout.buckets[slot.bucket_index])
        begin, end = max(start, slot.start), min(stop, slot.stop)
        if begin < end:
            part = values(slot.name, step).flatten()[begin - slot.start : end - slot.start]
            weights.part(begin, end).copy_(part)


REDUCE = collectives.all_reduce


def reduce_numbers(x: Tensor, axis: Axis, op: str) -> Tensor:
    """Refuse NaN: of NaN and a number, backends may take either for the larger one."""
    assert not x.isnan().any()
    return REDUCE(x, axis, op)


def codes_of_ranks(replicas: Grid, names: Sequence[str], never_cut: bool = False) -> int:
    """Returns this rank's elements of matrices read in FP8."""
    ctx = context.create(replicas)
    layout = FlatLayout.of_units([Matrices(ctx.grad, names)], whole={"adamw"} if never_cut else ())
    traffic = ctx.grad.shards.traffic
    weights = UnitWeights(layout, ctx.device)
    check_codes(weights, 0, "at the start")
    write(weights, 1)
    before = dict(traffic.sent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_reduce", reduce_numbers)
        weights.gather()
    shards = ctx.grad.shards.size
    blocks = sum(math.prod(SHAPES[name]) for name in names if name in QUANTIZED) // 128**2
    if shards > 1:
        assert traffic.sent["all_reduce"] - before.get("all_reduce", 0) == 2 * 4 * blocks * (shards - 1) // shards
        before = dict(traffic.sent)
    check_codes(weights, 1, "after an update")
    if shards > 1:
        sizes = [bucket.numel * (1 if layout.is_quantized(bucket) else 2) for bucket in layout.buckets]
        assert traffic.sent["all_gather"] - before["all_gather"] == sum(sizes) * (shards - 1) // shards
        assert traffic.sent["all_reduce"] == before["all_reduce"]
    # Whoever reads weights outside of a step gets values, and codes are there again afterwards.
    params = [slot.param for slot in layout.slots]
    weights.hold(params)
    for slot in layout.slots:
        assert torch.equal(slot.param.data.nan_to_num(7.0), values(slot.name, 1).nan_to_num(7.0))
        converted = ConvertedWeight.of(slot.param).get(slot.param, TORCH_PRODUCTS)
        assert converted is slot.param
    weights.hold(())
    write(weights, 2)
    weights.gather()
    check_codes(weights, 2, "after another update")
    assert weights.nbytes == UnitWeights.planned_nbytes(layout)
    return sum(
        max(min(stop, slot.stop) - max(start, slot.start), 0)
        for slot in layout.slots
        for start, stop in [layout.shard(layout.buckets[slot.bucket_index])]
        if slot.spec.quantized
    )


EVERY = tuple(SHAPES)
WORLDS = {
    "dp 1": (Grid(), EVERY, False),
    "dp 2": (Grid(dp=2), EVERY, False),
    "dp 3": (Grid(dp=3), EVERY, False),
    "dp 4, copies": (Grid(dp=4, shard_ranks=2), EVERY, False),
    "dp 4, one matrix": (Grid(dp=4), ("b",), False),
    "dp 3, never cut": (Grid(dp=3), ("b", "d"), True),
}


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_get_the_codes_of_the_gathered_weights(world: str) -> None:
    """Faults fp8-ragged-shards, fp8-stale-codes: bitwise, wherever shards are cut, after each update."""
    replicas, names, never_cut = WORLDS[world]
    held = run_ranks(replicas.world_size, codes_of_ranks, replicas, names, never_cut)
    if world == "dp 3, never cut":
        assert held == [128 * 128, 128 * 128, 0]  # a rank without an element of a matrix


def test_other_layouts_stay_as_they_are() -> None:
    """Only units are apart, and their shards begin at multiples of 128."""
    axis = Axis("grad", 3)
    module = Matrices(axis)
    flat = FlatLayout([module], 10**6, sharded=True)
    units = FlatLayout.of_units([module])
    assert [[slot.name for slot in units.slots if slot.bucket_index == i] for i in (0, 1)] == [
        ["head", "norm"],
        ["d", "c", "b", "a"],
    ]
    assert all((slot.start - units.buckets[1].start) % 128 == 0 for slot in units.slots[2:])
    assert units.buckets[1].numel % (3 * 128) == 0
    for slot in flat.slots:
        slot.param.spec = replace(slot.spec, quantized=False)  # type: ignore[attr-defined]
    plain = FlatLayout([module], 10**6, sharded=True)
    assert flat.buckets == plain.buckets
    assert [slot.start for slot in flat.slots] == [slot.start for slot in plain.slots]


def test_a_matrix_that_blocks_do_not_tile_is_refused() -> None:
    module = Matrices(Axis("grad"), ("head",))
    module.head.spec = replace(module.head.spec, quantized=True)  # type: ignore[operator]
    with pytest.raises(ValueError, match="head is 131 x 128: 128 must divide rows and columns"):
        FlatLayout.of_units([module])


def test_products_get_the_part_of_the_codes_that_they_ask_for() -> None:
    """Experts ask for matrices [experts, out, in] of a part of their parameter."""
    memory = torch.randn(128 + 4 * 128 * 256).bfloat16()
    param = nn.Parameter(memory[128:].view(512, 256))
    expected = quantize_blocks(param.data.view(2, 256, 256))
    given = quantize_blocks(param.data)
    converted = ConvertedWeight.of(param)
    converted.set(param, given)
    of_second = converted.get(param.view(2, 256, 256)[1:], TORCH_PRODUCTS)
    with pytest.raises(RuntimeError, match="whole blocks of all columns"):
        converted.get(param[64:320], TORCH_PRODUCTS)
    with pytest.raises(RuntimeError, match="whole blocks of all columns"):
        converted.get(param[:, :128], TORCH_PRODUCTS)
    memory.untyped_storage().resize_(0)
    assert converted.get(param, TORCH_PRODUCTS).codes.data_ptr() == given.codes.data_ptr()
    for found in (of_second, converted.get(param.view(2, 256, 256), TORCH_PRODUCTS, slice(1, 2))):
        assert found.codes.shape == (1, 256, 256)
        assert found.exponents.shape == (1, 2, 2)
        assert same(found, expected[1:])
        assert same(found[0], expected[1])


# Training

HIDDEN = replace(
    grid.LLAMA, hidden_size=128, head_dim=32, num_key_value_heads=4, intermediate_size=128, num_hidden_layers=2
)


EXPERTS = replace(
    grid.of(grid.MIXTRAL, num_experts=4, moe_intermediate_size=128),
    hidden_size=128,
    head_dim=32,
    num_key_value_heads=4,
)


def config_of(zero_stage: int, model: ModelConfig = HIDDEN, dp: int = 2, **options: Any) -> Config:
    layout = Layout(model, dp=dp, zero_stage=zero_stage, fp8="blocks", **options)
    config = layout.config("bf16")
    return replace(config, optimizer=replace(config.optimizer, ema=0.5))


def train(config: Config) -> list[float]:
    """What steps and evaluations show: of the trained weights, and of their average."""
    state = make_state(config)
    shown = []
    for step in range(3):
        result = train_step(state, micro_batches(config, state.ctx, step))
        shown += [result.loss, result.grad_norm, evaluate(state, micro_batches(config, state.ctx, 3)).loss]
        assert state.optimizer.average is not None
        with state.optimizer.average.as_weights():
            shown.append(evaluate(state, micro_batches(config, state.ctx, 3)).loss)
    quantized = [bucket for bucket in state.weights.layout.buckets if state.weights.layout.is_quantized(bucket)]
    of_layer = 1 if config.model.experts is None else 2
    assert len(quantized) == (2 * of_layer if config.optimizer.zero_stage == 3 else 0)
    return shown


def train_at_stages(options: dict[str, Any]) -> list[list[float]]:
    return [train(config_of(stage, **options)) for stage in (1, 3)]


# Of one micro-batch a replica, so that sums have one order.
TRAINED: list[dict[str, Any]] = [
    {"micro_batch_size": 6},
    {"micro_batch_size": 6, "recompute": "full"},
    {"model": EXPERTS, "dp": 4, "ep": 2, "micro_batch_size": 3, "ep_overlap_chunks": 2},
]


@pytest.mark.parametrize("options", TRAINED, ids=["dense", "recomputed", "experts"])
def test_training_with_codes_is_that_of_converted_weights(options: dict[str, Any]) -> None:
    """Fault fp8-stale-codes: after updates, evaluations and averages in the place of weights."""
    for first, third in run_ranks(options.get("dp", 2), train_at_stages, options):
        assert first == third


def codes_of(state: TrainState) -> dict[str, Tensor]:
    assert isinstance(state.weights, UnitWeights)
    found = gathered(state.weights)
    return {
        f"{part} of {name}": getattr(value, part).view(torch.uint8)
        for name, value in found.items()
        if isinstance(value, Quantized)
        for part in ("codes", "exponents")
    }


def resume(folder: Path) -> None:
    """Fails unless a resumed run has the state and the codes of the first, and goes on as it does."""
    config = replace(config_of(3, micro_batch_size=6), run_dir=str(folder))
    ctx = make_context(config)
    first, _ = start(config, ctx, build_stages(config, ctx, allocate=not initializes_by_unit(config)))
    before = codes_of(first)
    train_step(first, micro_batches(config, ctx, 0))
    with Saver(first, folder) as saver:
        saver.save(first)
    path = str(folder / "checkpoints" / folder_name(1))
    resumed, _ = start(
        replace(config, checkpoint=CheckpointConfig(resume=path)),
        ctx,
        build_stages(config, ctx, allocate=not initializes_by_unit(config)),
    )
    assert len(before) == 2 * 2 * 4
    assert any(not torch.equal(before[name], codes) for name, codes in codes_of(first).items())
    for what in ("resumed", "a step later"):
        assert_bitwise(bits(resumed), bits(first), what)
        assert_bitwise(codes_of(resumed), codes_of(first), what)
        for state in (first, resumed):
            train_step(state, micro_batches(config, ctx, 1))


def test_main_weights_and_codes_are_those_of_the_run_before(tmp_path: Path) -> None:
    """Faults fp8-main-weights-rounded, fp8-stale-codes."""
    run_ranks(2, resume, tmp_path)


# What the plan says


def measure(config: Config) -> dict[str, Any]:
    """The most bytes of weights in a step, and what a rank sends in gathers and reductions of largest magnitudes."""
    state = make_state(config)
    weights, units = state.weights, state.pipeline.units
    assert isinstance(weights, UnitWeights)
    assert units is not None
    most = 0

    def live() -> int:
        storages = [*weights._whole, *weights._codes._whole.values()]
        kept = [weights.flat, *weights._codes._own.values(), *(axis.exponents for axis in weights._codes._axes)]
        return sum(x.untyped_storage().nbytes() for x in storages) + sum(x.nbytes for x in kept)

    def run(action: UnitAction) -> None:
        nonlocal most
        units.run(action)
        most = max(most, live())

    state.pipeline.units = replace(units, run=run)
    between = live()
    traffic = state.ctx.grad.shards.traffic
    before = dict(traffic.sent)
    train_step(state, micro_batches(config, state.ctx, 0))
    assert live() == between == weights.nbytes
    layout = weights.layout
    of_stages = [layout.buckets_of(stage) for _, stage in sorted(state.stages.items())]
    return {
        "most": most,
        "reported": weights.most_nbytes,
        "gathered": traffic.sent["all_gather"] - before.get("all_gather", 0),
        "units": [[layout.gathered_nbytes(layout.buckets[unit]) for unit in units] for units in of_stages],
        "in bf16": 2 * sum(bucket.numel for bucket in layout.buckets if layout.is_quantized(bucket)),
    }


@pytest.mark.parametrize("options", [{"micro_batch_size": 2}, {"micro_batch_size": 6, "recompute": "full"}], ids=str)
def test_memory_and_traffic_are_those_of_the_plan(options: dict[str, Any]) -> None:
    config = config_of(3, **options)
    layer = PARTS.recording(config, PARTS.context(config, 0), LayerPart(0, recomputed=False))
    for rank, found in enumerate(run_ranks(2, measure, config)):
        plan = report_rank(config, PARTS, rank)
        assert replace(plan, stages="") == replace(built_report(config, rank), stages="")
        assert found["most"] == found["reported"] == plan.weights
        sizes = [sum(units) for units in found["units"]]
        rounds = 3 if options["micro_batch_size"] == 2 else 1
        # A unit stays if the next action uses it again, as with weights.
        assert found["gathered"] == (rounds * (2 * sum(sizes) - sizes[-1]) - (rounds - 1) * sizes[0]) // 2
        matrices = found["units"][1][-1]
        assert 2 * matrices == found["in bf16"] // 2  # of one of the two layers
        assert matrices + 2 * (layer.elements["grad"] - matrices) == layer.gathered_bytes["grad"]


# Ranks that fail where they make codes


def ends_in_reduction(ends: signal.Signals) -> None:
    """Plant a signal for rank 1, at the third update, before it says its largest magnitudes."""
    encode, calls = UnitCodes.encode, itertools.count()

    def ending(codes: UnitCodes) -> None:
        if next(calls) == 3 and codes._axes[0].axis.rank == 1:
            os.kill(os.getpid(), ends)
        encode(codes)

    UnitCodes.encode = ending  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (signal.SIGKILL, "rank 1 .* was ended by SIGKILL in step 3, optimizer"),
        (signal.SIGSTOP, r"rank 1 .* did not arrive: its process is stopped .*unit_codes\.py"),
    ],
)
def test_a_rank_that_ends_before_its_largest_magnitudes_is_named(
    ends: signal.Signals, said: str, tmp_path: Path
) -> None:
    sizes = ("--model.hidden_size", "128", "--model.num_attention_heads", "4", "--model.num_key_value_heads", "4")
    more = ("--model.head_dim", "32", "--model.intermediate_size", "128", "--train.fp8", "blocks")
    run = ("--optimizer.zero_stage", "3", "--launch.nproc", "2", "--train.steps", "6", "--checkpoint.every", "2")
    flags = (*sizes, *more, *run, "--launch.timeout_seconds", "6")
    ended = program.run(*flags, cwd=tmp_path, plant=partial(ends_in_reduction, ends))
    assert ended.code == 6
    assert re.search(said, ended.err, re.DOTALL)
    assert (tmp_path / "run/checkpoints/step_00000002").is_dir()
