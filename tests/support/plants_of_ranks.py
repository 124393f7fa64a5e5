"""Faults of tensor, data and pipeline parallelism to plant (`tests.support.plants`). Each is a function of `Patch`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megapar.comm.axis import Axis
from megapar.comm.pending import Pending
from megapar.context_parallel.dropout import AttentionDropout
from megapar.data import order
from megapar.data_parallel import accumulate
from megapar.data_parallel.layout import FlatLayout
from megapar.data_parallel.partial_sums import _Aligned, _Overlapping
from megapar.data_parallel.reduce import Gradients
from megapar.data_parallel.units import UnitGradients, UnitWeights
from megapar.data_parallel.weights import FlatWeights
from megapar.declare.batch import MicroBatch
from megapar.linear import function as linear
from megapar.linear.main_grad import WeightGradientQueue
from megapar.pipeline.runtime import PipelineRuntime
from megapar.step import divisors
from megapar.tensor_parallel import layers, regions
from megapar.train import trainer

Wrap = Callable[[Any], Any]
"""From the original function to the one in its place."""
Patch = Callable[[Any, str, Wrap], None]
"""Replaces an attribute of a module or class as a `Wrap` says, for as long as the rank runs."""


# Tensor parallelism


def no_row_sum(patch: Patch, rank: int) -> None:
    """Leave out the sum over tp after a row-parallel layer."""
    patch(layers, "reduce_from_tp", lambda original: lambda x, tp: x)


def no_input_gradient_sum(patch: Patch, rank: int) -> None:
    """Leave out the sum over tp of an input's gradient."""
    patch(regions.Copy, "leave_async", lambda original: lambda self, grad_x: (grad_x, Pending()))


def no_sum_over(name: str) -> Callable[[Patch, int], None]:
    """No partial gradients of equal boxes are summed over the axis `name`."""

    def plant(patch: Patch, rank: int) -> None:
        def wrap(original: Any) -> Callable[..., None]:
            def summed(self: _Aligned, grads: torch.Tensor) -> None:
                if self.axis.name != name:
                    original(self, grads)

            return summed

        patch(_Aligned, "sum", wrap)

    return plant


def no_head_sum(patch: Patch, rank: int) -> None:
    """Leave out the sum of gradients of heads that two ranks hold."""
    patch(_Overlapping, "sum", lambda original: lambda self, grads: None)


def seed_by_rank(patch: Patch, rank: int) -> None:
    """Draw initial weights with the rank's number."""
    patch(trainer, "initialize", lambda original: lambda modules, seed, **how: original(modules, seed + rank, **how))


def heads_from_zero(patch: Patch, rank: int) -> None:
    """Number the heads of each rank from 0 in dropout."""

    def wrap(original: Any) -> Callable[..., Any]:
        def of(self: AttentionDropout, *args: Any, **kwargs: Any) -> Any:
            return original(replace(self, heads=range(len(self.heads))), *args, **kwargs)

        return of

    patch(AttentionDropout, "of", wrap)


# Data parallelism and ZeRO


def averaged(patch: Patch, rank: int) -> None:
    """Divide gradients by the number of replicas once more."""

    def wrap(original: Any) -> Callable[..., None]:
        def finish(self: Gradients) -> None:
            original(self)
            for bucket in self.layout.buckets:
                self.flat[bucket.start : bucket.stop].div_(self.layout.axis(bucket).size)

        return finish

    patch(Gradients, "finish", wrap)


def last_bucket_kept(patch: Patch, rank: int) -> None:
    """Never reduce the last bucket."""

    def wrap(original: Any) -> Callable[..., None]:
        def reduce_next(self: Gradients) -> None:
            if len(self._started) < len(self.layout.buckets) - 1:
                original(self)
            else:
                self._started.append(Pending())

        return reduce_next

    patch(Gradients, "_reduce_next", wrap)


def local_divisor(patch: Patch, rank: int) -> None:
    """Divide by the tokens of this replica alone."""

    def wrap(original: Any) -> Callable[..., torch.Tensor]:
        def count(batches: Sequence[MicroBatch], ctx: Any) -> torch.Tensor:
            original(batches, ctx)
            return torch.stack([batch.weights_bs.sum() for batch in batches]).sum().clamp_(min=1.0)

        return count

    patch(divisors, "count_targets", wrap)


def same_samples(patch: Patch, rank: int) -> None:
    """Train all replicas on the same samples."""

    def wrap(original: Any) -> Callable[..., Any]:
        return lambda consumed, batch, micro_batch, dp_rank, dp_size: original(consumed, batch, micro_batch, 0, dp_size)

    patch(order, "micro_batch_positions", wrap)


