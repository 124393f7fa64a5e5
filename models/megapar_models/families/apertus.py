"""Apertus (arXiv 2509.14233): Llama with norms of queries and keys, and an MLP without gate of xIELU.

Its weights are those of Llama (megapar_models.families.llama) without layers.N.mlp.gate, and these, with d the width of
a head:

    layers.N.attention.{q,k}_norm.weight    [d]     on every tp rank; each computes a part of its gradient
    layers.N.mlp.activation.alpha_{p,n}     [1]     on every tp rank; each computes a part of its gradient

At Hugging Face: apertus.
"""

from dataclasses import dataclass
from typing import Any

from megapar_models.families.llama import LLAMA
from megapar_models.family import Family, ModelType, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary, RotaryModel
from megapar_models.rotary_fields import StatedRope
from megapar_models.stage import Stage


@dataclass(frozen=True)
class ApertusModel(RotaryModel):
    """The options of Apertus."""

    attention_bias: bool = False
    """Biases of all projections of attention."""


class ApertusStage(Stage[ApertusModel]):
    """Consecutive layers of Apertus."""

    @classmethod
    def layer_kind(cls, model: ApertusModel, number: int) -> LayerKind:
        return LayerKind(
            mlp="plain",
            norm=NormRule(model.rms_norm_eps),
            rotary=Rotary.of(model),
            qk_norm=True,
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
        )


class _Rope(StatedRope):
    def write(self, model: ApertusModel, fields: dict[str, Any]) -> None:
        super().write(model, fields)
        # Without any, transformers takes that of the published models.
        fields["rope_scaling"] = fields["rope_scaling"] or {"rope_type": "default"}


# What transformers takes if a config.json has no field about rotary positions.
_ROPE = {"rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, "original_max_position_embeddings": 8192}
_ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
# The published files also have fields of the program that trained them.
_FIXED = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0, "hidden_dropout": 0.0, "mlp_bias": False}
_FIXED |= {"post_norm": False, "qk_norm": True}

APERTUS = Family(
    name="apertus",
    stage=ApertusStage,
    activations=("xielu",),
    options=ApertusModel,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={"apertus": ModelType("ApertusForCausalLM", fixed=_FIXED)},
        codecs=(_Rope(default=_ROPE),),
        modules={
            "layers.*.attention_norm": "model.layers.*.attention_layernorm",
            "layers.*.mlp_norm": "model.layers.*.feedforward_layernorm",
            "layers.*.mlp.gate": None,
            "layers.*.mlp.activation.alpha_p": "model.layers.*.mlp.act_fn.alpha_p",
            "layers.*.mlp.activation.alpha_n": "model.layers.*.mlp.act_fn.alpha_n",
        },
        # Numbers of xIELU that are not trained.
        constants={"model.layers.*.mlp.act_fn.beta": 0.5, "model.layers.*.mlp.act_fn.eps": -1e-6},
        fields=same("attention_bias"),
        defaults={"hidden_act": "xielu", "rms_norm_eps": 1e-5, "attention_bias": False},
        activations=same("xielu"),
    ),
)
