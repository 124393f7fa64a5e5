"""The trainer: builds a training state around a model, and runs its steps."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megapar.base.errors import NumericError, Preempted, StorageError
from megapar.base.precision import LossScale
from megapar.checkpoint import tiers
from megapar.checkpoint.format import Manifest, step_of
from megapar.comm import collectives
from megapar.config.derive import num_microbatches
from megapar.config.options import Config, OptimizerConfig, flatten
from megapar.data.delivery import Delivery
from megapar.data.loader import Loader
from megapar.data_parallel.layout import FlatLayout, HasParameters
from megapar.data_parallel.reduce import Gradients
from megapar.data_parallel.shards import ReducedGradients, Weights
from megapar.data_parallel.units import Initial, UnitGradients, UnitWeights
from megapar.data_parallel.weights import FlatWeights
from megapar.declare.agreement import from_first, on_all_ranks
from megapar.declare.batch import MicroBatch, PipelineStage
from megapar.declare.context import ParallelContext
from megapar.declare.largest_logits import measuring_modules
from megapar.declare.random import fill, initialize
from megapar.declare.sharding import model_dtype
from megapar.declare.stage_set import StageSet
from megapar.launch.rank_process import RankProcess
from megapar.observe.memory_report import MemoryReport
from megapar.observe.metrics import Measured, Meter, Reporter
from megapar.observe.observer import Observed, Observers
from megapar.observe.of_run import observers_of
from megapar.observe.prediction import Prediction
from megapar.observe.sinks.base import RunInfo
from megapar.observe.watch import Watch
from megapar.optimizer import table
from megapar.optimizer.optimizers import Optimizers
from megapar.pipeline.runtime import PipelineRuntime
from megapar.pipeline.schedules import of
from megapar.pipeline.sharding_plan import UnitAction, Units
from megapar.pipeline.zero_bubble import ScheduleMemory
from megapar.step import not_finite, spikes
from megapar.step.evaluation import validate
from megapar.step.spikes import Spikes, compute_again, in_words_again, past_rewinds
from megapar.step.state import QueuedStep, StepResult, TrainState
from megapar.step.step import queue_step
from megapar.step.trainable import freeze_others
from megapar.system import device, events
from megapar.system.environment import Environment
from megapar.system.garbage import GarbageCollection
from megapar.system.say import say
from megapar.train import checkpoints, host_memory
from megapar.train.data import TEST, holds_conversations, packs_in_words
from megapar.train.savers import Lost, Saved, Savers


def initializes_by_unit(config: Config) -> bool:
    """Whether `start` takes stages without memory for their parameters. A rank of ZeRO-3 then never holds all of them.

    Frozen parameters are in no unit. With some of them all have memory from the beginning.
    """
    return config.optimizer.zero_stage == 3 and not config.train.trainable


def assemble(
    config: Config,
    ctx: ParallelContext,
    stages: StageSet[PipelineStage],
    memory: ScheduleMemory | None = None,
    initial: Initial | None = None,
) -> TrainState:
    """Build the training state at step 0: pipeline runtime, flat weights and gradients, and optimizers.

    Initialize the weights of `stages` before this call: the optimizer's main weights are copied from them. With ZeRO-3
    `initial` fills them here, unless it is None (`initializes_by_unit`). `memory` is what the schedule may keep
    (`megapar_tools.plan.memory.memory_limit`).
    """
    options = config.optimizer
    kernels = device.kernels_of(config.kernels, ctx.device, config.train.precision)
    stage = options.zero_stage
    layout = layout_of(options, list(stages.values()))
    weights: Weights
    if stage == 3:
        weights = UnitWeights(layout, ctx.device, initial)
    else:
        weights = FlatWeights(layout, ctx.device)
        if options.overlap_param_gather:
            weights.wait_under_forward(stages.values())
    grads: ReducedGradients
    reduce_dtype = model_dtype(options.grad_reduce_dtype)
    if stage >= 2:
        grads = UnitGradients(layout, ctx.device, reduce_dtype=reduce_dtype, impl=kernels.adamw)
    else:
        overlap = options.overlap_grad_reduce
        grads = Gradients(layout, ctx.device, overlap=overlap, reduce_dtype=reduce_dtype, impl=kernels.adamw)
    parallel = config.parallel
    units = make_units(stages, weights, grads, overlap=options.overlap_grad_reduce)
    return TrainState(
        config=config,
        ctx=ctx,
        stages=stages,
        pipeline=PipelineRuntime(stages, ctx, of(parallel, memory), parallel.vpp, stages.fine_stages, units),
        weights=weights,
        grads=grads,
        optimizer=Optimizers(
            weights, grads, ctx, options, kernels.adamw, config.train.seed, measuring_modules(stages.values())
        ),
        loss_scale=LossScale.of(config.train.precision),
        failed=torch.zeros((), dtype=torch.bool, device=ctx.device),
    )


def layout_of(options: OptimizerConfig, modules: Sequence[HasParameters]) -> FlatLayout:
    """The layout of the parameters of a rank's stages, in order."""
    whole = table.needing_whole(options, modules)
    update_of = table.update_of(options)
    if options.zero_stage >= 2:
        return FlatLayout.of_units(modules, whole=whole, update_of=update_of)
    elements = bucket_elements(options.bucket_mb)
    return FlatLayout(modules, elements, sharded=options.zero_stage == 1, whole=whole, update_of=update_of)


