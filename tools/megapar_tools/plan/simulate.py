"""Runs the training step of one rank of a world of any size, in one process without its memory and its peers.

Stages, schedule, engines, optimizer and collectives are those of a run. Tensors are on the meta device: they have
shapes and no values. Messages are counted and not sent. What the host would read of a value is zero, so no update is
skipped and nobody asks to stop. The rows of experts follow from a stated load (`megapar.base.expert_load`).
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megapar.base.expert_load import EVEN, ExpertLoad
from megapar.base.grid import EXPERT_AXES, Grid
from megapar.comm.axis import Axis
from megapar.comm.transport_simulated import Simulated
from megapar.config.derive import num_microbatches
from megapar.config.options import Config
from megapar.data.order import micro_batch_positions
from megapar.data_parallel.layout import FlatLayout
from megapar.declare import context
from megapar.declare.batch import MicroBatch, PipelineStage, Targets
from megapar.declare.context import ParallelContext
from megapar.declare.stage_set import StageSet
from megapar.launch.grid import grid_of
from megapar.observe import memory_report
from megapar.observe.kept import KeptBytes
from megapar.pipeline.actions import Action
from megapar.step.step import queue_step
from megapar.step.trainable import freeze
from megapar.train.levers import planned_device
from megapar.train.trainer import assemble, layout_of
from megapar_tools.plan.memory import memory_limit
from megapar_tools.plan.parts import Parts
from megapar_tools.plan.target import planned_transport, with_planned_kernels

META = torch.device("meta")
Build = Callable[[Config, ParallelContext], StageSet[PipelineStage]]
"""Builds the stages of one rank."""
_PLACES = ("tp", "cp", "dp", "pp", *EXPERT_AXES)


@dataclass(frozen=True)
class AxisTraffic:
    """What a rank sends over one axis in a step.

    The axis has `ranks` ranks on `nodes` nodes. `calls` and `sent`, in bytes, are by operation, as
    `Traffic` counts them. `sent_to_other_nodes` is the part of the bytes that leaves the node: a ring sends all of them
    to the next rank of the axis.
    """

    ranks: int
    nodes: int
    calls: Mapping[str, int]
    sent: Mapping[str, int]
    sent_to_other_nodes: int

    @property
    def sent_inside_node(self) -> int:
        return sum(self.sent.values()) - self.sent_to_other_nodes


@dataclass(frozen=True)
class Simulation:
    """One step of one rank.

    `positions` has its position and the size of each axis of the grids, by name. Axes of one rank are left out.
    `stages` says in words what it holds. `memory` has the most bytes of the step by the names in the report of
    train.memory_report. `traffic` is by axis. `flops` are those of matrix products and attention, forward and backward,
    recomputation included.
    """

    rank: int
    positions: Mapping[str, tuple[int, int]]
    stages: str
    memory: Mapping[str, int]
    traffic: Mapping[str, AxisTraffic]
    flops: int

    @property
    def memory_bytes(self) -> int:
        """All bytes in the device's memory."""
        return memory_report.on_device(self.memory)


