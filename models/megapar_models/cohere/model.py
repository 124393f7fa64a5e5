"""Cohere's Command R and Command R7B: parallel branches behind one LayerNorm without bias, and scaled logits.

The layers of Command R7B that read all keys see no positions (NoPE). The others have a window and rotary positions.

The names of the weights are those of Llama (megapar_models.llama.model), without layers.N.mlp_norm.
"""

from dataclasses import dataclass, field

from megapar.config.options import OF_FUNCTION
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
            rotary=Rotary.of(model) if sees_positions else None,
            window=window_of(model, number),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
        )

    @classmethod
    def ends_of(cls, model: CohereModel) -> Ends:
        return Ends(logits=LogitRule(model.logit_scale))
