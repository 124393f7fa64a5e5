"""Replaces parallel.schedule auto by the schedule with the shortest step, or by the choice of an earlier start.

Schedules are simulated with measured times of the stages (`choose`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from megapar.base.errors import ConfigError
from megapar.config.derive import num_microbatches
from megapar.config.files import RunConfig, load_earlier
from megapar.config.messages import counted
from megapar.config.options import Config, ParallelConfig
from megapar.declare.agreement import from_first
from megapar.declare.context import ParallelContext
from megapar.pipeline.actions import Orders
from megapar.pipeline.lowering import lower
from megapar.pipeline.schedules import SCHEDULES, find, make, of
from megapar.pipeline.simulation import Timeline, simulate
from megapar.pipeline.zero_bubble import ScheduleMemory
from megapar.system.say import say
from megapar_tools.plan.measure import MEASURED
from megapar_tools.plan.memory import memory_limit
from megapar_tools.plan.parts import Parts

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


TimesOfStages = Callable[[Config], Sequence[tuple[float, float, float]]]
"""Returns the times of F, I and W of each stage of a config. Its parallel.vpp may differ from the run's."""


def with_chosen_schedule(
    options: RunConfig, ctx: ParallelContext, measure: Callable[[Config, torch.device], TimesOfStages], parts: Parts
) -> RunConfig:
    """Fill in parallel.schedule, vpp and schedule_costs if the schedule is auto. A collective over `ctx.world`.

    A resumed run keeps its schedule: rank 0 takes an earlier start's choice from config.toml in the run folder. If
    there is none, rank 0 calls `measure` and chooses. It prints where the choice is from. Raises ConfigError on every
    rank if no schedule keeps to parallel.schedule_memory_gb.
    """
    if options.derived.parallel.schedule != "auto":
        return options
    found = _Found()
    if ctx.world.first:
        try:
            found = _find_on_first_rank(options, ctx, measure, parts)
        except ConfigError as error:
            # Not raised here, because the other ranks wait in `from_first`.
            found = _Found(error=str(error))
    # It travels as JSON, so tuples arrive as lists.
    chosen, line, error_text = from_first(found, ctx)
    if error_text:
        raise ConfigError(error_text)
    if ctx.world.first:
        say(line)
    chosen["schedule_costs"] = tuple(chosen["schedule_costs"])
    return options.with_parallel(MEASURED, **chosen)


class _Found(NamedTuple):
    """What rank 0 tells the other ranks: the chosen options of `parallel`, and a line for the user, or an error."""

    options: Mapping[str, object] = {}
    line: str = ""
    error: str = ""


def _find_on_first_rank(
    options: RunConfig, ctx: ParallelContext, measure: Callable[[Config, torch.device], TimesOfStages], parts: Parts
) -> _Found:
    """Return the choice of an earlier start. If there is none, choose by measured times."""
    earlier = _earlier_choice(options.given)
    if earlier is not None:
        return earlier
    choice = _choose(options.derived, options.given.parallel, measure(options.derived, ctx.device), parts)
    forward, inputs, weights = choice.costs
    line = (
        f"schedule {choice.schedule} with {counted(choice.vpp, 'stage')} on a rank is the shortest, about "
        f"{choice.idle:.1%} idle: times of forward, gradients of inputs and of weights are as {forward:g} : {inputs:g} "
        f": {weights:g}"
    )
    return _Found(_options(choice.schedule, choice.vpp, choice.costs), line)


def _options(schedule: str, vpp: int, costs: Sequence[float]) -> dict[str, object]:
    """The options of `parallel` set by a choice."""
    return {"schedule": schedule, "vpp": vpp, "schedule_costs": costs}


def planned_schedule(given: Config, config: Config, parts: Parts) -> Config:
    """Replace parallel.schedule auto in a dry run, which measures nothing, by the best one for equal times.

    A dry run takes all stages and actions to be equally long. A run fills in its schedule when its ranks run
    (`with_chosen_schedule`). `given` has the options as the user gave them.
    """
    parallel = config.parallel
    if parallel.schedule != "auto" or not config.dry_run:
        return config
    choice = _choose(config, given.parallel, _equal_times, parts)
    say(
        f"parallel.schedule=auto: planned with {choice.schedule}, vpp {choice.vpp}, which idles {choice.idle:.1%} if "
        "all stages take equal times; a run measures them when it first starts"
    )
    return replace(config, parallel=replace(parallel, schedule=choice.schedule, vpp=choice.vpp))


def _equal_times(config: Config) -> Sequence[tuple[float, float, float]]:
    # The work of a rank does not depend on vpp.
    each = 1 / config.parallel.vpp
    return [(each, each, each)] * (config.parallel.pp * config.parallel.vpp)


def _choose(config: Config, given: ParallelConfig, times_of: TimesOfStages, parts: Parts) -> ScheduleChoice:
    """The best schedule for the numbers of stages allowed by the options.

    `given` has the options as the user gave them. `config` has them filled in.
    """
    parallel = config.parallel

    def with_vpp(vpp: int) -> Config:
        # Any schedule with so many stages on a rank does, because the times and the memory of a stage do not depend on
        # the order.
        name = "1f1b" if vpp == 1 else "interleaved"
        return replace(config, parallel=replace(parallel, vpp=vpp, schedule=name))

    def stage_times(vpp: int) -> list[StageTimes]:
        return [StageTimes(*times) for times in times_of(with_vpp(vpp))]

    def memory(vpp: int) -> ScheduleMemory | None:
        return memory_limit(with_vpp(vpp), parts)

    return choose(parallel, _allowed_vpps(config, given), num_microbatches(config), stage_times, memory)


def _allowed_vpps(config: Config, given: ParallelConfig) -> list[int]:
    """The allowed numbers of stages on a rank. `given` has the options as the user gave them."""
    pp = config.parallel.pp
    if given.vpp:
        return [given.vpp]
    if given.partition:
        return [len(given.partition) // pp]
    # The first and the last stage may be without layers. Every other stage needs one.
    most_stages = config.model.num_hidden_layers + 2
    return [vpp for vpp in (1, 2) if pp * vpp <= most_stages]


def _earlier_choice(config: Config) -> _Found | None:
    """The choice in the config.toml of the run folder, if it was made for the same model and layout.

    `config` has the options as the user gave them, because config.toml has them so too.
    """
    earlier = load_earlier(config)
    if earlier is None:
        return None
    chosen = earlier.parallel
    if not chosen.schedule_costs or chosen.schedule not in SCHEDULES:
        # It was given and not chosen. A file, or a module to import, is taken from the user's options alone.
        return None
    given = config.parallel
    same_layout = given == replace(
        chosen,
        # The choice itself.
        schedule=given.schedule,
        vpp=given.vpp,
        schedule_costs=given.schedule_costs,
        # Replicas do not change what a stage costs.
        dp=given.dp,
        # It may have been measured after the choice.
        partition=given.partition,
    )
    if not same_layout or earlier.model != config.model:
        return None
    line = f"schedule {chosen.schedule} with {counted(chosen.vpp, 'stage')} on a rank, as chosen at the first start"
    return _Found(_options(chosen.schedule, chosen.vpp, chosen.schedule_costs), line)
