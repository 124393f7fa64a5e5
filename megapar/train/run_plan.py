"""The options of a run filled in, and what a plan says of the run before and while it trains."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from megapar.config.derive import num_microbatches, smallest_world
from megapar.config.elastic import fitted
from megapar.config.files import Resolved, RunConfig
from megapar.config.options import Config
from megapar.declare.context import ParallelContext
from megapar.observe.memory_report import MemoryReport
from megapar.observe.prediction import Prediction
from megapar.pipeline.schedules import make
from megapar.pipeline.zero_bubble import ScheduleMemory
from megapar.train.data import with_fetched_tokenizer, with_vocabulary_of_tokenizer
from megapar.train.doors import Builder, LazyPlanner
from megapar.train.out_of_memory import Explanation

Validate = Callable[[Config, int], Config]


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run on `world_size` ranks.

    `requested` are the user's options, before launch.min_dp fits them to the ranks (`fitted`). The run takes `options`.
    `validate` fills in options for a number of ranks, and raises ConfigError for what cannot run. `planner` is asked
    where an option needs a plan.
    """

    requested: Resolved
    validate: Validate
    planner: LazyPlanner
    world_size: int
    options: RunConfig

    @classmethod
    def of(cls, requested: Resolved, validate: Validate, builder: Builder, world_size: int = 0) -> "RunPlan":
        """Fill in the options for `world_size` ranks. 0 stands for launch.nproc, or for the fewest of the layout.

        Raises ConfigError if the options cannot run on these ranks. Downloads the files of a tokenizer that they name
        at Hugging Face (`with_fetched_tokenizer`).
        """
        requested = replace(requested, config=with_fetched_tokenizer(requested.config))
        if world_size:
            return _make_plan(requested, fitted(requested, world_size), validate, LazyPlanner(builder), world_size)
        world_size = requested.config.launch.nproc or smallest_world(requested.config.parallel)
        return _make_plan(requested, requested, validate, LazyPlanner(builder), world_size)

    def for_ranks(self, world_size: int) -> "RunPlan":
        """Return the plan of the same run on another number of ranks. Raises ConfigError if they cannot run it."""
        return _make_plan(self.requested, fitted(self.requested, world_size), self.validate, self.planner, world_size)

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
        self.planner.show(self.config, self.options.given, self.validated, size_and_flops)

    def explained(self, rank: int, *, launcher_plans: bool) -> Callable[[], AbstractContextManager[None]]:
        """Return what makes contexts around the work of `rank`: in them an error says where memory went.

        `launcher_plans`: the launcher of the rank calls `advise` for its error.
        """
        given = self.options.given
        return Explanation(self.config, given, self.validated, self.planner, rank, launcher_plans).around

    def advise(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the `record` of a rank's error with what would need less memory, if that is what it lacked."""
        return Explanation(self.config, self.requested.config, self.validated, self.planner).advise(record)

    def measured(self, ctx: ParallelContext) -> tuple["RunPlan", list[str]]:
        """Fill in the schedule and the stages that options leave to measurements here. A collective over `ctx.world`.

        Returns the plan with them, and lines about the origin of the stages.
        """
        options, notes, parallel = self.options, list[str](), self.config.parallel
        if parallel.schedule == "auto":
            options = self.planner.choose_schedule(options, ctx)
        if parallel.balance == "measured" and not parallel.partition:
            options, notes = self.planner.measure_partition(options, ctx)
        return replace(self, options=options), notes

    def memory_limit(self) -> ScheduleMemory | None:
        """Return what the schedule may keep, None without a limit."""
        return self.planner.memory_limit(self.config) if self.config.parallel.schedule_memory_gb else None

    def host_bytes_of_inputs(self, rank: int) -> int:
        """Return the bytes of host memory that train.offload takes on `rank`."""
        return self.planner.host_bytes_of_inputs(self.config, rank) if self.config.train.offload else 0

    def memory_report(self, rank: int) -> MemoryReport | None:
        """Return the report of `rank` that train.memory_report asks for."""
        return self.planner.memory_report(self.config, rank) if self.config.train.memory_report else None

    def prediction(self, ctx: ParallelContext) -> Prediction | None:
        """Return the predicted time of a step, on the first rank: for the machine of option gpu, or for this GPU."""
        if not ctx.world.first or (self.config.gpu == "auto" and ctx.device.type != "cuda"):
            return None
        return self.planner.predict(self.config, ctx)


def _make_plan(
    requested: Resolved, given: Resolved, validate: Validate, planner: LazyPlanner, world_size: int
) -> RunPlan:
    config = with_vocabulary_of_tokenizer(validate(given.config, world_size))
    check_schedule(config)
    if leaves_choices(config):
        config = planner.choose(given.config, config)
    return RunPlan(requested, validate, planner, world_size, RunConfig(given.config, config, given.sources))


def check_schedule(config: Config) -> None:
    """Raise ConfigError if parallel.schedule does not exist, or does not fit the run's ranks and micro-batches.

    With valid options the schedules of `schedules.SCHEDULES` fit. A file, or a schedule in a module of the user's, may
    not fit.
    """
    parallel = config.parallel
    if parallel.schedule != "auto":
        make(parallel.schedule, parallel.pp, parallel.vpp, num_microbatches(config))


def leaves_choices(config: Config) -> bool:
    """Return whether options leave a choice to the planner before the run: memory to spend, chunks, a schedule."""
    parallel = config.parallel
    chunks = parallel.tp_overlap_chunks, parallel.ep_overlap_chunks
    return bool(config.train.memory_gb or 0 in chunks or (config.dry_run and parallel.schedule == "auto"))
