"""Any layout's checkpoint loads into any other, bit for bit: all ranks of both are made here, one after the other."""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megapar_models.build import build_stages
from megapar_models.counts import WholeModel
from megapar_models.families.qwen3_moe import Qwen3MoeExperts
from megapar_models.registry import validate, weight_options
from torch import Tensor

from megapar.base.errors import CheckpointError
from megapar.base.grid import Grid
from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.load import differences, fill, load_weights, weight_slices
from megapar.checkpoint.save import first_copies, publish, share, write_part
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, OptimizerConfig, ParallelConfig, TrainConfig
from megapar.config.options import flatten as flatten_options
from megapar.declare import context
from megapar.declare.context import ParallelContext, single
from megapar.declare.optimizer_state import StateSlice
from megapar.declare.params import ParamSpec
from tests.support import tiny_models
from tests.support.checkpoints import STATE, exported
from tests.support.flat import flatten
from tests.support.sweeps import slow_but

LLAMA = tiny_models.small(
    "llama", 12, 4, 20, num_attention_heads=12, num_key_value_heads=3, head_dim=2, attention_bias=True, qk_norm=True
)
ONE_KV_HEAD = replace(LLAMA, num_key_value_heads=1, tie_word_embeddings=True)
GPT = tiny_models.small(
    "gpt", 12, 4, 20, num_key_value_heads=4, head_dim=3, max_position_embeddings=9, tie_word_embeddings=True
)
MIXTURE = tiny_models.small(
    "qwen3_moe",
    12,
    2,
    20,
    num_attention_heads=12,
    num_key_value_heads=3,
    head_dim=2,
    qk_norm=True,
    moe=Qwen3MoeExperts(5, 2, moe_intermediate_size=8, mlp_only_layers=(1,), shared_expert_intermediate_size=12),
)
FACTS = {"step": 3, "consumed_samples": 24, "layout": {}, "data": {}}


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    vpp: int = 1
    zero_stage: int = 1
    shard_ranks: int = 0
    bucket_mb: float = 1.0
    precision: str = "fp32"

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def config(self, model: ModelConfig) -> Config:
        schedule = "interleaved" if self.vpp > 1 else "1f1b"
        axes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "cp": self.cp, "ep": self.ep, "etp": self.etp}
        parallel = ParallelConfig(**axes, vpp=self.vpp, schedule=schedule)
        train = TrainConfig(global_batch_size=120, seq_length=8, precision=self.precision)  # type: ignore[arg-type]
        optimizer = OptimizerConfig(
            zero_stage=self.zero_stage,  # type: ignore[arg-type]
            shard_ranks=self.shard_ranks,
            bucket_mb=self.bucket_mb,
        )
        return validate(Config(model=model, parallel=parallel, train=train, optimizer=optimizer), self.world)

    def context(self, rank: int) -> ParallelContext:
        """The place of `rank`, without process groups: enough to build its part of the model."""
        axes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp, "ep": self.ep, "etp": self.etp or self.tp}
        return context.planned(Grid(**axes, shard_ranks=self.shard_ranks), rank, device=torch.device("cpu"))


@cache
def rank_slices(model: ModelConfig, layout: Layout, rank: int) -> list[StateSlice]:
    """What this rank's optimizer holds. Every user overwrites all of it."""
    ctx = layout.context(rank)
    stages = build_stages(layout.config(model), ctx)
    options = layout.config(model).optimizer
    buffer = flatten(
        list(stages.values()), ctx, zero_stage=options.zero_stage, bucket_mb=options.bucket_mb, overlap=False
    )
    return list(buffer.optimizers(options).slices())


@cache
def whole(model: ModelConfig) -> Mapping[str, Tensor]:
    """The state of every logical tensor, each element random."""
    tensors = {}
    for name, piece in WholeModel(model).tensors().items():
        for state in STATE:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{state}.{name}".encode()))
            values = torch.randn(piece.shape, generator=generator)
            tensors[f"{state}.{name}"] = values.abs() if state == "exp_avg_sq" else values
    return tensors


def held(tensors: Mapping[str, Tensor], spec: ParamSpec, numel: int, state: str) -> Tensor:
    """What a local parameter of `numel` elements should hold: its cut of each tensor, then zeros."""
    parts = []
    for piece in spec.pieces:
        tensor = tensors[f"{state}.{piece.name}"]
        parts.append(tensor[piece.held.slices].flatten())
    flat = torch.cat(parts)
    return torch.cat([flat, flat.new_zeros(numel - flat.numel())])


