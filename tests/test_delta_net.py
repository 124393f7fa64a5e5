"""Gated delta nets in every layout: loss, gradients and updated weights as on one process, documents too."""

from dataclasses import replace
from typing import Any

import pytest
from megapar_models.generation import Sampling, generate, next_logits, why_no_cache
from megapar_models.registry import validate

from megapar.base.errors import ConfigError
from megapar.config.model_options import ModelConfig
from megapar.config.options import AdapterConfig, Config
from megapar.declare import context
from tests.support import grid, tiny_models
from tests.support.sweeps import slow_but
from tests.support.width import in_each_layout, trains_as_one_process, trains_on_single_tokens

MODEL = replace(grid.LLAMA, family="tests.support.hybrids:HEADS_FAMILY", attention_bias=False)
KIMI = replace(MODEL, family="tests.support.hybrids:CHANNELS_FAMILY")


@in_each_layout
@pytest.mark.parametrize("packed", slow_but([1], [False, True]), ids=["samples", "documents"])
def test_it_trains_as_one_process(sizes: dict[str, object], packed: bool) -> None:
    trains_as_one_process(MODEL, {**sizes, "packed": packed})


FURTHER: dict[str, dict[str, Any]] = {
    "cp 2, ring": {"cp": 2, "cp_attention": "ring"},
    "cp 2, ulysses": {"cp": 2, "cp_attention": "ulysses"},
    "cp 2 and tp 2, sequence parallel": {"cp": 2, "tp": 2, "sequence_parallel": True},
    "cp 2 and tp 2, ulysses": {"cp": 2, "tp": 2, "cp_attention": "ulysses"},
    "cp 3": {"cp": 3},
    "tp 4, more than key heads": {"tp": 4, "sequence_parallel": True},
    "cp 2, full recomputation, zero bubble": {"cp": 2, "pp": 2, "schedule": "zb-h1", "recompute": "full"},
    "selective": {"recompute": "selective"},
    "all but attention": {"recompute": "all_but_attention", "cp": 2},
    "light": {"recompute": "light", "tp": 2},
    "zb-v": {"pp": 2, "vpp": 2, "schedule": "zb-v"},
    "zero 3": {"dp": 2, "zero_stage": 3},
    "adapters": {"tp": 2, "sequence_parallel": True, "adapter": AdapterConfig(rank=3)},
    "offload": {"recompute": "full", "offload": 0.5, "cp": 2},
    "Muon by head": {"tp": 2, "dp": 2, "optimizer": "muon"},
}


FURTHER_CASES = {
    f"{layout}, {kind}": (sizes, model)
    for layout, sizes in FURTHER.items()
    for kind, model in (("by heads", MODEL), ("by channels", KIMI))
}
QUICK = ("cp 2 and tp 2, sequence parallel, by heads", "cp 2, full recomputation, zero bubble, by channels")


@pytest.mark.parametrize(
    ("sizes", "model"),
    slow_but([list(FURTHER_CASES).index(case) for case in QUICK], FURTHER_CASES.values()),
    ids=list(FURTHER_CASES),
)
def test_in_further_layouts(sizes: dict[str, object], model: ModelConfig) -> None:
    """Faults projections-cut-apart, states-cross-documents: on samples of several documents."""
    trains_as_one_process(model, {**sizes, "packed": True})


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gather", "ulysses"])
@pytest.mark.parametrize("model", [MODEL, KIMI], ids=["by heads", "by channels"])
def test_four_ranks_cut_documents_of_single_tokens(
    monkeypatch: pytest.MonkeyPatch, model: ModelConfig, form: str
) -> None:
    """Fault states-over-cp."""
    trains_on_single_tokens(monkeypatch, model, {"cp": 4, "cp_attention": form})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layer_types": ("linear_attention",) * 3}, "has 3 layers; give a type for each of the 2, or none"),
        ({"layer_types": ("full_attention", "conv")}, "conv unknown; use linear_attention and full_attention"),
        ({"linear_conv_kernel_dim": 0}, "model.linear_conv_kernel_dim=0: must be at least 1"),
        ({"linear_num_key_heads": 3}, "each key head serves as many value heads"),
    ],
)
def test_options_of_layers_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    model = replace(tiny_models.model("qwen3_5"), linear_num_key_heads=2, linear_num_value_heads=4)
    with pytest.raises(ConfigError, match=said):
        validate(Config(replace(model, **options)), 1)


@pytest.mark.parametrize("model", [MODEL, KIMI], ids=["by heads", "by channels"])
def test_it_generates_with_its_state_as_a_cache(model: ModelConfig) -> None:
    """Prompts of unequal lengths; without a cache the whole rows are computed again for each token."""
    config = tiny_models.config(model)
    stage = tiny_models.build(config, context.single())
    prompts = [[5, 3, 8], [7, 2, 2, 9, 4, 1], [3]]
    assert not why_no_cache(stage, prompts, 6)
    rows = generate(stage, prompts, 6, -1, Sampling(temperature=0.0))
    for row, prompt in zip(rows, prompts, strict=True):
        for end in range(len(prompt), len(row)):
            assert row[end] == next_logits(stage, [row[:end]])[0].argmax()
