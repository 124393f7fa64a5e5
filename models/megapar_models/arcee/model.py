"""Arcee's AFM (Arcee AI, 2025): Llama with an MLP without gate, of squared ReLU (So et al., arXiv 2109.08668).

Its weights are those of Llama (megapar_models.llama.model), without layers.N.mlp.gate.
"""

from dataclasses import dataclass

from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary
from megapar_models.rotary_options import RotaryModel
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
