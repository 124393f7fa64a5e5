"""Prints a pipeline schedule, simulates it, and draws it. With --run, beside the measured timeline of a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import tyro
from megapar_tools.trace import profile
from megapar_tools.trace.timeline import draw_over_each_other, write_chrome_trace

from megapar.base.errors import ConfigError, storing
from megapar.config.messages import counted
from megapar.launch.reporting import reported
from megapar.pipeline.actions import Event, Kind, Orders, show
from megapar.pipeline.lowering import lower
from megapar.pipeline.schedules import SCHEDULES, find, make
from megapar.pipeline.simulation import Timeline, simulate
from megapar.pipeline.zero_bubble import Durations, counted_by_stage

FORMATS = (".png", ".svg", ".json")


@dataclass
class Arguments:
    """Print the orders of a schedule, how much of a step ranks idle, and how many micro-batches they keep."""

    schedule: tyro.conf.Positional[str] = "1f1b"
    """The schedule: a name such as zb-v, FILE.txt, FILE.csv, or MODULE:NAME, as for parallel.schedule."""
    pp: int = 4
    """Pipeline ranks."""
    vpp: int = 0
    """Stages on each rank; 0 means what the schedule needs, else 1."""
    microbatches: int = 8
    """Micro-batches of a step."""
    forward: float = 1.0
    """Time of a micro-batch's forward through all stages of a rank."""
    inputs: float = 1.0
    """Time of its gradient of inputs."""
    weights: float = 1.0
    """Time of its gradient of weights. A backward in one piece takes both times."""
    made_for: str = ""
    """Times of F, I and W that a zero-bubble schedule is made for, such as 1,1.3,0.7, as parallel.schedule_costs; empty
    means that they are not known. What is simulated are --forward, --inputs and --weights."""
    transfer: float = 0.0
    """Time of a message."""
    memory: float = 0.0
    """Micro-batches that a rank of a zero-bubble schedule may keep; 0 means the schedule's own limit."""
    run: Path | None = None
    """Folder of a run with log.profile: its orders are simulated with its median times, and drawn above its own."""
    out: tuple[Path, ...] = ()
    """Files to write: .png and .svg are pictures, .json is a trace for chrome://tracing or ui.perfetto.dev."""


def orders_of(args: Arguments) -> tuple[Orders, int]:
    """The orders for the arguments, and their number of stages."""
    name = args.schedule
    schedule = find(name)
    only = schedule.vpp.only
    if args.vpp and only not in (0, args.vpp):
        raise ConfigError(f"--vpp {args.vpp}: {name} needs {only}, which 0 means")
    vpp = schedule.vpp.meant_by(args.vpp)
    obeying = ", ".join(known for known, each in SCHEDULES.items() if each.search)
    if schedule.search:
        memory = None
        if args.memory:
            memory = counted_by_stage(args.memory, schedule.placement(args.pp, vpp))
        schedule = schedule.within(memory, durations_of(args.made_for))
    elif args.memory:
        raise ConfigError(f"--memory {args.memory:g}: only {obeying} obey it; leave it out for {name}")
    elif args.made_for:
        raise ConfigError(f"--made_for {args.made_for}: only {obeying} obey it; leave it out for {name}")
    return make(schedule, args.pp, vpp, args.microbatches), args.pp * vpp


def durations_of(made_for: str) -> Durations | None:
    """The times to make a schedule for. None if they are not known."""
    if not made_for:
        return None
    try:
        forward, inputs, weights = [float(word) for word in made_for.split(",")]
    except ValueError:
        forward = inputs = weights = math.nan
    if not (0 < forward < math.inf and 0 <= inputs < math.inf and 0 <= weights < math.inf):
        raise ConfigError(f"--made_for {made_for}: must be three times, of F, I and W, such as 1,1.3,0.7")
    return Durations(forward, inputs, weights)


def simulated(args: Arguments, orders: Orders, num_stages: int) -> Timeline:
    share = len(orders) / num_stages  # of a rank's time, that one of its stages takes
    return simulate(
        lower(orders, num_stages),
        args.forward * share,
        (args.inputs + args.weights) * share,
        args.transfer,
        args.weights * share,
    )


def as_measured(events: Sequence[Event]) -> tuple[Orders, Timeline]:
    """The orders of a run's ranks, and a simulation with the median times of each kind and stage."""
    num_stages = 1 + max(event.action.stage for event in events)
    by_rank: Orders = [[] for _ in range(1 + max(event.rank for event in events))]
    for event in sorted(events, key=lambda event: event.start):
        by_rank[event.rank].append(event.action)

    def seconds(kind: Kind, stage: int) -> float:
        spans = [e.end - e.start for e in events if e.action.kind == kind and e.action.stage == stage]
        if spans:
            return median(spans)
        return 0.0

    stages = range(num_stages)
    weights = [seconds("W", stage) for stage in stages]
    # A schedule may run some micro-batches backward in one piece, and others in halves.
    backward = [seconds("B", stage) or seconds("I", stage) + weights[stage] for stage in stages]
    forward = [seconds("F", stage) for stage in stages]
    return by_rank, simulate(lower(by_rank, num_stages), forward, backward, weights=weights)


def idle_in_words(events: Sequence[Event]) -> str:
    span = max(event.end for event in events) - min(event.start for event in events)
    ranks = 1 + max(event.rank for event in events)
    busy = sum(event.end - event.start for event in events)
    return f"{1 - busy / (span * ranks):.1%} idle in {span:.4g}"


def main() -> None:
    with reported():
        args = tyro.cli(Arguments, description=__doc__, use_underscores=True)
        for path in args.out:
            if path.suffix not in FORMATS:
                raise ConfigError(f"--out {path}: the name must end in {', '.join(FORMATS)}")
        timelines: dict[str, Sequence[Event]] = {}
        seconds = 1.0
        unit = "s"
        if args.run:
            measured = profile.events(profile.read(args.run))
            orders, timeline = as_measured(measured)
            timelines = {"simulated with its median times": timeline.events, f"{args.run.name}, measured": measured}
        else:
            orders, num_stages = orders_of(args)
            timeline = simulated(args, orders, num_stages)
            timelines[f"{args.schedule}: {counted(len(orders), 'rank')}, {counted(num_stages, 'stage')}"] = (
                timeline.events
            )
            unit = "times of --forward"
            seconds = 1e-3  # so that a trace shows one unit as a millisecond
        print(show(orders))
        for title, events in timelines.items():
            print(f"{title}: {idle_in_words(events)} {unit}")
        print(f"micro-batches in stages that a rank keeps: {' '.join(map(str, timeline.peak_live))}")
        for path in args.out:
            with storing(path):
                if path.suffix == ".json":
                    write_chrome_trace(timelines, path, seconds)
                else:
                    draw_over_each_other(timelines, path, unit)
            print(path)


if __name__ == "__main__":
    main()
