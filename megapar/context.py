"""The rank grid: which ranks form each tensor, context, data and pipeline group.

`rank_groups` and `coordinates` are pure arithmetic, so they can be tested for thousands of ranks without a process. The
rest of the code receives a `ParallelContext`: one `Axis` for each direction of the grid, with its process group.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from megapar.comm import host_meeting
from megapar.comm.flight import AxisLog, Flight
from megapar.comm.shared_memory import Host
from megapar.comm.store import StoreUser, part_of
from megapar.comm.transport import ALONE, PLANNED, Transport
from megapar.comm.transport_gloo import Gloo
from megapar.comm.transport_shared_memory import SharedMemory
from megapar.comm.transport_torch import TorchDistributed

DEFAULT_ORDER = "tp-cp-dp-pp"
EXPERT_ORDER = "etp-ep-expert_grad"
"""Rank order of the expert grid, fastest axis first. So the ranks that share an expert are neighbors."""
_SPLIT = ("grad", "expert_grad")  # the axes that optimizer.shard_ranks splits
_EXPERT_AXES = tuple(EXPERT_ORDER.split("-"))


def coordinates(rank: int, sizes: Mapping[str, int], order: str = DEFAULT_ORDER) -> dict[str, int]:
    """The position of `rank` on each axis, by name. The first axis named in `order` varies fastest."""
    position = {}
    for name in order.split("-"):
        rank, position[name] = divmod(rank, sizes[name])
    return position


def rank_groups(sizes: Mapping[str, int], axes: Sequence[str], order: str = DEFAULT_ORDER) -> list[tuple[int, ...]]:
    """All groups of ranks that differ only in their position on `axes`, as Megatron's RankGenerator lists them.

    Ranks ascend within a group, so among `axes` the one that comes first in `order` varies fastest.
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
) -> list[tuple[int, ...]]:
    """All groups of ranks that differ only in their position on `axes` of the expert grid.

    The expert grid is a second factorization of the ranks that have one position on pp: etp x ep x expert_grad ranks,
    the same as tp x cp x dp (arXiv 2504.14960, where expert_grad is edp). `sizes` are those of the dense grid.
    `expert_sizes` has etp, ep and expert_grad. Raises ValueError if both products differ.
    """
    if math.prod(expert_sizes.values()) * sizes["pp"] != math.prod(sizes.values()):
        raise ValueError(f"the expert grid {dict(expert_sizes)} has other ranks than tp, cp and dp of {dict(sizes)}")
    positions = rank_groups(expert_sizes, axes, EXPERT_ORDER)
    groups = []
    for ranks in rank_groups(sizes, ["tp", "cp", "dp"], order):
        groups += [tuple(ranks[position] for position in group) for group in positions]
    return groups


@dataclass
class Traffic:
    """Calls, and bytes sent by this rank (with ring algorithms), over one axis, by name of the operation."""

    calls: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)

    def record(self, operation: str, sent_bytes: int) -> None:
        self.calls[operation] = self.calls.get(operation, 0) + 1
        self.sent[operation] = self.sent.get(operation, 0) + sent_bytes

    def total(self) -> int:
        """Bytes sent so far, over all operations."""
        return sum(self.sent.values())


TIED_AXIS = "tied"
"""Name of the axis of the pipeline ranks that hold copies of a tied embedding (`ParallelContext.tied`)."""


