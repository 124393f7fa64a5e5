"""ZeRO-2 and 3: every layout trains as ZeRO-1 does, with the plan's memory and traffic."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from megapar_tools.plan.memory import report_rank
from megapar_tools.verify import logical
from megapar_tools.verify.logical import held_weights
from megapar_tools.verify.run import see_gradients
from torch import Tensor

from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.config.options import Config
from megapar.data_parallel.units import UnitGradients, UnitWeights
from megapar.data_parallel.weights import FlatWeights
from megapar.observe.kept import KeptBytes
from megapar.pipeline.sharding_plan import UnitAction
from megapar.step.evaluation import evaluate
from megapar.step.step import train_step
from tests.support import close
from tests.support.distributed import run_ranks
from tests.support.grid import (
    DENSE_BETWEEN,
    GPT,
    LLAMA,
    MIXTRAL,
    ONE_KV_HEAD,
    SHARED,
    STEPS,
    STRADDLING,
    Layout,
    bitwise,
    check,
    make_state,
    micro_batches,
    name,
    of,
    shown_of_step,
)
from tests.support.plans import PARTS
from tests.support.sweeps import slow_but

BREADTH = "breadth"
SMALL = replace(LLAMA, num_hidden_layers=2)
TIED = replace(GPT, num_hidden_layers=3)
UNTIED = replace(TIED, tie_word_embeddings=False)
ONE_HEAD = replace(ONE_KV_HEAD, num_hidden_layers=2)


# Every layout trains as ZeRO-1 does


def train_at_stages(layout: Layout) -> dict[int, Any]:
    """What `train_two_steps` shows, by ZeRO stage. The states share their process groups' ranks, and nothing else."""
    shown: dict[int, Any] = {}
    for stage in (1, 2, 3):
        state = make_state(replace(layout, zero_stage=stage).config())
        seen = see_gradients(state)
        shown[stage] = {"initial": held_weights(state), "steps": []}
        for step in range(STEPS):
            result = train_step(state, micro_batches(state.config, state.ctx, step, layout.packed))
            shown[stage]["steps"].append(shown_of_step(state, result, seen))
        shown[stage]["evaluation"] = evaluate(state, micro_batches(state.config, state.ctx, STEPS, layout.packed))
    return shown


# With one micro-batch a replica, or breadth-first, each gradient is summed over micro-batches before it is reduced, as
# with ZeRO-1. Otherwise the sums have another order. So they have for an embedding that two fine stages use.
SAME_SUMS = [
    Layout(SMALL, dp=2, micro_batch_size=6),
    Layout(UNTIED, dp=3, micro_batch_size=2, schedule=BREADTH, recompute="selective"),
    Layout(MIXTRAL, dp=2, ep=2, micro_batch_size=6),
    Layout(TIED, dp=2, pp=2, micro_batch_size=6),
    Layout(SMALL, dp=2, pp=2, micro_batch_size=2, schedule="breadth"),
    Layout(SMALL, dp=2, micro_batch_size=12),  # the second replica has no micro-batch
]
OTHER_SUMS = [
    Layout(ONE_HEAD, dp=2, micro_batch_size=4, recompute="full"),  # replicas with two micro-batches and one
    Layout(UNTIED, dp=3, micro_batch_size=3, recompute="full", every=2),
    Layout(ONE_HEAD, tp=2, dp=2, sequence_parallel=True, micro_batch_size=3),
    Layout(TIED, dp=2, pp=2, schedule="gpipe", micro_batch_size=2),
    Layout(SMALL, dp=2, pp=2, vpp=2, schedule="interleaved", micro_batch_size=3, recompute="full"),
    Layout(of(MIXTRAL, num_experts=3), dp=4, ep=4),  # a rank has no expert, and experts have no replicas
    Layout(SMALL, dp=2, pp=2, vpp=2, schedule="zb-v", micro_batch_size=3),
    Layout(SMALL, dp=4, micro_batch_size=2, overlap=False, shard_ranks=2),
    Layout(STRADDLING, tp=2, pp=2, micro_batch_size=4),  # one replica
]
MORE = [
    Layout(LLAMA, dp=2, schedule=BREADTH),
    Layout(MIXTRAL, dp=2, pp=2, ep=2, schedule="zb-h1", micro_batch_size=2),
    Layout(LLAMA, dp=2, pp=2, schedule="zb-h1", micro_batch_size=1, recompute="full"),
    Layout(GPT, dp=2, micro_batch_size=3, recompute="selective"),
    Layout(STRADDLING, cp=2, micro_batch_size=6),
    Layout(DENSE_BETWEEN, tp=2, dp=2, ep=2, micro_batch_size=3),
    Layout(DENSE_BETWEEN, pp=2, dp=2, ep=2, etp=1, micro_batch_size=2, recompute="full", shard_ranks=1),
    Layout(SHARED, tp=2, dp=2, sequence_parallel=True, ep=4, etp=1, micro_batch_size=2),
    Layout(GPT, cp=2, dp=2, cp_attention="ring", micro_batch_size=3, schedule=BREADTH, packed=True),
    Layout(LLAMA, tp=2, dp=2, pp=2, sequence_parallel=True, micro_batch_size=1),
    Layout(ONE_KV_HEAD, dp=2, pp=2, vpp=2, schedule="gpipe", micro_batch_size=2, order="pp-dp-cp-tp"),
    Layout(LLAMA, dp=4, shard_ranks=2, micro_batch_size=1, loss_chunk=11),
]


