"""Mixtures of experts from and to Hugging Face, from one tensor an expert and from stacked ones; dense checkpoints as
their start."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megapar_models.build import build_stages
from megapar_models.convert.config_json import from_hugging_face, to_hugging_face, warnings_of
from megapar_models.convert.export_config import computed
from megapar_models.convert.parity import load_fp32, native_logits
from megapar_models.convert.saved import saved_config
from megapar_models.convert.stream import write_weights
from megapar_models.registry import FAMILIES, presets, validate, weight_options
from safetensors.torch import save_file
from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError
from megapar.checkpoint.format import read_manifest, write_manifest
from megapar.checkpoint.load import Reader
from megapar.config.model_options import ModelConfig, MoEConfig
from megapar.config.options import CheckpointConfig, Config, DataConfig
from megapar.declare import random
from megapar.declare.context import single
from megapar.declare.params import Piece, spec_of
from megapar.declare.random import initialize
from megapar.expert_parallel.balance import Router
from megapar.train import checkpoints, trainer
from tests.support import reference_models, tiny_models
from tests.support.checkpoints import edit_manifest
from tests.support.hugging_face import Case, assert_parity, assert_same_tensors, refused, save_model, sizes, tensors
from tests.support.model_types import TYPES
from tests.support.options import load
from tests.support.published import random_model
from tests.support.sweeps import slow_but
from tools.convert_checkpoint import (
    HfToNative,
    NativeToDcp,
    NativeToHf,
    Upcycle,
    hf_to_native,
    native_to_dcp,
    native_to_hf,
    upcycle_dense,
)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 528, "rope_theta": 5000.0}
CASES = [
    Case("mixtral", {"rms_norm_eps": 1e-3}),
    Case("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3, "tie_word_embeddings": True}),
    Case("qwen3_moe", {"norm_topk_prob": True, "rope_parameters": YARN}),
    Case("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    Case("qwen3_moe", {"norm_topk_prob": True, "num_hidden_layers": 4, "decoder_sparse_step": 2}),
    Case("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [0, 2], "hidden_act": "gelu_pytorch_tanh"}),
]
AN_EXPERT = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.4.w1.weight",
    "qwen3_moe": "model.layers.1.mlp.experts.4.gate_proj.weight",
}


def model_of(raw: dict[str, Any]) -> ModelConfig:
    return validate(replace(Config(), model=from_hugging_face(raw)), 1).model


def native_tensors(folder: Path) -> dict[str, Tensor]:
    manifest = read_manifest(folder)
    with Reader(folder, manifest) as reader:
        return {name.removeprefix("main."): reader.tensor(name) for name in manifest.tensors}


# There and back


@pytest.mark.parametrize("case", slow_but([0, 4], CASES), ids=str)
def test_experts_come_back_bitwise_and_logits_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    """Fault converted-experts-lost: one tensor an expert, as save_pretrained writes it, and all experts of a layer in
    one, as transformers has them in memory. norm_topk_prob both ways. The plain version has the same logits."""
    source = save_model(tmp_path / "hf", case)
    stacked = save_model(tmp_path / "stacked", case, save_original_format=False)
    assert AN_EXPERT[case.kind] in tensors(source)
    assert AN_EXPERT[case.kind] not in tensors(stacked)
    native = tmp_path / "native"
    hf_to_native(HfToNative(source, native))
    assert_parity(native)
    hf_to_native(HfToNative(stacked, tmp_path / "unstacked", verify=False))
    weights = native_tensors(native)
    for name, tensor in native_tensors(tmp_path / "unstacked").items():
        assert torch.equal(weights[name], tensor), name

    raw = json.loads((source / "config.json").read_text())
    model = model_of(raw)
    assert load(["--config", str(native / "config.toml")]).config.model == model
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source)
    tokens_bs = torch.randint(model.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    expected = theirs(tokens_bs).logits.detach()
    torch.testing.assert_close(reference_models.logits(model, weights, tokens_bs), expected, rtol=1e-5, atol=1e-5)

    (native / "config.json").unlink()
    native_to_hf(NativeToHf(native, tmp_path / "own"))
    assert_same_tensors(tmp_path / "own", source)
    assert_parity(tmp_path / "own")
    own = json.loads((tmp_path / "own" / "config.json").read_text())
    assert model_of(own) == model


def test_a_bf16_mixture_comes_back_with_its_own_config(tmp_path: Path) -> None:
    """In shards of stacked experts, each read from its place."""
    source = save_model(tmp_path / "hf", CASES[2], torch.bfloat16)
    stacked = save_model(
        tmp_path / "stacked", CASES[2], torch.bfloat16, save_original_format=False, max_shard_size="20KB"
    )
    assert len(list(stacked.glob("*.safetensors"))) > 2
    hf_to_native(HfToNative(stacked, tmp_path / "native", verify=False))
    native_to_hf(NativeToHf(tmp_path / "native", tmp_path / "back"))
    assert_same_tensors(tmp_path / "back", source)
    copied = json.loads((tmp_path / "back" / "config.json").read_text())
    raw = json.loads((stacked / "config.json").read_text())
    assert copied.pop("torch_dtype") == raw.pop("dtype") == "bfloat16"
    assert copied == raw


IN_FP32 = {
    "deepseek_v3": ("e_score_correction_bias",),
    "dots1": ("e_score_correction_bias",),
    "glm4_moe": ("e_score_correction_bias",),
    "solar_open": ("e_score_correction_bias",),
    "ernie4_5_moe": ("e_score_correction_bias", "mlp.gate.weight"),
    "minimax_m2": ("e_score_correction_bias", "block_sparse_moe.gate.weight"),
    "qwen3_5_text": ("A_log", "linear_attn.norm.weight"),  # and Qwen3.6 has none
}


@pytest.mark.parametrize("name", slow_but([0, 4], [*IN_FP32]))
def test_what_a_bf16_file_has_in_fp32_comes_back_bitwise(name: str, tmp_path: Path) -> None:
    """With values that bf16 does not hold. The training is one of bf16. A layer of prediction of ERNIE is left out."""
    random_model(TYPES[name].model_type, TYPES[name].fields).save_pretrained(tmp_path / "fp32")
    stored = tensors(tmp_path / "fp32")
    kept = {key for key in stored if key.endswith(IN_FP32[name])}
    assert len(kept) >= len(IN_FP32[name])
    rounded = {key: tensor if key in kept else tensor.bfloat16() for key, tensor in stored.items()}
    assert any((tensor != tensor.bfloat16()).any() for key, tensor in stored.items() if key in kept)
    for folder in ("hf", "expected"):
        (tmp_path / folder).mkdir()
        save_file(rounded, tmp_path / folder / "model.safetensors", {"format": "pt"})
    if name == "ernie4_5_moe":
        rounded["model.mtp_emb_norm.0.weight"] = torch.ones(4)
        save_file(rounded, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    shutil.copy(tmp_path / "fp32" / "config.json", tmp_path / "hf")
    hf_to_native(HfToNative(tmp_path / "hf", tmp_path / "native", verify=False))
    assert saved_config(read_manifest(tmp_path / "native")).train.precision == "bf16"
    native_to_hf(NativeToHf(tmp_path / "native", tmp_path / "back", verify=False))
    assert_same_tensors(tmp_path / "back", tmp_path / "expected")


def test_norms_behind_dense_layers_that_transformers_does_not_compute_are_left_out(tmp_path: Path) -> None:
    """Published files of A.X K1 have them. An export with --like puts them back."""
    case = TYPES["axk1"]
    random_model(case.model_type, case.fields).save_pretrained(tmp_path / "theirs")
    stored = tensors(tmp_path / "theirs")
    unused = "model.layers.0.post_mlp_layernorm.weight"
    assert unused not in stored
    save_file({**stored, unused: torch.randn(48)}, tmp_path / "theirs/model.safetensors", {"format": "pt"})
    hf_to_native(HfToNative(tmp_path / "theirs", tmp_path / "ours"))  # with a comparison of logits
    like = tmp_path / "theirs"
    native_to_hf(NativeToHf(tmp_path / "ours", tmp_path / "back", like=like, verify=False))
    assert_same_tensors(tmp_path / "back", like)


PUBLISHED = {
    "mixtral-8x7b": """{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "output_router_logits": false, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0", "use_cache": true, "vocab_size": 32000}""",
    "qwen3-30b-a3b": """{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}""",
}
# With fields that transformers 5 does not have: of layers of prediction, and of other programs.
PUBLISHED_BESIDE = {
    "qwen2-57b-a14b": """{"architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 3584,
        "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 131072,
        "max_window_layers": 28, "model_type": "qwen2_moe", "moe_intermediate_size": 2560, "norm_topk_prob": false,
        "num_attention_heads": 28, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 20480, "sliding_window": 131072,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": true,
        "use_sliding_window": false, "vocab_size": 151936}""",
    "minimax-m2": """{"architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1, 1], "auto_map": {},
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536,
        "max_position_embeddings": 196608, "model_type": "minimax_m2", "mtp_transformer_layers": 1,
        "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
        "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06,
        "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.46.1", "use_cache": true,
        "use_mtp": true, "use_qk_norm": true, "use_routing_bias": true, "vocab_size": 200064}""",
    "solar-open-100b": """{"architectures": ["SolarOpenForCausalLM"], "first_k_dense_replace": 0, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10240, "max_position_embeddings": 131072,
        "model_type": "solar_open", "moe_intermediate_size": 1280, "n_routed_experts": 128, "n_shared_experts": 1,
        "norm_topk_prob": true, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 8, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-05,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536},
        "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "transformers_version": "4.57.1", "vocab_size": 196608}""",
    "dots.llm1": """{"architectures": ["Dots1ForCausalLM"], "attention_bias": false, "first_k_dense_replace": 1,
        "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 32768, "model_type": "dots1",
        "moe_intermediate_size": 1408, "n_group": null, "n_routed_experts": 128, "n_shared_experts": 2,
        "norm_topk_prob": true, "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 62,
        "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "rope_theta": 10000000, "routed_scaling_factor": 2.5,
        "scoring_func": "noaux_tc", "sliding_window": null, "tie_word_embeddings": false, "topk_group": null,
        "vocab_size": 152064}""",
    "ernie-4.5-21b-a3b": """{"architectures": ["Ernie4_5_MoeForCausalLM"], "head_dim": 128, "hidden_size": 2560,
        "intermediate_size": 12288, "max_position_embeddings": 131072, "model_type": "ernie4_5_moe",
        "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_intermediate_size": 1536, "moe_k": 6,
        "moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64,
        "moe_num_shared_experts": 2, "moe_use_aux_free": true, "num_attention_heads": 20, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "num_nextn_predict_layers": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0, "tie_word_embeddings": true, "use_bias": false, "vocab_size": 103424}""",
    "ernie-4.5-300b-a47b": """{"architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_act": "silu",
        "hidden_size": 8192, "intermediate_size": 28672, "max_position_embeddings": 131072,
        "model_type": "ernie4_5_moe", "moe_gate": "topk_fused", "moe_intermediate_size": 3584, "moe_k": 8,
        "moe_layer_end_index": 53, "moe_layer_interval": 1, "moe_layer_start_index": 3, "moe_num_experts": 64,
        "moe_num_shared_experts": 0, "num_attention_heads": 64, "num_hidden_layers": 54, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": false, "use_cache": false,
        "vocab_size": 103424}""",
}


