"""Chooses a schedule for parallel.schedule=auto: simulates the candidates with measured times, takes the shortest."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megapar.base.errors import ConfigError
from megapar.config.options import ParallelConfig
from megapar.pipeline.actions import Orders
from megapar.pipeline.lowering import lower
from megapar.pipeline.schedules import find, make, of
from megapar.pipeline.simulation import Timeline, simulate
from megapar.pipeline.zero_bubble import ScheduleMemory

# The candidates. If several take equally long, the first is chosen, so simpler schedules come first. gpipe and breadth
# are left out, because 1f1b takes as long and keeps less. zb-2p, v-half and v-min are left out, because they are zb-h1
# and zb-v with another memory limit, and parallel.schedule_memory_gb sets that limit.
FAMILY = ("1f1b", "interleaved", "zb-h1", "dualpipe-v", "zb-interleaved", "zb-v")

# What a message costs in the simulation, in mean forwards of a stage. If messages cost nothing, schedules with twice as
# many messages, or that wait for them, would look as good as the others.
_TRANSFER = 0.05


class ScheduleChoice(NamedTuple):
    """A schedule, and what the simulation says of it."""

    schedule: str
    vpp: int
    costs: tuple[float, ...]
    """parallel.schedule_costs: mean times of F, I and W, in units of the time of F."""
    idle: float
    """The idle share of the ranks' time in a step, from 0 to 1."""


class StageTimes(NamedTuple):
    """The times of F, I and W of one micro-batch through a stage, in any unit."""

    forward: float
    inputs: float
    weights: float


def choose(
    parallel: ParallelConfig,
    vpps: Sequence[int],
    num_microbatches: int,
    times_of: Callable[[int], Sequence[StageTimes]],
    memory_of: Callable[[int], ScheduleMemory | None],
) -> ScheduleChoice:
    """The schedule of FAMILY with the shortest step.

    `vpps` are the allowed numbers of stages on a rank. For each of them, `times_of(vpp)` returns the times of all
    stages, and `memory_of(vpp)` returns what a rank may keep for backward passes. With None it may keep as much as with
    1F1B. Equal arguments give equal results. Raises ConfigError if no schedule keeps to the memory.
    """
    best: ScheduleChoice | None = None
    best_makespan = math.inf
    for name, vpp in _candidates(vpps):
        times = times_of(vpp)
        memory = memory_of(vpp)
        costs = _relative_costs(times)
        schedule = of(replace(parallel, schedule=name, vpp=vpp, schedule_costs=costs), memory)
        try:
            orders = make(schedule, parallel.pp, vpp, num_microbatches)
        except ConfigError:  # this schedule cannot keep to the memory
            continue
        timeline = _simulate(orders, times)
        # 1F1B keeps at most pp micro-batches on a rank. `peak_live` counts each once in each of the rank's vpp stages.
        if memory is None and max(timeline.peak_live) > parallel.pp * vpp:
            continue
        # Rounded, so that the last digits do not decide between schedules that are equally long. Divided by the work,
        # so that the rounding does not depend on the unit of time.
        makespan = round(timeline.makespan / _work(times), 9)
        if makespan < best_makespan:
            best_makespan = makespan
            best = ScheduleChoice(name, vpp, costs, timeline.bubble)
    if best is None:
        raise ConfigError(
            f"parallel.schedule=auto, parallel.schedule_memory_gb={parallel.schedule_memory_gb:g}: no schedule keeps "
            "so little for its backward passes; allow more, or use train.recompute full"
        )
    return best


def _candidates(vpps: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield each schedule of FAMILY with each vpp it can have."""
    for name in FAMILY:
        for vpp in vpps:
            fits = find(name).vpp.nearest_to(vpp) == vpp
            # With one stage on a rank, interleaved is 1f1b, and zb-interleaved is zb-h1.
            is_duplicate = vpp == 1 and "interleaved" in name
            if fits and not is_duplicate:
                yield name, vpp


def _relative_costs(times: Sequence[StageTimes]) -> tuple[float, ...]:
    """The times of F, I and W over all stages, divided by the time of F, and rounded for config.toml."""
    forward = sum(stage.forward for stage in times)
    inputs = sum(stage.inputs for stage in times)
    weights = sum(stage.weights for stage in times)
    return tuple(round(total / forward, 3) for total in (forward, inputs, weights))


def _work(times: Sequence[StageTimes]) -> float:
    """The time of one micro-batch through all stages, forward and backward."""
    return sum(sum(stage) for stage in times)


def _simulate(orders: Orders, times: Sequence[StageTimes]) -> Timeline:
    forward = [stage.forward for stage in times]
    backward = [stage.inputs + stage.weights for stage in times]
    weights = [stage.weights for stage in times]
    transfer = _TRANSFER * sum(forward) / len(forward)
    return simulate(lower(orders, len(times)), forward, backward, transfer, weights)
