"""Text to tokens: tokenizers, corpus tools, entropies. Preprocessing: test_data_preprocess.py."""

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megapar_tools.prepare.preprocess import PreprocessOptions, preprocess

from megapar.base.errors import ConfigError, DataError
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, DataConfig, TrainConfig
from megapar.data.indexed import IndexedDataset
from megapar.data.prepared import write_sidecar
from megapar.data.tokenizer import load_tokenizer, made_by, train_sentencepiece
from megapar.train import data as train_data
from tests.support.tokenizers import byte_pairs, hugging_face
from tools.entropy import cross_entropies

ROOT = Path(__file__).parent.parent
TEXTS = [
    "def main() -> None:\n    print('one')\n\n\treturn  None\r\n",
    "  leading, trailing and   inner spaces  \n\n\n",
    "digits 1234567890, NUL \0, BOM \ufeff, control \x1b[0m, separators \x85 \u2028",
    "漢字, ελληνικά, é (composed), e\u0301 (not), 🙂, 👩\u200d👩\u200d👧",
    "</s><s><unk> <0x41> are text here",
    "x" * 10_000,
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    train_sentencepiece([p.read_text() for p in sorted((ROOT / "megapar").rglob("*.py"))[:8]], 600, path)
    return path


def run_tool(name: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, ROOT / "tools" / name, *args], capture_output=True, text=True, check=False)


# tokenizers


def test_bytes_round_trip_and_the_end_of_document_is_no_byte():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    for text in TEXTS:
        assert tokenizer.encode(text).tolist() == list(text.encode())
        assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eod]) == text


def test_sentencepiece_gives_every_text_back(model: Path):
    tokenizer = load_tokenizer(f"spm:{model}")
    assert tokenizer.vocab_size == 600
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert tokenizer.decode(ids) == text
        assert tokenizer.eod not in ids
        assert max(ids) < tokenizer.vocab_size
    assert tokenizer.encode("\n\n  \n").tolist().count(3) == 3, "a newline is always one id"
    assert len(tokenizer.encode("        self.")) <= 3, "runs of spaces and common words are single pieces"


