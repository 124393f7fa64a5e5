"""Sweep of kills: every moment of a run, layout, victim and signal; then the run goes on, bitwise as if undisturbed.

An id reads signal-victim-layout-moment. `sync` and `async` tell how checkpoints are saved.
"""

import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megapar.checkpoint import folder as folders
from megapar.checkpoint import save
from megapar.comm import transport_shared_memory
from megapar.comm.flight import AxisLog
from megapar.data.delivery import Delivery
from megapar.launch import rank_process
from megapar.observe import metrics
from megapar.step import evaluation
from megapar.train import checkpoints, saver, trainer
from tests.support import faults
from tests.support.faults import LAYOUTS, RANKS, Scene
from tests.support.program import Ended
from tests.support.sweeps import slow_but

STEPS = 6
ANY_MICRO_BATCH = ("--train.steps", str(STEPS), "--train.global_batch_size", "8")
ANY_MICRO_BATCH += ("--train.eval_every", "2", "--train.eval_samples", "8", "--data.validation", "synthetic")
ANY_MICRO_BATCH += ("--checkpoint.every", "2", "--log.no-tensorboard", "--launch.timeout_seconds", "30")
FLAGS = (*ANY_MICRO_BATCH, "--train.micro_batch_size", "2")
KILL, SEGV, TERM = signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM
INT, HUP, USR1 = signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


class Case(NamedTuple):
    """The signal, its victims, the layout, the moment, and the way of saving checkpoints."""

    number: signal.Signals
    victim: str
    layout: str
    moment: str
    mode: str = "sync"

    def __str__(self) -> str:
        return f"{self.number.name[3:].lower()}-{self.victim}-{self.layout}-{self.moment}-{self.mode}"

    @property
    def flags(self) -> tuple[str, ...]:
        return (*FLAGS, *LAYOUTS[self.layout], *(("--checkpoint.async_save",) if self.mode == "async" else ()))


def before(owner: Any, name: str, act: Callable[..., bool | None]) -> None:
    """Plant `act(arguments)` in front of a function; it is called until it reports an action."""
    real = getattr(owner, name)
    acted = False

    def call(*args: Any, **named: Any) -> Any:
        nonlocal acted
        acted = acted or bool(act(*args))
        return real(*args, **named)

    setattr(owner, name, call)


def after(owner: Any, name: str, act: Callable[..., bool | None]) -> None:
    """As `before`, once the function has returned."""
    real = getattr(owner, name)
    acted = False

    def call(*args: Any, **named: Any) -> Any:
        nonlocal acted
        value = real(*args, **named)
        acted = acted or bool(act(*args))
        return value

    setattr(owner, name, call)


def plant(case: Case) -> Callable[[], None]:
    """What kills at the moment of the case."""
    where, _, place = case.moment.partition("_")
    at = int(place) if place.isdigit() else 0
    here = {"rank": -1, "operations": 0, "copies": 0, "step": 0}
    # Some moments exist on rank 0 alone; a rank that is the victim acts itself elsewhere.
    acting = int(case.victim.removeprefix("rank")) if case.victim.startswith("rank") else 0

    def strike(rank: int = acting) -> bool:
        if here["rank"] != rank:
            return False
        if case.victim.startswith("rank") and rank == acting:
            os.kill(os.getpid(), case.number)
        else:
            faults.send(case.number, case.victim, case.layout != "one")
        return True

    def joined(config: Any, env: Any, process: Any) -> bool:
        here["rank"] = env.rank
        return where == "joining" and strike()

    def began(axis: Any, *_: Any) -> bool:
        here["operations"] += axis._flight.step >= 4
        return here["operations"] == at + 1 and strike()

    def sorted_rows(*_: Any) -> bool:
        here["copies"] += 1
        return here["copies"] == at + 1 and strike()

    def on_step(step: int) -> bool:
        here["step"] += 1
        return here["step"] == step and strike()

    def in_save(folder: Path, rank: int) -> bool:
        return "step_00000004" in str(folder) and strike(rank)

    def install() -> None:
        before(rank_process, "join", joined)
        moments: dict[str, Callable[[], None]] = {
            "joining": lambda: None,
            "starting": lambda: before(trainer, "start", lambda *_: strike()),
            "fetching": lambda: before(Delivery, "next_step", lambda *_: on_step(4)),
            "operation": lambda: before(AxisLog, "begin", began),
            "sorting": lambda: after(transport_shared_memory, "_copy", sorted_rows),
            "updating": lambda: after(trainer, "queue_step", lambda *_: on_step(4)),
            "evaluating": lambda: before(evaluation, "evaluate", lambda *_: on_step(2)),
            "writing": lambda: before(save, "write_part", lambda path, *_: in_save(path, acting)),
            "written": lambda: after(save, "_write_file", lambda path, *_: in_save(path, acting)),
            "sealing": lambda: before(save, "write_manifest", lambda path, *_: in_save(path, 0)),
            "sealed": lambda: after(save, "write_manifest", lambda path, *_: in_save(path, 0)),
            "published": lambda: after(save, "publish", lambda path, *_: in_save(path, 0)),
            "pruning": lambda: before(folders, "_remove", lambda *_: strike(0)),
            "copying": lambda: before(saver, "snapshot", lambda *_: on_step(2)),
            "ending": lambda: before(rank_process, "leave", lambda *_: strike()),
            "loading": lambda: before(checkpoints, "load", lambda *_: strike()),
            "aside": lambda: before(checkpoints, "set_aside", lambda *_: strike(0)),
            "lines": lambda: before(metrics, "replace_file", lambda *_: strike(0)),
        }
        moments[where]()

    return install


