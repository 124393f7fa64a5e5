"""Sweep of damaged files and failing writes: token files, their descriptions, full disks."""

import errno
import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapar.checkpoint import format as checkpoint_format
from megapar.checkpoint import save
from megapar.data.indexed import IndexedWriter
from megapar.train import trainer
from tests.support import faults
from tests.support.faults import TWO, Scene

FLAGS = ("--train.global_batch_size", "8", "--train.micro_batch_size", "2", "--log.no-tensorboard")
VOCABULARY, DOCUMENTS = 131, 10
HEADER = 34  # bytes of an index: magic 9, version 8, dtype 1, sequences 8, boundaries 8
LENGTHS = HEADER
POINTERS = LENGTHS + 4 * DOCUMENTS
BOUNDARIES = POINTERS + 8 * DOCUMENTS


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.bin and text.idx: ten documents, enough for some steps."""
    folder = tmp_path_factory.mktemp("tokens")
    draw = np.random.default_rng(3)
    with IndexedWriter(folder / "text", np.dtype("<u2")) as writer:
        for _ in range(DOCUMENTS):
            writer.add_document(draw.integers(0, VOCABULARY, 90))
    return folder


def flipped(offset: int, bit: int = 1) -> Callable[[Path], object]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[offset] ^= bit
        path.write_bytes(content)

    return flip


def cut(size: int) -> Callable[[Path], object]:
    """To this number of bytes, from the end if it is negative."""
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


# Each byte that decides something; the index says where it lies.
FLIPS = {f"magic-{at}": at for at in (0, 8)} | {f"version-{at}": 9 + at for at in (0, 7)} | {"dtype": 17}
FLIPS |= {f"sequences-{at}": 18 + at for at in (0, 3, 7)} | {f"boundaries-{at}": 26 + at for at in (0, 3, 7)}
FLIPS |= {f"length-{n}-{at}": LENGTHS + 4 * n + at for n in (0, 5, 9) for at in (0, 3)}
FLIPS |= {f"pointer-{n}-{at}": POINTERS + 8 * n + at for n in (0, 5, 9) for at in (0, 7)}
FLIPS |= {f"first-boundary-{at}": BOUNDARIES + at for at in (0, 7)}
FLIPS |= {f"last-boundary-{at}": BOUNDARIES + 8 * DOCUMENTS + at for at in (0, 7)}
SIZES = {"empty": 0, "in-header": 20, "after-header": HEADER, "in-lengths": LENGTHS + 5, "in-pointers": POINTERS + 9}
SIZES |= {"in-boundaries": BOUNDARIES + 3, "last-byte": -1}

DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    **{f"idx-flip-{name}": ("idx", flipped(at, 128 if name.endswith("-7") else 1)) for name, at in FLIPS.items()},
    **{f"idx-cut-{name}": ("idx", cut(size)) for name, size in SIZES.items()},
    **{f"bin-cut-{size}": ("bin", cut(size)) for size in (0, 1, 900, -2, -1)},
    "bin-longer": ("bin", lambda path: path.write_bytes(path.read_bytes() + b"xx")),
    "idx-longer": ("idx", lambda path: path.write_bytes(path.read_bytes() + b"x" * 8)),
    "bin-missing": ("bin", Path.unlink),
    "idx-missing": ("idx", Path.unlink),
    "bin-a-folder": ("bin", as_folder),
    "idx-a-folder": ("idx", as_folder),
    "bin-in-place-of-idx": ("idx", lambda path: shutil.copy(path.with_suffix(".bin"), path)),
    "idx-in-place-of-bin": ("bin", lambda path: shutil.copy(path.with_suffix(".idx"), path)),
    "token-beyond": ("bin", lambda path: path.write_bytes(b"\xff\x7f" * (path.stat().st_size // 2))),
    **{
        f"json-{name}": ("json", lambda path, text=text: path.write_bytes(text))
        for name, text in {  # type: ignore[misc]
            "empty": b"",
            "cut": b'{"documents": 10, ',
            "binary": b"\xff\xfe\0",
            "list": b"[1]",
            "null": b"null",
            "number": b"3",
            "nested": b"[" * 100_000,
            "names-alone": b'["documents", "tokens", "tokenizer", "append_eod", "sources", "sha256"]',
            "tokenizer-empty": b'{"documents":1,"tokens":1,"tokenizer":{},"append_eod":0,"sources":[],"sha256":{}}',
            "tokenizer-null": b'{"documents":1,"tokens":1,"tokenizer":null,"append_eod":0,"sources":[],"sha256":{}}',
            "tokenizer-text": b'{"documents":1,"tokens":1,"tokenizer":"x","append_eod":0,"sources":[],"sha256":{}}',
            "no-hash": b'{"documents":1,"tokens":1,"tokenizer":{"sha256":[]},"append_eod":0,"sources":[],"sha256":{}}',
        }.items()
    },
}
FEW_DAMAGE = ("idx-flip-pointer-5-0", "json-nested")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FEW_DAMAGE)) for name in DAMAGE]
)
def test_damaged_token_files_are_named(name: str, tokens: Path, tmp_path: Path) -> None:
    """Faults truncated-bin, longer-bin, damaged-idx, mismatched-idx, token-ids-beyond-vocabulary,
    tokens-of-another-tokenizer."""
    scene = Scene(tmp_path)
    shutil.copytree(tokens, scene.work, dirs_exist_ok=True)
    suffix, change = DAMAGE[name]
    change(scene.work / f"text.{suffix}")
    # Each token is read: the tokens of the set are fewer than those of the steps.
    ended = scene.run(*FLAGS, "--train.steps", "5", "--data.train", "text", "--model.vocab_size", "0")
    assert ended.code == 3, ended.out + ended.err
    assert ended.err.startswith("DataError: ")
    assert ended.err.count("\n") == 1, ended.err
    assert "text." in ended.err
    record = scene.work / "run/error.json"
    assert record.exists() == record.parent.exists()
    if record.exists():
        assert faults.error(scene.work)["class"] == "DataError"


# Disks

CALLS: dict[str, tuple[Any, str]] = {
    "shard": (save, "save_file"),
    "manifest": (save, "write_manifest"),
    "sync": (save, "sync_folder"),
    "name": (Path, "rename"),
    "fsync": (os, "fsync"),
    "folder": (Path, "mkdir"),
    "pointer": (checkpoint_format, "write_latest"),
}
REASONS = {"full": errno.ENOSPC, "quota": errno.EDQUOT, "broken": errno.EIO, "read-only": errno.EROFS}


def failing(call: str, number: int) -> Callable[[], None]:
    """Plant a disk's refusal of a call for the checkpoint of the fourth step, as of a full or broken one."""

    def plant() -> None:
        real_step = trainer.queue_step
        owner, name = CALLS[call]
        real = getattr(owner, name)

        def refuse(*args: Any, **named: Any) -> Any:
            paths = [str(value) for value in args if isinstance(value, Path)]
            if any("step_00000004" in path for path in paths) or call in ("fsync", "sync"):
                raise OSError(number, os.strerror(number))
            return real(*args, **named)

        def queue_step(state: Any, *args: Any, **named: Any) -> Any:
            if state.step in (3, 5):
                setattr(owner, name, refuse if state.step == 3 else real)
            return real_step(state, *args, **named)

        trainer.queue_step = queue_step

    return plant