def rounded_sums(patch: Patch, rank: int) -> None:
    """Main gradients rounded to bf16 after each addition."""

    def wrap(original: Any) -> Callable[..., None]:
        def add(*args: Any) -> None:
            original(*args)
            total = next(arg for arg in args if isinstance(arg, torch.Tensor))
            total.copy_(total.bfloat16())

        return add

    patch(accumulate, "_add", wrap)
    patch(linear, "_add_product", wrap)


def weights_not_gathered(patch: Patch, rank: int) -> None:
    """Leave out the gather of updated weights."""
    patch(FlatWeights, "start_gather", lambda original: lambda self: None)


def first_sum_twice(patch: Patch, rank: int) -> None:
    """Add the first sum of a unit twice."""

    def wrap(original: Any) -> Callable[..., None]:
        def add(self: UnitGradients, unit: int) -> None:
            first = unit in self._untouched
            original(self, unit)
            if first:
                self._shards[unit].mul_(2.0)

        return add

    patch(UnitGradients, "add", wrap)


def weights_before_update(patch: Patch, rank: int) -> None:
    """Gather the weights of before the update."""
    kept: list[torch.Tensor] = []

    def wrap(original: Any) -> Callable[..., None]:
        def gather_unit(self: UnitWeights, unit: int) -> None:
            if not kept:
                kept.extend(shard.clone() for shard in self._shards)
            shards = self._shards
            self._shards = kept
            original(self, unit)
            self._shards = shards

        return gather_unit

    patch(UnitWeights, "gather_unit", wrap)


def weights_freed(patch: Patch, rank: int) -> None:
    """The memory of a unit is used for something else at every second use of the unit."""
    uses: dict[int, int] = {}

    def wrap(original: Any) -> Callable[..., None]:
        def wait_for(self: UnitWeights, unit: int) -> None:
            original(self, unit)
            uses[unit] = uses.get(unit, 0) + 1
            if uses[unit] % 2 == 0:
                self._whole[unit].zero_()

        return wait_for

    patch(UnitWeights, "wait_for", wrap)


def copies_not_summed(patch: Patch, rank: int) -> None:
    """Leave out the sum over groups of shard_ranks."""
    patch(FlatLayout, "copies", lambda original: lambda self, bucket: Axis("copies"))


# Pipeline


def one_less(patch: Patch, rank: int) -> None:
    """Leave out the last micro-batch."""

    def wrap(original: Any) -> Callable[..., Any]:
        return lambda self, batches, *args, **kwargs: original(self, batches[:-1], *args, **kwargs)

    patch(PipelineRuntime, "step", wrap)


def documents_lost(patch: Patch, rank: int) -> None:
    """Forget in the stages in the middle where documents begin."""

    def wrap(original: Any) -> Callable[..., Any]:
        def step(self: PipelineRuntime, batches: Sequence[MicroBatch], *args: Any, **kwargs: Any) -> Any:
            if not self.axis.first and not self.axis.last:
                batches = [replace(batch, starts=None, starts_on_host=None) for batch in batches]
            return original(self, batches, *args, **kwargs)

        return step

    patch(PipelineRuntime, "step", wrap)


def one_twice(patch: Patch, rank: int) -> None:
    """Run the first micro-batch again."""

    def wrap(original: Any) -> Callable[..., Any]:
        return lambda self, batches, *args, **kwargs: original(self, [*batches, batches[0]], *args, **kwargs)

    patch(PipelineRuntime, "step", wrap)


def first_weight_gradient_lost(patch: Patch, rank: int) -> None:
    """Leave out the first matrix in W."""

    def wrap(original: Any) -> Callable[..., None]:
        def run(self: WeightGradientQueue) -> None:
            self._entries.popleft()
            original(self)

        return run

    patch(WeightGradientQueue, "run", wrap)


def chunks_swapped(patch: Patch, rank: int) -> None:
    """Swap two stages of a rank."""

    def wrap(original: Any) -> Callable[..., None]:
        def create(self: PipelineRuntime, stages: Mapping[int, Any], *args: Any, **kwargs: Any) -> None:
            swapped = dict(stages)
            # Those with embedding and head stay: they take and return something else.
            first, second = [number for number, stage in sorted(stages.items()) if not (stage.first or stage.last)][:2]
            swapped[first] = stages[second]
            swapped[second] = stages[first]
            original(self, swapped, *args, **kwargs)

        return create

    patch(PipelineRuntime, "__init__", wrap)
