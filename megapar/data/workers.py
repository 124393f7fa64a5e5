"""Worker processes that process tasks one at a time. A worker that dies raises instead of hanging the parent."""

import multiprocessing
import multiprocessing.connection
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, cast

from megapar.errors import DataError, MegaparError

Pool = dict[Connection, BaseProcess]
Report = Callable[[Any], None]
Prepare = Callable[[], Callable[[Any, Report], None]]  # called in each worker; what it gives does a task, and reports

_KEPT = "; what is done is kept for a rerun"


class _Done:
    """A worker's last word on a task."""


def _work(connection: Connection, prepare: Prepare) -> None:
    """A worker process: tasks in, reports out, then _Done or an error for each task; until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers Ctrl-C and ends its workers
    with suppress(EOFError, ConnectionError):
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
    """Processes by the connection to each, ended with the block. Spawned: a fork could inherit a held lock."""
    spawn = multiprocessing.get_context("spawn")
    pool: Pool = {}
    try:
        for number in range(count):
            ours, theirs = spawn.Pipe()
            process: BaseProcess = spawn.Process(
                target=_work, args=(theirs, prepare), name=f"worker {number}", daemon=True
            )
            process.start()
            theirs.close()
            pool[ours] = process
        yield pool
    finally:
        for connection, process in pool.items():
            connection.close()
            process.terminate()
            process.join()


def run(tasks: Sequence[Any], pool: Pool) -> Iterator[Any]:
    """What the workers report while they do all tasks.

    Raises the error of the earliest bad task, however many workers there are, or DataError when a worker dies.
    """
    waiting = deque(enumerate(tasks))
    running: dict[Connection, int] = {}
    failed: dict[int, MegaparError] = {}
    while True:
        for connection in [connection for connection in pool if connection not in running]:
            if waiting and not failed:
                number, task = waiting.popleft()
                with alive(pool[connection], "--workers", _KEPT):
                    connection.send(task)
                running[connection] = number
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
    """Raise DataError that names the worker whose connection breaks, and what ended it; `option` is their number."""
    try:
        yield
    except (EOFError, ConnectionError):  # it ends at once with the worker: nobody else holds the pipe's other end
        process.join()
        code = cast(int, process.exitcode)
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = f", often for want of memory: try fewer {option}" if code == -signal.SIGKILL else ""
        raise DataError(f"{process.name} (pid {process.pid}) {cause}{hint}{comfort}") from None
