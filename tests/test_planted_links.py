"""Folders that others may write: no file is written or removed behind a link that somebody put there.

A stranger's folder on a scratch disk gives a run no weights. The page on threats says the same and names these tests.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from matplotlib.figure import Figure
from megapar_tools.plan import hardware
from megapar_tools.prepare import preprocess as preprocessing

from megapar.base.errors import StorageError
from megapar.data.indexed import IndexedWriter
from megapar.data.prepared import weights_path, write_weights
from megapar.observe import metrics
from megapar.system import atomic_files, events
from tests.support import program
from tests.support.faults import error
from tests.support.stranger import as_root

sys.path.append(str(program.ROOT / "tools"))  # calibrate.py uses its neighbours as modules
import build_corpus
import calibrate
import gpu_facts

TOKEN = "0123456789abcdef"  # what the random letters of a name are made to be
PRECIOUS = b"precious"


def write_indexed(path: Path) -> None:
    with IndexedWriter(path.with_suffix(""), np.uint16) as writer:
        writer.add_document([1, 2, 3])


def write_block(path: Path) -> None:
    with atomic_files.replacing(path) as file:
        file.write(b"new")


def write_calibration(path: Path) -> None:
    """What calibrate.py does around its measurement, which takes a minute."""
    made = hardware.load("h100-80g")
    with mock.patch.multiple(calibrate, run_ranks=mock.DEFAULT, medians=mock.DEFAULT, hardware_of=lambda *_: made):
        calibrate.main(calibrate.Arguments(output=path, device="cpu"))


def write_gpu_facts(path: Path) -> None:
    with (
        mock.patch.object(gpu_facts, "machine", return_value={"gpus": []}),
        mock.patch.object(sys, "argv", ["gpu_facts.py", "--json", str(path)]),
    ):
        gpu_facts.main()


WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "replace_file": ("ranks.json", lambda path: atomic_files.replace_file(path, b"new")),
    "replacing": ("scores.jsonl", write_block),
    "write_json": ("results.json", lambda path: atomic_files.write_json(path, {"new": 1})),
    "write_text": ("trace.json", lambda path: atomic_files.write_text(path, "new")),
    "save_figure": ("loss.png", lambda path: atomic_files.save_figure(Figure(), path)),
    "indexed": ("tokens.idx", write_indexed),
    "weights": ("tokens.weights", lambda path: write_weights(path.with_suffix(""), [np.ones(3, np.uint8)])),
    "hardware": ("machine.toml", lambda path: hardware.write(hardware.load("h100-80g"), path)),
    "calibrate.py": ("cpu.toml", write_calibration),
    "gpu_facts.py": ("facts.json", write_gpu_facts),
    "build_corpus.py": ("train.jsonl", lambda path: build_corpus.write(path, ["{}"])),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("target", ["precious", "missing"])
def test_no_writer_follows_a_link(name: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault planted-links: under the file's name, and under each name that its draft could have."""
    monkeypatch.setattr(atomic_files.secrets, "token_hex", lambda size: TOKEN)
    (tmp_path / "precious").write_bytes(PRECIOUS)
    folder = tmp_path / "open"
    folder.mkdir()
    file_name, write = WRITERS[name]
    names = [file_name, "tokens.bin", weights_path(folder / "tokens").name]
    for planted in {
        *names,
        *(f"{n}{end}" for n in names for end in (f".{TOKEN}.tmp", ".tmp")),
        *map(".{}.partial".format, names),
    }:
        (folder / planted).symlink_to(tmp_path / target)
    write(folder / file_name)
    assert (tmp_path / "precious").read_bytes() == PRECIOUS
    assert not (tmp_path / "missing").exists()
    made = [path for path in folder.iterdir() if not path.is_symlink()]
    assert made
    assert all(path.stat().st_size for path in made)


def test_streams_are_written_and_stay() -> None:
    """`--json /dev/stdout`: a rename by root would put a file in place of the system's link."""
    reader, writer = os.pipe()
    try:
        atomic_files.write_json(Path(f"/dev/fd/{writer}"), {"a": 1})
        with atomic_files.replacing(Path(f"/dev/fd/{writer}")) as file:
            file.write(b"more")
        assert os.read(reader, 100) == b'{\n "a": 1\n}\nmore'
    finally:
        os.close(reader)
        os.close(writer)
    atomic_files.replace_file(Path("/dev/null"), b"nothing")
    assert Path("/dev/null").is_char_device()


