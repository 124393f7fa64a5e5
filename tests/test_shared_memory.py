"""The exchange between ranks of one host: what is in flight, what is left behind, and who may take part."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megapar.base.errors import CommunicationError
from megapar.base.grid import Grid
from megapar.comm import collectives, host_meeting
from megapar.comm.transport_shared_memory import SharedMemory
from megapar.declare import context
from megapar.declare.context import ParallelContext
from megapar.system.own_folder import OwnFolder
from tests.support.distributed import run_ranks


def own_blocks(ctx: ParallelContext) -> list[int]:
    """The sizes of the blocks made by this rank and not given back."""
    assert isinstance(ctx.world.transport, SharedMemory)
    return [block.size for block in ctx.world.transport.host._blocks.values()]


def pages_of_exchange(ctx: ParallelContext) -> int:
    """The bytes of memory taken by the blocks of this rank."""
    assert isinstance(ctx.world.transport, SharedMemory)
    return os.fstat(ctx.world.transport.host._memory).st_blocks * 512


def everything_in_flight() -> None:
    """Starts many operations on two axes, of sizes below and above every limit, and waits for them in reverse order."""
    ctx = context.create(Grid(tp=2, dp=2))
    sizes = [1, 1000, 1025, 16_384, 20_000, 300_001]
    started = []
    for round_number in range(3):
        for axis in (ctx.world, ctx.tp, ctx.dp):
            for size in sizes:
                parts = [torch.arange(size) % 97 + 3 * rank + round_number for rank in range(axis.size)]
                x = parts[axis.rank].clone()
                started.append((collectives.all_reduce_async(x, axis), x, torch.stack(parts).sum(0)))
                peer = (axis.rank + 1) % axis.size
                before = (axis.rank - 1) % axis.size
                y = torch.full((size,), -1)
                started.append(
                    (collectives.exchange([(parts[axis.rank].clone(), peer)], [(y, before)], axis), y, parts[before])
                )
                z, pending = collectives.all_gather_async(parts[axis.rank], axis)
                started.append((pending, z, torch.cat(parts)))
    for pending, found, expected in reversed(started):
        pending.wait()
        assert torch.equal(found, expected)


def test_many_operations_in_flight_are_each_others_neighbors_and_nothing_more() -> None:
    run_ranks(4, everything_in_flight)


def sums_over_both() -> None:
    """Random numbers, so another order of the sum would round otherwise in some elements."""
    shared = context.create(Grid(dp=4)).dp
    gloo = context.create(Grid(dp=4), use_shared_memory=False).dp
    generator = torch.Generator().manual_seed(shared.rank)
    for size in (400, 40_000):  # whole tensors and slices through shared memory; whole tensors over gloo
        x = torch.randn(size, generator=generator)
        assert torch.equal(collectives.all_reduce(x.clone(), shared), collectives.all_reduce(x.clone(), gloo))
        assert torch.equal(collectives.reduce_scatter(x, shared), collectives.reduce_scatter(x, gloo))


def test_sums_round_as_over_gloo() -> None:
    run_ranks(4, sums_over_both)


def many_before_the_first_is_received(kilobytes: int) -> None:
    """Rank 0 sends more than a socket holds before rank 1 receives anything."""
    axis = context.create(Grid(pp=2)).pp
    count = 3000 // kilobytes
    if axis.first:
        pendings = [
            collectives.exchange([(torch.full((256 * kilobytes,), float(i)), 1)], [], axis) for i in range(count)
        ]
        assert isinstance(axis.transport, SharedMemory)
        if kilobytes == 1:
            assert axis.transport.host._links[1].has_unsent, "the case that this test is about"
        for pending in pendings:
            pending.wait()
    else:
        time.sleep(0.3)
        for i in range(count):
            x = torch.empty(256 * kilobytes)
            collectives.exchange([], [(x, 0)], axis).wait()
            assert (x == i).all()
    collectives.barrier(axis)


@pytest.mark.parametrize("kilobytes", [1, 40])
def test_a_full_socket_delays_messages_and_loses_none(kilobytes: int) -> None:
    run_ranks(2, many_before_the_first_is_received, kilobytes)


def memory_is_given_back() -> None:
    ctx = context.create(Grid(dp=2))
    mega = 1 << 20
    for _ in range(20):
        collectives.all_reduce(torch.ones(mega // 4), ctx.dp)
        collectives.all_gather(torch.ones(mega // 4), ctx.dp)
    assert len(own_blocks(ctx)) <= 4, "blocks are used again"
    pendings = [collectives.all_reduce_async(torch.ones(8 * mega // 4), ctx.dp) for _ in range(16)]
    for pending in pendings:
        pending.wait()
    collectives.all_reduce(torch.ones(mega // 4), ctx.dp)
    collectives.barrier(ctx.dp)
    assert sum(own_blocks(ctx)) > 100 * mega, "the case that this test is about"
    held = pages_of_exchange(ctx)
    assert held <= 88 * mega, "idle blocks beyond 64 MiB are given back, but for the last two messages"
    sizes = own_blocks(ctx)
    for _ in range(3):
        pendings = [collectives.all_reduce_async(torch.ones(8 * mega // 4), ctx.dp) for _ in range(12)]
        for pending in pendings:
            pending.wait()
    collectives.barrier(ctx.dp)
    assert own_blocks(ctx) == sizes, "blocks that were given back are used again"
    assert pages_of_exchange(ctx) <= 88 * mega


def test_blocks_are_used_again_and_large_ones_given_back() -> None:
    run_ranks(2, memory_is_given_back)


def the_other_ends(number: int, names: Path) -> None:
    make = host_meeting.OwnFolder

    def make_noted(place: Path, prefix: str) -> OwnFolder:
        folder = make(place, prefix)
        (names / folder.path.name).touch()
        return folder

    host_meeting.OwnFolder = make_noted
    ctx = context.create(Grid(dp=2), timeout_seconds=2)
    collectives.all_reduce(torch.ones(10_000), ctx.dp)
    if ctx.dp.rank == 1:
        collectives.exchange([(torch.full((10_000,), 7.0), 0)], [], ctx.dp)
        os.kill(os.getpid(), number)
    x = torch.empty(10_000)
    collectives.exchange([], [(x, 1)], ctx.dp).wait()
    assert (x == 7).all(), "what was sent before the end arrives"
    with pytest.raises(CommunicationError, match="timed out" if number == signal.SIGSTOP else "closed its connection"):
        collectives.all_reduce(torch.ones(10_000), ctx.dp)
    if number == signal.SIGKILL:
        with pytest.raises(CommunicationError, match="closed its connection"):
            collectives.exchange([(x, 1)], [], ctx.dp)
    raise AssertionError("the end of the test")  # its ranks are killed: one of them cannot end by itself


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_stops_ends_the_wait(number: signal.Signals, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the end of the test") as caught:
        run_ranks(2, the_other_ends, number, tmp_path, idle_seconds=5)
    assert "rank 1:" not in str(caught.value)
    names = os.listdir(tmp_path)
    assert len(names) == 2
    left = Path("/proc/net/unix").read_text() + " ".join(os.listdir("/dev/shm"))
    assert not any(name in left for name in names)
    assert "megapar-exchange" not in left


def one_expanded_number() -> float:
    pp = context.create(Grid(pp=2)).pp
    arrived = torch.empty(1)
    collectives.exchange([(torch.tensor(3.0 + pp.rank).expand(1), 1 - pp.rank)], [(arrived, 1 - pp.rank)], pp).wait()
    return arrived.item()


def test_a_number_with_a_stride_of_0_is_sent() -> None:
    """torch says that it is contiguous, whatever its stride: the gradient of a sum, say."""
    assert run_ranks(2, one_expanded_number) == [4.0, 3.0]


def sizes_differ() -> None:
    axis = context.create(Grid(dp=2)).dp
    with pytest.raises(CommunicationError, match=r"sent \d+ bytes where this rank expects \d+"):
        collectives.all_reduce(torch.ones(100 + 100 * axis.rank), axis)


def test_ranks_that_send_other_sizes_are_told() -> None:
    run_ranks(2, sizes_differ)


def meeting_of(hosts: list[str], reachable: bool) -> list[bool]:
    """Whether tp, dp and the world of tp 2, dp 2 use shared memory, after a sum and a barrier over each."""
    rank = dist.get_rank()
    socket.gethostname = lambda: hosts[rank]
    if not reachable and rank == 3:
        host_meeting._connect = lambda path: None
    ctx = context.create(Grid(tp=2, dp=2))
    for axis in (ctx.tp, ctx.dp, ctx.world):
        expected = float(sum(2**r for r in axis.ranks))
        assert (collectives.all_reduce(torch.full((3,), 2.0**rank), axis) == expected).all()
        collectives.barrier(axis)
    return [isinstance(axis.transport, SharedMemory) for axis in (ctx.tp, ctx.dp, ctx.world)]


@pytest.mark.parametrize(
    ("hosts", "reachable", "shared"),
    [
        (["a", "a", "a", "a"], True, [(True, True, True)] * 4),
        (["a", "a", "b", "b"], True, [(True, False, False)] * 4),
        (["a", "b", "a", "b"], True, [(False, True, False)] * 4),
        (["a", "a", "a", "b"], True, [(True, False, False)] * 2 + [(False, False, False)] * 2),
        (["a", "a", "a", "a"], False, [(False, False, False)] * 4),
    ],
    ids=["one host", "tp on a host", "dp on a host", "three and one", "one name, two hosts"],
)
def test_each_axis_whose_ranks_share_a_host_uses_it(
    hosts: list[str], reachable: bool, shared: list[tuple[bool, ...]]
) -> None:
    found = run_ranks(4, meeting_of, hosts, reachable)
    if hosts == ["a", "a", "a", "b"]:
        # The dp axis of ranks 0 and 2 is on host a, that of ranks 1 and 3 is not.
        shared = [(True, True, False), (True, False, False), (False, True, False), (False, False, False)]
    assert [tuple(row) for row in found] == shared


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def count_descriptors() -> None:
    """As many descriptors as the module's docstring says, whatever is sent."""
    before = descriptors()
    ctx = context.create(Grid(dp=dist.get_world_size()))
    expected = before + 2 * ctx.dp.size
    assert descriptors() == expected
    for size in (10_000, 100_000, 1_000_000):
        pendings = [collectives.all_reduce_async(torch.ones(size), ctx.dp) for _ in range(4)]
        for pending in pendings:
            pending.wait()
    collectives.barrier(ctx.dp)
    assert len(own_blocks(ctx)) >= 8
    assert descriptors() == expected


@pytest.mark.parametrize("ranks", [2, 4])
def test_descriptors_are_twice_the_ranks_however_many_blocks(ranks: int) -> None:
    """Fault descriptors-run-out: 64 ranks take 128 each."""
    run_ranks(ranks, count_descriptors)
