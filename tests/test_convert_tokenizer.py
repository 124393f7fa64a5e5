"""A model exported to Hugging Face is given its training's tokenizer, whatever class transformers chooses for its
files; or the export is refused."""

import importlib.util
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from megapar_models.convert.tokenizer_files import TEXTS, check_texts, differences, sentencepiece_json
from megapar_models.convert.word_pattern import InexpressibleError
from megapar_tools.prepare.preprocess import PreprocessOptions, preprocess

from megapar.base.errors import CheckpointError, DataError
from megapar.config.options import CheckpointConfig, DataConfig
from megapar.data.tokenizer import SentencePieceTokenizer, load_tokenizer, train_sentencepiece
from tests.support.exports import make_checkpoint, make_run, report
from tests.support.sweeps import slow_but
from tests.support.tokenizers import hugging_face, trained_byte_pairs
from tools import convert_checkpoint
from tools.convert_checkpoint import HfToNative, NativeToHf, hf_to_native, native_to_hf

ROOT = Path(__file__).parent.parent
transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")

# How sentencepiece models differ from those that tools/train_tokenizer.py makes.
AS_LLAMA_2 = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "spm, dummy prefix": {"model_type": "bpe", **AS_LLAMA_2},
    "spm, bpe, nmt_nfkc": {"model_type": "bpe"},
    "spm, unigram": {"model_type": "unigram", **AS_LLAMA_2, "pad_id": 3, "required_chars": "0123456789<>/"},
    "spm, symbols": {
        **{"model_type": "bpe", **AS_LLAMA_2, "add_dummy_prefix": False},
        "user_defined_symbols": ["\n", "<|im_start|>", "<|im_end|>"],
    },
}
SPECS = ("bytes", "tiktoken", "hf", "hf, eos_token alone", "spm, ours", *SENTENCEPIECE)


def lines() -> list[str]:
    text = [path.read_text() for path in sorted((ROOT / "megapar").rglob("*.py"))[:12]]
    return [line for each in text for line in each.splitlines()]


