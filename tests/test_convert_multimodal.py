"""The text of a multimodal file of Hugging Face."""

import json
from pathlib import Path

import pytest
import torch
from megapar_models.convert.config_json import from_hugging_face

from megapar.base.errors import ConfigError
from tests.support.hugging_face import tensors
from tests.support.model_types import TYPES
from tests.support.published import assert_equal_logits, converted, model_of, random_batch
from tools.convert_checkpoint import NativeToHf, native_to_hf


def test_the_text_of_a_multimodal_file_is_converted_without_its_vision(tmp_path: Path) -> None:
    """Its language model is that of gemma3_text, and comes back as such."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    text = {**TYPES["gemma3_text"].fields, "final_logit_softcapping": None}
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


@pytest.mark.parametrize("text_type", ["mistral", "ministral3"])
def test_the_text_of_a_mistral3_file_is_converted_without_its_vision(text_type: str, tmp_path: Path) -> None:
    """It comes back as what it is."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    text = {**TYPES[text_type].fields, "sliding_window": 9}
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14}
    config = {"text_config": {"model_type": text_type, **text}, "vision_config": vision, "tie_word_embeddings": False}
    whole = transformers.Mistral3Config(**config)
    model = transformers.Mistral3ForConditionalGeneration._from_config(whole, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path / "theirs")
    assert any("vision" in name for name in tensors(tmp_path / "theirs"))
    stage = converted(tmp_path / "theirs", tmp_path / "ours")
    raw = json.loads((tmp_path / "theirs/config.json").read_text())
    with torch.no_grad():
        assert_equal_logits(stage, random_batch(), model(random_batch().tokens_bs).logits)
    native_to_hf(NativeToHf(tmp_path / "ours", tmp_path / "text", verify=False))
    written = json.loads((tmp_path / "text/config.json").read_text())
    assert written["model_type"] == text_type
    assert model_of(written) == stage.model
    with pytest.raises(ConfigError, match="model_type='pixtral' is not supported"):
        model_of({**raw, "text_config": {**raw["text_config"], "model_type": "pixtral"}})
