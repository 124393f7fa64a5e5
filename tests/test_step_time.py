"""The model of time: recorded work against counts by hand, links against formulas, pipelines against their simulation,
and what must never be slower."""

import math
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megapar_kernels import backend, delta_rule, dispatch, state_space
from megapar_kernels.attention import masked_causal_attention
from megapar_models.registry import presets, validate
from megapar_tools.plan import hardware
from megapar_tools.plan.durations import duration, kernel_seconds
from megapar_tools.plan.estimate import Estimator
from megapar_tools.plan.hardware import Hardware, Link
from megapar_tools.plan.network import Network
from megapar_tools.plan.parts import Parts, meta_batch
from megapar_tools.plan.recorded import Recording
from megapar_tools.plan.space import layout_of
from megapar_tools.plan.step_time import OPTIMIZER, step_time
from megapar_tools.plan.work import META, AttentionWork, Kernel, Operations, Product, Started, Tape, Waited
from megapar_tools.plan.work import recording as recording_of
from torch import Tensor

from megapar.activations import recompute
from megapar.base.errors import ConfigError
from megapar.base.grid import Grid
from megapar.config.derive import num_microbatches
from megapar.config.options import Config
from megapar.declare import context
from megapar.declare.batch import PipelineStage
from megapar.launch.grid import grid_of
from megapar.linear.torch_products import TorchProducts
from megapar.pipeline.actions import Action
from megapar.pipeline.schedules import SCHEDULES, make, show
from megapar.pipeline.sharding_plan import Item, UnitAction, Units, insert_unit_actions
from megapar.pipeline.simulation import simulate
from tests.support.kernel_checks import needs_triton  # which also repairs Triton's interpreter
from tests.support.options import load
from tests.support.plans import PARTS

sys.path.append(str(Path(__file__).parents[1] / "tools"))
import plan
import plan_accuracy
from megapar_models.build import StageBuilder

from tests.support.sweeps import slow_but

H100 = hardware.load("h100-80g")
BUILDER = StageBuilder()


@pytest.fixture(autouse=True)
def _not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dispatch, backend):
        monkeypatch.setattr(module, "interpreting", lambda: False)


def config(world: int, *flags: str, preset: str = "llama3.2-1b", batch: int = 64) -> Config:
    """A preset in bf16 with the kernels of a GPU."""
    fixed = ["--config", preset, "--kernels.backend", "triton", "--train.precision", "bf16"]
    sizes = ["--train.seq_length", "2048", "--train.global_batch_size", str(batch)]
    return validate(load([*fixed, *sizes, *flags], presets()).config, world)


def layer_work(of: Config, layer: int = 1):  # type: ignore[no-untyped-def]
    ctx, tape = recording_of(context.planned(grid_of(of), 0, device=META))
    stage = BUILDER.maker(of, ctx)(range(layer, layer + 1), first=False, last=False)
    batch = meta_batch(of.train.micro_batch_size, of.train.seq_length, of.parallel.cp, 1)
    return stage, Recording(stage, batch, tape)


def product_flops(operations: Operations) -> float:
    return sum(2 * x.m * x.n * x.k * x.number for x in operations if isinstance(x, Product))


# Machines


def test_a_machine_is_written_and_read_again(tmp_path: Path) -> None:
    for name in hardware.names():
        machine = hardware.load(name)
        hardware.write(machine, tmp_path / "machine.toml", {"watts": "assumed"})
        assert hardware.load(str(tmp_path / "machine.toml")) == machine
        assert machine.usable_bytes < machine.memory_gib * 2**30


