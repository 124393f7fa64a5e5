"""Reduces gradients over data-parallel replicas, bucket by bucket, while the last backward of a step still runs.

The last backward of a step is the last action of this rank that adds gradients of matrices: the backward of one
micro-batch through one of the rank's stages, or its second half (W of `megapar.pipeline.actions.Action`). A bucket is
complete when all its gradients have been added. A complete bucket is all-reduced (ZeRO stage 0) or reduce-scattered
(stage 1). All ranks reduce the buckets in the same order.

    call        when                                effect
    zero()      at the start of a step              gradients count as zero
    begin()     right before the last backward      reduces complete buckets from now on
    finish()    after the last backward             reduces the other buckets and waits for all

After finish(), this rank's shards hold the gradient of the global batch. With optimizer.shard_ranks a shard has copies.
They are summed from the start of the next bucket's reduction on.
"""

from collections.abc import Hashable
from enum import Enum

import torch
from megapar_kernels.dispatch import Implementation

from megapar.comm import collectives
from megapar.data_parallel.accumulate import make_main_grads, zero_padding
from megapar.data_parallel.layout import FlatLayout
from megapar.data_parallel.shards import ReducedGradients


class _Phase(Enum):
    ADDING = "gradients are added; nothing is reduced"
    LAST_BACKWARD = "between begin() and finish(): complete buckets are reduced"
    REDUCED = "after finish(): the gradients are those of the global batch"


class Gradients(ReducedGradients):
    """The gradients of a rank, and their reduction over data-parallel replicas once a step.

    `flat` has the offsets of `layout`. With `overlap`, buckets are reduced during the last backward of a step,
    otherwise all after it.
    """

    SHARDS_ONLY = False

    def __init__(
        self,
        layout: FlatLayout,
        device: torch.device,
        *,
        overlap: bool = True,
        reduce_dtype: torch.dtype = torch.float32,
        impl: Implementation = "torch",
    ):
        super().__init__(layout, device, reduce_dtype=reduce_dtype, impl=impl)
        self._main_grads = make_main_grads(layout, self.flat, self._note_addition)
        self._overlap = overlap
        self._phase = _Phase.ADDING
        # One for each bucket whose reduction has started, in bucket order. The length is the index of the next bucket.
        self._started: list[collectives.Pending] = []
        self._sums_of_copies: list[collectives.Pending] = []
        self._progress = _Progress(layout)

    def zero(self) -> None:
        """Start a step with gradients of zero. Raises RuntimeError between begin() and finish().

        `flat` keeps the old values until they are overwritten: by the first addition to a parameter, or by zeros before
        its bucket is reduced. So the values of `flat` are valid only from finish() until the next zero().
        """
        if self._phase is _Phase.LAST_BACKWARD:
            raise RuntimeError("Gradients.zero() while buckets may be in flight: call finish() first")
        for main_grad in self._main_grads:
            main_grad.is_stale = True
        self._started = []
        self._sums_of_copies = []
        self._phase = _Phase.ADDING

    def begin(self, last_backward: Hashable = None) -> None:
        """Reduce complete buckets from now on. Call it right before the last backward of the step on this rank.

        `last_backward` tells what runs last: its stage, and whether it is a backward or its second half. The gradients
        added by it are learned for each of them.
        """
        if self._phase is not _Phase.ADDING:
            raise RuntimeError("Gradients.begin() after begin() or finish(): call finish(), then zero() first")
        self._phase = _Phase.LAST_BACKWARD
        self._progress.start(last_backward)
        # The buckets of stages that have run their last backward already are complete.
        self._reduce_complete_buckets()

    def finish(self) -> None:
        """Reduce the remaining buckets, sum shards over their copies, and wait for all. Then sum partial gradients."""
        if self._phase is _Phase.REDUCED:
            raise RuntimeError("Gradients.finish() called twice: the gradients are reduced, call zero() first")
        while len(self._started) < len(self.layout.buckets):
            self._reduce_next()
        self._sum_copies()
        for pending in [*self._started, *self._sums_of_copies]:
            pending.wait()
        self._add_partial_sums()
        if self._phase is _Phase.LAST_BACKWARD:  # without begin() no additions were counted
            self._progress.learn()
        self._phase = _Phase.REDUCED

    def _note_addition(self, slot_index: int) -> None:
        """Note that a gradient was added to a slot. Raises RuntimeError if the reduction of its bucket has started."""
        slot = self.layout.slots[slot_index]
        if slot.bucket_index < len(self._started):
            raise RuntimeError(self._too_late(slot.name))
        if self._phase is _Phase.LAST_BACKWARD:
            self._progress.note_addition(slot_index)
            self._reduce_complete_buckets()

    def _too_late(self, name: str) -> str:
        if self._phase is _Phase.REDUCED:
            return f"gradient of {name} added after finish(): call zero() first"
        return (
            f"gradient of {name} added after its bucket was reduced: the parameter received more gradients in the last "
            "backward than in any step before. To avoid this, set --optimizer.no_overlap_grad_reduce: buckets are then "
            "reduced after the last backward"
        )

    def _reduce_complete_buckets(self) -> None:
        if not self._overlap:
            return
        # A complete bucket waits for those before it, so that all ranks start the same collectives in the same order.
        while len(self._started) < len(self.layout.buckets) and self._progress.is_complete(len(self._started)):
            self._reduce_next()

    def _sum_copies(self) -> None:
        """Start to sum the newest bucket's shard over its copies. It has copies with optimizer.shard_ranks."""
        for bucket in self.layout.buckets[: len(self._started)][-1:]:  # none before the first
            if self.layout.copies(bucket).size > 1:
                self._started[-1].wait()
                shard = self.flat[slice(*self.layout.shard(bucket))]
                self._sums_of_copies.append(collectives.all_reduce_async(shard, self.layout.copies(bucket)))

    def _reduce_next(self) -> None:
        self._sum_copies()  # the shard has had the backward of a bucket to arrive
        bucket = self.layout.buckets[len(self._started)]
        for main_grad in self._main_grads[bucket.first_param : bucket.end_param]:
            main_grad.zero_if_stale()  # a parameter that no micro-batch has used
        whole = self.flat[bucket.start : bucket.stop]
        if self.layout.sharded:
            # The reduction of the step before has left anything outside this rank's shard.
            for slot in self.layout.slots[bucket.first_param : bucket.end_param]:
                zero_padding(self.flat, slot, 0)
            self._started.append(self._start_reduce_scatter(whole, bucket))
        else:
            self._started.append(collectives.all_reduce_async(whole, self.layout.axis(bucket)))