def test_names_of_drafts_cannot_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    real = atomic_files.open_new

    def note(path: Path) -> object:
        seen.add(path.name)
        return real(path)

    monkeypatch.setattr(atomic_files, "open_new", note)
    for _ in range(3):
        atomic_files.replace_file(tmp_path / "a", b"new")
    assert len(seen) == 3


def test_lines_are_appended_to_no_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fault planted-links: events, metrics and profiles are appended to, so no rename replaces a link."""
    (tmp_path / "precious").write_bytes(PRECIOUS)
    for name in ("events.jsonl", "metrics.jsonl"):
        (tmp_path / name).symlink_to("precious")
    events.append(tmp_path, "start")
    assert "event start not written (is a link, and is not followed)" in caplog.text
    with pytest.raises(OSError, match="is a link, and is not followed"):
        metrics.LineWriter(tmp_path / "metrics.jsonl")
    assert (tmp_path / "precious").read_bytes() == PRECIOUS


FLAGS = ("--train.steps", "2", "--checkpoint.every", "1")


def test_a_run_truncates_no_file_behind_its_lock(tmp_path: Path) -> None:
    """Fault planted-links."""
    (tmp_path / "precious").write_bytes(PRECIOUS)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock").symlink_to(tmp_path / "precious")
    ended = program.run(*FLAGS, cwd=tmp_path)
    assert (ended.code, "cannot write run/.lock: is a link, and is not followed" in ended.err) == (
        StorageError.exit_code,
        True,
    )
    assert (tmp_path / "precious").read_bytes() == PRECIOUS


@pytest.mark.slow  # four starts
def test_nothing_is_removed_behind_a_link_to_checkpoints_of_others(tmp_path: Path) -> None:
    """Fault planted-links: a run saves behind a link and goes on from there, and removes what is its own alone."""
    for name, is_own in (("own", True), ("others", False)):
        folder = tmp_path / name
        target = folder / "disk"
        target.mkdir(parents=True)
        (folder / "run").mkdir()
        (folder / "run/checkpoints").symlink_to(target)
        if not is_own:
            (target / "step_00000001").mkdir()
            (target / "step_00000001/manifest.json").write_text("of another run")
            (target / ".tmp-theirs").mkdir()
        ended = program.run(*FLAGS, "--checkpoint.keep_last", "1", "--checkpoint.resume", "none", cwd=folder)
        assert ended.code == 0, ended.err
        assert ("not known to be of this run" in ended.err) == (not is_own)
        assert (target / "step_00000002/manifest.json").exists()
        (target / ".tmp-left").mkdir()
        ended = program.run("--train.steps", "3", "--checkpoint.keep_last", "1", cwd=folder)
        assert ended.code == 0, ended.err
        assert "resumed step 2" in ended.out
        assert (target / ".tmp-left").exists() != is_own
        assert (target / "step_00000002").exists() != is_own
        if not is_own:
            assert (target / ".tmp-theirs").exists()
            theirs = [path.read_text() for path in target.rglob("manifest.json")]
            assert "of another run" in theirs


def test_parts_of_tokens_in_anothers_folder_are_not_taken(tmp_path: Path) -> None:
    """Fault planted-links: preprocess_data.py goes on from parts beside the output, which may be open to all."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.parts").symlink_to("elsewhere")
    with pytest.raises(StorageError, match="is a link, or another user's"):
        preprocessing._parts_folder(tmp_path / "out.parts").__enter__()


LOCAL = ("--checkpoint.every", "0", "--checkpoint.no_save_last", "--checkpoint.local_every", "1")


@as_root
@pytest.mark.slow  # four starts
def test_a_strangers_checkpoint_on_a_scratch_disk_is_not_resumed(tmp_path: Path) -> None:
    """Fault strangers-checkpoint: the folder on the disk is of this user and closed to others, or it is left out."""
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o777)
    flags = (*LOCAL, "--checkpoint.local_dir", str(disk))
    assert program.run(*flags, "--train.steps", "2", cwd=tmp_path).code == 0
    (folder,) = disk.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)  # as earlier versions made it: nobody else could write there
    ended = program.run(*flags, "--train.steps", "3", cwd=tmp_path)
    assert "resumed step 2" in ended.out
    assert folder.stat().st_mode & 0o777 == 0o700
    for change in (lambda: os.chown(folder, 65534, 65534), lambda: (os.chown(folder, 0, 0), folder.chmod(0o777))):
        change()
        ended = program.run(*flags, "--train.steps", "4", cwd=tmp_path)
        assert ended.code == 0, ended.err
        assert "resumed" not in ended.out
        assert ended.err.count("checkpoint.local_dir is left out; remove it") == 1
        assert not (tmp_path / "run/error.json").exists(), error(tmp_path / "run")
