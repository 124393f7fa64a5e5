"""Shows what data parallelism does to gradients in one step, parameter by parameter and bucket by bucket.

It takes pretrain.py's flags too, such as --config C.toml --launch.nproc 4, and changes no run: nothing is saved.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from megapar_models.build import build_stages
from megapar_models.registry import FOR_OPTIONS, named_configs, num_targets, sample_kind, validate
from megapar_tools.migrate.hints import hint
from rich.console import Console
from rich.progress import track
from rich.table import Table

from megapar.base.errors import ConfigError
from megapar.comm import collectives
from megapar.comm.flight import Board
from megapar.config.derive import num_microbatches
from megapar.config.files import load
from megapar.config.lengths import Lengths
from megapar.config.messages import problem
from megapar.config.options import Config
from megapar.data_parallel.buckets import intersect
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from megapar.declare.context import ParallelContext
from megapar.declare.random import initialize
from megapar.launch.local import preload, start_local_ranks
from megapar.launch.rank_process import job
from megapar.launch.reporting import reported
from megapar.optimizer.schedule import learning_rate
from megapar.step.divisors import count_divisors
from megapar.step.state import TrainState
from megapar.system import environment
from megapar.system.atomic_files import save_figure, write_json
from megapar.system.device import DeviceClock
from megapar.system.environment import Environment
from megapar.system.recorder import Recorder
from megapar.train.data import go_on, open_loaders, with_fetched_tokenizer, with_vocabulary_of_tokenizer
from megapar.train.trainer import assemble, start

_MOST_RANKS = 8  # with a column each; of more ranks the table has the smallest and the largest norm
_WIDTH = 140  # characters a line where the output is no terminal


@dataclass(frozen=True)
class Arguments:
    """Show the gradient of each parameter on each replica before and after synchronization, and when each bucket is
    reduced. All other flags are those of pretrain.py. Weights are those of the run folder's newest checkpoint, if it
    has one."""

    leave_out: int | None = None
    """Train without the gradient of this replica in the sum, which then updates from its own gradient alone, and show
    how its weights drift from the others'."""
    steps: int = 40
    """Steps to train with --leave_out."""
    out: Path = Path("gradient_drift.png")
    """Picture of the drift, with --leave_out."""
    json: Path | None = None
    """Write all numbers to this file too."""


@dataclass(frozen=True)
class Parameter:
    """The norms of a parameter's gradient: on each replica by itself, and of the sum over replicas."""

    name: str
    elements: int
    bucket: int
    local: Sequence[float]
    total: float


@dataclass(frozen=True)
class Reduction:
    """When a bucket was reduced on rank 0, in seconds since the first forward of the step began.

    `asked` is when the rank began to wait for it. The rest up to `done` is exposed.
    """

    bucket: int
    parameters: int
    nbytes: int
    started: float
    asked: float
    done: float


@dataclass(frozen=True)
class Drift:
    """Training with or without the gradient of one replica in the sum, by the number of updates, from 0.

    `distance` is that of the replica's weights from those of the others, divided by the norm of these. `losses` are
    those of each replica's own weights on one held-out batch, in nats per target token.
    """

    distance: Sequence[float]
    losses: Sequence[Sequence[float]]


def check(config: Config, args: Arguments) -> None:
    """Raise ConfigError for a layout of which the tool can say nothing."""
    for name in ("tp", "pp", "cp", "ep"):
        if getattr(config.parallel, name) > 1:
            text = "the tool compares replicas that hold the same weights; leave it at 1"
            raise ConfigError(problem(config, f"parallel.{name}", text))
    if config.parallel.dp == 1:
        raise ConfigError(
            problem(config, "parallel.dp", "one replica has nobody to synchronize with; --launch.nproc 2")
        )
    if config.optimizer.zero_stage > 1:
        text = "stages 2 and 3 keep no whole gradient to look at; use 0 or 1"
        raise ConfigError(problem(config, "optimizer.zero_stage", text))
    if args.leave_out is not None and not 0 <= args.leave_out < config.parallel.dp:
        raise ConfigError(f"--leave_out {args.leave_out}: replicas are 0 to {config.parallel.dp - 1}")
    warmup = config.optimizer.warmup_steps
    if Lengths.of(config.optimizer, config.train).unit != "steps":
        text = "the tool trains a few steps, and counts them; give numbers of steps"
        raise ConfigError(problem(config, "optimizer.warmup_steps optimizer.decay_steps", text))
    if isinstance(warmup, int) and args.steps <= warmup:
        raise ConfigError(f"--steps {args.steps}: must be above optimizer.warmup_steps={warmup}, which come first")


