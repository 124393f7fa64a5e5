"""The declaration of a parameter (`ParamSpec`), made once by the layer that creates it.

Initialization, gradient sums, gradient norm, weight decay, ZeRO ownership and the boxes of a checkpoint all follow from
`ParamSpec`. A parameter without one is an error. No code decides by isinstance, ndim or a name pattern.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megapar.context import Axis

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Init:
    """Initial values of a parameter. `normal` draws N(0, std) from (seed, name, row). The others are constant."""

    kind: Literal["normal", "zeros", "ones"]
    std: float = 0.0


ZEROS = Init("zeros")
ONES = Init("ones")


class Box(NamedTuple):
    """A rectangular part of a tensor: indices from `offset` to `offset + size`, with one number for each dimension."""

    offset: Sizes
    size: Sizes

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that cut the part out of the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.size, strict=True))


@dataclass(frozen=True)
class Piece:
    """The part of one logical tensor that this rank holds.

    No layout changes a logical tensor: it is one entry of a checkpoint.

    `held` is the box that this rank holds. `owned` is the box inside `held` that this rank counts in norms and writes
    to checkpoints. It is None if other ranks own all of `held`. Over the ranks of one replica, owned boxes are disjoint
    and cover the tensor.

    `replicated` names the axes on which all ranks hold the same box. `partial` names the axes over which this rank's
    gradient is only a part of the sum. Examples are norm weights under sequence parallelism, rows that several tensor
    ranks hold, and the two copies of a tied embedding.
    """

    name: str
    shape: Sizes
    held: Box
    owned: Box | None
    replicated: tuple[Axis, ...] = ()
    partial: tuple[Axis, ...] = ()

    @property
    def local_shape(self) -> Sizes:
        return self.held.size

    def is_partial_over(self, axis_name: str) -> bool:
        return any(axis.name == axis_name for axis in self.partial)


@dataclass(frozen=True)
class ParamSpec:
    """The declaration that is attached to a parameter.

    A parameter consists of `pieces`, one after the other in flat memory, and then of padding rows that nothing uses.
    The ranks of the axis `replicas` each compute the gradient of their own samples. Gradients are summed, and optimizer
    state is sharded, over that axis. `decay` says whether weight decay applies. `whole` means that the optimizer needs
    the parameter in one place, so that ZeRO never cuts it between two ranks.
    """

    pieces: tuple[Piece, ...]
    init: Init
    decay: bool
    replicas: Axis
    whole: bool = False

    @property
    def name(self) -> str:
        """The logical name. The names of the pieces of a fused parameter are joined with '+'."""
        return "+".join(piece.name for piece in self.pieces)

    def replicated_over(self) -> tuple[str, ...]:
        """Sorted names of the axes on which all ranks hold the same part of every piece."""
        # The pieces of a fused parameter may be cut in different ways.
        common = {axis.name for axis in self.pieces[0].replicated}
        for piece in self.pieces[1:]:
            common &= {axis.name for axis in piece.replicated}
        return tuple(sorted(common))

    def partial_axes(self) -> list[Axis]:
        """Axes of more than one rank over which some piece's gradient is only a part of the sum."""
        # By name, as several pieces may be partial over the same axis.
        axes = {axis.name: axis for piece in self.pieces for axis in piece.partial if axis.size > 1}
        return list(axes.values())

    def segments(self) -> Iterator[tuple[Piece, int, int]]:
        """Yield (piece, first, last) for each piece: its flat elements [first, last) in the contiguous parameter."""
        first = 0
        for piece in self.pieces:
            last = first + piece.held.numel
            yield piece, first, last
            first = last

    def owned_ranges(self) -> list[tuple[int, int]]:
        """Flat ranges [start, stop) of the local parameter that this rank owns (see `Piece.owned`)."""
        ranges = []
        for piece, first, _ in self.segments():
            if piece.owned is None:
                continue
            offsets = zip(piece.owned.offset, piece.held.offset, strict=True)
            inside = tuple(owned - held for owned, held in offsets)
            for start, stop in flat_ranges(piece.held.size, Box(inside, piece.owned.size)):
                ranges.append((first + start, first + stop))
        return ranges


def selected(spec: ParamSpec, patterns: Sequence[str]) -> bool:
    """Whether train.trainable with `patterns` trains this parameter. Without patterns it does.

    A fused parameter has one gradient, so the patterns must match all of its pieces.
    """
    matched = [any(fnmatchcase(piece.name, pattern) for pattern in patterns) for piece in spec.pieces]
    return not patterns or all(matched)


