"""The loss of one global batch, without a change of the model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from megapar.batch import MicroBatch
from megapar.comm import collectives
from megapar.config.derive import num_microbatches
from megapar.train.references import with_references
from megapar.train.state import TrainState, without_targets
from megapar.train.step import Divisors, mean_loss


class Evaluated(NamedTuple):
    """Sums over all ranks: of the losses, what they are divided by (target tokens, or pairs), and the hits.

    Hits are the weights of targets with the highest logit. A target that shares it with another id counts too.
    """

    loss: float
    divisor: float
    hits: float


def evaluate(state: TrainState, batches: Sequence[MicroBatch]) -> Evaluated:
    """Evaluate one global batch without dropout.

    `batches` are this rank's micro-batches. They may be on the host. Raises DataError if no target has a weight.
    """
    ctx = state.ctx
    hits = torch.zeros((), dtype=torch.float64, device=ctx.device)
    max_microbatches = num_microbatches(state.config)
    batches = with_references(state, [batch.to(ctx.device) for batch in batches], max_microbatches)
    batches = [replace(batch, hits=hits) for batch in batches]
    for stage in state.stages.values():
        stage.eval()
    divisor = Divisors.of(state, batches, state.config.train.global_batch_size).main
    loss = mean_loss(state.pipeline.evaluate(batches, max_microbatches), divisor, ctx)
    for stage in state.stages.values():
        stage.train()
    hits = collectives.all_reduce(collectives.all_reduce(hits, ctx.grad), ctx.pp)
    with ctx.flight.held():
        targets = divisor.item()
    if targets == 0.0:
        raise without_targets("an evaluation")
    return Evaluated((loss * divisor).item(), targets, hits.item())
