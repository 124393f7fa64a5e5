"""GLM-4 (arXiv 2406.12793) and GLM-4-0414: Llama with a rotated part of each head, and with norms behind branches too.

Its weights are those of Llama (megapar_models.llama.model). Norms behind branches are attention_output_norm and
mlp_output_norm of each layer.
"""

from dataclasses import dataclass, replace

from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.partial_rotary import PartialRotaryModel, partial_rotary
from megapar_models.stage import Stage


@dataclass(frozen=True)
class GlmModel(PartialRotaryModel):
    """The options of GLM-4."""

    attention_bias: bool = False
    """Biases on the query, key and value projections."""
    output_norms: bool = False
    """Norms of what attention and MLP add to the residual stream (GLM-4-0414 has them)."""


class GlmStage(Stage[GlmModel]):
    """Consecutive GLM-4 layers."""

    @classmethod
    def layer_kind(cls, model: GlmModel, number: int) -> LayerKind:
        kind = LayerKind(norm=NormRule(model.rms_norm_eps), rotary=partial_rotary(model), qkv_bias=model.attention_bias)
        if model.output_norms:
            return replace(kind, norms="both")
        return kind
