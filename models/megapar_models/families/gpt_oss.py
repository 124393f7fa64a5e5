"""gpt-oss (arXiv 2508.10925): a mixture with biases everywhere, sinks, and windows on every second layer.

Its weights are those of Mixtral (megapar_models.families.mixtral), and these. Sizes are h hidden, f the width of an
expert, and E experts:

    layers.N.attention.{q,k,v}.bias             one for each row of the weight, cut with it
    layers.N.attention.o.bias                   [h]       on every tp rank
    layers.N.attention.sinks                    [heads]   cut by heads
    layers.N.mlp.router.logit_bias              [E]       on every tp rank; each computes a part of its gradient
    layers.N.mlp.experts.K.{gate,up}.bias       [f]       on the ep rank of expert K; cut over etp
    layers.N.mlp.experts.K.down.bias            [h]       on the ep rank of expert K

At Hugging Face: gpt_oss. Files with experts in mxfp4 are read exactly; files are written with experts in bf16.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.config.model_options import OF_FUNCTION
from megapar_models.families.llama import LLAMA
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.family import Codec, Family, ModelType, Raw, like, overlaid, same
from megapar_models.layer_kind import LayerKind
from megapar_models.moe_fields import RoutedExperts
from megapar_models.rotary_fields import Rope
from megapar_models.tensor_layouts import Packing
from megapar_models.windows import full_every


@dataclass(frozen=True)
class GptOssModel(MixtralModel):
    """The options of gpt-oss."""

    attention_bias: bool = True
    """Biases on the query, key, value and output projections."""
    sliding_window: int = field(default=128, metadata=OF_FUNCTION)
    """Keys that layers 0, 2, 4 and so on read, the token's own among them; the other layers read all."""
    swiglu_limit: float = field(default=7.0, metadata=OF_FUNCTION)
    """Bound of the gate (from above) and of up (on both sides) in the activation of experts."""


class GptOssStage(MixtralStage[GptOssModel]):
    """Consecutive layers of gpt-oss."""

    @classmethod
    def layer_kind(cls, model: GptOssModel, number: int) -> LayerKind:
        return replace(
            super().layer_kind(model, number),
            window=model.sliding_window * (number % 2 == 0),
            sinks=True,
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            activation="clamped_swiglu",
            activation_limit=model.swiglu_limit,
            router_bias=True,
            router_dtype="model",
            expert_bias=True,
        )


class _Rope(Rope):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        if raw.get("rope_parameters") is None and "rope_scaling" not in raw:
            raw = overlaid(raw, {"rope_scaling": _ROPE})
        return super().read(raw, model_type)


class _Windows(Codec):
    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        if raw.get("sliding_window", 128) is None:
            yield "sliding_window=null is not supported; transformers fails with it"
        types = full_every(2, raw["num_hidden_layers"])
        if (raw.get("layer_types") or types) != types:
            yield "layer_types is not supported unless it alternates, beginning with sliding_attention"

    def write(self, model: GptOssModel, fields: dict[str, Any]) -> None:
        fields |= {"layer_types": full_every(2, model.num_hidden_layers), "swiglu_alpha": 1.702}


# What transformers takes if a config.json has no field about rotary positions.
_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_ROPE |= {"original_max_position_embeddings": 4096}
_MOE = RoutedExperts(
    names={
        "num_local_experts": "num_experts",
        **same("num_experts_per_tok", "router_aux_loss_coef"),
        "intermediate_size": "moe_intermediate_size",
    },
    aliases=same("num_experts"),
    defaults={"num_local_experts": 128, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.001},
    always={"norm_topk_prob": True},
)
_EXPERTS = "model.layers.*.mlp.experts"
_MATRICES = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}

GPT_OSS = Family(
    name="gpt_oss",
    stage=GptOssStage,
    activations=("silu",),
    options=GptOssModel,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={
            "gpt_oss": ModelType(
                "GptOssForCausalLM",
                fixed={"attention_dropout": 0.0, "swiglu_alpha": 1.702, "partial_rotary_factor": 1.0},
            )
        },
        codecs=(_MOE, _Windows(), _Rope(150000.0)),
        modules={
            **dict.fromkeys(f"layers.*.mlp.{name}" for name in ("gate", "up", "down")),
            "layers.*.attention.sinks": "model.layers.*.self_attn.sinks",
            "layers.*.mlp.router": "model.layers.*.mlp.router",
            "layers.*.mlp.router.logit_bias": "model.layers.*.mlp.router.bias",
            **{f"layers.*.mlp.experts.*.{our}.weight": f"{_EXPERTS}.{their}" for our, their in _MATRICES.items()},
            **{f"layers.*.mlp.experts.*.{our}.bias": f"{_EXPERTS}.{their}_bias" for our, their in _MATRICES.items()},
        },
        layouts={
            f"{_EXPERTS}.gate_up_proj": Packing("rows", transposed=True),  # even columns are gates, odd ones ups
            f"{_EXPERTS}.gate_up_proj_bias": Packing("rows"),
            f"{_EXPERTS}.down_proj": Packing(transposed=True),
        },
        fields=same("attention_bias", "swiglu_limit", "sliding_window"),
        defaults={
            **{"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 64},
            **{"attention_bias": True, "swiglu_limit": 7.0, "sliding_window": 128},
        },
        activations=same("silu"),
        # The names of the first two in the original program, beside those that transformers reads.
        without_effect=("initial_context_length", "experts_per_token"),
    ),
)
