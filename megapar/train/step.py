"""One training step on one screen."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megapar import comm
from megapar.batch import MicroBatch, PipelineStage
from megapar.config import Config
from megapar.context import ParallelContext
from megapar.data_parallel.reduce import Gradients
from megapar.data_parallel.weights import FlatWeights
from megapar.optimizer.base import Optimizer
from megapar.optimizer.clip import clip_coefficient, grad_norm
from megapar.optimizer.schedule import learning_rate
from megapar.pipeline.runtime import PipelineRuntime
from megapar.pipeline.schedules import Event
from megapar.precision import LossScale


@dataclass
class TrainState:
    """Everything that a step changes or uses, and what its checkpoints say of it.

    `step` counts completed steps, including those whose update was skipped after an fp16 overflow; `consumed_samples`
    counts the samples in them.
    `lineage` lists the starts that led here, each with the step that it went on from; `data` says what the samples
    depend on (`megapar.train.data.identity`).
    """

    config: Config
    ctx: ParallelContext
    stages: Mapping[int, PipelineStage]
    pipeline: PipelineRuntime
    weights: FlatWeights
    grads: Gradients
    optimizer: Optimizer
    loss_scale: LossScale
    step: int = 0
    consumed_samples: int = 0
    lineage: list[tuple[str, int]] = field(default_factory=list)
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """What a step found, the same on every rank. `grad_norm` is taken before clipping; `tokens` are the target
    tokens; `stop`: some rank was asked to end the run."""

    loss: float
    grad_norm: float
    lr: float
    tokens: float
    loss_scale: LossScale  # that the step used
    stop: bool = False

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def overflowed(self) -> bool:
        """A gradient left fp16's range though the loss did not: a smaller loss scale mends it."""
        scale = self.loss_scale
        return math.isfinite(self.loss) and not self.finite and scale.dynamic and scale.scale > 1.0


def count_targets(batches: Sequence[MicroBatch], ctx: ParallelContext) -> Tensor:
    """Sum of loss weights over all samples of the step on all ranks, at least 1, fp32: the only divisor, applied
    once."""
    tokens = torch.zeros((), device=ctx.device)
    if batches:  # else another replica has all of the step's micro-batches
        tokens = torch.stack([batch.weights_bs.sum() for batch in batches]).sum().to(ctx.device)
    return comm.all_reduce(tokens, ctx.grad).clamp_(min=1.0)


def mean_loss(loss_sums: Sequence[Tensor], tokens: Tensor, ctx: ParallelContext) -> Tensor:
    """The step's loss over all its tokens, on every rank; only last stages have sums."""
    total = torch.stack(list(loss_sums)).sum() if loss_sums else torch.zeros((), device=ctx.device)
    return comm.all_reduce(comm.all_reduce(total, ctx.grad), ctx.pp) / tokens


def train_step(
    state: TrainState, batches: Sequence[MicroBatch], trace: list[Event] | None = None, *, asked_to_stop: bool = False
) -> StepResult:
    """Forward and backward over this rank's micro-batches, then one AdamW update if loss and norm are finite.

    `trace` collects when each forward and backward ran. `asked_to_stop` on any rank is `stop` in the result on every
    rank. That costs no message: it goes with the gradient norm.
    """
    ctx = state.ctx
    options = state.config.optimizer
    scale = state.loss_scale.scale
    ctx.flight.enter("forward")
    tokens = count_targets(batches, ctx)
    state.grads.zero()
    loss_sums = state.pipeline.step(batches, scale / tokens, state.grads.begin, trace)
    ctx.flight.enter("reduce")
    state.grads.finish()
    votes = torch.full((), float(asked_to_stop), device=ctx.device)
    norm = grad_norm(state.grads, ctx, votes) / scale
    lr = learning_rate(state.step, options, state.config.train.steps)
    loss = mean_loss(loss_sums, tokens, ctx)
    stop = votes.item() > 0
    result = StepResult(loss.item(), norm.item(), lr, tokens.item(), replace(state.loss_scale), stop)
    ctx.flight.enter("optimizer")
    if result.finite:
        state.optimizer.step(lr, clip_coefficient(norm, options.clip_grad) / scale)
    if result.finite or result.overflowed:
        state.loss_scale.update(result.finite)
        state.step += 1
        state.consumed_samples += state.config.train.batch_size(state.consumed_samples)
    return result


def evaluate(state: TrainState, batches: Sequence[MicroBatch]) -> tuple[float, float]:
    """(loss sum, target tokens) over all ranks of one global batch of validation samples, without dropout."""
    for stage in state.stages.values():
        stage.eval()
    tokens = count_targets(batches, state.ctx)
    loss = mean_loss(state.pipeline.evaluate(batches), tokens, state.ctx)
    for stage in state.stages.values():
        stage.train()
    return (loss * tokens).item(), tokens.item()
