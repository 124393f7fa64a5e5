"""How the ranks of one host find each other for the exchange through shared memory.

Each rank listens at a socket in a folder of its own (megapar.system.own_folder), and tells the folder's path through
the job's store. Of each pair of ranks the higher one connects to the lower one. Each gives the other a descriptor of
its memory. Then the folder is removed, and nobody can connect any more.

Other users cannot enter the folder, so they cannot connect. A rank follows no path into another user's folder, and both
ends ask the kernel for the user at the other end. A rank takes the ranks it expects, each once, and the first one
stays. docs/threats.md says what follows.
"""

import errno
import os
import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from megapar.base.errors import CommunicationError
from megapar.comm.rendezvous import Store
from megapar.comm.shared_memory import Connection, Host
from megapar.system import limits
from megapar.system.own_folder import OwnFolder, opened, shared_places, sweep

_PREFIX = "megapar-meeting-"
_SOCKET = "socket"
_HELLO = struct.Struct("=Q")  # rank
_CREDENTIALS = struct.Struct("=iii")  # process, user and group, as SO_PEERCRED gives them


def meet(rank: int, store: Store, barrier: Callable[[], None], timeout_seconds: float) -> Host | None:
    """Connect to the ranks on this host. A collective over all ranks of the job, whatever their hosts.

    `barrier` waits until all ranks have called it. Returns None if there is no other rank here, or if this host's ranks
    cannot all reach each other: containers with one host name may be apart, and a system may refuse the memory. All
    ranks of a host return None together. Raises OutOfMemoryError if this process may not open enough files, and
    CommunicationError if another rank has ended.
    """
    try:
        with limits.named():
            return _meet(rank, store, barrier, timeout_seconds)
    except RuntimeError as error:  # of the barrier or the store
        reason = str(error).partition("\n")[0]
        raise CommunicationError(f"another rank ended while the ranks of a host met ({reason})") from error


def _meet(rank: int, store: Store, barrier: Callable[[], None], timeout_seconds: float) -> Host | None:
    # All ranks meet equally often, so the number of the meeting is the same on all.
    meeting = f"host/{store.add(f'host/meetings/{rank}', 1)}/{socket.gethostname()}"
    party = _Party(rank)
    try:
        number = store.add(meeting, 1)
        store.set(f"{meeting}/{number}", f"{rank} {party.path}")
        barrier()
        posted = [store.get(f"{meeting}/{index}").decode() for index in range(1, store.add(meeting, 0) + 1)]
        paths = {int(text.partition(" ")[0]): text.partition(" ")[2] for text in posted}
        party.ask({peer: path for peer, path in paths.items() if peer < rank})
        barrier()  # now all have asked, so `answer` does not wait for any
        party.answer(peer for peer in paths if peer > rank)
        barrier()  # now all have answered
        party.hear_answers()
    finally:
        party.leave_door()
    if len(party.connections) < len(paths) - 1:
        store.set(f"{meeting}/apart", str(rank))
    barrier()
    if len(paths) == 1 or store.check([f"{meeting}/apart"]):
        party.part()
        return None
    return Host(rank, party.connections, party.memory, timeout_seconds)


class _Party:
    """This rank at the meeting. `path` is its folder, "" if the system lacks something the exchange needs."""

    def __init__(self, rank: int):
        self.path = ""
        self.memory = -1  # descriptor of the memory that this rank shares
        self.connections: dict[int, Connection] = {}
        self._rank = rank
        self._asked: dict[int, socket.socket] = {}  # connections of this rank that were not answered yet
        self._folder: OwnFolder | None = None
        self._listener: socket.socket | None = None
        if sys.platform != "linux":
            return
        try:
            self.memory = os.memfd_create("megapar-exchange")
        except OSError as error:
            if limits.reached(error):
                raise
            return  # a container's filter of system calls may refuse it
        for parent in shared_places():
            if self._open_door(parent):
                return

    def _open_door(self, parent: Path) -> bool:
        """Listen in a new folder in `parent`. Returns whether the system allows it."""
        sweep(parent, _PREFIX)
        try:
            self._folder = OwnFolder(parent, _PREFIX)
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            # A socket's address has at most 107 bytes. This one is short wherever the folder lies.
            self._listener.bind(f"/proc/self/fd/{self._folder.descriptor}/{_SOCKET}")
            self._listener.listen(socket.SOMAXCONN)
            self._listener.setblocking(False)
        except OSError as error:
            self.leave_door()
            if limits.reached(error):
                raise
            return False
        self.path = str(self._folder.path)
        return True

    def leave_door(self) -> None:
        """Stop listening, and remove the folder."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def ask(self, paths: Mapping[int, str]) -> None:
        """Connect to the ranks listening in the folders of `paths`, and say who this is."""
        for peer, path in paths.items():
            connection = _connect(path) if self.path and path else None
            if connection is not None and self._introduce(connection):
                self._asked[peer] = connection

    def answer(self, expected: Iterable[int]) -> None:
        """Accept a connection from each rank of `expected`."""
        awaited = set(expected)
        while self._listener is not None:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            peer = self._hear(connection, awaited)
            if peer is not None and self._introduce(connection):
                awaited.remove(peer)

    def hear_answers(self) -> None:
        """Receive the answers of the ranks asked by this one."""
        for peer, connection in self._asked.items():
            self._hear(connection, {peer})

    def part(self) -> None:
        """Close all connections."""
        for connection in self.connections.values():
            connection.close()
        if self.memory >= 0:
            os.close(self.memory)

    def _introduce(self, connection: socket.socket) -> bool:
        """Send this rank's number and memory. Returns whether they have left."""
        try:
            socket.send_fds(connection, [_HELLO.pack(self._rank)], [self.memory])
        except OSError:  # the other end has gone
            connection.close()
            return False
        return True

    def _hear(self, connection: socket.socket, awaited: Collection[int]) -> int | None:
        """Keep `connection` if one of the `awaited` ranks introduces itself. Returns the rank.

        Otherwise closes the connection and returns None.
        """
        hello = _hello(connection)
        if hello is None:
            connection.close()
            return None
        peer, memory = hello
        if peer not in awaited:  # a process of this user that is no rank, or that comes second
            Connection(connection, memory).close()
            return None
        self.connections[peer] = Connection(connection, memory)
        return peer


def _connect(path: str) -> socket.socket | None:
    """Connect to the rank listening in the folder `path`. Returns None if it is not on this host."""
    with opened(Path(path)) as folder:
        if folder is None:
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            connection.connect(f"/proc/self/fd/{folder}/{_SOCKET}")
        except OSError:
            connection.close()
            return None
        return connection


def _hello(connection: socket.socket) -> tuple[int, int] | None:
    """The rank at the other end and a descriptor of its memory, None if it is no process of this user or says nothing.

    Raises OSError if this process may open no more files: then the descriptor was lost on its way.
    """
    connection.setblocking(False)
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        return None
    try:
        text, descriptors, flags, _ = socket.recv_fds(connection, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError:  # nothing was said, or the other end has gone
        return None
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, "no room for a descriptor")
    if len(text) != _HELLO.size or not descriptors:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    return _HELLO.unpack(text)[0], descriptors[0]