@dataclass(frozen=True)
class Axis:
    """One direction of the rank grid: the ranks that differ from this rank in this direction alone.

    `ranks` are global ranks. `rank` is this rank's position among them. `transport` moves tensors between the ranks.
    Without it an axis of several ranks is a plan's. `log` keeps the newest operations; it is None at size 1 and in a
    plan. `inner` and `outer` are set if the axis is split: into groups of neighbors, and the ranks that have one
    position in these groups.
    """

    name: str
    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    transport: Transport = field(default=ALONE, compare=False)
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    log: AxisLog | None = field(default=None, compare=False)
    inner: "Axis | None" = field(default=None, compare=False)
    outer: "Axis | None" = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.size > 1 and self.transport is ALONE:
            object.__setattr__(self, "transport", PLANNED)  # the only way to complete a frozen object

    @property
    def shards(self) -> "Axis":
        """The ranks over which ZeRO shards: all of them, or a group of neighbors (optimizer.shard_ranks)."""
        return self.inner or self

    @property
    def copies(self) -> "Axis":
        """The ranks that hold copies of this rank's shard: this rank alone, or one of each group of neighbors."""
        return self.outer or Axis(f"{self.name}_copies")

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1


@dataclass(frozen=True)
class ParallelContext:
    """The position of this rank in the grid, its device and its flight log.

    `grad` is dp x cp: gradients are summed and ZeRO shards are cut over it. `tied` holds the ranks of this pipeline
    that hold copies of a tied embedding, and has size 1 on all other ranks. `flight` is the log in which this rank
    writes what it is doing.

    Experts lie on a grid of their own over the same ranks (`expert_rank_groups`): experts are dealt over `ep`, each is
    cut over `etp`, and `expert_grad` are the ranks that hold the same experts, over which their gradients are summed.
    The three have size 1 in a model without experts.
    """

    tp: Axis
    cp: Axis
    dp: Axis
    pp: Axis
    grad: Axis
    etp: Axis
    ep: Axis
    expert_grad: Axis
    tied: Axis
    world: Axis
    device: torch.device
    flight: Flight = field(default_factory=Flight, compare=False)

    @property
    def axes(self) -> tuple[Axis, ...]:
        dense = (self.tp, self.cp, self.dp, self.pp, self.grad)
        parts = [part for axis in (self.grad, self.expert_grad) for part in (axis.inner, axis.outer) if part]
        return (*dense, self.etp, self.ep, self.expert_grad, self.tied, self.world, *parts)

    def traffic(self) -> dict[str, int]:
        """Bytes sent so far by this rank, by name of the axis. Axes over which nothing was sent are left out."""
        return {axis.name: axis.traffic.total() for axis in self.axes if axis.traffic.total()}


def single(device: torch.device | None = None, flight: Flight | None = None) -> ParallelContext:
    """The context of one process: every axis has size 1."""
    names = ("tp", "cp", "dp", "pp", "grad", "etp", "ep", "expert_grad", "tied", "world")
    axes = {name: Axis(name) for name in names}
    return ParallelContext(**axes, device=device or torch.device("cpu"), flight=flight or Flight())


