"""The rank grid: which ranks form which tensor, context, data and pipeline group.

`rank_groups` and `coordinates` are pure arithmetic, testable for thousands of ranks without a process.
`ParallelContext` is what the rest of the code receives: one `Axis` a direction of the grid, with its process group.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from megapar.flight import AxisLog, Flight

DEFAULT_ORDER = "tp-cp-dp-pp"


def coordinates(rank: int, sizes: Mapping[str, int], order: str = DEFAULT_ORDER) -> dict[str, int]:
    """Position of `rank` on each axis. The first axis named in `order` varies fastest."""
    position = {}
    for name in order.split("-"):
        rank, position[name] = divmod(rank, sizes[name])
    return position


def rank_groups(sizes: Mapping[str, int], axes: Sequence[str], order: str = DEFAULT_ORDER) -> list[tuple[int, ...]]:
    """All groups of ranks that differ only in their position on `axes`, as Megatron's RankGenerator lists them.

    Within a group ranks ascend, so the axis that comes first in `order` varies fastest.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes.values())):
        position = coordinates(rank, sizes, order)
        key = tuple(position[name] for name in order.split("-") if name not in axes)
        groups.setdefault(key, []).append(rank)
    return [tuple(group) for group in groups.values()]


@dataclass
class Traffic:
    """What went over one axis: calls and bytes sent by this rank (ring algorithms), by kind of operation."""

    calls: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)

    def record(self, operation: str, sent_bytes: int) -> None:
        self.calls[operation] = self.calls.get(operation, 0) + 1
        self.sent[operation] = self.sent.get(operation, 0) + sent_bytes

    def total(self) -> int:
        """Bytes sent so far, over all operations."""
        return sum(self.sent.values())


@dataclass(frozen=True)
class Axis:
    """One line of the rank grid: this rank's peers in one direction.

    `ranks` are global ranks, `rank` is the position among them. `group` is None at size 1: collectives are then no-ops.
    `log` keeps the newest operations; None at size 1.
    """

    name: str
    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    log: AxisLog | None = field(default=None, compare=False)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1


@dataclass(frozen=True)
class ParallelContext:
    """Where this rank stands. `grad` is dp x cp, over which gradients are summed and ZeRO shards are cut;
    `ends` holds the ranks of this pipeline on which copies of a tied embedding live, size 1 on all others.
    `flight` is where this rank writes what it is doing."""

    tp: Axis
    cp: Axis
    dp: Axis
    pp: Axis
    grad: Axis
    ends: Axis
    world: Axis
    device: torch.device
    flight: Flight = field(default_factory=Flight, compare=False)

    @property
    def axes(self) -> tuple[Axis, ...]:
        return (self.tp, self.cp, self.dp, self.pp, self.grad, self.ends, self.world)

    def traffic(self) -> dict[str, int]:
        """Bytes sent so far by this rank, by axis; axes that sent nothing are left out."""
        return {axis.name: axis.traffic.total() for axis in self.axes if axis.traffic.total()}


def single(device: torch.device | None = None, flight: Flight | None = None) -> ParallelContext:
    """The context of one process: every axis has size 1."""
    axes = {name: Axis(name) for name in ("tp", "cp", "dp", "pp", "grad", "ends", "world")}
    return ParallelContext(**axes, device=device or torch.device("cpu"), flight=flight or Flight())


def planned(
    rank: int,
    *,
    tp: int = 1,
    dp: int = 1,
    pp: int = 1,
    order: str = DEFAULT_ORDER,
    ends: Iterable[int] | None = None,
    device: torch.device,
) -> ParallelContext:
    """The context that `create` would give to `rank`, without process groups: on the meta device collectives give
    shapes alone."""
    sizes = {"tp": tp, "cp": 1, "dp": dp, "pp": pp}
    place = coordinates(rank, sizes, order)
    axes = {name: Axis(name, size, place[name], tuple(range(size))) for name, size in sizes.items()}
    axes["grad"] = Axis("grad", dp, place["dp"], tuple(range(dp)))
    axes["world"] = Axis("world", tp * dp * pp, rank, tuple(range(tp * dp * pp)))
    holders = _holders(ends, pp)
    axes["ends"] = Axis("ends")
    if place["pp"] in holders:
        axes["ends"] = Axis("ends", len(holders), holders.index(place["pp"]), tuple(range(len(holders))))
    return ParallelContext(**axes, device=device, flight=Flight())


def _holders(ends: Iterable[int] | None, pp: int) -> list[int]:
    """The pipeline ranks that hold a tied embedding, each once."""
    return sorted({0, pp - 1} if ends is None else set(ends))


def create(
    *,
    tp: int = 1,
    dp: int = 1,
    pp: int = 1,
    cp: int = 1,
    order: str = DEFAULT_ORDER,
    ends: Iterable[int] | None = None,
    device: torch.device | None = None,
    timeout_seconds: float = 300.0,
    flight: Flight | None = None,
) -> ParallelContext:
    """Make the process groups. A collective: every rank of an initialized world calls it with the same arguments.
    Collectives that take longer than `timeout_seconds` raise; torch's groups do not inherit it from the world's.
    `ends` are the pipeline ranks that hold a tied embedding: the first and the last one unless given.
    `flight` is where this rank logs its operations; without one it is memory of this process alone.

    Raises ValueError if the sizes do not multiply to the world size or `order` does not name each axis once.
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
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {tuple(range(world_size)): dist.group.WORLD}

    def axis(name: str, groups: list[tuple[int, ...]]) -> Axis:
        for ranks in groups:
            if len(ranks) > 1 and ranks not in made:
                made[ranks] = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_seconds))
        mine = next((ranks for ranks in groups if rank in ranks), (rank,))
        if len(mine) == 1:
            return Axis(name, ranks=mine)
        log = flight.axis(name, mine[0], len(mine), mine.index(rank))
        return Axis(name, len(mine), mine.index(rank), mine, made[mine], log=log)

    lines = rank_groups(sizes, ["pp"], order)
    return ParallelContext(
        tp=axis("tp", rank_groups(sizes, ["tp"], order)),
        cp=axis("cp", rank_groups(sizes, ["cp"], order)),
        dp=axis("dp", rank_groups(sizes, ["dp"], order)),
        pp=axis("pp", lines),
        grad=axis("grad", rank_groups(sizes, ["dp", "cp"], order)),
        ends=axis("ends", [tuple(line[place] for place in _holders(ends, pp)) for line in lines]),
        world=axis("world", [tuple(range(world_size))]),
        device=device or torch.device("cpu"),
        flight=flight,
    )
