"""The parts of a model in one layout: embedding, each kind of layer, norm and head.

A part is built as a stage of its own on the meta device. So the parts of a model of 80 layers are as few as those of
one layer, and layouts that differ only in how many ranks share the work have the same parts.
`megapar_tools.plan.memory` puts the memory of ranks together from them.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from megapar.activations.recompute import Recompute
from megapar.base.grid import Grid
from megapar.comm.axis import Axis
from megapar.comm.transport import Transport
from megapar.config.options import BY_LAYER, Config, ParallelConfig
from megapar.data_parallel.layout import Update
from megapar.declare import context
from megapar.declare.batch import MicroBatch, PipelineStage, Targets
from megapar.declare.context import ParallelContext
from megapar.declare.params import ParamSpec, spec_of
from megapar.launch.grid import grid_of
from megapar.optimizer.table import update_of
from megapar.pipeline.zero_bubble import ScheduleMemory
from megapar.step.trainable import freeze
from megapar.train.doors import Builder
from megapar_tools.plan.moments import Orders
from megapar_tools.plan.recorded import Given, Recording
from megapar_tools.plan.target import planned_transport
from megapar_tools.plan.work import META, recording


@dataclass(frozen=True)
class LayerPart:
    """A layer as a part: the number of the first layer like it, and whether backward computes it again.

    `trained` says of each of its parameters whether it is trained. It is empty without train.trainable. `offloaded`
    says whether its input is in host memory until its backward pass.
    """

    number: int
    recomputed: bool
    trained: tuple[bool, ...] = ()
    offloaded: bool = False


FIRST = "first"
"""The part with the embedding, as a stage without layers."""
LAST = "last"
"""The part with norm, head and loss, as a stage without layers."""
PartId = LayerPart | str

# Parameters


@dataclass(frozen=True)
class DeclaredParameter:
    """The declaration of a parameter without its memory."""

    spec: ParamSpec
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool


@dataclass(frozen=True)
class StageParameters:
    """One stage's parameters in a `Structure`, by index, in the order of registration before and after its layers."""

    before: Sequence[int]
    after: Sequence[int]


@dataclass(frozen=True, eq=False)
class Structure:
    """The parameters of one part, or of the two ends of a model on one rank, which may share the embedding's matrix."""

    params: Sequence[DeclaredParameter]
    members: Sequence[StageParameters]

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
            members.append(StageParameters(before, [i for i in after if i not in before]))
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

    @classmethod
    def of(cls, config: Config, ctx: ParallelContext, parts: Sequence[PartId] = ()) -> "_Cuts":
        """Return what decides the shapes of `parts` on the rank of `ctx`."""
        parallel = config.parallel
        options = (
            config.train.precision,
            config.train.fp8,
            config.train.fp8_skip,
            config.adapter,
            config.train.trainable,
            parallel.sequence_parallel,
            parallel.tp_overlap_chunks,
            parallel.ep_overlap_chunks,
            ctx.cp.size,
            ctx.ep.transport.sorts_groups,
        )
        tp, ep, etp = ((axis.size, axis.rank) for axis in (ctx.tp, ctx.ep, ctx.etp))
        # A layer is the same on ranks with copies of a tied embedding and on others.
        is_layer = all(isinstance(part, LayerPart) for part in parts)
        return cls(config.model, options, tp, ep, etp, 0 if is_layer else ctx.tied.size)


