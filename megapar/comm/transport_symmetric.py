"""Copies between the memories of a node's GPUs in place of NCCL's all-gathers and reduce-scatters.

NCCL's kernels take multiprocessors from the products beside them. The copy engines copy without any. torch's symmetric
memory (`torch.distributed._symmetric_memory`) lets each rank read what the others have put into theirs.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.comm.flight import AxisLog
from megapar.comm.pending import Pending
from megapar.comm.transport import put
from megapar.comm.transport_torch import TorchDistributed
from megapar.system.side_stream import SideStream


def offered_by_torch() -> bool:
    """Whether this build of torch has symmetric memory."""
    return find_spec("torch.distributed._symmetric_memory") is not None


class PeerMemory(Protocol):
    """Memory of equal size on each rank of an axis. All of these ranks can read all of it."""

    nbytes: int

    def view(self, position: int, x: Tensor, row: int = 0) -> Tensor:
        """The memory at a position of the axis, as a tensor like `x` that begins `row` rows of `x` behind its start."""
        ...

    def barrier(self) -> None:
        """On the current stream, wait until the streams of all ranks have come here."""
        ...


class TorchPeerMemory:
    """`PeerMemory` by torch. Making one is a collective over `group`. A barrier ends the process after `timeout`."""

    def __init__(self, nbytes: int, group: dist.ProcessGroup, device: torch.device, timeout_seconds: float):
        from torch.distributed import _symmetric_memory as symmetric_memory  # absent from some builds of torch

        self.nbytes = nbytes
        self._milliseconds = int(1000 * timeout_seconds)
        self._memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(self._memory, group.group_name)

    def view(self, position: int, x: Tensor, row: int = 0) -> Tensor:
        offset = row * x.shape[1:].numel()
        return self._handle.get_buffer(position, tuple(x.shape), x.dtype, offset)

    def barrier(self) -> None:
        self._handle.barrier(0, self._milliseconds)


class SymmetricMemory(TorchDistributed):
    """A `Transport` whose ranks read each other's memory in all-gathers and reduce-scatters. NCCL does all else.

    A rank puts its tensor into its peer memory, and copies from the others' once all have done so. `make` gives peer
    memory of at least so many bytes; all ranks call it for the same operations. Sums have the order of ranks, and are
    rounded once, to the dtype of the tensor.
    """

    name: ClassVar[str] = "symmetric memory"

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        ranks: tuple[int, ...],
        log: AxisLog | None,
        make: Callable[[int], PeerMemory],
    ):
        super().__init__(group, rank, ranks, log)
        self._make = make
        self._memory: PeerMemory | None = None
        self._outgrown: list[PeerMemory] = []  # a peer may still read it
        self._stream: SideStream | None = None

    def all_gather(self, x: Tensor, out: Tensor) -> Pending:
        return self.all_gather_slices(x, out.view(len(self.ranks), *x.shape).unbind())

    def all_gather_slices(self, x: Tensor, slices: Sequence[Tensor]) -> Pending:
        x = x.contiguous()
        memory = self._of_at_least(x.nbytes)

        def copy() -> None:
            memory.view(self.rank, x).copy_(x)
            put(x, slices[self.rank])
            memory.barrier()
            for peer in self._others():
                slices[peer].copy_(memory.view(peer, x))
            memory.barrier()  # the next operation overwrites what peers have read now

        return self._queued(copy, [x, *slices])

    def reduce_scatter(self, x: Tensor, out: Tensor) -> Pending:
        x = x.contiguous()
        memory = self._of_at_least(x.nbytes)
        rows = x.shape[0] // len(self.ranks)

        def copy() -> None:
            mine = x[self.rank * rows : (self.rank + 1) * rows]
            memory.view(self.rank, x).copy_(x)
            parts = x.new_empty(len(self.ranks), *mine.shape)
            parts[self.rank].copy_(mine)
            memory.barrier()
            for peer in self._others():
                parts[peer].copy_(memory.view(peer, mine, self.rank * rows))
            memory.barrier()
            torch.sum(parts, dim=0, out=out)

        return self._queued(copy, [x, out])

    def _others(self) -> list[int]:
        """The other positions. Each rank begins with its neighbor, so that no rank is read by all at once."""
        size = len(self.ranks)
        return [(self.rank + step) % size for step in range(1, size)]

    def _of_at_least(self, nbytes: int) -> PeerMemory:
        """Peer memory of at least so many bytes."""
        if self._memory is None or self._memory.nbytes < nbytes:
            if self._memory is not None:
                self._outgrown.append(self._memory)
            self._memory = self._make(nbytes)
        return self._memory

    def _queued(self, copy: Callable[[], None], tensors: list[Tensor]) -> Pending:
        """Queue `copy` on the stream of copies, behind what the current stream has queued so far."""
        self._stream = self._stream or SideStream(tensors[0].device)
        return Pending([self._stream.queue(copy)], tensors)
