"""Text files to .bin/.idx pairs: kinds of files, bad lines, workers, resumption, order, and what is done with pairs."""

import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import zstandard
from megapar_tools.prepare import corpus
from megapar_tools.prepare import preprocess as preprocessing
from megapar_tools.prepare.corpus import DocumentPlace, FileRange, Reading, cut, find_files
from megapar_tools.prepare.preprocess import (
    PartSpans,
    PreprocessOptions,
    TextCounts,
    encode,
    preprocess,
    read_documents,
)
from numpy.typing import NDArray

from megapar.base.errors import ConfigError, DataError
from megapar.data import prepared
from megapar.data.indexed import IndexedDataset, IndexedWriter
from megapar.data.prepared import first_occurrences, merge_prepared, read_sidecar, split, verify
from megapar.data.tokenizer import ByteTokenizer, train_sentencepiece
from megapar.data.workers import run, worker_pool
from tests.support.faults import gone
from tests.support.sweeps import slow_but

ROOT = Path(__file__).parent.parent
BYTES = PreprocessOptions(tokenizer="bytes", append_eod=True)
TEXTS = [f"document {i} ü\n" * (i * 37 % 91) for i in range(150)]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are made here, one after the other, without a second for the start of each process."""

    @contextmanager
    def pool(count: int, prepare: Callable[[], Any]) -> Iterator[Any]:
        yield prepare()

    def here(tasks: list[PartSpans], work: Callable[..., None]) -> Iterator[TextCounts]:
        for task in tasks:
            reports: list[TextCounts] = []
            work(task, reports.append)
            yield from reports

    monkeypatch.setattr(preprocessing, "worker_pool", pool)
    monkeypatch.setattr(preprocessing, "run", here)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocessing, "_SHARD_BYTES", 5000)


def jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def documents(prefix: Path) -> list[str]:
    """Texts of a pair of bytes; each ends with the id for the end of a document."""
    dataset = IndexedDataset(prefix)
    found = [dataset.document(i).tolist() for i in range(len(dataset))]
    assert all(tokens[-1] == 256 for tokens in found)
    return [bytes(tokens[:-1]).decode() for tokens in found]


def outputs(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}.{suffix}").read_bytes() for suffix in ("bin", "idx", "json")]


def run_tool(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools/preprocess_data.py", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# documents out of files


def test_documents_become_sequences_in_input_order(tmp_path: Path, in_process: None):
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "b.py").write_bytes(b"b\r\n")
    (tmp_path / "folder" / "deep" / "a.txt").write_bytes(b"a")
    (tmp_path / "folder" / "ignored.bin").write_bytes(b"\xff")
    lines = jsonl(tmp_path / "z.jsonl", ["first", "", "ζ"])
    inputs = [lines, tmp_path / "folder", tmp_path / "folder" / "b.py"]
    facts = preprocess(inputs, tmp_path / "out", BYTES)
    expected = ["first", "ζ", "b\r\n", "a", "b\r\n"]
    assert documents(tmp_path / "out") == expected
    assert (facts["documents"], facts["empty_documents"]) == (5, 1)
    assert facts["tokens"] == facts["text_bytes"] + 5 == len(IndexedDataset(tmp_path / "out").tokens)
    assert [text for text in read_documents(inputs) if text] == expected
    preprocess(inputs, tmp_path / "plain", PreprocessOptions(tokenizer="bytes"))
    assert IndexedDataset(tmp_path / "plain").tokens[:].tolist() == list("".join(expected).encode())


@pytest.mark.parametrize("size", range(1, 40))
def test_every_line_belongs_to_one_span(tmp_path: Path, size: int):
    """Wherever the cuts fall: inside a line, on its newline, right after it; the last line has no newline."""
    jsonl_path, text_path = tmp_path / "a.jsonl", tmp_path / "b.txt"
    jsonl_path.write_text('{"text":"1"}\n{"text":"23"}\n\n{"text":"4"}\r\n{"text":"567"}')
    text_path.write_bytes(b"1\n23\r\n\n  \n4 \n\n567")
    reading = Reading(text_lines=True)
    spans = [span for shard in cut([jsonl_path, text_path], reading, size) for span in shard]
    readers = [corpus.SpanReader(span, reading) for span in spans]
    assert [text for reader in readers for _, text in reader] == ["1", "23", "4", "567", "1", "23", "4 ", "567"]
    assert sum(reader.lines for reader in readers) == 5 + 7
    sizes = [path.stat().st_size for path in (jsonl_path, text_path)]
    assert sum(reader.num_bytes for reader in readers) == sum(span.num_bytes for span in spans) == sum(sizes)


def test_compressed_files_and_files_of_one_document(tmp_path: Path):
    plain = jsonl(tmp_path / "a.jsonl", TEXTS).read_bytes()
    half = len(plain) // 2
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain[:half]) + gzip.compress(plain[half:]))
    frames = [zstandard.ZstdCompressor().compress(piece) for piece in (plain[:half], plain[half:])]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        assert list(read_documents([tmp_path / name])) == TEXTS
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"1\n2\n"))
    (tmp_path / "a.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(b"3\n4\n"))
    inputs = [tmp_path / "a.txt.gz", tmp_path / "a.txt.zst"]
    assert list(read_documents(inputs)) == ["1\n2\n", "3\n4\n"]
    assert list(read_documents(inputs, Reading(text_lines=True))) == ["1", "2", "3", "4"]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_damaged_compressed_files_are_named(tmp_path: Path, suffix: str):
    """Fault undecodable-text. Cut short anywhere, and with a flipped byte; zstandard's own reader takes a file cut
    short for whole."""
    plain = jsonl(tmp_path / "a.jsonl", TEXTS).read_bytes()
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    packed = gzip.compress(plain) if suffix == "gz" else compressor.compress(plain)
    path = tmp_path / f"a.jsonl.{suffix}"
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 255
    for damaged in (packed[:-1], packed[: len(packed) // 2], packed[:3], bytes(flipped), b"no such format"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=f"^{path}: ") as caught:
            list(read_documents([path]))
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_parquet(tmp_path: Path, in_process: None, small_shards: None):
    """Row groups are read apart; text may be null, a dictionary, in another column, or no UTF-8."""
    pyarrow = pytest.importorskip("pyarrow", reason="no parquet without pyarrow")
    from pyarrow import parquet

    texts = [text for text in TEXTS if text]
    table = pyarrow.table({"body": pyarrow.array(texts).dictionary_encode(), "n": range(len(texts))})
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path, row_group_size=7, compression="none")
    recipe = PreprocessOptions(tokenizer="bytes", append_eod=True, text_field="body")
    assert len(list(cut([path], recipe, 1000))) > 5
    assert preprocess([path], tmp_path / "out", recipe)["documents"] == len(texts)
    assert documents(tmp_path / "out") == texts
    for field, said in (("text", "no column text; --text_field names one of body, n"), ("n", "column n holds int64")):
        with pytest.raises(DataError, match=said):
            list(read_documents([path], Reading(text_field=field)))
    raw = pyarrow.array([b"good", None, b"\xff"], pyarrow.binary())
    parquet.write_table(pyarrow.table({"text": raw}), path, row_group_size=2)
    with pytest.raises(DataError, match=r"a.parquet: row 2 \(row group 0\): no text"):
        list(read_documents([path]))
    assert list(read_documents([path], Reading(on_bad_line="replace"))) == ["good", "\ufffd"]
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"a.parquet: damaged, cut short"):
        list(read_documents([path]))


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", "zstandard")])
def test_a_package_that_is_missing_is_named(tmp_path: Path, name: str, package: str, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / name).write_bytes(b"x")
    for module in (package, "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"needs the package {package}: pip install {package}$"):
        list(read_documents([tmp_path / name]))


def test_input_that_cannot_be_used_is_refused(tmp_path: Path, in_process: None):
    """Fault no-tokens."""
    (tmp_path / "latin.txt").write_bytes(b"tea\ncaf\xe9")
    (tmp_path / "a.pdf").write_bytes(b"x")
    (tmp_path / "none").mkdir()
    empty = jsonl(tmp_path / "empty.jsonl", ["", ""])
    cases = [
        ([tmp_path / "latin.txt"], DataError, r"latin.txt: line 2 \(byte 7\): not UTF-8"),
        ([tmp_path / "missing.txt"], DataError, "no such file"),
        ([tmp_path / "a.pdf"], ConfigError, "unknown kind of file"),
        ([tmp_path / "none"], DataError, "no .jsonl"),
        ([empty], DataError, "empty.jsonl: 0 tokens"),
    ]
    for inputs, kind, said in cases:
        with pytest.raises(kind, match=said):
            preprocess(inputs, tmp_path / "out", BYTES)
    for options, workers in ((BYTES, 0), (PreprocessOptions(tokenizer="bytes", shuffle=-1), 1)):
        with pytest.raises(ConfigError, match="--workers"):
            preprocess([empty], tmp_path / "out", options, workers=workers)
    assert not (tmp_path / "out.bin").exists()
    assert not (tmp_path / "out.parts").exists(), "parts of documents without text are of no use to another run"


def test_a_document_of_a_gibibyte_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus, "_LONGEST", 1 << 12)
    monkeypatch.setattr(corpus, "_BLOCK", 1 << 9)
    (tmp_path / "a.txt").write_bytes(b"x\n" * (1 << 12))
    with pytest.raises(DataError, match=r"a.txt: byte 0: a document of 1 GiB or more; --text_lines"):
        list(read_documents([tmp_path / "a.txt"]))
    assert len(list(read_documents([tmp_path / "a.txt"], Reading(text_lines=True)))) == 1 << 12


# bad lines

BAD_LINES = [  # line, reason, what replace makes of it
    (b'{"text": "cut', "not JSON", None),
    (b'{"body": "x"}', "no text", None),
    (b'{"text": 5}', "no text", None),
    (b'{"text": null}', "no text", None),
    (b'["text"]', "no text", None),
    (b'{"text": ' + b"[" * 100_000, "not JSON", None),
    (b'{"text": "a\xffb"}', "not UTF-8", "a\ufffdb"),
    (b'{"text": "a\\ud800b\\ud83d\\ude42"}', "lone surrogate", "a\ufffdb🙂"),
    (b'\xef\xbb\xbf{"text": "x"}', "byte order mark", "x"),
    (b'{"text": "a\\u0000b"}', "NUL", "a\ufffdb"),
    (b'{"text": "a\x00b"}', "not JSON", None),
]


@pytest.mark.parametrize(("line", "reason", "mended"), BAD_LINES)
def test_a_bad_line_is_named_left_out_or_mended(
    tmp_path: Path, line: bytes, reason: str, mended: str | None, in_process: None, monkeypatch: pytest.MonkeyPatch
):
    """Faults undecodable-text, bad-json-lines. Also when lines are shared out between shards: the first bad one is
    named, by its line and byte."""
    # Shards of 20 bytes, and no more than about ten of a long line: each shard costs a file.
    monkeypatch.setattr(preprocessing, "_SHARD_BYTES", max(20, len(line) // 5))
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    good = b'{"text": "good"}\n'
    path.write_bytes(good * 3 + line + b"\n" + good + line + b"\n")
    with pytest.raises(DataError, match=rf"a.jsonl: line 4 \(byte 51\): {reason}") as caught:
        list(read_documents([path]))
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"line 4 \(byte 51\)"):
        preprocess([path], out, BYTES)
    assert {p.name for p in tmp_path.iterdir()} <= {"a.jsonl", "out.parts"}
    places = [f"{path}: line 4 (byte 51)", f"{path}: line 6 (byte {51 + len(line) + 1 + 17})"]
    for policy, text in (("skip", None), ("replace", mended)):
        recipe = PreprocessOptions(tokenizer="bytes", append_eod=True, on_bad_line=policy)  # type: ignore[arg-type]
        facts = preprocess([path], out, recipe)
        between = [] if text is None else [text]
        said = f"{reason}, {'mended' if between else 'left out'}"
        assert documents(out) == ["good"] * 3 + between + ["good"] + between
        assert facts["bad_lines"] == {
            "on_bad_line": policy,
            "counts": {said: 2},
            "first": [f"{place}: {said}" for place in places],
        }
    assert not (tmp_path / "out.parts").exists()


def test_text_files_that_are_bad_are_left_out_or_mended(tmp_path: Path):
    """Fault undecodable-text."""
    for name, raw in (("a", b"\xef\xbb\xbfx"), ("b", b"x\0y"), ("c", b"\xe9"), ("d", "\ufffd fine".encode())):
        (tmp_path / f"{name}.txt").write_bytes(raw)
    assert list(read_documents([tmp_path], Reading(on_bad_line="skip"))) == ["x", "\ufffd fine"]
    mended = ["x", "x\ufffdy", "\ufffd", "\ufffd fine"]
    assert list(read_documents([tmp_path], Reading(on_bad_line="replace"))) == mended


def test_a_byte_order_mark_at_the_start_of_a_file_is_no_part_of_its_text(tmp_path: Path):
    """Fault byte-order-mark: editors write it, and it cost the first document."""
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.jsonl").write_bytes(mark + b'{"text": "one"}\r\n{"text": "two"}\n')
    (tmp_path / "b.jsonl").write_bytes(mark + b"\n" + b'{"text": "three"}\n')
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(mark + b'{"text": "four"}\n'))
    (tmp_path / "d.txt").write_bytes(mark + b"five\nsix\n")
    for policy in ("error", "skip"):
        found = list(read_documents([tmp_path], Reading(on_bad_line=policy)))
        assert found == ["one", "two", "three", "four", "five\nsix\n"]
    (tmp_path / "joined.txt").write_bytes((mark + b"x\n") * 2)
    with pytest.raises(DataError, match=r"joined.txt: line 2 \(byte 5\): byte order mark"):
        list(read_documents([tmp_path / "joined.txt"], Reading(text_lines=True)))


def test_a_line_without_the_key_names_its_keys_and_the_option(tmp_path: Path):
    """Fault line-without-text-key: to skip such lines would skip the whole corpus."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1, "meta": {"text": "within", "n": 2}, "body": "x"}\n')
    keys = "--text_field names the key of the text; this line has id, meta, body, meta.text, meta.n"
    for field, said in (
        ("text", keys),
        ("body.text", keys),
        ("meta.n", "no text (meta.n is int)"),
    ):
        with pytest.raises(DataError, match=re.escape(said)):
            list(read_documents([path], Reading(text_field=field)))
    assert list(read_documents([path], Reading(text_field="meta.text"))) == ["within"]
    path.write_text('{"meta.text": "a key with a dot", "meta": {"text": "within"}}\n')
    assert list(read_documents([path], Reading(text_field="meta.text"))) == ["a key with a dot"]