# One step


def forward_and_backward(state: TrainState, batches: Sequence[MicroBatch], *, overlap: bool) -> None:
    """Compute the gradients of a step. With `overlap` their reduction begins meanwhile, as in training."""
    samples = state.config.train.batch_size(state.consumed_samples)
    divisors = count_divisors(state, batches, samples)
    tokens, main = divisors.tokens, divisors.main
    state.grads.zero()
    most = num_microbatches(state.config, samples)
    if overlap:
        state.pipeline.step(batches, 1 / main, state.grads.begin, most, 1 / tokens)
    else:
        state.pipeline.step(batches, 1 / main, max_microbatches=most, added_scale=1 / tokens)
        for slot in state.grads.layout.slots:
            slot.param.main_grad.zero_if_stale()  # type: ignore[attr-defined]


def norms_before_and_after(state: TrainState, batches: Sequence[MicroBatch]) -> list[Parameter]:
    """The norms of all parameters, the last layers first. A collective."""
    grads = state.grads
    layout = grads.layout
    axis = state.ctx.grad
    forward_and_backward(state, batches, overlap=False)
    own_norms = [grads.flat[slot.start : slot.stop].norm().item() for slot in layout.slots]
    local = collectives.gather_json(own_norms, axis, state.ctx.device)
    grads.finish()
    squares = torch.zeros(len(layout.slots), dtype=torch.float64, device=state.ctx.device)
    for index, slot in enumerate(layout.slots):
        shard = layout.shard(layout.buckets[slot.bucket_index])
        for begin, end in intersect([(slot.start, slot.stop)], [shard]):
            squares[index] += grads.part(begin, end).double().square().sum()
    if layout.sharded:
        # Each element of the sum is on one rank of a group of shards, and on as many groups as there are copies.
        collectives.all_reduce(squares, axis)
        squares *= axis.shards.size / axis.size
    return [
        Parameter(slot.name, slot.stop - slot.start, slot.bucket_index, [norms[index] for norms in local], total)
        for index, (slot, total) in enumerate(zip(layout.slots, squares.sqrt().tolist(), strict=True))
    ]


def times_of_reductions(state: TrainState, batches: Sequence[MicroBatch]) -> list[Reduction]:
    """When this rank reduces each bucket in a step of training, in order. A collective."""
    grads = state.grads
    # The first of them learns which gradients the last backward adds. Then buckets are reduced under it.
    for _ in range(2):
        forward_and_backward(state, batches, overlap=True)
        grads.finish()
    clock = DeviceClock(state.ctx.device)
    recorder = state.ctx.flight.recorder = Recorder(clock, state.step + 1)
    forward_and_backward(state, batches, overlap=True)
    grads.finish()
    state.ctx.flight.recorder = None
    recorded = recorder.finish().as_json(clock)
    origin = next(start for name, *_, start, _ in recorded["spans"] if name == "F")
    waits = {
        (axis, position): (start, end)
        for name, axis, first, last, _, start, end in recorded["spans"]
        if name == "wait"
        for position in range(first, last + 1)
    }
    axis = state.ctx.grad.shards.name
    # The count of target tokens comes first on the same axis, before any forward.
    begun = [row for row in recorded["operations"] if row[0] == axis and row[6] > origin]
    found = []
    for index, bucket in enumerate(grads.layout.buckets):
        _, position, _, _, _, nbytes, started = begun[index]
        asked, done = waits[axis, position]
        parameters = bucket.end_param - bucket.first_param
        found.append(Reduction(index, parameters, nbytes, started - origin, asked - origin, done - origin))
    return found


# A gradient that is left out


