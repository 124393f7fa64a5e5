"""The simulation of one rank: what it counts is what real ranks hold and send, and what a dry run plans."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.build import build_stages
from megapar_models.counts import size_and_flops
from megapar_models.registry import presets, validate
from megapar_tools.plan.expert_loads import logged
from megapar_tools.plan.memory import report_rank
from megapar_tools.plan.simulate import Simulation, simulate
from torch import Tensor, nn

from megapar.base.expert_load import EVEN, ExpertLoad
from megapar.base.grid import Grid
from megapar.comm import collectives
from megapar.config.derive import smallest_world
from megapar.config.options import AdapterConfig, Config
from megapar.data_parallel.accumulate import MainGradView
from megapar.declare import context
from megapar.declare.batch import MicroBatch, PipelineStage, TensorSpec
from megapar.launch.grid import grid_of
from megapar.linear.main_grad import DeferredWeightGradient
from megapar.observe import memory_report
from megapar.observe.expert_rows import FOLDER, ExpertRows
from megapar.observe.kept import KeptBytes
from megapar.pipeline.lowering import lower
from megapar.pipeline.runtime import PipelineRuntime
from megapar.pipeline.schedules import make, placement
from megapar.pipeline.simulation import simulate as simulate_schedule
from megapar.step.step import train_step
from megapar.train.data import with_vocabulary_of_tokenizer
from tests.support import program
from tests.support.distributed import ON_GPUS, run_ranks
from tests.support.grid import (
    DENSE_BETWEEN,
    GPT,
    LLAMA,
    MIXTRAL,
    ONE_KV_HEAD,
    SHARED,
    SIGMOID,
    Layout,
    make_state,
    micro_batches,
    name,
    of,
)
from tests.support.options import load
from tests.support.plans import PARTS
from tests.support.sweeps import slow_but
from tools import plan
from tools import simulate as tool

Counts = dict[str, tuple[dict[str, int], dict[str, int]]]
"""Calls and bytes by operation, by axis."""


def simulated(config: Config, rank: int, load: ExpertLoad = EVEN, ranks_per_node: int = 8) -> Simulation:
    return simulate(config, build_stages, PARTS, rank, ranks_per_node, load)


# Real ranks


def second_step(config: Config, folder: Path) -> tuple[dict[str, int], Counts]:
    """What this rank holds and sends in its second step. It logs the rows of experts in `folder`."""
    state = make_state(config)
    train_step(state, micro_batches(config, state.ctx, 0))
    for axis in state.ctx.axes:
        axis.traffic.calls.clear()
        axis.traffic.sent.clear()
    kept = KeptBytes(state.stages, state.pipeline.deferred_nbytes)
    rows = ExpertRows()
    state.pipeline.after_action.append(kept.note_action)
    with kept.counting(), rows.noting(state.stages):
        train_step(state, micro_batches(config, state.ctx, 1))
    rows.write(folder, state.ctx.world.rank)
    sent = {axis.name: (axis.traffic.calls, axis.traffic.sent) for axis in state.ctx.axes if axis.traffic.calls}
    return memory_report.measured(state, kept, "cpu"), sent


LAYOUTS = [
    (Layout(LLAMA, tp=2, pp=2, sequence_parallel=True, micro_batch_size=6), "fp32"),
    (Layout(LLAMA, dp=2, pp=2, vpp=2, schedule="zb-v", zero_stage=3, recompute="full", micro_batch_size=6), "fp32"),
    (Layout(ONE_KV_HEAD, cp=2, cp_attention="ring", micro_batch_size=6, grad_reduce_dtype="bf16"), "bf16"),
    (Layout(SHARED, tp=2, dp=2, sequence_parallel=True, ep=2, etp=2, micro_batch_size=6), "bf16"),
    (Layout(MIXTRAL, dp=4, ep=4, etp=1), "fp32"),
    (Layout(SIGMOID, tp=2, dp=2, ep=2, etp=1, recompute="full", micro_batch_size=2), "fp32"),
    (
        Layout(
            DENSE_BETWEEN, pp=2, dp=2, ep=2, etp=1, recompute="full", shard_ranks=1, zero_stage=3, micro_batch_size=2
        ),
        "fp32",
    ),
    (Layout(ONE_KV_HEAD, pp=2, dp=2, vpp=2, schedule="interleaved"), "bf16"),
    (Layout(GPT, tp=2, dp=2, recompute="selective", micro_batch_size=3), "fp32"),
    (Layout(GPT, pp=2, dp=2, schedule="zb-h1", zero_stage=0, micro_batch_size=3), "fp32"),
    (Layout(LLAMA, dp=4, zero_stage=3, shard_ranks=2), "bf16"),
    (Layout(LLAMA, dp=4, zero_stage=2, schedule="breadth"), "fp32"),
    (Layout(LLAMA, cp=2, tp=2, sequence_parallel=True, tp_overlap_chunks=2), "fp32"),
    (Layout(LLAMA, cp=2, pp=2, cp_attention="ulysses", micro_batch_size=2, recompute="selective"), "fp32"),
    (Layout(LLAMA, dp=5), "fp32"),  # replicas with three micro-batches and with two
    (Layout(LLAMA, pp=2, vpp=2, schedule="dualpipe-v", loss_chunk=8), "fp32"),
    (Layout(LLAMA, tp=2, dp=2, sequence_parallel=True, adapter=AdapterConfig(rank=4)), "bf16"),
    (Layout(LLAMA, tp=2, pp=2, tp_overlap_chunks=2, adapter=AdapterConfig(rank=4, dora=True)), "bf16"),
    (Layout(LLAMA, tp=2, dp=2, sequence_parallel=True, adapter=AdapterConfig(rank=4, dora=True)), "bf16"),
    (Layout(LLAMA, pp=4, schedule="gpipe", order="pp-dp-cp-tp", trainable=("layers.2.*",)), "fp32"),
    (Layout(LLAMA, pp=2, vpp=2, schedule="v-min", overlap=False, recompute="full", every=2), "bf16"),
    (Layout(ONE_KV_HEAD, tp=2, dp=2, optimizer="muon"), "bf16"),
    (Layout(LLAMA, tp=2, cp=2, optimizer="muon", zero_stage=3), "fp32"),
    (Layout(MIXTRAL, tp=2, dp=2, ep=2, etp=1, optimizer="muon", zero_stage=2), "fp32"),
    (Layout(LLAMA, tp=2, dp=2, optimizer="muon", zero_stage=0), "fp32"),
    # Ranks without rows of experts: a stage of a plain MLP, and a replica without a micro-batch.
    (Layout(DENSE_BETWEEN, pp=3, micro_batch_size=6, partition=(1, 1, 1)), "fp32"),
    (Layout(MIXTRAL, dp=5, micro_batch_size=3), "fp32"),
    (Layout(of(MIXTRAL, num_experts=3), dp=4, ep=4, micro_batch_size=3, optimizer="muon", zero_stage=2), "fp32"),
]


@pytest.mark.skipif(ON_GPUS, reason="GPUs have kernels of their own, which keep less")
@pytest.mark.parametrize(
    ("layout", "precision"), slow_but([1, 3, 25], LAYOUTS), ids=[name(layout) for layout, _ in LAYOUTS]
)
def test_a_simulated_rank_holds_and_sends_what_a_real_one_does(layout: Layout, precision: str, tmp_path: Path) -> None:
    """To the byte and the call: memory of each kind, messages of each operation on each axis. A dry run plans the same
    memory; with experts it knows no rows, so the simulation takes those that the ranks have logged."""
    config = layout.config(precision)
    for rank, (memory, sent) in enumerate(run_ranks(layout.world, second_step, config, tmp_path)):
        experts: ExpertLoad = EVEN
        if config.model.num_experts:
            experts = logged(tmp_path / FOLDER, grid_of(config), rank)
        found = simulated(config, rank, experts)
        assert found.memory == memory
        assert {axis: (traffic.calls, traffic.sent) for axis, traffic in found.traffic.items()} == sent
        if experts is EVEN:
            assert report_rank(config, PARTS, rank).rows == memory


@pytest.mark.skipif(ON_GPUS, reason="GPUs have kernels of their own, which keep less")
@pytest.mark.parametrize("precision", slow_but([0], ["bf16", "fp32", "fp16"]))
@pytest.mark.parametrize("optimizer", slow_but([0], ["adamw", "lion", "sgd"]))
def test_state_in_host_memory_is_simulated(optimizer: str, precision: str, tmp_path: Path) -> None:
    """optimizer.offload: the updates of the host, with their slots, have no memory either."""
    config = Layout(ONE_KV_HEAD, micro_batch_size=6).config(precision)
    config = replace(config, optimizer=replace(config.optimizer, name=optimizer, offload=0.5, ema=0.9))
    memory, _ = second_step(config, tmp_path)
    assert simulated(config, 0).memory == memory == report_rank(config, PARTS, 0).rows


GPUS = ("--launch.device", "cuda", "--train.precision", "bf16", "--train.seq_length", "1024")
PRESETS = [
    ("llama3-8b", "--parallel.tp", "2", "--parallel.sequence_parallel", "--parallel.pp", "2"),
    ("llama3-8b", "--parallel.cp", "2", "--optimizer.zero_stage", "3", "--train.recompute", "selective"),
    ("gpt2-xl", "--parallel.pp", "2", "--parallel.schedule", "zb-h1", "--model.attention_dropout", "0.1"),
    ("qwen3-30b-a3b", "--parallel.ep", "4", "--parallel.pp", "2", "--train.recompute", "full"),
]


@pytest.mark.parametrize("flags", slow_but([1, 3], [(flags,) for flags in PRESETS]), ids=lambda flags: flags[0])
def test_a_simulated_gpu_holds_what_a_dry_run_plans(flags: tuple[str, ...]) -> None:
    """With the kernels of GPUs, in models so large that GPUs take them."""
    preset, *layout = flags
    given = load(["--config", preset, *layout, *GPUS, "--train.global_batch_size", "8"], presets()).config
    config = validate(replace(given, model=replace(given.model, num_hidden_layers=4)), 8)
    found = simulated(config, 5)
    assert found.memory == report_rank(config, PARTS, 5).rows
    on_cpus = simulated(replace(config, launch=replace(config.launch, device="cpu")), 5)
    assert found.memory != on_cpus.memory
    assert found.traffic == on_cpus.traffic
    assert found.flops == on_cpus.flops


# Links


def test_bytes_are_split_into_those_of_the_node_and_others() -> None:
    """Two nodes of two ranks. A ring sends to the next rank, a message to its receiver."""
    config = Layout(SIGMOID, dp=4, ep=4, etp=1, micro_batch_size=3).config()
    for rank, next_is_outside in enumerate((False, True, False, True)):
        traffic = simulated(config, rank, ranks_per_node=2).traffic
        grad = traffic["grad"]
        assert (grad.ranks, grad.nodes) == (4, 2)
        assert grad.sent_to_other_nodes == next_is_outside * sum(grad.sent.values())
        ep = traffic["ep"]
        # Of the rows that leave a rank, two thirds go to the two ranks of the other node.
        addressed = ep.sent["all_to_all"] * 2 // 3
        assert ep.sent_to_other_nodes == addressed + next_is_outside * ep.sent["all_gather"]
        assert ep.sent_inside_node + ep.sent_to_other_nodes == sum(ep.sent.values())


def test_messages_of_a_pipeline_go_to_their_node() -> None:
    config = Layout(LLAMA, pp=4, micro_batch_size=6).config()
    nodes = [simulated(config, rank, ranks_per_node=2).traffic["pp"] for rank in range(4)]
    one_way = nodes[0].sent["send"]
    # All-reduces of norm and loss go around the ring. Hidden states go forward, and their gradients back.
    ring = sum(nodes[0].sent.values()) - one_way
    assert [axis.sent_to_other_nodes for axis in nodes] == [0, one_way + ring, one_way, ring]


# FLOPs

PLAIN = replace(LLAMA, attention_bias=False, vocab_size=128)  # no padding of the vocabulary, which is multiplied too


@pytest.mark.parametrize(
    "layout",
    [
        Layout(PLAIN, tp=2, pp=2, micro_batch_size=6),
        Layout(PLAIN, cp=2, cp_attention="ring", zero_stage=3, micro_batch_size=6),
        Layout(replace(SIGMOID, vocab_size=128), dp=2, ep=2, etp=1, micro_batch_size=6),
    ],
    ids=name,
)
def test_executed_flops_are_those_of_the_model(layout: Layout) -> None:
    """Exactly: the sum over all ranks is the FLOPs of a token, times tokens."""
    config = layout.config()
    _, flops_per_token = size_and_flops(config)
    tokens = config.train.global_batch_size * config.train.seq_length
    assert sum(simulated(config, rank).flops for rank in range(layout.world)) == flops_per_token * tokens


def test_recomputed_layers_are_executed_again() -> None:
    whole = simulated(Layout(PLAIN, micro_batch_size=6).config(), 0).flops
    again = simulated(Layout(PLAIN, micro_batch_size=6, recompute="full").config(), 0).flops
    head = 6 * 12 * 24 * 128 * PLAIN.hidden_size
    assert again - whole == (whole - head) // 3  # a forward more of all layers


def test_qk_clip_multiplies_queries_and_keys_once_more() -> None:
    """In samples of one block, so without the half that causality leaves out."""
    model = replace(PLAIN, qk_norm=False)
    plain = Layout(model, micro_batch_size=6).config()
    clipped = replace(plain, optimizer=replace(plain.optimizer, qk_clip=100.0))
    more = simulated(clipped, 0).flops - simulated(plain, 0).flops
    assert more == 12 * 2 * 24 * 24 * model.num_attention_heads * model.head_dim * model.num_hidden_layers


# Experts


def test_an_imbalance_gives_this_rank_more_rows() -> None:
    config = Layout(SIGMOID, dp=4, ep=4, etp=1, micro_batch_size=3).config()
    even = simulated(config, 1)
    args = tool.Arguments(rank=1, imbalance=2.0)
    more = simulated(config, 1, tool.load_of(args, config))
    # Of the 144 choices of a micro-batch, this rank's two experts get 72 instead of 36. So from each of three other
    # ranks 36 rows more arrive, and results and gradients of rows leave again. A weight
    # goes with a row, and its gradient comes back.
    row = 2 * 4 * SIGMOID.hidden_size + 4
    layers = SIGMOID.num_hidden_layers
    assert even.traffic["ep"].sent["all_to_all"] == layers * row * (108 + 108)
    assert more.traffic["ep"].sent["all_to_all"] == layers * row * (72 + 216)
    assert more.memory["activations: mlp"] > even.memory["activations: mlp"]
    assert more.flops > even.flops


# Time: stages that sleep


FORWARD, INPUTS, WEIGHTS = 0.05, 0.04, 0.06  # seconds of the first stage; each later one takes a fifth more


def factor(stage: int) -> float:
    return 1 + stage / 5


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: "SleepingStage") -> Tensor:
        ctx.stage = stage
        time.sleep(FORWARD * stage.factor)
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(INPUTS * ctx.stage.factor)

        def add(*_: object) -> None:
            time.sleep(WEIGHTS * ctx.stage.factor)

        DeferredWeightGradient(ctx.stage.weight.main_grad, grad, grad, add).add_or_defer()
        return grad, None


class SleepingStage(PipelineStage):
    """A stage whose F, I and W take known times, and no processor."""

    def __init__(self, number: int, num_stages: int):
        super().__init__()
        self.first = number == 0
        self.last = number == num_stages - 1
        self.factor = factor(number)
        self.weight = nn.Parameter(torch.zeros(1))
        self.weight.main_grad = MainGradView(torch.zeros(1), lambda: None)  # type: ignore[assignment]

    def boundary(self, batch: MicroBatch) -> tuple[TensorSpec, ...]:
        return () if self.first else (TensorSpec((1,), torch.float32),)

    def forward(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        y: Tensor = Sleep.apply(self.weight if x is None else x, self)
        return y.sum() if self.last else y


def ends_of_steps(schedule: str, pp: int, vpp: int, microbatches: int) -> list[float]:
    """The seconds from the start of each of eight steps to the end of the last action of this rank."""
    ctx = context.create(Grid(pp=pp))
    ranks = placement(schedule, pp, vpp)
    stages = {number: SleepingStage(number, pp * vpp) for number, rank in enumerate(ranks) if rank == ctx.pp.rank}
    runtime = PipelineRuntime(stages, ctx, schedule, vpp)  # type: ignore[arg-type]
    ended = [0.0]
    runtime.after_action.append(lambda action: ended.append(time.monotonic()))
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    batches = [MicroBatch.of_samples(tokens, tokens, torch.ones(1, 1), tokens[0])] * microbatches
    found = []
    for _ in range(8):
        collectives.barrier(ctx.pp)
        start = time.monotonic()
        runtime.step(batches)
        found.append(ended[-1] - start)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "vpp"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2)],
)
def test_a_step_of_known_times_takes_as_long_as_simulated(schedule: str, vpp: int) -> None:
    """Within 5%. Stages sleep, so few processors are enough. The fastest of eight steps has waited least for them."""
    pp = 3
    microbatches = 6
    factors = [factor(stage) for stage in range(pp * vpp)]
    timeline = simulate_schedule(
        lower(make(schedule, pp, vpp, microbatches), pp * vpp),
        [FORWARD * x for x in factors],
        [(INPUTS + WEIGHTS) * x for x in factors],
        weights=[WEIGHTS * x for x in factors],
    )
    ranks = run_ranks(pp, ends_of_steps, schedule, pp, vpp, microbatches)
    measured = min(max(steps) for steps in zip(*ranks, strict=True))
    assert measured == pytest.approx(timeline.makespan, rel=0.05)


# The program

MIXTURE = (
    *("--model.family", "mixtral", "--model.moe.num_experts", "4", "--model.moe.num_experts_per_tok", "2"),
    *("--parallel.dp", "2", "--parallel.ep", "2", "--train.steps", "2", "--train.global_batch_size", "8"),
)


def run(monkeypatch: pytest.MonkeyPatch, *flags: object) -> int:
    """The exit code of the tool with these flags."""
    monkeypatch.setattr(sys, "argv", ["simulate.py", *map(str, flags)])
    try:
        tool.main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    return 0


@pytest.mark.skipif(ON_GPUS, reason="GPUs have kernels of their own, which keep less")
def test_the_rows_that_a_run_logged_give_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """memory.json and metrics.jsonl of a run, against the tool with the run's own flags."""
    measures = ("--launch.nproc", "2", "--train.memory_report", "--checkpoint.no_save_last")
    ended = program.run(*program.TINY, *MIXTURE, *measures, cwd=tmp_path)
    assert ended.code == 0, ended.err
    ranks = json.loads((tmp_path / "run/memory.json").read_text())["bytes_by_rank"]
    for rank, rows in enumerate(ranks):
        out = tmp_path / f"{rank}.json"
        flags = ("--world", 2, "--rank", rank, "--expert_rows", tmp_path / "run/expert_rows", "--json", out)
        assert run(monkeypatch, *program.TINY, *MIXTURE, *flags) == 0
        found = json.loads(out.read_text())
        assert {**rows["measured"], **found["memory"]} == rows["measured"]
        if rank == 0:  # which writes the metrics
            second = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[1])
            sent = {axis: sum(traffic["sent"].values()) for axis, traffic in found["traffic"].items()}
            assert sent == {axis: nbytes for axis, nbytes in second["comm_bytes"].items() if nbytes}


