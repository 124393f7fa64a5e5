"""QK-clip (optimizer.qk_clip): the largest logits of heads, and the weights scaled by them."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_kernels import block_attention
from megapar_kernels.block_attention import ScoreRule, largest_scores
from megapar_tools.verify import logical
from megapar_tools.verify.logical import held_weights
from torch import Tensor

from megapar.base.errors import ConfigError
from megapar.config.model_options import ModelConfig
from megapar.config.options import OptimizerConfig
from megapar.step.state import TrainState
from megapar.step.step import train_step
from megapar.train.checkpoints import find, resume
from megapar.train.saver import Saver
from tests.support import program, tiny_models
from tests.support.distributed import run_ranks
from tests.support.grid import (
    GPT,
    LATENT,
    LLAMA,
    MIXTRAL,
    ONE_KV_HEAD,
    STRADDLING,
    Layout,
    alone,
    make_state,
    micro_batches,
)
from tests.support.sweeps import slow_but

GROUPED = replace(LLAMA, qk_norm=False)  # with biases of q, k and v
HEADS_OF_LAYERS = replace(GROUPED, family="tests.test_width_heads:UNNORMED_FAMILY")
SHARED_KEY = replace(ONE_KV_HEAD, qk_norm=False)
CAPPED = tiny_models.small(
    "gemma2", 48, 4, 76, num_key_value_heads=2, head_dim=10, sliding_window=7, initializer_range=0.1
)
ADAMW = OptimizerConfig(lr=5e-2, eps=1e-2)
MUON = OptimizerConfig(name="muon", lr=2e-3, eps=1e-2)


def state_of(layout: Layout, limit: float, options: OptimizerConfig = ADAMW, precision: str = "fp32") -> TrainState:
    config = layout.config(precision)
    names = ("zero_stage", "shard_ranks", "bucket_mb", "main_weights", "moments")
    of_layout = {name: getattr(config.optimizer, name) for name in names}
    options = replace(options, schedule="constant", qk_clip=limit, **of_layout)
    return make_state(replace(config, optimizer=options))


def step(state: TrainState, number: int, packed: bool = False) -> tuple[float, Tensor]:
    """Train a step. Returns its largest logit, and the table of those of heads."""
    seen: list[Tensor] = []
    update = state.optimizer.step

    def note(lr: float, clip: Tensor, skip: Tensor, logits: Tensor) -> None:
        seen.append(logits.clone())
        update(lr, clip, skip, logits)

    state.optimizer.step = note  # type: ignore[method-assign, assignment]
    result = train_step(state, micro_batches(state.config, state.ctx, number, packed))
    state.optimizer.step = update  # type: ignore[method-assign]
    state.weights.wait()
    assert result.largest_logit == seen[0].amax()
    return result.largest_logit, seen[0]


def train(layout: Layout, limit: float, options: OptimizerConfig = ADAMW, steps: int = 3) -> dict[str, Any]:
    state = state_of(layout, limit, options)
    tables = [step(state, number, layout.packed)[1] for number in range(steps)]
    return {"tables": tables, "weights": held_weights(state)}


@cache
def limit_of(model: ModelConfig, packed: bool = False) -> float:
    """A limit that some heads exceed in the first step, and others do not."""
    table = train(Layout(model, packed=packed, micro_batch_size=12), math.inf, steps=1)["tables"][0]
    return float(table.median())


# The largest scores


@pytest.mark.parametrize("case", ["plain", "window", "documents", "both", "later", "apart", "bf16"])
def test_blocks_find_the_largest_of_all_scores(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest score that causality, window and documents leave, with explicit scores beside it."""
    monkeypatch.setattr(block_attention, "_QUERIES", 5)
    monkeypatch.setattr(block_attention, "_KEYS", 4)
    generator = torch.Generator().manual_seed(1)
    dtype = torch.bfloat16 if case == "bf16" else torch.float32
    queries, keys = (9, 23) if case in ("later", "apart") else (23, 23)
    q = torch.randn(2, 6, queries, 8, generator=generator).to(dtype)
    k = torch.randn(2, 2, keys, 8, generator=generator).to(dtype)
    window = 6 if case in ("window", "both") else 0
    documents = None
    scores = q.float() @ k.float().repeat_interleave(3, 1).mT * 0.7
    position, key = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    seen = (key <= position) if case != "apart" else torch.ones(queries, keys, dtype=torch.bool)
    if window:
        seen = seen & (key > position - window)
    if case in ("documents", "both"):
        documents = torch.tensor([[0] * 10 + [1] * 13, [2] * 3 + [3] * 20])
        seen = (seen & (documents[:, :, None] == documents[:, None]))[:, None]
    expected = scores.masked_fill(~seen, -math.inf).amax((0, 2, 3))
    rule = ScoreRule(0.7, cap=2.0)
    found = largest_scores(q, k, rule, causal=case != "apart", window=window, documents_bs=documents)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert found.max() > rule.cap, "the cap comes after"


# Layouts

