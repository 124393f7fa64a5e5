"""What a resumed run reads must be what it read before: the same files with other contents are refused."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapar.base.errors import DataError
from megapar.base.grid import Grid
from megapar.comm import collectives
from megapar.data import contents
from megapar.data.contents import content_hash
from megapar.data.indexed import IndexedDataset, IndexedWriter
from megapar.data.prepared import write_sidecar
from megapar.data.sources import stream_fingerprints
from megapar.declare import context
from megapar.train import data
from megapar.train.data import ORDER, compare
from tests.support import program
from tests.support.checkpoints import edit_manifest
from tests.support.distributed import run_ranks
from tests.support.faults import on_rank

FLAGS = ("--model.vocab_size", "257", "--checkpoint.every", "2", "--log.no-tensorboard", "--train.steps")


def tokens(prefix: Path, seed: int, count: int = 9000) -> str:
    prefix.parent.mkdir(exist_ok=True)
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        writer.add_documents(np.random.default_rng(seed).integers(0, 131, count), [100] * (count // 100))
    return str(prefix)


def test_data_of_another_program_needs_no_tokenizer_and_its_ids_are_compared(tmp_path: Path) -> None:
    """Fault token-ids-beyond-vocabulary: 131 ids are fewer than those of the default, `bytes`; too small a vocabulary
    ends the run before its first step."""
    tokens(tmp_path / "foreign", 0)
    flags = ("--data.train", "foreign", "--log.no-tensorboard", "--train.steps", "2", "--checkpoint.no-save_last")
    fits = program.run(*flags, "--model.vocab_size", "131", cwd=tmp_path)
    assert fits.code == 0, fits.err
    small = program.run(*flags, "--model.vocab_size", "120", cwd=tmp_path)
    assert small.code == 3, small.err
    assert "is outside the vocabulary of 120: set data.tokenizer" in small.err
    assert "step 1/2" not in small.out
    # Who names the tokenizer by a description of the data is told that the vocabulary lacks its ids.
    made_by = {"spec": "bytes", "vocab_size": 257, "sha256": "bytes"}
    counts = {"documents": 90, "tokens": 9000, "append_eod": False, "sources": []}
    write_sidecar(tmp_path / "foreign", {**counts, "tokenizer": made_by})
    named = program.run(*flags, "--model.vocab_size", "131", cwd=tmp_path)
    assert named.code == 2, named.err
    assert named.err.startswith("ConfigError: model.vocab_size=131, data.tokenizer=bytes: the tokenizer has 257 ids")


def test_the_same_path_with_other_bytes_is_refused(tmp_path: Path) -> None:
    """Fault other-training-data: before anything changes, with the path, the old and the new hash; an option goes on
    and tells."""
    tokens(tmp_path / "one", 0)
    two, held = tokens(tmp_path / "two", 1), tokens(tmp_path / "held", 2)
    flags = ("--data.train", "0.7:one", "0.3:two", "--data.validation", "held")
    assert program.run(*flags, *FLAGS, "4", cwd=tmp_path).code == 0
    before = IndexedDataset(two).fingerprints()
    for changed, size in ((two, 9000), (held, 12000)):
        for end in (".bin", ".idx"):
            shutil.copy(changed + end, changed + end + ".old")
        tokens(Path(changed), 99, size)
        now = IndexedDataset(changed).fingerprints()
        back = ("--checkpoint.resume", "run/checkpoints/step_00000002")
        refused = program.run(*flags, *back, *FLAGS, "6", cwd=tmp_path)
        assert refused.code == 3, refused.err
        assert refused.err.startswith("DataError: data changed since run/checkpoints/step_00000002 was saved: ")
        name = Path(changed).name
        assert f"{name}.bin: content hash " in refused.err
        assert now[f"{changed}.bin"] in refused.err
        assert changed != two or before[f"{two}.bin"] in refused.err
        assert refused.err.count("\n") == 1
        assert not list((tmp_path / "run/checkpoints").glob("abandoned-*")), "a start that is refused changes nothing"
        if changed == two:
            for end in (".bin", ".idx"):
                shutil.move(changed + end + ".old", changed + end)
    accepted = program.run(*flags, *FLAGS, "6", "--data.accept_changed", cwd=tmp_path)
    assert accepted.code == 0, accepted.err
    assert "data changed since: held.bin: content hash " in accepted.out
    again = program.run(*flags, *FLAGS, "8", cwd=tmp_path)
    assert again.code == 0, again.err
    assert "data changed" not in again.out


def test_other_paths_and_weights_are_told_and_old_checkpoints_go_on(tmp_path: Path) -> None:
    """Fault other-training-data: what the user asked for is no error; nor is a checkpoint without hashes, but its lack
    is told."""
    for seed, name in enumerate(("one", "two")):
        tokens(tmp_path / name, seed)
    assert program.run("--data.train", "0.5:one", "0.5:two", *FLAGS, "2", cwd=tmp_path).code == 0
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    for end in (".bin", ".idx"):
        shutil.copy(tmp_path / f"two{end}", tmp_path / f"elsewhere{end}")
    later = ("--data.stages", "48:0.9,0.1")
    moved = program.run("--data.train", "0.5:one", "0.5:elsewhere", *later, *FLAGS, "4", cwd=tmp_path)
    assert moved.code == 0, moved.err
    assert "changed since: data.train: " in moved.out
    assert "content hash" not in moved.out

    def forget(body: dict[str, Any]) -> None:
        del body["data"]["hashes"], body["data"]["blend"], body["trainer"]["lineage"], body["trainer"]["recent"]

    edit_manifest(tmp_path / "old/checkpoints/step_00000002", forget)
    tokens(tmp_path / "two", 99)
    further = ("4", "--run_dir", "old", "--guard.on_spike", "skip")
    old = program.run("--data.train", "0.5:one", "0.5:two", *FLAGS, *further, cwd=tmp_path)
    assert old.code == 0, old.err
    assert "guard.on_spike=skip begins anew: the checkpoint, of an older version, lacks the losses of its" in old.out
    assert "data not compared: old/checkpoints/step_00000002 holds no content hashes of its files" in old.out


def test_sources_without_files_are_gone_on_with(tmp_path: Path) -> None:
    for steps in ("2", "4"):
        ended = program.run(*FLAGS, steps, cwd=tmp_path)
        assert ended.code == 0, ended.err
        assert "data changed" not in ended.out
        assert "data not compared" not in ended.out
    assert "resumed step 2 from" in ended.out


def test_the_local_files_of_a_stream_are_hashed(tmp_path: Path) -> None:
    """Fault other-training-data for Hugging Face's kinds of files; what lies on the Hub is named, and not read for a
    hash."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(name * 100_000)
    pattern = f"hf:json:{tmp_path}/*.json"
    first = stream_fingerprints(pattern)
    assert sorted(first) == [f"{tmp_path}/a.json", f"{tmp_path}/b.json"]
    assert stream_fingerprints(f"hf:json:{tmp_path}/a.json") == {f"{tmp_path}/a.json": first[f"{tmp_path}/a.json"]}
    (tmp_path / "b.json").write_text("b" * 100_001)
    second = stream_fingerprints(pattern)
    (tmp_path / "b.json").write_text("c" + "b" * 99_999)
    third = stream_fingerprints(pattern)
    assert len({found[f"{tmp_path}/b.json"] for found in (first, second, third)}) == 3
    assert len({found[f"{tmp_path}/a.json"] for found in (first, second, third)}) == 1
    assert stream_fingerprints("hf:allenai/c4") == {}


