"""Where a step first went wrong: a second pass over its micro-batches that looks at every module's tensors.

It costs nothing in good steps. After a step that was not finite all ranks take part in it, with the same weights and
samples and, as dropout masks derive from counters, the same masks: so it repeats the step, transfers included.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megapar import comm
from megapar.batch import MicroBatch, PipelineStage
from megapar.train.step import StepResult, TrainState, count_targets

_MOST = 4  # names or samples that a message lists


class Finding(NamedTuple):
    """A tensor with an element that is not finite. Findings sort in the order of computation, a micro-batch at a time:
    `place` counts stages in the direction of the pass, `order` what a rank has computed."""

    microbatch: int
    backward: bool
    place: int
    order: int
    rank: int
    what: str
    samples: tuple[int, ...]

    def __str__(self) -> str:
        way = "backward" if self.backward else "forward"
        return (
            f"{self.what} in the {way} pass of micro-batch {self.microbatch} "
            f"(samples {_some(self.samples, len(self.samples))}) on rank {self.rank}"
        )


def explain(state: TrainState, batches: Sequence[MicroBatch], result: StepResult) -> str:
    """What was not finite first in a step of these micro-batches, and whether the weights were: the same words on every
    rank. A collective over all ranks; gradients are overwritten."""
    rank = state.ctx.world.rank
    weights = [f"{name} on rank {rank}" for name in not_finite_weights(state)]
    findings = second_pass(state, batches, result.loss_scale.scale)
    gradients = [f"the gradient of {name} on rank {rank}" for name in _not_finite_gradients(state)]
    # With thousands of ranks, whose weights may all be bad, a few names of each are enough.
    here = [weights[:_MOST], len(weights), min(findings, default=None), gradients[:1]]
    everywhere = comm.gather_json(here, state.ctx.world, state.ctx.device)
    bad_weights = [name for names, _, _, _ in everywhere for name in names]
    found = [Finding(*finding) for _, _, finding, _ in everywhere if finding]
    bad_gradients = [name for _, _, _, names in everywhere for name in names]
    if found:
        first = str(min(found))
    elif bad_gradients:
        first = f"{bad_gradients[0]}, summed over micro-batches"
    elif bad_weights:
        first = "none of the second pass"
    else:
        first = "none: a second pass over the same samples was finite, so suspect this machine's hardware"
    if bad_weights:
        listed = _some(bad_weights, sum(number for _, number, _, _ in everywhere))
        return f"first not finite: {first}; the weights were not finite before the step: {listed}"
    return f"first not finite: {first}; all weights were finite before the step"


def not_finite_weights(state: TrainState) -> list[str]:
    """Names of this rank's parameters that hold an infinite or NaN element, in the model's order."""
    return [slot.name for slot in reversed(state.grads.layout.slots) if not _finite(slot.param.detach())]


def second_pass(state: TrainState, batches: Sequence[MicroBatch], loss_scale: float) -> list[Finding]:
    """Forward and backward of the micro-batches once more; for each of them the first finding of either pass here."""
    watch = _Watch(state, batches)
    state.grads.zero()
    handles = watch.attach(state.stages)
    try:
        state.pipeline.step(batches, loss_scale / count_targets(batches, state.ctx))
    finally:
        for handle in handles:
            handle.remove()
    return [*watch.forward.values(), *watch.backward.values()]


def _not_finite_gradients(state: TrainState) -> list[str]:
    """In the order of the backward pass; sums over this rank's micro-batches, not yet reduced."""
    grads = state.grads
    return [slot.name for slot in grads.layout.slots if not _finite(grads.flat[slot.start : slot.stop])]


class _Watch:
    """Hooks on every module of this rank's stages, and what they found."""

    def __init__(self, state: TrainState, batches: Sequence[MicroBatch]):
        self.forward: dict[int, Finding] = {}  # by micro-batch
        self.backward: dict[int, Finding] = {}
        self._rank = state.ctx.world.rank
        self._num_stages = state.pipeline.num_stages
        self._batches = batches
        self._now: tuple[int, int] | None = None  # (stage, micro-batch) whose forward runs; None: a recomputation
        self._order = 0

    def attach(self, stages: Mapping[int, PipelineStage]) -> list[RemovableHandle]:
        handles = []
        for number, stage in stages.items():
            handles.append(stage.register_forward_pre_hook(partial(self._enter, number)))
            for name, module in stage.named_modules():
                title = name or f"stage {number} ({stage.title()})"
                handles.append(module.register_forward_pre_hook(partial(self._before, title)))
                handles.append(module.register_forward_hook(partial(self._after, title)))
            handles.append(stage.register_forward_hook(self._leave))
        return handles

    def _enter(self, number: int, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        # The pipeline hands its stages copies of the micro-batches, which share their tensors.
        ids = inputs[1].sample_ids_b
        self._now = number, next(i for i, batch in enumerate(self._batches) if batch.sample_ids_b is ids)

    def _leave(self, *_: Any) -> None:
        self._now = None

    def _before(self, title: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._now is not None:
            self._look(self.forward, False, f"the input of {title}", *self._now, inputs)

    def _after(self, title: str, _: nn.Module, __: Any, result: Any) -> None:
        if self._now is None:
            return
        outputs = result if isinstance(result, tuple) else (result,)
        self._look(self.forward, False, f"the output of {title}", *self._now, outputs)
        for tensor in outputs:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._gradient, title, *self._now))

    def _gradient(self, title: str, stage: int, microbatch: int, gradient: Tensor) -> None:
        what = f"the gradient of the output of {title}"
        self._look(self.backward, True, what, stage, microbatch, (gradient,))

    def _look(
        self,
        found: dict[int, Finding],
        backward: bool,
        what: str,
        stage: int,
        microbatch: int,
        tensors: Sequence[Any],
    ) -> None:
        self._order += 1
        if microbatch in found or all(_finite(x) for x in tensors if isinstance(x, Tensor)):
            return
        place = self._num_stages - 1 - stage if backward else stage
        samples = tuple(self._batches[microbatch].sample_ids_b.tolist())
        found[microbatch] = Finding(microbatch, backward, place, self._order, self._rank, what, samples)


def _finite(x: Tensor) -> bool:
    # Detached: what autograd saved here would confuse a recomputation, which saves nothing here.
    return not x.is_floating_point() or bool(torch.isfinite(x.detach()).all())


def _some(items: Sequence[Any], number: int) -> str:
    """The first of `number` items."""
    more = f" and {number - _MOST} more" if number > _MOST else ""
    return ", ".join(map(str, items[:_MOST])) + more
