"""What a run minimizes: an objective, chosen by train.objective.

The last stage computes the log-probability of each target, or a score of each token. An objective makes losses of them.
Losses are sums over a step, and are divided once: by the step's target tokens, or by its pairs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megapar.comm.axis import Axis
from megapar.config.options import TrainConfig
from megapar.declare.batch import PADDING, MicroBatch
from megapar.declare.stage_set import AddedLoss
from megapar.tensor_parallel.regions import reduce_from_tp


@dataclass(frozen=True)
class Scored:
    """A micro-batch, and what the model says of each of its tokens.

    `values_sb`, fp32 [s, b], are the log-probabilities of the targets in nats, or with model.head=score the scores of
    the tokens. The columns are those of this context-parallel rank. `cp` are the ranks with the others.
    """

    values_sb: Tensor
    batch: MicroBatch
    cp: Axis

    @property
    def weights_sb(self) -> Tensor:
        """The weights of the targets, fp32 [s, b]."""
        return self.batch.weights_bs.t()

    def sums(self, x_sb: Tensor, documents: int = 2) -> Tensor:
        """The sums of `x_sb` over each of the first `documents` documents of each sample, [b, documents].

        They are over the positions of all context-parallel ranks, and the same on each of them.
        """
        number_bs = self.batch.documents_in_samples_bs()
        # A sum for each document, and no index_add: on a GPU its order of additions differs from run to run.
        parts = [torch.where(number_bs == number, x_sb.t(), 0.0).sum(dim=1) for number in range(documents)]
        return reduce_from_tp(torch.stack(parts, dim=1), self.cp)

    def of_answers(self) -> Tensor:
        """The log-probability of each answer of a pair, [b, 2]: the sum over its targets, each times its weight."""
        return self.sums(self.values_sb * self.weights_sb)


class Losses(NamedTuple):
    """What an objective makes of a micro-batch.

    `losses` are added up. Divided by tokens, they are of this context-parallel rank's tokens. Divided by pairs, they
    are one for each sample, [b], the same on all context-parallel ranks. `metrics` has the values of
    `Objective.metrics` by name, each of the same kind as the losses.
    """

    losses: Tensor
    metrics: Mapping[str, Tensor] = {}


@dataclass(frozen=True)
class Objective:
    """An objective: the function of its losses, and what they are divided by.

    With `divided_by` pairs, each sample has two documents to compare, and then padding (`megapar.data.pairs`).
    `metrics` are the names of further values. Their means over the step are logged. `needs_references`: the micro-batch
    must have the log-probabilities by a reference model (`MicroBatch.references_bd`).
    """

    function: Callable[[Scored, TrainConfig], Losses]
    divided_by: Literal["tokens", "pairs"] = "tokens"
    metrics: Sequence[str] = ()
    needs_references: bool = False
    options: Sequence[str] = ()
    """The options that the function reads, such as train.beta. With other objectives they are refused."""
    head: Literal["vocabulary", "score"] = "vocabulary"
    """What model.head must be."""

    @property
    def added_losses(self) -> list[AddedLoss]:
        """The metrics, as a stage set declares them."""
        return [AddedLoss(name, divided_by=self.divided_by) for name in self.metrics]

    def total(self, scored: Scored, train: TrainConfig) -> Tensor:
        """The sum of the losses, 0-d fp32. The sum over all context-parallel ranks counts each of them once."""
        losses, metrics = self.function(scored, train)
        # The losses of whole samples are the same on each of the cp ranks, so the first one's count. Each rank has the
        # whole gradient of them, as it has that of its own columns alone.
        counts = self.divided_by == "tokens" or scored.cp.first
        if scored.batch.scope.loss_sums is not None and counts:
            for name in self.metrics:
                scored.batch.scope.loss_sums[name].add_(metrics[name].detach().sum())
        if self.divided_by == "pairs" and scored.batch.scope.hits is not None:
            # An evaluation may hold padding. Unlike tokens without a weight, a pair without any has a loss.
            losses = losses.masked_fill(scored.batch.sample_ids_b == PADDING, 0.0)
        total = losses.sum()
        return total if counts else total - total.detach()


def _cross_entropy(scored: Scored, train: TrainConfig) -> Losses:
    return Losses(-scored.values_sb * scored.weights_sb)


CROSS_ENTROPY = Objective(_cross_entropy, options=("train.z_loss",))
USUAL: Callable[[Scored], Tensor] = partial(CROSS_ENTROPY.total, train=TrainConfig())
"""The objective of a run that names no other."""
