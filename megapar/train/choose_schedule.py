"""Replaces parallel.schedule=auto by the schedule that idles least, by measured times or by what is in config.toml."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from megapar.agreement import from_first
from megapar.config import Config, ParallelConfig
from megapar.config_io import Resolved, load_earlier
from megapar.context import ParallelContext
from megapar.derive import num_microbatches
from megapar.errors import ConfigError, say
from megapar.messages import counted
from megapar.pipeline.choice import Choice, StageTimes, choose
from megapar.pipeline.schedules import make
from megapar.train.dry_run import Build, memory_limit

TimesOfStages = Callable[[Config], Sequence[tuple[float, float, float]]]
"""The times of F, I and W of each stage of a config. Its parallel.vpp may be another one than the run's."""


def with_chosen_schedule(
    resolved: Resolved,
    config: Config,
    ctx: ParallelContext,
    measure: Callable[[Config, torch.device], TimesOfStages],
    build: Build,
) -> tuple[Resolved, Config]:
    """Fill in parallel.schedule, vpp and schedule_costs if the schedule is auto. A collective over `ctx.world`.

    Rank 0 calls `measure`, or takes what the run folder's config.toml holds from an earlier start: a run that is
    resumed keeps its schedule. Returns both configurations with the choice, and says where it is from. Raises
    ConfigError on every rank if no schedule keeps to parallel.schedule_memory_gb.
    """
    if config.parallel.schedule != "auto":
        return resolved, config
    found: tuple[Sequence[object], str] = ((), "")
    if ctx.world.first:
        try:
            found = _earlier_choice(resolved.config) or _in_words(
                _choose(config, resolved.config.parallel, measure(config, ctx.device), build)
            )
        except ConfigError as error:  # the other ranks wait, and are told below
            found = ((), str(error))
    values, line = from_first(found, ctx)
    if not values:
        raise ConfigError(line)
    name, vpp, costs = values
    if ctx.world.first:
        say(line)
    chosen = {"schedule": name, "vpp": vpp, "schedule_costs": tuple(costs)}
    paths = [f"parallel.{key}" for key in chosen]
    sources = dict(resolved.sources) | dict.fromkeys(paths, "measured at the first start")
    in_file = replace(resolved.config, parallel=replace(resolved.config.parallel, **chosen))
    return Resolved(in_file, sources), replace(config, parallel=replace(config.parallel, **chosen))


def check_schedule(given: Config, config: Config, build: Build) -> Config:
    """Raise ConfigError if parallel.schedule does not exist, or does not fit the run's ranks and micro-batches.

    Names of ours fit where the options are valid. A file, or a schedule from a module of one's own, may not. Returns
    `config`. In a dry run, which measures nothing, auto is filled in as if all stages and actions took equal times.
    `given` has the options as the user gave them.
    """
    parallel = config.parallel
    if parallel.schedule != "auto":
        make(parallel.schedule, parallel.pp, parallel.vpp, num_microbatches(config))
        return config
    if not config.dry_run:
        return config
    choice = _choose(config, given.parallel, _equal_times, build)
    say(
        f"parallel.schedule=auto: planned with {choice.schedule}, vpp {choice.vpp}, which idles {choice.idle:.1%} if "
        "all stages take equal times; a run measures them when it first starts"
    )
    return replace(config, parallel=replace(parallel, schedule=choice.schedule, vpp=choice.vpp))


def _equal_times(config: Config) -> Sequence[tuple[float, float, float]]:
    each = 1 / config.parallel.vpp
    return [(each, each, each)] * (config.parallel.pp * config.parallel.vpp)


def _choose(config: Config, given: ParallelConfig, times_of: TimesOfStages, build: Build) -> Choice:
    """The best schedule for the numbers of stages that the options allow. `given` has those that the user gave."""
    parallel = config.parallel
    # A vpp or a partition that the user gave decides how many stages there are. All but the first and the last need a
    # layer.
    if given.vpp or given.partition:
        vpps = [given.vpp or len(given.partition) // parallel.pp]
    else:
        vpps = [vpp for vpp in (1, 2) if parallel.pp * vpp <= config.model.num_hidden_layers + 2]

    def of_vpp(vpp: int) -> Config:
        # Any schedule with so many stages on a rank: neither times nor memory of a stage depend on the order.
        name = {1: "1f1b"}.get(vpp, "interleaved")
        return replace(config, parallel=replace(parallel, vpp=vpp, schedule=name))

    return choose(
        parallel,
        vpps,
        num_microbatches(config),
        lambda vpp: [StageTimes(*times) for times in times_of(of_vpp(vpp))],
        lambda vpp: memory_limit(of_vpp(vpp), build),
    )


def _in_words(choice: Choice) -> tuple[Sequence[object], str]:
    """What the ranks share of a choice, and a line for the user."""
    forward, inputs, weights = choice.costs
    line = (
        f"schedule {choice.schedule} with {counted(choice.vpp, 'stage')} on a rank is the shortest, about "
        f"{choice.idle:.1%} idle: times of forward, gradients of inputs and of weights are as {forward:g} : {inputs:g} "
        f": {weights:g}"
    )
    return (choice.schedule, choice.vpp, choice.costs), line


def _earlier_choice(config: Config) -> tuple[Sequence[object], str] | None:
    """The choice in the config.toml of the run folder, if it was made for the same model and layout.

    `config` has its options as they were given, as that file has. A schedule without schedule_costs was not chosen.
    """
    earlier = load_earlier(config.run_dir)
    if earlier is None:
        return None
    chosen = earlier.parallel
    # Replicas do not change what a stage costs. A partition may have been measured after the choice.
    given = config.parallel
    as_given = replace(
        chosen,
        schedule=given.schedule,
        vpp=given.vpp,
        schedule_costs=given.schedule_costs,
        dp=given.dp,
        partition=given.partition,
    )
    if not chosen.schedule_costs or earlier.model != config.model or as_given != given:
        return None
    line = f"schedule {chosen.schedule} with {counted(chosen.vpp, 'stage')} on a rank, as chosen at the first start"
    return (chosen.schedule, chosen.vpp, chosen.schedule_costs), line
