"""Faults of attention, experts, norm and update to plant (`tests.support.plants`). Each is a function of `Patch`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from megapar_models import multi_token

from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.context_parallel import gather
from megapar.context_parallel.attention import CoreAttention
from megapar.context_parallel.ring import _Round
from megapar.context_parallel.ulysses import Ulysses
from megapar.data_parallel.layout import FlatLayout
from megapar.data_parallel.reduce import Gradients
from megapar.declare.batch import MicroBatch
from megapar.expert_parallel import balance, dispatch, route, row_counts
from megapar.optimizer.adamw import AdamW
from megapar.optimizer.average import Average
from megapar.optimizer.base import Optimizer
from megapar.tensor_parallel import regions
from megapar.train import trainer
from tests.support.plants_of_ranks import Patch

# Context parallelism


def positions_from_zero(patch: Patch, rank: int) -> None:
    """Count positions from 0 on each rank."""

    def wrap(original: Any) -> Callable[..., MicroBatch]:
        def columns(self: MicroBatch, positions_s: torch.Tensor) -> MicroBatch:
            return replace(original(self, positions_s), positions_s=torch.arange(len(positions_s)))

        return columns

    patch(MicroBatch, "columns", wrap)


def later_tokens_rolled(patch: Patch, rank: int) -> None:
    """Take for a token further ahead what stands so many columns on among those of the rank."""

    def wrap(original: Any) -> Callable[..., MicroBatch]:
        def rolled(batch: MicroBatch, tokens: int) -> MicroBatch:
            tokens_bs, targets_bs = (batch.tokens_bs.roll(-n, 1) for n in (tokens, tokens + 1))
            return replace(original(batch, tokens), tokens_bs=tokens_bs, targets_bs=targets_bs)

        return rolled

    patch(multi_token, "ahead", wrap)


def contiguous_chunks(patch: Patch, rank: int) -> None:
    """Take the mask of a rank with one run of positions."""

    def chunks(length: int, cp: int, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        size = length // (2 * cp)
        return (2 * rank * size, (2 * rank + 1) * size), ((2 * rank + 1) * size, (2 * rank + 2) * size)

    patch(gather, "chunks", lambda original: chunks)


def key_gradients_kept(patch: Patch, rank: int) -> None:
    """Leave out the sum of keys' gradients over cp."""

    def first_part(parts: torch.Tensor, cp: Axis) -> torch.Tensor:
        return parts.view(cp.size, -1)[cp.rank].clone()

    patch(
        gather,
        "collectives",
        lambda original: SimpleNamespace(all_gather=collectives.all_gather, reduce_scatter=first_part),
    )


def other_direction(patch: Patch, rank: int) -> None:
    """Take keys for those of the next rank."""
    patch(_Round, "source", lambda original: lambda self, step: (self.cp.rank + step) % self.cp.size)