def check_stages(layout: Layout, *, same_sums: bool) -> None:
    """Stages 2 and 3 against 1: bitwise with `same_sums`; otherwise the first gradients to 1e-6, and all the rest as
    against one process."""
    ranks = run_ranks(layout.world, train_at_stages, layout)
    for stage in (1, 2, 3):
        check(replace(layout, zero_stage=stage), [rank[stage] for rank in ranks])
    for stage in (2, 3):
        for step in range(STEPS):
            for kind in (2, 3):  # gradients, weights
                first = logical.assemble([rank[1]["steps"][step][kind] for rank in ranks])
                found = logical.assemble([rank[stage]["steps"][step][kind] for rank in ranks])
                if same_sums:
                    assert bitwise(found, first), f"stage {stage}, step {step}"
                else:
                    close.assert_close(found, first, 1e-6 if (step, kind) == (0, 2) else 1e-5)


@pytest.mark.parametrize("layout", slow_but([0, 2], SAME_SUMS), ids=name)
def test_stages_agree_bitwise_where_sums_have_one_order(layout: Layout) -> None:
    """Fault zero-ragged-micro-batches."""
    check_stages(layout, same_sums=True)


@pytest.mark.parametrize("layout", slow_but([3, 8], OTHER_SUMS), ids=name)
def test_stages_agree_to_rounding(layout: Layout) -> None:
    """Faults zero-accumulation-lost, zero-one-replica, zero-with-pipelines, zero-tied-weights, zero-norm-of-shards."""
    check_stages(layout, same_sums=False)


@pytest.mark.slow
@pytest.mark.parametrize("layout", MORE, ids=name)
def test_stages_agree_in_more_layouts(layout: Layout) -> None:
    check_stages(layout, same_sums=False)


def test_twenty_steps_agree_bitwise() -> None:
    """Fault zero-stages-drift."""
    for rank in run_ranks(2, train_twenty_steps, Layout(SMALL, dp=2, micro_batch_size=6)):
        assert rank[1] == rank[2] == rank[3]


def train_twenty_steps(layout: Layout) -> dict[int, list[tuple[float, float]]]:
    found = {}
    for stage in (1, 2, 3):
        state = make_state(replace(layout, zero_stage=stage).config())
        results = [train_step(state, micro_batches(state.config, state.ctx, step)) for step in range(20)]
        found[stage] = [(result.loss, result.grad_norm) for result in results]
    return found


def gather_under_the_forward(layout: Layout) -> list[tuple[list[tuple[float, float]], int]]:
    """Losses and norms without and with optimizer.overlap_param_gather, and the gathers in flight after the steps."""
    found = []
    for overlap in (False, True):
        config = layout.config()
        state = make_state(replace(config, optimizer=replace(config.optimizer, overlap_param_gather=overlap)))
        assert isinstance(state.weights, FlatWeights)
        results = [train_step(state, micro_batches(config, state.ctx, step)) for step in range(3)]
        found.append(([(result.loss, result.grad_norm) for result in results], len(state.weights._arriving)))
        state.weights.wait()
    return found


def test_gathers_of_stage_2_may_run_under_the_forward() -> None:
    for (expected, none), (found, some) in run_ranks(
        2, gather_under_the_forward, Layout(TIED, dp=2, zero_stage=2, micro_batch_size=3)
    ):
        assert found == expected
        assert (none, some) == (0, 6)  # a unit of each fine stage, and the tied embedding


