"""Ministral 3 (Mistral AI, 2025): Llama with YaRN, and with a factor of queries that grows with the position.

Its weights are those of Llama (megapar_models.llama.model).
"""

from dataclasses import dataclass, field

from megapar.config.model_options import OF_FUNCTION
from megapar_models.layer_kind import LayerKind, Temperature
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary
from megapar_models.stage import Stage
from megapar_models.windows import WindowModel, window_of


@dataclass(frozen=True)
class Ministral3Model(WindowModel):
    """The options of Ministral 3."""

    llama_4_scaling_beta: float = field(default=0.0, metadata=OF_FUNCTION)
    """Queries are multiplied by 1 + beta ln(1 + floor(position / rope_scaling.original_max_position_embeddings))."""


class Ministral3Stage(Stage[Ministral3Model]):
    """Consecutive layers of Ministral 3."""

    @classmethod
    def layer_kind(cls, model: Ministral3Model, number: int) -> LayerKind:
        temperature = None
        if model.llama_4_scaling_beta:
            original = model.rope_scaling.original_max_position_embeddings
            temperature = Temperature(model.llama_4_scaling_beta, original)
        return LayerKind(
            norm=NormRule(model.rms_norm_eps),
            rotary=Rotary.of(model),
            window=window_of(model, number),
            temperature=temperature,
        )
