"""Predicts the time of a training step of any layout on any machine, before anything is rented.

The work of each part of the model is recorded from the program itself (`megapar_tools.plan.work`), and timed for the
machine (`megapar_tools.plan.durations`). The pipeline runs by the plan of the runtime (`megapar.pipeline.simulation`).
To choose among many layouts, few of its micro-batches are simulated, and the waits of ZeRO-2 and 3 are estimated: up to
2% off, with breadth-first 5%, with slow gathers a tenth. After the pipeline come the exposed reductions of gradients,
the optimizer, and the gathers of new weights.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice

from megapar.base.grid import TIED_AXIS
from megapar.config.derive import num_microbatches
from megapar.config.options import Config
from megapar.launch.grid import grid_of
from megapar.optimizer import table
from megapar.optimizer.base import Optimizer
from megapar.pipeline.actions import Event
from megapar.pipeline.lowering import Message, lower
from megapar.pipeline.refine import refine, runs_breadth_first, stages_of_runs
from megapar.pipeline.schedules import find, placement
from megapar.pipeline.sharding_plan import Item, UnitAction, Units, insert_unit_actions
from megapar.pipeline.simulation import simulate
from megapar.train.levers import planned_device
from megapar_tools.plan.buffers import update_traffic
from megapar_tools.plan.durations import Duration, add_seconds, duration, scale_seconds, total
from megapar_tools.plan.hardware import Hardware
from megapar_tools.plan.memory import memory_limit
from megapar_tools.plan.network import Network
from megapar_tools.plan.parts import Parts
from megapar_tools.plan.recorded import Recording
from megapar_tools.plan.stage_works import stages_of

OPTIMIZER = "optimizer and norm"
HOST_LINK = "host"
"""The link of a device to its host, among the axes."""
_LEAST_FEW = 8
"""Of a pipeline at least so many micro-batches are simulated, and two rounds of them."""


StageSeconds = tuple[Duration, float, float]
"""One micro-batch through a stage: all of it, the seconds of F, and those of B, or of I and W."""


_Run = Sequence[float]
"""The seconds of a pipeline; on the mean of its ranks those of work, and of waits for units; each rank's end."""


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step. If pipeline ranks differ, their mean.

    `busy` has the seconds of kernels by kind, `exposed` those of communication with nothing computed under it, by axis.
    `idle_share` is the share of the step spent waiting for other stages of the pipeline. `mfu` is the
    model's FLOPs by the peak of `precision`. `events` is the timeline of the pipeline, empty if it was not simulated.
    """

    seconds: float
    idle_share: float
    busy: Mapping[str, float]
    exposed: Mapping[str, float]
    tokens_per_second_per_gpu: float
    mfu: float
    events: Sequence[Event] = ()

    @property
    def exposed_share(self) -> float:
        """The share of the step spent waiting for communication within a rank's own stages."""
        return sum(self.exposed.values()) / self.seconds


def step_time(
    config: Config, parts: Parts, hardware: Hardware, *, simulated: bool = False, timeline: bool = False
) -> StepTime:
    """The time of a step of `config`, a validated configuration for a whole world.

    With `simulated` the plan of the runtime is simulated for few micro-batches, and with `timeline` for all. The first
    takes a tenth of a second for large pipelines, the second up to minutes. Raises ConfigError if the machine lacks the
    precision.
    """
    return _Step(config, parts, hardware).time(simulated, timeline)


