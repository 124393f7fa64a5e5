"""Gemma (arXiv 2403.08295): Llama with embeddings times sqrt(hidden_size), norms times 1 + weight, and a gate of GELU.

The names of the weights are those of Llama (megapar_models.families.llama).

At Hugging Face: gemma.
"""

import math
from dataclasses import dataclass
from typing import Any

from typing_extensions import TypeVar

from megapar_models.families.llama import MLP_MODULES, MODULES_BUT_MLP, SAME_FIELDS, TIED
from megapar_models.family import Family, HuggingFace, ModelType, Raw
from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.norms import NormRule
from megapar_models.rope import factor_warnings, read_rope, scaling_problems, write_rope
from megapar_models.rotary import Rotary
from megapar_models.rotary_options import RotaryModel
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


FIELDS = {name: name for name in (*SAME_FIELDS, "attention_bias")}
DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "head_dim": 256,
}
DEFAULTS |= {"attention_bias": False, "hidden_act": "gelu_pytorch_tanh"}
ACTIVATIONS = ("gelu_pytorch_tanh", "silu", "relu2")


def bidirectional(raw: Raw) -> list[str]:
    """A problem if attention reads later tokens too."""
    if raw.get("use_bidirectional_attention"):
        return ["use_bidirectional_attention=true is not supported; attention is causal"]
    return []


def _read(raw: Raw, _: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding from a config.json; returns option values and problems."""
    values, problems = read_rope(raw, default_theta=10000.0)
    return values, [*problems, *bidirectional(raw)]


def _write(model: GemmaModel, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], **fields, **write_rope(model)}


GEMMA = Family(
    name="gemma",
    stage=GemmaStage,
    activations=ACTIVATIONS,
    options=GemmaModel,
    even_head_dim=True,
    problems=scaling_problems,
    hugging_face=HuggingFace(
        model_types={"gemma": ModelType({"num_key_value_heads": 16, **DEFAULTS}, {"attention_dropout": 0.0})},
        modules=MODULES_BUT_MLP | MLP_MODULES,
        fields=FIELDS,
        # Its first files say gelu and mean the approximation by tanh, and so transformers reads them.
        activations={**{name: name for name in ACTIVATIONS}, "gelu": "gelu_pytorch_tanh"},
        tied=TIED,
        without_effect=("hidden_activation",),  # transformers reads hidden_act
        read=_read,
        write=_write,
        warnings=factor_warnings,
    ),
)
