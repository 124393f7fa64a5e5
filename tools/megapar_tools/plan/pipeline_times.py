"""The time of a pipeline, by simulation of the runtime's plan (`megapar.pipeline.simulation`)."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from megapar.config.derive import num_microbatches
from megapar.config.options import Config
from megapar.pipeline.actions import Action, Event
from megapar.pipeline.lowering import Message, lower
from megapar.pipeline.refine import refine, runs_breadth_first, stages_of_runs
from megapar.pipeline.schedules import find
from megapar.pipeline.sharding_plan import Item, UnitAction, Units, insert_unit_actions
from megapar.pipeline.simulation import simulate
from megapar.pipeline.zero_bubble import ScheduleMemory
from megapar_tools.plan.network import Network
from megapar_tools.plan.part_times import PartTimes, StageTime
from megapar_tools.plan.parts import Parts

_LEAST_FEW = 8
"""Of a pipeline at least so many micro-batches are simulated, and two rounds of them."""

PipelineSeconds = Sequence[float]
"""The seconds of a pipeline; on the mean of its ranks those of work, and of waits for units; each rank's end."""


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


def of_few(config: Config, run: Callable[[int], PipelineSeconds]) -> PipelineSeconds:
    """Return what `run` returns for all micro-batches of a step, from what `run` returns for few.

    Once a pipeline is full, each further round of micro-batches takes the same time.
    """
    few, *more = microbatches_simulated(config)
    if not more:
        return run(few)
    rounds = (num_microbatches(config) - few) / (more[0] - few)
    return [a + rounds * (b - a) for a, b in zip(run(few), run(more[0]), strict=True)]


class StagePipeline:
    """A pipeline whose actions each take the time of a whole stage, waits for units included.

    `memory` is what the schedule may keep, if that is limited. Simulated pipelines are kept in `parts.times`.
    """

    def __init__(
        self,
        config: Config,
        parts: Parts,
        memory: ScheduleMemory | None,
        stages: Sequence[Sequence[PartTimes]],
        message_seconds: float,
    ):
        self._config = config
        self._parts = parts
        self._memory = memory
        self._stages = stages
        self._message_seconds = message_seconds

    def run(self, times: Sequence[StageTime]) -> PipelineSeconds:
        """Return the seconds of a step whose stages take `times`."""
        parallel = self._config.parallel
        pp = parallel.pp
        working = num_microbatches(self._config) * sum(time.whole.seconds for time in times) / pp
        if pp == 1:
            return working, working, 0.0, working
        (seconds,) = of_few(self._config, lambda number: [self._makespan(number, times)])
        # A rank's last backward ends when those of all stages before it still have to run.
        per_stage = sum(time.backward for time in times) / (pp * parallel.vpp)
        return seconds, working, 0.0, *(seconds - rank * per_stage for rank in range(pp))

    def _makespan(self, number: int, times: Sequence[StageTime]) -> float:
        """The time of the pipeline for so many micro-batches."""
        forward = [time.forward for time in times]
        backward = [time.backward for time in times]
        weights = None
        if find(self._config.parallel.schedule).in_halves:
            # What is added to the shards of ZeRO-2 and 3 is what a W has computed.
            weights = [sum((one.weights_seconds + one.add) * one.number for one in stage) for stage in self._stages]
        # Layouts that differ in ZeRO's groups of ranks have the same pipeline with the same times.
        key = (*self._key(number), *forward, *backward, *(weights or ()), self._message_seconds)
        made = self._parts.times
        if key not in made:
            made[key] = simulate(self._plans(number), forward, backward, self._message_seconds, weights).makespan
        makespan: float = made[key]
        return makespan

    def _plans(self, number: int) -> Sequence[Sequence[Item]]:
        """The plans of all ranks for so many micro-batches. They are made once."""
        parallel = self._config.parallel
        key = self._key(number)
        if key not in self._parts.times:
            orders = self._parts.orders(parallel, number, self._memory).actions
            self._parts.times[key] = lower(orders, parallel.pp * parallel.vpp)
        plans: Sequence[Sequence[Item]] = self._parts.times[key]
        return plans

    def _key(self, number: int) -> tuple[Hashable, ...]:
        """What decides the plans of all ranks for so many micro-batches."""
        parallel = self._config.parallel
        memory = self._memory
        limit = None if memory is None else (memory.limit, tuple(memory.forward), tuple(memory.inputs))
        return parallel.schedule, parallel.schedule_costs, parallel.pp, parallel.vpp, number, limit


