"""FIFOs, devices, folders and giants in place of files of a run: none is waited for, each is named."""

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress
from pathlib import Path

import pytest
from megapar_models.convert.huggingface import HFWeights
from megapar_models.convert.safetensors_folder import INDEX

from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.lineage import PLAN, complete_plan
from megapar.data.prepared import read_sidecar
from megapar.data.tokenizer import load_tokenizer
from megapar.launch.reporting import write_error
from megapar.pipeline import schedule_files
from megapar.system.regular_files import SMALL, open_regular, read_regular
from tests.support import faults, program
from tests.support.faults import Scene
from tests.support.options import load
from tests.support.sweeps import slow_but

FLAGS = ("--log.no-tensorboard", "--checkpoint.every", "2", "--train.steps")


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    """A call waiting for a FIFO raises after a minute."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with the checkpoints of steps 2 and 4."""
    scene = Scene(tmp_path_factory.mktemp("trained"))
    assert scene.run(*FLAGS, "4").code == 0
    return scene.work


NEWEST = "checkpoints/step_00000004"
IN_PLACE: dict[str, tuple[str, int, str]] = {
    "manifest": (f"{NEWEST}/manifest.json", 0, f"checkpoint skipped: run/{NEWEST}/manifest.json: not readable (is a "),
    "shard": (f"{NEWEST}/rank_00000.safetensors", 0, "not a regular file"),
    "metrics": ("metrics.jsonl", 7, "cannot write run/metrics.jsonl: is a FIFO, not a regular file"),
    "lock": (".lock", 7, "cannot write run/.lock: is a FIFO, not a regular file"),
    "plan": ("checkpoints/.abandoning", 7, "is a FIFO, not a regular file: 'run/checkpoints/.abandoning'"),
    "options": ("config.toml", 0, ""),
    "error": ("error.json", 0, ""),
}
FEW_IN_PLACE = ("manifest", "metrics", "lock")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FEW_IN_PLACE)) for name in IN_PLACE]
)
def test_a_fifo_in_the_run_folder_is_not_waited_for(name: str, trained: Path, tmp_path: Path) -> None:
    """Fault fifo-for-a-file."""
    scene = Scene(tmp_path)
    shutil.copytree(trained, scene.work, dirs_exist_ok=True)
    file, code, words = IN_PLACE[name]
    path = scene.work / "run" / file
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    ended = scene.run(*FLAGS, "6")
    assert ended.code == code, ended.err
    assert words in ended.err
    assert ended.err.count("\n") == bool(words), ended.err


REWINDS = {"empty": "", "cut": "{", "list": "[1]", "null": "null", "text": '"x"', "infinite": "Infinity"} | {
    f"{last} {consumed}": json.dumps({"last_step": last, "consumed_samples": consumed})
    for last, consumed in [(2, 0), (2, -1), (2, 1e99), (2, 10**20), (2, 10**18), (-1, 48), ("2", 48), (None, None)]
}


@pytest.mark.parametrize("content", slow_but([10], REWINDS))
def test_odd_files_of_earlier_starts_are_passed_over(content: str, trained: Path, tmp_path: Path) -> None:
    """Fault odd-notes-end-run: rewind.json and events.jsonl. No sample is repeated or left out, rewind.json goes."""
    scene = Scene(tmp_path)
    shutil.copytree(trained, scene.work, dirs_exist_ok=True)
    (scene.work / "run/rewind.json").write_text(REWINDS[content])
    odd = [{"event": "spike", "action": "rewinds", **step} for step in ({}, {"step": "x"}, {"step": None})]
    with open(scene.work / "run/events.jsonl", "a") as file:
        file.write("".join(json.dumps(event) + "\n" for event in odd))
    ended = scene.run(*FLAGS, "6", "--guard.on_spike", "rewind")
    assert ended.code == 0, ended.err
    assert "rewind.json" in ended.out + ended.err
    lines = [line for line in faults.metrics(scene.work) if "loss" in line]
    assert [line["consumed_samples"] for line in lines] == [24 * step for step in range(1, 7)]
    assert not (scene.work / "run/rewind.json").exists()


@pytest.mark.parametrize("name", slow_but([0], ["events.jsonl", "rewind.json"]))
@pytest.mark.parametrize("kind", slow_but([0], ["a folder", "a FIFO"]))
def test_notes_that_cannot_be_read_are_a_line(kind: str, name: str, trained: Path, tmp_path: Path) -> None:
    """Fault odd-notes-end-run."""
    scene = Scene(tmp_path)
    shutil.copytree(trained, scene.work, dirs_exist_ok=True)
    path = scene.work / "run" / name
    path.unlink(missing_ok=True)
    (Path.mkdir if kind == "a folder" else os.mkfifo)(path)
    ended = scene.run(*FLAGS, "6", "--guard.on_spike", "rewind")
    assert ended.code == 0, ended.err
    assert ended.err
    assert all(f"run/{name}" in line for line in ended.err.splitlines()), ended.err


