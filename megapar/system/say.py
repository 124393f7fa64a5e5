"""Lines for people, on standard output and standard error. A stream that fails ends no run."""

import os
import sys


def tell(text: str) -> None:
    """Print a line on stderr. Never raises.

    A full disk or a closed pipe must not hide the error itself.
    """
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        silence(2)


def say(text: str) -> None:
    """Print a line on stdout. Never raises: a closed pipe (`| head`) or a full disk must not end a run.

    The first failure is reported on stderr. Later lines are dropped.
    """
    try:
        print(text, flush=True)
    except (OSError, ValueError) as error:
        silence(1)
        tell(f"stdout cannot be written ({error}): log lines are dropped from here on, the run goes on")


def silence(descriptor: int) -> None:
    """Redirect `descriptor` to os.devnull."""
    # The descriptor is replaced, not the Python stream: Python writes what its buffer still holds when it exits.
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)
