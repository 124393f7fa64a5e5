"""Errors that users can cause.

Each class has its exit code. Each message is one line that says what happened, where, why, and what would work.
`megapar.launch.reporting` prints them and ends the process.
"""

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class MegaparError(Exception):
    """Base class of every error that a user can cause or mend. It is printed without a traceback.

    If `everywhere` is set, all ranks raise it with the same words, and rank 0 alone prints it. If `told_by_another` is
    set, another rank of this host prints it with the same words. It is reported after `patience_seconds`.
    """

    exit_code = 70
    everywhere = False
    told_by_another = False
    patience_seconds = 0.0


class ConfigError(MegaparError):
    """Options that cannot run or that are not understood."""

    exit_code = 2
    everywhere = True


class DataError(MegaparError):
    """Tokens, documents or files of data that are missing or damaged."""

    exit_code = 3


class CheckpointError(MegaparError):
    """A checkpoint that is incomplete, damaged or of another model."""

    exit_code = 4


class NumericError(MegaparError):
    """A loss or gradient that is not finite."""

    exit_code = 5
    everywhere = True


class CommunicationError(MegaparError):
    """A rank that was lost, or a collective that took longer than its timeout.

    Usually another rank's failure is the cause. So this error is reported after a delay, in which a launcher may end
    this rank. Then only the cause is reported.
    """

    exit_code = 6
    patience_seconds = 1.0
    ranks: Sequence[Any] = ()  # step, phase and operation of all ranks as JSON types, if known
    culprit: Mapping[str, Any] = {}  # rank, host, pid, step and phase of the missing rank, if known


class StorageError(MegaparError):
    """Files that cannot be written."""

    exit_code = 7


class OutOfMemoryError(MegaparError):
    """A device or a process without enough memory, or that may start no other thread or process, or open no file."""

    exit_code = 8


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Raise StorageError that names `path` in place of an OSError from the code that writes it."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {path}: {reason_of(error)}") from error


@contextmanager
def starting(what: str, remedy: str) -> Iterator[None]:
    """Raise OutOfMemoryError if the system refuses to start the process `what` in the block.

    `remedy` says what would need fewer processes.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.ENOMEM):
            raise
        limits = "the limit of processes (ulimit -u, or the container's) or of memory (ulimit -v) is reached"
        raise OutOfMemoryError(f"{what} cannot be started ({reason_of(error)}): {limits}; {remedy}") from error


def reason_of(error: BaseException | None) -> str:
    """Why the system refused something, in its words, such as "No space left on device"."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class Preempted(MegaparError):  # noqa: N818 (no error)
    """The run was asked to stop and has saved a checkpoint at the end of a step. This is no failure."""

    exit_code = 75  # EX_TEMPFAIL: start it again
    everywhere = True
