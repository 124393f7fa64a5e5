"""Messages between the ranks of one host: large ones through shared memory, small ones through Unix sockets.

Every pair of ranks on a host has one socket. A rank that sends a large message copies it into a block of memory that
both ranks have mapped, and tells the receiver through the socket where the message lies. The receiver reads the message
there, and says with its next message that the block is free again. So a message takes one copy, and no thread has to
run for it.

Sends and receives on a socket are ordered by the operating system, so a receiver that has read the message of the
socket sees all that the sender had written before. No rank ever polls memory that another rank writes.

A rank that waits sleeps in the kernel. When a process ends, however it ends, the kernel closes its sockets, and the
ranks that wait for it find out at once. Blocks and sockets have no name in the file system (Linux's memfd and its
abstract addresses), so nothing is left behind, and the size of /dev/shm does not matter.
"""

import mmap
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from megapar.device import usable_cores
from megapar.rendezvous import Store

SMALL = 4096  # bytes: a message up to this size travels in the packet itself and needs no block
_ROUND = 1 << 16  # sizes of blocks are multiples of this, so that messages of similar sizes share them
_IDLE_BYTES = 64 << 20  # free blocks beyond this sum are given back to the system
_MOST_READ = 2  # messages of a link that have been read without the sender knowing
# Kind, number of blocks that have been read, channel, number of the block, bytes, and _MOST_READ blocks that were read.
_HEADER = struct.Struct(f"=BBHIQ{_MOST_READ}I")
_LARGEST_PACKET = _HEADER.size + SMALL
_SPIN_SECONDS = 1e-4  # a rank with a core of its own looks for messages this long before it sleeps
_HELLO = struct.Struct("=Q16s")  # rank, nonce of the listener


class _Kind(IntEnum):
    """What a packet says."""

    MAP = 0  # a new block, of so many bytes; the next packet carries its file descriptor
    DATA = 1  # a message that lies in a block
    SMALL = 2  # a message that follows in this packet
    FREE = 3  # no message: only numbers of blocks that have been read
    DROP = 4  # this block will not be used again


class _Block:
    """Memory of this rank that others have mapped. It is free when `readers` is 0 and its writer has let it go."""

    def __init__(self, number: int, size: int):
        self.number = number
        self.size = size
        try:
            self.descriptor = os.memfd_create("megapar-exchange")
            # Reserved now: memory that runs out is an error here, and would be a SIGBUS at the first write.
            os.posix_fallocate(self.descriptor, 0, size)
            self.memory = _map(self.descriptor, size)
        except OSError as error:
            raise MemoryError(f"no {size:,} bytes of memory to share with other ranks: {error.strerror}") from error
        self.readers = 0
        self.held = False  # by the work that fills it
        self.known_to: set[int] = set()  # ranks that have mapped it

    def tensor(self) -> Tensor:
        """The whole block: uint8 [size]."""
        return torch.frombuffer(self.memory, dtype=torch.uint8)


def _map(descriptor: int, size: int) -> mmap.mmap:
    # Populated: a page that is touched for the first time would cost a fault.
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


class Message:
    """A message that this rank expects, or has got. Read `content` after it has arrived, then call `release`."""

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
        """The rank that sends it."""
        return self._link.rank

    @property
    def lost(self) -> bool:
        """Whether it has not arrived and never will, because its sender has ended."""
        return self._link.closed and not self.arrived

    def content(self, like: Tensor) -> Tensor:
        """The content as a tensor with the shape and dtype of `like`. It is valid until `release`.

        Raises RuntimeError if it has another number of bytes.
        """
        assert self._memory is not None
        if self._bytes != like.nbytes:
            raise RuntimeError(
                f"rank {self._link.rank} sent {self._bytes} bytes where this rank expects {like.nbytes}: the ranks run "
                "different operations"
            )
        if not self._bytes:
            return torch.empty_like(like)
        flat = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=self._offset)
        return flat.view(like.shape)

    def release(self) -> None:
        """Tell the sender that the content has been read."""
        if self._block >= 0:
            self._link.has_read(self._block)
        self._memory = bytearray()

    def fill(self, memory: mmap.mmap | bytearray, block: int, offset: int, size: int) -> None:
        """Note that it has arrived: `size` bytes of `memory` at `offset`, in the sender's `block` (-1 for none)."""
        self._memory = memory
        self._block = block
        self._offset = offset
        self._bytes = size


