"""The state changed by training steps, what a step returns, and steps possibly still in progress on the device.

A GPU computes a step while the host queues the next one. So `megapar.step.step.queue_step` reads no number: the device
itself decides whether the step updates weights, and `QueuedStep.finish` reads the numbers later.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megapar.base.errors import DataError
from megapar.base.precision import LossScale
from megapar.checkpoint.format import Manifest
from megapar.checkpoint.tiers import Tier
from megapar.config.options import Config
from megapar.data.blend import BlendPhase
from megapar.data_parallel.shards import ReducedGradients, Weights
from megapar.declare.batch import MicroBatch, PipelineStage
from megapar.declare.context import ParallelContext
from megapar.declare.stage_set import StageSet
from megapar.linear.fp8_watch import by_product
from megapar.optimizer.optimizers import Optimizers
from megapar.pipeline.runtime import PipelineRuntime
from megapar.system import device


@dataclass(frozen=True)
class Recent:
    """The losses and gradient norms of the last steps, oldest first: what the guard against spikes judges by.

    Steps whose updates the guard has skipped are left out. Steps without finite numbers are, too.
    """

    WINDOW: ClassVar[int] = 100  # steps
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=Recent.WINDOW))
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=Recent.WINDOW))

    def add(self, loss: float, grad_norm: float) -> None:
        """Add a step, and forget the oldest one of more than WINDOW."""
        self.losses.append(loss)
        self.norms.append(grad_norm)


@dataclass
class TrainState:
    """Everything a step uses or changes, and what its checkpoints record.

    `step` counts completed steps, including those with an update skipped after an fp16 overflow. `consumed_samples`
    counts the samples of these steps. `lineage` has an entry for each start or resumption leading here, oldest first:
    its random id, and the number of steps completed before it (`megapar.checkpoint.lineage`). `data_identity` has a
    hash of each file that the samples depend on (`megapar.train.data.identity`). `blend` are the stages by which the
    samples are read; it is empty at step 0, where the options have them (`megapar.train.resumed_samples`). `base` names
    the frozen weights of adapters (`megapar.train.adapter_base`); it is empty if checkpoints hold all weights. `origin`
    names the model at Hugging Face that the weights began as (`megapar.checkpoint.origin`), if there was one. `tiers`
    are the folders for its checkpoints, the fastest first. `opened` are folders of other frameworks that it starts
    from. A step with a gradient norm beyond `norm_limit` makes no update; it counts as one in the bias correction of
    moments.

    `failed` is a 0-d bool on the device. No update is made while it is True. The step sets it if its loss or norm is
    not finite. Steps queued behind it by the host find it set. `QueuedStep.finish` clears it, when the host reads the
    numbers of the failed step.
    """

    config: Config
    ctx: ParallelContext
    stages: StageSet[PipelineStage]
    pipeline: PipelineRuntime
    weights: Weights
    grads: ReducedGradients
    optimizer: Optimizers
    loss_scale: LossScale
    failed: Tensor
    step: int = 0
    consumed_samples: int = 0
    lineage: list[tuple[str, int]] = field(default_factory=list)
    data_identity: Mapping[str, Any] = field(default_factory=dict)
    blend: tuple[BlendPhase, ...] = ()
    base: Mapping[str, Any] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)
    tiers: Sequence[Tier] = ()
    norm_limit: float = math.inf
    recent: Recent = field(default_factory=Recent)
    opened: Mapping[Path, Manifest] = field(default_factory=dict)


@dataclass(frozen=True)
class StepSums:
    """What the ranks of a step have summed up, the same on every rank: 0-d fp32 tensors on the device.

    `loss` and `grad_norm` are without the loss scale. `tokens` is the sum of the weights of targets. `stop_votes`
    counts the ranks that have to stop. `added` are the losses besides the main one, in the order of
    `megapar.declare.stage_set.Declared.losses`. `logits`, fp32 [layers, heads], are the largest logits of attention,
    None without optimizer.qk_clip. `fp8`, fp32 1-D, is what FP8 loses (`megapar.linear.fp8_watch.rates`), None where
    log.fp8_every does not ask for it.
    """

    loss: Tensor
    grad_norm: Tensor
    tokens: Tensor
    stop_votes: Tensor
    added: Sequence[Tensor]
    logits: Tensor | None
    fp8: Tensor | None = None

    def packed(self) -> Tensor:
        """Return the numbers of the step, fp32 1-D, as `QueuedStep.finish` reads them."""
        largest = [] if self.logits is None else [self.logits.amax()]
        numbers = torch.stack([self.loss, self.grad_norm, self.tokens, self.stop_votes, *self.added, *largest])
        return numbers if self.fp8 is None else torch.cat([numbers, self.fp8])


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank.

    `step` is the number of the step, counted from 1. `loss` is the mean in nats per target token. `grad_norm` is taken
    before clipping. `tokens` is the sum of the loss weights: the number of target tokens if all weights are 0 or 1. It
    is a float because weights may be fractions. `positions` are all that the step computed, whatever their weight.
    `consumed_samples` counts those of this step too, unless the step has
    failed. `stop` is True if some rank has to stop, because of a signal or launch.time_limit. `losses` are those
    besides the main one by name, divided by the same number of tokens. `tallies` are what modules counted in the step,
    by name, int64 [rows, n] (`megapar.declare.tally`). `largest_logit` is that of attention over all heads, with
    optimizer.qk_clip. `fp8` is what FP8 loses by product (`megapar.linear.fp8_watch.by_product`), if log.fp8_every
    watches the step.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: float
    positions: int
    consumed_samples: int
    loss_scale: LossScale  # the one that the step used
    stop: bool
    losses: Mapping[str, float] = field(default_factory=dict)
    tallies: Mapping[str, Tensor] = field(default_factory=dict)
    largest_logit: float | None = None
    fp8: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        """Whether the loss and the gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def overflowed(self) -> bool:
        """Whether the gradients overflowed fp16, and a smaller loss scale may avoid it.

        That is so if the loss is finite, the gradient norm is not, and the loss scale is dynamic and above 1.
        """
        scale = self.loss_scale
        return math.isfinite(self.loss) and not self.finite and scale.dynamic and scale.scale > 1.0

    @property
    def failed(self) -> bool:
        """Whether the step is not finite and a smaller loss scale would not avoid it. It ends the run."""
        return not self.finite and not self.overflowed

    def check_targets(self) -> None:
        """Raise DataError if no target of the step had a weight. Its loss is then 0 / 0, on every rank."""
        if self.tokens == 0.0:
            raise without_targets(f"step {self.step}")


