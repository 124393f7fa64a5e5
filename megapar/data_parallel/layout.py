"""The layout of parameters in a rank's flat buffers. Weights, gradients and optimizer state share these offsets.

Parameters are in reverse registration order, which is about the order in which their gradients become final. They are
grouped into buckets. A bucket is reduced in one collective over the axis on which its parameters are replicated
(`ParamSpec.replicas`). Under ZeRO each rank of that axis owns an equal slice of the bucket, its shard (Rajbhandari et
al., arXiv 1910.02054).

A range is [start, stop) in elements. A list of ranges is sorted and disjoint.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from megapar.context import Axis
from megapar.params import ParamSpec, spec_of

Range = tuple[int, int]

ALIGNMENT = 64
"""In elements. Parameters and shards start at multiples of it.

A vectorized optimizer then has no scalar remainder inside them. A remainder rounds differently, so an element's update
would depend on where the buffer happens to be cut.
"""


_TIES = "ends"  # the axis of stages that hold copies of one parameter (megapar.context)


class Bucket(NamedTuple):
    """Contiguous elements of the buffers that are reduced in one collective.

    They are the elements [start, stop), padding included. The bucket holds the parameters [first, last), by position.
    """

    start: int
    stop: int
    first: int
    last: int

    def shard(self, rank: int, size: int) -> Range:
        """The range of the `rank`-th of `size` equal slices."""
        length = (self.stop - self.start) // size
        return self.start + rank * length, self.start + (rank + 1) * length


@dataclass(frozen=True)
class Group:
    """Parameters that may share buckets.

    `counts` are their numbers of elements. Each bucket is cut into `shards` equal slices. `whole` means that no
    parameter may lie in two slices.
    """

    counts: Sequence[int]
    shards: int
    whole: bool = False


def lay_out(groups: Sequence[Group], bucket_elements: int) -> tuple[list[int], list[Bucket]]:
    """Place parameters in buckets. Returns the first element of each parameter, in the given order, and the buckets.

    A bucket holds parameters of one group only. It is closed when it has reached `bucket_elements`. It is padded so
    that it divides into equal, aligned slices.
    """
    starts: list[int] = []
    buckets: list[Bucket] = []
    end = 0
    for group in groups:
        first = 0
        filled = 0
        for position, count in enumerate(group.counts):
            filled += _round_up(count, ALIGNMENT)
            # The last parameter closes the group's last bucket, however full it is.
            if filled < bucket_elements and position < len(group.counts) - 1:
                continue
            counts = group.counts[first : position + 1]
            place = _place_whole if group.whole else _place
            inside, length = place(counts, group.shards)
            buckets.append(Bucket(end, end + length, len(starts), len(starts) + len(counts)))
            starts += [end + start for start in inside]
            end += length
            first = position + 1
            filled = 0
    return starts, buckets


def _place(counts: Sequence[int], shards: int) -> tuple[list[int], int]:
    """First element of each parameter, from the bucket's start, and the bucket's length. Slices may cut parameters."""
    starts = []
    end = 0
    for count in counts:
        starts.append(end)
        end += _round_up(count, ALIGNMENT)
    return starts, _round_up(end, ALIGNMENT * shards)


def _place_whole(counts: Sequence[int], shards: int) -> tuple[list[int], int]:
    """As `_place`, with no parameter in two slices. The slices are as short as the order of parameters allows."""
    sizes = [_round_up(count, ALIGNMENT) for count in counts]
    # Binary search for the least length with which filling slices one after the other needs at most `shards` of them.
    low = max(max(sizes), _round_up(-(-sum(sizes) // shards), ALIGNMENT))
    high = sum(sizes)
    while low < high:
        middle = (low + high) // 2 // ALIGNMENT * ALIGNMENT
        if _slices_needed(sizes, middle) <= shards:
            high = middle
        else:
            low = middle + ALIGNMENT
    starts = []
    end = 0
    for size in sizes:
        if end // low != (end + size - 1) // low:  # it would cross into the next slice: start there
            end = _round_up(end, low)
        starts.append(end)
        end += size
    return starts, low * shards


def _slices_needed(sizes: Sequence[int], length: int) -> int:
    """Number of slices of `length` elements that hold parameters of these sizes in order, none of them cut."""
    needed = 1
    filled = 0
    for size in sizes:
        if filled + size > length:
            needed += 1
            filled = 0
        filled += size
    return needed


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def merge(ranges: Iterable[Range]) -> list[Range]:
    """Join adjacent ranges. Returns the same elements in as few ranges as possible."""
    merged: list[Range] = []
    for start, stop in ranges:
        # Ranges come in ascending order, so only the last one can be adjacent.
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return merged


def intersect(left: Sequence[Range], right: Sequence[Range]) -> list[Range]:
    """The elements that are in both lists of ranges."""
    common = []
    i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        stop = min(left[i][1], right[j][1])
        if start < stop:
            common.append((start, stop))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


@dataclass(frozen=True)
class Slot:
    """The elements [start, stop) of the buffers that hold a parameter. [stop, end) is padding, which stays zero."""

    param: nn.Parameter
    spec: ParamSpec
    start: int
    stop: int
    end: int
    bucket: int

    @property
    def name(self) -> str:
        return self.spec.name


Declared = tuple[nn.Parameter, ParamSpec]


class FlatLayout:
    """Slots and buckets of all trained parameters of a rank's stages.

    `modules` are this rank's stages in order. A bucket has about `bucket_elements` elements. `sharded` says whether
    each rank of a bucket's axis owns a slice of it (ZeRO) or all of it.

    Raises TypeError if a parameter has no ParamSpec, or if parameters are not all fp32, all bf16 or all fp16.
    """

    def __init__(self, modules: Sequence[nn.Module], bucket_elements: int, *, sharded: bool):
        declared = _collect(modules)
        self.sharded = sharded
        self.dtype = _common_dtype(declared)
        groups = _in_groups(declared)
        counted = []
        for group in groups:
            _, spec = group[0]  # all parameters of a group agree on these two
            counted.append(Group([param.numel() for param, _ in group], spec.replicas.size, spec.whole))
        starts, self.buckets = lay_out(counted, bucket_elements)
        self.slots = _slots([pair for group in groups for pair in group], starts, self.buckets)
        self.numel = self.buckets[-1].stop if self.buckets else 0

    def axis(self, bucket: Bucket) -> Axis:
        """The axis over which the gradients of a bucket are summed."""
        return self.slots[bucket.first].spec.replicas

    def shard(self, bucket: Bucket) -> Range:
        """The part of a bucket that this rank's optimizer updates."""
        if not self.sharded:
            return bucket.start, bucket.stop
        axis = self.axis(bucket)
        return bucket.shard(axis.rank, axis.size)

    def shards(self) -> list[Range]:
        """The elements that this rank's optimizer updates, in as few ranges as possible."""
        return merge(self.shard(bucket) for bucket in self.buckets)

    def counted(self) -> list[Range]:
        """The elements that this rank counts in the gradient norm, and some padding, which is zero.

        Over all ranks each element of the model is counted once. The rank that owns it counts it if its shard holds the
        element. If nothing is sharded, the first of the replicas counts it.
        """
        owned = []
        for slot in self.slots:
            if not (self.sharded or slot.spec.replicas.first):
                continue
            for start, stop in slot.spec.owned_ranges():
                # With the padding behind a parameter, ranges of neighbors touch and become one: fewer, longer ranges.
                end = slot.end if slot.start + stop == slot.stop else slot.start + stop
                owned.append((slot.start + start, end))
        return intersect(merge(owned), self.shards())

    def copies(self) -> list[Range]:
        """The elements of this rank's shards that are not in `counted`. Another rank counts its own copy of them."""
        counted = self.counted()
        # What lies between the counted ranges, before the first and after the last.
        starts = [0, *(stop for _, stop in counted)]
        stops = [*(start for start, _ in counted), self.numel]
        between = [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]
        return intersect(between, self.shards())


