"""This rank's place in the rank grid, and its connections to the other ranks.

The rest of the code receives a `ParallelContext`: one `Axis` for each direction of the grid (`megapar.base.grid`), with
its transport.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from megapar.base.errors import ConfigError
from megapar.base.expert_load import EVEN, ExpertLoad
from megapar.base.grid import Grid, Groups
from megapar.comm import host_meeting
from megapar.comm.axis import Axis
from megapar.comm.flight import Flight
from megapar.comm.store import StoreUser, part_of
from megapar.comm.transport import ALONE, PLANNED, Transport
from megapar.comm.transports import Transports
from megapar.linear.meanwhile import Meanwhile


@dataclass(frozen=True)
class ParallelContext:
    """The position of this rank in the grid, its device and its flight log.

    `grad` is dp x cp: gradients are summed and ZeRO shards are cut over it. `tied` has the ranks of this pipeline with
    copies of a tied embedding, and size 1 on all other ranks. `flight` is this rank's flight log. `cores` are the CPU
    cores for this rank. `expert_load` is read in plans alone.

    Experts lie on a grid of their own over the same ranks: experts are dealt over `ep`, and each is cut over `etp`. The
    ranks of `expert_grad` hold the same experts, and sum their gradients. The three have size 1 in a model without
    experts. `expert_gradients` has the weight gradients that this rank computes while rows of experts travel over `ep`.

    `plane` is tp x grad, the ranks with a part of a matrix, and `expert_plane` is etp x expert_grad. They are None
    unless an optimizer of the run joins the parts of matrices (`Grid.planes`), and have size 1 in one direction.
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
    cores: int = field(default=1, compare=False)
    expert_load: ExpertLoad = field(default=EVEN, compare=False)
    expert_gradients: Meanwhile = field(default_factory=Meanwhile, compare=False)
    plane: Axis | None = None
    expert_plane: Axis | None = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        dense = (self.tp, self.cp, self.dp, self.pp, self.grad)
        parts = [part for axis in (self.grad, self.expert_grad) for part in (axis.inner, axis.outer) if part]
        planes = [axis for axis in (self.plane, self.expert_plane) if axis]
        return (*dense, self.etp, self.ep, self.expert_grad, self.tied, self.world, *parts, *planes)

    def plane_of(self, grad_axis: str) -> tuple[Axis, Axis]:
        """Return the axis that cuts a matrix, and the axis of all ranks with parts of it.

        `grad_axis` names the axis of its gradient sum. Raises ConfigError if these ranks are not connected.
        """
        cut, grad, plane = self.tp, self.grad, self.plane
        if grad_axis == self.expert_grad.name:
            cut, grad, plane = self.etp, self.expert_grad, self.expert_plane
        if cut.size == 1:
            return cut, grad
        if grad.size == 1:
            return cut, cut
        if plane is None:
            raise ConfigError(
                f"a layer names an optimizer that joins the parts of a matrix on {cut.size} ranks of {cut.name} and "
                f"{grad.size} of {grad.name}, and this run has not connected them: name it in optimizers_of_layers of "
                "the model's options, or as optimizer.name"
            )
        return cut, plane

    def traffic(self) -> dict[str, int]:
        """Bytes sent so far by this rank, by name of the axis. Axes without traffic are left out."""
        return {axis.name: axis.traffic.total() for axis in self.axes if axis.traffic.total()}


def single(device: torch.device | None = None, flight: Flight | None = None, cores: int = 1) -> ParallelContext:
    """The context of one process: every axis has size 1."""
    axes = {name: Axis(name) for name in Grid().positions(0)}
    device = device or torch.device("cpu")
    return _context(axes, device, flight or Flight(), cores)


def planned(grid: Grid, rank: int, *, device: torch.device, transport: Transport = PLANNED) -> ParallelContext:
    """The context of `rank` as `create` would return it, but without process groups.

    Collectives work with it on the meta device alone, where they compute shapes. `transport` is that of all axes.
    """
    # Dry runs read sizes and positions alone, so `ranks` need not be the global ranks.
    axes = {}
    for name, (size, position) in grid.positions(rank).items():
        axes[name] = Axis(name, size, position, tuple(range(size)), transport if size > 1 else ALONE)
    return _context(axes, device, Flight())