def heads_reversed(patch: Patch, rank: int) -> None:
    """Send key/value heads in reverse."""

    def wrap(original: Any) -> Callable[..., None]:
        def create(self: Ulysses, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self.kv_order = self.kv_order.flip(0)

        return create

    patch(Ulysses, "__init__", wrap)


# Windows, sinks and latent attention


def window_forgotten(patch: Patch, rank: int) -> None:
    """Let layers with a window read all keys if there are cp ranks."""

    def wrap(original: Any) -> Callable[..., None]:
        def create(self: CoreAttention, cp: Axis, *args: Any, **kwargs: Any) -> None:
            original(self, cp, *args, **kwargs)
            if cp.size > 1:
                self.window = 0

        return create

    patch(CoreAttention, "__init__", wrap)


def window_longer(patch: Patch, rank: int) -> None:
    """End a window one key too late."""

    def wrap(original: Any) -> Callable[..., None]:
        def create(self: CoreAttention, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if self.window:
                self.window += 1

        return create

    patch(CoreAttention, "__init__", wrap)


def sinks_of_first_heads(patch: Patch, rank: int) -> None:
    """Take the sinks of the first heads for those of each cp rank's own."""

    def wrap(original: Any) -> Callable[..., torch.Tensor]:
        def forward(self: Ulysses, *args: Any) -> torch.Tensor:
            *others, sinks_n = args
            y: torch.Tensor = original(self, *others, sinks_n.roll(self.cp.rank * self.heads))
            return y

        return forward

    patch(Ulysses, "forward", wrap)


def copies_summed_nowhere(patch: Patch, rank: int) -> None:
    """Leave out the sum over tp of the gradient of what all heads read."""
    patch(regions._Copy, "backward", lambda original: staticmethod(lambda ctx, grad: (grad, None)))


# Experts


def not_sorted(patch: Patch, rank: int) -> None:
    """Leave arrived rows unsorted."""
    patch(row_counts.RowChunk, "arrives_sorted", lambda original: False)
    patch(row_counts.RowChunk, "expert_order", lambda original: None)


def norm_of_weights_forgotten(patch: Patch, rank: int) -> None:
    """Divide the scores of experts by their sum where they are not to be, and the other way round."""

    def wrap(original: Any) -> Callable[..., torch.Tensor]:
        def weights(scores_te: torch.Tensor, indices_tk: torch.Tensor, rule: route.RouterRule) -> torch.Tensor:
            other = replace(rule, norm_topk_prob=not rule.norm_topk_prob)
            chosen: torch.Tensor = original(scores_te, indices_tk, other)
            return chosen

        return weights

    patch(route, "weights", wrap)


def experts_scaled(patch: Patch, rank: int) -> None:
    """Multiply gradients of experts by 2."""

    def wrap(original: Any) -> Callable[..., None]:
        def finish(self: Gradients) -> None:
            original(self)
            for slot in self.layout.slots:
                if slot.spec.grad_axis.name.startswith("expert"):
                    self.flat[slot.start : slot.stop].mul_(2.0)

        return finish

    patch(Gradients, "finish", wrap)


def slices_not_summed(patch: Patch, rank: int) -> None:
    """Leave out the sum over etp of an expert's results."""

    def sum_rows(parts: torch.Tensor, brought_rows: Sequence[int], etp: Axis) -> torch.Tensor:
        return parts.split(list(brought_rows))[etp.rank]

    patch(dispatch, "_sum_rows", lambda original: sum_rows)


# Norm and update


def copies_counted(patch: Patch, rank: int) -> None:
    """Count copies of tp ranks twice in the norm."""
    patch(FlatLayout, "norm_ranges", lambda original: FlatLayout.shards)


def all_decayed(patch: Patch, rank: int) -> None:
    """Decay norms and biases too."""
    patch(Optimizer, "ranges_where_decayed", lambda original: lambda self, shard: [(0, shard.stop - shard.start)])


def one_step_later(patch: Patch, rank: int) -> None:
    """Take the bias correction of the next step."""

    def wrap(original: Any) -> Callable[..., None]:
        return lambda self, shard, grad, params, step: original(
            self, shard, grad, params, replace(step, number=step.number + 1)
        )

    patch(AdamW, "update", wrap)


def nothing_frozen(patch: Patch, rank: int) -> None:
    """Train what is to be frozen."""
    patch(trainer, "freeze_others", lambda original: lambda stages, patterns, ctx: [])


def biases_by_next_counts(patch: Patch, rank: int) -> None:
    """Move selection biases by the counts of the next expert."""

    def wrap(original: Any) -> Callable[..., torch.Tensor]:
        return lambda bias_e, counts_e, rate: original(bias_e, counts_e.roll(1), rate)

    patch(balance, "updated_bias", wrap)


def average_of_one_rank(patch: Patch, rank: int) -> None:
    """Move the average of weights on the first rank alone."""

    def wrap(original: Any) -> Callable[..., None]:
        def update(self: Average, found_inf: torch.Tensor | None) -> None:
            if rank == 0:
                original(self, found_inf)

        return update

    patch(Average, "update", wrap)
