"""`megapar new-family`: what it says of a model without family, and drafts that train as they are written."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megapar_models.convert.draft import draft
from megapar_models.convert.safetensors_folder import INDEX, header_of
from megapar_models.convert.sketch import sketch
from safetensors.torch import save_file

from megapar.base.errors import ConfigError
from tests import survey_page
from tests.support.drafts import importable, outcome_of_draft, sketch_of, written
from tests.support.hugging_face import assert_same_tensors
from tests.support.survey import save_noisy
from tests.support.sweeps import slow_but
from tools import new_family
from tools.convert_checkpoint import HfToNative, NativeToHf, hf_to_native, native_to_hf


def saved(folder: Path, model_type: str, fields: Mapping[str, Any] | None = None) -> Path:
    """The folder of a small model of transformers."""
    save_noisy(folder, model_type, fields)
    return folder


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """The exit code of the program, and what it printed."""
    monkeypatch.setattr(sys, "argv", ["new_family.py", *map(str, words)])
    code = 0
    try:
        new_family.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


# What it says


def test_it_says_which_rules_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "theirs", "stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5})
    code, out, _ = run(monkeypatch, capsys, source)
    assert code == 0
    assert "LayerKind.norm: LayerNorm (layer_norm_eps)" in out
    assert "LayerKind.norms, .parallel: before (input_layernorm, post_attention_layernorm)" in out
    assert (
        "LayerKind.rotary: rotary positions of a part of each head (rope_parameters={'partial_rotary_factor': " in out
    )
    assert "LayerKind.qkv_bias: biases of queries, keys and values (use_qkv_bias=True)" in out
    assert "a person must decide" not in out


def test_biases_without_a_field_are_seen_in_the_tensors(tmp_path: Path) -> None:
    assert "LayerKind.qkv_bias: model.layers.*.self_attn.q_proj.bias" in sketch_of(saved(tmp_path, "qwen2")).asks


def test_it_says_what_is_missing_and_what_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "theirs", "jamba")
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**raw, "clever_factor": 2.0}))
    _, out, _ = run(monkeypatch, capsys, source, "--write", tmp_path / "drafts")
    assert "no family has it" in out
    missing = out.partition("no rule here computes:\n")[2].partition("fields that are not known here:\n")
    assert "mamba_dt_rank=6: a state-space mixer" in missing[0]
    assert "tensors model.layers.*.mamba.A_log/D: a state-space mixer" in missing[0]
    assert "clever_factor=2.0" in missing[2]
    assert "nearest: model_type " in missing[2]
    assert "lines say TODO" in out
    draft = (tmp_path / "drafts/jamba.py").read_text()
    assert "# TODO unknown field: clever_factor=2.0" in draft
    assert "# TODO no rule of ours: mamba_dt_rank=6: a state-space mixer" in draft


def test_the_nearest_family_is_the_one_with_the_fewest_differences(tmp_path: Path) -> None:
    """A field and a tensor more, on a file of Gemma 2 with another name."""
    source = saved(tmp_path / "theirs", "gemma2")
    raw = {**json.loads((source / "config.json").read_text()), "model_type": "gemma9", "clever_factor": 2.0}
    near = new_family.nearest(raw, {**new_family.read_shapes(source), "model.layers.0.clever.weight": (3,)})
    assert (near.model_type, near.family) == ("gemma2", "gemma2")
    (field,) = near.fields
    assert field.startswith("clever_factor=2.0 is not known, and may change the model")
    assert near.tensors == ["model.layers.*.clever.weight"]


def test_a_type_whose_reading_ends_early_is_not_the_nearest() -> None:
    """OPT's ffn_dim is missing in a file of AFMoE, so its other fields are not compared: one difference is too few."""
    raw = transformers.AutoConfig.for_model("afmoe").to_dict()
    found = {near.model_type: near.fields for near in new_family.candidates(raw, {})}
    assert found["opt"] == ["ffn_dim is missing"]
    assert len(found["qwen3"]) > 1
    nearest = new_family.nearest(raw, {})
    assert nearest.model_type != "opt"
    assert "is missing" not in " ".join(nearest.fields)


def test_a_known_model_type_is_trained_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "theirs", "cohere")
    _, out, _ = run(monkeypatch, capsys, source)
    assert "model_type cohere is known: family cohere. To train it:" in out
    assert f"  megapar convert hf-to-native {source} native" in out
    assert "LogitRule.multiplier: a factor of logits (logit_scale=0.5)" in out
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**raw, "attention_dropout": 0.5}))
    _, out, _ = run(monkeypatch, capsys, source)
    assert "model_type cohere is known, and this file is refused:\n  config.json: attention_dropout=0.5 is not" in out


# What cannot be read

