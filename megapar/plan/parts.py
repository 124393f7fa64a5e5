"""The parts of a model in one layout: embedding, each kind of layer, norm and head.

A part is built as a stage of its own on the meta device. So the parts of a model of 80 layers are as few as those of
one layer, and layouts that differ only in how many ranks share the work have the same parts. `megapar.plan.memory` puts
the memory of ranks together from them.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megapar.batch import MicroBatch, PipelineStage, Targets
from megapar.config.options import Config
from megapar.context import Axis, ParallelContext
from megapar.data_parallel.accumulate import MainGradView, attach
from megapar.grid import Grid
from megapar.main_grad import WeightGradientQueue, main_grads
from megapar.params import ParamSpec, spec_of
from megapar.recompute import Recompute
from megapar.stage_set import Declared
from megapar.train.kept import BETWEEN, ENDS, KeptBytes
from megapar.train.trainable import freeze

META = torch.device("meta")


class Builder(Protocol):
    """Builds parts of a model: what a plan must be told, because it knows no model (`megapar_models.build`)."""

    def stage_layers(self, config: Config) -> Sequence[range]:
        """The layers of each stage of the pipeline."""

    def layer_kinds(self, config: Config) -> Sequence[int]:
        """For each layer the number of the first layer of the same kind: equal shapes, equal bytes kept."""

    def maker(self, config: Config, ctx: ParallelContext) -> Callable[..., PipelineStage]:
        """Make a stage on the context's device: called with a range of layers, `first`, `last` and `tied_weight`.

        `tied_weight` is the matrix of the embedding if the stage before holds it on the same rank.
        """

    def embedding_weight(self, config: Config, first: PipelineStage) -> nn.Parameter | None:
        """The `tied_weight` for the last stage of a rank with the first stage as well. None if it uses no embedding."""

    def declared(self, config: Config) -> Declared:
        """What the model declares."""

    def flops_per_token(self, config: Config) -> int:
        """FLOPs of a token, forward and backward, for MFU."""

    def title(self, layers: range, *, first: bool, last: bool) -> str:
        """The contents of a stage in words."""


@dataclass(frozen=True)
class LayerPart:
    """A layer as a part: the number of the first layer like it, and whether backward computes it again.

    `trained` says of each of its parameters whether it is trained. It is empty without train.trainable.
    """

    number: int
    recomputed: bool
    trained: tuple[bool, ...] = ()


FIRST = "first"
"""The part with the embedding, as a stage without layers."""
LAST = "last"
"""The part with norm, head and loss, as a stage without layers."""
PartId = LayerPart | str

# What is kept, by identity

INPUT = "input"
OUTPUT = "output"
GRAD_INPUT = "gradient of the input"
GRAD_OUTPUT = "gradient of the output"


@dataclass(frozen=True)
class Storage:
    """A storage kept by a part: its bytes, the kind under which it is counted, and its identity beyond the part.

    None: no other part sees it. INPUT, OUTPUT and the gradients are seen by the neighbors. Anything else is the path of
    a tensor that all layers of a stage are given, such as a rotary table: it is kept once for all of them.
    """

    nbytes: int
    kind: str
    identity: Hashable = None


@dataclass(frozen=True)
class Given:
    """The tensor that a part gets from the part before it in its stage, and whether it needs a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


@dataclass(frozen=True)
class Kept:
    """What one micro-batch keeps in a part.

    `storages` are in the order in which they were kept. `passes` are pairs of identities that are one storage here,
    such as an output that is the input. `output` is what the next part is given.
    """

    storages: Sequence[Storage]
    passes: Sequence[tuple[str, str]]
    output: Given
    adds_gradients_in_i: bool