def planned(
    rank: int,
    *,
    tp: int = 1,
    dp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 0,
    etp: int = 1,
    order: str = DEFAULT_ORDER,
    tied: Iterable[int] | None = None,
    shard_ranks: int = 0,
    device: torch.device,
) -> ParallelContext:
    """The context that `create` would give to `rank`, but without process groups.

    Collectives work with it on the meta device alone, where they compute shapes.
    """
    sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    position = coordinates(rank, sizes, order)

    # Dry runs read sizes and positions alone, so `ranks` need not be the global ranks.
    def axis(name: str, size: int, rank: int) -> Axis:
        return Axis(name, size, rank, tuple(range(size)))

    axes = {name: axis(name, size, position[name]) for name, size in sizes.items()}
    # Among dp and cp, the one that comes first in `order` varies fastest.
    axes["grad"] = axis("grad", dp * cp, _index(position, sizes, ["dp", "cp"], order))
    axes |= {name: Axis(name) for name in _EXPERT_AXES}
    if ep:
        expert_sizes = {"etp": etp, "ep": ep, "expert_grad": tp * cp * dp // (ep * etp)}
        in_expert_grid = coordinates(_index(position, sizes, ["tp", "cp", "dp"], order), expert_sizes, EXPERT_ORDER)
        for name in _EXPERT_AXES:
            axes[name] = axis(name, expert_sizes[name], in_expert_grid[name])
    axes["world"] = axis("world", tp * cp * dp * pp, rank)
    with_embedding = _with_embedding(tied, pp)
    axes[TIED_AXIS] = Axis(TIED_AXIS)
    if position["pp"] in with_embedding:
        axes[TIED_AXIS] = axis(TIED_AXIS, len(with_embedding), with_embedding.index(position["pp"]))
    for name in _SPLIT:
        whole = axes[name]
        if 0 < shard_ranks < whole.size:
            inner = axis(f"{name}_shards", shard_ranks, whole.rank % shard_ranks)
            outer = axis(f"{name}_copies", whole.size // shard_ranks, whole.rank // shard_ranks)
            axes[name] = replace(whole, inner=inner, outer=outer)
    return ParallelContext(**axes, device=device, flight=Flight())


def _split(groups: Sequence[tuple[int, ...]], shard_ranks: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Cut each group of ranks into groups of `shard_ranks` neighbors.

    Returns these groups, and the groups of ranks that have one position in them.
    """
    inner = [group[i : i + shard_ranks] for group in groups for i in range(0, len(group), shard_ranks)]
    outer = [group[i::shard_ranks] for group in groups for i in range(shard_ranks)]
    return inner, outer


def _index(position: Mapping[str, int], sizes: Mapping[str, int], axes: Sequence[str], order: str) -> int:
    """The position of a rank among the ranks that differ from it on `axes` alone."""
    index = 0
    stride = 1
    for name in order.split("-"):
        if name in axes:
            index += stride * position[name]
            stride *= sizes[name]
    return index


def _groups(
    sizes: Mapping[str, int], ep: int, etp: int, order: str, tied: Iterable[int] | None
) -> dict[str, list[tuple[int, ...]]]:
    """For each axis of a context, by name, all groups of ranks that differ in its direction.

    An `ep` of 0 stands for a model without experts: the axes of the expert grid then have no group.
    """
    pipelines = rank_groups(sizes, ["pp"], order)
    with_embedding = _with_embedding(tied, sizes["pp"])
    groups = {name: rank_groups(sizes, [name], order) for name in ("tp", "cp", "dp", "pp")}
    groups["grad"] = rank_groups(sizes, ["dp", "cp"], order)
    groups |= {name: [] for name in _EXPERT_AXES}
    if ep:
        expert_sizes = {"etp": etp, "ep": ep, "expert_grad": sizes["tp"] * sizes["cp"] * sizes["dp"] // (ep * etp)}
        for name in _EXPERT_AXES:
            groups[name] = expert_rank_groups(sizes, expert_sizes, [name], order)
    groups[TIED_AXIS] = [tuple(ranks[position] for position in with_embedding) for ranks in pipelines]
    groups["world"] = [tuple(range(math.prod(sizes.values())))]
    return groups


def _with_embedding(tied: Iterable[int] | None, pp: int) -> list[int]:
    """The pipeline ranks that hold a tied embedding, sorted, each once. None means the first and the last."""
    if tied is None:
        return sorted({0, pp - 1})
    return sorted(set(tied))


def create(
    *,
    tp: int = 1,
    dp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 0,
    etp: int = 1,
    order: str = DEFAULT_ORDER,
    tied: Iterable[int] | None = None,
    device: torch.device | None = None,
    timeout_seconds: float = 300.0,
    flight: Flight | None = None,
    use_shared_memory: bool = True,
    shard_ranks: int = 0,
) -> ParallelContext:
    """Make the process groups. A collective: every rank of an initialized world calls it with the same arguments.

    Collectives that take longer than `timeout_seconds` raise an error. `tied` are the pipeline ranks that hold a tied
    embedding, by default the first and the last. `flight` is the log of this rank's operations, by default private.
    With `use_shared_memory` the axes of a gloo job whose ranks are all on one host exchange through shared memory.
    `ep` and `etp` are sizes of the expert grid. An `ep` of 0 stands for a model without experts. ZeRO shards over
    groups of `shard_ranks` neighbors on the axes of gradients, 0 for all ranks.

    Raises ValueError if the sizes do not multiply to the world size, if ep * etp does not divide tp * cp * dp, or if
    `order` does not name each axis once.
    """
    sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    if sorted(order.split("-")) != sorted(sizes):
        raise ValueError(f"order {order!r} must name each of tp, cp, dp and pp once, such as {DEFAULT_ORDER!r}")
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if math.prod(sizes.values()) != world_size:
        raise ValueError(
            f"tp({tp}) * cp({cp}) * dp({dp}) * pp({pp}) = {math.prod(sizes.values())}, not {world_size} ranks"
        )
    if world_size == 1:
        return single(device, flight)
    flight = flight or Flight()
    rank = dist.get_rank()
    host = None
    if use_shared_memory and dist.get_backend() == "gloo":
        store = part_of(dist.distributed_c10d._get_default_store(), StoreUser.EXCHANGE)
        host = host_meeting.meet(rank, store, dist.barrier, timeout_seconds)
    axis = _AxisMaker(rank, world_size, timedelta(seconds=timeout_seconds), flight, host).make
    groups = _groups(sizes, ep, etp, order, tied)
    # Every rank makes the axes in the same order.
    axes = {name: axis(name, groups[name]) for name in groups}
    for name in _SPLIT:
        if groups[name] and 0 < shard_ranks < len(groups[name][0]):
            inner, outer = _split(groups[name], shard_ranks)
            # Named, so that every rank makes the two in this order.
            shards = axis(f"{name}_shards", inner)
            copies = axis(f"{name}_copies", outer)
            axes[name] = replace(axes[name], inner=shards, outer=copies)
    return ParallelContext(**axes, device=device or torch.device("cpu"), flight=flight)


def _world_group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "create needs an initialized world"
    return world


class _AxisMaker:
    """Makes the axes of a rank, each with what it needs to communicate. All ranks make the same axes in one order."""

    def __init__(self, rank: int, world_size: int, timeout: timedelta, flight: Flight, host: Host | None):
        self._rank = rank
        self._timeout = timeout
        self._flight = flight
        self._host = host
        # Every rank knows whether this host has all of them. Then no axis needs a group.
        self._needs_groups = host is None or len(host.peers) + 1 < world_size
        # Axes with the same ranks share one group: each group costs memory and connections.
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(world_size)): _world_group()}
        self._axes = 0

    def make(self, name: str, groups: list[tuple[int, ...]]) -> Axis:
        """The axis of this rank, given all groups of ranks that differ in its direction."""
        self._axes += 1
        # new_group is a collective over the world, so every rank makes the groups of all ranks in the same order.
        for ranks in groups:
            if self._needs_groups and len(ranks) > 1 and ranks not in self._groups:
                # A new group does not inherit the timeout of the world.
                self._groups[ranks] = dist.new_group(list(ranks), timeout=self._timeout)
        members = next((ranks for ranks in groups if self._rank in ranks), (self._rank,))
        if len(members) == 1:
            return Axis(name, ranks=members)
        position = members.index(self._rank)
        log = self._flight.axis(name, members[0], len(members), position)
        transport = self._transport(position, members, log)
        return Axis(name, len(members), position, members, transport, log=log)

    def _transport(self, position: int, members: tuple[int, ...], log: AxisLog) -> Transport:
        if self._host is not None and self._host.peers.issuperset(set(members) - {self._rank}):
            # The number of the axis is the same on all ranks, and so names its messages.
            return SharedMemory(self._host, self._axes, position, members, log)
        group = self._groups[members]
        kind = Gloo if dist.get_backend(group) == "gloo" else TorchDistributed
        return kind(group, position, members, log)
