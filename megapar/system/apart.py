"""Work that a process leaves to a fork of its own, because of what it would start in this one."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import ParamSpec, TypeVar

from megapar.base.errors import OutOfMemoryError, starting

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def apart(function: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs) -> Result:
    """`function(*args, **options)` in a forked process. What it returns or raises is pickled.

    For what starts threads in a process that forks ranks afterwards. A download is one such thing, a backward another,
    even of tensors without memory: autograd's threads start CUDA at the first backward of a process, and then no fork
    of this process can use a GPU. Raises OutOfMemoryError if the fork cannot be started, or is ended from outside.
    """
    fork = multiprocessing.get_context("fork")
    with starting("a forked process", "end others"), ProcessPoolExecutor(1, fork) as process:
        try:
            return process.submit(function, *args, **options).result()
        except BrokenProcessPool as error:
            reason = "if nobody did it, the kernel does so for want of memory (see dmesg)"
            raise OutOfMemoryError(f"a forked process was ended by a signal: {reason}") from error
