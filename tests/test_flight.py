"""Flight logs: what is written is read, also after the process was killed; and what several logs say together."""

import inspect
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megapar.comm import collectives, flight
from megapar.comm.axis import Axis
from megapar.comm.flight import RING, AxisLog, Board, Flight, read
from megapar.comm.flight_file import FlightFile
from megapar.comm.pending import Pending
from megapar.comm.rendezvous import RankInfo
from megapar.comm.transport import Meta
from megapar.declare import agreement, context
from megapar.declare.context import ParallelContext
from megapar.expert_parallel.dispatch import plan_dispatch
from megapar.launch.diagnosis import as_table, diagnose

MEMBERS = [RankInfo(rank, f"node-{rank}", "cpu", pid=100 + rank) for rank in range(4)]


def test_what_is_logged_is_read() -> None:
    log = Flight()
    axis = log.axis("tp", 4, 2, 1)
    log.step = 7
    log.enter("backward")
    first = axis.begin("all_reduce", 4096, torch.bfloat16)
    second = axis.begin("send", 12, torch.int64, peer=0)
    third = axis.begin("send", 16, torch.float32, peer=0)
    axis.wait(first, first)
    axis.end(first, first)
    axis.wait(second, third)
    found = read(log.memory, 10)
    assert (found["step"], found["phase"], found["pid"], found["checkpoint"]) == (7, "backward", os.getpid(), -1)
    (shown,) = found["axes"]
    assert [shown[key] for key in ("name", "first", "size", "position", "collectives")] == ["tp", 4, 2, 1, 1]
    fields = ("operation", "number", "bytes", "dtype", "peer", "step")
    assert [[record[key] for key in fields] for record in shown["records"]] == [
        ["all_reduce", 1, 4096, "bfloat16", -1, 7],
        ["send", 1, 12, "int64", 0, 7],
        ["send", 2, 16, "float32", 0, 7],
    ]
    assert [record["ended"] > 0 for record in shown["records"]] == [True, False, False]
    assert [record["number"] for record in found["waiting"]["records"]] == [1, 2]
    axis.end(second, third)
    assert read(log.memory, 1)["waiting"] is None


def test_the_ring_keeps_the_newest() -> None:
    log = Flight()
    axis = log.axis("grad", 0, 2, 0)
    for number in range(RING + 5):
        place = axis.begin("all_gather", number, torch.float32)
    axis.end(0, place)  # what was overwritten is left alone
    (shown,) = read(log.memory, 2 * RING)["axes"]
    assert [record["bytes"] for record in shown["records"]] == list(range(5, RING + 5))
    assert all(record["ended"] > 0 for record in shown["records"])


class Counted(Meta):
    """Sends nothing, and is logged as if it did."""

    sends = True


def call_each_collective(axis: Axis) -> None:
    x = torch.empty(4, 4, device="meta")
    flat = torch.empty(8, device="meta")
    collectives.all_reduce(x.t(), axis)
    collectives.all_reduce_async(x, axis)
    collectives.all_gather(x, axis)
    collectives.all_gather_slices_async(x, [x, x], axis)
    collectives.all_gather_shard_async(flat, axis)
    collectives.reduce_scatter(x, axis)
    collectives.reduce_scatter_shard_async(flat, axis)
    collectives.reduce_scatter_shard_in_bf16_async(flat, axis)
    collectives.all_to_all(x, [1, 3], [1, 2], axis)
    collectives.exchange([(x, 1)], [(x, 1)], axis)
    collectives.barrier(axis)


def test_the_site_of_an_operation_is_the_line_that_calls_comm() -> None:
    """Not a line of comm, and not the caller's caller."""
    log = Flight()
    call_each_collective(Axis("tp", 2, 0, (0, 1), Counted(), log=log.axis("tp", 0, 2, 0)))
    lines, first = inspect.getsourcelines(call_each_collective)
    records = read(log.memory, 20)["axes"][0]["records"]
    assert len(records) == 12
    for record in records:
        name, line = record["site"].split(":")
        assert name.endswith("tests/test_flight.py")
        assert "collectives." in lines[int(line) - first]


def test_a_log_outlives_a_process_that_was_killed() -> None:
    board = Board(2)
    child = os.fork()
    if child == 0:
        log = Flight(board[1])
        log.step = 3
        log.enter("forward")
        log.axis("pp", 0, 2, 1).begin("barrier", 0, None)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    found = read(board[1], 5)
    assert (found["pid"], found["step"], found["phase"]) == (child, 3, "forward")
    assert found["axes"][0]["records"][0]["operation"] == "barrier"
    assert read(board[0], 5)["pid"] == 0


