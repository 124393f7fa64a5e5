"""The memory of each rank of a layout, from the parts of its model (`megapar_tools.plan.parts`), to the byte.

No rank is built. What lies in buffers follows from the declared parameters, by the code that lays them out in a run.
What is kept for backward passes follows from the order of the rank's schedule.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from megapar.activations.host_inputs import planned_nbytes
from megapar.base.grid import Grid
from megapar.config.derive import num_microbatches
from megapar.config.options import Config, ParallelConfig
from megapar.declare import context
from megapar.declare.context import ParallelContext
from megapar.launch.grid import grid_of
from megapar.observe import memory_report
from megapar.observe.kept import Key
from megapar.optimizer import table
from megapar.pipeline.actions import Action
from megapar.pipeline.partition import split_finely
from megapar.pipeline.refine import refine, runs_breadth_first, stages_of_runs
from megapar.pipeline.schedules import placement
from megapar.pipeline.sharding_plan import UnitAction, UnitKind, Units, insert_unit_actions, unit_changes
from megapar.pipeline.zero_bubble import ScheduleMemory
from megapar.step.trainable import freeze, refuse
from megapar.train.levers import planned_device
from megapar_tools.plan.buffers import Buffers
from megapar_tools.plan.moments import WINDOW, Orders, Step, at_peak, without_repeats
from megapar_tools.plan.parts import BOTH, FIRST, LAST, Copies, LayerPart, PartId, Parts, PlannedStage
from megapar_tools.plan.recorded import Kept, kept_by_stage
from megapar_tools.plan.target import with_planned_kernels
from megapar_tools.plan.work import META


@dataclass(frozen=True)
class RankReport:
    """The memory needed by one rank, in bytes.

    `pp` is the rank's position on axis pp, and `stages` says in words what it holds. `parameters` is a number of
    elements. `kept` is the most kept for backward passes at one time of the rank's schedule, by name
    (`memory_report.by_name`). `optimizer_on_host` and `inputs_on_host` are in host memory beside the device's, and in
    no total. Not counted are workspaces of kernels, and free memory held by the caching allocator.
    """

    pp: int
    stages: str
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    optimizer_on_host: int
    inputs_on_host: int
    kept: tuple[tuple[str, int], ...]

    @property
    def rows(self) -> dict[str, int]:
        """The bytes by the names in the report of train.memory_report."""
        rows = memory_report.rows(self.weights, self.gradients, self.optimizer, dict(self.kept))
        return rows | memory_report.on_host(self.optimizer_on_host, self.inputs_on_host)

    @property
    def on_host(self) -> int:
        """All bytes in host memory beside the device's."""
        return self.optimizer_on_host + self.inputs_on_host

    @property
    def activations(self) -> int:
        """The bytes kept for backward passes."""
        return sum(size for _, size in self.kept)

    @property
    def total(self) -> int:
        """All bytes in the device's memory."""
        return self.weights + self.gradients + self.optimizer + self.activations


def reports(config: Config, parts: Parts) -> dict[RankReport, list[int]]:
    """The reports of the ranks, each with the ranks it is for.

    Data-parallel replicas need the same memory, and so do context-parallel ranks. So only the first of them is listed.
    If they hold different numbers of experts, the first of those with the same experts is listed. Tensor ranks with
    parameters of the same shapes need the same memory too. All of them are listed. To save time, only the first of them
    is planned.

    Raises ConfigError if train.trainable does not fit the model's parameters, or if an option is set that no optimizer
    reads.
    """
    _refuse_patterns(config, parts)
    plan = _Plan(config, parts)
    found: dict[RankReport, list[int]] = {}
    optimizers: set[str] = set()
    for rank in _ranks_to_list(plan.grid, config):
        found.setdefault(plan.report_of_shapes(rank), []).append(rank)
    optimizers.update(plan.optimizers)
    table.check(config.optimizer, optimizers)
    return found


def fullest_rank(config: Config, parts: Parts) -> RankReport:
    """The report of the rank with the largest total."""
    return max(reports(config, parts), key=lambda report: report.total)


def report_rank(config: Config, parts: Parts, rank: int) -> RankReport:
    """The memory needed by `rank`. Activations are those kept by the planned device's kernels."""
    return _Plan(config, parts).report(rank)


def host_bytes_of_inputs(config: Config, parts: Parts, rank: int) -> int:
    """The bytes that inputs of layers take of the host's memory for `rank` (train.offload), on whatever device."""
    if not config.train.offload:
        return 0
    plan = _Plan(config, parts)
    return plan.inputs(plan.context(rank))[0]


