"""Rules of layers and of a model's two ends: against plain PyTorch, and in layouts against one process."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from megapar_models.families.llama import LLAMA as LLAMA_FAMILY
from megapar_models.families.llama import LlamaStage
from megapar_models.forward import ForwardContext
from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.norms import NormRule
from megapar_models.reference import Tensors, linear
from torch import Tensor

from megapar.config.model_options import ModelConfig
from megapar.declare import context
from megapar.tensor_parallel.cross_entropy import LogitRule
from tests.support import tiny_models
from tests.support.grid import LLAMA
from tests.support.rules import attention_plainly, check_against_plain
from tests.support.sweeps import slow_but
from tests.support.width import LAYOUTS, trains_as_one_process

MULTIPLIER, RESIDUAL, CAP, LOGITS = 48**0.5, 0.3, 1.5, 0.7


class RulesStage(LlamaStage):
    """Layers as in GPT-NeoX, Cohere, Granite and Apertus, between the ends of Gemma 2 and GPT-J.

    The first has the norms of Nemotron.
    """

    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        layer_norm = NormRule(model.rms_norm_eps, "layer", offset=1)
        plain_norm = replace(layer_norm, offset=0, biased=False, weighted=False)
        biased = replace(kind, mlp_bias=True)
        kinds = [
            replace(biased, parallel="two_norms", norm=layer_norm, mlp="plain", activation="gelu", out_bias=True),
            replace(biased, parallel="one_norm", norm=replace(layer_norm, offset=0, biased=False), activation="relu"),
            replace(kind, residual_multiplier=RESIDUAL, mlp="plain", activation="xielu"),
            replace(kind, norm=plain_norm, norms="both", activation="gelu"),
        ]
        return kinds[number % 4]

    @classmethod
    def last_norm(cls, model: ModelConfig) -> NormRule:
        return NormRule(model.rms_norm_eps, weighted=False)

    @classmethod
    def ends_of(cls, model: ModelConfig) -> Ends:
        return Ends(embedding_multiplier=MULTIPLIER, head_bias=True, logits=LogitRule(LOGITS, CAP))


FAMILY = replace(LLAMA_FAMILY, name="rules", stage=RulesStage)
MODEL = replace(LLAMA, family="tests.test_rules_layers:FAMILY", qk_norm=False)


@pytest.mark.parametrize(
    ("layout", "loss_chunk"), slow_but([0, 2], [("tp 2", 0), ("pp 2 with vpp 2", 5), ("cp 2 with ZeRO-3", 5)])
)
def test_layers_and_ends_by_rules_train_as_in_one_process(layout: str, loss_chunk: int) -> None:
    sizes = {**LAYOUTS[layout], "loss_chunk": loss_chunk, "sequence_parallel": layout == "tp 2"}
    trains_as_one_process(MODEL, sizes)


def norm_plainly(tensors: Tensors, name: str, x: Tensor, eps: float) -> Tensor:
    """LayerNorm, with what it has of weight and bias. That with a bias has 1 + its weight."""
    weight, bias = tensors.get(f"{name}.weight"), tensors.get(f"{name}.bias")
    if bias is not None:
        assert weight is not None
        weight = weight + 1
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def plain_layer(model: ModelConfig, tensors: Tensors, number: int, x: Tensor) -> Tensor:
    name = f"layers.{number}"
    eps = model.rms_norm_eps

    def attention(y: Tensor) -> Tensor:
        return attention_plainly(model, tensors, f"{name}.attention", y)

    def mlp(y: Tensor) -> Tensor:
        act = [F.gelu, F.relu, None, F.gelu][number]
        up = linear(tensors, f"{name}.mlp.up", y)
        if number == 0:
            return linear(tensors, f"{name}.mlp.down", F.gelu(up))
        if number == 2:
            p, n = (F.softplus(tensors[f"{name}.mlp.activation.alpha_{sign}"]) for sign in "pn")
            below = (torch.expm1(torch.clamp(up, max=-1e-6)) - up) * (0.5 + n)
            return linear(tensors, f"{name}.mlp.down", torch.where(up > 0, p * up * up, below) + 0.5 * up)
        assert act is not None
        return linear(tensors, f"{name}.mlp.down", act(linear(tensors, f"{name}.mlp.gate", y)) * up)

    def norm(part: str, y: Tensor) -> Tensor:
        return norm_plainly(tensors, f"{name}.{part}", y, eps)

    if number == 0:
        return x + attention(norm("attention_norm", x)) + mlp(norm("mlp_norm", x))
    if number == 1:
        normed = norm("attention_norm", x)
        return x + attention(normed) + mlp(normed)
    if number == 2:
        weight = tensors[f"{name}.attention_norm.weight"]
        x = x + RESIDUAL * attention(F.rms_norm(x, x.shape[-1:], weight, eps))
        weight = tensors[f"{name}.mlp_norm.weight"]
        return x + RESIDUAL * mlp(F.rms_norm(x, x.shape[-1:], weight, eps))
    x = x + norm("attention_output_norm", attention(norm("attention_norm", x)))
    return x + norm("mlp_output_norm", mlp(norm("mlp_norm", x)))


def plain_logits(model: ModelConfig, tensors: Tensors, tokens_bs: Tensor) -> Tensor:
    x = tensors["embedding.weight"][tokens_bs] * MULTIPLIER
    for number in range(4):
        x = plain_layer(model, tensors, number, x)
    products = F.rms_norm(x, x.shape[-1:], None, model.rms_norm_eps) @ tensors["head.weight"].t() + tensors["head.bias"]
    return CAP * torch.tanh(LOGITS * products / CAP)


@pytest.mark.parametrize("loss_chunk", [0, 7])
def test_layers_and_ends_by_rules_compute_what_they_say(loss_chunk: int) -> None:
    """The loss and every gradient."""
    check_against_plain(MODEL, plain_logits, loss_chunk)


def test_an_embedding_multiplier_is_rounded_to_the_dtype_of_weights() -> None:
    """As Gemma has it: the root of 3072 is 55.5 in bf16, not 55.43."""
    config = tiny_models.config(MODEL)
    stage = tiny_models.build(config, context.single()).bfloat16()
    stage.ends = Ends(embedding_multiplier=math.sqrt(3072))
    batch = tiny_models.batch(config.model)
    found = stage.embed(ForwardContext(batch))
    assert stage.embedding is not None
    assert torch.equal(found, stage.embedding.weight[batch.tokens_bs.t()] * 55.5)


def test_norm_rules_that_contradict_are_refused() -> None:
    with pytest.raises(ValueError, match="about a weight"):
        NormRule(1e-5, weighted=False, cast_first=True)
