"""A pass forward and backward before the first step, for what is compiled at its first call (`kernels.compile`)."""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from megapar.batch import MicroBatch
from megapar.config.derive import num_microbatches
from megapar.largest_logits import forget, measuring_modules
from megapar.tally import counting_modules, end_step
from megapar.train.references import with_references
from megapar.train.state import TrainState
from megapar.train.step import start_losses


def rehearse(state: TrainState, batches: Sequence[MicroBatch]) -> str:
    """Forward and backward over this rank's micro-batches, without an update and without a trace in the next step.

    So the first step takes as long as others. Returns a line to print. A collective.
    """
    start = time.perf_counter()
    samples = state.config.train.batch_size(state.consumed_samples)
    max_microbatches = num_microbatches(state.config, samples)
    batches = with_references(state, [batch.to(state.ctx.device) for batch in batches], max_microbatches)
    batches = [replace(batch, loss_sums=start_losses(state)) for batch in batches]
    nothing = torch.zeros((), device=state.ctx.device)  # what losses are multiplied by
    state.grads.zero()
    state.pipeline.step(batches, nothing, state.grads.begin, max_microbatches, nothing)
    state.grads.finish()
    end_step(counting_modules(state.stages.values()), skip_update=torch.ones_like(nothing, dtype=torch.bool))
    forget(measuring_modules(state.stages.values()))
    return f"compiled in {time.perf_counter() - start:.1f} s, before the first step"
