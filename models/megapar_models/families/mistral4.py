"""Mistral 4 (Mistral AI, 2026): DeepSeek's latent attention and experts, and Ministral 3's factor of queries.

The weights are those of DeepSeek-V3 (megapar_models.families.deepseek), without a bias that selects experts. Scores of
experts are a softmax, and the score of a group is the sum of its two best.

At Hugging Face: mistral4, also the text of mistral3.
"""

from dataclasses import dataclass, replace
from typing import Any

from megapar.base.errors import ConfigError
from megapar_models.families.deepseek import DEEPSEEK, DeepseekModel, DeepseekStage, Latents, SharedExperts
from megapar_models.families.ministral3 import TemperatureModel, TemperatureRope, temperature_of, temperature_problems
from megapar_models.family import Family, ModelType, Raw, like
from megapar_models.layer_kind import LayerKind
from megapar_models.multi_token import MTPRule
from megapar_models.rotary_fields import split_rope


@dataclass(frozen=True)
class Mistral4Model(DeepseekModel, TemperatureModel):
    """The options of Mistral 4."""


class Mistral4Stage(DeepseekStage[Mistral4Model]):
    """Consecutive layers of Mistral 4."""

    @classmethod
    def layer_kind(cls, model: Mistral4Model, number: int) -> LayerKind:
        kind = replace(super().layer_kind(model, number), temperature=temperature_of(model))
        return replace(kind, router=replace(kind.router, group_score="best_2")) if kind.router else kind

    @classmethod
    def mtp_rule(cls, model: Mistral4Model) -> MTPRule | None:
        return None  # no file has such layers


class _Experts(SharedExperts):
    """The experts of DeepSeek with a softmax, and without a bias that selects them."""

    def write(self, model: Mistral4Model, fields: dict[str, Any]) -> None:
        if model.moe.scoring_func != "softmax" or model.moe.has_selection_bias:
            text = "mistral4 of transformers has a softmax, and no bias that selects experts"
            raise ConfigError(f"model.moe.scoring_func, model.moe.balance: {text}")
        super().write(model, fields)


class _Rope(TemperatureRope):
    """Rotary positions, with the rotated part of a head among their parameters."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        rotated = raw.get("qk_rope_head_dim") or 64
        width = (raw.get("qk_nope_head_dim") or 64) + rotated
        raw, beside = split_rope(raw, _PART)
        values, problems = super().read(raw, model_type)
        part = beside.get(_PART)
        if part is not None and int(width * part) != rotated:
            problems.append(f"rope_parameters: {_PART}={part} is not supported unless it gives qk_rope_head_dim")
        return values, problems

    def write(self, model: Mistral4Model, fields: dict[str, Any]) -> None:
        super().write(model, fields)
        fields["rope_parameters"][_PART] = model.head_dim / model.key_width


_EXPERTS = "model.layers.*.mlp.experts"
_PART = "partial_rotary_factor"
_MOE: dict[str, Any] = {"n_routed_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 2048}
_MOE |= {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
_DEFAULTS = {"norm_topk_prob": True, "first_k_dense_replace": 0, "n_shared_experts": 1}
# What transformers takes if a config.json has no field about rotary positions.
_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192}
_ROPE |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0}
_FIXED = {"attention_dropout": 0.0, "rope_interleave": True, "mlp_bias": False, "sliding_window": None}

MISTRAL4 = Family(
    name="mistral4",
    stage=Mistral4Stage,
    activations=("silu",),
    options=Mistral4Model,
    even_head_dim=True,
    problems=temperature_problems,
    hugging_face=like(
        DEEPSEEK,
        model_types={"mistral4": ModelType("Mistral4ForCausalLM", fixed=_FIXED)},
        codecs=(
            _Experts(defaults=_DEFAULTS, moe=_MOE, sigmoid=False),
            _Rope(warns=False, default=_ROPE),
            Latents(1024, nope_width=64, whole_heads=True),
        ),
        # Each tensor of theirs has all experts, and those of gates and up below each other.
        modules={
            "layers.*.mlp.router.bias": None,
            **dict.fromkeys(f"layers.*.mlp.experts.*.{name}" for name in ("gate", "up", "down")),
            **{f"layers.*.mlp.experts.*.{name}.weight": f"{_EXPERTS}.gate_up_proj" for name in ("gate", "up")},
            "layers.*.mlp.experts.*.down.weight": f"{_EXPERTS}.down_proj",
        },
        stacked={},
        defaults={"kv_lora_rank": 256, "qk_nope_head_dim": 64},
        ignored=lambda raw: (),
    ),
)
