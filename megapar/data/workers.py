"""Worker processes, with one task at a time. If a worker dies, the parent raises an error instead of hanging."""

import multiprocessing
import multiprocessing.connection
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, cast

from megapar.base.errors import DataError, MegaparError, starting
from megapar.system.processes import end_with_parent

Pool = dict[Connection, BaseProcess]
Report = Callable[[Any], None]
Prepare = Callable[[], Callable[[Any, Report], None]]  # called once in each worker; returns what does a task

_KEPT = "; what is done is kept for a rerun"


class _Done:
    """A worker's message at the end of a task."""


def _work(connection: Connection, prepare: Prepare, parent: int) -> None:
    """Run a worker process until the parent closes the connection. `parent` is the parent's process number.

    It receives tasks. For each task it sends its reports, and then _Done or the task's error.
    """
    # A stopped worker would not see that the connection is closed.
    if not end_with_parent(parent):
        return
    # A terminal sends Ctrl-C to all processes of the group. The parent answers it and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, ConnectionError):  # the parent has closed the connection, or has died
        work = prepare()
        while True:
            task = connection.recv()
            try:
                work(task, connection.send)
                connection.send(_Done())
            except MegaparError as error:
                connection.send(error)


@contextmanager
def worker_pool(count: int, prepare: Prepare) -> Iterator[Pool]:
    """Start `count` worker processes and yield them by the connection to each. They end with the block."""
    # Spawned, because a forked process could inherit a lock that a thread of the parent holds, and wait for it forever.
    spawn = multiprocessing.get_context("spawn")
    pool: Pool = {}
    try:
        for number in range(count):
            ours, theirs = spawn.Pipe()
            process: BaseProcess = spawn.Process(
                target=_work, args=(theirs, prepare, os.getpid()), name=f"worker {number}", daemon=True
            )
            with starting(process.name, "use fewer --workers"):
                process.start()
            # Only the worker may hold its end. Otherwise its death would not close the pipe, and `recv` would hang.
            theirs.close()
            pool[ours] = process
        yield pool
    finally:
        for connection, process in pool.items():
            connection.close()
            process.kill()  # SIGTERM would not end a stopped worker
            process.join()


def run(tasks: Sequence[Any], pool: Pool) -> Iterator[Any]:
    """Let the workers of `pool` do all `tasks`, and yield their reports.

    Raises the error of the earliest failed task, for any number of workers. Raises DataError if a worker
    dies.
    """
    waiting = deque(enumerate(tasks))
    running: dict[Connection, int] = {}
    failed: dict[int, MegaparError] = {}
    while True:
        idle = [connection for connection in pool if connection not in running]
        for connection in idle:
            if waiting and not failed:
                number, task = waiting.popleft()
                with alive(pool[connection], "--workers", _KEPT):
                    connection.send(task)
                running[connection] = number
        # A task before the failed one may still be running and may fail too. Its error would come first in the input.
        if failed and not any(number < min(failed) for number in running.values()):
            raise failed[min(failed)]
        if not running:
            return
        for ready in multiprocessing.connection.wait(list(running)):
            connection = cast(Connection, ready)
            with alive(pool[connection], "--workers", _KEPT):
                answer = connection.recv()
            if isinstance(answer, MegaparError):
                failed[running.pop(connection)] = answer
            elif isinstance(answer, _Done):
                del running[connection]
            else:
                yield answer


@contextmanager
def alive(process: BaseProcess, option: str, comfort: str = "") -> Iterator[None]:
    """Raise DataError if the connection to `process` breaks in the block. The error says how the process ended.

    `option` sets the number of workers. `comfort` ends the message.
    """
    try:
        yield
    except (EOFError, ConnectionError):  # the worker has ended: nobody else holds the other end of the pipe
        process.join()
        code = cast(int, process.exitcode)
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = ""
        if code == -signal.SIGKILL:  # the kernel kills with it when memory runs out
            hint = f", often for want of memory: try fewer {option}"
        raise DataError(f"{process.name} (pid {process.pid}) {cause}{hint}{comfort}") from None
