"""What is tested before the first step (launch.preflight): hosts, groups, bandwidth, products."""

import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megapar.base.errors import CommunicationError
from megapar.base.grid import Grid
from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.comm.rendezvous import RankInfo
from megapar.declare import context
from megapar.launch import preflight, reach
from tests.support import namespaces, program
from tests.support.distributed import run_ranks
from tests.support.processes import free_port, slurm
from tests.support.program import Program
from tests.support.sweeps import slow_but

GRID = Grid(tp=2, dp=2)
HOSTS = ("node-a", "node-a", "node-b", "node-b")
MEMBERS = [RankInfo(rank, host, "cpu", pid=100 + rank) for rank, host in enumerate(HOSTS)]
FOUR = ("--parallel.tp", "2", "--launch.preflight", "--train.steps", "2", "--log.no-tensorboard")
LIMIT = 2.0


# Groups, on real ranks over gloo


def on_ranks(what: str) -> dict[str, Any] | str:
    """Body of a rank: the result of a preflight, or its error. `what` is planted."""
    ctx = context.create(GRID, use_shared_memory=False)
    rank = ctx.world.rank
    product: preflight.Product = torch.matmul
    if what == "slow" and rank == 2:

        def product(a: torch.Tensor, b: torch.Tensor) -> object:
            return [a @ b for _ in range(4)]

    if what == "wrong sum" and rank == 3:
        real = collectives.all_reduce

        def all_reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
            return real(x, axis).add_(axis.name == "dp")

        collectives.all_reduce = all_reduce  # type: ignore[assignment]
    store = dist.PrefixStore("preflight", dist.distributed_c10d._get_default_store())
    try:
        preflight.check_groups(ctx, GRID.groups(), MEMBERS, store, LIMIT)
    except CommunicationError as error:
        return f"{error.culprit['rank']} {error.told_by_another} {error}"
    return preflight.measure(ctx, MEMBERS, product)


def test_a_slow_rank_is_marked_and_figures_are_plausible() -> None:
    results = run_ranks(4, on_ranks, "slow")
    assert all(result == results[0] for result in results), "all ranks have one result"
    (result, *_) = results
    assert 2 in result["slow_ranks"]
    row = result["ranks"][2]
    assert (row["host"], row["slow"]) == ("node-b", True)
    assert row["of_median"] < 0.6
    assert row["tflops"] == min(row["tflops"] for row in result["ranks"])
    assert {name: axis["ranks"] for name, axis in result["axes"].items()} == {"tp": 2, "dp": 2, "grad": 2, "world": 4}
    assert [group["ranks"] for group in result["axes"]["tp"]["groups"]] == [[0, 1], [2, 3]]
    for axis in result["axes"].values():
        assert all(0.001 < group["gb_per_second"] < 1000 for group in axis["groups"])
    assert all(0.0005 < row["tflops"] < 20 for row in result["ranks"])
    lines = preflight.table(json.loads(json.dumps(result)), MEMBERS)
    assert lines[0] == "preflight: every group answers (4 ranks, 2 hosts)"
    (marked,) = [line for line in lines if "rank 2 (node-b)" in line]
    assert marked.endswith("of the median  SLOW")


def test_a_group_with_a_wrong_sum_is_named() -> None:
    words = "preflight: axis dp: the group of ranks 1 and 3 (node-a, node-b) does not work, and all its ranks are there"
    results = run_ranks(4, on_ranks, "wrong sum")
    assert all(words in text and "(the sum was 4 to 4, not 3)" in text for text in results), results
    assert sorted(text.split()[1] for text in results) == ["False", "True", "True", "True"], "one rank tells it"


def test_nothing_of_a_preflight_stays_in_the_run() -> None:
    """Counts of bytes and random numbers are those of a run without."""

    def body() -> tuple[dict[str, int], float]:
        ctx = context.create(GRID)
        torch.manual_seed(5)
        preflight.measure(ctx, MEMBERS)
        return ctx.traffic(), float(torch.rand(()))

    torch.manual_seed(5)
    assert run_ranks(4, body) == [({}, float(torch.rand(())))] * 4


# Marks


def found(*speeds: float, **axes: list[tuple[list[int], float]]) -> dict[str, Any]:
    every = []
    for rank, tflops in enumerate(speeds):
        mine = {name: next([ranks, speed] for ranks, speed in groups if rank in ranks) for name, groups in axes.items()}
        every.append({"tflops": tflops, "axes": mine})
    return preflight.report(every, HOSTS, preflight.WORKS["cpu"])