def kept_by_a_layer(config: Config, parts: Parts) -> tuple[float, float]:
    """The bytes that one micro-batch keeps in a layer on the first rank, and those of them in its MLP: means."""
    plan = _Plan(config, parts)
    whole = _Stage(0, range(config.model.num_hidden_layers), first=False, last=False)
    found = plan.kept_by_stage(plan.context(0), whole, deferred=False)
    in_mlp = sum(nbytes for kind, nbytes in found.items() if kind == "mlp")
    return found.total() / len(whole.layers), in_mlp / len(whole.layers)


def memory_limit(config: Config, parts: Parts) -> ScheduleMemory | None:
    """What parallel.schedule_memory_gb allows, and what each stage of the pipeline keeps. None if it is not given.

    It is that of the first replica and tensor rank.
    """
    if not config.parallel.schedule_memory_gb:
        return None
    return _Plan(config, parts).limit()


def _refuse_patterns(config: Config, parts: Parts) -> None:
    """Raise ConfigError if a pattern of train.trainable or optimizer.groups matches no parameter, or a part of one."""
    patterns = config.train.trainable
    if not patterns and not config.optimizer.groups:
        return
    # A rank has only a part of the parameters. To find patterns that match none at all, the whole model is built.
    alone = replace(config, parallel=ParallelConfig(dp=1, vpp=1, etp=1))
    make_stage = parts.builder.maker(alone, context.planned(grid_of(alone), 0, device=META))
    whole = make_stage(range(config.model.num_hidden_layers), first=True, last=True)
    refuse(patterns, [freeze([whole], patterns)])
    table.check_groups(config.optimizer, [table.groups_used(config.optimizer, [whole])])


def _ranks_to_list(grid: Grid, config: Config) -> list[int]:
    """The ranks of `reports`, ascending."""
    strides = {}
    stride = 1
    for name in grid.order.split("-"):
        strides[name] = stride
        stride *= grid.sizes[name]
    ranks = {pp * strides["pp"] + tp * strides["tp"] for pp in range(grid.pp) for tp in range(grid.tp)}
    if grid.ep and config.model.num_experts % grid.ep:
        # Of the ranks with other numbers of experts, those of the first expert replica.
        every = range(grid.world_size)
        ranks.update(rank for rank in every if grid.positions(rank)["expert_grad"][1] == 0)
    return sorted(ranks)


# The plan of one layout


@dataclass(frozen=True)
class _Stage:
    """A stage, or a fine stage: its number, its layers, and whether it has the embedding, or norm and head."""

    number: int
    layers: range
    first: bool
    last: bool


def _ends(stages: Sequence[_Stage]) -> list[PartId]:
    """The ends of the model on a rank with these stages."""
    if any(stage.first and stage.last for stage in stages):
        return [BOTH]
    first: list[PartId] = [FIRST for stage in stages if stage.first]
    return first + [LAST for stage in stages if stage.last]


