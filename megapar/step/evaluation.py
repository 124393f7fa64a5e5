"""The loss of held-out samples, without a change of the model."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from megapar.comm import collectives
from megapar.config.derive import num_microbatches
from megapar.data.loader import Loader
from megapar.declare.batch import MicroBatch, StepScope
from megapar.step.divisors import count_divisors
from megapar.step.references import with_references
from megapar.step.state import TrainState, without_targets
from megapar.step.step import sum_of_losses


class Evaluated(NamedTuple):
    """Sums over all ranks: of the losses, what they are divided by (target tokens, or pairs), and the hits.

    Hits are the weights of targets with the highest logit. A target that shares it with another id counts too.
    """

    loss: float
    divisor: float
    hits: float

    @property
    def mean_loss(self) -> float:
        """The loss in nats for each target token, or for each pair."""
        return self.loss / self.divisor

    @property
    def accuracy(self) -> float:
        """The share of hits."""
        return self.hits / self.divisor


def evaluate(state: TrainState, batches: Sequence[MicroBatch], samples: int = 0) -> Evaluated:
    """Evaluate `samples` samples without dropout, or a global batch of them if `samples` is 0. A collective.

    `batches` are this rank's micro-batches of them. They may be on the host, and may hold padding.
    """
    ctx = state.ctx
    samples = samples or state.config.train.global_batch_size
    scope = StepScope()
    max_microbatches = num_microbatches(state.config, samples)
    batches = with_references(state, [batch.to(ctx.device, scope) for batch in batches], max_microbatches)
    hits = scope.hits = torch.zeros((), dtype=torch.float64, device=ctx.device)
    for stage in state.stages.values():
        stage.eval()
    divisor = count_divisors(state, batches, samples).main
    loss = sum_of_losses(state.pipeline.evaluate(batches, max_microbatches), ctx)
    for stage in state.stages.values():
        stage.train()
    hits = collectives.all_reduce(collectives.all_reduce(hits, ctx.grad), ctx.pp)
    with ctx.flight.held():
        return Evaluated(loss.item(), divisor.item(), hits.item())


def validate(state: TrainState, data: Loader) -> Evaluated:
    """Evaluate the first `train.eval_samples` samples, or all if there are fewer: the same ones at each call.

    A blend ends before one of its sources would give a sample twice. Raises DataError on every rank if no target has a
    weight.
    """
    size = data.batch_size(0)
    total = min(state.config.train.eval_samples, data.samples.before_any_repeats())
    parts = []
    with averaged(state):
        for first in range(0, total, size):
            count = min(size, total - first)
            parts.append(evaluate(state, data.evaluation_step(first, count), count))
    sums = Evaluated(*(sum(values) for values in zip(*parts, strict=True)))
    if sums.divisor == 0.0:
        raise without_targets("an evaluation")
    return sums


def averaged(state: TrainState) -> AbstractContextManager[None]:
    """A context around evaluations: their weights are the average, if train.eval_weights asks for it."""
    average = state.optimizer.average
    if average is None or state.config.train.eval_weights == "trained":
        return nullcontext()
    return average.as_weights()
