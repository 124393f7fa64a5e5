"""Ranks that start again after a fault: from a snapshot or a checkpoint, in the same world or a smaller one."""

import fcntl
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapar.base.errors import CommunicationError, DataError
from megapar.checkpoint import tiers
from megapar.checkpoint.format import open_manifest
from megapar.launch import rank_process, restarts
from megapar.launch.restarts import Fault as Past
from megapar.launch.restarts import judge
from megapar.system import events
from megapar.train import savers
from megapar.train.savers import best_interval
from tests.support import faults
from tests.support.faults import Scene
from tests.support.injector import KINDS, Fault, plant, struck
from tests.support.program import Ended
from tests.support.small_training import make_config, make_state
from tests.support.sweeps import slow_but

STEPS = 8
INPUTS = ("--train.recompute", "full", "--train.offload", "1", "--parallel.schedule", "zb-h1")
LAYOUTS = faults.LAYOUTS | {
    "clipped": (*faults.LAYOUTS["tp2"], "--optimizer.qk_clip", "0.001"),
    "offloaded": (*faults.LAYOUTS["pp2"], *INPUTS, "--optimizer.offload", "0.5"),
}


def flags_of(steps: int, every: int = 4, timeout_seconds: int = 6, micro_batch: int = 4) -> tuple[str, ...]:
    """Flags of a run of so many steps, with a checkpoint after every `every`-th."""
    sizes = (
        "--train.steps",
        str(steps),
        "--train.global_batch_size",
        "8",
        "--train.micro_batch_size",
        str(micro_batch),
    )
    launch = ("--launch.timeout_seconds", str(timeout_seconds))
    return (*sizes, *launch, "--checkpoint.every", str(every), "--log.no-tensorboard")


FLAGS = flags_of(STEPS)
RESTARTS = ("--launch.max_restarts", "3")
MEMORY = ("--checkpoint.memory_every", "1")

LOST, INTERNAL = CommunicationError.exit_code, 70


# The decision


def nothing_smaller(_: int) -> int:
    return 0


def past(step: int, *, rank: int = 1, code: int = LOST, world: int = 4) -> Past:
    return Past(code, "CommunicationError", rank, step, world)


def test_what_may_pass_is_started_again_and_what_would_come_again_is_not() -> None:
    assert judge([past(7)], nothing_smaller, 3).world == 4
    assert judge([past(7, code=INTERNAL)], nothing_smaller, 3).world == 4
    for code in (2, DataError.exit_code, 5, 7, 8):
        assert judge([past(7, code=code)], nothing_smaller, 3).ends == "this error would come again"
    assert judge([past(7)], nothing_smaller, 0).ends == "launch.max_restarts=0 are used up"


def test_a_fault_that_comes_again_at_its_step_ends_the_run_and_others_do_not() -> None:
    assert judge([past(7), past(7)], nothing_smaller, 9).ends == "it came twice at step 7"
    assert judge([past(7), past(7, rank=2)], nothing_smaller, 9).world == 4, "of another rank"
    assert judge([past(7), past(9)], nothing_smaller, 9).world == 4, "two steps further"
    assert judge([past(7), past(3)], nothing_smaller, 9).world == 4, "at another step"
    assert judge([past(7), past(3), past(5)], nothing_smaller, 9).ends == "3 starts came no further than step 7"
    many = [past(step) for step in range(1, 9)]
    assert judge(many, nothing_smaller, 9).world == 4
    assert judge(many, nothing_smaller, 7).ends == "launch.max_restarts=7 are used up"


def test_pauses_grow_without_progress() -> None:
    assert judge([past(7)], nothing_smaller, 9).pause_seconds == 0
    assert judge([past(7), past(3, rank=2)], nothing_smaller, 9).pause_seconds == 1
    assert judge([past(7), past(9)], nothing_smaller, 9).pause_seconds == 0


def test_a_rank_lost_twice_without_progress_is_left_out() -> None:
    assert judge([past(7), past(7)], lambda world: world - 1, 9).world == 3
    assert judge([past(7), past(6)], lambda world: world - 1, 9).world == 3
    assert judge([past(7), past(9)], lambda world: world - 1, 9).world == 4


