"""What a dry run predicts: on small models the bytes of real ranks, to the byte; for every shipped configuration and
preset consistent numbers."""

import importlib.util
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from megapar_models.counts import WholeModel
from megapar_models.registry import presets, validate
from megapar_tools.plan.memory import RankReport, report_rank, reports
from torch import Tensor

from megapar.config.derive import smallest_world
from megapar.config.messages import counted
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, ParallelConfig, TrainConfig
from megapar.pipeline.runtime import PipelineRuntime
from megapar.step.state import TrainState
from tests.support import gemma4
from tests.support.distributed import ON_GPUS, run_ranks
from tests.support.grid import (
    DENSE_BETWEEN,
    GPT,
    LLAMA,
    MIXTRAL,
    ONE_KV_HEAD,
    SAMPLES,
    SHARED,
    STRADDLING,
    Layout,
    make_state,
    micro_batches,
)
from tests.support.kernel_checks import needs_triton
from tests.support.options import load
from tests.support.plans import PARTS
from tests.support.sweeps import slow_but

SCRIPTS = Path(__file__).parent.parent / "pretrain_scripts"
CONFIGS = sorted(SCRIPTS.glob("configs/*.toml"))
WINDOWS = replace(LLAMA, family="tests.test_width_layers:WINDOWS")
DELTA = replace(LLAMA, family="tests.support.hybrids:HEADS_FAMILY", attention_bias=False)
HEADS = replace(LLAMA, family="tests.test_width_heads:WINDOW_FAMILY", qk_norm=False)  # of other sizes in each layer
KIMI = replace(DELTA, family="tests.support.hybrids:CHANNELS_FAMILY")


class Kept:
    """Follows the bytes of distinct storages kept by autograd for backward passes, those of `known` not counted."""

    def __init__(self, known: Iterable[Tensor]):
        self.known = {x.untyped_storage().data_ptr() for x in known}
        self.users: dict[int, int] = {}
        self.now = self.peak = 0

    def pack(self, x: Tensor) -> "KeptTensor | Tensor":
        return x if x.untyped_storage().data_ptr() in self.known else KeptTensor(self, x)

    def add(self, x: Tensor, users: int) -> None:
        place = x.untyped_storage().data_ptr()
        before = self.users.get(place, 0)
        after = self.users.get(place, 0) + users
        self.users[place] = after
        self.now += x.untyped_storage().nbytes() * ((after > 0) - (before > 0))
        self.peak = max(self.peak, self.now)


class KeptTensor:
    def __init__(self, kept: Kept, x: Tensor):
        self.kept, self.x = kept, x
        kept.add(x, 1)

    def __del__(self) -> None:
        self.kept.add(self.x, -1)


def held_bytes(state: TrainState, most_batches: int = SAMPLES) -> tuple[int, int, int, int]:
    """Weights, gradients, optimizer state and most activations of a real step of so many micro-batches at most on this
    rank."""
    weights = [x.untyped_storage() for x in (state.weights.flat, state.weights.precise)]
    places = {storage.data_ptr(): 0 for storage in weights}
    for item in state.optimizer.slices():
        for x in item.parts():
            places.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())
    buffers = [buffer for stage in state.stages.values() for buffer in stage.buffers()]
    kept = Kept([state.weights.flat, state.weights.precise, *buffers])
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda held: held if isinstance(held, Tensor) else held.x):
        run_forwards_and_backwards(state.pipeline, state, most_batches)
    assert kept.now == 0, "all that was kept is released"
    held = sum(storage.nbytes() for storage in weights)
    return held, state.grads.flat.untyped_storage().nbytes(), sum(places.values()), kept.peak


def run_forwards_and_backwards(pipeline: PipelineRuntime, state: TrainState, most_batches: int) -> None:
    state.grads.zero()
    pipeline.step(micro_batches(state.config, state.ctx, 0)[:most_batches], 1.0, state.grads.begin)
    state.grads.finish()


def held_bytes_on_ranks(config: Config) -> tuple[int, int, int, int]:
    return held_bytes(make_state(config))


def predicted(config: Config) -> Mapping[int, tuple[int, int, int, int]]:
    """The same numbers by rank, of the first replica's ranks."""
    kinds = reports(config, PARTS).items()
    return {rank: (r.weights, r.gradients, r.optimizer, r.activations) for r, ranks in kinds for rank in ranks}


