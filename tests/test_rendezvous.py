"""Ranks compare what they must share before any collective. What differs, who is missing and who shares a GPU is told
by name, on every rank."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megapar_models.registry import find, find_objective

from megapar.base.errors import CommunicationError, ConfigError
from megapar.base.grid import Grid
from megapar.comm import collectives, rendezvous
from megapar.comm.rendezvous import RankInfo, differences, hashes_of_files, in_runs, meet
from megapar.comm.store import StoreUser, connect, part_of, quiet_log
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, LaunchConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megapar.config.rate_schedules import find_rate_schedule
from megapar.declare import context
from megapar.declare.context import single
from megapar.launch.rank_process import leave, what_ranks_share
from megapar.pipeline import schedules
from tests.support import program
from tests.support.distributed import run_ranks
from tests.support.processes import free_port
from tests.support.progress import CAP_SECONDS


def meet_all(members: Sequence[RankInfo], shared: Sequence[dict[str, Any]], timeout_seconds: float = 20) -> list[str]:
    """What each rank's `meet` said, as "Class: text", "" if it found nothing; ranks are threads with one store."""
    store = dist.HashStore()
    world_size = len(members)
    said = [""] * world_size

    def one(place: int) -> None:
        try:
            found = meet(store, members[place], world_size, shared[place], timeout_seconds)
            assert found.members == list(members)
        except (ConfigError, CommunicationError) as error:
            said[place] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=one, args=(place,)) for place in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return said


def cpus(*hosts: str) -> list[RankInfo]:
    return [RankInfo(rank, host, "cpu") for rank, host in enumerate(hosts)]


def test_ranks_that_agree_go_on() -> None:
    assert meet_all(cpus("a", "a", "b"), [{"train.seed": 1}] * 3) == ["", "", ""]


def test_a_difference_is_told_alike_on_every_rank_with_values_ranks_and_hosts() -> None:
    values: list[dict[str, Any]] = [{"train.seed": 1, "the device": "cuda"} for _ in range(5)]
    values[3] = {"train.seed": 77, "the device": "cuda"}
    values[4] = {"train.seed": 1, "the device": "cpu"}
    said = meet_all(cpus("node-a", "node-a", "node-a", "node-b", "node-b"), values)
    assert len(set(said)) == 1
    assert said[0] == (
        'ConfigError: ranks disagree on the device: "cuda" on ranks 0-3 (node-a, node-b); "cpu" on rank 4 (node-b)\n'
        "ranks disagree on train.seed: 1 on ranks 0-2 and 4 (node-a, node-b); 77 on rank 3 (node-b)"
    )


def test_many_differences_are_cut_short() -> None:
    shared = [{f"option{i}": rank for i in range(9)} for rank in range(2)]
    lines = differences(cpus("a", "b"), shared)
    assert len(lines) == 6
    assert lines[-1] == "ranks disagree on 4 more"


def test_ranks_that_share_a_gpu_are_named() -> None:
    members = [RankInfo(rank, "node-a", "cuda:0", gpu=f"GPU-{rank % 2}") for rank in range(3)]
    line = "ranks 0 and 2 on node-a share one GPU (GPU-0): start one rank a GPU, or show each task its own"
    assert meet_all(members, [{}] * 3) == [f"ConfigError: {line}"] * 3
    assert meet_all([RankInfo(rank, f"node-{rank}", "cuda:0", gpu="GPU-0") for rank in range(2)], [{}] * 2) == ["", ""]


def test_two_processes_of_one_rank_are_told() -> None:
    store = dist.HashStore()
    store.add("1/processes/1", 1)
    with pytest.raises(ConfigError, match="two processes are rank 1 of this job, one of them on node-b") as caught:
        meet(store, RankInfo(1, "node-b", "cpu"), 2, {}, 1)
    assert not caught.value.everywhere, "nobody else knows, so this process tells it"


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "READING_SECONDS", 0.1)
    store = dist.HashStore()
    with pytest.raises(CommunicationError, match=r"ranks 1-2 of 3 did not come within 0.2 s"):
        meet(store, RankInfo(0, "a", "cpu"), 3, {}, 0.2)
    # A rank that comes later reads the same verdict.
    with pytest.raises(CommunicationError, match=r"ranks 1-2 of 3 did not come within 0.2 s"):
        meet(store, RankInfo(1, "a", "cpu"), 3, {}, 0.2)


