"""One pipeline stage of a decoder-only transformer.

A stage has consecutive layers. The first stage also has the embedding, and the last one the norm, head and loss. Layers
keep their global numbers, so that the names of weights do not depend on the split into stages.

Shapes: s positions of this context-parallel rank (s/tp between layers under sequence parallelism), b micro-batch,
h hidden, v vocabulary, d width of a head.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from megapar_kernels.backend import Kernels
from torch import Tensor, nn

from megapar import recompute
from megapar.batch import MicroBatch, PipelineStage, TensorSpec
from megapar.config.options import ModelConfig
from megapar.context import Axis, ParallelContext
from megapar.expert_parallel.balance import Router, end_step
from megapar.expert_parallel.dispatch import Dispatch
from megapar.params import Init
from megapar.products import TORCH_PRODUCTS, MatrixProducts
from megapar.random import row_keys
from megapar.sharding import Sharding
from megapar.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megapar.tensor_parallel.layers import (
    VocabParallelEmbedding,
    column_linear,
    vocabulary_cut,
    vocabulary_parameter,
)
from megapar.tensor_parallel.linear_cross_entropy import linear_cross_entropy


@dataclass(frozen=True)
class Blueprint:
    """What every module of a model is built from. A stage keeps it; a layer keeps what it needs of it.

    `tied` is the axis of the pipeline ranks that hold copies of a tied embedding. It is None if one rank holds all of
    it, or if the embedding is not tied. `products` are those of linear layers, experts and the head. `loss_chunk` is
    the number of tokens whose logits are in memory at one time; 0 takes all tokens of a micro-batch. `cp_attention` is
    the option parallel.cp_attention.
    """

    model: ModelConfig
    sharding: Sharding
    recompute: recompute.Recompute
    seed: int
    tied: Axis | None = None
    kernels: Kernels = field(default_factory=Kernels)
    products: MatrixProducts = TORCH_PRODUCTS
    z_loss: float = 0.0
    loss_chunk: int = 0
    cp_attention: Literal["gather", "ring", "ulysses"] = "gather"

    @property
    def init(self) -> Init:
        return Init("normal", self.model.initializer_range)

    @property
    def output_init(self) -> Init:
        """The initialization of the two projections that add to the residual stream: GPT-2 scales it by the depth."""
        return Init("normal", self.model.initializer_range / math.sqrt(2 * self.model.num_hidden_layers))


@dataclass(frozen=True)
class ForwardContext:
    """What every layer needs in a forward pass.

    `batch` has the positions, the keys of dropout and the documents. `rope` has the rotary tables cos and sin [s, d];
    it is None in a model without rotary positions. `dispatches` has, by the number of a layer, the experts of the
    tokens, as the first forward pass of the micro-batch chose them. Recomputation uses them again.
    """

    batch: MicroBatch
    rope: tuple[Tensor, Tensor] | None = None
    dispatches: dict[int, Dispatch] = field(default_factory=dict)


class DropoutSite(IntEnum):
    """The places where a model applies dropout. Their numbers are part of a mask's key (`dropout_use`): do not change
    them, or a resumed run draws other masks."""

    EMBEDDING = 0
    ATTENTION_PROBABILITIES = 1
    ATTENTION_OUTPUT = 2
    MLP_OUTPUT = 3


def dropout_use(layer: int, site: DropoutSite) -> int:
    """The number of a site in the whole model. The site of the embedding is counted in layer 0."""
    return len(DropoutSite) * layer + site


def hidden_keys(context: ForwardContext, use: int, seed: int, sharding: Sharding) -> Tensor:
    """The keys [s or s/tp, b] of a dropout mask of hidden states, from sample and global position.

    `use` is the site's number (`dropout_use`).
    """
    position_s = rows_of_rank(context.batch.positions_s, sharding)
    return row_keys(seed, use, context.batch.sample_ids_b[None, :], position_s[:, None])


def rows_of_rank(x_s: Tensor, sharding: Sharding) -> Tensor:
    """The part of [s, ...] that this rank holds between layers: all, or [s/tp, ...] under sequence parallelism."""
    if not sharding.splits_sequence:
        return x_s
    return x_s.chunk(sharding.tp.size)[sharding.tp.rank]


class Stage(PipelineStage):
    """A pipeline stage with the layers `layers`. Families subclass it.

    It has the embedding if `first`, and norm, head and loss if `last`. `tied` is the parameter of the input embedding,
    given to the last stage of a tied model if the first stage is on the same rank. Without it the last stage holds a
    copy, and the gradients of both are summed.
    """

    def __init__(
        self, blueprint: Blueprint, layers: range, *, first: bool, last: bool, tied: nn.Parameter | None = None
    ):
        super().__init__()
        model = blueprint.model
        sharding = blueprint.sharding
        self.blueprint = blueprint
        self.first = first
        self.last = last
        self.embedding = self.norm = None
        if first:
            self.embedding = VocabParallelEmbedding(
                "embedding",
                model.vocab_size,
                model.hidden_size,
                sharding,
                init=blueprint.init,
                tied=blueprint.tied,
            )
        self.layers = nn.ModuleDict({str(number): self.make_layer(number) for number in layers})
        if last:
            self.norm = self.make_norm("norm")
            # One stage is the whole model: the head is the embedding's own parameter.
            if model.tie_word_embeddings and self.embedding is not None:
                tied = self.embedding.weight
            self.head = tied if tied is not None else self._make_head()
            # A loss in chunks adds the gradient of the head while it has the gradients of logits.
            self.adds_gradients_in_i = blueprint.loss_chunk > 0

    def embedding_weight(self) -> nn.Parameter:
        assert self.embedding is not None
        return self.embedding.weight

    def make_layer(self, number: int) -> nn.Module:
        """Make the layer with this global number. It maps (x_sbh, ForwardContext) to x_sbh."""
        raise NotImplementedError

    def make_norm(self, name: str) -> nn.Module:
        raise NotImplementedError

    def embed(self, batch: MicroBatch) -> Tensor:
        """Token embeddings [s or s/tp, b, h]."""
        assert self.embedding is not None
        return self.embedding(batch.tokens_bs.t())

    def run_layers(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        """Run this stage's layers in order. train.recompute decides which of them recompute their activations."""
        for number, layer in self.layers.items():
            x_sbh = recompute.run(self.blueprint.recompute.layer(int(number)), layer, x_sbh, context)
        return x_sbh

    def _make_head(self) -> nn.Parameter:
        model = self.blueprint.model
        # The copy of a tied embedding has the embedding's name: it is one tensor in a checkpoint.
        tie = model.tie_word_embeddings
        return vocabulary_parameter(
            "embedding.weight" if tie else "head.weight",
            model.vocab_size,
            model.hidden_size,
            self.blueprint.sharding,
            init=self.blueprint.init,
            tied=self.blueprint.tied if tie else None,
        )

    def end_step(self, ctx: ParallelContext, found_inf: Tensor) -> Mapping[int, Tensor]:
        """Give each router of this stage the load of its experts in the whole batch. A collective over tp and grad."""
        routers = {
            int(number): module
            for number, layer in self.layers.items()
            for module in layer.modules()
            if isinstance(module, Router)
        }
        counts = end_step(routers.values(), (ctx.tp, ctx.grad), found_inf)
        if counts is None:
            return {}
        return dict(zip(routers, counts, strict=True))

    def title(self) -> str:
        numbers = list(self.layers)
        parts = []
        if self.first:
            parts.append("embedding")
        if numbers:
            parts.append(f"layers {numbers[0]}-{numbers[-1]}")
        if self.last:
            parts.append("head")
        return ", ".join(parts)

    def boundary(self, batch: MicroBatch) -> tuple[TensorSpec, ...]:
        """The tensors that arrive from the previous stage: hidden states, and none on the first stage."""
        if self.first:
            return ()
        sharding = self.blueprint.sharding
        length = batch.seq_length
        if sharding.splits_sequence:
            length //= sharding.tp.size
        return (TensorSpec((length, batch.size, self.blueprint.model.hidden_size), sharding.dtype),)

    def hidden_states(self, x_sbh: Tensor | None, batch: MicroBatch) -> Tensor:
        """The hidden states after this stage's layers. The first stage gets None for x_sbh, and embeds the tokens."""
        raise NotImplementedError

    def forward(self, x_sbh: Tensor | None, batch: MicroBatch) -> Tensor:
        """The hidden states for the next stage; on the last stage the loss sum."""
        raise NotImplementedError

    def logits(self, x_sbh: Tensor) -> Tensor:
        """The logits of this tp rank's part of the vocabulary, [s, b, its columns]. Padding comes last."""
        assert self.norm is not None
        return column_linear(self.norm(x_sbh), self.head, None, self.blueprint.sharding, self.blueprint.products)

    def loss(self, x_sbh: Tensor, batch: MicroBatch) -> Tensor:
        """The sum of weight * cross entropy over targets: 0-d fp32, the same on every tp rank."""
        blueprint = self.blueprint
        sharding = blueprint.sharding
        vocab_size = blueprint.model.vocab_size
        targets_sb = batch.targets_bs.t()
        start, _, _ = vocabulary_cut(vocab_size, sharding.tp)
        z_loss = blueprint.z_loss if self.training else 0.0  # a validation loss is the cross entropy alone
        # In chunks the logits of all tokens are never in memory at one time, but the backward pass computes them again.
        # A single chunk would save nothing.
        if 0 < blueprint.loss_chunk < targets_sb.numel():
            assert self.norm is not None
            losses_sb = linear_cross_entropy(
                self.norm(x_sbh),
                self.head,
                targets_sb,
                vocab_size,
                start,
                sharding.tp,
                sequence_parallel=sharding.splits_sequence,
                chunk_rows=blueprint.loss_chunk,
                z_loss=z_loss,
                impl=blueprint.kernels.cross_entropy,
                products=blueprint.products,
            )
        else:
            losses_sb = vocab_parallel_cross_entropy(
                self.logits(x_sbh),
                targets_sb,
                vocab_size,
                start,
                sharding.tp,
                z_loss=z_loss,
                impl=blueprint.kernels.cross_entropy,
                inplace=True,
            )
        return (losses_sb * batch.weights_bs.t()).sum()