LLAMA = {"model_type": "llama", "hidden_size": 8}


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (None, 2, "ConfigError: FOLDER/config.json: is not there; name a folder of Hugging Face"),
        ("{", 2, "ConfigError: FOLDER/config.json: not readable as JSON ("),
        ("[]", 2, "ConfigError: FOLDER/config.json: has no model_type"),
        ({"hidden_size": 8}, 2, "ConfigError: FOLDER/config.json: has no model_type"),
        ({**LLAMA, "is_encoder_decoder": True}, 2, "ConfigError: FOLDER/config.json: is_encoder_decoder; models here"),
        ({**LLAMA, "architectures": ["BertForMaskedLM"]}, 2, "ConfigError: FOLDER/config.json: architectures=['Bert"),
        (
            {"model_type": "llava", "text_config": {}},
            2,
            "ConfigError: FOLDER/config.json: multimodal; put its text_conf",
        ),
    ],
)
def test_what_it_cannot_read_is_refused_in_a_line(
    content: object,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "config.json").write_text(text)
    found, out, err = run(monkeypatch, capsys, tmp_path)
    assert (found, out, err.count("\n")) == (code, "", 1)
    assert err.startswith(said.replace("FOLDER", str(tmp_path)))


def test_a_broken_index_and_a_draft_that_is_there_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "theirs", "llama")
    assert run(monkeypatch, capsys, source, "--write", tmp_path / "drafts")[0] == 0
    code, _, err = run(monkeypatch, capsys, source, "--write", tmp_path / "drafts")
    assert (code, err.count("\n")) == (2, 1)
    assert "llama.py is there already" in err
    (source / INDEX).write_text("{}")
    code, _, err = run(monkeypatch, capsys, source)
    assert (code, err.count("\n")) == (4, 1)
    assert "not an index of safetensors files" in err


def refusal(raw: Mapping[str, Any]) -> str:
    """What a config.json is refused with; "" if it is not."""
    try:
        sketch(raw, {})
    except ConfigError as error:
        return str(error)
    return ""


VALUES = ("x", [], {}, -1, 0, None, 1.5, True, [1], {"a": 1}, ["a"])


@pytest.mark.parametrize(("values", "fewest"), slow_but([0], [(VALUES[::2], 25), (VALUES, 50)]), ids=["few", "all"])
@pytest.mark.parametrize("model_type", slow_but([0], ["stablelm", "cohere2", "deepseek_v3", "dots1", "gpt2", "jamba"]))
def test_any_value_of_a_field_gives_a_report_or_lines(
    model_type: str, values: tuple[Any, ...], fewest: int, tmp_path: Path
) -> None:
    """A file from anywhere may have any value. No other error than ConfigError is raised, and a draft compiles."""
    source = saved(tmp_path, model_type)
    raw, shapes = new_family.read_config(source), new_family.read_shapes(source)
    refused = 0
    for name in raw.keys() - {"model_type"}:
        for value in values:
            odd = {**raw, name: value}
            if said := refusal(odd):
                assert name in said
                refused += 1
                continue
            found = sketch(odd, shapes)
            assert list(new_family.report(odd, found, new_family.nearest(odd, shapes), source))
            compile(draft(found, "folder"), "draft", "exec")
    assert refused > fewest


# Drafts


DECODERS = [
    name for name, row in survey_page.rows().items() if row.result != "no text" and "its text is" not in row.why
]


COMPLETE = ("llama", "qwen2", "olmo2", "granite", "phi", "phi3", "stablelm", "starcoder2", "mixtral", "qwen2_moe")
COMPLETE += ("qwen3_moe", "olmoe", "dots1", "solar_open", "minimax_m2", "flex_olmo")


@pytest.mark.parametrize("model_type", slow_but([DECODERS.index("phi"), DECODERS.index("stablelm")], DECODERS))
def test_a_draft_without_todo_computes_the_model_or_is_refused(model_type: str, tmp_path: Path) -> None:
    """It is written from config.json and tensors alone. What these do not say, the comparison in `convert` finds."""
    found = outcome_of_draft(saved(tmp_path / "theirs", model_type), tmp_path)
    if model_type in COMPLETE:
        assert found == "trains"
    assert found in ("trains", "incomplete") or "logits differ from those of transformers" in found


def test_a_draft_names_the_fields_of_its_experts(tmp_path: Path) -> None:
    """A sigmoid because of the bias that selects, a plain MLP in the first layer, and a shared expert."""
    experts = sketch_of(saved(tmp_path, "dots1")).experts
    assert experts is not None
    assert (experts.shared, experts.dense) == ("n_shared_experts", ("first_k_dense_replace",))
    assert experts.always == {"scoring_func": "sigmoid", "balance": "bias"}
    assert experts.names["n_routed_experts"] == "num_experts"
    rule = 'replace(router_rule(model.moe), group_score="best_2")'
    assert experts.kind["router"] == f"None if number in model.moe.mlp_only_layers else {rule}"


def test_experts_of_another_form_are_left_to_a_person(tmp_path: Path) -> None:
    found = sketch_of(saved(tmp_path, "gpt_oss"))
    assert found.experts is None
    assert found.decide[0].startswith(
        "tensors model.layers.*.mlp.experts, model.layers.*.mlp.router: experts and their"
    )


