"""Gemma (arXiv 2403.08295): Llama with embeddings times sqrt(hidden_size), norms times 1 + weight, and a gate of GELU.

The names of the weights are those of Llama (megapar_models.families.llama).

At Hugging Face: gemma.
"""

import math
from dataclasses import dataclass
from typing import Any

from typing_extensions import TypeVar

from megapar_models.families.llama import LLAMA
from megapar_models.family import Codec, Family, ModelType, Raw, like, same
from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary, RotaryModel
from megapar_models.rotary_fields import Rope
from megapar_models.stage import Stage


@dataclass(frozen=True)
class GemmaModel(RotaryModel):
    """The options of Gemma."""

    attention_bias: bool = False
    """Biases of all projections of attention."""


G = TypeVar("G", bound=GemmaModel, default=GemmaModel)


class GemmaStage(Stage[G]):
    """Consecutive Gemma layers."""

    @classmethod
    def layer_kind(cls, model: G, number: int) -> LayerKind:
        return LayerKind(
            norm=NormRule(model.rms_norm_eps, offset=1),
            rotary=Rotary.of(model),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
        )

    @classmethod
    def ends_of(cls, model: G) -> Ends:
        return Ends(embedding_multiplier=math.sqrt(model.hidden_size))


class Causal(Codec):
    """Attention to earlier tokens alone."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        if raw.get("use_bidirectional_attention"):
            return {}, ["use_bidirectional_attention=true is not supported; attention is causal"]
        return {}, []


GEMMA = Family(
    name="gemma",
    stage=GemmaStage,
    activations=("gelu_pytorch_tanh", "silu", "relu2"),
    options=GemmaModel,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={"gemma": ModelType("GemmaForCausalLM", fixed={"attention_dropout": 0.0})},
        codecs=(Rope(), Causal()),
        fields=same("attention_bias"),
        defaults={
            **{"tie_word_embeddings": True, "num_key_value_heads": 16, "head_dim": 256, "attention_bias": False},
            "hidden_act": "gelu_pytorch_tanh",
        },
        # Its first files say gelu and mean the approximation by tanh, and so transformers reads them.
        activations={**same("gelu_pytorch_tanh", "silu", "relu2"), "gelu": "gelu_pytorch_tanh"},
        without_effect=("hidden_activation",),  # transformers reads hidden_act
    ),
)
