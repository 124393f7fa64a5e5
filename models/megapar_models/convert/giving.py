"""Tensors for another process of this host, such as an engine that generates: through memory that both map.

The process that takes them listens at a socket in a folder that it makes, closed to other users. The one that gives
them connects, and passes a descriptor of its memory. Then each bucket of tensors is one short message: how many bytes
the tensors have, and how many the text behind them, which says where each tensor lies. The taker answers when it has
used them, and only then the giver writes the next bucket. Both ends ask the kernel for the user at the other end.
"""

import json
import math
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

from megapar.base.errors import CommunicationError, ConfigError, reason_of
from megapar.system import limits
from megapar.system.own_folder import OwnFolder, opened, sweep

_SOCKET = "socket"
_PREFIX = "megapar-taker-"
_MESSAGE = struct.Struct("=QQ")  # bytes of the tensors, and of the text behind them; twice 0 ends a stream
_END = (0, 0)
_GIVER = "the process that gives weights"
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
        """Give contiguous tensors that lie in `memory`. Returns when the other end has used them.

        Raises ValueError for another tensor, before anything is said.
        """
        entries = [(name, dtype_name(x.dtype), list(x.shape), self._offset_of(name, x)) for name, x in tensors.items()]
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

    def _offset_of(self, name: str, x: Tensor) -> int:
        """Where a tensor begins in the memory, in bytes."""
        if not x.numel():
            return 0
        offset = x.data_ptr() - self._mapped.data_ptr()
        is_inside = x.device.type == "cpu" and 0 <= offset <= len(self._mapped) - x.nbytes
        if not is_inside or not x.is_contiguous():
            what = "its elements do not follow one another" if is_inside else "does not lie in `memory`"
            raise ValueError(f"{name} {list(x.shape)}: {what}; copy it into `Giver.memory`, and give the copy")
        return offset

    def _say(self, tensor_bytes: int, text_bytes: int) -> None:
        with _telling(f"{self._path}: the process that takes weights", self._given, self._timeout_seconds):
            self._connection.sendall(_MESSAGE.pack(tensor_bytes, text_bytes))
            if self._connection.recv(1) != _USED:
                raise ConnectionResetError


class Taker:
    """The process that takes weights. It exists before the giver, which needs its `path`, a new folder in `parent`.

    It waits at most `timeout_seconds` inside of a stream, and for ever between streams. Folders in `parent` of takers
    that were killed are removed.
    """

    def __init__(self, parent: Path, timeout_seconds: float):
        self._timeout_seconds = timeout_seconds
        sweep(parent, _PREFIX)
        self._folder = OwnFolder(parent, _PREFIX)
        self.path = self._folder.path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"/proc/self/fd/{self._folder.descriptor}/{_SOCKET}")
        self._listener.listen(1)

    def streams(self) -> Iterator[Iterator[dict[str, Tensor]]]:
        """Wait for the giver, and yield each of its streams until it leaves.

        A stream yields the tensors of each bucket by name. They are the giver's memory, valid until the next bucket.
        Raises CommunicationError if the giver is gone in the middle of a stream, or too late, or if another process
        connects, which does not speak as a giver does.
        """
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(self._timeout_seconds)
            with _telling(_GIVER, 0, self._timeout_seconds):
                _check_user(connection)
                _, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
            if not descriptors:
                raise CommunicationError(f"{_GIVER} has gone, or passes no memory, before bucket 0")
            (memory,) = descriptors
            try:
                while True:
                    connection.settimeout(None)
                    with _telling(_GIVER, 0, self._timeout_seconds):
                        text = connection.recv(_MESSAGE.size)
                    if not text:
                        return
                    connection.settimeout(self._timeout_seconds)
                    yield self._stream(connection, memory, _message(text, 0))
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

    def _stream(self, connection: socket.socket, memory: int, message: tuple[int, int]) -> Iterator[dict[str, Tensor]]:
        mapped = torch.empty(0, dtype=torch.uint8)
        taken = 0
        while message != _END:
            tensor_bytes, text_bytes = message
            try:
                if sum(message) > os.fstat(memory).st_size:
                    raise ValueError(f"{sum(message)} bytes in a memory of {os.fstat(memory).st_size}")
                if tensor_bytes > len(mapped):
                    mapped = _map(memory, tensor_bytes)
                tensors = _tensors_in(mapped, json.loads(os.pread(memory, text_bytes, tensor_bytes)))
            except (ValueError, TypeError, RuntimeError, OverflowError, OSError) as error:
                raise CommunicationError(f"{_GIVER} says what is no bucket, after bucket {taken} ({error})") from error
            yield tensors
            taken += 1
            with _telling(_GIVER, taken, self._timeout_seconds):
                connection.sendall(_USED)
                text = connection.recv(_MESSAGE.size)
                if not text:
                    raise ConnectionResetError
            message = _message(text, taken)
        with _telling(_GIVER, taken, self._timeout_seconds):
            connection.sendall(_USED)


def _message(text: bytes, taken: int) -> tuple[int, int]:
    """The numbers of a message. Raises CommunicationError if it has another length."""
    if len(text) != _MESSAGE.size:
        raise CommunicationError(f"{_GIVER} says what is no bucket, after bucket {taken} ({len(text)} bytes)")
    tensor_bytes, text_bytes = _MESSAGE.unpack(text)
    return tensor_bytes, text_bytes


def _tensors_in(mapped: Tensor, entries: Any) -> dict[str, Tensor]:
    """The tensors of a bucket by name. Raises ValueError, TypeError or RuntimeError if an entry is none."""
    tensors = {}
    for name, dtype, shape, offset in entries:
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"{name}: {dtype} is no dtype")
        nbytes = math.prod(shape) * kind.itemsize
        if not 0 <= offset <= offset + nbytes <= len(mapped):
            raise ValueError(f"{name}: bytes {offset} to {offset + nbytes} of {len(mapped)}")
        tensors[name] = mapped[offset : offset + nbytes].view(kind).view(shape)
    return tensors


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
