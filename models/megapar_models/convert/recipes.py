"""How tensors of Hugging Face are made of ours, and ours found in theirs: bits are moved, and no number is changed.

One of theirs may hold several of ours: whole ones below each other (a fused qkv_proj), or a few rows of each in turn
(grouped qkv, interleaved gate and up), and all of this for every expert. It may be transposed. A projection may have
the two numbers of a rotary pair beside each other. Ours has them half a head apart. One of ours may also be several of
theirs, one for each group of its rows (a norm's weight for each head).
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapar.base.errors import ConfigError
from megapar.checkpoint.format import Sizes
from megapar.checkpoint.load import Reader
from megapar.declare.params import MAIN, Box
from megapar_models.tensor_layouts import Packing, Pairs


class TensorPart(NamedTuple):
    """One of our tensors within one of theirs: the rows from `first` on of each group, of one expert or of all.

    `rows` is the number of rows of one group, over all of its parts. If ours is several of theirs, this is the part of
    ours in one of them: `shape` is that of the part, and `start` its first row in ours. `within` are the rows of theirs
    with the expert of ours, if experts lie below each other in one matrix, or the columns if they lie `beside` each
    other; then `expert` is None.
    """

    name: str
    shape: Sizes
    first: int
    rows: int
    groups: int
    expert: int | None
    transposed: bool
    by_group: bool
    pairs: Pairs | None
    start: int = 0
    axes: tuple[int, int] = (0, 0)
    within: slice | None = None
    beside: bool = False

    @property
    def box(self) -> Box:
        """The part of our tensor."""
        return Box((self.start, *(0 for _ in self.shape[1:])), self.shape)

    def inside(self, box: Box) -> Box | None:
        """What the part has of a box of our tensor, if anything."""
        start = max(box.offset[0], self.start)
        rows = min(box.offset[0] + box.size[0], self.start + self.shape[0]) - start
        return Box((start, *box.offset[1:]), (rows, *box.size[1:])) if rows > 0 else None

    def matrix(self, theirs: Tensor) -> Tensor:
        """The view of a box of theirs without further axes of size 1, and not transposed. Stacked experts: one's."""
        before, behind = self.axes
        for axis in (*(0,) * before, *(-1,) * behind):
            theirs = theirs.select(axis, 0)
        return theirs.t() if self.transposed else theirs

    def view(self, theirs: Tensor) -> Tensor:
        """The view [groups, rows of ours in a group, ...] of `theirs`, which is one expert's if they are stacked."""
        matrix = self.matrix(theirs)
        if self.within is not None:
            matrix = matrix[:, self.within] if self.transposed != self.beside else matrix[self.within]
        by_group = matrix if self.by_group else matrix.unflatten(0, (self.groups, self.rows))
        return by_group[:, self.first : self.first + self.shape[0] // self.groups]

    def put(self, theirs: Tensor, box: Box, values: Tensor) -> None:
        """Put a box `inside` the part with `values` into theirs, without a copy in between. After all boxes, `turn`."""
        box = Box((box.offset[0] - self.start, *box.offset[1:]), box.size)
        view = self.view(theirs if self.expert is None else theirs[self.expert])
        if self.groups == 1:
            view[0][box.slices].copy_(values)
            return
        rows = torch.arange(box.offset[0], box.offset[0] + box.size[0], device=view.device)
        in_group = self.shape[0] // self.groups
        index: tuple[Tensor | slice, ...] = (rows // in_group, rows % in_group, *box.slices[1:])
        view[index] = values.to(view.device, view.dtype)

    def turn(self, theirs: Tensor) -> None:
        """Put the rows of the whole part, which are in our order, into theirs if rotary pairs differ."""
        if self.pairs is not None:
            view = self.view(theirs if self.expert is None else theirs[self.expert])
            view.copy_(self.pairs.theirs(view.flatten(0, 1)).unflatten(0, (self.groups, -1)))

    def read(self, theirs: Tensor) -> Tensor:
        """The part of ours, fp32 and contiguous, from theirs (of one expert if they are stacked)."""
        ours = torch.empty(self.shape, dtype=torch.float32)
        ours.unflatten(0, (self.groups, -1)).copy_(self.view(theirs))
        if self.pairs is None:
            return ours
        return self.pairs.ours(ours)

    def cut(self, read: Callable[[Box], Tensor], box: Box) -> Tensor:
        """A box `inside` the part, fp32 and contiguous. `read` returns a box of theirs: the least that holds this one.

        Where rows of several of ours lie in turn, these are whole groups, and where rotary pairs differ, whole heads.
        """
        start = box.offset[0] - self.start
        low, high = start, start + box.size[0]
        if self.pairs is not None:
            width = self.pairs.width or self.shape[0]
            low, high = low // width * width, -(-high // width) * width
        in_group = self.shape[0] // self.groups
        before = 0  # rows of ours in front of `low` that are read too
        if self.groups == 1 and not self.by_group:
            offset: Sizes = (self.first + low,)
            size: Sizes = (high - low,)
        else:
            group, stop = low // in_group, -(-high // in_group)
            before = low - group * in_group
            offset, size = (group * self.rows,), ((stop - group) * self.rows,)
            if self.by_group:
                offset, size = (group, self.first), (stop - group, in_group)
        values = read(self._placed((*offset, *box.offset[1:]), (*size, *box.size[1:])))
        values = self.matrix(values if self.expert is None else values[0])
        if self.by_group:
            values = values.flatten(0, 1)
        elif self.groups > 1:
            values = values.unflatten(0, (-1, self.rows))[:, self.first : self.first + in_group].flatten(0, 1)
        values = values[before : before + high - low]
        if self.pairs is not None:
            values = self.pairs.ours(values)
        return values[start - low : start - low + box.size[0]].float().contiguous()

    def _placed(self, offset: Sizes, size: Sizes) -> Box:
        """A box of the matrix as a box of theirs."""
        if self.transposed:
            offset, size = offset[::-1], size[::-1]
        if self.within is not None:
            first = self.within.start
            offset = (offset[0], first + offset[1]) if self.beside else (first + offset[0], *offset[1:])
        before, behind = self.axes
        offset = (*(0,) * before, *offset, *(0,) * behind)
        size = (*(1,) * before, *size, *(1,) * behind)
        if self.expert is None:
            return Box(offset, size)
        return Box((self.expert, *offset), (1, *size))

    def write(self, reader: Reader, theirs: Tensor, state: str = MAIN) -> None:
        """Put the part, read from a native checkpoint, into theirs. There our tensor has this state, such as MAIN."""
        if self.expert is not None:
            theirs = theirs[self.expert]
        view = self.view(theirs)
        name = f"{state}.{self.name}"
        if self.groups == 1 and self.pairs is None:
            reader.fill(name, self.box.offset, view[0])  # without a copy in between
            return
        ours = reader.tensor(name)[self.start : self.start + self.shape[0]]
        if self.pairs is not None:
            ours = self.pairs.theirs(ours)
        view.copy_(ours.unflatten(0, (self.groups, -1)))


class Recipe(NamedTuple):
    """One of their tensors: its shape and its parts, in order. `constant` is its value if it has no part of ours."""

    shape: Sizes
    parts: tuple[TensorPart, ...]
    constant: float | None = None

    def of_experts(self) -> list["Recipe"]:
        """The recipes of the experts in a stack of all, in order. Empty if the tensor is no stack."""
        numbers = sorted({part.expert for part in self.parts if part.expert is not None})
        return [
            Recipe(self.shape[1:], tuple(part._replace(expert=None) for part in self.parts if part.expert == number))
            for number in numbers
        ]


def recipes(
    shapes: Mapping[str, Sizes],
    modules: Mapping[str, str],
    layouts: Mapping[str, Packing] | None = None,
    *,
    sizes: Any = None,
    pairs: Mapping[str, Pairs] | None = None,
) -> dict[str, Recipe]:
    """The recipe of each Hugging Face tensor by its name.

    `shapes` are the shapes of the model's logical tensors, in order. `modules` maps each of our modules to the Hugging
    Face module, with `*` for the numbers of layer and expert, or one of our tensors to the whole name of theirs. One of
    ours with the number of its layer goes before the one with `*`.
    Several of ours may have the same one. If theirs has no * for the expert, it is a stack of all experts. If it has a
    further *, ours is several of theirs, and the * is the number of the group. `layouts` are those of their modules or
    tensors, and `pairs` those of our modules. `sizes` has the options named by `Packing.groups`. Raises ConfigError if
    rows do not divide into groups.
    """
    found: dict[str, list[tuple[str, Sizes, str]]] = {}
    divided: dict[str, Recipe] = {}
    layout_of: dict[str, Packing] = {}
    for name, shape in shapes.items():
        numbers = starred(name)[1]
        theirs = their_name(name, modules)
        layout = (layouts or {}).get(theirs) or (layouts or {}).get(theirs.rpartition(".")[0], Packing())
        target = _numbered(theirs, numbers)
        if len(numbers) < theirs.count("*"):
            divided |= _divided(target, name, shape, getattr(sizes, str(layout.groups)), pairs_of(name, pairs or {}))
            continue
        expert = ""
        if len(numbers) > theirs.count("*"):
            expert = numbers[-1]
        found.setdefault(target, []).append((name, shape, expert))
        layout_of[target] = layout
    whole = {target: _recipe(target, ours, layout_of[target], sizes, pairs or {}) for target, ours in found.items()}
    return whole | divided


def _divided(target: str, name: str, shape: Sizes, groups: int, pairs: Pairs | None) -> dict[str, Recipe]:
    """The recipes of several of theirs with the rows of one of ours, a group each. `target` has a * for its number."""
    if shape[0] % groups:
        raise ConfigError(f"{target}: {shape[0]} rows do not divide by {groups} groups")
    rows = shape[0] // groups
    size = (rows, *shape[1:])
    return {
        _numbered(target, [str(group)]): Recipe(
            size, (TensorPart(name, size, 0, rows, 1, None, False, False, pairs, start=group * rows),)
        )
        for group in range(groups)
    }


def _recipe(
    target: str, ours: list[tuple[str, Sizes, str]], layout: Packing, sizes: Any, pairs: Mapping[str, Pairs]
) -> Recipe:
    parts: list[TensorPart] = []
    shape: Sizes = ()
    experts = 0
    ours = sorted(ours, key=lambda tensor: int(tensor[2] or 0))
    for number, (expert, of_expert) in enumerate(groupby(ours, key=lambda tensor: tensor[2])):
        members = list(of_expert)
        if layout.order:
            members.sort(key=lambda tensor: layout.order.index(tensor[0].split(".")[-2]))
        transposed = layout.transposed and len(members[0][1]) == 2  # a bias has nothing to transpose
        rows = sum(tensor[1][0] for tensor in members)
        groups = 1
        if layout.groups == "rows":
            groups = members[0][1][0]
        elif layout.groups:
            groups = layout.groups if isinstance(layout.groups, int) else getattr(sizes, layout.groups)
        if any(tensor[1][0] % groups for tensor in members):
            raise ConfigError(f"{target}: rows {[tensor[1][0] for tensor in members]} do not divide by {groups} groups")
        first = 0
        index, within = number if expert else None, None
        if layout.joined:
            high = members[0][1][1] if transposed != layout.beside else rows
            index, within = None, slice(number * high, (number + 1) * high)
        for name, size, _ in members:
            form = (transposed, layout.by_group, pairs_of(name, pairs), 0, layout.axes, within, layout.beside)
            parts.append(TensorPart(name, size, first, rows // groups, groups, index, *form))
            first += size[0] // groups
        shape = (rows, *members[0][1][1:])
        if layout.by_group:
            shape = (groups, rows // groups, *members[0][1][1:])
        if transposed:
            shape = shape[::-1]
        before, behind = layout.axes
        shape = (*(1 for _ in range(before)), *shape, *(1 for _ in range(behind)))
        experts += bool(expert)
    if layout.joined and layout.beside:
        shape = (shape[0], experts * shape[1])
    elif layout.joined:
        shape = (experts * shape[0], *shape[1:])
    elif experts:
        shape = (experts, *shape)
    return Recipe(shape, tuple(parts))


def their_name(name: str, modules: Mapping[str, str]) -> str:
    """Return the name of theirs, with * for numbers, that holds our tensor. A name of one layer goes before all layers.

    Raises KeyError if `modules` has none.
    """
    pattern = starred(name)[0]
    module, _, kind = name.rpartition(".")
    if found := modules.get(name) or modules.get(pattern):
        return found
    return f"{their_module(module, modules)}.{kind}"


def their_module(module: str, modules: Mapping[str, str]) -> str:
    """Return the module of theirs, with * for numbers, that holds our module. Raises KeyError if there is none."""
    return modules.get(module) or modules[starred(module)[0]]


def pairs_of(name: str, pairs: Mapping[str, Pairs]) -> Pairs | None:
    """Return the rotary pairs of one of our tensors: those of its module in its layer, or of that module in all."""
    module = name.rpartition(".")[0]
    return pairs.get(module) or pairs.get(starred(module)[0])


def starred(name: str) -> tuple[str, list[str]]:
    """Put * in the place of each numeric component of a dotted name. Returns the name and the numbers, in order."""
    components = name.split(".")
    numbers = [component for component in components if component.isdecimal()]
    return ".".join("*" if component.isdecimal() else component for component in components), numbers


def _numbered(pattern: str, numbers: Iterable[str]) -> str:
    """Put the numbers in the place of the stars: the inverse of `starred`."""
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern


class TensorPlace(NamedTuple):
    """The place of one of our tensors, or of a part of it: the name of theirs, and the part."""

    source: str
    part: TensorPart


def places(wanted: Mapping[str, Recipe]) -> dict[str, list[TensorPlace]]:
    """The places of each native tensor by its name, in the order of its rows: the inverse of the recipes."""
    found: dict[str, list[TensorPlace]] = {}
    for source, recipe in wanted.items():
        for part in recipe.parts:
            found.setdefault(part.name, []).append(TensorPlace(source, part))
    return found
