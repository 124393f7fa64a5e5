"""The doors to megapar_tools: what a run asks of planning, of migration and of the dashboard.

Nothing else in megapar imports megapar_tools, and these functions import it when they are called. So a rank holds none
of it until an option, an unknown flag or an error asks for it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from megapar.config.files import RunConfig
from megapar.config.options import Config
from megapar.config.unknown import UnknownOption
from megapar.declare.batch import PipelineStage
from megapar.declare.context import ParallelContext
from megapar.declare.stage_set import Declared
from megapar.observe.memory_report import MemoryReport
from megapar.observe.prediction import Prediction
from megapar.pipeline.zero_bubble import ScheduleMemory


class Builder(Protocol):
    """Builds parts of a model: what a plan must be told, because it knows no model (`megapar_models.build`)."""

    def stage_layers(self, config: Config) -> Sequence[range]:
        """The layers of each stage of the pipeline."""

    def layer_kinds(self, config: Config) -> Sequence[int]:
        """For each layer the number of the first layer of the same kind: equal shapes, equal bytes kept."""

    def maker(self, config: Config, ctx: ParallelContext) -> Callable[..., PipelineStage]:
        """Make a stage on the context's device: called with a range of layers, `first`, `last` and `tied_weight`.

        `tied_weight` is the matrix of the embedding if the stage before holds it on the same rank.
        """

    def embedding_weight(self, config: Config, first: PipelineStage) -> nn.Parameter | None:
        """The `tied_weight` for the last stage of a rank with the first stage as well. None if it uses no embedding."""

    def declared(self, config: Config) -> Declared:
        """What the model declares."""

    def in_fp8(self, config: Config) -> list[str]:
        """Return which matrices are multiplied in FP8, in lines. None without train.fp8."""

    def flops_per_token(self, config: Config) -> int:
        """FLOPs of a token, forward and backward, for MFU."""

    def title(self, layers: range, *, first: bool, last: bool) -> str:
        """The contents of a stage in words."""


def hint(unknown: UnknownOption) -> str:
    """Say what an unknown flag or key may mean (`megapar_tools.migrate.hints.hint`)."""
    from megapar_tools.migrate.hints import hint

    return hint(unknown)


def write_report(run_dir: Path) -> None:
    """Write report.html into a run folder, unless a process works in it. Raises StorageError if that cannot be."""
    from megapar_tools.dashboard.page import write_report
    from megapar_tools.dashboard.status import is_locked

    if not is_locked(run_dir):
        write_report(run_dir)


@dataclass(frozen=True)
class Shortage:
    """What a rank needs by plan: in words, in bytes by what needs them, and changes of options that need less."""

    needs: str
    rows: Mapping[str, int]
    smaller: Sequence[str]


class LazyPlanner:
    """Asks `megapar_tools.plan` about the options of a run. All questions share the measured parts of the model."""

    def __init__(self, builder: Builder):
        self._builder = builder

    @cached_property
    def parts(self) -> Any:
        """The parts of the model, a `megapar_tools.plan.parts.Parts`. Each is measured when a plan first needs it."""
        from megapar_tools.plan.parts import Parts

        return Parts(self._builder)

    def choose(self, given: Config, config: Config) -> Config:
        """Return `config`, validated, with what its options leave to be chosen before the run.

        That is what train.memory_gb may spend, the chunks of overlapped collectives, and in a dry run the schedule.
        `given` has the options as the user gave them. Raises ConfigError if nothing fits.
        """
        from megapar_tools.plan.choose import check_choices
        from megapar_tools.plan.choose_schedule import planned_schedule

        return check_choices(planned_schedule(given, config, self.parts), self.parts)

    def choose_schedule(self, options: RunConfig, ctx: ParallelContext) -> RunConfig:
        """Replace parallel.schedule auto by the schedule with the shortest measured step.

        A collective over `ctx.world`. Raises ConfigError on every rank if no schedule keeps to
        parallel.schedule_memory_gb.
        """
        from megapar_tools.plan.choose_schedule import with_chosen_schedule
        from megapar_tools.plan.measure import times_of_stages

        def times(config: Config, on: Any) -> Any:
            return times_of_stages(self._builder, config, on)

        return with_chosen_schedule(options, ctx, times, self.parts)

    def measure_partition(self, options: RunConfig, ctx: ParallelContext) -> tuple[RunConfig, list[str]]:
        """Cut the model into stages of equal measured time, and say so in lines. A collective over `ctx.world`."""
        from megapar_tools.plan.measure import with_measured_partition

        return with_measured_partition(options, ctx, self._builder)

    def memory_limit(self, config: Config) -> ScheduleMemory | None:
        """Return what parallel.schedule_memory_gb allows, and what each stage keeps."""
        from megapar_tools.plan.memory import memory_limit

        return memory_limit(config, self.parts)

    def host_bytes_of_inputs(self, config: Config, rank: int) -> int:
        """Return the bytes of host memory that train.offload takes on `rank`."""
        from megapar_tools.plan.memory import host_bytes_of_inputs

        return host_bytes_of_inputs(config, self.parts, rank)

    def memory_report(self, config: Config, rank: int) -> MemoryReport:
        """Return the planned memory of `rank`, to be compared with what the run uses."""
        from megapar_tools.plan.memory import report_rank

        return MemoryReport(report_rank(config, self.parts, rank).rows)

    def predict(self, config: Config, ctx: ParallelContext) -> Prediction | None:
        """Return the predicted time of a step on the first rank. None where no machine is known."""
        from megapar_tools.plan.fits import prediction_of

        return prediction_of(config, self.parts, ctx)

    def explain_shortage(
        self, config: Config, given: Config, validated: Callable[[Config], Config], rank: int
    ) -> Shortage:
        """Return what `rank` needs by plan, and which options would need less. Arguments as of `Explanation`."""
        from megapar_tools.plan.verdict import shortage_of

        return Shortage(*shortage_of(config, given, validated, self.parts, rank))

    def show(
        self,
        config: Config,
        given: Config,
        validated: Callable[[Config], Config],
        size_and_flops: Callable[[Config], tuple[str, int]],
    ) -> None:
        """Print what each rank would hold, and whether it fits the machine that option gpu names."""
        from megapar_tools.plan import fits

        fits.show(config, self.parts, *size_and_flops(config))
        fits.show_verdict(given, config, self.parts, validated)