EARLY = ("joining", "starting", "loading", "aside")  # before the first step: nothing to save on request
AGAIN = ("loading", "aside", "lines")  # of a run that goes on


def expected(case: Case) -> tuple[int, str]:
    """The exit code, and a pattern of the line on standard error; "" for none."""
    number, victim = case.number, case.victim
    alone = case.layout == "one" or victim in ("launcher", "all")
    if number in (KILL, SEGV):
        name = f"rank {victim[4:]} "
        return (-number, "") if alone else (6, rf"CommunicationError: {name}\(process \d+.*was ended by {number.name}")
    if number in (INT, HUP) or (number == TERM and case.moment in EARLY):
        return 128 + number, rf"interrupted .*\({number.name}\)"
    return 75, rf"Preempted: stopped by {number.name} after step \d, which is saved"


def check_end(case: Case, scene: Scene, ended: Ended) -> None:
    """The exit code, one line, error.json, and whole checkpoints."""
    code, pattern = expected(case)
    if code == 75 and ended.code == 0 and (case.mode == "async" or case.moment == "pruning"):
        # The save, or a thread that removes an old checkpoint, went on behind the last steps: the request came when all
        # was done.
        code = 0
        pattern = ""
    assert ended.code == code, ended.out + ended.err
    told = [line for line in ended.err.splitlines() if re.match(r"[A-Za-z]*Error: |Preempted|interrupted", line)]
    assert [bool(re.search(pattern, line)) for line in told] == [True] * bool(pattern), ended.err
    if case.number != SEGV:
        assert len(ended.err.splitlines()) == len(told), ended.err
    record = scene.work / "run/error.json"
    assert record.exists() == (code == 6 and record.parent.exists()), ended.err
    if record.exists():
        facts = faults.error(scene.work)
        assert (facts["class"], facts["exit_code"], facts["rank"]) == ("CommunicationError", 6, int(case.victim[4:]))
        assert facts["message"] in told[0]
    scene.check_checkpoints(ended.out if case.moment != "pruning" else "")


def check_whole(layout: str, scene: Scene, undisturbed: dict[str, Scene]) -> None:
    """The run, now at its end, is the undisturbed one: metrics, weights, and nothing besides."""
    other = undisturbed[layout]
    assert faults.metrics(scene.work) == faults.metrics(other.work)
    assert faults.weights(scene.work, STEPS) == faults.weights(other.work, STEPS)
    assert not (scene.work / "run/error.json").exists()
    names = {path.name for path in scene.checkpoints.iterdir()}
    assert {name for name in names if name.startswith(".") or "abandoned" in name} == set()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scene]:
    """The scene of an uninterrupted run, by layout; each is made when it is first asked for."""

    class Runs(dict[str, Scene]):
        def __missing__(self, layout: str) -> Scene:
            scene = Scene(tmp_path_factory.mktemp(layout))
            ended = scene.run(*FLAGS, *LAYOUTS[layout])
            assert (ended.code, ended.err) == (0, "")
            self[layout] = scene
            return scene

    return Runs()


