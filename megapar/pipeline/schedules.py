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
from megapar.config.virtual_stages import ANY, ONE, SEVERAL, TWO, VirtualStages
from megapar.pipeline.actions import Action, Event, Kind, Orders, looped, peak, show, v_shaped
from megapar.pipeline.orders import gpipe, interleaved, one_f_one_b
from megapar.pipeline.schedule_files import is_file, read
from megapar.pipeline.zero_bubble import Durations, Memory, counted_by_stage, shortest
from megapar.pipeline.zero_bubble_orders import dualpipe_v

__all__ = ["SCHEDULES", "Action", "Event", "Kind", "Orders", "Schedule", "find", "looped", "make", "placement", "show"]


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
    name: str = ""
    """What messages call it: the value of parallel.schedule. `find` fills it in."""

    def __str__(self) -> str:
        return self.name


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
        schedule = Schedule(file.orders_for, file.placement_for)
    else:
        schedule = named("parallel.schedule", name, SCHEDULES, Schedule)
    return replace(schedule, name=name)


def of(parallel: ParallelConfig, memory: Memory | None = None) -> Schedule:
    """The schedule of a run, made for its `parallel.schedule_costs` and within `memory`.

    `memory` is `parallel.schedule_memory_gb` for the run's stages. None: the schedule's own limit. Schedules without
    freedom are checked against it: `make` then raises ConfigError.
    """
    durations = Durations(*parallel.schedule_costs) if parallel.schedule_costs else None
    if parallel.schedule in ZERO_BUBBLE:
        return replace(ZERO_BUBBLE[parallel.schedule].schedule(memory, durations), name=parallel.schedule)
    schedule = find(parallel.schedule)
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


def _checked(name: str, orders: Callable[[int, int, int], Orders], memory: Memory) -> Callable[[int, int, int], Orders]:
    """`orders` with a check: ConfigError if they keep more than `memory`."""

    def within(pp: int, vpp: int, num_microbatches: int) -> Orders:
        made = orders(pp, vpp, num_microbatches)
        kept = max(peak(order, memory.forward, memory.inputs) for order in made)
        if kept > memory.limit:
            raise ConfigError(
                f"parallel.schedule={name}: keeps {kept / 2**30:.3f} GiB on a rank for its backward passes, more than "
                f"parallel.schedule_memory_gb={memory.limit / 2**30:g}; allow that much, or use zb-h1, zb-interleaved "
                "or zb-v, which obey it"
            )
        return made

    return within


@dataclass(frozen=True)
class ZeroBubble:
    """A member of the family of `zero_bubble.shortest`.

    `microbatches(pp)` is how many whole micro-batches a rank may keep if no limit in bytes is given.
    """

    placement: Callable[[int, int], list[int]]
    vpp: VirtualStages
    microbatches: Callable[[int], float]

    def schedule(self, memory: Memory | None = None, durations: Durations | None = None) -> Schedule:
        """The schedule within `memory` that fits `durations` best. None: they are not known."""

        def orders(pp: int, vpp: int, num_microbatches: int) -> Orders:
            rank_of = self.placement(pp, vpp)
            limit = memory or counted_by_stage(self.microbatches(pp), rank_of)
            return shortest(rank_of, num_microbatches, limit, durations)

        return Schedule(orders, self.placement, self.vpp)


ZERO_BUBBLE = {
    "zb-h1": ZeroBubble(looped, ONE, lambda pp: pp),
    "zb-2p": ZeroBubble(looped, ONE, lambda pp: 2 * pp),
    "zb-interleaved": ZeroBubble(looped, SEVERAL, lambda pp: pp),
    "zb-v": ZeroBubble(v_shaped, TWO, lambda pp: pp),
    # What the papers' building blocks keep. The one micro-batch more is what the turn of the V needs to keep going. It
    # is why the share of 1F1B's memory comes near 1/2 and 1/3 only where ranks are many.
    "v-half": ZeroBubble(v_shaped, TWO, lambda pp: pp / 2 + 1),
    "v-min": ZeroBubble(v_shaped, TWO, lambda pp: (pp + 1) // 3 + 1),
}

SCHEDULES = {
    "gpipe": Schedule(gpipe),
    "breadth": Schedule(gpipe, breadth_first=True),
    "1f1b": Schedule(one_f_one_b, vpp=ONE),
    "interleaved": Schedule(interleaved, vpp=SEVERAL),
    **{name: family.schedule() for name, family in ZERO_BUBBLE.items()},
    "dualpipe-v": Schedule(dualpipe_v, v_shaped, TWO),
}