class UnitPipeline:
    """A pipeline simulated with its units: what ZeRO-2 and 3 gather, reduce and add to shards, part by part.

    `hosts` are the seconds in which a host issues the operations of each stage (`Duration.host`).
    """

    def __init__(self, config: Config, stages: Sequence[Sequence[PartTimes]], hosts: Sequence[float]):
        self._config = config
        self._splits = config.optimizer.zero_stage >= 2
        # The stages of the plan: those of the schedule, or their parts.
        self._parts: list[list[PartTimes]] = []
        self._counts: list[int] = []
        self._slowed: list[tuple[float, float]] = []  # in forward and in backward
        for stage, host in zip(stages, hosts, strict=True):
            single = [replace(one, number=1) for one in stage for _ in range(one.number)]
            groups = [[one] for one in single] if self._splits else [single]
            self._counts.append(len(groups))
            self._parts += groups
            passes = [sum(one.forward.seconds for one in single), sum(one.backward_seconds for one in single)]
            slow = max(host / sum(passes), 1.0)
            to_host = sum(one.to_host for one in single)
            self._slowed += [(max(slow, to_host / passes[0]), max(slow, to_host / passes[1]))] * len(groups)

    def run(
        self, orders: Sequence[Sequence[Action]], message_seconds: float
    ) -> tuple[PipelineSeconds, Sequence[Event]]:
        """Return the seconds of a pipeline that runs `orders`, and its timeline."""
        pp = self._config.parallel.pp
        parts = list(zip(self._slowed, self._parts, strict=True))
        forward = [slow * sum(one.forward.seconds for one in part) for (slow, _), part in parts]
        backward = [slow * sum(one.backward_seconds for one in part) for (_, slow), part in parts]
        weights = None
        if find(self._config.parallel.schedule).in_halves:
            weights = [slow * sum(one.weights_seconds for one in part) for (_, slow), part in parts]

        # A number would be the time of a whole batch of messages.
        def message(rank: int, one: Message) -> float:
            return message_seconds

        plans = self._plans(orders)
        timeline = simulate(plans, forward, backward, message, weights, self._seconds_of)
        # What follows a wait for a sum of gradients counts as a part of it: it is added to a shard.
        items = [(rank, item) for rank, plan in enumerate(plans) for item in plan]
        adds = sum(
            self._seconds_of(rank, item) for rank, item in items if isinstance(item, UnitAction) and item.kind == "add"
        )
        waited = (sum(timeline.unit_waits) + adds) / pp
        working = sum(event.end - event.start for event in timeline.events) / pp + waited
        return (timeline.makespan, working, waited, *timeline.ends), timeline.events

    def _plans(self, orders: Sequence[Sequence[Action]]) -> Sequence[Sequence[Item]]:
        parallel = self._config.parallel
        lowered = lower(orders, parallel.pp * parallel.vpp)
        if not self._splits:
            return lowered
        by_breadth = find(parallel.schedule).breadth_first
        fine = refine(lowered, self._counts, breadth_first=runs_breadth_first(by_breadth, parallel.pp))
        runs = stages_of_runs(by_breadth, parallel.pp, self._counts)
        return [insert_unit_actions(plan, self._units(), runs) for plan in fine]

    def _units(self) -> Units:
        """The units of a plan: each part is one, of the same number."""
        number = len(self._parts)
        return Units(
            {part: [part] for part in range(number)},
            run=lambda action: None,
            gathers=self._config.optimizer.zero_stage == 3,
            overlap=self._config.optimizer.overlap_grad_reduce,
            add_in_i={number - 1} if self._config.kernels.loss_chunk > 0 else (),
        )

    def _seconds_of(self, rank: int, action: UnitAction) -> float:
        one = self._parts[action.unit][0]
        return {"gather": one.gather, "reduce": one.reduce, "add": one.add}.get(action.kind, 0.0)


def seconds_of_message(network: Network, stages: Sequence[Sequence[PartTimes]]) -> float:
    """Return the seconds of the tensors between two stages, for neighboring pipeline ranks."""
    boundary = max(one.part.boundary_bytes for stage in stages for one in stage)
    return network.message(network.span("pp").nodes > 1, boundary)
