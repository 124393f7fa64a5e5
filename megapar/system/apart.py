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

    For a backward, even of tensors without memory, in a process that forks ranks afterwards. Autograd's threads start
    CUDA at the first backward of a process, and then no fork of this process can use a GPU. Raises OutOfMemoryError if
    the fork cannot be started, or is ended from outside.
    """
    fork = multiprocessing.get_context("fork")
    with starting("a process that plans", "end others"), ProcessPoolExecutor(1, fork) as process:
        try:
            return process.submit(function, *args, **options).result()
        except BrokenProcessPool as error:
            reason = "if nobody did it, the kernel does so for want of memory (see dmesg)"
            raise OutOfMemoryError(f"the process that plans was ended by a signal: {reason}") from error