def test_each_figure_of_a_machine_has_a_source() -> None:
    for path in hardware.FOLDER.glob("*.toml"):
        for line in path.read_text().splitlines():
            if " = " in line and not line.startswith("name"):
                assert "  # " in line, f"{path.name}: {line}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("watts = ", "what = "), "unknown key what"),
        (("watts = 700.0", ""), "missing key watts"),
        (("memory_share = 0.87", "memory_share = 0.0"), "memory_share=0 must be above 0"),
        (("reserve_gib = 4.0", "reserve_gib = 90.0"), "leaves nothing"),
        (("price_per_hour = 2.8", 'price_per_hour = "much"'), "price_per_hour='much' is not what the key takes"),
        (("[node]", "[node"), "no TOML file"),
    ],
)
def test_a_wrong_machine_is_refused_in_one_line(change: tuple[str, str], words: str, tmp_path: Path) -> None:
    text = (hardware.FOLDER / "h100-80g.toml").read_text()
    assert change[0] in text
    (tmp_path / "wrong.toml").write_text(text.replace(*change, 1))
    with pytest.raises(ConfigError, match=words) as caught:
        hardware.load(str(tmp_path / "wrong.toml"))
    assert "\n" not in str(caught.value)


def test_an_unknown_machine_is_refused_with_near_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean h100-80g"):
        hardware.load("h100")


# Recorded work


@needs_triton
def test_a_layer_multiplies_its_matrices_three_times() -> None:
    """Forward, input gradient and weight gradient: 2 FLOPs a weight and token each, on each rank a part of them."""
    for tp in (1, 2, 4):
        of = config(tp, "--parallel.tp", str(tp), "--parallel.sequence_parallel")
        stage, work = layer_work(of)
        matrices = sum(p.numel() for p in stage.parameters() if p.dim() == 2)
        one = 2.0 * 2048 * matrices
        assert product_flops(work.forward) == one
        assert product_flops(work.backward) == 2 * one
        assert product_flops(work.inputs) == product_flops(work.weights) == one
        assert {x.precision for x in work.backward if isinstance(x, Product)} == {"bf16"}


@needs_triton
def test_attention_counts_what_its_mask_leaves() -> None:
    _, work = layer_work(config(1))
    _, in_ring = layer_work(config(2, "--parallel.cp", "2", "--parallel.cp_attention", "ring"))
    causal = 2 * 2048**2 * 2048  # half of 4 s^2 n d
    found = [x for x in work.forward if isinstance(x, AttentionWork)]
    assert [x.flops for x in found] == [causal]
    # Each of two ranks has half of the scores, but for the halves of the blocks on the diagonal.
    split = sum(x.flops for x in in_ring.forward if isinstance(x, AttentionWork))
    assert split == pytest.approx(causal / 2, rel=0.01)
    assert [x.backward for x in work.backward if isinstance(x, AttentionWork)] == [True]


def test_attention_in_fp32_has_the_share_of_its_own_peak() -> None:
    """At the rate of 16 bits, long samples in fp32 had an MFU of 190 %."""
    seconds = {
        precision: kernel_seconds(AttentionWork(1e15, 128, False, precision, 0), replace(H100, kernel_us=0.0))[1]
        for precision in ("bf16", "fp16", "fp32")
    }
    assert seconds["bf16"] == seconds["fp16"]
    assert seconds["fp32"] / seconds["bf16"] == pytest.approx(989 / 66.9)
    # A file that was measured in fp32 alone has the rates of fp32.
    measured = replace(H100, peak_tflops={"fp32": 66.9}, kernel_us=0.0)
    assert kernel_seconds(AttentionWork(1e15, 128, False, "fp32", 0), measured)[1] == seconds["bf16"]