def test_training_twice_gives_the_same_file(tmp_path: Path):
    """Also of a text longer than 4192 bytes: sentencepiece leaves those out by default."""
    for name in ("a", "b"):
        train_sentencepiece(["one two three two one\n" * 300], 280, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_hugging_face_files_truncate_and_add_nothing(tmp_path: Path):
    """Texts longer than the file's limit come back whole; a special token inside a text is text."""
    tokenizer = load_tokenizer(f"hf:{hugging_face(tmp_path)}")
    assert (tokenizer.vocab_size, tokenizer.eod) == (400, 1)
    for text in [*TEXTS, "<|endoftext|> and <s> " * 20]:
        ids = tokenizer.encode(text).tolist()
        assert tokenizer.decode([*ids, tokenizer.eod]) == text
        assert not {0, 1} & set(ids)
    assert len(tokenizer.encode("def test")) < len("def test")


def test_the_end_of_a_document_is_what_the_files_say(tmp_path: Path):
    path = hugging_face(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<s>"}}')
    assert load_tokenizer(f"hf:{path}").eod == 0
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(DataError, match="which token ends a document\\? Found <end>"):
        load_tokenizer(f"hf:{path}")
    (tmp_path / "tokenizer_config.json").unlink()
    hugging_face(tmp_path, added_tokens=[])
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    with pytest.raises(DataError, match="a cannot end a document: text can hold it"):
        load_tokenizer(f"hf:{path}")


def test_the_fingerprint_is_of_what_decides_the_ids(tmp_path: Path):
    """Fault tokenizer-fingerprint: transformers adds fields to tokenizer_config.json when it saves a tokenizer, and
    chat templates change. Data prepared under the fingerprint of both files, as earlier versions wrote it, is still
    taken."""
    path, beside = hugging_face(tmp_path), tmp_path / "tokenizer_config.json"
    beside.write_text('{"eos_token": "<|endoftext|>"}')
    first = load_tokenizer(f"hf:{path}")
    assert made_by(first, hashlib.sha256(path.read_bytes() + beside.read_bytes()).hexdigest())
    beside.write_text('{"eos_token": {"content": "<|endoftext|>"}, "is_local": true, "chat_template": "{{ x }}"}')
    again = load_tokenizer(f"hf:{path}")
    assert made_by(again, first.fingerprint)
    beside.write_text('{"eos_token": "<s>"}')
    assert not made_by(load_tokenizer(f"hf:{path}"), first.fingerprint)
    beside.write_text('{"eos_token": "<|endoftext|>"}')
    path.write_text(path.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true'))
    assert not made_by(load_tokenizer(f"hf:{path}"), first.fingerprint)


def test_data_described_by_an_earlier_version_is_trained_on(tmp_path: Path):
    """Fault tokenizer-fingerprint: its description holds the fingerprint of both files."""
    path, prefix = hugging_face(tmp_path), tmp_path / "out"
    (tmp_path / "a.txt").write_text("text " * 20)
    facts = preprocess([tmp_path / "a.txt"], prefix, PreprocessOptions(tokenizer=f"hf:{path}"))
    older = hashlib.sha256(path.read_bytes()).hexdigest()
    assert older != facts["tokenizer"]["sha256"]
    data = DataConfig(train=(str(prefix),), tokenizer=f"hf:{path}")
    config = Config(model=ModelConfig(vocab_size=400), train=TrainConfig(seq_length=4), data=data)
    for digest in (facts["tokenizer"]["sha256"], older):
        write_sidecar(prefix, facts | {"tokenizer": facts["tokenizer"] | {"sha256": digest}})
        assert len(train_data._open(config, [(str(prefix), (0.0, 1.0))], seed=0, num_targets=1, kind="texts")) == 1
    write_sidecar(prefix, facts | {"tokenizer": facts["tokenizer"] | {"sha256": "0"}})
    with pytest.raises(DataError, match="is another: name the one that made them"):
        train_data._open(config, [(str(prefix), (0.0, 1.0))], seed=0, num_targets=1, kind="texts")


def test_special_tokens_in_a_text_become_ids_only_where_that_is_asked_for(tmp_path: Path):
    """Fault special-tokens-in-text."""
    spec, text = f"hf:{hugging_face(tmp_path)}", "<s>one<|endoftext|>"
    parsed = load_tokenizer(spec, parse_special=True)
    assert parsed.encode(text).tolist() == [0, *load_tokenizer(spec).encode("one"), 1]
    (tmp_path / "a.txt").write_text(text)
    facts = preprocess(
        [tmp_path / "a.txt"], tmp_path / "out", PreprocessOptions(tokenizer=spec, special_tokens="parse")
    )
    assert facts["tokenizer"]["special_tokens"] == "parse"
    assert IndexedDataset(tmp_path / "out").document(0).tolist() == parsed.encode(text).tolist()
    facts = preprocess([tmp_path / "a.txt"], tmp_path / "out", PreprocessOptions(tokenizer=spec))
    assert "special_tokens" not in facts["tokenizer"]
    start, *ids = IndexedDataset(tmp_path / "out").document(0).tolist()
    assert start == 0  # of the post-processor
    assert not {0, 1} & {*ids}
    with pytest.raises(ConfigError, match="--special_tokens parse: hf: and spm: tokenizers alone"):
        preprocess([tmp_path / "a.txt"], tmp_path / "out", PreprocessOptions(tokenizer="bytes", special_tokens="parse"))


def test_ids_of_a_vocabulary_with_gaps_are_below_its_size(tmp_path: Path):
    path = hugging_face(tmp_path)
    facts = json.loads(path.read_text())
    facts["model"]["vocab"]["zzz"] = 5000
    path.write_text(json.dumps(facts))
    assert load_tokenizer(f"hf:{path}").vocab_size == 5001


@pytest.mark.parametrize("end", ['{"lstrip": true}', '{"content": null}', '["<s>"]', "7"])
def test_an_end_token_that_is_no_text_is_refused_in_one_line(tmp_path: Path, end: str):
    path = hugging_face(tmp_path)
    path.with_name("tokenizer_config.json").write_text(f'{{"eos_token": {end}}}')
    with pytest.raises(DataError, match=r"eos_token in .*tokenizer_config\.json names no token") as caught:
        load_tokenizer(f"hf:{path}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"special_tokens": ["<end>"], "eod": "<end>"}, "special_tokens in .*json must be an object"),
        ({"special_tokens": {"<end>": "300"}, "eod": "<end>"}, "special_tokens in .*json must be an object"),
        ({"special_tokens": {"<end>": 300}, "eod": ["<end>"]}, "is none of the special tokens <end>"),
        ({"special_tokens": {"<end>": -1}, "eod": "<end>"}, "special_tokens in .*json must be an object"),
        ({"special_tokens": {"<end>": 2**31}, "eod": "<end>"}, "special_tokens in .*json must be an object"),
        ({"special_tokens": {"<end>": 7}, "eod": "<end>"}, "<end> has the id 7, which is the rank of a token"),
        ({"pattern": 7}, "tiktoken refuses it"),
        ({"pattern": "("}, "tiktoken refuses it"),
    ],
)
def test_a_tiktoken_description_that_is_none_is_refused_in_one_line(tmp_path: Path, facts: dict[str, Any], said: str):
    path = tmp_path / "ranks"
    byte_pairs(path)
    Path(f"{path}.json").write_text(json.dumps(facts))
    with pytest.raises(DataError, match=said) as caught:
        load_tokenizer(f"tiktoken:{path}")
    assert "\n" not in str(caught.value)


def test_tiktoken_files(tmp_path: Path):
    spec = f"tiktoken:{byte_pairs(tmp_path / 'x.tiktoken', b'de', b'def')}"
    tokenizer = load_tokenizer(spec)
    assert (tokenizer.vocab_size, tokenizer.eod) == (259, 258)
    assert tokenizer.encode("def e").tolist() == [257, 32, 101]
    for text in [*TEXTS, "<|endoftext|>"]:
        assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eod]) == text
    first = tokenizer.fingerprint
    facts = {"pattern": ".", "special_tokens": {"<end>": 300}, "eod": "<end>"}
    (tmp_path / "x.tiktoken.json").write_text(json.dumps(facts))
    tokenizer = load_tokenizer(spec)
    assert (tokenizer.vocab_size, tokenizer.eod) == (301, 300)
    assert tokenizer.encode("def").tolist() == [100, 101, 102], "words of one character"
    assert tokenizer.fingerprint != first