DISKS = [
    (call, reason, flags)
    for call in ("shard", "manifest", "sync", "name", "fsync", "folder")
    for reason, flags in (
        ("full", ()),
        ("quota", TWO),
        ("broken", ("--checkpoint.async_save",)),
        ("read-only", (*TWO, "--checkpoint.async_save")),
    )
    # An asynchronous save of step 2 may still be at its end when the disk begins to refuse.
    if not (call in ("fsync", "sync") and "--checkpoint.async_save" in flags)
]


def check_disk(call: str, reason: str, flags: tuple[str, ...], folder: Path) -> None:
    scene = Scene(folder)
    flags = (*FLAGS, *flags, "--checkpoint.every", "2", "--checkpoint.on_failure", "stop", "--train.steps")
    ended = scene.run(*flags, "6", plant=failing(call, REASONS[reason]))
    assert ended.code == 7, ended.out + ended.err
    (line,) = ended.err.splitlines()
    assert line.startswith("StorageError: checkpoint of step 4 not saved")
    assert os.strerror(REASONS[reason]) in line
    facts = faults.error(scene.work)
    assert (facts["class"], facts["exit_code"]) == ("StorageError", 7)
    assert scene.check_checkpoints(ended.out)[-1] == 2
    again = scene.run(*flags, "6")
    assert again.code == 0, again.err
    assert scene.check_checkpoints(again.out) == [6, 4, 2]
    assert [line["step"] for line in faults.metrics(scene.work)] == [1, 2, 3, 4, 5, 6]
    assert not [path for path in scene.checkpoints.iterdir() if path.name.startswith(".")]


