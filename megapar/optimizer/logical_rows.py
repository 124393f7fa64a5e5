"""Where the elements of a shard lie in their logical tensors: what the random bits of an update follow from.

The bits hash (seed, name, element, update), so they are the same in every layout.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from megapar_kernels.rounding import Rows

from megapar.declare.params import Box, Sizes
from megapar.optimizer.visits import UpdateShard


def logical_rows(shard: UpdateShard, seed: int) -> Iterator[Rows]:
    """Where the elements of a shard lie in their logical tensors. `seed` decides their random bits."""
    elements = shard.stop - shard.start
    for slot in shard.slots:
        for piece, begin, _ in slot.spec.segments():
            key = name_key(seed, piece.name)
            for part in lines(piece.shape, piece.held):
                start = slot.start + begin + part.position - shard.start
                stop = min(start + part.height * part.width, elements)
                if start < elements and stop > 0:
                    yield Rows(start, stop, part.first, part.width, part.pitch, key)


def name_key(seed: int, name: str) -> int:
    """A 32-bit key of the logical tensor `name`."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest(), "little")


class TensorLines(NamedTuple):
    """`height` lines of `width` elements, one after the other from `position` on in a local tensor.

    The first begins at `first` in the flat logical tensor, and each of the others `pitch` elements after its neighbor.
    """

    position: int
    first: int
    height: int
    width: int
    pitch: int


def lines(shape: Sizes, box: Box) -> Iterator[TensorLines]:
    """Yield the elements of `box` in a row-major tensor of `shape` as `TensorLines`, in ascending order.

    They are one unless a box cuts two dimensions after the first.
    """
    if box.numel == 0:
        return
    cuts = [dim for dim in range(1, len(shape)) if box.size[dim] != shape[dim]]
    last = cuts[-1] if cuts else 0  # a line covers this dimension's extent, and those after it completely
    before = cuts[-2] if len(cuts) > 1 else 0  # the dimensions from here to `last` have one pitch
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    begin = sum(offset * stride for offset, stride in zip(box.offset, strides, strict=True))
    width = math.prod(box.size[last:])
    height = math.prod(box.size[before:last])
    pitch = strides[last - 1] if last else width
    for number, index in enumerate(itertools.product(*(range(size) for size in box.size[:before]))):
        first = begin + sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield TensorLines(number * height * width, first, height, width, pitch)