# Memory that is freed or still travelling


class Late(collectives.Pending):
    """An operation started by the wait for it."""

    def __init__(self, start: Callable[[], None]):
        super().__init__()
        self.start: Callable[[], None] | None = start

    def wait(self) -> None:
        start, self.start = self.start, None
        if start is not None:
            start()


def late_transport(patch: pytest.MonkeyPatch) -> None:
    """Weights are NaN until their gather is waited for, and a gradient must not change until its sum is."""
    gather = collectives.all_gather_shard_async

    def late_gather(flat: Tensor, axis: Axis) -> collectives.Pending:
        mine = flat.chunk(axis.size)[axis.rank]
        kept = mine.clone()
        flat.fill_(math.nan)

        def start() -> None:
            mine.copy_(kept)
            gather(flat, axis).wait()

        return Late(start)

    def late(reduce: Callable[[Tensor, Axis], collectives.Pending], flat: Tensor, axis: Axis) -> collectives.Pending:
        kept = flat.clone()

        def start() -> None:
            assert torch.equal(flat, kept), "a gradient changed while it travelled"
            reduce(flat, axis).wait()

        return Late(start)

    patch.setattr(collectives, "all_gather_shard_async", late_gather)
    for function in ("reduce_scatter_shard_async", "reduce_scatter_shard_in_bf16_async"):
        patch.setattr(collectives, function, partial(late, getattr(collectives, function)))


def poison(patch: pytest.MonkeyPatch) -> None:
    """Released weights become NaN and stay readable; new memory for gradients is NaN, and so is the memory beside the
    shard when a sum has arrived."""
    opened = UnitGradients.open

    def release(weights: UnitWeights, unit: int) -> None:
        weights._whole[unit].fill_(math.nan)

    def open_poisoned(gradients: UnitGradients, unit: int) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(torch, "empty", lambda size, **options: torch.full((size,), math.nan, **options))
            opened(gradients, unit)

    def reduce_and_poison(
        reduce: Callable[[Tensor, Axis], collectives.Pending], flat: Tensor, axis: Axis
    ) -> collectives.Pending:
        def spoil() -> None:
            for rank, part in enumerate(flat.chunk(axis.size)):
                if rank != axis.rank:
                    part.fill_(math.nan)

        pending = reduce(flat, axis)
        return Late(lambda: (pending.wait(), spoil()))  # type: ignore[arg-type, func-returns-value]

    patch.setattr(UnitWeights, "release", release)
    patch.setattr(UnitGradients, "open", open_poisoned)
    for function in ("reduce_scatter_shard_async", "reduce_scatter_shard_in_bf16_async"):
        patch.setattr(collectives, function, partial(reduce_and_poison, getattr(collectives, function)))


def train_with(layout: Layout, spoil: Callable[[pytest.MonkeyPatch], None]) -> tuple[Any, Any]:
    """What training shows, and what it shows with `spoil`."""
    found = []
    for spoils in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if spoils:
                spoil(patch)
            state = make_state(layout.config())
            results = [train_step(state, micro_batches(state.config, state.ctx, step)) for step in range(STEPS)]
            loss, tokens, _ = evaluate(state, micro_batches(state.config, state.ctx, STEPS))
        numbers = [(result.loss, result.grad_norm) for result in results]
        found.append((numbers, loss, tokens, state.optimizer.each[0].shards[0].main.tolist()))
    return found[0], found[1]


MEMORY = [
    Layout(TIED, dp=2, zero_stage=3, micro_batch_size=2, recompute="selective"),
    Layout(TIED, dp=2, pp=2, zero_stage=3, micro_batch_size=3, vpp=2, schedule="interleaved", recompute="full"),
    Layout(MIXTRAL, dp=2, ep=2, zero_stage=3, micro_batch_size=3, schedule=BREADTH, grad_reduce_dtype="bf16"),
]


@pytest.mark.parametrize("layout", slow_but([1, 2], MEMORY), ids=name)
def test_memory_that_is_freed_or_fresh_is_never_read(layout: Layout) -> None:
    """Fault zero-freed-memory."""
    for expected, found in run_ranks(layout.world, train_with, layout, poison):
        assert found == expected


