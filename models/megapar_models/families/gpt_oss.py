"""gpt-oss (arXiv 2508.10925): a mixture with biases everywhere, sinks, and windows on every second layer.

Its weights are those of Mixtral (megapar_models.families.mixtral), and these. Sizes are h hidden, f the width of an
expert, and E experts:

    layers.N.attention.{q,k,v}.bias             one for each row of the weight, cut with it
    layers.N.attention.o.bias                   [h]       on every tp rank
    layers.N.attention.sinks                    [heads]   cut by heads
    layers.N.mlp.router.logit_bias              [E]       on every tp rank; each computes a part of its gradient
    layers.N.mlp.experts.K.{gate,up}.bias       [f]       on the ep rank of expert K; cut over etp
    layers.N.mlp.experts.K.down.bias            [h]       on the ep rank of expert K

The gpt-oss family: its options, and its names at Hugging Face.

Files with experts in mxfp4 are read exactly. What is written has them in bf16.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.config.model_options import OF_FUNCTION, MoEConfig
from megapar_models.families.llama import MODULES_BUT_MLP, SAME_FIELDS, TIED
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.family import Family, HuggingFace, ModelType, overlaid
from megapar_models.layer_kind import LayerKind
from megapar_models.moe_fields import mixture_warnings, read_moe, refuse_unwritable
from megapar_models.rope import read_rope, scaling_problems, write_rope
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


_EXPERTS = "model.layers.*.mlp.experts"
_MODULES = {
    "layers.*.attention.sinks": "model.layers.*.self_attn.sinks",
    "layers.*.mlp.router": "model.layers.*.mlp.router",
    "layers.*.mlp.router.logit_bias": "model.layers.*.mlp.router.bias",
}
for _name, _theirs in {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}.items():
    _MODULES[f"layers.*.mlp.experts.*.{_name}.weight"] = f"{_EXPERTS}.{_theirs}"
    _MODULES[f"layers.*.mlp.experts.*.{_name}.bias"] = f"{_EXPERTS}.{_theirs}_bias"
_LAYOUTS = {
    f"{_EXPERTS}.gate_up_proj": Packing("rows", transposed=True),  # even columns are gates, odd ones ups
    f"{_EXPERTS}.gate_up_proj_bias": Packing("rows"),
    f"{_EXPERTS}.down_proj": Packing(transposed=True),
}
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "initializer_range": 0.02}
_DEFAULTS |= {"num_key_value_heads": 8, "head_dim": 64, "attention_bias": True, "swiglu_limit": 7.0}
_DEFAULTS |= {"sliding_window": 128}
_FIXED = {"attention_dropout": 0.0, "swiglu_alpha": 1.702, "partial_rotary_factor": 1.0}
_MOE = {
    "num_local_experts": "num_experts",
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "router_aux_loss_coef": "router_aux_loss_coef",
}
_MOE_DEFAULTS = {"num_local_experts": 128, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.001}
# What transformers takes if a config.json has no field about rotary positions.
_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_ROPE |= {"original_max_position_embeddings": 4096}


def _read(raw: Mapping[str, Any], _: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding and experts from a config.json; returns option values and problems."""
    stated = raw
    if raw.get("rope_parameters") is None and "rope_scaling" not in raw:
        stated = overlaid(raw, {"rope_scaling": _ROPE})
    values, problems = read_rope(stated, default_theta=150000.0)
    moe, wrong = read_moe(raw, _MOE, _MOE_DEFAULTS)
    values["moe"] = MoEConfig(norm_topk_prob=True, moe_intermediate_size=raw.get("intermediate_size", 2880), **moe)
    return values, [*problems, *wrong]


def _judge(raw: Mapping[str, Any], _: str) -> Iterator[str]:
    if raw.get("sliding_window", 128) is None:
        yield "sliding_window=null is not supported; transformers fails with it"
    types = full_every(2, raw["num_hidden_layers"])
    if (raw.get("layer_types") or types) != types:
        yield "layer_types is not supported unless it alternates, beginning with sliding_attention"


def _write(model: GptOssModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if gpt_oss does not represent it."""
    refuse_unwritable(model, "gpt_oss", {"norm_topk_prob": True}, ())
    fields |= {theirs: getattr(model.moe, ours) for theirs, ours in _MOE.items() if theirs != "num_experts"}
    fields |= {"intermediate_size": model.moe.moe_intermediate_size}
    fields |= {"layer_types": full_every(2, model.num_hidden_layers), "swiglu_alpha": 1.702, **write_rope(model)}
    return {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], **fields}


GPT_OSS = Family(
    name="gpt_oss",
    stage=GptOssStage,
    activations=("silu",),
    options=GptOssModel,
    even_head_dim=True,
    problems=scaling_problems,
    hugging_face=HuggingFace(
        model_types={"gpt_oss": ModelType(_DEFAULTS, _FIXED)},
        modules=MODULES_BUT_MLP | _MODULES,
        layouts=_LAYOUTS,
        fields={name: name for name in (*SAME_FIELDS, "attention_bias", "swiglu_limit", "sliding_window")},
        activations={"silu": "silu"},
        tied=TIED,
        # The names of the first two in the original program, beside those that transformers reads.
        without_effect=("initial_context_length", "experts_per_token"),
        read=_read,
        judge=_judge,
        write=_write,
        warnings=mixture_warnings,
    ),
)