def types_of(zero_stage: int) -> tuple[type[Weights], type[ReducedGradients]]:
    """The classes that hold the weights and the gradients of a rank."""
    return UnitWeights if zero_stage == 3 else FlatWeights, UnitGradients if zero_stage >= 2 else Gradients


def make_units(
    stages: Mapping[int, PipelineStage], weights: Weights, grads: ReducedGradients, *, overlap: bool
) -> Units | None:
    """What the plan of the pipeline must know of the units of ZeRO-2 and 3; None with the stages before."""
    actions = {**grads.unit_actions(), **weights.unit_actions()}
    if not actions:
        return None

    def run(action: UnitAction) -> None:
        actions[action.kind](action.unit)

    of_stage = {number: grads.layout.buckets_of(stage) for number, stage in stages.items()}
    add_in_i = {number for number, stage in stages.items() if stage.adds_gradients_in_i}
    return Units(of_stage, run, "gather" in actions, overlap, add_in_i, copied="copies" in actions)


def bucket_elements(bucket_mb: float) -> int:
    """The number of fp32 gradients in `bucket_mb` MiB. Raises ValueError if it is 0."""
    elements = int(bucket_mb * 2**20 / 4)
    if elements < 1:
        raise ValueError(f"bucket_mb is {bucket_mb}: validate() fills in the 0 of optimizer.bucket_mb")
    return elements


@dataclass(frozen=True)
class TrainingRun:
    """A training run: its state, its data and its folder.

    `flops_per_token` counts forward and backward, for MFU. `asked_to_stop` returns what asks this rank to end the run,
    and "" as long as nothing does. `memory_report` is None unless train.memory_report asks for it. `prediction` is None
    if there is no model of this machine's time. `process` is this rank's, None for a library's run.
    """

    state: TrainState
    train_data: Delivery
    validation_sets: Mapping[str, Loader]
    run_dir: Path
    flops_per_token: int
    asked_to_stop: Callable[[], str] = str  # str() is ""
    memory_report: MemoryReport | None = None
    prediction: Prediction | None = None
    process: RankProcess | None = None


