"""log.straggler_every: a slow rank is named, and no other."""

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapar.comm.flight import Flight
from megapar.observe import stragglers
from megapar.observe.stragglers import Straggler, Stragglers, Waits
from megapar.system import device
from megapar.train import trainer
from tests.support import program

WINDOW = 8
RANKS = (
    "--launch.nproc",
    "2",
    "--log.no-tensorboard",
    "--checkpoint.no-save_last",
    "--log.straggler_every",
    str(WINDOW),
)
SIZES = ("--train.global_batch_size", "4", "--train.micro_batch_size", "1", "--train.steps", "25")


def sleeping(seconds: Callable[[int], float]) -> Callable[[], None]:
    """Each rank sleeps in each step that is sampled for what `seconds` says: more than the noise of a busy machine."""

    def plant() -> None:
        real = trainer.queue_step

        def slow(state: Any, *args: Any, **named: Any) -> Any:
            if state.step % WINDOW < stragglers.SAMPLED:
                time.sleep(seconds(state.ctx.world.rank))
            return real(state, *args, **named)

        trainer.queue_step = slow

    return plant


def named(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(text) for text in (folder / "run/events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "straggler"]


def test_a_slow_rank_is_named_once_with_its_host(tmp_path: Path) -> None:
    run = program.run(*RANKS, *SIZES, cwd=tmp_path, plant=sleeping(lambda rank: 0.05 + 0.55 * rank))
    assert run.code == 0, run.err
    (event,) = named(tmp_path)
    assert (event["step"], event["rank"], event["host"]) == (24, 1, socket.gethostname())
    assert 1.5 < event["ratio"] < 12.5, "0.60 s beside 0.05 s, and what both compute"
    told = [line for line in run.out.splitlines() if line.startswith("straggler: ")]
    assert told == [f"straggler: {Straggler(24, 1, event['host'], event['ratio'])}"]


def test_equal_ranks_are_not_named(tmp_path: Path) -> None:
    run = program.run(*RANKS, *SIZES, cwd=tmp_path, plant=sleeping(lambda rank: 0.4))
    assert run.code == 0, run.err
    assert named(tmp_path) == []


def test_ranks_with_unlike_layers_are_not_compared(tmp_path: Path) -> None:
    """And a rank with more micro-batches is none that is slow: three in a step, over two replicas."""
    plant = sleeping(lambda rank: 0.05 + 0.35 * rank)
    assert program.run(*RANKS, *SIZES, "--parallel.pp", "2", cwd=tmp_path, plant=plant).code == 0
    assert named(tmp_path) == []


def test_time_is_that_of_a_micro_batch(tmp_path: Path) -> None:
    """Three micro-batches in a step over two replicas: rank 0 has two of them."""
    flags = ("--train.global_batch_size", "3", "--train.micro_batch_size", "1", "--train.steps", "25")
    run = program.run(*RANKS, *flags, cwd=tmp_path, plant=sleeping(lambda rank: 0.8 - 0.4 * rank))
    assert run.code == 0, run.err
    assert named(tmp_path) == []


class Ticks:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def moment(self) -> float:
        return self.now

    def read(self, moments: Any) -> list[float]:
        return list(moments)


def test_own_time_is_the_step_without_its_waits() -> None:
    clock = Ticks()
    waits = Waits(clock)
    for computed, waited in ((2.0, 1.0), (3.0, 0.5)):
        clock.now += computed
        with waits.span("F", (0, 0)):
            waits.wait("tp", 0, 0)
            clock.now += waited
            waits.end()
    clock.now += 4.0
    waits.close()
    assert waits.own_seconds() == 9.0


def judged(windows: list[list[float]], monkeypatch: pytest.MonkeyPatch) -> list[Straggler]:
    """What is told of windows of the times of four ranks, two of each stage."""
    found: list[Straggler] = []
    hosts = [["a", 0], ["b", 0], ["c", 1], ["d", 1]]
    monkeypatch.setattr(stragglers.collectives, "gather_json", lambda *_: hosts)
    parts = {"world": SimpleNamespace(size=4), "pp": SimpleNamespace(rank=0)}
    ctx: Any = SimpleNamespace(flight=Flight(), device=torch.device("cpu"), **parts)
    lines: list[dict[str, Any]] = []
    judge = Stragglers(ctx, 8, found.append, lines.append)
    for number, window in enumerate(windows, 1):
        rows = torch.tensor([(seconds, 1e9 + rank) for rank, seconds in enumerate(window)], dtype=torch.float64)
        judge._judge(8 * number, device.HostCopy(rows))
    assert [line["step"] for line in lines] == [8 * number for number in range(1, len(windows) + 1)]
    assert lines[-1]["rank_compute_seconds"] == [None if seconds != seconds else seconds for seconds in windows[-1]]
    assert lines[-1]["rank_peak_memory_bytes"] == [10**9, 10**9 + 1, 10**9 + 2, 10**9 + 3]
    return found


def test_a_rank_is_named_after_three_windows_and_again_when_it_was_well(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, even = [1.0, 1.0, 5.0, 8.0], [1.0, 1.05, 5.0, 7.4]
    ratio = pytest.approx(1.6)
    assert judged([slow, slow, even, slow, slow], monkeypatch) == []
    assert judged([slow] * 5, monkeypatch) == [Straggler(24, 3, "d", ratio)]
    again = [Straggler(24, 3, "d", ratio), Straggler(56, 3, "d", ratio)]
    assert judged([slow] * 3 + [even] + [slow] * 4, monkeypatch) == again
    assert judged([[1.0, 1.0, 5.0, float("nan")]] * 5, monkeypatch) == [], "it had no sample: log.profile took them"


def test_windows_are_not_shorter_than_their_samples(tmp_path: Path) -> None:
    run = program.run("--log.straggler_every", "4", cwd=tmp_path)
    assert (run.code, run.err.strip()) == (2, "ConfigError: log.straggler_every=4: use at least 8, or 0")
