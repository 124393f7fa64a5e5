"""Mixtral (arXiv 2401.04088): Llama with a mixture of experts in place of the MLP.

These are the weights beyond those of Llama (megapar_models.families.llama has the others). Sizes are h hidden, f the
width of an expert, and E experts:

    layers.N.mlp.router.weight                  [E, h]    on every tp rank; each computes a part of its gradient
    layers.N.mlp.router.bias                    [E]       balance=bias alone: no parameter, but state
    layers.N.mlp.experts.K.{gate,up}.weight     [f, h]    on the ep rank of expert K; cut by output over etp
    layers.N.mlp.experts.K.down.weight          [h, f]    on the ep rank of expert K; cut by input over etp
    layers.N.mlp.shared.{gate,up,down}.weight             an expert for every token (optional), cut as an MLP
    layers.N.mlp.shared_gate.weight             [1, h]    on every tp rank (optional)

At Hugging Face: mixtral.
"""

from dataclasses import dataclass

from typing_extensions import TypeVar

from megapar.config.model_options import MixtureModel
from megapar_models.families.llama import LLAMA
from megapar_models.family import Family, ModelType, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.moe_fields import RoutedExperts
from megapar_models.norms import NormRule
from megapar_models.reference import mixtral_logits
from megapar_models.rotary import Rotary, RotaryModel
from megapar_models.rotary_fields import Rope
from megapar_models.stage import Stage
from megapar_models.windows import NoWindow


@dataclass(frozen=True)
class MixtralModel(MixtureModel, RotaryModel):
    """The options of Mixtral."""


X = TypeVar("X", bound=MixtralModel, default=MixtralModel)


class MixtralStage(Stage[X]):
    """Consecutive Mixtral layers."""

    @classmethod
    def layer_kind(cls, model: X, number: int) -> LayerKind:
        return LayerKind(norm=NormRule(model.rms_norm_eps), rotary=Rotary.of(model), mlp="mixture", mixture=model.moe)


# Mixtral takes the softmax of the chosen experts' logits. That is the softmax of all logits, divided by its sum over
# the chosen experts.
_EXPERTS = RoutedExperts(
    names={**same("num_experts_per_tok", "router_aux_loss_coef"), "num_local_experts": "num_experts"},
    defaults={"num_experts_per_tok": 2, "router_aux_loss_coef": 0.001},
    always={"norm_topk_prob": True},
)
_FIXED = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0, "router_jitter_noise": 0.0}
_MOE = "model.layers.*.block_sparse_moe"

MIXTRAL = Family(
    name="mixtral",
    stage=MixtralStage,
    reference=mixtral_logits,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=MixtralModel,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={"mixtral": ModelType("MixtralForCausalLM", fixed=_FIXED)},
        codecs=(_EXPERTS, Rope(1e6), NoWindow()),
        modules={
            **dict.fromkeys(f"layers.*.mlp.{name}" for name in ("gate", "up", "down")),
            "layers.*.mlp.router": f"{_MOE}.gate",
            "layers.*.mlp.experts.*.gate": f"{_MOE}.experts.*.w1",
            "layers.*.mlp.experts.*.up": f"{_MOE}.experts.*.w3",
            "layers.*.mlp.experts.*.down": f"{_MOE}.experts.*.w2",
        },
        stacked={f"{_MOE}.experts.gate_up_proj": ("w1", "w3"), f"{_MOE}.experts.down_proj": ("w2",)},
        # What transformers 5 calls mlp, in memory and in files of stacked experts.
        renamed={".mlp.": ".block_sparse_moe."},
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    ),
)
