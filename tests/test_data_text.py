"""Text to tokens: tokenizers, preprocessing, corpus tools, entropies."""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megapar.data import preprocess as preprocessing
from megapar.data.entropy import cross_entropies
from megapar.data.indexed import IndexedDataset
from megapar.data.preprocess import Span, preprocess, read_documents
from megapar.data.tokenizer import load_tokenizer, train_sentencepiece
from megapar.errors import ConfigError, DataError

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


def jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def run_tool(name: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, ROOT / "tools" / name, *args], capture_output=True, text=True, check=False)


# tokenizers


def test_bytes_round_trip_and_the_end_of_document_is_no_byte():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    for text in TEXTS:
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eod]) == text


def test_sentencepiece_gives_every_text_back(model: Path):
    tokenizer = load_tokenizer(f"spm:{model}")
    assert tokenizer.vocab_size == 600
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eod not in ids
        assert max(ids) < tokenizer.vocab_size
    assert tokenizer.encode("\n\n  \n").count(3) == 3, "a newline is always one id"
    assert len(tokenizer.encode("        self.")) <= 3, "runs of spaces and common words are single pieces"


def test_training_twice_gives_the_same_file(tmp_path: Path):
    """Also of a text longer than the 4192 bytes at which sentencepiece by default leaves one out."""
    for name in ("a", "b"):
        train_sentencepiece(["one two three two one\n" * 300], 280, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_bad_tokenizers_are_refused_in_one_line(tmp_path: Path):
    (tmp_path / "foreign.model").write_text("no model")
    cases = [
        ("byte", ConfigError, "unknown tokenizer 'byte'; use bytes or spm:FILE"),
        ("spm:", ConfigError, "unknown tokenizer"),
        (f"spm:{tmp_path}/none.model", DataError, "none.model is not a file"),
        (f"spm:{tmp_path}/foreign.model", DataError, "not a sentencepiece model"),
    ]
    for spec, kind, said in cases:
        with pytest.raises(kind, match=said) as caught:
            load_tokenizer(spec)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="vocab_size 5000"):
        train_sentencepiece(["a few words"], 5000, tmp_path / "x.model")


# preprocessing


def test_documents_become_sequences_in_input_order(tmp_path: Path):
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "b.py").write_bytes(b"b\r\n")
    (tmp_path / "folder" / "deep" / "a.txt").write_bytes(b"a")
    (tmp_path / "folder" / "ignored.bin").write_bytes(b"\xff")
    lines = jsonl(tmp_path / "z.jsonl", ["first", "", "ζ"])
    inputs = [lines, tmp_path / "folder", tmp_path / "folder" / "b.py"]
    summary = preprocess(inputs, tmp_path / "out", "bytes", append_eod=True)
    dataset = IndexedDataset(tmp_path / "out")
    expected = ["first", "ζ", "b\r\n", "a", "b\r\n"]
    assert [dataset.document(i).tolist() for i in range(len(dataset))] == [[*t.encode(), 256] for t in expected]
    assert (summary.documents, summary.tokens, summary.empty) == (5, len(dataset.tokens), 1)
    assert [text for text in read_documents(inputs) if text] == expected
    preprocess(inputs, tmp_path / "plain", "bytes")
    assert IndexedDataset(tmp_path / "plain").tokens.tolist() == list("".join(expected).encode())


def test_the_number_of_workers_changes_no_byte(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch):
    """Many small tasks, lines longer than a task, and text files between two .jsonl files."""
    monkeypatch.setattr(preprocessing, "_TASK_BYTES", 500)
    texts = [f"document {i} " * (i * 37 % 91) for i in range(150)]
    inputs = [jsonl(tmp_path / "a.jsonl", texts), tmp_path / "m.txt", jsonl(tmp_path / "b.jsonl", texts[::-1])]
    inputs[1].write_text("between " * 400)
    outputs = []
    for workers in (1, 3):
        preprocess(inputs, tmp_path / f"w{workers}", f"spm:{model}", workers=workers, append_eod=True)
        outputs.append([(tmp_path / f"w{workers}.{suffix}").read_bytes() for suffix in ("bin", "idx")])
    assert outputs[0] == outputs[1]
    tokenizer, dataset = load_tokenizer(f"spm:{model}"), IndexedDataset(tmp_path / "w3")
    decoded = [tokenizer.decode(dataset.document(i)[:-1].tolist()) for i in range(len(dataset))]
    assert decoded == [t for t in [*texts, inputs[1].read_text(), *texts[::-1]] if t]


