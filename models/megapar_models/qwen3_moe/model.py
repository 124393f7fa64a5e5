"""Qwen3-MoE (arXiv 2505.09388): Mixtral's layers with norms of q and k, and some layers with a plain MLP.

Its weights are those of Mixtral (megapar_models.mixtral.model). The layers that model.moe.mlp_only_layers names have
those of Llama.
"""

from torch import nn

from megapar_models.llama.model import LlamaLayer, LlamaStage
from megapar_models.mixtral.model import MixtralLayer


class Qwen3MoeStage(LlamaStage):
    """Consecutive layers of Qwen3-MoE."""

    def make_layer(self, number: int) -> nn.Module:
        if number in self.blueprint.model.moe.mlp_only_layers:
            return LlamaLayer(number, self.blueprint)
        return MixtralLayer(number, self.blueprint)
