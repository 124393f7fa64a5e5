"""Gemma (arXiv 2403.08295): Llama with embeddings times sqrt(hidden_size), norms times 1 + weight, and a gate of GELU.

The names of the weights are those of Llama (megapar_models.llama.model).
"""

import math
from dataclasses import dataclass

from typing_extensions import TypeVar

from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary
from megapar_models.rotary_options import RotaryModel
from megapar_models.stage import Stage


@dataclass(frozen=True)
class GemmaModel(RotaryModel):
    """The options of Gemma."""

    attention_bias: bool = False
    """Biases of all projections of attention."""


G = TypeVar("G", bound=GemmaModel, default=GemmaModel)


class GemmaStage(Stage[G]):
    """Consecutive Gemma layers."""

    @classmethod
    def layer_kind(cls, model: G, number: int) -> LayerKind:
        return LayerKind(
            norm=NormRule(model.rms_norm_eps, offset=1),
            rotary=Rotary.of(model),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
        )

    @classmethod
    def ends_of(cls, model: G) -> Ends:
        return Ends(embedding_multiplier=math.sqrt(model.hidden_size))
