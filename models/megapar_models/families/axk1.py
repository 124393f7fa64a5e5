"""A.X K1 (SK Telecom, 2026): DeepSeek-V3, with a norm of what experts and shared expert give together.

The weights are those of DeepSeek-V3 (megapar_models.families.deepseek), and in layers with experts
layers.N.mlp_output_norm.weight [h].

At Hugging Face: axk1. Layers without experts have that norm in some files too; transformers does not compute it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megapar.base.errors import ConfigError
from megapar_models.codecs import Written
from megapar_models.families.deepseek import (
    DEEPSEEK,
    SIGMOID,
    DeepseekModel,
    DeepseekStage,
    Latents,
    SharedExperts,
    with_listed_layers,
)
from megapar_models.family import Family, ModelType, Raw, like
from megapar_models.layer_kind import LayerKind
from megapar_models.multi_token import MTPRule
from megapar_models.rotary_fields import Rope


class AXK1Stage(DeepseekStage):
    """Consecutive layers of A.X K1."""

    @classmethod
    def layer_kind(cls, model: DeepseekModel, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        return replace(kind, mlp_norms="both") if kind.mlp == "mixture" else kind

    @classmethod
    def mtp_rule(cls, model: DeepseekModel) -> MTPRule | None:
        return None  # no file has such layers


class _Experts(SharedExperts):
    """The experts of DeepSeek-V3, and the list of layers that have them."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        values, problems = super().read(raw, model_type)
        types = raw.get("mlp_layer_types")
        return with_listed_layers(values, types, raw["num_hidden_layers"], problems) if types else (values, problems)

    def write(self, model: DeepseekModel, fields: dict[str, Any]) -> None:
        if model.moe.scoring_func != "sigmoid" or not model.moe.has_selection_bias:
            text = "axk1 of transformers has sigmoid scores and a bias that selects experts"
            raise ConfigError(f"model.moe.scoring_func, model.moe.balance: {text}")
        super().write(model, fields)
        dense = fields.pop("first_k_dense_replace")
        fields["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (model.num_hidden_layers - dense)


@dataclass(frozen=True)
class _Latents(Latents):
    """Latent attention, of queries too."""

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        """Yield what latent attention does not compute."""
        yield from super().judge(raw, model_type)
        if not raw.get("q_lora_rank", self.q_rank):
            yield "q_lora_rank is not supported unless it is above 0: queries of axk1 have a latent"

    def write(self, model: DeepseekModel, fields: dict[str, Any]) -> None:
        if not model.q_lora_rank:
            raise ConfigError("model.q_lora_rank=0: queries of axk1 of transformers have a latent")
        super().write(model, fields)


def _of_dense_layers(raw: Raw) -> tuple[str, ...]:
    """Return the norms behind MLPs without experts, which transformers does not compute."""
    types = raw.get("mlp_layer_types") or ["dense"] * raw.get("first_k_dense_replace", 1)
    return tuple(f"model.layers.{number}.post_mlp_layernorm." for number, kind in enumerate(types) if kind == "dense")


_MOE: dict[str, Any] = {"n_routed_experts": 192, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
_MOE |= {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
_DEFAULTS = {"norm_topk_prob": True, "first_k_dense_replace": 1, "n_shared_experts": 1}
_FIXED = {"attention_dropout": 0.0, "moe_layer_freq": 1, "rope_interleave": True, "mlp_bias": False, **SIGMOID}

AXK1 = Family(
    name="axk1",
    stage=AXK1Stage,
    activations=("silu",),
    options=DeepseekModel,
    even_head_dim=True,
    hugging_face=like(
        DEEPSEEK,
        model_types={"axk1": ModelType("AXK1ForCausalLM", fixed=_FIXED)},
        codecs=(_Experts(defaults=_DEFAULTS, moe=_MOE), Rope(), _Latents(), Written(SIGMOID)),
        modules={"layers.*.mlp_output_norm": "model.layers.*.post_mlp_layernorm"},
        renamed={".mlp.post_mlp_layernorm.": ".post_mlp_layernorm."},
        without_effect=("ep_size", "aux_loss_alpha", "seq_aux"),
        ignored=_of_dense_layers,
    ),
)