@pytest.mark.parametrize("name", [*PUBLISHED, *PUBLISHED_BESIDE])
def test_published_configs_are_the_presets(name: str) -> None:
    """Fault config-json-fidelity: as transformers 4 wrote them."""
    model = model_of(json.loads({**PUBLISHED, **PUBLISHED_BESIDE}[name]))
    preset = load(["--config", str(presets()[name])]).config
    assert model == validate(preset, 1).model


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_reads_our_configs_as_the_published_ones(name: str) -> None:
    model = model_of(json.loads(PUBLISHED[name]))
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers")
    ours, theirs = to_hugging_face(model), json.loads(PUBLISHED[name])
    read = [transformers.AutoConfig.for_model(**fields).to_dict() for fields in (ours, theirs)]
    for fields in read:
        fields["head_dim"] = fields["head_dim"] or fields["hidden_size"] // fields["num_attention_heads"]
        for field in ("bos_token_id", "eos_token_id", "torch_dtype", "dtype", "transformers_version"):
            fields.pop(field, None)
        fields.pop("max_window_layers", None)  # transformers 5 keeps it and does not use it
    assert read[0] == read[1]


# What is refused


Edit = Callable[[dict[str, Tensor]], Any]
UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"
AN_UP = "model.layers.0.mlp.experts.3.up_proj.weight"
EDITS: list[tuple[bool, str, Edit]] = [
    (False, f"missing {AN_UP}", lambda t: t.pop(AN_UP)),
    (False, "missing model.layers.1.mlp.gate.weight", lambda t: t.pop("model.layers.1.mlp.gate.weight")),
    (
        False,
        "unexpected model.layers.1.mlp.experts.6.up_proj.weight",
        lambda t: t.update({"model.layers.1.mlp.experts.6.up_proj.weight": t[AN_UP].clone()}),
    ),
    (False, f"{AN_UP} has shape [48, 40], not [40, 48]", lambda t: t.update({AN_UP: t[AN_UP].t().contiguous()})),
    (
        False,
        "gate.e_score_correction_bias",
        lambda t: t.update({"model.layers.0.mlp.gate.e_score_correction_bias": t["model.norm.weight"].clone()}),
    ),
    (True, "missing model.layers.0.mlp.experts.5.gate_proj.weight", lambda t: t.update({UP: t[UP][:5].clone()})),
    (True, "unexpected model.layers.0.mlp.experts.6.gate_proj.weight", lambda t: t.update({UP: torch.ones(7, 80, 48)})),
    (True, "experts.0.down_proj.weight has shape [40, 48]", lambda t: t.update({DOWN: t[DOWN].mT.contiguous()})),
    (True, f"unexpected {UP}", lambda t: t.update({UP: torch.ones(6, 81, 48)})),
    (True, f"holds {AN_UP} twice, as ", lambda t: t.update({AN_UP: torch.ones(40, 48)})),
]


