"""Messages between the ranks of one host: large ones through shared memory, small ones through Unix sockets.

Every pair of ranks on a host has one socket. The sender of a large message copies it into a block of memory mapped by
both ranks, and tells the receiver through the socket where the message lies. The receiver reads the message there, and
says with its next message that the block is free again. So a message takes one copy, and no thread has to run for it.

The operating system orders sends and receives on a socket. So after reading the message of the socket, the receiver
sees everything the sender wrote before it. No rank ever polls memory written by another rank.

A waiting rank sleeps in the kernel. When a process ends, however it ends, the kernel closes its sockets, and the ranks
waiting for it find out at once. The memory has no name in the file system (Linux's memfd), so nothing is left behind,
and the size of /dev/shm does not matter.

All descriptors are opened when the ranks meet (megapar.comm.host_meeting): for each other rank its socket and its
memory, and this rank's own memory and epoll. Together these are two for each rank on the host, for any number of
blocks.
"""

import ctypes
import errno
import math
import mmap
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from megapar.system import limits
from megapar.system.environment import usable_cores

SMALL = 4096  # bytes: a message up to this size travels in the packet itself and needs no block
_ROUND = 1 << 16  # sizes of blocks are multiples of this, so that messages of similar sizes share them
_IDLE_BYTES = 64 << 20  # free blocks beyond this sum are given back to the system
_MOST_READ = 2  # messages of a link that have been read without the sender knowing
# Kind, number of blocks that have been read, channel, number of the block, bytes, and _MOST_READ blocks that were read.
_HEADER = struct.Struct(f"=BBHIQ{_MOST_READ}I")
_LARGEST_PACKET = _HEADER.size + SMALL
_SPIN_SECONDS = 1e-4  # a rank with a core of its own looks for messages this long before it sleeps
_OFFSET = struct.Struct("=Q")
_MAP_FIXED = 0x10  # of Linux's mman.h, on every architecture that torch supports


class _Kind(IntEnum):
    """What a packet says."""

    MAP = 0  # a new block, of so many bytes; its offset in the sender's memory follows in this packet
    DATA = 1  # a message that lies in a block
    SMALL = 2  # a message that follows in this packet
    FREE = 3  # no message: only numbers of blocks that have been read


@dataclass(frozen=True)
class Connection:
    """The connection to another rank: a socket, and a descriptor of the memory for the blocks of the other rank."""

    socket: socket.socket
    memory: int

    def close(self) -> None:
        self.socket.close()
        os.close(self.memory)


class _Block:
    """A range of this rank's memory, also mapped by others.

    It is free when `readers` is 0 and its writer has let it go. `memory` is the descriptor of the rank's memory.
    """

    def __init__(self, number: int, memory: int, offset: int, size: int):
        self.number = number
        self.offset = offset
        self.size = size
        self._memory = memory
        self.reserve()
        self._range = _map(memory, offset, size)
        self.readers = 0
        self.held = False  # by the work that fills it
        self.known_to: set[int] = set()  # ranks that have mapped it

    def reserve(self) -> None:
        """Get the pages of this block from the system. Raises MemoryError if there are not so many."""
        # Reserved before they are written: memory that runs out is an error here, and would be a SIGBUS at the first
        # write.
        with limits.named():
            try:
                os.posix_fallocate(self._memory, self.offset, self.size)
            except OSError as error:
                if error.errno not in (errno.ENOMEM, errno.ENOSPC):
                    raise
                text = f"no {self.size:,} bytes of memory to share with other ranks: {error.strerror}"
                raise MemoryError(text) from error

    def give_back(self) -> None:
        """Give the pages of this block back to the system. It keeps its range, where all ranks have mapped it."""
        self._range.madvise(mmap.MADV_REMOVE)

    def tensor(self) -> Tensor:
        """The whole block: uint8 [size]."""
        return torch.frombuffer(self._range, dtype=torch.uint8)


def _map(memory: int, offset: int, size: int) -> mmap.mmap:
    """Map a range of the memory with the descriptor `memory`. Raises OSError if there is no room."""
    # Python's mmap keeps a copy of the descriptor, and a rank maps hundreds of blocks. So Python maps nothing in
    # particular, the system puts the memory into the same place, and Python unmaps it in the end.
    place = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(place))
    # Populated: a page that is touched for the first time would cost a fault.
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE | _MAP_FIXED
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    if library.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, memory, offset) != address:
        number = ctypes.get_errno()
        raise OSError(number, f"no {size:,} bytes of memory to share with other ranks: {os.strerror(number)}")
    return place