def test_an_order_of_another_version_is_refused() -> None:
    """Fault other-training-data: samples would come twice, or never."""
    saved = {**ORDER, "order": "older-v0", "hashes": {"a.bin": "1", "gone.bin": "2"}}
    now = {"hashes": {"a.bin": "1", "b.bin": "3"}}
    with pytest.raises(DataError, match=f"order: older-v0 -> {ORDER['order']}"):
        compare(saved, now, Path("p"), accept=False)
    assert compare(saved, now, Path("p"), accept=True) == [f"data changed since: order: older-v0 -> {ORDER['order']}"]
    assert compare({**saved, **ORDER}, now, Path("p"), accept=False) == []
    assert compare({}, {}, Path("p"), accept=False) == []
    assert compare({"hashes": {}}, now, Path("p"), accept=False) == []


class Files:
    """A loader asked only for the hashes of its files."""

    def __init__(self, files: dict[str, str]):
        self.samples = self
        self._files = files

    def fingerprints(self) -> dict[str, str]:
        return self._files


def agree(different: bool) -> tuple[str, list[int]]:
    """What rank 1 hears of its own files, and the sizes of what was gathered."""
    ctx = context.create(Grid(tp=1, dp=2, pp=1))
    files = {f"corpus/part-{number}.bin": str(number) for number in range(1000)}
    if different and not ctx.world.first:
        files["corpus/part-7.bin"] = "other"
        files["more.bin"] = "1"
    sizes = []
    gather = collectives.gather_json

    def watched(value: Any, *args: Any) -> Any:
        sizes.append(len(str(value)))
        return gather(value, *args)

    collectives.gather_json = watched
    try:
        data._agree([Files(files)], ctx)  # type: ignore[list-item]
    except DataError as error:
        return str(error), sizes
    return "", sizes