def make_tokenizer(folder: Path, name: str) -> str:
    """Its files in `folder`; returns what data.tokenizer is then."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == "bytes":
        return "bytes"
    if name == "tiktoken":
        return f"tiktoken:{trained_byte_pairs(folder / 'x.tiktoken', 60, b'reached by no merge')}"
    if name.startswith("hf"):
        path = hugging_face(folder, post_processor=None, truncation=None, padding=None)
        if name != "hf":
            (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
        return f"hf:{path}"
    path = folder / "own.model"
    if name == "spm, ours":
        train_sentencepiece(["\n".join(lines())], 600, path)
    else:
        model = io.BytesIO()
        options = {"vocab_size": 700, "hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1}
        options |= SENTENCEPIECE[name]
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines()), model_writer=model, **options)
        path.write_bytes(model.getvalue())
    return f"spm:{path}"


def refused(options: NativeToHf, *words: str) -> None:
    before = sorted(options.dst.parent.iterdir())
    with pytest.raises(CheckpointError) as caught:
        native_to_hf(options)
    assert caught.value.exit_code == 4
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(options.dst.parent.iterdir()) == before


@pytest.fixture(scope="module", params=SPECS)
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), request.param)


@pytest.mark.parametrize("kind", slow_but([0, 2], ["llama", "qwen3", "gpt2"]))
def test_an_export_encodes_as_training_did(kind: str, spec: str, tmp_path: Path) -> None:
    """Fault exported-tokenizer: transformers chooses the tokenizer's class by model_type, and some classes rebuild
    it."""
    source = make_checkpoint(tmp_path / "native", kind, data=DataConfig(tokenizer=spec))
    native_to_hf(NativeToHf(source, tmp_path / "hf", tokenizer=spec, verify=False))
    ours, theirs = load_tokenizer(spec), transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text).tolist(), text
    assert theirs.eos_token_id == ours.eod
    ids = ours.encode("two  words\n").tolist()
    assert theirs.decode(ids) == ours.decode(ids)
    found = report(tmp_path / "hf")
    assert (found["verified"], found["different"], found["added_to_each_text"]) == (True, 0, [])
    assert found["texts"] >= len(TEXTS)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == ours.eod


@pytest.mark.parametrize("name", ["hf", "bytes", "tiktoken", "spm, dummy prefix"])
def test_a_tokenizer_that_transformers_would_rebuild_is_read_as_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault exported-tokenizer: for model_type qwen2 transformers cuts words as Qwen does, whatever tokenizer.json and
    tokenizer_class say. An auto_map ends this, with and without trust_remote_code."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    spec = make_tokenizer(tmp_path / "tokenizer", name)
    source = make_checkpoint(tmp_path / "native", "qwen2", data=DataConfig(tokenizer=spec))
    options = NativeToHf(source, tmp_path / "export", tokenizer=spec, verify=False)
    native_to_hf(options)
    assert (report(options.dst)["verified"], report(options.dst)["different"]) == (True, 0)
    ours = load_tokenizer(spec)
    for trust in (None, False, True):
        theirs = transformers.AutoTokenizer.from_pretrained(options.dst, trust_remote_code=trust)
        assert not differences(ours, lambda text, theirs=theirs: theirs(text)["input_ids"], TEXTS)
        assert theirs.eos_token_id == ours.eod
    again = replace(options, dst=tmp_path / "again", like=options.dst)  # its files are enough to export again
    native_to_hf(again)
    theirs = transformers.AutoTokenizer.from_pretrained(again.dst, trust_remote_code=True)
    assert not differences(ours, lambda text: theirs(text)["input_ids"], TEXTS)
    beside = options.dst / "tokenizer_config.json"
    facts = json.loads(beside.read_text())
    del facts["auto_map"]
    beside.write_text(json.dumps(facts))
    theirs = transformers.AutoTokenizer.from_pretrained(options.dst)
    assert differences(ours, lambda text: theirs(text)["input_ids"], TEXTS), "transformers needs no auto_map any more"


def test_qwens_own_tokenizer_needs_nothing(tmp_path: Path) -> None:
    path = hugging_face(tmp_path, post_processor=None, truncation=None, padding=None)
    whole = tokenizers.Tokenizer.from_file(str(path))
    qwens = transformers.Qwen2Tokenizer()._tokenizer
    whole.normalizer, whole.pre_tokenizer = qwens.normalizer, qwens.pre_tokenizer
    whole.save(str(path))
    source = make_checkpoint(tmp_path / "native", "qwen2", data=DataConfig(tokenizer=f"hf:{path}"))
    native_to_hf(NativeToHf(source, tmp_path / "export", verify=False))
    assert report(tmp_path / "export")["different"] == 0
    assert "auto_map" not in json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())


def test_files_of_another_tokenizer_or_end_are_refused(tmp_path: Path) -> None:
    """--like takes its files from a folder; an end token beyond the vocabulary is no id of the model."""
    spec = make_tokenizer(tmp_path / "one", "hf")
    source = make_checkpoint(tmp_path / "native", data=DataConfig(tokenizer=spec))
    options = NativeToHf(source, tmp_path / "export", verify=False)
    native_to_hf(replace(options, dst=tmp_path / "like"))
    beside = tmp_path / "like" / "tokenizer_config.json"
    facts = json.loads(beside.read_text())
    beside.write_text(json.dumps(facts | {"eos_token": "<s>"}))
    refused(replace(options, like=tmp_path / "like"), "the end token is '<s>' (id 0), in training id 1")
    beside.write_text(json.dumps(facts | {"eos_token": "<new>"}))
    refused(replace(options, like=tmp_path / "like"), "the end token is '<new>' (id 400), in training id 1")
    beside.write_text(json.dumps(facts))
    path = tmp_path / "like" / "tokenizer.json"
    path.write_text(path.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true', 1))
    refused(replace(options, like=tmp_path / "like"), "texts are encoded otherwise")
    small = make_checkpoint(tmp_path / "small", vocab_size=200, data=DataConfig(tokenizer="bytes"))
    refused(NativeToHf(small, tmp_path / "export", tokenizer="bytes", verify=False), "256 is outside the model's")


def test_without_transformers_the_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    source = make_checkpoint(tmp_path / "native")
    native_to_hf(NativeToHf(source, tmp_path / "export", tokenizer="bytes", verify=False))
    assert report(tmp_path / "export") == {"verified": False, "why": "transformers is not installed"}


def test_a_tokenizer_file_that_cannot_be_read_is_refused_unless_nothing_is_verified(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    source = make_checkpoint(tmp_path / "native", data=DataConfig(tokenizer=f"hf:{tmp_path / 'tokenizer.json'}"))
    options = NativeToHf(source, tmp_path / "export", verify=False)
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        native_to_hf(options)
    named = f"hf:{tmp_path / 'tokenizer.json'}"
    native_to_hf(replace(options, tokenizer=named, verify_tokenizer=False))
    assert (tmp_path / "export" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("kind", ["hf", "tiktoken"])
def test_no_private_file_that_a_manifest_names_gets_into_an_export(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault copies-of-private-files: as the tokenizer, or quoted in what says why there is none."""
    (tmp_path / "tokenizer.json").write_text("secret")
    (tmp_path / "special_tokens_map.json").write_text("secret")
    spec = f"{kind}:{tmp_path / 'tokenizer.json'}"
    source = make_checkpoint(tmp_path / "native", data=DataConfig(tokenizer=spec))
    native_to_hf(NativeToHf(source, tmp_path / "export", verify=False, verify_tokenizer=False))
    written = {path.name: path.read_bytes() for path in (tmp_path / "export").iterdir()}
    assert written.keys() == {"config.json", "model.safetensors", "parity.json"}
    assert not any(b"secret" in data for data in written.values())
    assert f"the folder has no tokenizer: data.tokenizer {spec} cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_links_out_of_a_folder_are_not_copied(file: str, tmp_path: Path) -> None:
    """Fault copies-of-private-files: there and back. The links in Hugging Face's cache are followed."""
    cache = tmp_path / "models--a--b"
    source = cache / "snapshots/0123"
    native_to_hf(NativeToHf(make_checkpoint(tmp_path / "run"), tmp_path / "plain", verify=False))
    make_tokenizer(tmp_path / "plain", "hf, eos_token alone")
    source.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for path in (tmp_path / "plain").iterdir():
        path.rename(cache / "blobs" / path.name)
        (source / path.name).symlink_to(f"../../blobs/{path.name}")
    hf_to_native(HfToNative(source, tmp_path / "native", verify=False))
    wanted = (cache / "blobs" / file).read_text()
    assert (tmp_path / "native" / file).read_text() == wanted
    assert not (tmp_path / "native" / file).is_symlink()
    (tmp_path / "private").write_text(wanted)
    for folder, convert in (
        (source, lambda: hf_to_native(HfToNative(source, tmp_path / "again", verify=False))),
        (tmp_path / "native", lambda: native_to_hf(NativeToHf(tmp_path / "native", tmp_path / "again", verify=False))),
    ):
        (folder / file).unlink()
        (folder / file).symlink_to(tmp_path / "private")
        with pytest.raises(CheckpointError, match=f"{file}: is a link to .*private, out of the folder"):
            convert()
        assert not (tmp_path / "again").exists()


