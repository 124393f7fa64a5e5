"""gpt-oss (arXiv 2508.10925): a mixture with biases everywhere, sinks, and windows on every second layer.

Its weights are those of Mixtral (megapar_models.mixtral.model), and these. Sizes are h hidden, f the width of an
expert, and E experts:

    layers.N.attention.{q,k,v}.bias             one for each row of the weight, cut with it
    layers.N.attention.o.bias                   [h]       on every tp rank
    layers.N.attention.sinks                    [heads]   cut by heads
    layers.N.mlp.router.logit_bias              [E]       on every tp rank; each computes a part of its gradient
    layers.N.mlp.experts.K.{gate,up}.bias       [f]       on the ep rank of expert K; cut over etp
    layers.N.mlp.experts.K.down.bias            [h]       on the ep rank of expert K
"""

from dataclasses import dataclass, field, replace

from megapar.config.model_options import OF_FUNCTION
from megapar_models.layer_kind import LayerKind
from megapar_models.mixtral.model import MixtralModel, MixtralStage


@dataclass(frozen=True)
class GptOssModel(MixtralModel):
    """The options of gpt-oss."""

    attention_bias: bool = True
    """Biases on the query, key, value and output projections."""
    sliding_window: int = field(default=128, metadata=OF_FUNCTION)
    """Keys that layers 0, 2, 4 and so on read, the token's own among them; the other layers read all."""
    swiglu_limit: float = field(default=7.0, metadata=OF_FUNCTION)
    """Bound of the gate (from above) and of up (on both sides) in the activation of experts."""


class GptOssStage(MixtralStage[GptOssModel]):
    """Consecutive layers of gpt-oss."""

    @classmethod
    def layer_kind(cls, model: GptOssModel, number: int) -> LayerKind:
        return replace(
            super().layer_kind(model, number),
            window=model.sliding_window * (number % 2 == 0),
            sinks=True,
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            activation="clamped_swiglu",
            activation_limit=model.swiglu_limit,
            router_bias=True,
            router_dtype="model",
            expert_bias=True,
        )