@pytest.mark.skipif(ON_GPUS, reason="GPUs have kernels of their own, which keep less")
@pytest.mark.parametrize(
    ("layout", "precision"),
    slow_but(
        [1, 3, 6, 10, 13, 14, 17],
        [
            (Layout(LLAMA, tp=2, pp=2, sequence_parallel=True), "fp32"),
            (Layout(ONE_KV_HEAD, pp=2, dp=2, vpp=2, schedule="interleaved"), "fp32"),
            (Layout(GPT, tp=2, dp=2, recompute="selective", micro_batch_size=3), "fp32"),
            (Layout(GPT, pp=4, schedule="gpipe", zero_stage=0, micro_batch_size=2), "fp32"),
            (Layout(LLAMA, dp=4, zero_stage=1), "fp32"),
            (Layout(LLAMA, tp=4, micro_batch_size=6), "fp32"),
            (Layout(LLAMA, tp=2, pp=2, sequence_parallel=True, micro_batch_size=2), "bf16"),
            (Layout(LLAMA, dp=2, tp=2, recompute="selective", micro_batch_size=3), "bf16"),
            (Layout(ONE_KV_HEAD, pp=4), "bf16"),
            (Layout(LLAMA, cp=2, tp=2, sequence_parallel=True), "fp32"),
            (Layout(ONE_KV_HEAD, cp=4, cp_attention="ring", micro_batch_size=2), "bf16"),
            (Layout(LLAMA, cp=2, pp=2, cp_attention="ulysses", micro_batch_size=2), "fp32"),
            (Layout(GPT, cp=2, dp=2, recompute="selective", micro_batch_size=3), "fp32"),
            (Layout(WINDOWS, pp=2, dp=2), "fp32"),
            (Layout(LLAMA, tp=2, dp=2, moments="bf16", main_weights="remainder"), "bf16"),
            (Layout(LLAMA, pp=2, dp=2, zero_stage=0, moments="bf16"), "bf16"),
            (Layout(LLAMA, tp=2, pp=2, main_weights="remainder"), "bf16"),
            (Layout(DELTA, cp=2, tp=2, sequence_parallel=True, micro_batch_size=2), "fp32"),
            (Layout(DELTA, cp=2, dp=2, cp_attention="ulysses", recompute="selective"), "bf16"),
            (Layout(KIMI, pp=2, cp=2, recompute="all_but_attention", micro_batch_size=3), "bf16"),
            (Layout(KIMI, tp=2, pp=2), "fp32"),
            (Layout(DELTA, pp=2, dp=2), "bf16"),
            (Layout(HEADS, tp=2, pp=2, sequence_parallel=True, micro_batch_size=2), "fp32"),
            (Layout(HEADS, cp=2, dp=2, cp_attention="ulysses", recompute="selective"), "bf16"),
            (Layout(gemma4.MIXTURE, tp=2, pp=2, sequence_parallel=True), "fp32"),
            (Layout(gemma4.MODEL, pp=4, recompute="selective"), "bf16"),
            (Layout(gemma4.MODEL, cp=2, dp=2, cp_attention="ulysses", recompute="full"), "fp32"),
        ],
    ),
    ids=[
        *("tp2-pp2-sp", "pp2-dp2-vpp2", "tp2-dp2-selective", "pp4-gpipe-zero0", "dp4", "tp4"),
        *("tp2-pp2-sp-bf16", "dp2-tp2-selective-bf16", "pp4-bf16"),
        *("cp2-tp2-sp", "cp4-ring-bf16", "cp2-pp2-ulysses", "cp2-dp2-selective", "windows-pp2"),
        *("tp2-dp2-6-bytes", "pp2-dp2-8-bytes", "tp2-pp2-10-bytes", "delta-cp2-tp2-sp"),
        *("delta-cp2-ulysses-bf16", "channels-pp2-cp2-bf16", "channels-tp2-pp2", "delta-pp2-bf16"),
        *("heads-tp2-pp2-sp", "heads-cp2-ulysses-bf16"),
        *("gemma4-tp2-pp2-sp", "gemma4-pp4-bf16", "gemma4-cp2-ulysses"),
    ],
)
def test_predicted_bytes_are_those_of_real_ranks(layout: Layout, precision: str) -> None:
    """Weights, gradients, optimizer state; and activations at their peak, in the order of the schedule."""
    config = layout.config(precision)
    ranks = run_ranks(4, held_bytes_on_ranks, config)
    expected = predicted(config)
    assert len(expected) == 4 // config.parallel.dp // config.parallel.cp
    for rank, numbers in expected.items():
        assert ranks[rank] == numbers, rank