def microbatches_simulated(config: Config) -> list[int]:
    """The numbers of micro-batches that stand for a whole step: those of all, or two, one round of a pipeline apart."""
    parallel = config.parallel
    number = num_microbatches(config)
    # Of short pipelines the first two rounds are not yet like the others.
    few = max(2, -(-_LEAST_FEW // parallel.pp)) * parallel.pp + number % parallel.pp
    # A schedule from a file may be for one number of micro-batches only. Breadth-first, the collectives of a unit run
    # under all micro-batches.
    if number <= few + parallel.pp or not find(parallel.schedule).repeats:
        return [number]
    return [few, few + parallel.pp]


@dataclass(frozen=True)
class _Fine:
    """The times of a part: F, B, I and W of one micro-batch, and of the collectives of its units (ZeRO-2 and 3)."""

    part: Recording
    number: int
    """How many of them follow each other."""
    forward: Duration
    backward: Duration
    inputs: Duration
    weights: Duration
    gather: float
    reduce: float
    add: float
    to_host: float
    """Seconds of the inputs of its layers on the link to the host, one way (train.offload)."""


@dataclass
class _Ends:
    """What follows the pipeline on a rank, in seconds by axis, and the optimizer's."""

    exposed: dict[str, float] = field(default_factory=dict)
    optimizer: float = 0.0

    def expose(self, axis: str, seconds: float) -> None:
        if seconds > 0:
            self.exposed[axis] = self.exposed.get(axis, 0.0) + seconds

    @property
    def seconds(self) -> float:
        return sum(self.exposed.values()) + self.optimizer


class _Step:
    """The computation of `step_time`."""

    def __init__(self, config: Config, parts: Parts, hardware: Hardware):
        self.config = config
        self.parts = parts
        self.hardware = hardware
        self.memory = memory_limit(config, parts)
        copied = ("tp",) if config.parallel.tp_symmetric_memory else ()
        self.network = Network(grid_of(config), hardware, copied)
        self.microbatches = num_microbatches(config)
        parallel = config.parallel
        self.schedule = find(parallel.schedule)
        self.in_halves = self.schedule.in_halves
        self.rank_of = placement(parallel.schedule, parallel.pp, parallel.vpp)
        self.zero_stage = config.optimizer.zero_stage
        fine: dict[Recording, _Fine] = {}
        self.stages: list[list[_Fine]] = []
        for stage in stages_of(config, parts):
            for part, _ in stage:
                if part not in fine:
                    fine[part] = self._fine(part)
            self.stages.append([replace(fine[part], number=number) for part, number in stage])

    def time(self, simulated: bool, timeline: bool) -> StepTime:
        """The step, as `step_time` says."""
        config = self.config
        pp = config.parallel.pp
        # Most stages are alike.
        times_of: dict[tuple[tuple[Recording, int], ...], StageSeconds] = {}
        stage_times = []
        for stage in self.stages:
            key = tuple((fine.part, fine.number) for fine in stage)
            if key not in times_of:
                times_of[key] = self._stage(stage)
            stage_times.append(times_of[key])
        events: Sequence[Event] = ()
        if timeline:
            run, events = self._simulated(self.microbatches)
        elif simulated:
            run = self._of_few(lambda number: self._simulated(number)[0])
        else:
            run = self._by_stages(stage_times)
        pipeline, working, waited, *ends_of_ranks = run
        rank_times: list[Duration] = []
        for rank in range(pp):
            own = [times for times, home in zip(stage_times, self.rank_of, strict=True) if home == rank]
            rank_times.append(total([whole for whole, _, _ in own]).times(self.microbatches))
        after = [self._after(rank) for rank in range(pp)]
        overhead = self.hardware.step_overhead_ms * 1e-3
        # All ranks wait for the norm of the gradient, and so for the last reduction.
        reduced = max(end + ends.seconds for end, ends in zip(ends_of_ranks, after, strict=True))
        seconds = max(reduced, pipeline) + overhead
        exposed = scale_seconds(
            add_seconds(*(work.exposed for work in rank_times), *(ends.exposed for ends in after)), 1 / pp
        )
        if (simulated or timeline) and self.zero_stage >= 2:
            exposed["grad"] = waited
        busy = scale_seconds(add_seconds(*(work.busy for work in rank_times)), 1 / pp)
        busy[OPTIMIZER] = sum(ends.optimizer for ends in after) / pp
        idle = max(pipeline - working, 0.0) / seconds
        tokens = config.train.global_batch_size * config.train.seq_length
        world = self.network.grid.world_size
        rate = tokens / seconds / world
        peak = self.hardware.peak(config.train.precision)
        mfu = self.parts.flops_per_token(config) * rate / peak
        return StepTime(seconds, idle, busy, exposed, rate, mfu, tuple(events))

    # Parts and stages

    def _fine(self, part: Recording) -> _Fine:
        forward = self._duration(part.forward)
        backward = inputs = weights = Duration()
        if self.in_halves:
            inputs = self._duration(part.inputs)
            weights = self._duration(part.weights)
        else:
            backward = self._duration(part.backward)
        gather = reduce = add = 0.0
        if self.zero_stage >= 2:
            for axis, elements in part.elements.items():
                reduced = elements * self._grad_itemsize
                reduce += self.network.seconds("reduce_scatter", self._shards(axis), reduced)
                shard = elements / self._shard_ranks(axis)
                # The sum is read and added to the shard.
                add += self.hardware.memory_seconds(3 * 4 * shard)
                if self.zero_stage == 3:
                    gather += self.network.seconds("all_gather", self._shards(axis), elements * part.itemsize)
        to_host = sum(part.kept.on_host) / (self.hardware.host.link_gb_per_second * 1e9)
        return _Fine(part, 1, forward, backward, inputs, weights, gather, reduce, add, to_host)

    def _duration(self, operations: tuple[object, ...]) -> Duration:
        return duration(operations, self.hardware, self.network)  # type: ignore[arg-type]

    def _stage(self, stage: Sequence[_Fine]) -> StageSeconds:
        """One micro-batch through a stage: all of its time, the seconds of F, and those of B or I and W."""
        forward = total([fine.forward.times(fine.number) for fine in stage])
        if self.in_halves:
            backward = total([half.times(fine.number) for fine in stage for half in (fine.inputs, fine.weights)])
        else:
            backward = total([fine.backward.times(fine.number) for fine in stage])
        forward_seconds = forward.seconds
        backward_seconds = backward.seconds
        exposed: dict[str, float] = {}
        if self.zero_stage >= 2:
            runs = 1
            if self._breadth_first:
                runs = self.microbatches
            waits_forward = _unit_waits([(f.forward.seconds * runs, f.gather, f.number) for f in stage]) / runs
            of_backward = [(self._backward_of(f) * runs, f.gather + f.reduce, f.number) for f in reversed(stage)]
            adds = sum(fine.add * fine.number for fine in stage)
            waits_backward = (_unit_waits(of_backward) + adds) / runs
            forward_seconds += waits_forward
            backward_seconds += waits_backward
            exposed["grad"] = waits_forward + waits_backward
            moved = sum((2 * fine.gather + fine.reduce) * fine.number for fine in stage) / runs
            backward_seconds += max(moved - exposed["grad"], 0.0) * self.hardware.interference
        # Inputs of layers travel under a pass: to the host under the forward, and back under the backward.
        to_host = sum(fine.to_host * fine.number for fine in stage)
        waits = [max(to_host - seconds, 0.0) for seconds in (forward_seconds, backward_seconds)]
        forward_seconds += waits[0]
        backward_seconds += waits[1]
        if sum(waits):
            exposed[HOST_LINK] = sum(waits)
        whole = total([forward, backward])
        # A device waits for a host that issues operations more slowly than they run.
        seconds = forward_seconds + backward_seconds
        slowed = max(seconds, whole.host) / seconds
        whole = replace(whole, seconds=seconds * slowed, exposed=add_seconds(whole.exposed, exposed))
        return whole, forward_seconds * slowed, backward_seconds * slowed

    # The pipeline

    def _of_few(self, run: Callable[[int], Sequence[float]]) -> Sequence[float]:
        """What `run` returns for all micro-batches, from what it returns for few.

        Once a pipeline is full, each further round of micro-batches takes the same time.
        """
        few, *more = microbatches_simulated(self.config)
        if not more:
            return run(few)
        rounds = (self.microbatches - few) / (more[0] - few)
        return [a + rounds * (b - a) for a, b in zip(run(few), run(more[0]), strict=True)]

    def _by_stages(self, stages: Sequence[StageSeconds]) -> _Run:
        """A step whose actions each take the time of a whole stage, waits for units included."""
        parallel = self.config.parallel
        pp = parallel.pp
        working = self.microbatches * sum(whole.seconds for whole, _, _ in stages) / pp
        if pp == 1:
            return working, working, 0.0, working
        (seconds,) = self._of_few(lambda number: [self._pipeline_seconds(number, stages)])
        # A rank's last backward ends when those of all stages before it still have to run.
        per_stage = sum(backward for _, _, backward in stages) / (pp * parallel.vpp)
        return seconds, working, 0.0, *(seconds - rank * per_stage for rank in range(pp))

    def _pipeline_seconds(self, number: int, stages: Sequence[StageSeconds]) -> float:
        """The time of the pipeline for so many micro-batches, by simulation without units."""
        forward = [seconds for _, seconds, _ in stages]
        backward = [seconds for _, _, seconds in stages]
        weights = None
        if self.in_halves:
            # What is added to the shards of ZeRO-2 and 3 is what a W has computed.
            weights = [sum((fine.weights.seconds + fine.add) * fine.number for fine in stage) for stage in self.stages]
        message = self._message_seconds()
        # Layouts that differ in ZeRO's groups of ranks have the same pipeline with the same times.
        key = (*self._pipeline(number), *forward, *backward, *(weights or ()), message)
        if key not in self.parts.times:
            timeline = simulate(self._plans(number), forward, backward, message, weights)
            self.parts.times[key] = timeline.makespan
        return self.parts.times[key]

    def _plans(self, number: int) -> Sequence[Sequence[Item]]:
        """The plans of all ranks for so many micro-batches, without units. They are made once."""
        parallel = self.config.parallel
        key = self._pipeline(number)
        if key not in self.parts.times:
            orders = self.parts.orders(parallel, number, self.memory).actions
            self.parts.times[key] = lower(orders, parallel.pp * parallel.vpp)
        return self.parts.times[key]

    def _pipeline(self, number: int) -> tuple[Hashable, ...]:
        """What decides the plans of all ranks for so many micro-batches."""
        parallel = self.config.parallel
        memory = self.memory
        limit = None if memory is None else (memory.limit, tuple(memory.forward), tuple(memory.inputs))
        return parallel.schedule, parallel.schedule_costs, parallel.pp, parallel.vpp, number, limit

    def _message_seconds(self) -> float:
        """Seconds of the tensors between two stages, for neighboring pipeline ranks."""
        boundary = max(fine.part.boundary_bytes for stage in self.stages for fine in stage)
        return self.network.message(self.network.span("pp").nodes > 1, boundary)

    def _simulated(self, number: int) -> tuple[_Run, Sequence[Event]]:
        """A step of so many micro-batches with its units, and its timeline."""
        parallel = self.config.parallel
        orders = self.parts.orders(parallel, number, self.memory).actions
        splits = self.zero_stage >= 2
        # The stages of the plan: those of the schedule, or their parts.
        parts: list[list[_Fine]] = []
        counts = []
        slowed: list[tuple[float, float]] = []  # in forward and in backward
        for stage in self.stages:
            single = [replace(fine, number=1) for fine in stage for _ in range(fine.number)]
            groups = [single]
            if splits:
                groups = [[fine] for fine in single]
            counts.append(len(groups))
            parts += groups
            passes = [sum(fine.forward.seconds for fine in single), sum(map(self._backward_of, single))]
            slow = max(self._stage(stage)[0].host / sum(passes), 1.0)
            to_host = sum(fine.to_host for fine in single)
            slowed += [(max(slow, to_host / passes[0]), max(slow, to_host / passes[1]))] * counts[-1]
        forward = [s * sum(fine.forward.seconds for fine in part) for (s, _), part in zip(slowed, parts, strict=True)]
        backward = [s * sum(map(self._backward_of, part)) for (_, s), part in zip(slowed, parts, strict=True)]
        weights = [s * sum(fine.weights.seconds for fine in part) for (_, s), part in zip(slowed, parts, strict=True)]
        lowered = lower(orders, parallel.pp * parallel.vpp)
        plans: Sequence[Sequence[Item]] = lowered
        if splits:
            fine = refine(lowered, counts, breadth_first=runs_breadth_first(self._breadth_first, parallel.pp))
            runs = stages_of_runs(self._breadth_first, parallel.pp, counts)
            plans = [insert_unit_actions(plan, self._units(len(parts)), runs) for plan in fine]

        def message(rank: int, one: Message) -> float:
            return message_seconds

        def unit(rank: int, action: UnitAction) -> float:
            fine = parts[action.unit][0]
            return {"gather": fine.gather, "reduce": fine.reduce, "add": fine.add}.get(action.kind, 0.0)

        message_seconds = self._message_seconds()
        timeline = simulate(plans, forward, backward, message, weights if self.in_halves else None, unit)
        # What follows a wait for a sum of gradients counts as a part of it: it is added to a shard.
        items = [(rank, item) for rank, plan in enumerate(plans) for item in plan]
        adds = sum(unit(rank, item) for rank, item in items if isinstance(item, UnitAction) and item.kind == "add")
        waited = (sum(timeline.unit_waits) + adds) / parallel.pp
        working = sum(event.end - event.start for event in timeline.events) / parallel.pp + waited
        return (timeline.makespan, working, waited, *timeline.ends), timeline.events

    def _backward_of(self, fine: _Fine) -> float:
        if self.in_halves:
            return fine.inputs.seconds + fine.weights.seconds
        return fine.backward.seconds

    def _units(self, number: int) -> Units:
        """Units of a plan of so many parts: each part is one, of the same number."""
        chunked = self.config.kernels.loss_chunk > 0
        return Units(
            {part: [part] for part in range(number)},
            run=lambda action: None,
            gathers=self.zero_stage == 3,
            overlap=self.config.optimizer.overlap_grad_reduce,
            add_in_i={number - 1} if chunked else (),
        )

    @property
    def _breadth_first(self) -> bool:
        return self.schedule.breadth_first

    # After the pipeline

    def _after(self, rank: int) -> _Ends:
        """What a pipeline rank does after its last backward."""
        ends = _Ends()
        own = [stage for stage, home in zip(self.stages, self.rank_of, strict=True) if home == rank]
        fine = [part for stage in own for part in stage]
        elements = self._elements(fine)
        itemsize = max((part.part.itemsize for part in fine), default=2)
        options = self.config.optimizer
        for axis, number in elements.items():
            shard = float(number)
            if options.zero_stage:
                shard /= self._shard_ranks(axis)
            if options.zero_stage < 2:
                ends.expose(axis, self._reduction_wait(axis, number, own))
            if options.zero_stage and self._is_split(axis):
                ends.expose(axis, self._wait_for_copies(axis, shard, number, own))
            if options.zero_stage in (1, 2):
                gather = self.network.seconds("all_gather", self._shards(axis), number * itemsize)
                if options.overlap_param_gather and own:
                    first = own[0]
                    # All but the first part's travel under the forward passes that do not need them yet.
                    under = sum(part.forward.seconds * part.number for part in first)
                    gather = max(gather - under, gather / max(sum(part.number for part in fine), 1))
                ends.expose(axis, gather)
            on_host = shard * options.offload
            # Both at once; but the norm is that of all gradients, on the device.
            updated = self.hardware.memory_seconds(update_traffic(options) * (shard - on_host) + 4 * on_host)
            ends.optimizer += max(updated, self.hardware.host_update_seconds(on_host, itemsize))
            self._join_matrices(axis, fine, ends)
        ends.expose("world", self.network.seconds("all_reduce", "world", 8.0))
        if self.config.model.tie_word_embeddings and rank in self.network.grid.with_embedding:
            tied = max((part.part.embedding_elements for part in fine), default=0)
            ends.expose(TIED_AXIS, self.network.seconds("all_reduce", TIED_AXIS, 4 * tied))
        return ends

    def _join_matrices(self, axis: str, fine: Sequence[_Fine], ends: _Ends) -> None:
        """Add the exchange of whole matrices, and their products on the rank with the largest share (`owners`)."""
        options = self.config.optimizer
        plane = self._plane(axis)
        shapes: Counter[tuple[type[Optimizer], int, int]] = Counter()
        elements = 0
        for part in fine:
            for (axis_of_gradients, name), pieces in part.part.matrices.items():
                optimizer = table.find(name or options.name)
                if axis_of_gradients != axis or not optimizer.JOINS_MATRICES:
                    continue
                for piece in pieces:
                    blocks = piece.blocks if options.muon_per_head and piece.blocks else piece.shape[:1]
                    # Blocks repeat down to the last row (`Piece.blocks`).
                    count = math.ceil(piece.shape[0] * len(blocks) / sum(blocks))
                    for number in islice(cycle(blocks), count):
                        shapes[optimizer, number, piece.shape[1]] += part.number
                    elements += math.prod(piece.shape) * part.number
        if not shapes:
            return
        ranks = self.network.span(plane).ranks
        seconds = {shape: self._seconds_of_matrix(*shape) for shape in shapes}
        all_of_them = sum(seconds[shape] * number for shape, number in shapes.items())
        ends.optimizer += max(all_of_them / ranks, max(seconds.values()))
        itemsize = 2 if self._sends_16_bits else 4
        ends.expose(plane, 2 * self.network.seconds("all_to_all", plane, elements * itemsize / ranks))

    @property
    def _sends_16_bits(self) -> bool:
        """Whether whole matrices travel and are multiplied in bf16 (`Muon.sent_dtype`)."""
        return self.config.kernels.backend in ("triton", "apex") or planned_device(self.config) == "cuda"

    def _plane(self, axis: str) -> str:
        """The name of the axis of all ranks with parts of a matrix, as `ParallelContext.plane_of` has it."""
        cut, plane = ("etp", "expert_plane") if axis == "expert_grad" else ("tp", "plane")
        if self.network.span(cut).ranks == 1:
            return axis
        return cut if self.network.span(axis).ranks == 1 else plane

    def _seconds_of_matrix(self, optimizer: type[Optimizer], rows: int, columns: int) -> float:
        """Return the seconds of the products that update one whole matrix."""
        precision = "bf16" if self._sends_16_bits else "fp32"
        products = optimizer.matrix_products(rows, columns)
        return sum(self.hardware.product_seconds(*product, precision) for product in products)

    def _elements(self, fine: Sequence[_Fine]) -> dict[str, int]:
        """The elements of a rank's parameters by axis. A tied embedding counts once."""
        elements: dict[str, int] = {}
        tied = []
        if self.config.model.tie_word_embeddings:
            tied = [part.part.embedding_elements for part in fine if part.part.embedding_elements]
        for part in fine:
            for axis, number in part.part.elements.items():
                elements[axis] = elements.get(axis, 0) + number * part.number
        if len(tied) > 1:
            elements["grad"] -= sum(tied[1:])
        return elements

    def _reduction_wait(self, axis: str, elements: int, stages: Sequence[Sequence[_Fine]]) -> float:
        """Seconds of the reduction of gradients after the last backward (ZeRO stages 0 and 1)."""
        options = self.config.optimizer
        operation = "all_reduce" if options.zero_stage == 0 else "reduce_scatter"
        nbytes = elements * self._grad_itemsize
        buckets = self._buckets(elements)
        # The last bucket is complete when the backward ends. The others follow each other under it.
        each = self.network.seconds(operation, self._shards(axis), nbytes / buckets)
        if not options.overlap_grad_reduce or not stages:
            return each * buckets
        # The last backward of a rank is that of its first stage; the buckets of its other stages are complete then.
        window = sum(self._backward_of(fine) * fine.number for fine in stages[0])
        return max(each, each * buckets - window * (buckets - 1) / buckets)

    def _wait_for_copies(self, axis: str, shard: float, elements: int, stages: Sequence[Sequence[_Fine]]) -> float:
        """Seconds of the sum of shards over their copies, after the last backward."""
        seconds = self.network.seconds("all_reduce", self._copies(axis), 4 * shard)
        options = self.config.optimizer
        if not stages or (options.zero_stage < 2 and not options.overlap_grad_reduce):
            return seconds
        # A unit's starts with its last addition, and a bucket's when the next bucket is complete: under the backward of
        # what is left.
        units = sum(fine.number for fine in stages[0])
        if options.zero_stage < 2:
            units = self._buckets(elements)
        window = sum(self._backward_of(fine) * fine.number for fine in stages[0])
        return max(seconds / units, seconds - window * (units - 1) / units)

    def _buckets(self, elements: int) -> int:
        return max(round(elements * 4 / (self.config.optimizer.bucket_mb * 2**20)), 1)

    @property
    def _grad_itemsize(self) -> int:
        return 2 if self.config.optimizer.grad_reduce_dtype == "bf16" else 4

    def _is_split(self, axis: str) -> bool:
        return 0 < self.config.optimizer.shard_ranks < self.network.span(axis).ranks

    def _shards(self, axis: str) -> str:
        return f"{axis}_shards" if self._is_split(axis) else axis

    def _copies(self, axis: str) -> str:
        return f"{axis}_copies"

    def _shard_ranks(self, axis: str) -> int:
        return self.network.span(self._shards(axis)).ranks


def _unit_waits(parts: Sequence[tuple[float, float, int]]) -> float:
    """Seconds of waiting for units. The collectives of a part run under the part before it. Parts repeat for ever.

    A part has its seconds of computing, those of its units' collectives, and a number: how often it follows itself.
    """
    waits = 0.0
    computed_before = parts[-1][0]
    for computed, moved, number in parts:
        waits += max(moved - computed_before, 0.0) + (number - 1) * max(moved - computed, 0.0)
        computed_before = computed
    return waits
