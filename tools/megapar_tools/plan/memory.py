"""The memory of each rank of a layout, from the parts of its model (`megapar_tools.plan.parts`), to the byte.

No rank is built. What lies in buffers follows from the declared parameters, by the code that lays them out in a run.
What is kept for backward passes follows from the order of the rank's schedule.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace

from megapar.base.grid import Grid
from megapar.config.options import Config, ParallelConfig
from megapar.declare import context
from megapar.declare.context import ParallelContext
from megapar.launch.grid import grid_of
from megapar.observe import memory_report
from megapar.optimizer import table
from megapar.pipeline.zero_bubble import ScheduleMemory
from megapar.step.trainable import freeze, refuse
from megapar.train.levers import planned_device
from megapar_tools.plan.activation_memory import ActivationMemory
from megapar_tools.plan.buffers import Buffers
from megapar_tools.plan.moments import Orders
from megapar_tools.plan.parameter_memory import ParameterMemory
from megapar_tools.plan.parts import Parts
from megapar_tools.plan.stage_layout import HeldStage, StageLayout
from megapar_tools.plan.target import with_planned_kernels
from megapar_tools.plan.unit_memory import UnitMemory
from megapar_tools.plan.work import META


@dataclass(frozen=True)
class RankReport:
    """The memory needed by one rank, in bytes.

    `pp` is the rank's position on axis pp, and `stages` says in words what it holds. `parameters` is a number of
    elements. `kept` is the most kept for backward passes at one time of the rank's schedule, by name
    (`memory_report.by_name`). `converted` are weights in the number format of their products. `optimizer_on_host` and
    `inputs_on_host` are in host memory beside the device's, and in no total. Not counted are workspaces of kernels, and
    free memory held by the caching allocator.
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
    converted: int = 0

    @property
    def rows(self) -> dict[str, int]:
        """The bytes by the names in the report of train.memory_report."""
        rows = memory_report.rows(self.weights, self.converted, self.gradients, self.optimizer, dict(self.kept))
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
        return self.weights + self.converted + self.gradients + self.optimizer + self.activations


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
    for rank in _ranks_to_list(grid_of(config), config):
        found.setdefault(plan.report_of_shapes(rank), []).append(rank)
    table.check(config.optimizer, plan.optimizers)
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
    config = with_planned_kernels(config)
    return _activations(config, parts).inputs(parts.context(config, rank))[0]


def kept_by_a_layer(config: Config, parts: Parts) -> tuple[float, float]:
    """The bytes that one micro-batch keeps in a layer on the first rank, and those of them in its MLP: means."""
    config = with_planned_kernels(config)
    whole = HeldStage(0, range(config.model.num_hidden_layers), first=False, last=False)
    found = _activations(config, parts).kept_by_stage(parts.context(config, 0), whole, deferred=False)
    in_mlp = sum(nbytes for kind, nbytes in found.items() if kind == "mlp")
    return found.total() / len(whole.layers), in_mlp / len(whole.layers)


def memory_limit(config: Config, parts: Parts) -> ScheduleMemory | None:
    """What parallel.schedule_memory_gb allows, and what each stage of the pipeline keeps. None if it is not given.

    It is that of the first replica and tensor rank.
    """
    if not config.parallel.schedule_memory_gb:
        return None
    return _activations(with_planned_kernels(config), parts).limit()


def _activations(config: Config, parts: Parts) -> ActivationMemory:
    return ActivationMemory(config, parts, StageLayout(config, parts.builder))


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


class _Plan:
    """The memory of the ranks of one layout. `optimizers` has the names of the optimizers of all reported ranks."""

    def __init__(self, config: Config, parts: Parts):
        self._config = config = with_planned_kernels(config)
        self._parts = parts
        self.optimizers: set[str] = set()
        self._layout = StageLayout(config, parts.builder)
        self._parameters = ParameterMemory(config, parts, self._layout)
        self._units = UnitMemory(config, parts, self._layout)
        self._activations = ActivationMemory(config, parts, self._layout)
        self._of_shapes: dict[Hashable, RankReport] = {}

    def report_of_shapes(self, rank: int) -> RankReport:
        """The report of the first rank with parameters of the same shapes as `rank`."""
        ctx = self._parts.context(self._config, rank)
        shapes = (ctx.pp.rank, self._parameters.shapes(ctx))
        if shapes not in self._of_shapes:
            self._of_shapes[shapes] = self.report(rank)
        return self._of_shapes[shapes]

    def report(self, rank: int) -> RankReport:
        """The report of `rank`."""
        ctx = self._parts.context(self._config, rank)
        buffers = self._parameters.buffers(ctx)
        self.optimizers.update(buffers.optimizers)
        orders = self._activations.orders()
        gathered, collected = self._units.peak_bytes(ctx, buffers, orders)
        at_peak = self._activations.at_peak(ctx)
        optimizer = buffers.optimizer
        on_host = buffers.optimizer_on_host
        stages = self._layout.stages[ctx.pp.rank]
        on = planned_device(self._config)
        if on == "cpu":  # the host's memory is the device's
            optimizer += on_host
            on_host = 0
        in_slots, travelling = self._activations.inputs(ctx)
        of_inputs, inputs_on_host = memory_report.inputs_by_name(travelling, in_slots, on)
        return RankReport(
            pp=ctx.pp.rank,
            stages=self._layout.titles(ctx.pp.rank),
            parameters=buffers.parameters,
            weights=buffers.weights + gathered,
            gradients=buffers.gradients + collected,
            optimizer=optimizer,
            optimizer_on_host=on_host,
            inputs_on_host=inputs_on_host,
            kept=tuple((memory_report.by_name(at_peak, len(stages), self._layout.fine_stages) | of_inputs).items()),
            converted=self._converted_bytes(ctx, buffers, orders),
        )

    def _converted_bytes(self, ctx: ParallelContext, buffers: Buffers, orders: Orders) -> int:
        """The most bytes of weights in the number format of their products at one time (`ConvertedWeight`).

        They are kept until the weights change, and with ZeRO-3 until the unit of the weights is released. Codes that
        ZeRO-3 gathers are those of the unit, and count as its weights.
        """
        if self._config.train.fp8 == "none" and self._config.kernels.products == "torch":
            return 0  # torch's products read the weights themselves
        sizes = [self._activations.converted_by_stage(ctx, stage) for stage in self._layout.stages[ctx.pp.rank]]
        trained = [size for size, _, _ in sizes]
        frozen = sum(size for _, _, size in sizes)
        if self._config.optimizer.zero_stage < 3:
            return sum(trained) + sum(size for _, size, _ in sizes) + frozen
        # The units of a stage are gathered and released together, so one of them stands for all.
        of_units = [0] * len(buffers.unit_elements)
        for units, size in zip(buffers.units, trained, strict=True):
            if units:
                of_units[units[0]] += size
        return self._units.most_in_use(ctx, buffers, orders, of_units) + frozen