TWO_LAYERS = {"llama": replace(LLAMA, num_hidden_layers=2), "gpt": replace(GPT, num_hidden_layers=2)}
FUSED = {
    **{
        f"{family}-{recompute}": Layout(model, recompute=recompute, backend="triton")
        for family, model in TWO_LAYERS.items()
        for recompute in ("none", "selective", "light", "all_but_attention", "full")
    },
    "gpt-no-dropout": Layout(replace(TWO_LAYERS["gpt"], hidden_dropout=0.0, attention_dropout=0.0), backend="triton"),
    **{
        f"mixture-{recompute}": Layout(
            replace(MIXTRAL, hidden_size=32, num_hidden_layers=1), recompute=recompute, backend="triton"
        )
        for recompute in ("none", "light")
    },
    "llama-loss-chunk": Layout(TWO_LAYERS["llama"], loss_chunk=8, backend="triton"),
}


@needs_triton
@pytest.mark.skipif(ON_GPUS, reason="compares with interpreted kernels, which run on a CPU")
@pytest.mark.parametrize("name", slow_but([1, 7, 11], FUSED))
def test_predicted_bytes_are_those_that_fused_kernels_keep(name: str) -> None:
    """Fault planned-activations. In bf16, on the real bytes of interpreted kernels; for Llama torch's ops keep more."""
    layout = FUSED[name]
    config = layout.config("bf16")
    (expected,) = predicted(config).values()
    assert held_bytes(make_state(config), most_batches=1) == expected
    (by_torch,) = predicted(replace(layout, backend="torch").config("bf16")).values()
    assert expected[3] < by_torch[3] or name.startswith("gpt")


def test_a_plan_for_gpus_counts_what_their_kernels_keep() -> None:
    """Fault planned-activations. `launch.device` decides, and large tensors go to Triton's kernels there."""
    wide = replace(LLAMA, hidden_size=64, intermediate_size=192)
    config = Layout(wide).config("bf16")
    config = replace(config, train=replace(config.train, seq_length=2**15))

    def activations(**options: str) -> int:
        launch = replace(config.launch, device=options["device"])
        kernels = replace(config.kernels, backend=options["backend"])
        (numbers,) = predicted(replace(config, launch=launch, kernels=kernels)).values()
        return numbers[3]

    gpu = activations(device="cuda", backend="auto")
    cpu = activations(device="cpu", backend="auto")
    assert gpu == activations(device="cpu", backend="triton") < cpu == activations(device="cuda", backend="torch")


@pytest.mark.skipif(ON_GPUS, reason="it is a CPU whose LayerNorm differs")
def test_a_cpu_keeps_layer_norm_statistics_in_bf16() -> None:
    """The one difference: mean and inverse deviation of each position, fp32 elsewhere, are bf16 on a CPU."""
    config = Layout(GPT, micro_batch_size=2).config("bf16")
    (expected,) = predicted(config).values()
    statistics = (2 * GPT.num_hidden_layers + 1) * 2 * config.train.seq_length * config.train.micro_batch_size
    assert held_bytes(make_state(config)) == (*expected[:3], expected[3] - 2 * statistics)


@pytest.mark.skipif(ON_GPUS, reason="GPUs have kernels of their own, which keep less")
def test_values_of_another_width_are_planned_at_their_width() -> None:
    plain = replace(LLAMA, num_key_value_heads=4, head_dim=12, attention_bias=False, qk_norm=False)
    config = Layout(replace(plain, family="tests.test_width_attention:FAMILY")).config("bf16")
    (expected,) = predicted(config).values()
    assert held_bytes(make_state(config), most_batches=1) == expected


@pytest.mark.parametrize("model", [MIXTRAL, SHARED, DENSE_BETWEEN], ids=["mixtral", "shared", "dense_between"])
def test_what_the_losses_of_routers_keep_is_planned(model: ModelConfig) -> None:
    config = Layout(model).config()
    (expected,) = predicted(config).values()
    assert held_bytes(make_state(config)) == expected


