"""The text of a multimodal file of Hugging Face."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.convert.config_json import from_hugging_face
from safetensors.torch import save_file

from megapar.base.errors import ConfigError
from tests.support.hugging_face import assert_same_tensors, refused, tensors
from tests.support.model_types import TYPES
from tests.support.published import assert_equal_logits, converted, model_of, random_batch
from tests.support.sweeps import slow_but
from tools.convert_checkpoint import HfToNative, NativeToHf, hf_to_native, native_to_hf


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
    native_to_hf(NativeToHf(tmp_path / "ours", tmp_path / "whole", like=tmp_path / "theirs", verify=False))
    assert_same_tensors(tmp_path / "whole", tmp_path / "theirs")
    assert json.loads((tmp_path / "whole/config.json").read_text()) == raw
    with pytest.raises(ConfigError, match="text_config is missing"):
        from_hugging_face({"model_type": "gemma3"})
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        from_hugging_face({**raw, "text_config": {**raw["text_config"], "final_logit_softcapping": 3.0}})


@pytest.mark.parametrize("text_type", ["mistral", "ministral3", "mistral4"])
def test_the_text_of_a_mistral3_file_is_converted_without_its_vision(text_type: str, tmp_path: Path) -> None:
    """It comes back as what it is."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    text = {**TYPES[text_type].fields, **({} if text_type == "mistral4" else {"sliding_window": 9})}
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
    native_to_hf(NativeToHf(tmp_path / "ours", tmp_path / "whole", like=tmp_path / "theirs", verify=False))
    assert_same_tensors(tmp_path / "whole", tmp_path / "theirs")
    assert json.loads((tmp_path / "whole/config.json").read_text()) == raw
    with pytest.raises(ConfigError, match="model_type='pixtral' is not supported"):
        model_of({**raw, "text_config": {**raw["text_config"], "model_type": "pixtral"}})


GEMMA4_VISION = {
    "gemma4": {
        **{"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16},
    },
    "gemma4_unified": {
        **{"patch_size": 2, "pooling_kernel_size": 1, "mm_embed_dim": 8, "mm_posemb_size": 4},
        "output_proj_dims": 8,
    },
}


@pytest.mark.parametrize("kind", slow_but([0], GEMMA4_VISION))
def test_the_text_of_a_gemma4_file_is_converted_without_images_and_sound(kind: str, tmp_path: Path) -> None:
    """Its tables and projections of layers come back as one each, beside what an import leaves out."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    # Without a padding token transformers fails.
    text = {"model_type": f"{kind}_text", **TYPES[f"{kind}_text"].fields, "pad_token_id": 0}
    whole = transformers.AutoConfig.for_model(kind, text_config=text, vision_config=GEMMA4_VISION[kind])
    model = transformers.AutoModelForImageTextToText.from_config(whole, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path / "theirs")
    assert any("vision" in name for name in tensors(tmp_path / "theirs"))
    hf_to_native(HfToNative(tmp_path / "theirs", tmp_path / "ours"))  # with a comparison of logits
    stage = converted(tmp_path / "theirs", tmp_path / "again")
    native_to_hf(NativeToHf(tmp_path / "ours", tmp_path / "text"))
    written = json.loads((tmp_path / "text/config.json").read_text())
    assert written["model_type"] == "gemma4_text"
    assert model_of(written) == stage.model
    native_to_hf(NativeToHf(tmp_path / "ours", tmp_path / "whole", like=tmp_path / "theirs", verify=False))
    assert_same_tensors(tmp_path / "whole", tmp_path / "theirs")


def test_the_text_of_a_llama4_file_is_converted_without_its_vision(tmp_path: Path) -> None:
    """Both comparisons are with transformers, and the export puts back what the import leaves out."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "vision_output_dim": 16}
    vision |= {"projector_input_dim": 16, "projector_output_dim": 16}
    whole = transformers.Llama4Config(text_config=dict(TYPES["llama4_text"].fields), vision_config=vision)
    model = transformers.Llama4ForConditionalGeneration._from_config(whole, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(0.1 * torch.randn(param.shape, generator=generator))
    model.save_pretrained(tmp_path / "theirs")
    assert any("vision" in name for name in tensors(tmp_path / "theirs"))
    hf_to_native(HfToNative(tmp_path / "theirs", tmp_path / "ours"))
    stage = converted(tmp_path / "theirs", tmp_path / "again")
    raw = json.loads((tmp_path / "theirs/config.json").read_text())
    with torch.no_grad():
        assert_equal_logits(stage, random_batch(), model(random_batch().tokens_bs).logits)
    native_to_hf(NativeToHf(tmp_path / "ours", tmp_path / "text"))
    assert model_of(json.loads((tmp_path / "text/config.json").read_text())) == stage.model
    native_to_hf(NativeToHf(tmp_path / "ours", tmp_path / "whole", like=tmp_path / "theirs", verify=False))
    assert_same_tensors(tmp_path / "whole", tmp_path / "theirs")
    assert json.loads((tmp_path / "whole/config.json").read_text()) == raw


VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "out_hidden_size": 48,
    "patch_size": 4,
}
VISION |= {"num_position_embeddings": 16}


def save_qwen(folder: Path, text_type: str) -> Any:
    """Save a whole model of Qwen3.5 as it is published: its text has norms in fp32 and a layer of prediction."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    kind, text = text_type.removesuffix("_text"), {"model_type": text_type, **TYPES[text_type].fields}
    config = transformers.AutoConfig.for_model(kind, text_config=text, vision_config=VISION, tie_word_embeddings=False)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(0.1 * torch.randn(param.shape, generator=generator) - 2 * name.endswith("A_log"))
    model.save_pretrained(folder)
    stored = {"mtp.fc.weight": torch.randn(8, 4), "mtp.norm.weight": torch.randn(4)}
    for name, tensor in tensors(folder).items():
        kept = name.endswith(("A_log", "linear_attn.norm.weight"))
        stored[name] = tensor if kept else tensor.bfloat16().contiguous()
    path = folder / "config.json"
    path.write_text(path.read_text().replace("float32", "bfloat16"))
    save_file(stacked(stored) if "moe" in kind else stored, folder / "model.safetensors", {"format": "pt"})
    return model


def stacked(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with those of all experts of a layer in one, as published files have them."""
    found = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    for layer in range(4):
        start = f"model.language_model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([stored[f"{start}.{expert}.{name}_proj.weight"] for expert in range(5)])
            for name in ("gate", "up", "down")
        )
        found |= {f"{start}.gate_up_proj": torch.cat([gate, up], 1), f"{start}.down_proj": down}
    return found


