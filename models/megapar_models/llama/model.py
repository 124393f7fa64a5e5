"""Llama 2 and 3 (arXiv 2302.13971, 2307.09288, 2407.21783), with options also Mistral, Qwen2 and Qwen3.

The model has RMSNorm before attention and before the MLP, rotary positions, SwiGLU, and grouped-query attention.
Options add biases to q, k and v, norms of q and k, and tied embeddings.

These are the weights of the whole model. Each matrix is [out, in]. tp cuts it by its output dimension in a
ColumnParallelLinear and by its input dimension in a RowParallelLinear. Sizes are h hidden, i intermediate,
v vocabulary, and d the width of a head:

    embedding.weight                        [v, h]              cut by vocabulary
    layers.N.attention_norm.weight          [h]                 on every tp rank
    layers.N.attention.q.weight             [heads * d, h]      cut by output: each rank has its heads
    layers.N.attention.{k,v}.weight         [kv heads * d, h]   cut by output; several ranks may hold the same head
    layers.N.attention.o.weight             [h, heads * d]      cut by input
    layers.N.mlp_norm.weight                [h]                 on every tp rank
    layers.N.mlp.{gate,up}.weight           [i, h]              cut by output
    layers.N.mlp.down.weight                [h, i]              cut by input
    norm.weight                             [h]                 on every tp rank
    head.weight (unless tied)               [v, h]              cut by output, which is the vocabulary

The end of a tensor's name gives its dimensions: x_sbh is [s, b, h], with s the sequence (s/tp between layers under
sequence parallelism) and b the micro-batch.

What a layer is made of: `LlamaStage.layer_kind`. Read megapar_models.layer next: it is what a layer computes. Then
megapar_models.stage: the model from tokens to the loss.
"""

from dataclasses import dataclass

from typing_extensions import TypeVar

from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary
from megapar_models.stage import Stage
from megapar_models.windows import WindowModel, window_of


@dataclass(frozen=True)
class LlamaModel(WindowModel):
    """The options of Llama, and of Mistral, Qwen2, Qwen3 and Seed-OSS."""

    attention_bias: bool = False
    """Biases on the query, key and value projections (Qwen2 sets it)."""
    attention_out_bias: bool = False
    """A bias on the output projection of attention."""
    mlp_bias: bool = False
    """Biases on the three matrices of the MLP."""
    qk_norm: bool = False
    """RMSNorm over each head's query and key before the rotary embedding (Qwen3 sets it)."""


L = TypeVar("L", bound=LlamaModel, default=LlamaModel)


class LlamaStage(Stage[L]):
    """Consecutive Llama layers."""

    @classmethod
    def layer_kind(cls, model: L, number: int) -> LayerKind:
        return LayerKind(
            norm=NormRule(model.rms_norm_eps),
            rotary=Rotary.of(model),
            window=window_of(model, number),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_out_bias,
            qk_norm=model.qk_norm,
            mlp_bias=model.mlp_bias,
        )
