"""Chooses a schedule for parallel.schedule=auto: simulates the family with measured times, and takes the shortest."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megapar.config import ParallelConfig
from megapar.derive import STAGES_ON_A_RANK
from megapar.errors import ConfigError
from megapar.pipeline.actions import Orders
from megapar.pipeline.lowering import lower
from megapar.pipeline.schedules import make, of
from megapar.pipeline.simulation import Timeline, simulate
from megapar.pipeline.zero_bubble import Memory

# Of equals, the first one: simpler schedules come first. gpipe and breadth are left out, because 1f1b takes as long and
# keeps less. zb-2p, v-half and v-min are zb-h1 and zb-v with another limit, which whoever wants them gives in bytes.
FAMILY = ("1f1b", "interleaved", "zb-h1", "dualpipe-v", "zb-interleaved", "zb-v")

# What a message is taken to cost, in mean forwards of a stage. Without it, schedules that send twice as many messages,
# or wait for them, would look as good as those that do not.
_TRANSFER = 0.05


class Choice(NamedTuple):
    """A schedule, and what the simulation says of it."""

    schedule: str
    vpp: int
    costs: tuple[float, ...]
    """parallel.schedule_costs: mean times of F, I and W. The time of F is 1."""
    idle: float
    """The share of a step in which ranks compute nothing."""


class StageTimes(NamedTuple):
    """The time of one micro-batch's F, I and W through a stage."""

    forward: float
    inputs: float
    weights: float


def choose(
    parallel: ParallelConfig,
    vpps: Sequence[int],
    num_microbatches: int,
    times_of: Callable[[int], Sequence[StageTimes]],
    memory_of: Callable[[int], Memory | None],
) -> Choice:
    """The schedule of the family that takes the shortest time for a step.

    `vpps` are the numbers of stages on a rank that may be chosen. For each of them, `times_of(vpp)` has the times of
    the stages, and `memory_of(vpp)` what ranks may keep for backward passes. Where that is None, schedules are left out
    that keep more than 1F1B, which is pp micro-batches. The result is a function of the arguments alone. Raises
    ConfigError if no schedule keeps to the memory.
    """
    found = []
    for name, vpp in _candidates(vpps):
        times = times_of(vpp)
        memory = memory_of(vpp)
        costs = _mean(times)
        candidate = of(_with(parallel, name, vpp, costs), memory)
        try:
            orders = make(candidate, parallel.pp, vpp, num_microbatches)
        except ConfigError:  # it cannot keep to the memory
            continue
        result = _simulate(orders, times)
        if memory is None and max(result.peak_live) > parallel.pp * vpp:
            continue
        # Rounded, so that times that ought to be equal are equal.
        found.append((round(result.makespan / _work(times), 9), Choice(name, vpp, costs, result.bubble)))
    if not found:
        raise ConfigError(
            f"parallel.schedule=auto, parallel.schedule_memory_gb={parallel.schedule_memory_gb:g}: no schedule keeps "
            "so little for its backward passes; allow more, or use train.recompute full"
        )
    return min(found, key=lambda item: item[0])[1]


def _candidates(vpps: Sequence[int]) -> Iterator[tuple[str, int]]:
    for name in FAMILY:
        for vpp in vpps:
            one_stage_of_several = vpp == 1 and "interleaved" in name  # then it is 1f1b, or zb-h1
            if STAGES_ON_A_RANK.get(name, vpp) == vpp and not one_stage_of_several:
                yield name, vpp


def _with(parallel: ParallelConfig, name: str, vpp: int, costs: tuple[float, ...]) -> ParallelConfig:
    return replace(parallel, schedule=name, vpp=vpp, schedule_costs=costs)


def _mean(times: Sequence[StageTimes]) -> tuple[float, ...]:
    """Times of F, I and W over all stages, as multiples of F's, which is 1, rounded for config.toml."""
    totals = [sum(parts) for parts in zip(*times, strict=True)]
    return tuple(round(total / totals[0], 3) for total in totals)


def _work(times: Sequence[StageTimes]) -> float:
    return sum(map(sum, times))


def _simulate(orders: Orders, times: Sequence[StageTimes]) -> Timeline:
    forward = [stage.forward for stage in times]
    return simulate(
        lower(orders, len(times)),
        forward,
        [stage.inputs + stage.weights for stage in times],
        _TRANSFER * sum(forward) / len(forward),
        [stage.weights for stage in times],
    )
