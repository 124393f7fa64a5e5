"""ERNIE 4.5's mixtures of text (Baidu, 2025): Mixtral's layers, with shared experts and a bias that selects.

The first layers have a plain MLP. The weights are those of Mixtral (megapar_models.mixtral.model).
"""

from dataclasses import dataclass, field

from megapar_models.deepseek.model import DeepseekExperts, with_experts
from megapar_models.layer_kind import LayerKind
from megapar_models.mixtral.model import MixtralModel, MixtralStage


@dataclass(frozen=True)
class ErnieMoeModel(MixtralModel):
    """The options of ERNIE 4.5's mixtures."""

    moe: DeepseekExperts = field(default_factory=DeepseekExperts)
    """Mixture of experts."""


class ErnieMoeStage(MixtralStage[ErnieMoeModel]):
    """Consecutive layers of an ERNIE 4.5 mixture."""

    @classmethod
    def layer_kind(cls, model: ErnieMoeModel, number: int) -> LayerKind:
        return with_experts(super().layer_kind(model, number), model.moe, number)
