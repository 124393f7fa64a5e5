"""Spikes of the loss and of the gradient norm: when a step has one, and what then happens (guard.on_spike).

A spike is a value far above those of the last steps: above their median by six standard deviations, taken from the
median absolute deviation (1.4826 of it, for a normal distribution), and by a share of the median. PaLM went back some
hundred steps before a spike and skipped the data around it; the same data gave no spike to other weights (arXiv
2204.02311, section 5.1).
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megapar.base.errors import DataError, Rewind, StorageError, reason_of
from megapar.config.messages import counted
from megapar.config.options import Config
from megapar.declare.agreement import from_first, on_all_ranks
from megapar.declare.context import ParallelContext
from megapar.declare.tally import counting_modules, end_step
from megapar.step.divisors import count_divisors
from megapar.step.state import QueuedStep, Recent, StepResult, TrainState
from megapar.step.step import enter_scope, reduce_sums, run_microbatches
from megapar.system import events
from megapar.system.atomic_files import write_json
from megapar.system.typed import read_json

_FEWEST = 50  # steps before the first judgement
_DEVIATIONS = 6 * 1.4826
_LOSS_SHARE = 0.1  # of the median loss: a spike is at least so much above it
_NORM_SHARE = 2.0  # of the median norm
_BACK = 10  # steps: a checkpoint so close to a spike may have its seed in it
_MOST_REWINDS = 3
_SAME = 0.01  # relative: sums on a GPU may differ in their order, and a spike is larger by far
FILE = "rewind.json"
_PLAN = ("last_step", "consumed_samples")


class RewindPlan(NamedTuple):
    """What starts after a spike must follow: the last step of a checkpoint that serves, and the samples consumed then.

    It is kept until a checkpoint of the run folder knows the samples that are left out. `followed`: a start has
    followed it.
    """

    last_step: int
    consumed_samples: int
    followed: bool

    def is_served_by(self, step: int, consumed_samples: int) -> bool:
        """Whether a checkpoint is far enough before the spike, or behind the samples that are left out."""
        return step <= self.last_step or (self.followed and consumed_samples > self.consumed_samples)


class Spikes:
    """The last losses and gradient norms of a run, equal on all ranks, and the judgement of the next ones."""

    def __init__(self, config: Config, run_dir: Path, rewinds: Sequence[int] = (), recent: Recent | None = None):
        """`rewinds` are the steps of the spikes that the run has gone back before, the same on every rank.

        `recent` are the numbers to judge by. Steps are added to it.
        """
        self._policy = config.guard.on_spike
        self._run_dir = run_dir
        self._rewinds = rewinds
        self._recent = recent or Recent()

    def norm_limit(self) -> float:
        """The largest gradient norm with which the next step updates weights."""
        return _limit(self._recent.norms, _NORM_SHARE) if self._policy == "skip" else math.inf

    def judge(self, result: StepResult, norm_limit: float, ctx: ParallelContext) -> str:
        """A line about the spike of a finite step, "" without one. `norm_limit` is the one that the step had.

        Rank 0 writes an event. Every rank raises Rewind if the run is to go back, or StorageError if rank 0 cannot
        write the plan for the next start. A collective.
        """
        skipped = result.grad_norm > norm_limit
        found = []
        for name, value, past, share in (
            ("loss", result.loss, self._recent.losses, _LOSS_SHARE),
            ("gradient norm", result.grad_norm, self._recent.norms, _NORM_SHARE),
        ):
            if value > _limit(past, share):
                found.append((name, value, statistics.median(past)))
        if not skipped:  # the next values are compared with those of steps that changed the weights
            self._recent.add(result.loss, result.grad_norm)
        if not found and not skipped:
            return ""
        words = ", ".join(f"{name} {value:.4g} where {median:.4g} is the median" for name, value, median in found)
        near = sum(step > result.step - Recent.WINDOW for step in self._rewinds)
        rewinds = self._policy == "rewind" and near < _MOST_REWINDS
        action = "skipped" if skipped else "rewinds" if rewinds else "none"
        if rewinds:
            doing = f"step {result.step}: spike: {words}; the next start cannot be told to go back"
            on_all_ranks(lambda: self._plan_rewind(result) if ctx.world.first else None, ctx, StorageError, doing)
        if ctx.world.first:
            fields = {"step": result.step, "loss": result.loss, "grad_norm": result.grad_norm}
            events.append(self._run_dir, "spike", **fields, policy=self._policy, action=action)
        if rewinds:
            raise Rewind(
                f"step {result.step}: spike: {words}; the next start goes on from a checkpoint of step "
                f"{result.step - _BACK} or before, and leaves out the samples up to this step's"
            )
        done = "the weights are not updated" if skipped else "the run goes on"
        if self._policy == "rewind":
            done += f", as {_MOST_REWINDS} rewinds have not helped"
        return f"spike: {words}; {done}"

    def _plan_rewind(self, result: StepResult) -> None:
        values = max(result.step - _BACK, 0), result.consumed_samples
        write_json(self._run_dir / FILE, dict(zip(_PLAN, values, strict=True)))


def _limit(past: deque[float], share: float) -> float:
    if len(past) < _FEWEST:
        return math.inf
    median = statistics.median(past)
    deviation = statistics.median(abs(value - median) for value in past)
    return median + max(_DEVIATIONS * deviation, share * abs(median))


def compute_again(state: TrainState, step: QueuedStep) -> tuple[float, float]:
    """The loss and the gradient norm of a step that has not changed the weights, computed again.

    A collective over all ranks. It overwrites gradients, and changes nothing else.
    """
    state.weights.wait()
    samples = state.config.train.batch_size(step.before.consumed_samples)
    state.ctx.flight.enter("forward")
    scope, batches = enter_scope(state, step.batches)
    scale = step.loss_scale.scale  # the state's may have grown since
    divisors = count_divisors(state, batches, samples)
    main_losses = run_microbatches(state, batches, samples, divisors, scale)
    sums = reduce_sums(state, scope, main_losses, divisors, scale)
    # Modules have counted the step's tokens a second time.
    end_step(counting_modules(state.stages.values()), torch.ones((), dtype=torch.bool, device=state.ctx.device))
    with state.ctx.flight.held():
        return sums.loss.item(), sums.grad_norm.item()


def in_words_again(result: StepResult, loss: float, grad_norm: float) -> str:
    """A step beside the loss and the norm that it had when it was computed again from the same weights."""
    if math.isclose(loss, result.loss, rel_tol=_SAME) and math.isclose(grad_norm, result.grad_norm, rel_tol=_SAME):
        return "computed again it is the same, so it is the data or the weights, and not the hardware"
    return (
        f"computed again the loss is {loss:.4g} and the norm {grad_norm:.4g}: suspect the hardware; launch.preflight "
        "and guard.check_replicas_every look for the rank"
    )


def planned_rewind(run_dir: Path, ctx: ParallelContext, *, named: bool = False) -> RewindPlan | None:
    """The plan that a start must follow. A collective.

    `named`: the start names its checkpoint, which is respected if another start has followed the plan already. A file
    that says something else is passed over, with a warning.
    """
    found = from_first(_read_plan(run_dir) if ctx.world.first else None, ctx)
    if found is None or (named and found[2]):
        return None
    return RewindPlan(*found)


def _read_plan(run_dir: Path) -> RewindPlan | None:
    path = run_dir / FILE
    try:
        plan = read_json(path, dict.fromkeys(RewindPlan._fields, int))
        if all(plan.get(name, -1) >= 0 for name in _PLAN):
            return RewindPlan(plan["last_step"], plan["consumed_samples"], plan.get("followed", 0) > 0)
        problem = f"{path}: {' and '.join(_PLAN)} must be there, and not negative"
    except FileNotFoundError:
        return None
    except (DataError, OSError) as error:
        problem = str(error)
    logging.getLogger(__name__).warning("%s; this start goes back before no spike", problem)
    return None


def forget_rewind(run_dir: Path) -> None:
    """Remove the plan of a rewind. A failure is a warning."""
    path = run_dir / FILE
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logging.getLogger(__name__).warning("%s not removed: %s", path, reason_of(error))


def rewind(state: TrainState, plan: RewindPlan | None, run_dir: Path) -> list[str]:
    """Leave out the samples around a spike, where the state has been restored; returns lines for the user.

    The plan stays in the run folder: a start before the next checkpoint must follow it again.
    """
    lines = [] if plan is None else _leave_out(state, plan)
    if state.ctx.world.first:
        beyond = plan is not None and plan.followed and state.consumed_samples > plan.consumed_samples
        if plan is not None and (beyond or state.consumed_samples == plan.consumed_samples):
            try:
                write_json(run_dir / FILE, {**plan._asdict(), "followed": 1})
            except StorageError as error:
                logging.getLogger(__name__).warning("%s", error)
        else:
            forget_rewind(run_dir)
    return lines


def _leave_out(state: TrainState, plan: RewindPlan) -> list[str]:
    skipped = plan.consumed_samples - state.consumed_samples
    if plan.followed and skipped < 0:
        return []  # the checkpoint is behind those samples
    # The spike came `_BACK` steps after the last step that serves, and no step has consumed more.
    most = (plan.last_step + _BACK - state.step) * state.config.train.global_batch_size
    if not 0 < skipped <= most:
        return [
            f"{FILE} puts the samples after a spike at {plan.consumed_samples:,}, and those from step {state.step} "
            f"on begin at {state.consumed_samples:,}, at most {max(most, 0):,} before: none are left out"
        ]
    state.consumed_samples = plan.consumed_samples
    return [f"went back to step {state.step} before a spike; {counted(skipped, 'sample')} from there on are left out"]


def past_rewinds(run_dir: Path) -> list[int]:
    """The steps of the spikes that the run has gone back before."""
    return [event["step"] for event in events.past(run_dir) if event.get("action") == "rewinds" and "step" in event]
