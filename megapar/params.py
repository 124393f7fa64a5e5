"""What a parameter is, said once by the layer that creates it.

From `ParamSpec` alone follow initialization, gradient sums, what the gradient norm counts, weight decay, ZeRO
ownership and the boxes of a checkpoint. A parameter without one is an error. Nothing is decided by isinstance, ndim
or a name pattern.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megapar.context import Axis

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Init:
    """How a parameter starts: `normal` draws N(0, std) from (seed, name, row); the others are constant."""

    kind: Literal["normal", "zeros", "ones"]
    std: float = 0.0


ZEROS = Init("zeros")
ONES = Init("ones")


class Box(NamedTuple):
    """An axis-aligned part of a tensor: element indices from `offset` to `offset + size`, one number a dimension."""

    offset: Sizes
    size: Sizes

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index a whole tensor with these to get the part."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.size, strict=True))


@dataclass(frozen=True)
class Piece:
    """One logical tensor, which no layout changes (a checkpoint's entry), and the part of it on this rank.

    `held` is the box that this rank holds. `owned` is the box, inside `held`, that this rank counts in norms and writes
    to checkpoints; None if other ranks own all of it. Over the ranks of one replica, owned boxes are disjoint and cover
    the tensor.

    `replicated` names the axes all of whose ranks hold the same box. `partial` names the axes over which this rank's
    gradient is only a part of the sum: norm weights under sequence parallelism, rows that several tensor ranks hold,
    the two copies of a tied embedding.
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
    """Attached to a parameter: its pieces one after the other in flat memory, then inert padding rows.

    `replicas` is the axis whose ranks each compute the gradient of their own samples: gradients are summed, and
    optimizer state is sharded, over it. `decay` says whether weight decay applies. `whole`: its optimizer needs the
    parameter in one place, so that ZeRO never cuts it between two ranks.
    """

    pieces: tuple[Piece, ...]
    init: Init
    decay: bool
    replicas: Axis
    whole: bool = False

    @property
    def name(self) -> str:
        """The logical name, those of a fused parameter joined with '+'."""
        return "+".join(piece.name for piece in self.pieces)

    def replicated_over(self) -> tuple[str, ...]:
        """Names of the axes on which every rank holds the same of this parameter, sorted."""
        common = {axis.name for axis in self.pieces[0].replicated}
        for piece in self.pieces[1:]:
            common &= {axis.name for axis in piece.replicated}
        return tuple(sorted(common))

    def partial_axes(self) -> list[Axis]:
        """Axes of more than one rank over which some piece's gradient is only a part of the sum."""
        axes = {axis.name: axis for piece in self.pieces for axis in piece.partial if axis.size > 1}
        return list(axes.values())

    def segments(self) -> Iterator[tuple[Piece, int, int]]:
        """(piece, first, last) flat element range of each piece inside the contiguous parameter."""
        first = 0
        for piece in self.pieces:
            last = first + piece.held.numel
            yield piece, first, last
            first = last

    def owned_ranges(self) -> list[tuple[int, int]]:
        """Flat element ranges of the local parameter that this rank owns: in the norm, in a checkpoint."""
        ranges = []
        for piece, first, _ in self.segments():
            if piece.owned is None:
                continue
            inside = tuple(mine - held for mine, held in zip(piece.owned.offset, piece.held.offset, strict=True))
            for start, stop in flat_ranges(piece.held.size, Box(inside, piece.owned.size)):
                ranges.append((first + start, first + stop))
        return ranges


def flat_ranges(shape: Sizes, box: Box) -> Iterator[tuple[int, int]]:
    """The elements of `box` in a row-major tensor of `shape`, as flat ranges [start, stop) in order."""
    if box.numel == 0:
        return
    # The trailing dimensions that the box covers whole are one run together with the dimension before them.
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
    """Split range(size) into contiguous parts, one a rank of `axis`; returns this rank's [start, stop).

    The parts' lengths differ by at most one.
    """
    return axis.rank * size // axis.size, (axis.rank + 1) * size // axis.size


def sharded(name: str, shape: Sequence[int], cuts: Mapping[int, tuple[int, int]]) -> Piece:
    """A tensor of which this rank holds [start, stop) along each dimension of `cuts`, and shares nothing of it."""
    offset = [0] * len(shape)
    size = list(shape)
    for dim, (start, stop) in cuts.items():
        offset[dim] = start
        size[dim] = stop - start
    held = Box(tuple(offset), tuple(size))
    return Piece(name, tuple(shape), held, held)


def replicated(name: str, shape: Sequence[int], axis: Axis, *, partial: bool = False) -> Piece:
    """A tensor that every rank of `axis` holds whole; the first one owns it.

    `partial`: each rank's gradient is a part of the sum over `axis`; else the gradients are equal.
    """
    return copied(sharded(name, shape, {}), axis, partial=partial)


def copied(piece: Piece, axis: Axis, *, partial: bool) -> Piece:
    """`piece`, held alike by every rank of `axis`; the first one owns it. `partial` as in `replicated`."""
    return replace(
        piece,
        owned=piece.owned if axis.first else None,
        replicated=(*piece.replicated, axis),
        partial=(*piece.partial, axis) if partial else piece.partial,
    )


def parameter(spec: ParamSpec, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialized parameter of the local `shape` that carries `spec`."""
    param = nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device=device))
    param.spec = spec  # type: ignore[attr-defined]
    return param


def spec_of(param: Tensor, name: str = "parameter") -> ParamSpec:
    """The spec of `param`. Raises TypeError, naming it, if the layer that created it declared none."""
    spec = getattr(param, "spec", None)
    if not isinstance(spec, ParamSpec):
        raise TypeError(
            f"{name} of shape {tuple(param.shape)} has no ParamSpec: create it with megapar.params.parameter()"
        )
    return spec


class MainGrad(Protocol):
    """Where training sums a parameter's gradient in fp32 over the micro-batches: the attribute `main_grad` of the
    parameter, if it has one.

    A layer that computes a weight gradient itself adds it to `view`, of the parameter's shape, then calls `added`, once
    a backward pass, and gives autograd None. Read the attribute in the forward pass: under activation checkpointing the
    tensor that backward unpacks has no attributes.
    """

    view: Tensor

    def added(self) -> None:
        """Tell that this backward pass's gradient has been added to `view`."""

    def add(self, grad: Tensor) -> None:
        """Add `grad`, of the parameter's shape and any dtype, and tell so."""


def main_grad_of(param: Tensor) -> MainGrad | None:
    """The parameter's place among the flat gradients, or None when it has none (then autograd's .grad is used)."""
    return getattr(param, "main_grad", None)


@dataclass(frozen=True)
class StateSlice:
    """Flat elements [start, stop) of a local parameter, and what a rank keeps of them: 1-D tensors by name.

    `main` are the fp32 weights that the optimizer updates; the other names are the optimizer's own. A checkpoint stores
    each of them as `NAME.TENSOR`.
    """

    param: Tensor
    spec: ParamSpec
    start: int
    stop: int
    tensors: Mapping[str, Tensor]

    @property
    def main(self) -> Tensor:
        return self.tensors["main"]
