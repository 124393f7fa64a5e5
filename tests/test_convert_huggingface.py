"""Conversion from and to Hugging Face: bits come back, logits are those of transformers, and what we cannot be is
refused before anything is written."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.convert.config_json import from_hugging_face, to_hugging_face, warnings_of
from megapar_models.convert.exported import hf_recipes
from megapar_models.convert.saved import load_model
from megapar_models.convert.stream import TensorInfo, shards
from megapar_models.generation import next_logits
from megapar_models.registry import FAMILIES, validate
from megapar_models.rotary import RopeScaling, Rotary
from safetensors.torch import save_file
from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError, StorageError
from megapar.checkpoint.format import read_manifest
from megapar.config.model_options import ModelConfig
from megapar.config.options import CheckpointConfig, Config
from megapar.declare.batch import MicroBatch
from megapar.step.step import train_step
from megapar.train import checkpoints
from megapar.train.saver import Saver
from tests.support.distributed import run_ranks
from tests.support.grid import Layout, make_state, micro_batches
from tests.support.hugging_face import (
    POSITIONS,
    Case,
    assert_parity,
    assert_same_tensors,
    refused,
    save_model,
    sizes,
    tensors,
)
from tests.support.options import load
from tests.support.sweeps import slow_but
from tools import convert_checkpoint
from tools.convert_checkpoint import HfToNative, NativeToHf, hf_to_native, native_to_hf

TOOL = Path(__file__).parents[1] / "tools" / "convert_checkpoint.py"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 256, "rope_theta": 5000.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "rope_theta": 5000.0}
YARN_MSCALE = YARN | {"beta_fast": 8.0, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 1.9, "truncate": False}


CASES = [
    Case("llama", {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-3}),
    Case("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}, "head_dim": 10}),
    Case("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}),
    Case("mistral", {"head_dim": 10, "sliding_window": POSITIONS}),
    Case("mistral", {"num_key_value_heads": 1, "tie_word_embeddings": True, "sliding_window": None}),
    Case("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    Case("qwen2", {"tie_word_embeddings": True}),
    Case("qwen3", {"head_dim": 10, "hidden_act": "relu2"}),
    Case("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    Case("gpt2", {"layer_norm_epsilon": 1e-3}),
    Case("gpt2", {"tie_word_embeddings": False, "activation_function": "relu2"}),
    Case("llama", {"rope_parameters": YARN}),
    Case("qwen3", {"rope_parameters": YARN_MSCALE}),
]


# There and back


# Each kind of model, of scaled rotary positions and of activations.
@pytest.mark.parametrize("case", slow_but([0, 6, 9], CASES), ids=str)
def test_weights_come_back_bitwise_and_logits_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    """Fault hugging-face-round-trip, and fidelity of config.json (fault config-json-fidelity): the copy of it from the
    weights' folder, and our own, read by transformers as the same model."""
    source, native = save_model(tmp_path / "hf", case), tmp_path / "native"
    hf_to_native(HfToNative(source, native))
    assert_parity(native)
    raw = json.loads((source / "config.json").read_text())
    model = validate(replace(Config(), model=from_hugging_face(raw)), 1).model
    assert load(["--config", str(native / "config.toml")]).config.model == model

    native_to_hf(NativeToHf(native, tmp_path / "copied", verify=False))
    written, expected = (folder / "model.safetensors" for folder in (tmp_path / "copied", source))
    assert written.read_bytes() == expected.read_bytes()
    copied = json.loads((tmp_path / "copied" / "config.json").read_text())
    assert copied.pop("torch_dtype") == raw.pop("dtype") == "float32"
    assert copied == raw

    (native / "config.json").unlink()
    native_to_hf(NativeToHf(native, tmp_path / "own"))
    assert_same_tensors(tmp_path / "own", source)
    assert_parity(tmp_path / "own")
    own = json.loads((tmp_path / "own" / "config.json").read_text())
    assert validate(replace(Config(), model=from_hugging_face(own)), 1).model == model


