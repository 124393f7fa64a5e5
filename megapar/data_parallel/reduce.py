"""Reduces gradients over their replicas, bucket by bucket, while the last backward pass still runs.

A bucket is all-reduced (ZeRO stage 0) or reduce-scattered (stage 1) as soon as its last gradient has been added. All
ranks reduce the buckets in the same order. One step:

    zero()      gradients are added, micro-batch by micro-batch
    begin()     right before the last backward: from now on full buckets are reduced
    finish()    the rest is reduced; afterwards this rank's shards hold the gradient of the global batch
"""

from enum import Enum

import torch
from megapar_kernels.adamw import FlatRanges
from megapar_kernels.dispatch import Implementation

from megapar import comm
from megapar.data_parallel.accumulate import accumulate
from megapar.data_parallel.layout import FlatLayout, Range, intersect
from megapar.data_parallel.partial_sums import partial_sums


class _Phase(Enum):
    ADDING = "gradients are added; nothing is reduced"
    LAST_BACKWARD = "between begin() and finish(): full buckets are reduced"
    REDUCED = "after finish(): the gradients are those of the global batch"


class Gradients:
    """The gradients of a rank, and their reduction over replicas.

    `flat` is 1-D fp32 with the offsets of `layout`. `overlap` says whether buckets are reduced during the last backward
    pass or all after it. `impl` is the implementation that adds up squares for the gradient norm.
    """

    def __init__(
        self, layout: FlatLayout, device: torch.device, *, overlap: bool = True, impl: Implementation = "torch"
    ):
        self.layout = layout
        self.impl: Implementation = impl
        self.flat = accumulate(layout, device, self._added)
        self.counted = FlatRanges.of(layout.counted(), device)
        """The elements of `flat` that this rank counts in the gradient norm."""
        self.copied = FlatRanges.of(layout.copies(), device)
        """Elements of `flat` in this rank's shards that other ranks count, from copies of their own."""
        self._overlap = overlap
        self._phase = _Phase.ADDING
        self._pending: list[comm.Pending] = []  # one for each bucket whose reduction has started, in bucket order
        self._progress = _Progress(layout)
        self._partial_sums = partial_sums(layout)

    def zero(self) -> None:
        """Start a step with gradients of zero. Raises RuntimeError between begin() and finish()."""
        if self._phase is _Phase.LAST_BACKWARD:
            raise RuntimeError("Gradients.zero() while buckets may be in flight: call finish() first")
        self.flat.zero_()
        self._pending = []
        self._phase = _Phase.ADDING

    def begin(self) -> None:
        """Allow buckets to be reduced from now on. Call it right before the last backward of this rank."""
        if self._phase is not _Phase.ADDING:
            raise RuntimeError("Gradients.begin() called twice in a step: call finish(), then zero() first")
        self._phase = _Phase.LAST_BACKWARD
        self._progress.start()
        self._reduce_full_buckets()

    def finish(self) -> None:
        """Reduce the remaining buckets, wait for all, then add up gradients that several ranks computed in part."""
        if self._phase is _Phase.REDUCED:
            raise RuntimeError("Gradients.finish() called twice: the gradients are reduced, call zero() first")
        while len(self._pending) < len(self.layout.buckets):
            self._reduce_next()
        for pending in self._pending:
            pending.wait()
        # After the reductions, which change the same elements.
        for partial_sum in self._partial_sums:
            partial_sum.sum(self.flat)
        if self._phase is _Phase.LAST_BACKWARD:  # without begin() no additions were counted
            self._progress.learn()
        self._phase = _Phase.REDUCED

    def not_finite(self) -> list[str]:
        """Names of the parameters whose gradient in this rank's shards is not finite.

        They are in the order of the layout, which is about that of the backward pass.
        """
        shards = self.layout.shards()
        return [slot.name for slot in self.layout.slots if self._has_not_finite(slot.start, slot.stop, shards)]

    def _has_not_finite(self, start: int, stop: int, shards: list[Range]) -> bool:
        return any(not self.flat[a:b].isfinite().all() for a, b in intersect([(start, stop)], shards))

    def _added(self, index: int) -> None:
        """Note an addition to slot `index`. Raises RuntimeError if the reduction of its bucket has started."""
        slot = self.layout.slots[index]
        if slot.bucket < len(self._pending):
            raise RuntimeError(self._too_late(slot.name))
        if self._phase is _Phase.LAST_BACKWARD:
            self._progress.added(index)
            self._reduce_full_buckets()

    def _too_late(self, name: str) -> str:
        if self._phase is _Phase.REDUCED:
            return f"gradient of {name} added after finish(): call zero() first"
        return (
            f"gradient of {name} added after its bucket was reduced, for it was added more often in the last backward "
            "than in any step before: --optimizer.no_overlap_grad_reduce reduces after it"
        )

    def _reduce_full_buckets(self) -> None:
        if not self._overlap:
            return
        # In bucket order only: a full bucket waits for those before it, so that all ranks start the same collectives.
        while len(self._pending) < len(self.layout.buckets) and self._progress.is_full(len(self._pending)):
            self._reduce_next()

    def _reduce_next(self) -> None:
        bucket = self.layout.buckets[len(self._pending)]
        reduce = comm.reduce_scatter_shard_async if self.layout.sharded else comm.all_reduce_async
        self._pending.append(reduce(self.flat[bucket.start : bucket.stop], self.layout.axis(bucket)))


class _Progress:
    """Tells which buckets have all their gradients, from what earlier last backward passes have added.

    A bucket is full when each of its parameters has received as many additions since begin() as in the largest step
    before. The number is learned, because a parameter may be used several times. Parameters that never receive any
    belong to other stages of this rank, whose gradients are final already. On the first step nothing is known, and no
    bucket is full before finish().
    """

    def __init__(self, layout: FlatLayout):
        self._layout = layout
        self._expected: list[int] | None = None
        self._additions = [0] * len(layout.slots)
        self._missing: list[int] = []  # number of parameters that each bucket waits for

    def start(self) -> None:
        """Begin to count the additions of a last backward pass."""
        self._additions = [0] * len(self._additions)
        if self._expected is not None:
            self._missing = [
                sum(count > 0 for count in self._expected[bucket.first : bucket.last])
                for bucket in self._layout.buckets
            ]

    def added(self, index: int) -> None:
        """Count an addition to slot `index`."""
        self._additions[index] += 1
        if self._expected is not None and self._additions[index] == self._expected[index]:
            self._missing[self._layout.slots[index].bucket] -= 1

    def is_full(self, bucket: int) -> bool:
        """Whether the bucket of this number has all its gradients."""
        return self._expected is not None and self._missing[bucket] == 0

    def learn(self) -> None:
        """Remember the additions of the last backward pass, which has ended."""
        # The largest number so far: expecting fewer additions than come would reduce a bucket too early.
        before = self._expected or self._additions
        self._expected = [max(pair) for pair in zip(self._additions, before, strict=True)]
