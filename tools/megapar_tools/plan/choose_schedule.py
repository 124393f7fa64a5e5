"""Replaces parallel.schedule=auto by the schedule with the shortest step, or by the choice of an earlier start."""

from collections.abc import Callable, Mapping, Sequence
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
from megapar.pipeline.schedules import SCHEDULES
from megapar.pipeline.zero_bubble import ScheduleMemory
from megapar.system.say import say
from megapar_tools.plan.choice import ScheduleChoice, StageTimes, choose
from megapar_tools.plan.measure import MEASURED
from megapar_tools.plan.memory import memory_limit
from megapar_tools.plan.parts import Parts

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

    All stages and actions then take as long. A run fills in its schedule when its ranks run (`with_chosen_schedule`).
    `given` has the options as the user gave them.
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
