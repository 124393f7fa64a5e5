"""Predicts the time of a training step of any layout on any machine, before anything is rented.

The work of each part of the model is recorded from the program itself (`megapar_tools.plan.work`), and timed for the
machine (`megapar_tools.plan.durations`). The pipeline runs by the plan of the runtime (`megapar.pipeline.simulation`).
To choose among many layouts, few of its micro-batches are simulated, and the waits of ZeRO-2 and 3 are estimated: up to
2% off, with breadth-first 5%, with slow gathers a tenth. After the pipeline come the exposed reductions of gradients,
the optimizer, and the gathers of new weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megapar.config.derive import num_microbatches
from megapar.config.options import Config
from megapar.launch.grid import grid_of
from megapar.pipeline.actions import Event
from megapar.pipeline.schedules import find, placement
from megapar_tools.plan.durations import KERNELS, Duration, add_seconds, scale_seconds, total
from megapar_tools.plan.hardware import Hardware
from megapar_tools.plan.memory import memory_limit
from megapar_tools.plan.network import Network
from megapar_tools.plan.part_times import PartTimer, PartTimes, StageTime, time_parts, time_stages
from megapar_tools.plan.parts import Parts
from megapar_tools.plan.pipeline_times import PipelineSeconds, StagePipeline, UnitPipeline, of_few, seconds_of_message
from megapar_tools.plan.shard_groups import ShardGroups
from megapar_tools.plan.update_times import UpdateTimer
from megapar_tools.plan.work import Product

OPTIMIZER = "optimizer and norm"


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step. If pipeline ranks differ, their mean.

    `busy` has the seconds of kernels by kind, `exposed` those of communication with nothing computed under it, by axis.
    `idle_share` is the share of the step spent waiting for other stages of the pipeline. `mfu` is the
    model's FLOPs by the peak of `precision`, with train.fp8 too. `events` is the timeline of the pipeline, empty if it
    was not simulated. `fp8` is the share of the FLOPs of matrix products that the machine multiplies in FP8, and
    `adds_fp8` says whether weight gradients are among them.
    """

    seconds: float
    idle_share: float
    busy: Mapping[str, float]
    exposed: Mapping[str, float]
    tokens_per_second_per_gpu: float
    mfu: float
    events: Sequence[Event] = ()
    fp8: float = 0.0
    adds_fp8: bool = False

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
    parallel = config.parallel
    pp = parallel.pp
    network = Network(grid_of(config), hardware, ("tp",) if parallel.tp_symmetric_memory else ())
    groups = ShardGroups(config.optimizer, network)
    stages = time_parts(config, parts, PartTimer(config, hardware, network, groups))
    number = num_microbatches(config)
    with_units = config.optimizer.zero_stage >= 2
    # Breadth-first, the collectives of a unit run under all micro-batches.
    runs = number if find(parallel.schedule).breadth_first else 1
    times = time_stages(stages, hardware.interference, with_units=with_units, runs=runs)
    run, events = _pipeline(config, parts, network, stages, times, simulated=simulated, timeline=timeline)
    pipeline, working, waited, *ends = run
    rank_of = placement(parallel.schedule, pp, parallel.vpp)
    rank_times: list[Duration] = []
    updates = []
    timer = UpdateTimer(config, hardware, network, groups)
    for rank in range(pp):
        own = [stage for stage, home in enumerate(rank_of) if home == rank]
        rank_times.append(total([times[stage].whole for stage in own]).times(number))
        updates.append(timer.time(rank, [stages[stage] for stage in own]))
    # All ranks wait for the norm of the gradient, and so for the last reduction.
    reduced = max(end + update.seconds for end, update in zip(ends, updates, strict=True))
    seconds = max(reduced, pipeline) + hardware.step_overhead_ms * 1e-3
    exposed = scale_seconds(
        add_seconds(*(work.exposed for work in rank_times), *(update.exposed for update in updates)), 1 / pp
    )
    if (simulated or timeline) and with_units:
        exposed["grad"] = waited
    busy = scale_seconds(add_seconds(*(work.busy for work in rank_times)), 1 / pp)
    busy[OPTIMIZER] = sum(update.optimizer for update in updates) / pp
    converted = sum(update.converted for update in updates) / pp
    if converted:
        busy[KERNELS] = busy.get(KERNELS, 0.0) + converted
    idle = max(pipeline - working, 0.0) / seconds
    rate = config.train.global_batch_size * config.train.seq_length / seconds / network.grid.world_size
    mfu = parts.flops_per_token(config) * rate / hardware.peak(config.train.precision)
    in_fp8 = _products_in_fp8(stages) if config.train.fp8 != "none" and hardware.multiplies_fp8 else (0.0, False)
    return StepTime(seconds, idle, busy, exposed, rate, mfu, tuple(events), *in_fp8)


def _products_in_fp8(stages: Sequence[Sequence[PartTimes]]) -> tuple[float, bool]:
    """The share of products' FLOPs in FP8 in all stages, and whether weight gradients are in FP8."""
    of_all = in_fp8 = 0.0
    adds = False
    for part in (part for stage in stages for part in stage):
        for operation in (*part.part.forward, *part.part.backward):
            if isinstance(operation, Product):
                flops = part.number * operation.flops
                of_all += flops
                in_fp8 += flops if operation.precision == "fp8" else 0.0
                adds = adds or operation.adds
    return in_fp8 / max(of_all, 1.0), adds


def _pipeline(
    config: Config,
    parts: Parts,
    network: Network,
    stages: Sequence[Sequence[PartTimes]],
    times: Sequence[StageTime],
    *,
    simulated: bool,
    timeline: bool,
) -> tuple[PipelineSeconds, Sequence[Event]]:
    """The seconds of the pipeline of a step, and with `timeline` its events."""
    memory = memory_limit(config, parts)
    message = seconds_of_message(network, stages)
    if not simulated and not timeline:
        return StagePipeline(config, parts, memory, stages, message).run(times), ()
    pipeline = UnitPipeline(config, stages, [time.whole.host for time in times])

    def run(number: int) -> tuple[PipelineSeconds, Sequence[Event]]:
        return pipeline.run(parts.orders(config.parallel, number, memory).actions, message)

    if timeline:
        return run(num_microbatches(config))
    return of_few(config, lambda number: run(number)[0]), ()
