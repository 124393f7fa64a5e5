"""MiniMax-M2: Mixtral's layers with norms of all of q and k, a rotated part of each head, and DeepSeek-V3's router.

Its weights are those of Mixtral (megapar_models.families.mixtral), with layers.N.attention.q_norm and k_norm as wide as
the projections, and a bias by which each router selects.

At Hugging Face: minimax_m2. Layers of prediction are left out.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from megapar.config.model_options import MoEConfig
from megapar_models.families.llama import ACTIVATIONS, MODULES_BUT_MLP, SAME_FIELDS, TIED
from megapar_models.families.mixtral import EXPERTS, RENAMED, STACKED, MixtralModel, MixtralStage
from megapar_models.family import Family, HuggingFace, ModelType, Raw
from megapar_models.layer_kind import LayerKind
from megapar_models.moe_fields import mixture_warnings, read_moe, refuse_unwritable
from megapar_models.partial_rotary import (
    PartialRotaryModel,
    partial_problems,
    partial_rotary,
    read_partial_rope,
    write_partial_rope,
)


@dataclass(frozen=True)
class MiniMaxM2Model(MixtralModel, PartialRotaryModel):
    """The options of MiniMax-M2."""

    moe: MoEConfig = field(default_factory=MoEConfig)
    """Mixture of experts."""


class MiniMaxM2Stage(MixtralStage[MiniMaxM2Model]):
    """Consecutive layers of MiniMax-M2."""

    @classmethod
    def layer_kind(cls, model: MiniMaxM2Model, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        return replace(kind, rotary=partial_rotary(model), qk_norm=True, qk_norm_over="width")


# Hugging Face

_BIAS = {"layers.*.mlp.router.bias": "model.layers.*.block_sparse_moe.e_score_correction_bias"}
_DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_DEFAULTS |= {"initializer_range": 0.02, "num_key_value_heads": 8, "head_dim": 128}
_FIXED: dict[str, Any] = {"attention_dropout": 0.0, "router_jitter_noise": 0.0, "scoring_func": "sigmoid"}
_FIXED |= {"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True, "shared_intermediate_size": 0}
_MOE = {"num_experts_per_tok": "num_experts_per_tok", "num_local_experts": "num_experts"}
_MOE_DEFAULTS = {"num_experts_per_tok": 8, "num_local_experts": 256}
_RULES: dict[str, Any] = {"scoring_func": "sigmoid", "norm_topk_prob": True}
# Of the published files: layers of prediction, of another program's losses, and all layers of attention.
_WITHOUT_EFFECT = ("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "router_aux_loss_coef", "attn_type_list")


def _read(raw: Raw, _: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding and experts from a config.json; returns option values and problems."""
    rotated, width = raw.get("rotary_dim"), raw.get("head_dim", 128)
    part = 1.0
    if isinstance(rotated, int) and isinstance(width, int) and width:
        part = rotated / width  # as the published files say it
    values, problems = read_partial_rope(raw, 5000000.0, part)
    moe, wrong = read_moe(raw, _MOE, _MOE_DEFAULTS)
    return values | {"moe": MoEConfig(balance="bias", **_RULES, **moe)}, [*problems, *wrong]


def _write(model: MiniMaxM2Model, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if minimax_m2 does not represent it."""
    refuse_unwritable(model, "minimax_m2", _RULES, (), has_bias=True)
    fields |= {theirs: getattr(model.moe, ours) for theirs, ours in _MOE.items()} | write_partial_rope(model)
    fields |= {"intermediate_size": model.moe.moe_intermediate_size, "rotary_dim": model.rotary_width}
    return {"model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], **fields}


def _prediction(_: Raw) -> tuple[str, ...]:
    return ("model.mtp.", "mtp.")


MINIMAX_M2 = Family(
    name="minimax_m2",
    stage=MiniMaxM2Stage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=MiniMaxM2Model,
    problems=partial_problems,
    hugging_face=HuggingFace(
        model_types={"minimax_m2": ModelType(_DEFAULTS, _FIXED)},
        modules=MODULES_BUT_MLP | EXPERTS | _BIAS,
        stacked=STACKED,
        renamed=RENAMED,
        in_fp32=("layers.*.mlp.router.weight",),  # transformers takes them in any dtype, other programs in fp32
        fields={name: name for name in SAME_FIELDS},
        activations=ACTIVATIONS,
        tied=TIED,
        ignored=_prediction,
        read=_read,
        write=_write,
        warnings=mixture_warnings,
        without_effect=_WITHOUT_EFFECT,
    ),
)
