"""The training step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megapar.base.errors import NumericError
from megapar.comm import collectives
from megapar.config.derive import num_microbatches
from megapar.declare.batch import MicroBatch
from megapar.declare.context import ParallelContext
from megapar.declare.largest_logits import of_step
from megapar.declare.stage_set import AddedLoss
from megapar.declare.tally import counting_modules, end_step, tables
from megapar.optimizer.clip import clip_coefficient, reduce_norm
from megapar.optimizer.schedule import learning_rate
from megapar.step.references import with_references
from megapar.step.state import Position, QueuedStep, StepResult, TrainState
from megapar.system import device


def count_targets(batches: Sequence[MicroBatch], ctx: ParallelContext) -> Tensor:
    """Sum the loss weights of all samples of the step over all replicas; returns a 0-d fp32 tensor.

    It is the only divisor of the step's loss and gradients, unless its objective divides by pairs. It is 0 if no target
    has a weight. The loss is then NaN, so the step updates nothing, and is refused (`StepResult.check_targets`).
    """
    tokens = torch.zeros((), device=ctx.device)
    if batches:  # a replica has none if the step has fewer micro-batches than replicas
        tokens = torch.stack([batch.weights_bs.sum() for batch in batches]).sum().to(ctx.device)
    return collectives.all_reduce(tokens, ctx.grad)


class Divisors(NamedTuple):
    """What sums of losses over a step are divided by, 0-d fp32.

    `tokens` is the number of its target tokens. `main` is what the main loss is divided by.
    """

    tokens: Tensor
    main: Tensor

    @classmethod
    def of(cls, state: TrainState, batches: Sequence[MicroBatch], samples: int) -> "Divisors":
        """Return the divisors of a step with `samples`. `batches` are this rank's micro-batches, on its device."""
        tokens = count_targets(batches, state.ctx)
        if state.stages.declared.divided_by == "tokens":
            return cls(tokens, tokens)
        # A sample is a pair. It may be compared without a weight of any token.
        return cls(tokens.clamp(min=1.0), torch.full_like(tokens, samples))

    def of_added(self, loss: AddedLoss) -> Tensor:
        """Return the divisor of a loss besides the main one."""
        return self.tokens if loss.divided_by == "tokens" else self.main


def sum_of_losses(main_losses: Sequence[Tensor], ctx: ParallelContext) -> Tensor:
    """The sum of the main loss over all replicas, 0-d, on every rank. A collective.

    `main_losses` are the sums of this rank's micro-batches. They are empty on ranks without the last stage.
    """
    total = torch.stack(list(main_losses)).sum() if main_losses else torch.zeros((), device=ctx.device)
    return collectives.all_reduce(collectives.all_reduce(total, ctx.grad), ctx.pp)


def start_losses(state: TrainState) -> dict[str, Tensor]:
    """A zero for each loss declared by the model, to add up over this rank's micro-batches (`MicroBatch.loss_sums`)."""
    declared = state.stages.declared.losses
    return {loss.name: torch.zeros((), dtype=torch.float64, device=state.ctx.device) for loss in declared}


def parts_of_losses(state: TrainState, loss_sums: Mapping[str, Tensor]) -> Tensor:
    """This rank's part of each declared loss, fp64 1-D. The sum over all ranks counts each loss once."""
    parts = []
    for loss in state.stages.declared.losses:
        # Tensor ranks that add the same loss have all of it, so the first one's counts.
        counted = loss.split_over_tp or state.ctx.tp.first
        parts.append(loss_sums[loss.name] * float(counted))
    if parts:
        return torch.stack(parts)
    return torch.zeros(0, dtype=torch.float64, device=state.ctx.device)


