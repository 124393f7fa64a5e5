"""Arcee's AFM (Arcee AI, 2025): Llama with an MLP without gate, of squared ReLU (So et al., arXiv 2109.08668).

Its weights are those of Llama (megapar_models.families.llama), without layers.N.mlp.gate.

At Hugging Face: arcee.
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
class ArceeModel(RotaryModel):
    """The options of AFM."""

    attention_bias: bool = False
    """Biases of all projections of attention."""
    mlp_bias: bool = False
    """Biases of both matrices of the MLP."""


class ArceeStage(Stage[ArceeModel]):
    """Consecutive layers of AFM."""

    @classmethod
    def layer_kind(cls, model: ArceeModel, number: int) -> LayerKind:
        return LayerKind(
            mlp="plain",
            norm=NormRule(model.rms_norm_eps),
            rotary=Rotary.of(model),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            mlp_bias=model.mlp_bias,
        )


ARCEE = Family(
    name="arcee",
    stage=ArceeStage,
    activations=("relu2", "silu", "gelu_pytorch_tanh"),
    options=ArceeModel,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={
            "arcee": ModelType("ArceeForCausalLM", fixed={"attention_dropout": 0.0, "partial_rotary_factor": 1.0})
        },
        codecs=(EvenHeads(), Rope()),
        modules={"layers.*.mlp.gate": None},
        fields=same("attention_bias", "mlp_bias"),
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False},
        activations=same("relu2", "silu", "gelu_pytorch_tanh"),
    ),
)
