"""Gemma 1 to 3 against transformers, and in layouts against one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.convert.config_json import from_hugging_face

from megapar.errors import ConfigError
from tests.support.grid import Layout, check_on_ranks
from tests.support.hugging_face import tensors
from tests.support.published import (
    SIZES,
    Published,
    assert_equal_logits,
    converted,
    model_of,
    random_batch,
)
from tests.support.sweeps import slow_but
from tools.convert_checkpoint import NativeToHf, native_to_hf

SCALED = {
    "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
COMMON = {**SIZES, "head_dim": 10, "rms_norm_eps": 1e-3, "attention_bias": True}
FIELDS: dict[str, dict[str, Any]] = {
    "gemma": COMMON,
    "gemma2": {**COMMON, "sliding_window": 5, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**COMMON, "sliding_window": 5, "query_pre_attn_scalar": 7, "rope_parameters": SCALED},
}
FIELDS["gemma2"]["final_logit_softcapping"] = 3.0
FIELDS["gemma3_text"] |= {"sliding_window_pattern": 3, "final_logit_softcapping": 3.0}
REFUSED = {"attention_dropout": 0.1, "use_bidirectional_attention": True}
FURTHER_REFUSED = {"gemma3_text": {"attn_logit_softcapping": 2.0}}
TYPES = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 8}
LATER: list[dict[str, Any]] = [
    {"rms_norm_eps": 1e-1},
    {"hidden_activation": "silu"},
    {"layer_types": TYPES},
    {"sliding_window": 3},
    {"query_pre_attn_scalar": 13},
    {"final_logit_softcapping": None},
]
CHANGES: dict[str, list[dict[str, Any]]] = {
    "gemma": [{"rms_norm_eps": 1e-1}, {"hidden_act": "relu2"}, {"rope_parameters": YARN}],
    "gemma2": [*LATER, {"attn_logit_softcapping": None}, {"rope_parameters": YARN}],
    "gemma3_text": [
        *LATER,
        {"layer_types": None, "sliding_window_pattern": 2},
        {"rope_parameters": {"full_attention": YARN}},
    ],
}


@pytest.mark.parametrize("kind", list(FIELDS))
def test_it_computes_what_transformers_does(kind: str, tmp_path: Path) -> None:
    """Each field of config.json with another value too, or it is refused."""
    published = Published(tmp_path, kind, FIELDS[kind])
    published.check_logits_and_gradients()
    published.check_packed()
    published.check_fields(CHANGES[kind], REFUSED | FURTHER_REFUSED.get(kind, {}))
    published.check_way_back()


@pytest.mark.parametrize(
    ("kind", "sizes"),
    slow_but([1], [("gemma2", {"tp": 2, "pp": 2}), ("gemma3_text", {"cp": 2, "cp_attention": "ulysses"})]),
)
def test_it_trains_in_a_layout_as_in_one_process(kind: str, sizes: dict[str, Any]) -> None:
    check_on_ranks(Layout(model_of({"model_type": kind, **FIELDS[kind]}), **sizes))


def test_the_text_of_a_multimodal_file_is_converted_without_its_vision(tmp_path: Path) -> None:
    """Its language model is that of gemma3_text, and comes back as such."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    text = {**FIELDS["gemma3_text"], "final_logit_softcapping": None}
    vision = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    whole = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = transformers.Gemma3ForConditionalGeneration._from_config(whole, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path / "theirs")
    assert any("vision" in name for name in tensors(tmp_path / "theirs"))
    stage = converted(tmp_path / "theirs", tmp_path / "ours")
    raw = json.loads((tmp_path / "theirs/config.json").read_text())
    with torch.no_grad():
        expected_bsv = model(random_batch().tokens_bs).logits
    assert_equal_logits(stage, random_batch(), expected_bsv)
    native_to_hf(NativeToHf(tmp_path / "ours", tmp_path / "text", verify=False))
    written = json.loads((tmp_path / "text/config.json").read_text())
    assert written["model_type"] == "gemma3_text"
    assert model_of(written) == stage.model
    with pytest.raises(ConfigError, match="text_config is missing"):
        from_hugging_face({"model_type": "gemma3"})
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        from_hugging_face({**raw, "text_config": {**raw["text_config"], "final_logit_softcapping": 3.0}})