def test_ranks_compare_digests_and_send_lists_only_to_name_a_difference() -> None:
    for said, sizes in run_ranks(2, agree, False):
        assert said == ""
        assert sizes == [64]
    for said, sizes in run_ranks(2, agree, True):
        assert said.startswith("corpus/part-7.bin is not the same everywhere: content hash 7 on node ")
        assert len(sizes) == 2


def test_a_token_in_the_middle_is_found_in_files_that_are_read_whole(tmp_path: Path) -> None:
    """Fault other-training-data: of equal size, between the places sampled before."""
    tokens(tmp_path / "one", 0, 1_000_000)
    assert program.run("--data.train", "one", *FLAGS, "2", cwd=tmp_path).code == 0
    path = tmp_path / "one.bin"
    assert path.stat().st_size <= contents.WHOLE
    content = bytearray(path.read_bytes())
    content[1_000_500] ^= 1
    path.write_bytes(content)
    ended = program.run("--data.train", "one", *FLAGS, "4", cwd=tmp_path)
    assert ended.code == 3
    assert "data changed since run/checkpoints/step_00000002 was saved: one.bin: content hash " in ended.err


def test_a_large_file_that_was_written_since_is_told(tmp_path: Path) -> None:
    """Fault other-training-data: what was not compared is said. A pair made anew has another description."""
    tokens(tmp_path / "one", 0, 3_000_000)
    tokenizer = {"spec": "bytes", "sha256": "bytes", "vocab_size": 257, "eod": 256}
    facts = {"documents": 30_000, "tokens": 3_000_000, "tokenizer": tokenizer, "append_eod": False, "sources": []}
    write_sidecar(tmp_path / "one", facts)
    assert program.run("--data.train", "one", *FLAGS, "2", cwd=tmp_path).code == 0
    path = tmp_path / "one.bin"
    assert path.stat().st_size > contents.WHOLE
    before = content_hash(path)
    with path.open("r+b") as file:
        file.seek(3_000_000 // 2)
        file.write(b"\1")
    assert content_hash(path) == before, "between two pieces"
    told = program.run("--data.train", "one", *FLAGS, "4", cwd=tmp_path)
    assert told.code == 0, told.err
    assert "data written since: one.bin: size and samples are equal, other bytes were not compared; " in told.out
    write_sidecar(tmp_path / "one", facts)
    refused = program.run("--data.train", "one", *FLAGS, "6", cwd=tmp_path)
    assert refused.code == 3
    assert "data changed since run/checkpoints/step_00000004 was saved: one.json: content hash " in refused.err
    assert "one.bin" not in refused.err


@pytest.mark.parametrize("suffix", ["bin", pytest.param("idx", marks=pytest.mark.slow)])
def test_a_file_that_is_cut_short_while_it_is_read(suffix: str, tmp_path: Path) -> None:
    """Fault data-cut-while-read: a line in place of SIGBUS."""
    tokens(tmp_path / "one", 0)
    cut = on_rank(1, 2, lambda _: os.truncate(f"one.{suffix}", 5000))
    ended = program.run("--data.train", "one", *FLAGS, "50", "--launch.nproc", "2", cwd=tmp_path, plant=cut)
    assert ended.code == 3, ended.err
    assert ended.err.startswith("DataError: ")
    size = (tmp_path / f"one.{suffix}").stat().st_size
    assert f"one.{suffix} has {size:,} bytes, and had " in ended.err
    assert ended.err.count("\n") == 1
