"""Attention residuals: as in flash-linear-attention and Inkling 2, and in every layout as in one process."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megapar_models import reference as plain
from megapar_models.counts import WholeModel
from megapar_models.factory import Factory
from megapar_models.families.llama import LLAMA as LLAMA_FAMILY
from megapar_models.families.llama import LlamaStage
from megapar_models.families.mixtral import MIXTRAL as MIXTRAL_FAMILY
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.layer_kind import LayerKind
from megapar_models.reference import Tensors
from megapar_models.streams import AttentionResiduals, DepthAttention
from megapar_tools.plan.parts import LayerPart
from torch import Tensor, nn

from megapar.config.model_options import ModelConfig
from megapar.declare import context
from megapar.declare.params import ZEROS
from megapar.declare.sharding import Sharding
from megapar.pipeline.schedules import SCHEDULES
from megapar.step.step import train_step
from tests.support import tiny_models
from tests.support.distributed import run_ranks
from tests.support.grid import LLAMA, MIXTRAL, SAMPLES, Layout, make_state, micro_batches, of
from tests.support.plans import PARTS
from tests.support.sweeps import slow_but
from tests.support.width import computes_as_its_reference, sent_over_pp, trains_as_one_process

RULE = AttentionResiduals(layers_per_block=2, eps=1e-3)
INKLING = replace(RULE, layers_per_block=3, weighted=False, normed_values=True, scale=48**-0.5)


class DepthStage(LlamaStage):
    """Three blocks of layers, of which the last has one layer. Layer 2, which begins a block, has no mixer."""

    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        if number == 2:
            kind = replace(kind, mixer="none", rotary=None)
        return RULE.in_layer(kind, number, model.hidden_size)


class DeepMixtureStage(MixtralStage[MixtralModel]):
    """In the form of Inkling 2."""

    @classmethod
    def layer_kind(cls, model: MixtralModel, number: int) -> LayerKind:
        return INKLING.in_layer(super().layer_kind(model, number), number, model.hidden_size)


def plain_mix(rule: AttentionResiduals, tensors: Tensors, name: str, sums: list[Tensor]) -> Tensor:
    """The weighted sum of the sums of blocks, by the formula of arXiv 2603.15031."""
    query, norm = tensors[f"{name}.query"], tensors.get(f"{name}.norm.weight", torch.ones(()))
    normed = [v / (v.square().mean(-1, keepdim=True) + rule.eps).sqrt() * norm for v in sums]
    scores = torch.stack([((key * query).sum(-1) * rule.scale).exp() for key in normed])
    values = normed if rule.normed_values else sums
    return sum(weight[..., None] * v for weight, v in zip(scores / scores.sum(0), values, strict=True))


def plain_logits(rule: AttentionResiduals, mlp: Callable[..., Tensor], model: Any, *given: Any) -> Tensor:
    """Logits in plain PyTorch. `outputs` are those of all branches by block, the embedding first."""
    tensors, tokens_bs = given
    outputs = [[tensors["embedding.weight"][tokens_bs]]]

    def branch(name: str, number: int, part: Callable[..., Tensor], opens: bool) -> None:
        sums = [sum(of_block) for of_block in outputs]
        read = sums[0] if len(sums) == 1 else plain_mix(rule, tensors, f"layers.{number}.{name}_stream", sums)
        normed = plain.rms_norm(model, tensors, f"layers.{number}.{name}_norm", read)
        y = part(model, tensors, f"layers.{number}.{name}", normed)
        outputs.append([y]) if opens else outputs[-1].append(y)

    for number in range(5):
        begins = number % rule.layers_per_block == 0
        has_mixer = f"layers.{number}.attention.q.weight" in tensors
        if has_mixer:
            branch("attention", number, plain.attention, begins)
        branch("mlp", number, mlp, begins and not has_mixer)
    ended = plain_mix(rule, tensors, "stream_end", [sum(of_block) for of_block in outputs])
    return plain.rms_norm(model, tensors, "norm", ended) @ tensors["head.weight"].t()


REFERENCE = partial(plain_logits, RULE, plain.mlp)
OF_MIXTURE = partial(plain_logits, INKLING, partial(plain.mixture, mlp=plain.mlp))
FAMILY = replace(LLAMA_FAMILY, name="depth", stage=DepthStage, reference=REFERENCE)
MIXTURE_FAMILY = replace(MIXTRAL_FAMILY, name="depth_mixture", stage=DeepMixtureStage, reference=OF_MIXTURE)
PLAIN = replace(LLAMA, attention_bias=False, qk_norm=False)
MODEL = replace(PLAIN, family=f"{__name__}:FAMILY", num_hidden_layers=5)
MIXTURE = replace(of(MIXTRAL, layers=5), family=f"{__name__}:MIXTURE_FAMILY")


def with_random_weights(rule: AttentionResiduals) -> tuple[DepthAttention, list[Tensor]]:
    """Attention over four sums of width 20, and its inputs and parameters."""
    torch.manual_seed(0)
    factory = Factory(Sharding.of(context.single(), torch.float32), ZEROS, ZEROS)
    ours = DepthAttention("end", rule, 4, 20, factory)
    for param in ours.parameters():
        nn.init.normal_(param)
    return ours, [*(torch.randn(5, 2, 20, requires_grad=True) for _ in range(4)), *ours.parameters()]


def assert_same(found: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    """Numbers and gradients are the same."""
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weights).sum(), leaves)
    for grad, of_theirs in zip(gradients, torch.autograd.grad((expected * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(grad, of_theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_attention_over_the_depth_is_that_of_flash_linear_attention() -> None:
    """Its plain reference."""
    naive = pytest.importorskip("fla.ops.attnres.naive", reason="not run: needs flash-linear-attention")
    ours, leaves = with_random_weights(RULE)
    expected = naive.naive_attnres(ours.query, leaves[:4], ours.weight, rms_eps=RULE.eps)
    assert_same(ours(leaves[:4]), expected, leaves)


@pytest.mark.slow
def test_attention_over_the_depth_is_that_of_inkling_2_in_transformers() -> None:
    name = "transformers.models.inkling2.modeling_inkling2"
    module = pytest.importorskip(name, reason="not run: needs transformers")
    ours, leaves = with_random_weights(replace(INKLING, eps=1e-6, scale=20**-0.5))
    theirs = module.Inkling2BlockAttentionResidual(SimpleNamespace(hidden_size=20))
    theirs.query = ours.query
    (expected,) = theirs(torch.stack(leaves[:3], -2), leaves[3])
    assert_same(ours(leaves[:4]), expected, leaves)


@pytest.mark.parametrize("model", [MODEL, MIXTURE], ids=["kimi_k3", "inkling2"])
def test_models_with_attention_residuals_compute_what_they_say(model: ModelConfig) -> None:
    """Loss and every gradient are those of plain PyTorch."""
    computes_as_its_reference(model)


LAYOUTS: dict[str, dict[str, Any]] = {
    "pp 2": {"pp": 2},
    "tp 2 with sp": {"tp": 2, "sequence_parallel": True},
    "tp 2": {"tp": 2},
    "pp 2 with vpp 2": {"pp": 2, "vpp": 2, "schedule": "interleaved"},
    "zero bubble": {"pp": 2, "vpp": 2, "schedule": "zb-v", "dp": 2, "zero_stage": 2},
    "cp 2 with ZeRO-3": {"cp": 2, "zero_stage": 3},
    "ZeRO-3, recomputed": {"dp": 2, "zero_stage": 3, "recompute": "full", "pp": 2, "schedule": "zb-h1"},
    "light": {"pp": 2, "recompute": "light", "schedule": "zb-h1"},
    "selective": {"tp": 2, "sequence_parallel": True, "recompute": "selective", "pp": 2},
    "all but attention, offloaded": {"recompute": "all_but_attention", "offload": 0.5, "pp": 2},
}


@pytest.mark.parametrize("sizes", slow_but([0], LAYOUTS.values()), ids=list(LAYOUTS))
def test_models_with_attention_residuals_train_as_in_one_process(sizes: dict[str, Any]) -> None:
    trains_as_one_process(MODEL, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_models_with_attention_residuals_train_as_in_one_process_in_every_schedule(schedule: str) -> None:
    sizes = {"pp": 2, "vpp": SCHEDULES[schedule].vpp.nearest_to(2), "schedule": schedule}
    trains_as_one_process(MODEL, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"dp": 2, "ep": 2}, {"dp": 2, "ep": 2, "pp": 2, "recompute": "full"}], ids=str)
def test_attention_residuals_go_beside_experts_dealt_to_ranks(sizes: dict[str, Any]) -> None:
    trains_as_one_process(MIXTURE, sizes)


@pytest.mark.slow
@pytest.mark.parametrize(("partition", "sums"), [((2, 3), 2), ((3, 2), 3), ((1, 4), 2)], ids=str)
def test_the_sums_of_finished_blocks_cross_a_cut(partition: Any, sums: int) -> None:
    """With that of the block which the cut divides, or which the layer behind the cut finishes: as planned."""
    layout = Layout(MODEL, pp=2, partition=partition, micro_batch_size=3)
    config = layout.config()
    nbytes = 4 * MODEL.hidden_size * SAMPLES * layout.length
    recording = PARTS.recording(config, PARTS.context(config, 0), LayerPart(partition[0], recomputed=False))
    assert sums * nbytes == recording.boundary_bytes * SAMPLES // 3 == recording.boundary_gradient_bytes * SAMPLES // 3
    sent = run_ranks(2, sent_over_pp, config)
    assert all(sums * nbytes <= found < 1.01 * sums * nbytes for found in sent)


def test_parameters_and_products_over_the_depth_are_counted() -> None:
    whole, one_sum = (WholeModel(tiny_models.config(model).model) for model in (MIXTURE, of(MIXTRAL, layers=5)))
    # Ten branches, of which the first reads the embedding alone, and the end: a query each.
    assert whole.parameters() - one_sum.parameters() == 10 * MIXTURE.hidden_size
    products = [a - b for a, b in zip(whole.products_of_layers(24), one_sum.products_of_layers(24), strict=True)]
    assert products == [4 * MIXTURE.hidden_size * sources for sources in (2, 2 + 2, 2 + 2, 2 + 3, 3 + 3)]


def test_all_sums_have_one_weight_at_the_start() -> None:
    stage = make_state(Layout(MODEL).config()).stages[0]
    sums = [torch.randn(3, 2, MODEL.hidden_size) for _ in range(4)]
    torch.testing.assert_close(DepthAttention.forward(stage.stream_end, sums), sum(sums) / 4)


@pytest.mark.slow
def test_bf16_models_train_over_the_depth() -> None:
    config = Layout(MODEL).config("bf16")
    state = make_state(config)
    assert math.isfinite(train_step(state, micro_batches(config, state.ctx, 0)).loss)


def test_normalized_values_have_no_weight() -> None:
    with pytest.raises(ValueError, match=r"^AttentionResiduals.weighted, normed_values: no model"):
        replace(RULE, normed_values=True)