@pytest.mark.slow
def test_text_within_a_column_of_parquet(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow", reason="no parquet without pyarrow")
    from pyarrow import parquet

    rows = [{"text": "one", "n": 1}, None, {"text": None, "n": 2}, {"text": "two", "n": 3}]
    parquet.write_table(pyarrow.table({"meta": pyarrow.array(rows), "n": range(4)}), tmp_path / "a.parquet")
    reading = Reading(text_field="meta.text", on_bad_line="skip")
    assert list(read_documents([tmp_path / "a.parquet"], reading)) == ["one", "two"]
    for field, said in (("meta.body", "no column meta.body"), ("n.text", "no column n.text"), ("meta", "holds struct")):
        with pytest.raises(DataError, match=said):
            list(read_documents([tmp_path / "a.parquet"], Reading(text_field=field)))


# workers and resumption


def test_the_number_of_workers_changes_no_byte(tmp_path: Path, small_shards: None):
    """Many small shards, lines longer than a shard, and text files between two .jsonl files."""
    model = tmp_path / "small.model"
    train_sentencepiece([(ROOT / "megapar/comm/collectives.py").read_text()], 400, model)
    inputs = [jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "m.txt", jsonl(tmp_path / "b.jsonl", TEXTS[::-1])]
    inputs[1].write_text("between " * 4000)
    recipe = PreprocessOptions(tokenizer=f"spm:{model}", append_eod=True, shuffle=3)
    for workers in (1, 3):
        preprocess(inputs, tmp_path / f"w{workers}", recipe, workers=workers)
    assert outputs(tmp_path / "w1") == outputs(tmp_path / "w3")
    assert not list(tmp_path.glob("*.parts"))


KILLED_RUN = """
import multiprocessing, os, signal
from pathlib import Path
from megapar_tools.prepare import preprocess as preprocessing
from megapar_tools.prepare.preprocess import PreprocessOptions, preprocess

def stop(counts):
    if len([path for path in Path("out.parts").glob("*.json") if "draft" not in path.name]) >= 5:
        (worker,) = multiprocessing.active_children()  # the one that made the parts, so it is not just starting
        Path("worker").write_text(str(worker.pid))
        os.kill(worker.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    preprocessing._SHARD_BYTES = 5000
    options = PreprocessOptions(tokenizer="bytes", append_eod=True)
    preprocess([Path("a.jsonl")], Path("out"), options, workers=1, on_progress=stop)
"""


def test_a_stopped_worker_holds_up_nobody():
    """Fault orphaned-ranks: the pool ends it."""
    with worker_pool(1, slow_and_quick) as pool:
        ((_, process),) = pool.items()
        os.kill(process.pid, signal.SIGSTOP)
        late = threading.Timer(20, os.kill, (process.pid, signal.SIGKILL))  # so that a failure does not wait forever
        late.start()
    assert late.is_alive(), "the pool waited for the worker"
    late.cancel()


def test_a_killed_run_goes_on_where_it_stood(tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch):
    """The result is the same as of a run never killed, and finished parts are not made again.

    Fault orphaned-ranks: no worker is left, a stopped one neither.
    """
    monkeypatch.chdir(tmp_path)
    jsonl(Path("a.jsonl"), TEXTS)
    Path("killed.py").write_text(KILLED_RUN)
    killed = subprocess.run([sys.executable, "killed.py"], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert gone([int(Path("worker").read_text())])
    left = {path.name: path.stat().st_ino for path in Path("out.parts").glob("*.json") if "draft" not in path.name}
    assert len(left) >= 5
    assert not Path("out.bin").exists()
    heard: list[int] = []
    seen: list[dict[str, int]] = []

    def watch(counts: TextCounts) -> None:
        heard.append(counts.documents)
        whole = (path for path in Path("out.parts").glob("*.json") if "draft" not in path.name)
        seen.append({path.name: path.stat().st_ino for path in whole})

    preprocess([Path("a.jsonl")], Path("out"), BYTES, workers=1, on_progress=watch)
    assert heard[0] > 0
    assert left.items() <= seen[-1].items()
    preprocess([Path("a.jsonl")], Path("whole"), BYTES, workers=1)
    assert outputs(Path("out")) == outputs(Path("whole"))
    assert documents(Path("out")) == [text for text in TEXTS if text]


@pytest.mark.parametrize("change", ["nothing", "input", "eod", "tokenizer"])
def test_parts_of_other_options_or_input_are_not_taken(
    tmp_path: Path, change: str, in_process: None, small_shards: None
):
    path = jsonl(tmp_path / "a.jsonl", TEXTS)
    recipe = BYTES
    with pytest.raises(KeyboardInterrupt):
        preprocess([path], tmp_path / "out", BYTES, on_progress=partial(interrupt, 50))
    assert list((tmp_path / "out.parts").glob("*.json"))
    if change == "input":
        path.write_bytes(path.read_bytes().replace(b"document 149", b"Document 149"))
        os.utime(path, ns=(0, 0))
    elif change == "eod":
        recipe = PreprocessOptions(tokenizer="bytes")
    elif change == "tokenizer":
        train_sentencepiece([(ROOT / "megapar/comm/collectives.py").read_text()], 400, tmp_path / "m")
        recipe = PreprocessOptions(tokenizer=f"spm:{tmp_path / 'm'}", append_eod=True)
    heard: list[int] = []
    preprocess([path], tmp_path / "out", recipe, on_progress=lambda counts: heard.append(counts.documents))
    assert (heard[0] > 0) == (change == "nothing")
    preprocess([path], tmp_path / "whole", recipe)
    assert outputs(tmp_path / "out") == outputs(tmp_path / "whole")


def interrupt(documents: int, counts: TextCounts) -> None:
    if counts.documents > documents:
        raise KeyboardInterrupt


def test_input_that_changes_meanwhile_is_noticed(tmp_path: Path, in_process: None):
    path = jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(DataError, match=r"a.jsonl: changed while they were read"):
        preprocess([path], tmp_path / "out", BYTES, on_progress=lambda counts: os.utime(path, ns=(0, 0)))
    assert not (tmp_path / "out.bin").exists()


def test_a_killed_worker_is_named_and_not_waited_for(tmp_path: Path):
    """Fault killed-worker. Worker 0 hangs on a pipe without a writer, and is killed while worker 1 goes on."""
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "good.txt").write_text("x")
    shards = [PartSpans([FileRange(tmp_path / name, 0, 1, 1)], name) for name in ("pipe.txt", "good.txt")]
    with worker_pool(2, partial(preprocessing._work, BYTES, tmp_path)) as pool:
        processes = list(pool.values())
        reports = run(shards, pool)
        next(reports)
        os.kill(processes[0].pid, signal.SIGKILL)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=r"worker 0 \(pid \d+\) was killed by SIGKILL"):
            list(reports)
    assert not any(process.is_alive() for process in processes)


