"""The training step, and the evaluation of one global batch.

A GPU computes a step while the host queues the next one. So `queue_step` reads no number: the device itself decides
whether the step updates weights, and `QueuedStep.finish` reads the numbers later.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megapar import device
from megapar.batch import MicroBatch, PipelineStage
from megapar.comm import collectives
from megapar.config.derive import num_microbatches
from megapar.config.options import Config
from megapar.context import ParallelContext
from megapar.data_parallel.shards import ReducedGradients, Weights
from megapar.optimizer.clip import clip_coefficient, grad_norm
from megapar.optimizer.optimizers import Optimizers
from megapar.optimizer.schedule import learning_rate
from megapar.pipeline.runtime import PipelineRuntime
from megapar.pipeline.schedules import Event
from megapar.precision import LossScale
from megapar.stage_set import StageSet


@dataclass
class TrainState:
    """Everything that a step uses or changes, and what its checkpoints record.

    `step` counts completed steps, including those whose update
    was skipped after an fp16 overflow. `consumed_samples` counts the samples of these steps. `lineage` has an entry for
    each start or resumption that led here, oldest first: its random id, and the number of steps completed before it
    (`megapar.checkpoint.lineage`). `data_identity` has a hash of each file that the samples depend on
    (`megapar.train.data.identity`). `failed` is a 0-d bool on the device. It is True from a failed step on, and no
    update is made while it is.
    """

    config: Config
    ctx: ParallelContext
    stages: StageSet[PipelineStage]
    pipeline: PipelineRuntime
    weights: Weights
    grads: ReducedGradients
    optimizer: Optimizers
    loss_scale: LossScale
    failed: Tensor
    step: int = 0
    consumed_samples: int = 0
    lineage: list[tuple[str, int]] = field(default_factory=list)
    data_identity: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank.

    `step` is the number of the step, counted from 1. `loss` is the mean in nats per target token. `grad_norm` is taken
    before clipping. `tokens` is the sum of the loss weights, which is the number of target tokens if all weights are 0
    or 1. It is a float because weights may be fractions. `consumed_samples` counts those of this step too, unless the
    step has failed. `stop` is True if some rank has to stop, because of a signal or launch.time_limit. `expert_counts`,
    int64 [layers, experts], are the tokens that each expert got. They are None in a model without experts.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: float
    consumed_samples: int
    loss_scale: LossScale  # the one that the step used
    stop: bool
    expert_counts: Tensor | None = None

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

    @property
    def failed(self) -> bool:
        """Whether the step is not finite and a smaller loss scale would not avoid it. It ends the run."""
        return not self.finite and not self.overflowed


@dataclass(frozen=True)
class _Position:
    """The counts of a state that a step advances."""

    step: int
    consumed_samples: int
    updates: int


@dataclass(frozen=True)
class QueuedStep:
    """A step that the device may still be computing.

    `batches` are this rank's micro-batches of the step. A failed step is explained by running them again.
    """

    state: TrainState
    batches: Sequence[MicroBatch]
    lr: float
    loss_scale: LossScale
    before: _Position
    numbers: device.HostCopy  # fp32 [4]: loss, gradient norm, tokens, votes to stop
    expert_counts: device.HostCopy | None  # int64 [layers, experts]

    def finish(self) -> StepResult:
        """Wait for the numbers of the step, and correct the state if the step made no update. Call it once.

        After an overflow the loss scale is halved. After a failed step the counts of the state are those before that
        step. Steps that were queued behind it have updated nothing either: forget them.
        """
        loss, grad_norm, tokens, votes = self.numbers.wait().tolist()
        before = self.before
        consumed = before.consumed_samples + self.state.config.train.batch_size(before.consumed_samples)
        counts = None
        if self.expert_counts is not None:
            counts = self.expert_counts.wait()
        result = StepResult(
            before.step + 1, loss, grad_norm, self.lr, tokens, consumed, self.loss_scale, votes > 0, counts
        )
        if result.failed:
            self.state.step = before.step
            self.state.consumed_samples = before.consumed_samples
            self.state.optimizer.step_count = before.updates
            self.state.failed.zero_()
            return replace(result, consumed_samples=before.consumed_samples)
        if result.overflowed:
            self.state.optimizer.step_count = before.updates
        self.state.loss_scale.update(result.finite)
        return result


def count_targets(batches: Sequence[MicroBatch], ctx: ParallelContext) -> Tensor:
    """Sum the loss weights of all samples of the step over all replicas; returns a 0-d fp32 tensor, at least 1.

    It is the only divisor of the step's loss and gradients.
    """
    tokens = torch.zeros((), device=ctx.device)
    if batches:  # a replica has none if the step has fewer micro-batches than replicas
        tokens = torch.stack([batch.weights_bs.sum() for batch in batches]).sum().to(ctx.device)
    # At least 1, because samples without any target would give 0 / 0.
    return collectives.all_reduce(tokens, ctx.grad).clamp_(min=1.0)


def mean_loss(loss_sums: Sequence[Tensor], tokens: Tensor, ctx: ParallelContext) -> Tensor:
    """The step's loss over all its tokens, 0-d, on every rank. `loss_sums` is empty on ranks without the last stage."""
    total = torch.stack(list(loss_sums)).sum() if loss_sums else torch.zeros((), device=ctx.device)
    return collectives.all_reduce(collectives.all_reduce(total, ctx.grad), ctx.pp) / tokens


