"""Turns a schedule into plans: inserts the transfers between ranks, and refuses an order that cannot run.

A plan is one rank's list of actions and `Transfers`. It cannot deadlock, for the following reason. The orders are timed
with nominal costs, and each message gets the time at which its producer ends. Messages that touch a rank at the same
time are one `Transfers`, and every rank has its `Transfers` in order of time. So both ends of a link name its messages
in the same order, and what is posted at one time depends on nothing that is posted later. This holds even where a
backend runs a rank's batches one after the other (NCCL).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megapar.pipeline.schedules import Action

Plan = list["Action | Transfers"]

# Nominal durations. They decide only how early a receive is posted, never whether a plan is valid.
COST = {"F": 4, "B": 8}
# Not 0: a transfer without duration would end at the same time as an action. The tie would put a receive into the batch
# of a send, after the action that it could have overlapped. With forwards alone, and transfers that take 0.3 forwards,
# that costs 23%.
TRANSFER_COST = 1


@dataclass(frozen=True)
class Transfer:
    """One message: the tensors that `consumer` takes from another rank.

    `peer` is the position of the other end on axis pp.
    """

    consumer: Action
    peer: int


@dataclass
class Transfers:
    """Messages that one rank posts together, as one batch. An action waits for the batch that brings its input.

    A rank has at most one batch with sends in flight. It waits for that batch before it posts the next one, so that the
    tensors that were sent are freed. Without this limit, with random delays of 30% on each action, a step would gain
    less than 1%.
    """

    sends: list[Transfer] = field(default_factory=list)
    receives: list[Transfer] = field(default_factory=list)

    def __str__(self) -> str:
        sends = [f"{transfer.consumer}->{transfer.peer}" for transfer in self.sends]
        receives = [f"{transfer.consumer}<-{transfer.peer}" for transfer in self.receives]
        return f"({' '.join(sends + receives)})"


def producer(action: Action, num_stages: int) -> Action | None:
    """The action of the neighboring stage whose result `action` takes. None if `action` takes none."""
    step = -1 if action.kind == "F" else 1  # activations come from the stage before, gradients from the one after
    return _beside(action, step, num_stages)


def consumer(action: Action, num_stages: int) -> Action | None:
    """The action of the neighboring stage that takes the result of `action`. None if there is none."""
    step = 1 if action.kind == "F" else -1
    return _beside(action, step, num_stages)


def _beside(action: Action, step: int, num_stages: int) -> Action | None:
    """The same kind of action on the stage `step` further on. None if there is no such stage."""
    stage = action.stage + step
    if not 0 <= stage < num_stages:
        return None
    # Action._replace would be shorter but takes six times as long. This runs several times for each action.
    return Action(action.kind, stage, action.microbatch)


def lower(orders: Sequence[Sequence[Action]], num_stages: int) -> list[Plan]:
    """Make the plan of each rank from its order of actions.

    The rank of an action is the one whose order holds it, so the orders also say on which rank each stage lives. Raises
    ValueError for an action that occurs twice. Raises ValueError if the orders cannot run to their end, with what each
    stuck rank waits for.
    """
    return _lower(orders, num_stages, range(len(orders)))


def lower_one(orders: Sequence[Sequence[Action]], num_stages: int, rank: int) -> Plan:
    """`lower(orders, num_stages)[rank]` in half the time, because the transfers of the other ranks are not made."""
    return _lower(orders, num_stages, [rank])[0]


def _lower(orders: Sequence[Sequence[Action]], num_stages: int, ranks: Sequence[int]) -> list[Plan]:
    rank_of = {action: rank for rank, order in enumerate(orders) for action in order}
    sources = {action: producer(action, num_stages) for action in rank_of}
    ends = _end_times(orders, rank_of, sources)
    batches: dict[int, dict[int, Transfers]] = {rank: {} for rank in ranks}
    for action, source in sources.items():
        if source is None:
            continue
        rank = rank_of[action]
        peer = rank_of[source]
        if rank == peer:
            continue  # both stages are on one rank, which hands the tensors over
        time = ends[source]
        if peer in batches:
            batches[peer].setdefault(time, Transfers()).sends.append(Transfer(action, rank))
        if rank in batches:
            batches[rank].setdefault(time, Transfers()).receives.append(Transfer(action, peer))
    return [_weave(orders[rank], ends, batches[rank]) for rank in ranks]


def _end_times(
    orders: Sequence[Sequence[Action]], rank_of: Mapping[Action, int], sources: Mapping[Action, Action | None]
) -> dict[Action, int]:
    """The nominal time at which each action ends.

    An action starts when the action before it in its rank's order has ended and its input has arrived. Raises
    ValueError for an action that occurs twice and for orders that cannot run to their end.
    """
    if sum(map(len, orders)) > len(rank_of):
        counts = Counter(action for order in orders for action in order)
        twice = ", ".join(str(action) for action, count in counts.items() if count > 1)
        raise ValueError(f"schedule holds more than once: {twice}")
    ends: dict[Action, int] = {}
    position = [0] * len(orders)
    clock = [0] * len(orders)
    # Each round runs every rank as far as it can go. A round in which no rank moves is the end, or a deadlock.
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order) and not _missing(order[position[rank]], ends, sources):
                action = order[position[rank]]
                source = sources[action]
                if source is not None:
                    delay = TRANSFER_COST if rank_of[source] != rank else 0
                    clock[rank] = max(clock[rank], ends[source] + delay)
                clock[rank] += COST[action.kind]
                ends[action] = clock[rank]
                position[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} waits at {order[at]} for {_missing(order[at], ends, sources)}"
        for rank, (order, at) in enumerate(zip(orders, position, strict=True))
        if at < len(order)
    ]
    if stuck:
        raise ValueError(f"schedule cannot run: {'; '.join(stuck)}")
    return ends


def _missing(action: Action, ends: Mapping[Action, int], sources: Mapping[Action, Action | None]) -> str:
    """What `action` still waits for, in words. "" if nothing."""
    if action.kind == "B":
        forward = Action("F", action.stage, action.microbatch)
        if forward not in ends:
            return f"its forward {forward}"
    source = sources[action]
    if source is None or source in ends:
        return ""
    awaited = "activation" if action.kind == "F" else "gradient"
    return f"the {awaited} of {source}"


def _weave(order: Sequence[Action], ends: Mapping[Action, int], batches: Mapping[int, Transfers]) -> Plan:
    """Insert a rank's batches into its order of actions. `batches` are by time.

    A batch with a send comes right after the action whose result it sends. A batch of receives alone comes before the
    action during which its messages arrive.
    """
    plan: Plan = []
    times = sorted(batches, reverse=True)
    for action in order:
        while times and times[-1] <= ends[action]:
            # At the time at which this action ends, a send may carry its result, so it must come after it.
            if times[-1] == ends[action] and batches[times[-1]].sends:
                break
            plan.append(batches[times.pop()])
        plan.append(action)
    return plan + [batches[time] for time in reversed(times)]