def kept_by_stage(parts: Sequence[Kept], *, has_first: bool, has_layers: bool) -> Counter[str]:
    """The bytes kept by a stage of these parts in order, by kind. `has_first` says whether the first is the embedding.

    Neighbors share the tensors between them, and all layers share what they are given: each counts once, under the kind
    of the part that kept it first.
    """
    found: Counter[str] = Counter()
    seen: set[Hashable] = set()
    names: dict[Hashable, Hashable] = {}  # the boundaries that are one storage

    for position, part in enumerate(parts):
        own = {
            INPUT: ("x", position),
            OUTPUT: ("x", position + 1),
            GRAD_INPUT: ("grad", position),
            GRAD_OUTPUT: ("grad", position + 1),
        }
        for one, other in part.passes:
            # The boundary after the part is the storage of the boundary before it.
            names[own[other]] = names.get(own[one], own[one])
        for storage in part.storages:
            kind = storage.kind
            if kind == ENDS and position == 0 and has_first and has_layers:
                kind = BETWEEN  # a stage counts as its ends what comes after its layers
            if storage.identity is not None:
                boundary = own.get(storage.identity) if isinstance(storage.identity, str) else None
                identity = names.get(boundary, boundary) if boundary else storage.identity
                if identity in seen:
                    continue
                seen.add(identity)
            found[kind] += storage.nbytes
    return found


# Parameters


@dataclass(frozen=True)
class DeclaredParameter:
    """The declaration of a parameter without its memory."""

    spec: ParamSpec
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool


@dataclass(frozen=True)
class Member:
    """One stage's parameters in a `Structure`, by index, in the order of registration before and after its layers."""

    before: Sequence[int]
    after: Sequence[int]


@dataclass(frozen=True, eq=False)
class Structure:
    """The parameters of one part, or of the two ends of a model on one rank, which may share the embedding's matrix."""

    params: Sequence[DeclaredParameter]
    members: Sequence[Member]

    @classmethod
    def of(cls, stages: Sequence[nn.Module]) -> "Structure":
        """The structure of stages on one rank."""
        params: dict[int, DeclaredParameter] = {}
        index: dict[int, int] = {}
        members = []
        for stage in stages:
            before: list[int] = []
            after: list[int] = []
            found = before
            for name, module in stage.named_modules():
                for param in module.parameters(recurse=False):
                    if id(param) not in params:
                        index[id(param)] = len(params)
                        params[id(param)] = DeclaredParameter(
                            spec_of(param), tuple(param.shape), param.dtype, param.requires_grad
                        )
                    if index[id(param)] not in found:
                        found.append(index[id(param)])
                if name == "layers":
                    found = after
            members.append(Member(before, [i for i in after if i not in before]))
        return cls(list(params.values()), members)

    @cached_property
    def shapes(self) -> tuple[object, ...]:
        """The shapes of the parameters with padding, and of their parts of logical tensors."""
        return tuple((p.shape, tuple(piece.local_shape for piece in p.spec.pieces)) for p in self.params)


class Copies:
    """Parameters of a structure on the meta device, for each layer or rank that has one.

    Their specs have the axes of one layout.
    """

    def __init__(self, structure: Structure, axes: Mapping[str, Axis]):
        self.members = structure.members
        self._params = [(p, _with_axes(p.spec, axes)) for p in structure.params]
        self._made: list[list[nn.Parameter]] = []

    def number(self, index: int) -> list[nn.Parameter]:
        """The parameters of the copy `index`: the same objects at each call."""
        while len(self._made) <= index:
            self._made.append([_parameter(declared, spec) for declared, spec in self._params])
        return self._made[index]


def _parameter(declared: DeclaredParameter, spec: ParamSpec) -> nn.Parameter:
    x = torch.empty(declared.shape, dtype=declared.dtype, device=META)
    param = nn.Parameter(x, requires_grad=declared.trained)
    param.spec = spec  # type: ignore[attr-defined]
    return param


