"""Times pipeline schedules of sleeping stages, beside the simulation of the same plans.

Each rank has 1/pp of the model's work: a forward of --milliseconds, and as much for the gradient of inputs and for the
gradients of weights. Stages sleep instead of computing, so four ranks run at full speed on two cores. The difference to
the simulation is the cost of the runtime itself. Ranks should wait at the places of the simulation.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.counting import cost
from benchmarks.harness import Found, Output
from benchmarks.ranks import run_ranks, synchronize
from megapar.base.errors import ConfigError
from megapar.base.grid import Grid
from megapar.data_parallel.layout import FlatLayout
from megapar.data_parallel.reduce import Gradients
from megapar.declare import context
from megapar.declare.batch import MicroBatch, PipelineStage, TensorSpec
from megapar.declare.context import ParallelContext
from megapar.declare.params import ONES, shared_piece
from megapar.declare.sharding import Sharding
from megapar.linear.function import LOCAL, LinearFunction
from megapar.linear.torch_products import TorchProducts
from megapar.pipeline.lowering import lower
from megapar.pipeline.runtime import PipelineRuntime
from megapar.pipeline.schedules import SCHEDULES, make, placement
from megapar.pipeline.simulation import simulate

WIDTH = 8  # of the tensors that ranks send: so small that transfers cost no time


@dataclass(frozen=True)
class Options(Output):
    """Measure pipeline schedules on ranks that sleep."""

    pp: int = 4
    """Pipeline ranks."""
    schedules: tuple[str, ...] = tuple(name for name in SCHEDULES if name != "gpipe")
    """Values of parallel.schedule. Those with any number of stages run two on each rank."""
    microbatches: tuple[int, ...] = ()
    """Micro-batches of a step; empty: pp, 2 pp and 4 pp."""
    milliseconds: float = 100.0
    """Time of a forward through all stages of a rank; its gradients of inputs and of weights take as long each."""
    steps: int = 5
    """Timed steps of each case, after one that warms up."""


@dataclass(frozen=True)
class SleepingProducts(TorchProducts):
    """Matrix products of `seconds` each."""

    seconds: float = 0.0

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(x, weight, bias)

    def input_gradient(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return super().input_gradient(grad_y, weight)

    def add_weight_gradient(self, total: Tensor, grad_2d: Tensor, x_2d: Tensor, *, overwrite: bool = False) -> None:
        time.sleep(self.seconds)
        super().add_weight_gradient(total, grad_2d, x_2d, overwrite=overwrite)


class SleepingStage(PipelineStage):
    """One linear layer with three products as long."""

    def __init__(self, number: int, num_stages: int, ctx: ParallelContext, seconds: float):
        super().__init__()
        self.first = number == 0
        self.last = number == num_stages - 1
        self.products = SleepingProducts(seconds=seconds)
        sharding = Sharding.of(ctx, torch.float32)
        piece = shared_piece(f"layers.{number}.weight", (WIDTH, WIDTH), sharding.tp)
        self.weight = sharding.parameter((piece,), piece.shape, ONES, decay=True)

    def boundary(self, batch: MicroBatch) -> tuple[TensorSpec, ...]:
        if self.first:
            return ()
        return (TensorSpec((1, WIDTH), torch.float32),)

    def forward(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        if x is None:
            # It requires a gradient, as that of an embedding would.
            x = torch.ones(1, WIDTH, requires_grad=True)
        y = LinearFunction.apply(x, self.weight, None, LOCAL, self.products)
        if self.last:
            return y.sum()
        return y


def measure_rank(options: Options, schedule: str, target: torch.device) -> dict[str, list[float]]:
    """On each rank: the seconds of every timed step, by number of micro-batches."""
    ctx = context.create(Grid(pp=options.pp), device=target)
    vpp = stages_on_a_rank(schedule)
    num_stages = options.pp * vpp
    seconds = options.milliseconds / 1e3 / vpp
    place = placement(schedule, options.pp, vpp)
    numbers = [stage for stage, rank in enumerate(place) if rank == ctx.pp.rank]
    stages = {number: SleepingStage(number, num_stages, ctx, seconds) for number in numbers}
    # Main gradients, to which stages add: without them a backward in halves has nothing to put off.
    gradients = Gradients(FlatLayout(list(stages.values()), 1 << 20, sharded=False), target)
    runtime = PipelineRuntime(stages, ctx, schedule, vpp)
    token = torch.zeros(1, 1, dtype=torch.int64)
    found: dict[str, list[float]] = {}
    for count in numbers_of_microbatches(options):
        batches = [MicroBatch.of_samples(token, token, torch.ones(1, 1), token[:, 0])] * count
        found[str(count)] = []
        for step in range(1 + options.steps):
            gradients.zero()
            synchronize(options.pp, target)
            spent, _ = cost(partial(runtime.step, batches))
            if step:
                found[str(count)].append(spent.wall)
    return found


def stages_on_a_rank(schedule: str) -> int:
    """What parallel.vpp 0 means. With one stage on each rank breadth would be gpipe."""
    return 2 if schedule == "breadth" else SCHEDULES[schedule].vpp.meant_by(0)


def numbers_of_microbatches(options: Options) -> Sequence[int]:
    return options.microbatches or (options.pp, 2 * options.pp, 4 * options.pp)


def compared(options: Options, schedule: str, count: int, ranks: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """The time of a step beside the simulated one, and the ranks' shares of idle time."""
    vpp = stages_on_a_rank(schedule)
    plans = lower(make(schedule, options.pp, vpp, count), options.pp * vpp)
    unit = options.milliseconds / 1e3 / vpp
    timeline = simulate(plans, forward=unit, backward=2 * unit)
    # A step ends when its last rank ends.
    steps = [max(times) for times in zip(*(rank[str(count)] for rank in ranks), strict=True)]
    measured = statistics.median(steps)
    busy = 3 * count * options.milliseconds / 1e3
    return {
        "schedule": schedule,
        "microbatches": count,
        "step_seconds": steps,
        "simulated_seconds": timeline.makespan,
        "measured_over_simulated": measured / timeline.makespan,
        "idle": 1 - busy / measured,
        "simulated_idle": timeline.bubble,
        "peak_microbatches": max(timeline.peak_live) / vpp,
    }


def measure(options: Options) -> Found:
    """Time every schedule on ranks of its own."""
    unknown = [name for name in options.schedules if name not in SCHEDULES]
    if unknown:
        raise ConfigError(f"--schedules {' '.join(unknown)}: no such schedule; there are {', '.join(SCHEDULES)}")
    rows = []
    for schedule in options.schedules:
        ranks = run_ranks(options.pp, "cpu", partial(measure_rank, options, schedule))
        rows += [compared(options, schedule, count, ranks) for count in numbers_of_microbatches(options)]
    return Found({"rows": rows})
