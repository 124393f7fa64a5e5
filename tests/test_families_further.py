"""AFM, Nemotron, Apertus, HunYuan, Ministral 3 and Command R+ against transformers, and Phi-3 with longrope."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.convert.config_json import warnings_of
from megapar_models.registry import presets, validate
from megapar_models.rotary_options import RopeScaling
from safetensors.torch import load_file, save_file

from megapar.errors import CheckpointError, ConfigError
from megapar.params import spec_of
from megapar.verify import logical
from tests.support import tiny_models
from tests.support.grid import Layout, check_on_ranks
from tests.support.hugging_face import tensors
from tests.support.options import load
from tests.support.published import (
    LENGTH,
    SIZES,
    Published,
    assert_equal_logits,
    converted,
    model_of,
    random_batch,
    whole_stage,
)
from tests.support.sweeps import slow_but
from tools.convert_checkpoint import NativeToHf, native_to_hf

RMS = {**SIZES, "rms_norm_eps": 1e-3}
BIASED = {**RMS, "attention_bias": True}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8, "rope_theta": 300.0}
PLAIN = {"rope_type": "default", "rope_theta": 700.0}
ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 100.0}
FACTORS = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [1.5, 3.0, 9.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.5, **FACTORS}
SCALES = {"factor": 5.0, "attention_factor": 1.4}
THREE_LAYERS = {**RMS, "num_hidden_layers": 3}
# Kinds that have one by another name.
KINDS = {"phi3 in short samples": "phi3", "phi3 in long samples": "phi3", "command r+": "cohere"}
TEMPERATURE = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "beta_fast": 2.0, "beta_slow": 0.2}
TEMPERATURE |= {
    "original_max_position_embeddings": 5,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "llama_4_scaling_beta": 0.7,
}
FIELDS: dict[str, dict[str, Any]] = {
    "arcee": {**BIASED, "head_dim": 10, "mlp_bias": True},
    "nemotron": {**SIZES, "norm_eps": 1e-3, "head_dim": 10, "attention_bias": True, "mlp_bias": True}
    | {"partial_rotary_factor": 0.6, "tie_word_embeddings": True},
    "apertus": {**BIASED, "head_dim": 10, "rope_parameters": LLAMA3},
    "hunyuan_v1_dense": {**BIASED, "head_dim": 10, "rope_parameters": ALPHA},
    "phi3 in short samples": {**THREE_LAYERS, "rope_parameters": LONGROPE, "original_max_position_embeddings": LENGTH},
    # Documents alone are long too: transformers would take the other factors for a shorter one.
    "phi3 in long samples": {
        **THREE_LAYERS,
        "rope_parameters": LONGROPE | SCALES,
        "original_max_position_embeddings": 1,
    },
    "ministral3": {**THREE_LAYERS, "head_dim": 10, "rope_parameters": TEMPERATURE, "sliding_window": 9},
    "command r+": {**SIZES, "head_dim": 10, "layer_norm_eps": 1e-3, "logit_scale": 0.3, "use_qk_norm": True},
}
COMMON: list[dict[str, Any]] = [{"rope_parameters": PLAIN}, {"hidden_act": "silu"}]
GATED: list[dict[str, Any]] = [COMMON[0], {"hidden_act": "gelu_pytorch_tanh"}]
RMS_EPS = {"rms_norm_eps": 1e-1}
OF_LONGROPE: list[dict[str, Any]] = [
    {"rope_parameters": LONGROPE | {"factor": 5.0}},
    {"rope_parameters": LONGROPE | {"attention_factor": 1.4}},
    {"rope_parameters": LONGROPE | SCALES | {"rope_type": "yarn", "rope_theta": 50.0}},
    {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
]
CHANGES: dict[str, list[dict[str, Any]]] = {
    "arcee": [*COMMON, RMS_EPS],
    "nemotron": [COMMON[1], {"norm_eps": 1e-1}, {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.2}}],
    "apertus": [COMMON[0], RMS_EPS, {"rope_parameters": None}],
    "hunyuan_v1_dense": [*GATED, RMS_EPS, {"rope_parameters": ALPHA | {"alpha": 5.0}}],
    "phi3 in short samples": [GATED[1], RMS_EPS, *OF_LONGROPE, {"original_max_position_embeddings": LENGTH - 1}],
    "phi3 in long samples": [
        {"original_max_position_embeddings": LENGTH},
        {"rope_parameters": LONGROPE | SCALES | {"long_factor": [1.5, 3.0, 5.0]}},
    ],
    "ministral3": [
        *(GATED[1], RMS_EPS, {"sliding_window": 3}, {"sliding_window": None}),
        *({"rope_parameters": TEMPERATURE | {"llama_4_scaling_beta": beta}} for beta in (0.0, 0.2)),
        {"rope_parameters": TEMPERATURE | {"original_max_position_embeddings": 7}},
    ],
    "command r+": [*GATED, {"layer_norm_eps": 1e-1}, {"logit_scale": 0.9}],
}
REFUSED: dict[str, dict[str, Any]] = {
    "apertus": {"hidden_act": "relu2"},
    "phi3 in short samples": {"embd_pdrop": 0.1, "resid_pdrop": 0.1, "sliding_window": "5"},
    "phi3 in long samples": {
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "sliding_window": "5",
        "hidden_act": "relu",
        "rms_norm_eps": "1",
    },
}


@pytest.mark.parametrize("kind", list(FIELDS))
def test_it_computes_what_transformers_does(kind: str, tmp_path: Path) -> None:
    """Each field of config.json with another value too, or it is refused."""
    published = Published(tmp_path, KINDS.get(kind, kind), FIELDS[kind])
    published.check_logits_and_gradients()
    published.check_packed()
    refused = {"attention_dropout": 0.1, **REFUSED.get(kind, {})}
    if kind == "hunyuan_v1_dense":
        del refused["attention_dropout"], published.raw["attention_dropout"]  # it is told instead
    published.check_fields(CHANGES[kind], refused)
    published.check_way_back()


SMALL = {"num_key_value_heads": 2, "head_dim": 10, "initializer_range": 0.1}


@pytest.mark.parametrize(
    ("family", "options", "sizes"),
    slow_but(
        [2],
        [
            ("arcee", {"mlp_bias": True}, {"pp": 2, "vpp": 2, "schedule": "interleaved"}),
            ("nemotron", {"partial_rotary_factor": 0.6}, {"tp": 2, "sequence_parallel": True}),
            ("apertus", {}, {"tp": 2, "pp": 2}),
            ("hunyuan", {}, {"cp": 2, "zero_stage": 3}),
            (
                "ministral3",
                {
                    "llama_4_scaling_beta": 0.7,
                    "rope_scaling": RopeScaling("yarn", 8.0, original_max_position_embeddings=5),
                },
                {"cp": 2, "cp_attention": "ring", "packed": True},
            ),
            ("cohere", {"qk_norm": True, "num_attention_heads": 6, "num_key_value_heads": 3}, {"tp": 2}),
        ],
    ),
)
def test_its_layers_train_as_in_one_process(family: str, options: dict[str, Any], sizes: dict[str, Any]) -> None:
    model = tiny_models.small(family, 48, 4, 76, **SMALL | options)
    check_on_ranks(Layout(model, **sizes))


@pytest.mark.parametrize("text_type", ["mistral", "ministral3"])
def test_the_text_of_a_mistral3_file_is_converted_without_its_vision(text_type: str, tmp_path: Path) -> None:
    """It comes back as what it is."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    text = FIELDS["ministral3"] if text_type == "ministral3" else {**RMS, "sliding_window": 9}
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14}
    config = {"text_config": {"model_type": text_type, **text}, "vision_config": vision, "tie_word_embeddings": False}
    whole = transformers.Mistral3Config(**config)
    model = transformers.Mistral3ForConditionalGeneration._from_config(whole, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path / "theirs")
    assert any("vision" in name for name in tensors(tmp_path / "theirs"))
    found = converted(tmp_path / "theirs", tmp_path / "ours")
    raw = json.loads((tmp_path / "theirs/config.json").read_text())
    stage = whole_stage(model_of(raw))
    logical.fill([stage], found)
    with torch.no_grad():
        assert_equal_logits(stage, random_batch(), model(random_batch().tokens_bs).logits)
    native_to_hf(NativeToHf(tmp_path / "ours", tmp_path / "text", verify=False))
    written = json.loads((tmp_path / "text/config.json").read_text())
    assert written["model_type"] == text_type
    assert model_of(written) == stage.model
    with pytest.raises(ConfigError, match="model_type='pixtral' is not supported"):
        model_of({**raw, "text_config": {**raw["text_config"], "model_type": "pixtral"}})


