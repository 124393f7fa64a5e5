"""Puts the engines together around a model and runs the steps."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapar import comm, device
from megapar.agreement import on_all_ranks
from megapar.batch import MicroBatch, PipelineStage
from megapar.checkpoint.format import step_of
from megapar.config import Config
from megapar.context import ParallelContext
from megapar.data.delivery import Delivery
from megapar.data.loader import Loader
from megapar.data_parallel.layout import FlatLayout
from megapar.data_parallel.reduce import Gradients
from megapar.data_parallel.weights import FlatWeights
from megapar.errors import NumericError, StorageError, storing
from megapar.optimizer.adamw import AdamW
from megapar.pipeline.runtime import PipelineRuntime
from megapar.pipeline.schedules import Event
from megapar.precision import LossScale
from megapar.random import initialize
from megapar.train import checkpoints, not_finite
from megapar.train.data import TEST
from megapar.train.metrics import Meter, Reporter
from megapar.train.step import StepResult, TrainState, evaluate, train_step
from megapar.train.trainable import freeze_others


def assemble(config: Config, ctx: ParallelContext, stages: Mapping[int, PipelineStage]) -> TrainState:
    """Runtime, flat weights and gradients, and optimizer around this rank's `stages` (global number to module), at
    step 0.

    The optimizer's main weights start from the stages' weights: initialize those before.
    """
    options = config.optimizer
    kernels = device.choose_kernels(config.kernels.backend, ctx.device)
    layout = FlatLayout(list(stages.values()), bucket_elements(options.bucket_mb), sharded=options.zero_stage > 0)
    weights = FlatWeights(layout, ctx.device)
    grads = Gradients(layout, ctx.device, overlap=options.overlap_grad_reduce, impl=kernels.adamw)
    return TrainState(
        config=config,
        ctx=ctx,
        stages=stages,
        pipeline=PipelineRuntime(stages, ctx, config.parallel.schedule, config.parallel.vpp),
        weights=weights,
        grads=grads,
        optimizer=AdamW(weights, grads, options, kernels.adamw),
        loss_scale=LossScale.of(config.train.precision),
    )


def bucket_elements(bucket_mb: float) -> int:
    """The fp32 gradients in `bucket_mb` MiB. Raises ValueError if there are none."""
    elements = int(bucket_mb * 2**20 / 4)
    if elements < 1:
        raise ValueError(f"bucket_mb is {bucket_mb}: validate() fills in the 0 of optimizer.bucket_mb")
    return elements


@dataclass(frozen=True)
class Run:
    """What a training run needs besides its state. `flops_per_token` is that of forward and backward, for MFU;
    `asked_to_stop` says what asks this rank to end the run, "" as long as nothing does."""

    state: TrainState
    train_data: Delivery
    validation_sets: Mapping[str, Loader]
    run_dir: Path
    flops_per_token: int
    asked_to_stop: Callable[[], str] = str


def start(
    config: Config,
    ctx: ParallelContext,
    stages: Mapping[int, PipelineStage],
    data: Mapping[str, Any] | None = None,
) -> tuple[TrainState, list[str]]:
    """A state at step 0, or where `checkpoint.resume` says, and lines that tell what was resumed.

    `data` is the `identity` of the data that the run reads, which a checkpoint's must equal.
    """
    initialize(stages.values(), config.train.seed)
    notes = freeze_others(stages.values(), config.train.trainable, ctx)
    state = assemble(config, ctx, stages)
    state.data = data or {}
    notes += checkpoints.resume(state, Path(config.run_dir))
    ctx.flight.step = state.step
    if state.step:
        ctx.flight.checkpoint(state.step)
    state.pipeline.prepare(_numbers_of_microbatches(state))
    return state, notes


def _numbers_of_microbatches(state: TrainState) -> list[int]:
    """Of all steps that follow; they differ where the global batch grows (train.batch_ramp)."""
    train = state.config.train
    first = train.batch_size(state.consumed_samples)
    last = train.global_batch_size
    sizes = range(first, last, train.batch_ramp[1]) if train.batch_ramp else ()
    dp = state.ctx.dp
    return [len(range(dp.rank, size // train.micro_batch_size, dp.size)) for size in (*sizes, last)]


def train(run: Run) -> str:
    """Train to `train.steps`, reporting, evaluating and saving on the way; returns why it stopped before, or "".

    A run that is asked to stop saves at the end of the step that all ranks agree on.

    Raises NumericError at the first step whose loss or gradient norm is not finite, before its update; an fp16 overflow
    costs a step's update alone, unless the loss scale is 1 already.
    """
    state = run.state
    options = run.state.config
    steps = options.train.steps
    ctx = state.ctx
    flight = state.ctx.flight
    saves = options.checkpoint.every > 0 or options.checkpoint.save_last
    stop = False
    peak_tflops = options.log.peak_tflops or device.peak_tflops(ctx.device, options.train.precision)
    meter = Meter(ctx, run.flops_per_token, peak_tflops)
    with (
        checkpoints.Saver(state, run.run_dir) as saver,
        _reporter(run) as reporter,
        closing(run.train_data) as data,
    ):
        if state.step >= steps:
            reporter.say(f"nothing to do: train.steps={steps}, and step {state.step} is done")
        while state.step < steps and not stop:
            flight.step = state.step + 1
            flight.enter("data")
            trace: list[Event] | None = [] if options.log.timeline and state.step == steps - 1 else None
            meter.start()
            batches = meter.waited(data.next_step)
            batches = _on_device(batches, ctx)
            asked = run.asked_to_stop() != ""
            result = train_step(state, batches, trace, asked_to_stop=asked)
            failed = not result.finite and not result.overflowed
            reporter.step(meter.stop(result, state.step + failed, state.consumed_samples))
            if not result.finite:
                _explain_not_finite(state, batches, result, reporter)
            last = state.step == steps
            stop = result.stop and not last
            if trace is not None:
                write_timeline(trace, ctx, run.run_dir)
            for line in data.started_over():
                reporter.say(f"step {state.step}/{steps} | {line}")
            if last or _due(state.step, options.train.eval_every):
                flight.enter("evaluate")
                report_validation(state, run.validation_sets, reporter, last)
            flight.enter("save")
            saved = saver.save(state, ready=reporter.flush) if saver.due(state.step, last) or (stop and saves) else []
            for path in [*saved, *saver.completed(wait=last or stop)]:
                flight.checkpoint(step_of(path))
                reporter.say(f"step {state.step}/{steps} | saved {path}")
    return _why_stopped(run, saves) if stop else ""


def _why_stopped(run: Run, saves: bool) -> str:
    """What asked the run to stop, where it did, and what there is to go on from. A collective."""
    reasons = comm.gather_json(run.asked_to_stop(), run.state.ctx.world, run.state.ctx.device)
    reason = next(reason for reason in reasons if reason)
    if not saves:
        return f"stopped by {reason} after step {run.state.step}: nothing saved (checkpoint.save_last is off)"
    return f"stopped by {reason} after step {run.state.step}, which is saved: start it again to go on"


def _reporter(run: Run) -> Reporter:
    """What rank 0 reports with; it may take long to open a file of millions of lines. A collective."""
    state = run.state
    options = run.state.config
    first = state.ctx.world.first
    lineage = state.lineage
    name = lineage[-1][0] if lineage else "start"

    def open_files() -> Reporter:
        return Reporter(run.run_dir, options.log, options.train.steps, state.step, speaks=first, start=name)

    return on_all_ranks(open_files, state.ctx, StorageError, "metrics not written")


def _explain_not_finite(
    state: TrainState, batches: Sequence[MicroBatch], result: StepResult, reporter: Reporter
) -> None:
    """Say which gradients left fp16's range, or raise NumericError if a smaller loss scale cannot mend it."""
    if not result.overflowed:
        cause = not_finite.explain(state, batches, result)
        raise NumericError(
            f"step {state.step + 1}: loss {result.loss}, gradient norm {result.grad_norm}; "
            f"{cause}. No weight was changed: they are those of step {state.step}. "
            "A lower optimizer.lr or a longer optimizer.warmup_steps often helps; --checkpoint.resume goes back further"
        )
    here = [-state.ctx.pp.rank, state.grads.not_finite()]  # the last stage's backward runs first
    everywhere = comm.gather_json(here, state.ctx.world, state.ctx.device)
    names = [name for _, names in sorted(everywhere) for name in names]
    first = ", ".join(list(dict.fromkeys(names))[:3]) or "none"
    reporter.say(
        f"step {state.step}: no update, gradients overflowed fp16 (first in the backward pass: {first}); "
        f"loss scale {result.loss_scale.scale:,.0f} -> {state.loss_scale.scale:,.0f}"
    )


