"""Weights and gradients existing whole only while a unit of them is used (ZeRO-2 and 3, arXiv 1910.02054).

A unit is a bucket of a layout made with `units`. The plan of a step says when its weights are gathered and released,
and when its gradient is reduced (`megapar.pipeline.sharding_plan`). The classes here follow the plan.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial

import torch
from megapar_kernels.dispatch import Implementation
from torch import Tensor, nn

from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.data_parallel.accumulate import MainGradView, attach, view_of_slot, zero_padding
from megapar.data_parallel.layout import FlatLayout
from megapar.data_parallel.shards import ReducedGradients, Weights
from megapar.data_parallel.unit_codes import UnitCodes, kept_nbytes
from megapar.linear.converted_weight import forget_converted

Initial = Callable[[nn.Parameter, slice], None]
"""Fills some elements of a parameter in flat memory with its initial values."""


class UnitWeights(Weights):
    """The weights of this rank's shards (ZeRO-3). The constructor cuts them out of the parameters.

    Parameters are views of their unit's memory. It is allocated when the unit is gathered, and freed when it is
    released. Each unit keeps one storage object, and its size goes from zero to the whole and back. So tensors saved
    for backward by autograd see the weights again when the unit is gathered again.

    Of parameters that products read in FP8 blocks, steps and evaluations gather the codes (`UnitCodes`). The parameters
    then have no memory: only `hold` gathers their values.

    With `initial`, it fills the weights here, a unit at a time: parameters need no memory before, and a rank never
    holds more than one unit whole. It gets a parameter, and the elements of it that this rank keeps. Without it they
    keep their values.
    """

    SHARDS_ONLY = True

    def __init__(self, layout: FlatLayout, device: torch.device, initial: Initial | None = None):
        super().__init__(layout, device)
        self._shards = [self.part(*layout.shard(bucket)) for bucket in layout.buckets]
        self._whole: list[Tensor] = []
        self._arriving: dict[int, collectives.Pending] = {}
        self._held: set[int] = set()
        self._unit_of = {id(slot.param): slot.bucket_index for slot in layout.slots}
        # One unit after the other, so that only one of them takes memory twice.
        for unit, bucket in enumerate(layout.buckets):
            whole = torch.zeros(bucket.numel, dtype=layout.dtype_of(layout.update_of(bucket)), device=device)
            self._whole.append(whole)
            kept = layout.shard(bucket)
            for slot in layout.slots[bucket.first_param : bucket.end_param]:
                view = view_of_slot(whole, slot, bucket.start)
                if initial is None:
                    view.copy_(slot.param.data)
                # `.data`, so that modules and optimizer keep the same Parameter object.
                slot.param.data = view
                if initial is not None:
                    start, stop = (min(max(bound, slot.start), slot.stop) - slot.start for bound in kept)
                    initial(slot.param, slice(start, stop))
            self._shards[unit].copy_(self._own_slice(unit))
            whole.untyped_storage().resize_(0)
        self._codes = UnitCodes(layout, self._shards)
        self.gather()

    @classmethod
    def planned_nbytes(cls, layout: FlatLayout) -> int:
        return super().planned_nbytes(layout) + kept_nbytes(layout)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._codes.nbytes

    def gather_unit(self, unit: int) -> None:
        """Start to gather what products read of a unit: its weights or its codes. They may read it after `wait_for`."""
        if unit in self._codes:
            self._arriving[unit] = collectives.all_gather_shard_async(self._codes.open(unit), self._axis(unit))
            self.whole.change(self.nbytes_of(unit))
        else:
            self._arriving[unit] = self._gather_values(unit)

    def wait_for(self, unit: int) -> None:
        """Wait for the gather of a unit."""
        self._arriving.pop(unit).wait()
        if unit in self._codes:
            self._codes.show(unit)

    def release(self, unit: int) -> None:
        """Free the memory of a unit's weights or codes.

        On a GPU the kernels that read it may still be queued. The allocator gives the memory only to work queued behind
        them.
        """
        if unit in self._codes:
            self._forget(unit)
            self._codes.close(unit)
            self.whole.change(-self.nbytes_of(unit))
        else:
            self._free_values(unit)

    def hold(self, params: Iterable[nn.Parameter]) -> None:
        wanted = {self._unit_of[id(param)] for param in params if id(param) in self._unit_of}
        for unit in self._held - wanted:
            self._free_values(unit)
        for unit in sorted(wanted - self._held):
            self._gather_values(unit).wait()
        self._held = wanted

    def _gather_values(self, unit: int) -> collectives.Pending:
        """Start to gather the weights of a unit. Parameters may be read after the wait."""
        whole = self._whole[unit]
        whole.untyped_storage().resize_(whole.numel() * whole.itemsize)
        self.whole.change(whole.nbytes)
        self._own_slice(unit).copy_(self._shards[unit])
        return collectives.all_gather_shard_async(whole, self._axis(unit))

    def _free_values(self, unit: int) -> None:
        self._forget(unit)
        self._whole[unit].untyped_storage().resize_(0)
        self.whole.change(-self._whole[unit].nbytes)

    def _forget(self, unit: int) -> None:
        """Free what products have converted of a unit."""
        bucket = self.layout.buckets[unit]
        forget_converted(slot.param for slot in self.layout.slots[bucket.first_param : bucket.end_param])

    def _axis(self, unit: int) -> Axis:
        return self.layout.axis(self.layout.buckets[unit])

    def unit_actions(self) -> Mapping[str, Callable[[int], None]]:
        return {"gather": self.gather_unit, "wait": self.wait_for, "release": self.release}

    def nbytes_of(self, unit: int) -> int:
        return self.layout.gathered_nbytes(self.layout.buckets[unit])

    def start_gather(self) -> None:
        """Make the codes of updated weights. The plan gathers each unit before its use."""
        self._codes.encode()

    def wait(self) -> None:
        """Do nothing: after a step no gather is in flight."""

    def _own_slice(self, unit: int) -> Tensor:
        """This rank's slice of the whole weights of a unit."""
        bucket = self.layout.buckets[unit]
        start, stop = self.layout.shard(bucket)
        return self._whole[unit][start - bucket.start : stop - bucket.start]


