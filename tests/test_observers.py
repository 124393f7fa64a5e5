"""Observers: the moments of a run that they see, on every rank in one order, and the collectives around them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megapar.comm import collectives
from megapar.declare.batch import MicroBatch
from megapar.observe.observer import Observed, Observer
from megapar.step.state import StepResult
from tests.support import program
from tests.support.faults import TWO

NOT_A_CLASS = 3


class Moments(Observer):
    """Writes the moments that this rank sees to its file, and sums a number over all ranks at the end of a step."""

    def __init__(self, seen: Observed):
        self._seen = seen
        self._moments: list[Any] = []

    def begin_step(self, number: int) -> None:
        self._moments.append(["begin", number, self._seen.state.step])

    def before_compute(self, number: int, batches: Sequence[MicroBatch]) -> None:
        self._moments.append(["before", number, self._seen.state.step])
        assert batches

    def after_queue(self, number: int) -> None:
        self._moments.append(["queued", number, self._seen.state.step])

    def after_line(self, result: StepResult, line: dict[str, Any]) -> None:
        assert line["step"] == result.step
        self._moments.append(["line", result.step, self._seen.state.step])

    def end_step(self, number: int) -> None:
        ranks = collectives.gather_json(number, self._seen.state.ctx.world, self._seen.state.ctx.device)
        self._moments.append(["end", number, self._seen.state.step])
        self._seen.write({"step": number, "ranks_that_agree": ranks.count(number)})

    def before_save(self, step: int) -> None:
        self._moments.append(["save", step, self._seen.state.step])

    def close(self, error: BaseException | None) -> None:
        self._moments.append(["close", type(error).__name__, self._seen.state.step])
        rank = self._seen.state.ctx.world.rank
        (self._seen.run_dir / f"moments_{rank}.json").write_text(json.dumps(self._moments))


class Fails(Observer):
    """Fails on the second rank, after the first step and again when it is closed."""

    def __init__(self, seen: Observed):
        self._fails = seen.state.ctx.world.rank == 1

    def after_line(self, result: StepResult, line: dict[str, Any]) -> None:
        if self._fails:
            raise KeyError("no such gauge")

    def close(self, error: BaseException | None) -> None:
        if self._fails:
            raise ValueError("never opened")


def of_step(number: int) -> list[Any]:
    before = [[name, number, number - 1] for name in ("begin", "before")]
    return before + [[name, number, number] for name in ("queued", "line", "end")]


def test_an_observer_of_ones_own_sees_every_step_on_every_rank(tmp_path: Path) -> None:
    flags = (*TWO, "--train.steps", "2", "--log.observers", f"{__name__}:Moments")
    ended = program.run(*flags, cwd=tmp_path)
    assert ended.code == 0, ended.err
    for rank in (0, 1):
        moments = json.loads((tmp_path / f"run/moments_{rank}.json").read_text())
        assert moments == [*of_step(1), *of_step(2), ["save", 2, 2], ["close", "NoneType", 2]]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["ranks_that_agree"] for line in lines if "ranks_that_agree" in line] == [2, 2]


def test_an_observer_that_fails_ends_the_run_and_the_others_are_closed(tmp_path: Path) -> None:
    flags = (*TWO, "--log.observers", f"{__name__}:Moments", f"{__name__}:Fails")
    ended = program.run(*flags, cwd=tmp_path)
    assert ended.code == 70, ended.err
    assert "KeyError: 'no such gauge'\nthen Fails failed to close: ValueError('never opened')" in ended.err
    moments = json.loads((tmp_path / "run/moments_1.json").read_text())
    assert moments[-1][:2] == ["close", "KeyError"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{__name__}:NOT_A_CLASS", "is int, not a class"),
        (f"{__name__}:Path", "Path is no subclass of megapar.observe.observer.Observer"),
        ("no_such_module:Moments", "cannot be imported (ModuleNotFoundError"),
    ],
)
def test_what_is_no_observer_is_refused_in_one_line(name: str, words: str, tmp_path: Path) -> None:
    ended = program.run("--log.observers", name, cwd=tmp_path)
    assert ended.code == 2, ended.err
    (line,) = ended.err.splitlines()
    assert line.startswith(f"ConfigError: log.observers={name}: ")
    assert words in line