def test_full_recompute_keeps_the_inputs_of_layers() -> None:
    """[s, b, h] a layer, fp32; embedding, head, loss and one layer at a time keep the rest."""
    one, two, seven = (
        next(iter(predicted(Layout(replace(LLAMA, num_hidden_layers=n), recompute="full").config()).values()))[3]
        for n in (1, 2, 7)
    )
    layer = 24 * 1 * LLAMA.hidden_size * 4
    assert (two - one, seven - one) == (layer, 6 * layer)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(ONE_KV_HEAD, tp=4, pp=2, recompute="selective"),
        Layout(STRADDLING, tp=4, dp=2, sequence_parallel=True),
        Layout(GPT, tp=2, pp=2, vpp=2, schedule="interleaved", micro_batch_size=3),
    ],
    ids=["one-kv-head", "straddling", "gpt"],
)
def test_ranks_whose_memory_is_not_counted_again_need_the_same(layout: Layout) -> None:
    config = layout.config()
    ranks_of_replica_0 = 0
    for kind, ranks in reports(config, PARTS).items():
        for rank in ranks:
            assert report_rank(config, PARTS, rank) == kind, rank
            ranks_of_replica_0 += 1
    assert ranks_of_replica_0 == layout.tp * layout.pp


@pytest.fixture(scope="module")
def pretrain() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pretrain", SCRIPTS / "pretrain.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_shipped_configuration_can_run() -> None:
    for path in CONFIGS:
        config = load(["--config", str(path)], presets()).config
        validate(config, smallest_world(config.parallel))


FEW_CONFIGS = ("llama_70b", "mixtral_8x7b", "moe_laptop", "tiny")


@pytest.mark.parametrize(
    "path",
    slow_but([number for number, path in enumerate(CONFIGS) if path.stem in FEW_CONFIGS], CONFIGS),
    ids=lambda path: path.stem,
)
def test_every_shipped_configuration_dry_runs(
    path: Path,
    pretrain: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["pretrain.py", "--config", str(path), "--dry_run", "--run_dir", str(tmp_path / "run")]
    )
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert pretrain.main() == 0
    shown = capsys.readouterr().out
    config = load(["--config", str(path)], presets()).config
    parallel = config.parallel
    world = parallel.tp * parallel.cp * parallel.pp * max(parallel.dp, 1)
    size = WholeModel(validate(config, world).model, config.adapter).size_in_words()
    assert f"{size}; {counted(world, 'rank')} = " in shown
    assert "GiB on each rank" in shown
    assert not (tmp_path / "run").exists(), "a dry run writes nothing"


# One model of each family.
FEW_PRESETS = ("gpt2-124m", "llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b")


