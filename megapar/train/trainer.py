"""The trainer: builds a training state around a model, and runs its steps."""

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
    """Build the training state at step 0: pipeline runtime, flat weights and gradients, and optimizer.

    `stages` are this rank's stages by global stage number. Initialize their weights before this call: the optimizer's
    main weights are copied from them.
    """
    options = config.optimizer
    kernels = device.choose_kernels(config.kernels.backend, ctx.device)
    layout = FlatLayout(list(stages.values()), bucket_elements(options.bucket_mb), sharded=options.zero_stage > 0)
    weights = FlatWeights(layout, ctx.device)
    if options.overlap_param_gather:
        weights.wait_under_forward(stages.values())
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
    """How many fp32 gradients `bucket_mb` MiB hold. Raises ValueError if that is none."""
    elements = int(bucket_mb * 2**20 / 4)
    if elements < 1:
        raise ValueError(f"bucket_mb is {bucket_mb}: validate() fills in the 0 of optimizer.bucket_mb")
    return elements


@dataclass(frozen=True)
class Run:
    """A training run: its state, its data and its folder.

    `flops_per_token` counts forward and backward, for MFU. `asked_to_stop` returns what asks this rank to end the run,
    and "" as long as nothing does.
    """

    state: TrainState
    train_data: Delivery
    validation_sets: Mapping[str, Loader]
    run_dir: Path
    flops_per_token: int
    asked_to_stop: Callable[[], str] = str  # str() is ""


def start(
    config: Config,
    ctx: ParallelContext,
    stages: Mapping[int, PipelineStage],
    data: Mapping[str, Any] | None = None,
) -> tuple[TrainState, list[str]]:
    """Build the state at step 0 or at the checkpoint that `checkpoint.resume` names; returns it and lines for the user.

    `data` is the `identity` of the data that the run reads. That of the checkpoint must be equal.
    """
    # In this order: the optimizer copies the initialized weights, and makes state for trained parameters alone.
    initialize(stages.values(), config.train.seed)
    notes = freeze_others(stages.values(), config.train.trainable, ctx)
    state = assemble(config, ctx, stages)
    state.data_identity = data or {}
    notes += checkpoints.resume(state, Path(config.run_dir))
    ctx.flight.step = state.step
    if state.step:
        ctx.flight.checkpoint(state.step)
    state.pipeline.prepare(_numbers_of_microbatches(state))
    return state, notes


