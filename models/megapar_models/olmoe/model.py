"""OLMoE (arXiv 2409.02060): Mixtral with norms of queries and keys, each over all heads together.

Weights beyond those of Mixtral (megapar_models.mixtral.model), with d the width of a head:

    layers.N.attention.q_norm.weight    [heads * d]     cut as q
    layers.N.attention.k_norm.weight    [kv heads * d]  cut as k
"""

from dataclasses import dataclass, replace

from megapar_models.layer_kind import LayerKind
from megapar_models.mixtral.model import MixtralModel, MixtralStage


@dataclass(frozen=True)
class OlmoeModel(MixtralModel):
    """The options of OLMoE."""

    attention_bias: bool = False
    """Biases of all projections of attention."""


class OlmoeStage(MixtralStage[OlmoeModel]):
    """Consecutive OLMoE layers."""

    @classmethod
    def layer_kind(cls, model: OlmoeModel, number: int) -> LayerKind:
        return replace(
            super().layer_kind(model, number),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            qk_norm=True,
            qk_norm_over="width",
        )
