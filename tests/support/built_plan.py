"""The memory of a rank counted on the rank itself: all its stages are built on the meta device and measured whole.

Plans (`megapar_tools.plan.memory`) put it together from parts, and must find the same.
"""

import math
from collections import Counter
from dataclasses import replace

import torch
from megapar_models.build import build_stages
from megapar_tools.plan.memory import RankReport
from megapar_tools.plan.target import planned_transport
from megapar_tools.plan.work import META, FusedAttention
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megapar.config.derive import num_microbatches
from megapar.config.options import Config
from megapar.declare import context
from megapar.declare.batch import MicroBatch, PipelineStage, StepScope, Targets
from megapar.declare.params import spec_of
from megapar.launch.grid import grid_of
from megapar.linear.converted_weight import converted_nbytes
from megapar.linear.main_grad import WeightGradientQueue, main_grads
from megapar.observe import memory_report
from megapar.observe.kept import DEFERRED, KeptBytes, Key
from megapar.pipeline.actions import Action
from megapar.pipeline.sharding_plan import most_live
from megapar.step.trainable import freeze
from megapar.train.trainer import assemble


def built_report(config: Config, rank: int) -> RankReport:
    """The report of `rank`. `kernels.backend` must be given, because auto means another thing on a GPU."""
    ctx = context.planned(grid_of(config), rank, device=META, transport=planned_transport(config))
    stages = build_stages(config, ctx)
    freeze(stages.values(), config.train.trainable)
    state = assemble(config, ctx, stages)
    plan = state.pipeline.plan(num_microbatches(config), backward=True)
    batch = meta_batch(config, stages.declared.num_targets)
    kept = {number: kept_by(number, stage, batch) for number, stage in stages.items()}
    in_halves = {item.stage for item in plan if isinstance(item, Action) and item.kind == "I"}
    deferred = {number: deferred_by(stages[number], batch) for number in in_halves}
    live: Counter[Key] = Counter()
    at_peak: Counter[Key] = Counter()
    for item in plan:
        if not isinstance(item, Action):
            continue
        if item.kind == "F":
            live.update(kept[item.stage])
        elif item.kind != "W":
            live.subtract(kept[item.stage])
        if item.kind in "IW":
            live[item.stage, DEFERRED] += deferred[item.stage] * (1 if item.kind == "I" else -1)
        if live.total() > at_peak.total():
            at_peak = live.copy()
    sharded = {id(slot.param) for slot in state.weights.layout.slots} if config.optimizer.zero_stage == 3 else set()

    def converted(unit: int) -> int:
        bucket = state.weights.layout.buckets[unit]
        if state.weights.layout.is_quantized(bucket):
            return 0  # its codes are gathered, not converted
        return converted_nbytes(
            slot.param for slot in state.weights.layout.slots[bucket.first_param : bucket.end_param]
        )

    params = {id(param): param for stage in stages.values() for param in stage.parameters()}
    optimizer, on_host = memory_report.optimizer_nbytes(state, config.launch.device)
    return RankReport(
        pp=ctx.pp.rank,
        stages="; ".join(stage.title() for stage in stages.values()),
        parameters=sum(math.prod(p.local_shape) for param in params.values() for p in spec_of(param).pieces),
        weights=state.weights.nbytes
        + most_live(plan, state.weights.nbytes_of, "gather", "release")
        + memory_report.frozen_nbytes(stages.values()),
        gradients=state.grads.flat.nbytes + most_live(plan, state.grads.nbytes_of, "open", "add"),
        optimizer=optimizer,
        optimizer_on_host=on_host,
        inputs_on_host=0,
        kept=tuple(memory_report.by_name(at_peak, len(stages), stages.fine_stages).items()),
        converted=converted_nbytes(param for key, param in params.items() if key not in sharded)
        + most_live(plan, converted, "wait", "release"),
    )


def meta_batch(config: Config, num_targets: int) -> MicroBatch:
    train = config.train
    tokens_bs = torch.zeros((train.micro_batch_size, train.seq_length), dtype=torch.int64, device=META)
    weights_bs = torch.zeros_like(tokens_bs, dtype=torch.float32)
    later = [Targets(tokens_bs, weights_bs)] * (num_targets - 1)
    whole = MicroBatch.of_samples(tokens_bs, tokens_bs, weights_bs, tokens_bs[:, 0], later_targets=later)
    part = whole.columns(torch.empty(train.seq_length // config.parallel.cp, dtype=torch.int64, device=META))
    return replace(part, scope=StepScope(torch.ones((), device=META)))


def forward(stage: PipelineStage, batch: MicroBatch) -> tuple[Tensor, ...]:
    given = [torch.empty(spec.shape, dtype=spec.dtype, device=META) for spec in stage.boundary(batch)]
    for x, spec in zip(given, stage.boundary(batch), strict=True):
        x.requires_grad_(spec.has_gradient)
    with FusedAttention():
        result = stage(tuple(given) if len(given) > 1 else next(iter(given), None), batch)
    return (result,) if isinstance(result, Tensor) else tuple(result)


def kept_by(number: int, stage: PipelineStage, batch: MicroBatch) -> Counter[Key]:
    kept = KeptBytes({number: stage})
    with kept.counting():
        forward(stage, batch)
    return kept.at_peak


def deferred_by(stage: PipelineStage, batch: MicroBatch) -> int:
    """Units have no memory outside a step, so gradients added in I get some."""
    for main_grad, param in zip(main_grads(stage), (p for p in stage.parameters() if p.requires_grad), strict=True):
        main_grad.tensor = torch.empty(param.shape, device=META)
        main_grad._on_added = lambda: None  # type: ignore[attr-defined]
    outputs = [y for y in forward(stage, batch) if y.requires_grad]
    queue = WeightGradientQueue()
    with queue.open(main_grads(stage)), FusedAttention():
        if outputs:
            # From edges: within a function of a tensor torch takes the mode off.
            torch.autograd.backward([get_gradient_edge(y) for y in outputs], [torch.empty_like(y) for y in outputs])
    return queue.nbytes
