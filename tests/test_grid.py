"""The grid: every layout trains as one process does. Loss, every gradient and every weight after two steps, in fp32.

The layouts are a part of a pairwise cover of the options (tests/support/factors.py), and a few larger ones. Behind -m
slow are the rest of the cover, and layouts that were chosen by hand.
"""

import socket
from collections import defaultdict
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megapar_tools.verify import logical
from megapar_tools.verify.logical import held_gradients

from megapar.config.model_options import ModelConfig
from megapar.config.options import Config
from megapar.pipeline.schedules import SCHEDULES
from megapar.step.step import train_step
from tests.support import close, cover
from tests.support.distributed import ON_GPUS, run_ranks
from tests.support.factors import COVER, SPACE, layout_of
from tests.support.grid import (
    GPT,
    LLAMA,
    MIXTRAL,
    ONE_KV_HEAD,
    SAMPLES,
    STEPS,
    STRADDLING,
    Layout,
    bitwise,
    check_on_ranks,
    make_state,
    micro_batches,
    name,
    train_two_steps,
)
from tests.support.kernel_checks import needs_triton
from tests.support.sweeps import slow_but, with_new_values


def train_on_hosts(config: Config, ranks_of_a_host: int) -> dict[str, Any]:
    """`train_two_steps`, with a host name for each `ranks_of_a_host` consecutive ranks."""
    name = f"host-{dist.get_rank() // ranks_of_a_host}"
    socket.gethostname = lambda: name
    return train_two_steps(config)