@pytest.mark.parametrize("layout", slow_but([0, 1], MEMORY), ids=name)
def test_nothing_is_used_before_it_has_arrived(layout: Layout) -> None:
    """Fault zero-transfer-not-awaited."""
    for expected, found in run_ranks(layout.world, train_with, layout, late_transport):
        assert found == expected


# What the plan says of memory and traffic


def measure(config: Config) -> dict[str, Any]:
    """Bytes of weights and gradients between steps and at most during one, of optimizer state, and most activations."""
    state = make_state(config)
    weights, grads, units = state.weights, state.grads, state.pipeline.units
    assert isinstance(grads, UnitGradients)
    assert units is not None
    most = {"weights": 0, "gradients": 0}

    def live() -> dict[str, int]:
        whole = weights._whole if isinstance(weights, UnitWeights) else []
        return {
            "weights": weights.flat.nbytes + sum(x.untyped_storage().nbytes() for x in whole),
            "gradients": grads.flat.nbytes + sum(x.untyped_storage().nbytes() for x in grads._collected.values()),
        }

    def run(action: UnitAction) -> None:
        units.run(action)
        for kind, nbytes in live().items():
            most[kind] = max(most[kind], nbytes)

    state.pipeline.units = replace(units, run=run)
    between = live()
    kept = KeptBytes(state.stages)
    with kept.counting():
        train_step(state, micro_batches(config, state.ctx, 0))
    assert live() == between
    return {"between": between, "most": most, "optimizer": state.optimizer.nbytes, "activations": kept.peak}


@pytest.mark.parametrize(
    ("layout", "precision"),
    slow_but(
        [2, 4],
        [
            (Layout(LLAMA, dp=2, zero_stage=3, micro_batch_size=2), "bf16"),
            (Layout(LLAMA, dp=4, zero_stage=2, micro_batch_size=1), "bf16"),
            (Layout(TIED, tp=2, dp=2, zero_stage=3, micro_batch_size=3, schedule=BREADTH), "fp32"),
            (Layout(GPT, pp=2, dp=2, zero_stage=3, micro_batch_size=2, recompute="selective"), "fp32"),
            (Layout(SMALL, dp=4, zero_stage=3, shard_ranks=2, micro_batch_size=3, recompute="full"), "bf16"),
            (Layout(SMALL, dp=3, zero_stage=2, grad_reduce_dtype="bf16", micro_batch_size=2), "fp32"),
        ],
    ),
    ids=[
        "dp2-zero3-bf16",
        "dp4-zero2-bf16",
        "tp2-dp2-zero3",
        "pp2-dp2-zero3",
        "dp4-shards2-zero3-bf16",
        "dp3-zero2-reduced-in-bf16",
    ],
)
def test_memory_is_that_of_the_plan(layout: Layout, precision: str) -> None:
    """And between steps a rank holds its share alone: 2P or 2P/d of bf16 weights, 4P/d of gradients, 12P/d of state."""
    config = layout.config(precision)
    ranks = run_ranks(layout.world, measure, config)
    sharded = layout.zero_stage == 3
    shards = layout.shard_ranks or layout.dp
    for rank, found in enumerate(ranks):
        plan = report_rank(config, PARTS, rank)
        assert found["most"] == {"weights": plan.weights, "gradients": plan.gradients}
        assert found["optimizer"] == plan.optimizer
        assert found["activations"] == plan.activations
        elements = found["between"]["gradients"] // 4  # padded P/d
        assert plan.parameters <= elements * shards < plan.parameters * 1.2 + 20000
        size = 2 if precision == "bf16" else 4
        assert found["between"]["weights"] == size * elements * (1 if sharded else shards)
        assert found["optimizer"] == (12 if precision == "bf16" else 8) * elements


def sent(config: Config) -> dict[str, Any]:
    """Bytes sent by this rank over grad by operation, in a step and in an evaluation, and the bytes of each unit."""
    state = make_state(config)
    traffic = state.ctx.grad.shards.traffic.sent
    found: dict[str, Any] = {"units": {}}
    for number, stage in state.stages.items():
        for unit in state.grads.layout.buckets_of(stage):
            bucket = state.grads.layout.buckets[unit]
            found["units"].setdefault(number, []).append(bucket.stop - bucket.start)
    for kind, run in (("step", train_step), ("evaluation", evaluate)):
        before = dict(traffic)
        run(state, micro_batches(config, state.ctx, 0))
        found[kind] = {op: traffic[op] - before.get(op, 0) for op in ("all_gather", "reduce_scatter") if op in traffic}
    found["copies"] = state.ctx.grad.copies.traffic.sent
    return found