@needs_triton
@pytest.mark.parametrize("cp_attention", ["none", "gather", "ulysses"])
def test_the_estimate_of_a_search_has_the_widths_of_latent_attention(cp_attention: str) -> None:
    """Its FLOPs are the recorded ones, of values padded to keys of 192. Values of 128 are sent as they are."""
    cp = 1 if cp_attention == "none" else 2
    flags = ["--parallel.cp", str(cp)] + ["--parallel.cp_attention", cp_attention] * (cp > 1)
    of = config(cp, *flags, preset="deepseek-v2-lite")
    _, work = layer_work(of)
    planner = plan.ModelPlanner(H100)
    estimator = Estimator(of, plan.sizes_of(of)[0], H100, planner.kept_by_a_layer)
    layout, tokens = layout_of(of), of.train.seq_length / cp
    flops = sum(x.flops for x in work.forward if isinstance(x, AttentionWork))
    if cp == 1 or cp_attention == "ulysses":  # the first rank of gather has fewer scores than the others
        assert estimator.layers.attention(layout, tokens).flops == flops
    for found, recorded in zip(
        estimator.layers.communication(layout, tokens), (work.forward, work.backward), strict=True
    ):
        assert sent(found) == sent(recorded)


@needs_triton
def test_the_estimate_of_a_search_knows_windows() -> None:
    """Of Gemma 2's layers every other one reads 4,096 keys. Recorded are tiles, with about 64 keys a query more."""
    of = config(1, preset="gemma-2-9b")
    of = replace(of, train=replace(of.train, seq_length=16384))
    planner = plan.ModelPlanner(H100)
    estimator = Estimator(of, plan.sizes_of(of)[0], H100, planner.kept_by_a_layer)
    model, s = of.model, of.train.seq_length
    pairs = s * s / 2, 4096 * s - 4096**2 / 2
    flops = 4 * model.num_attention_heads * model.key_width * sum(pairs) / 2
    assert estimator.layers.attention(layout_of(of), s).flops == pytest.approx(flops)
    works = [layer_work(of, layer)[1] for layer in (0, 1)]
    recorded = sum(x.flops for work in works for x in work.forward if isinstance(x, AttentionWork))
    assert recorded / 2 == pytest.approx(flops, rel=0.02)


def sent(operations: Operations) -> Counter[tuple[str, str]]:
    """Bytes by axis and operation."""
    found: Counter[tuple[str, str]] = Counter()
    for x in operations:
        if isinstance(x, Started):
            found[x.axis, x.operation] += x.nbytes
    return found


