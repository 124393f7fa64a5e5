"""Flat buffers of a rank's parameters and fp32 gradients, reduced over data-parallel ranks while the backward runs.

Parameters lie in reverse registration order, about the order in which their gradients become final, in buckets. A
bucket is all-reduced (ZeRO stage 0) or reduce-scattered (stage 1, arXiv 1910.02054: each rank then owns an equal slice
of it) as soon as its last gradient has been added, in bucket order on all ranks. One step:

    zero()                  gradients are added, micro-batch by micro-batch
    begin()                 right before the last backward: from now on full buckets are reduced
    finish()                the rest is reduced; afterwards this rank's shards hold the gradient of the global batch
    gather_params()         after the optimizer has updated this rank's shards
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megapar_kernels.adamw import FlatRanges
from megapar_kernels.launch import Implementation
from torch import Tensor, nn

from megapar import comm
from megapar.context import ParallelContext
from megapar.data_parallel.layout import Bucket, Range, intersect, lay_out, merge
from megapar.params import MainGrad, ParamSpec, main_grad_of, spec_of

Declared = tuple[nn.Parameter, ParamSpec]


@dataclass(frozen=True)
class Slot:
    """A parameter's place: elements [start, stop) of the buffers; [stop, end) is padding, which stays zero."""

    param: nn.Parameter
    spec: ParamSpec
    start: int
    stop: int
    end: int
    bucket: int

    @property
    def name(self) -> str:
        return self.spec.name


