"""Simulates the plans that the runtime executes, without a process, to find out how long they take."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megapar.pipeline.lowering import MessageBatch, Plan
from megapar.pipeline.schedules import Action, Event


class Timeline(NamedTuple):
    """The result of simulating one step. Times are in the unit of the costs."""

    events: list[Event]
    makespan: float
    bubble: float
    """Share of the time of all ranks in which they compute nothing, from 0 to 1."""
    peak_live: list[int]
    """For each rank, the largest number of forwards, over all its stages, that wait for their backward at one time."""


@dataclass
class _Batch:
    """A batch of messages that a rank has posted. `start` is None until the batch may run."""

    messages: MessageBatch
    posted: float
    start: float | None = None


@dataclass
class _Rank:
    """The state of one rank.

    `at` is its position in the plan. `clock` is its time so far. `batches` are posted and not known to have
    ended, the oldest first. `free` is when the last batch ended, `sent` when the last batch with sends did. `arrivals`
    are the times at which inputs of actions arrived.
    """

    plan: Plan
    at: int = 0
    clock: float = 0.0
    batches: deque[_Batch] = field(default_factory=deque)
    free: float = 0.0
    sent: float = 0.0
    arrivals: dict[Action, float] = field(default_factory=dict)

    def awaits(self, action: Action) -> bool:
        return any(t.consumer == action for batch in self.batches for t in batch.messages.receives)

    def sending(self) -> bool:
        return any(batch.messages.sends for batch in self.batches)


def simulate(
    plans: Sequence[Plan], forward: Sequence[float] | float, backward: Sequence[float] | float, transfer: float = 0.0
) -> Timeline:
    """Simulate the plans of all ranks. Costs are per stage, or one cost for all stages, and `transfer` per message.

    As in the runtime, a message moves after both ends have posted it, the batches of a rank run one after the other,
    and a rank with sends in flight waits for them before it posts more. Raises ValueError if the plans deadlock.
    """
    ranks = [_Rank(plan) for plan in plans]
    costs = {"F": forward, "B": backward}
    starts: dict[Action, list[float]] = {}
    events: list[Event] = []
    # Each round runs every rank as far as it can go. A round in which no rank moves is the end, or a deadlock.
    moved = True
    while moved:
        moved = False
        for number, rank in enumerate(ranks):
            while rank.at < len(rank.plan) and _advance(rank, number, costs, events):
                moved = True
            while rank.batches and _settle(rank, starts, transfer):
                moved = True
    stuck = [f"rank {number} at {rank.plan[rank.at]}" for number, rank in enumerate(ranks) if rank.at < len(rank.plan)]
    if stuck:
        raise ValueError(f"plans lock each other up: {'; '.join(stuck)}")
    makespan = max(event.end for event in events)
    busy = sum(event.end - event.start for event in events)
    bubble = 1 - busy / (makespan * len(ranks))
    return Timeline(events, makespan, bubble, [_peak_live(rank.plan) for rank in ranks])


def _advance(rank: _Rank, number: int, costs: dict[str, Sequence[float] | float], events: list[Event]) -> bool:
    """Run the next item of the rank's plan. Returns False if it cannot run yet."""
    item = rank.plan[rank.at]
    if isinstance(item, MessageBatch):
        if item.sends:
            if rank.sending():
                return False
            # The runtime waits for the sends in flight before it posts more, so this rank's time goes on to their end.
            rank.clock = max(rank.clock, rank.sent)
        rank.batches.append(_Batch(item, rank.clock))
    else:
        if rank.awaits(item):
            return False
        start = max(rank.clock, rank.arrivals.get(item, 0.0))
        cost = costs[item.kind]
        duration = cost[item.stage] if isinstance(cost, Sequence) else cost
        rank.clock = start + duration
        events.append(Event(number, item, start, rank.clock))
    rank.at += 1
    return True


def _settle(rank: _Rank, starts: dict[Action, list[float]], transfer: float) -> bool:
    """Start the rank's oldest batch, or end it if the other ends of its messages have started too.

    Returns False if it can do neither.
    """
    batch = rank.batches[0]
    messages = [t.consumer for t in (*batch.messages.sends, *batch.messages.receives)]
    if batch.start is None:
        batch.start = max(batch.posted, rank.free)
        for message in messages:
            starts.setdefault(message, []).append(batch.start)
        return True
    # A message has two ends, so it has two starts when both have posted it.
    if any(len(starts[message]) < 2 for message in messages):
        return False
    rank.free = transfer + max(max(starts[message]) for message in messages)
    if batch.messages.sends:
        rank.sent = rank.free
    rank.arrivals.update({t.consumer: rank.free for t in batch.messages.receives})
    rank.batches.popleft()
    return True


def _peak_live(plan: Plan) -> int:
    """The largest number of forwards in the plan that wait for their backward at one time."""
    live = peak = 0
    for item in plan:
        if isinstance(item, Action):
            live += 1 if item.kind == "F" else -1
            peak = max(peak, live)
    return peak