@pytest.mark.parametrize(("stacked", "words", "edit"), EDITS, ids=[words for _, words, _ in EDITS])
def test_an_expert_that_is_missing_or_does_not_fit_is_named(
    stacked: bool, words: str, edit: Edit, tmp_path: Path
) -> None:
    """Fault converted-experts-lost."""
    source = save_model(tmp_path / "hf", CASES[2], save_original_format=not stacked)
    stored = tensors(source)
    edit(stored)
    save_file(stored, source / "model.safetensors")
    refused(CheckpointError, HfToNative(source, tmp_path / "native", verify=False), words)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_parity_refuses_gate_and_up_in_each_others_place(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault converted-experts-lost: their shapes are the same, so only the logits tell."""
    source = save_model(tmp_path / "hf", Case(kind))
    names = FAMILIES[kind].hugging_face
    assert names is not None
    gate, up = (names.modules[f"layers.*.mlp.experts.*.{part}"] for part in ("gate", "up"))
    monkeypatch.setitem(names.modules, "layers.*.mlp.experts.*.gate", up)
    monkeypatch.setitem(names.modules, "layers.*.mlp.experts.*.up", gate)
    refused(CheckpointError, HfToNative(source, tmp_path / "native"), "logits differ from those of transformers")


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    ("mixtral", {"sliding_window": 1024}, "sliding_window=1024"),
    ("mixtral", {"num_local_experts": None}, "num_local_experts is missing"),
    ("mixtral", {"num_experts_per_tok": "2"}, "num_experts_per_tok='2' should be a whole number"),
    ("mixtral", {"num_experts_per_tok": 7}, "a token can choose among 6 experts"),
    ("qwen3_moe", {"attention_bias": True}, "attention_bias=True"),
    ("qwen3_moe", {"use_sliding_window": True}, "sliding_window=4096"),
    ("qwen3_moe", {"num_local_experts": 7}, "num_local_experts=7 contradicts 6"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers=['0']"),
    ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob=1 should be true or false"),
]


@pytest.mark.parametrize(("kind", "changes", "words"), UNSUPPORTED, ids=lambda v: v if isinstance(v, str) else "")
def test_a_config_of_a_mixture_that_we_cannot_be_is_refused_by_the_field(
    kind: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Fault config-json-fidelity: before a weight is read, so none is needed here."""
    source = tmp_path / "hf"
    source.mkdir()
    long = {"max_position_embeddings": 8192}
    (source / "config.json").write_text(json.dumps({**sizes(kind), **long, **changes}))
    refused(ConfigError, HfToNative(source, tmp_path / "native", verify=False), words)


def test_layers_without_experts_are_read_as_transformers_counts_them() -> None:
    """Every n-th layer has experts, but for a list of exceptions; listed layers beyond the model do not matter."""
    qwen = {**sizes("qwen3_moe"), "num_hidden_layers": 7}
    assert model_of(qwen).moe.mlp_only_layers == ()
    assert model_of({**qwen, "decoder_sparse_step": 3}).moe.mlp_only_layers == (0, 1, 3, 4, 6)
    assert model_of({**qwen, "mlp_only_layers": [5, 0, 9]}).moe.mlp_only_layers == (0, 5)


def test_options_of_training_are_told_and_do_not_matter() -> None:
    mixtral = sizes("mixtral")
    assert warnings_of(mixtral) == []
    (line,) = warnings_of({**mixtral, "output_router_logits": True})
    assert "output_router_logits=true is not read" in line
    # Balanced by another loss it is the same model, whose weights another run may start from.
    model = model_of(mixtral)
    other = replace(model, moe=replace(model.moe, balance="sequence", router_aux_loss_coef=0.5, router_z_loss_coef=0.1))
    assert to_hugging_face(other)["router_aux_loss_coef"] == 0.5
    assert computed(other) == computed(model)
    assert weight_options(Config(model=other)) == weight_options(Config(model=model))
    # A loss beside the bias is a matter of training too.
    model = replace(model, moe=replace(model.moe, balance="bias"))
    other = replace(model, moe=replace(model.moe, balance="bias+sequence", router_aux_loss_coef=0.5))
    assert computed(other) == computed(model)
    assert weight_options(Config(model=other)) == weight_options(Config(model=model))
    assert weight_options(Config(model=other))["moe.balance"] == "bias"


def test_a_mixture_that_hugging_face_has_not_is_refused() -> None:
    mixtral, qwen = model_of(sizes("mixtral")), model_of(sizes("qwen3_moe"))
    for model, changes, words in (
        (mixtral, {"norm_topk_prob": False}, "model.moe.norm_topk_prob=false: mixtral of transformers has true"),
        (mixtral, {"balance": "bias", "router_aux_loss_coef": 0.001}, "model.moe.balance=bias: mixtral"),
        (mixtral, {"balance": "bias+sequence"}, r"model.moe.balance=bias\+sequence: mixtral"),
        (qwen, {"scoring_func": "sigmoid"}, "model.moe.scoring_func=sigmoid"),
        (qwen, {"routed_scaling_factor": 2.5}, "model.moe.routed_scaling_factor=2.5"),
        (qwen, {"n_group": 2}, "model.moe.n_group=2"),
        (qwen, {"shared_expert_intermediate_size": 32}, "model.moe.shared_expert_intermediate_size=32"),
    ):
        with pytest.raises(ConfigError, match=words):
            to_hugging_face(replace(model, moe=replace(model.moe, **changes)))
    with pytest.raises(ConfigError, match=r"model\.qk_norm=false"):
        to_hugging_face(replace(qwen, qk_norm=False))


# Dense checkpoints as the start of a mixture


def dense_checkpoint(folder: Path, kind: str, **changes: Any) -> dict[str, Tensor]:
    """Convert a dense model of transformers to `folder`; its tensors."""
    source = save_model(folder.parent / "hf", Case(kind, changes))
    (source / "tokenizer.json").write_text("{}")  # what is in it matters to nobody here
    hf_to_native(HfToNative(source, folder, verify=False))
    return native_tensors(folder)


@pytest.mark.parametrize(
    ("kind", "family", "experts", "per_token"),
    slow_but([0, 1], [("llama", "mixtral", 8, 2), ("qwen3", "qwen3_moe", 5, 3), ("mistral", "qwen3_moe", 3, 2)]),
)
def test_an_upcycled_mixture_computes_the_dense_model(
    kind: str, family: Any, experts: int, per_token: int, tmp_path: Path
) -> None:
    """Every expert is the dense MLP, bit by bit; routers are drawn as those of a new model with this seed are."""
    dense = dense_checkpoint(tmp_path / "dense", kind, tie_word_embeddings=True)
    target = tmp_path / "mixture"
    upcycle_dense(Upcycle(tmp_path / "dense", target, experts, per_token, family, seed=7))
    report = json.loads((target / "parity.json").read_text())
    assert report["reference"] == str(tmp_path / "dense")
    assert all(0 <= row["relative"] <= 1e-5 and row["largest_logit"] > 0.5 for row in report["prompts"])

    config, stage = load_fp32(target, torch.float32)
    assert (config.model.family, config.model.moe.num_experts) == (family, experts)
    tokens_s = tiny_models.batch(config.model, samples=1).tokens_bs[0]
    _, dense_stage = load_fp32(tmp_path / "dense", torch.float32)
    found, expected = (native_logits(model, tokens_s, 0) for model in (stage, dense_stage))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))

    fresh = build_stages(config, single())[0]
    initialize([fresh], seed=7)
    drawn = {piece.name: param for param in fresh.parameters() for piece in spec_of(param).pieces}
    mixture = native_tensors(target)
    for name, tensor in mixture.items():
        if name.endswith("router.weight"):
            assert torch.equal(tensor, drawn[name].detach()), name
            assert tensor.abs().max() > 0
        else:
            assert torch.equal(tensor, dense[re.sub(r"experts\.\d+\.", "", name)]), name
    loaded = load(["--config", str(target / "config.toml")]).config
    assert loaded.model == config.model
    assert loaded.data.tokenizer == f"hf:{target / 'tokenizer.json'}"
    assert read_manifest(target).trainer["config"]["data.tokenizer"] == loaded.data.tokenizer


