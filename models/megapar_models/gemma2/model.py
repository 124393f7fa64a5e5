"""Gemma 2 and 3 (arXiv 2408.00118, 2503.19786): Gemma with norms behind attention and MLP as well.

Most layers read a window of keys. Gemma 2 caps scores and logits. Gemma 3 normalizes queries and keys, and its layers
with a window have a rotary table of their own.

These are the weights beyond those of Llama (megapar_models.llama.model has the others), with h hidden and d the width
of a head:

    layers.N.attention_output_norm.weight   [h]     on every tp rank
    layers.N.mlp_output_norm.weight         [h]     on every tp rank
    layers.N.attention.{q,k}_norm.weight    [d]     on every tp rank (Gemma 3)
"""

from dataclasses import dataclass, field, replace

from megapar.config.model_options import OF_FUNCTION
from megapar.tensor_parallel.cross_entropy import LogitRule
from megapar_models.gemma.model import GemmaModel, GemmaStage
from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.local_rope import LocalRopeModel, rotary_of
from megapar_models.windows import window_of


@dataclass(frozen=True)
class Gemma2Model(LocalRopeModel, GemmaModel):
    """The options of Gemma 2 and 3."""

    qk_norm: bool = False
    """Norms of each head's query and key before the rotary embedding (Gemma 3)."""
    query_pre_attn_scalar: int = field(default=0, metadata=OF_FUNCTION)
    """Scores are divided by its root; 0: the width of a head."""
    attn_logit_softcapping: float = field(default=0.0, metadata=OF_FUNCTION)
    """Scores x become cap * tanh(x / cap), with this cap; 0: they stay as they are."""
    final_logit_softcapping: float = field(default=0.0, metadata=OF_FUNCTION)
    """Logits x become cap * tanh(x / cap), with this cap; 0: they stay as they are."""


class Gemma2Stage(GemmaStage[Gemma2Model]):
    """Consecutive layers of Gemma 2 or 3."""

    @classmethod
    def layer_kind(cls, model: Gemma2Model, number: int) -> LayerKind:
        return replace(
            super().layer_kind(model, number),
            norms="both",
            rotary=rotary_of(model, number),
            window=window_of(model, number),
            qk_norm=model.qk_norm,
            attention_scale=(model.query_pre_attn_scalar or model.head_dim) ** -0.5,
            score_cap=model.attn_logit_softcapping,
        )

    @classmethod
    def ends_of(cls, model: Gemma2Model) -> Ends:
        return replace(super().ends_of(model), logits=LogitRule(cap=model.final_logit_softcapping))