def drift(
    config: Config, ctx: ParallelContext, steps: Sequence[Sequence[MicroBatch]], left_out: int, *, synchronized: bool
) -> Drift:
    """Train from the initial weights, and compare the weights of replica `left_out` with those of the others.

    The last of `steps` is not trained on: its first micro-batch is the held-out one, the same on all ranks.
    """
    # Without ZeRO each replica updates all of its weights by itself, so that they can come apart.
    whole = replace(config, optimizer=replace(config.optimizer, zero_stage=0))
    stages = build_stages(whole, ctx)
    initialize(stages.values(), config.train.seed)
    state = assemble(whole, ctx, stages)
    *trained, held_out = steps
    run = replace(config.train, steps=len(trained))
    distances = [distance(state, left_out)]
    losses = [losses_of_replicas(state, held_out[:1])]
    for step in track(trained, "training", disable=not ctx.world.first, transient=True):
        forward_and_backward(state, step, overlap=False)
        own_gradient = state.grads.flat.clone()
        is_left_out = not synchronized and ctx.grad.rank == left_out
        if is_left_out:
            state.grads.flat.zero_()  # it takes part in the sum, because a collective needs all ranks, and adds nothing
        state.grads.finish()
        if is_left_out:
            state.grads.flat.copy_(own_gradient)
        state.optimizer.step(learning_rate(state.step, state.consumed_samples, whole.optimizer, run))
        state.step += 1
        distances.append(distance(state, left_out))
        losses.append(losses_of_replicas(state, held_out[:1]))
    return Drift(distances, losses)


def distance(state: TrainState, left_out: int) -> float:
    """The distance of the weights of replica `left_out` from those of the others, over the norm of these."""
    axis = state.ctx.grad
    reference = 1 if left_out == 0 else 0
    weights = torch.cat([state.weights.flat.float(), state.weights.precise])
    received = weights.clone()
    if axis.rank != reference:
        received.zero_()
    collectives.all_reduce(received, axis)
    here = ((weights - received).norm() / received.norm()).item()
    return float(collectives.gather_json(here, axis, state.ctx.device)[left_out])


def losses_of_replicas(state: TrainState, batches: Sequence[MicroBatch]) -> list[float]:
    """The loss of each replica's own weights on `batches`, without any communication between replicas."""
    for stage in state.stages.values():
        stage.eval()
    batches = [batch.to(state.ctx.device) for batch in batches]
    total = torch.stack(state.pipeline.evaluate(batches)).sum()
    for stage in state.stages.values():
        stage.train()
    here = (total / sum(batch.weights_bs.sum() for batch in batches)).item()
    return collectives.gather_json(here, state.ctx.grad, state.ctx.device)


def draw(found: Mapping[str, Drift], left_out: int, path: Path) -> None:
    """Draw the distances and the losses of both ways to train."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    weights, losses = figure.subplots(1, 2)
    left = found["left out"]
    others = 1 if left_out == 0 else 0
    updates = range(len(left.distance))
    weights.plot(updates, found["synchronized"].distance, color="#174a86", label="all gradients in the sum")
    weights.plot(updates, left.distance, color="#c62828", label=f"without that of replica {left_out}")
    weights.set(title=f"distance of replica {left_out} from the others", ylabel="share of the norm of the weights")
    synchronized = [row[others] for row in found["synchronized"].losses]
    losses.plot(updates, synchronized, color="#174a86", label="all gradients in the sum, every replica")
    losses.plot(
        updates, [row[others] for row in left.losses], "--", color="#e76f51", label="left out: the other replicas"
    )
    losses.plot(updates, [row[left_out] for row in left.losses], color="#c62828", label=f"left out: replica {left_out}")
    losses.set(title="loss of each replica's weights, held-out batch", ylabel="nats per token")
    for axes in (weights, losses):
        axes.set_xlabel("updates")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    save_figure(figure, path)


# The program


def inspect(config: Config, args: Arguments, env: Environment, board: Board | None = None) -> None:
    """Inspect on one rank. Rank 0 prints."""
    with job(config, env, board) as (ctx, _):
        data, held_out = open_loaders(config, ctx, num_targets(config), sample_kind(config))
        state, notes = start(config, ctx, build_stages(config, ctx))
        with closing(data):
            go_on(state, data, held_out)
            batches = [batch.to(ctx.device) for batch in data.next_step()]
        parameters = norms_before_and_after(state, batches)
        reductions = times_of_reductions(state, batches)
        found: dict[str, Drift] = {}
        if args.leave_out is not None:
            steps = steps_of_data(config, ctx, args.steps)
            found["synchronized"] = drift(config, ctx, steps, args.leave_out, synchronized=True)
            found["left out"] = drift(config, ctx, steps, args.leave_out, synchronized=False)
        if ctx.world.first:
            for note in notes:
                print(note)
            show(parameters, reductions)
            if args.leave_out is not None:
                show_drift(found, args.leave_out, args.out)
            if args.json:
                write(parameters, reductions, found, args.json)


def steps_of_data(config: Config, ctx: ParallelContext, number: int) -> list[list[MicroBatch]]:
    """This rank's micro-batches of the first `number` steps, and then those of one process, which are held out."""
    data, _ = open_loaders(config, ctx, num_targets(config), sample_kind(config))
    with closing(data):
        steps = [data.next_step() for _ in range(number)]
    alone = replace(config, parallel=replace(config.parallel, dp=1))
    whole, _ = open_loaders(alone, context.single(ctx.device), num_targets(config), sample_kind(config))
    with closing(whole):
        whole.consumed_samples = number * config.train.global_batch_size
        steps.append(whole.next_step())
    return [[batch.to(ctx.device) for batch in step] for step in steps]


