"""The rank grid: the ranks of each tensor, context, data and pipeline group.

All of it is arithmetic on sizes, so it can be tested for thousands of ranks without a process.
`megapar.declare.context` makes process groups of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DEFAULT_ORDER = "tp-cp-dp-pp"
EXPERT_ORDER = "etp-ep-expert_grad"
"""Rank order of the expert grid, fastest axis first. So the ranks with slices of one expert (etp) are neighbors."""
EXPERT_AXES = tuple(EXPERT_ORDER.split("-"))
GRADIENT_AXES = ("grad", "expert_grad")
"""The axes of gradient sums. `Grid.shard_ranks` splits them."""
TIED_AXIS = "tied"
"""Name of the axis of the pipeline ranks with copies of a tied embedding (`ParallelContext.tied`)."""

Groups = list[tuple[int, ...]]


@dataclass(frozen=True)
class Grid:
    """The sizes of the rank grid, and what else decides which ranks communicate.

    `order` names the dense axes, the fastest first. `ep` and `etp` are sizes of the expert grid. An `ep` of 0 stands
    for a model without experts. ZeRO shards over groups of `shard_ranks` neighbors on the axes of gradients, 0 for all
    ranks. `tied` are the pipeline ranks with copies of the embedding, by default the first and the last. With `planes`
    the ranks that have parts of a matrix can communicate all at once.

    Raises ValueError if `order` does not name each axis once.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 0
    etp: int = 1
    order: str = DEFAULT_ORDER
    shard_ranks: int = 0
    tied: tuple[int, ...] | None = None
    planes: bool = False

    def __post_init__(self) -> None:
        if sorted(self.order.split("-")) != sorted(self.sizes):
            raise ValueError(
                f"order {self.order!r} must name each of tp, cp, dp and pp once, such as {DEFAULT_ORDER!r}"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks along each axis of the dense grid, by its name."""
        return {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}

    @property
    def expert_sizes(self) -> dict[str, int]:
        """The number of ranks along each axis of the expert grid, by its name. All are 1 in a model without experts."""
        if not self.ep:
            return dict.fromkeys(EXPERT_AXES, 1)
        ranks = self.tp * self.cp * self.dp
        return {"etp": self.etp, "ep": self.ep, "expert_grad": ranks // (self.ep * self.etp)}

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def with_embedding(self) -> tuple[int, ...]:
        """The pipeline ranks with a tied embedding, sorted, each once."""
        return tuple(sorted({0, self.pp - 1} if self.tied is None else set(self.tied)))

    def groups(self) -> dict[str, Groups]:
        """For each axis, by name, all groups of ranks in its direction.

        The order of axes and groups is the same on every rank. In a model without experts the axes of the expert grid
        have no group. Raises ValueError if ep * etp does not divide tp * cp * dp.
        """
        groups = {name: rank_groups(self.sizes, [name], self.order) for name in self.sizes}
        groups["grad"] = rank_groups(self.sizes, ["dp", "cp"], self.order)
        for name in EXPERT_AXES:
            groups[name] = []
            if self.ep:
                groups[name] = expert_rank_groups(self.sizes, self.expert_sizes, [name], self.order)
        groups[TIED_AXIS] = [tuple(ranks[position] for position in self.with_embedding) for ranks in groups["pp"]]
        groups["world"] = [tuple(range(self.world_size))]
        for name in GRADIENT_AXES:
            if groups[name] and 0 < self.shard_ranks < len(groups[name][0]):
                groups[f"{name}_shards"], groups[f"{name}_copies"] = _split(groups[name], self.shard_ranks)
        if self.planes:
            groups["plane"] = groups["expert_plane"] = []
            if self._has_plane:
                groups["plane"] = rank_groups(self.sizes, ["tp", "cp", "dp"], self.order)
            if self._has_expert_plane:
                axes = ["etp", "expert_grad"]
                groups["expert_plane"] = expert_rank_groups(self.sizes, self.expert_sizes, axes, self.order)
        return groups

    @property
    def _has_plane(self) -> bool:
        """Whether a plane of tp x grad has two directions. Otherwise an axis of one of them has the same ranks."""
        return min(self.tp, self.dp * self.cp) > 1

    @property
    def _has_expert_plane(self) -> bool:
        sizes = self.expert_sizes
        return min(sizes["etp"], sizes["expert_grad"]) > 1

    def positions(self, rank: int) -> dict[str, tuple[int, int]]:
        """For each axis of `groups`, by name, the number of ranks in the group of `rank`, and its position there."""
        position = coordinates(rank, self.sizes, self.order)
        found = {name: (size, position[name]) for name, size in self.sizes.items()}
        found["grad"] = (self.dp * self.cp, self._index(position, ["dp", "cp"]))
        in_stage = self._index(position, ["tp", "cp", "dp"])
        in_expert_grid = coordinates(in_stage, self.expert_sizes, EXPERT_ORDER)
        for name, size in self.expert_sizes.items():
            found[name] = (size, in_expert_grid[name])
        found[TIED_AXIS] = (1, 0)
        if position["pp"] in self.with_embedding:
            found[TIED_AXIS] = (len(self.with_embedding), self.with_embedding.index(position["pp"]))
        found["world"] = (self.world_size, rank)
        for name in GRADIENT_AXES:
            size, index = found[name]
            if 0 < self.shard_ranks < size:
                found[f"{name}_shards"] = (self.shard_ranks, index % self.shard_ranks)
                found[f"{name}_copies"] = (size // self.shard_ranks, index // self.shard_ranks)
        if self.planes:
            found["plane"] = found["expert_plane"] = (1, 0)
            if self._has_plane:
                found["plane"] = (self.tp * self.dp * self.cp, in_stage)
            if self._has_expert_plane:
                (etp, in_etp), (copies, copy) = found["etp"], found["expert_grad"]
                found["expert_plane"] = (etp * copies, in_etp + etp * copy)
        return found

    def _index(self, position: Mapping[str, int], axes: Sequence[str]) -> int:
        """The position of a rank among the ranks differing from it on `axes` alone."""
        index = 0
        stride = 1
        for name in self.order.split("-"):
            if name in axes:
                index += stride * position[name]
                stride *= self.sizes[name]
        return index


def coordinates(rank: int, sizes: Mapping[str, int], order: str = DEFAULT_ORDER) -> dict[str, int]:
    """The position of `rank` on each axis, by name. The first axis named in `order` varies fastest."""
    position = {}
    for name in order.split("-"):
        rank, position[name] = divmod(rank, sizes[name])
    return position


def rank_groups(sizes: Mapping[str, int], axes: Sequence[str], order: str = DEFAULT_ORDER) -> Groups:
    """All groups of ranks differing only in their position on `axes`, in the order of Megatron's RankGenerator.

    Ranks ascend within a group, so among `axes` the first one in `order` varies fastest.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    # Ranks that agree on all other axes are in one group.
    for rank in range(math.prod(sizes.values())):
        position = coordinates(rank, sizes, order)
        key = tuple(position[name] for name in order.split("-") if name not in axes)
        groups.setdefault(key, []).append(rank)
    return [tuple(group) for group in groups.values()]


def expert_rank_groups(
    sizes: Mapping[str, int], expert_sizes: Mapping[str, int], axes: Sequence[str], order: str = DEFAULT_ORDER
) -> Groups:
    """All groups of ranks differing only in their position on `axes` of the expert grid.

    The expert grid is a second factorization of the ranks at one position on pp: etp x ep x expert_grad ranks, the same
    as tp x cp x dp (arXiv 2504.14960; expert_grad is its edp). `sizes` are those of the dense grid. `expert_sizes` has
    etp, ep and expert_grad. Raises ValueError if both products differ.
    """
    if math.prod(expert_sizes.values()) * sizes["pp"] != math.prod(sizes.values()):
        raise ValueError(f"the expert grid {dict(expert_sizes)} has other ranks than tp, cp and dp of {dict(sizes)}")
    positions = rank_groups(expert_sizes, axes, EXPERT_ORDER)
    groups = []
    for ranks in rank_groups(sizes, ["tp", "cp", "dp"], order):
        groups += [tuple(ranks[position] for position in group) for group in positions]
    return groups


def _split(groups: Groups, shard_ranks: int) -> tuple[Groups, Groups]:
    """Cut each group of ranks into groups of `shard_ranks` neighbors.

    Returns these groups, and the groups of ranks of one position in them.
    """
    inner = [group[i : i + shard_ranks] for group in groups for i in range(0, len(group), shard_ranks)]
    outer = [group[i::shard_ranks] for group in groups for i in range(shard_ranks)]
    return inner, outer
