"""Simulates the time of the runtime's plans. It needs no process group and no device."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megapar.pipeline.actions import Action, Event, peak
from megapar.pipeline.lowering import Message, MessageBatch
from megapar.pipeline.sharding_plan import Item, UnitAction


class Timeline(NamedTuple):
    """The result of simulating one step. Times are in the unit of the costs."""

    events: list[Event]
    makespan: float
    bubble: float
    """The idle share of the time of all ranks, from 0 to 1."""
    peak_live: list[int]
    """For each rank, the peak number of forwards, over all its stages, without their B or W yet."""
    ends: list[float]
    """For each rank, the end of its plan."""
    unit_waits: list[float]
    """For each rank, its time of waiting for the collectives of units."""


@dataclass
class _Batch:
    """A batch of messages, posted by a rank at the time `posted`.

    From `start` on the rank's end of the messages is ready. It is None while earlier batches of the rank are not
    finished.
    """

    messages: MessageBatch
    posted: float
    start: float | None = None
    ends: list[list[float]] = field(default_factory=list)
    """For each message the starts of its ends, as many as have started."""


@dataclass
class _Rank:
    """The state of one rank."""

    plan: Sequence[Item]
    next_item: int = 0
    """The index of the next item of the plan."""
    clock: float = 0.0
    """The end of all items before that."""
    batches: deque[_Batch] = field(default_factory=deque)
    """The posted, unfinished batches, the oldest first."""
    last_batch_end: float = 0.0
    last_send_end: float = 0.0
    """Of the finished batches: the end of the last one, and of the last one with sends."""
    arrivals: dict[Action, float] = field(default_factory=dict)
    """By action, the arrival of its input."""
    awaited: set[Action] = field(default_factory=set)
    """The actions whose inputs are in `batches`."""
    num_sending: int = 0
    """How many of `batches` have sends."""
    units_free: float = 0.0
    """The end of the collectives of units that have started. They run one after the other, beside the actions."""
    unit_ends: dict[tuple[str, int], float] = field(default_factory=dict)
    """The end of the newest gather and the newest reduction of each unit."""
    unit_wait: float = 0.0
    """Time of waiting for them so far."""

    @property
    def finished(self) -> bool:
        return self.next_item == len(self.plan)


Cost = Sequence[float] | float
"""What an action costs: a number for each stage, or one number for all stages."""
Transfer = Callable[[int, Message], float] | float
"""What a message costs: a function of one end, a rank, and the message there, or one number for all messages."""
UnitCost = Callable[[int, UnitAction], float]
"""What an action of a unit costs on a rank. That of a gather or a reduction runs beside the actions of the rank."""


def _free(rank: int, action: UnitAction) -> float:
    return 0.0


def simulate(
    plans: Sequence[Sequence[Item]],
    forward: Cost,
    backward: Cost,
    transfer: Transfer = 0.0,
    weights: Cost | None = None,
    units: UnitCost = _free,
) -> Timeline:
    """Simulate the plans of all ranks. `transfer` is the cost of a message, `units` that of an action of a unit.

    `backward` is the cost of a B. A W costs `weights` of it, and an I the rest. None means half:
    for each matrix product of a forward, I and W have one product of the same size each.

    As in the runtime, a message moves after both ends have posted it, the batches of a rank run one after the other,
    and a rank with sends in flight waits for them before it posts more sends. The collectives of a rank's units run one
    after the other. Raises ValueError if the plans deadlock.
    """
    orders = [[item for item in plan if isinstance(item, Action)] for plan in plans]
    num_stages = 1 + max(action.stage for order in orders for action in order)
    costs = _costs(num_stages, forward, backward, weights)
    events, ranks = _run(plans, costs, transfer, units)
    makespan = max(event.end for event in events)
    busy = sum(event.end - event.start for event in events)
    bubble = 1 - busy / (makespan * len(plans))
    # Every forward counts as one, from F to B or W.
    ones = [1] * num_stages
    peak_live = [int(peak(order, ones, ones)) for order in orders]
    return Timeline(
        events, makespan, bubble, peak_live, [rank.clock for rank in ranks], [rank.unit_wait for rank in ranks]
    )


def _run(
    plans: Sequence[Sequence[Item]], costs: dict[str, list[float]], transfer: Transfer, units: UnitCost
) -> tuple[list[Event], list[_Rank]]:
    """Run all plans to their end. Raises ValueError if they deadlock."""
    ranks = [_Rank(plan) for plan in plans]
    starts: dict[Action, list[float]] = {}
    events: list[Event] = []
    # Each round runs every rank as far as it can go. A round in which no rank moves is the end, or a deadlock.
    moved = True
    while moved:
        moved = False
        for number, rank in enumerate(ranks):
            while not rank.finished and _run_next_item(rank, number, costs, units, events):
                moved = True
            while rank.batches and _start_or_finish_batch(rank, number, starts, transfer):
                moved = True
    stuck = [f"rank {number} at {r.plan[r.next_item]}" for number, r in enumerate(ranks) if not r.finished]
    if stuck:
        raise ValueError(f"plans lock each other up: {'; '.join(stuck)}")
    return events, ranks


def _costs(num_stages: int, forward: Cost, backward: Cost, weights: Cost | None) -> dict[str, list[float]]:
    """The cost of an action, by its kind and then by its stage."""

    def by_stage(cost: Cost) -> list[float]:
        if isinstance(cost, Sequence):
            return list(cost)
        return [cost] * num_stages

    of_b = by_stage(backward)
    of_w = [cost / 2 for cost in of_b] if weights is None else by_stage(weights)
    of_i = [whole - part for whole, part in zip(of_b, of_w, strict=True)]
    return {"F": by_stage(forward), "B": of_b, "I": of_i, "W": of_w}


def _run_next_item(
    rank: _Rank, number: int, costs: dict[str, list[float]], units: UnitCost, events: list[Event]
) -> bool:
    """Run the next item of the plan of `rank`, rank number `number`. Returns False if it cannot run yet."""
    item = rank.plan[rank.next_item]
    if isinstance(item, MessageBatch):
        if item.sends:
            if rank.num_sending:
                return False
            # The runtime waits for the sends in flight before it posts more, so the rank's time goes on to their end.
            rank.clock = max(rank.clock, rank.last_send_end)
            rank.num_sending += 1
        rank.batches.append(_Batch(item, rank.clock))
        rank.awaited.update([message.consumer for message in item.receives])
    elif isinstance(item, UnitAction):
        _run_unit_action(rank, item, units(number, item))
    else:
        if item in rank.awaited:
            return False
        start = max(rank.clock, rank.arrivals.get(item, 0.0))
        rank.clock = start + costs[item.kind][item.stage]
        events.append(Event(number, item, start, rank.clock))
    rank.next_item += 1
    return True


def _run_unit_action(rank: _Rank, action: UnitAction, cost: float) -> None:
    """Start a collective of a unit, or wait for one. A wait and what follows it take the rank's own time."""
    if action.kind in ("gather", "reduce"):
        rank.units_free = max(rank.units_free, rank.clock) + cost
        rank.unit_ends[action.kind, action.unit] = rank.units_free
        return
    if action.kind in ("wait", "add"):
        awaited = "gather" if action.kind == "wait" else "reduce"
        end = rank.unit_ends[awaited, action.unit]
        rank.unit_wait += max(end - rank.clock, 0.0)
        rank.clock = max(end, rank.clock)
    rank.clock += cost


