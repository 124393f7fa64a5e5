"""Sweep of damaged checkpoints: `auto` takes the newest whole one, or the run stops with one line: the file and what to
go on from. No damage is loaded, and nothing whole is lost."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megapar.checkpoint.format import read_manifest
from tests.support import faults
from tests.support.checkpoints import edit_manifest
from tests.support.faults import TWO, Scene

FLAGS = ("--train.global_batch_size", "8", "--train.micro_batch_size", "2", "--log.no-tensorboard")
FLAGS += ("--checkpoint.every", "2", "--checkpoint.no-save_last", "--optimizer.schedule", "constant", "--train.steps")
NEWEST, OLDER = "step_00000004", "step_00000002"
FIRST, SECOND = "rank_00000.safetensors", "rank_00001.safetensors"
SKIPPED, STOPPED, IGNORED = "skipped", "stopped", "ignored"


class Damage(NamedTuple):
    """What is done to the newest checkpoint, what `auto` makes of it, and words of the line about it.

    skipped: a warning, and the older one is gone on from. stopped: exit code 4. ignored: nothing is amiss.
    """

    name: str
    change: Callable[[Path], object]
    outcome: str
    words: str = ""

    def __str__(self) -> str:
        return self.name


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Four steps on two ranks, with checkpoints of steps 2 and 4."""
    scene = Scene(tmp_path_factory.mktemp("trained"))
    assert scene.run(*FLAGS, "4", *TWO).code == 0
    return scene


