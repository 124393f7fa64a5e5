"""Fields of a config.json: values of other types, fields of published files that no model reads, and two ropes."""

import json
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megapar_models.convert import config_fields
from megapar_models.convert.config_json import from_hugging_face, warnings_of
from megapar_models.convert.typed_fields import read_object
from megapar_models.registry import presets, validate

from megapar.base.errors import ConfigError
from megapar.checkpoint.format import read_manifest
from tests.support.model_types import TYPES
from tests.support.options import load
from tests.support.published import config_of, model_of, random_model
from tools.convert_checkpoint import HfToNative, NativeToHf, hf_to_native, native_to_hf, whole_config

# Published files

# As published, with fields that no model reads. Long factors of Phi-4 mini are the preset's.
COMMAND_R7B = {
    **{"model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"], "attention_bias": False},
    **{"attention_dropout": 0.0, "bos_token_id": 5, "cache_implementation": "hybrid", "eos_token_id": 255001},
    **{"head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02},
    **{"intermediate_size": 14336, "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 0.25},
    **{"max_position_embeddings": 132096, "num_attention_heads": 32, "num_hidden_layers": 32},
    **{"num_key_value_heads": 8, "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0},
    **{"position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0},
    **{"sliding_window": 4096, "sliding_window_pattern": 4, "torch_dtype": "bfloat16", "use_cache": True},
    **{"transformers_version": "4.48.0.dev0", "use_embedding_sharing": True, "use_gated_activation": True},
    **{"use_parallel_block": True, "use_parallel_embedding": True, "use_qk_norm": False, "vocab_size": 256000},
}
# Objects with what releases before 4.40 wrote into any of them.
_IN_OBJECTS = {
    **{"return_dict": True, "output_hidden_states": False, "torch_dtype": None, "tie_word_embeddings": True},
    **{"max_length": 20, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}},
    "model_type": "",
}
DBRX = {
    **{"model_type": "dbrx", "architectures": ["DbrxForCausalLM"], "d_model": 6144, "emb_pdrop": 0.0},
    "attn_config": {**_IN_OBJECTS, "attn_pdrop": 0, "clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
    "ffn_config": {
        **{**_IN_OBJECTS, "ffn_act_fn": {"name": "silu"}, "ffn_hidden_size": 10752, "moe_num_experts": 16},
        **{"moe_top_k": 4, "moe_jitter_eps": 0, "moe_loss_weight": 0.05, "moe_normalize_expert_weights": 1},
        "uniform_expert_assignment": False,
    },
    **{"initializer_range": 0.02, "max_seq_len": 32768, "n_heads": 48, "n_layers": 40, "resid_pdrop": 0.0},
    **{"output_router_logits": False, "router_aux_loss_coef": 0.05, "tie_word_embeddings": False},
    **{"torch_dtype": "bfloat16", "transformers_version": "4.39.2", "use_cache": True, "vocab_size": 100352},
}
GEMMA_2_9B = {
    **{"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "attention_bias": False},
    **{"attention_dropout": 0.0, "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid"},
    **{"eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"},
    **{"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "initializer_range": 0.02},
    **{"intermediate_size": 14336, "max_position_embeddings": 8192, "num_attention_heads": 16},
    **{"num_hidden_layers": 42, "num_key_value_heads": 8, "pad_token_id": 0, "query_pre_attn_scalar": 256},
    **{"rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096},
    **{"torch_dtype": "float32", "transformers_version": "4.42.0.dev0", "use_cache": True, "vocab_size": 256000},
}
PHI_4_MINI = {
    **{"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
    **{"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "bos_token_id": 199999, "embd_pdrop": 0.0},
    **{"eos_token_id": 199999, "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072},
    **{"initializer_range": 0.02, "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False},
    **{"max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 24, "num_hidden_layers": 32},
    **{"num_key_value_heads": 8, "original_max_position_embeddings": 4096, "pad_token_id": 199999},
    **{"partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_theta": 10000.0},
    **{"sliding_window": 262144, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True},
    "vocab_size": 200064,
}
QWEN3_5_0_8B = {
    **{"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056},
    **{"video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054},
    **{"tie_word_embeddings": True, "vision_config": {"depth": 12, "model_type": "qwen3_5"}},
    "text_config": {
        **{"attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16"},
        **{"eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu"},
        **{"hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3584},
        **{"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6, "linear_conv_kernel_dim": 4},
        **{"linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 16},
        **{"linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144},
        **{"mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1},
        **{"mtp_use_dedicated_embeddings": False, "num_attention_heads": 8, "num_hidden_layers": 24},
        **{"num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "use_cache": True},
        **{"tie_word_embeddings": True, "vocab_size": 248320},
        "rope_parameters": {
            **{"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25},
            **{"rope_theta": 10000000, "rope_type": "default"},
        },
    },
}


def preset(name: str) -> Any:
    return validate(load(["--config", str(presets()[name])]).config, 1).model


@pytest.mark.parametrize(
    ("name", "file"),
    [
        *(("command-r7b", COMMAND_R7B), ("gemma-2-9b", GEMMA_2_9B), ("phi-4-mini", PHI_4_MINI)),
        *(("qwen3.5-0.8b", QWEN3_5_0_8B), ("dbrx", DBRX)),
    ],
)
def test_a_published_file_with_fields_that_nobody_reads_is_its_preset(name: str, file: dict[str, Any]) -> None:
    """Fault config-json-fidelity."""
    model = preset(name)
    if name == "phi-4-mini":
        scaling = model.rope_scaling
        factors = {"short_factor": [*scaling.short_factor], "long_factor": [*scaling.long_factor]}
        file = {**file, "rope_scaling": {"type": "longrope", **factors}}
    # A preset is the model alone.
    assert replace(model_of(file), num_nextn_predict_layers=0) == model


def test_another_name_of_the_pattern_of_layers_must_agree() -> None:
    with pytest.raises(ConfigError, match=r"layer_switch=2 is not supported unless"):
        model_of({**COMMAND_R7B, "layer_switch": 2})


# By row of model types: fields of published files, and for some a value that says something else.
UNREAD: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"is_llama_config": True, "rope_interleaved": False}, {"rope_interleaved": True}),  # SmolLM2
    ("llama", {"max_sequence_length": 2048, "_commit_hash": None, "pretraining_tp": 1}, {}),  # the first Llama
    ("llama", {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}, {}),
    ("qwen3", {"unsloth_fixed": True, "unsloth_version": "2025.3.1"}, {}),
    ("gpt_oss", {"unsloth_fixed": True, "unsloth_version": "2025.3.1"}, {}),
    ("qwen2", {"use_mrope": False}, {"use_mrope": True}),  # Qwen2.5 Math
    ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 262144}}, {}),  # Qwen2.5 1M
    ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}, {"lm_head_bias": True}),
    ("gemma2", {"sliding_window_size": 5}, {"sliding_window_size": 6}),
    ("cohere2", {"rotary_pct": 1.0}, {"rotary_pct": 0.5}),
    ("cohere2", {"position_embedding_type": "rope_gptj"}, {"position_embedding_type": "rope"}),
    ("cohere2", {"use_embedding_sharing": True}, {"use_embedding_sharing": False}),
    (
        "qwen3_5_text",
        {"output_gate_type": "swish", "mamba_ssm_dtype": "float32"},
        {"output_gate_type": "sigmoid"},
    ),
    ("stablelm", {"use_norm_bias": False, "rotary_scaling_factor": 1.0}, {"rotary_scaling_factor": 2.0}),
    ("hyperclovax", {"attn_pdrop": 0.0, "summary_first_dropout": 0.0, "end_token_id": 100257}, {"attn_pdrop": 0.1}),
    ("exaone_moe", {"is_moe_layer": [False, True, True, True]}, {"is_moe_layer": [True] * 4}),
    ("exaone_moe", {"first_last_k_dense_replace": 1}, {"first_last_k_dense_replace": 2}),
    ("mellum", {"use_sliding_window": True, "max_window_layers": 0}, {"use_sliding_window": False}),
    ("kolibri1", {"head_dtype": "float32"}, {}),
    ("cohere2_moe", {"use_parallel_block": True}, {"use_parallel_block": False}),
    ("mistral4", {"sliding_window": None}, {"sliding_window": 5}),
    ("llama4_text", {"attn_temperature_tuning": 4}, {}),  # transformers has made it true or false since
]


@pytest.mark.parametrize(("name", "fields", "wrong"), UNREAD)
def test_fields_that_nobody_reads_are_taken_with_the_values_that_agree(
    name: str, fields: dict[str, Any], wrong: dict[str, Any]
) -> None:
    file = {"model_type": TYPES[name].model_type, **TYPES[name].fields}
    assert model_of({**file, **fields}) == model_of(file)
    for field, value in wrong.items():
        with pytest.raises(ConfigError, match=f"^config.json: {re.escape(f'{field}={value!r}')} is not supported"):
            model_of({**file, field: value})


def test_an_unknown_field_can_be_accepted(tmp_path: Path) -> None:
    """The way back reads the same file again. A field that is known, or not there, cannot be accepted."""
    case = TYPES["llama"]
    theirs = random_model(case.model_type, case.fields)
    theirs.save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "scale_of_ours": 2}))
    options = HfToNative(tmp_path / "theirs", tmp_path / "native", verify=False)
    with pytest.raises(ConfigError, match=r"scale_of_ours=2 is not known, and may .*--accept_fields scale_of_ours$"):
        hf_to_native(options)
    for name in ("rope_theta", "scale_of_theirs"):
        with pytest.raises(ConfigError, match=rf"--accept_fields {name}: the file has no such field, or it is known"):
            hf_to_native(replace(options, accept_fields=("scale_of_ours", name)))
    hf_to_native(replace(options, accept_fields=("scale_of_ours",)))
    assert read_manifest(tmp_path / "native").trainer["accepted_fields"] == ["scale_of_ours"]
    native_to_hf(NativeToHf(tmp_path / "native", tmp_path / "back", verify=False))
    assert json.loads((tmp_path / "back/config.json").read_text())["scale_of_ours"] == 2


# rope_parameters beside rope_scaling

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = ("rope_parameters", "rope_scaling")
PLAIN = {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("kind", "both"),
    [
        ("qwen2", {"rope_parameters": PLAIN, "rope_scaling": {**YARN, "rope_theta": 1e6}}),
        ("qwen2", {"rope_parameters": PLAIN, "rope_scaling": YARN, "rope_theta": 1e6}),
        ("qwen3_moe", {"rope_parameters": PLAIN, "rope_scaling": {**YARN, "rope_theta": 5e5}}),
        (
            "glm4",
            {name: {**PLAIN, "partial_rotary_factor": part} for name, part in zip(ROPES, (0.5, 1.0), strict=True)},
        ),
    ],
)
def test_rope_scaling_takes_the_place_of_rope_parameters(kind: str, both: dict[str, Any]) -> None:
    """Fault two-ropes-in-a-file: as transformers reads a file of version 5 to which rope_scaling was added."""
    fields = {name: value for name, value in TYPES[kind].fields.items() if not name.startswith("rope")}
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers")
    theirs = transformers.AutoConfig.for_model(kind, **deepcopy({**fields, **both})).rope_parameters
    model = model_of({"model_type": kind, **fields, **both})
    assert model == model_of({"model_type": kind, **fields, "rope_parameters": theirs})
    assert model.rope_theta == theirs["rope_theta"]
    assert model.rope_scaling.rope_type == both["rope_scaling"]["rope_type"]
    assert getattr(model, "partial_rotary_factor", 1.0) == theirs.get("partial_rotary_factor", 1.0)


@pytest.mark.parametrize("kind", ["qwen2", "deepseek_v3", "phi3", "hunyuan_v1_dense"])
def test_a_base_that_only_the_unread_field_has_is_refused(kind: str) -> None:
    """transformers would take its default for the base."""
    fields = {name: value for name, value in TYPES[kind].fields.items() if not name.startswith("rope")}
    said = r"rope_parameters has rope_theta=1000000.0, and rope_scaling, .* has none: add it to rope_scaling, or"
    with pytest.raises(ConfigError, match=said):
        model_of({"model_type": kind, **fields, "rope_parameters": PLAIN, "rope_scaling": YARN})


def test_the_base_of_dbrx_is_that_of_its_own_code(tmp_path: Path) -> None:
    """Fault base-in-an-object: transformers reads rope_parameters alone, which no published file has."""
    case = TYPES["dbrx"]
    random_model(case.model_type, case.fields).save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    file = json.loads(path.read_text())
    del file["rope_parameters"]
    path.write_text(json.dumps(file))
    assert model_of(file).rope_theta == 700.0
    (line,) = warnings_of(file)
    assert line.startswith("config.json: rope_theta=700.0 of attn_config is used, as the model's own code does;")
    hf_to_native(HfToNative(tmp_path / "theirs", tmp_path / "native"))
    assert not warnings_of(config_of(case.model_type, case.fields))


# Values of other types


def file_of(name: str) -> dict[str, Any]:
    """The config.json of a row of model types."""
    return config_of(TYPES[name].model_type, TYPES[name].fields)


DEEP: list[Any] = []
for _ in range(300):
    DEEP = [DEEP]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 3, 7, 10**9, 10**20, 0.5, 1e300, float("nan"), "", "x", "full_attention"),
    *([], [1], ["x"], [None], [[]], {}, {"a": 1}, {"rope_type": []}, {"full_attention": 3}, DEEP),
]


def changed(file: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The file with each field, and each field of its objects, at each value and left out."""
    for name, old in file.items():
        yield {field: value for field, value in file.items() if field != name}
        for value in VALUES:
            yield {**file, name: value}
        if isinstance(old, Mapping):
            yield from ({**file, name: inner} for inner in changed(old))


def assert_read_or_refused(file: Mapping[str, Any]) -> None:
    """Nothing but a ConfigError is raised."""
    with suppress(ConfigError):
        whole_config(from_hugging_face(file))
        warnings_of(file)


def test_values_of_other_types_are_lines() -> None:
    """Fault json-field-of-another-type: a sample of the sweep below."""
    generator = random.Random(5)
    for name in generator.sample([*TYPES], 5):
        for file in generator.sample([*changed(file_of(name))], 30):
            assert_read_or_refused(file)


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_every_field_with_every_value_is_read_or_refused(name: str) -> None:
    for file in changed(file_of(name)):
        assert_read_or_refused(file)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": ["llama"]}, "model_type=['llama'] should be a text"),
        ({"hidden_act": ["silu"]}, "hidden_act=['silu'] should be a text"),
        ({"layer_types": 3}, "layer_types=3 should be a list of texts"),
        ({"rope_parameters": "yarn"}, "rope_parameters='yarn' should be an object of fields"),
        ({"rope_scaling": {"rope_type": []}}, "rope_scaling: rope_type=[] should be a text"),
        ({"sliding_window": "4096"}, "sliding_window='4096' should be a whole number"),
        ({"num_hidden_layers": 10**20}, f"num_hidden_layers={10**20} should be a whole number from 0 to 10,000"),
        ({"use_sliding_window": "false"}, "use_sliding_window='false' should be true or false"),
    ],
)
def test_a_field_of_another_type_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_hugging_face({**file_of("qwen3"), **changes})
    assert str(caught.value) == f"config.json: {said}"


def test_a_file_that_is_a_list_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"config.json: \[1, 2\] should be an object of fields"):
        read_object(tmp_path / "config.json")


def test_every_field_that_a_family_reads_has_a_kind() -> None:
    from megapar_models.convert import config_json  # its private class notes what is read

    read = set()
    for file in map(file_of, TYPES):
        _, names = config_json._of_type(file, "")
        raw = config_json._Read(file)
        names.read(raw, file["model_type"])
        [*names.judge(raw, file["model_type"]), *names.warnings(raw), *names.ignored(raw)]
        read |= raw.fields | {*names.fields}
    assert read - {*config_fields.KINDS, ""} == set()
