"""Times pipeline schedules whose stages sleep, beside the simulation of the same plans.

Each rank has 1/pp of the model's work: a forward of --milliseconds, and as much for the gradient of inputs and for the
gradients of weights. Stages sleep instead of computing, so four ranks run at full speed on two cores. What is left is
what the runtime itself costs, and whether ranks wait where the simulation says.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.layouts import run_ranks, synchronize
from megapar import context
from megapar.batch import MicroBatch, PipelineStage, TensorSpec
from megapar.context import ParallelContext
from megapar.data_parallel.layout import FlatLayout
from megapar.data_parallel.reduce import Gradients
from megapar.errors import ConfigError
from megapar.grid import Grid
from megapar.launch.reporting import reported
from megapar.linear import LOCAL, LinearFunction
from megapar.params import Init, replicated
from megapar.pipeline.lowering import lower
from megapar.pipeline.runtime import PipelineRuntime
from megapar.pipeline.schedules import SCHEDULES, make, placement
from megapar.pipeline.simulation import simulate
from megapar.products import MatrixProducts
from megapar.sharding import Sharding
from megapar.system.atomic_files import write_json
from megapar.train.provenance import in_a_line, provenance

WIDTH = 8  # of the tensors that ranks send: so small that transfers cost no time
STAGES_ON_A_RANK = {"interleaved": 2, "zb-interleaved": 2, "breadth": 2}


@dataclass(frozen=True)
class Arguments:
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
    json: Path | None = None
    """Write all numbers to this file."""


@dataclass(frozen=True)
class SleepingProducts(MatrixProducts):
    """Matrix products of which each takes `seconds`."""

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
    """One linear layer, whose three products take as long."""

    def __init__(self, number: int, num_stages: int, ctx: ParallelContext, seconds: float):
        super().__init__()
        self.first = number == 0
        self.last = number == num_stages - 1
        self.products = SleepingProducts(seconds=seconds)
        sharding = Sharding.of(ctx, torch.float32)
        piece = replicated(f"layers.{number}.weight", (WIDTH, WIDTH), sharding.tp)
        self.weight = sharding.parameter((piece,), piece.shape, Init("ones"), decay=True)

    def boundary(self, batch: MicroBatch) -> tuple[TensorSpec, ...]:
        return () if self.first else (TensorSpec((1, WIDTH), torch.float32),)

    def forward(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        if x is None:
            # It requires a gradient, as that of an embedding would.
            x = torch.ones(1, WIDTH, requires_grad=True)
        y = LinearFunction.apply(x, self.weight, None, LOCAL, self.products)
        return y.sum() if self.last else y


def measure(arguments: Arguments, schedule: str, where: torch.device) -> dict[str, list[float]]:
    """On each rank: the seconds of every timed step, by number of micro-batches."""
    ctx = context.create(Grid(pp=arguments.pp), device=where)
    vpp = stages_on_a_rank(schedule, arguments.pp)
    num_stages = arguments.pp * vpp
    seconds = arguments.milliseconds / 1e3 / vpp
    mine = [stage for stage, rank in enumerate(placement(schedule, arguments.pp, vpp)) if rank == ctx.pp.rank]
    stages = {number: SleepingStage(number, num_stages, ctx, seconds) for number in mine}
    # Main gradients, to which stages add: without them a backward in halves has nothing to defer.
    gradients = Gradients(FlatLayout(list(stages.values()), 1 << 20, sharded=False), where)
    runtime = PipelineRuntime(stages, ctx, schedule, vpp)
    found: dict[str, list[float]] = {}
    for count in numbers_of_microbatches(arguments):
        batches = [a_batch() for _ in range(count)]
        found[str(count)] = []
        for step in range(1 + arguments.steps):
            gradients.zero()
            synchronize(arguments.pp, where)
            start = time.perf_counter()
            runtime.step(batches)
            if step:
                found[str(count)].append(time.perf_counter() - start)
    return found


def a_batch() -> MicroBatch:
    token = torch.zeros(1, 1, dtype=torch.int64)
    return MicroBatch.of_samples(token, token, torch.ones(1, 1), token[:, 0])


def stages_on_a_rank(schedule: str, pp: int) -> int:
    place = SCHEDULES[schedule].placement
    if schedule in STAGES_ON_A_RANK:
        return STAGES_ON_A_RANK[schedule]
    # A schedule in the form of a V has its last stage on rank 0, where its first one is.
    return 2 if place(pp, 2)[-1] == 0 else 1


def numbers_of_microbatches(arguments: Arguments) -> Sequence[int]:
    return arguments.microbatches or (arguments.pp, 2 * arguments.pp, 4 * arguments.pp)


def compared(
    arguments: Arguments, schedule: str, count: int, ranks: Sequence[dict[str, list[float]]]
) -> dict[str, Any]:
    """The time of a step beside the simulated one, and the shares of time in which ranks are idle."""
    vpp = stages_on_a_rank(schedule, arguments.pp)
    plans = lower(make(schedule, arguments.pp, vpp, count), arguments.pp * vpp)
    unit = arguments.milliseconds / 1e3 / vpp
    timeline = simulate(plans, forward=unit, backward=2 * unit)
    # A step ends when its last rank ends.
    steps = [max(times) for times in zip(*(rank[str(count)] for rank in ranks), strict=True)]
    measured = statistics.median(steps)
    busy = 3 * count * arguments.milliseconds / 1e3
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


def show(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("schedule", "micro-batches", "ms", "simulated", "ratio", "idle", "simulated", "micro-batches kept")
    for row in rows:
        table.add_row(
            row["schedule"],
            str(row["microbatches"]),
            f"{1e3 * statistics.median(row['step_seconds']):.1f}",
            f"{1e3 * row['simulated_seconds']:.1f}",
            f"{row['measured_over_simulated']:.3f}",
            f"{row['idle']:.1%}",
            f"{row['simulated_idle']:.1%}",
            f"{row['peak_microbatches']:g}",
        )
    return table


def main(arguments: Arguments) -> None:
    unknown = [name for name in arguments.schedules if name not in SCHEDULES]
    if unknown:
        raise ConfigError(f"--schedules {' '.join(unknown)}: no such schedule; there are {', '.join(SCHEDULES)}")
    rows = []
    for schedule in arguments.schedules:
        ranks = run_ranks(arguments.pp, "cpu", partial(measure, arguments, schedule))
        rows += [compared(arguments, schedule, count, ranks) for count in numbers_of_microbatches(arguments)]
    console = Console(width=120)
    facts = provenance(torch.device("cpu"))
    console.print(show(rows))
    console.print(in_a_line(facts))
    if arguments.json:
        options = {name: value for name, value in asdict(arguments).items() if name != "json"}
        write_json(arguments.json, {**facts, "options": options, "rows": rows})


if __name__ == "__main__":
    with reported():
        main(tyro.cli(Arguments, description=__doc__, use_underscores=True))
