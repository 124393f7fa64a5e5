"""StableLM 3B and 2 (arXiv 2402.17834): Llama with LayerNorm and a rotated part of each head.

By option attention and MLP read the same residual stream through one norm. Its weights are those of Llama
(megapar_models.llama.model); norms also have a bias.
"""

from dataclasses import dataclass

from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.partial_rotary import PartialRotaryModel, partial_rotary
from megapar_models.stage import Stage


@dataclass(frozen=True)
class StableLmModel(PartialRotaryModel):
    """The options of StableLM."""

    attention_bias: bool = False
    """Biases of the query, key and value projections."""
    parallel_residual: bool = False
    """Attention and MLP read the same residual stream, through one norm."""


class StableLmStage(Stage[StableLmModel]):
    """Consecutive StableLM layers."""

    @classmethod
    def layer_kind(cls, model: StableLmModel, number: int) -> LayerKind:
        return LayerKind(
            norm=NormRule(model.rms_norm_eps, "layer"),
            parallel="one_norm" if model.parallel_residual else "no",
            rotary=partial_rotary(model),
            qkv_bias=model.attention_bias,
        )
