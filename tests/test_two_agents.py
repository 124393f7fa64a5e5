"""Two agents of torchrun on one machine, as two nodes: a rank that is lost on one of them costs no step."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megapar.system import events
from tests.support import faults
from tests.support.processes import SCRIPTS, TINY, free_port
from tests.support.progress import CAP_SECONDS

STEPS = 60
FLAGS = (*TINY, "--run_dir", "run", "--train.steps", str(STEPS), "--checkpoint.every", "10", "--log.no-tensorboard")
FLAGS += ("--train.global_batch_size", "4", "--train.micro_batch_size", "2", "--launch.timeout_seconds", "30")


@contextmanager
def two_agents(folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Agents with a rank each. At the end those left are killed."""
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "two")
    counts = ("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.1")
    command = [sys.executable, "-m", "megapar.launch.torchrun", *counts, *meeting, str(SCRIPTS / "pretrain.py"), *FLAGS]
    folder.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    agents = []
    for node in range(2):
        with (folder / f"node_{node}.txt").open("wb") as lines:
            agents.append(subprocess.Popen(command, cwd=folder, env=env, stdout=lines, stderr=lines))
    try:
        yield agents
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


def ranks_of(agent: subprocess.Popen[bytes]) -> list[int]:
    """The processes that an agent has started."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    return [pid for pid in map(int, children) if b"pretrain.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + CAP_SECONDS
    lines = folder / "run/metrics.jsonl"
    while not lines.exists() or f'"step": {step},' not in lines.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
def test_a_rank_lost_on_one_node_comes_back_and_the_run_ends_bitwise_the_same(node: int, tmp_path: Path) -> None:
    """Fault lost-rank: both nodes start again, and the one that has the store too."""
    with two_agents(tmp_path / "undisturbed") as agents:
        assert [agent.wait(CAP_SECONDS) for agent in agents] == [0, 0]
    disturbed = tmp_path / "disturbed"
    with two_agents(disturbed) as agents:
        for number, step in enumerate((15, 35), 1):
            wait_for_step(disturbed, step)
            (lost,) = ranks_of(agents[node])
            os.kill(lost, signal.SIGKILL)
            deadline = time.monotonic() + CAP_SECONDS
            while len([event for event in events.read(disturbed / "run") if event["event"] == "start"]) <= number:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        codes = [agent.wait(CAP_SECONDS) for agent in agents]
    told = "".join((disturbed / f"node_{node}.txt").read_text() for node in range(2))
    assert codes == [0, 0], told
    starts = [event["step"] for event in events.read(disturbed / "run") if event["event"] == "start"]
    assert starts[0] == 0
    assert all(step % 10 == 0 and step > 0 for step in starts[1:])
    ours, theirs = (
        [line for line in faults.metrics(tmp_path / name) if "loss" in line] for name in ("disturbed", "undisturbed")
    )
    assert ours == theirs
    assert faults.weights(disturbed, STEPS) == faults.weights(tmp_path / "undisturbed", STEPS)
