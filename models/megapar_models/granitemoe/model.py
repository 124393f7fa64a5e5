"""The mixtures of Granite 3: the factors of Granite, and experts in place of the MLP.

The names of the weights are those of Mixtral (megapar_models.mixtral.model).
"""

from dataclasses import dataclass, replace

from megapar.config.model_options import MixtureModel
from megapar_models.granite.model import GraniteModel, GraniteStage
from megapar_models.layer_kind import LayerKind


@dataclass(frozen=True)
class GraniteMoeModel(MixtureModel, GraniteModel):
    """The options of Granite's mixtures."""


class GraniteMoeStage(GraniteStage[GraniteMoeModel]):
    """Consecutive layers of Granite with experts."""

    @classmethod
    def layer_kind(cls, model: GraniteMoeModel, number: int) -> LayerKind:
        return replace(super().layer_kind(model, number), mlp="mixture", mixture=model.moe)
