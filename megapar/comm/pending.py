"""Operations in flight, and how the failure of one is told."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from megapar.base.errors import CommunicationError
from megapar.comm.flight import AxisLog
from megapar.system import limits

# What gloo says of a host whose settings it cannot work with, and what that means. No other rank is to blame.
_OF_HOST = {
    "Unable to find interface": (
        "gloo finds no network interface of its address; bring the loopback up (ip link set lo up)"
    ),
    "File name too long": "gloo takes names of hosts of at most 63 letters; give this host a shorter one (hostname)",
}


@contextmanager
def as_communication_errors(log: AxisLog | None = None) -> Iterator[None]:
    """Raise CommunicationError in place of RuntimeError. Backends report a missing or late peer by a RuntimeError.

    `log` is the flight log of the operation's axis. Raises OutOfMemoryError if no more sockets can be opened.
    """
    try:
        with limits.named():
            yield
    except RuntimeError as error:
        words = str(error).splitlines()[0]
        known = (text for part, text in _OF_HOST.items() if part in words)
        reason = next(known, "another rank ended, or a transfer took longer than launch.timeout_seconds")
        reason = f"{reason} ({words})"
        # The log may know the rank that is missing.
        message = reason if log is None else log.fail(reason)
        raise CommunicationError(message) from error


class InFlight(Protocol):
    """An operation in flight: a work of torch.distributed, or an Operation of megapar.comm.shared_memory."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


class Pending:
    """Operations in flight and the tensors they use.

    A second wait on a gloo point-to-point work never returns. Freeing a tensor in flight is a use-after-free, and
    dropping a work in flight loses its message. So this object holds works and tensors until the first `wait`, and
    later calls of `wait` do nothing. `wait` raises CommunicationError if a peer is gone or too late.
    """

    def __init__(self, works: Sequence[InFlight | None] = (), tensors: Sequence[Tensor] = ()):
        self._works = [work for work in works if work is not None]
        self._tensors = list(tensors)
        self._then: Callable[[], None] | None = None
        self._logged: tuple[AxisLog, int, int] | None = None  # first and last position of the operations in the log

    def wait(self) -> None:
        """Wait for the works, then call the function given to `followed_by`. Only the first call does anything."""
        # Cleared first: should a work fail, another `wait` must not wait for it again.
        works = self._works
        self._works = []
        if works and self._logged is not None:
            log, first, last = self._logged
            log.wait(first, last)
            with as_communication_errors(log):
                for work in works:
                    work.wait()
            self._continue()
            log.end(first, last)
        else:
            with as_communication_errors():
                for work in works:
                    work.wait()
            self._continue()
        self._tensors = []

    def has_arrived(self) -> bool:
        """Whether `wait` would return at once. gloo knows it only once somebody waits: until then this is False.

        Raises CommunicationError if a peer of any operation that goes on meanwhile is gone.
        """
        with as_communication_errors(self._logged[0] if self._logged else None):
            return all(work.is_completed() for work in self._works)

    def _continue(self) -> None:
        """Call the function given to `followed_by`. It is a part of the operation, such as the sum of what arrived."""
        then = self._then
        self._then = None
        if then is not None:
            then()

    def followed_by(self, then: Callable[[], None]) -> "Pending":
        """Call `then` once, after the works have ended. Returns this object."""
        self._then = then
        return self

    def logged(self, log: AxisLog | None, first: int, last: int) -> "Pending":
        """Mark the works as the operations `first` to `last` of an axis's log. Returns this object."""
        if log is not None:
            self._logged = log, first, last
            log.started(first, last)
        return self


class _Nothing(Pending):
    """No operation. A class of its own, because a step of one process waits for it thousands of times."""

    def wait(self) -> None:
        pass

    def followed_by(self, then: Callable[[], None]) -> Pending:
        return Pending().followed_by(then)


NOTHING = _Nothing()
"""What there is to wait for if nothing is communicated."""
