"""GPT-2 (Radford et al., 2019).

It has learned positions, LayerNorm before attention and before the MLP, GELU, biases in all linear layers, and dropout.
An option ties the embeddings.

At Hugging Face: gpt2. Checkpoints of Megatron-LM's GPT are read and written too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch.nn.functional as F
from megapar_kernels.dropout import dropout_add, keep_mask
from torch import Tensor, nn

from megapar.base.errors import ConfigError
from megapar.config.model_options import OF_TRAINING, ModelConfig
from megapar.declare.params import shared_piece
from megapar_models.attention import Attention
from megapar_models.codecs import Written
from megapar_models.factory import Factory
from megapar_models.family import Codec, Family, HuggingFace, Megatron, ModelType, Raw, same
from megapar_models.forward import DropoutSite, ForwardContext, dropout_use, hidden_keys, rows_of_rank
from megapar_models.layer_kind import LayerKind
from megapar_models.mlp import PlainMLP
from megapar_models.norms import NormRule, add_and_norm
from megapar_models.reference import gpt_logits
from megapar_models.stage import Stage
from megapar_models.tensor_layouts import Packing


@dataclass(frozen=True)
class GPTModel(ModelConfig):
    """The options of GPT-2."""

    hidden_dropout: float = field(default=0.0, metadata=OF_TRAINING)
    """Dropout after embedding, attention and MLP."""
    attention_dropout: float = field(default=0.0, metadata=OF_TRAINING)
    """Dropout on attention probabilities."""


class GPTLayer(nn.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))).

    With norms of the stream, norm(x + dropout(attention(x))), then norm(x + dropout(mlp(x))).
    """

    def __init__(self, number: int, kind: LayerKind, model: GPTModel, factory: Factory):
        super().__init__()
        name = f"layers.{number}"
        self.number = number
        self.sharding = factory.sharding
        self.norms = kind.norms
        self.dropout = model.hidden_dropout
        self.impl = factory.kernels.dropout
        self.attention_norm = factory.norm(f"{name}.attention_norm", model.hidden_size, kind.norm)
        self.attention = Attention(number, kind, model, factory)
        self.mlp_norm = factory.norm(f"{name}.mlp_norm", model.hidden_size, kind.norm)
        self.mlp = PlainMLP(number, kind, model, factory)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        if self.norms == "stream":
            y_sbh = self._add(self.attention(x_sbh, context), x_sbh, context, DropoutSite.ATTENTION_OUTPUT)
            x_sbh = self.attention_norm(y_sbh)
            y_sbh = self._add(self.mlp(x_sbh, context), x_sbh, context, DropoutSite.MLP_OUTPUT)
            return self.mlp_norm(y_sbh)
        y_sbh = self.attention(add_and_norm(self.attention_norm, x_sbh)[0], context)
        if self._dropout():
            x_sbh = self._add(y_sbh, x_sbh, context, DropoutSite.ATTENTION_OUTPUT)
            normed, _ = add_and_norm(self.mlp_norm, x_sbh)
        else:
            normed, x_sbh = add_and_norm(self.mlp_norm, x_sbh, y_sbh)
        return self._add(self.mlp(normed, context), x_sbh, context, DropoutSite.MLP_OUTPUT)

    def _dropout(self) -> float:
        if self.training:
            return self.dropout
        return 0.0

    def _add(self, y_sbh: Tensor, residual_sbh: Tensor, context: ForwardContext, site: DropoutSite) -> Tensor:
        p = self._dropout()
        keys = None
        if p:
            keys = hidden_keys(context, dropout_use(self.number, site), self.sharding)
        return dropout_add(y_sbh, residual_sbh, keys, p, self.impl)


class GPTStage(Stage[GPTModel]):
    """Consecutive GPT-2 layers. The first stage also has the table of learned positions."""

    sizes_of_weights: tuple[str, ...] = ("model.max_position_embeddings",)
    first_position = 0
    """The row of the table for position 0."""
    learns_positions: ClassVar[bool] = True
    """Whether the table is a parameter. If not, a subclass computes its rows (`embedded_positions`)."""

    def __init__(self, model: GPTModel, factory: Factory, layers: range, **options: Any):
        super().__init__(model, factory, layers, **options)
        self.positions = None
        if self.first and self.learns_positions:
            sharding = factory.sharding
            shape = (self.first_position + model.max_position_embeddings, model.hidden_size)
            # Under sequence parallelism each tp rank adds the positions of its part of the sequence. Its gradient of
            # the table is then a partial sum.
            piece = shared_piece("positions.weight", shape, sharding.tp, partial=sharding.sequence_parallel)
            self.positions = sharding.parameter((piece,), shape, factory.init, decay=True)

    @classmethod
    def layer_kind(cls, model: GPTModel, number: int) -> LayerKind:
        return LayerKind(
            mlp="plain",
            norm=NormRule(model.rms_norm_eps, "layer"),
            mlp_bias=True,
            qkv_bias=True,
            out_bias=True,
            attention_dropout=model.attention_dropout,
        )

    def make_layer(self, number: int, kind: LayerKind) -> nn.Module:
        return GPTLayer(number, kind, self.model, self.factory)

    def embed(self, context: ForwardContext) -> Tensor:
        """Token plus position embeddings after dropout, [s or s/tp, b, h].

        Positions count from the start of a document. Under sequence parallelism each rank adds those of its rows.
        """
        batch = context.batch
        sharding = self.factory.sharding
        x_sbh = super().embed(context)
        p = self.model.hidden_dropout if self.training else 0.0
        positions = batch.positions_s[:, None] if batch.starts is None else batch.document_positions_bs().t()
        x_sbh = x_sbh + self.embedded_positions(rows_of_rank(positions, sharding) + self.first_position)
        if not p:
            return x_sbh
        keys = hidden_keys(context, dropout_use(0, DropoutSite.EMBEDDING), sharding)
        return x_sbh * keep_mask(keys, x_sbh.shape[-1], p) / (1.0 - p)

    def embedded_positions(self, rows: Tensor) -> Tensor:
        """Return these rows of the table of positions, [..., h] of int64 [...]."""
        assert self.positions is not None
        return F.embedding(rows, self.positions)


