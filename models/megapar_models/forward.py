"""What the layers of a stage share in a forward pass: the micro-batch, the rotary tables and the keys of dropout."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from megapar_kernels.dispatch import Implementation
from megapar_kernels.rope import rotate
from torch import Tensor

from megapar.context_parallel.dropout import AttentionDropout
from megapar.declare.batch import MicroBatch
from megapar.declare.largest_logits import LargestLogits
from megapar.declare.random import Tokens
from megapar.declare.sharding import Sharding
from megapar.expert_parallel.dispatch import Dispatch
from megapar_models.rotary import Rotary


@dataclass(frozen=True)
class ForwardContext:
    """What every layer needs in a forward pass.

    `batch` has the positions, the sample numbers and the documents. `rotary` has the tables cos and sin of every
    `Rotary` in the layers of the stage. `seed` is the seed of dropout. `recomputes_attention` says whether backward
    computes core attention again (`Recompute.attention`). `dispatches` has, by the number of a layer, the experts of
    the tokens, as the first forward pass of the micro-batch chose them. Recomputation uses them again. `measured` are
    the layers with logits that the first forward pass has measured. `chunked` has the micro-batch in chunks by
    their size, for the layers that have asked for it (`attended`). `handed` are the tensors that the running layer
    reads, and what it writes there, by name (`megapar_models.handed`).
    """

    batch: MicroBatch
    rotary: Mapping[Rotary, tuple[Tensor, Tensor]] = field(default_factory=dict)
    seed: int = 0
    recomputes_attention: bool = False
    dispatches: dict[int, Dispatch] = field(default_factory=dict)
    measured: set[int] = field(default_factory=set)
    chunked: dict[int, MicroBatch] = field(default_factory=dict)
    handed: dict[str, Tensor] = field(default_factory=dict)

    def attended(self, chunk: int) -> MicroBatch:
        """The micro-batch within whose documents a layer with this `LayerKind.chunk` attends: in chunks, if not 0."""
        if not chunk:
            return self.batch
        if chunk not in self.chunked:
            self.chunked[chunk] = self.batch.in_chunks(chunk)
        return self.chunked[chunk]

    def rotated(self, rotary: Rotary | None, x_sbnd: Tensor, impl: Implementation) -> Tensor:
        """Rotate heads by their positions. Without `rotary` they stay as they are."""
        if rotary is None:
            return x_sbnd
        tables = self.rotary[rotary]
        length, samples = x_sbnd.shape[:2]
        if len(tables[0]) == length:
            return rotate(x_sbnd, *tables, impl=impl)
        # The tables have a row for each position of each sample: as if it were one sample of s b positions.
        flat = rotate(x_sbnd.flatten(0, 1)[:, None], *tables, impl=impl)
        return flat.squeeze(1).unflatten(0, (length, samples))

    def attention_dropout(self, p: float, layer: int, heads: range) -> AttentionDropout:
        """Return the dropout of the probabilities of a layer's query heads."""
        use = dropout_use(layer, DropoutSite.ATTENTION_PROBABILITIES)
        return AttentionDropout(p, self.seed, use, heads, self.batch.sample_ids_b, self.batch.positions_s)

    @property
    def tokens(self) -> Tokens:
        """The tokens [s, b] of this context-parallel rank. Adapters drop inputs by them."""
        return Tokens(self.seed, self.batch.sample_ids_b, self.batch.positions_s)

    def not_measured(self, largest: LargestLogits | None) -> LargestLogits | None:
        """`largest` in the first forward pass of its layer in training, then None: recomputation measures nothing."""
        if largest is None or not largest.training or largest.layer in self.measured:
            return None
        self.measured.add(largest.layer)
        return largest

    def tokens_of_rank(self, sharding: Sharding) -> Tokens:
        """Return the tokens of this rank between layers: all, or [s/tp, b] under sequence parallelism."""
        return replace(self.tokens, positions_s=rows_of_rank(self.batch.positions_s, sharding))


class DropoutSite(IntEnum):
    """The places of dropout in a model. Their numbers are part of a mask's key (`dropout_use`): do not change them, or
    a resumed run draws other masks."""

    EMBEDDING = 0
    ATTENTION_PROBABILITIES = 1
    ATTENTION_OUTPUT = 2
    MLP_OUTPUT = 3


def dropout_use(layer: int, site: DropoutSite) -> int:
    """The number of a site in the whole model. The site of the embedding is counted in layer 0."""
    return len(DropoutSite) * layer + site


def hidden_keys(context: ForwardContext, use: int, sharding: Sharding) -> Tensor:
    """The keys [s or s/tp, b] of a dropout mask of hidden states, from sample and global position.

    `use` is the site's number (`dropout_use`).
    """
    return context.tokens_of_rank(sharding).keys(use)


def rows_of_rank(x_s: Tensor, sharding: Sharding) -> Tensor:
    """This rank's part of [s, ...] between layers: all, or [s/tp, ...] under sequence parallelism."""
    if not sharding.splits_sequence:
        return x_s
    return x_s.chunk(sharding.tp.size)[sharding.tp.rank]
