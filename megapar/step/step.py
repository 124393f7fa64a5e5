"""The training step, in five acts: count targets, run micro-batches, reduce, judge the step, update the weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megapar.base.errors import NumericError
from megapar.comm import collectives
from megapar.config.derive import num_microbatches
from megapar.declare.batch import MicroBatch, StepScope
from megapar.declare.context import ParallelContext
from megapar.declare.largest_logits import reduce_largest_logits
from megapar.declare.tally import counting_modules, end_step, tables
from megapar.linear.fp8_watch import StepWatch, rates
from megapar.optimizer.clip import clip_coefficient, reduce_norm
from megapar.optimizer.schedule import learning_rate
from megapar.step.divisors import Divisors, count_divisors
from megapar.step.references import with_references
from megapar.step.state import QueuedStep, StepCounts, StepResult, StepSums, TrainState
from megapar.system import device


def train_step(state: TrainState, batches: Sequence[MicroBatch], *, asked_to_stop: bool = False) -> StepResult:
    """Run a step to its end: `queue_step`, then `finish`.

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


def queue_step(state: TrainState, batches: Sequence[MicroBatch], *, asked_to_stop: bool = False) -> QueuedStep:
    """Queue forward and backward over this rank's micro-batches, then one update if loss and norm are finite.

    `batches` may be on the host. The counts of `state` are advanced at once. With a dynamic loss scale, finish the
    step before the next one is queued. If `asked_to_stop` is True on any rank, `stop` of the result is True on every
    rank.
    """
    before = StepCounts(state.step, state.consumed_samples, state.optimizer.step_count)
    samples = state.config.train.batch_size(state.consumed_samples)
    scale = state.loss_scale.scale
    scope, batches = enter_scope(state, batches)
    batches = with_references(state, batches, num_microbatches(state.config, samples))

    state.ctx.flight.enter("forward")
    divisors = count_divisors(state, batches, samples)
    watch = begin_watch(state)
    main_losses = run_microbatches(state, batches, samples, divisors, scale)
    sums = reduce_sums(state, scope, main_losses, divisors, scale, asked_to_stop=asked_to_stop, watch=watch)
    # Copied before the update: the device still has the update to compute when the host has the numbers.
    numbers = device.HostCopy(sums.packed())
    skip_update = judge_step(state, sums)
    lr = learning_rate(state.step, state.consumed_samples, state.config.optimizer, state.config.train)
    tallies = update_weights(state, sums, lr, skip_update)

    state.step += 1
    state.consumed_samples += samples
    return QueuedStep(state, batches, lr, replace(state.loss_scale), before, numbers, tallies)


def enter_scope(state: TrainState, batches: Sequence[MicroBatch]) -> tuple[StepScope, list[MicroBatch]]:
    """Return a new scope of a training step, and this rank's micro-batches in the scope and on the device."""
    losses = state.stages.declared.losses
    zeros = {loss.name: torch.zeros((), dtype=torch.float64, device=state.ctx.device) for loss in losses}
    scope = StepScope(loss_sums=zeros)
    return scope, [batch.to(state.ctx.device, scope) for batch in batches]


def begin_watch(state: TrainState) -> StepWatch | None:
    """Begin to count what FP8 loses in the next step, if log.fp8_every asks for it."""
    every = state.config.log.fp8_every
    if not every or (state.step + 1) % every:
        return None
    return StepWatch(state.stages.values(), state.stages.declared.fp8_products, state.ctx.device)


def run_microbatches(
    state: TrainState, batches: Sequence[MicroBatch], samples: int, divisors: Divisors, scale: float
) -> list[Tensor]:
    """Run forward and backward of this rank's micro-batches; the reduction of gradients begins in the last backward.

    The gradients are those of the step's loss times `scale`, the loss scale. Returns the sums of the main loss of each
    micro-batch, 0-d, on the ranks of the last stage, and [] elsewhere.
    """
    state.grads.zero()
    # The divisor is known before the first backward, so no gradient needs to be rescaled after it was summed.
    return state.pipeline.step(
        batches,
        scale / divisors.main,
        state.grads.begin,
        num_microbatches(state.config, samples),
        scale / divisors.tokens,
    )