@dataclass(frozen=True)
class Dropout(Codec):
    """Dropout of embeddings and of the residual stream: ours is one for both."""

    embedding: str = "embd_pdrop"
    residual: str = "resid_pdrop"
    default: float = 0.1
    """transformers' value for absent fields."""

    def warnings(self, raw: Raw, family: str) -> Iterator[str]:
        embedding, residual = (raw.get(name, self.default) for name in (self.embedding, self.residual))
        if embedding != residual:
            both = "model.hidden_dropout is the latter for both, and training may choose another"
            yield f"config.json: {self.embedding}={embedding} differs from {self.residual}={residual}: {both}"

    def write(self, model: GPTModel, fields: dict[str, Any]) -> None:
        fields[self.embedding] = model.hidden_dropout


class _Heads(Codec):
    def write(self, model: GPTModel, fields: dict[str, Any]) -> None:
        # config.json of gpt2 has no field for grouped-query attention or for the width of a head.
        whole = model.num_key_value_heads == model.num_attention_heads
        if not whole or model.num_attention_heads * model.head_dim != model.hidden_size:
            raise ConfigError(
                "model.num_key_value_heads, model.head_dim: gpt2 of Hugging Face has as many key/value heads as heads, "
                "of width hidden_size / num_attention_heads"
            )
        # Two names of one function. GPT-2's own config.json has this one.
        if model.hidden_act == "gelu_pytorch_tanh":
            fields["activation_function"] = "gelu_new"


# Fields of the head of classifiers.
SUMMARY = tuple(f"summary_{name}" for name in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj"))
# The number of positions under its old name, and an order of operations for fp16.
WITHOUT_EFFECT = ("n_ctx", "reorder_and_upcast_attn", *SUMMARY)
_FIXED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
_LAYER = "transformer.h.*"
# Modules of the class Conv1D, whose weights are [in, out]. Those of Linear are [out, in].
_CONV1D = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")

GPT = Family(
    name="gpt",
    stage=GPTStage,
    reference=gpt_logits,
    activations=("gelu_pytorch_tanh", "relu2"),
    options=GPTModel,
    hugging_face=HuggingFace(
        model_types={"gpt2": ModelType("GPT2LMHeadModel", fixed=_FIXED)},
        codecs=(_Heads(), Dropout(), Written(_FIXED)),
        modules={
            "embedding": "transformer.wte",
            "positions": "transformer.wpe",
            "layers.*.attention_norm": f"{_LAYER}.ln_1",
            # c_attn stacks the weights of q, k and v.
            **dict.fromkeys((f"layers.*.attention.{name}" for name in "qkv"), f"{_LAYER}.attn.c_attn"),
            "layers.*.attention.o": f"{_LAYER}.attn.c_proj",
            "layers.*.mlp_norm": f"{_LAYER}.ln_2",
            "layers.*.mlp.up": f"{_LAYER}.mlp.c_fc",
            "layers.*.mlp.down": f"{_LAYER}.mlp.c_proj",
            "norm": "transformer.ln_f",
            "head": "lm_head",
        },
        layouts={f"{_LAYER}.{name}": Packing(transposed=True) for name in _CONV1D},
        fields={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_inner": "intermediate_size",
            "vocab_size": "vocab_size",
            "n_positions": "max_position_embeddings",
            "activation_function": "hidden_act",
            "layer_norm_epsilon": "rms_norm_eps",
            "tie_word_embeddings": "tie_word_embeddings",
            "resid_pdrop": "hidden_dropout",
            "attn_pdrop": "attention_dropout",
            "initializer_range": "initializer_range",
        },
        defaults={
            **{"n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5},
            **{"tie_word_embeddings": True, "resid_pdrop": 0.1, "attn_pdrop": 0.1, "initializer_range": 0.02},
        },
        activations={"gelu_new": "gelu_pytorch_tanh", **same("gelu_pytorch_tanh", "relu2")},
        tied={"lm_head.weight": "transformer.wte.weight"},
        base_prefix="transformer.",
        without_effect=WITHOUT_EFFECT,
    ),
    megatron=Megatron(
        swiglu=False, normalization="LayerNorm", position_embedding_type="learned_absolute", add_bias_linear=True
    ),
)