def test_the_text_of_a_step3p7_file_is_converted_without_its_vision(tmp_path: Path) -> None:
    """It comes back as step3p5, and as what it is with the original beside it, with which it is compared."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    whole = transformers.AutoConfig.for_model(
        "step3p7", text_config=TYPES["step3p5"].fields, vision_config={**vision, "mlp_ratio": 1.25}
    )
    model = transformers.Step3p7ForConditionalGeneration._from_config(whole, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path / "theirs")
    assert any("vision" in name for name in tensors(tmp_path / "theirs"))
    stage = converted(tmp_path / "theirs", tmp_path / "ours")
    with torch.no_grad():
        assert_equal_logits(stage, random_batch(), model(random_batch().tokens_bs).logits)
    native_to_hf(NativeToHf(tmp_path / "ours", tmp_path / "text", verify=False))
    written = json.loads((tmp_path / "text/config.json").read_text())
    assert written["model_type"] == "step3p5"
    assert model_of(written) == stage.model
    native_to_hf(NativeToHf(tmp_path / "ours", tmp_path / "whole", like=tmp_path / "theirs", verify=False))
    assert_same_tensors(tmp_path / "whole", tmp_path / "theirs")
    hf_to_native(HfToNative(tmp_path / "whole", tmp_path / "compared"))
    assert (tmp_path / "compared/parity.json").exists()
    with pytest.raises(ConfigError, match=r"no class of logits for model_type='step3p5'.*--no-verify"):
        hf_to_native(HfToNative(tmp_path / "text", tmp_path / "alone"))


@pytest.mark.parametrize("text_type", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_an_export_puts_back_what_the_import_left_out(
    text_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tower of images and layers of prediction, bit by bit, with the names and the dtypes of the source."""
    save_qwen(tmp_path / "theirs", text_type)
    hf_to_native(HfToNative(tmp_path / "theirs", tmp_path / "ours", mtp=False))  # with a comparison of logits
    said = capsys.readouterr().err
    assert re.findall(r"left out: .*", said) == [
        "left out: 2 tensors mtp.*, 144 bytes",
        "left out: 21 tensors model.visual.*, 21,896 bytes",
    ]
    like = tmp_path / "theirs"
    native_to_hf(NativeToHf(tmp_path / "ours", tmp_path / "whole", like=like, verify=False))
    assert_same_tensors(tmp_path / "whole", like)
    assert json.loads((tmp_path / "whole/config.json").read_text()) == json.loads((like / "config.json").read_text())
    # Without --like it is the text alone.
    native_to_hf(NativeToHf(tmp_path / "ours", tmp_path / "text", verify=False))
    assert json.loads((tmp_path / "text/config.json").read_text())["model_type"] == text_type
    raw = json.loads((like / "config.json").read_text())
    raw["text_config"]["rms_norm_eps"] = 0.5
    (like / "config.json").write_text(json.dumps(raw))
    refused(
        ConfigError, NativeToHf(tmp_path / "ours", tmp_path / "other", like=like), "model.rms_norm_eps 0.5 in place"
    )
