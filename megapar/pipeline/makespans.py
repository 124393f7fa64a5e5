"""How long orders take with given times: what zero-bubble schedules are chosen by."""

from collections.abc import Sequence
from typing import NamedTuple

from megapar.pipeline.actions import Orders


class Times(NamedTuple):
    """How long an action of each kind takes in a stage, and a message between ranks, in any unit."""

    F: float = 1.0
    I: float = 1.0  # noqa: E741
    W: float = 1.0
    message: float = 0.0


def makespans(orders: Orders, rank_of: Sequence[int], times: Sequence[Times]) -> list[float] | None:
    """How long orders take with each of `times`. None if they cannot run to their end."""
    found = Makespans(orders, rank_of)
    if not found.can_run:
        return None
    return [found.of(one) for one in times]


class Makespans:
    """How long orders of F's, I's and W's take, for one choice of times after the other.

    `rank_of` is the rank of each stage. Here messages do not wait for each other. `megapar.pipeline.simulation` lets
    them wait, and takes about ten times as long. `can_run` is False for orders that cannot run to their end.
    """

    def __init__(self, orders: Orders, rank_of: Sequence[int]):
        self._num_ranks = len(orders)
        # For each action, after all that it waits for: its rank, its kind, the number here of the producer of its input
        # (its own number if there is none), and whether that is on another rank.
        self._steps: list[tuple[int, str, int, bool]] = []
        numbers: dict[tuple[str, int, int], int] = {}  # by action
        last_stage = len(rank_of) - 1
        positions = [0] * len(orders)
        # Each round runs every rank as far as it can go.
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(orders):
                begin = positions[rank]
                for action in order[begin:]:
                    kind, stage, microbatch = action
                    number = len(self._steps)
                    # A rank runs F, I and W of a micro-batch in a stage in this order, so what one of them takes from
                    # another need not be looked at.
                    source = stage
                    if kind == "F" and stage > 0:
                        source = stage - 1
                    elif kind == "I" and stage < last_stage:
                        source = stage + 1
                    producer = number
                    if source != stage:
                        producer = numbers.get((kind, source, microbatch), -1)
                        if producer < 0:
                            break
                    numbers[action] = number
                    self._steps.append((rank, kind, producer, rank_of[source] != rank))
                    positions[rank] += 1
                moved = moved or positions[rank] > begin
        self.can_run = all(position == len(order) for position, order in zip(positions, orders, strict=True))

    def of(self, times: Times) -> float:
        """How long the orders take with `times`, rounded, so that the last digits decide nothing."""
        cost = times._asdict()
        message = times.message
        clocks = [0.0] * self._num_ranks
        ends = [0.0] * len(self._steps)
        for number, (rank, kind, producer, is_sent) in enumerate(self._steps):
            start = clocks[rank]
            ready = ends[producer]
            if is_sent:
                ready += message
            if ready > start:
                start = ready
            clocks[rank] = ends[number] = start + cost[kind]
        return round(max(clocks), 9)
