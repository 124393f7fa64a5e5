"""The errors a user can cause.

Each class has its exit code. Each message is one line: what happened, at which option, file or rank, why, and what
would work. `megapar.launch.reporting` prints them and ends the process.
"""

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class MegaparError(Exception):
    """Base class of the errors a user can cause or mend. It is printed without a traceback.

    If `everywhere` is set, all ranks raise it with the same words, and rank 0 alone prints it. If `told_by_another` is
    set, another rank of this host prints it with the same words. It is reported after `patience_seconds`.
    """

    exit_code = 70
    everywhere = False
    told_by_another = False
    patience_seconds = 0.0


class ConfigError(MegaparError):
    """Options nobody understands, or nobody can run."""

    exit_code = 2
    everywhere = True


class DataError(MegaparError):
    """Missing or damaged tokens, documents or data files."""

    exit_code = 3


class CheckpointError(MegaparError):
    """An incomplete or damaged checkpoint, or one of another model."""

    exit_code = 4


class NumericError(MegaparError):
    """A NaN or infinity in a loss or gradient."""

    exit_code = 5
    everywhere = True


class CommunicationError(MegaparError):
    """A lost rank, or a collective beyond its timeout.

    Usually another rank's failure is the cause. So this error is reported after a delay, in which a launcher may end
    this rank. Then only the cause is reported.
    """

    exit_code = 6
    patience_seconds = 1.0
    ranks: Sequence[Any] = ()  # step, phase and operation of all ranks as JSON types, if known
    culprit: Mapping[str, Any] = {}  # rank, host, pid, step and phase of the missing rank, if known


class StorageError(MegaparError):
    """A file cannot be written."""

    exit_code = 7


class OutOfMemoryError(MegaparError):
    """A device or process has too little memory, or may start no more threads or processes, or open no more files.

    `unplanned` says what was used, if the message lacks a plan that the launcher can make.
    """

    exit_code = 8
    unplanned: Mapping[str, Any] | None = None


class Rewind(MegaparError):  # noqa: N818 (no error)
    """A spike of the loss: the next start goes on from before it (guard.on_spike)."""

    exit_code = 9
    everywhere = True


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into a StorageError about `path`."""
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
