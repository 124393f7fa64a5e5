"""Puts the engines together around a model and runs the steps."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from megapar import comm, device
from megapar.batch import MicroBatch, PipelineStage
from megapar.checkpoint.agreement import together
from megapar.config import Config
from megapar.context import ParallelContext
from megapar.data.loader import Loader, open_dataset
from megapar.data_parallel.grad_buffer import GradBuffer
from megapar.errors import DataError, NumericError
from megapar.optimizer.adamw import AdamW
from megapar.pipeline.runtime import PipelineRuntime
from megapar.pipeline.schedules import Event
from megapar.precision import LossScale
from megapar.random import initialise
from megapar.train import checkpoints
from megapar.train.metrics import Meter, Reporter
from megapar.train.step import TrainState, evaluate, train_step


def assemble(config: Config, ctx: ParallelContext, stages: Mapping[int, PipelineStage]) -> TrainState:
    """Runtime, gradient buffer and optimizer around this rank's `stages` (global number to module), at step 0.

    The optimizer's main weights start from the stages' weights: initialise those before.
    """
    options, kernels = config.optimizer, device.choose_kernels(config.kernels.backend, ctx.device)
    grads = GradBuffer(
        list(stages.values()),
        ctx,
        zero_stage=options.zero_stage,
        bucket_mb=options.bucket_mb,
        overlap=options.overlap_grad_reduce,
        weight_gradient=kernels.weight_gradient,
    )
    pipeline = PipelineRuntime(stages, ctx, config.parallel.schedule, config.parallel.vpp)
    optimizer = AdamW(grads, options, kernels.adamw)
    return TrainState(config, ctx, stages, pipeline, grads, optimizer, LossScale.of(config.train.precision))


@dataclass(frozen=True)
class Run:
    """What a training run needs besides its state. `flops_per_token` is that of forward and backward, for MFU."""

    state: TrainState
    train_data: Loader
    validation_data: Loader | None
    run_dir: Path
    flops_per_token: int


def start(config: Config, ctx: ParallelContext, stages: Mapping[int, PipelineStage]) -> tuple[TrainState, list[str]]:
    """A state at step 0, or where `checkpoint.resume` says, and lines that tell what was resumed."""
    initialise(stages.values(), config.train.seed)
    state = assemble(config, ctx, stages)
    notes = checkpoints.resume(state, Path(config.run_dir))
    return state, notes


def open_loaders(config: Config, ctx: ParallelContext) -> tuple[Loader, Loader | None]:
    """Training and validation data of this rank. A collective: raises DataError on every rank if it fails on one."""

    def loader(sources: Sequence[str], data_seed: int, order_seed: int | None) -> Loader:
        size = {"seq_length": config.train.seq_length, "vocab_size": config.model.vocab_size}
        return Loader(
            open_dataset(sources, seed=data_seed, **size),
            seed=order_seed,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=config.train.micro_batch_size,
            dp_rank=ctx.dp.rank,
            dp_size=ctx.dp.size,
        )

    def open_both() -> tuple[Loader, Loader | None]:
        seed, validation = config.train.seed, config.data.validation
        held_out = loader(validation, seed + 1, None) if validation else None
        return loader(config.data.train, seed, seed), held_out

    return together(open_both, ctx, DataError, "data not opened")


def train(run: Run) -> None:
    """Train to `train.steps`, reporting, evaluating and saving on the way.

    Raises NumericError at the first step whose loss or gradient norm is not finite, before its update; an fp16 overflow
    costs a step's update alone, unless the loss scale is 1 already.
    """
    state, options = run.state, run.state.config
    steps, ctx = options.train.steps, state.ctx
    meter = Meter(ctx, run.flops_per_token, options.log.peak_tflops or device.peak_tflops(ctx.device))
    with (
        checkpoints.Saver(state, run.run_dir) as saver,
        closing(Reporter(run.run_dir, options.log, steps, state.step, speaks=ctx.world.first)) as reporter,
    ):
        while state.step < steps:
            trace: list[Event] | None = [] if options.log.timeline and state.step == steps - 1 else None
            meter.start()
            result = train_step(state, _on_device(run.train_data.next_step(), ctx), trace)
            failed = not result.finite and not result.overflowed
            reporter.step(meter.stop(result, state.step + failed, state.consumed_samples))
            if not result.finite:
                where = comm.gather_json(state.grads.not_finite(), ctx.world, ctx.device)
                names = ", ".join(sorted({name for rank in where for name in rank})[:3]) or "none"
            if result.overflowed:
                reporter.say(
                    f"step {state.step}: no update, gradients overflowed fp16 (first of them: {names}); "
                    f"loss scale {result.loss_scale.scale:,.0f} -> {state.loss_scale.scale:,.0f}"
                )
            if failed:
                raise NumericError(
                    f"step {state.step + 1}: loss {result.loss}, gradient norm {result.grad_norm} (not finite: {names})"
                    f"; the weights are those of step {state.step}. A lower optimizer.lr or a longer "
                    "optimizer.warmup_steps often helps"
                )
            last = state.step == steps
            if trace is not None:
                write_timeline(trace, ctx, run.run_dir)
            if run.validation_data and (last or _due(state.step, options.train.eval_every)):
                validation_loss = mean_validation_loss(state, run.validation_data)
                reporter.write({"step": state.step, "validation_loss": validation_loss})
                reporter.say(f"step {state.step}/{steps} | validation loss {validation_loss:.4f}")
            saved = saver.save(state) if saver.due(state.step, last) else []
            for path in [*saved, *saver.completed(wait=last)]:
                reporter.say(f"step {state.step}/{steps} | saved {path}")


def write_timeline(trace: Sequence[Event], ctx: ParallelContext, run_dir: Path) -> None:
    """Gather the events of the first replica's pipeline into run_dir/timeline.json. Clocks of other machines differ."""
    rows = comm.gather_json([[e.rank, *e.action, e.start, e.end] for e in trace], ctx.pp, ctx.device)
    if ctx.world.first:
        (run_dir / "timeline.json").write_text(json.dumps([event for row in rows for event in row]))


def mean_validation_loss(state: TrainState, data: Loader) -> float:
    """Mean loss in nats per target token over the first `train.eval_samples` validation samples, always the same ones,
    in whole global batches and none of them twice."""
    size = data.global_batch_size
    batches = min(-(-state.config.train.eval_samples // size), len(data.dataset) // size)
    data.consumed_samples = 0
    sums = [evaluate(state, _on_device(data.next_step(), state.ctx)) for _ in range(batches)]
    return sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _on_device(batches: list[MicroBatch], ctx: ParallelContext) -> list[MicroBatch]:
    return [batch.to(ctx.device) for batch in batches]
