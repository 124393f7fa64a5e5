"""GLM-4 (arXiv 2406.12793) and GLM-4-0414: Llama with a rotated part of each head, and with norms behind branches too.

Its weights are those of Llama (megapar_models.families.llama). Norms behind branches are attention_output_norm and
mlp_output_norm of each layer.

At Hugging Face: glm, and glm4 for GLM-4-0414.
"""

from dataclasses import dataclass, replace
from typing import Any

from megapar_models.codecs import Written
from megapar_models.families.llama import LLAMA
from megapar_models.family import Codec, Family, ModelType, Raw, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import PartialRotaryModel, Rotary
from megapar_models.rotary_fields import PartialRope
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
        kind = LayerKind(norm=NormRule(model.rms_norm_eps), rotary=Rotary.of(model), qkv_bias=model.attention_bias)
        if model.output_norms:
            return replace(kind, norms="both")
        return kind


class _OutputNorms(Codec):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        return {"output_norms": model_type == "glm4"}, []


def _pairs(model: GlmModel) -> dict[str, Pairs]:
    return dict.fromkeys(("layers.*.attention.q", "layers.*.attention.k"), Pairs(model.head_dim, 0, model.rotary_width))


_FIXED = {"attention_dropout": 0.0, "mlp_bias": False}

GLM = Family(
    name="glm",
    stage=GlmStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=GlmModel,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={
            "glm": ModelType("GlmForCausalLM", fixed=_FIXED),
            "glm4": ModelType("Glm4ForCausalLM", fixed=_FIXED),
        },
        type_of=lambda model: "glm4" if model.output_norms else "glm",
        # transformers takes 151329 for an absent padding token, and refuses one beyond the vocabulary.
        codecs=(PartialRope(factor=0.5, warns=False), _OutputNorms(), Written({"pad_token_id": None})),
        modules={
            **dict.fromkeys(("layers.*.mlp.gate", "layers.*.mlp.up"), "model.layers.*.mlp.gate_up_proj"),
            "layers.*.attention_output_norm": "model.layers.*.post_self_attn_layernorm",
            "layers.*.mlp_output_norm": "model.layers.*.post_mlp_layernorm",
        },
        fields=same("attention_bias"),
        defaults={"rms_norm_eps": 1.5625e-7, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
        pairs=_pairs,
    ),
)
