"""Accounts for the time of the recorded steps of a run (log.profile), on every rank.

Each moment of a step belongs to one part, so the parts of a rank sum to its step:

    forward, backward, W   computing an action; recomputed forwards belong to their backward
    optimizer              computing the gradient norm and the update
    data                   waiting for the data of the step
    exposed                of each axis: starting its operations, and waiting for them while data moves
    slowest                waiting until a rank of the same pipeline rank has started the operation too
    idle                   the same for a rank of another pipeline rank: the bubble
    host                   the rest: Python, copies, reports

Hidden time of an axis is time of computing with operations of the axis in flight: all their ranks had started them, and
this rank had not asked for the result. They may have ended earlier, so it is an upper bound. It is no part.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megapar.base.errors import DataError
from megapar.pipeline.actions import Action, Event

PARTS = ("forward", "backward", "W", "optimizer", "data", "slowest", "idle", "host")
COMPUTING = ("forward", "backward", "W", "optimizer")
_OF_SPAN = {
    "F": "forward",
    "B": "backward",
    "I": "backward",
    "W": "W",
    "optimizer": "optimizer",
    "data": "data",
}


class RecordedSpan(NamedTuple):
    """See `megapar.system.recorder.Span`."""

    name: str
    axis: str
    first: int
    second: int
    depth: int
    start: float
    end: float


class RecordedOperation(NamedTuple):
    """See `megapar.system.recorder.Operation`."""

    axis: str
    position: int
    name: str
    number: int
    peer: int
    nbytes: int
    start: float


@dataclass(frozen=True)
class TimedStep:
    """A recorded step of one rank, in seconds of the clock of rank 0."""

    start: float
    end: float
    spans: list[RecordedSpan]
    operations: list[RecordedOperation]


class RankAxis(NamedTuple):
    """An axis of a rank. `ranks` are the global ranks on it."""

    ranks: tuple[int, ...]
    transport: str


@dataclass(frozen=True)
class RankRecord:
    """What a rank has recorded, by the number of the step. `clock_error` bounds its distance from rank 0's clock."""

    rank: int
    pipeline_rank: int
    device: str
    axes: Mapping[str, RankAxis]
    clock_error: float
    steps: Mapping[int, TimedStep]


class Segment(NamedTuple):
    """A piece of a step, all of one part. `axis` is set for the part "exposed", `waited_for` for slowest and idle."""

    part: str
    start: float
    end: float
    axis: str = ""
    waited_for: int = -1


@dataclass
class RankTime:
    """The time of a rank in seconds a step, as a mean over the recorded steps.

    `parts` and `exposed` sum to `step_seconds`. `waited_for` divides the part "slowest" by the last rank.
    """

    rank: int
    step_seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    hidden: dict[str, float] = field(default_factory=dict)
    waited_for: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def computing(self) -> float:
        """Seconds of computing a step."""
        return sum(self.parts[part] for part in COMPUTING)

    @property
    def busy(self) -> float:
        """Seconds a step without waiting for other ranks: computing, data and host."""
        return self.computing + self.parts["data"] + self.parts["host"]


# Reading


def read(run_dir: Path) -> list[RankRecord]:
    """The records of all ranks, in their order, of the steps recorded by all of them.

    Of a run with several starts, those of the newest one with recorded steps. Raises DataError if a rank's
    file is missing or damaged, or if no step is in all files.
    """
    folder = run_dir / "profile"
    first = folder / "rank_00000.jsonl"
    if not first.is_file():
        raise DataError(f"{first} is not there: give the folder of a run that has trained with --log.profile A-B")
    start = [line["start"] for line in _lines(first) if "meetings" in line]
    if not start:
        raise DataError(f"{first} describes no rank: the run ended before it had recorded a step")
    (header, steps), *_ = reference = [_newest(first, start[-1])]
    for rank in range(1, header["world"]):
        reference.append(_newest(folder / f"rank_{rank:05}.jsonl", start[-1]))
    common = set(steps).intersection(*(set(lines) for _, lines in reference))
    if not common:
        raise DataError(f"{folder}: no step is recorded by all {len(reference)} ranks; the run ended before")
    return [_record(rank_header, {n: lines[n] for n in sorted(common)}, header) for rank_header, lines in reference]


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file. A full disk or a kill may have cut the last one."""
    if not path.is_file():
        raise DataError(f"{path} is not there: each rank of the run has such a file, on the host that it ran on")
    whole = path.read_bytes().rpartition(b"\n")[0]
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from error


def _newest(path: Path, start: str) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """The header of a rank, and its recorded steps of the run's start `start`."""
    header: dict[str, Any] = {}
    steps: dict[int, dict[str, Any]] = {}
    for line in _lines(path):
        if "meetings" in line:
            header = line
            steps = {}
        elif header.get("start") == start:
            steps[line["step"]] = line
    if header.get("start") != start:
        raise DataError(f"{path} is of another start of the run than rank_00000.jsonl: profile it again")
    return header, steps