def show(parameters: Sequence[Parameter], reductions: Sequence[Reduction]) -> None:
    """Print both tables of one step."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    replicas = len(parameters[0].local)
    headings = [f"replica {rank}" for rank in range(replicas)]
    if replicas > _MOST_RANKS:
        headings = ["smallest", "largest"]
    table = Table(title="norm of each gradient before synchronization, and of the sum", title_justify="left")
    table.add_column("parameter")
    for heading in ("elements", "bucket", *headings, "sum"):
        table.add_column(heading, justify="right")
    for found in parameters:
        norms = found.local
        if replicas > _MOST_RANKS:
            norms = [min(norms), max(norms)]
        cells = [f"{norm:.5f}" for norm in (*norms, found.total)]
        table.add_row(found.name, f"{found.elements:,}", str(found.bucket), *cells)
    console.print(table)
    table = Table(title="reductions on rank 0 in order; ms since the first forward", title_justify="left")
    for heading in ("bucket", "parameters", "KiB", "started", "asked for", "done", "exposed"):
        table.add_column(heading, justify="right")
    for reduction in reductions:
        moments = (reduction.started, reduction.asked, reduction.done, reduction.done - reduction.asked)
        cells = [f"{1e3 * moment:.2f}" for moment in moments]
        table.add_row(str(reduction.bucket), str(reduction.parameters), f"{reduction.nbytes / 1024:,.1f}", *cells)
    console.print(table)


def show_drift(found: Mapping[str, Drift], left_out: int, path: Path) -> None:
    """Print how far the replica has drifted after the last step, and draw the picture."""
    for name, result in found.items():
        others = result.losses[-1][1 if left_out == 0 else 0]
        print(
            f"{name}: after {len(result.distance) - 1} updates replica {left_out} is {result.distance[-1]:.2%} away "
            f"from the others; its loss is {result.losses[-1][left_out]:.4f}, theirs {others:.4f}"
        )
    draw(found, left_out, path)
    print(path)


def write(
    parameters: Sequence[Parameter], reductions: Sequence[Reduction], found: Mapping[str, Drift], path: Path
) -> None:
    """Write all numbers as JSON."""
    content: dict[str, Any] = {
        "parameters": [asdict(row) for row in parameters],
        "reductions": [asdict(row) for row in reductions],
        "drift": {name: asdict(result) for name, result in found.items()},
    }
    write_json(path, content)


def config_of(flags: Sequence[str], env: Environment) -> Config:
    """The configuration that pretrain.py would run with these flags."""
    resolved = load(flags, named_configs(Path(__file__).parents[1] / "pretrain_scripts/configs"), FOR_OPTIONS, hint)
    world = env.world_size if env.launched else max(resolved.config.launch.nproc, 1)
    return with_vocabulary_of_tokenizer(with_fetched_tokenizer(validate(resolved.config, world)))


def main() -> int:
    with reported():
        args, flags = tyro.cli(Arguments, description=Arguments.__doc__, use_underscores=True, return_unknown_args=True)
        env = environment.read()
        config = config_of(flags, env)
        check(config, args)
        if env.launched:
            inspect(config, args, env)
            return 0
        preload(config)
        return start_local_ranks(partial(inspect, config, args), config.parallel.dp, config.run_dir)


if __name__ == "__main__":
    sys.exit(main())
