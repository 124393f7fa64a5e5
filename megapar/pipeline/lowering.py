"""Turns a schedule into plans: inserts the messages between ranks, and refuses impossible orders.

A plan is one rank's list of actions and message batches (`MessageBatch`). Plans cannot deadlock, for these reasons:

1. All actions are timed with nominal durations. The time of a message is the end of its producer.
2. All messages of a rank at one time are one batch. A rank posts its batches in order of time.
3. So the two ranks at the ends of a link post its messages in the same order.
4. Nothing waits for a batch with a later time, so no circle of waiting can form. This holds even if a backend runs a
   rank's batches one after the other (NCCL).
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from megapar.pipeline.actions import Action

Plan = list["Action | MessageBatch"]

# Nominal durations. They decide which messages share a batch and how early it is posted, never whether a plan is valid.
COST = {"F": 64, "B": 128, "I": 64, "W": 64}
# The nominal duration of a message. It is not 0, because the actions of neighbors would then end at the same time. A
# rank's receive would join the batch of its send, which is posted only after the action that the receive could have
# overlapped. In a simulation of forwards alone, with messages that take 0.3 forwards, a step takes 23% longer. It is
# much less than an action, because it adds up along a chain of stages, and batches would then be out of step with
# actions: with a quarter of a forward, zb-v on 8 ranks would idle 7% of a step instead of 3.5%.
MESSAGE_COST = 1


@dataclass(frozen=True)
class Message:
    """One end of a message: the tensors for `consumer` from another rank.

    `consumer` identifies the message at both ends. `peer` is the position of the other end on axis pp.
    """

    consumer: Action
    peer: int


@dataclass
class MessageBatch:
    """Messages posted together by one rank. An action waits for the batch with its input.

    The runtime lets a rank have at most one batch with sends in flight. Before it posts the next one, it waits, and
    frees the sent tensors. Without this limit, a simulated step with random
    delays of 30% on each action would be less than 1% faster.
    """

    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)

    def __str__(self) -> str:
        sends = [f"{message.consumer}->{message.peer}" for message in self.sends]
        receives = [f"{message.consumer}<-{message.peer}" for message in self.receives]
        return f"({' '.join(sends + receives)})"


def producer(action: Action, num_stages: int, exists: Container[Action]) -> Action | None:
    """The producer of the input of `action`, in a neighboring stage. None if `action` takes no input.

    `exists` are all actions of the schedule. They tell whether a backward is one action or two halves.
    """
    if action.kind == "W":
        return None  # what it needs was left on this rank by its I
    offset = -1 if action.kind == "F" else 1  # activations come from the stage before, gradients from the one after
    stage = action.stage + offset
    if not 0 <= stage < num_stages:
        return None
    # Action._replace would be shorter but takes six times as long. This runs several times for each action.
    if action.kind == "F":
        return Action("F", stage, action.microbatch)
    half = Action("I", stage, action.microbatch)
    if half in exists:
        return half
    return Action("B", stage, action.microbatch)


def lower(orders: Sequence[Sequence[Action]], num_stages: int) -> list[Plan]:
    """Make the plan of each rank from its order of actions.

    An action belongs to the rank with it in its order, so the orders also give each stage its rank.

    Raises ValueError

    - if an action occurs twice;
    - if the orders cannot run to their end. The message lists what each stuck rank waits for.
    """
    return _lower(orders, num_stages, range(len(orders)))


def lower_one(orders: Sequence[Sequence[Action]], num_stages: int, rank: int) -> Plan:
    """`lower(orders, num_stages)[rank]` in half the time, because the messages of the other ranks are not made."""
    return _lower(orders, num_stages, [rank])[0]


def refuse_circles(orders: Sequence[Sequence[Action]], num_stages: int) -> None:
    """Raise the ValueError of `lower` without making plans."""
    rank_of = {action: rank for rank, order in enumerate(orders) for action in order}
    _end_times(orders, rank_of, {action: producer(action, num_stages, rank_of) for action in rank_of})


def _lower(orders: Sequence[Sequence[Action]], num_stages: int, ranks: Sequence[int]) -> list[Plan]:
    rank_of = {action: rank for rank, order in enumerate(orders) for action in order}
    sources = {action: producer(action, num_stages, rank_of) for action in rank_of}
    ends = _end_times(orders, rank_of, sources)
    by_rank_and_time: dict[int, dict[float, MessageBatch]] = {rank: {} for rank in ranks}
    for action, source in sources.items():
        if source is None:
            continue
        sender = rank_of[source]
        receiver = rank_of[action]
        if sender == receiver:
            continue  # both stages are on one rank, which passes the tensors on without a message
        time = ends[source]
        if sender in by_rank_and_time:
            batch = by_rank_and_time[sender].setdefault(time, MessageBatch())
            batch.sends.append(Message(action, peer=receiver))
        if receiver in by_rank_and_time:
            batch = by_rank_and_time[receiver].setdefault(time, MessageBatch())
            batch.receives.append(Message(action, peer=sender))
    return [_weave(orders[rank], ends, by_rank_and_time[rank]) for rank in ranks]


def _end_times(
    orders: Sequence[Sequence[Action]],
    rank_of: Mapping[Action, int],
    sources: Mapping[Action, Action | None],
) -> dict[Action, float]:
    """The nominal end of each action.

    An action starts when the action before it in its rank's order has ended and its input has arrived. Raises
    ValueError if an action occurs twice, or if the orders cannot run to their end.
    """
    if sum(map(len, orders)) > len(rank_of):
        counts = Counter(action for order in orders for action in order)
        twice = ", ".join(str(action) for action, count in counts.items() if count > 1)
        raise ValueError(f"schedule holds more than once: {twice}")
    ends: dict[Action, float] = {}
    position = [0] * len(orders)
    clock = [0.0] * len(orders)
    # Each round runs every rank as far as it can go. If no rank moves in a round, either everything has run, or the
    # rest can never run.
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order) and _missing(order[position[rank]], ends, sources) is None:
                action = order[position[rank]]
                source = sources[action]
                if source is not None:
                    delay = MESSAGE_COST if rank_of[source] != rank else 0
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


def _missing(action: Action, ends: Mapping[Action, float], sources: Mapping[Action, Action | None]) -> str | None:
    """What `action` still waits for, in words. None if it can run."""
    if action.kind in ("B", "I"):
        forward = Action("F", action.stage, action.microbatch)
        if forward not in ends:
            return f"its forward {forward}"
    if action.kind == "W":
        half = Action("I", action.stage, action.microbatch)
        if half not in ends:
            return f"its gradient of inputs {half}"
    source = sources[action]
    if source is None or source in ends:
        return None
    awaited = "activation" if action.kind == "F" else "gradient"
    return f"the {awaited} of {source}"


def _weave(order: Sequence[Action], ends: Mapping[Action, float], batches: Mapping[float, MessageBatch]) -> Plan:
    """Insert a rank's batches into its order of actions. `batches` are by time.

    A batch with a send comes right after the producer of its tensors. A batch of receives alone comes before the action
    during their transfer.
    """
    plan: Plan = []
    times = sorted(batches, reverse=True)
    for action in order:
        while times and times[-1] <= ends[action]:
            # A batch that sends this action's result must follow the action.
            if times[-1] == ends[action] and batches[times[-1]].sends:
                break
            plan.append(batches[times.pop()])
        plan.append(action)
    return plan + [batches[time] for time in reversed(times)]