def reduce_sums(
    state: TrainState,
    scope: StepScope,
    main_losses: Sequence[Tensor],
    divisors: Divisors,
    scale: float,
    *,
    asked_to_stop: bool = False,
    watch: StepWatch | None = None,
) -> StepSums:
    """End the reduction of gradients, and sum up the numbers of the step over all ranks. A collective."""
    ctx = state.ctx
    ctx.flight.enter("reduce")
    state.grads.finish()
    votes = torch.full((1,), float(asked_to_stop), dtype=torch.float64, device=ctx.device)
    declared = state.stages.declared.losses
    others = [votes, _parts_of_losses(state, scope)]
    if watch is not None:
        others.append(watch.end())
    with ctx.flight.span("optimizer"):
        # The vote to stop, the added losses and what FP8 loses travel with the norm: no message of their own.
        norm, totals = reduce_norm(state.grads, ctx, torch.cat(others))
    stop_votes, *losses = totals[: 1 + len(declared)].float()
    return StepSums(
        loss=sum_of_losses(main_losses, ctx) / divisors.main,
        grad_norm=norm / scale,
        tokens=divisors.tokens,
        stop_votes=stop_votes,
        added=[x / divisors.of_added(loss) for loss, x in zip(declared, losses, strict=True)],
        logits=reduce_largest_logits(state.stages, ctx),
        fp8=None if watch is None else rates(totals[1 + len(declared) :]),
    )


def _parts_of_losses(state: TrainState, scope: StepScope) -> Tensor:
    """Return this rank's part of each declared loss, fp64 1-D. The sum over all ranks counts each loss once."""
    assert scope.loss_sums is not None
    # Tensor ranks that add the same loss have all of it, so the first one's counts.
    counted = [float(loss.split_over_tp or state.ctx.tp.first) for loss in state.stages.declared.losses]
    parts = [x * share for x, share in zip(scope.loss_sums.values(), counted, strict=True)]
    return torch.stack(parts) if parts else torch.zeros(0, dtype=torch.float64, device=state.ctx.device)


def sum_of_losses(main_losses: Sequence[Tensor], ctx: ParallelContext) -> Tensor:
    """Return the sum of the main loss over all replicas, 0-d, on every rank. A collective.

    `main_losses` are the sums of this rank's micro-batches. They are empty on ranks without the last stage.
    """
    total = torch.stack(list(main_losses)).sum() if main_losses else torch.zeros((), device=ctx.device)
    return collectives.all_reduce(collectives.all_reduce(total, ctx.grad), ctx.pp)


def judge_step(state: TrainState, sums: StepSums) -> Tensor:
    """Return whether the step must not update weights, a 0-d bool on the device. The host waits for nothing.

    Without a dynamic loss scale `state.failed` is set by a step that is not finite (`TrainState`).
    """
    finite = sums.loss.isfinite() & sums.grad_norm.isfinite()
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
        skip_update = skip_update | (sums.grad_norm > state.norm_limit)
    return skip_update


def update_weights(state: TrainState, sums: StepSums, lr: float, skip_update: Tensor) -> Mapping[str, device.HostCopy]:
    """Update the weights, and the state of modules that count, unless `skip_update`. A collective.

    Returns what modules counted in the step: the tables of all ranks by name, on their way to the host.
    """
    ctx = state.ctx
    ctx.flight.enter("optimizer")
    # The gradients are still multiplied by the loss scale: the update divides them along with clipping.
    clip = clip_coefficient(sums.grad_norm, state.config.optimizer.clip_grad) / state.loss_scale.scale
    with ctx.flight.span("optimizer"):
        state.optimizer.step(lr, clip, skip_update, sums.logits)
    counts = end_step(counting_modules(state.stages.values()), skip_update)
    tallies = tables(state.stages.declared.tallies, counts, ctx.pp, ctx.device)
    return {name: device.HostCopy(table) for name, table in tallies.items()}
