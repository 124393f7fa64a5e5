"""Links between hosts that are cut or slow while a run trains. Three hosts are network namespaces."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megapar.train import trainer
from tests.support import faults, namespaces
from tests.support.program import Ended

FLAGS = (
    "--train.global_batch_size",
    "6",
    "--launch.timeout_seconds",
    "4",
    "--checkpoint.every",
    "2",
    "--log.no-tensorboard",
)


@pytest.fixture
def three_hosts() -> Iterator[str]:
    with namespaces.three_hosts() as prefix:
        yield prefix


def losses(folder: Path) -> list[tuple[int, Any, Any]]:
    lines = [line for line in faults.metrics(folder) if "loss" in line]
    return [(line["step"], line["loss"], line["consumed_samples"]) for line in lines]


def rest_from_step_7() -> None:
    """Plants a rest in each later step: the run goes on until its link is cut, however busy the machine is."""
    real = trainer.queue_step

    def queue_step(state: Any, *args: Any, **options: Any) -> Any:
        time.sleep(0.1 * (state.step >= 7))
        return real(state, *args, **options)

    trainer.queue_step = queue_step


def run(hosts: str, folder: Path, *flags: str) -> list[Ended]:
    return [rank.wait(60) for rank in namespaces.start(hosts, folder, *FLAGS, *flags)]


def test_a_link_that_is_cut_while_ranks_train(tmp_path: Path, three_hosts: str) -> None:
    """Fault cut-link: rank 0, the keeper of the store, reaches both other hosts, which no more reach each other. All
    ranks end in time with one cause, and the next start ends bitwise as an undisturbed run."""
    calm, cut = tmp_path / "calm", tmp_path / "cut"
    for folder in (calm, cut):
        folder.mkdir()
    steps = ("--train.steps", "20")
    ended = run(three_hosts, calm, *steps)
    assert [one.code for one in ended] == [0, 0, 0], ended[0].err
    ranks = namespaces.start(three_hosts, cut, *FLAGS, *steps, plant=rest_from_step_7)
    ranks[0].until("step  7/20")
    namespaces.cut(three_hosts, "b", "c")
    ended = [rank.wait(60) for rank in ranks]
    assert [one.code for one in ended] == [6, 6, 6], "\n".join(one.err for one in ended)
    error = json.loads((cut / "run/error.json").read_text())
    assert error["rank"] in (1, 2), "the ends of the link"
    assert len({one.err for one in ended}) == 1, "one cause"
    assert error["message"] in ended[0].err
    namespaces.mend(three_hosts, "b", "c")
    ended = run(three_hosts, cut, *steps)
    assert [one.code for one in ended] == [0, 0, 0], ended[0].err
    assert "resumed step " in ended[0].out
    assert losses(cut) == losses(calm)
    assert faults.weights(cut, 20) == faults.weights(calm, 20)


@pytest.mark.slow
def test_a_slow_link_costs_time_alone(tmp_path: Path, three_hosts: str) -> None:
    """Fault slow-link: 32 Mbit/s instead of what the machine gives."""
    seconds = []
    for name in ("calm", "slow"):
        (tmp_path / name).mkdir()
        if name == "slow":
            namespaces.slow(three_hosts, "b", "c", "32mbit")
        ended = run(three_hosts, tmp_path / name, "--train.steps", "6")
        assert [one.code for one in ended] == [0, 0, 0], ended[0].err
        lines = [json.loads(line) for line in (tmp_path / name / "run/metrics.jsonl").read_text().splitlines()]
        seconds.append(sorted(line["step_seconds"] for line in lines if "loss" in line)[3])
    assert seconds[1] > seconds[0] + 0.1, "or nothing was slow"
    assert losses(tmp_path / "slow") == losses(tmp_path / "calm")
    assert faults.weights(tmp_path / "slow", 6) == faults.weights(tmp_path / "calm", 6)