LAYOUTS = [
    Layout(
        STRADDLING, tp=2, cp=2, zero_stage=2, micro_batch_size=3
    ),  # a key/value head on two ranks, whose query heads differ
    Layout(GROUPED, pp=2, dp=2, zero_stage=3, recompute="full", micro_batch_size=2),
    Layout(LATENT, tp=2, dp=2),
    Layout(GROUPED, cp=2, cp_attention="ring", dp=2, zero_stage=0, packed=True),
    Layout(GROUPED, tp=2, cp=2, cp_attention="ulysses", sequence_parallel=True, packed=True),
    Layout(CAPPED, cp=2, cp_attention="ulysses", dp=2),
    Layout(GROUPED, cp=4, packed=True, recompute="selective"),
    Layout(MIXTRAL, tp=2, dp=2, ep=2, etp=1, zero_stage=2),
    Layout(SHARED_KEY, tp=4),
    Layout(GPT, pp=2, tp=2, vpp=2, schedule="interleaved", recompute="all_but_attention"),
    Layout(GROUPED, pp=2, dp=2, schedule="zb-h1", shard_ranks=1),
    Layout(HEADS_OF_LAYERS, tp=2, pp=2, zero_stage=2),
]


def name(layout: Layout) -> str:
    sizes = {key: getattr(layout, key) for key in ("tp", "pp", "dp", "cp") if getattr(layout, key) > 1}
    return f"{layout.model.family} " + " ".join(f"{key}{size}" for key, size in sizes.items()) + layout.cp_attention


@cache
def reference(layout: Layout, limit: float, options: OptimizerConfig) -> dict[str, Any]:
    return train(layout, limit, options)


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    slow_but([1, 2], [(layout, optimizer) for layout in LAYOUTS for optimizer in (ADAMW, MUON)]),
    ids=lambda value: name(value) if isinstance(value, Layout) else value.name,
)
def test_logits_and_weights_are_those_of_one_process(layout: Layout, optimizer: OptimizerConfig) -> None:
    """Fault largest-logit-of-a-part: the maximum of each head is that over tp, dp x cp and micro-batches."""
    limit = limit_of(layout.model, layout.packed)
    expected = reference(alone(layout), limit, optimizer)
    ranks = run_ranks(layout.world, train, layout, limit, optimizer)
    for rank in ranks:
        for found, wanted in zip(rank["tables"], expected["tables"], strict=True):
            torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
    first = expected["tables"][0]
    assert (first > limit).any()
    assert (first <= limit).any()
    weights = logical.assemble([rank["weights"] for rank in ranks])
    wanted = logical.assemble([expected["weights"]])
    for tensor in wanted:
        torch.testing.assert_close(weights[tensor], wanted[tensor], rtol=1e-4, atol=2e-5, msg=tensor)


# What is scaled


