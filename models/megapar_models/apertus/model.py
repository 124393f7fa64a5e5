"""Apertus (arXiv 2509.14233): Llama with norms of queries and keys, and an MLP without gate of xIELU.

Its weights are those of Llama (megapar_models.llama.model) without layers.N.mlp.gate, and these, with d the width of a
head:

    layers.N.attention.{q,k}_norm.weight    [d]     on every tp rank; each computes a part of its gradient
    layers.N.mlp.activation.alpha_{p,n}     [1]     on every tp rank; each computes a part of its gradient
"""

from dataclasses import dataclass

from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary
from megapar_models.rotary_options import RotaryModel
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
