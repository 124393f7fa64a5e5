"""Runs going back, beginning anew or coming from elsewhere: their own checkpoints and lines of metrics."""

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megapar.base.errors import CheckpointError
from megapar.checkpoint import lineage as lineages
from megapar.checkpoint.folder import sweep
from megapar.checkpoint.format import checkpoint_folders, open_manifest, step_of
from megapar.checkpoint.lineage import leads_to, lineage_of, set_aside
from megapar.checkpoint.resume import choose
from megapar.declare import context
from megapar.observe.metrics import cut_back
from tests.support import program
from tests.support.checkpoints import killed_at, load_toy, save_toy, toy_slices

EVERY = ("--checkpoint.every", "2", "--log.no-tensorboard")


def steps(root: Path) -> list[int]:
    return [step_of(path) for path in reversed(checkpoint_folders(root))]


def save_of(root: Path, step: int, lineage: list[tuple[str, int]]) -> Path:
    return save_toy(root, step, {"lineage": [list(start) for start in lineage]})


def metric_steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_checkpoint_leads_to_those_that_went_on_from_it_or_from_later() -> None:
    a, b, c = ("a", 0), ("b", 4), ("c", 2)
    assert leads_to(4, [a], [a, b])
    assert leads_to(6, [a, b], [a, b])
    assert not leads_to(6, [a], [a, b])
    assert not leads_to(2, [c], [a, b])
    assert not leads_to(6, [a, b], [a])
    assert leads_to(4, [], [b])  # older than lineages
    assert not leads_to(6, [], [b])


@pytest.mark.parametrize("lineage", ["a", {"a": 1}, [["a"]], [["a", 1.5]], [["a", True]], [[1, 1]], ["ab"]])
def test_a_lineage_of_another_shape_is_refused(lineage: Any) -> None:
    with pytest.raises(CheckpointError, match=r"trainer\.lineage"):
        lineage_of({"lineage": lineage})


def test_what_is_set_aside_is_what_does_not_lead_here(tmp_path: Path) -> None:
    """Fault abandoned-branch: later steps and other branches, damaged ones too; unreadable earlier steps stay."""
    a, b = ("a", 0), ("b", 4)
    for step in (2, 4, 6):
        save_of(tmp_path, step, [a])
    save_of(tmp_path, 3, [("other", 0)])
    for step in (1, 8):
        (tmp_path / f"step_{step:08d}").mkdir()
    (line,) = set_aside(tmp_path, [a, b])
    assert "step_00000003, step_00000006, step_00000008, now in " in line
    assert steps(tmp_path) == [1, 2, 4]
    assert steps(tmp_path / "abandoned-b") == [3, 6, 8]
    assert (tmp_path / "latest").read_text() == "step_00000004\n"
    load_toy(tmp_path / "abandoned-b/step_00000006", toy_slices(0))
    assert set_aside(tmp_path, [a, b]) == []
    assert len(set_aside(tmp_path, [("fresh", 0)])) == 1
    assert steps(tmp_path) == []
    assert not (tmp_path / "latest").exists()
    assert choose("auto", tmp_path, context.single()) is None


CALLS: list[tuple[Any, str]] = [(os, "fsync"), (Path, "replace"), (lineages, "sync_folder")]
CALLS += [(Path, "mkdir"), (Path, "rename"), (lineages, "write_latest"), (Path, "unlink")]


def test_a_kill_at_any_moment_of_setting_aside_leaves_one_branch_whole(tmp_path: Path) -> None:
    """Fault abandoned-branch: the next start sees the old branch as it was, or the new one alone; no checkpoint is
    lost."""
    lineage = [("a", 0), ("b", 2)]
    number, seen, ended = 0, set(), False
    while not ended:
        root = tmp_path / str(number)
        for step in (2, 4, 6):
            save_of(root, step, [("a", 0)])
        ended = not killed_at(CALLS, number, lambda root=root: set_aside(root, lineage))  # type: ignore[misc]
        sweep(root)
        aside = steps(root / "abandoned-b")
        assert sorted([*steps(root), *aside]) == [2, 4, 6]
        assert steps(root) in ([2, 4, 6], [2])
        assert not list(root.glob(".*")), "nothing is left of the work"
        newest = choose("auto", root, context.single())
        assert newest is not None
        assert step_of(newest) == steps(root)[-1]
        load_toy(newest, toy_slices(0))
        seen.add(len(aside))
        number += 1
    assert seen == {0, 2}
    assert number > 8


