"""Steps read ahead of the training that waits for them: by a thread of this process, or by processes.

A thread is enough for token files, whose reading is the copying of mapped memory. Processes are for sources that
compute, such as streams that are tokenized on the way. No worker holds a state: it is told how many samples came
before, and answers with the step that follows.
"""

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from megapar.batch import MicroBatch
from megapar.data.loader import Loader
from megapar.data.workers import alive
from megapar.errors import MegaparError

Read = Callable[[int], list[MicroBatch]]


class _Readers(Protocol):
    """Answer what was asked, in that order."""

    ahead: int  # steps worth asking for before the first is taken

    def ask(self, consumed_samples: int) -> None: ...

    def take(self) -> list[MicroBatch]: ...

    def close(self) -> None: ...


class Delivery:
    """The steps of a run from `consumed_samples` on, which may be set to go on from elsewhere."""

    def __init__(self, loader: Loader, workers: int = 0):
        self.loader = loader
        self.workers = workers
        self.consumed_samples = self._last = 0
        self._readers: _Readers | None = None
        self._asked: deque[int] = deque()

    def next_step(self) -> list[MicroBatch]:
        """This rank's micro-batches of the next step; asks for those behind it. Raises DataError if a file is bad or a
        worker died."""
        if self._readers is None or (self._asked and self._asked[0] != self.consumed_samples):
            self.close()
            read = self.loader.step_after
            self._readers = _Processes(read, self.workers) if self.workers else _Thread(read)
        while len(self._asked) <= self._readers.ahead:
            following = self._asked[-1] if self._asked else None
            at = self.consumed_samples if following is None else following + self.loader.batch_size(following)
            self._readers.ask(at)
            self._asked.append(at)
        batches = self._readers.take()
        self._last = self._asked.popleft()
        self.consumed_samples = self._last + self.loader.batch_size(self._last)
        return batches

    def started_over(self) -> list[str]:
        """A line for each source that began another epoch in the step that was taken last."""
        return self.loader.samples.started_over(self._last, self.consumed_samples)

    def close(self) -> None:
        """End the workers."""
        if self._readers is not None:
            self._readers.close()
        self._readers = None
        self._asked.clear()


class _Thread:
    ahead = 1

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
    """Forked, so that they share the mapped files; asked in turn. They touch no device."""

    def __init__(self, read: Read, count: int):
        self.ahead = 2 * count
        fork = multiprocessing.get_context("fork")
        self._workers: list[tuple[Connection, BaseProcess]] = []
        for number in range(count):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=_work, args=(read, ours, theirs), name=f"data worker {number}", daemon=True)
            process.start()
            theirs.close()
            self._workers.append((ours, process))
        self._asked = self._taken = 0

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
        return [MicroBatch(**{name: torch.from_numpy(x) for name, x in arrays.items()}) for arrays in answer]

    def close(self) -> None:
        for connection, process in self._workers:
            process.terminate()
            process.join()
            connection.close()


def _work(read: Read, parents: Connection, connection: Connection) -> None:
    """A worker process: a position in, a step or an error out, until the parent hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers Ctrl-C and ends its workers
    parents.close()
    torch.set_num_threads(1)
    while True:
        try:
            consumed_samples = connection.recv()
        except (EOFError, ConnectionError):
            return
        answer: Any
        try:
            answer = [_arrays(batch) for batch in read(consumed_samples)]
        except MegaparError as error:
            answer = error
        connection.send(answer)


def _arrays(batch: MicroBatch) -> dict[str, NDArray[Any]]:
    """The fields that there are: arrays cross a pipe by value, tensors would through files that outlive a worker."""
    return {name: x.numpy() for name, x in vars(batch).items() if x is not None}
