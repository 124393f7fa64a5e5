"""Muon (Jordan et al., 2024; scaled as in arXiv 2502.16982): the momentum of each matrix is made orthogonal.

The momentum is kept by element, in the slices of ZeRO. For a step each matrix becomes whole on one rank, its owner
(`megapar.optimizer.owners`). It is orthogonalized there, and every rank gets the elements that it updates. So an update
is the same in every layout, and no rank repeats the work of another one.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapar.base.grid import Grid
from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.data_parallel.layout import FlatLayout
from megapar.data_parallel.shards import ReducedGradients
from megapar.declare.context import ParallelContext
from megapar.declare.params import Sizes
from megapar.optimizer.base import clipped
from megapar.optimizer.owners import Fragment, MatrixPart, PlaneMember, Routes, parts_of
from megapar.optimizer.sgd import SGD
from megapar.optimizer.visits import UpdateArgs

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic. Singular values end between 0.5 and 1.5, not at 1 (kellerjordan.github.io/posts/muon)."""
ROUNDS = 5
_EPS = 1e-7  # beside the norm of a matrix that is zero
_BATCH_ELEMENTS = 1 << 24  # of matrices multiplied at one time: more would need memory, and be no faster


@dataclass(frozen=True)
class MuonOptions:
    """The options of Muon (`OptimizerConfig`)."""

    momentum: float
    nesterov: bool
    muon_scale: str
    muon_per_head: bool
    weight_decay: float


class Muon(SGD):
    """Muon for matrices. Without an orthogonal momentum it would be SGD with the rate of `scale`."""

    OPTIONS = MuonOptions
    MATRICES_ONLY = True
    JOINS_MATRICES = True
    OFFLOADS = False

    def __init__(self, updates: Any, weights: Any, gradients: ReducedGradients, ctx: ParallelContext, *rest: Any):
        super().__init__(updates, weights, gradients, ctx, *rest)
        self._gradients = gradients
        self._layout: FlatLayout = weights.layout
        self.sent_dtype = torch.float32
        if self.impl != "torch" or ctx.device.type == "cuda":
            self.sent_dtype = torch.bfloat16  # the iteration needs no more, see the source above
        self.axes = {slot.spec.grad_axis.name: slot.spec.grad_axis for slot in self.slots}
        """The axes of the gradient sums of matrices, by name."""
        self.routes: dict[str, Routes] = {}
        """By the name of the axis of gradients. They are found in the first step, or before it by a plan."""
        found = [each for name in self.axes for each in self._located(self._layout, name)]
        self._bucket_starts = {part.name: start for part, start in found}

    def parts(self, axis_name: str) -> list[MatrixPart]:
        """This rank's parts of matrices."""
        return self.parts_in(self._layout, axis_name)

    def parts_in(self, layout: FlatLayout, axis_name: str) -> list[MatrixPart]:
        """The parts of matrices of a rank with this layout."""
        return [part for part, _ in self._located(layout, axis_name)]

    def _located(self, layout: FlatLayout, axis_name: str) -> list[tuple[MatrixPart, int]]:
        return parts_of(layout, self.updates, axis_name, by_block=self.options.muon_per_head)

    @classmethod
    def matrix_products(cls, rows: int, columns: int) -> list[tuple[int, int, int]]:
        """Return the products of Newton-Schulz: in each round m x m x n, m x m x m and m x n x m, with m <= n."""
        m, n = sorted((rows, columns))
        return [(m, m, n), (m, m, m), (m, n, m)] * ROUNDS

    def join_in_plan(self, grid: Grid, layout_of_rank: Callable[[int], FlatLayout]) -> None:
        for name, axis in self.axes.items():
            cut, plane = self.ctx.plane_of(name)
            parts = {cut.rank: self.parts(name)}
            members = []
            for rank in plane.ranks:
                positions = grid.positions(rank)
                _, of_cut = positions[cut.name]
                _, of_grad = positions[name]
                if of_cut not in parts:
                    parts[of_cut] = self.parts_in(layout_of_rank(rank), name)
                members.append(PlaneMember.at(of_grad, axis, parts[of_cut], sharded=self._layout.sharded))
            self.routes[name] = Routes(members, plane.rank)

    def step(self, step: UpdateArgs) -> None:
        for visit in self.visits:
            self.direction(visit.shard, clipped(visit.grad, step))
        for name, axis in sorted(self.axes.items()):
            cut, plane = self.ctx.plane_of(name)
            if name not in self.routes:
                self.routes[name] = self._meet(axis, cut, plane)
            self._orthogonalize(self.routes[name], plane)
        for visit in self.visits:
            self.follow(visit.shard, visit.grad, step)
            self.round_weights(visit)

    def _meet(self, axis: Axis, cut: Axis, plane: Axis) -> Routes:
        """Ranks tell each other their parts, once. A collective.

        Raises RuntimeError, on all ranks, if two ranks of one axis of gradients have other parts.
        """
        parts = [part.to_json() for part in self.parts(axis.name)]
        digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()
        # The parts of the ranks of an axis of gradients are equal, so one of them tells its own.
        told = collectives.gather_json((cut.rank, axis.rank, digest, parts * axis.first), plane, self.ctx.device)
        firsts = {
            of_cut: (found, list(map(MatrixPart.from_json, of_first)))
            for of_cut, rank, found, of_first in told
            if not rank
        }
        for position, (of_cut, _, found, _) in enumerate(told):
            if found != firsts[of_cut][0]:
                raise RuntimeError(
                    f"rank {plane.ranks[position]} has other matrices, or other buckets of them, than the first rank "
                    f"of its axis {axis.name}, so their parts cannot be put together"
                )
        sharded = self._layout.sharded
        members = [PlaneMember.at(rank, axis, firsts[of_cut][1], sharded=sharded) for of_cut, rank, _, _ in told]
        return Routes(members, plane.rank)

    def _orthogonalize(self, routes: Routes, plane: Axis) -> None:
        """Replace this rank's slices of matrices, in the memory of gradients, by those of the orthogonal matrices."""
        sent = self._cat([self._slice(fragment) for fragment in _flat(routes.out)])
        arrived = collectives.all_to_all(sent, _counts(routes.out), _counts(routes.gathered), plane)
        matrices = _Matrices(routes.shapes, arrived)
        for fragment, values in _split(arrived, routes.gathered):
            matrices.put(fragment, values)
        matrices.orthogonalize(self.options.muon_scale)
        sent = self._cat([matrices.get(fragment) for fragment in _flat(routes.returned)])
        arrived = collectives.all_to_all(sent, _counts(routes.returned), _counts(routes.back), plane)
        for fragment, values in _split(arrived, routes.back):
            self._slice(fragment).copy_(values)

    def _slice(self, fragment: Fragment) -> Tensor:
        start = self._bucket_starts[fragment.part.name] + fragment.part.start
        return self._gradients.part(start + fragment.start, start + fragment.stop)

    def _cat(self, parts: Sequence[Tensor]) -> Tensor:
        if not parts:
            return torch.empty(0, dtype=self.sent_dtype, device=self.ctx.device)
        return torch.cat([part.to(self.sent_dtype) for part in parts])