@pytest.mark.parametrize(
    "path", slow_but([[*presets()].index(name) for name in FEW_PRESETS], presets().values()), ids=presets()
)
def test_every_preset_adds_up(path: Path) -> None:
    """Over tp x pp every parameter is held once, replicated ones on each tensor rank; bf16 weights of 2 bytes, fp32
    gradients of 4, main weights and moments of 12 cut over dp 2; little padding."""
    model = load(["--config", str(path)]).config.model
    # A dry run computes the shapes of each layer on each kind of rank; 13 layers do not divide by pp.
    layers = min(model.num_hidden_layers, 13)
    by_layer: dict[str, Any] = {
        field.name: value[:layers]
        for field in fields(model)
        if isinstance(value := getattr(model, field.name), tuple) and len(value) == model.num_hidden_layers
    }
    if letters := getattr(model, "hybrid_override_pattern", ""):
        by_layer["hybrid_override_pattern"] = letters[:layers]
    if numbers := getattr(model, "attn_layer_indices", ()):
        by_layer["attn_layer_indices"] = tuple(number for number in numbers if number < layers)
    if shared := getattr(model, "num_kv_shared_layers", 0):
        by_layer["num_kv_shared_layers"] = min(shared, 5)
    model = replace(model, num_hidden_layers=layers, **by_layer)
    tp = next(tp for tp in (2, 5, 1) if model.num_attention_heads % tp == 0 and model.intermediate_size % tp == 0)
    pp = 4
    dp = 2
    config = Config(
        model=model,
        parallel=ParallelConfig(tp=tp, pp=pp, dp=dp, sequence_parallel=True),
        train=TrainConfig(global_batch_size=16, seq_length=1020, precision="bf16", recompute="selective"),
    )
    kinds = reports(validate(config, tp * pp * dp), PARTS)
    assert sorted(rank for ranks in kinds.values() for rank in ranks) == [
        rank for rank in range(tp * pp * dp) if rank // tp % dp == 0
    ]
    derived = validate(config, tp * pp * dp).model
    whole = WholeModel(derived)
    count = whole.parameters()
    copies = math.prod(whole.tensors()["embedding.weight"].shape) * model.tie_word_embeddings
    held = sum(kind.parameters * len(ranks) for kind, ranks in kinds.items())
    vectors = tp * 20 * (model.num_hidden_layers + 1) * model.hidden_size
    positions = 0
    if "positions.weight" in whole.tensors():
        positions = (tp - 1) * model.max_position_embeddings * model.hidden_size  # each tensor rank has the whole table
    # Each tensor rank has all of a router, of the biases behind the experts, and of projections of embeddings.
    everywhere = [name for name in whole.tensors() if re.search(r"\.router\.|\.down\.bias|project_", name)]
    repeated = (tp - 1) * sum(math.prod(whole.tensors()[name].shape) for name in everywhere)
    least = count + copies + positions + repeated
    assert held >= least
    # Fewer key heads than tensor ranks, and the projections to latents, are on each of them, too.
    keys = math.gcd(derived.num_key_value_heads, getattr(derived, "num_global_key_value_heads", 0))
    if keys % tp == 0 and not getattr(derived, "kv_lora_rank", 0):
        # So are strengths, decays and time steps of layers with a state, and groups of Mamba-2, if there are fewer.
        parts = (".beta.", ".decay.", ".dt.", ".mamba.B", ".mamba.C", ".conv_B", ".conv_C", ".latent_")
        parts += (".per_layer.gate", ".per_layer.projection", ".per_layer.model_projection")
        shared = [piece for name, piece in whole.tensors().items() if any(part in name for part in parts)]
        assert held <= least + vectors + (tp - 1) * sum(math.prod(piece.shape) for piece in shared)
    for kind in kinds:
        check_memory(kind, dp)


def check_memory(kind: RankReport, dp: int) -> None:
    elements = kind.gradients // 4
    precise = kind.weights // 2 - elements  # fp32 weights, which are their own main weights
    assert 0 <= precise < 1e-3 * elements + 100_000
    assert kind.optimizer == (12 * elements - 4 * precise) // dp
    assert kind.parameters <= elements <= 1.02 * kind.parameters + 100_000
    assert kind.activations > 0
    assert kind.total == kind.weights + kind.gradients + kind.optimizer + kind.activations


def test_ranks_with_other_numbers_of_experts_are_listed() -> None:
    """Of 5 experts, three ranks hold one and the fourth two. The other eight ranks hold the same experts again."""
    config = Layout(MIXTRAL, dp=12, ep=4, etp=1).config()
    kinds = reports(config, PARTS)
    assert list(kinds.values()) == [[0, 1, 2], [3]]
    few, many = kinds
    expert = 3 * MIXTRAL.hidden_size * MIXTRAL.moe.moe_intermediate_size
    assert many.parameters - few.parameters == MIXTRAL.num_hidden_layers * expert
    # Where all ranks hold equal numbers of experts, replica 0 stands for all.
    even = replace(MIXTRAL, moe=replace(MIXTRAL.moe, num_experts=8))
    assert list(reports(Layout(even, dp=12, ep=4, etp=1).config(), PARTS).values()) == [[0]]


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "dualpipe-v"])
def test_a_plan_counts_the_parameters_of_the_stages_that_a_rank_has(schedule: str) -> None:
    """Fault parameters-of-placed-stages."""
    model = ModelConfig(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, vocab_size=300)
    parallel = ParallelConfig(pp=2, vpp=2, schedule=schedule, partition=(0, 1, 2, 1))
    config = validate(Config(model=model, parallel=parallel), 2)
    counts = {rank: r.parameters for r, ranks in reports(config, PARTS).items() for rank in ranks}
    embedding = 300 * 32
    layer = 4 * 32 * 32 + 3 * 32 * 4 * 32 + 2 * 32
    first = embedding
    second = layer
    third = 2 * layer
    last = layer + 32 + embedding
    if schedule == "interleaved":
        assert counts == {0: first + third, 1: second + last}
    else:
        assert counts == {0: first + last, 1: second + third}
    assert sum(counts.values()) == WholeModel(config.model).parameters()