def expected(model: ModelConfig, slices: list[StateSlice]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, this slice's view, what it should hold) of all state."""
    for item in slices:
        for state in STATE:
            values = held(whole(model), item.spec, item.param.numel(), state)[item.start : item.stop]
            yield f"{state}.{item.spec.name}", item.tensors[state], values


def save_simulated(model: ModelConfig, layout: Layout, root: Path) -> Path:
    temporary = root / ".tmp-step_00000003-test"
    temporary.mkdir(parents=True)
    parts = []
    for rank in range(layout.world):
        slices = rank_slices(model, layout, rank)
        for _, view, values in expected(model, slices):
            view.copy_(values)
        mine = share(slices) if layout.zero_stage == 0 else first_copies(slices)
        parts.append(write_part(temporary, rank, mine))
    config = layout.config(model)
    facts = FACTS | {"model_config": weight_options(config), "trainer": {"config": flatten_options(config)}}
    publish(temporary, root, facts, parts)
    return root / "step_00000003"


def check_load(model: ModelConfig, path: Path, layout: Layout) -> None:
    manifest = read_manifest(path)
    names = set()
    for rank in range(layout.world):
        slices = rank_slices(model, layout, rank)
        for _, view, _ in expected(model, slices):
            view.fill_(torch.nan)
        fill(path, manifest, slices)
        for name, view, values in expected(model, slices):
            assert torch.equal(view, values), f"{layout} rank {rank}: {name}"
            names.add(name)
    assert {name for fused in names for name in logical_names(fused)} == manifest.tensors.keys()


def logical_names(fused: str) -> list[str]:
    state, names = fused.split(".", 1)
    return [f"{state}.{name}" for name in names.split("+")]


LAYOUTS = [
    Layout(),
    Layout(cp=4, zero_stage=0),
    Layout(dp=5, bucket_mb=1 / 1024),
    Layout(tp=2, cp=2),
    Layout(tp=4, pp=2, vpp=2),
    Layout(tp=4, dp=2, bucket_mb=1 / 512, precision="bf16"),
    Layout(tp=2, pp=3, dp=2, shard_ranks=1),
    Layout(pp=4, dp=2, zero_stage=0, precision="bf16"),
]


@pytest.mark.parametrize("distance", slow_but([3], range(len(LAYOUTS))))
def test_every_layout_loads_every_other(tmp_path: Path, distance: int) -> None:
    """Faults empty-shards, any-layout-loads: shared rows of k and v, fused pieces, padded vocabulary, tied copies,
    shards cut anywhere. Each layout is saved, and loaded into the one so far behind it in the list."""
    for number, source in enumerate(LAYOUTS):
        path = save_simulated(LLAMA, source, tmp_path / str(number))
        check_load(LLAMA, path, LAYOUTS[(number + distance) % len(LAYOUTS)])


@pytest.mark.slow
def test_tied_embeddings_and_one_kv_head_in_every_layout(tmp_path: Path) -> None:
    """Each layout saves for the next one."""
    for model in (ONE_KV_HEAD, GPT):
        for source, target in pairwise([*LAYOUTS, LAYOUTS[0]]):
            check_load(model, save_simulated(model, source, tmp_path / model.family / str(hash(source))), target)


def test_all_layouts_store_the_same_tensors(tmp_path: Path) -> None:
    """Every tensor once, in its true shape, however often ranks hold it; 12 bytes an element in all. So every layout
    exports the same weights (fault any-layout-exports)."""
    names = {f"{state}.{name}": piece.shape for name, piece in WholeModel(GPT).tensors().items() for state in STATE}
    kinds = {name: ("float32", shape) for name, shape in names.items()}
    exports = []
    for number, layout in enumerate(LAYOUTS):
        path = save_simulated(GPT, layout, tmp_path / str(number))
        exports.append(exported(path))
        manifest = read_manifest(path)
        assert {name: entry.shape for name, entry in manifest.tensors.items()} == names
        assert {entry.dtype for entry in manifest.tensors.values()} == {"float32"}
        assert not differences(manifest, kinds, weight_options(layout.config(GPT)))
        elements = sum(torch.Size(chunk.size).numel() for e in manifest.tensors.values() for chunk in e.chunks)
        assert elements == sum(torch.Size(shape).numel() for shape in names.values())
    assert exports.count(exports[0]) == len(LAYOUTS)


EXPERT_LAYOUTS = [
    Layout(),
    Layout(dp=4, ep=4),
    Layout(dp=2, ep=2, zero_stage=0),
    Layout(tp=2, dp=2, ep=2, bucket_mb=1 / 1024),
    Layout(tp=2, ep=2, etp=1),
    Layout(dp=4, ep=2, etp=2, precision="bf16"),
    Layout(dp=8, ep=8),  # three ranks hold no expert
    Layout(dp=4, ep=1, etp=4, zero_stage=0),
    Layout(dp=2, pp=2, ep=2, vpp=2),
    Layout(cp=2, dp=2, ep=4, etp=1),
]


def test_experts_load_into_any_split_of_ranks(tmp_path: Path) -> None:
    """Fault experts-numbered-by-rank: layouts of ep, etp and replicas load what others have saved, bit by bit, weights
    and moments; an expert has its global number in every one."""
    names = {name.split(".")[4] for name in WholeModel(MIXTURE).tensors() if ".experts." in name}
    assert names == {"0", "1", "2", "3", "4"}
    for number, source in enumerate(EXPERT_LAYOUTS):
        path = save_simulated(MIXTURE, source, tmp_path / str(number))
        for other in (0, number - 1, number - 4):
            check_load(MIXTURE, path, EXPERT_LAYOUTS[other])


def test_experts_of_every_layout_export_the_same_weights(tmp_path: Path) -> None:
    """Fault any-layout-exports."""
    # transformers' class has no shared expert.
    model = replace(MIXTURE, moe=replace(MIXTURE.moe, shared_expert_intermediate_size=0))
    exports = []
    for number, layout in enumerate(EXPERT_LAYOUTS):
        exports.append(exported(save_simulated(model, layout, tmp_path / str(number))))
    assert exports.count(exports[0]) == len(EXPERT_LAYOUTS)


@st.composite
def random_layouts(draw: st.DrawFn) -> Layout:
    tp, pp = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]))
    return Layout(
        tp=tp,
        pp=pp,
        dp=draw(st.sampled_from([1, 2, 3, 4, 5])),
        cp=draw(st.sampled_from([1, 1, 2])),
        vpp=draw(st.integers(1, 2)) if pp == 2 else 1,
        zero_stage=draw(st.integers(0, 1)),
        bucket_mb=draw(st.sampled_from([1e-4, 1e-3, 1.0])),
        precision=draw(st.sampled_from(["fp32", "bf16"])),
    )


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_layouts(), random_layouts(), st.sampled_from([LLAMA, ONE_KV_HEAD, GPT]))
def test_random_layouts_load_each_other(source: Layout, target: Layout, model: ModelConfig) -> None:
    """Fault any-layout-loads."""
    with TemporaryDirectory() as folder:
        check_load(model, save_simulated(model, source, Path(folder) / "root"), target)


