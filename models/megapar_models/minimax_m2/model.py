"""MiniMax-M2: Mixtral's layers with norms of all of q and k, a rotated part of each head, and DeepSeek-V3's router.

Its weights are those of Mixtral (megapar_models.mixtral.model), with layers.N.attention.q_norm and k_norm as wide as
the projections, and a bias by which each router selects.
"""

from dataclasses import dataclass, field, replace

from megapar.config.model_options import MoEConfig
from megapar_models.layer_kind import LayerKind
from megapar_models.mixtral.model import MixtralModel, MixtralStage
from megapar_models.partial_rotary import PartialRotaryModel, partial_rotary


@dataclass(frozen=True)
class MiniMaxM2Model(MixtralModel, PartialRotaryModel):
    """The options of MiniMax-M2."""

    moe: MoEConfig = field(default_factory=MoEConfig)
    """Mixture of experts."""


class MiniMaxM2Stage(MixtralStage[MiniMaxM2Model]):
    """Consecutive layers of MiniMax-M2."""

    @classmethod
    def layer_kind(cls, model: MiniMaxM2Model, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        return replace(kind, rotary=partial_rotary(model), qk_norm=True, qk_norm_over="width")
