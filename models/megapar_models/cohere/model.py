"""Cohere's Command R and Command R7B: parallel branches behind one LayerNorm without bias, and scaled logits.

The layers of Command R7B that read all keys see no positions (NoPE). The others have a window and rotary positions.

The names of the weights are those of Llama (megapar_models.llama.model), without layers.N.mlp_norm. Command R+ also has
these, with d the width of a head:

    layers.N.attention.q_norm.weight    [heads * d]       cut by heads
    layers.N.attention.k_norm.weight    [kv heads * d]    cut by heads; several ranks may hold the same head
"""

from dataclasses import dataclass, field

from megapar.config.model_options import OF_FUNCTION
from megapar.tensor_parallel.cross_entropy import LogitRule
from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary
from megapar_models.stage import Stage
from megapar_models.windows import WindowModel, is_full, window_of


@dataclass(frozen=True)
class CohereModel(WindowModel):
    """The options of Cohere's models. With a window, layers without it have no rotary positions."""

    attention_bias: bool = False
    """Biases of all projections of attention."""
    qk_norm: bool = False
    """LayerNorm of each query and key head before the rotary embedding, with weights of its own (Command R+)."""
    logit_scale: float = field(default=1.0, metadata=OF_FUNCTION)
    """The factor of logits."""


class CohereStage(Stage[CohereModel]):
    """Consecutive layers of Cohere's models."""

    @classmethod
    def layer_kind(cls, model: CohereModel, number: int) -> LayerKind:
        sees_positions = not model.sliding_window or not is_full(model, number)
        return LayerKind(
            norm=NormRule(model.rms_norm_eps, "layer", biased=False),
            parallel="one_norm",
            qk_norm=model.qk_norm,
            qk_norm_over="each_head",
            rotary=Rotary.of(model) if sees_positions else None,
            window=window_of(model, number),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
        )

    @classmethod
    def ends_of(cls, model: CohereModel) -> Ends:
        return Ends(logits=LogitRule(model.logit_scale))
