"""Collectives between CPU ranks of one host, through shared memory (`megapar.comm.shared_memory`).

Each is a method that starts it, and a generator: it sends this rank's part, yields the messages it needs, and goes on
when they have arrived. `shared_memory.RunningExchange` runs it.

Reductions add the ranks' parts in the order of ranks. So a sum rounds the same way wherever an element lies, and the
same way as over gloo.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from megapar.comm.flight import AxisLog
from megapar.comm.pending import Pending, as_communication_errors
from megapar.comm.shared_memory import SMALL, Host, Packet, RunningExchange, Steps
from megapar.comm.transport import GroupCounts, Transfers, fold, parts_of_positions, put

# An all-reduce of more bytes, over three and more ranks, is a reduce-scatter and an all-gather: every rank would read
# the whole tensor of every other one. For fewer bytes the second exchange of messages costs more.
_DIRECT = 1 << 16


class SharedMemory:
    """A `Transport` through shared memory.

    `ranks` are global ranks, all on this host, and this one is at position `rank`. `channel` is the number of the axis,
    the same on all its ranks: it tells its messages from those of other axes.
    """

    name: ClassVar[str] = "shared memory"
    sends: ClassVar[bool] = True
    sorts_groups: bool = True

    def __init__(self, host: Host, channel: int, rank: int, ranks: tuple[int, ...], log: AxisLog | None):
        self.host = host
        self.channel = channel
        self.rank = rank
        self.ranks = ranks
        self.log = log

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, x: Tensor, op: str) -> Pending:
        if self.size > 2 and x.nbytes > _DIRECT:
            return self._start(_all_reduce_in_slices(x.view(-1), self, op))
        return self._start(_all_reduce_whole(x, self, op))

    def all_gather(self, x: Tensor, out: Tensor) -> Pending:
        return self.all_gather_slices(x, out.chunk(self.size))

    def all_gather_slices(self, x: Tensor, slices: Sequence[Tensor]) -> Pending:
        put(x, slices[self.rank])
        return self._start(_all_gather(slices, self))

    def reduce_scatter(self, x: Tensor, out: Tensor) -> Pending:
        return self._start(_reduce_scatter(x.contiguous().chunk(self.size), out, self))

    def all_to_all(self, x: Tensor, out: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Pending:
        return self.all_to_all_by_group(x, out, [[n] for n in sent_rows], [[n] for n in received_rows])

    def all_to_all_by_group(self, x: Tensor, out: Tensor, sent: GroupCounts, received: GroupCounts) -> Pending:
        outgoing, arriving = parts_of_positions(x.contiguous(), sent), parts_of_positions(out, received)
        return self._start(_all_to_all(outgoing, arriving, self))

    def exchange(self, sends: Transfers, receives: Transfers) -> Pending:
        return self._start(_exchange(sends, receives, self))

    def barrier(self) -> Pending:
        return self._start(_barrier(self)).followed_by(self._flush)

    def _start(self, steps: Steps) -> Pending:
        with as_communication_errors(self.log):
            return Pending([RunningExchange(steps, self.host)])

    def _flush(self) -> None:
        # Another rank may still wait for a packet that is queued here, and this process may end next.
        with as_communication_errors(self.log):
            self.host.flush()

    def peers(self) -> list[int]:
        """Positions of the other ranks."""
        return [position for position in range(self.size) if position != self.rank]

    def expect(self, position: int, phase: int = 0) -> Packet:
        """The next message of `phase` from `position`."""
        return self.host.expect(self.ranks[position], 2 * self.channel + phase)

    def send(self, x: Tensor, positions: Sequence[int], phase: int = 0) -> None:
        """Send a copy of `x` to each of `positions`.

        What an operation sends later than at its start has phase 1: another operation may have started in between on
        one rank and not on another, so their messages of phase 0 and 1 come in different orders.
        """
        channel = 2 * self.channel + phase
        if not positions:
            return
        if x.nbytes <= SMALL:
            # A copy: memory that numpy has seen can never be resized, which ZeRO-3 does to release weights. One element
            # of stride 0, as a sum's gradient has it, is contiguous for torch, and only this copy gives it a stride.
            copy = x.clone(memory_format=torch.contiguous_format).view(-1)
            payload = copy.view(torch.uint8).numpy().tobytes() if x.nbytes else b""
            for position in positions:
                self.host.send_small(self.ranks[position], channel, payload)
            return
        self._send_block(x.nbytes, lambda memory: memory.view(x.dtype).view(x.shape).copy_(x), channel, positions)

    def send_parts(self, parts: Sequence[Tensor], position: int) -> None:
        """Send `parts`, rows each, to `position`: one after the other in one message of phase 0."""
        nbytes = sum(part.nbytes for part in parts)
        if nbytes <= SMALL:
            self.send(torch.cat(list(parts)), [position])
            return

        def fill(memory: Tensor) -> None:
            _copy(parts, [memory.view(parts[0].dtype).view(-1, *parts[0].shape[1:])])

        self._send_block(nbytes, fill, 2 * self.channel, [position])

    def _send_block(
        self, nbytes: int, fill: Callable[[Tensor], object], channel: int, positions: Sequence[int]
    ) -> None:
        """Send `nbytes` to each of `positions`. `fill` writes them into memory, uint8, that the others map."""
        block = self.host.block(nbytes)
        fill(block.tensor()[:nbytes])
        for position in positions:
            self.host.send(self.ranks[position], channel, block, nbytes)
        self.host.let_go(block)


def _copy(parts: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    """Copy rows: from several parts into one place, or from one part into several places."""
    if len(places) == 1:
        torch.cat(list(parts), out=places[0])
        return
    (whole,) = parts
    for place, part in zip(places, whole.split([len(place) for place in places]), strict=True):
        place.copy_(part)


def _fold_arrived(arriving: Mapping[int, Packet], own_part: Tensor, out: Tensor, axis: SharedMemory, op: str) -> None:
    """Reduce this rank's tensor `own_part` and those received from the other positions into `out`."""
    parts = [
        arriving[position].content(own_part.dtype, own_part.shape) if position in arriving else own_part
        for position in range(axis.size)
    ]
    fold(parts, out, op)
    for message in arriving.values():
        message.release()


