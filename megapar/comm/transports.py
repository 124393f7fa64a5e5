"""Chooses what moves the tensors of each axis."""

from collections.abc import Collection
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from megapar.base.grid import Groups
from megapar.comm.flight import AxisLog
from megapar.comm.process_groups import ProcessGroups
from megapar.comm.shared_memory import Host
from megapar.comm.transport import Transport
from megapar.comm.transport_gloo import Gloo
from megapar.comm.transport_shared_memory import SharedMemory
from megapar.comm.transport_symmetric import SymmetricMemory, TorchPeerMemory
from megapar.comm.transport_torch import TorchDistributed


class Transports:
    """The transports of a rank. All ranks call `meet` for the same axes in one order, then `of` for their own.

    `host` is what the CPU ranks of a host share, or None. The axes `symmetric` are those of GPUs of one host that read
    each other's memory. `gradient_ctas` is that of `process_groups.nccl_options`.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout: timedelta,
        device: torch.device,
        host: Host | None,
        symmetric: Collection[str],
        gradient_ctas: int = 0,
    ):
        self._rank = rank
        self._timeout_seconds = timeout.total_seconds()
        self._device = device
        self._host = host
        self._symmetric = symmetric
        # Every rank knows whether this host has all of them. Then no axis needs a group.
        self._needs_groups = host is None or len(host.peers) + 1 < world_size
        self._groups = ProcessGroups(rank, world_size, timeout, gradient_ctas)
        self._met = 0

    def meet(self, name: str, groups: Groups) -> None:
        """Connect the groups of ranks of the next axis. A collective over the world."""
        self._met += 1
        if self._needs_groups:
            self._groups.make(name, groups)

    def of(self, name: str, position: int, members: tuple[int, ...], log: AxisLog) -> Transport:
        """The transport of the axis that has met last, for this rank."""
        if self._host is not None and self._host.peers.issuperset(set(members) - {self._rank}):
            # The number of the axis is the same on all ranks, and so names its messages.
            return SharedMemory(self._host, self._met, position, members, log)
        group = self._groups.of(name, members)
        if name in self._symmetric:
            make = partial(TorchPeerMemory, group=group, device=self._device, timeout_seconds=self._timeout_seconds)
            return SymmetricMemory(group, position, members, log, make)
        kind = Gloo if dist.get_backend(group) == "gloo" else TorchDistributed
        return kind(group, position, members, log)