class _Progress:
    """Tells which buckets are complete. It learns from earlier steps how many additions each parameter receives.

    - The expected number of a parameter is the largest number of gradients added to it in the last backward of an
      earlier step.
    - Steps with other numbers of micro-batches may end with the backward of another stage, or with W instead of a whole
      backward. These add to other parameters. So each kind of last backward has numbers of its own.
    - A bucket is complete when each of its parameters has received the expected number since begin().
    - The number is learned rather than taken as 1, because a model may use a parameter several times.
    - A parameter expecting none has its final gradient at begin(). It belongs to another stage of this rank, or to a
      head with its loss computed in chunks: there I has added the gradient.
    - The first time a kind of last backward runs, nothing is known, and no bucket is complete before finish().
    """

    def __init__(self, layout: FlatLayout):
        self._layout = layout
        self._learned: dict[Hashable, list[int]] = {}  # expected numbers, by the kind of last backward
        self._last_backward: Hashable = None
        self._expected: list[int] | None = None  # those of the last backward that runs
        self._additions = [0] * len(layout.slots)
        self._waiting_for: list[int] = []  # for each bucket, the number of its parameters that expect more additions

    def start(self, last_backward: Hashable) -> None:
        """Begin to count additions. Call it right before the last backward."""
        self._last_backward = last_backward
        self._expected = self._learned.get(last_backward)
        self._additions = [0] * len(self._additions)
        if self._expected is not None:
            self._waiting_for = [
                sum(additions > 0 for additions in self._expected[bucket.first_param : bucket.end_param])
                for bucket in self._layout.buckets
            ]

    def note_addition(self, slot_index: int) -> None:
        self._additions[slot_index] += 1
        if self._expected is not None and self._additions[slot_index] == self._expected[slot_index]:
            self._waiting_for[self._layout.slots[slot_index].bucket_index] -= 1

    def is_complete(self, bucket_index: int) -> bool:
        return self._expected is not None and self._waiting_for[bucket_index] == 0

    def learn(self) -> None:
        """Update the expected numbers. Call it after the last backward.

        A replica without a micro-batch in this step learns nothing: the next step may give it one (train.batch_ramp).
        """
        if not any(self._additions):
            return
        # The largest number so far: expecting fewer additions than come would reduce a bucket too early.
        before = self._expected or self._additions
        expected = [max(pair) for pair in zip(self._additions, before, strict=True)]
        self._learned[self._last_backward] = expected
