"""One micro-batch through a part of a model, recorded once: what it keeps for its backward pass, and what it does.

The memory of a plan follows from what is kept (`megapar_tools.plan.memory`), and its time from what is done
(`megapar_tools.plan.step_time`). The part is a pipeline stage on the meta device, such as the embedding, one layer, or
norm with head. Its own forward and backward run, so nothing here knows a family of models.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megapar.activations.host_inputs import NotedInputs, kept_by
from megapar.data_parallel.accumulate import MainGradView, attach
from megapar.data_parallel.dtypes import gathered_itemsize
from megapar.declare.batch import MicroBatch, PipelineStage, TensorSpec
from megapar.declare.params import Piece, spec_of
from megapar.linear.converted_weight import ConvertedWeight
from megapar.linear.main_grad import WeightGradientQueue, main_grads
from megapar.linear.products import MatrixProducts
from megapar.observe.kept import BETWEEN, ENDS, KeptBytes
from megapar_tools.plan.work import META, Operation, Operations, Tape, collect

# What is kept, by identity


class Boundary(NamedTuple):
    """One of the tensors that a part gets from the part before it, or leaves to the next, or its gradient.

    They are counted by `number`: 0 are the hidden states.
    """

    is_output: bool
    is_gradient: bool
    number: int

    def in_stage(self, position: int) -> tuple[int, bool, int]:
        """Return the same for both parts beside the boundary, for a part at this position of its stage."""
        return position + self.is_output, self.is_gradient, self.number


@dataclass(frozen=True)
class Storage:
    """A storage kept by a part: its bytes, the kind under which it is counted, and its identity beyond the part.

    None: no other part sees it. A `Boundary` is seen by the neighbors. Anything else is the path of a tensor that all
    layers of a stage are given, such as a rotary table: it is kept once for all of them.
    """

    nbytes: int
    kind: str
    identity: Hashable = None


class Given(NamedTuple):
    """A tensor that a part gets from the part before it in its stage, and whether it needs a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


@dataclass(frozen=True)
class Converted:
    """What a part makes of its weights in the number format of their products, such as FP8.

    `operations` convert trained weights. They are in no pass: a run converts weights when they have changed, and not in
    each micro-batch. `trained` and `frozen` are the bytes of what is kept beside such weights. `quantized` are those of
    trained ones of which ZeRO-3 gathers the codes, and then keeps nothing beside them.
    """

    operations: Operations
    trained: int
    quantized: int
    frozen: int


@dataclass(frozen=True)
class Kept:
    """What one micro-batch keeps in a part, and the weights `converted` for it.

    `storages` are in the order in which they were kept. `passes` are pairs of identities that are one storage here,
    such as an output that is an input. `outputs` are what the next part is given. `on_host` are the bytes of inputs
    that are in host memory meanwhile.
    """

    storages: Sequence[Storage]
    passes: Sequence[tuple[Boundary, Boundary]]
    outputs: tuple[Given, ...]
    adds_gradients_in_i: bool
    converted: Converted
    on_host: Sequence[int] = ()


def kept_by_stage(parts: Sequence[Kept], *, has_first: bool, has_layers: bool) -> Counter[str]:
    """The bytes kept by a stage of these parts in order, by kind. `has_first` says whether the first is the embedding.

    Neighbors share the tensors between them, and all layers share what they are given: each counts once, under the kind
    of the part that kept it first.
    """
    found: Counter[str] = Counter()
    seen: set[Hashable] = set()
    names: dict[Hashable, Hashable] = {}  # the boundaries that are one storage

    for position, part in enumerate(parts):
        for one, other in part.passes:
            # The boundary after the part is the storage of the boundary before it.
            before = one.in_stage(position)
            names[other.in_stage(position)] = names.get(before, before)
        for storage in part.storages:
            kind = storage.kind
            if kind == ENDS and position == 0 and has_first and has_layers:
                kind = BETWEEN  # a stage counts as its ends what comes after its layers
            if storage.identity is not None:
                boundary = storage.identity.in_stage(position) if isinstance(storage.identity, Boundary) else None
                identity = names.get(boundary, boundary) if boundary else storage.identity
                if identity in seen:
                    continue
                seen.add(identity)
            found[kind] += storage.nbytes
    return found


