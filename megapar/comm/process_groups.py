"""The process groups of a grid's axes: as few as can be, in as few calls as can be."""

from datetime import timedelta

import torch.distributed as dist

from megapar.grid import GRADIENT_AXES, Groups


class ProcessGroups:
    """The process groups of a rank. Every rank calls `make` for the same axes in one order, and gets its own by `of`.

    Axes with the same ranks share one group, because each costs memory and connections. Axes of gradients share none
    with others: NCCL runs a group's operations in order, so an all-to-all would wait for the reduce-scatter before it.
    """

    def __init__(self, rank: int, world_size: int, timeout: timedelta):
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._groups: dict[tuple[bool, tuple[int, ...]], dist.ProcessGroup | None] = {}

    def make(self, axis: str, groups: Groups) -> None:
        """Make the groups of an axis that are not there yet. A collective over the world."""
        missing = []
        for ranks in groups:
            key = _is_of_gradients(axis), ranks
            if axis == "world" or len(ranks) < 2 or key in self._groups:
                continue
            # Steps begin and end with the group of all ranks, so one kind of axes may have it too.
            if len(ranks) == self._world_size and _world() not in self._groups.values():
                self._groups[key] = _world()
            else:
                missing.append(ranks)
        if missing and can_split():
            # One call: new_group would split the world of GPUs anew for each group, seconds to minutes for thousands.
            own = dist.split_group(split_ranks=[list(ranks) for ranks in missing], timeout=self._timeout)
            for ranks in missing:
                self._groups[_is_of_gradients(axis), ranks] = own if self._rank in ranks else None
            return
        for ranks in missing:
            # A new group does not inherit the timeout of the world.
            self._groups[_is_of_gradients(axis), ranks] = dist.new_group(list(ranks), timeout=self._timeout)

    def of(self, axis: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of an axis of this rank."""
        group = _world() if axis == "world" else self._groups[_is_of_gradients(axis), ranks]
        assert group is not None
        return group


def can_split() -> bool:
    """Whether torch can split the group of all ranks: NCCL can, if the group was made for the GPU of each rank."""
    return dist.get_backend() == "nccl" and _world().bound_device_id is not None


def _is_of_gradients(axis: str) -> bool:
    """Whether sums of gradients use the axis. With cp nobody communicates over dp; otherwise it has their ranks."""
    return axis == "dp" or axis.startswith(GRADIENT_AXES)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "groups are made in an initialized world"
    return world
