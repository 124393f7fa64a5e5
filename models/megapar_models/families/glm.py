"""GLM-4 (arXiv 2406.12793) and GLM-4-0414: Llama with a rotated part of each head, and with norms behind branches too.

Its weights are those of Llama (megapar_models.families.llama). Norms behind branches are attention_output_norm and
mlp_output_norm of each layer.

At Hugging Face: glm, and glm4 for GLM-4-0414.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megapar_models.families.llama import ACTIVATIONS, MLP_MODULES, MODULES_BUT_MLP, SAME_FIELDS, TIED
from megapar_models.family import Family, HuggingFace, ModelType
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.partial_rotary import (
    PartialRotaryModel,
    partial_problems,
    partial_rotary,
    read_partial_rope,
    write_partial_rope,
)
from megapar_models.stage import Stage
from megapar_models.tensor_layouts import Pairs


@dataclass(frozen=True)
class GlmModel(PartialRotaryModel):
    """The options of GLM-4."""

    attention_bias: bool = False
    """Biases on the query, key and value projections."""
    output_norms: bool = False
    """Norms of what attention and MLP add to the residual stream (GLM-4-0414 has them)."""


class GlmStage(Stage[GlmModel]):
    """Consecutive GLM-4 layers."""

    @classmethod
    def layer_kind(cls, model: GlmModel, number: int) -> LayerKind:
        kind = LayerKind(norm=NormRule(model.rms_norm_eps), rotary=partial_rotary(model), qkv_bias=model.attention_bias)
        if model.output_norms:
            return replace(kind, norms="both")
        return kind


# Hugging Face

_MODULES = MODULES_BUT_MLP | MLP_MODULES
_MODULES |= dict.fromkeys(("layers.*.mlp.gate", "layers.*.mlp.up"), "model.layers.*.mlp.gate_up_proj")
_MODULES |= {
    "layers.*.attention_output_norm": "model.layers.*.post_self_attn_layernorm",
    "layers.*.mlp_output_norm": "model.layers.*.post_mlp_layernorm",
}
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1.5625e-7, "tie_word_embeddings": False, "initializer_range": 0.02}
_DEFAULTS |= {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True}
_FIXED = {"attention_dropout": 0.0, "mlp_bias": False}


def _read(raw: Mapping[str, Any], model_type: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding and norms from a config.json; returns option values and problems."""
    values, problems = read_partial_rope(raw, 10000.0, 0.5)
    return {**values, "output_norms": model_type == "glm4"}, problems


def _write(model: GlmModel, fields: dict[str, Any]) -> dict[str, Any]:
    # transformers takes 151329 for an absent padding token, and refuses one beyond the vocabulary.
    fields |= {**write_partial_rope(model), "pad_token_id": None}
    if model.output_norms:
        return {"model_type": "glm4", "architectures": ["Glm4ForCausalLM"], **fields}
    return {"model_type": "glm", "architectures": ["GlmForCausalLM"], **fields}


def _pairs(model: GlmModel) -> dict[str, Pairs]:
    pairs = Pairs(model.head_dim, 0, model.rotary_width)
    return {"layers.*.attention.q": pairs, "layers.*.attention.k": pairs}


GLM = Family(
    name="glm",
    stage=GlmStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=GlmModel,
    even_head_dim=True,
    problems=partial_problems,
    hugging_face=HuggingFace(
        model_types=dict.fromkeys(("glm", "glm4"), ModelType(_DEFAULTS, _FIXED)),
        modules=_MODULES,
        fields={name: name for name in (*SAME_FIELDS, "attention_bias")},
        activations=ACTIVATIONS,
        tied=TIED,
        pairs=_pairs,
        read=_read,
        write=_write,
    ),
)
