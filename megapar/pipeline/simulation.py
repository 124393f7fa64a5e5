"""Simulates the plans that the runtime executes, without a process, to find out how long they take."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megapar.pipeline.actions import Action, Event, peak
from megapar.pipeline.lowering import MessageBatch, Plan


class Timeline(NamedTuple):
    """The result of simulating one step. Times are in the unit of the costs."""

    events: list[Event]
    makespan: float
    bubble: float
    """Share of the time of all ranks in which they compute nothing, from 0 to 1."""
    peak_live: list[int]
    """For each rank, the largest number of forwards, over all its stages, that wait for their B or W at one time."""


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


Cost = Sequence[float] | float
"""What an action costs: a number for each stage, or one number for all stages."""


def simulate(
    plans: Sequence[Plan], forward: Cost, backward: Cost, transfer: float = 0.0, weights: Cost | None = None
) -> Timeline:
    """Simulate the plans of all ranks. `transfer` is the cost of a message.

    `backward` is the cost of a B. `weights` is the part of it that a W costs, and an I costs the rest. None means half:
    each matrix product has one product of the same size for the gradient of its input, and one for that of its weight.

    As in the runtime, a message moves after both ends have posted it, the batches of a rank run one after the other,
    and a rank with sends in flight waits for them before it posts more. Raises ValueError if the plans deadlock.
    """
    ranks = [_Rank(plan) for plan in plans]
    orders = [[item for item in plan if isinstance(item, Action)] for plan in plans]
    num_stages = 1 + max(action.stage for order in orders for action in order)
    costs = _costs(num_stages, forward, backward, weights)
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
    ones = [1] * num_stages
    return Timeline(events, makespan, bubble, [int(peak(order, ones, ones)) for order in orders])


def _costs(num_stages: int, forward: Cost, backward: Cost, weights: Cost | None) -> dict[str, list[float]]:
    """The cost of each kind of action, by stage."""

    def by_stage(cost: Cost) -> list[float]:
        return list(cost) if isinstance(cost, Sequence) else [cost] * num_stages

    whole = by_stage(backward)
    of_weights = [cost / 2 for cost in whole] if weights is None else by_stage(weights)
    of_inputs = [cost - part for cost, part in zip(whole, of_weights, strict=True)]
    return {"F": by_stage(forward), "B": whole, "I": of_inputs, "W": of_weights}


def _advance(rank: _Rank, number: int, costs: dict[str, list[float]], events: list[Event]) -> bool:
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
        rank.clock = start + costs[item.kind][item.stage]
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
