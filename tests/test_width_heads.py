"""A family outside megapar whose layers have heads and widths of their own, as Laguna, MiMo-V2 and Step-3.5 have."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megapar_models import reference as plain
from megapar_models.attention import Attention
from megapar_models.counts import WholeModel
from megapar_models.families.llama import LLAMA as LLAMA_FAMILY
from megapar_models.families.llama import LlamaStage
from megapar_models.layer_kind import HeadSizes, LayerKind
from megapar_models.reference import Tensors, linear
from megapar_models.registry import kinds_of, validate
from megapar_models.rotary import Rotary
from megapar_tools.plan.memory import reports
from torch import Tensor

from megapar.base.errors import ConfigError
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, OptimizerConfig, ParallelConfig
from megapar.declare import context
from tests.support import tiny_models
from tests.support.built_plan import built_report
from tests.support.grid import LENGTH, LLAMA, Layout
from tests.support.plans import PARTS
from tests.support.rules import attended, check_against_plain, rotated
from tests.support.sweeps import slow_but
from tests.support.width import trains_as_one_process

WINDOW, ROTATED, FACTOR, THETA = 5, 4, 0.707, 300.0
# Fewer key/value heads than two tensor ranks, and wider values; a key/value head that two of them share, and narrower
# values; one head for each of two tensor ranks.
ONE_KEY, BETWEEN, EVEN = HeadSizes(6, 1, 8, 12), HeadSizes(6, 3, 12, 8), HeadSizes(2, 2, 10, 6)
WIDTHS = (76, 20, 76, 36)


class OfLayersStage(LlamaStage):
    """Layer 0 is as the model says. The others have heads, widths, tables, gates and sinks of their own."""

    local_window = 0
    normed = True

    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        normed = replace(kind, qk_norm=cls.normed)
        local = Rotary(THETA, 12, inside_documents=True)
        kinds = [
            kind,
            replace(normed, head_sizes=ONE_KEY, mlp_width=WIDTHS[1], rotary=Rotary(THETA, ROTATED)),
            replace(normed, head_sizes=BETWEEN, rotary=local, qk_norm_after_rotary=True, head_gate=True),
            replace(kind, head_sizes=EVEN, mlp_width=WIDTHS[3], output_gate=True, gate_activation="softplus"),
        ]
        kinds[1] = replace(kinds[1], window=cls.local_window, sinks=True, value_factor=FACTOR)
        kinds[2] = replace(kinds[2], gate_activation="softplus", sizes_from="model.head_dim")
        return kinds[number % 4]


class WindowStage(OfLayersStage):
    local_window = WINDOW


class UnnormedStage(WindowStage):
    """The same without norms of queries and keys, as optimizer.qk_clip needs it."""

    normed = False


FAMILY = replace(LLAMA_FAMILY, name="heads of layers", stage=OfLayersStage)
WINDOW_FAMILY = replace(FAMILY, stage=WindowStage)
UNNORMED_FAMILY = replace(FAMILY, stage=UnnormedStage)
MODEL = replace(LLAMA, family="tests.test_width_heads:FAMILY", qk_norm=False)
WINDOW_MODEL = replace(MODEL, family="tests.test_width_heads:WINDOW_FAMILY")
UNNORMED = replace(MODEL, family="tests.test_width_heads:UNNORMED_FAMILY")

CASES: dict[str, tuple[ModelConfig, dict[str, object]]] = {
    "tp 2": (WINDOW_MODEL, {"tp": 2, "packed": True, "recompute": "selective"}),
    "tp 2, sequence parallel": (WINDOW_MODEL, {"tp": 2, "sequence_parallel": True, "zero_stage": 2}),
    "cp 2 by gather": (MODEL, {"cp": 2, "packed": True}),
    "cp 2 in a ring": (MODEL, {"cp": 2, "cp_attention": "ring", "packed": True}),
    "cp 2 by ulysses": (WINDOW_MODEL, {"cp": 2, "cp_attention": "ulysses", "packed": True}),
    "pp 2 with vpp 2": (WINDOW_MODEL, {"pp": 2, "vpp": 2, "schedule": "interleaved", "recompute": "full"}),
    "ZeRO-3": (WINDOW_MODEL, {"dp": 2, "zero_stage": 3}),
    "tp 2 and cp 2 with ZeRO-3": (MODEL, {"tp": 2, "cp": 2, "sequence_parallel": True, "zero_stage": 3}),
    "Muon over tp 2": (WINDOW_MODEL, {"tp": 2, "optimizer": "muon"}),
}


@pytest.mark.parametrize(("model", "sizes"), slow_but([0, 4], CASES.values()), ids=list(CASES))
def test_it_trains_as_one_process(model: ModelConfig, sizes: dict[str, object]) -> None:
    trains_as_one_process(model, sizes)


# What it computes


def mixed_plainly(model: ModelConfig, tensors: Tensors, number: int, x: Tensor) -> Tensor:
    name = f"layers.{number}.attention"
    if number == 0:
        return plain.attention(model, tensors, name, x)
    sizes, other = (ONE_KEY, BETWEEN, EVEN)[number - 1], replace(model, rope_theta=THETA)
    q, k, v = (
        linear(tensors, f"{name}.{letter}", x).unflatten(-1, (heads, width)).transpose(1, 2)
        for letter, heads, width in (
            ("q", sizes.query_heads, sizes.head_dim),
            ("k", sizes.kv_heads, sizes.head_dim),
            ("v", sizes.kv_heads, sizes.value_dim),
        )
    )
    position = torch.arange(x.shape[1])
    seen = position[:, None] >= position
    sinks, gates = None, torch.ones(())
    weights = [tensors.get(f"{name}.{letter}_norm.weight") for letter in "qk"]
    if number == 1:
        q, k = (F.rms_norm(y, y.shape[-1:], w, model.rms_norm_eps) for y, w in zip((q, k), weights, strict=True))
        q, k = (rotated(other, y, ROTATED) for y in (q, k))
        v, sinks = v * FACTOR, tensors[f"{name}.sinks"]
        seen = seen & (position > position[:, None] - WINDOW)
    if number == 2:
        q, k = (rotated(other, y, 12) for y in (q, k))
        q, k = (F.rms_norm(y, y.shape[-1:], w, model.rms_norm_eps) for y, w in zip((q, k), weights, strict=True))
        gates = F.softplus(linear(tensors, f"{name}.gate", x)).repeat_interleave(sizes.value_dim, -1)
    if number == 3:
        q, k = (rotated(model, y, 10) for y in (q, k))
        gates = F.softplus(linear(tensors, f"{name}.gate", x))
    y = attended(q, k, v, seen, sinks, sizes.head_dim**-0.5, 0.0)
    return linear(tensors, f"{name}.o", y * gates)


def logits(model: ModelConfig, tensors: Tensors, tokens_bs: Tensor) -> Tensor:
    x = tensors["embedding.weight"][tokens_bs]
    for number in range(4):
        normed = plain.rms_norm(model, tensors, f"layers.{number}.attention_norm", x)
        x = x + mixed_plainly(model, tensors, number, normed)
        normed = plain.rms_norm(model, tensors, f"layers.{number}.mlp_norm", x)
        x = x + plain.mlp(model, tensors, f"layers.{number}.mlp", normed)
    return plain.rms_norm(model, tensors, "norm", x) @ tensors["head.weight"].t()


def test_it_computes_what_it_says() -> None:
    """The loss and every gradient."""
    check_against_plain(WINDOW_MODEL, logits)


# What is counted and planned


def test_parameters_and_flops_are_those_of_each_layer() -> None:
    whole, h = WholeModel(tiny_models.config(MODEL).model), MODEL.hidden_size
    heads = [HeadSizes(4, 2, 10, 10), ONE_KEY, BETWEEN, EVEN]
    matrices = []
    for s, width, gates in zip(heads, WIDTHS, (0, 0, BETWEEN.query_heads, 12), strict=True):
        rows = (s.query_heads + s.kv_heads) * s.head_dim + (s.query_heads + s.kv_heads) * s.value_dim + gates
        matrices.append(h * rows + 3 * h * width)
    scores = [LENGTH // 2 * s.query_heads * (s.head_dim + s.value_dim) for s in heads]
    costs = whole.layer_costs(LENGTH)
    small = [cost - matrix - score for cost, matrix, score in zip(costs, matrices, scores, strict=True)]
    biases = [s.query_heads * s.head_dim + s.kv_heads * (s.head_dim + s.value_dim) for s in heads]
    biases[2] += BETWEEN.query_heads
    biases[3] += 12
    norms = [2 * h, 2 * h + 2 * 8 + 6, 2 * h + 2 * 12, 2 * h]
    assert small == [bias + norm for bias, norm in zip(biases, norms, strict=True)]
    head = h * MODEL.vocab_size
    assert whole.flops_per_token(LENGTH) == 6 * (sum(matrices) + sum(scores) + head)
    assert whole.layer_kinds(LENGTH) == [0, 1, 2, 3]


PLANNED = {
    "tp 2": Layout(WINDOW_MODEL, tp=2, sequence_parallel=True, pp=2),
    "ZeRO-3": Layout(WINDOW_MODEL, tp=2, dp=2, zero_stage=3, recompute="selective"),
    "ring": Layout(MODEL, cp=2, cp_attention="ring", pp=2),
    "ulysses": Layout(WINDOW_MODEL, cp=2, cp_attention="ulysses", recompute="light"),
}


@pytest.mark.parametrize("layout", slow_but([0], PLANNED.values()), ids=list(PLANNED))
def test_a_plan_has_the_bytes_of_each_layer(layout: Layout) -> None:
    config = layout.config("bf16")
    config = replace(config, kernels=replace(config.kernels, backend="torch"))
    for report, (first, *_) in reports(config, PARTS).items():
        assert replace(report, stages="") == replace(built_report(config, first), stages="")


# What is refused


def refused(
    model: ModelConfig, world_size: int = 0, optimizer: Mapping[str, Any] | None = None, **parallel: Any
) -> str:
    config = Config(model, parallel=ParallelConfig(**parallel), optimizer=OptimizerConfig(**(optimizer or {})))
    config = replace(config, train=replace(config.train, seq_length=LENGTH))
    with pytest.raises(ConfigError) as error:
        validate(config, world_size or config.parallel.tp * config.parallel.cp)
    return str(error.value)


def test_what_tp_does_not_divide_is_refused_by_layer() -> None:
    said = refused(replace(MODEL, num_attention_heads=4), tp=4).splitlines()
    assert said == [
        "model.family=tests.test_width_heads:FAMILY, parallel.tp=4: layer 1 has 6 query heads, which must divide by "
        "tp; tp may be 1 or 2"
    ]


class WideStage(OfLayersStage):
    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        sizes, width = ((None, 0), (HeadSizes(8, 4, 10, 10), 0), (HeadSizes(12, 8, 6, 6), 0), (None, 22))[number]
        kind = LlamaStage.layer_kind(model, number)
        rotary = Rotary(1e4, sizes.head_dim) if sizes else kind.rotary
        return replace(kind, head_sizes=sizes, mlp_width=width, rotary=rotary, sizes_from="model.head_dim")


WIDE_FAMILY = replace(FAMILY, stage=WideStage)


def test_each_thing_that_does_not_fit_has_a_line() -> None:
    wide = replace(MODEL, family="tests.test_width_heads:WIDE_FAMILY")
    assert refused(wide) == (
        "model.head_dim=10: layer 2 has 12 query heads, which must divide by its 8 key/value heads; it may have 1, 2, "
        "3, 4, 6 or 12 key/value heads"
    )


def test_ulysses_deals_the_heads_of_each_layer() -> None:
    said = refused(WINDOW_MODEL, tp=2, cp=2, cp_attention="ulysses")
    assert said.endswith("layer 1 has 6 query heads, and ulysses deals the 3 of a tp rank to cp ranks; cp may be 1")


def test_kinds_know_their_first_layers() -> None:
    deep = replace(WINDOW_MODEL, num_hidden_layers=7)
    assert [*kinds_of(tiny_models.config(deep).model).values()] == [0, 1, 2, 3]


def test_sizes_of_layers_are_those_of_their_modules() -> None:
    stage = tiny_models.build(tiny_models.config(MODEL), context.single())
    assert [stage.layers[str(number)].attention.value_dim for number in range(4)] == [10, 12, 8, 6]
    assert all(isinstance(stage.layers[str(number)].attention, Attention) for number in range(4))
