"""The places of a layout's elements in a buffer of all of them, or of this rank's shards alone."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megapar.data_parallel.buckets import Range, intersect, merge
from megapar.data_parallel.layout import FlatLayout


class Placement:
    """The places of a layout's elements in a buffer.

    A buffer holds all elements, at the offsets of the layout, or with `shards_only` this rank's shards, one after the
    other. `numel` is the length of the buffer. The last `num_precise` elements are fp32 parameters of a 16-bit model
    (`ParamSpec.precise`). `weights_nbytes` are the bytes of all elements as weights.
    """

    def __init__(self, layout: FlatLayout, *, shards_only: bool):
        self._held = layout.shards() if shards_only else layout.everything
        self.numel = sum(stop - start for start, stop in self._held)
        self.num_precise = sum(max(stop - max(start, layout.precise_start), 0) for start, stop in self._held)
        num_flat = self.numel - self.num_precise
        self.weights_nbytes = num_flat * layout.dtype.itemsize + self.num_precise * torch.float32.itemsize

    def ranges_of(self, ranges: Sequence[Range]) -> list[Range]:
        """The places of `ranges` in the buffer. Elements outside of the buffer are left out."""
        placed = []
        base = 0  # where the held elements [start, stop) begin in the buffer
        i = 0
        for start, stop in self._held:
            while i < len(ranges) and ranges[i][1] <= start:
                i += 1
            last = i
            while last < len(ranges) and ranges[last][0] < stop:
                last += 1
            for first, end in intersect(ranges[i:last], [(start, stop)]):
                placed.append((base + first - start, base + end - start))
            base += stop - start
        return merge(placed)

    def slice(self, start: int, stop: int) -> slice:
        """The slice of the buffer with the elements [start, stop). They must lie in one shard."""
        ((first, last),) = self.ranges_of([(start, stop)])
        return slice(first, last)


def slots_not_finite(
    at: Callable[[int, int], Tensor], placement: Placement, layout: FlatLayout, ranges: Sequence[Range]
) -> list[str]:
    """Names of the parameters with an infinite or NaN element within `ranges` of the layout.

    `at` returns the elements at places of `placement`.
    """
    names = []
    for slot in layout.slots:
        held = placement.ranges_of(intersect([(slot.start, slot.stop)], ranges))
        if not all(at(start, stop).isfinite().all() for start, stop in held):
            names.append(slot.name)
    return names