def go_back(scene: Scene, other: Scene) -> None:
    """Let the scene hold the undisturbed run as it was after its fourth step, but with two lines of metrics more, as of
    a run killed on its way to the sixth."""
    shutil.copytree(other.work, scene.work, dirs_exist_ok=True)
    shutil.rmtree(scene.checkpoints / f"step_{STEPS:08d}")


def kill_and_go_on(case: Case, folder: Path, undisturbed: dict[str, Scene]) -> None:
    scene = Scene(folder)
    if case.moment in AGAIN:
        go_back(scene, undisturbed[case.layout])
    keep = ("--checkpoint.keep_last", "1") if case.moment == "pruning" else ()
    check_end(case, scene, scene.run(*case.flags, *keep, plant=plant(case)))
    again = scene.run(*case.flags, *keep)
    assert again.code == 0, again.err
    check_whole(case.layout, scene, undisturbed)


# One case for each kind of moment, victim and signal.
FEW = [
    Case(KILL, "rank1", "dp2", "written"),
    Case(TERM, "rank1", "tp2", "operation_7"),
    Case(KILL, "all", "one", "sealed", "async"),
    Case(KILL, "launcher", "pp2", "published"),
    Case(HUP, "rank0", "one", "evaluating"),
    Case(KILL, "rank1", "zero3", "operation_7"),
]


def flags_of(micro_batch: int, *options: str) -> tuple[str, ...]:
    shape = ("--train.micro_batch_size", str(micro_batch), "--model.no_tie_word_embeddings")
    return (*ANY_MICRO_BATCH, *faults.TWO, *shape, *options)


NARROW = ("--train.precision", "bf16", "--optimizer.moments", "bf16", "--optimizer.main_weights", "remainder")
# One option has other values in each part of a run: the parts have the same bits.
WAYS = {
    "zero_stage": [flags_of(4, "--optimizer.zero_stage", stage) for stage in "321"],
    "offload": [
        flags_of(4, "--optimizer.zero_stage", "2", "--optimizer.offload", share) for share in ("0", "0.5", "1")
    ],
    "muon": [flags_of(4, "--optimizer.name", "muon", "--optimizer.zero_stage", stage) for stage in "321"],
    "narrow state": [flags_of(4, *NARROW, "--optimizer.zero_stage", stage) for stage in "321"],
    "average": [flags_of(4, "--optimizer.ema", "0.9", "--optimizer.zero_stage", stage) for stage in "321"],
    "schedule": [flags_of(2, "--parallel.pp", "2", "--parallel.schedule", name) for name in ("zb-v", "zb-h1", "1f1b")],
}


@pytest.mark.parametrize("option", slow_but([3], WAYS))
def test_a_killed_run_goes_on_in_another_way(option: str, tmp_path: Path) -> None:
    """Fault killed-at-any-moment: the weights equal those of a run never killed and never changed."""
    first, second, last = WAYS[option]
    (tmp_path / "changed").mkdir()
    changed, undisturbed = Scene(tmp_path / "changed"), Scene(tmp_path)
    for flags, step in ((first, 3), (second, 5)):
        ended = changed.run(*flags, plant=faults.on_rank(1, step - 1, lambda _: os.kill(os.getpid(), KILL)))
        assert ended.code == 6, ended.err
        assert changed.check_checkpoints(ended.out)[0] == step - 1
    for scene in (changed, undisturbed):
        assert scene.run(*last).code == 0
    assert faults.weights(changed.work, STEPS) == faults.weights(undisturbed.work, STEPS)
    found, expected = ([line.get("loss") for line in faults.metrics(s.work)] for s in (changed, undisturbed))
    assert found == expected


