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

from dataclasses import replace

from megapar_models.layer_kind import LayerKind
from megapar_models.llama.model import LlamaStage
from megapar_models.stage import M


class MixtralStage(LlamaStage[M]):
    """Consecutive Mixtral layers."""

    @classmethod
    def layer_kind(cls, model: M, number: int) -> LayerKind:
        return replace(super().layer_kind(model, number), mlp="mixture", mixture=model.moe)