class _Link:
    """The connection to one other rank of this host."""

    def __init__(self, rank: int, connection: socket.socket, poll: select.epoll):
        self.rank = rank
        self.closed = False
        self._socket = connection
        self._socket.setblocking(False)
        self._poll = poll
        self._poll.register(self._socket, select.EPOLLIN)
        self._unsent: deque[tuple[bytes, int]] = deque()  # packets that the socket has not taken, and descriptors
        self._blocks: dict[int, mmap.mmap] = {}  # the other rank's blocks
        self._incoming_block = (-1, 0)  # number and size of the block whose descriptor comes next
        # By channel: messages that have arrived and that nobody expects yet, and those that are expected.
        self._early: dict[int, deque[Message]] = {}
        self._expected: dict[int, deque[Message]] = {}
        self._read: list[int] = []  # blocks of the other rank that were read, which it does not know yet
        self.on_free: Callable[[int], None] = lambda block: None

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: _Kind, channel: int = 0, block: int = 0, size: int = 0, payload: bytes = b"") -> None:
        """Send a packet, or queue it if the socket is full. It also says which blocks have been read."""
        number = len(self._read)
        read = self._read + [0] * (_MOST_READ - number)
        self._read = []
        self._send(_HEADER.pack(kind, number, channel, block, size, *read) + payload, -1)

    def has_read(self, block: int) -> None:
        """Note that a message in `block` of the other rank has been read."""
        self._read.append(block)
        # Most often the next message to the other rank carries the number, which saves a packet. If none leaves, its
        # memory must not stay in use.
        if len(self._read) == _MOST_READ:
            self.send(_Kind.FREE)

    def send_block(self, block: _Block) -> None:
        """Make the other rank map `block`."""
        self.send(_Kind.MAP, block=block.number, size=block.size)
        # A copy of the descriptor, because the block may be dropped before the packet has left the queue.
        self._send(b"\0", os.dup(block.descriptor))

    def _send(self, packet: bytes, descriptor: int) -> None:
        self._unsent.append((packet, descriptor))
        if self.closed:
            self._drop_unsent()
            return
        if len(self._unsent) == 1 and not self.flush():
            self._poll.modify(self._socket, select.EPOLLIN | select.EPOLLOUT)

    def flush(self) -> bool:
        """Send queued packets. Returns whether all have left."""
        while self._unsent and not self.closed:
            packet, descriptor = self._unsent[0]
            try:
                if descriptor < 0:
                    self._socket.send(packet)
                else:
                    socket.send_fds(self._socket, [packet], [descriptor])
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                # The other rank has ended. What it sent before can still be read, so the link is not closed yet.
                self._drop_unsent()
                return True
            self._unsent.popleft()
            if descriptor >= 0:
                os.close(descriptor)
        return True

    def _drop_unsent(self) -> None:
        for _, descriptor in self._unsent:
            if descriptor >= 0:
                os.close(descriptor)
        self._unsent.clear()

    def expect(self, channel: int) -> Message:
        """The next message of `channel`, which may not have arrived yet."""
        early = self._early.get(channel)
        if early:
            return early.popleft()
        message = Message(self)
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
        """Receive one packet. If the other rank has ended, and all that it sent has been received, close the link."""
        try:
            if self._incoming_block[0] >= 0:
                self._receive_block()
                return
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
            self._incoming_block = (block, size)
        elif kind == _Kind.DROP:
            del self._blocks[block]

    def _receive_block(self) -> None:
        """Receive the descriptor of the block that the packet before has named, and map it."""
        _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not descriptors:
            self._close()
            return
        number, size = self._incoming_block
        self._incoming_block = (-1, 0)
        self._blocks[number] = _map(descriptors[0], size)
        os.close(descriptors[0])

    def _arrive(self, channel: int) -> Message:
        """The message object that the next packet of `channel` fills."""
        expected = self._expected.get(channel)
        if expected:
            return expected.popleft()
        message = Message(self)
        self._early.setdefault(channel, deque()).append(message)
        return message

    def _close(self) -> None:
        if not self.closed:
            self.closed = True
            self._poll.unregister(self._socket)
            self._drop_unsent()


Steps = Generator[Sequence[Message], None, None]
"""What an operation does: it sends, yields the messages that it needs, and goes on when they have arrived."""


class Operation:
    """Runs `steps`. It takes no thread: it goes on whenever this rank sends or waits and its messages have arrived."""

    def __init__(self, steps: Steps, host: "Host"):
        self._steps = steps
        self._host = host
        self.needs: Sequence[Message] = ()
        """The messages without which it cannot go on; empty if it has ended."""
        self.go_on()
        if self.needs:
            host.start(self)

    def go_on(self) -> None:
        """Go on. Called when all messages that it needs have arrived."""
        # Steps may yield no messages: then there is nothing to wait for, and they go on at once.
        self.needs = next((messages for messages in self._steps if messages), ())

    def wait(self) -> None:
        """Wait until it has ended. Raises RuntimeError if a rank that it needs has ended, or is too late."""
        if self.needs:
            self._host.wait(self)


