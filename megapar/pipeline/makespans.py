"""How long orders take with several times at once: what zero-bubble schedules are chosen by."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapar.pipeline.actions import Orders


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
    ends: dict[tuple[str, int, int], NDArray[np.float64]] = {}  # by action
    clocks = [np.zeros(len(times)) for _ in orders]
    positions = [0] * len(orders)
    last_stage = len(rank_of) - 1
    # Each round runs every rank as far as it can go.
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            clock = clocks[rank]
            begin = positions[rank]
            for action in order[begin:]:
                kind, stage, microbatch = action
                # The producer of the input. A rank runs F, I and W of a micro-batch in a stage in this order, so what
                # one of them takes from another need not be looked at.
                source = -1
                if kind == "F" and stage > 0:
                    source = stage - 1
                elif kind == "I" and stage < last_stage:
                    source = stage + 1
                if source >= 0:
                    ready = ends.get((kind, source, microbatch))
                    if ready is None:
                        break
                    if rank_of[source] != rank:
                        ready = ready + message
                    clock = np.maximum(clock, ready)
                clock = clock + cost[kind]
                ends[action] = clock
                positions[rank] += 1
            clocks[rank] = clock
            moved = moved or positions[rank] > begin
    if any(position < len(order) for position, order in zip(positions, orders, strict=True)):
        return None
    longest: NDArray[np.float64] = np.max(clocks, axis=0)
    return longest
