"""The store through which the ranks of a job find each other: torch's TCPStore, or its FileStore for forked ranks.

Each user of the store has a prefix of its own (`StoreUser`), so that no two users can meet in one key.
"""

import ctypes
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import StrEnum, unique
from pathlib import Path
from threading import Thread
from typing import TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from megapar.base.errors import CommunicationError

T = TypeVar("T")
JobStore = dist.Store
_WARNING = 1  # the level of torch's C++ log that torch starts with
_FATAL = 3
_HANDSHAKE_SECONDS = 2.0  # what a store may take to answer, after the last moment at which a connection is made


@unique
class StoreUser(StrEnum):
    """Who keeps keys in the job's store. Each user's keys begin with its name."""

    MEETING = "meeting"  # megapar.comm.rendezvous
    PREFLIGHT = "preflight"  # megapar.launch.preflight and reach
    MONITOR = "monitor"  # megapar.launch.monitor
    GROUPS = "groups"  # torch's process groups; what follows lies in their part
    EXCHANGE = "exchange"  # megapar.comm.host_meeting
    POSTED = "posted"  # comm.post and comm.collect


def part_of(store: dist.Store, user: StoreUser, meeting: int | None = None) -> dist.Store:
    """The keys of `user` in `store`. `meeting` is the number of their meeting, if they belong to one.

    After a restart by torchrun the ranks meet again, and must not read the keys of the ranks before them.
    """
    if meeting is None:
        return dist.PrefixStore(user, store)
    return dist.PrefixStore(f"{user}/{meeting}", store)


def connect(meeting: str, rank: int, world_size: int, *, serves_store: bool, timeout_seconds: float) -> dist.Store:
    """Connect to the job's store.

    `meeting` is "tcp://host:port" or "file://path". With `serves_store` this process opens the TCP store. Raises
    CommunicationError with address and rank.
    """
    address = urlsplit(meeting)
    timeout = timedelta(seconds=timeout_seconds)

    def open_store() -> dist.Store:
        if address.scheme == "file":
            return dist.FileStore(address.path, world_size)
        assert address.hostname is not None
        assert address.port is not None
        # TCPStore would retry an unknown name until the timeout; this look-up fails at once.
        socket.getaddrinfo(address.hostname, address.port)
        return dist.TCPStore(
            address.hostname,
            address.port,
            world_size,
            is_master=serves_store,
            timeout=timeout,
            wait_for_workers=False,  # `rendezvous.meet` waits, and names missing ranks
        )

    try:
        store = answered(open_store, timeout_seconds + _HANDSHAKE_SECONDS)
    except (RuntimeError, ValueError, OSError) as error:
        raise CommunicationError(_no_store(meeting, rank, serves_store, timeout_seconds, error)) from error
    store.set_timeout(timeout)
    return dist.PrefixStore("megapar", store)  # torchrun's agent keeps keys in the store as well


def answered(call: Callable[[], T], seconds: float) -> T:
    """What `call` returns or raises. Raises TimeoutError if it takes longer than `seconds`.

    TCPStore waits without a limit for the answer to most requests, its first handshake included: for ever, if another
    program has the port or the store's process is stopped. This wait is in C++, and nothing but the end of the process
    ends it. So a thread makes the call. The thread ends with the process, and this process ends soon after a
    TimeoutError. A handshake of our own before the first request would depend on torch's protocol, and the protocol may
    change.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            # Here, so that a thread that is given up stays quiet.
            with quiet_log():
                result = call()
        except Exception as error:  # raised by `answer.result`
            answer.set_exception(error)
        else:
            answer.set_result(result)

    Thread(target=run, name="store", daemon=True).start()
    return answer.result(seconds)


@contextmanager
def quiet_log() -> Iterator[None]:
    """Keep torch's C++ code from logging in the block. Its errors are raised as well, and told in one line.

    Standard error is left alone, so nobody else's words are lost.
    """
    level = _log_level()
    # A user who has set TORCH_CPP_LOG_LEVEL=INFO wants to see more.
    if level is None or level.value < _WARNING:
        yield
        return
    before = level.value
    level.value = _FATAL
    try:
        yield
    finally:
        level.value = before


def _log_level() -> ctypes.c_int | None:
    """Torch's variable for the lowest level its C++ code logs.

    torch reads TORCH_CPP_LOG_LEVEL when it is imported, and has no function to set the level later.
    """
    suffix = "dylib" if sys.platform == "darwin" else "so"
    with suppress(OSError, ValueError):  # a torch that is built otherwise: its lines come before our one
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libc10.{suffix}"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    return None


def _no_store(meeting: str, rank: int, serves_store: bool, timeout_seconds: float, error: Exception) -> str:
    """The message of a rank if it cannot open or reach the store."""
    text = str(error).strip()
    reason = text.splitlines()[0].rstrip(".") if text else "no answer"
    if serves_store and "EADDRINUSE" in text:
        return (
            f"rank {rank} cannot open {meeting}: the port is in use, by another job or a second rank 0; "
            "choose another MASTER_PORT"
        )
    if serves_store:
        return f"rank {rank} cannot open {meeting} ({reason}): MASTER_ADDR must be this node's own name or address"
    if _somebody_listens(meeting):
        return (
            f"rank {rank} found no store at {meeting} within {timeout_seconds:g} s ({reason}): another program listens "
            "there, or rank 0 is stopped; see rank 0's message, or choose another MASTER_PORT"
        )
    return (
        f"rank {rank} did not reach rank 0 at {meeting} within {timeout_seconds:g} s ({reason}): check MASTER_ADDR and "
        "MASTER_PORT, that rank 0 was started, and that no firewall stands between"
    )


def _somebody_listens(meeting: str) -> bool:
    """Whether a connection to the address of a TCP store can be made."""
    address = urlsplit(meeting)
    if not address.hostname or not address.port:
        return False
    try:
        socket.create_connection((address.hostname, address.port), timeout=_HANDSHAKE_SECONDS).close()
    except OSError:
        return False
    return True
