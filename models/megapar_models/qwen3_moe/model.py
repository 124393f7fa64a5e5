"""Qwen3-MoE (arXiv 2505.09388): Mixtral's layers with norms of q and k, and some layers with a plain MLP.

Qwen2-MoE (arXiv 2407.10671) has biases in place of the norms, and a shared expert with a gate. The weights are those of
Mixtral (megapar_models.mixtral.model). The layers in model.moe.mlp_only_layers have those of Llama.
"""

from dataclasses import dataclass, field, replace

from megapar.config.model_options import MoEConfig
from megapar_models.layer_kind import LayerKind
from megapar_models.mixtral.model import MixtralModel, MixtralStage


@dataclass(frozen=True)
class Qwen3MoeExperts(MoEConfig):
    """A mixture whose layers are not all of experts."""

    mlp_only_layers: tuple[int, ...] = ()
    """Numbers of the layers, from 0, that have a plain MLP of width model.intermediate_size in place of experts, such
    as 0 1 2."""


@dataclass(frozen=True)
class Qwen3MoeModel(MixtralModel):
    """The options of Qwen3's mixtures."""

    moe: Qwen3MoeExperts = field(default_factory=Qwen3MoeExperts)
    """Mixture of experts."""
    qk_norm: bool = False
    """RMSNorm over each head's query and key before the rotary embedding."""
    attention_bias: bool = False
    """Biases of the query, key and value projections (Qwen2-MoE)."""


class Qwen3MoeStage(MixtralStage[Qwen3MoeModel]):
    """Consecutive layers of Qwen3-MoE."""

    @classmethod
    def layer_kind(cls, model: Qwen3MoeModel, number: int) -> LayerKind:
        kind = replace(super().layer_kind(model, number), qk_norm=model.qk_norm, qkv_bias=model.attention_bias)
        if number in model.moe.mlp_only_layers:
            return replace(kind, mlp="dense", mixture=None)
        return kind
