"""Adapters (LoRA): what they compute, that they train in every layout as in one process, and their checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.build import build_stages
from megapar_models.convert import adapters as files
from megapar_models.families.deepseek import DeepseekExperts
from megapar_tools.verify import logical
from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError
from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.load import Reader
from megapar.config.model_options import ModelConfig
from megapar.config.options import AdapterConfig, Config
from megapar.declare import context
from megapar.declare.params import ZEROS, spec_of
from megapar.declare.random import Tokens, initialize
from megapar.declare.sharding import Sharding
from megapar.linear import low_rank
from megapar.linear.low_rank import LoraRule
from megapar.step.step import train_step
from megapar.tensor_parallel.columns import Columns
from megapar.tensor_parallel.layers import ColumnParallelLinear
from megapar.tensor_parallel.lora import lora_of_columns
from megapar.train.saver import Saver
from megapar.train.trainer import start
from tests.support import adapters, tiny_models
from tests.support.distributed import run_ranks
from tests.support.grid import (
    DENSE_BETWEEN,
    GPT,
    LLAMA,
    MIXTRAL,
    SAMPLES,
    SHARED,
    STRADDLING,
    Layout,
    check_on_ranks,
    make_context,
    make_state,
    micro_batches,
    name,
)
from tests.support.sweeps import slow_but

ALL = AdapterConfig(rank=3, alpha=7.0)
SOME = AdapterConfig(rank=4, alpha=8.0, targets=("q", "v", "down"), rslora=True)
DROPPED = replace(ALL, dropout=0.25)
DORA = replace(ALL, dora=True)

LATENT = tiny_models.small(
    "deepseek",
    48,
    2,
    76,
    head_dim=6,
    q_lora_rank=18,
    kv_lora_rank=14,
    qk_nope_head_dim=10,
    v_head_dim=8,
    initializer_range=0.1,
    moe=DeepseekExperts(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, first_k_dense_replace=1),
)

LAYOUTS = [
    Layout(LLAMA, tp=2, sequence_parallel=True, pp=2, micro_batch_size=3, adapter=ALL),
    Layout(STRADDLING, tp=4, sequence_parallel=True, tp_overlap_chunks=2, micro_batch_size=3, adapter=SOME),
    Layout(LLAMA, tp=2, tp_overlap_chunks=2, pp=2, schedule="zb-h1", micro_batch_size=3, adapter=ALL),
    Layout(LLAMA, tp=2, adapter=SOME, zero_stage=2, micro_batch_size=3),
    Layout(LLAMA, dp=2, zero_stage=3, micro_batch_size=3, adapter=ALL),
    Layout(GPT, cp=2, tp=2, sequence_parallel=True, adapter=ALL),
    Layout(LLAMA, cp=2, cp_attention="ring", pp=2, vpp=2, schedule="interleaved", adapter=ALL),
    Layout(MIXTRAL, tp=2, dp=2, ep=2, etp=2, sequence_parallel=True, adapter=ALL),
    Layout(SHARED, tp=2, ep=4, dp=2, etp=1, adapter=ALL),
    Layout(DENSE_BETWEEN, pp=2, dp=2, ep=2, schedule="zb-h1", adapter=SOME),
    # With MIXTRAL's own vocabulary two experts have equal scores for a token of the first step: rounding would choose.
    Layout(replace(MIXTRAL, vocab_size=127), tp=4, etp=4, recompute="full", adapter=SOME),
    Layout(LLAMA, tp=2, recompute="selective", micro_batch_size=3, adapter=ALL),
    Layout(GPT, pp=2, recompute="full", every=2, micro_batch_size=3, adapter=ALL),
    Layout(LLAMA, tp=2, cp=2, dp=2, sequence_parallel=True, zero_stage=3, adapter=ALL),
    Layout(LLAMA, tp=2, dp=2, pp=2, sequence_parallel=True, zero_stage=2, schedule="zb-v", vpp=2, adapter=ALL),
    Layout(LATENT, tp=2, sequence_parallel=True, pp=2, adapter=ALL),
    Layout(LATENT, tp=2, dp=2, zero_stage=3, adapter=ALL),
    Layout(STRADDLING, tp=4, sequence_parallel=True, tp_overlap_chunks=2, micro_batch_size=3, adapter=DROPPED),
    Layout(LLAMA, tp=2, tp_overlap_chunks=2, pp=2, schedule="zb-h1", micro_batch_size=3, adapter=DROPPED),
    Layout(GPT, cp=2, tp=2, sequence_parallel=True, recompute="full", adapter=DROPPED),
    Layout(LATENT, tp=2, sequence_parallel=True, pp=2, adapter=replace(DROPPED, targets=("*.attention.*",))),
    Layout(LLAMA, dp=2, tp=2, zero_stage=3, micro_batch_size=3, adapter=DROPPED),
    Layout(LLAMA, tp=2, sequence_parallel=True, micro_batch_size=3, adapter=DORA),
    Layout(STRADDLING, tp=4, sequence_parallel=True, tp_overlap_chunks=2, micro_batch_size=3, adapter=DORA),
    Layout(LLAMA, pp=2, tp=2, schedule="zb-h1", micro_batch_size=3, adapter=replace(SOME, dora=True)),
    Layout(GPT, cp=2, tp=2, recompute="full", adapter=DORA),
    Layout(LLAMA, dp=2, tp=2, zero_stage=3, micro_batch_size=3, adapter=DORA),
    Layout(LATENT, tp=2, sequence_parallel=True, pp=2, adapter=replace(DORA, targets=("*.attention.*",))),
    Layout(LLAMA, dp=2, zero_stage=2, pp=2, micro_batch_size=3, adapter=DORA),
    Layout(LLAMA, dp=2, zero_stage=0, micro_batch_size=3, adapter=ALL),
]


# What adapters compute


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        (LLAMA, ALL),
        (STRADDLING, SOME),
        (replace(MIXTRAL, moe=replace(MIXTRAL.moe, balance="none")), ALL),
        (LLAMA, DORA),
        (STRADDLING, replace(SOME, dora=True)),
    ],
    ids=["all", "some, rslora", "experts", "dora", "dora, some"],
)
def test_steps_are_those_of_merged_weights_in_plain_torch(
    model: ModelConfig, adapter: AdapterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_rank, "NORM_BLOCK", 9 * model.hidden_size)  # several blocks, the last one smaller
    if model.experts:
        model = replace(model, moe=replace(model.experts, router_aux_loss_coef=0.001, router_z_loss_coef=0.0))
    tensors = tiny_models.random_tensors(model, adapter=adapter)
    state = adapters.make_state(model, adapter, tensors)
    adapters.check(state, adapters.Merged(state.config.model, adapter, tensors))


def test_new_adapters_change_nothing_and_are_drawn_as_peft_draws_them() -> None:
    """A evenly from +-1/sqrt(in), B zeros. So the logits are those of the base, bit by bit."""
    with_adapters = tiny_models.config(LLAMA)
    with_adapters = replace(with_adapters, adapter=AdapterConfig(rank=64))
    (found,) = build_stages(with_adapters, context.single()).values()
    (base,) = build_stages(tiny_models.config(LLAMA), context.single()).values()
    initialize([found], seed=3)
    initialize([base], seed=3)
    batch = tiny_models.batch(LLAMA)
    assert torch.equal(found(None, batch), base(None, batch))
    # With DoRA the rows are divided by their own norms and multiplied by them.
    with_magnitudes = replace(with_adapters, adapter=AdapterConfig(rank=64, dora=True))
    (also,) = build_stages(with_magnitudes, context.single()).values()
    initialize([also], seed=3)
    assert torch.equal(also(None, batch), base(None, batch))
    drawn = logical.assemble([logical.held([found], context.single())])
    for matrix, inputs in (("attention.k", 48), ("mlp.down", 76), ("attention.o", 40)):
        a = drawn[f"layers.1.{matrix}.lora_a"] * inputs**0.5
        assert a.shape == (64, inputs)
        assert -1 <= a.min() < -0.99 < 0.99 < a.max() <= 1
        assert abs(a.mean()) < 0.05
        assert a.var() == pytest.approx(1 / 3, rel=0.05)
        assert not drawn[f"layers.1.{matrix}.lora_b"].any()


def identities(sharding: Sharding, number: int = 0, size: int = 60) -> ColumnParallelLinear:
    """Two matrices of zeros beside each other, with adapters whose A and B are identities: y = (x, x), where none is
    dropped."""
    columns = [Columns.even(f"layers.{number}.{name}", size, sharding.tp) for name in ("one", "two")]
    lora = lora_of_columns(LoraRule(size, 1.0, dropout=0.25), size, columns, [True, True], sharding)
    assert lora is not None
    with torch.no_grad():
        for factor in (lora.a, lora.b):
            factor.copy_(torch.eye(size).repeat(2, 1))
    return ColumnParallelLinear(size, columns, sharding, init=ZEROS, bias=False, lora=lora)


def test_dropout_drops_inputs_of_a_in_training() -> None:
    """By sample, position and layer. The others are divided by 1 - p, and so are gradients."""
    sharding = Sharding.of(context.single(), torch.float64)
    tokens = Tokens(5, torch.arange(4), torch.arange(100))
    layer = identities(sharding)
    layer.weight.data.zero_()
    x_sbi = torch.ones(100, 4, 60, dtype=torch.float64, requires_grad=True)
    y_sbo = layer(x_sbi, tokens)
    kept, also_kept = y_sbo.chunk(2, dim=-1)
    assert torch.equal(kept, also_kept)
    values = torch.tensor([0.0, 1 / 0.75], dtype=torch.float64)
    assert torch.equal(kept.unique(), values)
    assert (kept == 0).double().mean() == pytest.approx(0.25, abs=0.01)
    rows = kept.flatten(0, 1)
    assert len(rows.unique(dim=0)) == len(rows)
    other = identities(sharding, number=1)
    other.weight.data.zero_()
    assert not torch.equal(other(x_sbi, tokens), y_sbo)
    # y = drop(x), so its gradient is drop(grad_y), and that of A and B of outer products of both.
    grad_sbo = torch.randn(100, 4, 120, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y_sbo.backward(grad_sbo)
    one, two = grad_sbo.chunk(2, dim=-1)
    torch.testing.assert_close(x_sbi.grad, (one + two) * kept.detach())
    assert layer.lora is not None
    expected = torch.cat([part.flatten(0, 1).t() @ rows.detach() for part in (one, two)])
    torch.testing.assert_close(layer.lora.a.grad, expected)
    torch.testing.assert_close(layer.lora.b.grad, expected)
    with torch.no_grad():
        assert torch.equal(layer.eval()(x_sbi), torch.ones(100, 4, 120, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"the layer of layers.0.one.lora_a is called without the tokens of its input"):
        layer.train()(x_sbi)


@pytest.mark.parametrize("layout", slow_but([2, 7, 23], LAYOUTS), ids=name)
def test_adapters_train_in_every_layout_as_in_one_process(layout: Layout) -> None:
    """Loss, norm, every gradient and every weight of two steps. B is random: with zeros A would have no gradient.

    Faults adapters-of-experts, adapters-of-latent-projections, frozen-base-recomputed, norm-of-adapters and
    norms-of-cut-rows.
    """
    check_on_ranks(layout)


# What ranks send, and what they hold alike

PLAIN = replace(LLAMA, attention_bias=False, qk_norm=False)


def sent_in_a_step(config: Config) -> dict[str, int]:
    """Bytes by axis sent by this rank in the second step."""
    state = make_state(config)
    train_step(state, micro_batches(config, state.ctx, 0))
    before = state.ctx.traffic()
    train_step(state, micro_batches(config, state.ctx, 1))
    return {axis: n - before[axis] for axis, n in state.ctx.traffic().items() if n > before[axis]}


@pytest.mark.parametrize(
    "options", slow_but([1], [{}, {"sequence_parallel": True, "tp_overlap_chunks": 2}]), ids=["tp", "sp"]
)
def test_adapters_send_no_activation_more(options: dict[str, Any]) -> None:
    """Over tp a step sends the bytes of one that trains the matrices, and the gradients of the whole factors, once."""
    adapter = replace(ALL, rank=8)
    matrices = Layout(PLAIN, tp=2, micro_batch_size=3, trainable=("*.attention.*", "*.mlp.*"), **options)
    adapted = Layout(PLAIN, tp=2, micro_batch_size=3, adapter=adapter, **options)
    without = run_ranks(2, sent_in_a_step, matrices.config())
    found = run_ranks(2, sent_in_a_step, adapted.config())
    # A of q, k, v, gate and up, and B of o and down. An all-reduce between two ranks sends the bytes once.
    whole = 4 * 8 * (5 + 2) * 48 * 4
    assert found == [{**sent, "tp": sent["tp"] + whole} for sent in without]


def test_magnitudes_send_norms_of_rows_that_are_cut(tmp_path: Path) -> None:
    """Over tp a step of DoRA sends two norms for each row of o and down in every forward, and nothing else."""
    adapted, dora = (Layout(PLAIN, tp=2, micro_batch_size=3, adapter=adapter) for adapter in (ALL, DORA))
    without, found = (run_ranks(2, sent_in_a_step, layout.config()) for layout in (adapted, dora))
    forwards = 4 * 2 * (SAMPLES // 3)
    norms = forwards * 2 * 48 * 4
    assert found == [{**sent, "tp": sent["tp"] + norms} for sent in without]


def weights_after_steps(config: Config, steps: int) -> dict[str, Tensor]:
    state = make_state(config)
    for step in range(steps):
        train_step(state, micro_batches(config, state.ctx, step))
    named = {spec_of(param).name: param for stage in state.stages.values() for param in stage.parameters()}
    return {name: param.detach().clone() for name, param in named.items() if param.requires_grad}


def test_whole_factors_stay_the_same_on_all_ranks() -> None:
    """Fault whole-factor-not-summed: bit by bit after three steps, of tp and of replicas."""
    layout = Layout(LLAMA, tp=2, dp=2, sequence_parallel=True, micro_batch_size=3, adapter=DORA)
    ranks = run_ranks(4, weights_after_steps, layout.config("bf16"), 3)
    of_rows = [f".{matrix}.lora_{kind}" for matrix in ("o", "down") for kind in ("b", "magnitude")]
    whole = [name for name in ranks[0] if any(part in name for part in (*of_rows, ".q.lora_a"))]
    assert len(whole) == 5 * LLAMA.num_hidden_layers
    assert all(torch.equal(ranks[0][name], rank[name]) for rank in ranks for name in whole)
    assert all(torch.equal(ranks[n][name], ranks[n + 2][name]) for n in (0, 1) for name in ranks[0])


# Checkpoints


def base_of(folder: Path, model: ModelConfig = LLAMA, seed: int = 1, layout: Layout | None = None) -> Path:
    """A checkpoint of a model without adapters."""
    config = (layout or Layout(model, micro_batch_size=3)).config()
    config = replace(config, run_dir=str(folder), train=replace(config.train, seed=seed))
    ctx = make_context(config)
    state, _ = start(config, ctx, build_stages(config, ctx))
    (path,) = Saver(state, folder).save(state)
    return path


def train_adapters(layout: Layout, run_dir: Path, base: Path | None, steps: int, precision: str = "bf16") -> Any:
    """Train to step `steps` from what `run_dir` holds, and save; losses, notes, and the trained weights."""
    config = layout.config(precision)
    options = replace(config.checkpoint, init_from=str(base) if base else "none")
    config = replace(config, run_dir=str(run_dir), checkpoint=options)
    ctx = make_context(config)
    state, notes = start(config, ctx, build_stages(config, ctx))
    found = [train_step(state, micro_batches(config, ctx, step)) for step in range(state.step, steps)]
    Saver(state, run_dir).save(state)
    weights = {f"{key}.{i.spec.name}": x.clone() for i in state.optimizer.slices() for key, x in i.tensors.items()}
    return [result.loss for result in found], notes, weights


RUN = Layout(LLAMA, micro_batch_size=3, adapter=SOME)


def test_a_checkpoint_holds_the_factors_alone_and_resumes_bitwise(tmp_path: Path) -> None:
    """Faults adapters-saved-whole and adapters-resumed-stale."""
    base = base_of(tmp_path / "base")
    losses, _, weights = train_adapters(RUN, tmp_path / "whole", base, 4)
    train_adapters(RUN, tmp_path / "run", base, 2)
    manifest = read_manifest(tmp_path / "run/checkpoints/step_00000002")
    widths = {"q": (40, 48), "v": (20, 48), "down": (48, 76)}
    names = {f"layers.{n}.attention.{m}": widths[m] for n in range(4) for m in "qv"}
    names |= {f"layers.{n}.mlp.down": widths["down"] for n in range(4)}
    expected = {f"{name}.lora_a": (4, inputs) for name, (_, inputs) in names.items()}
    expected |= {f"{name}.lora_b": (outputs, 4) for name, (outputs, _) in names.items()}
    states = ("main", "exp_avg", "exp_avg_sq")
    assert {name: entry.shape for name, entry in manifest.tensors.items()} == {
        f"{state}.{name}": shape for state in states for name, shape in expected.items()
    }
    numbers = sum(4 * (outputs + inputs) for outputs, inputs in names.values())
    files = sum(manifest.files.values())
    assert 12 * numbers < files < 12 * numbers + 200 * len(manifest.tensors)
    assert manifest.base == {"weights": read_manifest(base).weights_digest()}
    again, notes, resumed = train_adapters(RUN, tmp_path / "run", base, 4)
    assert notes[1].startswith("resumed step 2")
    assert again == losses[2:]
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)


@pytest.mark.parametrize("dora", slow_but([1], [False, True]), ids=["lora", "dora"])
def test_adapters_resume_in_another_layout(dora: bool, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    run = replace(RUN, adapter=replace(SOME, dora=dora))
    losses, _, _ = train_adapters(run, tmp_path / "one", base, 3, "fp32")
    four = replace(run, tp=2, pp=2, sequence_parallel=True)
    run_ranks(4, train_adapters, four, tmp_path / "four", base, 2, "fp32")
    again, _, _ = train_adapters(run, tmp_path / "four", base, 3, "fp32")
    assert again == pytest.approx(losses[2:], rel=1e-6)


def test_another_base_is_refused(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    train_adapters(RUN, tmp_path / "run", base, 1)
    other = base_of(tmp_path / "other", seed=2)
    for wrong in (other, None):
        with pytest.raises(CheckpointError, match=r"adapters are of another base \(weights [0-9a-f]{12}\) than"):
            train_adapters(RUN, tmp_path / "run", wrong, 2)
    louder = replace(RUN, adapter=replace(SOME, alpha=9.0))
    with pytest.raises(CheckpointError, match=r"adapter.alpha \(8.0 \| 9.0\)"):
        train_adapters(louder, tmp_path / "run", base, 2)
    with pytest.raises(CheckpointError, match=r"adapter.rank differs \(4 \| 5\)"):
        train_adapters(replace(RUN, adapter=replace(SOME, rank=5)), tmp_path / "run", base, 2)
    with pytest.raises(CheckpointError, match=r"holds no adapters; start from its weights"):
        train_adapters(RUN, tmp_path / "base", base, 2)
    saved = tmp_path / "run/checkpoints/step_00000001"
    with pytest.raises(CheckpointError, match=r"it holds adapters alone, without the weights of their base"):
        train_adapters(RUN, tmp_path / "new", saved, 1)


CUTS = [
    Layout(LLAMA, tp=2, pp=2, sequence_parallel=True, micro_batch_size=3),
    Layout(STRADDLING, tp=4, dp=1, zero_stage=1, micro_batch_size=3),
    Layout(MIXTRAL, tp=2, dp=2, ep=2, etp=2),
    Layout(LLAMA, dp=3, zero_stage=3),
]


@pytest.mark.parametrize("layout", CUTS, ids=name)
def test_the_hash_of_a_base_does_not_depend_on_how_it_is_cut(layout: Layout, tmp_path: Path) -> None:
    one = base_of(tmp_path / "one", layout.model)
    cut, *_ = run_ranks(layout.world, base_of, tmp_path / "cut", layout.model, 1, layout)
    boxes, whole = (read_manifest(path).tensors for path in (cut, one))
    assert any(len(boxes[name].chunks) > len(whole[name].chunks) for name in whole)
    assert read_manifest(cut).weights_digest() == read_manifest(one).weights_digest()
    other = base_of(tmp_path / "other", layout.model, seed=2)
    assert read_manifest(other).weights_digest() != read_manifest(one).weights_digest()


def test_adapters_go_on_on_a_base_in_other_boxes(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    losses, _, _ = train_adapters(RUN, tmp_path / "whole", base, 3)
    train_adapters(RUN, tmp_path / "run", base, 2)
    cut, *_ = run_ranks(4, base_of, tmp_path / "cut", LLAMA, 1, CUTS[0])
    assert train_adapters(RUN, tmp_path / "run", cut, 3)[0] == losses[2:]


def test_a_run_starts_from_adapters(tmp_path: Path) -> None:
    """Fault adapters-started-stale: it trains on from their fp32 weights, with new moments, in any layout."""
    base = base_of(tmp_path / "base")
    _, _, trained = train_adapters(RUN, tmp_path / "first", base, 2)
    first = tmp_path / "first/checkpoints/step_00000002"
    second = replace(RUN, adapter=replace(SOME, init_from=str(first)))
    _, notes, begun = train_adapters(second, tmp_path / "begun", base, 0)
    assert notes[1:] == [f"started from the weights of {base}, step 0", f"started from the adapters of {first}, step 0"]
    assert all(torch.equal(begun[name], trained[name]) for name in begun if name.startswith("main."))
    assert not any(begun[name].any() for name in begun if not name.startswith("main."))
    losses, _, _ = train_adapters(second, tmp_path / "one", base, 3, "fp32")
    again, notes, _ = train_adapters(second, tmp_path / "one", base, 4, "fp32")
    assert notes[1].startswith("resumed step 3")
    for layout in (replace(second, tp=2, sequence_parallel=True), replace(second, pp=2, dp=2, zero_stage=2)):
        (found, *_), *_ = run_ranks(layout.world, train_adapters, layout, tmp_path / name(layout), base, 4, "fp32")
        assert found == pytest.approx(losses + again, rel=1e-6)


def test_adapters_that_do_not_fit_are_no_start(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    train_adapters(replace(RUN, trainable=("*.lora_*", "norm.*")), tmp_path / "first", base, 1)
    first = tmp_path / "first/checkpoints/step_00000001"

    def said(base: Path = base, **options: Any) -> str:
        adapter = replace(SOME, **{"init_from": str(first), **options})
        with pytest.raises(CheckpointError) as caught:
            train_adapters(replace(RUN, adapter=adapter), tmp_path / "run", base, 1)
        return str(caught.value)

    assert "does not fit this run (checkpoint | run): adapter.rank (4 | 5), the scale s (4 | 3.57771): give" in said(
        rank=5
    )
    assert "(checkpoint | run): the scale s (4 | 2): give adapter.rank, alpha, rslora and dora as" in said(rslora=False)
    named = "does not fit this run; adapter.targets and train.trainable must name what was trained there"
    assert said(targets=("q", "v", "o")).count("lora") == 16
    # The norm was trained there: to leave it out would be another function.
    assert f"{named} (checkpoint | run):\n  main.norm.weight: [48] | unknown" in said()
    assert "its adapters are of another base" in said(base_of(tmp_path / "other", seed=2))
    assert "it holds no adapters" in said(init_from=str(base))
    free = replace(RUN, adapter=replace(SOME, init_from=str(first)), trainable=("*.lora_*", "*norm*"))
    _, _, weights = train_adapters(free, tmp_path / "free", base, 0)
    with Reader(first, read_manifest(first)) as reader:
        assert torch.equal(weights["main.norm.weight"].view(-1), reader.tensor("main.norm.weight"))


def test_a_base_may_lack_the_factors_and_nothing_else(tmp_path: Path) -> None:
    tied = replace(LLAMA, tie_word_embeddings=True)
    base = base_of(tmp_path / "base", replace(tied, tie_word_embeddings=True))
    with pytest.raises(CheckpointError, match=r"head.weight: missing") as caught:
        train_adapters(RUN, tmp_path / "run", base, 1)
    assert "lora" not in str(caught.value)


TIED = replace(LLAMA, tie_word_embeddings=True)


def merge_error(folder: Path) -> float:
    """The largest error of merged weights, in roundings of fp32 of their terms. Nothing without an adapter changes."""
    base = base_of(folder / "base", TIED)
    train_adapters(replace(RUN, model=TIED), folder / "run", base, 2)
    adapted = folder / "run/checkpoints/step_00000002"
    merged = folder / "merged"
    files.merge(files.Merge(adapted, base, merged))
    largest = 0.0
    readers = [Reader(path, read_manifest(path)) for path in (base, adapted, merged)]
    names = [key for key in readers[0].manifest.tensors if key.startswith("main.")]
    assert sorted(readers[2].manifest.tensors) == names
    for key in names:
        weight, found = (reader.tensor(key) for reader in (readers[0], readers[2]))
        matrix = key.removesuffix(".weight")
        if f"{matrix}.lora_a" not in readers[1].manifest.tensors:
            assert torch.equal(weight, found), key
            continue
        a, b = (readers[1].tensor(f"{matrix}.lora_{kind}").double() for kind in "ab")
        exact = weight.double() + SOME.scale * b @ a
        assert (exact - weight).abs().max() > 1e-4
        errors = (found.double() - exact).abs() / (weight.abs() + SOME.scale * b.abs() @ a.abs())
        largest = max(largest, errors.max().item() / 2**-24)
    return largest


def test_merged_weights_are_sums_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults merge-rounded-twice and merge-changes-tied-head. A planted sum in bf16 is seen."""
    assert merge_error(tmp_path / "right") < 8

    def in_bf16(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        return (weight.bfloat16() + scale * b.bfloat16() @ a.bfloat16()).float()

    monkeypatch.setattr(files, "merged", in_bf16)
    assert merge_error(tmp_path / "planted") > 1000


@pytest.mark.parametrize("target", ["head", "embedding", "embed_tokens"])
@pytest.mark.parametrize("model", [LLAMA, TIED], ids=["untied", "tied"])
def test_embedding_and_head_take_no_adapter(model: ModelConfig, target: str) -> None:
    """Fault merge-changes-tied-head: an adapter of one of them would change the other too."""
    said = build(Layout(model, adapter=AdapterConfig(rank=2, targets=("q", target))))
    assert said.startswith(f"adapter.targets {target}: matches no matrix of the model; its matrices are called ")


# What cannot be


@pytest.mark.parametrize(
    ("adapter", "trainable", "said"),
    [
        (AdapterConfig(alpha=3.0), (), "adapter.alpha=3.0, adapter.rank=0: there is no adapter"),
        (ALL, ("norm.*",), "train.trainable=norm.*, adapter.rank=3: the patterns leave adapters frozen"),
        (replace(ALL, dropout=1.0), (), "adapter.dropout=1.0: must be at least 0 and below 1"),
        (replace(DROPPED, dora=True), (), "adapter.dora=true, adapter.dropout=0.25: magnitudes scale the whole"),
        (AdapterConfig(dora=True), (), "adapter.dora=true, adapter.rank=0: there is no adapter"),
    ],
)
def test_options_without_effect_are_refused(adapter: AdapterConfig, trainable: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Layout(LLAMA, adapter=adapter, trainable=trainable).config()
    assert str(caught.value).startswith(said)


def build(layout: Layout) -> str:
    """What a rank says when it builds its part."""
    config = layout.config()
    try:
        build_stages(config, make_context(config))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_target_without_a_matrix_is_refused_on_every_rank() -> None:
    wrong = Layout(LLAMA, pp=2, adapter=AdapterConfig(rank=2, targets=("q", "router", "head")))
    text = "adapter.targets router head: matches no matrix of the model; its matrices are called "
    assert run_ranks(2, build, wrong) == [f"{text}down, gate, k, o, q, up, v"] * 2
    assert build(Layout(LLAMA, adapter=AdapterConfig(rank=2, targets=("layers.3.attention.?",)))) == ""
    some = AdapterConfig(rank=2, targets=("layers.*.experts.1.up",))
    assert "matches up of some experts of layers.0.mlp.experts: name all" in build(Layout(MIXTRAL, adapter=some))
    text = (
        "adapter.dropout=0.25: layers.0.mlp.experts have adapters, which take no dropout; use 0.0, or adapter.targets"
    )
    assert build(Layout(MIXTRAL, adapter=DROPPED)).startswith(text)
    assert build(Layout(MIXTRAL, adapter=replace(DROPPED, targets=("q", "v")))) == ""
    text = "adapter.dora: layers.0.mlp.experts have adapters, which have no magnitudes; leave it out, or name targets"
    assert build(Layout(MIXTRAL, adapter=DORA)).startswith(text)
    assert build(Layout(MIXTRAL, adapter=replace(DORA, targets=("q", "v")))) == ""