def test_it_prints_memory_messages_and_flops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = ("--parallel.tp", 2, "--parallel.pp", 2, "--parallel.dp", 0, "--world", 64, "--rank", 37)
    assert run(monkeypatch, *program.TINY, *world, "--train.global_batch_size", 32) == 0
    out = capsys.readouterr().out
    assert "64 ranks = tp 2 x pp 2 x dp 16" in out
    assert "rank 37: tp 1 of 2, dp 2 of 16, pp 1 of 2; " in out
    assert "all in the device's memory" in out
    assert "reduce_scatter" in out
    assert "PFLOP of products" in out


def test_with_a_machine_it_predicts_the_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, trace = tmp_path / "out.json", tmp_path / "trace.json"
    layout = ("--parallel.pp", 2, "--parallel.dp", 0, "--world", 8, "--train.precision", "bf16")
    flags = (*program.TINY[:4], *layout, "--gpu", "h100-80g", "--gpus_per_node", 4)
    assert run(monkeypatch, *flags, "--json", out, "--timeline", trace) == 0
    found = json.loads(out.read_text())
    assert f"predicted on h100-80g: {found['step_seconds']:.4g} s a step" in capsys.readouterr().out
    assert 0 < found["idle_share"] < 1
    assert found["traffic"]["pp"]["nodes"] == 2  # of four GPUs each
    events = [row for row in json.loads(trace.read_text())["traceEvents"] if row["ph"] == "X"]
    assert {event["tid"] for event in events} == {0, 1}