@pytest.mark.parametrize("task_bytes", range(1, 40))
def test_every_line_belongs_to_one_task(tmp_path: Path, task_bytes: int, monkeypatch: pytest.MonkeyPatch):
    """Wherever the cuts fall: inside a line, on its newline, right after it; the last line has no newline."""
    monkeypatch.setattr(preprocessing, "_TASK_BYTES", task_bytes)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text":"1"}\n{"text":"23"}\n\n{"text":"4"}\n{"text":"567"}')
    assert list(read_documents([path])) == ["1", "23", "4", "567"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "cut', "JSONDecodeError"),
        (b'{"body": "x"}', "KeyError"),
        (b'{"text": 5}', "AttributeError"),
        (b'["text"]', "TypeError"),
        (b'{"text": "\xff"}', "UnicodeDecodeError"),
        (b'{"text": "\\ud800"}', "UnicodeEncodeError"),
        (b'\xef\xbb\xbf{"text": "x"}', "BOM"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, said: str):
    """(rows D8, D9) Whatever the number of workers, the first bad line is the one that is named; nothing is written."""
    path = tmp_path / "a.jsonl"
    good = b'{"text": "good"}\n'
    path.write_bytes(good * 3 + line + b"\n" + good + line + b"\n")
    with pytest.raises(DataError, match=rf"a.jsonl: line 4 \(byte 51\).*{said}"):
        list(read_documents([path]))
    with pytest.raises(DataError, match=r"line 4 \(byte 51\)"):
        preprocess([path], tmp_path / "out", "bytes")
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_input_that_cannot_be_used_is_refused(tmp_path: Path):
    """(row D1)"""
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "a.pdf").write_bytes(b"x")
    (tmp_path / "none").mkdir()
    empty = jsonl(tmp_path / "empty.jsonl", ["", ""])
    cases = [
        ([tmp_path / "latin.txt"], DataError, "latin.txt: byte 3: not UTF-8"),
        ([tmp_path / "missing.txt"], DataError, "no such file"),
        ([tmp_path / "a.pdf"], ConfigError, "unknown kind of file"),
        ([tmp_path / "none"], DataError, "no .jsonl"),
        ([empty], DataError, "0 tokens"),
    ]
    for inputs, kind, said in cases:
        with pytest.raises(kind, match=said):
            preprocess(inputs, tmp_path / "out", "bytes")
    assert not (tmp_path / "out.bin").exists()
    with pytest.raises(ConfigError, match="--workers 0"):
        preprocess([empty], tmp_path / "out", "bytes", workers=0)


def test_a_killed_worker_is_named_and_not_waited_for(tmp_path: Path):
    """(row D13) Worker 0 hangs on a pipe that nobody writes, and is killed while worker 1 goes on."""
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "good.txt").write_text("x")
    with preprocessing._worker_pool(2, "bytes", append_eod=False) as pool:

        def tasks() -> Iterator[list[Span]]:
            yield [Span(tmp_path / "pipe.txt", 0, 1)]
            os.kill(next(iter(pool.values())).pid, signal.SIGKILL)
            yield [Span(tmp_path / "good.txt", 0, 1)]

        with pytest.raises(DataError, match=r"worker 0 \(pid \d+\) died with exit code -9"):
            list(preprocessing._in_order(tasks(), pool))
        processes = list(pool.values())
    assert not any(process.is_alive() for process in processes)


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
