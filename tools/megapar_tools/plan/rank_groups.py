"""The ranks of each group of a rank grid, found from the sizes of its axes without a process group."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from megapar.base.grid import EXPERT_AXES, EXPERT_ORDER, GRADIENT_AXES, TIED_AXIS, Grid, coordinates


class RankGroups:
    """The groups of ranks on the axes of `grid` (`Grid.groups`)."""

    def __init__(self, grid: Grid):
        self.grid = grid
        self._groups: dict[tuple[str, int], list[int]] = {}

    def with_shards_of(self, shard_ranks: int) -> "RankGroups":
        """Return the groups with another number of ranks that share a shard. All others are found once for both."""
        other = RankGroups(replace(self.grid, shard_ranks=shard_ranks))
        other._groups = self._groups
        return other

    def members(self, axis: str, rank: int) -> list[int]:
        """Return the ranks of the group of `rank` on an axis, ascending in their position there."""
        for name in GRADIENT_AXES:
            if axis in (f"{name}_shards", f"{name}_copies"):
                whole = self._whole_group(name, rank)
                size = self.grid.shard_ranks
                position = whole.index(rank)
                if axis.endswith("shards"):
                    first = position // size * size
                    return whole[first : first + size]
                return whole[position % size :: size]
        if axis == TIED_AXIS:
            line = self.members("pp", rank)
            return [line[position] for position in self.grid.with_embedding]
        if axis in EXPERT_AXES:
            return self._expert_members(axis, rank)
        if axis == "expert_plane":
            lines = [self._expert_members("expert_grad", member) for member in self._expert_members("etp", rank)]
            return sorted(member for line in lines for member in line)
        axes = {"grad": ("dp", "cp"), "plane": ("tp", "dp", "cp")}.get(axis, (axis,))
        place = coordinates(rank, self.grid.sizes, self.grid.order)
        return list(self._line(place, axes))

    def _whole_group(self, axis: str, rank: int) -> list[int]:
        """The group of `rank` on an axis of gradients, before it is split into shards and copies."""
        if (axis, rank) not in self._groups:
            self._groups[axis, rank] = self.members(axis, rank)
        return self._groups[axis, rank]

    def _line(self, position: Mapping[str, int], axes: tuple[str, ...]) -> Iterator[int]:
        """The ranks different from `position` on `axes` alone, ascending in their positions there."""
        lines = [0]
        stride = 1
        first = 0
        for name in self.grid.order.split("-"):
            size = self.grid.sizes[name]
            if name in axes:
                # The fastest axis comes first, so each later one repeats what is there.
                lines = [line + stride * at for at in range(size) for line in lines]
            else:
                first += stride * position[name]
            stride *= size
        for line in lines:
            yield first + line

    def _expert_members(self, axis: str, rank: int) -> list[int]:
        """The group of `rank` on an axis of the expert grid, a second factorization of the ranks of a stage."""
        if not self.grid.ep:
            return [rank]
        stage = sorted(self._line(coordinates(rank, self.grid.sizes, self.grid.order), ("tp", "cp", "dp")))
        sizes = self.grid.expert_sizes
        position = coordinates(stage.index(rank), sizes, EXPERT_ORDER)
        stride = 1
        for name in EXPERT_ORDER.split("-"):
            if name == axis:
                break
            stride *= sizes[name]
        first = stage.index(rank) - position[axis] * stride
        return [stage[first + at * stride] for at in range(sizes[axis])]