@pytest.mark.parametrize("schedule", ["1f1b", BREADTH])
@pytest.mark.parametrize("stage", [2, 3])
def test_traffic_is_that_of_the_formulas(stage: int, schedule: str) -> None:
    """(2 + 2 + 4) P u m in bf16 with ZeRO-3, and 2 P u + 4 P u m with ZeRO-2, for u = (d-1)/d and m micro-batches, or
    for m = 1 breadth-first. A unit stays if the next action uses it again: the last one between forward and backward,
    and the first one between the backward of a micro-batch and the forward of the next."""
    layout = Layout(SMALL, dp=2, zero_stage=stage, micro_batch_size=2, schedule=schedule)
    rounds = 3 if schedule == "1f1b" else 1  # 12 samples, 2 replicas, 2 samples of a micro-batch
    for found in run_ranks(2, sent, layout.config("bf16")):
        sizes = [sum(units) for _, units in sorted(found["units"].items())]
        everything, first, last = sum(sizes), sizes[0], sizes[-1]
        forward = backward = rounds * 2 * everything // 2
        kept = rounds * 2 * last // 2 + (rounds - 1) * 2 * first // 2
        gathered = 2 * everything // 2 if stage == 2 else forward + backward - kept
        assert found["step"] == {"all_gather": gathered, "reduce_scatter": rounds * 4 * everything // 2}
        assert found["evaluation"]["all_gather"] == (0 if stage == 2 else forward)
        assert found["evaluation"]["reduce_scatter"] == 0


@pytest.mark.parametrize("schedule", ["1f1b", BREADTH])
def test_traffic_between_copies_of_shards_is_that_of_the_formula(schedule: str) -> None:
    """Within groups of n = 2 of d = 4 ranks as with d = 2, and 2 (d/n-1)/(d/n) 4P/n across them in a step, however many
    micro-batches it has."""
    layout = Layout(SMALL, dp=4, zero_stage=3, shard_ranks=2, micro_batch_size=1, schedule=schedule)
    rounds = 3 if schedule == "1f1b" else 1  # 12 samples, 4 replicas, 1 sample of a micro-batch
    for found in run_ranks(4, sent, layout.config("bf16")):
        sizes = [sum(units) for _, units in sorted(found["units"].items())]
        everything, first, last = sum(sizes), sizes[0], sizes[-1]
        gathered = rounds * (2 * everything - last) - (rounds - 1) * first
        assert found["step"] == {"all_gather": gathered, "reduce_scatter": rounds * 4 * everything // 2}
        assert found["copies"] == {"all_reduce": 4 * everything // 2}


def order_of_sums(layout: Layout) -> list[str]:
    """What starts in the second step, of which the first has learned when buckets are complete."""
    config = layout.config()
    config = replace(config, optimizer=replace(config.optimizer, bucket_mb=0.02))
    state = make_state(config)
    noted: list[str] = []

    def noting(patch: pytest.MonkeyPatch, owner: Any, name: str, event: Callable[..., str]) -> None:
        original = getattr(owner, name)

        def noted_first(*args: Any, **options: Any) -> Any:
            noted.append(event(*args))
            return original(*args, **options)

        patch.setattr(owner, name, noted_first)

    with pytest.MonkeyPatch.context() as patch:
        noting(patch, collectives, "reduce_scatter_shard_async", lambda *_: "bucket")
        noting(patch, collectives, "all_reduce_async", lambda x, axis, *_: axis.name)
        noting(patch, type(state.grads), "finish", lambda _: "finish")
        for step in range(2):
            noted.clear()
            train_step(state, micro_batches(config, state.ctx, step))
    return [event for event in noted if event in ("bucket", state.ctx.grad.copies.name, "finish")]


def test_copies_of_shards_are_summed_under_the_backward() -> None:
    """With stage 1. The sum of a bucket's shard starts right before the next bucket is reduced."""
    for noted in run_ranks(4, order_of_sums, Layout(SMALL, dp=4, shard_ranks=2, micro_batch_size=3)):
        before = noted[: noted.index("finish")]
        assert before == ["bucket", *["grad_copies", "bucket"] * (len(before) // 2)]
        assert len(before) >= 5
        assert noted.count("bucket") == noted.count("grad_copies")