def write_timeline(trace: Sequence[Event], ctx: ParallelContext, run_dir: Path) -> None:
    """Gather the events of the first replica's pipeline into run_dir/timeline.json. Clocks of other machines differ."""
    rows = comm.gather_json([[e.rank, *e.action, e.start, e.end] for e in trace], ctx.pp, ctx.device)
    if ctx.world.first:
        with storing(path := run_dir / "timeline.json"):
            path.write_text(json.dumps([event for row in rows for event in row]))


def report_validation(state: TrainState, sets: Mapping[str, Loader], reporter: Reporter, last: bool) -> None:
    """Report the mean loss on each set: as validation_loss if there is one, else with its name behind it, and as
    test_loss on the set for after the last step."""
    validation = [name for name in sets if name != TEST]
    keys = {name: "validation_loss" if len(validation) == 1 else f"validation_loss/{name}" for name in validation}
    if last and TEST in sets:
        keys[TEST] = "test_loss"
    losses = {key: mean_validation_loss(state, sets[name]) for name, key in keys.items()}
    if losses:
        reporter.write({"step": state.step, **losses})
        shown = " | ".join(f"{key.replace('_', ' ')} {loss:.4f}" for key, loss in losses.items())
        reporter.say(f"step {state.step}/{state.config.train.steps} | {shown}")


def mean_validation_loss(state: TrainState, data: Loader) -> float:
    """Mean loss in nats per target token over the first `train.eval_samples` validation samples, always the same ones,
    in whole global batches and none of them twice."""
    size = data.batch_size(0)
    batches = min(-(-state.config.train.eval_samples // size), len(data.samples) // size)
    sums = [evaluate(state, _on_device(data.step_after(i * size), state.ctx)) for i in range(batches)]
    return sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _on_device(batches: list[MicroBatch], ctx: ParallelContext) -> list[MicroBatch]:
    return [batch.to(ctx.device) for batch in batches]
