"""Tensors for another process of this host, such as an engine that generates: through memory that both map.

The process that takes them listens at a socket in a folder that it makes, closed to other users. The one that gives
them connects, and passes a descriptor of its memory. Then each bucket of tensors is one short message: how many bytes
the tensors have, and how many the text behind them, which says where each tensor lies. The taker answers when it has
used them, and only then the giver writes the next bucket. Both ends ask the kernel for the user at the other end.
"""

import json
import mmap
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megapar.errors import CommunicationError, ConfigError, reason_of
from megapar.system import limits
from megapar.system.own_folder import OwnFolder, opened

_SOCKET = "socket"
_PREFIX = "megapar-taker-"
_MESSAGE = struct.Struct("=QQ")  # bytes of the tensors, and of the text behind them; twice 0 ends a stream
_END = (0, 0)
_USED = b"u"
_CREDENTIALS = struct.Struct("=iii")  # process, user and group, as SO_PEERCRED gives them


class Giver:
    """The end that gives. `path` is `Taker.path` of the other end.

    It waits at most `timeout_seconds` for an answer. Raises ConfigError if nobody listens there, and CommunicationError
    if the other end is gone or too late.
    """

    def __init__(self, path: Path, timeout_seconds: float):
        self._path = path
        self._timeout_seconds = timeout_seconds
        self._memory = os.memfd_create("megapar-giver")
        self._mapped = torch.empty(0, dtype=torch.uint8)
        self._given = 0
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(timeout_seconds)
        with opened(path) as folder:
            try:
                if folder is None:
                    raise FileNotFoundError(2, "it is no folder of this user, closed to others")
                self._connection.connect(f"/proc/self/fd/{folder}/{_SOCKET}")
                _check_user(self._connection)
                socket.send_fds(self._connection, [_USED], [self._memory])
            except OSError as error:
                self.close()
                raise ConfigError(f"{path}: nobody takes weights there ({reason_of(error)})") from error

    def memory(self, nbytes: int) -> Tensor:
        """1-D uint8 memory for the next bucket, which the other end sees too. The bucket before is overwritten."""
        if nbytes > len(self._mapped):
            with limits.named():
                os.ftruncate(self._memory, nbytes)
                self._mapped = _map(self._memory, nbytes)
        return self._mapped[:nbytes]

    def give(self, tensors: Mapping[str, Tensor]) -> None:
        """Give tensors that lie in `memory`. Returns when the other end has used them."""
        begin = self._mapped.data_ptr()
        entries = [(name, dtype_name(x.dtype), list(x.shape), x.data_ptr() - begin) for name, x in tensors.items()]
        text = json.dumps(entries).encode()
        os.pwrite(self._memory, text, len(self._mapped))
        self._say(len(self._mapped), len(text))
        self._given += 1

    def end(self) -> None:
        """End a stream. Another one may follow."""
        self._say(*_END)
        self._given = 0

    def close(self) -> None:
        """Leave. The other end then takes no further stream."""
        self._connection.close()
        os.close(self._memory)

    def __enter__(self) -> "Giver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _say(self, tensor_bytes: int, text_bytes: int) -> None:
        with _telling(f"{self._path}: the process that takes weights", self._given, self._timeout_seconds):
            self._connection.sendall(_MESSAGE.pack(tensor_bytes, text_bytes))
            if self._connection.recv(1) != _USED:
                raise ConnectionResetError


class Taker:
    """The end that takes, made first. Its folder `path`, a new one in `parent`, is what the giver must know.

    It waits at most `timeout_seconds` inside of a stream, and for ever between streams.
    """

    def __init__(self, parent: Path, timeout_seconds: float):
        self._timeout_seconds = timeout_seconds
        self._folder = OwnFolder(parent, _PREFIX)
        self.path = self._folder.path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"/proc/self/fd/{self._folder.descriptor}/{_SOCKET}")
        self._listener.listen(1)

    def streams(self) -> Iterator[Iterator[dict[str, Tensor]]]:
        """Wait for the giver, and yield each of its streams until it leaves.

        A stream yields the tensors of each bucket by name. They are the giver's memory, valid until the next bucket.
        Raises CommunicationError if the giver is gone in the middle of a stream, or too late.
        """
        connection, _ = self._listener.accept()
        with connection:
            _check_user(connection)
            _, (memory, *_), _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
            try:
                while message := connection.recv(_MESSAGE.size):
                    connection.settimeout(self._timeout_seconds)
                    yield self._stream(connection, memory, _MESSAGE.unpack(message))
                    connection.settimeout(None)
            finally:
                os.close(memory)

    def close(self) -> None:
        """Stop listening, and remove the folder."""
        self._listener.close()
        self._folder.remove()

    def __enter__(self) -> "Taker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, connection: socket.socket, memory: int, message: tuple[Any, ...]) -> Iterator[dict[str, Tensor]]:
        mapped = torch.empty(0, dtype=torch.uint8)
        taken = 0
        while message != _END:
            tensor_bytes, text_bytes = message
            if tensor_bytes > len(mapped):
                mapped = _map(memory, tensor_bytes)
            tensors = {}
            for name, dtype, shape, offset in json.loads(os.pread(memory, text_bytes, tensor_bytes)):
                kind: torch.dtype = getattr(torch, dtype)
                nbytes = torch.Size(shape).numel() * kind.itemsize
                tensors[name] = mapped[offset : offset + nbytes].view(kind).view(shape)
            yield tensors
            taken += 1
            with _telling("the process that gives weights", taken, self._timeout_seconds):
                connection.sendall(_USED)
                text = connection.recv(_MESSAGE.size)
                if not text:
                    raise ConnectionResetError
                message = _MESSAGE.unpack(text)
        connection.sendall(_USED)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as bfloat16: an attribute of torch."""
    return str(dtype).removeprefix("torch.")


def _map(memory: int, nbytes: int) -> Tensor:
    """1-D uint8 memory of a descriptor. It is freed with the tensor and its views."""
    return torch.frombuffer(mmap.mmap(memory, nbytes), dtype=torch.uint8)


def _check_user(connection: socket.socket) -> None:
    """Raise PermissionError if another user is at the other end."""
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise PermissionError(1, f"user {user} is at the other end")


@contextmanager
def _telling(who: str, buckets: int, timeout_seconds: float) -> Iterator[None]:
    """Raise CommunicationError if the other end does not answer."""
    try:
        yield
    except TimeoutError as error:
        raise CommunicationError(f"{who} has not answered after bucket {buckets} for {timeout_seconds:g} s") from error
    except OSError as error:
        raise CommunicationError(f"{who} has gone after bucket {buckets} ({reason_of(error)})") from error