def test_shards_in_bf16_come_back_bitwise_and_files_byte_for_byte(tmp_path: Path) -> None:
    """Export, import and export again write the same bytes (fault export-twice); tokenizer files travel along."""
    source = save_model(tmp_path / "hf", CASES[5], torch.bfloat16, max_shard_size="20KB")
    (source / "tokenizer.json").write_text("{}")  # what is in it matters to nobody here
    assert len(list(source.glob("*.safetensors"))) > 2
    names = [tmp_path / name for name in ("native", "first", "again", "second")]
    for number, (src, dst) in enumerate(zip([source, *names], names, strict=False)):
        if number % 2:
            options = NativeToHf(src, dst, verify=number == 1, verify_tokenizer=False, shard_bytes=30_000)
            native_to_hf(options)
        else:
            hf_to_native(HfToNative(src, dst, verify=False, shard_bytes=30_000))
    native, first, _, second = names
    assert_same_tensors(first, source)
    manifest = read_manifest(native)
    assert manifest.trainer["config"]["train.precision"] == "bf16"
    assert manifest.trainer["weights_only"]
    assert {entry.dtype for entry in manifest.tensors.values()} == {"float32"}
    assert len(manifest.files) > 2
    assert manifest.trainer["config"]["data.tokenizer"] == f"hf:{native / 'tokenizer.json'}"
    report = json.loads((first / "parity.json").read_text())
    assert report["weights"] == "bfloat16"
    assert max(row["relative"] for row in report["prompts"]) <= 1e-5
    for folder in (first, second):
        (folder / "parity.json").unlink()
    files = sorted(path.name for path in first.iterdir())
    assert files == sorted(path.name for path in second.iterdir())
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < set(files)
    for name in files:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_names_without_prefix_derived_tables_and_tied_copies_are_understood(tmp_path: Path) -> None:
    """As the first published GPT-2 files are: no `transformer.`, causal masks among the weights."""
    source = save_model(tmp_path / "hf", CASES[9])
    stored = tensors(source)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    bare |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8).tril(), "lm_head.weight": stored["transformer.wte.weight"].clone()}
    save_file(bare, source / "model.safetensors", {"format": "pt"})
    hf_to_native(HfToNative(source, tmp_path / "native", verify=False))
    native_to_hf(NativeToHf(tmp_path / "native", tmp_path / "back", verify=False))
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    assert_same_tensors(tmp_path / "back", source)


# Training goes on from it, in any layout


def first_loss_and_save(model: ModelConfig, native: Path, run: Path, layout: dict[str, int]) -> float:
    """Start from the converted weights, save them as they are, and train a step."""
    laid = Layout(model, **layout)
    config = replace(laid.config(), checkpoint=CheckpointConfig(init_from=str(native)), run_dir=str(run))
    state = make_state(config)
    checkpoints.resume(state, run, checkpoints.find(state.config, run, state.ctx))
    with Saver(state, run) as saver:
        saver.save(state)
    return train_step(state, micro_batches(state.config, state.ctx, 0)).loss


