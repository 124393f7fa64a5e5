"""What a parameter is, said once by the layer that creates it.

From `ParamSpec` alone follow initialisation, gradient sums, what the gradient norm counts, weight decay, ZeRO
ownership and the boxes of a checkpoint. A parameter without one is an error. Nothing is decided by isinstance, ndim
or a name pattern.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from megapar_kernels import apex
from megapar_kernels.launch import Implementation
from torch import Tensor, nn

from megapar.context import Axis


@dataclass(frozen=True)
class Init:
    """How a parameter starts: `normal` draws N(0, std) from (seed, name, row); the others are constant."""

    kind: Literal["normal", "zeros", "ones"]
    std: float = 0.0


ZEROS, ONES = Init("zeros"), Init("ones")


@dataclass(frozen=True)
class Piece:
    """One logical, layout-free tensor (a checkpoint's entry) and the part of it that this tp rank holds.

    This rank holds [start, stop) of dimension `dim` and owns [own_start, own_stop) of that: owned parts are disjoint
    over tp and cover the tensor, so owners count it in norms and save it. Replicated tensors have `dim` None and tp
    rank 0 owns them; a tied copy owns nothing. `shared`: some of the tensor is held by several tp ranks.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    start: int
    stop: int
    own_start: int
    own_stop: int
    shared: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])


@dataclass(frozen=True)
class ParamSpec:
    """Attached to a parameter, which is the concatenation of its pieces along their dimension, then inert padding rows.

    `tp_sum`: this rank's gradient is a partial sum over tp (norms and row biases under sequence parallel; rows that
    several tp ranks hold). `tie`: the parameter is one of two copies, on the first and last pipeline stage, whose
    gradients are summed over `ctx.ends`.
    """

    pieces: tuple[Piece, ...]
    init: Init
    decay: bool
    tp_sum: bool = False
    tie: bool = False

    @property
    def name(self) -> str:
        """The logical name, those of a fused parameter joined with '+'."""
        return "+".join(piece.name for piece in self.pieces)

    def segments(self) -> Iterator[tuple[Piece, int, int]]:
        """(piece, first, last) flat element range of each piece inside the contiguous parameter."""
        first = 0
        for piece in self.pieces:
            last = first + math.prod(piece.local_shape)
            yield piece, first, last
            first = last

    def owned_ranges(self) -> list[tuple[int, int]]:
        """Flat element ranges of the local parameter that count once over tp: in the norm, in a checkpoint."""
        ranges = []
        for piece, first, last in self.segments():
            if piece.dim in (None, 0):
                row = math.prod(piece.shape[1:])
                first, last = (
                    first + (piece.own_start - piece.start) * row,
                    first + (piece.own_stop - piece.start) * row,
                )
            elif piece.own_start == piece.own_stop:
                continue
            if last > first:
                ranges.append((first, last))
        return ranges


def cut(size: int, axis: Axis) -> tuple[int, int]:
    """[start, stop) of this rank when `size` things are dealt evenly in order over `axis`; sizes differ by one at
    most."""
    return axis.rank * size // axis.size, (axis.rank + 1) * size // axis.size


def replicated(name: str, shape: Sequence[int], axis: Axis) -> Piece:
    """A tensor that every rank of `axis` holds whole."""
    rows = shape[0] if axis.first else 0
    return Piece(name, tuple(shape), None, 0, shape[0], 0, rows, shared=axis.size > 1)


def sharded(name: str, shape: Sequence[int], dim: int, bounds: tuple[int, int]) -> Piece:
    """A tensor of which this rank holds [start, stop) along `dim`, shared with nobody."""
    return Piece(name, tuple(shape), dim, *bounds, *bounds)


def parameter(spec: ParamSpec, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialised parameter of the local `shape` that carries `spec`."""
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


class MainGrad:
    """Where a parameter's gradient is summed in fp32: a view into the flat gradient buffer, set as `param.main_grad`.

    Layers that compute their weight gradient themselves add it here with `add_outer`; for all others the gradient
    buffer's hook calls `add`. `on_added` runs after each addition, so that a full bucket can be reduced. `how` is the
    implementation of `add_outer` on 16-bit inputs: torch or apex.
    """

    def __init__(self, view: Tensor, on_added: Callable[[], None], how: Implementation = "torch"):
        self.view = view
        self._on_added = on_added
        self._how = how

    def add(self, grad: Tensor) -> None:
        self.view.add_(grad)
        self._on_added()

    def add_outer(self, grad_2d: Tensor, x_2d: Tensor, *, more: bool = False) -> None:
        """Add grad_2d^T @ x_2d ([tokens, out] and [tokens, in] to [out, in]); `more` of the same addition follows."""
        if grad_2d.dtype == torch.float32:
            self.view.addmm_(grad_2d.t(), x_2d)
        elif self._how == "apex":
            apex.add_outer(self.view, grad_2d, x_2d)
        elif grad_2d.is_cuda:
            torch.addmm(self.view, grad_2d.t(), x_2d, out_dtype=torch.float32, out=self.view)
        else:
            self.view.addmm_(grad_2d.t().float(), x_2d.float())
        if not more:
            self._on_added()

    def add_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Add `rows` [n, in] to the rows numbered `ids` [n]; an id may occur often."""
        self.view.index_add_(0, ids, rows.float())
        self._on_added()


def main_grad_of(param: Tensor) -> MainGrad | None:
    """The parameter's place in a gradient buffer, or None when it has none (then autograd's .grad is used)."""
    return getattr(param, "main_grad", None)
