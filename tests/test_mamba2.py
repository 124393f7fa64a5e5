"""Mamba-2 in every layout: loss, gradients and updated weights as on one process, documents too. And its families."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_kernels.chunks import CHUNK
from megapar_models.families.llama import LLAMA as LLAMA_FAMILY
from megapar_models.families.llama import LlamaStage
from megapar_models.generation import Sampling, generate, next_logits, why_no_cache
from megapar_models.layer_kind import LayerKind
from megapar_models.mamba2 import Mamba2
from megapar_models.norms import NormRule
from torch.utils.flop_counter import FlopCounterMode

from megapar.base.errors import ConfigError
from megapar.comm.axis import Axis
from megapar.config.model_options import ModelConfig
from megapar.context_parallel.state_space import StateSpace
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from tests.support import grid, tiny_models
from tests.support.model_types import TYPES
from tests.support.published import published_model, random_model
from tests.support.sweeps import slow_but
from tests.support.width import in_each_layout, trains_as_one_process, trains_on_single_tokens
from tools.convert_checkpoint import HfToNative, hf_to_native


class MambaStage(LlamaStage):
    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        rule = Mamba2(4, 10, 2, 7, 4, NormRule(1e-4))
        return replace(kind, mixer=rule, rotary=None, qk_norm=False) if number % 2 else kind


FAMILY = replace(LLAMA_FAMILY, name="mamba", stage=MambaStage)
MODEL = replace(grid.LLAMA, family=f"{__name__}:FAMILY", num_key_value_heads=4, attention_bias=False)


@in_each_layout
@pytest.mark.parametrize("packed", slow_but([1], [False, True]))
def test_it_trains_as_one_process(sizes: dict[str, object], packed: bool) -> None:
    trains_as_one_process(MODEL, {**sizes, "packed": packed})


FURTHER: dict[str, dict[str, Any]] = {
    "cp 2, ring": {"cp": 2, "cp_attention": "ring"},
    "cp 2, ulysses": {"cp": 2, "cp_attention": "ulysses"},
    "cp 2 and tp 2, sequence parallel": {"cp": 2, "tp": 2, "sequence_parallel": True},
    "cp 2 and tp 2, ulysses": {"cp": 2, "tp": 2, "cp_attention": "ulysses"},
    "cp 4, ulysses, more than groups": {"cp": 4, "cp_attention": "ulysses"},
    "cp 3": {"cp": 3},
    "tp 4, more than groups": {"tp": 4, "sequence_parallel": True},
    "cp 2, full recomputation, zero bubble": {"cp": 2, "pp": 2, "schedule": "zb-h1", "recompute": "full"},
    "selective": {"recompute": "selective"},
    "all but attention": {"recompute": "all_but_attention", "cp": 2},
    "light": {"recompute": "light", "tp": 2},
    "zb-v": {"pp": 2, "vpp": 2, "schedule": "zb-v"},
    "zero 3": {"dp": 2, "zero_stage": 3},
}


@pytest.mark.parametrize("name", slow_but([1, 2, 6], FURTHER))
def test_in_further_layouts(name: str) -> None:
    trains_as_one_process(MODEL, {**FURTHER[name], "packed": True})


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gather", "ulysses"])
def test_four_ranks_cut_documents_of_single_tokens(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Fault states-over-cp."""
    trains_on_single_tokens(monkeypatch, MODEL, {"cp": 4, "cp_attention": form})


GENERATING = [TYPES[name] for name in ("nemotron_h", "falcon_h1", "bamba", "granitemoehybrid", "mamba2")]


@pytest.mark.parametrize(
    "model",
    [MODEL, *slow_but([0, 1], (published_model(case.model_type, case.fields) for case in GENERATING))],
    ids=["layers beside attention", *(case.model_type for case in GENERATING)],
)
def test_it_generates_with_its_state_as_a_cache(model: ModelConfig) -> None:
    """Prompts of unequal lengths; without a cache the whole rows are computed again for each token."""
    stage = tiny_models.build(tiny_models.config(model), context.single())
    prompts = [[5, 3, 8], [7, 2, 2, 9, 4, 1], [3]]
    assert not why_no_cache(stage, prompts, 6)
    rows = generate(stage, prompts, 6, -1, Sampling(temperature=0.0))
    for row, prompt in zip(rows, prompts, strict=True):
        for end in range(len(prompt), len(row)):
            assert row[end] == next_logits(stage, [row[:end]])[0].argmax()


def test_the_flops_of_a_token_are_those_of_the_products() -> None:
    """The product of pairs computes all of a chunk, and those up to a token are needed."""
    core = StateSpace(Axis("cp"), "gather", [0, 0, 1, 1], 10, 7, torch.device("cpu"))
    x, b = torch.zeros(2 * CHUNK, 1, 4, 10), torch.zeros(2 * CHUNK, 1, 2, 7)
    tokens = torch.zeros(1, 2 * CHUNK, dtype=torch.int64)
    batch = MicroBatch.of_samples(tokens, tokens, torch.ones(tokens.shape), torch.arange(1))
    with FlopCounterMode(display=False) as counter:
        core(x, x[..., 0], x[..., 0], b, b, batch)
    not_needed = 2 * (2 * 7 + 4 * 10) * (CHUNK - 1) / 2
    assert counter.get_total_flops() == 2 * CHUNK * (core.flops_per_token(2 * CHUNK) + not_needed)


def test_tp_that_does_not_divide_the_heads_is_refused() -> None:
    model = published_model("bamba", {**TYPES["bamba"].fields, "num_attention_heads": 12})
    with pytest.raises(ConfigError, match="tp deals heads of Mamba-2; use tp 1, 2 or 3"):
        grid.Layout(model, tp=4).config()


def test_a_layer_has_a_branch() -> None:
    with pytest.raises(ValueError, match="a layer has one of them"):
        LayerKind(norm=NormRule(1e-5), mixer="none", mlp="none")


def test_a_pattern_of_another_length_is_refused() -> None:
    model = published_model("nemotron_h", TYPES["nemotron_h, no experts"].fields)
    wrong = replace(model, hybrid_override_pattern="M*-")
    with pytest.raises(ConfigError, match="has 3 layers; give a letter for each of the 4"):
        grid.Layout(wrong).config()


def test_small_time_steps_of_nemotron_h_are_those_of_the_reference(tmp_path: Path) -> None:
    """Fault time-steps-clamped: transformers lets none be below time_step_min. Without that its logits judge."""
    case = TYPES["nemotron_h, no experts"]
    theirs = random_model(case.model_type, {**case.fields, "time_step_min": 0.001})
    with torch.no_grad():
        for name, param in theirs.named_parameters():
            if name.endswith("dt_bias"):
                param.fill_(-8.0)
    theirs.save_pretrained(tmp_path / "theirs")
    hf_to_native(HfToNative(tmp_path / "theirs", tmp_path / "ours", verify=True))
    assert (tmp_path / "ours/parity.json").exists()
