"""What the optimizer, the gradient norm and checks read of a rank's weights and gradients: its shards.

Each ZeRO stage keeps weights and gradients in its own way. `FlatWeights` and `Gradients` keep all elements (stages 0
and 1). `UnitGradients` keeps the gradients of this rank's shards alone (2 and 3), and `UnitWeights` the weights (3).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import ClassVar

import torch
from megapar_kernels.adamw import FlatRanges
from megapar_kernels.dispatch import Implementation
from torch import Tensor, nn

from megapar.comm import collectives
from megapar.data_parallel.buckets import Bucket
from megapar.data_parallel.layout import FlatLayout
from megapar.data_parallel.partial_sums import partial_sums
from megapar.data_parallel.placement import Placement, slots_not_finite


class PeakBytes:
    """The bytes of something besides its buffer, now and at most."""

    def __init__(self) -> None:
        self._live = 0
        self.peak = 0

    def change(self, nbytes: int) -> None:
        """Note that `nbytes` were allocated, or freed if they are negative."""
        self._live += nbytes
        self.peak = max(self.peak, self._live)


class Weights(ABC):
    """The weights of a rank. `flat` is 1-D, in the model's dtype. `placement` has the places of elements in it.

    The last places may be in `precise`, behind the end of `flat`: 1-D fp32, the precise weights of a 16-bit model.
    `whole` counts the bytes of units while they are whole (ZeRO-3).
    """

    SHARDS_ONLY: ClassVar[bool]
    """Whether `flat` holds this rank's shards alone."""

    def __init__(self, layout: FlatLayout, device: torch.device):
        self.layout = layout
        self.whole = PeakBytes()
        self.placement = Placement(layout, shards_only=self.SHARDS_ONLY)
        num_precise = self.placement.num_precise
        self.flat = torch.zeros(self.placement.numel - num_precise, dtype=layout.dtype, device=device)
        self.precise = torch.zeros(num_precise, device=device)

    @classmethod
    def planned_nbytes(cls, layout: FlatLayout) -> int:
        """The `nbytes` of the weights of a layout, before there are any."""
        return Placement(layout, shards_only=cls.SHARDS_ONLY).weights_nbytes

    @property
    def nbytes(self) -> int:
        """The bytes taken by the weights between steps."""
        return self.flat.nbytes + self.precise.nbytes

    @property
    def most_nbytes(self) -> int:
        """The most bytes taken by the weights at one time."""
        return self.nbytes + self.whole.peak

    def unit_actions(self) -> Mapping[str, Callable[[int], None]]:
        """What the plan of a step may ask of a unit's weights, by the kind of action. Nothing without units."""
        return {}

    def nbytes_of(self, unit: int) -> int:
        """The bytes of a unit's weights, or of their codes, while a step has them gathered, padding included."""
        return 0

    def part(self, start: int, stop: int) -> Tensor:
        """The elements [start, stop) of the layout. They must lie in one of this rank's shards."""
        place = self.placement.slice(start, stop)
        return self._at(place.start, place.stop)

    def _at(self, start: int, stop: int) -> Tensor:
        """The elements at the places [start, stop), all in one of the two buffers."""
        end = self.flat.numel()
        return self.flat[start:stop] if start < end else self.precise[start - end : stop - end]

    def gather(self) -> None:
        """Let forward passes read every rank's updated shards.

        Without ZeRO nothing is communicated. Call it after every update nevertheless: it forgets converted weights, and
        with ZeRO-3 makes the codes of those that products read in FP8.
        """
        self.start_gather()
        self.wait()

    @abstractmethod
    def start_gather(self) -> None:
        """Start `gather`. Parameters may be read after `wait`. What products have converted of them is forgotten."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for all gathers in flight."""

    def hold(self, params: Iterable[nn.Parameter]) -> None:
        """Let `params` be read outside of a step until the next call, which frees those of this one.

        All ranks of an axis of gradients call it alike, with the parameters of the same logical tensors.
        """
        self.wait()

    def not_finite(self) -> list[str]:
        """Names of the parameters with an infinite or NaN element here, in the model's order."""
        return slots_not_finite(self._at, self.placement, self.layout, self.layout.everything)[::-1]