class _Matrices:
    """The whole matrices owned by a rank, of these shapes by name, and of the dtype and device of `like`."""

    def __init__(self, shapes: dict[str, Sizes], like: Tensor):
        self._whole = {name: like.new_empty(shape) for name, shape in shapes.items()}
        self._columns: dict[tuple[str, Sizes, Sizes], Tensor] = {}  # flat parts with a part of the columns

    def _flat(self, part: MatrixPart) -> Tensor:
        """The elements of a part: a view of the matrix if they are whole rows."""
        whole = self._whole[part.name]
        if part.held.size[1] == whole.shape[1]:
            return whole[part.held.slices].view(-1)
        key = (part.name, *part.held)
        if key not in self._columns:
            self._columns[key] = whole[part.held.slices].reshape(-1)
        return self._columns[key]

    def put(self, fragment: Fragment, values: Tensor) -> None:
        self._flat(fragment.part)[fragment.start : fragment.stop] = values

    def get(self, fragment: Fragment) -> Tensor:
        return self._flat(fragment.part)[fragment.start : fragment.stop]

    def orthogonalize(self, scale: str) -> None:
        """Make all matrices orthogonal, and scale them."""
        for (name, offset, size), flat in self._columns.items():
            places = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
            self._whole[name][places] = flat.view(size)
        self._columns = {}
        for names in _batches({name: tuple(x.shape) for name, x in self._whole.items()}):
            found = orthogonalized(torch.stack([self._whole[name] for name in names]))
            found *= factor(scale, tuple(found.shape[1:]))
            for name, x in zip(names, found, strict=True):
                self._whole[name].copy_(x)


def _batches(shapes: dict[str, Sizes]) -> Iterator[list[str]]:
    """Names of matrices of one shape, each once."""
    of_shape: dict[Sizes, list[str]] = {}
    for name, shape in shapes.items():
        of_shape.setdefault(shape, []).append(name)
    for shape, names in of_shape.items():
        length = max(_BATCH_ELEMENTS // math.prod(shape), 1)
        for start in range(0, len(names), length):
            yield names[start : start + length]


def orthogonalized(x: Tensor) -> Tensor:
    """Matrices [b, m, n] with the same singular vectors and with singular values near 1, by Newton-Schulz.

    Zero rows and columns stay zero.
    """
    a, b, c = COEFFICIENTS
    transposed = x.shape[1] > x.shape[2]
    if transposed:
        x = x.mT
    x = x / (torch.linalg.matrix_norm(x.float(), keepdim=True) + _EPS).to(x.dtype)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if transposed else x


def factor(scale: str, shape: Sizes) -> float:
    """The factor of an orthogonal matrix [rows, columns], by muon_scale."""
    rows, columns = shape
    match scale:
        case "adam_rms":  # the RMS of AdamW's updates, so its rate fits (arXiv 2502.16982, section 2.2)
            return 0.2 * math.sqrt(max(rows, columns))
        case "spectral":  # arXiv 2310.17813
            return math.sqrt(rows / columns)
        case _:  # keller
            return math.sqrt(max(1.0, rows / columns))


def _flat(fragments: Sequence[Sequence[Fragment]]) -> list[Fragment]:
    return [fragment for of_rank in fragments for fragment in of_rank]


def _counts(fragments: Sequence[Sequence[Fragment]]) -> list[int]:
    return [sum(fragment.numel for fragment in of_rank) for of_rank in fragments]


def _split(values: Tensor, fragments: Sequence[Sequence[Fragment]]) -> Iterator[tuple[Fragment, Tensor]]:
    """Each fragment with its values."""
    listed = _flat(fragments)
    return zip(listed, values.split([fragment.numel for fragment in listed]), strict=True)
