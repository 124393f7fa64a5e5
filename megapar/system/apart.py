"""Work that a process leaves to a fork of its own, because of what it would start in this one."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def apart(function: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs) -> Result:
    """`function(*args, **options)` in a forked process. What it returns or raises is pickled.

    For a backward, even of tensors without memory, in a process that forks ranks afterwards. Autograd's threads start
    CUDA at the first backward of a process, and then no fork of this process can use a GPU.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        return process.submit(function, *args, **options).result()