# Recording


@dataclass
class _Graph:
    """A forward pass of which nothing ran backward yet: its inputs and outputs, and the boundaries that are one."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    identities: "_Identities"
    passes: list[tuple[Boundary, Boundary]]
    on_host: Sequence[int]

    def note_gradients_of_inputs(self) -> None:
        """Note in a later backward pass the gradients of inputs, and which of them are those of outputs."""

        def note(grad_x: Tensor, boundary: Boundary) -> None:
            known = self.identities.found.get(grad_x.untyped_storage()._cdata)
            if isinstance(known, Boundary):
                self.passes.append((boundary, known))
            self.identities.add(grad_x, boundary)

        for number, x in enumerate(self.inputs):
            if x.requires_grad:
                x.register_hook(partial(note, boundary=Boundary(is_output=False, is_gradient=True, number=number)))


class Recording:
    """One micro-batch through a part on one rank. Each pass runs when it is first asked for, and never again.

    `stage` is on the meta device, and was built with a context of `megapar_tools.plan.work.recording`, of which `tape`
    is. `given` is what the part before it passes on. None: it gets what the stage gets, with gradients.
    Parameters get main gradients.
    """

    def __init__(self, stage: PipelineStage, batch: MicroBatch, tape: Tape, given: tuple[Given, ...] | None = None):
        self._stage = stage
        self._batch = batch
        self._tape = tape
        self._given = given
        self._graph: _Graph | None = None
        for param in stage.parameters():
            param.converted = _NotedConversions(tape)  # type: ignore[attr-defined]
            if param.requires_grad:
                attach(MainGradView(torch.empty(param.shape, device=META), _nothing), param)

    @cached_property
    def _forward(self) -> tuple[Operations, Kept]:
        counted = KeptBytes({0: self._stage})
        with counted.counting():
            self._graph, operations = _run_forward(self._stage, self._batch, self._tape, self._inputs())
        known = self._graph.identities.found
        storages = [Storage(nbytes, kind, known.get(x)) for x, ((_, kind), nbytes) in counted.counted.items()]
        return operations, _kept(storages, self._graph, self._stage)

    @property
    def forward(self) -> Operations:
        """Return the operations of the forward pass (F)."""
        return self._forward[0]

    @property
    def kept(self) -> Kept:
        """Return what the part keeps between its forward pass (F) and its backward pass (B or I)."""
        return self._forward[1]

    @cached_property
    def backward(self) -> Operations:
        """Return the operations of the whole backward pass (B)."""
        graph = self._take_graph()
        gradients = [torch.empty_like(y) for y in graph.outputs]
        _, operations = collect(self._tape, lambda: _run_backward(graph.outputs, gradients))
        return operations

    @cached_property
    def _halves(self) -> tuple[Operations, Operations, Kept]:
        """Return the operations of I and W, the halves of a backward pass, and what the part keeps between them."""
        graph = self._take_graph()
        gradients = [torch.empty_like(y) for y in graph.outputs]
        graph.identities.add_boundaries(gradients, is_output=True, is_gradient=True)

        graph.note_gradients_of_inputs()
        queue = WeightGradientQueue()
        with queue.open(main_grads(self._stage)):
            _, inputs = collect(self._tape, lambda: _run_backward(graph.outputs, gradients))
        known = graph.identities.found
        storages = [Storage(nbytes, "", known.get(x)) for x, nbytes in queue.nbytes_of_storages().items()]
        kept = _kept(storages, graph, self._stage)
        _, weights = collect(self._tape, queue.run)
        return inputs, weights, kept

    @property
    def inputs(self) -> Operations:
        """Return the operations of the gradients of inputs (I)."""
        return self._halves[0]

    @property
    def weights(self) -> Operations:
        """Return the operations of the gradients of weights (W)."""
        return self._halves[1]

    @property
    def deferred(self) -> Kept:
        """Return what the part keeps between the gradients of inputs (I) and of weights (W)."""
        return self._halves[2]

    # What the stage declares

    @cached_property
    def boundary(self) -> tuple[Given, ...]:
        """Return what the stage before sends to a part that begins its stage. Empty for the model's first part."""
        return tuple(Given(tuple(spec.shape), spec.dtype, spec.has_gradient) for spec in self._specs)

    @cached_property
    def boundary_bytes(self) -> int:
        """Return the bytes of a message from the stage before."""
        return sum(spec.nbytes for spec in self._specs)

    @cached_property
    def boundary_gradient_bytes(self) -> int:
        """Return the bytes of a message to the stage before, of gradients."""
        return sum(spec.nbytes for spec in self._specs if spec.has_gradient)

    @cached_property
    def _specs(self) -> tuple[TensorSpec, ...]:
        return self._stage.boundary(self._batch)

    @cached_property
    def elements(self) -> Mapping[str, int]:
        """Return the elements of the part's trained parameters on this rank, by the axis of their gradients' sum."""
        return _by_axis(self._stage, nn.Parameter.numel)

    @cached_property
    def weight_bytes(self) -> Mapping[str, int]:
        """Return the bytes of the part's `elements` as weights, by the same axis."""
        return _by_axis(self._stage, lambda param: param.numel() * param.dtype.itemsize)

    @cached_property
    def gathered_bytes(self) -> Mapping[str, int]:
        """Return the bytes that ZeRO-3 gathers of the part's `elements`, by the same axis: of weights, or of codes."""
        return _by_axis(self._stage, lambda param: param.numel() * gathered_itemsize(spec_of(param), param.dtype))

    @cached_property
    def matrices(self) -> Mapping[tuple[str, str], Sequence[Piece]]:
        """Return the trained matrices that this rank has a part of, by two names: of the axis of gradient sums, and of
        the optimizer that a layer asks for ("" for the run's)."""
        found: dict[tuple[str, str], list[Piece]] = {}
        for param in self._stage.parameters():
            spec = spec_of(param)
            if param.requires_grad and spec.update != "element":
                found.setdefault((spec.grad_axis.name, spec.optimizer), []).extend(spec.pieces)
        return found

    @cached_property
    def embedding_elements(self) -> int:
        """Return the elements of the embedding's trained matrix on this rank."""
        return sum(
            param.numel()
            for param in self._stage.parameters()
            if param.requires_grad and any(piece.name.startswith("embedding.") for piece in spec_of(param).pieces)
        )

    # Passes

    def _take_graph(self) -> _Graph:
        """The graph of the recorded forward, or if a backward has used it up, of another one."""
        _ = self._forward
        graph = self._graph
        self._graph = None
        return graph or _run_forward(self._stage, self._batch, self._tape, self._inputs())[0]

    def _inputs(self) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty(given.shape, dtype=given.dtype, device=META, requires_grad=given.needs_grad)
            for given in self._given or self.boundary
        )


