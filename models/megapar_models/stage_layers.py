"""The layers of a pipeline stage, and what they hand on (`megapar_models.handed`).

Shapes: s positions of this context-parallel rank (s/tp between layers under sequence parallelism), b micro-batch,
h hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from megapar.activations import recompute
from megapar.activations.recompute import Recompute
from megapar.declare.batch import MicroBatch, PipelineStage, TensorSpec
from megapar.declare.sharding import Sharding
from megapar_models.forward import ForwardContext
from megapar_models.handed import Bundle, Handed, HandingLayer, taken
from megapar_models.layer_kind import LayerKind, StreamRule

Given = Tensor | tuple[Tensor, ...]
"""What a stage gets: the hidden states, or with them what is handed on (`StageLayers.receives`), in order."""


class StageLayers(nn.ModuleDict):
    """Consecutive layers, named by their global numbers.

    `make` makes the layer of a number and a kind. `cuts` are what is handed on with the hidden states, to the first
    layer and behind the last one. `rule` decides which layers are recomputed. `width` is that of token embeddings, and
    `stream` is the rule of all layers of the model (`LayerKind.stream`). Raises ValueError if a layer has another one.
    """

    def __init__(
        self,
        kinds: Mapping[int, LayerKind],
        make: Callable[[int, LayerKind], nn.Module],
        cuts: tuple[Sequence[Handed], Sequence[Handed]],
        rule: Recompute,
        width: int,
        sharding: Sharding,
        stream: StreamRule | None = None,
    ):
        if wrong := [number for number, kind in kinds.items() if kind.stream != stream]:
            raise ValueError(f"LayerKind.stream of layers {wrong}: another rule than in layer 0; give all the same")
        super().__init__({str(number): make(number, kind) for number, kind in kinds.items()})
        self.rule, self.sharding, self.stream = rule, sharding, stream
        self.width = width if stream is None else width * stream.streams
        self.receives, self.leaves = cuts
        # Each table once, in the order of the layers.
        self.rotary = list(dict.fromkeys(kind.rotary for kind in kinds.values() if kind.rotary is not None))
        self.handing = {
            str(number): HandingLayer(f"layer {number}", self[str(number)], kind.reads, kind.writes, sharding)
            for number, kind in kinds.items()
            if kind.reads or kind.writes
        }

    def received(self, x: Given) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the hidden states of what the stage gets, and by name what is handed on with them."""
        x_sbh, *handed = (x,) if isinstance(x, Tensor) else x
        return x_sbh, {one.name: y for one, y in zip(self.receives, handed, strict=True)}

    def left(self, x_sbh: Tensor, handed: Mapping[str, Tensor]) -> Given:
        """Return the output of this stage: hidden states [s or s/tp, b, width], with handed-on tensors as a tuple."""
        return (x_sbh, *(handed[one.name] for one in self.leaves)) if self.leaves else x_sbh

    def specs(self, batch: MicroBatch, handed: Sequence[Handed]) -> tuple[TensorSpec, ...]:
        """Return shape and dtype of the hidden states and of each handed-on tensor on this rank."""
        length = batch.seq_length
        if self.sharding.splits_sequence:
            length //= self.sharding.tp.size
        x_sbh = TensorSpec((length, batch.size, self.width), self.sharding.dtype)
        return (x_sbh, *(one.spec(batch, self.sharding) for one in handed))

    def forward(self, x_sbh: Tensor, handed: dict[str, Tensor], context: ForwardContext) -> Tensor:
        """Return the hidden states behind the layers. Adds to `handed` the tensors that the layers write."""
        branch_sbh = None  # what the layer before has not yet added to x_sbh
        for number, layer in self.items():
            again, offloads = self.rule.layer(int(number)), self.rule.offloads(int(number))
            handing = self.handing.get(number)
            # A recomputed layer has one tensor of hidden states as input: the branch is added first.
            if handing is None and not again and getattr(layer, "leaves_branch", False):
                x_sbh, branch_sbh = layer(x_sbh, context, branch_sbh, adds=False)
                continue
            x_sbh, branch_sbh = _added(x_sbh, branch_sbh), None
            run = partial(recompute.run, again, keeps_attention=self.rule.keeps_attention, offloads=offloads)
            if handing is None:
                x_sbh = run(layer, x_sbh, context)
                continue
            # Handed-on tensors stay on the device under train.offload, because other layers keep them too.
            x_sbh, *written = run(handing, x_sbh, context, stay=[handed[name] for name in handing.reads])
            handed.update((one.name, y) for one, y in zip(handing.writes, written, strict=True))
        return _added(x_sbh, branch_sbh)


class LayersOfStage(PipelineStage):
    """The way of a micro-batch through a stage's layers, with the embedding in front on the first stage.

    `handed` is what the model hands on. `stream_end` is on the last stage what `StreamRule.make_end` makes. A subclass
    makes `layers` and embeds.
    """

    layers: StageLayers
    handed: Bundle

    def __init__(self, *, first: bool, last: bool, seed: int):
        super().__init__()
        self.first, self.last, self.seed = first, last, seed
        self.stream_end: nn.Module | None = None

    def embed(self, context: ForwardContext) -> Tensor:
        """Token embeddings [s or s/tp, b, h]."""
        raise NotImplementedError

    def hidden_states(self, x: Given | None, batch: MicroBatch) -> Tensor:
        """Return the hidden states after this stage's layers. `x` is what the stage gets, None on the first stage."""
        return self.run_layers(x, batch)[0]

    def run_layers(self, x: Given | None, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the hidden states after this stage's layers, and what is handed on, by name."""
        rule = self.layers.rule
        tables = {rotary: rotary.tables(batch) for rotary in self.layers.rotary}
        context = ForwardContext(batch, tables, self.seed, rule.attention())
        with recompute.light(rule.mode == "light"):
            x_sbh, handed = self._begun(context) if x is None else self.layers.received(x)
            x_sbh = self.layers(x_sbh, handed, context)
            if self.last:
                x_sbh = self.end(x_sbh, replace(context, handed=handed) if handed else context)
        return x_sbh, handed

    def _begun(self, context: ForwardContext) -> tuple[Tensor, dict[str, Tensor]]:
        """The input of the first layer, and what is handed on with it."""
        writes = self.handed.begins
        if writes:
            context = replace(context, handed={})
        x_sbh = self.begin(self.embed(context), context)
        given = taken("the embedding", writes, context.handed, context.batch, self.layers.sharding)
        return x_sbh, {one.name: y for one, y in zip(writes, given, strict=True)}

    def begin(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        """Return the input of the first layer from the token embeddings, and write what `Ends.writes` declares."""
        return x_sbh if self.layers.stream is None else self.layers.stream.begin(x_sbh)

    def end(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        """Return what the last norm reads, [s, b, h], from the output of the last layer and what `Ends.reads` names."""
        if self.stream_end is not None:
            x_sbh = self.stream_end(x_sbh, context)
        return x_sbh

    def boundary(self, batch: MicroBatch) -> tuple[TensorSpec, ...]:
        """The tensors from the previous stage: hidden states and what is handed on, and none on the first stage."""
        return () if self.first else self.layers.specs(batch, self.layers.receives)

    def leaving(self, batch: MicroBatch) -> tuple[TensorSpec, ...]:
        """The tensors to the next stage."""
        return self.layers.specs(batch, self.layers.leaves)


def _added(x_sbh: Tensor, branch_sbh: Tensor | None) -> Tensor:
    return x_sbh if branch_sbh is None else x_sbh + branch_sbh