def without_targets(what: str) -> DataError:
    """The error of a step or an evaluation without a target that has a weight. All ranks have it."""
    error = DataError(
        f"{what}: no token of its samples is trained, so there is no loss to take the mean of. The first token of a "
        "document is no target with data.documents=apart: if documents have one token, use joined. Of conversations "
        "megapar preprocess chat --show 3 shows what is trained. Or raise train.global_batch_size"
    )
    error.everywhere = True
    return error


@dataclass(frozen=True)
class StepCounts:
    """The counts of a state advanced by a step."""

    step: int
    consumed_samples: int
    updates: int


@dataclass(frozen=True)
class QueuedStep:
    """A queued step, possibly still in progress on the device.

    `batches` are this rank's micro-batches of the step. A failed step is explained by running them again.
    """

    state: TrainState
    batches: Sequence[MicroBatch]
    lr: float
    loss_scale: LossScale
    before: StepCounts
    numbers: device.HostCopy  # `StepSums.packed`
    tallies: Mapping[str, device.HostCopy]

    def finish(self) -> StepResult:
        """Wait for the numbers of the step, and correct the state if the step made no update. Call it once.

        After an overflow the loss scale is halved. After a failed step the counts of the state are those before the
        failed step. Steps queued behind it have updated nothing either: forget them.
        """
        # A device that waits for another rank's holds this host here. The log tells where it is.
        with self.state.ctx.flight.held():
            loss, grad_norm, tokens, votes, *others = self.numbers.wait().tolist()
        declared = self.state.stages.declared
        names = [of_loss.name for of_loss in declared.losses]
        losses, rest = others[: len(names)], others[len(names) :]
        largest = rest.pop(0) if declared.logits is not None else None
        before = self.before
        train = self.state.config.train
        samples = train.batch_size(before.consumed_samples)
        result = StepResult(
            step=before.step + 1,
            loss=loss,
            grad_norm=grad_norm,
            lr=self.lr,
            tokens=tokens,
            positions=samples * train.seq_length,
            consumed_samples=before.consumed_samples + samples,
            loss_scale=self.loss_scale,
            stop=votes > 0,
            losses=dict(zip(names, losses, strict=True)),
            tallies={name: table.wait() for name, table in self.tallies.items()},
            largest_logit=largest,
            fp8=by_product(declared.fp8_products, rest) if rest else {},
        )
        if result.failed:
            self.state.step = before.step
            self.state.consumed_samples = before.consumed_samples
            self.state.optimizer.step_count = before.updates
            self.state.failed.zero_()
            return replace(result, consumed_samples=before.consumed_samples)
        if result.overflowed:
            self.state.optimizer.step_count = before.updates
        self.state.loss_scale.update(result.finite)
        return result