@pytest.mark.parametrize(
    ("case", "layout"),
    slow_but(
        [1, 4],
        [
            (CASES[0], {"tp": 2, "pp": 2}),
            (CASES[6], {"pp": 4}),
            (CASES[9], {"tp": 4}),
            (Case("mixtral"), {"dp": 4, "ep": 4}),
            (Case("qwen3_moe", {"mlp_only_layers": [0]}), {"tp": 2, "pp": 2, "ep": 2, "etp": 1}),
        ],
    ),
    ids=("llama, tp 2, pp 2", "tied qwen2, pp 4", "tied gpt2, tp 4", "mixtral, ep 4", "qwen3_moe, tp 2, pp 2, ep 2"),
)
def test_training_starts_from_converted_weights_in_any_layout(
    case: Case, layout: dict[str, int], tmp_path: Path
) -> None:
    """The first loss equals one process's; the layout's checkpoint converts back to the same bits (fault
    hugging-face-round-trip)."""
    changes = {"num_hidden_layers": 4}
    if case.kind == "gpt2":
        changes = {"n_layer": 4, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)}
    source, native = save_model(tmp_path / "hf", Case(case.kind, {**case.changes, **changes})), tmp_path / "native"
    hf_to_native(HfToNative(source, native, verify=False))
    model = load(["--config", str(native / "config.toml")]).config.model
    losses = []
    for run, laid in ((tmp_path / "one", {}), (tmp_path / "four", layout)):
        losses += run_ranks(Layout(model, **laid).world, first_loss_and_save, model, native, run, laid)[:1]
        (step,) = (run / "checkpoints").glob("step_*")
        native_to_hf(NativeToHf(step, run / "back", like=source, verify=False))
        assert_same_tensors(run / "back", source)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_generation_reads_converted_weights(tmp_path: Path) -> None:
    source = save_model(tmp_path / "hf", CASES[7])
    hf_to_native(HfToNative(source, tmp_path / "native", verify=False))
    _, stage = load_model(tmp_path / "native")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source)
    ids = [5, 99, 130, 0, 7]
    expected = theirs(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(next_logits(stage, [ids])[0], expected, rtol=1e-5, atol=1e-5)


# What is refused


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "bert"}, "model_type='bert'"),
    ("llama", {"model_type": None}, "model_type=None"),
    ("mistral", {"attention_bias": True}, "attention_bias=True"),
    ("qwen3", {"mlp_bias": True}, "mlp_bias=True"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": "2"}}, "factor='2' should be a number"),
    ("llama", {"rope_scaling": YARN | {"truncate": None}}, "truncate=None should be bool"),
    ("llama", {"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor=0 is not supported"),
    ("llama", {"rope_scaling": YARN | {"low_freq_factor": 1}}, "rope_type yarn does not use low_freq_factor"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_type linear lacks factor"),
    ("llama", {"rope_parameters": {"rope_type": "default", "beta": 2}}, "rope_type default does not use beta"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2' should be a number"),
    ("llama", {"hidden_size": "48"}, "hidden_size='48' should be a whole number"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings=1 should be true or false"),
    ("llama", {"vocab_size": None}, "vocab_size is missing"),
    ("llama", {"num_attention_heads": 5, "num_key_value_heads": 2}, "query heads must divide"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not known, and may change the model"),
    ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder=True is not supported"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
    ("gpt2", {"activation_function": "gelu"}, "activation_function='gelu'"),
]


@pytest.mark.parametrize(("kind", "changes", "words"), UNSUPPORTED, ids=lambda v: v if isinstance(v, str) else "")
def test_a_config_that_we_cannot_be_is_refused_by_the_field(
    kind: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Fault config-json-fidelity: before a weight is read, so none is needed here."""
    source = tmp_path / "hf"
    source.mkdir()
    long = {"max_position_embeddings": 8192} if kind != "gpt2" else {}
    (source / "config.json").write_text(json.dumps({**sizes(kind), **long, **changes}))
    refused(ConfigError, HfToNative(source, tmp_path / "native", verify=False), words)


def test_old_and_new_spellings_of_config_mean_the_same() -> None:
    llama = sizes("llama")
    linear = RopeScaling(rope_type="linear", factor=2.0)
    for fields in (
        {"rope_theta": 7000.0, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_theta": 7000, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7000.0}},
    ):
        found = from_hugging_face({**llama, **fields})
        assert (found.rope_theta, found.rope_scaling) == (7000.0, linear)
    del llama["head_dim"], llama["num_key_value_heads"]
    derived = validate(replace(Config(), model=from_hugging_face(llama)), 1).model
    assert (derived.head_dim, derived.num_key_value_heads, derived.tie_word_embeddings) == (12, 4, False)
    assert from_hugging_face(sizes("gpt2")).tie_word_embeddings


YARN_PUBLISHED: list[dict[str, Any]] = [
    {"head_dim": 128, "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},  # Qwen
    {"head_dim": 64, "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"head_dim": 64, "factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.5, "mscale_all_dim": 1.0},
    {"head_dim": 64, "rope_theta": 150000, "factor": 32, "original_max_position_embeddings": 4096, "truncate": False},
    {"head_dim": 80, "factor": 16.0, "original_max_position_embeddings": 2048, "attention_factor": 0.75},
    {"head_dim": 80, "factor": 16.0, "original_max_position_embeddings": 16, "mscale": 2.0},  # mscale alone is ignored
    {"head_dim": 12, "factor": None, "original_max_position_embeddings": 64, "beta_fast": 4, "beta_slow": 0.5},
    {"head_dim": 12, "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 10**5},  # mixed to the end
    {"head_dim": 12, "factor": 2.0, "beta_fast": None},  # the original length is max_position_embeddings
]


@pytest.mark.parametrize("published", YARN_PUBLISHED, ids=str)
def test_yarn_frequencies_are_those_of_transformers(published: dict[str, Any]) -> None:
    """Bit by bit, from both spellings of a config.json, and again from our own."""
    utils = pytest.importorskip("transformers.modeling_rope_utils", reason="not run: needs transformers")
    from transformers import AutoConfig

    scaling = dict(published)
    fields = {**sizes("qwen3"), "head_dim": scaling.pop("head_dim"), "rope_theta": scaling.pop("rope_theta", 10000.0)}
    for spelling in ("type", "rope_type"):
        raw = {**fields, "rope_scaling": {spelling: "yarn", **scaling}}
        config = AutoConfig.for_model(**{**raw, "rope_scaling": dict(raw["rope_scaling"])})
        expected, expected_factor = utils.ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        model = validate(replace(Config(), model=from_hugging_face(raw)), 1).model
        rotary = Rotary.of(model)
        frequency, factor = rotary.frequency(torch.device("cpu"), 1)
        assert torch.equal(frequency, expected)
        assert factor == pytest.approx(expected_factor, rel=1e-15)
        three = torch.zeros(1, 3)
        cos, _ = rotary.tables(MicroBatch.of_samples(three, three, three, torch.zeros(1)))
        torch.testing.assert_close(cos[1, : len(expected)], expected.cos() * expected_factor, rtol=1e-7, atol=0.0)
        assert validate(replace(Config(), model=from_hugging_face(to_hugging_face(model))), 1).model == model


def test_a_factor_of_yarn_that_versions_of_transformers_read_differently_is_told() -> None:
    raw = {**sizes("llama"), "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert warnings_of(raw) == []
    raw["rope_scaling"]["original_max_position_embeddings"] = POSITIONS // 4
    assert warnings_of(raw) == []
    raw["rope_scaling"]["original_max_position_embeddings"] = POSITIONS // 2
    (line,) = warnings_of(raw)
    assert "factor=4.0 of yarn is used" in line
    assert "= 2 in its place" in line


def test_a_sliding_window_that_never_applies_is_none() -> None:
    unused = {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0}
    above = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    full = {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"] * 2}
    for kind, fields in (("mistral", {"sliding_window": POSITIONS}), ("qwen2", unused), ("qwen2", above)):
        without = {**sizes(kind), "sliding_window": None}
        assert from_hugging_face({**sizes(kind), **fields}) == from_hugging_face(without)
    assert from_hugging_face({**sizes("qwen3"), **full}) == from_hugging_face(sizes("qwen3"))


def test_a_model_that_hugging_face_has_not_is_refused() -> None:
    base = validate(replace(Config(), model=from_hugging_face(sizes("llama"))), 1).model
    gpt = validate(replace(Config(), model=from_hugging_face(sizes("gpt2"))), 1).model
    for model, words in (
        (replace(base, attention_bias=True, qk_norm=True), "model.attention_bias=true, model.qk_norm=true"),
        (replace(base, hidden_size=50), "model.hidden_size=50"),
        (replace(gpt, num_key_value_heads=2), "model.num_key_value_heads"),
        (replace(gpt, head_dim=10), "model.head_dim"),
    ):
        with pytest.raises(ConfigError, match=words):
            to_hugging_face(model)


Edit = Callable[[dict[str, Tensor]], Any]
EDITS: list[tuple[str, Edit]] = [
    ("missing model.norm.weight", lambda t: t.pop("model.norm.weight")),
    ("unexpected model.extra.weight", lambda t: t.update({"model.extra.weight": torch.ones(3)})),
    ("unexpected lm_head.bias", lambda t: t.update({"lm_head.bias": torch.ones(131)})),
    ("model.norm.weight has shape [47], not [48]", lambda t: t.update({"model.norm.weight": torch.ones(47)})),
    ("lm_head.weight is F64", lambda t: t.update({"lm_head.weight": torch.ones(131, 48, dtype=torch.float64)})),
]


@pytest.mark.parametrize(("words", "edit"), EDITS, ids=[words for words, _ in EDITS])
def test_tensors_that_are_not_the_models_are_named(words: str, edit: Edit, tmp_path: Path) -> None:
    """Fault conversion-names-bad-tensors, on the way in."""
    source = save_model(tmp_path / "hf", CASES[0])
    stored = tensors(source)
    edit(stored)
    save_file(stored, source / "model.safetensors")
    refused(CheckpointError, HfToNative(source, tmp_path / "native", verify=False), words)


def test_folders_that_lie_are_refused(tmp_path: Path) -> None:
    """An index of other files or tensors (fault paths-leaving-the-folder), pickles (fault nothing-is-unpickled), a
    diverging tied copy, no room for output."""
    source = save_model(tmp_path / "hf", CASES[2])
    options = HfToNative(source, tmp_path / "native", verify=False)
    index, weights = source / "model.safetensors.index.json", source / "model.safetensors"
    listed = dict.fromkeys(tensors(source), "model.safetensors")

    def lie(changes: Mapping[str, str | None]) -> None:
        found = {name: file for name, file in {**listed, **changes}.items() if file}
        index.write_text(json.dumps({"weight_map": found}))

    lie({"model.norm.weight": "../hf/model.safetensors"})
    refused(CheckpointError, options, "a path outside the folder")
    lie({"model.other.weight": "model.safetensors"})
    refused(CheckpointError, options, "names tensors that no file holds: model.other.weight")
    lie({"model.norm.weight": None})
    refused(CheckpointError, options, "holds model.norm.weight")
    lie(dict.fromkeys(listed, "model-00001-of-00001.safetensors"))
    refused(CheckpointError, options, "model.safetensors: is there beside model.safetensors.index.json, which does not")
    index.unlink()
    stored = tensors(source)
    save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"] + 1}, weights)
    refused(CheckpointError, options, "if the file is right, set tie_word_embeddings to false in config")
    weights.write_bytes(weights.read_bytes()[:-5])
    refused(CheckpointError, options, "not readable as safetensors")
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 5\n")
    refused(CheckpointError, options, "model.safetensors: a pointer of Git LFS, and not the weights")
    weights.rename(source / "pytorch_model.bin")
    refused(CheckpointError, options, ".bin files are pickles, which are never read")


def test_a_damaged_or_foreign_native_checkpoint_is_refused(tmp_path: Path) -> None:
    """Fault conversion-names-bad-tensors, on the way out: a flipped bit is found when its tensor is read, and no folder
    appears."""
    source, native = save_model(tmp_path / "hf", CASES[0]), tmp_path / "native"
    hf_to_native(HfToNative(source, native, verify=False))
    options = NativeToHf(native, tmp_path / "back", verify=False)
    other = save_model(tmp_path / "other", CASES[5])
    refused(ConfigError, replace(options, like=other), "describes another model")
    refused(ConfigError, replace(options, dst=source), "exists")
    file = native / "weights_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    refused(CheckpointError, options, "CRC-32")


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_model(tmp_path / "hf", CASES[0])
    options = HfToNative(source, tmp_path / "native", verify=False)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("megapar_models.convert.stream.shutil.disk_usage", lambda path: usage)
    refused(StorageError, options, "1,000 are free")


def test_dropouts_that_differ_are_told_and_not_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dropout is an option of training; the weights are the same model's."""
    source = save_model(tmp_path / "hf", Case("gpt2", {"embd_pdrop": 0.3}))
    hf_to_native(HfToNative(source, tmp_path / "native"))
    assert_parity(tmp_path / "native")
    warnings_of = capsys.readouterr().err
    assert "warning: config.json: embd_pdrop=0.3 differs from resid_pdrop=0.1" in warnings_of
    assert load(["--config", str(tmp_path / "native" / "config.toml")]).config.model.hidden_dropout == 0.1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value: float, tmp_path: Path) -> None:
    """Fault non-finite-weights: on the way in, on the way out, and by a dtype with too small a range. The conversion is
    not blamed."""
    source = save_model(tmp_path / "hf", CASES[0])
    stored = tensors(source)
    hf_to_native(HfToNative(source, tmp_path / "native", verify=False))
    stored["model.embed_tokens.weight"][3, 5] = value
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    for verify in (False, True):
        refused(CheckpointError, HfToNative(source, tmp_path / "again", verify=verify), "embedding.weight: holds NaN")
    stored["model.embed_tokens.weight"][3, 5] = 1e6
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    hf_to_native(HfToNative(source, tmp_path / "large", verify=False))
    small = NativeToHf(tmp_path / "large", tmp_path / "back", verify=False, dtype="float16")
    refused(CheckpointError, small, "model.embed_tokens.weight: holds NaN or infinity as float16")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    source = save_model(tmp_path / "hf", CASES[5], torch.bfloat16, max_shard_size="20KB")
    shard = sorted(source.glob("*.safetensors"))[1]
    shard.unlink()
    words = f"{shard.name}: missing, though model.safetensors.index.json names it"
    refused(CheckpointError, HfToNative(source, tmp_path / "native"), words)


@pytest.mark.parametrize("wrong", ["names", "rope"])
def test_parity_refuses_a_wrong_conversion(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values exchanged; long wavelengths not stretched: an error visible beyond the original context."""
    source = save_model(tmp_path / "hf", replace(CASES[0]))
    if wrong == "names":
        names = FAMILIES["llama"].hugging_face
        assert names is not None
        keys, values = (names.modules[f"layers.*.attention.{letter}"] for letter in "kv")
        monkeypatch.setitem(names.modules, "layers.*.attention.k", values)
        monkeypatch.setitem(names.modules, "layers.*.attention.v", keys)
    else:
        read = convert_checkpoint.from_hugging_face
        forgetful = lambda raw, *more: replace(read(raw, *more), rope_scaling=RopeScaling())  # noqa: E731
        monkeypatch.setattr(convert_checkpoint, "from_hugging_face", forgetful)
    refused(CheckpointError, HfToNative(source, tmp_path / "native"), "logits differ from those of transformers")


def test_without_transformers_verification_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(ConfigError, HfToNative(tmp_path / "hf", tmp_path / "native"), "not installed: pip install")


def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """2 for a config beyond our models, 4 for missing tensors; a line on stderr."""
    source = tmp_path / "hf"
    source.mkdir()
    command = ["convert_checkpoint.py", "hf-to-native", str(source), str(tmp_path / "native"), "--no-verify"]
    monkeypatch.setattr(sys, "argv", command)
    for changes, code, words in (
        ({"attention_dropout": 0.1}, 2, "attention_dropout=0.1"),
        ({}, 4, "model.safetensors: missing"),
    ):
        (source / "config.json").write_text(json.dumps({**sizes("llama"), **changes}))
        with pytest.raises(SystemExit) as exited:
            convert_checkpoint.main()
        warnings_of = capsys.readouterr().err
        assert (exited.value.code, len(warnings_of.splitlines())) == (code, 1), warnings_of
        assert words in warnings_of
    assert os.listdir(tmp_path) == ["hf"]


# Memory


MEASURED = """
import json, sys
from pathlib import Path
from tools.convert_checkpoint import HfToNative, NativeToHf, hf_to_native, native_to_hf

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def peak(convert, options):
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    convert(options)
    return status("VmHWM") - before

for folder in map(Path, sys.argv[1:]):
    peaks = [
        peak(hf_to_native, HfToNative(folder / "hf", folder / "native", verify=False)),
        peak(native_to_hf, NativeToHf(folder / "native", folder / "back", verify=False)),
    ]
    (folder / "peaks.json").write_text(json.dumps(peaks))
"""


def stacked(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Mixtral's tensors, with all experts of a layer in one tensor, as transformers 5 has them in memory."""
    found = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    folders = {name.partition(".experts.")[0] for name in stored.keys() - found.keys()}
    for folder in folders:
        names = [name for name in sorted(stored) if name.startswith(folder)]
        w1, w3, w2 = (
            torch.stack([stored[name] for name in names if name.endswith(f".{part}.weight")])
            for part in ("w1", "w3", "w2")
        )
        found[f"{folder}.experts.gate_up_proj"] = torch.cat((w1, w3), dim=1)
        found[f"{folder}.experts.down_proj"] = w2
    return found


@pytest.mark.slow
def test_conversion_needs_no_more_than_two_of_the_largest_tensor(tmp_path: Path) -> None:
    """And 24 MiB, most of it for modules imported on the way and the allocator's leftovers. Of a file of stacked
    experts the largest tensor is a matrix of one expert."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("not run: needs /proc/self/clear_refs to reset the peak of memory")
    wide = {"hidden_size": 256, "num_hidden_layers": 12, "intermediate_size": 2048, "head_dim": 64}
    experts = {"hidden_size": 256, "intermediate_size": 1536, "num_local_experts": 12, "vocab_size": 1024}
    largest, total = {}, {}
    for kind, fields in (("llama", wide), ("gpt2", {"n_embd": 256, "n_layer": 30}), ("mixtral", experts)):
        source, raw = tmp_path / kind / "hf", {**sizes(kind), "vocab_size": 16384, **fields}
        source.mkdir(parents=True)
        (source / "config.json").write_text(json.dumps(raw))
        model = validate(replace(Config(), model=from_hugging_face(raw)), 1).model
        stored = {name: torch.zeros(recipe.shape) for name, recipe in hf_recipes(model).items()}
        save_file(stacked(stored) if kind == "mixtral" else stored, source / "model.safetensors")
        largest[kind] = max(tensor.nbytes for tensor in stored.values())
        total[kind] = sum(tensor.nbytes for tensor in stored.values())
    folders, environment = [str(tmp_path / kind) for kind in total], {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURED, *folders]
    subprocess.run(command, cwd=TOOL.parents[1], check=True, capture_output=True, env=environment)
    for kind in total:
        allowed = 2 * largest[kind] + (24 << 20)
        assert total[kind] > 1.5 * allowed
        assert max(json.loads((tmp_path / kind / "peaks.json").read_text())) <= allowed


def test_shards_hold_at_most_their_limit() -> None:
    plan = {str(n): TensorInfo((size,), torch.float32) for n, size in enumerate((10, 10, 30, 5, 5, 5))}
    assert [list(shard) for shard in shards(plan, 80)] == [["0", "1"], ["2"], ["3", "4", "5"]]
