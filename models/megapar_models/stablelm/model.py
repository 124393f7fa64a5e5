"""StableLM 3B and 2 (arXiv 2402.17834): Llama with LayerNorm and a rotated part of each head.

By option attention and MLP read the same residual stream through one norm, and each head of queries and keys has a
norm. Its weights are those of Llama (megapar_models.llama.model). Norms of the residual stream also have a bias. With
norms of heads (StableLM 2 12B) there are these, with d the width of a head:

    layers.N.attention.q_norm.weight    [heads * d]       cut by heads
    layers.N.attention.k_norm.weight    [kv heads * d]    cut by heads; several ranks may hold the same head
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
    qk_norm: bool = False
    """LayerNorm of each query and key head before the rotary embedding, with weights of its own (StableLM 2 12B)."""


class StableLmStage(Stage[StableLmModel]):
    """Consecutive StableLM layers."""

    @classmethod
    def layer_kind(cls, model: StableLmModel, number: int) -> LayerKind:
        return LayerKind(
            norm=NormRule(model.rms_norm_eps, "layer"),
            parallel="one_norm" if model.parallel_residual else "no",
            rotary=partial_rotary(model),
            qk_norm=model.qk_norm,
            qk_norm_over="each_head",
            qk_norm_rule=NormRule(model.rms_norm_eps, "layer", biased=False),
            qkv_bias=model.attention_bias,
        )
