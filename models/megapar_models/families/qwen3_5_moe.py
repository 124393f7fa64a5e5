"""Qwen3.5's mixtures: its layers with experts, one of them for every token, in place of the MLP.

Their weights are those of Qwen3.5 and of Mixtral (megapar_models.families.qwen3_5, megapar_models.families.mixtral).

At Hugging Face: qwen3_5_moe_text, and the text of qwen3_5_moe (also Qwen3.6).
"""

from dataclasses import dataclass, replace
from typing import Any

from megapar.config.model_options import MixtureModel
from megapar_models.delta_fields import MAYBE_IN_FP32, SIZE_DEFAULTS, SIZE_FIELDS, DeltaLayers, linear_names_of
from megapar_models.families.qwen3_5 import (
    FIXED,
    FURTHER,
    LAYOUTS,
    MODULES,
    NAMES_OF_LINEAR,
    UNREAD,
    Mrope,
    Qwen35Model,
    full_kind,
    gated_kind,
    other_parts,
    prediction_modules,
    prediction_names,
)
from megapar_models.families.qwen3_moe import QWEN3_MOE, STACKED
from megapar_models.family import Family, ModelType, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.moe_fields import RoutedExperts, refuse_unwritable
from megapar_models.multi_token import MTPRule
from megapar_models.stage import Stage


@dataclass(frozen=True)
class Qwen35MoeModel(MixtureModel, Qwen35Model):
    """The options of Qwen3.5's mixtures."""


class Qwen35MoeStage(Stage[Qwen35MoeModel]):
    """Consecutive layers of a mixture of Qwen3.5."""

    @classmethod
    def layer_kind(cls, model: Qwen35MoeModel, number: int) -> LayerKind:
        return replace(gated_kind(model, number), mlp="mixture", mixture=model.moe)

    @classmethod
    def mtp_rule(cls, model: Qwen35MoeModel) -> MTPRule | None:
        return MTPRule(kind=replace(full_kind(model), mlp="mixture", mixture=model.moe))


class GatedSharedExpert(RoutedExperts):
    """Experts by softmax, and an expert for every token, whose output has a gate."""

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        shared = {SHARED: model.moe.shared_expert_intermediate_size}
        refuse_unwritable(model, fields["model_type"], {**self.always, **shared}, ())
        fields |= {theirs: getattr(model.moe, ours) for theirs, ours in self.names.items()}


SHARED = "shared_expert_intermediate_size"
EXPERT_FIELDS = same("num_experts", "num_experts_per_tok", "moe_intermediate_size", SHARED, "router_aux_loss_coef")
EXPERT_DEFAULTS = {"moe_intermediate_size": 512, SHARED: 512, "router_aux_loss_coef": 0.001}
_EXPERTS = GatedSharedExpert(
    names=EXPERT_FIELDS,
    aliases={"num_local_experts": "num_experts"},
    defaults={**EXPERT_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8},
    always={"norm_topk_prob": True, "shared_expert_gate": True},
)

# Of layers of multi-token prediction Qwen3.5 has the matrices of each expert in files, and Qwen3.6 has stacks.
STACKED_TOO = STACKED | {name.replace("model.", "mtp."): modules for name, modules in STACKED.items()}

QWEN3_5_MOE = Family(
    name="qwen3_5_moe",
    stage=Qwen35MoeStage,
    activations=("silu",),
    options=Qwen35MoeModel,
    even_head_dim=True,
    hugging_face=like(
        QWEN3_MOE,
        model_types={
            "qwen3_5_moe_text": ModelType(
                "Qwen3_5MoeForCausalLM", fixed={**FIXED, "mlp_only_layers": [], "norm_topk_prob": True}
            )
        },
        codecs=(_EXPERTS, DeltaLayers(), Mrope(), FURTHER),
        modules=MODULES,
        modules_of=lambda model: {**linear_names_of(model, NAMES_OF_LINEAR), **prediction_modules(model)},
        mtp_names=prediction_names,
        stacked=STACKED_TOO,
        layouts=LAYOUTS,
        maybe_fp32=MAYBE_IN_FP32,
        # No layer has another MLP.
        fields={**SIZE_FIELDS, **same("attention_bias"), "intermediate_size": None},
        defaults={**SIZE_DEFAULTS, "num_key_value_heads": 2, "head_dim": 256, "attention_bias": False},
        activations=same("silu"),
        without_effect=(*UNREAD, "intermediate_size"),
        ignored=other_parts,
    ),
)
