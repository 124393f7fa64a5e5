"""Ranks that torchrun or Slurm started: no launcher of ours watches them, so they tell who is missing themselves."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megapar.data.indexed import IndexedWriter
from tests.support import program
from tests.support.processes import free_port, slurm
from tests.support.program import Program

LONG = ("--train.steps", "100000", "--launch.timeout_seconds", "5")


def on_two_hosts() -> None:
    """Plants a host's name of its own: then ranks know each other's state from the store alone."""
    rank = os.environ["SLURM_PROCID"]
    socket.gethostname = lambda: f"node-{rank}"


def on_one_host() -> None:
    """Plants nothing."""


def start(folder: Path, plant: Callable[[], None]) -> list[Program]:
    port = free_port()
    ranks = [program.start(*LONG, cwd=folder, env=slurm(rank, 2, port), plant=plant) for rank in (0, 1)]
    ranks[0].until(" 3/100000 | loss")
    # A rank posts its step to the store every second. On another host that is all that is known of a stopped rank.
    time.sleep(2.2)
    return ranks


CASES = [
    pytest.param(on_one_host, 0, signal.SIGSTOP, "did not arrive: its process is stopped", id="stopped, one host"),
    pytest.param(on_one_host, 1, signal.SIGKILL, "did not arrive: its process has ended", id="killed, one host"),
    pytest.param(on_two_hosts, 1, signal.SIGSTOP, "did not arrive: ", id="stopped, two hosts"),
    pytest.param(on_two_hosts, 1, signal.SIGINT, "it ended with Interrupted", id="interrupted, two hosts"),
    pytest.param(on_two_hosts, 1, signal.SIGKILL, "did not arrive: ", id="killed, two hosts", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("plant", "culprit", "number", "words"), CASES)
def test_the_other_rank_names_the_one_that_is_missing(
    tmp_path: Path, plant: Callable[[], None], culprit: int, number: signal.Signals, words: str
) -> None:
    """Fault hung-rank. Rank 0, which keeps the store, may be the one."""
    ranks = start(tmp_path, plant)
    ranks[culprit].send(number)
    ended = ranks[1 - culprit].wait(60)
    ranks[culprit].kill_all()
    assert ended.code == 6
    (line,) = [line for line in ended.err.splitlines() if line.startswith("CommunicationError")]
    assert f"CommunicationError: rank {culprit} (process {ranks[culprit].pid} on " in line
    assert words in line
    facts = json.loads((tmp_path / "run/error.json").read_text())
    assert (facts["rank"], facts["pid"], facts["exit_code"]) == (culprit, ranks[culprit].pid, 6)
    assert facts["step"] >= 1
    assert len(facts["ranks"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_the_host_of_the_store_is_named(tmp_path: Path, number: signal.Signals) -> None:
    ranks = start(tmp_path, on_two_hosts)
    ranks[0].send(number)
    ended = ranks[1].wait(60)
    ranks[0].kill_all()
    assert ended.code == 6
    (line,) = [line for line in ended.err.splitlines() if line.startswith("CommunicationError")]
    assert "the job's store on node-0 does not answer: rank 0 or its host is lost" in line


def test_a_request_to_one_rank_stops_all(tmp_path: Path) -> None:
    """Fault request-to-stop, as Slurm's --signal does; a table of the live run first, from the store alone."""
    ranks = start(tmp_path, on_two_hosts)
    ranks[1].send(signal.SIGUSR2)
    ranks[1].until("newest operation of each axis")
    assert "node-0" in ranks[1].err
    ranks[1].send(signal.SIGUSR1)
    ended = [rank.wait(60) for rank in ranks]
    assert [rank.code for rank in ended] == [75, 75]
    assert ended[0].err.startswith("Preempted: stopped by SIGUSR1 after step ")
    left = {f"megapar-flight-{rank.pid}" for rank in ranks} & set(os.listdir("/dev/shm"))
    assert not left, "a run that ends well removes its flight logs"


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_an_error_that_ranks_share_is_told_once(tmp_path: Path, axis: str) -> None:
    """Each rank of a tensor group, and the first and the last pipeline stage, read the same bad token."""
    tokens = np.zeros(4000, dtype=np.int64)
    tokens[1700] = 300
    with IndexedWriter(tmp_path / "bad", np.dtype(np.uint16)) as writer:
        writer.add_document(tokens)
    port = free_port()
    flags = (f"--parallel.{axis}", "2", "--model.vocab_size", "300", "--data.train", "bad", "--train.steps", "100")
    ranks = [program.start(*flags, cwd=tmp_path, env=slurm(rank, 2, port)) for rank in (0, 1)]
    ended = [rank.wait(60) for rank in ranks]
    assert [rank.code for rank in ended] == [3, 3]
    lines = [line for rank in ended for line in rank.err.splitlines() if "Error" in line]
    assert len(lines) == 1, lines
    assert "offset 1700: token id 300" in lines[0]
    facts = json.loads((tmp_path / "run/error.json").read_text())
    assert (facts["class"], facts["exit_code"]) == ("DataError", 3)
    assert "offset 1700: token id 300" in facts["message"]
    assert facts["step"] >= 1
    assert "told" not in facts


def test_errors_of_ranks_that_differ_are_all_told(tmp_path: Path) -> None:
    """Two ranks of a data-parallel group read two bad tokens at once."""
    tokens = np.full(4000, 300, dtype=np.int64)
    with IndexedWriter(tmp_path / "bad", np.dtype(np.uint16)) as writer:
        writer.add_document(tokens)
    port = free_port()
    flags = ("--parallel.dp", "2", "--model.vocab_size", "300", "--data.train", "bad")
    ranks = [program.start(*flags, cwd=tmp_path, env=slurm(rank, 2, port)) for rank in (0, 1)]
    ended = [rank.wait(60) for rank in ranks]
    assert [rank.code for rank in ended] == [3, 3]
    for rank in ended:
        assert sum("DataError" in line for line in rank.err.splitlines()) == 1, rank.err