# What follows from a tokenizer that nobody named


def test_no_end_token_follows_from_the_default_tokenizer(tmp_path: Path) -> None:
    """Fault tokens-in-config-json: `bytes` is the default of data.tokenizer, and 256 then is a word like any other."""

    def end(source: Path, name: str, **options: Any) -> Any:
        native_to_hf(NativeToHf(source, tmp_path / name, verify=False, **options))
        return json.loads((tmp_path / name / "config.json").read_text())["eos_token_id"]

    (tmp_path / "a.txt").write_text("text")
    preprocess([tmp_path / "a.txt"], tmp_path / "described", PreprocessOptions(tokenizer="bytes"))
    unnamed = make_checkpoint(
        tmp_path / "native", data=DataConfig(train=(f"0.5:{tmp_path / 'megatrons'}", "synthetic"))
    )
    assert end(unnamed, "unnamed") is None
    assert "name the tokenizer with --tokenizer" in report(tmp_path / "unnamed")["why"]
    assert end(unnamed, "named", tokenizer="bytes") == 256
    described = make_checkpoint(
        tmp_path / "other", data=DataConfig(train=(f"0.5:{tmp_path / 'described'}", "synthetic"))
    )
    assert end(described, "from_description") == 256
    assert end(unnamed, "other_tokenizer", tokenizer=make_tokenizer(tmp_path / "spm", "spm, ours")) == 2