def _record(header: Mapping[str, Any], steps: Mapping[int, Mapping[str, Any]], first: Mapping[str, Any]) -> RankRecord:
    offset, error = clock_offset(header, first)
    shifted = {}
    for number, step in steps.items():
        spans = [RecordedSpan._make([*row[:5], row[5] - offset, row[6] - offset]) for row in step["spans"]]
        operations = [RecordedOperation._make([*row[:6], row[6] - offset]) for row in step["operations"]]
        shifted[number] = TimedStep(step["start"] - offset, step["end"] - offset, spans, operations)
    axes = {name: RankAxis(tuple(axis["ranks"]), axis["transport"]) for name, axis in header["axes"].items()}
    return RankRecord(header["rank"], header["pipeline_rank"], header["device"], axes, error, shifted)


def clock_offset(header: Mapping[str, Any], first: Mapping[str, Any]) -> tuple[float, float]:
    """How far a rank's clock is ahead of that of the rank of `first`, in seconds, and a bound of the error.

    No rank leaves a meeting before all have come. So a rank left, by its clock, later than the other came, and the
    other way round. The difference lies between the two bounds.
    """
    low = max(came - left for (came, _), (_, left) in zip(header["meetings"], first["meetings"], strict=True))
    high = min(left - came for (_, left), (came, _) in zip(header["meetings"], first["meetings"], strict=True))
    # Processes of one kernel read one clock, unless a container has moved its own.
    if header["boot"] and header["boot"] == first["boot"] and low <= 0 <= high:
        return 0.0, 0.0
    return (low + high) / 2, (high - low) / 2


# Accounting


class _Arrivals:
    """When each rank started its operations."""

    def __init__(self, records: Sequence[RankRecord]):
        self._collectives: dict[tuple[str, int, int], list[tuple[float, int]]] = defaultdict(list)
        self._messages: dict[tuple[str, str, int, int, int], float] = {}
        self._by_position: dict[tuple[int, str, int], RecordedOperation] = {}
        for record in records:
            for step in record.steps.values():
                for operation in step.operations:
                    self._add(record, operation)

    def _add(self, record: RankRecord, operation: RecordedOperation) -> None:
        self._by_position[record.rank, operation.axis, operation.position] = operation
        ranks = record.axes[operation.axis].ranks
        if operation.peer < 0:
            key = operation.axis, ranks[0], operation.number
            self._collectives[key].append((operation.start, record.rank))
        else:
            peer = ranks[operation.peer]
            self._messages[operation.name, operation.axis, record.rank, peer, operation.number] = operation.start

    def operation(self, record: RankRecord, axis: str, position: int) -> RecordedOperation | None:
        return self._by_position.get((record.rank, axis, position))

    def last(self, record: RankRecord, axis: str, position: int) -> tuple[float, int]:
        """When the last other rank started this operation, and its number. (-inf, -1) if it is not recorded."""
        operation = self.operation(record, axis, position)
        unknown = (float("-inf"), -1)
        if operation is None:
            return unknown
        ranks = record.axes[axis].ranks
        if operation.peer < 0:
            started = self._collectives[axis, ranks[0], operation.number]
            return max((pair for pair in started if pair[1] != record.rank), default=unknown)
        other_end = "send"
        if operation.name == "send":
            # Through shared memory a message is sent when it is written. Elsewhere its receiver must be ready.
            if record.axes[axis].transport == "shared memory":
                return unknown
            other_end = "receive"
        peer = ranks[operation.peer]
        started_at = self._messages.get((other_end, axis, peer, record.rank, operation.number))
        if started_at is None:
            return unknown
        return started_at, peer