class GradBuffer:
    """`params` (the model's dtype) and `grads` (fp32), 1-D with the same offsets. Parameters become views of `params`.

    `modules` are this rank's stages in order. Each distinct parameter gets `main_grad`, its place in `grads`: layers
    add to it, and gradients that autograd leaves in `.grad` are moved there. Buckets hold about `bucket_mb` MiB of
    gradient; `weight_gradient` is who adds 16-bit matrix products to it. Raises TypeError if a parameter has no
    ParamSpec or parameters are not all fp32, all bf16 or all fp16; ValueError if one needs no gradient, or `bucket_mb`
    is not above 0.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        ctx: ParallelContext,
        *,
        zero_stage: int,
        bucket_mb: float,
        overlap: bool,
        weight_gradient: Implementation = "torch",
    ):
        if not bucket_mb > 0:
            raise ValueError(f"bucket_mb is {bucket_mb}: validate() fills in the 0 of optimizer.bucket_mb")
        self.ctx = ctx
        self.sharded = zero_stage == 1
        self._overlap, self._weight_gradient = overlap, weight_gradient
        params = _collect(modules)
        dtype = _common_dtype(params)
        self.slots, self.buckets = _place(_in_groups(params), int(bucket_mb * 2**20 / 4), ctx.grad.size)
        total = self.buckets[-1].stop if self.buckets else 0
        self.grads = torch.zeros(total, dtype=torch.float32, device=ctx.device)
        self.params = torch.zeros(total, dtype=dtype, device=ctx.device)
        self._pending: list[comm.Pending] = []
        self._launched = 0  # buckets whose reduction has started since zero()
        self._finished = False
        self._counting = False  # between begin() and finish()
        self._added_last = [0] * len(self.slots)  # additions since begin()
        self._expected: list[int] | None = None  # the most that an earlier last backward added; None before the first
        self._waiting: list[int] = []  # parameters that each bucket still waits for; empty: all wait for finish()
        self._shared, self._shared_numel = self._locate_shared_rows()
        self.counted = FlatRanges.of(self.owned(), ctx.device)
        """The elements of `grads` that this rank counts in the gradient norm."""
        self.copied = FlatRanges.of(self.copies(), ctx.device)
        """Those that other ranks count, of which this rank holds copies."""
        for index, slot in enumerate(self.slots):
            self._attach(slot, index)

    def _attach(self, slot: Slot, index: int) -> None:
        param = slot.param
        view = self.params[slot.start : slot.stop].view(param.shape)
        view.copy_(param.data)
        param.data = view
        grad = self.grads[slot.start : slot.stop].view(param.shape)
        main_grad = MainGrad(grad, partial(self._added, index), self._weight_gradient)
        param.main_grad = main_grad  # type: ignore[attr-defined]
        param.register_post_accumulate_grad_hook(_move_grad)

    def zero(self) -> None:
        """Start a step with gradients of zero. Raises RuntimeError between begin() and finish()."""
        if self._counting:
            raise RuntimeError("GradBuffer.zero() while buckets may be in flight: call finish() first")
        self.grads.zero_()
        self._launched = 0
        self._finished = False

    def begin(self) -> None:
        """Allow buckets to be reduced from now on: the last backward of this rank is about to start.

        A bucket is full when each of its parameters has received as many additions since begin() as it ever did before;
        parameters that never did (they belong to other stages of this rank) are final already. Nothing is known on the
        first step, so all is reduced in finish().
        """
        if self._counting or self._finished:
            raise RuntimeError("GradBuffer.begin() called twice in a step: call finish(), then zero() first")
        self._counting = True
        self._added_last = [0] * len(self.slots)
        if self._overlap and self._expected is not None:
            self._waiting = [sum(n > 0 for n in self._expected[b.first : b.last]) for b in self.buckets]
            self._reduce_full_buckets()

    def finish(self) -> None:
        """Reduce what is left and wait, then add up tied copies and rows that several tensor ranks hold."""
        if self._finished:
            raise RuntimeError("GradBuffer.finish() called twice: the gradients are reduced, call zero() first")
        while self._launched < len(self.buckets):
            self._reduce_next()
        for pending in self._pending:
            pending.wait()
        self._pending = []
        self._sum_tied_copies()
        self._sum_shared_rows()
        if self._counting:
            self._expected = [
                max(pair) for pair in zip(self._added_last, self._expected or self._added_last, strict=True)
            ]
        self._waiting = []
        self._counting = False
        self._finished = True

    def gather_params(self) -> None:
        """Fill `params` with every rank's updated shards (ZeRO stage 1; at stage 0 each rank has updated all)."""
        if self.sharded:
            flats = [self.params[bucket.start : bucket.stop] for bucket in self.buckets]
            for pending in [comm.all_gather_shard_async(flat, self.ctx.grad) for flat in flats]:
                pending.wait()

    def shards(self) -> list[Range]:
        """The elements that this rank's optimizer updates, in as few ranges as possible."""
        return merge(self._shard(index) for index in range(len(self.buckets)))

    def owned(self) -> list[Range]:
        """The elements of this rank's shards that no other tensor or pipeline rank counts, and some padding (zeros)."""
        counted = [
            (slot.start + start, slot.end if slot.start + stop == slot.stop else slot.start + stop)
            for slot in self.slots
            for start, stop in slot.spec.owned_ranges()
        ]
        return intersect(merge(counted), self.shards())

    def copies(self) -> list[Range]:
        """The elements of this rank's shards that are not in `owned`: another rank counts its own copy of them."""
        owned = self.owned()
        starts = [0, *(stop for _, stop in owned)]
        stops = [*(start for start, _ in owned), self.grads.numel()]
        between = [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]
        return intersect(between, self.shards())

    def not_finite(self) -> list[str]:
        """Parameters with an infinite or NaN gradient in this rank's shards, after finish(), about in the order of the
        backward pass."""
        names = []
        for slot in self.slots:
            parts = intersect([(slot.start, slot.stop)], self.shards())
            if not all(torch.isfinite(self.grads[start:stop]).all() for start, stop in parts):
                names.append(slot.name)
        return names

    def _shard(self, index: int) -> Range:
        axis = self.ctx.grad
        return self.buckets[index].shard(axis.rank, axis.size) if self.sharded else self.buckets[index][:2]

    def _added(self, index: int) -> None:
        """A gradient was added to slot `index`; raises RuntimeError if its bucket is being or has been reduced."""
        slot = self.slots[index]
        if slot.bucket < self._launched:
            raise RuntimeError(
                f"gradient of {slot.name} added after finish(): call zero() first"
                if self._finished
                else f"gradient of {slot.name} added after its bucket was reduced, for it was added more often in the "
                "last backward than in any step before: --optimizer.no_overlap_grad_reduce reduces after it"
            )
        if not self._counting:
            return
        self._added_last[index] += 1
        if self._waiting and self._expected and self._added_last[index] == self._expected[index]:
            self._waiting[slot.bucket] -= 1
            self._reduce_full_buckets()

    def _reduce_full_buckets(self) -> None:
        while self._launched < len(self._waiting) and self._waiting[self._launched] == 0:
            self._reduce_next()

    def _reduce_next(self) -> None:
        bucket = self.buckets[self._launched]
        reduce = comm.reduce_scatter_shard_async if self.sharded else comm.all_reduce_async
        self._launched += 1
        self._pending.append(reduce(self.grads[bucket.start : bucket.stop], self.ctx.grad))

    def _sum_tied_copies(self) -> None:
        """Both ends hold the same buckets of tied parameters, so their shards hold the same elements."""
        for index, bucket in enumerate(self.buckets):
            if self.slots[bucket.first].spec.tie:
                start, stop = self._shard(index)
                comm.all_reduce(self.grads[start:stop], self.ctx.ends)

    def _locate_shared_rows(self) -> tuple[list[tuple[int, int, int]], int]:
        """For gradients that are partial sums over tp: (place among all rows of all such pieces, start, stop) for each
        run of elements in this rank's shards, and the number of elements of all such pieces."""
        runs, numel = [], 0
        shards = self.shards()
        for slot in self.slots:
            for piece, first, last in slot.spec.segments() if slot.spec.tp_sum else ():
                if not piece.shared:
                    continue
                if piece.dim not in (None, 0):
                    raise ValueError(f"{piece.name} is shared over tp along dimension {piece.dim}: only rows can be")
                row = math.prod(piece.shape[1:])
                place = numel + (0 if piece.dim is None else piece.start * row) - slot.start - first
                for start, stop in intersect([(slot.start + first, slot.start + last)], shards):
                    runs.append((place + start, start, stop))
                numel += math.prod(piece.shape)
        return runs, numel

    def _sum_shared_rows(self) -> None:
        """Add up rows that several tensor ranks hold, whatever their offsets and shards on each of them.

        Each rank lays the elements that it has reduced at their logical places, zeros elsewhere. All tensor ranks then
        add the same numbers in the same order, so their copies stay bitwise equal.
        """
        if not self._shared_numel:
            return
        packed = self.grads.new_zeros(self._shared_numel)
        for place, start, stop in self._shared:
            packed[place : place + stop - start] = self.grads[start:stop]
        comm.all_reduce(packed, self.ctx.tp)
        if self.sharded:
            comm.all_reduce(packed, self.ctx.grad)
        for place, start, stop in self._shared:
            self.grads[start:stop] = packed[place : place + stop - start]