class _Plan:
    """The memory of the ranks of one layout."""

    def __init__(self, config: Config, parts: Parts):
        self.config = config = with_planned_kernels(config)
        self.parts = parts
        self.grid = grid_of(config)
        self.optimizers: set[str] = set()
        parallel = config.parallel
        self.ranks_of_coarse = placement(parallel.schedule, parallel.pp, parallel.vpp)
        ranks = self.ranks_of_coarse
        layers = parts.builder.stage_layers(config)
        self.fine_stages: tuple[int, ...] = ()
        if config.optimizer.zero_stage >= 2:
            self.fine_stages, layers, ranks = split_finely(layers, ranks)
        self.stages: list[list[_Stage]] = [[] for _ in range(parallel.pp)]
        last = len(layers) - 1
        for number, (rank, numbers) in enumerate(zip(ranks, layers, strict=True)):
            self.stages[rank].append(_Stage(number, numbers, number == 0, number == last))
        self.num_fine = self.fine_stages or (1,) * len(layers)
        self.coarse_of = [stage for stage, count in enumerate(self.num_fine) for _ in range(count)]
        self._ends = [_ends(stages) for stages in self.stages]
        self._kinds: dict[int, dict[LayerPart, None]] = {}
        self._of_shapes: dict[Hashable, RankReport] = {}
        self._kept: dict[Hashable, Counter[str]] = {}
        self._schedule: Orders | None = None

    def context(self, rank: int) -> ParallelContext:
        """The context of a rank."""
        return self.parts.context(self.config, rank)

    def report_of_shapes(self, rank: int) -> RankReport:
        """The report of the first rank with parameters of the same shapes as `rank`."""
        ctx = self.context(rank)
        shapes = (ctx.pp.rank, self._shapes(ctx))
        if shapes not in self._of_shapes:
            self._of_shapes[shapes] = self.report(rank)
        return self._of_shapes[shapes]

    def report(self, rank: int) -> RankReport:
        """The report of `rank`."""
        ctx = self.context(rank)
        stages = self.stages[ctx.pp.rank]
        buffers = self._buffers(ctx)
        self.optimizers.update(buffers.optimizers)
        gathered, collected = self._most_of_units(ctx, buffers)
        at_peak = self._at_peak(ctx)
        optimizer = buffers.optimizer
        on_host = buffers.optimizer_on_host
        on = planned_device(self.config)
        if on == "cpu":  # the host's memory is the device's
            optimizer += on_host
            on_host = 0
        in_slots, travelling = self.inputs(ctx)
        of_inputs, inputs_on_host = memory_report.inputs_by_name(travelling, in_slots, on)
        return RankReport(
            pp=ctx.pp.rank,
            stages=self._titles(stages),
            parameters=buffers.parameters,
            weights=buffers.weights + gathered,
            gradients=buffers.gradients + collected,
            optimizer=optimizer,
            optimizer_on_host=on_host,
            inputs_on_host=inputs_on_host,
            kept=tuple((memory_report.by_name(at_peak, len(stages), self.fine_stages) | of_inputs).items()),
        )

    # Parameters

    def _shapes(self, ctx: ParallelContext) -> Hashable:
        """The shapes of the parameters of a rank: of its ends together, and of each of its kinds of layers."""
        pp = ctx.pp.rank
        if pp not in self._kinds:
            of_layer = self.parts.layer_parts(self.config, ctx)
            self._kinds[pp] = dict.fromkeys(of_layer[number] for stage in self.stages[pp] for number in stage.layers)
        found = [self.parts.structure(self.config, ctx, part).shapes for part in self._kinds[pp]]
        if self._ends[pp]:
            found.append(self.parts.structure(self.config, ctx, *self._ends[pp]).shapes)
        return tuple(found)

    def _modules(self, ctx: ParallelContext) -> list[PlannedStage]:
        """The parameters of each stage of a rank."""
        of_layer = self.parts.layer_parts(self.config, ctx)
        ends: Copies | None = None
        if self._ends[ctx.pp.rank]:
            ends = self.parts.copies(self.parts.structure(self.config, ctx, *self._ends[ctx.pp.rank]), ctx)
        copies: dict[LayerPart, Copies] = {}
        used: Counter[LayerPart] = Counter()
        members = iter(ends.members if ends else ())
        modules = []
        for stage in self.stages[ctx.pp.rank]:
            params = []
            after = []
            if ends and (stage.first or stage.last):
                member = next(members)
                of_ends = ends.number(0)
                params += [of_ends[index] for index in member.before]
                after = [of_ends[index] for index in member.after]
            for number in stage.layers:
                part = of_layer[number]
                if part not in copies:
                    copies[part] = self.parts.copies(self.parts.structure(self.config, ctx, part), ctx)
                params += copies[part].number(used[part])
                used[part] += 1
            modules.append(PlannedStage([*params, *after]))
        return modules

    def _buffers(self, ctx: ParallelContext) -> Buffers:
        """The buffers of a rank. Layouts that differ in the order of the schedule alone have the same."""
        options = self.config.optimizer
        modules = self._modules(ctx)
        # The copies of a parameter are the same objects in every plan.
        params = tuple(tuple(map(id, module.params)) for module in modules)
        key = ("buffers", params, options)
        if key not in self.parts.memory:
            self.parts.memory[key] = Buffers.of(options, modules)
        found: Buffers = self.parts.memory[key]
        return found

    def _most_of_units(self, ctx: ParallelContext, buffers: Buffers) -> tuple[int, int]:
        """The most bytes of gathered weights and of collected gradients at one time."""
        options = self.config.optimizer
        if options.zero_stage < 2:
            return 0, 0
        orders = self._orders()
        pp = self.config.parallel.pp
        in_runs = stages_of_runs(orders.breadth_first, pp, self.num_fine) is not None
        shown = self._enough_stages(ctx, all_of_them=in_runs)
        coarse = [self.coarse_of[self.stages[ctx.pp.rank][position].number] for position in shown]
        fine_stages = [coarse.count(stage) for stage in range(len(self.num_fine))]
        add_in_i = {new for new, old in enumerate(shown) if self._adds_gradients_in_i(ctx, old)}
        of_stage = {new: buffers.units[old] for new, old in enumerate(shown)}

        def changes(steps: Sequence[Step], allocates: UnitKind, frees: UnitKind) -> list[tuple[int, int]]:
            actions = [Action(kind, stage, number) for number, (kind, stage) in enumerate(without_repeats(steps, pp))]
            (order,) = refine([actions], fine_stages, breadth_first=runs_breadth_first(orders.breadth_first, pp))
            rules = Units(of_stage, _never, allocates == "gather", options.overlap_grad_reduce, add_in_i)
            plan = insert_unit_actions(order, rules, dict(enumerate(coarse)) if in_runs else None)
            return unit_changes(plan, allocates, frees)

        # Layouts that differ in the number of shards, or in ZeRO-2 and 3, use their units alike.
        units = tuple(tuple(numbers) for numbers in of_stage.values())
        decides = (id(orders), ctx.pp.rank, tuple(coarse), units, frozenset(add_in_i), options.overlap_grad_reduce)
        steps = orders.steps(ctx.pp.rank)
        gathered = 0
        if options.zero_stage == 3:
            # What gathers is one sequence of steps, and what adds gradients another.
            if ("gathers", decides) not in self.parts.memory:
                uses = [(kind, stage) for kind, stage in steps if kind != "W"]
                self.parts.memory["gathers", decides] = changes(uses, "gather", "release")
            gathered = _peak(self.parts.memory["gathers", decides], buffers.unit_elements)
        if ("additions", decides) not in self.parts.memory:
            in_i = {coarse[new] for new in add_in_i}
            adding = [(kind, stage) for kind, stage in steps if kind in ("B", "W") or (kind == "I" and stage in in_i)]
            self.parts.memory["additions", decides] = changes(adding, "open", "add")
        collected = _peak(self.parts.memory["additions", decides], buffers.unit_elements)
        return gathered * buffers.weight_size, collected * torch.float32.itemsize

    def _adds_gradients_in_i(self, ctx: ParallelContext, position: int) -> bool:
        stage = self.stages[ctx.pp.rank][position]
        return stage.last and self.parts.recording(self.config, ctx, LAST).kept.adds_gradients_in_i

    def _enough_stages(self, ctx: ParallelContext, *, all_of_them: bool) -> list[int]:
        """The positions of the fine stages of a rank with which units lie in memory as with all of them.

        Of equal layers one after the other a few show all that there is, unless the units of a stage stay in memory
        while it runs.
        """
        of_layer = self.parts.layer_parts(self.config, ctx)
        shown: list[int] = []
        before: object = None
        same = 0
        for position, stage in enumerate(self.stages[ctx.pp.rank]):
            part = of_layer[stage.layers[0]] if stage.layers else None
            alike = (self.coarse_of[stage.number], part)
            same = same + 1 if part is not None and alike == before else 1
            before = alike
            if all_of_them or same <= 2 * WINDOW:
                shown.append(position)
        return shown

    # What is kept for backward passes

    def kept_by_stage(self, ctx: ParallelContext, stage: _Stage, *, deferred: bool) -> Counter[str]:
        """The bytes that one micro-batch keeps in a stage by kind: from F to B or I, or if `deferred` from I to W."""
        # Of the ranks of a plan, those with one position on tp and with the same experts have the same parts.
        key = (tuple(self._parts_of(ctx, stage)), deferred, ctx.tp.rank, ctx.ep.rank, ctx.etp.rank)
        if key not in self._kept:
            found = self._kept_by_parts(ctx, stage, deferred=deferred)
            self._kept[key] = kept_by_stage(found, has_first=stage.first, has_layers=len(stage.layers) > 0)
        return self._kept[key]

    def _kept_by_parts(self, ctx: ParallelContext, stage: _Stage, *, deferred: bool) -> list[Kept]:
        """What one micro-batch keeps in each part of a stage."""
        found: list[Kept] = []
        for part in self._parts_of(ctx, stage):
            recording = self.parts.recording(self.config, ctx, part, found[-1].output if found else None)
            found.append(recording.deferred if deferred else recording.kept)
        return found

    def _parts_of(self, ctx: ParallelContext, stage: _Stage) -> list[PartId]:
        of_layer = self.parts.layer_parts(self.config, ctx)
        ids: list[PartId] = [of_layer[number] for number in stage.layers]
        if stage.first:
            ids.insert(0, FIRST)
        if stage.last:
            ids.append(LAST)
        return ids

    def inputs(self, ctx: ParallelContext) -> tuple[int, int]:
        """The bytes of inputs of layers in host memory, and the most on the device on their way (train.offload)."""
        if not self.config.train.offload:
            return 0, 0
        sizes = {}
        for stage in self.stages[ctx.pp.rank]:
            parts = self._kept_by_parts(ctx, stage, deferred=False)
            sizes[stage.number] = tuple(nbytes for part in parts for nbytes in part.on_host)
        orders = self._orders()
        key = ("inputs", id(orders), ctx.pp.rank, tuple(self.num_fine), tuple(sizes.items()))
        if key not in self.parts.memory:
            breadth_first = runs_breadth_first(orders.breadth_first, self.config.parallel.pp)
            (order,) = refine([orders.actions[ctx.pp.rank]], self.num_fine, breadth_first=breadth_first)
            self.parts.memory[key] = planned_nbytes(order, sizes)
        planned: tuple[int, int] = self.parts.memory[key]
        return planned

    def _at_peak(self, ctx: ParallelContext) -> Counter[Key]:
        """The bytes kept for backward passes, by stage and kind, when their sum is largest during the plan."""
        stages = self.stages[ctx.pp.rank]
        orders = self._orders()
        kept = {stage.number: self.kept_by_stage(ctx, stage, deferred=False) for stage in stages}
        in_halves = orders.in_halves(ctx.pp.rank)
        deferred = {
            stage.number: sum(self.kept_by_stage(ctx, stage, deferred=True).values())
            if self.coarse_of[stage.number] in in_halves
            else 0
            for stage in stages
        }
        fine: dict[int, list[int]] = {}
        for stage in stages:
            fine.setdefault(self.coarse_of[stage.number], []).append(stage.number)
        return at_peak(orders.moments(ctx.pp.rank), fine, kept, deferred)

    def limit(self) -> ScheduleMemory:
        """What each stage keeps, as `ScheduleMemory` has it. A schedule orders stages, so fine stages are added up."""
        num_stages = len(self.num_fine)
        forward = [0] * num_stages
        inputs = [0] * num_stages
        stride = 1
        for name in self.grid.order.split("-"):
            if name == "pp":
                break
            stride *= self.grid.sizes[name]
        for pp, stages in enumerate(self.stages):
            ctx = self.context(pp * stride)
            for stage in stages:
                coarse = self.coarse_of[stage.number]
                forward[coarse] += sum(self.kept_by_stage(ctx, stage, deferred=False).values())
                inputs[coarse] += sum(self.kept_by_stage(ctx, stage, deferred=True).values())
        return ScheduleMemory(self.config.parallel.schedule_memory_gb * 2**30, forward, inputs)

    def _orders(self) -> Orders:
        if self._schedule is None:
            parallel = self.config.parallel
            memory = self.limit() if parallel.schedule_memory_gb else None
            self._schedule = self.parts.orders(parallel, num_microbatches(self.config), memory)
        return self._schedule

    def _titles(self, stages: Sequence[_Stage]) -> str:
        """What the stages hold, in words. Of consecutive fine stages, only the first and the last are named."""
        runs: list[list[_Stage]] = []
        for stage in stages:
            if runs and self.fine_stages and runs[-1][-1].number == stage.number - 1:
                runs[-1].append(stage)
            else:
                runs.append([stage])
        names = []
        for run in runs:
            first, last = (
                self.parts.builder.title(stage.layers, first=stage.first, last=stage.last)
                for stage in (run[0], run[-1])
            )
            names.append(first if first == last else f"{first} to {last}")
        return "; ".join(names)


def _peak(changes: Sequence[tuple[int, int]], sizes: Sequence[int]) -> int:
    """The largest sum of the sizes of units in memory. A change is a unit, and 1 if it comes or -1 if it leaves."""
    return max(accumulate((sign * sizes[unit] for unit, sign in changes), initial=0))


def _never(action: UnitAction) -> None:
    raise AssertionError("a plan runs no unit action")
