"""Quantized files of Hugging Face: experts in mxfp4, and FP8 in blocks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megapar.base.errors import CheckpointError
from tests.support.hugging_face import tensors
from tests.support.model_types import TYPES
from tests.support.published import random_model
from tools.convert_checkpoint import HfToNative, NativeToHf, hf_to_native, native_to_hf


def test_experts_in_mxfp4_are_those_of_transformers(tmp_path: Path) -> None:
    """Faults of nibbles, scales and the transpose: bf16 weights, and what is written back, are theirs bitwise."""
    integration = pytest.importorskip("transformers.integrations.mxfp4", reason="not run: needs transformers")
    fields = {**TYPES["gpt_oss"].fields, "hidden_size": 64, "intermediate_size": 32}
    model = random_model("gpt_oss", fields).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "hf")
    (path,) = (tmp_path / "hf").glob("*.safetensors")
    stored = load_file(path)
    generator = torch.Generator().manual_seed(2)
    expected = dict(stored)
    for name, tensor in list(stored.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, columns, rows = tensor.shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 126, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = integration.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        assert expected[name].shape == tensor.shape
    save_file(stored, path, {"format": "pt"})
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    hf_to_native(HfToNative(tmp_path / "hf", tmp_path / "native", verify=False))
    native_to_hf(NativeToHf(tmp_path / "native", tmp_path / "back", verify=False))
    back = tensors(tmp_path / "back")
    assert back.keys() == expected.keys()
    for name, tensor in expected.items():
        assert back[name].dtype == torch.bfloat16
        assert torch.equal(back[name], tensor), name
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_fp8_is_dequantized_and_layers_of_prediction_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under the type of Kimi K2. Blocks of kv_a are ragged: 136 rows, 32 columns. The bias of a router keeps fp32."""
    fields = {**TYPES["deepseek_v3"].fields, "hidden_size": 32, "num_hidden_layers": 3, "kv_lora_rank": 130}
    model = random_model("deepseek_v3", fields).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "hf")
    (path,) = (tmp_path / "hf").glob("*.safetensors")
    stored = load_file(path)
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa"
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    values = (torch.randn(136, 32, generator=torch.Generator().manual_seed(3)) * 8).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.25], [0.0625]])
    stored |= {f"{name}.weight": values, f"{name}.weight_scale_inv": scales, bias: stored[bias].float() + 1e-5}
    stored |= {"model.layers.3.eh_proj.weight": torch.ones(32, 64), "model.layers.3.enorm.weight": torch.ones(32)}
    save_file(stored, path, {"format": "pt"})
    config_path = tmp_path / "hf" / "config.json"
    config = json.loads(config_path.read_text()) | {"model_type": "kimi_k2", "num_nextn_predict_layers": 1}
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config_path.write_text(json.dumps(config))
    hf_to_native(HfToNative(tmp_path / "hf", tmp_path / "native", verify=False, mtp=False))
    assert "left out: 2 tensors model.layers.3.*" in capsys.readouterr().err
    native_to_hf(NativeToHf(tmp_path / "native", tmp_path / "back", verify=False))
    back = tensors(tmp_path / "back")
    rows = torch.cat((values[:128].double() * 0.25, values[128:].double() * 0.0625))
    assert back[f"{name}.weight"].dtype == torch.bfloat16
    assert torch.equal(back[f"{name}.weight"].double(), rows)
    assert torch.equal(back[bias], stored[bias])
    config_path.write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(CheckpointError, match=r"unexpected model\.layers\.3\.eh_proj\.weight"):
        hf_to_native(HfToNative(tmp_path / "hf", tmp_path / "again", verify=False, mtp=False))