def _by_axis(stage: nn.Module, size_of: Callable[[nn.Parameter], int]) -> Mapping[str, int]:
    """The sizes of a stage's trained parameters, added up by the axis of their gradients' sum."""
    found: Counter[str] = Counter()
    for param in stage.parameters():
        if param.requires_grad:
            found[spec_of(param).grad_axis.name] += size_of(param)
    return found


def _run_forward(
    stage: PipelineStage, batch: MicroBatch, tape: Tape, inputs: tuple[Tensor, ...]
) -> tuple[_Graph, Operations]:
    """Run the forward pass of a stage. Return its graph, and its operations."""
    identities = _Identities()
    identities.add_boundaries(inputs, is_output=False)
    identities.add_all(batch, ("batch",))

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        identities.add_all(args[1:], ("given",))
        identities.add_all(kwargs, ("given",))

    layers: Mapping[str, nn.Module] = getattr(stage, "layers", {})
    handles = [layer.register_forward_pre_hook(look, with_kwargs=True) for layer in layers.values()]
    noted = NotedInputs()
    x = inputs if len(inputs) > 1 else next(iter(inputs), None)
    with kept_by(noted):
        result, operations = collect(tape, lambda: stage(x, batch))
    for handle in handles:
        handle.remove()
    outputs = (result,) if isinstance(result, Tensor) else tuple(result)
    passes = []
    for number, y in enumerate(outputs):
        left = Boundary(is_output=True, is_gradient=False, number=number)
        known = identities.found.get(y.untyped_storage()._cdata)
        if isinstance(known, Boundary):  # an input, or an earlier output
            passes.append((known, left))
        identities.add(y, left)
    return _Graph(inputs, outputs, identities, passes, noted.sizes), operations


