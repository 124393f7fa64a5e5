"""Every collective and transfer on real ranks: values, shapes, strides, and the counted bytes."""

import gc
import importlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megapar.base.errors import CommunicationError
from megapar.base.grid import Grid
from megapar.comm import collectives, transport_torch
from megapar.comm.axis import Axis, Traffic
from megapar.comm.pending import Pending
from megapar.comm.transport import ExchangedRows
from megapar.declare import context
from megapar.expert_parallel.exchange import exchange_rows
from tests.support.distributed import ON_GPUS, rank_device, run_ranks
from tests.support.sweeps import slow_but

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
SHAPES = ((12,), (12, 5), (24, 2, 3))  # dimension 0 divides by 2, 3 and 4


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Whole numbers, small enough for exact sums in bf16, distinct by rank and place."""
    place = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return ((7 * place + 5 * rank + place * rank) % 23 - 11).to(dtype).to(rank_device(dist.get_rank()))


def strided(x: Tensor) -> Tensor:
    """The same values at every other address, the last dimension outermost."""
    memory = x.new_empty((*reversed(x.shape), 2))[..., 0]
    y = memory.permute(*reversed(range(x.dim())))
    return y.copy_(x)


def check_all_reduce(axis: Axis, all_x: list[Tensor], variant: str) -> None:
    for op, expected in (
        ("sum", torch.stack(all_x).sum(0)),
        ("max", torch.stack(all_x).amax(0)),
        ("min", torch.stack(all_x).amin(0)),
    ):
        x = all_x[axis.rank].clone() if variant == "contiguous" else strided(all_x[axis.rank])
        result = collectives.all_reduce(x, axis, op)
        assert result is x, "the argument itself holds the result"
        assert torch.equal(x, expected.to(x.dtype)), op
        if variant == "contiguous":
            x = all_x[axis.rank].clone()
            collectives.all_reduce_async(x, axis, op).wait()
            assert torch.equal(x, expected.to(x.dtype)), op


def check_gathers_and_scatters(axis: Axis, all_x: list[Tensor], variant: str) -> None:
    x = all_x[axis.rank].clone() if variant == "contiguous" else strided(all_x[axis.rank])
    kept = x.clone()
    whole, total = torch.cat(all_x), torch.stack(all_x).sum(0).to(x.dtype)
    assert torch.equal(collectives.all_gather(x, axis), whole)
    out, pending = collectives.all_gather_async(x, axis)
    pending.wait()
    assert torch.equal(out, whole)
    assert torch.equal(collectives.reduce_scatter(x, axis), total.chunk(axis.size)[axis.rank])
    assert torch.equal(x, kept), "inputs are left alone"
    out, pending = collectives.reduce_scatter_async(x, axis)
    pending.wait()
    assert torch.equal(out, total.chunk(axis.size)[axis.rank])
    check_given_memory(axis, x, whole, out)


def check_given_memory(axis: Axis, x: Tensor, whole: Tensor, total: Tensor) -> None:
    """Gathers into slices lying apart, and a sum of slices into given memory; the memory beside is left alone."""
    apart = torch.full((axis.size, x.shape[0] + 2, *x.shape[1:]), -1, dtype=x.dtype, device=x.device)
    collectives.all_gather_slices_async(x, [places[1:-1] for places in apart], axis).wait()
    assert torch.equal(apart[:, 1:-1].flatten(0, 1), whole)
    assert (apart[:, :: x.shape[0] + 1] == -1).all()
    memory = torch.full((total.shape[0] + 2, *total.shape[1:]), -1, dtype=x.dtype, device=x.device)
    out, pending = collectives.reduce_scatter_async(x, axis, out=memory[1:-1])
    pending.wait()
    assert out.data_ptr() == memory[1:-1].data_ptr()
    assert torch.equal(memory[1:-1], total)
    assert (memory[:: total.shape[0] + 1] == -1).all()


def check_shards(axis: Axis, dtype: torch.dtype) -> None:
    flats = [numbers(rank, (12 * axis.size,), dtype) for rank in range(axis.size)]
    flat = flats[axis.rank].clone()
    collectives.reduce_scatter_shard_async(flat, axis).wait()
    mine = flat.chunk(axis.size)[axis.rank]
    assert torch.equal(mine, torch.stack(flats).sum(0).to(dtype).chunk(axis.size)[axis.rank])
    flat = torch.full_like(flat, -1)
    flat.chunk(axis.size)[axis.rank].copy_(flats[axis.rank].chunk(axis.size)[axis.rank])
    collectives.all_gather_shard_async(flat, axis).wait()
    assert torch.equal(flat, torch.cat([f.chunk(axis.size)[i] for i, f in enumerate(flats)]))


def check_shards_in_bf16(axis: Axis) -> None:
    """A sum of rounded parts in fp32: exact, because the parts have few different exponents."""
    for elements in (64, 5 * 64, 3 * 64 * 128):  # the longest slices need several runs of rounding in place
        generator = torch.Generator().manual_seed(elements)
        flats = [torch.rand(elements * axis.size, generator=generator) + 1 for _ in range(axis.size)]
        flats = [flat.to(rank_device(dist.get_rank())) for flat in flats]
        flat = flats[axis.rank].clone()
        collectives.reduce_scatter_shard_in_bf16_async(flat, axis).wait()
        expected = sum(part.bfloat16().double() for part in flats).chunk(axis.size)[axis.rank]
        assert torch.equal(flat.chunk(axis.size)[axis.rank].double(), expected)
        assert not torch.equal(expected, sum(part.double() for part in flats).chunk(axis.size)[axis.rank])


def check_exchange(axis: Axis) -> None:
    """Both ways around the ring at once, two tensors a link, of different dtypes and sizes."""
    before, after = (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size

    def message(rank: int, way: int) -> list[Tensor]:
        return [numbers(rank, (way, 3), torch.bfloat16), numbers(10 + rank, (5 * way,), torch.int64)]

    forth = [torch.full_like(x, -1) for x in message(before, 1)]
    back = [torch.full_like(x, -1) for x in message(after, 2)]
    sends = [(x, after) for x in message(axis.rank, 1)] + [(x, before) for x in message(axis.rank, 2)]
    receives = [(x, before) for x in forth] + [(x, after) for x in back]
    pending = collectives.exchange(sends, receives, axis)
    pending.wait()
    for found, expected in zip(forth + back, message(before, 1) + message(after, 2), strict=True):
        assert torch.equal(found, expected)
    pending.wait()  # a second wait on the works themselves would never return


def check_all_to_all(axis: Axis, dtype: torch.dtype) -> None:
    """Position i sends (3 i + 2 j) % 4 rows to position j, so some send nothing; strided, and by autograd."""
    counts = [[(3 * i + 2 * j) % 4 for j in range(axis.size)] for i in range(axis.size)]
    sent = counts[axis.rank]
    received = [row[axis.rank] for row in counts]
    all_x = [numbers(rank, (sum(counts[rank]), 5), dtype) for rank in range(axis.size)]
    parts = [x.split(row)[axis.rank] for x, row in zip(all_x, counts, strict=True)]
    before = axis.traffic.sent.get("all_to_all", 0)
    for x in (all_x[axis.rank].clone(), strided(all_x[axis.rank])):
        assert torch.equal(collectives.all_to_all(x, sent, received, axis), torch.cat(parts))
    to_others = (sum(sent) - sent[axis.rank]) * 5 * dtype.itemsize
    assert axis.traffic.sent["all_to_all"] - before == 2 * to_others
    if axis.transport.sorts_groups:
        check_groups(axis, dtype)
    with pytest.raises(ValueError, match="all_to_all of"):
        collectives.all_to_all(all_x[axis.rank], [*sent[1:], sent[0] + 1], received, axis)
    unlike = [n + 1 if position == axis.rank else n for position, n in enumerate(received)]
    with pytest.raises(ValueError, match="receives from itself what it sends there"):
        collectives.all_to_all(all_x[axis.rank], sent, unlike, axis)
    unlike_groups = ExchangedRows(sent, received, received_groups=[[n, 1] for n in received])
    with pytest.raises(ValueError, match="was given groups of"):
        collectives.all_to_all_async(all_x[axis.rank], unlike_groups, axis)
    if dtype.is_floating_point:
        x = all_x[axis.rank].clone().requires_grad_()
        y = exchange_rows(x, sent, received, axis)
        factors = [torch.full((len(part), 1), 2.0 + source) for source, part in enumerate(parts)]
        (y * torch.cat(factors).to(y.device, dtype) * (1 + axis.rank)).sum().backward()
        targets = torch.cat([torch.full((n, 5), float(1 + j)) for j, n in enumerate(sent)])
        assert torch.equal(x.grad.cpu().float(), targets * (2 + axis.rank))


def check_groups(axis: Axis, dtype: torch.dtype) -> None:
    """Three groups, also without rows: rows arrive in their order, and go back from it. Through packets and blocks."""
    for columns in (5, 3000):
        counts = [[[(3 * i + 2 * j + g) % 4 for g in range(3)] for j in range(axis.size)] for i in range(axis.size)]
        sizes = [[sum(groups) for groups in of_source] for of_source in counts]
        all_x = [numbers(rank, (sum(row), columns), dtype) for rank, row in enumerate(sizes)]
        sent = sizes[axis.rank]
        received = [row[axis.rank] for row in sizes]
        groups = [of_source[axis.rank] for of_source in counts]
        arriving = [x.split(row)[axis.rank].split(of) for x, row, of in zip(all_x, sizes, groups, strict=True)]
        sorted_rows = torch.cat([of_source[group] for group in range(3) for of_source in arriving])
        for x in (all_x[axis.rank].clone(), strided(all_x[axis.rank])):
            to_groups = ExchangedRows(sent, received, received_groups=groups)
            out, pending = collectives.all_to_all_async(x, to_groups, axis)
            pending.wait()
            assert torch.equal(out, sorted_rows)
            back, pending = collectives.all_to_all_async(out, to_groups.back, axis)
            pending.wait()
            assert torch.equal(back, x)


def every_function(sizes: dict[str, int], use_shared_memory: bool) -> None:
    ctx = context.create(Grid(**sizes), device=rank_device(dist.get_rank()), use_shared_memory=use_shared_memory)
    for name in sizes:
        check_everything(getattr(ctx, name), ctx.device)


def every_function_of_torch() -> None:
    """Those of torch.distributed itself: NCCL's on GPUs, and gloo's here."""
    rank = dist.get_rank()
    assert dist.group.WORLD is not None
    transport = transport_torch.TorchDistributed(dist.group.WORLD, rank, (0, 1), None)
    check_everything(Axis("dp", 2, rank, (0, 1), transport), rank_device(rank))


def check_everything(axis: Axis, device: torch.device) -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            all_x = [numbers(rank, shape, dtype) for rank in range(axis.size)]
            for variant in ("contiguous", "strided"):
                check_all_reduce(axis, all_x, variant)
                check_gathers_and_scatters(axis, all_x, variant)
        check_shards(axis, dtype)
        check_all_to_all(axis, dtype)
    check_shards_in_bf16(axis)
    check_exchange(axis)
    values = [{"rank": r, "text": "ä" * 40 * r, "list": [None, True, 1.5, 2**40] * r} for r in range(axis.size)]
    assert collectives.gather_json(values[axis.rank], axis, device) == values
    collectives.barrier(axis)


@pytest.mark.gpus
@pytest.mark.parametrize("use_shared_memory", [True, False], ids=["shared memory", "groups"])
@pytest.mark.parametrize("sizes", slow_but([0, 1], [{"dp": 3}, {"tp": 2, "dp": 2}, {"pp": 4}]), ids=str)
def test_every_function_gives_the_expected_values(sizes: dict[str, int], use_shared_memory: bool) -> None:
    """fp32, bf16 and int64; 1, 2 and 3 dimensions; strided tensors (fault strided-tensors-in-collectives)."""
    run_ranks(torch.Size(sizes.values()).numel(), every_function, sizes, use_shared_memory)


def sums_of_noise(use_shared_memory: bool) -> list[Tensor]:
    """One number in many places of tensors below and above the size of direct exchange; sums of slices."""
    axis = context.create(Grid(dp=4), use_shared_memory=use_shared_memory).dp
    noise = float(torch.randn((), generator=torch.Generator().manual_seed(axis.rank)))
    small = collectives.all_reduce(torch.full((1000,), noise), axis)
    large = collectives.all_reduce(torch.full((1 << 19,), noise), axis)
    slices = collectives.all_gather(collectives.reduce_scatter(torch.full((4000,), noise), axis), axis)
    return [small.cpu(), large[:4].cpu(), slices.cpu()]


@pytest.mark.skipif(ON_GPUS, reason="NCCL chooses its own order of sums")
def test_sums_are_equal_on_all_ranks_and_do_not_depend_on_the_place() -> None:
    shared = run_ranks(4, sums_of_noise, True)
    gloo = run_ranks(4, sums_of_noise, False)
    the_sum = shared[0][0][0]
    for small, large, slices in shared:
        assert (small == the_sum).all()
        assert (slices == the_sum).all()
        assert (large == the_sum).all()
    for small, large, slices in gloo:
        assert (small == the_sum).all()
        assert (slices == the_sum).all()
        assert torch.equal(large, gloo[0][1])  # gloo's own algorithm sums in an order of its own
        assert large[0].item() == pytest.approx(the_sum.item(), rel=1e-6)


def test_one_rank_communicates_nothing() -> None:
    axis = Axis("tp")
    x = torch.arange(6.0)
    assert collectives.all_reduce(x, axis) is x
    assert collectives.all_gather(x, axis) is x
    assert collectives.reduce_scatter(x, axis) is x
    for pending in (
        collectives.all_reduce_async(x, axis),
        collectives.all_gather_async(x, axis)[1],
        collectives.reduce_scatter_async(x, axis)[1],
        collectives.reduce_scatter_shard_async(x, axis),
        collectives.reduce_scatter_shard_in_bf16_async(x, axis),
        collectives.all_gather_shard_async(x, axis),
        collectives.exchange([], [], axis),
    ):
        pending.wait()
    assert collectives.gather_json("x", axis, x.device) == ["x"]
    collectives.barrier(axis)
    assert torch.equal(x, torch.arange(6.0))
    # Memory that the caller gives is filled by one rank as well.
    given = torch.zeros(2, 6)
    collectives.all_gather_slices_async(x, [given[0]], axis).wait()
    collectives.reduce_scatter_async(x, axis, out=given[1])[1].wait()
    assert torch.equal(given, x.expand(2, 6))
    assert axis.traffic == Traffic()


def counted_bytes() -> None:
    """Each rank against the formulas of comm's docstring, for B bytes and n ranks; all counts are exact."""
    ctx = context.create(Grid(dp=4), device=rank_device(dist.get_rank()))
    axis, n = ctx.dp, 4
    expected = Traffic()
    for dtype, elements in ((torch.float32, 36), (torch.bfloat16, 20), (torch.int64, 4)):
        x = numbers(0, (elements,), dtype)
        whole = x.numel() * x.element_size()
        calls: list[tuple[str, int, Any]] = [
            ("all_reduce", 2 * whole * (n - 1) // n, lambda x=x: collectives.all_reduce(x.clone(), axis)),
            ("all_gather", n * whole * (n - 1) // n, lambda x=x: collectives.all_gather(x, axis)),
            ("reduce_scatter", whole * (n - 1) // n, lambda x=x: collectives.reduce_scatter(x, axis)),
            (
                "reduce_scatter",
                whole * (n - 1) // n,
                lambda x=x: collectives.reduce_scatter_shard_async(x, axis).wait(),
            ),
            ("all_gather", whole * (n - 1) // n, lambda x=x: collectives.all_gather_shard_async(x, axis).wait()),
        ]
        for operation, sent, run in calls:
            run()
            expected.record(operation, sent)
    collectives.reduce_scatter_shard_in_bf16_async(torch.ones(36, device=ctx.device), axis).wait()
    expected.record("reduce_scatter", 2 * 36 * (n - 1) // n)
    x = numbers(0, (3, 7), torch.bfloat16)
    if axis.rank < 2:
        collectives.exchange(
            [(x, 1 - axis.rank), (x, 1 - axis.rank)], [(x.clone(), 1 - axis.rank) for _ in range(2)], axis
        ).wait()
        expected.record("send", 42)
        expected.record("send", 42)
    assert axis.traffic == expected, (axis.traffic, expected)
    assert ctx.traffic() == {"dp": sum(expected.sent.values())}


@pytest.mark.gpus
def test_counted_bytes_are_those_of_ring_algorithms() -> None:
    run_ranks(4, counted_bytes)


def a_late_receive() -> None:
    """Rank 0 sends, forgets its tensors and dirties the freed memory before rank 1 so much as posts its receives."""
    axis = context.create(Grid(pp=2), device=rank_device(dist.get_rank())).pp
    count, size = 20, 1 << 14
    if axis.first:
        sent = [collectives.exchange([(numbers(i, (size,), torch.float32), 1)], [], axis) for i in range(count)]
        gc.collect()
        dirt = [torch.full((size,), -1.0) for _ in range(2 * count)]
        time.sleep(0.5)
        for pending in sent:
            pending.wait()
        assert len(dirt) == 2 * count
    else:
        time.sleep(0.3)
        for i in range(count):
            x = torch.empty(size, device=rank_device(1))
            collectives.exchange([], [(x, 0)], axis).wait()
            assert torch.equal(x, numbers(i, (size,), torch.float32)), f"message {i} is damaged"


@pytest.mark.gpus
def test_a_message_outlives_its_tensor_and_waits_for_a_late_receive() -> None:
    run_ranks(2, a_late_receive)


def refusals() -> None:
    axis = context.create(Grid(dp=2), device=rank_device(dist.get_rank())).dp
    x = numbers(0, (4, 3), torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        collectives.all_reduce_async(x.t(), axis)
    with pytest.raises(ValueError, match="contiguous"):
        collectives.exchange([], [(x.t(), 1 - axis.rank)], axis)
    with pytest.raises(ValueError, match=r"dimension 0 of \(5,\) does not divide by dp size 2"):
        collectives.reduce_scatter(numbers(0, (5,), torch.float32), axis)
    learns = x.clone().requires_grad_()
    functions = (
        collectives.all_reduce,
        collectives.all_reduce_async,
        collectives.all_gather,
        collectives.all_gather_async,
        collectives.reduce_scatter,
        collectives.reduce_scatter_async,
    )
    for function in functions:
        with pytest.raises(RuntimeError, match=r"tensor_parallel\.regions"):
            function(learns * 1, axis)
    assert axis.traffic == Traffic(), "what is refused is not counted"
    with torch.no_grad():
        for function in functions[::2]:
            function(learns.clone(), axis)


@pytest.mark.gpus
def test_what_would_lose_a_gradient_or_a_result_is_refused() -> None:
    """Fault derivatives-of-collectives: a raw collective in a forward pass recorded by autograd raises."""
    run_ranks(2, refusals)


def names_of_one_torch(missing: tuple[str, ...]) -> None:
    for name in missing:
        delattr(dist, name)
    importlib.reload(transport_torch)
    assert not {name for name in missing if hasattr(dist, name)}
    every_function_of_torch()


@pytest.mark.parametrize("suffixes", [("single", "single"), ("into_tensor", "tensor")], ids=["2.11", "after 2.13"])
def test_one_set_of_names_is_enough(suffixes: tuple[str, str]) -> None:
    """torch 2.11 has only the old names of two collectives, 2.13 both, a later one perhaps only the new. Every function
    gives the expected values with either set."""
    missing = f"all_gather_{suffixes[0]}", f"reduce_scatter_{suffixes[1]}"
    other = {"single": "into_tensor", "into_tensor": "single"}[suffixes[0]]
    if not all(hasattr(dist, name) for name in (*missing, f"all_gather_{other}")):
        pytest.skip(f"torch {torch.__version__} has one set of names")
    run_ranks(2, names_of_one_torch, missing)


def test_a_planned_axis_takes_shapes_alone() -> None:
    """Values would be wrong without a word. Nothing is counted."""
    axis = Axis("dp", 2, 1, (0, 1))
    x = torch.empty(4, 3, device="meta")
    assert collectives.all_gather(x, axis).shape == (8, 3)
    assert collectives.reduce_scatter(x, axis).shape == (2, 3)
    assert collectives.all_to_all(x, [1, 3], [5, 3], axis).shape == (8, 3)
    assert collectives.all_reduce(x, axis) is x
    collectives.exchange([(x, 0)], [(x, 0)], axis).wait()
    assert axis.traffic == Traffic()
    functions = (collectives.all_reduce, collectives.all_gather, collectives.reduce_scatter)
    for function in functions:
        with pytest.raises(RuntimeError, match="not connected"):
            function(torch.ones(4, 3), axis)
    with pytest.raises(RuntimeError, match="not connected"):
        collectives.exchange([(torch.ones(4, 3), 0)], [], axis)


def one_rank_is_late() -> None:
    ctx = context.create(Grid(tp=2, dp=2), device=rank_device(dist.get_rank()), timeout_seconds=1)
    if ctx.tp.first:
        start = time.monotonic()
        with pytest.raises(CommunicationError, match=r"launch\.timeout_seconds"):
            collectives.all_reduce(torch.ones(4), ctx.tp)
        assert time.monotonic() - start < 20
    else:
        time.sleep(3)


@pytest.mark.skipif(ON_GPUS, reason="NCCL ends the process of a collective that is late")
def test_a_late_rank_is_an_error_on_every_group_of_the_grid() -> None:
    """torch gives new groups its own default, half an hour, whatever the world's timeout is."""
    run_ranks(4, one_rank_is_late)


def test_pending_waits_once() -> None:
    class Work:
        waits = 0

        def wait(self) -> None:
            self.waits += 1

    works = [Work(), Work(), Work()]
    pending = Pending([works[0], None, *works[1:]])  # type: ignore[list-item]
    for _ in range(3):
        pending.wait()
    assert [work.waits for work in works] == [1, 1, 1]