def test_xielu_starts_with_the_slopes_of_its_paper() -> None:
    xielu = whole_stage(tiny_models.small("apertus", 48, 4, 76, **SMALL)).layers["0"].mlp.xielu
    with torch.no_grad():
        for param in xielu.parameters():
            param.fill_(spec_of(param).init.value)
        found = xielu(torch.tensor([3.0, -2.0]))
    expected = [0.8 * 9 + 1.5, 0.8 * (math.expm1(-2) + 2) - 1]
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("missing", [False, True])
def test_a_constant_of_xielu_with_another_value_or_without_one_is_refused(missing: bool, tmp_path: Path) -> None:
    Published(tmp_path, "apertus", FIELDS["apertus"])
    file = tmp_path / "theirs/model.safetensors"
    stored = load_file(file)
    name = "model.layers.2.mlp.act_fn.beta"
    stored[name] = torch.tensor(0.25)
    if missing:
        del stored[name]
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"missing {name}" if missing else f"{name} is 0.25; models here .* 0.5"):
        converted(tmp_path / "theirs", tmp_path / "refused")


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("apertus", {"rope_theta": 1e4}, "releases of transformers disagree"),
        ("apertus", {"qk_norm": False}, "qk_norm=False is not supported"),
        ("nemotron", {"kv_channels": 12}, "kv_channels=12 is not supported unless it is the width of a head, 10"),
        ("hunyuan_v1_dense", {"attention_head_dim": 12}, "unless it is head_dim, 10"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' is not supp"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": "2"}}, "alpha='2' should be a number"),
        ("ministral3", {"rope_theta": 1e4}, "releases of transformers disagree"),
        ("ministral3", {"rope_parameters": PLAIN}, "rope_parameters lacks llama_4_scaling_beta"),
        ("ministral3", {"rope_parameters": PLAIN | {"llama_4_scaling_beta": 0.1}}, "this rope_type does not have; use"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "rope_type longrope lacks long_factor"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": 1}}, "short_factor=1 should be a list"),
        (
            "phi3",
            {"rope_scaling": LONGROPE, "original_max_position_embeddings": 1},
            "original_max_position_embeddings=1: must be at least 2",
        ),
        (
            "phi3",
            {"rope_scaling": LONGROPE | {"partial_rotary_factor": 1.0}},
            "has 3 factors; give 6 above 0, one for each rotated pair",
        ),
    ],
)
def test_what_they_do_not_compute_is_refused(kind: str, changes: dict[str, Any], words: str) -> None:
    fields = {name: value for name, value in FIELDS.get(kind, RMS).items() if name != "rope_parameters"}
    with pytest.raises(ConfigError, match=words):
        model_of({"model_type": kind, **fields, **changes})


