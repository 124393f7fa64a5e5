"""OLMoE (arXiv 2409.02060): Mixtral with norms of queries and keys, each over all heads together.

FlexOlmo (arXiv 2507.07024) has norms behind the branches, as OLMo 2.

Weights beyond those of Mixtral (megapar_models.families.mixtral), with d the width of a head:

    layers.N.attention.q_norm.weight    [heads * d]     cut as q
    layers.N.attention.k_norm.weight    [kv heads * d]  cut as k

At Hugging Face: olmoe and flex_olmo.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.families.qwen3_moe import QWEN3_MOE
from megapar_models.family import Codec, Family, ModelType, Raw, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.moe_fields import RoutedExperts
from megapar_models.rotary_fields import Rope


@dataclass(frozen=True)
class OlmoeModel(MixtralModel):
    """The options of OLMoE."""

    attention_bias: bool = False
    """Biases of all projections of attention."""
    norms: Literal["before", "after"] = "before"
    """Norms of the inputs of attention and experts, or of their outputs (FlexOlmo)."""


class OlmoeStage(MixtralStage[OlmoeModel]):
    """Consecutive OLMoE layers."""

    @classmethod
    def layer_kind(cls, model: OlmoeModel, number: int) -> LayerKind:
        return replace(
            super().layer_kind(model, number),
            norms=model.norms,
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            qk_norm=True,
            qk_norm_over="width",
        )


class _Experts(RoutedExperts):
    def refusals(self, model: OlmoeModel) -> Iterator[str]:
        if model.num_attention_heads * model.head_dim != model.hidden_size:
            yield f"model.head_dim={model.head_dim}: in olmoe of transformers the heads are hidden_size wide"


class _Norms(Codec):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        return {"norms": "before" if model_type == "olmoe" else "after"}, []

    def write(self, model: OlmoeModel, fields: dict[str, Any]) -> None:
        if model.norms == "after":
            fields["pad_token_id"] = None  # the default of flex_olmo is one of the published vocabulary


_EXPERTS = _Experts(
    names=same("num_experts", "num_experts_per_tok", "norm_topk_prob", "router_aux_loss_coef"),
    aliases={"num_local_experts": "num_experts"},
    defaults={"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.01},
)
_FLEX = replace(
    _EXPERTS, defaults={**_EXPERTS.defaults, "num_experts": 7, "num_experts_per_tok": 5, "router_aux_loss_coef": 0.01}
)
_FIXED = {"attention_dropout": 0.0, "clip_qkv": None}

OLMOE = Family(
    name="olmoe",
    stage=OlmoeStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=OlmoeModel,
    even_head_dim=True,
    hugging_face=like(
        QWEN3_MOE,
        model_types={
            "olmoe": ModelType("OlmoeForCausalLM", {}, _FIXED, (_EXPERTS, Rope())),
            "flex_olmo": ModelType("FlexOlmoForCausalLM", {"rms_norm_eps": 1e-6}, _FIXED, (_FLEX, Rope(500000.0))),
        },
        type_of=lambda model: "olmoe" if model.norms == "before" else "flex_olmo",
        codecs=(_Norms(),),
        modules={
            # In FlexOlmo post_attention_layernorm is behind attention, and in OLMoE before the experts.
            "layers.*.attention_output_norm": "model.layers.*.post_attention_layernorm",
            "layers.*.mlp_output_norm": "model.layers.*.post_feedforward_layernorm",
            **{f"layers.*.mlp.{name}": None for name in ("gate", "up", "down", "shared_gate")},
            **{f"layers.*.mlp.shared.{name}": None for name in ("gate", "up", "down")},
        },
        # The width of its norms of q and k is hidden_size, so that head_dim is no field.
        fields={"head_dim": None, **same("attention_bias")},
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": None, "attention_bias": False},
    ),
)