def test_an_error_file_that_cannot_be_removed_is_named(trained: Path, tmp_path: Path) -> None:
    """Fault unwritable-folder."""
    scene = Scene(tmp_path)
    shutil.copytree(trained, scene.work, dirs_exist_ok=True)
    (scene.work / "run/error.json").mkdir()
    ended = scene.run(*FLAGS, "6")
    assert ended.code == 7
    first, second = ended.err.splitlines()
    assert first.startswith("StorageError: cannot write run/error.json: ")
    assert second.startswith("run/error.json not written: ")


def sidecar(folder: Path) -> None:
    os.mkfifo(folder / "text.json")
    read_sidecar(folder / "text")


def tokenizer(folder: Path) -> None:
    os.mkfifo(folder / "tokenizer.json")
    load_tokenizer(f"hf:{folder}/tokenizer.json")


def schedule(folder: Path) -> None:
    os.mkfifo(folder / "orders.txt")
    schedule_files.read(str(folder / "orders.txt"))


def options(folder: Path) -> None:
    (folder / "options.toml").symlink_to("/dev/zero")
    load(["--config", str(folder / "options.toml")])


def manifest(folder: Path) -> None:
    os.mkfifo(folder / "manifest.json")
    read_manifest(folder)


def plan(folder: Path) -> None:
    os.mkfifo(folder / PLAN)
    complete_plan(folder)


def index(folder: Path) -> None:
    os.mkfifo(folder / INDEX)
    HFWeights(folder)


READERS = (sidecar, tokenizer, schedule, options, manifest, plan, index)


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_readers_of_files_wait_for_nobody(read: Callable[[Path], None], tmp_path: Path) -> None:
    """Fault fifo-for-a-file."""
    with pytest.raises(Exception, match=r"is a FIFO|is a device|is not a file"):
        read(tmp_path)


def test_the_record_of_an_error_waits_for_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault fifo-for-a-file: neither for the lock, nor for the file."""
    os.mkfifo(tmp_path / ".lock")
    write_error({"message": "x"}, str(tmp_path), ours=False)
    assert (tmp_path / "error.json").exists()
    (tmp_path / "error.json").unlink()
    os.mkfifo(tmp_path / "error.json")
    write_error({"message": "x"}, str(tmp_path), ours=True)
    assert (tmp_path / "error.json").is_file()
    assert capsys.readouterr().err == ""


def test_ranks_that_record_an_error_at_once_keep_out_of_each_others_way(tmp_path: Path) -> None:
    """As both ends of a broken link do. Each record is whole, and none is reported as lost."""

    def write(number: int) -> None:
        with open(tmp_path / f"stderr{number}", "w") as file, redirect_stderr(file):
            for _ in range(300):
                write_error({"message": "x" * 1000 * number}, str(tmp_path), ours=True)

    writers = [multiprocessing.get_context("fork").Process(target=write, args=(number,)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        with suppress(FileNotFoundError):
            assert set(json.loads((tmp_path / "error.json").read_text())["message"]) == {"x"}
    assert [(tmp_path / f"stderr{number}").read_text() for number in (1, 2)] == ["", ""]
    assert list(tmp_path.glob("error.json.*")) == []


def test_links_to_regular_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"text"
    with pytest.raises(OSError, match="is a link, and is not followed"):
        open_regular(tmp_path / "link", os.O_RDONLY | os.O_NOFOLLOW)
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)


def test_a_giant_is_not_read(tmp_path: Path) -> None:
    """Fault fifo-for-a-file: a sparse file of any size costs nothing to make."""
    path = tmp_path / "options.toml"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(OSError, match=f"has 1,099,511,627,776 bytes, and such a file has {SMALL:,} at most"):
        read_regular(path)


def test_a_run_of_absolute_paths_needs_no_working_folder(tmp_path: Path) -> None:
    """Fault working-folder-removed."""
    here = tmp_path / "here"
    here.mkdir()
    ended = program.run("--run_dir", str(tmp_path / "run"), "--train.steps", "3", cwd=here, plant=lambda: here.rmdir())
    assert (ended.code, ended.err) == (0, "")
    assert not here.exists()
