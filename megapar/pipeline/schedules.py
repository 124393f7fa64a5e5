"""Pipeline schedules as data: a list of actions for each pipeline rank.

They can be printed, compared and tested without a process. A schedule says only on which rank each stage lives and in
which order each rank computes. `lowering` inserts the transfers. `runtime` executes the result.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megapar.config import ParallelConfig
from megapar.errors import ConfigError
from megapar.plugins import named

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """A part of the work of one micro-batch on one stage. 3F7 is the forward of micro-batch 7 through stage 3.

    F    forward
    B    backward
    I    the half of the backward that computes the gradient of the stage's input, which the stage before waits for
    W    the other half, the gradients of weights, which no other stage waits for

    A stage runs a micro-batch backward as one B, or as an I and a later W.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Event(NamedTuple):
    """An action that ran, or would run, on a pipeline rank. Times are in seconds, or in the unit of a simulation."""

    rank: int
    action: Action
    start: float
    end: float


def looped(pp: int, vpp: int) -> list[int]:
    """The rank of each stage if stage s lives on rank s % pp. Chunk c of rank r then is stage c * pp + r."""
    return [stage % pp for stage in range(pp * vpp)]


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule.

    `orders(pp, vpp, num_microbatches)` returns the actions of each pipeline rank. `place(pp, vpp)` returns the rank on
    which each of the pp * vpp stages lives, vpp of them on each rank. `breadth_first` means that on a pipeline of one
    rank each fine stage runs all micro-batches before the next one (`megapar.pipeline.refine`).
    """

    orders: Callable[[int, int, int], list[list[Action]]]
    place: Callable[[int, int], list[int]] = looped
    breadth_first: bool = False


def find(name: str) -> Schedule:
    """The schedule that parallel.schedule names: a key of SCHEDULES, or MODULE:NAME. Raises ConfigError if there is
    none."""
    return named("parallel.schedule", name, SCHEDULES, Schedule)


def placement(name: str, pp: int, vpp: int) -> list[int]:
    """The pipeline rank on which each stage lives."""
    return find(name).place(pp, vpp)


def embedding_ranks(parallel: ParallelConfig) -> tuple[int, int]:
    """The pipeline ranks of the first and the last stage. They need tokens or targets, and hold a tied embedding."""
    place = placement(parallel.schedule, parallel.pp, parallel.vpp)
    return place[0], place[-1]


def make(name: str, pp: int, vpp: int, num_microbatches: int) -> list[list[Action]]:
    """The actions of each pipeline rank in order, for schedule `name` (see `find`) over pp * vpp stages.

    Any number of micro-batches from 1 works. Raises ConfigError for an unknown name, sizes below 1, or a schedule that
    cannot hold vpp stages on a rank.
    """
    schedule = find(name)
    for flag, value in (("parallel.pp", pp), ("parallel.vpp", vpp), ("the number of micro-batches", num_microbatches)):
        if value < 1:
            raise ConfigError(f"{flag} is {value}, but a pipeline needs at least 1")
    if name == "1f1b" and vpp > 1:
        raise ConfigError(f"parallel.vpp {vpp} needs parallel.schedule interleaved: 1f1b runs one stage on each rank")
    orders = schedule.orders(pp, vpp, num_microbatches)
    place = schedule.place(pp, vpp)
    for rank, order in enumerate(orders):
        stages = {action.stage for action in order}
        if stages != {stage for stage, home in enumerate(place) if home == rank}:
            raise ConfigError(
                f"parallel.schedule={name}: orders stages {sorted(stages)} on rank {rank}, but places the stages on "
                f"ranks {place}"
            )
    return orders


def show(orders: Sequence[Iterable[object]]) -> str:
    """The orders, or lowered plans, as text with a line for each rank."""
    return "\n".join(f"rank {rank}: {' '.join(map(str, order))}" for rank, order in enumerate(orders))


def gpipe(pp: int, vpp: int, num_microbatches: int) -> list[list[Action]]:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965). Every micro-batch is in flight at once."""
    microbatches = range(num_microbatches)
    orders = []
    for rank in range(pp):
        stages = range(rank, pp * vpp, pp)
        forwards = [Action("F", s, m) for s in stages for m in microbatches]
        # The gradient goes through this rank's stages from the last to the first.
        backwards = [Action("B", s, m) for s in reversed(stages) for m in microbatches]
        orders.append(forwards + backwards)
    return orders


def one_f_one_b(pp: int, vpp: int, num_microbatches: int) -> list[list[Action]]:
    """PipeDream-flush (Narayanan et al., arXiv 2006.09503): rank r holds at most pp - r micro-batches."""
    orders = []
    for rank in range(pp):
        forwards = [Action("F", rank, m) for m in range(num_microbatches)]
        backwards = [Action("B", rank, m) for m in range(num_microbatches)]
        # The first backward reaches this rank after the micro-batch has gone through the pp - rank - 1 later stages.
        orders.append(_warm_up_alternate_drain(forwards, backwards, warmup=pp - rank - 1))
    return orders


def interleaved(pp: int, vpp: int, num_microbatches: int) -> list[list[Action]]:
    """Megatron-LM's looped 1F1B (arXiv 2104.04473): groups of pp micro-batches go through the chunks of every rank.

    A number of micro-batches that pp does not divide is scheduled as the next multiple of pp. The actions of the
    micro-batches that do not exist are then left out. A valid order stays valid without all actions of a micro-batch.
    """
    if vpp == 1:
        # The warm-up below has 2 * (pp - rank - 1) forwards for one chunk. 1F1B holds half as many micro-batches.
        return one_f_one_b(pp, vpp, num_microbatches)
    orders = []
    for rank in range(pp):
        forwards = []
        backwards = []
        for group in range(0, num_microbatches, pp):
            for chunk in range(vpp):
                for m in range(group, group + pp):
                    forwards.append(Action("F", chunk * pp + rank, m))
                    backwards.append(Action("B", (vpp - 1 - chunk) * pp + rank, m))
        # Megatron-LM's warm-up: a group of pp micro-batches goes through all chunks but the last, and two more forwards
        # run for each later rank.
        warmup = 2 * (pp - rank - 1) + (vpp - 1) * pp
        order = _warm_up_alternate_drain(forwards, backwards, warmup)
        orders.append([action for action in order if action.microbatch < num_microbatches])
    return orders


def _warm_up_alternate_drain(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then one forward and one backward in turn, then the remaining backwards."""
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards[warmup:]) :]


SCHEDULES = {
    "gpipe": Schedule(gpipe),
    "1f1b": Schedule(one_f_one_b),
    "interleaved": Schedule(interleaved),
}