@pytest.mark.parametrize("path", sorted(tool.CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_is_read_without_its_tokenizer(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By simulate.py, plan.py and a dry run alike: none of them reads text, and the files give the vocabulary."""
    monkeypatch.chdir(tmp_path)
    flags = ["--config", str(path)]
    read = load(flags, presets())
    dry = validate(replace(read.config, dry_run=True), smallest_world(read.config.parallel))
    found = tool.checked(tool.Arguments(), flags, PARTS), plan.with_sizes(read), with_vocabulary_of_tokenizer(dry)
    assert {config.model.vocab_size for config in found} == {read.config.model.vocab_size}


def test_a_vocabulary_that_is_nowhere_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--config", tool.CONFIGS / "llama_7b.toml", "--model.vocab_size", 0, "--data.tokenizer", "spm:none.model")
    assert run(monkeypatch, *flags) == 2
    assert "none.model is not a file); set model.vocab_size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--world", 6, "--rank", 6), "--rank 6: the world of 6 ranks has the ranks 0 to 5"),
        (("--world", 6, "--rank", -1), "--rank -1: the world of 6 ranks has the ranks 0 to 5"),
        (("--world", -2), "--world -2: must be at least 1"),
        (("--world", 7, "--parallel.tp", 2), "tp(2)*pp(1)=2 does not divide world size 7"),
        (("--gpus_per_node", -1), "--gpus_per_node -1: must be at least 1"),
        (("--gpu", "h100"), "hardware h100: unknown"),
        (("--timeline", "x.png"), "--timeline x.png: its times come from --gpu"),
        (("--gpu", "h100-80g", "--timeline", "x.gif"), "--timeline x.gif: the name must end in .png, .svg, .json"),
        (("--imbalance", 2), "model.family=llama has no experts; leave them out"),
        (
            (*MIXTURE, "--world", 2, "--imbalance", 3),
            "--imbalance 3: the 2 of 4 experts of this rank can have at most 2 ",
        ),
        ((*MIXTURE, "--world", 2, "--imbalance", 2, "--expert_rows", "x"), "leave one out"),
        (("--wrld", 3), "--wrld: no such flag"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    flags: tuple[object, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *program.TINY, *flags) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_rows_of_another_run_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (*program.TINY, *MIXTURE, "--world", 2, "--expert_rows", tmp_path)
    assert run(monkeypatch, *flags) == 3
    assert "has no rows of experts; a run with --train.memory_report writes them" in capsys.readouterr().err
    (tmp_path / "rank_00001.json").write_text("{}")
    assert run(monkeypatch, *flags) == 3
    assert "rank_00001.json: no rows of experts can be read there" in capsys.readouterr().err
    (tmp_path / "rank_00001.json").rename(tmp_path / "rank_00002.json")
    assert run(monkeypatch, *flags) == 3
    assert "rank_00000.json: is not there, and in this layout that rank has experts" in capsys.readouterr().err
    for rank in range(2):
        rows = {str(layer): [[1, 2, 3, 4]] for layer in range(4)}
        (tmp_path / f"rank_{rank:05d}.json").write_text(json.dumps({"layers": rows}))
    assert run(monkeypatch, *flags) == 3
    assert "a micro-batch has 10 choices in layer 0, and" in capsys.readouterr().err