def raw_of(model_type: str, fields: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config.json with the defaults of transformers."""
    return {**transformers.AutoConfig.for_model(model_type).to_dict(), **(fields or {})}


@pytest.mark.parametrize(
    ("model_type", "tensor", "words"),
    [
        ("laguna", "", "gating=True: a gate on attention's output; family laguna has it"),
        ("laguna", "", "num_attention_heads_per_layer="),
        ("laguna", "model.layers.*.self_attn.g_proj.weight", "a gate on attention's output; family qwen3_next has it"),
        ("qwen4_exp_text", "", "hc_count=4: several residual streams (hyper-connections)"),
        ("qwen4_exp_text", "", "layer_types: layers of indexed_attention"),
        ("hy_v4", "", "hc_mult=4: several residual streams (hyper-connections); rule LayerKind.stream has it"),
        ("hy_v4", "model.layers.*.attn_hc.fn", "several residual streams (hyper-connections); rule LayerKind.stream"),
        ("gemma3n_text", "", "altup_num_inputs=4: several residual streams (AltUp)"),
        ("gemma4_text", "model.embed_tokens_per_layer.weight", "embeddings for each layer (per-layer inputs)"),
        ("glm_moe_dsa", "", "index_topk=2048: attention to chosen keys (a sparse indexer)"),
        ("glm_moe_dsa", "model.layers.*.self_attn.kv_b_proj.weight", "multi-head latent attention; family deepseek"),
        ("rwkv", "rwkv.blocks.*.attention.time_decay", "a recurrence by decays of time (RWKV)"),
        ("recurrent_gemma", "", "lru_width="),
        ("dbrx", "", "ffn_config="),
        ("minimax", "model.layers.*.self_attn.slope_rate", "no module of ours"),
    ],
)
def test_a_missing_mechanism_is_named_by_fields_and_tensors(model_type: str, tensor: str, words: str) -> None:
    found = sketch(raw_of(model_type), {tensor.replace("*", "0"): None} if tensor else {})
    assert [line for line in (*found.missing, *found.decide) if tensor in line and words in line]


def test_without_shapes_or_tensors_a_draft_leaves_more_to_decide(tmp_path: Path) -> None:
    source = saved(tmp_path / "theirs", "olmo2")
    assert sketch_of(source).complete
    names = [*header_of(source / "model.safetensors")]
    (source / "model.safetensors").unlink()
    bare = sketch_of(source)
    assert bare.decide == ["no names of tensors: Llama's are taken, with norms before both branches and a gated MLP"]
    (source / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    (line,) = sketch_of(source).decide
    assert line.startswith("model.layers.*.self_attn.q_norm: over each head or over all (LayerKind.qk_norm_over)")
    assert sketch_of(source).kind["norms"] == '"after"'


@pytest.mark.parametrize("model_type", ["stablelm", "dots1", pytest.param("qwen2_moe", marks=pytest.mark.slow)])
def test_a_draft_comes_back_from_training_as_it_went(model_type: str, tmp_path: Path) -> None:
    """The family of a checkpoint is outside of this repository: files and fields are those of the import."""
    source = saved(tmp_path / "theirs", model_type)
    name = written(source, tmp_path / "drafts")
    with importable(tmp_path / "drafts"):
        hf_to_native(HfToNative(source, tmp_path / "native", family=name))
        native_to_hf(NativeToHf(tmp_path / "native", tmp_path / "copied", family=name))
        (tmp_path / "native/config.json").unlink()
        native_to_hf(NativeToHf(tmp_path / "native", tmp_path / "again", family=name))
    for folder in ("copied", "again"):
        assert_same_tensors(tmp_path / folder, source)
        assert json.loads((tmp_path / folder / "config.json").read_text())["model_type"] == model_type


def test_fused_and_transposed_tensors_are_seen(tmp_path: Path) -> None:
    found = sketch_of(saved(tmp_path / "phi3", "phi3"))
    fused = {name for name, module in found.modules.items() if module == "model.layers.*.self_attn.qkv_proj"}
    assert fused == {f"layers.*.attention.{part}" for part in "qkv"}
    found = sketch_of(saved(tmp_path / "gpt2", "gpt2", {"n_inner": 76}))
    assert found.layouts["transformer.h.*.mlp.c_fc"] == "Packing(transposed=True)"
    assert found.decide == ["transformer.h.*.attn.c_attn: are its rows q, then k, then v, or head by head (layouts)?"]
    assert found.missing == [
        "tensors transformer.wpe.weight: learned positions of family gpt alone",
    ]


def test_a_family_without_the_model_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model_type='llama' is not one of family gemma; it has gemma"):
        hf_to_native(HfToNative(saved(tmp_path / "theirs", "llama"), tmp_path / "native", family="gemma"))


def test_one_tensor_decides_what_is_normalized(tmp_path: Path) -> None:
    """By its shape a norm of queries is over a head, over all heads, or has a weight for each."""
    source = saved(tmp_path / "theirs", "qwen3")
    raw = json.loads((source / "config.json").read_text())
    heads, width = raw["num_attention_heads"], raw["head_dim"]
    for shape, over in (((width,), None), ((heads * width,), '"width"'), ((heads, width), '"each_head"')):
        tensors = {f"model.layers.0.self_attn.{part}_norm.weight": torch.ones(shape) for part in "qk"}
        save_file(tensors, source / "model.safetensors")
        assert sketch_of(source).kind.get("qk_norm_over") == over