def flat_ranges(shape: Sizes, box: Box) -> Iterator[tuple[int, int]]:
    """Yield the elements of `box` in a row-major tensor of `shape` as flat ranges [start, stop), in ascending order."""
    if box.numel == 0:  # the product below would yield an empty range
        return
    # Elements are contiguous over the trailing dimensions that the box covers whole, and over the one before those.
    inner = len(shape)
    while inner > 0 and box.size[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = math.prod(box.size[outer:])
    begin = sum(offset * stride for offset, stride in zip(box.offset, strides, strict=True))
    for index in itertools.product(*(range(size) for size in box.size[:outer])):
        start = begin + sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield start, start + length


def cut(size: int, axis: Axis) -> tuple[int, int]:
    """Split range(size) into contiguous parts, one for each rank of `axis`. Returns this rank's [start, stop).

    The parts' lengths differ by at most one.
    """
    # Neighbors compute the same number for the border between them, so nothing is lost or held twice.
    return axis.rank * size // axis.size, (axis.rank + 1) * size // axis.size


def sharded(name: str, shape: Sequence[int], cuts: Mapping[int, tuple[int, int]]) -> Piece:
    """The piece [start, stop) along each dimension in `cuts`, whole along the others. No other rank holds it."""
    offset = [0] * len(shape)
    size = list(shape)
    for dim, (start, stop) in cuts.items():
        offset[dim] = start
        size[dim] = stop - start
    held = Box(tuple(offset), tuple(size))
    return Piece(name, tuple(shape), held, held)


def replicated(name: str, shape: Sequence[int], axis: Axis, *, partial: bool = False) -> Piece:
    """The piece of a tensor that every rank of `axis` holds whole. The first rank owns it.

    `partial` means that each rank's gradient is a part of the sum over `axis`. Else the gradients are equal.
    """
    return copied(sharded(name, shape, {}), axis, partial=partial)


def copied(piece: Piece, axis: Axis, *, partial: bool) -> Piece:
    """`piece` if every rank of `axis` holds it. The first rank owns it. `partial` is as in `replicated`."""
    # One owner only, so that norms count each element once and checkpoints hold it once.
    owned = piece.owned if axis.first else None
    partial_axes = (*piece.partial, axis) if partial else piece.partial
    return replace(piece, owned=owned, replicated=(*piece.replicated, axis), partial=partial_axes)


def parameter(spec: ParamSpec, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """Make an uninitialized parameter of the local `shape` and attach `spec` to it."""
    param = nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device=device))
    param.spec = spec  # type: ignore[attr-defined]
    return param


def spec_of(param: Tensor, name: str = "parameter") -> ParamSpec:
    """The spec of `param`. Raises TypeError that says `name` if the layer that created it has attached none."""
    spec = getattr(param, "spec", None)
    if not isinstance(spec, ParamSpec):
        raise TypeError(
            f"{name} of shape {tuple(param.shape)} has no ParamSpec: create it with megapar.params.parameter()"
        )
    return spec


class MainGrad(Protocol):
    """The fp32 sum of a parameter's gradients over the micro-batches: attribute `main_grad`, if the parameter has one.

    A layer that computes a weight gradient itself adds it to `view`, which has the shape of the parameter. It then
    calls `added`, once in each backward pass, and returns None to autograd. Read the attribute in the forward pass:
    under activation checkpointing the tensor that backward unpacks has no attributes.
    """

    view: Tensor

    def added(self) -> None:
        """Say that the gradient of this backward pass has been added to `view`."""

    def add(self, grad: Tensor) -> None:
        """Add `grad`, of the parameter's shape and any dtype, to `view`, and call `added`."""


def main_grad_of(param: Tensor) -> MainGrad | None:
    """The `main_grad` of `param`. None if it has none: its gradient then goes to autograd's .grad."""
    return getattr(param, "main_grad", None)


MAIN = "main"
"""The name of the weights in a `StateSlice` and in a checkpoint. An optimizer names the rest of its state."""


@dataclass(frozen=True)
class StateSlice:
    """Flat elements [start, stop) of a local parameter, and the optimizer state of these elements on this rank.

    `tensors` are 1-D, by name. `main` are the fp32 weights that the optimizer updates. The optimizer chooses the other
    names. A checkpoint stores each tensor as `NAME.TENSOR`.
    """

    param: Tensor
    spec: ParamSpec
    start: int
    stop: int
    tensors: Mapping[str, Tensor]

    @property
    def main(self) -> Tensor:
        return self.tensors[MAIN]