class Packet:
    """A message to this rank, expected or arrived. Read `content` after it has arrived, then call `release`."""

    def __init__(self, link: "_Link"):
        self._link = link
        self._memory: mmap.mmap | bytearray | None = None  # None until the message has arrived
        self._block = -1  # -1 for a message that needs no block
        self._offset = 0
        self._bytes = 0

    @property
    def arrived(self) -> bool:
        return self._memory is not None

    @property
    def sender(self) -> int:
        """The sending rank."""
        return self._link.rank

    @property
    def lost(self) -> bool:
        """Whether it has not arrived and never will, because its sender has ended."""
        return self._link.closed and not self.arrived

    def content(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """The content as a tensor of this dtype and shape. It is valid until `release`.

        Raises RuntimeError if it has another number of bytes.
        """
        assert self._memory is not None
        count = math.prod(shape)
        expected = count * dtype.itemsize
        if self._bytes != expected:
            raise RuntimeError(
                f"rank {self._link.rank} sent {self._bytes} bytes where this rank expects {expected}: the ranks run "
                "different operations"
            )
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._offset).view(tuple(shape))

    def release(self) -> None:
        """Tell the sender that the content has been read."""
        if self._block >= 0:
            self._link.has_read(self._block)
        self._memory = bytearray()

    def fill(self, memory: mmap.mmap | bytearray, block: int, offset: int, size: int) -> None:
        """Note its arrival: `size` bytes of `memory` at `offset`, in the sender's `block` (-1 for none)."""
        self._memory = memory
        self._block = block
        self._offset = offset
        self._bytes = size


class _Link:
    """The connection to one other rank of this host."""

    def __init__(self, rank: int, connection: Connection, poll: select.epoll):
        self.rank = rank
        self.closed = False
        self._socket = connection.socket
        self._memory = connection.memory
        self._socket.setblocking(False)
        self._poll = poll
        self._poll.register(self._socket, select.EPOLLIN)
        self._unsent: deque[bytes] = deque()  # packets that the socket has not taken
        self._blocks: dict[int, mmap.mmap] = {}  # the other rank's blocks
        # By channel: messages that have arrived and that nobody expects yet, and those that are expected.
        self._early: dict[int, deque[Packet]] = {}
        self._expected: dict[int, deque[Packet]] = {}
        self._read: list[int] = []  # blocks of the other rank that were read, which it does not know yet
        self.on_free: Callable[[int], None] = lambda block: None

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: _Kind, channel: int = 0, block: int = 0, size: int = 0, payload: bytes = b"") -> None:
        """Send a packet, or queue it if the socket is full. It also lists the blocks read since the last packet."""
        number = len(self._read)
        read = self._read + [0] * (_MOST_READ - number)
        self._read = []
        self._unsent.append(_HEADER.pack(kind, number, channel, block, size, *read) + payload)
        if self.closed:
            self._unsent.clear()
            return
        if len(self._unsent) == 1 and not self.flush():
            self._poll.modify(self._socket, select.EPOLLIN | select.EPOLLOUT)

    def has_read(self, block: int) -> None:
        """Note that a message in `block` of the other rank has been read."""
        self._read.append(block)
        # Most often the next message to the other rank carries the number, which saves a packet. If none leaves, its
        # memory must not stay in use.
        if len(self._read) == _MOST_READ:
            self.send(_Kind.FREE)

    def send_block(self, block: _Block) -> None:
        """Make the other rank map `block`."""
        self.send(_Kind.MAP, block=block.number, size=block.size, payload=_OFFSET.pack(block.offset))

    def flush(self) -> bool:
        """Send queued packets. Returns whether all have left."""
        while self._unsent and not self.closed:
            try:
                self._socket.send(self._unsent[0])
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                # The other rank has ended. What it sent before can still be read, so the link is not closed yet.
                self._unsent.clear()
                return True
            self._unsent.popleft()
        return True

    def expect(self, channel: int) -> Packet:
        """The next message of `channel`. It may not have arrived yet."""
        early = self._early.get(channel)
        if early:
            return early.popleft()
        message = Packet(self)
        self._expected.setdefault(channel, deque()).append(message)
        return message

    def on_event(self, event: int) -> None:
        """Handle what epoll reports."""
        if event & select.EPOLLOUT and self.flush():
            self._poll.modify(self._socket, select.EPOLLIN)
        if event & ~select.EPOLLOUT:
            self.receive()

    @property
    def has_unsent(self) -> bool:
        """Whether packets wait for the other rank to read earlier ones."""
        return bool(self._unsent)

    def receive(self) -> None:
        """Receive one packet. If the other rank has ended and all its packets have been received, close the link."""
        try:
            packet = self._socket.recv(_LARGEST_PACKET)
        except BlockingIOError:
            return
        except ConnectionResetError:
            return  # the other rank has ended without reading all; what it had sent comes next
        if not packet:
            self._close()
            return
        kind, number, channel, block, size, *read = _HEADER.unpack_from(packet)
        for free in read[:number]:
            self.on_free(free)
        if kind == _Kind.DATA:
            self._arrive(channel).fill(self._blocks[block], block, 0, size)
        elif kind == _Kind.SMALL:
            self._arrive(channel).fill(bytearray(packet), -1, _HEADER.size, size)
        elif kind == _Kind.MAP:
            (offset,) = _OFFSET.unpack_from(packet, _HEADER.size)
            self._blocks[block] = _map(self._memory, offset, size)

    def _arrive(self, channel: int) -> Packet:
        """The message object for the next packet of `channel`."""
        expected = self._expected.get(channel)
        if expected:
            return expected.popleft()
        message = Packet(self)
        self._early.setdefault(channel, deque()).append(message)
        return message

    def _close(self) -> None:
        if not self.closed:
            self.closed = True
            self._poll.unregister(self._socket)
            self._unsent.clear()


