"""The training step, and the evaluation of one global batch."""

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
    """Everything that a step uses or changes, and what its checkpoints record.

    `stages` are this rank's stages by global stage number. `step` counts completed steps, including those whose update
    was skipped after an fp16 overflow. `consumed_samples` counts the samples of these steps. `lineage` has an entry for
    each start or resumption that led here, oldest first: its random id, and the number of steps completed before it
    (`megapar.checkpoint.lineage`). `data_identity` has a hash of each file that the samples depend on
    (`megapar.train.data.identity`).
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
    data_identity: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank.

    `loss` is the mean in nats per target token. `grad_norm` is taken before clipping. `tokens` is the sum of the loss
    weights, which is the number of target tokens if all weights are 0 or 1. It is a float because weights may be
    fractions. `stop` is True if some rank has to stop, because of a signal or launch.time_limit.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: float
    loss_scale: LossScale  # the one that the step used
    stop: bool = False

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def overflowed(self) -> bool:
        """Whether the gradients overflowed fp16, so that a smaller loss scale may avoid it.

        That is so if the loss is finite, the gradient norm is not, and the loss scale is dynamic and above 1.
        """
        scale = self.loss_scale
        return math.isfinite(self.loss) and not self.finite and scale.dynamic and scale.scale > 1.0


def count_targets(batches: Sequence[MicroBatch], ctx: ParallelContext) -> Tensor:
    """Sum the loss weights of all samples of the step over all replicas; returns a 0-d fp32 tensor, at least 1.

    It is the only divisor of the step's loss and gradients.
    """
    tokens = torch.zeros((), device=ctx.device)
    if batches:  # a replica has none if the step has fewer micro-batches than replicas
        tokens = torch.stack([batch.weights_bs.sum() for batch in batches]).sum().to(ctx.device)
    # At least 1, because samples without any target would give 0 / 0.
    return comm.all_reduce(tokens, ctx.grad).clamp_(min=1.0)


def mean_loss(loss_sums: Sequence[Tensor], tokens: Tensor, ctx: ParallelContext) -> Tensor:
    """The step's loss over all its tokens, 0-d, on every rank. `loss_sums` is empty on ranks without the last stage."""
    total = torch.stack(list(loss_sums)).sum() if loss_sums else torch.zeros((), device=ctx.device)
    return comm.all_reduce(comm.all_reduce(total, ctx.grad), ctx.pp) / tokens


def train_step(
    state: TrainState, batches: Sequence[MicroBatch], trace: list[Event] | None = None, *, asked_to_stop: bool = False
) -> StepResult:
    """Run forward and backward over this rank's micro-batches, then one AdamW update if loss and norm are finite.

    `trace` collects the time of each forward and backward. If `asked_to_stop` is True on any rank, `stop` of the result
    is True on every rank.
    """
    ctx = state.ctx
    options = state.config.optimizer
    scale = state.loss_scale.scale
    ctx.flight.enter("forward")
    tokens = count_targets(batches, ctx)
    state.grads.zero()
    # The divisor is known before the first backward, so no gradient needs to be rescaled after it was summed.
    loss_sums = state.pipeline.step(batches, scale / tokens, state.grads.begin, trace)
    ctx.flight.enter("reduce")
    state.grads.finish()
    # The votes travel with the gradient norm, so that agreeing to stop costs no message of its own.
    votes = torch.full((), float(asked_to_stop), device=ctx.device)
    norm = grad_norm(state.grads, ctx, votes) / scale
    lr = learning_rate(state.step, options, state.config.train.steps)
    loss = mean_loss(loss_sums, tokens, ctx)
    stop = votes.item() > 0
    result = StepResult(loss.item(), norm.item(), lr, tokens.item(), replace(state.loss_scale), stop)
    ctx.flight.enter("optimizer")
    # Loss and norm are the same on every rank, so all ranks take the same branch.
    if result.finite:
        # The gradients are still multiplied by the loss scale: the update divides them along with clipping.
        state.optimizer.step(lr, clip_coefficient(norm, options.clip_grad) / scale)
        for stage in state.stages.values():
            stage.end_step(ctx)
    # Any other step that is not finite ends the run: the state stays that of the step before.
    if result.finite or result.overflowed:
        state.loss_scale.update(result.finite)
        state.step += 1
        state.consumed_samples += state.config.train.batch_size(state.consumed_samples)
    return result


def evaluate(state: TrainState, batches: Sequence[MicroBatch]) -> tuple[float, float]:
    """Evaluate one global batch without dropout; returns the loss sum and the number of target tokens over all ranks.

    `batches` are this rank's micro-batches.
    """
    for stage in state.stages.values():
        stage.eval()
    tokens = count_targets(batches, state.ctx)
    loss = mean_loss(state.pipeline.evaluate(batches), tokens, state.ctx)
    for stage in state.stages.values():
        stage.train()
    return (loss * tokens).item(), tokens.item()