def test_weights_alone_fill_a_model_without_an_optimizer(tmp_path: Path) -> None:
    """Each parameter becomes the main weight, rounded once to the model's dtype, and nothing else is needed."""
    path = save_simulated(LLAMA, Layout(tp=2, pp=2, dp=2), tmp_path)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        layout = Layout(precision=precision)
        stages = build_stages(layout.config(LLAMA), single())
        params = [param for stage in stages.values() for param in stage.parameters()]
        load_weights(
            path, slices=weight_slices(params), ctx=single(), model_config=weight_options(layout.config(LLAMA))
        )
        for slice_ in weight_slices(params):
            values = held(whole(LLAMA), slice_.spec, slice_.stop, "main")
            assert slice_.main.dtype == dtype
            assert torch.equal(slice_.main, values.to(dtype)), slice_.spec.name


def test_a_rank_reads_no_file_that_holds_nothing_of_its_own(tmp_path: Path) -> None:
    """Files of the other pipeline stage may hold anything: nobody looks."""
    layout = Layout(tp=2, pp=2, dp=2)
    path = save_simulated(LLAMA, layout, tmp_path)
    for rank in range(layout.world):
        if layout.context(rank).pp.first:
            shard = path / f"rank_{rank:05d}.safetensors"
            shard.write_bytes(bytes(shard.stat().st_size))
    manifest = read_manifest(path)
    for rank in range(layout.world):
        slices = rank_slices(LLAMA, layout, rank)
        if layout.context(rank).pp.first:
            with pytest.raises(CheckpointError, match="not readable as safetensors"):
                fill(path, manifest, slices)
        else:
            fill(path, manifest, slices)
            assert all(torch.equal(view, values) for _, view, values in expected(LLAMA, slices))