def test_start_and_end_tokens_and_generation_settings_outlast_a_training(tmp_path: Path) -> None:
    """Fault tokens-in-config-json: a run begun with a converted folder is exported without --like."""
    shape = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 88}
    config = transformers.LlamaConfig(
        **shape, vocab_size=800, max_position_embeddings=64, bos_token_id=0, eos_token_id=[1, 2]
    )
    source = tmp_path / "hf"
    transformers.LlamaForCausalLM(config).save_pretrained(source)
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.5, "do_sample": true}')
    make_tokenizer(source, "hf")
    hf_to_native(HfToNative(source, tmp_path / "native", verify=False))
    raw = json.loads((source / "config.json").read_text())
    spec = f"hf:{tmp_path / 'native' / 'tokenizer.json'}"
    model = convert_checkpoint.from_hugging_face(raw)
    for name, sections in (
        ("weights", {"checkpoint": CheckpointConfig(init_from=str(tmp_path / "native"))}),
        ("tokenizer", {"data": DataConfig(tokenizer=spec)}),
    ):
        run = make_run(tmp_path / name, model, **sections)
        native_to_hf(NativeToHf(run, tmp_path / f"export {name}", verify=False))
        found = json.loads((tmp_path / f"export {name}" / "config.json").read_text())
        assert (found["bos_token_id"], found["eos_token_id"]) == (0, [1, 2])
        written = (tmp_path / f"export {name}" / "generation_config.json").read_text()
        assert written == (source / "generation_config.json").read_text()
    other = make_run(tmp_path / "other", replace(model, intermediate_size=96), data=DataConfig(tokenizer=spec))
    native_to_hf(NativeToHf(other, tmp_path / "export other", verify=False))
    found = json.loads((tmp_path / "export other" / "config.json").read_text())
    assert (found["bos_token_id"], found["eos_token_id"]) == (None, 1), "the folder describes another model"


# sentencepiece


def test_a_sentencepiece_model_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """Newline as a symbol of a model with newlines normalized away; a model of characters."""
    for name, options in (
        ("protected", {"model_type": "unigram", "user_defined_symbols": ["\n"]}),
        ("characters", {"model_type": "char"}),
    ):
        model = io.BytesIO()
        options |= {"vocab_size": 200, "hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1}
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines()), model_writer=model, **options)
        path = tmp_path / f"{name}.model"
        path.write_bytes(model.getvalue())
        with pytest.raises(InexpressibleError):
            sentencepiece_json(SentencePieceTokenizer(path), path)


def test_check_texts_hold_the_symbols() -> None:
    assert check_texts([]) == list(TEXTS)
    assert "a<|x|>b" in " ".join(check_texts(["<|x|>"]))
    assert len(TEXTS) > 36
    assert len({*TEXTS}) == len(TEXTS)
