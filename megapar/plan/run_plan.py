"""The options of a run filled in, and what a plan says of the run before and while it trains."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megapar.config.derive import smallest_world
from megapar.config.elastic import fitted
from megapar.config.files import Resolved, RunConfig
from megapar.config.options import Config
from megapar.declare.context import ParallelContext
from megapar.observe.memory_report import MemoryReport
from megapar.observe.prediction import Prediction
from megapar.pipeline.zero_bubble import ScheduleMemory
from megapar.plan import choose_memory, dry_run, measure, memory, predicted
from megapar.plan.choose_schedule import check_schedule, with_chosen_schedule
from megapar.plan.out_of_memory import Explanation
from megapar.plan.parts import Builder, Parts
from megapar.train.data import with_vocabulary_of_tokenizer

Validate = Callable[[Config, int], Config]


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run on `world_size` ranks.

    `requested` are the user's options, before launch.min_dp fits them to the ranks (`fitted`). The run takes `options`.
    `validate` fills in options for a number of ranks, and raises ConfigError for what cannot run. `parts` are those of
    the model.
    """

    requested: Resolved
    validate: Validate
    parts: Parts
    world_size: int
    options: RunConfig

    @classmethod
    def of(cls, requested: Resolved, validate: Validate, builder: Builder, world_size: int = 0) -> "RunPlan":
        """Fill in the options for `world_size` ranks. 0 stands for launch.nproc, or for the fewest of the layout.

        Raises ConfigError if the options cannot run on these ranks.
        """
        if world_size:
            return _make_plan(requested, fitted(requested, world_size), validate, Parts(builder), world_size)
        world_size = requested.config.launch.nproc or smallest_world(requested.config.parallel)
        return _make_plan(requested, requested, validate, Parts(builder), world_size)

    def for_ranks(self, world_size: int) -> "RunPlan":
        """Return the plan of the same run on another number of ranks. Raises ConfigError if they cannot run it."""
        return _make_plan(self.requested, fitted(self.requested, world_size), self.validate, self.parts, world_size)

    def validated(self, config: Config) -> Config:
        """Return `config` filled in for this plan's ranks. Raises ConfigError if it cannot run."""
        return self.validate(config, self.world_size)

    @property
    def config(self) -> Config:
        """The options that the run reads."""
        return self.options.derived

    def show(self, size_and_flops: Callable[[Config], tuple[str, int]]) -> None:
        """Print what each rank would hold, and whether it fits the machine that option gpu names.

        `size_and_flops` says the number of parameters, in words, and the FLOPs of a token.
        """
        dry_run.show(self.config, self.parts, *size_and_flops(self.config))
        predicted.show_verdict(self.options.given, self.config, self.parts, self.validated)

    def explained(self, rank: int, *, launcher_plans: bool) -> Callable[[], AbstractContextManager[None]]:
        """Return what makes contexts around the work of `rank`: in them an error says where memory went.

        `launcher_plans`: the launcher of the rank calls `advise` for its error.
        """
        given = self.options.given
        return Explanation(self.config, given, self.validated, self.parts, rank, launcher_plans).around

    def advise(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the `record` of a rank's error with what would need less memory, if that is what it lacked."""
        return Explanation(self.config, self.requested.config, self.validated, self.parts).advise(record)

    def measured(self, ctx: ParallelContext) -> tuple["RunPlan", list[str]]:
        """Fill in the schedule and the stages that options leave to measurements here. A collective over `ctx.world`.

        Returns the plan with them, and lines about the origin of the stages.
        """
        times_of_stages = partial(measure.times_of_stages, self.parts.builder)
        options = with_chosen_schedule(self.options, ctx, times_of_stages, self.parts)
        options, notes = measure.with_measured_partition(options, ctx, self.parts.builder)
        return replace(self, options=options), notes

    def memory_limit(self) -> ScheduleMemory | None:
        """Return what the schedule may keep, None without a limit."""
        return memory.memory_limit(self.config, self.parts)

    def host_bytes_of_inputs(self, rank: int) -> int:
        """Return the bytes of host memory that train.offload takes on `rank`."""
        return memory.host_bytes_of_inputs(self.config, self.parts, rank)

    def memory_report(self, rank: int) -> MemoryReport | None:
        """Return the report of `rank` that train.memory_report asks for."""
        return dry_run.memory_report_of(self.config, self.parts, rank)

    def prediction(self, ctx: ParallelContext) -> Prediction | None:
        """Return the predicted time of a step, on the first rank and on a machine that is known."""
        return predicted.prediction_of(self.config, self.parts, ctx)


def _make_plan(requested: Resolved, given: Resolved, validate: Validate, parts: Parts, world_size: int) -> RunPlan:
    config = with_vocabulary_of_tokenizer(validate(given.config, world_size))
    config = choose_memory.check_choices(check_schedule(given.config, config, parts), parts)
    return RunPlan(requested, validate, parts, world_size, RunConfig(given.config, config, given.sources))
