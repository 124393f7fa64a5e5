"""What a sink is: a place for the numbers of a run beside metrics.jsonl. And its sender, which keeps it off training.

Each sink has a thread and a bounded queue. Training puts a line into the queue and goes on. A full queue drops the line
and counts it. An error or a service without an answer costs lines, and never a step. docs/watching.md says how to add a
sink.
"""

import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

from megapar.config.messages import counted
from megapar.system.say import tell

Line = Mapping[str, Any]
"""A line of metrics.jsonl: that of a step, or one with `step` and some other numbers, such as those of evaluations."""

QUEUED = 4096  # lines that a sink may be behind
_BATCH = 64  # the most lines of one call
_PAUSE_SECONDS = 60.0  # after a failure to open
CLOSING_SECONDS = 5.0  # how long the end of a run waits for its sinks


@dataclass(frozen=True)
class RunInfo:
    """What a sink may say of its run. `options` are the values of all options by dotted path.

    `curve` is the id under which a service keeps the numbers of this run (`megapar.observe.sinks.curve`). The lines up
    to `first_step` are at the service already, unless `replays` is True.
    """

    run_dir: Path
    options: Mapping[str, Any]
    steps: int
    first_step: int = 0
    curve: str = ""
    replays: bool = False


class Sink(Protocol):
    """A place for lines. Its methods are called in one thread, in the order open, write (many times), close.

    They may raise any Exception, and may take any time.
    """

    name: str
    """What messages call it."""

    def open(self) -> str:
        """Connect. Returns a line for the user, such as an address, or "". Called again later if it raises."""
        ...

    def write(self, lines: Sequence[Line]) -> None:
        """Take lines, the oldest first."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...

    def abandon(self) -> None:
        """End what would hold up the end of this process. Called if `close` takes too long, by another thread."""
        ...


def scalars(line: Line) -> Iterator[tuple[str, float]]:
    """The numbers of a line by name, without the step. Those of tables have names such as comm_bytes/tp.

    Tables of tables are left out: the load of each expert in each layer is for metrics.jsonl alone.
    """
    for key, value in line.items():
        if isinstance(value, int | float) and key != "step":
            yield key, value
        elif isinstance(value, Mapping):
            for name, part in value.items():
                if isinstance(part, int | float):
                    yield f"{key}/{name}", part


class Sender:
    """Hands lines to a sink in a thread of its own. No method raises or waits, `close` apart."""

    def __init__(self, sink: Sink, capacity: int = QUEUED):
        self._sink = sink
        self._queue: queue.Queue[Line] = queue.Queue(capacity)
        self._closing = Event()
        self._wakes = Event()
        self._is_open = False
        self._open_at = 0.0  # when to try to open it, on time.monotonic's clock
        self._warned = False
        self._lost = 0
        # A daemon: the process ends also while a service does not answer.
        self._thread = Thread(target=self._run, name=f"sink {sink.name}", daemon=True)
        self._thread.start()

    def put(self, line: Line) -> None:
        """Queue a line, or drop it if the queue is full."""
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._lose(1, "it is too slow")
        self._wakes.set()

    def close(self) -> None:
        """Let the thread send what is queued, and end. It does not wait for that: see `wait`."""
        self._closing.set()
        self._wakes.set()

    def wait(self, seconds: float) -> None:
        """Wait so long for the end of the thread, and say what was lost."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            left = counted(self._queue.qsize(), "line")
            self._warned = True  # what fails from here on is told with this line
            tell(f"{self._sink.name}: does not end within {CLOSING_SECONDS:g} s; {left} not sent, the run ends")
            self._sink.abandon()
        elif self._lost and self._is_open:  # else the first line has said it all
            tell(f"{self._sink.name}: {counted(self._lost, 'line')} of metrics.jsonl not sent")

    def _lose(self, lines: int, reason: str) -> None:
        """Count lost lines. The first loss is told at once, all of them at the end."""
        self._lost += lines
        if not self._warned:
            self._warned = True
            tell(f"{self._sink.name}: metrics not sent ({reason}); the run goes on, with metrics.jsonl")

    def _run(self) -> None:
        while True:
            closing = self._closing.is_set()  # read before the queue: no line comes after it
            lines = self._take()
            if lines or not self._is_open:
                self._send(lines)
            if closing and len(lines) < _BATCH:
                break
            if len(lines) < _BATCH and not closing:
                # A sink that is not open is tried again without a line too: it may serve what the run has already.
                self._wakes.wait(None if self._is_open else _PAUSE_SECONDS)
                self._wakes.clear()
        if self._is_open:
            try:
                self._sink.close()
            except Exception as error:
                self._lose(0, _words(error))

    def _take(self) -> list[Line]:
        lines: list[Line] = []
        while len(lines) < _BATCH:
            try:
                lines.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return lines

    def _send(self, lines: list[Line]) -> None:
        # Of any class: a sink calls code of others, and no error of theirs may end the thread.
        try:
            if not self._is_open:
                if time.monotonic() < self._open_at:
                    self._lost += len(lines)
                    return
                self._open_at = time.monotonic() + _PAUSE_SECONDS
                note = self._sink.open()
                self._is_open = True
                if note:
                    tell(f"{self._sink.name}: {note}")
            if lines:
                self._sink.write(lines)
        except Exception as error:
            self._lose(len(lines), _words(error))


def _words(error: Exception) -> str:
    """An error in one short line."""
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