def _numbers_of_microbatches(state: TrainState) -> list[int]:
    """How many micro-batches this rank runs in a step, for each size of the global batch that follows.

    The sizes differ if train.batch_ramp grows the global batch.
    """
    train = state.config.train
    first = train.batch_size(state.consumed_samples)
    last = train.global_batch_size
    sizes = range(first, last, train.batch_ramp[1]) if train.batch_ramp else ()
    dp = state.ctx.dp
    # Replica r runs the micro-batches r, r + dp, ...: the first replicas have one more if dp does not divide them.
    return [len(range(dp.rank, size // train.micro_batch_size, dp.size)) for size in (*sizes, last)]


def train(run: Run) -> str:
    """Train to `train.steps`; report, evaluate and save on the way. Returns why the run stopped before, or "".

    A run that is asked to stop saves at the end of the step that all ranks agree on. Raises NumericError at the first
    step whose loss or gradient norm is not finite, before its update. After an fp16 overflow only the step's update is
    skipped, unless the loss scale is 1 already.
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
            trace: list[Event] | None = None
            if options.log.timeline and state.step == steps - 1:
                trace = []
            meter.start()
            batches = meter.waited(data.next_step)
            batches = _on_device(batches, ctx)
            asked = run.asked_to_stop() != ""
            result = train_step(state, batches, trace, asked_to_stop=asked)
            # A failed step leaves state.step as it was, and its line still has a number of its own.
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
            saved: list[Path] = []
            if saver.due(state.step, last) or (stop and saves):
                # The lines of the steps before a checkpoint must be on disk when it gets its name: a resumed run goes
                # on behind them.
                saved = saver.save(state, ready=reporter.flush)
            for path in [*saved, *saver.completed(wait=last or stop)]:
                flight.checkpoint(step_of(path))
                reporter.say(f"step {state.step}/{steps} | saved {path}")
        state.weights.wait()  # no forward pass follows that would
    return _why_stopped(run, saves) if stop else ""


def _why_stopped(run: Run, saves: bool) -> str:
    """What asked the run to stop, after which step it stopped, and whether it saved. A collective."""
    reasons = comm.gather_json(run.asked_to_stop(), run.state.ctx.world, run.state.ctx.device)
    reason = next(reason for reason in reasons if reason)
    if not saves:
        return f"stopped by {reason} after step {run.state.step}: nothing saved (checkpoint.save_last is off)"
    return f"stopped by {reason} after step {run.state.step}, which is saved: start it again to go on"


def _reporter(run: Run) -> Reporter:
    """The run's reporter. A collective: rank 0 may take long to open a file of millions of lines."""
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
    """Report the gradients that overflowed fp16. Raises NumericError if a smaller loss scale would not avoid it."""
    if not result.overflowed:
        cause = not_finite.explain(state, batches, result)
        raise NumericError(
            f"step {state.step + 1}: loss {result.loss}, gradient norm {result.grad_norm}; "
            f"{cause}. No weight was changed: they are those of step {state.step}. "
            "A lower optimizer.lr or a longer optimizer.warmup_steps often helps; --checkpoint.resume goes back further"
        )
    here = [-state.ctx.pp.rank, state.grads.not_finite()]  # the last stage's backward runs first
    everywhere = comm.gather_json(here, state.ctx.world, state.ctx.device)
    names: dict[str, None] = {}  # as an ordered set: replicas and tensor ranks name the same parameters
    for _, names_of_rank in sorted(everywhere):
        names |= dict.fromkeys(names_of_rank)
    first = ", ".join(list(names)[:3]) or "none"
    reporter.say(
        f"step {state.step}: no update, gradients overflowed fp16 (first in the backward pass: {first}); "
        f"loss scale {result.loss_scale.scale:,.0f} -> {state.loss_scale.scale:,.0f}"
    )


def write_timeline(trace: Sequence[Event], ctx: ParallelContext, run_dir: Path) -> None:
    """Write the events of the first replica's pipeline to run_dir/timeline.json. A collective over `ctx.pp`.

    Ranks on other machines have other clocks, which are not aligned.
    """
    rows = comm.gather_json([[e.rank, *e.action, e.start, e.end] for e in trace], ctx.pp, ctx.device)
    if ctx.world.first:
        path = run_dir / "timeline.json"
        with storing(path):
            path.write_text(json.dumps([event for row in rows for event in row]))


def report_validation(state: TrainState, sets: Mapping[str, Loader], reporter: Reporter, last: bool) -> None:
    """Report the mean loss on each validation set, and after the last step on the test set.

    The key in metrics.jsonl is `validation_loss`, or `validation_loss/NAME` if there are several sets, and `test_loss`.
    """
    validation = [name for name in sets if name != TEST]
    keys = {name: f"validation_loss/{name}" for name in validation}
    if len(validation) == 1:
        keys = {validation[0]: "validation_loss"}
    if last and TEST in sets:
        keys[TEST] = "test_loss"
    losses = {key: mean_validation_loss(state, sets[name]) for name, key in keys.items()}
    if losses:
        reporter.write({"step": state.step, **losses})
        shown = " | ".join(f"{key.replace('_', ' ')} {loss:.4f}" for key, loss in losses.items())
        reporter.say(f"step {state.step}/{state.config.train.steps} | {shown}")


def mean_validation_loss(state: TrainState, data: Loader) -> float:
    """The mean loss over the first `train.eval_samples` samples, in nats per target token.

    These are the same samples at each call. They are read in whole global batches, and none of them twice.
    """
    size = data.batch_size(0)
    batches = min(-(-state.config.train.eval_samples // size), len(data.samples) // size)
    sums = [evaluate(state, _on_device(data.step_after(i * size), state.ctx)) for i in range(batches)]
    return sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _on_device(batches: list[MicroBatch], ctx: ParallelContext) -> list[MicroBatch]:
    return [batch.to(ctx.device) for batch in batches]
