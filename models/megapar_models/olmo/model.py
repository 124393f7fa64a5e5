"""OLMo 1 to 3 (arXiv 2402.00838, 2501.00656, 2512.13961): Llama with other norms.

OLMo 1 has LayerNorm without weights before each branch. OLMo 2 and 3 have RMSNorm behind each branch, and normalize
queries and keys over all heads together. Most layers of OLMo 3 read a window of keys, with a rotary table of their own.

Other weights than those of Llama (megapar_models.llama.model), with h hidden, d the width of a head and `norms` after:

    layers.N.attention_output_norm.weight   [h]             on every tp rank, in place of attention_norm
    layers.N.mlp_output_norm.weight         [h]             on every tp rank, in place of mlp_norm
    layers.N.attention.q_norm.weight        [heads * d]     cut as q
    layers.N.attention.k_norm.weight        [kv heads * d]  cut as k
"""

from dataclasses import dataclass
from typing import Literal

from megapar_models.layer_kind import LayerKind
from megapar_models.local_rope import LocalRopeModel, rotary_of
from megapar_models.norms import NormRule
from megapar_models.stage import Stage
from megapar_models.windows import window_of


@dataclass(frozen=True)
class OlmoModel(LocalRopeModel):
    """The options of OLMo."""

    norms: Literal["before", "after"] = "after"
    """before: LayerNorm without weights of the inputs of attention and MLP (OLMo 1). after: RMSNorm of their outputs,
    and of queries and keys (OLMo 2 and 3)."""
    attention_bias: bool = False
    """Biases of all projections of attention."""


class OlmoStage(Stage[OlmoModel]):
    """Consecutive OLMo layers."""

    @classmethod
    def layer_kind(cls, model: OlmoModel, number: int) -> LayerKind:
        norm = NormRule(model.rms_norm_eps)
        if model.norms == "before":
            norm = NormRule(model.rms_norm_eps, "layer", weighted=False, biased=False)
        return LayerKind(
            norm=norm,
            norms=model.norms,
            rotary=rotary_of(model, number),
            window=window_of(model, number),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            qk_norm=model.norms == "after",
            qk_norm_over="width",
        )
