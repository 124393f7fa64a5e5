"""Limits of this process (`ulimit`): raises them if the system allows it, and names one that a run has reached."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from megapar.base.errors import OutOfMemoryError

_FILES = resource.RLIMIT_NOFILE
_FILE_SIZE = resource.RLIMIT_FSIZE


def raise_open_files() -> None:
    """Let this process and its forks open as many files as the hard limit allows."""
    _, hard = resource.getrlimit(_FILES)
    # macOS calls its hard limit infinite and refuses to set it. Then the soft limit stays.
    with suppress(ValueError, OSError):
        resource.setrlimit(_FILES, (hard, hard))


def require_open_files(number: int) -> None:
    """Raise OutOfMemoryError if a process may not open `number` files and sockets at once."""
    limit, _ = resource.getrlimit(_FILES)
    if limit != resource.RLIM_INFINITY and limit < number:
        raise OutOfMemoryError(
            f"each rank opens about {number:,} files and sockets, and may not open more than {limit:,}: raise the "
            "limit (ulimit -n), or start fewer ranks"
        )


def require_file_size(size: int) -> None:
    """Raise OutOfMemoryError if a process may not write files of `size` bytes."""
    limit, _ = resource.getrlimit(_FILE_SIZE)
    if limit != resource.RLIM_INFINITY and limit < size:
        raise OutOfMemoryError(
            f"files of this process may not be larger than {limit:,} bytes, and the memory that ranks share, which "
            f"counts as a file, needs {size:,} at least: raise the limit (ulimit -f)"
        )


def reached(error: BaseException) -> str:
    """One line about the limit behind `error`. "" if `error` means something else."""
    number = error.errno if isinstance(error, OSError) else None
    # Gloo's errors have the system's words alone.
    words = str(error)
    if number == errno.ENFILE or "Too many open files in system" in words:
        return "this system may not open more files and sockets: raise its limit (sysctl fs.file-max)"
    if number == errno.EMFILE or "Too many open files" in words:
        return (
            f"this process may not open more than {resource.getrlimit(_FILES)[0]:,} files and sockets: raise the limit "
            "(ulimit -n)"
        )
    if number == errno.EFBIG:
        return (
            f"files of this process may not be larger than {resource.getrlimit(_FILE_SIZE)[0]:,} bytes, which counts "
            "for memory that ranks share too: raise the limit (ulimit -f)"
        )
    return ""


@contextmanager
def named() -> Iterator[None]:
    """Turn an error caused by a limit into an OutOfMemoryError that names it."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError
        text = reached(error)
        if text:
            raise OutOfMemoryError(text) from error
        raise