def scaled_by_hand(before: Mapping[str, Tensor], table: Tensor, model: ModelConfig, limit: float) -> dict[str, Tensor]:
    """The formulas of MuonClip in fp64, for GROUPED and LATENT."""
    found = {name: w.double() for name, w in before.items()}
    for layer, logits in enumerate(table.double()):
        for head in range(model.num_attention_heads):
            prefix = f"layers.{layer}.attention"
            if model is LATENT:
                factor = min(1.0, limit / logits[head].item())
                q, kv = found[f"{prefix}.q_b.weight"], found[f"{prefix}.kv_b.weight"]
                q[18 * head : 18 * head + 12] *= factor**0.5
                q[18 * head + 12 : 18 * head + 18] *= factor
                kv[20 * head : 20 * head + 12] *= factor**0.5
                continue
            group = logits.view(2, 2)[head // 2].max().item()
            factor = min(1.0, limit / group) ** 0.5
            for kind in ("weight", "bias"):
                found[f"{prefix}.q.{kind}"][10 * head : 10 * head + 10] *= factor
                if head % 2 == 0:
                    found[f"{prefix}.k.{kind}"][5 * head : 5 * head + 10] *= factor
    return found


@pytest.mark.parametrize("model", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_rows_are_scaled_by_the_formulas_and_logits_end_at_the_limit(model: ModelConfig) -> None:
    """Fault clip-without-latent-parts. Without a learning rate only the clip changes weights."""
    limit = limit_of(model)
    state = state_of(Layout(model, zero_stage=0), limit, replace(ADAMW, lr=0.0))
    before = logical.assemble([held_weights(state)])
    _, table = step(state, 0)
    after = logical.assemble([held_weights(state)])
    for tensor, wanted in scaled_by_hand(before, table, model, limit).items():
        torch.testing.assert_close(after[tensor].double(), wanted, rtol=1e-6, atol=0, msg=tensor)
    changed = {tensor.rpartition(".")[0] for tensor in after if not torch.equal(after[tensor], before[tensor])}
    assert {tensor.rpartition(".")[2] for tensor in changed} == ({"q_b", "kv_b"} if model is LATENT else {"q", "k"})
    # Layers behind see other hidden states, so only the first layer's logits are those of before, scaled.
    of_first = step(state, 0)[1][0]
    assert (of_first <= limit * (1 + 1e-5)).all()
    again = [step(state, 0)[0] for _ in range(6)]
    assert again[-1] <= limit * (1 + 1e-5)


def test_a_limit_that_no_logit_exceeds_changes_no_bit() -> None:
    """And with 0 nothing is measured."""
    layout = Layout(GROUPED, micro_batch_size=4)
    on, off = state_of(layout, 1e6), state_of(layout, 0.0)
    for number in range(2):
        step(on, number)
        assert train_step(off, micro_batches(off.config, off.ctx, number)).largest_logit is None
    ours, theirs = (logical.assemble([held_weights(state)]) for state in (on, off))
    assert all(torch.equal(ours[tensor], theirs[tensor]) for tensor in ours)
    assert not [key for key, _ in off.stages[0].named_buffers() if "maxima" in key]


@pytest.mark.parametrize("mode", ["selective", "light", "all_but_attention", "full"])
def test_recomputed_attention_is_measured_once(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    measure = block_attention.largest_scores

    def counted(*args: Any, **named: Any) -> Tensor:
        calls.append(1)
        return measure(*args, **named)

    limit = limit_of(GROUPED)  # before, because it measures too
    monkeypatch.setattr("megapar.context_parallel.whole.largest_scores", counted)
    shown = train(Layout(GROUPED, recompute=mode, micro_batch_size=4), limit, steps=2)
    assert len(calls) == 2 * 3 * GROUPED.num_hidden_layers  # steps, micro-batches and layers
    plain = train(Layout(GROUPED, micro_batch_size=4), limit, steps=2)
    ours, theirs = (logical.assemble([result["weights"]]) for result in (shown, plain))
    assert all(torch.equal(ours[tensor], theirs[tensor]) for tensor in ours)


# State in other places


@pytest.mark.parametrize("kind", ["fp32", "remainder", "offload"])
def test_main_weights_of_16_bit_models_are_scaled(kind: str) -> None:
    """Each kind of main weights. The parameters are these, rounded."""
    layout = Layout(GROUPED, main_weights="remainder" if kind == "remainder" else "fp32")
    options = replace(ADAMW, lr=0.0, weight_decay=0.0, offload=0.5 if kind == "offload" else 0.0)
    state = state_of(layout, limit_of(GROUPED), options, "bf16")
    before = main_weights(state)
    _, table = step(state, 0)
    assert (table > limit_of(GROUPED)).any()
    for item in state.optimizer.slices():
        part = item.param.detach().view(-1)[item.start : item.stop]
        if kind == "remainder":  # halfway it rounds away from zero
            torch.testing.assert_close(part, item.main.bfloat16(), rtol=2**-7, atol=0)
        else:
            assert torch.equal(part, item.main.bfloat16()), item.spec.name
    after = main_weights(state)
    for tensor, wanted in scaled_by_hand(before, table, GROUPED, limit_of(GROUPED)).items():
        torch.testing.assert_close(after[tensor].double(), wanted, rtol=1e-6, atol=0, msg=tensor)


def main_weights(state: TrainState) -> dict[str, Tensor]:
    """Those of each tensor of one process. With offload the device has a part of a parameter, and the host the rest."""
    flat: dict[str, list[Tensor]] = {}
    specs = {}
    for item in state.optimizer.slices():
        flat.setdefault(item.spec.name, []).append(item.main.clone())
        specs[item.spec.name] = item.spec
    return {
        piece.name: torch.cat(flat[key])[first:last].view(piece.shape)
        for key, spec in specs.items()
        for piece, first, last in spec.segments()
    }


def test_an_update_that_is_left_out_scales_nothing() -> None:
    state = state_of(Layout(GROUPED), 0.01)
    before = logical.assemble([held_weights(state)])
    state.failed.fill_(True)
    step(state, 0)
    after = logical.assemble([held_weights(state)])
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)


def test_a_resumed_run_goes_on_bitwise(tmp_path: Path) -> None:
    layout, limit = Layout(GROUPED), limit_of(GROUPED)
    state = state_of(layout, limit)
    step(state, 0)
    with Saver(state, tmp_path) as saver:
        saver.save(state)
    step(state, 1)
    again = state_of(layout, limit)
    resume(again, tmp_path, find(again.config, tmp_path, again.ctx))
    step(again, 1)
    ours, theirs = (logical.assemble([held_weights(x)]) for x in (state, again))
    assert all(torch.equal(ours[tensor], theirs[tensor]) for tensor in ours)


# What is refused


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model.qk_norm",), "norms queries and keys, so to scale their weights changes no logit; use 0"),
        (("--adapter.rank", "2"), "the weights of its queries and keys would stay as they are"),
        (("--train.trainable", "layers.*"), "the weights of its queries and keys would stay as they are"),
    ],
)
def test_what_would_not_change_logits_is_refused(flags: tuple[str, ...], said: str, tmp_path: Path) -> None:
    ended = program.run("--optimizer.qk_clip", "100", *flags, cwd=tmp_path)
    assert ended.code == ConfigError.exit_code, ended.err
    assert said in ended.err