def _start_or_finish_batch(rank: _Rank, number: int, starts: dict[Action, list[float]], transfer: Transfer) -> bool:
    """Start the oldest batch of `rank`. If it has started, finish it once the other ends of its messages have started.

    `starts` has, by the consumer of a message, the starts of its ends. Returns False if the batch must wait.
    """
    batch = rank.batches[0]
    if batch.start is None:
        batch.start = max(batch.posted, rank.last_batch_end)
        for message in (*batch.messages.sends, *batch.messages.receives):
            batch.ends.append(starts.setdefault(message.consumer, []))
            batch.ends[-1].append(batch.start)
        return True
    # A message has two ends, so it has two starts once the batches of both ends have started.
    last_start = 0.0
    for times in batch.ends:
        if len(times) < 2:
            return False
        last_start = max(last_start, *times)
    if not callable(transfer):
        cost = transfer
    else:
        # Messages of a batch share the rank's links in each direction.
        sent = sum(transfer(number, message) for message in batch.messages.sends)
        received = sum(transfer(number, message) for message in batch.messages.receives)
        cost = max(sent, received)
    end = last_start + cost
    rank.last_batch_end = end
    if batch.messages.sends:
        rank.last_send_end = end
        rank.num_sending -= 1
    for message in batch.messages.receives:
        rank.arrivals[message.consumer] = end
        rank.awaited.remove(message.consumer)
    rank.batches.popleft()
    return True
