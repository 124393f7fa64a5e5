"""The process groups of a grid's axes: as few as can be, in as few calls as can be."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megapar.base.grid import GRADIENT_AXES, Groups


class ProcessGroups:
    """The process groups of a rank. Every rank calls `make` for the same axes in one order, and gets its own by `of`.

    Axes with the same ranks share one group, because each costs memory and connections. Axes of gradients share none
    with others: NCCL runs a group's operations in order, so an all-to-all would wait for the reduce-scatter before it.
    `gradient_ctas` is that of `nccl_options`.
    """

    def __init__(self, rank: int, world_size: int, timeout: timedelta, gradient_ctas: int = 0):
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._gradient_ctas = gradient_ctas
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
        options = None
        if missing and dist.get_backend() == "nccl":
            options = nccl_options(_is_of_gradients(axis), self._gradient_ctas)
        if missing and can_split():
            # One call: new_group would split the world of GPUs anew for each group, seconds to minutes for thousands.
            split_ranks = [list(ranks) for ranks in missing]
            own = dist.split_group(split_ranks=split_ranks, timeout=self._timeout, pg_options=options)
            for ranks in missing:
                self._groups[_is_of_gradients(axis), ranks] = own if self._rank in ranks else None
            return
        for ranks in missing:
            # A new group does not inherit the timeout of the world.
            group = dist.new_group(list(ranks), timeout=self._timeout, pg_options=options)
            self._groups[_is_of_gradients(axis), ranks] = group

    def of(self, axis: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of an axis of this rank."""
        group = _world() if axis == "world" else self._groups[_is_of_gradients(axis), ranks]
        assert group is not None
        return group


def can_split() -> bool:
    """Whether torch can split the group of all ranks: NCCL can, if the group was made for the GPU of each rank."""
    return dist.get_backend() == "nccl" and _world().bound_device_id is not None


def nccl_options(of_gradients: bool, gradient_ctas: int = 0) -> Any:
    """Return NCCL's options for a group of axes of gradients, or of other axes.

    Products wait for what tp, cp, pp and ep send, so these groups get streams of high priority: their kernels take the
    next free SMs of the GPU. Sums of gradients and gathers of weights run beside products, and take `gradient_ctas`
    thread blocks at most (CTAs, one an SM); 0 leaves the number to NCCL.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=not of_gradients)
    if of_gradients and gradient_ctas:
        options.config.max_ctas = gradient_ctas
    return options


def world_is_of_gradients(groups: Mapping[str, Groups], world_size: int) -> bool:
    """Return whether `ProcessGroups.make` gives the world's group to axes of gradients, called for axes in this order.

    Without an axis over all ranks the group serves none, and True stands for a normal priority.
    """
    over_all = [axis for axis in groups if axis != "world" and (tuple(range(world_size)) in groups[axis])]
    return _is_of_gradients(over_all[0]) if over_all else True


def _is_of_gradients(axis: str) -> bool:
    """Whether sums of gradients use the axis. With cp nobody communicates over dp; otherwise it has their ranks."""
    return axis == "dp" or axis.startswith(GRADIENT_AXES)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "groups are made in an initialized world"
    return world