@pytest.fixture(scope="module")
def from_older(trained: Scene, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of one process going on from step 2 to step 5 without another checkpoint."""
    return go_on(trained, tmp_path_factory.mktemp("from_older"), OLDER)


@pytest.fixture(scope="module")
def from_newest(trained: Scene, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return go_on(trained, tmp_path_factory.mktemp("from_newest"), NEWEST)


def go_on(trained: Scene, folder: Path, name: str) -> list[dict[str, Any]]:
    scene = Scene(folder)
    shutil.copytree(trained.work, scene.work, dirs_exist_ok=True)
    for path in scene.checkpoints.glob("step_*"):
        if path.name > name:
            shutil.rmtree(path)
    assert scene.run(*FLAGS, "5").code == 0
    return faults.metrics(scene.work)


def edited(file: str, change: Callable[[bytearray], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        content = bytearray((path / file).read_bytes())
        change(content)
        (path / file).write_bytes(content)

    return edit


def truncated(file: str, share: float) -> Callable[[Path], None]:
    return edited(file, lambda content: content.__delitem__(slice(int(share * len(content)), None)))


def flipped(file: str, share: float) -> Callable[[Path], None]:
    """One bit, at this share of the file's bytes."""

    def flip(content: bytearray) -> None:
        content[min(int(share * len(content)), len(content) - 1)] ^= 4

    return edited(file, flip)


def swapped(path: Path) -> None:
    (path / FIRST).rename(path / "other")
    (path / SECOND).rename(path / FIRST)
    (path / "other").rename(path / SECOND)


def without(*keys: str, sign: bool = True) -> Callable[[Path], None]:
    """Without a field of the manifest's body; the SHA-256 then attests it."""

    def drop(body: dict[str, Any]) -> None:
        for key in keys[:-1]:
            body = body[key]
        del body[keys[-1]]

    return lambda path: edit_manifest(path, drop, sign=sign)


def replaced(value: Any, *keys: str) -> Callable[[Path], None]:
    def put(body: dict[str, Any]) -> None:
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = value

    return lambda path: edit_manifest(path, put)


def manifest_text(change: Callable[[str], str]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        (path / "manifest.json").write_text(change((path / "manifest.json").read_text()))

    return rewrite


def of_other_step(file: str) -> Callable[[Path], None]:
    return lambda path: shutil.copy(path.parent / OLDER / file, path / file)


def as_folder(file: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / file).unlink()
        (path / file).mkdir()

    return change


TENSOR = "main.layers.0.mlp.down.weight"


def shards() -> list[Damage]:
    cases = []
    for file in (FIRST, SECOND):
        rank = file[:10]
        cases += [Damage(f"{rank}-cut-at-{s}", truncated(file, s), SKIPPED, file) for s in (0.0, 0.001, 0.5, 0.9999)]
        # The first 8 bytes are the header's length, then comes the header, then tensors.
        cases += [Damage(f"{rank}-flip-at-{s}", flipped(file, s), STOPPED, file) for s in (0.0, 0.01, 0.3, 0.7, 1.0)]
        cases += [
            Damage(f"{rank}-missing", lambda path, file=file: (path / file).unlink(), SKIPPED, f"{file}: missing"),  # type: ignore[misc]
            Damage(f"{rank}-longer", edited(file, lambda content: content.extend(b"x")), SKIPPED, file),
            Damage(f"{rank}-zeros", edited(file, lambda c: c.__setitem__(slice(None), bytes(len(c)))), STOPPED, file),
            Damage(f"{rank}-of-step-2", of_other_step(file), STOPPED, f"{file}: "),
            Damage(f"{rank}-a-folder", as_folder(file), SKIPPED, "not a regular file"),
        ]
    return cases


def manifests() -> list[Damage]:
    name = "manifest.json"
    cases = [Damage(f"manifest-cut-at-{s}", truncated(name, s), SKIPPED, name) for s in (0.0, 0.1, 0.5, 0.99)]
    # Any byte of it is under the SHA-256, the names of its own fields excepted.
    cases += [Damage(f"manifest-flip-at-{s}", flipped(name, s), SKIPPED, name) for s in (0.0, 0.01, 0.3, 0.7, 0.99)]
    fields = ["format", "step", "consumed_samples", "layout", "model_config", "trainer", "data", "files", "tensors"]
    cases += [Damage(f"manifest-without-{field}", without(field), SKIPPED, name) for field in fields]
    cases += [Damage(f"manifest-without-trainer.{f}", without("trainer", f), SKIPPED) for f in ("updates", "config")]
    cases += [
        Damage(f"manifest-tensor-without-{field}", without("tensors", TENSOR, field), SKIPPED, name)
        for field in ("chunks", "dtype", "shape")
    ]
    cases += [
        Damage(f"manifest-{'.'.join(keys)}-is-{json.dumps(value)}", replaced(value, *keys), SKIPPED)
        for keys in (["step"], ["trainer"], ["files"], ["tensors"], ["trainer", "lineage"], ["tensors", TENSOR])
        for value in (None, -1, "x", [[]])
    ]
    cases += [
        Damage("manifest-missing", lambda path: (path / name).unlink(), SKIPPED, f"it has no {name}"),
        Damage("manifest-a-folder", as_folder(name), SKIPPED, name),
        Damage("manifest-unsigned", without("step", sign=False), SKIPPED, name),
        Damage("manifest-without-sha256", manifest_text(lambda t: t.replace('"sha256"', '"sha"')), SKIPPED, name),
        Damage("manifest-list", manifest_text(lambda text: f"[{text}]"), SKIPPED, name),
        Damage("manifest-null", manifest_text(lambda text: "null"), SKIPPED, name),
        Damage("manifest-not-utf8", edited(name, lambda content: content.__setitem__(100, 0xFF)), SKIPPED, name),
        Damage("manifest-nested", manifest_text(lambda text: "[" * 100_000), SKIPPED, name),
        Damage("manifest-nested-body", manifest_text(lambda text: '{"body": ' * 100_000), SKIPPED, name),
        Damage("manifest-of-step-2", of_other_step(name), SKIPPED, "step"),
        Damage("manifest-spaced", manifest_text(lambda text: json.dumps(json.loads(text), indent=1)), IGNORED),
    ]
    return cases


def folders() -> list[Damage]:
    latest = "../latest"
    cases = [
        Damage(f"latest-{name}", change, IGNORED)
        for name, change in {
            "missing": lambda path: (path / latest).unlink(),
            "of-step-2": lambda path: (path / latest).write_text(f"{OLDER}\n"),
            "junk": lambda path: (path / latest).write_bytes(b"\xff\0../../etc"),
            "empty": lambda path: (path / latest).write_text(""),
            "a-folder": as_folder(latest),
        }.items()
    ]
    cases += [
        Damage("shards-swapped", swapped, SKIPPED, "bytes, the manifest says"),
        Damage("empty-folder", lambda path: (shutil.rmtree(path), path.mkdir()), SKIPPED, NEWEST),  # type: ignore[func-returns-value]
        Damage("a-file", lambda path: (shutil.rmtree(path), path.write_text("")), SKIPPED, NEWEST),
        Damage("a-later-empty-folder", lambda path: path.with_name("step_00000009").mkdir(), IGNORED),
        Damage("renamed-to-9", lambda path: path.rename(path.with_name("step_00000009")), SKIPPED, "step_00000009"),
        Damage("another-file-beside", lambda path: (path / "notes.txt").write_text("x"), IGNORED),
    ]
    return cases


ALL = [*shards(), *manifests(), *folders()]
FEW = ("rank_00001-cut-at-0.5", "rank_00000-flip-at-0.7", "manifest-without-files")


def check(
    case: Damage,
    trained: Scene,
    folder: Path,
    from_older: list[dict[str, Any]],
    from_newest: list[dict[str, Any]],
) -> None:
    scene = Scene(folder)
    shutil.copytree(trained.work, scene.work, dirs_exist_ok=True)
    path = scene.checkpoints / NEWEST
    case.change(path)
    ended = scene.run(*FLAGS, "5")
    read_manifest(scene.checkpoints / OLDER)
    if case.outcome == STOPPED:
        assert ended.code == 4, ended.out + ended.err
        (line,) = ended.err.splitlines()
        assert re.match(r"CheckpointError: .*--checkpoint.resume \S*step_00000002 goes on from the one before", line)
        assert case.words in line
        facts = faults.error(scene.work)
        assert (facts["class"], facts["exit_code"], facts["step"]) == ("CheckpointError", 4, 0)
        assert facts["message"] in line
        ended = scene.run(*FLAGS, "5", "--checkpoint.resume", f"run/checkpoints/{OLDER}")
    assert ended.code == 0, ended.err
    if case.outcome == SKIPPED:
        warnings = [line for line in ended.err.splitlines() if line.startswith("checkpoint skipped: ")]
        assert len(warnings) == 1, ended.err
        assert NEWEST in warnings[0] or case.words in warnings[0]
        assert case.words in warnings[0]
    assert faults.metrics(scene.work) == (from_newest if case.outcome == IGNORED else from_older)
    assert not (scene.work / "run/error.json").exists()


@pytest.mark.parametrize("case", [case for case in ALL if case.name in FEW], ids=str)
def test_damage_is_named_and_not_loaded(
    case: Damage, trained: Scene, tmp_path: Path, from_older: list[dict[str, Any]], from_newest: list[dict[str, Any]]
) -> None:
    """Faults truncated-file, missing-file, flipped-bit, incomplete-checkpoint, odd-manifest."""
    check(case, trained, tmp_path, from_older, from_newest)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ALL if case.name not in FEW], ids=str)
