"""One pipeline stage of a decoder-only transformer: a run of layers, with the embedding on the first stage and the
norm, head and loss on the last. Layers keep their global numbers, so that names survive any split.

Shapes: s sequence (s/tp between layers with sequence parallel), b micro-batch, h hidden, v vocabulary, d head width.
"""

import math
from dataclasses import dataclass, field
from enum import IntEnum

from megapar_kernels.backend import Kernels
from torch import Tensor, nn

from megapar import recompute
from megapar.batch import MicroBatch, PipelineStage, TensorSpec
from megapar.config import ModelConfig
from megapar.context import Axis
from megapar.params import Init
from megapar.random import row_keys
from megapar.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megapar.tensor_parallel.layers import (
    Sharding,
    VocabParallelEmbedding,
    column_linear,
    vocabulary_cut,
    vocabulary_parameter,
)
from megapar.tensor_parallel.linear_cross_entropy import linear_cross_entropy


@dataclass(frozen=True)
class Blueprint:
    """What every module of a model is built from.

    `tied`: the axis of pipeline stages that hold copies of a tied embedding; None if one stage holds all of it.
    `loss_chunk`: tokens whose logits are held at once, 0 meaning all of a micro-batch.
    """

    model: ModelConfig
    sharding: Sharding
    recompute: recompute.Recompute
    seed: int
    tied: Axis | None = None
    kernels: Kernels = field(default_factory=Kernels)
    z_loss: float = 0.0
    loss_chunk: int = 0

    @property
    def init(self) -> Init:
        return Init("normal", self.model.initializer_range)

    @property
    def output_init(self) -> Init:
        """For the two projections that write to the residual stream (GPT-2's scaling by depth)."""
        return Init("normal", self.model.initializer_range / math.sqrt(2 * self.model.num_hidden_layers))


@dataclass(frozen=True)
class ForwardContext:
    """What one forward pass tells every layer: the batch (positions, keys of dropout, documents), and the rotary cos
    and sin [s, d], if the model has any."""

    batch: MicroBatch
    rope: tuple[Tensor, Tensor] | None = None


class DropoutSite(IntEnum):
    """Where a model drops out. The numbers key the masks (`dropout_use`): another number is another mask."""

    EMBEDDING = 0
    ATTENTION_PROBABILITIES = 1
    ATTENTION_OUTPUT = 2
    MLP_OUTPUT = 3


def dropout_use(layer: int, site: DropoutSite) -> int:
    """The number of a site in the whole model; the embedding counts as one of layer 0."""
    return len(DropoutSite) * layer + site


def hidden_keys(x_sbh: Tensor, context: ForwardContext, use: int, blueprint: Blueprint) -> Tensor:
    """Keys [s or s/tp, b] of the dropout mask of hidden states, by sample and global position; `use` numbers the
    place."""
    position_s = rows_of_rank(context.batch.positions_s, blueprint.sharding)
    return row_keys(blueprint.seed, use, context.batch.sample_ids_b[None, :], position_s[:, None])


def rows_of_rank(x_s: Tensor, sharding: Sharding) -> Tensor:
    """The part of [s, ...] that this rank holds between layers: all of it, or [s/tp, ...] with sequence parallel."""
    if not sharding.splits_sequence:
        return x_s
    return x_s.chunk(sharding.tp.size)[sharding.tp.rank]


class Stage(PipelineStage):
    """Layers `layers` of the model; the embedding if `first`, norm, head and loss if `last`. Families subclass it.

    `tied` is the input embedding's parameter where first and last stage are on one rank. Without it the last stage of a
    tied model holds a copy whose gradients are summed with the first stage's.
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
            if model.tie_word_embeddings and self.embedding is not None:
                tied = self.embedding.weight
            self.head = tied if tied is not None else self._make_head()

    def embedding_weight(self) -> nn.Parameter:
        assert self.embedding is not None
        return self.embedding.weight

    def make_layer(self, number: int) -> nn.Module:
        """The layer with this global number: (x_sbh, ForwardContext) to x_sbh."""
        raise NotImplementedError

    def make_norm(self, name: str) -> nn.Module:
        raise NotImplementedError

    def embed(self, batch: MicroBatch) -> Tensor:
        """Token embeddings [s or s/tp, b, h]."""
        assert self.embedding is not None
        return self.embedding(batch.tokens_bs.t())

    def run_layers(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        """This stage's layers, one after the other, those under activation checkpointing that the run asks for."""
        for number, layer in self.layers.items():
            x_sbh = recompute.run(self.blueprint.recompute.layer(int(number)), layer, x_sbh, context)
        return x_sbh

    def _make_head(self) -> nn.Parameter:
        model = self.blueprint.model
        tie = model.tie_word_embeddings
        return vocabulary_parameter(
            "embedding.weight" if tie else "head.weight",
            model.vocab_size,
            model.hidden_size,
            self.blueprint.sharding,
            init=self.blueprint.init,
            tied=self.blueprint.tied if tie else None,
        )

    def title(self) -> str:
        numbers = list(self.layers)
        layers = [f"layers {numbers[0]}-{numbers[-1]}"] if numbers else []
        return ", ".join([*(["embedding"] if self.first else []), *layers, *(["head"] if self.last else [])])

    def boundary(self, batch: MicroBatch) -> tuple[TensorSpec, ...]:
        """What arrives from the previous stage: nothing on the first, else hidden states."""
        if self.first:
            return ()
        sharding = self.blueprint.sharding
        length = batch.seq_length // (sharding.tp.size if sharding.splits_sequence else 1)
        return (TensorSpec((length, batch.size, self.blueprint.model.hidden_size), sharding.dtype),)

    def hidden(self, x_sbh: Tensor | None, batch: MicroBatch) -> Tensor:
        """Hidden states after this stage's layers; on the first stage x_sbh is None, and the batch is embedded."""
        raise NotImplementedError

    def forward(self, x_sbh: Tensor | None, batch: MicroBatch) -> Tensor:
        """Hidden states for the next stage, or on the last stage the loss sum."""
        raise NotImplementedError

    def logits(self, x_sbh: Tensor) -> Tensor:
        """[s, b, v]: this tp rank's columns of the vocabulary, padding last."""
        assert self.norm is not None
        return column_linear(self.norm(x_sbh), self.head, None, self.blueprint.sharding)

    def loss(self, x_sbh: Tensor, batch: MicroBatch) -> Tensor:
        """Sum over targets of weight * cross entropy, an fp32 scalar that is the same on every tp rank."""
        blueprint = self.blueprint
        sharding = blueprint.sharding
        vocab_size = blueprint.model.vocab_size
        targets_sb = batch.targets_bs.t()
        start, _, _ = vocabulary_cut(vocab_size, sharding.tp)
        z_loss = blueprint.z_loss if self.training else 0.0
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
                products=sharding.products,
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