def test_what_is_below_nine_tenths_of_the_median_is_marked() -> None:
    result = found(10, 9.1, 8.9, 10, tp=[([0, 1], 5.0), ([2, 3], 4.0)])
    assert result["slow_ranks"] == [], "8.9 of a median of 9.55"
    result = found(10, 10, 8.9, 10, tp=[([0, 1], 5.0), ([2, 3], 4.0)])
    assert result["slow_ranks"] == [2]
    assert [group["slow"] for group in result["axes"]["tp"]["groups"]] == [False, True]
    (line,) = [line for line in preflight.table(result, MEMBERS) if line.startswith("  tp ")]
    assert line.endswith("4.500 GB/s  SLOW 4.000 (0.89 of the median): ranks 2-3 (node-b)")


def test_of_many_ranks_the_table_has_the_slow_ones() -> None:
    members = [RankInfo(rank, f"node-{rank // 8}", "cpu") for rank in range(64)]
    every = [{"tflops": 5.0 if rank in (9, 40) else 10.0, "axes": {}} for rank in range(64)]
    result = preflight.report(every, [member.host for member in members], preflight.WORKS["cpu"])
    lines = preflight.table(result, members)
    assert [line.split()[1] for line in lines if line.startswith("  rank")] == ["9", "40"]


# Programs


def stopping(rank: int, hosts: bool, axis: str = "dp", *, after: bool = False) -> Callable[[], None]:
    """Plants a stop of `rank` in the test of an axis, a short limit for this axis, and two hosts under Slurm.

    `after`: the sum is there, so no group has failed.
    """

    def plant() -> None:
        if hosts:
            host = int(os.environ["SLURM_PROCID"]) // 2
            socket.gethostname = lambda: f"node-{host}"
        preflight.LIMIT_SECONDS = 3 * LIMIT
        real, run = preflight._AxisTest._sum, preflight._AxisTest.run

        def run_within_limit(test: Any) -> None:
            # Axes before it have longer: on a loaded host a sound group may take more than the short limit.
            if test._axis.name == axis:
                test._limit_seconds = LIMIT
            run(test)

        def total(test: Any) -> list[float]:
            stops = (test._rank, test._axis.name) == (rank, axis)
            found = real(test) if after or not stops else []
            if stops:
                os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(1)  # another thread may take the signal: this one would go on to the next axis meanwhile
            return found

        preflight._AxisTest._sum = total  # type: ignore[method-assign]
        preflight._AxisTest.run = run_within_limit  # type: ignore[method-assign]

    return plant


@pytest.mark.parametrize("after", slow_but([1], [False, True]))
def test_a_stopped_rank_is_named_by_the_local_launcher(tmp_path: Path, after: bool) -> None:
    ended = program.run(*FOUR, "--launch.nproc", "4", cwd=tmp_path, plant=stopping(2, False, after=after))
    assert ended.code == 6, ended.err
    (line,) = ended.err.splitlines()
    host = socket.gethostname()
    assert line == (
        f"CommunicationError: preflight: axis dp: rank 2 ({host}) gave no sign within {LIMIT:g} s: stopped or lost"
    )
    assert not (tmp_path / "run/preflight.json").exists()