@pytest.mark.parametrize(("recomputes", "again"), [(False, ["B"]), (True, ["F", "B"])])
def test_attention_with_a_window_is_one_operation_too(recomputes: bool, again: list[str]) -> None:
    """Also where backward repeats it."""
    q, k, v = (torch.empty(64, 1, 4, 32, device=META, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    class Windowed(PipelineStage):
        adds_gradients_in_i = False

        def boundary(self, batch: object) -> tuple[()]:
            return ()

        def forward(self, x: object, batch: object) -> torch.Tensor:
            return recompute.run(recomputes, partial(masked_causal_attention, starts=None, window=8), q, k, v)

    work = Recording(Windowed(), None, Tape())  # type: ignore[arg-type]
    for operations, passes in ((work.forward, ["F"]), (work.backward, again), (work.inputs, again)):
        found = [("B" if x.backward else "F", x.flops) for x in operations if isinstance(x, AttentionWork)]
        assert found == [(name, 4 * 64 * 64 * 32 * 4) for name in passes]
        assert not any(isinstance(x, Product) for x in operations)


@needs_triton
def test_attention_with_sinks_and_windows_is_that_of_our_kernels() -> None:
    """No scores are in memory: products are those of matrices and experts. A window of 128 takes few FLOPs."""
    of = config(1, "--train.micro_batch_size", "1", preset="gpt-oss-20b")
    found = []
    for number in (0, 1):
        ctx, tape = recording_of(context.planned(grid_of(of), 0, device=META))
        stage = BUILDER.maker(of, ctx)(range(number, number + 1), first=False, last=False)
        work = Recording(stage, meta_batch(1, of.train.seq_length, 1, 1), tape)
        matrices = [x for x in work.forward if isinstance(x, Product) and not x.grouped]
        assert len(matrices) == 5  # qkv, out, router, and biases of experts for both of their matrices
        found += [x for x in work.forward if isinstance(x, AttentionWork)]
        assert [x.tiled for x in work.backward if isinstance(x, AttentionWork) and x.backward] == [True]
    a_pair = 4.0 * 64 * 64
    assert [x.flops / a_pair for x in found] == [2048 * 128 - 128 * 127 / 2 + 2048 * 64, 2048 * 2049 / 2 + 2048 * 64]


@needs_triton
@pytest.mark.parametrize("in_one_launch", [True, False])
def test_experts_are_multiplied_in_as_many_launches_as_on_the_gpu(
    in_one_launch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for all of them on Hopper, and elsewhere one for each. Their FLOPs are the same."""
    if not in_one_launch:
        monkeypatch.setattr(TorchProducts, "in_one_launch", lambda *_: False)
    of = config(1, "--train.micro_batch_size", "1", preset="qwen3-30b-a3b")
    _, work = layer_work(of)
    flops = 2.0 * 8 * 2048 * 768 * 2048  # of a matrix, with 8 experts a token
    for operations, passes in ((work.forward, 1), (work.backward, 2)):
        found = [x for x in operations if isinstance(x, Product) and x.grouped]
        assert [x.launches for x in found] == [1 if in_one_launch else 128] * 2 * passes
        assert product_flops(found) == pytest.approx(3 * passes * flops)


@needs_triton
@pytest.mark.parametrize(
    ("preset", "precision", "module"),
    [("nemotron-3-nano-30b-a3b", "bf16", state_space), ("qwen3.5-0.8b", "fp32", delta_rule)],
)
def test_a_loop_over_chunks_is_recorded_as_if_it_ran(
    preset: str, precision: str, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = config(2, "--parallel.cp", "2", preset=preset)
    of = replace(of, train=replace(of.train, precision=precision))
    _, short = layer_work(of, 0)
    found = short.forward, short.backward

    def every(like: Tensor, count: int, *, backwards: bool = False) -> Iterable[int]:
        assert count == 2048 // 4 // 64  # of a run
        return range(count - 1, -1, -1) if backwards else range(count)

    monkeypatch.setattr(module, "chunks_of", every)
    _, long = layer_work(of, 0)
    assert found == (long.forward, long.backward)


@needs_triton
def test_kernels_move_what_they_read_and_write() -> None:
    """Forward, the norm with the residual's addition reads two tensors and writes two; the activation moves 3."""
    of = config(1)
    _, work = layer_work(of)
    hidden = 2048 * of.model.hidden_size * 2
    wide = 2048 * of.model.intermediate_size * 2
    moved = [x.moved_bytes for x in work.forward if isinstance(x, Kernel)]
    assert any(4 * hidden <= x < 4 * hidden * 1.01 for x in moved)
    assert 3 * wide in moved


@needs_triton
def test_collectives_are_recorded_with_what_runs_under_them() -> None:
    """Sequence parallelism: two gathers and two reduce-scatters forward. In backward the gathers for weight gradients
    and the reduce-scatters run under a product."""
    _, work = layer_work(config(2, "--parallel.tp", "2", "--parallel.sequence_parallel"))
    whole = 2048 * 2048 * 2
    started = [x for x in work.forward if isinstance(x, Started)]
    assert Counter((x.axis, x.operation, x.nbytes) for x in started) == {
        ("tp", "all_gather", whole): 2,
        ("tp", "reduce_scatter", whole): 2,
    }
    under: dict[int, float] = {}
    for operation in work.backward:
        if isinstance(operation, Started):
            under[operation.number] = 0.0
        elif isinstance(operation, Waited):
            under[operation.number] = -under[operation.number] - 1
        else:
            under = {n: x + 1 if x >= 0 else x for n, x in under.items()}
    hidden = sum(x < -1 for x in under.values())
    assert (len(under), hidden) == (6, 4)


@needs_triton
def test_what_one_plan_keeps_is_right_for_the_next() -> None:
    """Layers that are not recomputed stay so after a plan in which all of them are."""
    shared = Parts(StageBuilder())
    every = config(1, "--train.recompute", "full")
    second = config(1, "--train.recompute", "full", "--train.recompute_every", "2")
    assert step_time(every, shared, H100).seconds > step_time(second, shared, H100).seconds
    assert step_time(second, shared, H100) == step_time(second, Parts(StageBuilder()), H100)


ZERO_BUBBLE = SCHEDULES["zb-h1"]


@needs_triton
def test_an_order_by_another_name_takes_as_long(tmp_path: Path) -> None:
    """The same schedule as MODULE:NAME, and the same orders in a file, have the prediction of zb-h1.

    All micro-batches are simulated: a file does not say that its rounds are alike.
    """
    of = config(8, "--parallel.pp", "4", "--parallel.dp", "2", "--parallel.schedule", "zb-h1")
    file = tmp_path / "orders.txt"
    file.write_text(show(make("zb-h1", 4, 1, num_microbatches(of))))
    expected = step_time(of, PARTS, H100, timeline=True)
    for name in (f"{__name__}:ZERO_BUBBLE", str(file)):
        named = replace(of, parallel=replace(of.parallel, schedule=name))
        assert step_time(named, PARTS, H100, timeline=True) == expected, name
        assert not name.startswith(__name__) or step_time(named, PARTS, H100) == step_time(of, PARTS, H100)


@needs_triton
def test_experts_are_counted_as_products_of_groups() -> None:
    of = config(4, "--parallel.ep", "4", "--parallel.etp", "1", preset="mixtral-8x7b")
    _, work = layer_work(of)
    grouped = [x for x in work.forward if isinstance(x, Product) and x.grouped]
    assert [x.number for x in grouped] == [2, 2]  # gate with up, and down, of 8 / 4 experts
    assert grouped[0].m == 4 * 2048 * 2 / 8  # even load: the rows of 4 ranks' tokens, 2 of 8 experts each
    sent = [x for x in work.forward if isinstance(x, Started)]
    # The weights of rows, the rows, and their results.
    assert [(x.axis, x.nbytes) for x in sent if x.operation == "all_to_all"] == [
        ("ep", 2048 * 2 * 4),
        ("ep", 2048 * 2 * 4096 * 2),
        ("ep", 2048 * 2 * 4096 * 2),
    ]


def test_what_is_waited_for_at_once_is_exposed() -> None:
    network = Network(Grid(tp=8), H100)
    seconds = network.seconds("all_gather", "tp", 1e8)
    product = Product(8192, 8192, 8192, 1, "bf16", 0)
    exposed = duration((Started(1, "tp", "all_gather", 10**8), Waited(1), product), H100, network)
    hidden = duration((Started(1, "tp", "all_gather", 10**8), product, Waited(1)), H100, network)
    alone = duration((product,), H100, network)
    assert exposed.seconds == pytest.approx(alone.seconds + seconds)
    assert exposed.exposed == {"tp": pytest.approx(seconds)}
    assert hidden.seconds == pytest.approx(alone.seconds + H100.interference * seconds)
    assert hidden.exposed == {"tp": 0.0}


# Muon


MATRICES = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)]
"""Of a layer of Llama 3.2 1B."""


@pytest.mark.parametrize(
    ("flags", "plane"),
    [
        (("--parallel.dp", "4"), "grad"),
        (("--parallel.tp", "4"), "tp"),
        (("--parallel.tp", "2", "--parallel.dp", "2"), "plane"),
        (("--parallel.dp", "4", "--optimizer.muon_per_head"), "grad"),
    ],
)
def test_a_step_of_muon_has_the_products_of_newton_schulz_and_the_exchange(flags: tuple[str, ...], plane: str) -> None:
    """A rank's share of five rounds, and elements in bf16 there and back. The embedding is AdamW's, which muon adds
    nothing to."""
    muon = step_time(config(4, *flags, "--optimizer.name", "muon"), PARTS, H100)
    others = [flag for flag in flags if "muon" not in flag]
    adamw = step_time(config(4, *others), PARTS, H100)
    matrices = MATRICES
    if "--optimizer.muon_per_head" in flags:
        matrices = [(64, 2048)] * (32 + 8 + 8) + MATRICES[3:]
    seconds = 0.0
    for shape in matrices:
        m, n = sorted(shape)
        seconds += 5 * sum(H100.product_seconds(*product, "bf16") for product in ((m, m, n), (m, m, m), (m, n, m)))
    assert muon.busy[OPTIMIZER] - adamw.busy[OPTIMIZER] == pytest.approx(16 * seconds / 4, rel=1e-6)
    network = Network(grid_of(config(4, *flags, "--optimizer.name", "muon")), H100)
    sent = 16 * sum(m * n for m, n in MATRICES) * 2 / 4
    more = muon.exposed[plane] - adamw.exposed.get(plane, 0.0)
    assert more == pytest.approx(2 * network.seconds("all_to_all", plane, sent), rel=1e-6)


# The network


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_spans_are_those_of_the_groups(data: st.DataObject) -> None:
    """Of all groups of `Grid.groups`, the one on the most nodes; sizes that divide nothing too."""
    draw = data.draw
    tp, cp, dp, pp = (draw(st.integers(1, 4), name) for name in ("tp", "cp", "dp", "pp"))
    ep = draw(st.sampled_from([ep for ep in range(1, tp * cp * dp + 1) if tp * cp * dp % ep == 0]), "ep")
    replicas = (dp * cp, tp * cp * dp // ep)  # of dense weights, and of experts
    # Groups of shards divide the replicas, or are all of them.
    shards = [size for size in (0, 2, 3) if not size or all(n % size == 0 or n < size for n in replicas)]
    grid = Grid(
        tp,
        cp,
        dp,
        pp,
        ep=ep,
        order=draw(st.sampled_from(["tp-cp-dp-pp", "dp-tp-cp-pp", "tp-cp-pp-dp"]), "order"),
        shard_ranks=draw(st.sampled_from(shards), "shards"),
        planes=True,
    )
    per_node = draw(st.sampled_from([4, 8]), "per_node")
    network = Network(grid, replace(H100, gpus_per_node=per_node))
    for axis, groups in grid.groups().items():
        if not groups:
            continue
        span = network.span(axis)
        assert span.ranks == len(groups[0])
        nodes = max(len({rank // per_node for rank in group}) for group in groups)
        aligned = all(per_node % size == 0 or size == 1 for size in (tp, cp, dp, pp))
        if aligned:
            assert span.nodes == nodes, axis
        else:
            assert span.nodes <= nodes, axis


def test_a_ring_over_nodes_has_a_link_for_each_of_its_ranks_there() -> None:
    """64 ranks on 8 nodes: with 8 of a ring on each node all 8 links of a node carry it, else one of them."""
    quiet = replace(H100, node=Link(370.0, 0.0), network=Link(45.0, 0.0))
    whole = Network(Grid(dp=64), quiet).seconds("all_gather", "grad", 64e9)
    one_each = Network(Grid(tp=8, dp=8), quiet).seconds("all_gather", "grad", 8e9)
    assert whole == pytest.approx(63e9 / (8 * 45e9))
    assert one_each == pytest.approx(7e9 / 45e9)
    inside = Network(Grid(tp=8, dp=8), quiet)
    assert inside.seconds("all_reduce", "tp", 8e9) == pytest.approx(2 * 7e9 / 370e9)
    assert (inside.level("tp"), inside.level("grad")) == ("node", "network")


# The pipeline

SCHEDULES = [
    "1f1b",
    "gpipe",
    "interleaved",
    "zb-h1",
    "zb-2p",
    "zb-interleaved",
    "zb-v",
    "v-half",
    "v-min",
    "dualpipe-v",
]


@needs_triton
@pytest.mark.parametrize("schedule", slow_but([0, 2, 8], [*SCHEDULES, "breadth"]))
def test_few_micro_batches_foretell_many(schedule: str) -> None:
    """Also fewer than there are ranks, and numbers that do not divide by them: interleaved was 2.5 times too fast."""
    for pp, batch, stages in ((2, 100, 0), (4, 3, 0), (4, 32, 2), (4, 47, 0), (8, 5, 2), (8, 50, 2)):
        flags = ["--parallel.pp", str(pp), "--parallel.tp", "2", "--parallel.schedule", schedule]
        if "interleaved" in schedule and stages:
            flags += ["--parallel.vpp", str(stages)]
        if schedule == "breadth":
            flags += ["--optimizer.zero_stage", "2"]
        of = config(2 * pp, *flags, preset="llama3-8b", batch=batch)
        whole = step_time(of, PARTS, H100, timeline=True)
        off = 0.05 if schedule == "breadth" else 0.02
        assert step_time(of, PARTS, H100).seconds == pytest.approx(whole.seconds, rel=off), (pp, batch)
        assert whole.events
        assert max(event.end for event in whole.events) < whole.seconds


@needs_triton
@pytest.mark.parametrize(
    ("stage", "flags"),
    slow_but(
        [0, 4, 6, 8, 9, 11],
        [
            (stage, flags)
            for stage in "0123"
            for flags in ((), ("--parallel.pp", "2"), ("--parallel.schedule", "breadth"))
        ],
    ),
    ids=str,
)
def test_zero_is_near_its_simulation(stage: str, flags: tuple[str, ...]) -> None:
    of = config(16, "--optimizer.zero_stage", stage, *flags, preset="llama3-8b", batch=64)
    slow = replace(H100, network=Link(10.0, 12.0))  # so that gathers and reductions are not hidden
    for machine in (H100, slow):
        whole = step_time(of, PARTS, machine, timeline=True)
        few = step_time(of, PARTS, machine, simulated=True)
        assert few.seconds == pytest.approx(whole.seconds, rel=0.003)
        assert few.idle_share == pytest.approx(whole.idle_share, abs=0.003)
        assert few.exposed == pytest.approx(whole.exposed, rel=0.01, abs=1e-3)
        assert step_time(of, PARTS, machine).seconds == pytest.approx(whole.seconds, rel=0.1)


def test_units_wait_for_their_collectives() -> None:
    """Two parts of 1 s, gathers of 3 s: the first waits 3 s, and each later use for what its gather takes longer than
    the part before it."""
    plan: list[Item] = [Action("F", 0, 0), Action("F", 1, 0)]
    units = Units({0: [0], 1: [1]}, lambda action: None, gathers=True)
    plan = insert_unit_actions(plan, units)

    def cost(rank: int, action: UnitAction) -> float:
        return 3.0 if action.kind == "gather" else 0.0

    timeline = simulate([plan], [1.0, 1.0], 2.0, units=cost)
    assert [event.start for event in timeline.events] == [3.0, 6.0]
    assert timeline.unit_waits == [5.0]
    assert timeline.ends == [7.0]
    # One after the other on a rank's link, also if both have started before.
    both: list[Item] = [UnitAction("gather", 0), UnitAction("gather", 1), UnitAction("wait", 1), Action("F", 0, 0)]
    assert simulate([both], [1.0], 2.0, units=cost).events[0].start == 6.0


# What must never be slower


LAYOUTS = [
    ("llama3-8b", 16, ("--parallel.tp", "2", "--parallel.sequence_parallel", "--parallel.pp", "2")),
    ("llama3-8b", 16, ("--optimizer.zero_stage", "3")),
    ("llama3-8b", 16, ("--parallel.cp", "2", "--parallel.pp", "2", "--parallel.schedule", "zb-h1")),
    ("mixtral-8x7b", 16, ("--parallel.ep", "8", "--parallel.pp", "2", "--parallel.schedule", "interleaved")),
    ("qwen3-30b-a3b", 16, ("--parallel.ep", "16", "--optimizer.zero_stage", "2")),
]


machines = given(
    layout=st.sampled_from(LAYOUTS),
    speed=st.sampled_from(["peak", "memory", "node", "network", "attention"]),
    factor=st.floats(1.01, 20),
    slow=st.floats(0.02, 1),
)


@needs_triton
@settings(deadline=None, max_examples=8)
@machines
def test_a_faster_machine_is_never_slower(
    layout: tuple[str, int, tuple[str, ...]], speed: str, factor: float, slow: float
) -> None:
    is_never_slower(layout, speed, factor, slow)


@pytest.mark.slow
@needs_triton
@settings(deadline=None, max_examples=60)
@machines
def test_many_faster_machines_are_never_slower(
    layout: tuple[str, int, tuple[str, ...]], speed: str, factor: float, slow: float
) -> None:
    is_never_slower(layout, speed, factor, slow)


def is_never_slower(layout: tuple[str, int, tuple[str, ...]], speed: str, factor: float, slow: float) -> None:
    preset, world, flags = layout
    of = config(world, *flags, preset=preset)
    machine = replace(H100, network=Link(45.0 * slow, 12.0), node=Link(370.0 * slow, 5.0))
    before = step_time(of, PARTS, machine).seconds
    assert step_time(of, PARTS, faster(machine, speed, factor)).seconds <= before * (1 + 1e-12)


def faster(machine: Hardware, speed: str, factor: float) -> Hardware:
    match speed:
        case "peak":
            return replace(machine, peak_tflops={name: x * factor for name, x in machine.peak_tflops.items()})
        case "memory":
            return replace(machine, memory_gb_per_second=machine.memory_gb_per_second * factor)
        case "node":
            return replace(machine, node=Link(machine.node.gb_per_second * factor, machine.node.latency_us))
        case "network":
            return replace(machine, network=Link(machine.network.gb_per_second * factor, machine.network.latency_us))
    rates = {
        width: replace(rate, forward=rate.forward * factor, backward=rate.backward * factor)
        for width, rate in machine.attention.items()
    }
    return replace(machine, attention=rates)


@needs_triton
def test_a_larger_batch_never_takes_less_time() -> None:
    for preset, world, flags in LAYOUTS:
        seconds = [
            step_time(config(world, *flags, preset=preset, batch=batch), PARTS, H100).seconds for batch in (32, 64, 128)
        ]
        assert seconds == sorted(seconds)
        assert math.isclose(seconds[2] - seconds[1], 2 * (seconds[1] - seconds[0]), rel_tol=1e-6)


# Published runs


@needs_triton
@pytest.mark.slow
def test_published_runs_are_predicted() -> None:
    """Without simulation of the whole step. The next test compares the page with that."""
    runs = [run for run in plan_accuracy.published_runs(PARTS) if run.role in ("fitted", "judged")]
    errors = [
        abs(step_time(run.config, PARTS, hardware.load(run.machine)).tokens_per_second_per_gpu / run.published - 1)
        for run in runs
        if run.role == "judged"
    ]
    assert len(errors) >= 9
    assert sum(errors) / len(errors) < 0.08


@needs_triton
@pytest.mark.slow
def test_the_page_has_todays_predictions() -> None:
    made = plan_accuracy.tables(plan_accuracy.rows(plan_accuracy.published_runs(PARTS), PARTS))
    assert plan_accuracy.PAGE.read_text() == plan_accuracy.page_with(made)