@pytest.mark.parametrize(("spec", "package"), [("hf:{}/tokenizer.json", "tokenizers"), ("tiktoken:{}/x", "tiktoken")])
def test_a_package_that_is_missing_is_named(tmp_path: Path, spec: str, package: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"needs the package {package}: pip install {package}$"):
        load_tokenizer(spec.format(tmp_path))


def test_bad_tokenizers_are_refused_in_one_line(tmp_path: Path):
    (tmp_path / "foreign.model").write_text("no model")
    cut = byte_pairs(tmp_path / "cut.tiktoken")
    cut.write_bytes(cut.read_bytes()[:1000])
    twice = byte_pairs(tmp_path / "twice.tiktoken")
    twice.write_bytes(twice.read_bytes() + b"YWJj 7\n")
    beyond = byte_pairs(tmp_path / "beyond.tiktoken")
    beyond.write_bytes(beyond.read_bytes() + b"YWJj 1000000000000\n")
    cases = [
        (f"tiktoken:{twice}", DataError, "lines 8 and 257 have the same rank, 7$"),
        (f"tiktoken:{beyond}", DataError, "line 257: rank 1000000000000 is not from 0 to 2147483647$"),
        ("byte", ConfigError, "unknown tokenizer 'byte'; use bytes, spm:FILE"),
        ("spm:", ConfigError, "unknown tokenizer"),
        (f"spm:{tmp_path}/none.model", DataError, "none.model is not a file"),
        (f"spm:{tmp_path}/foreign.model", DataError, "not a sentencepiece model"),
        (f"hf:{tmp_path}/none.json", DataError, "none.json is not a file"),
        (f"hf:{tmp_path}/foreign.model", DataError, "not a tokenizer.json"),
        (f"tiktoken:{tmp_path}/none", DataError, "none is not a file"),
        (f"tiktoken:{tmp_path}/foreign.model", DataError, "line 1: expected BASE64 RANK"),
        (f"tiktoken:{cut}", DataError, "(no rank for byte 1|line 1)"),
    ]
    for spec, kind, said in cases:
        with pytest.raises(kind, match=said) as caught:
            load_tokenizer(spec)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="vocab_size 5000"):
        train_sentencepiece(["a few words"], 5000, tmp_path / "x.model")


# programs


def test_the_corpus_is_the_standard_library_split_by_document(tmp_path: Path):
    for name in ("a", "b"):
        done = run_tool("build_corpus.py", "--output", tmp_path / name, "--max_mb", "2", "--validation_percent", "10")
        assert done.returncode == 0, done.stderr
    parts = {name: (tmp_path / "a" / f"{name}.jsonl").read_bytes() for name in ("train", "validation")}
    assert parts == {name: (tmp_path / "b" / f"{name}.jsonl").read_bytes() for name in parts}
    documents = {name: [json.loads(line) for line in part.splitlines()] for name, part in parts.items()}
    texts = [document["text"] for part in documents.values() for document in part]
    assert len(set(texts)) == len(texts)
    assert 1.9e6 < sum(len(text.encode()) for text in texts) < 3.5e6
    for name, part in documents.items():
        for document in part:
            digest = hashlib.sha256(document["path"].encode()).digest()
            assert (int.from_bytes(digest[-8:], "big") / 2**64 < 0.1) == (name == "validation")


