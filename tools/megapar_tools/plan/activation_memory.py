"""The memory that ranks keep for backward passes, which follows from the order of a rank's schedule."""

from collections import Counter
from collections.abc import Hashable

from megapar.activations.host_inputs import planned_nbytes
from megapar.config.derive import num_microbatches
from megapar.config.options import Config
from megapar.declare.context import ParallelContext
from megapar.launch.grid import grid_of
from megapar.observe.kept import Key
from megapar.pipeline.refine import refine, runs_breadth_first
from megapar.pipeline.zero_bubble import ScheduleMemory
from megapar_tools.plan import moments
from megapar_tools.plan.moments import Orders
from megapar_tools.plan.parts import Parts
from megapar_tools.plan.recorded import Kept, Recording, kept_by_stage
from megapar_tools.plan.stage_layout import HeldStage, StageLayout


class ActivationMemory:
    """What the ranks of one layout keep for backward passes, and the orders of their actions."""

    def __init__(self, config: Config, parts: Parts, layout: StageLayout):
        self._config = config
        self._parts = parts
        self._layout = layout
        self._kept: dict[Hashable, Counter[str]] = {}
        self._converted: dict[Hashable, tuple[int, int, int]] = {}
        self._schedule: Orders | None = None

    def kept_by_stage(self, ctx: ParallelContext, stage: HeldStage, *, deferred: bool) -> Counter[str]:
        """Return the bytes that one micro-batch keeps in a stage, by kind: from F to B or I.

        If `deferred`, return those that the micro-batch keeps from I to W.
        """
        # Of the ranks of a plan, those with one position on tp and with the same experts have the same parts.
        parts = tuple(stage.parts(self._parts.layer_parts(self._config, ctx)))
        key = (parts, deferred, ctx.tp.rank, ctx.ep.rank, ctx.etp.rank)
        if key not in self._kept:
            found = self._kept_by_parts(ctx, stage, deferred=deferred)
            self._kept[key] = kept_by_stage(found, has_first=stage.first, has_layers=len(stage.layers) > 0)
        return self._kept[key]

    def _kept_by_parts(self, ctx: ParallelContext, stage: HeldStage, *, deferred: bool) -> list[Kept]:
        """What one micro-batch keeps in each part of a stage."""
        return [recording.deferred if deferred else recording.kept for recording in self._recordings(ctx, stage)]

    def _recordings(self, ctx: ParallelContext, stage: HeldStage) -> list[Recording]:
        """One micro-batch through each part of a stage."""
        found: list[Recording] = []
        for part in stage.parts(self._parts.layer_parts(self._config, ctx)):
            given = found[-1].kept.outputs if found else None
            found.append(self._parts.recording(self._config, ctx, part, given))
        return found

    def converted_by_stage(self, ctx: ParallelContext, stage: HeldStage) -> tuple[int, int, int]:
        """Return the bytes of weights in the number format of their products: of trained ones, and of frozen ones."""
        parts = tuple(stage.parts(self._parts.layer_parts(self._config, ctx)))
        key = (parts, ctx.tp.rank, ctx.ep.rank, ctx.etp.rank)
        if key not in self._converted:
            found = [recording.kept.converted for recording in self._recordings(ctx, stage)]
            sums = (sum(getattr(one, kind) for one in found) for kind in ("trained", "quantized", "frozen"))
            self._converted[key] = next(sums), next(sums), next(sums)
        return self._converted[key]

    def inputs(self, ctx: ParallelContext) -> tuple[int, int]:
        """Return the bytes of inputs of layers in host memory (train.offload).

        The second number is the most bytes of such inputs on the device at one time, on their way.
        """
        if not self._config.train.offload:
            return 0, 0
        sizes = {}
        for stage in self._layout.stages[ctx.pp.rank]:
            parts = self._kept_by_parts(ctx, stage, deferred=False)
            sizes[stage.number] = tuple(nbytes for part in parts for nbytes in part.on_host)
        orders = self.orders()
        key = ("inputs", id(orders), ctx.pp.rank, tuple(self._layout.num_fine), tuple(sizes.items()))
        if key not in self._parts.memory:
            breadth_first = runs_breadth_first(orders.breadth_first, self._config.parallel.pp)
            (order,) = refine([orders.actions[ctx.pp.rank]], self._layout.num_fine, breadth_first=breadth_first)
            self._parts.memory[key] = planned_nbytes(order, sizes)
        planned: tuple[int, int] = self._parts.memory[key]
        return planned

    def at_peak(self, ctx: ParallelContext) -> Counter[Key]:
        """Return the bytes kept for backward passes, by stage and kind, when their sum is largest during the plan."""
        stages = self._layout.stages[ctx.pp.rank]
        orders = self.orders()
        kept = {stage.number: self.kept_by_stage(ctx, stage, deferred=False) for stage in stages}
        in_halves = orders.in_halves(ctx.pp.rank)
        deferred = {
            stage.number: sum(self.kept_by_stage(ctx, stage, deferred=True).values())
            if self._layout.coarse_of[stage.number] in in_halves
            else 0
            for stage in stages
        }
        fine: dict[int, list[int]] = {}
        for stage in stages:
            fine.setdefault(self._layout.coarse_of[stage.number], []).append(stage.number)
        return moments.at_peak(orders.moments(ctx.pp.rank), fine, kept, deferred)

    def limit(self) -> ScheduleMemory:
        """Return what each stage keeps from F to B, and from I to W, for a schedule searched within a memory limit.

        A schedule orders stages, so fine stages are added up.
        """
        num_stages = len(self._layout.num_fine)
        forward = [0] * num_stages
        inputs = [0] * num_stages
        grid = grid_of(self._config)
        stride = 1
        for name in grid.order.split("-"):
            if name == "pp":
                break
            stride *= grid.sizes[name]
        for pp, stages in enumerate(self._layout.stages):
            ctx = self._parts.context(self._config, pp * stride)
            for stage in stages:
                coarse = self._layout.coarse_of[stage.number]
                forward[coarse] += sum(self.kept_by_stage(ctx, stage, deferred=False).values())
                inputs[coarse] += sum(self.kept_by_stage(ctx, stage, deferred=True).values())
        return ScheduleMemory(self._config.parallel.schedule_memory_gb * 2**30, forward, inputs)

    def orders(self) -> Orders:
        """Return the orders of the schedule, within parallel.schedule_memory_gb if that is given."""
        if self._schedule is None:
            parallel = self._config.parallel
            memory = self.limit() if parallel.schedule_memory_gb else None
            self._schedule = self._parts.orders(parallel, num_microbatches(self._config), memory)
        return self._schedule
