"""Jais 2 (Inception, 2025): Llama with LayerNorm, biases, and an MLP without gate of squared ReLU.

Its weights are those of Llama (megapar_models.families.llama), without layers.N.mlp.gate. Norms also have a bias.

At Hugging Face: jais2.
"""

from dataclasses import dataclass

from megapar_models.codecs import EvenHeads
from megapar_models.families.llama import LLAMA
from megapar_models.family import Family, ModelType, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary, RotaryModel
from megapar_models.rotary_fields import Rope
from megapar_models.stage import Stage


@dataclass(frozen=True)
class Jais2Model(RotaryModel):
    """The options of Jais 2."""

    attention_bias: bool = True
    """Biases of all projections of attention."""
    mlp_bias: bool = True
    """Biases of both matrices of the MLP."""


class Jais2Stage(Stage[Jais2Model]):
    """Consecutive layers of Jais 2."""

    @classmethod
    def layer_kind(cls, model: Jais2Model, number: int) -> LayerKind:
        return LayerKind(
            mlp="plain",
            norm=NormRule(model.rms_norm_eps, "layer"),
            rotary=Rotary.of(model),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            mlp_bias=model.mlp_bias,
        )


_FIXED = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0}

JAIS2 = Family(
    name="jais2",
    stage=Jais2Stage,
    activations=("relu2", "silu", "gelu_pytorch_tanh"),
    options=Jais2Model,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={"jais2": ModelType("Jais2ForCausalLM", fixed=_FIXED)},
        codecs=(EvenHeads(), Rope()),
        modules={"layers.*.mlp.gate": None},
        fields={"layer_norm_eps": "rms_norm_eps", **same("attention_bias", "mlp_bias")},
        defaults={"hidden_act": "relu2", "layer_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True},
        activations=same("relu2", "silu", "gelu_pytorch_tanh"),
    ),
)
