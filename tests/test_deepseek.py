"""DeepSeek's line against transformers, with and without a latent of queries, and in layouts against one process."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.deepseek.model import DeepseekExperts, DeepseekModel
from megapar_models.glm4_moe.model import Glm4MoeModel
from megapar_models.rotary_options import RopeScaling
from safetensors.torch import load_file, save_file

from megapar.errors import CheckpointError
from tests.support.hugging_face import tensors
from tests.support.parity import check_flips, check_parity, random_model
from tests.support.sweeps import slow_but
from tests.support.width import trains_as_one_process
from tools.convert_checkpoint import HfToNative, NativeToHf, hf_to_native, native_to_hf

# YaRN whose range lies between whole pairs, and two unlike mscales.
ROPE: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "beta_fast": 2.0, "beta_slow": 0.2}
ROPE |= {"original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 1.3}
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 44,
    "moe_intermediate_size": 20,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "pad_token_id": None,
}
LATENT: dict[str, Any] = SIZES | {
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "n_routed_experts": 8,
    "rope_parameters": ROPE,
    "routed_scaling_factor": 2.5,
}
V3 = LATENT | {
    "model_type": "deepseek_v3",
    "q_lora_rank": 18,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "attention_bias": True,
    "num_mtp_layers": 0,
}
V2 = LATENT | {
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
}
LITE = LATENT | {
    "model_type": "glm4_moe_lite",
    "q_lora_rank": 18,
    "n_routed_experts": 7,
    "mlp_layer_types": ["dense", "dense", "sparse"],
}
CASES = {"v3": V3, "v3 without q rank": V3 | {"q_lora_rank": None, "norm_topk_prob": False}, "v2": V2, "lite": LITE}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_it_is_the_model_of_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    check_parity(fields, tmp_path)


# With the scores' scale, and what cos and sin are multiplied by.
CHANGED: dict[str, list[dict[str, Any]]] = {
    "v3": [
        {"rms_norm_eps": 1e-2},
        {"n_group": 2, "topk_group": 1},
        {"topk_group": 4},
        {"num_experts_per_tok": 2},
        {"routed_scaling_factor": 1.5},
        {"norm_topk_prob": False},
        *({"rope_parameters": ROPE | {name: value}} for name, value in {"factor": 4.0, "mscale": 1.5}.items()),
        {"rope_parameters": ROPE | {"mscale_all_dim": 0.4}},
    ],
    "v2": [{"topk_method": "greedy"}, {"n_group": 2, "topk_group": 1}, {"routed_scaling_factor": 1.5}],
}
REFUSED: dict[str, list[dict[str, Any]]] = {
    "v3": [
        {"rope_interleave": False},
        {"num_key_value_heads": 2},
        {"scoring_func": "softmax"},
        {"topk_method": "greedy"},
        {"moe_layer_freq": 2},
        {"attention_dropout": 0.1},
        {"hidden_act": "gelu"},
        {"head_dim": 8},
        {"mscale_all_dim": 1.0},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
    ],
    "v2": [{"norm_topk_prob": True}, {"topk_method": "other"}, {"mlp_bias": True}],
}


@pytest.mark.parametrize("name", CHANGED)
def test_each_field_of_its_config_changes_the_logits_or_is_refused(name: str, tmp_path: Path) -> None:
    check_flips(CASES[name], CHANGED[name], REFUSED[name], tmp_path)


MODEL = DeepseekModel(
    family="deepseek",
    hidden_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    head_dim=6,
    q_lora_rank=18,
    kv_lora_rank=14,
    qk_nope_head_dim=10,
    v_head_dim=7,
    attention_bias=True,
    intermediate_size=44,
    vocab_size=131,
    initializer_range=0.1,
    rope_scaling=RopeScaling(
        "yarn", factor=8.0, original_max_position_embeddings=16, beta_fast=2.0, mscale=0.7, mscale_all_dim=1.3
    ),
    moe=DeepseekExperts(
        num_experts=8,
        num_experts_per_tok=4,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=40,
        first_k_dense_replace=1,
        scoring_func="sigmoid",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        balance="bias",
        router_bias_update_rate=0.02,
    ),
)
LAYOUTS: dict[str, dict[str, object]] = {
    "tp 2 x pp 2": {"tp": 2, "pp": 2},
    "sequence parallel, cp 2 by ring": {"tp": 2, "cp": 2, "cp_attention": "ring", "sequence_parallel": True},
    "cp 2 by ulysses, ep 2, packed": {"cp": 2, "cp_attention": "ulysses", "ep": 2, "packed": True},
    "cp 2, ZeRO-3, recomputed": {"cp": 2, "zero_stage": 3, "recompute": "selective"},
}


@pytest.mark.parametrize("layout", slow_but([0], LAYOUTS))
def test_it_trains_as_one_process(layout: str) -> None:
    trains_as_one_process(MODEL, LAYOUTS[layout])


def test_queries_without_a_latent_train_as_one_process() -> None:
    trains_as_one_process(replace(MODEL, q_lora_rank=0), {"tp": 2, "sequence_parallel": True})


def test_fp8_is_dequantized_and_layers_of_prediction_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under the type of Kimi K2. Blocks of kv_a are ragged: 136 rows, 32 columns. The bias of a router keeps fp32."""
    model = random_model(V3 | {"kv_lora_rank": 130}).to(torch.bfloat16)
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
    hf_to_native(HfToNative(tmp_path / "hf", tmp_path / "native", verify=False))
    assert "left out: tensors whose names begin with model.layers.3." in capsys.readouterr().err
    native_to_hf(NativeToHf(tmp_path / "native", tmp_path / "back", verify=False))
    back = tensors(tmp_path / "back")
    rows = torch.cat((values[:128].double() * 0.25, values[128:].double() * 0.0625))
    assert back[f"{name}.weight"].dtype == torch.bfloat16
    assert torch.equal(back[f"{name}.weight"].double(), rows)
    assert torch.equal(back[bias], stored[bias])
    config_path.write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(CheckpointError, match=r"unexpected model\.layers\.3\.eh_proj\.weight"):
        hf_to_native(HfToNative(tmp_path / "hf", tmp_path / "again", verify=False))


GLM = SIZES | {
    "model_type": "glm4_moe",
    "num_key_value_heads": 2,
    "head_dim": 12,
    "n_routed_experts": 7,
    "attention_bias": True,
    "use_qk_norm": True,
    "num_mtp_layers": 0,
    "routed_scaling_factor": 1.5,
}


def test_glm_is_the_model_of_transformers(tmp_path: Path) -> None:
    check_parity(GLM, tmp_path)


def test_each_field_of_the_config_of_glm_changes_the_logits_or_is_refused(tmp_path: Path) -> None:
    changed: list[dict[str, Any]] = [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
        {"routed_scaling_factor": 2.5},
        {"num_experts_per_tok": 2},
        {"norm_topk_prob": False},
    ]
    check_flips(GLM, changed, [{"topk_method": "greedy"}, {"attention_dropout": 0.1}, {"hidden_act": "gelu"}], tmp_path)


GLM_MODEL = Glm4MoeModel(
    family="glm4_moe",
    hidden_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    attention_bias=True,
    qk_norm=True,
    intermediate_size=44,
    vocab_size=131,
    initializer_range=0.1,
    moe=replace(MODEL.moe, n_group=1, topk_group=1),
)


@pytest.mark.slow
def test_glm_trains_as_one_process() -> None:
    trains_as_one_process(GLM_MODEL, {"tp": 2, "ep": 2, "etp": 1})