def start(
    config: Config,
    ctx: ParallelContext,
    stages: StageSet[PipelineStage],
    data: Mapping[str, Any] | None = None,
    memory: ScheduleMemory | None = None,
    env: Environment | None = None,
    inputs_on_host: int = 0,
    opened: Mapping[Path, Manifest] = MappingProxyType({}),
) -> tuple[TrainState, list[str]]:
    """Build the state at step 0 or at the checkpoint named by `checkpoint.resume`; returns it and lines for the user.

    `stages` have memory for their parameters unless `initializes_by_unit`. `data` is the `identity` of the run's data.
    The checkpoint's must be equal. `memory` is what the schedule may keep (`megapar_tools.plan.memory.memory_limit`).
    `env` tells whether the job's launcher has started the ranks again; then they go on from the newest checkpoint of
    all tiers, whatever `checkpoint.resume` says. `inputs_on_host` are the bytes of host memory that train.offload takes
    by plan (`memory.host_bytes_of_inputs`). `opened` are the folders of other frameworks that checkpoint.resume and
    checkpoint.init_from name (`megapar_models.doors.opened`). Raises ConfigError if an option is set that no optimizer
    of the run reads, or if a host has too little memory for its share of state and of inputs.
    """
    # In this order: the optimizer copies the initialized weights, and makes state for trained parameters alone.
    run_dir = Path(config.run_dir)
    env = env or Environment()
    again = from_first(ctx.world.first and events.has_started(run_dir, env.job, env.restart), ctx)
    folders = tiers.all_of(config.checkpoint, run_dir, env.snapshots, ctx, again=again)
    rewind = spikes.planned_rewind(run_dir, ctx, named=config.checkpoint.resume != "auto" and not again)
    path = checkpoints.find(config, run_dir, ctx, folders[:-1], again=again, rewind=rewind, opened=opened)
    seed = config.train.seed
    draws = checkpoints.draws(config, path)
    initial: Initial | None = None
    if initializes_by_unit(config):
        initial = partial(fill, seed=seed, draws=draws, threads=ctx.cores)
    else:
        initialize(stages.values(), seed, draws=draws, threads=ctx.cores)
    notes = freeze_others(stages.values(), config.train.trainable, ctx)
    # Of all ranks, because another pipeline rank's layers may have another optimizer.
    options = config.optimizer
    here = table.names_of(options, stages.values()), table.groups_used(options, stages.values())
    everywhere = collectives.gather_json(here, ctx.world, ctx.device)
    table.check(options, {name for names, _ in everywhere for name in names})
    table.check_groups(options, [groups for _, groups in everywhere])
    host_memory.check(config, layout_of(options, list(stages.values())), ctx, inputs_on_host)
    state = assemble(config, ctx, stages, memory, initial)
    state.data_identity = data or {}
    state.tiers = folders
    state.opened = opened
    notes += checkpoints.resume(state, run_dir, path)
    notes += spikes.rewind(state, rewind, run_dir)
    if ctx.world.first:
        _record_start(state, run_dir, env, path)
    ctx.flight.step = state.step
    if state.step:
        ctx.flight.checkpoint(state.step)
    state.pipeline.prepare(_numbers_of_microbatches(state))
    return state, notes


def _record_start(state: TrainState, run_dir: Path, env: Environment, path: Path | None) -> None:
    """Append the event of this start to events.jsonl."""
    parallel = state.config.parallel
    tier = "weights" if state.config.checkpoint.init_from != "none" else "none"
    if path is not None:
        tier = next((folder.name for folder in state.tiers if folder.root == path.parent), "shared")
    events.append(
        run_dir,
        "start",
        job=env.job,
        attempt=env.restart,
        step=state.step,
        tier=tier,
        path=str(path or ""),
        world=state.ctx.world.size,
        layout={name: getattr(parallel, name) for name in ("tp", "cp", "pp", "dp", "ep", "etp", "vpp")},
        steps_lost=events.steps_lost(run_dir, state.step),
    )


def _numbers_of_microbatches(state: TrainState) -> list[tuple[int, int]]:
    """How many micro-batches this rank runs in a step, and the most of any replica, for each global batch to come.

    The sizes differ if train.batch_ramp grows the global batch.
    """
    train = state.config.train
    first = train.batch_size(state.consumed_samples)
    last = train.global_batch_size
    sizes = range(first, last, train.batch_ramp[1]) if train.batch_ramp else ()
    return [(_microbatches_here(state, size), num_microbatches(state.config, size)) for size in (*sizes, last)]