class Restarted:
    """A job of two ranks in a store outliving them."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.numbers: list[dict[int, int]] = []  # of the meeting that each rank took part in, start by start
        self._started = 0

    def start(self, *ranks: int) -> list[threading.Thread]:
        """Start new processes of `ranks`, one after the other."""
        self.numbers.append({})
        threads = [threading.Thread(target=self._come, args=(rank, self.numbers[-1])) for rank in ranks]
        for thread in threads:
            thread.start()
            time.sleep(0.3)
        return threads

    def _come(self, rank: int, numbers: dict[int, int]) -> None:
        self._started += 1
        member = RankInfo(rank, "a", "cpu", pid=self._started)
        with suppress(CommunicationError):  # the other one never comes
            numbers[rank] = meet(self.store, member, 2, {}, 10, outlives_ranks=True).number


def join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join(60)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ranks_that_are_started_again_meet(order: tuple[int, int]) -> None:
    """Fault ranks-started-again: the verdict and the members of the start before lie in the store."""
    job = Restarted()
    join(job.start(0, 1))
    join(job.start(*order))
    assert job.numbers == [{0: 1, 1: 1}, {0: 2, 1: 2}]


def test_a_start_that_was_cut_short_does_not_count() -> None:
    """Fault ranks-started-again: rank 0 of the first start came, then both ended. Then rank 1 comes first."""
    job = Restarted()
    rendezvous._come(job.store, rendezvous._begin(job.store), RankInfo(0, "a", "cpu", pid=100), 2, {})
    join(job.start(1, 0))
    assert job.numbers == [{0: 2, 1: 2}]


def test_a_rank_that_ended_before_rank_0_came_does_not_count() -> None:
    """Fault ranks-started-again."""
    job = Restarted()
    with pytest.raises(CommunicationError, match="rank 0 did not come; rank 1 on a waited 0 s"):
        rendezvous._newest(job.store, RankInfo(1, "a", "cpu"), 0)
    join(job.start(1, 0))
    assert job.numbers == [{0: 1, 1: 1}]


def test_a_meeting_takes_a_few_requests_a_rank() -> None:
    """However many ranks: rank 0 asks for two answers of each, and waits for one key."""
    requests = []

    class Counting:
        def __init__(self) -> None:
            self.store = dist.HashStore()

        def __getattr__(self, name: str) -> Any:
            requests.append(name)
            return getattr(self.store, name)

    store: Any = Counting()
    members = cpus(*["a"] * 32)
    threads = [threading.Thread(target=meet, args=(store, member, 32, {"seed": 1}, 20)) for member in members]
    for thread in threads:
        thread.start()
    join(threads)
    assert len(requests) <= 32 * 12


EVERY_OTHER = "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18 and 10 more"


@pytest.mark.parametrize(
    ("ranks", "text"), [([4], "rank 4"), ([0, 1, 2, 6], "ranks 0-2 and 6"), (range(0, 40, 2), EVERY_OTHER)]
)
def test_ranks_in_words(ranks: Sequence[int], text: str) -> None:
    assert in_runs(ranks) == text


def test_ranks_share_options_and_code_but_not_how_they_start() -> None:
    one = what_ranks_share(Config(launch=LaunchConfig(nproc=2, threads=1, device="cpu")), "cpu")
    assert one == what_ranks_share(Config(), "cpu")
    assert one != what_ranks_share(Config(), "cuda")
    assert one != what_ranks_share(Config(train=TrainConfig(seed=2)), "cpu")
    assert "code megapar.comm.rendezvous" in hashes_of_files()


def test_ranks_share_the_code_that_options_name_outside_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a module imported by the named one from its own package; what the package does not import is no part."""
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab/layers.py").write_text("width = 1\n")
    (tmp_path / "lab/unused.py").write_text("")
    (tmp_path / "lab/family.py").write_text("import lab.layers\nfrom tests.toy_family import FAMILY\n")
    (tmp_path / "orders.py").write_text("from tests.support.schedules import BACK_AND_FORTH\n")
    (tmp_path / "updates.py").write_text("from megapar.optimizer.lion import Lion\n")
    (tmp_path / "rates.py").write_text("from tests.toy_rates import WARM_RESTARTS\n")
    (tmp_path / "losses.py").write_text("from megapar_models.objectives import CROSS_ENTROPY\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    optimizer = OptimizerConfig(name="updates:Lion", schedule="rates:WARM_RESTARTS")
    model, orders = ModelConfig(family="lab.family:FAMILY"), ParallelConfig(schedule="orders:BACK_AND_FORTH")
    config = Config(model, orders, TrainConfig(objective="losses:CROSS_ENTROPY"), optimizer)
    find(config.model.family)
    find_objective(config.train.objective)
    schedules.find(config.parallel.schedule)
    find_rate_schedule(config.optimizer.schedule)
    before = what_ranks_share(config, "cpu")
    outside = {"code lab.family", "code lab.layers", "code orders", "code updates", "code rates", "code losses"}
    assert {name for name in before if name.startswith("code ") and "megapar" not in name} == outside
    assert not outside & what_ranks_share(Config(), "cpu").keys()
    for file, name in (("lab/layers.py", "code lab.layers"), ("orders.py", "code orders"), ("rates.py", "code rates")):
        (tmp_path / file).write_text((tmp_path / file).read_text() + "# of another version\n")
        after = what_ranks_share(config, "cpu")
        (said,) = differences(cpus("a", "b"), [before, after])
        assert said.startswith(f"ranks disagree on {name}: ")
        before = after


# The store


def reach(meeting: str, rank: int, *, serves_store: bool) -> dist.Store:
    return connect(meeting, rank, 2, serves_store=serves_store, timeout_seconds=1)


def test_a_port_in_use_is_told() -> None:
    port = free_port()
    first = reach(f"tcp://127.0.0.1:{port}", 0, serves_store=True)
    with pytest.raises(CommunicationError, match=f"rank 0 cannot open tcp://127.0.0.1:{port}: the port is in use"):
        reach(f"tcp://127.0.0.1:{port}", 0, serves_store=True)
    del first


@pytest.mark.parametrize(
    ("meeting", "said"),
    [
        ("tcp://127.0.0.1:{port}", "rank 1 did not reach rank 0 at tcp://127.0.0.1:{port} within 1 s"),
        ("tcp://no-such-host.invalid:{port}", "rank 1 did not reach rank 0 at tcp://no-such-host.invalid:{port}"),
    ],
)
def test_nobody_at_the_address_is_told(meeting: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Fault noise-of-the-meeting."""
    port = free_port()
    with pytest.raises(CommunicationError) as caught:
        reach(meeting.format(port=port), 1, serves_store=False)
    assert said.format(port=port) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == "", "torch's lines"


def test_an_address_of_version_6_is_reached() -> None:
    meeting = f"tcp://[::1]:{free_port()}"
    server = reach(meeting, 0, serves_store=True)
    server.set("key", "value")
    assert reach(meeting, 1, serves_store=False).get("key") == b"value"


STRANGERS: dict[str, Callable[[socket.socket], None]] = {
    "silent": lambda connection: None,
    "http": lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "zeros": lambda connection: connection.sendall(bytes(4096)),
    "random": lambda connection: connection.sendall(random.Random(1).randbytes(4096)),
    "half an answer": lambda connection: connection.sendall(connection.recv(100)[:2]),
    "closes": lambda connection: connection.close(),
}


@contextmanager
def stranger(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Another program on a port; it gives `answer` to who connects. Yields the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = []

        def serve() -> None:
            with suppress(OSError):  # the test is over
                while True:
                    connections.append(server.accept()[0])
                    answer(connections[-1])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.close()


@pytest.mark.parametrize("name", STRANGERS)
def test_another_program_at_the_port_is_told(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Fault stranger-at-the-port: within the time-out and in one line, whatever it answers."""
    began = time.monotonic()
    with ExitStack() as listening:
        port = listening.enter_context(stranger(STRANGERS[name]))
        with pytest.raises(CommunicationError) as caught:
            reach(f"tcp://127.0.0.1:{port}", 1, serves_store=False)
        said = capfd.readouterr().err
        with quiet_log():  # the abandoned handshake ends with the stranger, and torch logs that
            listening.close()
            time.sleep(0.2)
    assert time.monotonic() - began < 30, "more than the time-out on a busy machine"
    assert f"rank 1 found no store at tcp://127.0.0.1:{port} within 1 s (" in str(caught.value)
    assert "another program listens there" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert said == "", "torch's lines"


def test_users_of_the_store_do_not_meet_in_a_key(tmp_path: Path) -> None:
    """Nor do ranks restarted by torchrun: addresses of dead ranks lie in its agent's store."""
    job = connect(f"file://{tmp_path}/store", 0, 1, serves_store=False, timeout_seconds=1)
    parts = [part_of(job, user, number) for user in StoreUser for number in (None, 1, 2)]
    for number, part in enumerate(parts):
        part.set("verdict", str(number))
    assert [part.get("verdict") for part in parts] == [str(number).encode() for number in range(len(parts))]


def test_leaving_frees_the_process_groups() -> None:
    def body() -> bool:
        ctx = context.create(Grid(dp=2))
        destroyed: list[bool] = []
        real: Callable[[], None] = collectives.shutdown
        collectives.shutdown = lambda: destroyed.append(True)  # the harness of the test still needs the groups
        try:
            leave(ctx)
        finally:
            collectives.shutdown = real
        return destroyed == [True]

    assert run_ranks(2, body) == [True, True]
    leave(single())


# Whole programs


def torchrun(rank: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def pair(tmp_path: Path, *flags: str, second: Sequence[str] = ()) -> list[program.Ended]:
    """Two ranks of one job, the second with more flags."""
    port = free_port()
    ranks = [
        program.start("--parallel.dp", "2", *flags, *(second if rank else ()), cwd=tmp_path, env=torchrun(rank, port))
        for rank in (0, 1)
    ]
    return [rank.wait() for rank in ranks]


def test_a_job_under_torchruns_variables_ends_orderly(tmp_path: Path) -> None:
    ended = pair(tmp_path, "--train.steps", "2")
    assert [(rank.code, rank.err) for rank in ended] == [(0, ""), (0, "")]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--train.seed", "77"), "ranks disagree on train.seed: 1234 on rank 0 "),
        (("--optimizer.lr", "5e-4"), "ranks disagree on optimizer.lr: 0.001 on rank 0 "),
        (("--train.steps", "7"), "ranks disagree on train.steps: 5 on rank 0 "),
        (("--model.intermediate_size", "164"), "ranks disagree on model.intermediate_size: 162 on rank 0 "),
        (("--train.precision", "bf16"), 'ranks disagree on train.precision: "fp32" on rank 0 '),
    ],
    ids=lambda value: value[0].removeprefix("--") if isinstance(value, tuple) else "",
)
def test_ranks_with_other_options_are_refused(flags: tuple[str, ...], said: str, tmp_path: Path) -> None:
    first, second = pair(tmp_path, second=flags)
    assert (first.code, second.code) == (2, 2)
    assert first.err.startswith(f"ConfigError: {said}")
    assert first.err.count("\n") == 1
    assert (second.out, second.err) == ("", ""), "rank 0 speaks for all"
    assert not (tmp_path / "run").exists()


def test_a_launcher_without_a_rank_does_not_train_alone(tmp_path: Path) -> None:
    ended = program.run(cwd=tmp_path, env={"WORLD_SIZE": "2"})
    assert ended.code == 2
    assert ended.err.startswith("ConfigError: RANK is not set")


@pytest.mark.slow
def test_torchrun_restarts_workers_twice_and_they_resume(tmp_path: Path) -> None:
    """Its agent keeps one store over all attempts, with the addresses of the dead in it."""
    flags = ("--parallel.dp", "2", "--train.steps", "60", "--checkpoint.every", "5")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--max-restarts", "2", "--monitor-interval", "0.2"]
    command = [*torchrun, str(program.PRETRAIN), *program.TINY, *flags]
    agent = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for step in (10, 30):
        wait_for(tmp_path / f"run/checkpoints/step_{step:08}", agent)
        workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        os.kill(int(workers[-1]), signal.SIGKILL)
    out, _ = agent.communicate(timeout=CAP_SECONDS)
    assert agent.returncode == 0, out
    assert out.count("resumed step ") == 2, out
    assert "step 60/60" in out


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + CAP_SECONDS
    while not path.exists():
        assert process.poll() is None, "ended before"
        assert time.monotonic() < end, f"no {path.name}"
        time.sleep(0.05)
