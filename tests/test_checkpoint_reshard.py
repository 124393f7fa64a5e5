"""Any layout's checkpoint loads into any other, bit for bit: all ranks of both are made here, one after the other."""

from dataclasses import replace
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
from megapar_models.registry import weight_options

from megapar.base.errors import CheckpointError
from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.load import differences, fill, load_weights, weight_slices
from megapar.checkpoint.save import first_copies, publish, share, write_part
from megapar.config.model_options import ModelConfig
from megapar.config.options import flatten as flatten_options
from megapar.declare.context import single
from tests.support import tiny_models
from tests.support.checkpoints import STATE, exported
from tests.support.simulated_ranks import LAYOUTS, LLAMA, Layout, expected, held, rank_slices, whole
from tests.support.sweeps import slow_but

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