def _microbatches_here(state: TrainState, size: int) -> int:
    """How many micro-batches of a global batch of `size` samples this rank runs."""
    dp = state.ctx.dp
    # Replica r runs the micro-batches r, r + dp, ...: the first replicas have one more if dp does not divide them.
    return len(range(dp.rank, size // state.config.train.micro_batch_size, dp.size))


class _Steps:
    """Runs the steps of a run and reports them.

    A GPU is one step behind the host: step t is reported when step t + 1 is queued, so the GPU always has work. A CPU
    has computed a step when it is queued, so each step is reported at once.
    """

    def __init__(
        self,
        run: TrainingRun,
        data: Delivery,
        reporter: Reporter,
        observers: Observers,
        watch: Watch,
        garbage: GarbageCollection,
    ):
        self._run = run
        self._observers = observers
        self._garbage = garbage
        self._watch = watch
        self._state = run.state
        self._data = data
        self._reporter = reporter
        options = run.state.config
        ctx = run.state.ctx
        peak_tflops = options.log.peak_tflops or device.peak_tflops(ctx.device, options.train.precision)
        self._meter = Meter(ctx, run.flops_per_token, peak_tflops)
        rewinds = past_rewinds(run.run_dir) if ctx.world.first and options.guard.on_spike == "rewind" else []
        self._spikes = Spikes(options, run.run_dir, from_first(rewinds, ctx), run.state.recent)
        self._queued: deque[tuple[QueuedStep, Measured, float]] = deque()  # oldest first; none is reported yet
        # A dynamic loss scale is known when the step before is finished. The GPU computes the update of that step
        # meanwhile, so even then it rarely waits for the host.
        # A step that guard.on_spike has skipped is computed again before the next one changes the weights.
        waits = run.state.loss_scale.dynamic or options.guard.on_spike == "skip"
        runs_behind = device.is_asynchronous(ctx.device) and not waits
        self._behind = 1 if runs_behind else 0

    def queue(self) -> None:
        """Queue the next step."""
        state = self._state
        number = state.step + 1
        self._observers.begin_step(number)
        state.ctx.flight.step = number
        state.ctx.flight.enter("data")
        self._meter.start()
        with state.ctx.flight.span("data"):
            batches = self._meter.waited(self._data.next_step)
        with self._meter.excluding():
            self._observers.before_compute(number, batches)
        asked = self._run.asked_to_stop() != ""
        state.norm_limit = self._spikes.norm_limit()
        step = queue_step(state, batches, asked_to_stop=asked)
        self._queued.append((step, self._meter.queued(), state.norm_limit))
        self._observers.after_queue(number)
        self._garbage.after_step(number)

    def report(self, *, everything: bool) -> bool:
        """Report the steps the device has computed; with `everything`, wait for all queued steps.

        Returns whether some rank has to stop. Then every step is reported. Raises NumericError if a step has failed,
        and DataError if no target of it has a weight.
        """
        stop = False
        # By number, not by what the device has computed so far: all ranks must learn of a stop at the same step.
        while len(self._queued) > (0 if everything or stop else self._behind):
            step, measured, norm_limit = self._queued.popleft()
            result = step.finish()
            result.check_targets()  # before a line with the loss 0 / 0 is written
            line = self._meter.line(result, measured)
            self._reporter.step(line)
            self._observers.after_line(result, line)
            if result.failed:
                self._state.ctx.flight.step = result.step
            if not result.finite:
                _explain_not_finite(self._state, step.batches, result, self._reporter)
            elif spike := self._spikes.judge(result, norm_limit, self._state.ctx):
                if result.grad_norm > norm_limit:
                    spike += f"; {in_words_again(result, *compute_again(self._state, step))}"
                self._reporter.say(f"step {result.step}/{self._state.config.train.steps} | {spike}")
                self._watch.alert("spike", spike, step=result.step, loss=result.loss, grad_norm=result.grad_norm)
            stop = stop or result.stop
        return stop


def train(run: TrainingRun) -> str:
    """Do as `_train`, and watch the run meanwhile."""
    options = run.state.config.log
    first = run.state.ctx.world.first
    tells = run.process is None or not run.process.has_launcher
    with Watch(run.run_dir, options.alert_command, run.state.ctx.flight, say, speaks=first, ends=tells) as watch:
        reason = _train(run, watch)
        if first and not reason:
            spikes.forget_rewind(run.run_dir)
        watch.ended(Preempted.exit_code if reason else 0, run.state.step, reason)
        return reason


def _train(run: TrainingRun, watch: Watch) -> str:
    """Train to `train.steps`; report, evaluate and save on the way. Returns why the run stopped before, or "".

    A run asked to stop saves at the end of a step agreed on by all ranks. Raises NumericError at the first step with a
    non-finite loss or gradient norm. This step has not updated the weights. After an fp16 overflow only the step's
    update is skipped, unless the loss scale is 1 already.
    """
    state = run.state
    options = run.state.config
    total = options.train.steps
    flight = state.ctx.flight
    saves = options.checkpoint.every > 0 or options.checkpoint.save_last
    stop = False
    with (
        Savers(state, run.run_dir) as saver,
        _reporter(run) as reporter,
        _observers(run, reporter, watch) as observers,
        closing(run.train_data) as data,
        GarbageCollection() as garbage,
    ):
        steps = _Steps(run, data, reporter, observers, watch, garbage)
        for line in packs_in_words(data.loader):
            reporter.say(line)
        if state.step >= total:
            reporter.say(f"nothing to do: train.steps={total}, and step {state.step} is done")
        while state.step < total and not stop:
            steps.queue()
            last = state.step == total
            evaluates = last or _due(state.step, options.train.eval_every)
            # An evaluation and a checkpoint come after the lines of all steps before, and need a finite step.
            asked = steps.report(everything=evaluates or saver.due(state.step))
            observers.end_step(state.step)
            stop = asked and not last
            for line in data.started_over():
                reporter.say(f"step {state.step}/{total} | {line}")
            if evaluates:
                flight.enter("evaluate")
                report_validation(state, run.validation_sets, reporter, last)
            flight.enter("save")
            saved: Iterable[Saved | Lost] = ()
            if saver.due(state.step) or (stop and saves):
                observers.before_save(state.step)
                # The lines of the steps before a checkpoint must be on disk when it gets its name: a resumed run goes
                # on behind them.
                saved = saver.save(state, stopping=stop and saves, ready=reporter.flush)
            # One by one: what was completed or lost is told before the error of a later save ends the run.
            for one in chain(saved, saver.completed(wait=last or stop)):
                _report_saved(run, one, saver, reporter, watch)
        state.weights.wait()  # no forward pass follows that would
    reason = _why_stopped(run, saves) if stop else ""
    if state.ctx.world.first:
        code = Preempted.exit_code if stop else 0
        events.append(run.run_dir, "exit", code=code, step=state.step, reason=reason)
    return reason


def _report_saved(run: TrainingRun, saved: Saved | Lost, saver: Savers, reporter: Reporter, watch: Watch) -> None:
    """Report a completed or lost checkpoint.

    A snapshot in memory ends with the job, so only the changes of this tier are reported.
    """
    state = run.state
    failed = saver.failed
    change = saver.change(saved)
    if isinstance(saved, Lost) and saved.tier.name == "shared":
        watch.save_failed(change, saved.step)
    else:
        watch.tier(saved.tier.name, change, state.step, works=isinstance(saved, Saved))
    if saver.failed != failed:
        reporter.write({"step": state.step, "failed_saves": saver.failed})
    if isinstance(saved, Lost) or saved.tier.name == "memory":
        return
    state.ctx.flight.checkpoint(step_of(saved.path))
    reporter.say(f"step {state.step}/{state.config.train.steps} | saved {saved.path}")
    if state.ctx.world.first:
        if saved.tier.name == "shared":
            spikes.forget_rewind(run.run_dir)  # this checkpoint knows the samples that were left out
        step = step_of(saved.path)
        events.append(run.run_dir, "saved", step=step, tier=saved.tier.name, seconds=round(saved.seconds, 3))


def _why_stopped(run: TrainingRun, saves: bool) -> str:
    """What asked the run to stop, after which step it stopped, and whether it saved. A collective."""
    reasons = collectives.gather_json(run.asked_to_stop(), run.state.ctx.world, run.state.ctx.device)
    reason = next(reason for reason in reasons if reason)
    if not saves:
        return f"stopped by {reason} after step {run.state.step}: nothing saved (checkpoint.save_last is off)"
    return f"stopped by {reason} after step {run.state.step}, which is saved: start it again to go on"


def _observers(run: TrainingRun, reporter: Reporter, watch: Watch) -> Observers:
    """Return the run's observers. A collective."""
    seen = Observed(run.state, run.run_dir, reporter.say, reporter.write)
    return observers_of(seen, watch, run.memory_report, run.prediction)


def _reporter(run: TrainingRun) -> Reporter:
    """The run's reporter. A collective: rank 0 may take long to open a file of millions of lines."""
    state = run.state
    options = run.state.config
    first = state.ctx.world.first
    info = RunInfo(run.run_dir, flatten(options), options.train.steps, state.step)

    def open_files() -> Reporter:
        return Reporter(options.log, info, state.lineage, speaks=first)

    return on_all_ranks(open_files, state.ctx, StorageError, "metrics not written")


def _explain_not_finite(
    state: TrainState, batches: Sequence[MicroBatch], result: StepResult, reporter: Reporter
) -> None:
    """Report gradients beyond the range of fp16. Raises NumericError if a smaller loss scale would not avoid it."""
    if result.failed:
        cause = not_finite.explain(state, batches, result)
        raise NumericError(
            f"step {result.step}: loss {result.loss}, gradient norm {result.grad_norm}; "
            f"{cause}. No weight was changed: they are those of step {result.step - 1}. "
            "A lower optimizer.lr or a longer optimizer.warmup_steps often helps; --checkpoint.resume goes back further"
        )
    # The backward of the last stage runs first. The schedule says which rank has it.
    here = [-max(state.stages), state.grads.not_finite()]
    everywhere = collectives.gather_json(here, state.ctx.world, state.ctx.device)
    names: dict[str, None] = {}  # as an ordered set: replicas and tensor ranks name the same parameters
    for _, names_of_rank in sorted(everywhere):
        names |= dict.fromkeys(names_of_rank)
    first = ", ".join(list(names)[:3]) or "none"
    reporter.say(
        f"step {result.step}: no update, gradients overflowed fp16 (first in the backward pass: {first}); "
        f"loss scale {result.loss_scale.scale:,.0f} -> {state.loss_scale.scale:,.0f}"
    )


def report_validation(state: TrainState, sets: Mapping[str, Loader], reporter: Reporter, last: bool) -> None:
    """Report the mean loss on each validation set, and after the last step on the test set.

    The key in metrics.jsonl is `validation_loss`, or `validation_loss/NAME` if there are several sets, and `test_loss`.
    Sets of conversations have an accuracy too, under `validation_accuracy` and so on: the share of the trained tokens
    with the highest logit.
    """
    validation = [name for name in sets if name != TEST]
    values: dict[str, float] = {}
    for name, data in sets.items():
        if name == TEST and not last:
            continue
        kind = "test" if name == TEST else "validation"
        suffix = f"/{name}" if name != TEST and len(validation) > 1 else ""
        found = validate(state, data)
        values[f"{kind}_loss{suffix}"] = found.mean_loss
        if holds_conversations(data) and state.stages.declared.divided_by == "tokens":
            values[f"{kind}_accuracy{suffix}"] = found.accuracy
    if values:
        reporter.write({"step": state.step, **values})
        shown = " | ".join(f"{key.replace('_', ' ')} {value:.4f}" for key, value in values.items())
        reporter.say(f"step {state.step}/{state.config.train.steps} | {shown}")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