def check_disk_for_a_while(call: str, reason: str, flags: tuple[str, ...], folder: Path) -> None:
    scene = Scene(folder)
    flags = (*FLAGS, *flags, "--checkpoint.every", "2", "--train.steps")
    ended = scene.run(*flags, "6", plant=failing(call, REASONS[reason]))
    assert ended.code == 0, ended.out + ended.err
    (line,) = [line for line in ended.out.splitlines() if line.startswith("save_failed: ")]
    assert line.startswith("save_failed: checkpoint of step 4 not saved")
    assert os.strerror(REASONS[reason]) in line
    steps = scene.check_checkpoints(ended.out)
    assert steps == ([6, 4, 2] if call == "sync" else [6, 2]), "a checkpoint that has its name stays"
    assert not [path for path in scene.checkpoints.iterdir() if path.name.startswith(".")]


def test_a_quota_that_is_reached_costs_no_older_checkpoint(tmp_path: Path) -> None:
    """Fault disk-without-space."""
    check_disk("shard", "quota", TWO, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("call", "reason", "flags"), DISKS, ids=[f"{c}-{r}" for c, r, _ in DISKS])
def test_sweep_of_disks_that_refuse(call: str, reason: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Faults disk-without-space, broken-disk, save-fails-for-a-while."""
    for check in (check_disk, check_disk_for_a_while):
        path = tmp_path / check.__name__
        path.mkdir()
        check(call, reason, flags, path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["one", "dp2"])
@pytest.mark.parametrize("limit", [20_000, 100_000, 300_000])
def test_sweep_of_largest_file_sizes(limit: int, ranks: str, tmp_path: Path) -> None:
    """Fault save-on-full-disk: at a limit of the kernel's the kernel writes part of what it is given."""
    scene = Scene(tmp_path)

    def plant() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    flags = (*FLAGS, *faults.LAYOUTS[ranks], "--train.steps", "2")
    ended = scene.run(*flags, plant=plant)
    (line,) = [line for line in ended.err.splitlines() if "Error: " in line]
    # The memory that ranks of a host share counts as a file.
    code = 7 if ranks == "one" else 8
    assert ended.code == code, ended.out + ended.err
    if ranks == "one":
        assert line.startswith("StorageError: checkpoint of step 2 not saved")
        assert "run/checkpoints/.tmp-step_00000002" in line
    else:
        # Both ranks reach the limit; a rank is named if the other one has not told of it yet.
        told = r"OutOfMemoryError: (rank [01]: )?files of this process may not be larger than .* \(ulimit -f\)"
        assert re.fullmatch(told, line), line
    assert scene.check_checkpoints() == []
    if (scene.work / "run").is_dir():  # ranks that cannot meet have no run folder
        assert json.loads((scene.work / "run/error.json").read_text())["exit_code"] == code
    assert scene.run(*flags).code == 0
    assert scene.check_checkpoints() == [2]
