"""A pass forward and backward before the first step, for what is compiled at its first call (`kernels.compile`)."""

import time
from collections import Counter
from collections.abc import Sequence

import torch

from megapar.base.compiled import Compiled, compiled_so_far
from megapar.config.derive import num_microbatches
from megapar.config.messages import counted
from megapar.declare.batch import MicroBatch
from megapar.declare.largest_logits import forget, measuring_modules
from megapar.declare.tally import counting_modules, end_step
from megapar.observe.observer import Observed, Observer
from megapar.step.references import with_references
from megapar.step.state import TrainState
from megapar.step.step import enter_scope


class Rehearsal(Observer):
    """Rehearses before the first step of a start."""

    def __init__(self, seen: Observed):
        self._seen = seen
        self._is_done = False

    def before_compute(self, number: int, batches: Sequence[MicroBatch]) -> None:
        if not self._is_done:
            self._is_done = True
            self._seen.say(rehearse(self._seen.state, batches))


def rehearse(state: TrainState, batches: Sequence[MicroBatch]) -> str:
    """Forward and backward over this rank's micro-batches, without an update and without a trace in the next step.

    So the first step takes as long as others. Returns a line to print: the time, graphs and graph breaks of this rank.
    A collective.
    """
    start = time.perf_counter()
    before = compiled_so_far()
    samples = state.config.train.batch_size(state.consumed_samples)
    max_microbatches = num_microbatches(state.config, samples)
    _, batches = enter_scope(state, batches)
    batches = with_references(state, batches, max_microbatches)
    nothing = torch.zeros((), device=state.ctx.device)  # what losses are multiplied by
    state.grads.zero()
    state.pipeline.step(batches, nothing, state.grads.begin, max_microbatches, nothing)
    state.grads.finish()
    end_step(counting_modules(state.stages.values()), skip_update=torch.ones_like(nothing, dtype=torch.bool))
    forget(measuring_modules(state.stages.values()))
    seconds = time.perf_counter() - start
    compiled = _in_words(compiled_so_far().since(before))
    return f"compiled in {seconds:.1f} s, before the first step; rank {state.ctx.world.rank}: {compiled}"


def _in_words(compiled: Compiled) -> str:
    """Such as "12 graphs, 0 graph breaks", with places and torch's reasons if there are breaks."""
    words = f"{counted(compiled.graphs, 'graph')}, {counted(len(compiled.breaks), 'graph break')}"
    reasons = "; ".join(f"{number} x {reason}" for reason, number in Counter(compiled.breaks).items())
    return f"{words} ({reasons})" if reasons else words
