"""Finds the first NaN or infinity of a step, by a second pass over every module's tensors.

A finite step costs nothing. After another one all ranks run its micro-batches again, transfers
included. The weights and samples are the same. The dropout masks are the same too, because they derive from counters.

On a GPU the device leaves out the update, but with ZeRO the gather after it still runs. It replaces a replica's
copies of the shards of others. So a weight damaged in such a copy alone is whole again in the second pass.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megapar.comm import collectives
from megapar.config.derive import num_microbatches
from megapar.declare.batch import MicroBatch, PipelineStage
from megapar.step.divisors import count_divisors
from megapar.step.state import StepResult, TrainState

_LISTED = 4  # the most names or samples that a message lists


class Finding(NamedTuple):
    """A tensor with a NaN or infinity.

    The first four fields sort findings in the order of computation, one micro-batch after another. `position` counts
    stages in the direction of the pass. `order` counts the tensors seen by the rank. `what` names the
    tensor.
    """

    microbatch: int
    backward: bool
    position: int
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
    """Say what was not finite first in a step of these micro-batches, and whether the weights were finite before.

    A collective over all ranks, with the same words on each. Gradients are overwritten.
    """
    rank = state.ctx.world.rank
    state.weights.wait()  # a GPU has gathered shards after the step as well, although none of them had changed
    weights = [f"{name} on rank {rank}" for name in state.weights.not_finite()]
    findings = second_pass(state, batches, result.loss_scale.scale)
    # Nothing has been reduced: these are the sums over this rank's micro-batches. With ZeRO-2 and 3 they are sums over
    # all ranks, of which each rank looks at its shards.
    not_finite = state.grads.not_finite(reduced=False)
    gradients = [f"the gradient of {name} on rank {rank}" for name in not_finite]
    # A few names of each rank are enough: with thousands of ranks, all weights of all of them may be bad.
    here = [weights[:_LISTED], len(weights), min(findings, default=None), gradients[:1]]
    everywhere = collectives.gather_json(here, state.ctx.world, state.ctx.device)
    bad_weights = [name for names, _, _, _ in everywhere for name in names]
    all_findings = [Finding(*finding) for _, _, finding, _ in everywhere if finding]
    bad_gradients = [name for _, _, _, names in everywhere for name in names]
    # Tensors of the second pass come first, because they name a module. A gradient may also overflow only in the sum
    # over micro-batches, and a bad weight may lie where no tensor of this step depends on it.
    if all_findings:
        first = str(min(all_findings))
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


def second_pass(state: TrainState, batches: Sequence[MicroBatch], loss_scale: float) -> list[Finding]:
    """Run forward and backward of the micro-batches again.

    Returns, for each micro-batch, the first finding of its forward and of its backward on this rank.
    """
    watch = _Watch(state, batches)
    state.grads.zero()
    state.grads.flat.zero_()  # because it is read before finish()
    handles = watch.attach(state.stages)
    try:
        samples = state.config.train.batch_size(state.consumed_samples)
        divisors = count_divisors(state, batches, samples)
        state.pipeline.step(
            batches,
            loss_scale / divisors.main,
            max_microbatches=num_microbatches(state.config, samples),
            added_scale=loss_scale / divisors.tokens,
        )
    finally:
        for handle in handles:
            handle.remove()
    return [*watch.forward.values(), *watch.backward.values()]


class _Watch:
    """Hooks on every module of this rank's stages, and the findings of these hooks."""

    def __init__(self, state: TrainState, batches: Sequence[MicroBatch]):
        self.forward: dict[int, Finding] = {}  # by micro-batch
        self.backward: dict[int, Finding] = {}
        self._rank = state.ctx.world.rank
        self._num_stages = state.pipeline.num_stages
        self._batches = batches
        # The stage and micro-batch whose forward runs. It is None while activation checkpointing recomputes a layer
        # within a backward: the layer's tensors were looked at in the forward.
        self._now: tuple[int, int] | None = None
        self._order = 0

    def attach(self, stages: Mapping[int, PipelineStage]) -> list[RemovableHandle]:
        """Add the hooks; returns their handles."""
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
        microbatch = next(i for i, batch in enumerate(self._batches) if batch is inputs[1])
        self._now = number, microbatch

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
        findings: dict[int, Finding],
        backward: bool,
        what: str,
        stage: int,
        microbatch: int,
        tensors: Sequence[Any],
    ) -> None:
        """Add a finding to `findings` if one of `tensors` is not finite and the micro-batch has none yet."""
        self._order += 1
        if microbatch in findings or all(_finite(x) for x in tensors if isinstance(x, Tensor)):
            return
        position = self._num_stages - 1 - stage if backward else stage
        samples = tuple(self._batches[microbatch].sample_ids_b.tolist())
        findings[microbatch] = Finding(microbatch, backward, position, self._order, self._rank, what, samples)


def _finite(x: Tensor) -> bool:
    # Detached, so that autograd saves nothing here: a recomputation does not run this, and must save the same tensors.
    return not x.is_floating_point() or bool(torch.isfinite(x.detach()).all())


def _some(items: Sequence[Any], number: int) -> str:
    """List the first of `number` items, and how many more there are."""
    more = ""
    if number > _LISTED:
        more = f" and {number - _LISTED} more"
    return ", ".join(map(str, items[:_LISTED])) + more