def segments(records: Sequence[RankRecord], step: int) -> list[list[Segment]]:
    """The step of each rank, cut into successive segments."""
    arrivals = _Arrivals(records)
    return [_segments(record, step, arrivals, records) for record in records]


def _segments(record: RankRecord, step: int, arrivals: _Arrivals, records: Sequence[RankRecord]) -> list[Segment]:
    found: list[Segment] = []
    for span, start, end in walk_innermost_spans(record.steps[step]):
        if span is None:
            found.append(Segment("host", start, end))
        elif not span.axis:
            found.append(Segment(_OF_SPAN[span.name], start, end))
        elif span.name == "start":
            found.append(Segment("exposed", start, end, span.axis))
        else:
            needed = range(span.first, span.second + 1)
            came, last = max(arrivals.last(record, span.axis, position) for position in needed)
            split = min(max(came, start), end)
            part = "slowest"
            if last >= 0 and records[last].pipeline_rank != record.pipeline_rank:
                part = "idle"
            if split > start:
                found.append(Segment(part, start, split, span.axis, last))
            found.append(Segment("exposed", split, end, span.axis))
    return found


def walk_innermost_spans(step: TimedStep) -> Iterator[tuple[RecordedSpan | None, float, float]]:
    """Pieces of a step with the innermost span around each. They follow each other from its start to its end."""
    around: list[RecordedSpan] = []
    now = step.start
    for span in [*step.spans, None]:
        while around and (span is None or len(around) > span.depth):
            ended = around.pop()
            yield ended, now, ended.end
            now = ended.end
        if span is not None:
            yield (around[-1] if around else None), now, span.start
            now = span.start
            around.append(span)
    yield None, now, step.end


def account(records: Sequence[RankRecord]) -> list[RankTime]:
    """The account of each rank."""
    arrivals = _Arrivals(records)
    accounts = []
    for record in records:
        number = len(record.steps)
        seconds = sum(step.end - step.start for step in record.steps.values()) / number
        result = RankTime(record.rank, seconds, dict.fromkeys(PARTS, 0.0), dict.fromkeys(record.axes, 0.0))
        computing: list[tuple[float, float]] = []
        for step in record.steps:
            for segment in _segments(record, step, arrivals, records):
                share = (segment.end - segment.start) / number
                if segment.part == "exposed":
                    result.exposed[segment.axis] += share
                else:
                    result.parts[segment.part] += share
                if segment.part == "slowest":
                    result.waited_for[segment.waited_for] += share
                if segment.part in COMPUTING:
                    computing.append((segment.start, segment.end))
        for axis, flights in in_flight(record, arrivals).items():
            result.hidden[axis] = _overlap(_joined(flights), computing) / number
        accounts.append(result)
    return accounts


@dataclass(frozen=True)
class BusiestRank:
    """The busiest rank beside the least busy one with the same work, in seconds a step.

    `waited` is how long other ranks waited for it, all together.
    """

    rank: int
    busy: float
    least: float
    waited: float


def straggler(records: Sequence[RankRecord], accounts: Sequence[RankTime]) -> BusiestRank | None:
    """The slowest rank; None if each pipeline rank has one rank alone, and so nothing to compare it with.

    The part "slowest" alone does not tell it: a rank may come late because its pipeline waited for another one.
    """
    least: dict[int, float] = {}
    for record, found in zip(records, accounts, strict=True):
        least[record.pipeline_rank] = min(found.busy, least.get(record.pipeline_rank, found.busy))
    if len(least) == len(records):
        return None
    excess = [found.busy - least[record.pipeline_rank] for record, found in zip(records, accounts, strict=True)]
    rank = max(range(len(records)), key=excess.__getitem__)
    waited = sum(found.waited_for[rank] for found in accounts)
    return BusiestRank(rank, accounts[rank].busy, least[records[rank].pipeline_rank], waited)