def _kept(storages: Sequence[Storage], graph: _Graph, stage: PipelineStage) -> Kept:
    outputs = tuple(Given(tuple(y.shape), y.dtype, y.requires_grad) for y in graph.outputs)
    converted = _converted(stage.parameters())
    return Kept(storages, graph.passes, outputs, stage.adds_gradients_in_i, converted, tuple(graph.on_host))


def _run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    pairs = [(y, grad) for y, grad in zip(outputs, gradients, strict=True) if y.requires_grad]
    if pairs:
        # From edges, not from the tensors: torch takes function modes off within a function of a tensor, and layers
        # that are recomputed need `FusedAttention` in backward too.
        torch.autograd.backward([get_gradient_edge(y) for y, _ in pairs], [grad for _, grad in pairs])


class _NotedConversions(ConvertedWeight):
    """What is converted of a parameter. Its operations are noted here, and not on the tape."""

    def __init__(self, tape: Tape):
        super().__init__()
        self.operations: list[Operation] = []
        self._tape = tape

    def get(self, weight: Tensor, products: MatrixProducts, part: slice | None = None) -> Any:
        with self._tape.collecting_apart(self.operations):
            return super().get(weight, products, part)


def _converted(params: Iterable[nn.Parameter]) -> Converted:
    """What has been converted of parameters of a recording."""
    operations: list[Operation] = []
    trained = quantized = frozen = 0
    for param in params:
        noted = ConvertedWeight.of(param)
        assert isinstance(noted, _NotedConversions)  # `Recording` has set it
        if not param.requires_grad:
            frozen += noted.nbytes
            continue
        operations += noted.operations
        if spec_of(param).quantized:
            quantized += noted.nbytes
        else:
            trained += noted.nbytes
    return Converted(tuple(operations), trained, quantized, frozen)


def _nothing() -> None:
    """What a main gradient calls after an addition."""


@dataclass
class _Identities:
    """The storages of a stage that more than one layer may see, by address (`_cdata`). `alive` keeps the addresses.

    It keeps no tensors: autograd copies a gradient that someone else holds.
    """

    found: dict[int, Hashable] = field(default_factory=dict)
    alive: list[torch.UntypedStorage] = field(default_factory=list)

    def add(self, x: Tensor, identity: Hashable) -> None:
        storage = x.untyped_storage()
        self.alive.append(storage)
        self.found.setdefault(storage._cdata, identity)

    def add_boundaries(self, tensors: Iterable[Tensor], *, is_output: bool, is_gradient: bool = False) -> None:
        """Add what a part gets or leaves, in order."""
        for number, x in enumerate(tensors):
            self.add(x, Boundary(is_output, is_gradient, number))

    def add_all(self, value: object, path: tuple[Hashable, ...]) -> None:
        """Add every tensor inside `value`: dataclasses, mappings and sequences are looked into."""
        if isinstance(value, Tensor):
            self.add(value, path)
        elif is_dataclass(value) and not isinstance(value, type):
            for attribute in fields(value):
                self.add_all(getattr(value, attribute.name), (*path, attribute.name))
        elif isinstance(value, Mapping):
            for name, inside in value.items():
                self.add_all(inside, (*path, name))
        elif isinstance(value, list | tuple):
            for position, inside in enumerate(value):
                self.add_all(inside, (*path, position))
