"""The training step, and the evaluation of one global batch."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megapar import device
from megapar.batch import MicroBatch
from megapar.comm import collectives
from megapar.config.derive import num_microbatches
from megapar.context import ParallelContext
from megapar.errors import NumericError
from megapar.optimizer.clip import clip_coefficient, reduce_norm
from megapar.optimizer.schedule import learning_rate
from megapar.pipeline.schedules import Event
from megapar.train.state import Position, QueuedStep, StepResult, TrainState


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
    before = Position(state.step, state.consumed_samples, state.optimizer.step_count)
    ctx.flight.enter("forward")
    batches = [batch.to(ctx.device) for batch in batches]
    tokens = count_targets(batches, ctx)
    max_microbatches = num_microbatches(state.config, state.config.train.batch_size(state.consumed_samples))
    state.grads.zero()
    # The divisor is known before the first backward, so no gradient needs to be rescaled after it was summed.
    loss_sums = state.pipeline.step(batches, scale / tokens, state.grads.begin, trace, max_microbatches)
    ctx.flight.enter("reduce")
    state.grads.finish()
    # The votes to stop travel with the gradient norm, so that to agree costs no message of its own.
    wants_to_stop = torch.full((1,), float(asked_to_stop), device=ctx.device)
    norm, (stop_votes,) = reduce_norm(state.grads, ctx, wants_to_stop)
    norm = norm / scale
    loss = mean_loss(loss_sums, tokens, ctx)
    # Copied before the update: the device still has the update to compute when the host has the numbers.
    numbers = device.HostCopy(torch.stack([loss, norm, tokens, stop_votes]))
    ctx.flight.enter("optimizer")
    lr = learning_rate(state.step, options, state.config.train.steps)
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
    state.optimizer.step(lr, clip, skip_update)
    expert_counts = _end_step(state, skip_update)
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


def train_step(
    state: TrainState, batches: Sequence[MicroBatch], trace: list[Event] | None = None, *, asked_to_stop: bool = False
) -> StepResult:
    """`queue_step`, then `finish`: the step is complete when this returns.

    Raises NumericError if the loss or the norm is not finite. The step has then changed nothing. After an overflow of
    fp16 that a smaller loss scale may avoid it returns: see `StepResult.overflowed`.
    """
    result = queue_step(state, batches, trace, asked_to_stop=asked_to_stop).finish()
    if result.failed:
        raise NumericError(
            f"step {result.step}: loss {result.loss}, gradient norm {result.grad_norm}. No weight was changed: a lower "
            "optimizer.lr or a longer optimizer.warmup_steps often helps"
        )
    return result


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