SIZES_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128}
PUBLISHED: dict[str, dict[str, Any]] = {
    "apertus-8b": {
        **{**SIZES_8B, "model_type": "apertus", "num_attention_heads": 32, "intermediate_size": 21504},
        **{"hidden_act": "xielu", "hidden_dropout": 0.0, "max_position_embeddings": 65536, "mlp_bias": False},
        **{"post_norm": False, "qk_norm": True, "rms_norm_eps": 1e-05, "vocab_size": 131072},
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192, "type": "llama3", "rope_theta": 12000000},
    },
    "hunyuan-7b": {
        **{**SIZES_8B, "model_type": "hunyuan_v1_dense", "num_attention_heads": 32, "intermediate_size": 14336},
        **{"add_classification_head": False, "attention_dropout": 0.1, "attention_head_dim": 128, "class_num": 0},
        **{"cla_share_factor": 2, "dense_list": [4096, 0], "eod_token_id": 127967, "hidden_act": "silu"},
        **{"im_end_id": 5, "im_newline_id": 11, "im_start_id": 4, "mask_init_id": 12, "pad_id": 127961},
        **{"max_position_embeddings": 32768, "norm_type": "rms", "org_vocab_size": 128167, "pool_type": "last"},
        **{"rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sep_token_id": 127962, "text_end_id": 7, "text_start_id": 6},
        **{"tie_word_embeddings": True, "use_cla": False, "use_qk_norm": True, "vocab_size": 128167},
        "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0}
        | {"mscale_all_dim": 1.0, "type": "dynamic"},
    },
    "minitron-8b": {
        **{**SIZES_8B, "model_type": "nemotron", "num_attention_heads": 48, "intermediate_size": 16384},
        **{"hidden_act": "relu2", "initializer_range": 0.0134, "max_position_embeddings": 4096, "norm_eps": 1e-05},
        **{"rope_theta": 10000, "partial_rotary_factor": 0.5, "tie_word_embeddings": False, "vocab_size": 256000},
    },
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_published_config_json_is_its_preset(name: str) -> None:
    preset = load(["--config", str(presets()[name])]).config
    assert model_of(PUBLISHED[name]) == validate(preset, 1).model


def test_dropout_of_a_family_without_is_told() -> None:
    (line,) = warnings_of(PUBLISHED["hunyuan-7b"])
    assert "attention_dropout=0.1 is not read: family hunyuan trains without dropout" in line
