"""Rules of attention: against plain PyTorch, and in layouts and forms of context parallelism against one process."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from megapar_models import reference as plain
from megapar_models.families.llama import LLAMA as LLAMA_FAMILY
from megapar_models.families.llama import LlamaStage
from megapar_models.layer_kind import LayerKind, Temperature
from megapar_models.norms import NormRule
from megapar_models.reference import Tensors, heads, linear
from megapar_models.rotary import Rotary
from megapar_tools.verify.batches import four_documents
from torch import Tensor

from megapar.config.model_options import ModelConfig
from tests.support.grid import LLAMA
from tests.support.rules import attended, check_against_plain, rotated
from tests.support.sweeps import slow_but
from tests.support.width import LAYOUTS, trains_as_one_process

SCALE, CAP, WINDOW, ROTATED, TEMPERATURE = 0.5, 0.8, 5, 6, Temperature(0.7, 3)


class RulesStage(LlamaStage):
    """Scores as in gpt-oss and Gemma 2, gates as in Qwen3-Next and LFM3, norms as in OLMo, HunYuan and StableLM."""

    local_window = 0

    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        partial = Rotary(model.rope_theta, ROTATED)
        layer_norm = NormRule(model.rms_norm_eps, "layer", biased=False)
        kinds = [
            replace(kind, sinks=True, attention_scale=SCALE, rotary=partial, out_bias=True, window=cls.local_window),
            replace(kind, score_cap=CAP, qk_norm=True, qk_norm_over="width", temperature=TEMPERATURE),
            replace(kind, output_gate=True, qk_norm=True, qk_norm_after_rotary=True, rotary=partial),
            replace(kind, qk_norm=True, qk_norm_over="each_head", qk_norm_rule=layer_norm, attention_scale=SCALE),
        ]
        kinds[3] = replace(kinds[3], head_gate=True)
        return kinds[number % 4]


class WindowStage(RulesStage):
    """The same with a window in the layer with sinks."""

    local_window = WINDOW


FAMILY = replace(LLAMA_FAMILY, name="rules", stage=RulesStage)
WINDOW_FAMILY = replace(LLAMA_FAMILY, name="window rules", stage=WindowStage)
MODEL = replace(LLAMA, family="tests.test_rules_attention:FAMILY", qk_norm=False)
WINDOW_MODEL = replace(MODEL, family="tests.test_rules_attention:WINDOW_FAMILY")
# Two tp ranks share the key/value head in the middle.
SHARED_HEADS = replace(MODEL, num_attention_heads=6, num_key_value_heads=3, head_dim=8)

CASES = {
    "tp 2": (WINDOW_MODEL, {**LAYOUTS["tp 2"], "packed": True, "recompute": "selective"}),
    "tp 2 with shared heads": (SHARED_HEADS, {"tp": 2, "sequence_parallel": True}),
    "pp 2 with vpp 2": (WINDOW_MODEL, LAYOUTS["pp 2 with vpp 2"]),
    "cp 2 by gather with ZeRO-3": (MODEL, {**LAYOUTS["cp 2 with ZeRO-3"], "packed": True}),
    "cp 2 in a ring": (MODEL, {"cp": 2, "cp_attention": "ring", "packed": True}),
    "cp 2 by ulysses": (WINDOW_MODEL, {"cp": 2, "cp_attention": "ulysses", "packed": True}),
}


@pytest.mark.parametrize(("model", "sizes"), slow_but(range(0, len(CASES), 2), CASES.values()), ids=list(CASES))
def test_attention_by_rules_trains_as_in_one_process(model: ModelConfig, sizes: dict[str, object]) -> None:
    trains_as_one_process(model, sizes)


def mixed_plainly(
    model: ModelConfig, tensors: Tensors, number: int, x: Tensor, documents: Tensor, positions: Tensor
) -> Tensor:
    name = f"layers.{number}.attention"
    q, k, v = (heads(model, tensors, f"{name}.{letter}", x) for letter in "qkv")
    position = torch.arange(x.shape[1])
    seen = (documents[:, :, None] == documents[:, None, :])[:, None] & (position[:, None] >= position)
    eps, d = model.rms_norm_eps, model.head_dim
    weights = {letter: tensors.get(f"{name}.{letter}_norm.weight") for letter in "qk"}
    sinks, scale, cap = None, d**-0.5, 0.0
    if number == 0:
        q, k = rotated(model, q, ROTATED), rotated(model, k, ROTATED)
        sinks, scale = tensors[f"{name}.sinks"], SCALE
        seen = seen & (position < position[:, None] + 1) & (position > position[:, None] - WINDOW)
    if number == 1:
        normed = []
        for letter, y in (("q", q), ("k", k)):
            flat = y.transpose(1, 2).flatten(2)
            flat = F.rms_norm(flat, flat.shape[-1:], weights[letter], eps)
            normed.append(rotated(model, flat.unflatten(2, (-1, d)).transpose(1, 2), d))
        q, k = normed
        q = q * (1 + TEMPERATURE.beta * torch.log(1 + (positions // TEMPERATURE.original)))[:, None, :, None]
        cap = CAP
    if number == 2:
        q = F.rms_norm(rotated(model, q, ROTATED), (d,), weights["q"], eps)
        k = F.rms_norm(rotated(model, k, ROTATED), (d,), weights["k"], eps)
    if number == 3:
        q, k = (F.layer_norm(y, (d,), eps=eps) for y in (q, k))
        q, k = (y * weights[letter].view(-1, 1, d) for letter, y in (("q", q), ("k", k)))  # type: ignore[union-attr]
        q, k = rotated(model, q, d), rotated(model, k, d)
        scale = SCALE
    y = attended(q, k, v, seen, sinks, scale, cap)
    if number == 2:
        y = y * linear(tensors, f"{name}.gate", x).sigmoid()
    if number == 3:
        y = y * linear(tensors, f"{name}.gate", x).sigmoid().repeat_interleave(d, -1)
    return linear(tensors, f"{name}.o", y)


@pytest.mark.parametrize("packed", [False, True])
def test_attention_by_rules_computes_what_it_says(packed: bool) -> None:
    """The loss and every gradient. In packed samples temperatures begin again with each document."""
    starts = four_documents(torch.arange(2), 24) if packed else None
    documents = torch.zeros(2, 24, dtype=torch.int64)
    positions = torch.arange(24).expand(2, 24)
    if starts is not None:
        documents = torch.bucketize(torch.arange(48), starts, right=True).view(2, 24)
        positions = (torch.arange(48) - starts[documents.flatten() - 1]).view(2, 24)

    def logits(model: ModelConfig, tensors: Tensors, tokens_bs: Tensor) -> Tensor:
        x = tensors["embedding.weight"][tokens_bs]
        for number in range(4):
            normed = plain.rms_norm(model, tensors, f"layers.{number}.attention_norm", x)
            x = x + mixed_plainly(model, tensors, number, normed, documents, positions)
            normed = plain.rms_norm(model, tensors, f"layers.{number}.mlp_norm", x)
            x = x + plain.mlp(model, tensors, f"layers.{number}.mlp", normed)
        return plain.rms_norm(model, tensors, "norm", x) @ tensors["head.weight"].t()

    check_against_plain(WINDOW_MODEL, logits, starts=starts)
