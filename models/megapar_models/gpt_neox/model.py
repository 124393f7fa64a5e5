"""GPT-NeoX (arXiv 2204.06745) and the models after it: Phi, GPT-J and Falcon.

Attention and MLP read the same residual stream, through one norm or a norm each. They have LayerNorm, an MLP without
gate, and a rotated part of each head.

The names of the weights are those of Llama (megapar_models.llama.model), without layers.N.mlp.gate, and with one norm
without layers.N.mlp_norm. Norms also have a bias.
"""

from dataclasses import dataclass
from typing import Literal

from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.norms import NormRule
from megapar_models.partial_rotary import PartialRotaryModel, partial_rotary
from megapar_models.stage import Stage


@dataclass(frozen=True)
class GPTNeoXModel(PartialRotaryModel):
    """The options of GPT-NeoX, Phi, GPT-J and Falcon."""

    parallel_residual: Literal["no", "one_norm", "two_norms"] = "two_norms"
    """Whether attention and MLP read the same residual stream: through one norm, or through a norm each."""
    attention_bias: bool = True
    """Biases of all projections of attention."""
    mlp_bias: bool = True
    """Biases of both matrices of the MLP."""
    head_bias: bool = False
    """A bias of the logits."""
    qk_norm: bool = False
    """LayerNorm of each query and key head before the rotary embedding, with one weight for all heads."""


class GPTNeoXStage(Stage[GPTNeoXModel]):
    """Consecutive layers of GPT-NeoX, Phi, GPT-J or Falcon."""

    @classmethod
    def layer_kind(cls, model: GPTNeoXModel, number: int) -> LayerKind:
        return LayerKind(
            mlp="plain",
            norm=NormRule(model.rms_norm_eps, "layer"),
            parallel=model.parallel_residual,
            rotary=partial_rotary(model),
            qk_norm=model.qk_norm,
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            mlp_bias=model.mlp_bias,
        )

    @classmethod
    def ends_of(cls, model: GPTNeoXModel) -> Ends:
        return Ends(head_bias=model.head_bias)
