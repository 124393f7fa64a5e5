"""How long orders take with several times at once: what zero-bubble schedules are chosen by."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapar.pipeline.actions import Action, Orders


class Times(NamedTuple):
    """How long an action of each kind takes in a stage, and a message between ranks, in any unit."""

    F: float = 1.0
    I: float = 1.0  # noqa: E741
    W: float = 1.0
    message: float = 0.0


def makespans(orders: Orders, rank_of: Sequence[int], times: Sequence[Times]) -> NDArray[np.float64] | None:
    """How long orders of F's, I's and W's take with each of `times`. None if they cannot run to their end.

    `rank_of` is the rank of each stage. Here messages do not wait for each other. `megapar.pipeline.simulation` lets
    them wait, and takes about ten times as long.
    """
    cost = {kind: np.array([getattr(t, kind) for t in times]) for kind in "FIW"}
    message = np.array([t.message for t in times])
    ends: dict[Action, NDArray[np.float64]] = {}
    clocks = [np.zeros(len(times)) for _ in orders]
    positions = [0] * len(orders)
    # Each round runs every rank as far as it can go.
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            clock = clocks[rank]
            begin = positions[rank]
            for action in order[begin:]:
                source = _source(action, len(rank_of) - 1)
                if source is not None:
                    ready = ends.get(source)
                    if ready is None:
                        break
                    if rank_of[source.stage] != rank:
                        ready = ready + message
                    clock = np.maximum(clock, ready)
                clock = clock + cost[action.kind]
                ends[action] = clock
                positions[rank] += 1
            clocks[rank] = clock
            moved = moved or positions[rank] > begin
    if any(position < len(order) for position, order in zip(positions, orders, strict=True)):
        return None
    longest: NDArray[np.float64] = np.max(clocks, axis=0)
    return longest


def _source(action: Action, last_stage: int) -> Action | None:
    """The producer of the action's input. None without an input, or if it is certainly of the same rank.

    A rank runs F, I and W of a micro-batch in a stage in this order, so these need not be looked at.
    """
    kind, stage, microbatch = action
    if kind == "F" and stage > 0:
        return Action("F", stage - 1, microbatch)
    if kind == "I" and stage < last_stage:
        return Action("I", stage + 1, microbatch)
    return None