def simulate(
    config: Config,
    build: Build,
    parts: Parts,
    rank: int,
    ranks_per_node: int,
    load: ExpertLoad = EVEN,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Simulation:
    """Run one step of `rank` at the full global batch. `config` must be validated for the world.

    `parts` are those of the same model, for a schedule within a limit of memory. Nodes hold `ranks_per_node`
    neighboring ranks each. `progress` is called after each action of the schedule, with the
    number of actions done and of all.
    """
    config = replace(with_planned_kernels(config), train=replace(config.train, batch_ramp=()))
    sorts_groups = planned_transport(config).sorts_groups

    def transport(ranks: tuple[int, ...], position: int) -> Simulated:
        return Simulated(len(ranks), position, sorts_groups=sorts_groups)

    grid = grid_of(config)
    ctx = context.simulated(grid, rank, transport, load)
    stages = build(config, ctx)
    freeze(stages.values(), config.train.trainable)
    state = assemble(config, ctx, stages, memory_limit(config, parts))
    for optimizer in state.optimizer.each:
        optimizer.join_in_plan(grid, lambda other: _layout_of_rank(other, grid, config, build))
    kept = KeptBytes(state.stages, state.pipeline.deferred_nbytes)
    state.pipeline.after_action.append(kept.note_action)
    batches = _micro_batches(config, ctx, stages.declared.num_targets)
    if stages.declared.divided_by == "pairs":
        batches = [batch.with_pairs() for batch in batches]
    plan = state.pipeline.plan(len(batches), num_microbatches(config), backward=True)
    total = sum(isinstance(item, Action) for item in plan)
    done = itertools.count(1)
    state.pipeline.after_action.append(lambda action: progress(next(done), total))
    with kept.counting(), _Executed() as executed:
        queue_step(state, batches).finish()  # numbers on the meta device are 0, and mean nothing
    traffic = {axis.name: _traffic(axis, ranks_per_node) for axis in ctx.axes if axis.traffic.calls}
    return Simulation(
        rank=rank,
        positions={axis.name: (axis.rank, axis.size) for axis in ctx.axes if axis.size > 1 and axis.name in _PLACES},
        stages="; ".join(stage.title() for stage in stages.values()),
        memory=memory_report.measured(state, kept, planned_device(config)),
        traffic=traffic,
        flops=executed.flops,
    )


def _layout_of_rank(rank: int, grid: Grid, config: Config, build: Build) -> FlatLayout:
    """Build the layout of another rank's parameters."""
    ctx = context.simulated(grid, rank, lambda ranks, position: Simulated(len(ranks), position))
    stages = build(config, ctx)
    freeze(stages.values(), config.train.trainable)
    return layout_of(config.optimizer, list(stages.values()))


def _micro_batches(config: Config, ctx: ParallelContext, num_targets: int) -> list[MicroBatch]:
    """The micro-batches of a step, with this rank's positions. Tokens have no values."""
    train = config.train
    length = train.seq_length
    positions_s = torch.empty(length // ctx.cp.size, dtype=torch.int64, device=META)
    rows = micro_batch_positions(0, train.global_batch_size, train.micro_batch_size, ctx.dp.rank, ctx.dp.size)
    batches = []
    for row in rows:
        tokens_bs = torch.empty((len(row), length), dtype=torch.int64, device=META)
        weights_bs = torch.empty((len(row), length), device=META)
        later = [Targets(tokens_bs, weights_bs)] * (num_targets - 1)
        whole = MicroBatch.of_samples(tokens_bs, tokens_bs, weights_bs, tokens_bs[:, 0], later_targets=later)
        batches.append(whole.columns(positions_s.clone()))
    return batches


def _traffic(axis: Axis, ranks_per_node: int) -> AxisTraffic:
    """What was sent over `axis`, with neighbors of `ranks_per_node` ranks on a node."""
    nodes = [rank // ranks_per_node for rank in axis.ranks]
    here = nodes[axis.rank]
    to_others = 0
    addressed = 0
    if isinstance(axis.transport, Simulated):
        addressed = sum(axis.transport.to_position)
        to_others = sum(sent for node, sent in zip(nodes, axis.transport.to_position, strict=True) if node != here)
    if nodes[(axis.rank + 1) % axis.size] != here:
        to_others += axis.traffic.total() - addressed
    return AxisTraffic(axis.size, len(set(nodes)), axis.traffic.calls, axis.traffic.sent, to_others)


class _Executed(TorchDispatchMode):
    """Counts the FLOPs of the operations executed in its context, and lets the host read zeros of meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if operation is _TO_NUMBER and args[0].is_meta:
            return 0
        if operation is _TO_DEVICE and args[0].is_meta and kwargs.get("device") == _CPU:
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        count = _FLOPS.get(operation.overloadpacket)
        if count is not None:
            self.flops += count(*args)
        return operation(*args, **kwargs)


_CPU = torch.device("cpu")
_TO_NUMBER = torch.ops.aten._local_scalar_dense.default  # what item() calls
_TO_DEVICE = torch.ops.aten._to_copy.default


def _product(a: Tensor, b: Tensor, *_: object) -> int:
    """The FLOPs of a product of matrices, or of a batch of them. Behind them may be the dtype of the result."""
    return 2 * a.numel() * b.shape[-1]


def _sum_and_product(total: Tensor, a: Tensor, b: Tensor, *_: object) -> int:
    return _product(a, b)


def _scaled_product(a: Tensor, b: Tensor, out: Tensor) -> int:
    """The FLOPs of a product of FP8 codes (`megapar_kernels.dispatch`)."""
    return 2 * out.numel() * b.shape[-1]


def _scaled_weight_gradient(a: Tensor, b: Tensor, total: Tensor) -> int:
    return 2 * total.shape[0] * b.numel()


def _attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False) -> int:
    """The FLOPs of the two products forward. A causal block has half of the scores."""
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    flops = 2 * scores * (q.shape[-1] + v.shape[-1])
    if causal:
        return flops // 2
    return flops


def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dropout: float, causal: bool
) -> int:
    """The FLOPs of four products. The kernel computes the scores once more, which the count of a model leaves out."""
    return 2 * _attention(q, k, v, dropout, causal)


_FLOPS: dict[Any, Callable[..., int]] = {
    torch.ops.aten.mm: _product,
    torch.ops.aten.bmm: _product,
    torch.ops.aten.addmm: _sum_and_product,
    torch.ops.aten.addmm_: _sum_and_product,
    torch.ops.aten.baddbmm: _sum_and_product,
    torch.ops.aten._scaled_mm: _product,
    torch.ops.aten._scaled_mm_v2: _product,
    torch.ops.megapar.scaled_product: _scaled_product,
    torch.ops.megapar.scaled_weight_gradient: _scaled_weight_gradient,
    # On the meta device attention is always this operation, whatever the device that is planned for.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