def slow_and_quick() -> Callable[[float, Callable[[Any], None]], None]:
    """A worker failing after as many seconds as its task says."""

    def work(seconds: float, report: Callable[[Any], None]) -> None:
        time.sleep(seconds)
        raise DataError(f"after {seconds}")

    return work


def test_the_earliest_bad_shard_is_named_whoever_fails_first():
    """Fault bad-json-lines. The second is found at once; the first is waited for, the third is not begun."""
    with worker_pool(2, slow_and_quick) as pool, pytest.raises(DataError, match=r"after 0\.7"):
        list(run([0.7, 0.0, 60.0], pool))


def test_parts_with_bad_lines_serve_only_their_own_policy(
    tmp_path: Path, in_process: None, monkeypatch: pytest.MonkeyPatch
):
    """Fault undecodable-text. A run leaving lines out is stopped; a mending one makes the part with the bad line
    anew."""
    monkeypatch.setattr(preprocessing, "_SHARD_BYTES", 20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "\xff"}\n' + b'{"text": "good"}\n' * 8)
    skip, replace = (PreprocessOptions(tokenizer="bytes", append_eod=True, on_bad_line=p) for p in ("skip", "replace"))
    with pytest.raises(KeyboardInterrupt):
        preprocess([path], tmp_path / "out", skip, on_progress=partial(interrupt, 4))
    assert len(list((tmp_path / "out.parts").glob("*.json"))) > 3
    preprocess([path], tmp_path / "out", replace)
    assert documents(tmp_path / "out") == ["\ufffd", *["good"] * 8]