@pytest.mark.skipif(ON_GPUS, reason="ranks on GPUs exchange over NCCL")
@pytest.mark.parametrize(
    "layout",
    [
        Layout(LLAMA, tp=2, dp=2, micro_batch_size=3),
        pytest.param(
            Layout(LLAMA, tp=2, dp=2, pp=2, vpp=2, schedule="interleaved", micro_batch_size=2), marks=pytest.mark.slow
        ),
    ],
    ids=name,
)
def test_shared_memory_and_gloo_give_the_same_bits(layout: Layout) -> None:
    """On one host, over gloo alone, and on two hosts, each with both ranks of every tp axis."""
    config = layout.config()
    world = layout.world
    shared = run_ranks(world, train_on_hosts, config, world)
    over_gloo = replace(config, launch=replace(config.launch, cpu_exchange="gloo"))
    for ranks in (
        run_ranks(world, train_on_hosts, over_gloo, world),
        run_ranks(world, train_on_hosts, config, world // 2),
    ):
        for step in range(STEPS):
            found = [rank["steps"][step] for rank in ranks]
            expected = [rank["steps"][step] for rank in shared]
            assert [row[:2] for row in found] == [row[:2] for row in expected]
            for kind in (2, 3):  # gradients, weights
                one = logical.assemble([row[kind] for row in found])
                assert bitwise(one, logical.assemble([row[kind] for row in expected]))


def train_while_gathers_run(config: Config) -> dict[str, Any]:
    """What `train_two_steps` shows, and how many gathers were in flight after a step and in the middle of a forward."""
    state = make_state(config)
    in_flight: list[int] = []
    state.weights.wait()  # nothing is in flight: a wait does nothing
    stages = list(state.stages.values())
    for stage in stages:
        first_layer = next(iter(stage.layers.values()))
        first_layer.register_forward_hook(lambda *_: in_flight.append(len(state.weights._arriving)))
    shown: dict[str, Any] = {"steps": [], "in_flight": in_flight}
    for step in range(3):
        result = train_step(state, micro_batches(config, state.ctx, step))
        in_flight.append(len(state.weights._arriving))
        shown["steps"].append((result.loss, result.grad_norm))
    state.weights.wait()
    shown["weights"] = logical.held(stages, state.ctx)
    return shown


@pytest.mark.gpus
@pytest.mark.parametrize(
    "layout",
    slow_but(
        [0, 1],
        [
            Layout(LLAMA, dp=2, micro_batch_size=3, recompute="full"),
            Layout(ONE_KV_HEAD, dp=2, pp=2, vpp=2, schedule="interleaved", micro_batch_size=2),
            Layout(GPT, dp=2, tp=2, sequence_parallel=True, micro_batch_size=3),
        ],
    ),
    ids=name,
)
def test_gathers_under_the_forward_change_no_bit(layout: Layout) -> None:
    config = layout.config()
    overlapped = replace(config, optimizer=replace(config.optimizer, overlap_param_gather=True))
    expected = run_ranks(layout.world, train_while_gathers_run, config)
    found = run_ranks(layout.world, train_while_gathers_run, overlapped)
    for rank, other in zip(found, expected, strict=True):
        assert rank["steps"] == other["steps"]
        assert not any(other["in_flight"])
        after_first_step = rank["in_flight"].index(max(rank["in_flight"]))
        under_forward = rank["in_flight"][after_first_step + 1]
        assert 0 < under_forward < max(rank["in_flight"]), "some have arrived for the first layer, others not yet"
    assert bitwise(
        logical.assemble([rank["weights"] for rank in found]), logical.assemble([rank["weights"] for rank in expected])
    )


def use_a_layer_without_calling_it(config: Config) -> str:
    state = make_state(config)
    train_step(state, micro_batches(config, state.ctx, 0))
    for stage in state.stages.values():
        for layer in stage.layers.values():
            layer.__class__ = type(
                "Bypassed", (type(layer),), {"__call__": lambda self, *args, **kwargs: self.forward(*args, **kwargs)}
            )
    with pytest.raises(RuntimeError) as caught:
        train_step(state, micro_batches(config, state.ctx, 1))
    state.weights.wait()
    return str(caught.value)


def test_a_layer_whose_weights_may_be_old_is_told() -> None:
    config = Layout(LLAMA, dp=2, micro_batch_size=3).config()
    overlapped = replace(config, optimizer=replace(config.optimizer, overlap_param_gather=True))
    for text in run_ranks(2, use_a_layer_without_calling_it, overlapped):
        assert "LlamaStage has used the layer of layers." in text


# What two of a kind do not show: heads on four ranks, a chain of four stages, replicas without a micro-batch, more cp
# ranks than key/value heads, three axes at once, and a schedule from outside.
LARGER = [
    Layout(STRADDLING, tp=4, sequence_parallel=True, micro_batch_size=6),
    Layout(LLAMA, pp=4, micro_batch_size=4),
    Layout(LLAMA, dp=4, micro_batch_size=6),
    Layout(ONE_KV_HEAD, cp=4, cp_attention="ring", micro_batch_size=6, packed=True),
    Layout(GPT, dp=2, tp=2, pp=2, sequence_parallel=True, micro_batch_size=2),
    Layout(GPT, tp=2, pp=2, vpp=2, schedule="tests.support.schedules:BACK_AND_FORTH", micro_batch_size=3),
]
# An evaluation runs a part of what a step runs, so every eighth layout has one. Of those that begin at 1 one has
# dropout, one delta nets, and two a V of stages; replicas without a micro-batch come beside.
LANE = [(layout, number % 8 == 1 or number == 16) for number, layout in enumerate([*map(layout_of, COVER), *LARGER])]
# Those of the cover with every value of an option, and every pair of two that deal work to ranks.
DEALS = ("tp", "cp", "dp", "schedule", "experts")
FEW = (1, 7, 8, 10, 12, 14, 15, 16, 17, 18, 21, 22, 25, 26, 28, 30, 34, 36, 37, 38, 39, 41, 44)


@pytest.mark.gpus
@pytest.mark.parametrize(
    ("layout", "evaluation"),
    slow_but([*FEW, *range(len(COVER), len(LANE))], LANE),
    ids=[name(layout) for layout, _ in LANE],
)
def test_layout_changes_nothing(layout: Layout, evaluation: bool) -> None:
    """Faults uneven-target-counts, loss-divided-once, no-target-tokens, micro-batch-size, logged-loss-is-optimized,
    norm-gradients-under-sequence-parallelism, kv-heads-fewer-than-tp, norms-shared-by-heads, vocabulary-padding,
    initial-weights-same, pipeline-schedules-agree, ragged-micro-batches, tied-embeddings-zero-pipeline,
    norm-counts-elements-once, clipping-changes-updates."""
    check_on_ranks(layout, evaluation)


# Values that meet in no layout, by factors. The rules of tests/support/factors.py say why.
FORBIDDEN: dict[tuple[str, str], set[tuple[Any, Any]]] = {
    ("cp", "dp"): {("ring", 2), ("ulysses", 2)},
    ("cp", "experts"): {
        ("ring", "as tp"),
        ("ring", "ep 2"),
        ("ring", "etp 2"),
    },
    ("cp", "model"): {
        ("ring", "hybrid"),
        ("ring", "shared"),
        ("ring", "sigmoid"),
        ("ulysses", "shared"),
        ("ulysses", "sigmoid"),
    },
    ("cp", "overlap"): {("gather", None), ("ring", None), ("ulysses", None)},
    ("cp", "partition"): {("gather", (1, 3)), ("ring", (1, 3)), ("ulysses", (1, 3))},
    ("cp", "schedule"): {
        ("gather", "zb-v"),
        ("ring", "1f1b"),
        ("ring", "zb-v"),
        ("ulysses", "1f1b"),
        ("ulysses", "zb-v"),
    },
    ("cp", "tp"): {("gather", "2"), ("ring", "2"), ("ulysses", "2")},
    ("cp", "tp_overlap_chunks"): {("gather", 3), ("ring", 3), ("ulysses", 3)},
    ("cp", "zero_stage"): {("gather", None), ("ring", None), ("ulysses", None)},
    ("dp", "model"): {(2, "straddling")},
    ("dp", "overlap"): {(2, None)},
    ("dp", "partition"): {(2, (1, 3))},
    ("dp", "tp"): {(2, "2")},
    ("dp", "tp_overlap_chunks"): {(2, 3)},
    ("dp", "zero_stage"): {(2, None)},
    ("experts", "model"): {
        (None, "hybrid"),
        ("as tp", "gpt"),
        ("as tp", "llama"),
        ("as tp", "one_kv_head"),
        ("as tp", "straddling"),
        ("ep 2", "gpt"),
        ("ep 2", "llama"),
        ("ep 2", "one_kv_head"),
        ("ep 2", "straddling"),
        ("etp 2", "gpt"),
        ("etp 2", "llama"),
        ("etp 2", "one_kv_head"),
        ("etp 2", "straddling"),
        (None, "shared"),
        (None, "sigmoid"),
    },
    ("experts", "overlap"): {("etp 2", None)},
    ("experts", "partition"): {("as tp", (1, 3)), ("ep 2", (1, 3)), ("etp 2", (1, 3))},
    ("experts", "tp"): {("etp 2", "2 with sequence parallelism"), ("etp 2", "2")},
    ("experts", "tp_overlap_chunks"): {("etp 2", 1), ("etp 2", 3)},
    ("experts", "zero_stage"): {("etp 2", None)},
    ("model", "partition"): {("hybrid", (1, 3)), ("shared", (1, 3)), ("sigmoid", (1, 3)), ("straddling", (1, 3))},
    ("model", "schedule"): {("straddling", "1f1b"), ("straddling", "zb-v")},
    ("model", "zero_stage"): {("straddling", 0), ("straddling", 2), ("straddling", 3)},
    ("order", "partition"): {("pp-dp-cp-tp", (1, 3))},
    ("order", "tp"): {("pp-dp-cp-tp", "2")},
    ("order", "tp_overlap_chunks"): {("pp-dp-cp-tp", 3)},
    ("overlap", "partition"): {(False, (1, 3)), (True, (1, 3))},
    ("overlap", "tp"): {(False, "2"), (True, "2")},
    ("overlap", "tp_overlap_chunks"): {(False, 3), (True, 3)},
    ("overlap", "zero_stage"): {(False, None), (None, 0), (None, 1), (None, 2), (None, 3), (True, None)},
    ("partition", "schedule"): {((1, 3), "zb-v"), ((1, 3), None)},
    ("partition", "tp"): {((1, 3), "2 with sequence parallelism"), ((1, 3), "2")},
    ("partition", "tp_overlap_chunks"): {((1, 3), 1), ((1, 3), 3)},
    ("partition", "zero_stage"): {((1, 3), 0), ((1, 3), 1), ((1, 3), 2), ((1, 3), 3)},
    ("schedule", "tp"): {("1f1b", "2"), ("zb-v", "2")},
    ("schedule", "tp_overlap_chunks"): {("1f1b", 3), ("zb-v", 3)},
    ("schedule", "zero_stage"): {("1f1b", 2), ("1f1b", 3), ("zb-v", 0), ("zb-v", 2), ("zb-v", 3)},
    ("tp", "tp_overlap_chunks"): {("2 with sequence parallelism", None), ("2", None), (None, 1), (None, 3)},
    ("tp", "zero_stage"): {("2", 0), ("2", 1), ("2", 2), ("2", 3)},
    ("tp_overlap_chunks", "zero_stage"): {(3, 0), (3, 1), (3, 2), (3, 3)},
}


def test_the_layouts_cover_every_pair_of_options() -> None:
    allowed, forbidden = SPACE.pairs()
    assert len(allowed) > 900
    met = set().union(*map(cover.pairs_of, COVER))
    assert met == allowed
    assert all(map(SPACE.allows, COVER))
    few = [COVER[number] for number in FEW]
    assert {value for case in few for value in case.items()} == {value for pair in allowed for value in pair}
    assert {pair for pair in allowed if pair[0][0] in DEALS and pair[1][0] in DEALS} <= set().union(
        *map(cover.pairs_of, few)
    )
    found: dict[tuple[str, str], set[tuple[Any, Any]]] = defaultdict(set)
    for (first, one), (second, other) in forbidden:
        found[first, second].add((one, other))
    assert found == FORBIDDEN


# A micro-batch of a layer costs a tensor-parallel layout several messages, so these have fewer of them.
GRID = [
    Layout(LLAMA, tp=2, micro_batch_size=3),
    Layout(LLAMA, tp=2, sequence_parallel=True, recompute="full", every=2, micro_batch_size=4),
    Layout(LLAMA, dp=2, zero_stage=0, micro_batch_size=2),
    Layout(LLAMA, dp=2, zero_stage=1, micro_batch_size=3, overlap=False),
    Layout(LLAMA, dp=2, micro_batch_size=4),  # 2 and 1 micro-batches
    Layout(LLAMA, pp=2, partition=(1, 3)),
    Layout(LLAMA, pp=2, vpp=2, schedule="interleaved", micro_batch_size=4),
    Layout(LLAMA, pp=2, micro_batch_size=SAMPLES),
    Layout(LLAMA, pp=3, schedule="zb-h1", micro_batch_size=2),
    Layout(GPT, pp=2, tp=2, vpp=2, schedule="zb-v", sequence_parallel=True, micro_batch_size=3),
    Layout(ONE_KV_HEAD, pp=2, vpp=2, schedule="dualpipe-v", recompute="full", micro_batch_size=2),
    Layout(LLAMA, pp=2, dp=2, vpp=2, schedule="zb-interleaved", micro_batch_size=2, loss_chunk=7),
    Layout(STRADDLING, pp=2, cp=2, vpp=2, schedule="v-half", micro_batch_size=3),
    Layout(LLAMA, pp=2, vpp=2, schedule="breadth", micro_batch_size=4),
    Layout(GPT, pp=2, schedule="gpipe", recompute="selective"),
    Layout(GPT, tp=2, sequence_parallel=True, recompute="selective", micro_batch_size=3),
    Layout(ONE_KV_HEAD, tp=2, sequence_parallel=True, micro_batch_size=4),
    Layout(ONE_KV_HEAD, dp=2),
    Layout(LLAMA, tp=2, sequence_parallel=True, loss_chunk=7, micro_batch_size=2),
    Layout(ONE_KV_HEAD, pp=2, loss_chunk=5),
    Layout(LLAMA, tp=2, sequence_parallel=True, micro_batch_size=3, packed=True),
    Layout(GPT, pp=2, micro_batch_size=2, recompute="selective", packed=True),
    Layout(LLAMA, tp=2, sequence_parallel=True, tp_overlap_chunks=3, recompute="full", every=2, micro_batch_size=4),
    Layout(GPT, tp=2, tp_overlap_chunks=2, recompute="selective", micro_batch_size=3),
    Layout(LLAMA, tp=4, sequence_parallel=True, micro_batch_size=4),
    Layout(GPT, tp=4, sequence_parallel=True, tp_overlap_chunks=5, micro_batch_size=4),
    Layout(ONE_KV_HEAD, tp=4, micro_batch_size=3),
    Layout(LLAMA, dp=2, tp=2, recompute="full", micro_batch_size=2),
    Layout(GPT, dp=2, pp=2, recompute="full"),
    Layout(ONE_KV_HEAD, dp=2, pp=2, zero_stage=0, order="pp-dp-cp-tp"),
    Layout(GPT, tp=2, pp=2, vpp=2, schedule="interleaved", sequence_parallel=True, micro_batch_size=4),
    Layout(LLAMA, dp=4, micro_batch_size=3),
    Layout(GPT, dp=2, pp=2, micro_batch_size=4, zero_stage=0),  # 2 and 1 micro-batches
    Layout(LLAMA, dp=2, pp=2, vpp=2, schedule="tests.support.schedules:BACK_AND_FORTH", micro_batch_size=2),
    Layout(GPT, dp=2, tp=2, sequence_parallel=True, micro_batch_size=3, packed=True),
    Layout(LLAMA, dp=2, tp=2, pp=2, sequence_parallel=True, recompute="selective", micro_batch_size=3),
    Layout(ONE_KV_HEAD, tp=4, pp=2, vpp=3, schedule="interleaved", sequence_parallel=True, micro_batch_size=4),
    Layout(STRADDLING, dp=2, tp=4, zero_stage=0, micro_batch_size=3),
    Layout(LLAMA, dp=2, pp=4, schedule="gpipe", micro_batch_size=2),
]
# Every pair of a form and a number of cp ranks, and each of them with the other axes.
GRID += [
    Layout(LLAMA, cp=2, micro_batch_size=6),
    Layout(LLAMA, cp=2, cp_attention="ring", micro_batch_size=6, loss_chunk=7),
    Layout(LLAMA, cp=2, cp_attention="ulysses", micro_batch_size=6),
    Layout(GPT, cp=2, recompute="selective", micro_batch_size=6, packed=True),
    Layout(GPT, cp=2, cp_attention="ring", recompute="full", micro_batch_size=6, packed=True),
    Layout(LLAMA, cp=3, zero_stage=0, micro_batch_size=6),
    Layout(STRADDLING, cp=3, cp_attention="ulysses", micro_batch_size=6, packed=True),
    Layout(LLAMA, cp=4, micro_batch_size=4, packed=True),
    Layout(GPT, cp=4, cp_attention="ulysses", zero_stage=0, recompute="selective", micro_batch_size=6, packed=True),
    Layout(GPT, cp=2, dp=2, cp_attention="ring", zero_stage=0, micro_batch_size=3),
    Layout(LLAMA, cp=2, dp=2, micro_batch_size=6, order="pp-dp-cp-tp"),
    Layout(LLAMA, cp=2, tp=2, sequence_parallel=True, recompute="selective", micro_batch_size=6),
    Layout(ONE_KV_HEAD, cp=2, tp=2, sequence_parallel=True, cp_attention="ulysses", micro_batch_size=6, packed=True),
    Layout(GPT, cp=2, pp=2, cp_attention="ring", recompute="selective", micro_batch_size=4, packed=True),
    Layout(
        LLAMA,
        cp=2,
        pp=2,
        vpp=2,
        schedule="interleaved",
        cp_attention="ulysses",
        micro_batch_size=6,
        order="cp-tp-dp-pp",
    ),
    Layout(STRADDLING, cp=3, tp=2, sequence_parallel=True, micro_batch_size=6, packed=True),
    Layout(GPT, cp=2, tp=2, pp=2, sequence_parallel=True, recompute="full", micro_batch_size=6, packed=True),
    Layout(LLAMA, cp=2, tp=2, dp=2, sequence_parallel=True, cp_attention="ring", micro_batch_size=6, packed=True),
]


# Where ranks share a GPU a layout takes up to two minutes. So a GPU gets those with values that LANE lacks.
ON_GPUS = with_new_values(GRID, [layout for layout, _ in LANE])
BY_HAND = [pytest.param(layout, marks=[pytest.mark.gpus] * (place in ON_GPUS)) for place, layout in enumerate(GRID)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", BY_HAND, ids=map(name, GRID))
def test_layouts_by_hand_change_nothing(layout: Layout) -> None:
    check_on_ranks(layout)


def gradients_of_schedules(layouts_of_schedules: list[Layout]) -> list[tuple[float, list[logical.Held]]]:
    """For each layout the loss and this rank's reduced gradients after one step."""
    shown = []
    for layout in layouts_of_schedules:
        config = layout.config()
        state = make_state(config)
        loss = train_step(state, micro_batches(config, state.ctx, 0)).loss
        shown.append((loss, held_gradients(state)))
    return shown


STAGES = {name: schedule.vpp.nearest_to(2) for name, schedule in SCHEDULES.items() if name != "1f1b"}


@pytest.mark.gpus
@pytest.mark.parametrize(("model", "rtol"), [(LLAMA, 0.0), (ONE_KV_HEAD, 1e-6)], ids=["untied", "tied"])
@pytest.mark.parametrize("micro_batch_size", slow_but([0], [2, 12]), ids=["six", "one"])
def test_every_schedule_has_the_bits_of_1f1b(model: ModelConfig, rtol: float, micro_batch_size: int) -> None:
    """With six micro-batches and with one. A tied embedding with both ends on one rank is summed in another order: it
    differs by rounding."""
    base = Layout(model, pp=2, micro_batch_size=micro_batch_size)
    others = [replace(base, schedule=name, vpp=vpp) for name, vpp in STAGES.items()]
    # 1F1B once more, and compared first: a step that differs from itself says nothing of the others.
    cases = [base, base, *others]
    by_rank = run_ranks(2, gradients_of_schedules, cases)
    expected_loss = by_rank[0][0][0]
    expected = logical.assemble([rank[0][1] for rank in by_rank])
    for number, case in enumerate(cases):
        assert by_rank[0][number][0] == pytest.approx(expected_loss, rel=1e-6), case.schedule
        found = logical.assemble([rank[number][1] for rank in by_rank])
        close.assert_close(found, expected, 0.0 if case == base else rtol, case.schedule)


def of_layers(model: ModelConfig, count: int) -> ModelConfig:
    return replace(model, num_hidden_layers=count)


# One layer uses every kernel of a family. The interpreter takes its time, so the layouts are small, and the one whose
# ranks compute the norms of the same positions is slow.
FUSED = [
    Layout(
        of_layers(GPT, 1), pp=2, micro_batch_size=SAMPLES, recompute="selective", backend="triton", partition=(1, 0)
    ),
    Layout(of_layers(ONE_KV_HEAD, 1), dp=2, micro_batch_size=6, backend="triton", loss_chunk=100),
    Layout(
        of_layers(ONE_KV_HEAD, 1), tp=2, sequence_parallel=True, micro_batch_size=6, backend="triton", loss_chunk=100
    ),
    Layout(of_layers(MIXTRAL, 1), dp=2, ep=2, micro_batch_size=6, backend="triton"),
]


@needs_triton
@pytest.mark.gpus
@pytest.mark.parametrize("layout", slow_but([1], FUSED), ids=name)
def test_fused_kernels_change_nothing(layout: Layout) -> None:
    """Every op by Triton's kernels, interpreted on a CPU, against one process with torch's ops."""
    check_on_ranks(layout)


@st.composite
def random_layouts(draw: st.DrawFn) -> Layout:
    tp, pp, dp = draw(st.sampled_from([(1, 2, 2), (2, 2, 1), (2, 1, 2), (4, 1, 1), (1, 4, 1), (1, 1, 3), (2, 3, 1)]))
    cp, cp_attention = draw(st.sampled_from([(1, "gather"), (2, "gather"), (2, "ring"), (2, "ulysses")]))
    if cp > 1:  # no more ranks than without it
        tp, pp, dp = draw(st.sampled_from([(1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 1, 1)]))
    vpp = draw(st.integers(1, 2 if pp < 4 else 1))
    return Layout(
        draw(st.sampled_from([LLAMA, GPT, ONE_KV_HEAD, STRADDLING])),
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        cp_attention=cp_attention,
        vpp=vpp,
        schedule="interleaved" if vpp > 1 else draw(st.sampled_from(["1f1b", "gpipe"])),
        sequence_parallel=draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        zero_stage=draw(st.sampled_from([0, 1, 2, 3])),
        micro_batch_size=draw(st.sampled_from([size for size in (1, 2, 3, 4) if SAMPLES % (size * dp) == 0])),
        loss_chunk=draw(st.sampled_from([0, 0, 11])),
        packed=draw(st.booleans()),
        order=draw(st.sampled_from(["tp-cp-dp-pp", "pp-tp-cp-dp", "dp-pp-tp-cp"])),
    )


def context_parallel_product() -> list[Layout]:
    """Every cp with every form, tensor parallelism, pipeline, model, and with and without documents. What a rank keeps
    goes round with the cases."""
    cases: list[Layout] = []
    kept = cycle([("none", 1), ("selective", 0), ("full", 1), ("none", 0)])
    axes = product(
        (2, 3, 4),
        ("gather", "ring", "ulysses"),
        (1, 2),
        (False, True),
        (1, 2),
        (LLAMA, GPT, ONE_KV_HEAD, STRADDLING),
        (False, True),
    )
    for cp, form, tp, sequence_parallel, pp, model, packed in axes:
        heads = model.num_attention_heads // tp
        if (form == "ulysses" and heads % cp) or (sequence_parallel and tp == 1):
            continue
        recompute, zero_stage = next(kept)
        cases.append(
            Layout(
                model,
                tp=tp,
                pp=pp,
                cp=cp,
                cp_attention=form,
                sequence_parallel=sequence_parallel,
                recompute=recompute,
                zero_stage=zero_stage,
                micro_batch_size=6,
                packed=packed,
            )
        )
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("layout", context_parallel_product(), ids=name)
def test_context_parallel_with_everything_changes_nothing(layout: Layout) -> None:
    check_on_ranks(layout)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(layout=random_layouts())
def test_many_random_layouts_change_nothing(layout: Layout) -> None:
    check_on_ranks(layout)