def test_lines_without_a_step_do_not_stop_a_resume_and_no_line_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault damaged-metrics: blank, foreign, binary and stepless lines are kept out, with one warning."""
    path, abandoned = tmp_path / "metrics.jsonl", tmp_path / "metrics.abandoned-a.jsonl"
    lines = [b'{"step": %d, "loss": NaN}\n' % step for step in (1, 2, 3, 4)]
    junk = [b"\n", b"hello\n", b"\xff\x00\xfe\n", b'{"loss": 1}\n', b"[1]\n", b'{"step": "2"}\n', b"[" * 9999 + b"\n"]
    cut = b'{"step": 1, "lo'
    path.write_bytes(lines[0] + b"".join(junk) + b"".join(lines[1:]) + cut)
    cut_back(path, 3, abandoned)
    assert path.read_bytes() == b"".join(lines[:3])
    assert abandoned.read_bytes() == b"".join(junk) + lines[3] + cut
    assert caplog.text.count("\n") == 1
    assert "7 lines that are no metrics of a step" in caplog.text
    before = path.stat().st_ino
    cut_back(path, 3, tmp_path / "again")
    assert path.stat().st_ino == before, "a file that is right is left alone"
    assert not (tmp_path / "again").exists()
    cut_back(tmp_path / "absent", 3, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_run_that_went_back_goes_on_with_its_own_branch(tmp_path: Path) -> None:
    """Fault abandoned-branch: six steps; back to the second with another seed, killed after the fourth; started
    again."""
    run, checkpoints = tmp_path / "run", tmp_path / "run/checkpoints"
    assert program.run("--train.steps", "6", *EVERY, cwd=tmp_path).code == 0
    first = losses(run)
    old = {step: (checkpoints / f"step_{step:08d}/manifest.json").read_bytes() for step in (4, 6)}
    other = ("--train.steps", "8", "--train.seed", "99", *EVERY)
    path = "run/checkpoints/step_00000002"
    back = program.run("--checkpoint.resume", path, *other, cwd=tmp_path, plant=lambda: end_at_step(5))
    assert back.code == 9, back.err
    assert "set aside, as they are of an abandoned branch: step_00000004, step_00000006, now in " in back.out
    (aside,) = checkpoints.glob("abandoned-*")
    assert {step: (aside / f"step_{step:08d}/manifest.json").read_bytes() for step in (4, 6)} == old
    again = program.run(*other, cwd=tmp_path)
    assert again.code == 0, again.err
    assert "resumed step 4 from" in again.out
    assert "set aside" not in again.out
    assert metric_steps(run) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert losses(run)[:2] == first[:2]
    assert all(new != old for new, old in zip(losses(run)[2:], first[2:], strict=False))
    moved = [json.loads(line) for path in run.glob("metrics.abandoned-*") for line in path.read_text().splitlines()]
    assert [line["loss"] for line in moved if line["step"] > 2][: len(first) - 2] == first[2:]
    lineage = lineage_of(open_manifest(checkpoints / "step_00000008").trainer)
    assert [step for _, step in lineage] == [0, 2, 4]
    assert lineage[:2] == lineage_of(open_manifest(checkpoints / "step_00000004").trainer)


def end_at_step(last: int) -> None:
    """The program ends, as by kill -9, at the beginning of this step."""
    from megapar.train import trainer

    original = trainer.queue_step

    def queue_step(state: Any, *args: Any, **named: Any) -> Any:
        if state.step == last - 1:
            os._exit(9)
        return original(state, *args, **named)

    trainer.queue_step = queue_step


def test_a_run_that_begins_anew_in_a_used_folder_is_not_mixed_with_the_old_one(tmp_path: Path) -> None:
    """Fault abandoned-branch: with `resume none`, and with old weights besides; each is then gone on from by itself."""
    run, checkpoints = tmp_path / "run", tmp_path / "run/checkpoints"
    assert program.run("--train.steps", "6", *EVERY, cwd=tmp_path).code == 0
    new = ("--train.steps", "4", "--train.seed", "99", *EVERY)
    anew = program.run("--checkpoint.resume", "none", *new, cwd=tmp_path, plant=lambda: end_at_step(4))
    assert anew.code == 9
    assert steps(checkpoints) == [2]
    again = program.run(*new, cwd=tmp_path)
    assert "resumed step 2 from" in again.out
    assert metric_steps(run) == [1, 2, 3, 4]
    (aside,) = checkpoints.glob("abandoned-*")
    assert steps(aside) == [2, 4, 6]
    weights = ("--checkpoint.resume", "none", "--checkpoint.init_from", str(aside / "step_00000006"))
    from_weights = program.run(*weights, *new, cwd=tmp_path)
    assert from_weights.code == 0, from_weights.err
    assert len(list(checkpoints.glob("abandoned-*"))) == 2
    assert metric_steps(run) == [1, 2, 3, 4]
    assert [step for _, step in lineage_of(open_manifest(checkpoints / "step_00000004").trainer)] == [0]


def test_a_plain_restart_sets_nothing_aside_and_says_when_there_is_nothing_to_do(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert program.run("--train.steps", "4", *EVERY, cwd=tmp_path).code == 0
    done = program.run("--train.steps", "4", *EVERY, cwd=tmp_path)
    assert done.code == 0
    assert "nothing to do: train.steps=4, and step 4 is done" in done.out
    shorter = program.run("--train.steps", "3", *EVERY, cwd=tmp_path)
    assert "nothing to do: train.steps=3, and step 4 is done" in shorter.out
    assert program.run("--train.steps", "6", *EVERY, cwd=tmp_path).code == 0
    assert metric_steps(run) == [1, 2, 3, 4, 5, 6]
    names = sorted(path.name for path in run.iterdir() if "abandoned" in path.name)
    assert names == []
    assert [step_of(path) for path in reversed(checkpoint_folders(run / "checkpoints"))] == [2, 4, 6]
    for older, newer in pairwise(checkpoint_folders(run / "checkpoints")[::-1]):
        lineage = lineage_of(open_manifest(newer).trainer)
        assert leads_to(step_of(older), lineage_of(open_manifest(older).trainer), lineage)


def test_checkpoints_older_than_lineages_are_gone_on_from(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_toy(tmp_path, step)
    assert choose("auto", tmp_path, context.single()) == tmp_path / "step_00000003"
    assert set_aside(tmp_path, [("a", 3)]) == []
    assert len(set_aside(tmp_path, [("b", 1)])) == 1
    assert steps(tmp_path) == [1]
