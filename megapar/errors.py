"""Errors for people: each class has an exit code, each message is one line saying what, where, why and what would
work."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class MegaparError(Exception):
    """Base of every error that a user can cause or mend; printed without a traceback."""

    exit_code = 70


class ConfigError(MegaparError):
    exit_code = 2


class DataError(MegaparError):
    exit_code = 3


class CheckpointError(MegaparError):
    exit_code = 4


class NumericError(MegaparError):
    exit_code = 5


class CommunicationError(MegaparError):
    exit_code = 6


class StorageError(MegaparError):
    exit_code = 7


@contextmanager
def reported() -> Iterator[None]:
    """Around a program's main: a MegaparError becomes one line on stderr and its exit code, other errors stay bugs."""
    try:
        yield
    except MegaparError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
