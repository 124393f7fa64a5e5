"""The mixtures of Granite 3: the factors of Granite, and experts in place of the MLP.

The names of the weights are those of Mixtral (megapar_models.families.mixtral).

At Hugging Face: granitemoe and granitemoeshared.
"""

from dataclasses import dataclass, replace
from typing import Any

from megapar.config.model_options import MixtureModel
from megapar_models.families.granite import GRANITE, GraniteModel, GraniteStage, Multipliers
from megapar_models.family import Codec, Family, ModelType, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.moe_fields import RoutedExperts, refuse_unwritable


@dataclass(frozen=True)
class GraniteMoeModel(MixtureModel, GraniteModel):
    """The options of Granite's mixtures."""


class GraniteMoeStage(GraniteStage[GraniteMoeModel]):
    """Consecutive layers of Granite with experts."""

    @classmethod
    def layer_kind(cls, model: GraniteMoeModel, number: int) -> LayerKind:
        return replace(super().layer_kind(model, number), mlp="mixture", mixture=model.moe)


class GraniteExperts(RoutedExperts):
    """The experts of Granite, in every layer."""

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        shared = model.moe.shared_expert_intermediate_size
        fixed = {"norm_topk_prob": True, "shared_expert_gate": False, "shared_expert_intermediate_size": shared}
        refuse_unwritable(model, "granitemoe", fixed, ())
        fields |= {theirs: getattr(model.moe, ours) for theirs, ours in self.names.items()}
        # All its layers have experts, so their width is the only one.
        fields["intermediate_size"] = model.moe.moe_intermediate_size


class SharedWidth(Codec):
    """The width of the expert for every token."""

    def write(self, model: GraniteMoeModel, fields: dict[str, Any]) -> None:
        fields["shared_intermediate_size"] = model.moe.shared_expert_intermediate_size


# The softmax of the chosen experts' logits is that of all, divided by its sum over the chosen ones.
_EXPERTS = GraniteExperts(
    names={"num_local_experts": "num_experts", **same("num_experts_per_tok", "router_aux_loss_coef")},
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001},
    always={"norm_topk_prob": True},
)
SHARED_EXPERTS = replace(
    _EXPERTS,
    aliases={"shared_intermediate_size": "shared_expert_intermediate_size"},
    defaults={**_EXPERTS.defaults, "shared_intermediate_size": 0},
)
_FIXED = {"attention_dropout": 0.0}
_LAYER = "model.layers.*"

GRANITEMOE = Family(
    name="granitemoe",
    stage=GraniteMoeStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=GraniteMoeModel,
    even_head_dim=True,
    hugging_face=like(
        GRANITE,
        model_types={
            "granitemoe": ModelType("GraniteMoeForCausalLM", {}, _FIXED, (_EXPERTS, Multipliers())),
            "granitemoeshared": ModelType(
                "GraniteMoeSharedForCausalLM", {}, _FIXED, (SHARED_EXPERTS, Multipliers(), SharedWidth())
            ),
        },
        type_of=lambda model: "granitemoeshared" if model.moe.shared_expert_intermediate_size else "granitemoe",
        # Each matrix of theirs has all experts, and those of gates and up below each other.
        modules={
            **dict.fromkeys(f"layers.*.mlp.{name}" for name in ("gate", "up", "down")),
            "layers.*.mlp.router": f"{_LAYER}.block_sparse_moe.router.layer",
            "layers.*.mlp.experts.*.gate": f"{_LAYER}.block_sparse_moe.input_linear",
            "layers.*.mlp.experts.*.up": f"{_LAYER}.block_sparse_moe.input_linear",
            "layers.*.mlp.experts.*.down": f"{_LAYER}.block_sparse_moe.output_linear",
            "layers.*.mlp.shared.gate": f"{_LAYER}.shared_mlp.input_linear",
            "layers.*.mlp.shared.up": f"{_LAYER}.shared_mlp.input_linear",
            "layers.*.mlp.shared.down": f"{_LAYER}.shared_mlp.output_linear",
        },
        # What transformers 5 calls them in memory.
        renamed={
            ".block_sparse_moe.experts.gate_up_proj": ".block_sparse_moe.input_linear.weight",
            ".block_sparse_moe.experts.down_proj": ".block_sparse_moe.output_linear.weight",
            ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
        },
        fields={"mlp_bias": None},
    ),
)
