"""The pipeline schedules, by name: the rank of each stage, and the order of each rank's actions.

A schedule is data: a list of actions for each pipeline rank. It can be printed, compared and tested without a process.
`lowering` inserts the transfers. `runtime` executes the result.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from megapar.base.errors import ConfigError
from megapar.config.messages import counted
from megapar.config.options import ParallelConfig
from megapar.config.plugins import named
from megapar.config.unknown import joined
from megapar.config.virtual_stages import ANY, ONE, SEVERAL, TWO, VirtualStages
from megapar.pipeline.actions import Action, Event, Kind, Orders, looped, peak, show, v_shaped
from megapar.pipeline.orders import gpipe, interleaved, one_f_one_b
from megapar.pipeline.schedule_files import is_file, read
from megapar.pipeline.zero_bubble import Durations, ScheduleMemory, counted_by_stage, shortest
from megapar.pipeline.zero_bubble_orders import dualpipe_v

__all__ = ["SCHEDULES", "Action", "Event", "Kind", "Orders", "Schedule", "find", "looped", "make", "placement", "show"]


@dataclass(frozen=True)
class Search:
    """What limits a searched order (`zero_bubble.shortest`).

    `microbatches(pp)` is how many whole micro-batches a rank may keep if no limit in bytes is given. `grows`:
    train.memory_gb may let a rank keep more. It may not where a schedule has its name for its limit, as v-half.
    """

    microbatches: Callable[[int], float]
    grows: bool = True


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule."""

    orders: Callable[[int, int, int], Orders]
    """The actions of each pipeline rank, by pp, vpp and the number of micro-batches."""
    placement: Callable[[int, int], list[int]] = looped
    """The rank of each of the pp * vpp stages, by pp and vpp. Each rank has vpp of them."""
    vpp: VirtualStages = ANY
    """The numbers of stages that a rank may have."""
    breadth_first: bool = False
    """Whether with ZeRO-2 and 3 the traffic does not depend on the number of micro-batches.

    On a pipeline of one rank each fine stage runs all of them before the next one (`megapar.pipeline.refine`). On
    several ranks the weights of a stage stay while it runs them (`megapar.pipeline.sharding_plan`).
    """
    in_halves: bool = False
    """Whether the backward pass of a stage comes as I and W (the gradients of its input, then those of its weights)."""
    repeats: bool = False
    """Whether each pp micro-batches of a long step take as long as the pp before them, so that a few show the time."""
    keeps_all: bool = False
    """Whether a rank keeps all micro-batches of a step. Else a few also show what it keeps at most."""
    search: Search | None = None
    """What searches the order within parallel.schedule_memory_gb, for the times of parallel.schedule_costs. None: the
    order is fixed, and a run refuses to keep more than that limit."""
    name: str = ""
    """What messages call it: the value of parallel.schedule. `find` fills it in."""

    def __str__(self) -> str:
        return self.name

    def within(self, memory: ScheduleMemory | None = None, durations: Durations | None = None) -> "Schedule":
        """Return the schedule searched within `memory` for `durations`, or this one if its order is fixed.

        Without `memory` the limit is that of `search`. Without `durations` the times of actions are not known.
        """
        search = self.search
        if search is None:
            return self

        def orders(pp: int, vpp: int, num_microbatches: int) -> Orders:
            rank_of = self.placement(pp, vpp)
            limit = memory or counted_by_stage(search.microbatches(pp), rank_of)
            return shortest(rank_of, num_microbatches, limit, durations)

        return replace(self, orders=orders)


def find(name: str) -> Schedule:
    """The schedule called `name` by parallel.schedule: a key of SCHEDULES, a file, or MODULE:NAME.

    A name with a slash, or with the ending .txt or .csv, is a file's. Raises ConfigError if there is no such schedule,
    or if the file cannot be read or cannot run.
    """
    if name == "auto":
        # Until the choice is made, stages count as looped. The axis of tied embeddings is made for the first and the
        # last rank then, and stays without use if the chosen schedule has both ends on one rank.
        schedule = Schedule(_not_chosen)
    elif is_file(name):
        file = read(name)
        in_halves = any(action.kind == "I" for order in file.orders for action in order)
        schedule = Schedule(file.orders_for, file.placement_for, in_halves=in_halves)
    else:
        schedule = named("parallel.schedule", name, SCHEDULES, Schedule)
    return replace(schedule, name=name)


def of(parallel: ParallelConfig, memory: ScheduleMemory | None = None) -> Schedule:
    """The schedule of a run, made for its `parallel.schedule_costs` and within `memory`.

    `memory` is `parallel.schedule_memory_gb` for the run's stages. None: the schedule's own limit. Schedules without
    freedom are checked against it: `make` then raises ConfigError.
    """
    durations = Durations(*parallel.schedule_costs) if parallel.schedule_costs else None
    schedule = find(parallel.schedule)
    if schedule.search is not None:
        return schedule.within(memory, durations)
    if memory is None:
        return schedule
    return replace(schedule, orders=_checked(parallel.schedule, schedule.orders, memory))