class UnitGradients(ReducedGradients):
    """The gradients of this rank's shards (ZeRO-2 and 3).

    The gradient of a unit is collected in memory allocated by `open`. `reduce` starts to sum it over all ranks, and
    `add` adds the sum to this rank's shard. The first sum of a step overwrites the shard. If it has copies on other
    ranks (optimizer.shard_ranks), `sum_copies` starts to add them up.
    """

    SHARDS_ONLY = True

    def __init__(
        self,
        layout: FlatLayout,
        device: torch.device,
        *,
        reduce_dtype: torch.dtype = torch.float32,
        impl: Implementation = "torch",
    ):
        super().__init__(layout, device, reduce_dtype=reduce_dtype, impl=impl)
        self._device = device
        self._shards = [self.part(*layout.shard(bucket)) for bucket in layout.buckets]
        self._main_grads: list[MainGradView] = []
        for index, slot in enumerate(layout.slots):
            main_grad = MainGradView(torch.empty(0, device=device), partial(self._note_addition, index))
            attach(main_grad, slot.param)
            self._main_grads.append(main_grad)
        self._collected: dict[int, Tensor] = {}  # whole gradients by unit, from `open` to `add`
        self._travelling: dict[int, collectives.Pending] = {}  # by unit, from `reduce` to `add`
        self._summed: list[collectives.Pending] = []  # from `sum_copies` to `finish`
        self._untouched = set(range(len(layout.buckets)))  # units whose shard holds values of an earlier step

    def zero(self) -> None:
        """Start a step with gradients of zero. Raises RuntimeError if the last step has not reduced all gradients."""
        if self._collected:
            raise RuntimeError("UnitGradients.zero() while gradients are collected: the plan must reduce them first")
        self._untouched = set(range(len(self.layout.buckets)))

    def begin(self, last_backward: Hashable = None) -> None:
        """Do nothing: the plan says when gradients are reduced."""

    def finish(self) -> None:
        """Wait for the sums of copies, and add up the partial gradients of several ranks. All others are reduced."""
        if self._collected:
            raise RuntimeError("UnitGradients.finish() while gradients are collected: the plan must reduce them first")
        for pending in self._summed:
            pending.wait()
        self._summed = []
        for unit in self._untouched:
            self._shards[unit].zero_()
        self._untouched = set()
        self._add_partial_sums()

    def open(self, unit: int) -> None:
        """Allocate the memory for collecting the gradient of a unit."""
        bucket = self.layout.buckets[unit]
        whole = torch.empty(bucket.stop - bucket.start, dtype=torch.float32, device=self._device)
        self._collected[unit] = whole
        self.whole.change(whole.nbytes)
        for index in range(bucket.first_param, bucket.end_param):
            slot = self.layout.slots[index]
            main_grad = self._main_grads[index]
            main_grad.tensor = view_of_slot(whole, slot, bucket.start)
            main_grad.is_stale = True  # the first gradient overwrites what the memory held before
            zero_padding(whole, slot, bucket.start)

    def reduce(self, unit: int) -> None:
        """Start to sum the gradient of a unit over all ranks."""
        bucket = self.layout.buckets[unit]
        for main_grad in self._main_grads[bucket.first_param : bucket.end_param]:
            main_grad.zero_if_stale()  # no gradient, such as that of experts without tokens
            # No later gradient may be added: the memory is read until the sum has arrived, and then freed.
            main_grad.tensor = main_grad.tensor.new_empty(0)
        self._travelling[unit] = self._start_reduce_scatter(self._collected[unit], bucket)

    def add(self, unit: int) -> None:
        """Wait for the sum of a unit's gradient, add it to this rank's shard, and free the memory."""
        self._travelling.pop(unit).wait()
        bucket = self.layout.buckets[unit]
        start, stop = self.layout.shard(bucket)
        whole = self._collected.pop(unit)
        self.whole.change(-whole.nbytes)
        arrived = whole[start - bucket.start : stop - bucket.start]
        if unit in self._untouched:
            self._untouched.remove(unit)
            self._shards[unit].copy_(arrived)
        else:
            self._shards[unit].add_(arrived)

    def sum_copies(self, unit: int) -> None:
        """Start to add up the copies of this rank's shard. Nothing may be added to it before `finish`."""
        copies = self.layout.copies(self.layout.buckets[unit])
        self._summed.append(collectives.all_reduce_async(self._shards[unit], copies))

    def unit_actions(self) -> Mapping[str, Callable[[int], None]]:
        actions = {"open": self.open, "reduce": self.reduce, "add": self.add}
        if any(self.layout.copies(bucket).size > 1 for bucket in self.layout.buckets):
            actions["copies"] = self.sum_copies
        return actions

    def nbytes_of(self, unit: int) -> int:
        bucket = self.layout.buckets[unit]
        return (bucket.stop - bucket.start) * torch.float32.itemsize

    def _note_addition(self, index: int) -> None:
        """Raise RuntimeError for a gradient coming after its unit was reduced."""
        slot = self.layout.slots[index]
        if slot.bucket_index not in self._collected or slot.bucket_index in self._travelling:
            raise RuntimeError(f"gradient of {slot.name} added while the plan does not collect it")