class ReducedGradients(ABC):
    """The gradients of a rank, and their reduction over data-parallel replicas.

    `flat` is 1-D fp32. `placement` has the places of elements in it. `whole` counts the bytes of units while they are
    collected (ZeRO-2 and 3). `impl` is the implementation of the sums of squares for the gradient norm.

        call        when                                effect
        zero()      at the start of a step              gradients count as zero
        begin()     right before the last backward      may start reductions
        finish()    after the last backward             `flat` holds the gradient of the global batch in the shards

    With the `reduce_dtype` bf16, ranks send each other gradients rounded to it.
    """

    SHARDS_ONLY: ClassVar[bool]
    """Whether `flat` holds this rank's shards alone."""

    def __init__(
        self,
        layout: FlatLayout,
        device: torch.device,
        *,
        reduce_dtype: torch.dtype = torch.float32,
        impl: Implementation = "torch",
    ):
        self.layout = layout
        self.reduce_dtype = reduce_dtype
        self.whole = PeakBytes()
        self.placement = Placement(layout, shards_only=self.SHARDS_ONLY)
        self.flat = torch.zeros(self.placement.numel, dtype=torch.float32, device=device)
        self.impl: Implementation = impl
        self.norm_ranges = FlatRanges.of(self.placement.ranges_of(layout.norm_ranges()), device)
        """The elements of `flat` counted by this rank in the gradient norm."""
        self.uncounted_ranges = FlatRanges.of(self.placement.ranges_of(layout.uncounted_ranges()), device)
        """Elements of `flat` in this rank's shards, counted by other ranks from copies of their own."""
        self._partial_sums = partial_sums(layout, self.placement)

    @property
    def most_nbytes(self) -> int:
        """The most bytes taken by the gradients at one time."""
        return self.flat.nbytes + self.whole.peak

    def unit_actions(self) -> Mapping[str, Callable[[int], None]]:
        """What the plan of a step may ask of a unit's gradient, by the kind of action. Nothing without units."""
        return {}

    def nbytes_of(self, unit: int) -> int:
        """The bytes of a unit's gradient while it is collected, padding included."""
        return 0

    def part(self, start: int, stop: int) -> Tensor:
        """The elements [start, stop) of the layout. They must lie in one of this rank's shards."""
        return self.flat[self.placement.slice(start, stop)]

    @abstractmethod
    def zero(self) -> None:
        """Start a step with gradients of zero."""

    @abstractmethod
    def begin(self, last_backward: Hashable = None) -> None:
        """Note that the last backward of the step begins on this rank."""

    @abstractmethod
    def finish(self) -> None:
        """Complete all reductions, then add up the partial gradients of several ranks."""

    def not_finite(self, *, reduced: bool = True) -> list[str]:
        """Names of the parameters with a gradient that is not finite, in the order of the layout.

        This is about the order of the backward pass. After the reduction only this rank's shards count. Without
        `reduced`, all elements of `flat` count.
        """
        ranges = self.layout.everything
        if reduced:
            ranges = self.layout.shards()
        return slots_not_finite(lambda start, stop: self.flat[start:stop], self.placement, self.layout, ranges)

    def _start_reduce_scatter(self, whole: Tensor, bucket: Bucket) -> collectives.Pending:
        """Start to sum `whole`, the gradients of a bucket with their padding, in place over the bucket's axis.

        After `wait`, the shard of this rank holds its sum. The rest of `whole` is undefined.
        """
        axis = self.layout.axis(bucket)
        if self.reduce_dtype == torch.bfloat16:
            return collectives.reduce_scatter_shard_in_bf16_async(whole, axis)
        return collectives.reduce_scatter_shard_async(whole, axis)

    def _add_partial_sums(self) -> None:
        """Call it after the reductions, because they change the same elements."""
        for partial_sum in self._partial_sums:
            partial_sum.sum(self.flat)
