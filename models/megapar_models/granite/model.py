"""Granite 3: Llama with factors of embeddings, scores, branches and logits.

The names of the weights are those of Llama (megapar_models.llama.model).
"""

from dataclasses import dataclass, field, replace

from typing_extensions import TypeVar

from megapar.config.model_options import OF_FUNCTION
from megapar.tensor_parallel.cross_entropy import LogitRule
from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary
from megapar_models.rotary_options import RotaryModel
from megapar_models.stage import Stage


@dataclass(frozen=True)
class GraniteModel(RotaryModel):
    """The options of Granite."""

    attention_bias: bool = False
    """Biases of all projections of attention."""
    embedding_multiplier: float = field(default=1.0, metadata=OF_FUNCTION)
    """The factor of token embeddings."""
    attention_multiplier: float = field(default=0.0, metadata=OF_FUNCTION)
    """The factor of scores; 0: 1 / sqrt(width of a head)."""
    residual_multiplier: float = field(default=1.0, metadata=OF_FUNCTION)
    """The factor of the outputs of attention and MLP."""
    logits_scaling: float = field(default=1.0, metadata=OF_FUNCTION)
    """Logits are divided by it."""


@dataclass(frozen=True)
class DenseGraniteModel(GraniteModel):
    """The options of Granite without experts."""

    mlp_bias: bool = False
    """Biases of all matrices of the MLP."""


G = TypeVar("G", bound=GraniteModel, default=GraniteModel)


class GraniteStage(Stage[G]):
    """Consecutive layers with the factors of Granite."""

    @classmethod
    def layer_kind(cls, model: G, number: int) -> LayerKind:
        return LayerKind(
            norm=NormRule(model.rms_norm_eps),
            rotary=Rotary.of(model),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            attention_scale=model.attention_multiplier or None,
            residual_multiplier=model.residual_multiplier,
        )

    @classmethod
    def ends_of(cls, model: G) -> Ends:
        return Ends(embedding_multiplier=model.embedding_multiplier, logits=LogitRule(1.0 / model.logits_scaling))


class DenseGraniteStage(GraniteStage[DenseGraniteModel]):
    """Consecutive layers of Granite without experts."""

    @classmethod
    def layer_kind(cls, model: DenseGraniteModel, number: int) -> LayerKind:
        return replace(super().layer_kind(model, number), mlp_bias=model.mlp_bias)