def in_flight(record: RankRecord, arrivals: _Arrivals) -> dict[str, list[tuple[float, float]]]:
    """For each axis, from when to when its operations were in flight before this rank waited for them."""
    handed_over: dict[tuple[str, int], float] = {}
    flights: dict[str, list[tuple[float, float]]] = {axis: [] for axis in record.axes}
    for step in record.steps.values():
        for span in step.spans:
            positions = range(span.first, span.second + 1)
            if span.name == "start":
                handed_over |= {(span.axis, position): span.end for position in positions}
            elif span.name == "wait":
                for position in positions:
                    # Of an operation of the step before the first recorded one nothing is known.
                    began = handed_over.get((span.axis, position), span.start)
                    began = max(began, arrivals.last(record, span.axis, position)[0])
                    if began < span.start:
                        flights[span.axis].append((began, span.start))
    return flights


def _joined(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, ascending and without overlaps."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _overlap(left: Sequence[tuple[float, float]], right: Sequence[tuple[float, float]]) -> float:
    """The length of what lies in both. Each is ascending and without overlaps."""
    total = 0.0
    i = 0
    j = 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def events(records: Sequence[RankRecord]) -> list[Event]:
    """The actions of the last recorded step in the pipeline of rank 0. Ranks of events are pipeline ranks."""
    pipeline = records[0].axes.get("pp", RankAxis((0,), ""))
    found = []
    for position, rank in enumerate(pipeline.ranks):
        step = records[rank].steps[max(records[rank].steps)]
        for span in step.spans:
            if span.name in ("F", "B", "I", "W"):
                action = Action(span.name, span.first, span.second)  # type: ignore[arg-type]
                found.append(Event(position, action, span.start, span.end))
    return found


# A trace for other programs


def chrome_trace(records: Sequence[RankRecord]) -> dict[str, Any]:
    """All recorded steps as a trace for ui.perfetto.dev: a process for each rank, and beside its work each axis."""
    arrivals = _Arrivals(records)
    origin = min(step.start for record in records for step in record.steps.values())
    rows: list[dict[str, Any]] = []
    for record in records:
        name = f"rank {record.rank} (pipeline rank {record.pipeline_rank})"
        rows.append({"ph": "M", "name": "process_name", "pid": record.rank, "args": {"name": name}})
        rows.append({"ph": "M", "name": "thread_name", "pid": record.rank, "tid": 0, "args": {"name": "work"}})
        for number, step in record.steps.items():
            rows.append(_row(f"step {number}", "step", record.rank, step.start - origin, step.end - step.start, {}))
            rows += [_span_row(record, span, arrivals, origin) for span in step.spans]
        for axis, flights in in_flight(record, arrivals).items():
            for index, (start, end) in enumerate(flights):
                shared = {"name": f"{axis} in flight", "cat": axis, "id": f"{axis}-{record.rank}-{index}"}
                for phase, moment in (("b", start), ("e", end)):
                    rows.append({**shared, "ph": phase, "pid": record.rank, "tid": 0, "ts": 1e6 * (moment - origin)})
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _span_row(record: RankRecord, span: RecordedSpan, arrivals: _Arrivals, origin: float) -> dict[str, Any]:
    details: dict[str, Any] = {}
    name = span.name
    if span.axis:
        operation = arrivals.operation(record, span.axis, span.first)
        came, last = arrivals.last(record, span.axis, span.second)
        name = f"{span.name} {span.axis}"
        if operation is not None:
            details = {"operation": operation.name, "bytes": operation.nbytes, "number": operation.number}
        if came > span.start:
            details["waited for rank"] = last
    elif span.first >= 0:
        name = f"{span.first}{span.name}{span.second}"
        details = {"stage": span.first, "microbatch": span.second}
    return _row(
        name, _OF_SPAN.get(span.name, span.axis), record.rank, span.start - origin, span.end - span.start, details
    )


def _row(
    name: str, category: str, rank: int, start: float, seconds: float, details: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",  # an event with a duration
        "name": name,
        "cat": category,
        "pid": rank,
        "tid": 0,
        "ts": 1e6 * start,  # microseconds
        "dur": 1e6 * seconds,
        "args": dict(details),
    }
