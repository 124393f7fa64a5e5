"""Another user of this machine: processes without root's rights, doing what they like in shared places."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="not run: only root can start a process of another user")


def _main(act: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    act(*args)


def start(act: Callable[..., None], *args: Any) -> BaseProcess:
    """Start `act(*args)` as another user."""
    process = multiprocessing.get_context("fork").Process(target=_main, args=(act, args))
    process.start()
    return process


def let(act: Callable[..., None], *args: Any) -> None:
    """Run `act(*args)` as another user, and wait for its end."""
    process = start(act, *args)
    process.join()
    assert process.exitcode == 0


@contextmanager
def place_of_all() -> Iterator[Path]:
    """A folder like /dev/shm: everybody may write, and nobody may remove what belongs to others."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        os.chmod(name, 0o1777)
        yield Path(name)