@pytest.mark.parametrize("culprit", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_a_stopped_rank_of_another_host_is_named_under_slurm(tmp_path: Path, culprit: int) -> None:
    """Rank 0 keeps the store, so the others learn nothing from it."""
    port = free_port()
    plant = stopping(culprit, True)
    ranks = [program.start(*FOUR, cwd=tmp_path, env=slurm(rank, 4, port), plant=plant) for rank in range(4)]
    others = [rank for number, rank in enumerate(ranks) if number != culprit]
    try:
        ended = [rank.wait(60) for rank in others]
    finally:
        ranks[culprit].kill_all()
    assert [rank.code for rank in ended] == [6, 6, 6], "\n".join(rank.err for rank in ended)
    lines = [line for rank in ended for line in rank.err.splitlines()]
    assert all(line.startswith("CommunicationError: ") for line in lines), lines
    if culprit == 0:
        assert "the job's store does not answer" in lines[0]
        assert "rank 0 on node-0" in lines[0]
        return
    assert [line.partition(": ")[2] for line in lines] == [
        f"preflight: axis dp: rank 3 (node-1) gave no sign within {LIMIT:g} s: stopped or lost"
    ]


def test_a_run_goes_on_after_a_preflight_with_the_losses_of_one_without(tmp_path: Path) -> None:
    losses = []
    for name, flags in (("with", FOUR), ("without", tuple(word for word in FOUR if word != "--launch.preflight"))):
        ended = program.run(*flags, "--launch.nproc", "4", "--run_dir", name, cwd=tmp_path)
        assert (ended.code, ended.err) == (0, "")
        assert ("every group answers (4 ranks, 1 host)" in ended.out) == (name == "with")
        steps = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([(step["loss"], step["comm_bytes"]) for step in steps if "loss" in step])
    assert losses[0] == losses[1]
    kept = json.loads((tmp_path / "with/preflight.json").read_text())
    assert [row["rank"] for row in kept["ranks"]] == [0, 1, 2, 3]
    assert not (tmp_path / "without/preflight.json").exists()


def test_one_rank_measures_its_products(tmp_path: Path) -> None:
    ended = program.run("--launch.preflight", "--train.steps", "2", "--optimizer.warmup_steps", "1", cwd=tmp_path)
    assert (ended.code, ended.err) == (0, "")
    kept = json.loads((tmp_path / "run/preflight.json").read_text())
    assert (len(kept["ranks"]), kept["axes"]) == (1, {})


# Hosts


RANKS_OF = {"node-a": [0, 1], "node-b": [2, 3], "node-c": [4, 5]}


def test_the_host_in_most_failed_connections_is_named() -> None:
    others = {("node-a", "node-b"): "10.0.0.2 port 7: timed out", ("node-c", "node-b"): "10.0.0.2 port 7: timed out"}
    assert reach.describe(others, RANKS_OF).startswith(
        "preflight: node-b (ranks 2-3) is not reached from node-a (ranks 0-1), node-c (ranks 4-5) (10.0.0.2 port 7: "
    )
    own = {("node-b", "node-a"): "x", ("node-b", "node-c"): "x"}
    assert "node-b (ranks 2-3) does not reach node-a (ranks 0-1), node-c (ranks 4-5)" in reach.describe(own, RANKS_OF)
    assert "node-c (ranks 4-5) is not reached from node-b" in reach.describe({("node-b", "node-c"): "x"}, RANKS_OF)
    assert reach.describe({}, RANKS_OF) == ""


def meet(monkeypatch: pytest.MonkeyPatch, deaf: str = "") -> list[str]:
    """What the first ranks of three hosts say that look for each other on this machine; `deaf` does not listen."""
    members = [RankInfo(rank, host, "cpu") for rank, host in enumerate(RANKS_OF)]
    store = dist.HashStore()
    real = reach._listening

    @contextmanager
    def listening(address: str, token: bytes, limit_seconds: float) -> Iterator[int]:
        with real(address, token, limit_seconds) as port:
            yield free_port() if threading.current_thread().name == deaf else port

    monkeypatch.setattr(reach, "_listening", listening)
    said = ["" for _ in members]

    def rank_main(rank: int) -> None:
        try:
            reach.check_hosts(store, members, rank, "tcp://127.0.0.1:9", "", LIMIT)
        except CommunicationError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=rank_main, args=(m.rank,), name=m.host) for m in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def test_hosts_connect_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert meet(monkeypatch) == ["", "", ""]
    said = meet(monkeypatch, deaf="node-b")
    assert said[0] == said[1] == said[2]
    assert said[0].startswith("preflight: node-b (rank 1) is not reached from node-a (rank 0), node-c (rank 2) (127.")
    assert "Connection refused" in said[0]


# Hosts in network namespaces


@pytest.fixture
def three_hosts() -> Iterator[str]:
    with namespaces.three_hosts() as prefix:
        yield prefix


def limited() -> None:
    preflight.LIMIT_SECONDS = LIMIT


def start_on(hosts: str, folder: Path) -> list[Program]:
    flags = ("--launch.preflight", "--train.steps", "2", "--train.global_batch_size", "6")
    return namespaces.start(hosts, folder, *flags, plant=limited)


def test_a_cut_link_between_two_hosts_is_named(tmp_path: Path, three_hosts: str) -> None:
    """Rank 0's host reaches both, so all ranks meet; gloo alone would wait for launch.timeout_seconds."""
    ranks = start_on(three_hosts, tmp_path)
    ended = [rank.wait(60) for rank in ranks]
    assert [rank.code for rank in ended] == [0, 0, 0], "\n".join(rank.err for rank in ended)
    assert "every group answers (3 ranks, 3 hosts)" in ended[0].out
    shutil.rmtree(tmp_path / "run")
    namespaces.ip("-n", f"{three_hosts}c", "link", "set", "tob", "down")
    start = time.monotonic()
    ended = [rank.wait(60) for rank in start_on(three_hosts, tmp_path)]
    seconds = time.monotonic() - start
    assert [rank.code for rank in ended] == [6, 6, 6], "\n".join(rank.err for rank in ended)
    assert "node-c (rank 2) is not reached from node-b (rank 1) (10.77.0.3 port " in ended[0].err
    assert len(ended[0].err.splitlines()) == 1
    assert seconds < 30, "not launch.timeout_seconds"
