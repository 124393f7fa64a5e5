"""What a plan costs: simulates the very plans that the runtime executes, without a process."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megapar.pipeline.lowering import Plan, Transfers
from megapar.pipeline.schedules import Action, Event


class Timeline(NamedTuple):
    """A simulated step. Times are in the unit of the costs."""

    events: list[Event]
    makespan: float
    bubble: float
    """Share of all ranks' time in which they compute nothing."""
    peak_live: list[int]
    """For each rank, the most forwards at once (over all its stages) that still wait for their backward."""


@dataclass
class _Batch:
    transfers: Transfers
    posted: float
    start: float | None = None


@dataclass
class _Rank:
    """Where a rank is in its plan. `batches` are posted and not known to have ended; `free`: when the last did."""

    plan: Plan
    at: int = 0
    clock: float = 0.0
    batches: deque[_Batch] = field(default_factory=deque)
    free: float = 0.0
    sent: float = 0.0
    arrivals: dict[Action, float] = field(default_factory=dict)

    def awaits(self, action: Action) -> bool:
        return any(t.consumer == action for batch in self.batches for t in batch.transfers.receives)

    def sending(self) -> bool:
        return any(batch.transfers.sends for batch in self.batches)


def simulate(
    plans: Sequence[Plan], forward: Sequence[float] | float, backward: Sequence[float] | float, transfer: float = 0.0
) -> Timeline:
    """Run the plans of all ranks with costs per stage (or one cost for all) and per message.

    As in the runtime, a message moves once both ends have posted it, a rank's batches run one after the other, and a
    rank with sends in flight waits for them before it posts more. Raises ValueError if the plans lock each other up.
    """
    ranks = [_Rank(plan) for plan in plans]
    costs = {"F": forward, "B": backward}
    starts: dict[Action, list[float]] = {}
    events: list[Event] = []
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
    return Timeline(events, makespan, 1 - busy / (makespan * len(ranks)), [_peak_live(rank.plan) for rank in ranks])


def _advance(rank: _Rank, number: int, costs: dict[str, Sequence[float] | float], events: list[Event]) -> bool:
    """Run the next item of the rank's plan; False if it cannot run yet."""
    item = rank.plan[rank.at]
    if isinstance(item, Transfers):
        if item.sends:
            if rank.sending():
                return False
            rank.clock = max(rank.clock, rank.sent)
        rank.batches.append(_Batch(item, rank.clock))
    else:
        if rank.awaits(item):
            return False
        start = max(rank.clock, rank.arrivals.get(item, 0.0))
        cost = costs[item.kind]
        rank.clock = start + (cost[item.stage] if isinstance(cost, Sequence) else cost)
        events.append(Event(number, item, start, rank.clock))
    rank.at += 1
    return True


def _settle(rank: _Rank, starts: dict[Action, list[float]], transfer: float) -> bool:
    """Start the rank's oldest batch, or end it if the other ends of its messages have started too; False if neither."""
    batch = rank.batches[0]
    messages = [t.consumer for t in (*batch.transfers.sends, *batch.transfers.receives)]
    if batch.start is None:
        batch.start = max(batch.posted, rank.free)
        for message in messages:
            starts.setdefault(message, []).append(batch.start)
        return True
    if any(len(starts[message]) < 2 for message in messages):
        return False
    rank.free = transfer + max(max(starts[message]) for message in messages)
    if batch.transfers.sends:
        rank.sent = rank.free
    rank.arrivals.update({t.consumer: rank.free for t in batch.transfers.receives})
    rank.batches.popleft()
    return True


def _peak_live(plan: Plan) -> int:
    live = peak = 0
    for item in plan:
        if isinstance(item, Action):
            live += 1 if item.kind == "F" else -1
            peak = max(peak, live)
    return peak