# ids


@pytest.mark.parametrize("size", slow_but([1], [65_535, 65_536, 65_537]))
def test_vocabularies_around_two_bytes_keep_their_last_id(tmp_path: Path, size: int, in_process: None):
    """Fault data-beyond-32-bits."""
    words = {"</s>": 0, **{f"w{i}": i for i in range(1, size)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "t.json"))
    path = jsonl(tmp_path / "a.jsonl", [f"w1 w{size - 1}"])
    with pytest.raises(DataError, match="</s> cannot end a document"):
        preprocess([path], tmp_path / "out", PreprocessOptions(tokenizer=f"hf:{tmp_path / 't.json'}"))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "t.json"))
    facts = preprocess(
        [path], tmp_path / "out", PreprocessOptions(tokenizer=f"hf:{tmp_path / 't.json'}", append_eod=True)
    )
    dataset = verify(tmp_path / "out", full=True)
    assert dataset.tokens[:].tolist() == [1, size - 1, 0]
    assert (facts["tokenizer"]["vocab_size"], dataset.dtype) == (size, np.dtype("<i4"))


def test_an_id_outside_the_vocabulary_is_named(tmp_path: Path):
    """Fault token-ids-beyond-vocabulary."""

    class Wrong(ByteTokenizer):
        def encode(self, text: str) -> NDArray[np.integer]:
            return np.array([1, 2, 257] if text == "wrong" else [3])

    span = FileRange(jsonl(tmp_path / "a.jsonl", ["x", "wrong"]), 0, 1, 1)
    batch = [(DocumentPlace(span, 1, 0), "x"), (DocumentPlace(span, 2, 14), "wrong")]
    said = r"a.jsonl: line 2 \(byte 14\): offset 2: token id 257 is outside the vocabulary of 257"
    with pytest.raises(DataError, match=said):
        encode(batch, Wrong(), BYTES)


