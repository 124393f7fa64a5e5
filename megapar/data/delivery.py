"""Delivery of steps: a thread of this process, or other processes, read steps before training asks for them.

A thread is enough for token files, because it waits for the disk without Python's lock. Processes are for sources with
computation, such as streams tokenized on the fly. Workers hold no state. A request names the number of samples consumed
before, and the answer is the next step.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import numpy as np
import torch

from megapar.base.errors import MegaparError, starting
from megapar.data.loader import Loader
from megapar.data.workers import alive
from megapar.declare.batch import MicroBatch, Targets
from megapar.system.processes import end_with_parent

Read = Callable[[int], list[MicroBatch]]


class _Readers(Protocol):
    """Readers of steps. They answer requests in the order of asking."""

    ahead: int  # the number of steps to ask for beyond the one that is taken next

    def ask(self, consumed_samples: int) -> None: ...

    def take(self) -> list[MicroBatch]: ...

    def close(self) -> None: ...


class Delivery:
    """The steps of a run from `consumed_samples` on.

    Setting `consumed_samples` makes the next step start there. `workers` is the number of reading processes; 0 means a
    thread of this process.
    """

    def __init__(self, loader: Loader, workers: int = 0):
        self.loader = loader
        self.workers = workers
        self.consumed_samples = 0
        self._last = 0  # consumed samples before the step that was taken last
        self._readers: _Readers | None = None
        self._asked: deque[int] = deque()

    def next_step(self) -> list[MicroBatch]:
        """This rank's micro-batches of the next step, and ask the readers for the steps after it.

        Raises DataError if a file is bad or a worker died.
        """
        # Somebody may have set `consumed_samples`. What was asked for then belongs to other steps.
        if self._readers is None or (self._asked and self._asked[0] != self.consumed_samples):
            self.close()
            read = self.loader.step_after
            self._readers = _Processes(read, self.workers) if self.workers else _Thread(read)
        while len(self._asked) <= self._readers.ahead:
            if self._asked:
                # The batch size may change from step to step (train.batch_ramp), so steps are counted one by one.
                newest = self._asked[-1]
                position = newest + self.loader.batch_size(newest)
            else:
                position = self.consumed_samples
            self._readers.ask(position)
            self._asked.append(position)
        batches = self._readers.take()
        self._last = self._asked.popleft()
        self.consumed_samples = self._last + self.loader.batch_size(self._last)
        return batches

    def started_over(self) -> list[str]:
        """A line for each source with a new epoch in the newest step."""
        return self.loader.samples.started_over(self._last, self.consumed_samples)

    def close(self) -> None:
        """End the readers. `next_step` starts new ones."""
        if self._readers is not None:
            self._readers.close()
        self._readers = None
        self._asked.clear()


class _Thread:
    """One thread of this process. An error in it is raised when its step is taken."""

    ahead = 1  # one step is read while the one before is trained

    def __init__(self, read: Read):
        self._read = read
        self._answers = deque[Future[list[MicroBatch]]]()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="data")

    def ask(self, consumed_samples: int) -> None:
        self._answers.append(self._pool.submit(self._read, consumed_samples))

    def take(self) -> list[MicroBatch]:
        return self._answers.popleft().result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class _Processes:
    """Processes, asked in turn. They touch no device."""

    def __init__(self, read: Read, count: int):
        self.ahead = 2 * count  # each process can begin its next step before its last one has been taken
        # Forked, so that all processes share the open files. It is safe because they touch no device.
        fork = multiprocessing.get_context("fork")
        self._workers: list[tuple[Connection, BaseProcess]] = []
        parent = os.getpid()
        try:
            for number in range(count):
                ours, theirs = fork.Pipe()
                name = f"data worker {number}"
                process = fork.Process(target=_work, args=(read, ours, theirs, parent), name=name, daemon=True)
                with starting(name, "use fewer data.workers"):
                    process.start()
                theirs.close()
                self._workers.append((ours, process))
        except BaseException:
            self.close()  # Python would wait for the others at its end
            raise
        self._asked = 0
        self._taken = 0

    def ask(self, consumed_samples: int) -> None:
        connection, process = self._workers[self._asked % len(self._workers)]
        self._asked += 1
        with alive(process, "data.workers"):
            connection.send(consumed_samples)

    def take(self) -> list[MicroBatch]:
        connection, process = self._workers[self._taken % len(self._workers)]
        self._taken += 1
        with alive(process, "data.workers"):
            answer = connection.recv()
        if isinstance(answer, MegaparError):
            raise answer
        return [_batch(values) for values in answer]

    def close(self) -> None:
        for connection, process in self._workers:
            process.kill()  # a worker ignores SIGTERM, and has nothing to clean up
            process.join()
            connection.close()


def _work(read: Read, parents: Connection, connection: Connection, parent: int) -> None:
    """Run a worker process until the parent closes the connection. `parent` is the parent's process number.

    It receives a number of consumed samples, and sends the next step, or the error from reading it.
    """
    # A stopped worker would not see that the connection is closed.
    if not end_with_parent(parent):
        return
    # A terminal or a scheduler signals all processes of the group. The parent answers, and ends its workers. The fork
    # copied the parent's handlers, which would take a signal of this process for a request to the parent.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # A fork copies the parent's end too. While this process holds it, the pipe would not close when the parent dies.
    parents.close()
    torch.set_num_threads(1)  # several OpenMP threads on cores that training keeps busy would wait for each other
    while True:
        try:
            consumed_samples = connection.recv()
        except (EOFError, ConnectionError):
            return
        answer: Any  # a list of dicts, or an error
        try:
            answer = [_values(batch) for batch in read(consumed_samples)]
        except MegaparError as error:
            answer = error
        connection.send(answer)


def _values(batch: MicroBatch) -> dict[str, Any]:
    """The fields of `batch`, with numpy arrays in place of tensors.

    Arrays cross a pipe by value. Tensors would cross it through files in shared memory, and these outlive a killed
    worker.
    """
    values = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in vars(batch).items()}
    return values | {"later_targets": [[x.numpy() for x in targets] for targets in batch.later_targets]}


def _batch(values: dict[str, Any]) -> MicroBatch:
    """The inverse of `_values`."""
    fields: dict[str, Any] = {
        name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in values.items()
    }
    fields["later_targets"] = tuple(Targets(*map(torch.from_numpy, arrays)) for arrays in values["later_targets"])
    return MicroBatch(**fields)