Steps = Generator[Sequence[Packet], None, None]
"""The steps of an operation: it sends, yields the messages it needs, and goes on when they have arrived."""


class RunningExchange:
    """Runs `steps`. It takes no thread: it goes on whenever this rank sends or waits and its messages have arrived."""

    def __init__(self, steps: Steps, host: "Host"):
        self._steps = steps
        self._host = host
        self.needs: Sequence[Packet] = ()
        """The messages it needs before it can go on; empty if it has ended."""
        self.go_on()
        if self.needs:
            host.start(self)

    def go_on(self) -> None:
        """Run the exchange until it needs more messages. Called when all that it needs have arrived."""
        # Steps may yield no messages: then there is nothing to wait for, and they go on at once.
        self.needs = next((messages for messages in self._steps if messages), ())

    def is_completed(self) -> bool:
        """Whether it has ended. It goes on if its messages have arrived."""
        if self.needs:
            self._host.progress(0.0)
        return not self.needs

    def wait(self) -> None:
        """Wait until it has ended. Raises RuntimeError if a rank it needs has ended, or is too late."""
        if self.needs:
            self._host.wait(self)


class Host:
    """The ranks of this host, as one of them sees them: sends messages to the others and waits for theirs.

    `memory` is a descriptor of the memory for this rank's blocks. Only one thread may call the methods.
    """

    def __init__(self, rank: int, connections: Mapping[int, Connection], memory: int, timeout_seconds: float):
        self.rank = rank
        self._memory = memory
        self._memory_bytes = 0  # the ranges of all blocks
        self._timeout_seconds = timeout_seconds
        self._poll = select.epoll()
        self._links = {peer: _Link(peer, connection, self._poll) for peer, connection in connections.items()}
        self._by_descriptor = {link.fileno(): link for link in self._links.values()}
        for link in self._links.values():
            link.on_free = self._on_free
        self._blocks: dict[int, _Block] = {}
        self._free: list[_Block] = []  # those that were used last come last
        self._given_back: list[_Block] = []  # free blocks without pages
        self._operations: list[RunningExchange] = []  # operations that have not ended, oldest first
        # Waking up takes longer than a small message. With fewer cores than ranks, the core is the other rank's.
        self._spin_seconds = _SPIN_SECONDS if len(self._links) + 1 <= usable_cores() else 0.0
        for descriptor in (memory, *(connection.memory for connection in connections.values())):
            weakref.finalize(self, os.close, descriptor)

    @property
    def peers(self) -> frozenset[int]:
        """The other ranks of this host."""
        return frozenset(self._links)

    def block(self, size: int) -> _Block:
        """A block of at least `size` bytes. The caller calls `let_go` when it needs it no longer."""
        block = _smallest_fitting(self._free, size)
        if block is None:
            block = _smallest_fitting(self._given_back, size)
            if block is not None:
                block.reserve()
        if block is None:
            whole = -(-size // _ROUND) * _ROUND
            block = _Block(len(self._blocks), self._memory, self._memory_bytes, whole)
            self._memory_bytes += whole
            self._blocks[block.number] = block
        block.held = True
        return block

    def let_go(self, block: _Block) -> None:
        """Note that this rank reads and writes `block` no longer."""
        block.held = False
        self._free_if_unused(block)

    def send(self, peer: int, channel: int, block: _Block, size: int) -> None:
        """Send the first `size` bytes of `block` to rank `peer`. They must not change before the peer has read them.

        Raises RuntimeError if the peer has ended.
        """
        link = self._live(peer)
        if peer not in block.known_to:
            link.send_block(block)
            block.known_to.add(peer)
        block.readers += 1
        link.send(_Kind.DATA, channel, block.number, size)

    def send_small(self, peer: int, channel: int, payload: bytes) -> None:
        """Send at most SMALL bytes to rank `peer`. Raises RuntimeError if the peer has ended."""
        self._live(peer).send(_Kind.SMALL, channel, size=len(payload), payload=payload)

    def _live(self, peer: int) -> _Link:
        link = self._links[peer]
        if link.closed:
            raise RuntimeError(f"rank {peer} of this host has closed its connection")
        return link

    def expect(self, peer: int, channel: int) -> Packet:
        """The next message of rank `peer` on `channel`. Messages are expected in the order they are sent."""
        return self._links[peer].expect(channel)

    def start(self, operation: RunningExchange) -> None:
        """Take over `operation`: whenever this rank sends or waits, operations go on if their messages have arrived."""
        self._operations.append(operation)
        self.progress(0.0)

    def progress(self, seconds: float) -> bool:
        """Receive what there is, waiting up to `seconds` for the first packet. Returns False if nothing came."""
        events = self._poll.poll(seconds)
        if not events:
            return False
        for descriptor, event in events:
            self._by_descriptor[descriptor].on_event(event)
        self._go_on()
        return True

    def _go_on(self) -> None:
        unfinished = []
        for operation in self._operations:
            while operation.needs and all(message.arrived for message in operation.needs):
                operation.go_on()
            if operation.needs:
                unfinished.append(operation)
        self._operations = unfinished

    def wait(self, operation: RunningExchange) -> None:
        """Wait until `operation` has ended. Raises RuntimeError if a rank it needs has ended, or is too late."""
        self._go_on()
        start = time.monotonic()
        deadline = start + self._timeout_seconds
        spin_until = start + self._spin_seconds
        while operation.needs:
            for message in operation.needs:
                if message.lost:
                    raise RuntimeError(f"rank {message.sender} of this host has closed its connection")
            now = time.monotonic()
            if now >= deadline:
                late = sorted({message.sender for message in operation.needs if not message.arrived})
                raise RuntimeError(f"timed out after {self._timeout_seconds:g} s waiting for ranks {late}")
            self.progress(0.0 if now < spin_until else deadline - now)

    def flush(self) -> None:
        """Wait until the sockets have taken all packets. Raises RuntimeError if this takes too long."""
        deadline = time.monotonic() + self._timeout_seconds
        while any(link.has_unsent for link in self._links.values()):
            if not self.progress(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                raise RuntimeError(f"timed out after {self._timeout_seconds:g} s sending to ranks of this host")

    def _on_free(self, number: int) -> None:
        block = self._blocks[number]
        block.readers -= 1
        self._free_if_unused(block)

    def _free_if_unused(self, block: _Block) -> None:
        if block.held or block.readers:
            return
        self._free.append(block)
        while sum(free.size for free in self._free) > _IDLE_BYTES:
            oldest = self._free.pop(0)
            oldest.give_back()
            self._given_back.append(oldest)


def _smallest_fitting(blocks: list[_Block], size: int) -> _Block | None:
    """Take the smallest block of at least `size` bytes from `blocks`. None if there is none."""
    # None that is more than twice as large: a large message may come next.
    fitting = [block for block in blocks if size <= block.size <= max(2 * size, _ROUND)]
    if not fitting:
        return None
    block = min(fitting, key=lambda block: block.size)
    blocks.remove(block)
    return block