class Parts:
    """The parts of models, each built and measured once for all layouts that share it.

    `builder` builds the stages.
    """

    def __init__(self, builder: Builder):
        self.builder = builder
        self._structures: dict[Hashable, Structure] = {}
        self._copies: dict[Hashable, Copies] = {}
        self._recordings: dict[Hashable, Recording] = {}
        self._layer_parts: dict[Hashable, list[LayerPart]] = {}
        self._batches: dict[Hashable, MicroBatch] = {}
        self._contexts: dict[tuple[Grid, int, Transport], ParallelContext] = {}
        self._orders: dict[Hashable, Orders] = {}
        self._flops: dict[tuple[Hashable, ...], int] = {}
        self.memory: dict[Hashable, Any] = {}
        """What plans of memory have computed before, by what decides it."""
        self.times: dict[Hashable, Any] = {}
        """What `megapar_tools.plan.pipeline_times` has computed before, by what decides it."""

    def context(self, config: Config, rank: int) -> ParallelContext:
        """The planned context of a rank. Layouts with one grid and one transport have the same."""
        grid, transport = grid_of(config), planned_transport(config)
        key = (grid, rank, transport)
        if key not in self._contexts:
            self._contexts[key] = context.planned(grid, rank, device=META, transport=transport)
        return self._contexts[key]

    def orders(self, parallel: ParallelConfig, num_microbatches: int, memory: ScheduleMemory | None = None) -> Orders:
        """The orders of a schedule, made once for all layouts with this pipeline."""
        key = (
            *(parallel.schedule, parallel.schedule_costs, parallel.pp, parallel.vpp, num_microbatches),
            (memory.limit, tuple(memory.forward), tuple(memory.inputs)) if memory else None,
        )
        if key not in self._orders:
            self._orders[key] = Orders(parallel, memory, num_microbatches)
        return self._orders[key]

    def flops_per_token(self, config: Config) -> int:
        """FLOPs of a token, forward and backward, for MFU."""
        key = config.model, config.adapter, config.train.seq_length, config.train.trainable
        if key not in self._flops:
            self._flops[key] = self.builder.flops_per_token(config)
        return self._flops[key]

    def layer_parts(self, config: Config, ctx: ParallelContext) -> list[LayerPart]:
        """The part of each layer. Layers are of one part if they are of one kind, and trained and updated alike."""
        train = config.train
        rule = Recompute.of(train)
        groups = config.optimizer.groups
        by_name = bool(train.trainable or groups)
        cuts = _Cuts.of(config, ctx) if by_name else None
        # Which matrices are in FP8 follows from their cuts.
        in_fp8 = (train.fp8_skip, config.parallel.tp, config.parallel.etp) if train.fp8 != "none" else None
        key = (config.model, config.adapter, train.seq_length, rule, cuts, groups, in_fp8)
        if key not in self._layer_parts:
            first_like: dict[Hashable, int] = {}
            parts = []
            for number, kind in enumerate(self.builder.layer_kinds(config)):
                trained: tuple[bool, ...] = ()
                updates: tuple[Update, ...] = ()
                if by_name:
                    # Patterns may name layers, so each layer is looked at.
                    structure = self.structure(config, ctx, LayerPart(number, recomputed=False))
                    trained = tuple(param.trained for param in structure.params)
                    updates = tuple(map(update_of(config.optimizer), (param.spec for param in structure.params)))
                alike = (kind, rule.layer(number), rule.offloads(number), trained, updates)
                first = first_like.setdefault(alike, number)
                parts.append(LayerPart(first, rule.layer(number), trained, rule.offloads(number)))
            self._layer_parts[key] = parts
        return self._layer_parts[key]

    def structure(self, config: Config, ctx: ParallelContext, *parts: PartId) -> Structure:
        """The parameters of a part on the rank of `ctx`: of a layer, of FIRST, of LAST, or of both.

        FIRST and LAST together are two stages of one rank. BOTH is one stage.
        """
        # Whether a layer is recomputed does not change its parameters.
        ids = tuple(part.number if isinstance(part, LayerPart) else part for part in parts)
        key = (ids, _Cuts.of(config, ctx, parts))
        if key not in self._structures:
            stages = _make_stages(self.builder, config, ctx, parts)
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

    def recording(
        self, config: Config, ctx: ParallelContext, part: PartId, given: tuple[Given, ...] | None = None
    ) -> Recording:
        """One micro-batch through a part on the rank of `ctx`.

        `given` is None for the first part of a stage: it gets what the stage gets, with gradients.
        """
        train = config.train
        decides: tuple[Hashable, ...] = (train.micro_batch_size, train.seq_length, ctx.cp.size)
        if part == LAST:
            decides = (*decides, config.kernels.loss_chunk, train.z_loss, train.objective)
            if config.model.num_nextn_predict_layers:  # its layers are recomputed as others are
                recomputed = (train.recompute, train.recompute_layers, train.offload)
                decides = (*decides, *recomputed, config.parallel.cp_attention)
        elif isinstance(part, LayerPart):
            # Which layers full recomputes, the part says.
            mode = "none" if train.recompute in BY_LAYER and not part.recomputed else train.recompute
            decides = (*decides, mode, config.parallel.cp_attention)
        key = (part, decides, config.kernels.backend, config.kernels.compile, _Cuts.of(config, ctx, [part]))
        if (key, given) not in self._recordings:
            noting, tape = recording(ctx)
            (stage,) = _make_stages(self.builder, config, noting, [part])
            if train.trainable:
                freeze([stage], train.trainable)
            batch = self._batch(config)
            if part == LAST and self.builder.declared(config).divided_by == "pairs":
                batch = batch.with_pairs()
            found = Recording(stage, batch, tape, given)
            # Most parts are given what a stage is given, so one recording is that of both.
            if given == found.boundary:
                found = self._recordings.setdefault((key, None), found)
            self._recordings[key, given] = found
        return self._recordings[key, given]

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


def _make_stages(
    builder: Builder, config: Config, ctx: ParallelContext, parts: Sequence[PartId]
) -> list[PipelineStage]:
    """Build each of `parts` as a stage. A LAST after a FIRST gets the embedding's matrix, if the model ties them."""
    make = builder.maker(config, ctx)
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
            tied = builder.embedding_weight(config, stages[0]) if stages else None
            stages.append(make(range(end, end), first=False, last=True, tied_weight=tied))
    return stages


def meta_batch(samples: int, length: int, cp: int, num_targets: int) -> MicroBatch:
    """A micro-batch of a context-parallel rank on the meta device, of `samples` samples of `length` tokens."""
    tokens_bs = torch.zeros((samples, length), dtype=torch.int64, device=META)
    weights_bs = torch.zeros((samples, length), device=META)
    later = [Targets(tokens_bs, weights_bs)] * (num_targets - 1)
    whole = MicroBatch.of_samples(tokens_bs, tokens_bs, weights_bs, sample_ids_b=tokens_bs[:, 0], later_targets=later)
    # With a scale, as in training: without one the losses of stages before the last would keep nothing.
    whole.scope.grad_scale = torch.ones((), device=META)
    return whole.columns(torch.empty(length // cp, dtype=torch.int64, device=META))
