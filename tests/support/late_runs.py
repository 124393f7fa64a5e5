"""Two steps of a layout, with transfers on time and as late as CUDA allows (tests/support/late.py)."""

from dataclasses import replace

import pytest

from megapar.step.step import train_step
from tests.support.grid import Layout, make_state, micro_batches
from tests.support.late import arrive_late
from tests.support.runs import Bits, bits


def two_steps(layout: Layout) -> Bits:
    """The state after two steps. Where gathers of weights may run under the forward pass, they do."""
    config = layout.config()
    if layout.overlap:
        config = replace(config, optimizer=replace(config.optimizer, overlap_param_gather=layout.zero_stage == 1))
    state = make_state(config)
    for step in range(2):
        train_step(state, micro_batches(config, state.ctx, step))
    state.weights.wait()
    return bits(state)


def on_time_and_late(layout: Layout) -> tuple[Bits, Bits]:
    """The late state, and the one on time."""
    expected = two_steps(layout)
    with pytest.MonkeyPatch.context() as patch:
        arrive_late(patch)
        return two_steps(layout), expected
