"""Qwen3-MoE (arXiv 2505.09388): Mixtral's layers with norms of q and k, and some layers with a plain MLP.

Its weights are those of Mixtral (megapar_models.mixtral.model). The layers in model.moe.mlp_only_layers have those of
Llama.
"""

from dataclasses import replace

from megapar.config.options import ModelConfig
from megapar_models.layer_kind import LayerKind
from megapar_models.mixtral.model import MixtralStage


class Qwen3MoeStage(MixtralStage):
    """Consecutive layers of Qwen3-MoE."""

    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        if number in model.moe.mlp_only_layers:
            return replace(kind, mlp="dense", mixture=None)
        return kind
