"""What the losses of a step are divided by: numbers of its targets, counted before the first backward pass."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megapar.comm import collectives
from megapar.declare.batch import MicroBatch
from megapar.declare.context import ParallelContext
from megapar.declare.stage_set import AddedLoss
from megapar.step.state import TrainState


class Divisors(NamedTuple):
    """What sums of losses over a step are divided by, 0-d fp32.

    `tokens` is the sum of the loss weights of the step's next-token targets. `main` divides the main loss. `own` has by
    name the divisors of losses that are divided by the weights of their own targets, such as mtp_1.
    """

    tokens: Tensor
    main: Tensor
    own: Mapping[str, Tensor] = {}

    def of_added(self, loss: AddedLoss) -> Tensor:
        """Return the divisor of a loss besides the main one."""
        if loss.divided_by == "own":
            count = self.own[loss.name]
            return count + (count == 0)  # 0 / 1 where no target has a weight
        return self.tokens if loss.divided_by == "tokens" else self.main


def count_divisors(state: TrainState, batches: Sequence[MicroBatch], samples: int) -> Divisors:
    """Return the divisors of a step with `samples` samples. A collective.

    `batches` are this rank's micro-batches, on its device. Sets the factors of losses divided by their own targets in
    the scope of each micro-batch (`StepScope.factors`).
    """
    tokens = count_targets(batches, state.ctx)
    declared = state.stages.declared
    if declared.divided_by == "pairs":
        # A sample is a pair. It may be compared without a weight of any token.
        return Divisors(tokens.clamp(min=1.0), torch.full_like(tokens, samples))
    own = {loss.name: count_targets(batches, state.ctx, loss.ahead) for loss in _divided_by_own(declared.losses)}
    divisors = Divisors(tokens, tokens, own)
    # Gradients of added losses are divided by `tokens`: the factors turn 1 / tokens into weight / own divisor.
    factors = {
        loss.name: torch.where(own[loss.name] == 0, 0.0, loss.weight * tokens / divisors.of_added(loss))
        for loss in _divided_by_own(declared.losses)
    }
    for batch in batches:
        batch.scope.factors = factors
    return divisors


def _divided_by_own(losses: Sequence[AddedLoss]) -> list[AddedLoss]:
    return [loss for loss in losses if loss.divided_by == "own"]


def count_targets(batches: Sequence[MicroBatch], ctx: ParallelContext, ahead: int = 1) -> Tensor:
    """Sum the loss weights of the targets `ahead` positions after each position, over the step and all replicas.

    Returns a 0-d fp32 tensor.

    With `ahead` 1 the sum divides the step's loss and gradients, unless the objective divides by pairs. If that sum is
    0, the loss is NaN, and the step is refused and updates nothing (`StepResult.check_targets`). With a larger `ahead`
    the sum divides the loss of the tokens so far ahead (`Divisors.own`): a sum of 0 makes that loss 0.
    """
    tokens = torch.zeros((), device=ctx.device)
    if batches:  # a replica has none if the step has fewer micro-batches than replicas
        tokens = torch.stack([batch.targets(ahead).weights_bs.sum() for batch in batches]).sum().to(ctx.device)
    return collectives.all_reduce(tokens, ctx.grad)
