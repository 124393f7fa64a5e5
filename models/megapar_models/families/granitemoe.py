"""The mixtures of Granite 3: the factors of Granite, and experts in place of the MLP.

The names of the weights are those of Mixtral (megapar_models.families.mixtral).

At Hugging Face: granitemoe and granitemoeshared.
"""

from dataclasses import dataclass, replace
from typing import Any

from megapar.config.model_options import MixtureModel, MoEConfig
from megapar_models.families.granite import (
    DEFAULTS,
    FIELDS,
    FIXED,
    GraniteModel,
    GraniteStage,
    judge_multipliers,
    multiplier_problems,
    write_multipliers,
)
from megapar_models.families.llama import ACTIVATIONS, MODULES_BUT_MLP, TIED
from megapar_models.family import Family, HuggingFace, ModelType, Raw
from megapar_models.layer_kind import LayerKind
from megapar_models.moe_fields import mixture_warnings, read_moe, refuse_unwritable
from megapar_models.rope import read_rope


@dataclass(frozen=True)
class GraniteMoeModel(MixtureModel, GraniteModel):
    """The options of Granite's mixtures."""


class GraniteMoeStage(GraniteStage[GraniteMoeModel]):
    """Consecutive layers of Granite with experts."""

    @classmethod
    def layer_kind(cls, model: GraniteMoeModel, number: int) -> LayerKind:
        return replace(super().layer_kind(model, number), mlp="mixture", mixture=model.moe)


# Each matrix of theirs has all experts, and those of gates and up below each other.
_EXPERTS = {
    "layers.*.mlp.router": "model.layers.*.block_sparse_moe.router.layer",
    "layers.*.mlp.experts.*.gate": "model.layers.*.block_sparse_moe.input_linear",
    "layers.*.mlp.experts.*.up": "model.layers.*.block_sparse_moe.input_linear",
    "layers.*.mlp.experts.*.down": "model.layers.*.block_sparse_moe.output_linear",
    "layers.*.mlp.shared.gate": "model.layers.*.shared_mlp.input_linear",
    "layers.*.mlp.shared.up": "model.layers.*.shared_mlp.input_linear",
    "layers.*.mlp.shared.down": "model.layers.*.shared_mlp.output_linear",
}
_MOE = {"num_local_experts": "num_experts"}
_MOE |= {name: name for name in ("num_experts_per_tok", "router_aux_loss_coef")}
_MOE_DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}


def _read(raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding and experts from a config.json; returns option values and problems."""
    values, problems = read_rope(raw, default_theta=10000.0)
    names = _MOE
    if model_type == "granitemoeshared":
        names = {**_MOE, "shared_intermediate_size": "shared_expert_intermediate_size"}
    moe, wrong = read_moe(raw, names, {**_MOE_DEFAULTS, "shared_intermediate_size": 0})
    # The softmax of the chosen experts' logits is that of all, divided by its sum over the chosen ones.
    return values | {"moe": MoEConfig(norm_topk_prob=True, **moe)}, [*problems, *wrong]


def _write(model: GraniteMoeModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if neither model_type represents it."""
    shared = model.moe.shared_expert_intermediate_size
    fixed = {"norm_topk_prob": True, "shared_expert_gate": False, "shared_expert_intermediate_size": shared}
    refuse_unwritable(model, "granitemoe", fixed, ())
    fields |= {theirs: getattr(model.moe, ours) for theirs, ours in _MOE.items()} | write_multipliers(model)
    # All its layers have experts, so their width is the only one.
    fields["intermediate_size"] = model.moe.moe_intermediate_size
    if not shared:
        return {"model_type": "granitemoe", "architectures": ["GraniteMoeForCausalLM"], **fields}
    fields["shared_intermediate_size"] = shared
    return {"model_type": "granitemoeshared", "architectures": ["GraniteMoeSharedForCausalLM"], **fields}


GRANITEMOE = Family(
    name="granitemoe",
    stage=GraniteMoeStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=GraniteMoeModel,
    even_head_dim=True,
    problems=multiplier_problems,
    hugging_face=HuggingFace(
        model_types={name: ModelType(DEFAULTS, FIXED) for name in ("granitemoe", "granitemoeshared")},
        modules=MODULES_BUT_MLP | _EXPERTS,
        # What transformers 5 calls them in memory.
        renamed={
            ".block_sparse_moe.experts.gate_up_proj": ".block_sparse_moe.input_linear.weight",
            ".block_sparse_moe.experts.down_proj": ".block_sparse_moe.output_linear.weight",
            ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
        },
        fields=FIELDS,
        activations=ACTIVATIONS,
        tied=TIED,
        read=_read,
        judge=judge_multipliers,
        write=_write,
        warnings=mixture_warnings,
    ),
)
