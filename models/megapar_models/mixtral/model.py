"""Mixtral (arXiv 2401.04088): Llama with a mixture of experts in place of the MLP.

These are the weights beyond those of Llama (megapar_models.llama.model has the others). Sizes are h hidden,
f the width of an expert, and E experts:

    layers.N.mlp.router.weight                  [E, h]    on every tp rank; each computes a part of its gradient
    layers.N.mlp.router.bias                    [E]       balance=bias alone: no parameter, but state
    layers.N.mlp.experts.K.{gate,up}.weight     [f, h]    on the ep rank of expert K; cut by output over etp
    layers.N.mlp.experts.K.down.weight          [h, f]    on the ep rank of expert K; cut by input over etp
    layers.N.mlp.shared.{gate,up,down}.weight             an expert for every token (optional), cut as an MLP
    layers.N.mlp.shared_gate.weight             [1, h]    on every tp rank (optional)
"""

from dataclasses import dataclass

from typing_extensions import TypeVar

from megapar.config.model_options import MixtureModel
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary
from megapar_models.rotary_options import RotaryModel
from megapar_models.stage import Stage


@dataclass(frozen=True)
class MixtralModel(MixtureModel, RotaryModel):
    """The options of Mixtral."""


X = TypeVar("X", bound=MixtralModel, default=MixtralModel)


class MixtralStage(Stage[X]):
    """Consecutive Mixtral layers."""

    @classmethod
    def layer_kind(cls, model: X, number: int) -> LayerKind:
        return LayerKind(norm=NormRule(model.rms_norm_eps), rotary=Rotary.of(model), mlp="mixture", mixture=model.moe)