def _all_reduce_whole(x: Tensor, axis: SharedMemory, op: str) -> Steps:
    """Every rank sends its tensor to every other one."""
    axis.send(x, axis.peers())
    arriving = {position: axis.expect(position) for position in axis.peers()}
    yield list(arriving.values())
    _fold_arrived(arriving, x, x, axis, op)


def _all_reduce_in_slices(x: Tensor, axis: SharedMemory, op: str) -> Steps:
    """Every rank reduces one slice and sends the result to every other one. `x` is 1-D."""
    slices = x.tensor_split(axis.size)
    for position in axis.peers():
        axis.send(slices[position], [position])
    yield from _reduce_own(slices, slices[axis.rank], axis, op)
    axis.send(slices[axis.rank], axis.peers(), phase=1)
    yield from _receive([(slices[position], position) for position in axis.peers()], axis, phase=1)


def _reduce_own(slices: Sequence[Tensor], out: Tensor, axis: SharedMemory, op: str) -> Steps:
    """Reduce the parts of this rank's slice, sent by the other ranks, into `out`."""
    own_part = slices[axis.rank]
    arriving = {position: axis.expect(position) for position in axis.peers()}
    yield list(arriving.values())
    _fold_arrived(arriving, own_part, out, axis, op)


def _receive(receives: Sequence[tuple[Tensor, int]], axis: SharedMemory, phase: int = 0) -> Steps:
    """Receive into (tensor, position) pairs."""
    arriving = [axis.expect(position, phase) for _, position in receives]
    yield arriving
    for message, (x, _) in zip(arriving, receives, strict=True):
        x.copy_(message.content(x.dtype, x.shape))
        message.release()


def _reduce_scatter(slices: Sequence[Tensor], out: Tensor, axis: SharedMemory) -> Steps:
    """Sum `slices[i]` of all ranks on position i, into its `out`. `out` may be its own slice."""
    for position in axis.peers():
        axis.send(slices[position], [position])
    yield from _reduce_own(slices, out, axis, "sum")


def _all_gather(slices: Sequence[Tensor], axis: SharedMemory) -> Steps:
    """Send this rank's slice to all others, and receive theirs into their slices."""
    axis.send(slices[axis.rank], axis.peers())
    yield from _receive([(slices[position], position) for position in axis.peers()], axis)


def _all_to_all(
    outgoing: Sequence[Sequence[Tensor]], arriving: Sequence[Sequence[Tensor]], axis: SharedMemory
) -> Steps:
    """Send the parts outgoing[i] to position i, and receive what comes from there into arriving[i]."""
    # No empty messages: both ends of a link know the count, so both leave it out.
    for position in axis.peers():
        if any(map(len, outgoing[position])):
            axis.send_parts(outgoing[position], position)
    _copy(outgoing[axis.rank], arriving[axis.rank])  # after the sends, which other ranks wait for
    del outgoing  # the frame would keep the rows until others have arrived
    sources = [position for position in axis.peers() if any(map(len, arriving[position]))]
    messages = [axis.expect(position) for position in sources]
    yield messages
    for position, message in zip(sources, messages, strict=True):
        places = arriving[position]
        shape = sum(map(len, places)), *places[0].shape[1:]
        _copy([message.content(places[0].dtype, shape)], places)
        message.release()


def _exchange(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: SharedMemory) -> Steps:
    """Send and receive (tensor, position) pairs. It ends when all have been received."""
    for x, position in sends:
        axis.send(x, [position])
    yield from _receive(receives, axis)


def _barrier(axis: SharedMemory) -> Steps:
    """End when all ranks have begun it."""
    nothing = torch.empty(0)
    axis.send(nothing, axis.peers())
    yield from _receive([(nothing, position) for position in axis.peers()], axis)