def _move_grad(param: Tensor) -> None:
    main_grad = main_grad_of(param)
    assert main_grad is not None
    if param.grad is not None:  # None where the layer has added its gradient itself
        main_grad.add(param.grad)
        param.grad = None


def _collect(modules: Sequence[nn.Module]) -> list[Declared]:
    """Each distinct parameter once, in reverse registration order. Raises ValueError for one that needs no gradient."""
    names = {param: name for module in modules for name, param in module.named_parameters()}
    frozen = [spec_of(param, name).name for param, name in names.items() if not param.requires_grad]
    if frozen:
        raise ValueError(f"{', '.join(frozen)}: requires_grad is False, and frozen parameters are not supported")
    return [(param, spec_of(param, name)) for param, name in reversed(names.items())]


def _common_dtype(params: Sequence[Declared]) -> torch.dtype:
    """fp32, bf16 or fp16; fp32 if there is no parameter. Raises TypeError, naming parameters, for others and for
    mixtures."""
    dtype = params[0][0].dtype if params else torch.float32
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{params[0][1].name} is {dtype}: parameters must be all torch.float32, bfloat16 or float16")
    for param, spec in params:
        if param.dtype != dtype:
            raise TypeError(
                f"{spec.name} is {param.dtype} and {params[0][1].name} is {dtype}: all parameters must have one dtype"
            )
    return dtype


def _in_groups(params: Sequence[Declared]) -> list[list[Declared]]:
    """Split over tp, whole on every tensor rank, tied: groups that share no bucket.

    A sum over three and more ranks rounds by an element's place in its bucket. Copies of a parameter must not drift
    apart, so the buckets that hold them look the same on all ranks that do, however their other parameters are cut.
    """
    split: list[Declared] = []
    whole: list[Declared] = []
    tied: list[Declared] = []
    for param, spec in params:
        group = tied if spec.tie else whole if all(piece.dim is None for piece in spec.pieces) else split
        group.append((param, spec))
    return [split, whole, sorted(tied, key=lambda pair: pair[1].name)]


def _place(groups: Sequence[Sequence[Declared]], bucket_elements: int, shards: int) -> tuple[list[Slot], list[Bucket]]:
    starts, buckets = lay_out([[param.numel() for param, _ in group] for group in groups], bucket_elements, shards)
    params = [pair for group in groups for pair in group]
    slots = []
    for number, bucket in enumerate(buckets):
        for i in range(bucket.first, bucket.last):
            end = starts[i + 1] if i + 1 < bucket.last else bucket.stop
            slots.append(Slot(*params[i], starts[i], starts[i] + params[i][0].numel(), end, number))
    return slots, buckets