def queue_step(
    state: TrainState, batches: Sequence[MicroBatch], trace: list[Event] | None = None, *, asked_to_stop: bool = False
) -> QueuedStep:
    """Queue forward and backward over this rank's micro-batches, then one update if loss and norm are finite.

    `batches` may be on the host. The counts of `state` are advanced at once. With a dynamic loss scale, finish the
    step before the next one is queued. `trace` collects the time of each forward and backward. If `asked_to_stop` is
    True on any rank, `stop` of the result is True on every rank.
    """
    ctx = state.ctx
    options = state.config.optimizer
    scale = state.loss_scale.scale
    before = _Position(state.step, state.consumed_samples, state.optimizer.step_count)
    ctx.flight.enter("forward")
    batches = [batch.to(ctx.device) for batch in batches]
    tokens = count_targets(batches, ctx)
    state.grads.zero()
    # The divisor is known before the first backward, so no gradient needs to be rescaled after it was summed.
    most = num_microbatches(state.config, state.config.train.batch_size(state.consumed_samples))
    loss_sums = state.pipeline.step(batches, scale / tokens, state.grads.begin, trace, most)
    ctx.flight.enter("reduce")
    state.grads.finish()
    # The votes travel with the gradient norm, so that agreeing to stop costs no message of its own.
    votes = torch.full((), float(asked_to_stop), device=ctx.device)
    norm = grad_norm(state.grads, ctx, votes) / scale
    loss = mean_loss(loss_sums, tokens, ctx)
    # Copied before the update: the device still has the update to compute when the host has the numbers.
    numbers = device.HostCopy(torch.stack([loss, norm, tokens, votes]))
    ctx.flight.enter("optimizer")
    lr = learning_rate(state.step, options, state.config.train.steps)
    # The gradients are still multiplied by the loss scale: the update divides them along with clipping.
    clip = clip_coefficient(norm, options.clip_grad) / scale
    found_inf = _forbids_update(state, loss, norm)
    state.optimizer.step(lr, clip, found_inf)
    expert_counts = _end_step(state, found_inf)
    state.step += 1
    state.consumed_samples += state.config.train.batch_size(state.consumed_samples)
    return QueuedStep(state, batches, lr, replace(state.loss_scale), before, numbers, expert_counts)


def _end_step(state: TrainState, found_inf: Tensor) -> device.HostCopy | None:
    """Let the stages update what follows the whole batch. Returns the tokens of each expert, int64 [layers, experts].

    They are None in a model without experts.
    """
    model = state.config.model
    counts = torch.zeros(model.num_hidden_layers, model.moe.num_experts, dtype=torch.int64, device=state.ctx.device)
    for stage in state.stages.values():
        for layer, counts_e in stage.end_step(state.ctx, found_inf).items():
            counts[layer] = counts_e
    if not model.moe.num_experts:
        return None
    # Each pipeline rank has the layers of its own stages, and zeros for the others.
    return device.HostCopy(collectives.all_reduce(counts, state.ctx.pp))


def _forbids_update(state: TrainState, loss: Tensor, norm: Tensor) -> Tensor:
    """0-d bool on the device: whether the step must not update weights. Loss and norm are the same on every rank.

    A step that ends the run is noted in `state.failed`.
    """
    not_finite = ~(loss.isfinite() & norm.isfinite())
    if state.loss_scale.dynamic:
        # It may be an overflow, after which training goes on. The host knows it before it queues the next step, because
        # that needs the new loss scale, and so does the bias correction of Adam, which counts the updates made.
        return not_finite
    # Training ends here, but the host may learn it when it has queued the next step. That step must not update either.
    return state.failed.logical_or_(not_finite)


def train_step(
    state: TrainState, batches: Sequence[MicroBatch], trace: list[Event] | None = None, *, asked_to_stop: bool = False
) -> StepResult:
    """`queue_step`, then `finish`: the step is complete when this returns."""
    return queue_step(state, batches, trace, asked_to_stop=asked_to_stop).finish()


def evaluate(state: TrainState, batches: Sequence[MicroBatch]) -> tuple[float, float]:
    """Evaluate one global batch without dropout; returns the loss sum and the number of target tokens over all ranks.

    `batches` are this rank's micro-batches. They may be on the host.
    """
    batches = [batch.to(state.ctx.device) for batch in batches]
    for stage in state.stages.values():
        stage.eval()
    tokens = count_targets(batches, state.ctx)
    loss = mean_loss(state.pipeline.evaluate(batches, num_microbatches(state.config)), tokens, state.ctx)
    for stage in state.stages.values():
        stage.train()
    return (loss * tokens).item(), tokens.item()