# order and duplicates


def test_duplicates_go_and_the_first_stays(tmp_path: Path, in_process: None, small_shards: None):
    texts = [TEXTS[i * i % 150] for i in range(400)]
    inputs = [jsonl(tmp_path / "a.jsonl", texts), jsonl(tmp_path / "b.jsonl", [*texts, "new", "new "])]
    facts = preprocess(
        inputs, tmp_path / "out", PreprocessOptions(tokenizer="bytes", append_eod=True, deduplicate=True)
    )
    expected = list(dict.fromkeys(text for text in [*texts, "new", "new "] if text))
    assert documents(tmp_path / "out") == expected
    assert facts["documents"] == len(expected) < facts["documents_before_deduplication"]


def test_hashes_are_compared_in_as_many_rounds_as_memory_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Words equal in one half only are different."""
    words = np.random.default_rng(0).integers(0, 40, (3000, 2)).astype("<u8")
    paths = [tmp_path / name for name in "abc"]
    for path, part in zip(paths, np.split(words, [1000, 1001]), strict=True):
        part.tofile(path)
    first: dict[tuple[int, int], int] = {}
    for i, (a, b) in enumerate(words.tolist()):
        first.setdefault((a, b), i)
    for limit in (1 << 24, 500):
        monkeypatch.setattr(prepared, "_HASHES", limit)
        assert first_occurrences(paths).tolist() == list(first.values())


def test_a_shuffle_is_a_permutation_that_its_number_names(tmp_path: Path, in_process: None, small_shards: None):
    texts = [f"document {i}" for i in range(3000)]
    path = jsonl(tmp_path / "a.jsonl", [*texts, *texts[:10]])
    found = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        recipe = PreprocessOptions(tokenizer="bytes", append_eod=True, shuffle=seed, deduplicate=True)
        preprocess([path], tmp_path / name, recipe)
        found.append(documents(tmp_path / name))
    assert found[0] == found[1] != found[2]
    assert sorted(found[0]) == sorted(found[2]) == sorted(texts)
    order = np.array([int(text.split()[1]) for text in found[0]])
    assert abs(np.corrcoef(order, np.arange(3000))[0, 1]) < 0.1
    assert order[:5].tolist() == [2067, 1138, 2056, 1286, 1120], "a promise: the order of a number never changes"


# pairs


def test_the_sidecar_says_what_made_a_pair(tmp_path: Path, in_process: None):
    model = tmp_path / "m"
    train_sentencepiece([(ROOT / "megapar/comm/collectives.py").read_text()], 400, model)
    path = jsonl(tmp_path / "a.jsonl", TEXTS)
    facts = preprocess([path], tmp_path / "out", PreprocessOptions(tokenizer=f"spm:{model}", append_eod=True))
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    assert facts["tokenizer"] == {"spec": f"spm:{model}", "sha256": digest, "vocab_size": 400, "eod": 2}
    assert facts["sources"] == [{"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}]
    written = read_sidecar(tmp_path / "out")
    assert written is not None
    assert written["sha256"]["bin"] == hashlib.sha256((tmp_path / "out.bin").read_bytes()).hexdigest()
    (tmp_path / "out.json").write_text("{}")
    with pytest.raises(DataError, match=r"out.json: not the description of a .bin/.idx pair: no append_eod"):
        read_sidecar(tmp_path / "out")


@pytest.fixture
def pair(tmp_path: Path, in_process: None) -> Path:
    preprocess([jsonl(tmp_path / "a.jsonl", TEXTS)], tmp_path / "pair", BYTES)
    return tmp_path / "pair"


def test_split_and_merge_give_the_pair_back(pair: Path, tmp_path: Path):
    made = split(pair, tmp_path / "s", (8, 1, 1))
    n = len(IndexedDataset(pair))
    sizes = [len(dataset) for dataset in made.values()]
    assert sizes == [round(0.8 * n), round(0.9 * n) - round(0.8 * n), n - round(0.9 * n)]
    prefixes = [tmp_path / f"s_{name}" for name in ("train", "validation", "test")]
    merge_prepared(prefixes, tmp_path / "m")
    assert outputs(tmp_path / "m")[:2] == outputs(pair)[:2]
    for prefix in (*prefixes, tmp_path / "m"):
        verify(prefix, full=True)
        facts = read_sidecar(prefix)
        assert facts is not None
        assert facts["tokenizer"]["eod"] == 256
    assert list(split(pair, tmp_path / "two", (0.5, 0.5))) == ["train", "validation"]
    for fractions in ((1.0,), (1, 1, 1, 1), (0.5, -0.5), (float("nan"), 1), (1, 0)):
        with pytest.raises(ConfigError, match="--fractions"):
            split(pair, tmp_path / "no", fractions)
    with pytest.raises(DataError, match="leave none for validation"):
        split(pair, tmp_path / "no", (1, 1e-6))


def test_documents_of_several_sequences_are_split_whole(tmp_path: Path):
    with IndexedWriter(tmp_path / "a", np.dtype("<u2")) as writer:
        writer.add_documents(np.arange(6), [1, 2, 3])
    dataset = IndexedDataset(tmp_path / "a")
    ends = np.array([0, 2, 3])
    raw = (tmp_path / "a.idx").read_bytes()
    (tmp_path / "a.idx").write_bytes(raw[:26] + np.int64(3).tobytes() + raw[34 : 34 + 36] + ends.tobytes())
    assert len(dataset) == 3
    made = split(tmp_path / "a", tmp_path / "s", (1, 1))
    assert [made[name].document(0).tolist() for name in ("train", "validation")] == [[0, 1, 2], [3, 4, 5]]
    assert made["train"].lengths[:].tolist() == [1, 2]


def test_pairs_of_different_tokenizers_are_not_merged(pair: Path, tmp_path: Path, in_process: None):
    train_sentencepiece([(ROOT / "megapar/comm/collectives.py").read_text()], 400, tmp_path / "t")
    preprocess(
        [tmp_path / "a.jsonl"], tmp_path / "b", PreprocessOptions(tokenizer=f"spm:{tmp_path / 't'}", append_eod=True)
    )
    with pytest.raises(DataError, match=r"b was made with tokenizer .*: merge files of one tokenizer"):
        merge_prepared([pair, tmp_path / "b"], tmp_path / "m")
    (tmp_path / "b.json").unlink()
    merge_prepared([pair, tmp_path / "b"], tmp_path / "m")
    assert read_sidecar(tmp_path / "m") is None, "nobody knows what b was made with"


def test_verify_finds_what_was_changed(pair: Path, tmp_path: Path):
    """Faults flipped-bit, token-ids-beyond-vocabulary. A flipped bit, ids outside the vocabulary, false ends, counts of
    another pair."""
    verify(pair, full=True)

    def damage(position: int, token: int) -> Path:
        for suffix in ("bin", "idx", "json"):
            shutil.copy(f"{pair}.{suffix}", f"{tmp_path}/x.{suffix}")
        tokens = np.memmap(tmp_path / "x.bin", "<u2", "r+")
        tokens[position] = token
        tokens.flush()
        return tmp_path / "x"

    dataset = IndexedDataset(pair)
    end = len(dataset.document(0)) - 1
    with pytest.raises(DataError, match=r"x.bin: SHA-256 .* the file was changed or damaged"):
        verify(damage(5, 1), full=True)
    for position, token, said in (
        (end + 3, 300, r"x.bin: document 1, offset 2: token id 300 is outside the vocabulary of 257"),
        (end, 7, r"x.bin: document 0 ends with 7, not with the end-of-document id 256"),
    ):
        prefix = damage(position, token)
        facts = json.loads(Path(f"{prefix}.json").read_text()) | {"sha256": {}}
        Path(f"{prefix}.json").write_text(json.dumps(facts))
        verify(prefix)
        with pytest.raises(DataError, match=said):
            verify(prefix, full=True)
    Path(f"{tmp_path}/x.json").unlink()
    with pytest.raises(DataError, match="vocabulary of 100"):
        verify(tmp_path / "x", full=True, vocab_size=100)
    shutil.copy(f"{pair}.json", tmp_path / "x.json")
    with IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        writer.add_document([1, 256])
    with pytest.raises(DataError, match=r"x: 1 documents, but .*x.json says"):
        verify(tmp_path / "x")


def test_the_commands_of_the_program(tmp_path: Path):
    jsonl(tmp_path / "a.jsonl", [*TEXTS, *TEXTS])
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("bad\n")
    made = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / "a", "--tokenizer", "bytes", "--append_eod")
    done = run_tool(*made, "--on_bad_line", "skip", "--deduplicate", "--shuffle", "1", "--workers", "2")
    assert done.returncode == 0, done.stderr
    kept = len({text for text in TEXTS if text})
    assert f"{kept} documents" in done.stdout
    assert "duplicates left out, 1 x not JSON, left out" in done.stdout
    for command in (
        ("verify", "--input", tmp_path / "a", "--full"),
        ("split", "--input", tmp_path / "a", "--output", tmp_path / "s", "--fractions", "0.9", "0.1"),
        ("merge", "--input", tmp_path / "s_train", tmp_path / "s_validation", "--output", tmp_path / "m"),
    ):
        done = run_tool(*command)
        assert done.returncode == 0, done.stderr
    assert outputs(tmp_path / "m")[:2] == outputs(tmp_path / "a")[:2]
    (tmp_path / "m.bin").write_bytes(b"")
    done = run_tool("verify", "--input", tmp_path / "m")
    assert done.returncode == 3
    assert done.stderr.startswith("DataError: ")
    assert done.stderr.count("\n") == 1


def test_find_files_lists_a_folder_in_order(tmp_path: Path):
    for name in ("b.jsonl.gz", "a.parquet", "c.zip", "d.txt.zst"):
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in find_files([tmp_path])] == ["a.parquet", "b.jsonl.gz", "d.txt.zst"]
