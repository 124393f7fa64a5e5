"""OLMoE (arXiv 2409.02060): Mixtral with norms of queries and keys, each over all heads together.

Weights beyond those of Mixtral (megapar_models.families.mixtral), with d the width of a head:

    layers.N.attention.q_norm.weight    [heads * d]     cut as q
    layers.N.attention.k_norm.weight    [kv heads * d]  cut as k

At Hugging Face: olmoe.
"""

from dataclasses import dataclass, replace
from typing import Any

from megapar.config.model_options import MoEConfig
from megapar_models.families.llama import ACTIVATIONS, MODULES_BUT_MLP, SAME_FIELDS, TIED
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.family import Family, HuggingFace, ModelType, Raw
from megapar_models.layer_kind import LayerKind
from megapar_models.moe_fields import mixture_warnings, read_moe, refuse_unwritable
from megapar_models.rope import read_rope, scaling_problems, write_rope


@dataclass(frozen=True)
class OlmoeModel(MixtralModel):
    """The options of OLMoE."""

    attention_bias: bool = False
    """Biases of all projections of attention."""


class OlmoeStage(MixtralStage[OlmoeModel]):
    """Consecutive OLMoE layers."""

    @classmethod
    def layer_kind(cls, model: OlmoeModel, number: int) -> LayerKind:
        return replace(
            super().layer_kind(model, number),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            qk_norm=True,
            qk_norm_over="width",
        )


_EXPERTS = {
    "layers.*.mlp.router": "model.layers.*.mlp.gate",
    "layers.*.mlp.experts.*.gate": "model.layers.*.mlp.experts.*.gate_proj",
    "layers.*.mlp.experts.*.up": "model.layers.*.mlp.experts.*.up_proj",
    "layers.*.mlp.experts.*.down": "model.layers.*.mlp.experts.*.down_proj",
}
_STACKED = {
    "model.layers.*.mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    "model.layers.*.mlp.experts.down_proj": ("down_proj",),
}
# The width of its norms of q and k is hidden_size, so that head_dim is no field.
_FIELDS = {name: name for name in (*SAME_FIELDS, "attention_bias") if name != "head_dim"}
_DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
_DEFAULTS |= {"initializer_range": 0.02, "num_key_value_heads": None, "attention_bias": False}
_FIXED = {"attention_dropout": 0.0, "clip_qkv": None}
_MOE = {"num_experts": "num_experts", "num_local_experts": "num_experts"}
_MOE |= {name: name for name in ("num_experts_per_tok", "norm_topk_prob", "router_aux_loss_coef")}
_MOE_DEFAULTS = {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.01}


def _read(raw: Raw, _: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding and experts from a config.json; returns option values and problems."""
    values, problems = read_rope(raw, default_theta=10000.0)
    moe, wrong = read_moe(raw, _MOE, _MOE_DEFAULTS)
    return values | {"moe": MoEConfig(**moe)}, [*problems, *wrong]


def _write(model: OlmoeModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if olmoe does not represent it."""
    problems = []
    if model.num_attention_heads * model.head_dim != model.hidden_size:
        problems.append(f"model.head_dim={model.head_dim}: in olmoe of transformers the heads are hidden_size wide")
    refuse_unwritable(model, "olmoe", {}, problems)
    fields |= {theirs: getattr(model.moe, ours) for theirs, ours in _MOE.items() if theirs == ours} | write_rope(model)
    # All its layers have experts, so their width is the only one.
    fields["intermediate_size"] = model.moe.moe_intermediate_size
    return {"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], **fields}


OLMOE = Family(
    name="olmoe",
    stage=OlmoeStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=OlmoeModel,
    even_head_dim=True,
    problems=scaling_problems,
    hugging_face=HuggingFace(
        model_types={"olmoe": ModelType(_DEFAULTS, _FIXED)},
        modules=MODULES_BUT_MLP | _EXPERTS,
        stacked=_STACKED,
        fields=_FIELDS,
        activations=ACTIVATIONS,
        tied=TIED,
        read=_read,
        write=_write,
        warnings=mixture_warnings,
    ),
)