def test_files_of_dead_processes_are_swept_and_those_of_living_ones_not(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        file = FlightFile(tmp_path)
        Flight(file.memory).raise_flag("failed")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    mine = FlightFile(tmp_path)
    assert mine.peer(child) is None, "the dead one's file was removed"
    Flight(mine.memory).step = 1
    other = mine.peer(os.getpid())
    assert other is not None
    assert read(other, 1)["pid"] == os.getpid()
    assert mine.claim(os.getpid())
    assert not mine.claim(os.getpid())
    assert mine.claim(os.getpid(), "-other")
    assert mine.claim(child), "nobody else tells what this rank knows"
    another = FlightFile(tmp_path)  # which sweeps
    assert len(list(tmp_path.iterdir())) == 2
    another.remove()
    mine.remove()
    assert not list(tmp_path.iterdir())


# What logs say together


class Job:
    """Logs of four ranks: axis tp of ranks 0, 1 and of 2, 3; axis pp of 0, 2 and of 1, 3."""

    def __init__(self) -> None:
        self.flights = [Flight() for _ in range(4)]
        self.tp = [log.axis("tp", rank // 2 * 2, 2, rank % 2) for rank, log in enumerate(self.flights)]
        self.pp = [log.axis("pp", rank % 2, 2, rank // 2) for rank, log in enumerate(self.flights)]
        for log in self.flights:
            log.step = 5
            log.enter("forward")

    def logs(self, **states: str) -> dict[int, Any]:
        """Read; `states` such as r2="stopped"."""
        return {
            rank: read(log.memory, 8) | {"state": states.get(f"r{rank}", "running")}
            for rank, log in enumerate(self.flights)
        }


def wait(axis: AxisLog, operation: str, count: int = 4096, peer: int = -1) -> None:
    place = axis.begin(operation, count, torch.float32, peer)
    axis.wait(place, place)


def test_the_rank_at_the_end_of_the_chain_is_named() -> None:
    """Fault hung-rank: 0 waits for 1, 1 for 3, 3 for 2; 2 computes."""
    job = Job()
    wait(job.tp[0], "all_reduce")
    wait(job.pp[1], "receive", peer=1)
    wait(job.tp[3], "all_reduce")
    found = diagnose(job.logs(), MEMBERS)
    assert found is not None
    assert found[1] == 2
    assert found[0].startswith("rank 2 (process ")
    assert "on node-2) did not arrive: it was in step 5, forward, for " in found[0]


@pytest.mark.parametrize("state", ["stopped", "ended", "silent"])
def test_a_process_that_is_gone_is_named_even_while_it_waits(state: str) -> None:
    job = Job()
    wait(job.tp[0], "all_reduce")
    wait(job.pp[1], "receive", peer=1)
    found = diagnose(job.logs(r1=state), MEMBERS)
    assert found is not None
    assert found[1] == 1


def test_ranks_that_wait_for_each_other_are_named() -> None:
    job = Job()
    wait(job.tp[0], "all_reduce")
    wait(job.pp[1], "receive", peer=1)
    wait(job.tp[3], "all_reduce")
    wait(job.pp[2], "send", peer=0)
    found = diagnose(job.logs(), MEMBERS)
    assert found is not None
    assert found[0] == (
        "ranks wait for each other: rank 0 waits for rank 1; rank 1 waits for rank 3; rank 2 waits for rank 0; "
        "rank 3 waits for rank 2"
    )


MISMATCHES = [
    (("all_reduce", 8, torch.float32), ("all_reduce", 16, torch.float32)),
    (("all_reduce", 8, torch.float32), ("all_reduce", 8, torch.int64)),
    (("all_reduce", 8, torch.float32), ("all_gather", 8, torch.float32)),
    (("send", 8, torch.float32, 1), ("receive", 12, torch.float32, 0)),
    (("all_to_all", 8, torch.float32), ("all_to_all", 8, torch.int64)),
    (("all_to_all", 8, torch.float32), ("all_gather", 8, torch.float32)),
]


@pytest.mark.parametrize(("one", "other"), MISMATCHES)
def test_operations_that_differ_are_named(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """Fault mismatched-operations: kind, size or dtype at the same number, and messages of a link."""
    job = Job()
    for axis in job.tp:
        axis.begin("all_reduce", 4, torch.float32)
    assert diagnose(job.logs(), MEMBERS) is None
    job.tp[2].begin(*one)
    job.tp[3].begin(*other)
    found = diagnose(job.logs(), MEMBERS)
    assert found is not None
    assert found[0].startswith(f"ranks did different things: {one[0]} ")
    assert "on rank 2 (process " in found[0]
    assert f"but {other[0]} " in found[0]


def test_an_all_to_all_of_other_sizes_is_no_difference() -> None:
    """Fault uneven-exchanges: each rank sends as many rows as its tokens chose experts elsewhere."""
    job = Job()
    for axis, count in ((job.tp[2], 8), (job.tp[3], 16), (job.tp[3], 0)):
        axis.begin("all_to_all", count, torch.float32)
    wait(job.tp[2], "all_to_all", 24)
    wait(job.tp[2], "all_to_all", 4)
    found = diagnose(job.logs(), MEMBERS)
    assert found is not None
    assert found[0].startswith("rank 3 (process ")


def test_the_rank_that_queues_nothing_is_named_where_hosts_wait_for_devices() -> None:
    """Fault hung-rank, under NCCL: no host waits for an operation. Rank 2 has queued no step that the others did."""
    job = Job()
    for number in range(3):
        for rank in range(4):
            if number < 2 or rank != 2:
                for axis in (job.tp[rank], job.pp[rank]):
                    axis.end(place := axis.begin("all_reduce", 4096, torch.float32), place)
    assert diagnose(job.logs(), MEMBERS) is None, "no host waits"
    for rank in (0, 1, 3):
        job.flights[rank].enter("device")
    job.flights[2].enter("data")
    found = diagnose(job.logs(), MEMBERS)
    assert found is not None
    assert found[1] == 2
    assert "on node-2) did not arrive: it was in step 5, data, for " in found[0]
    assert "; its last operation: all_reduce 2 on " in found[0]
    assert re.search(r"\. rank 0 waited \d+\.\d s for its device$", found[0])
    stopped = diagnose(job.logs(r1="stopped"), MEMBERS)
    assert stopped is not None
    assert stopped[1] == 1, "a rank that is gone is the cause"


class Instant(Meta):
    """A transport whose waits return at once, as over NCCL. Nothing arrives: the other rank has begun nothing."""

    sends = True

    def all_reduce(self, x: Tensor, op: str) -> Pending:
        return Pending()

    def all_gather(self, x: Tensor, out: Tensor) -> Pending:
        out.zero_()[: len(x)] = x
        return Pending()


def counts_of_rows(ctx: ParallelContext) -> None:
    indices = torch.arange(8).view(4, 2) % 4
    assert plan_dispatch(indices, 4, ctx.ep, ctx.etp).rows == 4


def a_question_to_all(ctx: ParallelContext) -> None:
    agreement.any_rank(True, ctx)


def lengths_of_all(ctx: ParallelContext) -> None:
    with pytest.raises(json.JSONDecodeError):  # the rows of a rank that has sent nothing
        collectives.gather_json("x", ctx.world, ctx.device)


@pytest.mark.parametrize(("work", "operation"), [
    (counts_of_rows, "all_gather 1 on ep"), (a_question_to_all, "all_reduce 1 on world"),
    (lengths_of_all, "all_gather 1 on world"),
])  # fmt: skip
def test_a_rank_that_is_missed_where_a_host_reads_a_result_is_named(
    work: Callable[[ParallelContext], None], operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault hung-rank, under NCCL: hosts of mixtures read how many rows arrive, and of all runs what ranks agree on."""
    here, there = Flight(), Flight()
    axes = {name: Axis(name, 2, 0, (0, 1), Instant(), log=here.axis(name, 0, 2, 0)) for name in ("ep", "world")}
    for name in axes:
        there.axis(name, 0, 2, 1)
    there.enter("data")
    ctx = replace(context.single(flight=here), **axes)
    found = []
    held = AxisLog.held

    @contextmanager
    def noted(self: AxisLog) -> Iterator[None]:
        with held(self):
            logs = {rank: {**read(log.memory, 8), "state": "running"} for rank, log in enumerate((here, there))}
            found.append(diagnose(logs, MEMBERS[:2]))
            yield

    monkeypatch.setattr(AxisLog, "held", noted)
    work(ctx)
    text, rank = found[0]
    assert rank == 1
    assert "on node-1) did not arrive: it was in data" in text
    assert operation in text
    assert read(here.memory, 8)["waiting"] is None, "the wait is over"


def test_a_rank_that_nobody_can_read_is_named() -> None:
    job = Job()
    logs = job.logs()
    del logs[3]
    wait(job.tp[2], "all_reduce")
    found = diagnose(logs, MEMBERS)
    assert found == ("nothing was heard of rank 3: see their own messages", 3)
    assert "node-3" in as_table(logs, MEMBERS)


def test_clocks_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a clock an hour late is named only if others wait for it."""
    real = time.time
    job = Job()
    monkeypatch.setattr(flight.time, "time", lambda: real() - 3600)
    job.flights[1].enter("forward")
    wait(job.tp[0], "all_reduce")
    monkeypatch.undo()
    job.tp[1].begin("all_reduce", 4096, torch.float32)
    wait(job.tp[3], "all_reduce")
    found = diagnose(job.logs(), MEMBERS)
    assert found is not None
    assert found[1] == 2


@pytest.mark.parametrize("message", ["short", "\N{GRINNING FACE}" * 100_000], ids=["table", "emoji"])
def test_an_error_of_any_length_leaves_the_rest_of_the_log_alone(message: str) -> None:
    """Fault very-long-errors: the table of a thousand ranks, or a message with 12 bytes of JSON a character."""
    log = flight.Flight()
    axis = log.axis("dp", 0, 2, 1)
    axis.begin("send", 8, torch.float32, 0)
    before = flight.read(log.memory, 4)["axes"]
    row = {"rank": 7, "host": "a" * 30, "pid": 1, "step": 3, "phase": "forward", "waits": "b" * 80}
    log.post_error({"class": "CommunicationError", "message": message, "exit_code": 6, "ranks": [row] * 3000})
    found = flight.read(log.memory, 4)
    assert found["axes"] == before
    assert found["error"]["exit_code"] == 6
    assert message.startswith(found["error"]["message"])