def virtual_stages(name: str) -> VirtualStages:
    """What a schedule says of parallel.vpp. A file says it only when it is read, so every number may work."""
    if is_file(name):
        return ANY
    return find(name).vpp


def placement(name: str | Schedule, pp: int, vpp: int) -> list[int]:
    """The pipeline rank of each stage."""
    schedule = find(name) if isinstance(name, str) else name
    return schedule.placement(pp, vpp)


def embedding_ranks(parallel: ParallelConfig) -> tuple[int, int]:
    """The pipeline ranks of the first and the last stage. They need tokens or targets, and hold a tied embedding."""
    rank_of = placement(parallel.schedule, parallel.pp, parallel.vpp)
    return rank_of[0], rank_of[-1]


def make(name: str | Schedule, pp: int, vpp: int, num_microbatches: int) -> Orders:
    """The actions of each pipeline rank in order, for a schedule or its name (see `find`) over pp * vpp stages.

    Any number of micro-batches from 1 works. Raises ConfigError for an unknown name, sizes below 1, or a vpp
    against the schedule.
    """
    schedule = find(name) if isinstance(name, str) else name
    for flag, value in (("parallel.pp", pp), ("parallel.vpp", vpp), ("the number of micro-batches", num_microbatches)):
        if value < 1:
            raise ConfigError(f"{flag} is {value}, but a pipeline needs at least 1")
    needs = schedule.vpp.nearest_to(vpp)
    if vpp != needs:
        works = "interleaved" if vpp > 1 else "1f1b or zb-h1"
        raise ConfigError(
            f"parallel.vpp {vpp} needs parallel.schedule {works}: {schedule} runs {counted(needs, 'stage')} on each "
            "rank"
        )
    orders = schedule.orders(pp, vpp, num_microbatches)
    rank_of = schedule.placement(pp, vpp)
    for rank, order in enumerate(orders):
        stages = {action.stage for action in order}
        if stages != {stage for stage, home in enumerate(rank_of) if home == rank}:
            raise ConfigError(
                f"parallel.schedule={schedule}: orders stages {sorted(stages)} on rank {rank}, but places the stages "
                f"on ranks {rank_of}"
            )
    return orders


def _not_chosen(pp: int, vpp: int, num_microbatches: int) -> Orders:
    raise ConfigError(
        "parallel.schedule=auto: a run chooses the schedule when it first starts; name one of "
        f"{', '.join(SCHEDULES)} here"
    )


def _checked(
    name: str, orders: Callable[[int, int, int], Orders], memory: ScheduleMemory
) -> Callable[[int, int, int], Orders]:
    """`orders` with a check: ConfigError if they keep more than `memory`."""

    def within(pp: int, vpp: int, num_microbatches: int) -> Orders:
        made = orders(pp, vpp, num_microbatches)
        kept = max(peak(order, memory.forward, memory.inputs) for order in made)
        if kept > memory.limit:
            obey = joined([other for other, each in SCHEDULES.items() if each.search and each.search.grows], "or")
            raise ConfigError(
                f"parallel.schedule={name}: keeps {kept / 2**30:.3f} GiB on a rank for its backward passes, more than "
                f"parallel.schedule_memory_gb={memory.limit / 2**30:g}; allow that much, or use {obey}, which "
                "obey it"
            )
        return made

    return within


def _searched(
    placement: Callable[[int, int], list[int]],
    vpp: VirtualStages,
    microbatches: Callable[[int], float],
    *,
    grows: bool = True,
) -> Schedule:
    """Return a schedule whose order is searched."""
    search = Search(microbatches, grows)
    return Schedule(_not_chosen, placement, vpp, in_halves=True, repeats=True, search=search).within()


SCHEDULES = {
    "gpipe": Schedule(gpipe, repeats=True, keeps_all=True),
    "breadth": Schedule(gpipe, breadth_first=True, keeps_all=True),
    "1f1b": Schedule(one_f_one_b, vpp=ONE, repeats=True),
    "interleaved": Schedule(interleaved, vpp=SEVERAL, repeats=True),
    "zb-h1": _searched(looped, ONE, lambda pp: pp),
    "zb-2p": _searched(looped, ONE, lambda pp: 2 * pp, grows=False),
    "zb-interleaved": _searched(looped, SEVERAL, lambda pp: pp),
    "zb-v": _searched(v_shaped, TWO, lambda pp: pp),
    # What the papers' building blocks keep. One extra micro-batch keeps the rank at the bottom of the V busy. So the
    # share of 1F1B's memory comes near 1/2 and 1/3 only where ranks are many.
    "v-half": _searched(v_shaped, TWO, lambda pp: pp / 2 + 1, grows=False),
    "v-min": _searched(v_shaped, TWO, lambda pp: (pp + 1) // 3 + 1, grows=False),
    "dualpipe-v": Schedule(dualpipe_v, v_shaped, TWO, in_halves=True, repeats=True),
}