def test_sweep_of_damaged_checkpoints(
    case: Damage, trained: Scene, tmp_path: Path, from_older: list[dict[str, Any]], from_newest: list[dict[str, Any]]
) -> None:
    """Faults truncated-file, missing-file, flipped-bit, incomplete-checkpoint, odd-manifest."""
    check(case, trained, tmp_path, from_older, from_newest)


def by_name() -> Sequence[Damage]:
    return [case for case in ALL if case.outcome == SKIPPED and not case.name.startswith(("a-file", "renamed"))][::4]


@pytest.mark.slow
@pytest.mark.parametrize("case", by_name(), ids=str)
def test_a_damaged_checkpoint_that_is_asked_for_ends_every_rank(case: Damage, trained: Scene, tmp_path: Path) -> None:
    """Faults incomplete-checkpoint, odd-manifest: on two ranks, one line, exit code 4, and nothing is set aside."""
    scene = Scene(tmp_path)
    shutil.copytree(trained.work, scene.work, dirs_exist_ok=True)
    case.change(scene.checkpoints / NEWEST)
    ended = scene.run(*FLAGS, "5", *TWO, "--checkpoint.resume", f"run/checkpoints/{NEWEST}")
    assert ended.code == 4, ended.out + ended.err
    (line,) = [line for line in ended.err.splitlines() if not line.startswith("checkpoint skipped: ")]
    assert line.startswith("CheckpointError: ")
    assert case.words in line
    assert faults.error(scene.work)["exit_code"] == 4
    assert sorted(path.name for path in scene.checkpoints.glob("step_*")) == [OLDER, NEWEST]
    assert not list(scene.checkpoints.glob("abandoned*"))