def test_a_dense_model_of_a_users_family_is_upcycled_if_the_user_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from megapar_models.registry import find\n\nFAMILY = find('llama')\n"
    (tmp_path / "family_of_mine.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    dense_checkpoint(tmp_path / "dense", "llama")
    name = "family_of_mine:FAMILY"

    def plant(body: dict[str, Any]) -> None:
        body["trainer"]["config"]["model.family"] = body["model_config"]["family"] = name

    edit_manifest(tmp_path / "dense", plant)
    with pytest.raises(CheckpointError, match=f"; --source_family {name} imports it, if you trust it"):
        upcycle_dense(Upcycle(tmp_path / "dense", tmp_path / "mixture"))
    upcycle_dense(Upcycle(tmp_path / "dense", tmp_path / "mixture", source_family=name))
    assert read_manifest(tmp_path / "mixture").model_config["family"] == Upcycle.family


def test_what_is_no_dense_llama_is_not_upcycled(tmp_path: Path) -> None:
    dense_checkpoint(tmp_path / "dense", "qwen3")
    for options, words in (
        (Upcycle(tmp_path / "dense", tmp_path / "m"), "model.qk_norm=true: family mixtral has no such thing"),
        (Upcycle(tmp_path / "dense", tmp_path / "m", 4, 5, "qwen3_moe"), "a token can choose among 4 experts"),
        (Upcycle(tmp_path / "dense", tmp_path / "m", 4, 2, "qwen3_moe", seed=-1), "train.seed=-1: must be at least 0"),
    ):
        with pytest.raises(ConfigError) as caught:
            upcycle_dense(options)
        assert words in str(caught.value)
    upcycle_dense(Upcycle(tmp_path / "dense", tmp_path / "m", 2, 2, "qwen3_moe", verify=False))
    with pytest.raises(ConfigError, match=r"model\.moe\.num_experts=2: the model is a mixture already"):
        upcycle_dense(Upcycle(tmp_path / "m", tmp_path / "again", 2, 1, "qwen3_moe"))
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    dense_checkpoint(tmp_path / "other" / "gpt", "gpt2", **no_dropout)
    with pytest.raises(CheckpointError, match="is no dense model that mixtral could be made of: missing layers"):
        upcycle_dense(Upcycle(tmp_path / "other" / "gpt", tmp_path / "again"))
    assert not (tmp_path / "again").exists()


# A run from converted weights


def start_from(
    native: Path, run: Path, options: CheckpointConfig | None = None, **moe: Any
) -> tuple[list[Tensor], list[str]]:
    """The selection biases of all routers at the start of a run from these weights, and the lines for the user."""
    config = load(["--config", str(native / "config.toml"), "--run_dir", str(run)]).config
    config = replace(config, checkpoint=options or CheckpointConfig(init_from=str(native)), data=DataConfig())
    config = validate(replace(config, model=replace(config.model, moe=replace(config.model.moe, **moe))), 1)
    stages = build_stages(config, single())
    _, notes = trainer.start(config, single(), stages)
    return [module.bias for stage in stages.values() for module in stage.modules() if isinstance(module, Router)], notes


def test_a_converted_mixture_starts_with_selection_biases_of_zero(tmp_path: Path) -> None:
    """Models without such biases have none in their files. Nothing else may be missing, and no bias may be lost."""
    source = save_model(tmp_path / "hf", CASES[2])
    native = tmp_path / "native"
    hf_to_native(HfToNative(source, native, verify=False))
    biases, notes = start_from(native, tmp_path / "run", balance="bias")
    assert len(biases) == 2
    assert not any(bias.any() for bias in biases)
    assert notes == [
        f"started from the weights of {native}, step 0",
        "the selection biases of routers start at 0: the weights were made without model.moe.balance=bias",
    ]
    assert start_from(native, tmp_path / "run")[1] == notes[:1]

    manifest = read_manifest(native)
    whole = dict(manifest.tensors)
    router = whole.pop("main.layers.1.mlp.router.weight")
    write_manifest(native, replace(manifest, tensors=whole))
    with pytest.raises(CheckpointError, match=r"main\.layers\.1\.mlp\.router\.weight: missing") as caught:
        start_from(native, tmp_path / "run", balance="bias")
    assert "bias" not in str(caught.value)

    # A checkpoint that states the option has lost its biases if they are not there.
    whole["main.layers.1.mlp.router.weight"] = router
    stated = {**manifest.model_config, "moe.balance": "bias"}
    write_manifest(native, replace(manifest, tensors=whole, model_config=stated))
    with pytest.raises(CheckpointError, match=r"buffer\.layers\.0\.mlp\.router\.bias: missing"):
        start_from(native, tmp_path / "run", balance="bias")
    with pytest.raises(CheckpointError, match=r"model\.moe\.balance: bias \| not stated"):
        start_from(native, tmp_path / "run")


# To torch's checkpoints


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch: one process, as we mean it
def test_experts_and_biases_of_routers_are_exported_for_dtensors(tmp_path: Path) -> None:
    """Fault converted-experts-lost: each expert under its global number, and the bias, although it is no parameter."""
    config = tiny_models.config(tiny_models.model("mixtral", moe=MoEConfig(3, 2, balance="bias")))
    weights = tiny_models.random_tensors(config.model)
    biases = {f"layers.{layer}.mlp.router.bias": torch.randn(3) for layer in range(2)}
    weights |= biases
    source = tmp_path / "native"
    source.mkdir()
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    write_weights(source, config, shapes, weights.__getitem__, shard_bytes=20_000)
    manifest = read_manifest(source)
    # A run saves the biases as buffers.
    entries = {
        f"buffer.{name.removeprefix('main.')}" if name.removeprefix("main.") in biases else name: entry
        for name, entry in manifest.tensors.items()
    }
    write_manifest(source, replace(manifest, tensors=entries))
    native_to_dcp(NativeToDcp(source, tmp_path / "dcp"))
    state = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert "layers.1.mlp.experts.2.down.weight" in weights
    for name, tensor in weights.items():
        assert torch.equal(state[name], tensor), name


def test_weights_that_files_fill_are_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing those of 70B takes minutes. A run without files draws all, and one that may lack tensors does too."""
    native = tmp_path / "native"
    hf_to_native(HfToNative(save_model(tmp_path / "hf", CASES[0]), native, verify=False))
    drawn: list[str] = []
    initial_values = random.initial_values

    def drawing(piece: Piece, *args: Any, **options: Any) -> Tensor:
        drawn.append(piece.name)
        return initial_values(piece, *args, **options)

    monkeypatch.setattr(random, "initial_values", drawing)
    start_from(native, tmp_path / "from")
    assert not drawn
    for number, options in enumerate((CheckpointConfig(), CheckpointConfig(init_from=str(native), strict=False))):
        start_from(native, tmp_path / str(number), options)
        assert {"embedding.weight", "layers.0.mlp.experts.0.down.weight"} <= set(drawn)
        drawn.clear()
    config = replace(load(["--config", str(native / "config.toml")]).config, data=DataConfig())
    (stage,) = build_stages(validate(config, 1), single()).values()
    draws = checkpoints.draws(Config(), tmp_path / "step-1")
    assert not any(draws(spec_of(param)) for param in stage.parameters()), "a run that resumes"