def simulated(
    grid: Grid, rank: int, transport: Callable[[tuple[int, ...], int], Transport], load: ExpertLoad = EVEN
) -> ParallelContext:
    """The context of `rank` on the meta device, with the global ranks of each axis. Nothing is connected.

    `transport` makes the transport of an axis out of its ranks and of this rank's position among them.
    """
    axes = {}
    for name, groups in grid.groups().items():
        ranks = next((ranks for ranks in groups if rank in ranks), (rank,))
        axes[name] = Axis(name)
        if len(ranks) > 1:
            position = ranks.index(rank)
            axes[name] = Axis(name, len(ranks), position, ranks, transport(ranks, position))
    return _context(axes, torch.device("meta"), Flight(), load=load)


def _context(
    axes: Mapping[str, Axis], device: torch.device, flight: Flight, cores: int = 1, load: ExpertLoad = EVEN
) -> ParallelContext:
    """Return the context with these axes, and with no weight gradient of an expert left to compute."""
    return ParallelContext(
        **_with_parts(axes),
        device=device,
        flight=flight,
        cores=cores,
        expert_load=load,
        expert_gradients=Meanwhile(),
    )


def _with_parts(axes: Mapping[str, Axis]) -> dict[str, Axis]:
    """The axes of a context: those of gradients get their parts, if `axes` has them."""
    whole = {}
    for name, axis in axes.items():
        if f"{name}_shards" in axes:
            whole[name] = replace(axis, inner=axes[f"{name}_shards"], outer=axes[f"{name}_copies"])
        elif not name.endswith(("_shards", "_copies")):
            whole[name] = axis
    return whole


def create(
    grid: Grid,
    *,
    device: torch.device | None = None,
    timeout_seconds: float = 300.0,
    flight: Flight | None = None,
    use_shared_memory: bool = True,
    symmetric_tp: bool = False,
    gradient_ctas: int = 0,
    cores: int = 1,
) -> ParallelContext:
    """Make the process groups. A collective: every rank of an initialized world calls it with the same arguments.

    Collectives raise an error after `timeout_seconds`. `flight` is the log of this rank's operations, by default
    private. With `use_shared_memory`, the axes of a gloo job exchange through shared memory if all its ranks are on one
    host. With `symmetric_tp`, the GPUs of `tp` gather and sum by copies from each other's memory. `gradient_ctas` is
    that of `comm.process_groups.nccl_options`. `cores` are the CPU cores for this rank.

    Raises ValueError if the grid's sizes do not multiply to the world size, or if ep * etp does not divide
    tp * cp * dp.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if grid.world_size != world_size:
        sizes = " * ".join(f"{name}({size})" for name, size in grid.sizes.items())
        raise ValueError(f"{sizes} = {grid.world_size}, not {world_size} ranks")
    if world_size == 1:
        return single(device, flight, cores)
    flight, device = flight or Flight(), device or torch.device("cpu")
    rank, host = dist.get_rank(), None
    if use_shared_memory and dist.get_backend() == "gloo":
        store = part_of(dist.distributed_c10d._get_default_store(), StoreUser.EXCHANGE)
        host = host_meeting.meet(rank, store, dist.barrier, timeout_seconds)
    symmetric, timeout = ("tp",) * symmetric_tp, timedelta(seconds=timeout_seconds)
    transports = Transports(rank, world_size, timeout, device, host, symmetric, gradient_ctas)
    maker = _AxisMaker(rank, flight, transports)
    axes = {name: maker.make(name, groups) for name, groups in grid.groups().items()}
    return _context(axes, device, flight, cores)


class _AxisMaker:
    """Makes the axes of a rank, each with what it needs to communicate. All ranks make the same axes in one order."""

    def __init__(self, rank: int, flight: Flight, transports: Transports):
        self._rank = rank
        self._flight = flight
        self._transports = transports

    def make(self, name: str, groups: Groups) -> Axis:
        """The axis of this rank, given all groups of ranks in its direction."""
        self._transports.meet(name, groups)
        members = next((ranks for ranks in groups if self._rank in ranks), (self._rank,))
        if len(members) == 1:
            return Axis(name, ranks=members)
        position = members.index(self._rank)
        log = self._flight.axis(name, members[0], len(members), position)
        return Axis(name, len(members), position, members, self._transports.of(name, position, members, log), log=log)
