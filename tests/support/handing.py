"""A family outside the tree whose layers hand on tensors of every kind, and read them several layers later.

The embedding hands on itself, and a weight of the first stage. Layer 1 hands on a note and a mark for each token, and
its place in a cycle: integers. Layers 2 and 4 read them, and layer 4 writes the note again for layer 5 and the end.
Layer 3 takes no part.
"""

from dataclasses import replace
from typing import Any

import torch
from megapar_models.ends import Projection
from megapar_models.families.llama import LLAMA as LLAMA_FAMILY
from megapar_models.families.llama import LlamaStage
from megapar_models.forward import ForwardContext, rows_of_rank
from megapar_models.handed import Handed
from megapar_models.layer import Layer
from megapar_models.layer_kind import Ends, LayerKind
from torch import Tensor, nn

from megapar.config.model_options import ModelConfig
from megapar.declare.params import Init, shared_piece
from tests.support import grid

WIDTH = 6  # of a note
CYCLE = 3


class HandingToy(Layer):
    """A layer that adds projections of what it reads, and writes projections of its output."""

    def __init__(self, number: int, kind: LayerKind, model: ModelConfig, factory: Any):
        super().__init__(number, kind, model, factory)
        self.reads, self.writes = kind.reads, [one.name for one in kind.writes]
        self.sharding = factory.sharding
        name = f"layers.{number}"
        self.note_in = self.note_out = None
        if "note" in self.reads:
            self.note_in = Projection(f"{name}.note_in", WIDTH, model.hidden_size, factory)
        if "note" in self.writes:
            self.note_out = Projection(f"{name}.note_out", model.hidden_size, WIDTH, factory)

    @property
    def leaves_branch(self) -> bool:
        return False

    def forward(self, x_sbh: Tensor, context: ForwardContext, *args: Any, **options: Any) -> Any:
        x_sbh, handed = super().forward(x_sbh, context), context.handed
        if self.note_in is not None:
            x_sbh = x_sbh + self.note_in(handed["note"])
        if "place" in self.reads:
            place_sb1 = handed["place"][..., None].to(x_sbh.dtype)
            x_sbh = x_sbh * (1 + 0.1 * place_sb1) * (1 + 0.1 * handed["mark"])
        if "embedding" in self.reads:
            x_sbh = x_sbh + handed["embedding"] * handed["scale"]
        if self.note_out is not None:
            handed["note"] = self.note_out(x_sbh).tanh()
        if "place" in self.writes:
            tokens_sb = rows_of_rank(context.batch.tokens_bs.t(), self.sharding)
            handed["place"] = (tokens_sb % CYCLE).int()
            handed["mark"] = x_sbh.tanh().mean(-1, keepdim=True)
        return x_sbh


NOTE = Handed(name="note", shape=(WIDTH,), splits_sequence=True)
WRITES = {
    1: (
        NOTE,
        Handed(name="mark", shape=(1,), gradient=False, splits_sequence=True),
        Handed(name="place", shape=(), dtype=torch.int32, splits_sequence=True),
    ),
    4: (NOTE,),
}
READS = {
    2: ("note", "place", "mark"),
    4: ("embedding", "scale", "note", "place", "mark"),
    5: ("note", "embedding", "scale"),
}


class HandingStage(LlamaStage):
    """The stage of the toy. The weight that the first stage hands on is `scale`."""

    def __init__(self, model: ModelConfig, factory: Any, layers: range, **options: Any):
        super().__init__(model, factory, layers, **options)
        if self.first:
            sharding = factory.sharding
            piece = shared_piece("scale", (model.hidden_size,), sharding.tp, partial=sharding.sequence_parallel)
            self.scale = sharding.parameter((piece,), piece.shape, Init("normal", 0.3), decay=False)
        if self.last:
            self.note_last = Projection("note_last", WIDTH, model.hidden_size, factory)

    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        return replace(kind, reads=READS.get(number, ()), writes=WRITES.get(number, ()))

    @classmethod
    def ends_of(cls, model: ModelConfig) -> Ends:
        shape = (model.hidden_size,)
        given = (
            Handed(name="embedding", shape=shape, splits_sequence=True),
            Handed(name="scale", shape=shape, by_token=False),
        )
        return Ends(writes=given, reads=("note",))

    def make_layer(self, number: int, kind: LayerKind) -> nn.Module:
        return HandingToy(number, kind, self.model, self.factory)

    def begin(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        context.handed.update(embedding=x_sbh, scale=self.scale)
        return x_sbh

    def end(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        return x_sbh + self.note_last(context.handed["note"])


FAMILY = replace(LLAMA_FAMILY, name="handing", stage=HandingStage)
MODEL = replace(
    grid.LLAMA, family=f"{__name__}:FAMILY", num_hidden_layers=6, attention_bias=False, num_key_value_heads=2
)