def many() -> list[Case]:
    """Each moment in each layout, with victims and signals dealt for all pairs of moment, victim and signal to come up
    over the layouts."""
    layouts = ("pp2", "dp2", "tp2", "tp2pp2", "one", "zero3", "ep2")
    moments = ["joining", "starting", "fetching", "updating", "evaluating", "writing", "written", "sealing", "sealed"]
    moments += ["published", "pruning", "copying", "loading", "aside", "lines", "operation_0", "operation_3"]
    signals = [KILL, TERM, SEGV, INT, KILL, HUP, USR1]
    cases = []
    for at, moment in enumerate(moments):
        for turn, layout in enumerate(layouts):
            if layout == "one" and moment.startswith("operation"):
                continue  # no other rank to talk to
            ranks = [f"rank{rank}" for rank in range(RANKS[layout])]
            victims = [*ranks, "launcher", "all"] if layout != "one" else ["rank0"]
            number = signals[(at + 2 * turn) % len(signals)]
            victim = victims[(at + turn) % len(victims)]
            if victim == "launcher" and moment == "joining":
                victim = ranks[-1]  # the launcher and the ranks would race
            if number == USR1 and moment in EARLY:
                number = KILL  # a request of the kind that waits: the first step follows it
            if number == TERM and moment == "lines":
                number = INT  # whether all ranks have come to where requests are followed is a race
            mode = "async" if moment == "copying" or (at + turn) % 2 else "sync"
            cases.append(Case(number, victim, layout, moment, mode))
    # Between exchanges of rows for experts, and within one: rows for the other rank are written, and not announced.
    cases += [
        Case(number, "rank1", "ep2", f"sorting_{at}") for number in (KILL, SEGV, TERM) for at in (0, 150, 151, 152)
    ]
    # Before ranks pass inputs of convolutions (1) and states (2), and their gradients (7 and 6).
    cases += [Case(number, "rank1", "states", f"operation_{at}") for number in (KILL, TERM) for at in (1, 2, 6, 7)]
    return [case for case in cases if case not in FEW]


@pytest.mark.parametrize("case", slow_but([0, 3], FEW), ids=str)
def test_a_kill_costs_nothing_that_was_saved(case: Case, tmp_path: Path, undisturbed: dict[str, Scene]) -> None:
    """Fault killed-at-any-moment."""
    kill_and_go_on(case, tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("case", many(), ids=str)
def test_sweep_of_kills(case: Case, tmp_path: Path, undisturbed: dict[str, Scene]) -> None:
    """Fault killed-at-any-moment."""
    kill_and_go_on(case, tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "dp2", "tp2", "tp2pp2", "zero3", "states"])
def test_a_rank_that_is_killed_when_all_is_done_costs_nothing(
    layout: str, tmp_path: Path, undisturbed: dict[str, Scene]
) -> None:
    """Fault killed-at-any-moment: everything is saved, the ranks are about to part."""
    case = Case(KILL, "rank1", layout, "ending")
    kill_and_go_on(case, tmp_path, undisturbed)


def codes(number: signal.Signals, victim: str, layout: str) -> set[int]:
    """The possible exit codes after a signal at any time; 0 if it comes too late."""
    if number in (KILL, SEGV):
        return {-number, 0} if victim in ("launcher", "all") or layout == "one" else {6, 0}
    return {75, 128 + number, 0}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "dp2", "tp2", "tp2pp2", "one", "zero3", "states"])
@pytest.mark.parametrize("seed", range(3))
def test_random_kills_in_a_row(seed: int, layout: str, tmp_path: Path, undisturbed: dict[str, Scene]) -> None:
    """Fault killed-at-any-moment: three kills at places drawn by the seed, each of the run resumed after the one
    before."""
    draw = random.Random(f"{seed} {layout}")
    scene = Scene(tmp_path)
    mode = draw.choice(["sync", "async"])
    for _ in range(3):
        number = draw.choice([KILL, KILL, TERM, SEGV, INT, HUP])
        victim = draw.choice([f"rank{draw.randrange(RANKS[layout])}", "all", "launcher"])
        victim = "rank0" if layout == "one" else victim
        moment = draw.choice(["fetching", "updating", "evaluating", "written", "sealed", "copying", "published"])
        moment = draw.choice([moment, "lines", "loading"])
        case = Case(number, victim, layout, moment, mode)
        ended = scene.run(*case.flags, plant=plant(case))
        assert ended.code in codes(number, victim, layout), f"{case}: {ended.err}"
        scene.check_checkpoints(ended.out)
    again = scene.run(*case.flags)
    assert again.code == 0, again.err
    check_whole(layout, scene, undisturbed)