def _collect(modules: Sequence[nn.Module]) -> list[Declared]:
    """Each distinct parameter that needs a gradient, once, in reverse registration order."""
    names = {param: name for module in modules for name, param in module.named_parameters() if param.requires_grad}
    return [(param, spec_of(param, name)) for param, name in reversed(names.items())]


def _common_dtype(params: Sequence[Declared]) -> torch.dtype:
    """The dtype of all parameters: fp32, bf16 or fp16. It is fp32 if there is no parameter.

    Raises TypeError that names parameters for another dtype and for a mixture.
    """
    if not params:
        return torch.float32
    first, first_spec = params[0]
    if first.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"{first_spec.name} is {first.dtype}: parameters must be all torch.float32, bfloat16 or float16"
        )
    for param, spec in params:
        if param.dtype != first.dtype:
            raise TypeError(
                f"{spec.name} is {param.dtype} and {first_spec.name} is {first.dtype}: all parameters must have one "
                "dtype"
            )
    return first.dtype


def _in_groups(params: Sequence[Declared]) -> list[list[Declared]]:
    """Group parameters that may share buckets: summed over the same axis, and replicated over the same other axes.

    A sum over three or more ranks rounds by an element's place in its bucket. Copies of a parameter must not drift
    apart. So the buckets that hold them must look the same on all ranks that do, however other parameters are cut.
    """
    groups: dict[tuple[tuple[str, ...], str, bool], list[Declared]] = {}
    for param, spec in params:
        key = (spec.replicated_over(), spec.replicas.name, spec.whole)
        groups.setdefault(key, []).append((param, spec))
    # Sorted by name, because other pipeline stages may have registered their copies in another order.
    for (replicated, _, _), group in groups.items():
        if _TIES in replicated:
            group.sort(key=lambda pair: pair[1].name)
    # Tied parameters come last: the gradient of an embedding becomes final at the very end of the backward pass.
    return [groups[key] for key in sorted(groups, key=lambda key: (_TIES in key[0], key))]


def _slots(params: Sequence[Declared], starts: Sequence[int], buckets: Sequence[Bucket]) -> list[Slot]:
    """The slot of each parameter. `params` and `starts` are in the same order."""
    slots = []
    for number, bucket in enumerate(buckets):
        for i in range(bucket.first, bucket.last):
            param, spec = params[i]
            end = starts[i + 1] if i + 1 < bucket.last else bucket.stop
            slots.append(Slot(param, spec, starts[i], starts[i] + param.numel(), end, number))
    return slots
