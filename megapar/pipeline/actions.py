"""What schedules are made of: actions, events, and the placement of stages on ranks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """A part of the work of one micro-batch on one stage. 3F7 is the forward of micro-batch 7 through stage 3.

    F    forward
    B    backward
    I    one half of the backward: the gradient of the stage's input. The stage before waits for it
    W    the other half: the gradients of weights. No other stage waits for them

    A stage runs a micro-batch backward as one B, or as an I and a later W.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Orders = list[list[Action]]
"""The actions of each pipeline rank, in running order."""


class Event(NamedTuple):
    """An action of a pipeline rank, real or simulated. Times are in seconds, or in the unit of a simulation."""

    rank: int
    action: Action
    start: float
    end: float


def looped(pp: int, vpp: int) -> list[int]:
    """The rank of each stage if stage s lives on rank s % pp. Chunk c of rank r then is stage c * pp + r."""
    return [stage % pp for stage in range(pp * vpp)]


def v_shaped(pp: int, vpp: int) -> list[int]:
    """The rank of each stage if rank r holds stages r and 2 * pp - 1 - r, so both ends live on rank 0.

    `vpp` is 2.
    """
    return [*range(pp), *reversed(range(pp))]


OfStages = Sequence[float] | Mapping[int, float]
"""A number for each stage."""


def peak(order: Iterable[Action], forward: OfStages, inputs: OfStages) -> float:
    """The peak of what a rank keeps for backward passes if it runs `order`.

    For each stage, a forward keeps `forward` until its B or I, and an I keeps `inputs` until its W: the inputs and the
    output gradients of matrix products. With ones the result is a number of micro-batches in stages.
    """
    kept = 0.0
    peak_kept = 0.0
    for action in order:
        if action.kind == "F":
            kept += forward[action.stage]
        elif action.kind == "W":
            kept -= inputs[action.stage]
        else:
            kept -= forward[action.stage]
        if action.kind == "I":
            kept += inputs[action.stage]
        peak_kept = max(peak_kept, kept)
    return peak_kept


def show(orders: Sequence[Iterable[object]]) -> str:
    """The orders, or lowered plans, as text with a line for each rank."""
    return "\n".join(f"rank {rank}: {' '.join(map(str, order))}" for rank, order in enumerate(orders))