class Host:
    """The ranks of this host, as one of them sees them: sends messages to the others and waits for theirs.

    Only one thread may call its methods.
    """

    def __init__(self, rank: int, connections: dict[int, socket.socket], timeout_seconds: float):
        self.rank = rank
        self._timeout_seconds = timeout_seconds
        self._poll = select.epoll()
        self._links = {peer: _Link(peer, connection, self._poll) for peer, connection in connections.items()}
        self._by_descriptor = {link.fileno(): link for link in self._links.values()}
        for link in self._links.values():
            link.on_free = self._on_free
        self._blocks: dict[int, _Block] = {}
        self._free: list[_Block] = []
        self._made = 0
        self._operations: list[Operation] = []  # operations that have not ended, oldest first
        # Waking up takes longer than a small message. With fewer cores than ranks, the core is the other rank's.
        self._spin_seconds = _SPIN_SECONDS if len(self._links) + 1 <= usable_cores() else 0.0

    @property
    def peers(self) -> frozenset[int]:
        """The other ranks of this host."""
        return frozenset(self._links)

    def block(self, size: int) -> _Block:
        """A block of at least `size` bytes. The caller calls `let_go` when it needs it no longer."""
        # The smallest that fits, and none that is more than twice as large: a large message may come next.
        fitting = [block for block in self._free if size <= block.size <= max(2 * size, _ROUND)]
        if fitting:
            block = min(fitting, key=lambda block: block.size)
            self._free.remove(block)
        else:
            self._made += 1
            block = _Block(self._made, -(-size // _ROUND) * _ROUND)
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

    def expect(self, peer: int, channel: int) -> Message:
        """The next message of rank `peer` on `channel`. Messages are expected in the order in which they are sent."""
        return self._links[peer].expect(channel)

    def start(self, operation: Operation) -> None:
        """Take over `operation`: whenever this rank sends or waits, those whose messages have arrived go on."""
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

    def wait(self, operation: Operation) -> None:
        """Wait until `operation` has ended. Raises RuntimeError if a rank that it needs has ended, or is too late."""
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
        """Wait until the sockets have taken all packets. Raises RuntimeError if that takes too long."""
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
            self._drop(self._free.pop(0))

    def _drop(self, block: _Block) -> None:
        for peer in block.known_to:
            if not self._links[peer].closed:
                self._links[peer].send(_Kind.DROP, block=block.number)
        os.close(block.descriptor)
        del self._blocks[block.number]


def meet(rank: int, store: Store, barrier: Callable[[], None], timeout_seconds: float) -> Host | None:
    """Connect to the ranks on this host. A collective over all ranks of the job, whatever their hosts.

    `barrier` waits until all ranks have called it. Returns None if there is no other rank here, or if this host's ranks
    cannot all reach each other: containers with one host name may be apart, and a system may refuse the memory. All
    ranks of a host return None together.
    """
    # All ranks meet equally often, so the number of the meeting is the same on all.
    meeting = f"host/{store.add(f'host/meetings/{rank}', 1)}/{socket.gethostname()}"
    nonce = os.urandom(16)
    listener = _listen(nonce)
    place = store.add(meeting, 1)
    store.set(f"{meeting}/{place}", f"{rank} {nonce.hex()}")
    barrier()
    ranks = [store.get(f"{meeting}/{index}").decode().split() for index in range(1, store.add(meeting, 0) + 1)]
    nonces = {int(number): bytes.fromhex(text) for number, text in ranks}
    connections = {}
    if listener is not None:
        for peer in nonces:
            # One rank of each pair connects, the other one accepts.
            if peer < rank:
                connection = _connect(nonces[peer], rank)
                if connection is not None:
                    connections[peer] = connection
    # After this barrier all connections to the listener have been made, so `accept` does not wait for any.
    barrier()
    if listener is not None:
        connections |= _accept(listener, nonce)
        listener.close()
    if len(connections) < len(nonces) - 1:
        store.set(f"{meeting}/apart", str(rank))
    barrier()
    if len(nonces) == 1 or store.check([f"{meeting}/apart"]):
        for connection in connections.values():
            connection.close()
        return None
    return Host(rank, connections, timeout_seconds)


def _listen(nonce: bytes) -> socket.socket | None:
    """Listen for the other ranks; None where the system has not what it takes."""
    if sys.platform != "linux":
        return None
    try:
        os.close(os.memfd_create("megapar-exchange"))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(_address(nonce))
    except OSError:  # a container's filter of system calls may refuse them
        return None
    listener.listen(socket.SOMAXCONN)
    listener.setblocking(False)
    return listener


def _address(nonce: bytes) -> bytes:
    # A leading zero makes the address abstract: it is no file, and ends with the listener.
    return b"\0megapar-" + nonce.hex().encode()


def _connect(nonce: bytes, rank: int) -> socket.socket | None:
    """Connect to the rank that listens with `nonce`; None if it is not on this host."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(_address(nonce))
    except ConnectionRefusedError:
        connection.close()
        return None
    # The nonce was told to the ranks of this job alone, so the listener knows that this is one.
    connection.send(_HELLO.pack(rank, nonce))
    return connection


def _accept(listener: socket.socket, nonce: bytes) -> dict[int, socket.socket]:
    """Accept the connections that have been made, by rank."""
    connections: dict[int, socket.socket] = {}
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return connections
        connection.setblocking(False)
        try:
            hello = connection.recv(_HELLO.size)
        except BlockingIOError:
            hello = b""
        if len(hello) == _HELLO.size and _HELLO.unpack(hello)[1] == nonce:
            connections[_HELLO.unpack(hello)[0]] = connection
        else:  # not a rank of this job
            connection.close()
