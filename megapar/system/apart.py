"""Work that a process leaves to a fork of its own, because of what it would start in this one."""

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import ParamSpec, TypeVar, cast

from megapar.base.errors import MegaparError, OutOfMemoryError, starting
from megapar.system.processes import end_with_parent

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def apart(function: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs) -> Result:
    """`function(*args, **options)` in a forked process. What it returns or raises is pickled.

    For what starts threads in a process that forks ranks afterwards. A download is one such thing, a backward another,
    even of tensors without memory: autograd's threads start CUDA at the first backward of a process, and then no fork
    of this process can use a GPU. The fork ends with this process, or when this process is interrupted. Raises
    OutOfMemoryError if the fork cannot be started, or is ended from outside.
    """
    fork = multiprocessing.get_context("fork")
    receiving, sending = fork.Pipe(duplex=False)
    process = fork.Process(target=_answer, args=(os.getpid(), sending, partial(function, *args, **options)))
    try:
        with starting("a forked process", "end others"):
            process.start()
        sending.close()  # so that the end of the fork is seen
        value, error = receiving.recv()
    except EOFError:
        reason = "if nobody did it, the kernel does so for want of memory (see dmesg)"
        raise OutOfMemoryError(f"a forked process was ended by a signal: {reason}") from None
    finally:
        # At once: after an interruption the fork may be in the middle of a long download.
        if process.pid is not None:
            process.kill()
            process.join()
        receiving.close()
    if error is not None:
        raise error
    return cast(Result, value)


def _answer(parent: int, sending: Connection, function: Callable[[], object]) -> None:
    """Send what `function` returns, and what it raises: one of both is None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both, and the parent decides
    if not end_with_parent(parent):
        return
    answer: tuple[object, BaseException | None]
    try:
        answer = function(), None
    except BaseException as error:  # a panic of Rust is no subclass of Exception
        if not isinstance(error, MegaparError):
            error.add_note(traceback.format_exc())  # pickling loses the traceback
        answer = None, error
    sys.stdout.flush()
    sending.send(answer)
