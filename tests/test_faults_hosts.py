"""Ranks started by torchrun or Slurm: no launcher of ours watches them, so they tell who is missing themselves."""

import ctypes
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megapar.comm import rendezvous
from megapar.data.indexed import IndexedWriter
from megapar.data.prepared import write_sidecar
from megapar.launch import rank_process
from megapar.train import trainer
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


def with_rests(plant: Callable[[], None]) -> Callable[[], None]:
    """`plant`, and a rest before each step: ranks waiting for a signal leave the cores to other tests."""

    def both() -> None:
        plant()
        real = trainer.queue_step

        def queue_step(*args: Any, **options: Any) -> Any:
            time.sleep(0.1)
            return real(*args, **options)

        trainer.queue_step = queue_step

    return both


def start(folder: Path, plant: Callable[[], None]) -> list[Program]:
    port = free_port()
    plant = with_rests(plant)
    ranks = [program.start(*LONG, cwd=folder, env=slurm(rank, 2, port), plant=plant) for rank in (0, 1)]
    ranks[0].until(" 3/100000 | loss")
    # A rank posts its step to the store every second. On another host that is all that is known of a stopped rank.
    time.sleep(2.2)
    return ranks


CASES = [
    pytest.param(
        on_one_host,
        0,
        signal.SIGSTOP,
        "did not arrive: its process is stopped",
        id="stopped, one host",
        marks=pytest.mark.slow,
    ),
    pytest.param(on_one_host, 1, signal.SIGKILL, "did not arrive: its process has ended", id="killed, one host"),
    pytest.param(on_two_hosts, 1, signal.SIGSTOP, "did not arrive: ", id="stopped, two hosts", marks=pytest.mark.slow),
    pytest.param(on_two_hosts, 1, signal.SIGINT, "it ended with Interrupted", id="interrupted, two hosts"),
    pytest.param(on_two_hosts, 1, signal.SIGKILL, "did not arrive: ", id="killed, two hosts", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("plant", "culprit", "number", "words"), CASES)
def test_the_other_rank_names_the_one_that_is_missing(
    tmp_path: Path, plant: Callable[[], None], culprit: int, number: signal.Signals, words: str
) -> None:
    """Fault hung-rank. It may be rank 0, the keeper of the store."""
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


EXPERTS = ("--model.family", "mixtral", "--model.moe.num_experts", "4", "--model.moe.moe_intermediate_size", "32")
FOUR_RANKS = [
    pytest.param(signal.SIGKILL, (*EXPERTS, "--parallel.ep", "4"), id="killed, ep"),
    pytest.param(signal.SIGSTOP, (*EXPERTS, "--parallel.ep", "4"), id="stopped, ep", marks=pytest.mark.slow),
    pytest.param(signal.SIGKILL, ("--parallel.tp", "2"), id="killed, tp x dp", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("number", "sizes"), FOUR_RANKS)
def test_several_ranks_that_ask_get_one_answer(tmp_path: Path, number: signal.Signals, sizes: tuple[str, ...]) -> None:
    """Faults hung-rank, keys-of-two-users, uneven-exchanges: two ranks on each of two hosts, and three of the four
    ask."""

    def plant() -> None:
        host = int(os.environ["SLURM_PROCID"]) // 2
        socket.gethostname = lambda: f"node-{host}"

    port = free_port()
    flags = (*LONG, *sizes)
    ranks = [program.start(*flags, cwd=tmp_path, env=slurm(r, 4, port), plant=with_rests(plant)) for r in range(4)]
    ranks[0].until(" 3/100000 | loss")
    time.sleep(2.2)
    ranks[3].send(number)
    ended = [rank.wait(60) for rank in ranks[:3]]
    ranks[3].kill_all()
    assert [rank.code for rank in ended] == [6, 6, 6], "\n".join(rank.err for rank in ended)
    assert not any("Traceback" in rank.err for rank in ended)
    lines = [line for rank in ended for line in rank.err.splitlines() if line.startswith("CommunicationError")]
    assert len(lines) == 2, "one of each host"
    for line in lines:
        assert line.startswith(f"CommunicationError: rank 3 (process {ranks[3].pid} on node-1) did not arrive: ")
    assert json.loads((tmp_path / "run/error.json").read_text())["rank"] == 3


def test_a_second_process_of_a_rank_is_told_and_the_job_goes_on(tmp_path: Path) -> None:
    """Fault silent-refusal: it comes when the others have met, so it alone can tell."""
    port = free_port()
    ranks = [program.start(*LONG, cwd=tmp_path, env=slurm(rank, 2, port)) for rank in (0, 1)]
    ranks[0].until(" 1/100000 | loss")
    late = program.run(*LONG, cwd=tmp_path, env=slurm(1, 2, port))
    assert late.code == 2
    assert late.err.startswith("ConfigError: rank 1: two processes are rank 1 of this job, one of them on ")
    assert late.err.count("\n") == 1
    ranks[1].send(signal.SIGUSR1)
    assert [rank.wait(60).code for rank in ranks] == [75, 75]


@pytest.mark.parametrize("flags", [("--launch.threads", "20000"), ("--launch.device", "cuda")], ids=["threads", "cuda"])
def test_the_first_rank_of_each_host_tells_what_only_its_host_may_have(tmp_path: Path, flags: tuple[str, str]) -> None:
    """Fault silent-refusal: ranks have not met, so rank 0 need not have the same error."""
    for local_rank in (0, 1):
        env = slurm(3, 4, free_port()) | {"SLURM_LOCALID": str(local_rank)}
        ended = program.run(*LONG, *flags, cwd=tmp_path, env=env)
        assert ended.code == 2
        assert ended.err.count("\n") == 1 - local_rank
        assert "ConfigError: " in ended.err or local_rank


def test_a_port_of_another_program_ends_all_ranks(tmp_path: Path) -> None:
    """Faults stranger-at-the-port, noise-of-the-meeting: it takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        flags = ("--launch.timeout_seconds", "1")
        ranks = [program.start(*flags, cwd=tmp_path, env=slurm(rank, 2, port)) for rank in (0, 1)]
        ended = [rank.wait(60) for rank in ranks]
    assert [rank.code for rank in ended] == [6, 6]
    assert "cannot open tcp://127.0.0.1:" in ended[0].err
    assert "another program listens there" in ended[1].err
    assert [rank.err.count("\n") for rank in ended] == [1, 1], ended[0].err + ended[1].err
    assert not (tmp_path / "run").exists()


def test_a_stopped_store_ends_the_meeting(tmp_path: Path) -> None:
    """Fault stranger-at-the-port: rank 0, the keeper of the store, is stopped while ranks meet."""

    def plant() -> None:
        rank_process._MEETING_MARGIN_SECONDS = 1.0

        def stop(store: Any, *_: object) -> None:
            store.wait(["1/all"])
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1)  # another thread may take the signal: this one would go on meanwhile, and give no verdict

        rendezvous._judge = stop

    port = free_port()
    flags = ("--launch.timeout_seconds", "1")
    ranks = [program.start(*flags, cwd=tmp_path, env=slurm(rank, 2, port), plant=plant) for rank in (0, 1)]
    ended = ranks[1].wait(60)
    ranks[0].kill_all()
    assert ended.code == 6
    assert "did not answer rank 1 for 3 s while ranks met" in ended.err
    assert ended.err.count("\n") == 1


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
    left = [name for name in os.listdir("/dev/shm") if any(f"-{rank.pid}-" in name for rank in ranks)]
    assert not left, "a run that ends well removes its flight logs"


def write_tokens(prefix: Path, tokens: NDArray[np.int64]) -> None:
    """Write one document. Its description names a tokenizer: otherwise ids would be looked at before the first step."""
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add_document(tokens)
    made_by = {"spec": "bytes", "vocab_size": 257, "sha256": "bytes"}
    write_sidecar(
        prefix, {"documents": 1, "tokens": len(tokens), "append_eod": False, "sources": [], "tokenizer": made_by}
    )


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_an_error_that_ranks_share_is_told_once(tmp_path: Path, axis: str) -> None:
    """Each rank of a tensor group, and the first and the last pipeline stage, read the same bad token."""
    tokens = np.zeros(4000, dtype=np.int64)
    tokens[1700] = 300
    write_tokens(tmp_path / "bad", tokens)
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
    write_tokens(tmp_path / "bad", np.full(4000, 300, dtype=np.int64))
    port = free_port()
    flags = ("--parallel.dp", "2", "--model.vocab_size", "300", "--data.train", "bad")
    ranks = [program.start(*flags, cwd=tmp_path, env=slurm(rank, 2, port)) for rank in (0, 1)]
    ended = [rank.wait(60) for rank in ranks]
    assert [rank.code for rank in ended] == [3, 3]
    for rank in ended:
        assert sum("DataError" in line for line in rank.err.splitlines()) == 1, rank.err


def without_loopback() -> None:
    """Give this process a network of its own, whose loopback is down."""
    if ctypes.CDLL(None).unshare(0x40000000):  # CLONE_NEWNET
        os._exit(99)


def with_a_long_name() -> None:
    """Give this process a name of the host of 64 letters, the longest that Linux has."""
    if ctypes.CDLL(None).unshare(0x04000000):  # CLONE_NEWUTS
        os._exit(99)
    socket.sethostname("h" * 64)


@pytest.mark.slow  # two starts of two ranks
@pytest.mark.parametrize(
    ("plant", "said"), [(without_loopback, "bring the loopback up"), (with_a_long_name, "at most 63 letters")]
)
def test_a_host_that_gloo_cannot_work_with_is_named(plant: Callable[[], None], said: str, tmp_path: Path) -> None:
    """Fault host-without-loopback: no other rank is blamed."""
    ended = program.run("--launch.nproc", "2", "--train.steps", "3", cwd=tmp_path, plant=plant)
    if ended.code == 99:
        pytest.skip("not run: needs to be root, for namespaces")
    assert ended.code == 6, ended.err
    assert said in ended.err
    assert "another rank ended" not in ended.err
