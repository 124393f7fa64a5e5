"""GLM-4.5 (arXiv 2508.06471): Llama's attention, rotated in part, with DeepSeek-V3's experts behind the first layers.

Its weights are those of Llama and of Mixtral (megapar_models.llama.model, megapar_models.mixtral.model).
"""

from dataclasses import dataclass, field, replace

from megapar.config.model_options import OF_FUNCTION
from megapar_models.deepseek.model import DeepseekExperts, with_experts
from megapar_models.layer_kind import LayerKind
from megapar_models.mixtral.model import MixtralModel, MixtralStage
from megapar_models.rotary import Rotary


@dataclass(frozen=True)
class Glm4MoeModel(MixtralModel):
    """The options of GLM-4.5."""

    moe: DeepseekExperts = field(default_factory=DeepseekExperts)
    """Mixture of experts."""
    attention_bias: bool = False
    """Biases on the query, key and value projections."""
    qk_norm: bool = False
    """RMSNorm over each head's query and key before the rotary embedding."""
    partial_rotary_factor: float = field(default=0.5, metadata=OF_FUNCTION)
    """The share of a head's dimensions, its first ones, that is rotated."""


class Glm4MoeStage(MixtralStage[Glm4MoeModel]):
    """Consecutive layers of GLM-4.5."""

    @classmethod
    def layer_kind(cls, model: Glm4MoeModel, number: int) -> LayerKind:
        width = int(model.head_dim * model.partial_rotary_factor)
        kind = replace(
            super().layer_kind(model, number),
            rotary=Rotary(model.rope_theta, width, model.rope_scaling),
            qkv_bias=model.attention_bias,
            qk_norm=model.qk_norm,
        )
        return with_experts(kind, model.moe, number)
