"""tools/benchmark.py data and delivery at sizes of seconds."""

import json
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from megapar.data.tokenizer import load_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "tools"))
import build_corpus
from benchmarks import data, delivery, harness


@pytest.mark.slow
def test_preprocessing_is_measured_for_each_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of a corpus this small, 3 percent for validation may be no document at all.
    monkeypatch.setattr(data, "CorpusArguments", partial(build_corpus.Arguments, validation_percent=50.0))
    # One of the tokenizers: each takes many starts of processes.
    train = data.train
    monkeypatch.setattr(data, "train", lambda *args: islice(train(*args), 1))
    file = tmp_path / "out.json"
    harness.run(data.measure, data.Options(megabytes=0.2, rounds=1, workers=(1, 2), vocab_size=512, json=file))
    found = json.loads(file.read_text())
    (one,) = found["runs"]
    assert one["tokenizer"] == "spm"
    assert list(one["medians"]) == ["bare 1", "preprocess 1", "bare 2", "preprocess 2"]
    for row in one["medians"].values():
        tokens = row["tokens_per_second"] / row["mb_per_second"] * found["text_megabytes"]
        assert abs(tokens - one["tokens"]) < 0.01


def test_tokenizers_that_are_measured_restore_the_text(tmp_path: Path) -> None:
    texts = [f"{i} bottles of milk, and één more\n" for i in range(200)]
    specs = list(data.train(texts, 300, tmp_path))
    assert [spec.partition(":")[0] for spec in specs] == ["spm", "hf", "tiktoken"]
    tokenizers = [load_tokenizer(spec) for spec in specs]
    assert all(tokenizer.decode(tokenizer.encode(texts[7])) == texts[7] for tokenizer in tokenizers[1:])
    # The third has the merges of the second.
    assert len(tokenizers[1].encode(texts[7])) == len(tokenizers[2].encode(texts[7])) < len(texts[7])


@pytest.mark.slow
def test_delivery_is_measured_for_each_size(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    harness.run(delivery.measure, delivery.Options(samples=(1000, 10**6), steps=3, documents=1000, json=file))
    found = json.loads(file.read_text())
    assert [row["samples"] for row in found["delivery"]] == [1000, 10**6]
    assert all(min(row.values()) > 0 for row in found["delivery"])
    assert found["opening_seconds"] > 0
