"""Errors for people: each class has an exit code, each message is one line saying what, where, why and what would
work."""

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class MegaparError(Exception):
    """Base of every error that a user can cause or mend; printed without a traceback.

    `everywhere`: all ranks raise it with the same words, so that rank 0 alone prints it.
    """

    exit_code = 70
    everywhere = False
    patience_seconds = 0.0


class ConfigError(MegaparError):
    """Options that cannot run, or are not understood."""

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
    """A rank that was lost, or a collective that outlasted its time.

    Mostly the echo of another rank's end, so it waits before it is told: a launcher that sees that rank first ends this
    one meanwhile, and the cause alone is told.
    """

    exit_code = 6
    patience_seconds = 1.0


class StorageError(MegaparError):
    """Files that cannot be written."""

    exit_code = 7


class OutOfMemoryError(MegaparError):
    """A device or a process that has no memory, or may start no thread, for what the run needs."""

    exit_code = 8


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Around the writing of `path`: what the disk refuses is a StorageError that names it."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def reported(rank: int = 0, run_dir: str | None = None) -> Iterator[None]:
    """Around a program's main: a MegaparError becomes one line on stderr, error.json in `run_dir`, and its exit code.

    Errors that all ranks raise are told by rank 0 alone. Everything else is a bug: its traceback is printed here, as
    torch's launcher swallows those of ranks that it forked, and the code is 70.
    """
    try:
        yield
    except MegaparError as error:
        time.sleep(error.patience_seconds)
        if rank == 0 or not error.everywhere:
            where = f"rank {rank}: " if rank else ""
            print(f"{type(error).__name__}: {where}{error}", file=sys.stderr, flush=True)
            _record(error, error.exit_code, rank, run_dir)
        sys.exit(error.exit_code)
    except Exception as error:
        traceback.print_exc()
        _record(error, MegaparError.exit_code, rank, run_dir)
        sys.exit(MegaparError.exit_code)


def _record(error: Exception, exit_code: int, rank: int, run_dir: str | None) -> None:
    if run_dir and os.path.isdir(run_dir):
        facts = {"class": type(error).__name__, "message": str(error), "rank": rank}
        with open(os.path.join(run_dir, "error.json"), "w") as file:
            json.dump(facts | {"exit_code": exit_code, "host": socket.gethostname()}, file)