def test_text_to_tokens_to_entropies_through_the_programs(tmp_path: Path):
    """build_corpus, train_tokenizer, preprocess_data and entropy one after the other."""
    assert run_tool("build_corpus.py", "--output", tmp_path, "--max_mb", "2").returncode == 0
    model = tmp_path / "tok.model"
    options = ("--input", tmp_path / "train.jsonl", "--output", model, "--vocab_size", "1000", "--sample_mb", "1")
    assert run_tool("train_tokenizer.py", *options).returncode == 0
    for name in ("train", "validation"):
        options = ("--input", tmp_path / f"{name}.jsonl", "--output", tmp_path / name, "--tokenizer", f"spm:{model}")
        done = run_tool("preprocess_data.py", *options, "--workers", "2", "--append_eod")
        assert done.returncode == 0, done.stderr
    tokenizer, dataset = load_tokenizer(f"spm:{model}"), IndexedDataset(tmp_path / "validation")
    first = json.loads((tmp_path / "validation.jsonl").open().readline())["text"]
    assert tokenizer.decode(dataset.document(0)[:-1].tolist()) == first
    assert dataset.document(0)[-1] == tokenizer.eod
    options = ("--train", tmp_path / "train", "--validation", tmp_path / "validation", "--tokenizer", f"spm:{model}")
    done = run_tool("entropy.py", *options, "--json", tmp_path / "e.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "e.json").read_text())
    assert found["bigram"] < found["unigram"] - 1 < math.log(1000) - 1


def test_programs_print_one_line_and_an_exit_code(tmp_path: Path):
    output = ("--output", tmp_path / "o", "--tokenizer")
    for code, args in (
        (3, ("--input", tmp_path / "none.txt", *output, "bytes")),
        (2, ("--input", __file__, *output, "words")),
        (3, ("--input", __file__, *output, f"spm:{tmp_path}/none.model")),
        (7, ("--input", __file__, "--output", Path(__file__) / "o", "--tokenizer", "bytes")),
    ):
        done = run_tool("preprocess_data.py", *args)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        assert sum("Error: " in line for line in done.stderr.splitlines()) == 1


def test_a_tokenizer_is_trained_on_the_key_that_is_named_and_a_bad_line_is_an_error_of_the_data(tmp_path: Path):
    """The line, the key and the way out, as in preprocess_data; nothing about the size of the vocabulary."""
    rows = [{"content": f"line {number} of some text"} for number in range(400)]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / "m", "--vocab_size", "300")
    done = run_tool("train_tokenizer.py", *options)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("DataError: ")
    assert "a.jsonl: line 1" in done.stderr
    assert "--text_field names the key of the text; this line has content" in done.stderr
    assert "vocab_size" not in done.stderr
    assert not (tmp_path / "m").exists()
    done = run_tool("train_tokenizer.py", *options, "--text_field", "content")
    assert done.returncode == 0, done.stderr
    assert load_tokenizer(f"spm:{tmp_path / 'm'}").vocab_size == 300


# entropies


def test_entropies_of_a_hand_computed_example():
    """Vocabulary {0, 1, 2}; train 0 1 0 1 0: c = 3, 2, 0 of 5. Held out 0 1 2 2: targets 1, 2, 2."""
    p = np.array([4, 3, 1]) / 8
    after_0_comes_1 = (2 + 1 * p[1]) / (2 + 1)  # 0 begins two pairs, always 01: one follower
    after_1_comes_2 = (0 + 1 * p[2]) / (2 + 1)
    after_2_comes_2 = p[2]  # 2 begins no pair
    found = cross_entropies(np.array([0, 1, 0, 1, 0], np.uint16), np.array([0, 1, 2, 2], np.uint16), 3)
    assert found.unigram == pytest.approx(-np.log([3 / 8, 1 / 8, 1 / 8]).mean(), rel=1e-12)
    assert found.bigram == pytest.approx(-np.log([after_0_comes_1, after_1_comes_2, after_2_comes_2]).mean(), rel=1e-12)


def test_bigram_probabilities_sum_to_one():
    """Over all next tokens, after a frequent, a rare and an unseen token."""
    train = np.random.default_rng(0).zipf(1.5, 2000).clip(max=49)
    for before in (1, int(train[-1]), 0):
        total = sum(math.exp(-cross_entropies(train, np.array([before, t]), 50).bigram) for t in range(50))
        assert total == pytest.approx(1, rel=1e-9)


def test_entropies_refuse_what_they_cannot_count():
    with pytest.raises(DataError, match="two tokens"):
        cross_entropies(np.array([1]), np.array([1, 2]), 3)
    with pytest.raises(DataError, match="token id 7 is outside the vocabulary of 3"):
        cross_entropies(np.array([1, 2]), np.array([1, 7]), 3)
