"""Records what a rank does in a step: spans of its work, and the start of its operations (log.profile).

Spans are nested: a wait for a collective may lie in a forward. A span is one of

    F, B, I, W     an action of the pipeline (`megapar.pipeline.actions`)
    data           the wait for the data of the step
    optimizer      the gradient norm, and the update of this rank's shard
    start          the start of operations on an axis: on a CPU also the copy of what is sent
    wait           the wait for operations on an axis

What lies in no span is the host's own time. The flight log (`megapar.comm.flight`) holds the recorder, because all
these parts report to it already. Without a recorder a report costs one comparison.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

Moment = Any
"""A moment of a `Clock`: seconds, or something that a device has yet to reach."""


class Clock(Protocol):
    """`megapar.system.device.DeviceClock`. This module does not import it, because --help reads this one without
    torch."""

    def moment(self) -> Moment:
        """The moment now."""
        ...

    def read(self, moments: Sequence[Moment]) -> list[float]:
        """The seconds of `moments`. The last one is the newest."""
        ...


@dataclass
class Span:
    """`numbers` are the stage and the micro-batch of an action, or the first and last position of operations.

    `axis` is "" except for the start and the wait of operations. `depth` is the number of spans around this one.
    """

    name: str
    axis: str
    numbers: tuple[int, int]
    depth: int
    start: Moment
    end: Moment


@dataclass
class Operation:
    """An operation at its `position` in the log of its axis. The other fields are those of `AxisLog.begin`."""

    axis: str
    position: int
    name: str
    number: int
    peer: int
    nbytes: int
    start: Moment


@dataclass
class RecordedStep:
    """A step of one rank. Its moments may still be ahead of the device."""

    step: int
    start: Moment
    end: Moment
    spans: list[Span] = field(default_factory=list)  # in the order in which they began
    operations: list[Operation] = field(default_factory=list)

    def as_json(self, clock: Clock) -> dict[str, Any]:
        """JSON types, with moments in seconds of `clock`. Waits until the device has finished the step."""
        moments = [self.start]
        for span in self.spans:
            moments += [span.start, span.end]
        moments += [operation.start for operation in self.operations]
        seconds = iter(clock.read([*moments, self.end]))
        start = next(seconds)
        spans = [[s.name, s.axis, *s.numbers, s.depth, next(seconds), next(seconds)] for s in self.spans]
        operations = [[o.axis, o.position, o.name, o.number, o.peer, o.nbytes, next(seconds)] for o in self.operations]
        return {"step": self.step, "start": start, "end": next(seconds), "spans": spans, "operations": operations}


class Recorder:
    """Records the step under way. A GPU executes on one stream what is recorded here; the host only marks moments."""

    def __init__(self, clock: Clock, step: int):
        self._clock = clock
        now = clock.moment()
        self._recorded = RecordedStep(step, now, now)
        self._depth = 0
        self._waiting: Span | None = None

    def finish(self) -> RecordedStep:
        """End the step, and return what was recorded."""
        self._recorded.end = self._clock.moment()
        return self._recorded

    @contextmanager
    def span(self, name: str, numbers: tuple[int, int]) -> Iterator[None]:
        """Record the time of the block."""
        span = self._open(name, "", numbers)
        yield
        self._close(span)

    def begin(self, axis: str, position: int, name: str, number: int, peer: int, nbytes: int) -> None:
        """Record that an operation starts."""
        operation = Operation(axis, position, name, number, peer, nbytes, self._clock.moment())
        self._recorded.operations.append(operation)

    def started(self, axis: str, first: int, last: int) -> None:
        """Record that the newest operations, `first` to `last` of the axis, have been handed to their transport."""
        start = self._recorded.operations[first - last - 1].start
        self._recorded.spans.append(Span("start", axis, (first, last), self._depth, start, self._clock.moment()))

    def wait(self, axis: str, first: int, last: int) -> None:
        """Record that a wait for operations begins."""
        self._waiting = self._open("wait", axis, (first, last))

    def end(self) -> None:
        """Record that the wait has ended."""
        assert self._waiting is not None
        self._close(self._waiting)

    def _open(self, name: str, axis: str, numbers: Sequence[int]) -> Span:
        now = self._clock.moment()
        span = Span(name, axis, (numbers[0], numbers[1]), self._depth, now, now)
        self._recorded.spans.append(span)
        self._depth += 1
        return span

    def _close(self, span: Span) -> None:
        span.end = self._clock.moment()
        self._depth -= 1