# Runs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scene]:
    """The scene of a run without faults, by layout; each is made when it is first asked for."""

    class Runs(dict[str, Scene]):
        def __missing__(self, layout: str) -> Scene:
            self[layout] = scene = Scene(tmp_path_factory.mktemp(layout))
            ended = scene.run(*FLAGS, *LAYOUTS[layout])
            assert (ended.code, ended.err) == (0, "")
            return scene

    return Runs()


def run(
    folder: Path, layout: str, *more: str, of: tuple[Fault, ...], flags: tuple[str, ...] = FLAGS
) -> tuple[Scene, Ended]:
    scene = Scene(folder)
    marks = folder / "marks"
    marks.mkdir()
    # One in a save is a StorageError, in a line.
    traces = any(fault.kind == "exc" and fault.point not in ("write", "written") for fault in of)
    ended = scene.run(*flags, *LAYOUTS[layout], *RESTARTS, *more, plant=plant(*of, marks=marks), traces=traces)
    assert struck(marks) == sum(fault.times for fault in of), ended.err
    assert left_snapshots() == []
    return scene, ended


def left_snapshots() -> list[Path]:
    """The folders of snapshots whose launcher has ended. One that lives, such as another test's, holds a lock."""
    left = []
    for path in Path("/dev/shm").glob("megapar-snapshots-*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.append(path)
            finally:
                os.close(descriptor)
    return left


def told(scene: Scene, name: str) -> list[dict[str, Any]]:
    """The events of this name."""
    return [event for event in events.read(scene.work / "run") if event["event"] == name]


def check_same(scene: Scene, other: Scene) -> None:
    """The run ended as the other one did: metrics and weights are equal bitwise."""
    assert faults.metrics(scene.work) == faults.metrics(other.work)
    assert faults.weights(scene.work, STEPS) == faults.weights(other.work, STEPS)
    assert not (scene.work / "run/error.json").exists()


ENDINGS = {
    "kill": "was ended by SIGKILL",
    "exc": "InjectedError",
    "exit0": "ended with exit code 0 before its run was complete",
    "hang": "did not arrive",
    "stop": "its process is stopped",
}
# A write that never ends is waited for, as a slow disk is: the alert `stall` tells.
SAVING = ("write", "written", "start")
CASES = [
    ("dp2", Fault("kill", 1, 7, "reduce")),
    ("tp2", Fault("exc", 0, 7, "optimizer")),
    ("pp2", Fault("exit0", 1, 7, "data")),
    ("zero3", Fault("stop", 0, 7, "reduce")),
    ("tp2pp2", Fault("hang", 3, 7, "forward")),
    *[("dp2", Fault(kind, 1, 7, point)) for kind in ENDINGS for point in ("data", "forward", "reduce", "optimizer")],
    *[("dp2", Fault(kind, 1, 7, "gradients")) for kind in ENDINGS],
    *[("tp2", Fault(kind, 1, 7, point)) for kind in ("kill", "exit0", "stop") for point in ("write", "written")],
    *[("tp2", Fault(kind, 1, 0, "start")) for kind in ENDINGS],
    ("clipped", Fault("kill", 1, 7, "reduce")),
    ("clipped", Fault("hang", 0, 7, "optimizer")),
    ("offloaded", Fault("kill", 1, 7, "forward")),
    ("offloaded", Fault("stop", 0, 7, "reduce")),
    ("states", Fault("kill", 1, 7, "forward")),
    ("states", Fault("stop", 0, 7, "reduce")),
]


@pytest.mark.parametrize(("layout", "fault"), slow_but([1, 3], CASES), ids=str)
def test_the_run_goes_on_from_the_step_before_and_ends_bitwise_the_same(
    layout: str, fault: Fault, tmp_path: Path, undisturbed: dict[str, Scene]
) -> None:
    """Faults lost-rank and frozen-rank: the culprit is named, and one step is computed twice at most."""
    scene, ended = run(tmp_path, layout, *MEMORY, of=(fault,))
    assert ended.code == 0, ended.err
    assert ENDINGS[fault.kind] in ended.err
    assert re.search(r"^restart 1 of 3, with \d ranks$", ended.err, re.M)
    check_same(scene, undisturbed[layout])
    (happened,) = told(scene, "fault")
    assert happened["rank"] == fault.rank
    starts = [(event["step"], event["tier"], event["steps_lost"]) for event in told(scene, "start")]
    # A rank that is lost before the first step leaves nothing to go on from.
    assert starts == [(0, "none", 0)] + [(6, "memory", 0)] * (fault.point != "start")
    assert [event["step"] for event in told(scene, "saved")][-1] == STEPS
    assert told(scene, "exit")[-1]["code"] == 0


LATE = [
    *[(kind, point) for kind in ("slow", "delay") for point in ("data", "forward", "reduce", "gradients", "optimizer")],
    *[(kind, point) for kind in ("slow", "delay") for point in SAVING],
]


@pytest.mark.parametrize(("kind", "point"), slow_but([2], LATE))
def test_a_rank_that_is_late_costs_time_alone(
    kind: str, point: str, tmp_path: Path, undisturbed: dict[str, Scene]
) -> None:
    scene, ended = run(tmp_path, "tp2", *MEMORY, of=(Fault(kind, 1, 7 * (point != "start"), point),))
    assert (ended.code, ended.err) == (0, "")
    assert (len(told(scene, "start")), told(scene, "fault")) == (1, [])
    check_same(scene, undisturbed["tp2"])


MUST_END = [("nan", "gradients", 5), ("enospc", "write", 7), ("exc", "write", 7), ("exc", "written", 7)]


@pytest.mark.parametrize(("kind", "point", "code"), slow_but([1], MUST_END))
def test_a_run_that_must_end_is_started_by_hand_and_ends_bitwise_the_same(
    kind: str, point: str, code: int, tmp_path: Path, undisturbed: dict[str, Scene]
) -> None:
    """Numbers and a run folder that fails are for a person. The newest checkpoint of all tiers is taken then."""
    local = ("--checkpoint.local_dir", str(tmp_path / "fast"), "--checkpoint.local_every", "1")
    # A fault of saves strikes twice in step 8: in the snapshot, and in the checkpoint of the run folder.
    fault = Fault(kind, 1, 7, point) if code == 5 else Fault(kind, 1, 8, point, times=2)
    scene, ended = run(tmp_path, "dp2", *local, of=(fault,))
    assert ended.code == code, ended.err
    assert ended.err.splitlines()[-1] == "not started again: this error would come again"
    assert scene.run(*FLAGS, *LAYOUTS["dp2"], *local).code == 0
    starts = [(start["step"], start["tier"]) for start in told(scene, "start")]
    assert starts == [(0, "none"), (fault.step - 1, "local")]
    check_same(scene, undisturbed["dp2"])


def moved_away(name: str, first: int, last: int, rank: int) -> Callable[[], None]:
    """Plants that `rank` puts a file in place of a tier's folder in step `first`, and the folder back in `last`."""

    def install() -> None:
        found: dict[str, Path] = {}
        real = tiers.all_of

        def all_of(*args: Any, **named: Any) -> list[tiers.Tier]:
            made = real(*args, **named)
            found.update({tier.name: tier.root for tier in made})
            return made

        def away(_: Any) -> None:
            found[name].rename(found[name].with_name(f"away-{found[name].name}"))
            found[name].touch()

        def back(_: Any) -> None:
            if found[name].is_file():  # a start that repeats the step finds the folder
                found[name].unlink()
                found[name].with_name(f"away-{found[name].name}").rename(found[name])

        tiers.all_of = all_of
        faults.on_rank(rank, first - 1, away)()
        faults.on_rank(rank, last - 1, back)()

    return install


TIERS = ["hosts", "memory", "local", "memory async", "local async"]


@pytest.mark.parametrize("tier", slow_but([0], TIERS))
def test_a_faster_tier_that_fails_costs_its_snapshots_alone(
    tier: str, tmp_path: Path, undisturbed: dict[str, Scene]
) -> None:
    """Fault snapshot-ends-run: one rank's disk fails in steps 3 to 5, and the run goes on. A restart has the tier
    again."""
    name, _, mode = tier.replace("hosts", "local hosts").partition(" ")
    local = ("--checkpoint.local_dir", str(tmp_path / "fast"), "--checkpoint.local_every", "1")
    marks = tmp_path / "marks"
    marks.mkdir()
    plants = [moved_away(name, 3, 6, rank=1), plant(Fault("kill", 0, 8), marks=marks)]
    if mode == "hosts":
        plants.append(on_disks(tmp_path / "disks", 1))
    scene = Scene(tmp_path)
    more = (*(MEMORY if name == "memory" else local), *(("--checkpoint.async_save",) if mode == "async" else ()))
    flags = (*flags_of(STEPS, timeout_seconds=20), *LAYOUTS["zero3"], *RESTARTS, *more)
    ended = scene.run(*flags, plant=both(*plants))
    assert ended.code == 0, ended.err
    (lost,), (again,) = told(scene, "tier_lost"), told(scene, "tier_back")
    assert (lost["tier"], again["tier"]) == (name, name)
    assert lost["step"] == 3 if mode != "async" else lost["step"] >= 3
    (line,) = (line for line in ended.out.splitlines() if line.startswith("tier_lost: "))
    # In the background the snapshot of the step before may be lost too, if the disk fails before its end.
    assert re.search(rf"checkpoint of step {'[23]' if mode == 'async' else 3} not saved \(rank ", line)
    assert 4 in [saved["step"] for saved in told(scene, "saved") if saved["tier"] == "shared"]
    # The start after the fault is from the tier that works again. A snapshot that was being written may be lost, and in
    # the background the only one.
    assert told(scene, "start")[-1]["tier"] in ([name, "shared"] if mode == "async" else [name])
    check_same(scene, undisturbed["zero3"])
    left = [path.name for path in tmp_path.rglob(".tmp-step_*")]
    assert (left, left_snapshots()) == ([], [])


def test_a_local_disk_that_is_gone_at_a_restart_is_left_out(tmp_path: Path, undisturbed: dict[str, Scene]) -> None:
    """Fault snapshot-ends-run: the launcher's next start does without it, and goes on from the run folder."""

    def kill(_: Any) -> None:
        if (tmp_path / "away").exists():
            return
        (tmp_path / "fast").rename(tmp_path / "away")
        (tmp_path / "fast").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    local = ("--checkpoint.local_dir", str(tmp_path / "fast"), "--checkpoint.local_every", "1")
    scene = Scene(tmp_path)
    ended = scene.run(*FLAGS, *LAYOUTS["dp2"], *RESTARTS, *local, plant=faults.on_rank(1, 6, kill))
    assert ended.code == 0, ended.err
    assert "Not a directory; this start goes on without it" in ended.err
    assert [(start["step"], start["tier"]) for start in told(scene, "start")] == [(0, "none"), (4, "shared")]
    check_same(scene, undisturbed["dp2"])


@pytest.mark.parametrize("resume", slow_but([1], ["auto", "none"]))
def test_without_snapshots_it_goes_on_from_the_disk_whatever_resume_says(
    resume: str, tmp_path: Path, undisturbed: dict[str, Scene]
) -> None:
    """Fault restart-from-zero."""
    scene, ended = run(tmp_path, "dp2", "--checkpoint.resume", resume, of=(Fault("kill", 0, 7),))
    assert ended.code == 0, ended.err
    check_same(scene, undisturbed["dp2"])
    assert [(event["step"], event["tier"], event["steps_lost"]) for event in told(scene, "start")] == [
        (0, "none", 0),
        (4, "shared", 2),
    ]


def test_a_local_disk_is_a_tier_and_is_found_by_the_next_job(tmp_path: Path, undisturbed: dict[str, Scene]) -> None:
    """The job ends, as its restarts are used up. The next one goes on from the newest checkpoint of all folders."""
    local = ("--checkpoint.local_dir", str(tmp_path / "fast"), "--checkpoint.local_every", "1")
    scene = Scene(tmp_path)
    ended = scene.run(*FLAGS, *LAYOUTS["dp2"], *local, plant=faults.on_rank(1, 6, lambda _: os.kill(os.getpid(), 9)))
    assert ended.code == 6
    (folder,) = (tmp_path / "fast").iterdir()
    kept = sorted(path.name for path in folder.glob("checkpoints/step_*"))
    # Rank 1 kills the job as soon as step 6 is complete; rank 0 may not have removed step 4 yet.
    assert kept[-2:] == ["step_00000005", "step_00000006"]
    assert kept[:-2] in ([], ["step_00000004"])
    ended = scene.run(*FLAGS, *LAYOUTS["dp2"], *local)
    assert f"resumed step 6 from {folder}" in ended.out
    check_same(scene, undisturbed["dp2"])
    # A start that goes back leaves no checkpoint of the branch it left in the fast folder.
    back = scene.run(*flags_of(5), *LAYOUTS["dp2"], *local, "--checkpoint.resume", "run/checkpoints/step_00000004")
    assert back.code == 0, back.err
    assert [path.name for path in folder.glob("checkpoints/step_*")] == ["step_00000005"]
    lineage = open_manifest(folder / "checkpoints/step_00000005").trainer["lineage"]
    assert [step for _, step in lineage] == [0, 4]


def test_a_damaged_snapshot_is_given_up_for_an_older_checkpoint(tmp_path: Path, undisturbed: dict[str, Scene]) -> None:
    """Fault damaged-snapshot: its checksum tells, it is removed, and the next start takes what is left."""
    of = (Fault("flip", 1, 6, "written"), Fault("kill", 0, 7))
    scene, ended = run(tmp_path, "dp2", *MEMORY, of=of)
    assert ended.code == 0, ended.err
    assert "this copy of step 6 is removed: start again without it" in ended.err
    first, second = told(scene, "start")
    # The snapshot before may not have been removed yet.
    assert (second["tier"], second["step"]) in [("shared", 4), ("memory", 5)]
    assert first["tier"] == "none"
    check_same(scene, undisturbed["dp2"])


def test_a_crash_loop_ends_with_its_cause(tmp_path: Path) -> None:
    """Fault crash-loop."""
    scene, ended = run(tmp_path, "dp2", *MEMORY, of=(Fault("exc", 1, 5, "forward", times=2),))
    assert ended.code == INTERNAL
    assert ended.err.splitlines()[-1] == "not started again: it came twice at step 5"
    assert faults.error(scene.work)["message"] == "planted"
    assert len(told(scene, "fault")) == 2


def test_a_fault_that_would_come_again_ends_the_run_at_once(tmp_path: Path) -> None:
    scene, ended = run(tmp_path, "dp2", *MEMORY, of=(Fault("nan", 1, 5, "gradients"),))
    assert ended.code == 5
    assert ended.err.splitlines()[-1] == "not started again: this error would come again"
    assert len(told(scene, "start")) == 1


def test_replicas_become_fewer_and_come_back_with_the_same_global_batches(tmp_path: Path) -> None:
    """Fault lost-twice: 4 replicas, then 3, then 4; loss and samples are those of an undisturbed run, to rounding."""
    four = (*flags_of(12, micro_batch=2), "--launch.nproc", "4")
    calm = Scene(tmp_path)
    assert calm.run(*four).code == 0
    folder = tmp_path / "shrinking"
    folder.mkdir()
    less = (*MEMORY, "--launch.min_dp", "3")
    scene, ended = run(folder, "one", *less, flags=four, of=(Fault("kill", 3, 5, times=2),))
    assert ended.code == 0, ended.err
    assert [event["world"] for event in told(scene, "start")] == [4, 4, 3, 4]
    found, expected = faults.metrics(scene.work), faults.metrics(calm.work)
    for key in ("step", "consumed_samples", "tokens"):
        assert [line.get(key) for line in found] == [line.get(key) for line in expected]
    losses = [(line["loss"], other["loss"]) for line, other in zip(found, expected, strict=True) if "loss" in line]
    assert all(one == pytest.approx(other, rel=1e-6) for one, other in losses)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_with_restarts_as_it_ends_any_other(number: signal.Signals, tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    running = scene.start(*flags_of(100_000, every=0), *LAYOUTS["dp2"], *RESTARTS, *MEMORY)
    running.until("step      3/")
    os.kill(running.pid, number)
    ended = scene.finish(running)
    assert ended.code == (75 if number == signal.SIGTERM else 130), ended.err
    assert "restart" not in ended.err
    assert scene.check_checkpoints(ended.out) == ([] if number == signal.SIGINT else scene.check_checkpoints())


def test_intervals_follow_the_time_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save of 0.5 s, a failure an hour: every 60 s, which are six steps."""
    assert best_interval(2.0, 3600 * 50_000 / 1024) == pytest.approx(14 * 60, rel=0.01)
    clock = {"now": 0.0}
    monkeypatch.setattr(savers.time, "perf_counter", lambda: clock["now"])

    def save(saver: Any, state: Any, ready: Any) -> list[Path]:
        clock["now"] += 0.5
        return []

    monkeypatch.setattr(savers.Saver, "save", save)
    config = make_config()
    options = replace(config.checkpoint, every=2, mtbf_hours=1.0)
    state = make_state(replace(config, checkpoint=options, train=replace(config.train, steps=100)))
    made = savers.Savers(state, tmp_path)
    saved = []
    for step in range(1, 40):
        clock["now"] = 10.0 * step
        state.step = step
        if made.due(step):
            list(made.save(state, stopping=False, ready=lambda: None))
            saved.append(step)
    assert saved == [2, 8, 14, 20, 26, 32, 38]


# Launchers that own the processes


def test_a_launcher_that_starts_a_job_again_goes_on_whatever_resume_says(tmp_path: Path) -> None:
    """Fault restart-from-zero: the same job goes on, another one begins anew as it was told."""
    one = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "a-job"}
    scene = Scene(tmp_path)
    flags = (*flags_of(6), "--checkpoint.resume", "none")
    ended = scene.run(*flags, env=one, plant=faults.on_rank(0, 4, lambda _: os.kill(os.getpid(), signal.SIGKILL)))
    assert ended.code == -signal.SIGKILL
    again = scene.run(*flags, env={**one, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert "resumed step 4 from" in again.out, again.err
    anew = scene.run(*flags, env={**one, "TORCHELASTIC_RUN_ID": "another", "TORCHELASTIC_RESTART_COUNT": "1"})
    assert "resumed" not in anew.out, anew.err
    assert [event["step"] for event in told(scene, "start")] == [0, 4, 0]


def test_fewer_ranks_make_fewer_replicas_if_they_may(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert scene.run(*flags_of(4), *LAYOUTS["dp2"]).code == 0
    refused = scene.run(*flags_of(8), "--parallel.dp", "2")
    assert refused.err.startswith("ConfigError: parallel.dp=2: "), refused.err
    ended = scene.run(*flags_of(8), "--parallel.dp", "2", "--launch.min_dp", "1")
    assert ended.code == 0, ended.err
    assert "resumed step 4 from" in ended.out
    assert told(scene, "start")[-1]["layout"]["dp"] == 1
    assert "dp = 1  # the ranks that came" in (scene.work / "run/config.toml").read_text()
    few = scene.run(*flags_of(8), "--parallel.dp", "4", "--launch.min_dp", "2")
    assert few.err.startswith("ConfigError: launch.min_dp=2: 1 ranks make 1 replicas"), few.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--launch.max_restarts", "1"), "launch.max_restarts=1, launch.nproc=0: "),
        (("--checkpoint.memory_every", "1"), "checkpoint.memory_every=1, launch.max_restarts=0: "),
        (("--checkpoint.local_every", "1"), "checkpoint.local_every=1, checkpoint.local_dir=none: "),
        (("--checkpoint.local_dir", "x"), "checkpoint.local_every=0, checkpoint.local_dir=x: "),
        (("--parallel.dp", "1", "--launch.min_dp", "2"), "launch.min_dp=2, parallel.dp=1: "),
    ],
    ids=lambda value: value[0].removeprefix("--") if isinstance(value, tuple) else "",
)
def test_options_without_effect_are_refused(flags: tuple[str, ...], words: str, tmp_path: Path) -> None:
    ended = Scene(tmp_path).run(*flags)
    assert (ended.code, ended.err.startswith(f"ConfigError: {words}")) == (2, True), ended.err


# Weeks in minutes


def both(*plants: Callable[[], None]) -> Callable[[], None]:
    def install() -> None:
        for one in plants:
            one()

    return install


def faults_of_all_kinds(steps: int, every: int) -> list[Fault]:
    """A fault every `every` steps. Each kind comes in turn; now and then a rank is killed twice, and left out."""
    points = ["data", "forward", "reduce", "optimizer"]
    only = {"nan": "gradients", "enospc": "write", "flip": "written"}
    found = []
    for number, step in enumerate(range(every, steps, every)):
        rank, kind = number % 3 + 1, KINDS[number % len(KINDS)]
        if number % 13 == 12:
            found.append(Fault("kill", rank, step, points[number % 4], times=2))
            continue
        found.append(Fault(kind, rank, step, only.get(kind, points[number % 4])))
        if kind == "flip":  # nobody reads the damaged snapshot without another fault
            found.append(Fault("kill", rank % 3 + 1, step + 1))
    return found


def note_launchers(file: Path) -> Callable[[], None]:
    """Plants a line at each start of ranks: the launcher's process, its memory in KiB, and its descriptors."""

    def install() -> None:
        real = restarts.run_ranks

        def run_ranks(*args: Any) -> Any:
            status = Path("/proc/self/status").read_text()
            memory = int(re.findall(r"VmRSS:\s+(\d+)", status)[0])
            with open(file, "a") as lines:
                lines.write(f"{os.getpid()} {memory} {len(os.listdir('/proc/self/fd'))}\n")
            return real(*args)

        restarts.run_ranks = run_ranks

    return install


@pytest.mark.slow
@pytest.mark.soak
def test_soak_of_faults(tmp_path: Path) -> None:
    """Fault soak-of-faults: 2,000 steps, a fault every 50 of each kind in turn, replicas 4 to 3 to 4; no sample is lost
    or repeated, at most one snapshot's interval is computed again for each fault, and memory and descriptors stay.

    Numbers that are not finite end the job, and the test starts it again, as a person would. A full disk costs a
    snapshot.
    """
    steps, interval = 2000, 10
    planted = faults_of_all_kinds(steps, every=50)
    marks = tmp_path / "marks"
    marks.mkdir()
    plants = both(plant(*planted, marks=marks), note_launchers(tmp_path / "launchers"))
    scene = Scene(tmp_path)
    four = ("--launch.nproc", "4", "--launch.max_restarts", "100", "--launch.min_dp", "3")
    flags = (*flags_of(steps, every=500, timeout_seconds=12, micro_batch=2), *four)
    tiers_of = ("--checkpoint.memory_every", "10", "--checkpoint.local_every", "10", "--log.every", "500")
    more = (*tiers_of, "--checkpoint.local_dir", str(tmp_path / "fast"))
    codes = [5]
    while codes[-1] == 5:
        running = scene.start(*flags, *more, plant=plants)
        ended = scene.finish(running, 3000, traces=None)
        codes.append(ended.code)
    assert codes[-1] == 0, ended.err
    assert struck(marks) == sum(fault.times for fault in planted)
    lines = [line for line in faults.metrics(scene.work) if "loss" in line]
    assert [(line["step"], line["consumed_samples"]) for line in lines] == [(n, 8 * n) for n in range(1, steps + 1)]
    starts = told(scene, "start")
    assert max(start["steps_lost"] for start in starts) < interval
    assert {start["world"] for start in starts} == {3, 4}
    assert starts[-1]["world"] == 4
    assert {start["tier"] for start in starts} == {"none", "memory", "local", "shared"}, "shared: all ranks again"
    ending = [fault for fault in planted if fault.kind not in ("slow", "delay", "enospc")]
    # A flipped bit is a fault of the start that reads it.
    assert len(told(scene, "fault")) == sum(fault.times for fault in ending)
    assert len(told(scene, "tier_lost")) == sum(fault.kind == "enospc" for fault in planted)
    with open(scene.work / "run/metrics.jsonl") as file:
        peaks = [json.loads(line).get("peak_memory_bytes", 0) for line in file]
    assert max(peaks[-200:]) < 1.1 * max(peaks[:200])
    starts_of: dict[str, list[tuple[int, int]]] = {}
    for line in (tmp_path / "launchers").read_text().splitlines():
        process, memory, files = line.split()
        starts_of.setdefault(process, []).append((int(memory), int(files)))
    for (memory_first, files_first), *others in starts_of.values():
        assert all(memory < 1.1 * memory_first and files == files_first for memory, files in others)


# A disk for each host


def on_disks(folder: Path, ranks_of_a_host: int) -> Callable[[], None]:
    """Plants that each host sees its own folder: ranks 0 to n - 1 are the first host, and so on."""

    def install() -> None:
        here = {"rank": 0}
        real = rank_process.join

        def join(config: Any, env: Any, process: Any) -> Any:
            here["rank"] = env.rank
            return real(config, env, process)

        rank_process.join = join
        tiers.local_root = lambda options: folder / f"host-{here['rank'] // ranks_of_a_host}"

    return install


def files_of(host: Path) -> dict[str, list[str]]:
    """The files of ranks in each checkpoint of a host's disk."""
    folders = sorted(host.glob("*/checkpoints/step_*"))
    return {folder.name: sorted(path.name for path in folder.glob("rank_*")) for folder in folders}


HOSTS = [("tp2pp2", 2), ("zero3", 1), ("tp2pp2", 1)]  # a layout and the ranks of a host
HOSTS_AND_LOST = [
    *[(*hosts, lost) for lost in ("a disk", "nothing") for hosts in HOSTS],
    ("zero3", 1, "two disks"),
]


@pytest.mark.parametrize(("layout", "ranks_of_a_host", "lost"), slow_but([1, 6], HOSTS_AND_LOST))
def test_each_host_keeps_its_part_and_a_copy_of_another(
    layout: str, ranks_of_a_host: int, lost: str, tmp_path: Path, undisturbed: dict[str, Scene]
) -> None:
    """Fault lost-disk: a host that comes back empty gets its files from its neighbor; without both the run folder
    serves."""
    scene = Scene(tmp_path)
    disks = tmp_path / "disks"
    flags = (*FLAGS, *LAYOUTS[layout], "--checkpoint.local_dir", "x", "--checkpoint.local_every", "1")
    plant_disks = on_disks(disks, ranks_of_a_host)
    killed = faults.on_rank(1, 6, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    assert scene.run(*flags, plant=both(plant_disks, killed)).code == 6
    ranks = faults.RANKS[layout]
    hosts = [disks / f"host-{number}" for number in range(ranks // ranks_of_a_host)]
    for number, host in enumerate(hosts):
        held = {rank for rank in range(ranks) if (rank // ranks_of_a_host - number) % len(hosts) in (0, len(hosts) - 1)}
        assert files_of(host)["step_00000006"] == [f"rank_{rank:05d}.safetensors" for rank in sorted(held)]
        assert len(files_of(host)) == 2
    for host in hosts[: {"nothing": 0, "a disk": 1, "two disks": 2}[lost]]:
        shutil.rmtree(host)
    ended = scene.run(*flags, plant=plant_disks)
    assert ended.code == 0, ended.err
    assert told(scene, "start")[-1]["tier"] == ("shared" if lost == "two disks" else "local")
    assert told(scene, "start")[-1]["step"] == (4 if lost == "two disks" else 6)
    check_same(scene, undisturbed[layout])


@pytest.mark.parametrize("point", slow_but([1], ["write", "written"]))
def test_a_rank_killed_while_hosts_write_costs_that_checkpoint_alone(
    point: str, tmp_path: Path, undisturbed: dict[str, Scene]
) -> None:
    local = ("--checkpoint.local_dir", "x", "--checkpoint.local_every", "1", *RESTARTS)
    marks = tmp_path / "marks"
    marks.mkdir()
    planted = both(on_disks(tmp_path / "disks", 1), plant(Fault("kill", 1, 7, point), marks=marks))
    scene = Scene(tmp_path)
    ended = scene.run(*FLAGS, *LAYOUTS["zero3"], *local, plant=planted)
    assert ended.code == 0, ended.err
    assert [(start["tier"], start["step"]) for start in told(scene, "start")] == [("none", 0), ("local", 6)]
    check_same(scene, undisturbed["zero3"])
    left = [path.name for path in (tmp_path / "disks").glob("*/*/checkpoints/.*")]
    assert [name for name in left if name.startswith((".tmp", ".probe"))] == []


def test_parts_on_disks_load_into_another_layout(tmp_path: Path, undisturbed: dict[str, Scene]) -> None:
    """Two hosts with a rank each wrote it; one process with one of the disks reads all."""
    scene = Scene(tmp_path)
    disks = tmp_path / "disks"
    local = ("--checkpoint.local_dir", "x", "--checkpoint.local_every", "1")
    killed = faults.on_rank(1, 6, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    scene.run(*FLAGS, *LAYOUTS["zero3"], *local, plant=both(on_disks(disks, 1), killed))
    four = (*FLAGS, "--launch.nproc", "4", "--parallel.tp", "2", *local)
    ended = scene.run(*four, plant=on_disks(disks, 2))
    assert ended.code == 0, ended.err
    assert told(scene, "start")[-1]["tier"] == "local"
    found, expected = faults.metrics(scene.work), faults.metrics(undisturbed["zero3"].work)
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], rel=1e-5)