def compute_gradients(
    state: TrainState,
    batches: Sequence[MicroBatch],
    samples: int,
    scale: float,
    vote: float = 0.0,
) -> tuple[Tensor, Tensor, list[Tensor], Divisors]:
    """Compute the gradients of a step with `samples` samples, multiplied by `scale`.

    Returns the loss and the gradient norm, 0-d and without `scale`, then the sums of `vote` and of the declared losses
    over all ranks, and the divisors of the losses.
    """
    ctx = state.ctx
    ctx.flight.enter("forward")
    loss_sums = start_losses(state)
    batches = [replace(batch, loss_sums=loss_sums) for batch in batches]
    divisors = Divisors.of(state, batches, samples)
    state.grads.zero()
    # The divisor is known before the first backward, so no gradient needs to be rescaled after it was summed.
    main_losses = state.pipeline.step(
        batches,
        scale / divisors.main,
        state.grads.begin,
        num_microbatches(state.config, samples),
        scale / divisors.tokens,
    )
    ctx.flight.enter("reduce")
    state.grads.finish()
    votes = torch.full((1,), vote, dtype=torch.float64, device=ctx.device)
    with ctx.flight.span("optimizer"):
        norm, sums = reduce_norm(state.grads, ctx, torch.cat([votes, parts_of_losses(state, loss_sums)]))
    return sum_of_losses(main_losses, ctx) / divisors.main, norm / scale, list(sums), divisors


def queue_step(state: TrainState, batches: Sequence[MicroBatch], *, asked_to_stop: bool = False) -> QueuedStep:
    """Queue forward and backward over this rank's micro-batches, then one update if loss and norm are finite.

    `batches` may be on the host. The counts of `state` are advanced at once. With a dynamic loss scale, finish the
    step before the next one is queued. If `asked_to_stop` is True on any rank, `stop` of the result is True on every
    rank.
    """
    ctx = state.ctx
    options = state.config.optimizer
    scale = state.loss_scale.scale
    before = Position(state.step, state.consumed_samples, state.optimizer.step_count)
    samples = state.config.train.batch_size(state.consumed_samples)
    batches = [batch.to(ctx.device) for batch in batches]
    batches = with_references(state, batches, num_microbatches(state.config, samples))
    # The vote to stop and the losses besides the main one travel with the gradient norm: no message of their own.
    loss, norm, (stop_votes, *losses), divisors = compute_gradients(
        state, batches, samples, scale, float(asked_to_stop)
    )
    added = [x / divisors.of_added(declared) for declared, x in zip(state.stages.declared.losses, losses, strict=True)]
    logits, largest = of_step(state.stages, ctx)
    # Copied before the update: the device still has the update to compute when the host has the numbers.
    numbers = device.HostCopy(torch.stack([loss, norm, divisors.tokens, stop_votes, *added, *largest]))
    ctx.flight.enter("optimizer")
    lr = learning_rate(state.step, state.consumed_samples, options, state.config.train)
    # The gradients are still multiplied by the loss scale: the update divides them along with clipping.
    clip = clip_coefficient(norm, options.clip_grad) / scale
    finite = loss.isfinite() & norm.isfinite()
    if state.loss_scale.dynamic:
        # It may be an overflow, after which training goes on. The host knows it before it queues the next step, because
        # that needs the new loss scale, and so does the bias correction of Adam, which counts the updates made.
        skip_update = ~finite
    else:
        # A step that is not finite ends the training, but the host may learn it when it has queued the next step. That
        # one must not update either.
        state.failed |= ~finite
        skip_update = state.failed
    if state.norm_limit < math.inf:
        skip_update = skip_update | (norm > state.norm_limit)
    with ctx.flight.span("optimizer"):
        state.optimizer.step(lr, clip, skip_update, logits)
    counts = end_step(counting_modules(state.stages.values()), skip_update)
    tallies = tables(state.stages.declared.tallies, counts, ctx.pp, ctx.device)
    on_host = {name: device.HostCopy(table) for name, table in tallies.items()}
    state.step += 1
    state.consumed_samples += samples
    return QueuedStep(state, batches, lr, replace(state.loss_scale), before, numbers, on_host)


def train_step(state: TrainState, batches: Sequence[MicroBatch], *, asked_to_stop: bool = False) -> StepResult:
    """`queue_step`, then `finish`: the step is complete when this returns.

    Raises DataError if no target has a weight, and NumericError if the loss or the norm is not finite. The step has
    then changed nothing. After an fp16 overflow it returns if a smaller loss scale may avoid the overflow: see
    `StepResult.overflowed`.
    """
    result = queue_step(state, batches, asked_to_stop=asked_to_stop).finish()
    result.check_targets()
    if result.failed:
        raise NumericError(
            f"step {result.step}: loss {result.loss}, gradient norm {result.grad_norm}. No weight was changed: a lower "
            "optimizer.lr or a longer optimizer.warmup_steps often helps"
        )
    return result
