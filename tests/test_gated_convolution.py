"""Gated short convolutions in every layout: loss, gradients and updated weights as on one process, documents too."""

from dataclasses import replace
from typing import Any

import pytest
from megapar_models.families.lfm2 import Lfm2Model
from megapar_models.generation import Sampling, generate, next_logits, why_no_cache
from megapar_models.registry import validate

from megapar.base.errors import ConfigError
from megapar.config.options import Config, ParallelConfig
from megapar.declare import context
from tests.support import tiny_models
from tests.support.sweeps import slow_but
from tests.support.width import in_each_layout, trains_as_one_process

MODEL = Lfm2Model(
    family="lfm2",
    hidden_size=36,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    intermediate_size=44,
    vocab_size=131,
    initializer_range=0.1,
    layer_types=("conv", "full_attention", "conv", "conv"),
    conv_width=6,
    conv_bias=True,
)


@in_each_layout
@pytest.mark.parametrize("packed", [False, True], ids=["samples", "documents"])
def test_it_trains_as_one_process(sizes: dict[str, object], packed: bool) -> None:
    trains_as_one_process(MODEL, {**sizes, "packed": packed})


FURTHER: dict[str, dict[str, Any]] = {
    "cp 3": {"cp": 3},
    "cp 2 and tp 2, sequence parallel": {"cp": 2, "tp": 2, "sequence_parallel": True},
    "tp 4, more than key heads": {"tp": 4, "sequence_parallel": True},
    "cp 2, full recomputation, zero bubble": {"cp": 2, "pp": 2, "schedule": "zb-h1", "recompute": "full"},
    "selective": {"recompute": "selective"},
    "all but attention": {"recompute": "all_but_attention", "cp": 2},
    "light": {"recompute": "light", "tp": 2},
    "zb-v": {"pp": 2, "vpp": 2, "schedule": "zb-v"},
    "zero 3": {"dp": 2, "zero_stage": 3},
}


@pytest.mark.parametrize("sizes", slow_but([1], FURTHER.values()), ids=list(FURTHER))
def test_in_further_layouts(sizes: dict[str, object]) -> None:
    trains_as_one_process(MODEL, {**sizes, "packed": True})


@pytest.mark.parametrize("width", [1, 3, 7])
def test_it_generates_with_its_last_inputs_as_a_cache(width: int) -> None:
    """Prompts of unequal lengths; without a cache the whole rows are computed again for each token."""
    config = tiny_models.config(replace(MODEL, conv_width=width))
    stage = tiny_models.build(config, context.single())
    prompts = [[5, 3, 8], [7, 2, 2, 9, 4, 1], [3]]
    assert not why_no_cache(stage, prompts, 6)
    rows = generate(stage, prompts, 6, -1, Sampling(temperature=0.0))
    for row, prompt in zip(rows, prompts, strict=True):
        for end in range(len(prompt), len(row)):
            assert row[end] == next_logits(stage, [row[:end]])[0].argmax()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ("conv",) * 3}, "has 3 layers; give a type for each of the 4"),
        ({"layer_types": ("convolution",) * 4}, "convolution unknown; use conv, full_attention"),
        ({"conv_width": 0}, "conv_width=0: must be at least 1"),
    ],
)
def test_options_that_mean_nothing_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validate(Config(replace(MODEL, **changes)), 1)


def test_channels_that_tp_does_not_deal_are_refused() -> None:
    """Twelve heads of attention would fit tp 6; 33 channels do not."""
    model = replace(MODEL, hidden_size=33, num_attention_heads=12, num_key_value_heads=6, intermediate_size=48)
    with pytest.raises(ConfigError, match="tp deals the channels of a convolution evenly; use tp 1 or 3"):
        validate(Config(model, parallel=ParallelConfig(tp=6)), 6)
