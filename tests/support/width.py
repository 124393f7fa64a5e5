"""Proves a newcomer's addition without an edit of megapar: it computes what it says, and trains in layouts alike."""

from collections.abc import Mapping

import pytest
import torch
from megapar_tools.verify import batches
from torch import Tensor

from megapar.config.model_options import ModelConfig
from megapar.config.options import Config
from megapar.declare import context
from megapar.step.step import train_step
from tests.support import close, grid, reference_models, rules, tiny_models
from tests.support.grid import Layout, check_on_ranks
from tests.support.sweeps import slow_but

LAYOUTS: dict[str, dict[str, object]] = {
    "tp 2": {"tp": 2},
    "pp 2 with vpp 2": {"pp": 2, "vpp": 2, "schedule": "interleaved"},
    "cp 2 with ZeRO-3": {"cp": 2, "zero_stage": 3},
}
in_each_layout = pytest.mark.parametrize("sizes", slow_but([0], LAYOUTS.values()), ids=list(LAYOUTS))


def trains_as_one_process(model: ModelConfig, sizes: Mapping[str, object]) -> None:
    """Two steps on the ranks of a layout: loss, norm, and every gradient and weight are those of one process.

    `model` has at least four layers, so each of the two pipeline ranks has two stages.
    """
    check_on_ranks(Layout(model, micro_batch_size=3, **sizes))  # type: ignore[arg-type]


def sent_over_pp(config: Config) -> int:
    """Return the bytes that this rank sends to other pipeline stages in a step."""
    state = grid.make_state(config)
    before = state.ctx.traffic().get("pp", 0)
    train_step(state, grid.micro_batches(config, state.ctx, 0))
    return state.ctx.traffic()["pp"] - before


def computes_as_its_reference(model: ModelConfig) -> None:
    """Loss and every gradient in one process are those of `Family.reference`, in fp64 and with random weights."""
    config = tiny_models.config(model)
    stage = tiny_models.build(config, context.single())
    batch = tiny_models.batch(config.model)
    loss = stage(None, batch)
    loss.backward()
    tensors = tiny_models.random_tensors(config.model)
    expected, gradients = reference_models.loss_and_gradients(config.model, tensors, [batch])
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    close.assert_close(rules.gradients(stage), gradients)


def trains_on_single_tokens(monkeypatch: pytest.MonkeyPatch, model: ModelConfig, sizes: Mapping[str, object]) -> None:
    """As `trains_as_one_process`, on samples of 24 tokens with documents of a single token among others.

    Of eight runs of three tokens, those of 4 context-parallel ranks, single tokens are the first and the last of a
    sample, the last of a run and the first of the next. A document goes over a whole run, and others begin with one.
    """

    def documents(samples: Tensor, length: int) -> Tensor:
        starts = torch.arange(len(samples))[:, None] * length + torch.tensor([0, 1, 5, 6, 7, 12, 15, 16, 20, 23])
        return torch.cat((starts.flatten(), torch.tensor([len(samples) * length]))).int()

    monkeypatch.setattr(batches, "four_documents", documents)
    monkeypatch.setattr(grid, "reference", grid.reference.__wrapped__)  # whose cache knows no documents
    trains_as_one_process(model, {**sizes, "packed": True})
