"""Generation in which layers of multi-token prediction propose tokens: the texts are those of greedy decoding."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from megapar_models.build import build_stages
from megapar_models.generation import Sampling, generate, proposing, why_no_proposals
from megapar_models.stage import Stage
from torch import nn

from megapar.config.options import OptimizerConfig
from megapar.declare import context
from megapar.declare.batch import MicroBatch, Targets
from megapar.declare.random import initialize
from megapar.step.state import TrainState
from megapar.step.step import train_step
from megapar.train.trainer import assemble
from tests.support.grid import LATENT, Layout
from tests.support.multi_token import MODEL, OTHER
from tests.support.sweeps import slow_but

GREEDY = Sampling(temperature=0)
TEXT = [7, 3, 9, 9, 4, 1, 8, 2, 6, 5, 5, 3] * 6


def stage_of(model: Any, steps: int = 0) -> Stage:
    """A model; by default with random weights, or overfitted on TEXT."""
    config = Layout(model).config()
    train = replace(config.train, global_batch_size=1, seq_length=48)
    optimizer = OptimizerConfig(lr=1e-2, schedule="constant", zero_stage=0, bucket_mb=1.0)
    ctx = context.single()
    stages = build_stages(replace(config, train=train), ctx)
    initialize(stages.values(), 3)
    (stage,) = stages.values()
    state: TrainState = assemble(replace(config, train=train, optimizer=optimizer), ctx, stages)
    for step in range(steps):
        train_step(state, [batch(step % 12, model.num_nextn_predict_layers)])
    return stage.eval()


def batch(start: int, depths: int) -> MicroBatch:
    tokens = torch.tensor([TEXT[start : start + 50 + depths]])
    targets = [Targets(tokens[:, n : n + 48], torch.ones(1, 48)) for n in range(1, 2 + depths)]
    ids = torch.tensor([start])
    return MicroBatch.of_samples(tokens[:, :48], *targets[0], ids, later_targets=targets[1:])


def greedy(stage: Stage, prompts: list[list[int]], tokens: int, eod: int = -1) -> list[list[int]]:
    """Without proposals."""
    mtp, stage.mtp = stage.mtp, None
    try:
        return generate(stage, prompts, tokens, eod, GREEDY)
    finally:
        stage.mtp = mtp


LATENTS = replace(LATENT, num_nextn_predict_layers=2)
MODELS = {
    "dense": MODEL,
    "latent, experts": LATENTS,
    "windows": replace(MODEL, sliding_window=5),
    "three depths": replace(OTHER, num_nextn_predict_layers=3),
}
PROMPTS = [TEXT[:11], TEXT[5:9], [3]]


TEXTS = [(name, trained) for name in MODELS for trained in (False, True)]


@pytest.mark.parametrize(("name", "trained"), slow_but([0], TEXTS))
def test_texts_are_those_of_greedy_decoding(name: str, trained: bool) -> None:
    """Prompts of unequal lengths, in a batch and alone. Wrong proposals leave nothing behind."""
    stage = stage_of(MODELS[name], 60 * trained)
    prompts = [*PROMPTS, [1, 99, 5, 42]]
    assert not why_no_proposals(stage, prompts, 40, GREEDY)
    found = generate(stage, prompts, 40, -1, GREEDY)
    assert found == greedy(stage, prompts, 40)
    assert [len(row) for row in found] == [len(prompt) + 40 for prompt in prompts]
    assert generate(stage, prompts[1:2], 23, -1, GREEDY) == greedy(stage, prompts[1:2], 23)
    # Each row ends before its own end token.
    ends = greedy(stage, prompts, 40, eod=9)
    assert generate(stage, prompts, 40, 9, GREEDY) == ends
    assert not trained or min(map(len, ends)) < 20


def test_an_overfitted_model_reads_several_tokens_in_a_pass() -> None:
    stage = stage_of(MODEL, 60)
    with proposing(stage, [TEXT[:14]], 40) as proposer:
        for _ in range(13):
            proposer.step(torch.tensor([True]))
        assert proposer.tokens_bs[0, :40].tolist() == TEXT[:40]
        assert proposer.taken == proposer.proposed == 26


def test_wrong_proposals_are_not_taken() -> None:
    stage = stage_of(MODEL)
    with proposing(stage, [TEXT[:14]], 40) as proposer:
        for _ in range(20):
            proposer.step(torch.tensor([True]))
        assert proposer.proposed == 40
        assert proposer.taken < 10


def test_without_proposals_the_reason_is_told() -> None:
    stage = stage_of(MODEL)
    assert "--temperature 0.8 draws others" in why_no_proposals(stage, PROMPTS, 9, Sampling())
    assert "model.max_position_embeddings" in why_no_proposals(stage, PROMPTS, 2048 - 12, GREEDY)
    stage.layers["1"].rolling = nn.Module()
    stage.layers["1"].rolling.with_cache = lambda first_b, capacity: None  # type: ignore[assignment]
    assert why_no_proposals(stage, PROMPTS, 9, GREEDY).startswith("the mixer of layer 1 keeps a state")
    stage.mtp = None
    assert why_no_proposals(stage, PROMPTS, 9, GREEDY) == "the model has no layers of multi-token prediction"