def _with_axes(spec: ParamSpec, axes: Mapping[str, Axis]) -> ParamSpec:
    """The spec on the axes of another layout, by their names."""
    pieces = tuple(
        replace(
            piece,
            same_on=tuple(axes.get(axis.name, axis) for axis in piece.same_on),
            partial=tuple(axes.get(axis.name, axis) for axis in piece.partial),
        )
        for piece in spec.pieces
    )
    return replace(spec, pieces=pieces, grad_axis=axes.get(spec.grad_axis.name, spec.grad_axis))


@dataclass(frozen=True, eq=False)
class PlannedStage:
    """The parameters of a stage, in the order of their registration."""

    params: Sequence[nn.Parameter]

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(self.params)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for param in self.params:
            yield spec_of(param).name, param


# Parts and what decides them


@dataclass(frozen=True)
class _Cuts:
    """What decides the shapes of a rank's parameters."""

    model: Hashable
    options: Hashable
    tp: tuple[int, int]
    ep: tuple[int, int]
    etp: tuple[int, int]
    tied: int


class Parts:
    """The parts of models, each built and measured once for all layouts that share it.

    `builder` builds the stages.
    """

    def __init__(self, builder: Builder):
        self.builder = builder
        self._structures: dict[Hashable, Structure] = {}
        self._copies: dict[Hashable, Copies] = {}
        self._kept: dict[Hashable, Kept] = {}
        self._layer_parts: dict[Hashable, list[LayerPart]] = {}
        self._batches: dict[Hashable, MicroBatch] = {}
        self.contexts: dict[tuple[Grid, int], ParallelContext] = {}
        """The contexts of ranks that were planned."""
        self.memory: dict[Hashable, Any] = {}
        """What `megapar.plan.memory` has computed before, by what decides it."""

    def layer_parts(self, config: Config, ctx: ParallelContext) -> list[LayerPart]:
        """The part of each layer. Layers are of one part if they are of one kind and trained alike."""
        train = config.train
        rule = Recompute(train.recompute, train.recompute_every)
        cuts = self._cuts(config, ctx) if train.trainable else None
        key = (config.model, train.seq_length, rule, cuts)
        if key not in self._layer_parts:
            first_like: dict[Hashable, int] = {}
            parts = []
            for number, kind in enumerate(self.builder.layer_kinds(config)):
                trained: tuple[bool, ...] = ()
                if train.trainable:
                    # Patterns may name layers, so each layer is looked at.
                    structure = self.structure(config, ctx, LayerPart(number, recomputed=False))
                    trained = tuple(param.trained for param in structure.params)
                alike = (kind, rule.layer(number), trained)
                first = first_like.setdefault(alike, number)
                parts.append(LayerPart(first, rule.layer(number), trained))
            self._layer_parts[key] = parts
        return self._layer_parts[key]

    def structure(self, config: Config, ctx: ParallelContext, *parts: PartId) -> Structure:
        """The parameters of a part on the rank of `ctx`: of a layer, of FIRST, of LAST, or of both.

        FIRST and LAST together are two stages of one rank. BOTH is one stage.
        """
        # Whether a layer is recomputed does not change its parameters.
        ids = tuple(part.number if isinstance(part, LayerPart) else part for part in parts)
        key = (ids, self._cuts(config, ctx, parts))
        if key not in self._structures:
            stages = self._stages(config, ctx, parts)
            if config.train.trainable:
                freeze(stages, config.train.trainable)
            self._structures[key] = Structure.of(stages)
        return self._structures[key]

    def copies(self, structure: Structure, ctx: ParallelContext) -> Copies:
        """The parameters of a structure with the axes of `ctx`."""
        # Over these a rank's gradients are summed and its state is sharded. The others decide the structure.
        sizes = tuple((axis.size, axis.shards.size, axis.copies.size) for axis in (ctx.grad, ctx.expert_grad))
        key = (id(structure), sizes, ctx.grad.rank, ctx.expert_grad.rank, ctx.dp.size, ctx.cp.size)
        if key not in self._copies:
            self._copies[key] = Copies(structure, {axis.name: axis for axis in ctx.axes})
        return self._copies[key]

    def kept(self, config: Config, ctx: ParallelContext, part: PartId, given: Given | None = None) -> Kept:
        """What a forward pass of one micro-batch keeps for its B or I.

        `given` is None for the first part of a stage: it gets what the stage gets, which needs a gradient.
        """
        return self._measured(config, ctx, part, given, _forward_keeps)

    def deferred(self, config: Config, ctx: ParallelContext, part: PartId, given: Given | None = None) -> Kept:
        """What the I of one micro-batch keeps for its W. `given` is as in `kept`."""
        return self._measured(config, ctx, part, given, _deferred)

    def _measured(
        self,
        config: Config,
        ctx: ParallelContext,
        part: PartId,
        given: Given | None,
        measure: Callable[[PipelineStage, MicroBatch, Given | None], Kept],
    ) -> Kept:
        train = config.train
        decides: tuple[Hashable, ...] = (train.micro_batch_size, train.seq_length, ctx.cp.size)
        if part == LAST:
            decides = (*decides, config.kernels.loss_chunk, train.z_loss)
        elif isinstance(part, LayerPart):
            decides = (*decides, train.recompute == "selective", config.parallel.cp_attention)
        key = (part, given, measure, decides, config.kernels.backend, self._cuts(config, ctx, [part]))
        if key not in self._kept:
            (stage,) = self._stages(config, ctx, [part])
            if train.trainable:
                freeze([stage], train.trainable)
            self._kept[key] = measure(stage, self._batch(config), given)
        return self._kept[key]

    def _cuts(self, config: Config, ctx: ParallelContext, parts: Sequence[PartId] = ()) -> _Cuts:
        parallel = config.parallel
        options = (
            config.train.precision,
            config.train.trainable,
            parallel.sequence_parallel,
            parallel.tp_overlap_chunks,
            ctx.cp.size,
        )
        tp, ep, etp = ((axis.size, axis.rank) for axis in (ctx.tp, ctx.ep, ctx.etp))
        # A layer is the same on ranks with copies of a tied embedding and on others.
        is_layer = all(isinstance(part, LayerPart) for part in parts)
        return _Cuts(config.model, options, tp, ep, etp, 0 if is_layer else ctx.tied.size)

    def _stages(self, config: Config, ctx: ParallelContext, parts: Sequence[PartId]) -> list[PipelineStage]:
        make = self.builder.maker(config, ctx)
        end = config.model.num_hidden_layers
        stages: list[PipelineStage] = []
        for part in parts:
            if isinstance(part, LayerPart):
                stages.append(make(range(part.number, part.number + 1), first=False, last=False))
            elif part == FIRST:
                stages.append(make(range(0), first=True, last=False))
            elif part == BOTH:
                stages.append(make(range(0), first=True, last=True))
            else:
                tied = self.builder.embedding_weight(config, stages[0]) if stages else None
                stages.append(make(range(end, end), first=False, last=True, tied_weight=tied))
        return stages

    def _batch(self, config: Config) -> MicroBatch:
        """A micro-batch of one rank on the meta device."""
        train = config.train
        num_targets = self.builder.declared(config).num_targets
        key = (train.micro_batch_size, train.seq_length, config.parallel.cp, num_targets)
        if key not in self._batches:
            self._batches[key] = meta_batch(*key)
        return self._batches[key]


