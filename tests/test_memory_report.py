"""Where the bytes of a rank are: what is counted lives as long as a backward pass needs it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megapar.train.dry_run import kept_for_backward
from megapar.train.kept import BETWEEN, ENDS, KeptBytes
from tests.support.grid import GPT, LLAMA, SHARED, Layout, make_state, micro_batches


@pytest.mark.parametrize("model", [LLAMA, GPT, SHARED], ids=lambda model: model.family)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_bytes_are_counted_once_and_until_the_backward_pass(model: Any, recompute: str) -> None:
    config = Layout(model, micro_batch_size=2, recompute=recompute).config()
    state = make_state(config)
    (stage,) = state.stages.values()
    # With a scale, as the runtime gives it: without one the losses of routers are freed at once.
    first, second = (replace(batch, loss_scale=torch.ones(())) for batch in micro_batches(config, state.ctx, 0)[:2])
    known = [*stage.parameters(), *stage.buffers()]
    expected = kept_for_backward(lambda: stage(None, first), known)
    kept = KeptBytes(state.stages)
    with kept.counting():
        loss = stage(None, first)
    assert kept.live.total() == kept.peak == expected
    kinds = {kind for _, kind in kept.live}
    assert kinds == ({BETWEEN, ENDS} if recompute == "full" else {BETWEEN, ENDS, "attention", "mlp"})
    with kept.counting():
        other = stage(None, second)
    assert kept.peak == 2 * expected
    loss.backward()
    assert kept.live.total() == expected
    stage(None, first)  # outside the context
    other.backward()
    assert kept.live.total() == 0
    assert sum(kept.at_peak.values()) == kept.peak == 2 * expected