BOTH = "both"
"""FIRST and LAST as one stage without layers."""


def meta_batch(samples: int, length: int, cp: int, num_targets: int) -> MicroBatch:
    """A micro-batch of a context-parallel rank on the meta device, of `samples` samples of `length` tokens."""
    tokens_bs = torch.zeros((samples, length), dtype=torch.int64, device=META)
    weights_bs = torch.zeros((samples, length), device=META)
    later = [Targets(tokens_bs, weights_bs)] * (num_targets - 1)
    whole = MicroBatch.of_samples(tokens_bs, tokens_bs, weights_bs, sample_ids_b=tokens_bs[:, 0], later_targets=later)
    # With a scale, as in training: without one the losses of stages before the last would keep nothing.
    whole = replace(whole, grad_scale=torch.ones((), device=META))
    return whole.columns(torch.empty(length // cp, dtype=torch.int64, device=META))


# Measuring


@dataclass
class _Identities:
    """The storages of a stage that more than one layer may see, by address (`_cdata`). `alive` keeps the addresses."""

    found: dict[int, Hashable] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor, identity: Hashable) -> None:
        self.alive.append(x)
        self.found.setdefault(x.untyped_storage()._cdata, identity)

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


def _input(stage: PipelineStage, batch: MicroBatch, given: Given | None) -> Tensor | None:
    """What the stage gets. None if it is the first."""
    specs = stage.boundary(batch)
    if not specs:
        return None
    if given is None:
        given = Given(specs[0].shape, specs[0].dtype, needs_grad=True)
    return torch.empty(given.shape, dtype=given.dtype, device=META, requires_grad=given.needs_grad)


def _forward(
    stage: PipelineStage, batch: MicroBatch, x: Tensor | None, identities: _Identities
) -> tuple[Tensor, list[tuple[str, str]]]:
    """The output of a stage. Adds what its layers share to `identities`. Returns also which boundaries are one."""
    if x is not None:
        identities.add(x, INPUT)
    identities.add_all(batch, ("batch",))

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        identities.add_all(args[1:], ("given",))
        identities.add_all(kwargs, ("given",))

    layers: Mapping[str, nn.Module] = getattr(stage, "layers", {})
    handles = [layer.register_forward_pre_hook(look, with_kwargs=True) for layer in layers.values()]
    output: Tensor = stage(x, batch)
    for handle in handles:
        handle.remove()
    address = output.untyped_storage()._cdata
    passes = [(INPUT, OUTPUT)] if identities.found.get(address) == INPUT else []
    identities.add(output, OUTPUT)
    return output, passes


def _given(output: Tensor) -> Given:
    return Given(tuple(output.shape), output.dtype, output.requires_grad)


def _forward_keeps(stage: PipelineStage, batch: MicroBatch, given: Given | None) -> Kept:
    kept = KeptBytes({0: stage})
    identities = _Identities()
    with kept.counting():
        output, passes = _forward(stage, batch, _input(stage, batch, given), identities)
    storages = [
        Storage(nbytes, kind, identities.found.get(address)) for address, ((_, kind), nbytes) in kept.counted.items()
    ]
    return Kept(storages, passes, _given(output), stage.adds_gradients_in_i)


def _deferred(stage: PipelineStage, batch: MicroBatch, given: Given | None) -> Kept:
    for param in stage.parameters():
        if param.requires_grad:
            attach(MainGradView(torch.empty(param.shape, device=META), _nothing), param)
    identities = _Identities()
    x = _input(stage, batch, given)
    output, passes = _forward(stage, batch, x, identities)
    grad = torch.empty_like(output)
    identities.add(grad, GRAD_OUTPUT)

    def look(grad_x: Tensor) -> None:
        if identities.found.get(grad_x.untyped_storage()._cdata) == GRAD_OUTPUT:
            passes.append((GRAD_INPUT, GRAD_OUTPUT))
        identities.add(grad_x, GRAD_INPUT)

    if x is not None and x.requires_grad:
        x.register_hook(look)
    queue = WeightGradientQueue()
    with queue.open(main_grads(stage)):
        if output.requires_grad:
            output.backward(grad)
    storages = [
        Storage(nbytes, "", identities.found.get(address)) for address, nbytes in queue.nbytes_of_storages().items()
    ]
    return Kept(storages, passes, _given(output), stage.adds_gradients_in_i)


def _nothing() -> None:
    """Stands in for what a main gradient tells when something is added to it."""
