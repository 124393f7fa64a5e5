"""The rank grid: arithmetic for thousands of ranks, and the groups made by `create` in torch's fake world."""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from megapar.base.grid import Grid, coordinates, expert_rank_groups, rank_groups
from megapar.comm import collectives, process_groups
from megapar.comm.axis import Axis
from megapar.comm.transport import ALONE
from megapar.comm.transport_torch import TorchDistributed
from megapar.declare import context

AXES = ("tp", "cp", "dp", "pp")

# Order, sizes of (tp, cp, dp, pp), and the groups of some axes. The first is the example in the documentation of
# Megatron's initialize_model_parallel.
GOLDEN = [
    (
        "tp-cp-dp-pp",
        (2, 1, 2, 4),
        {
            "tp": "0,1 2,3 4,5 6,7 8,9 10,11 12,13 14,15",
            "dp": "0,2 1,3 4,6 5,7 8,10 9,11 12,14 13,15",
            "pp": "0,4,8,12 1,5,9,13 2,6,10,14 3,7,11,15",
            "tp pp": "0,1,4,5,8,9,12,13 2,3,6,7,10,11,14,15",
            "tp dp": "0,1,2,3 4,5,6,7 8,9,10,11 12,13,14,15",
        },
    ),
    ("tp-cp-dp-pp", (2, 1, 2, 2), {"tp": "0,1 2,3 4,5 6,7", "dp": "0,2 1,3 4,6 5,7", "pp": "0,4 1,5 2,6 3,7"}),
    ("tp-cp-dp-pp", (2, 1, 1, 4), {"tp": "0,1 2,3 4,5 6,7", "dp": "0 1 2 3 4 5 6 7", "pp": "0,2,4,6 1,3,5,7"}),
    ("tp-cp-dp-pp", (4, 1, 2, 1), {"tp": "0,1,2,3 4,5,6,7", "dp": "0,4 1,5 2,6 3,7"}),
    ("tp-cp-pp-dp", (2, 1, 2, 2), {"tp": "0,1 2,3 4,5 6,7", "dp": "0,4 1,5 2,6 3,7", "pp": "0,2 1,3 4,6 5,7"}),
    (
        "tp-cp-dp-pp",
        (2, 2, 2, 1),
        {"tp": "0,1 2,3 4,5 6,7", "cp": "0,2 1,3 4,6 5,7", "dp": "0,4 1,5 2,6 3,7", "dp cp": "0,2,4,6 1,3,5,7"},
    ),
    (
        "dp-pp-cp-tp",
        (2, 1, 2, 2),
        {"tp": "0,4 1,5 2,6 3,7", "dp": "0,1 2,3 4,5 6,7", "pp": "0,2 1,3 4,6 5,7"},
    ),
]


@pytest.mark.parametrize(("order", "sizes", "groups"), GOLDEN)
def test_groups_of_8_and_16_ranks_are_megatrons(order: str, sizes: tuple[int, ...], groups: dict[str, str]) -> None:
    for axes, listed in groups.items():
        expected = {tuple(map(int, group.split(","))) for group in listed.split()}
        found = rank_groups(dict(zip(AXES, sizes, strict=True)), axes.split(), order)
        assert (set(found), len(found)) == (expected, len(expected)), axes


@st.composite
def grids(draw: st.DrawFn) -> tuple[dict[str, int], str]:
    sizes = {}
    for name in draw(st.permutations(AXES)):
        sizes[name] = draw(st.integers(1, min(32, 8192 // math.prod(sizes.values()))))
    return sizes, "-".join(draw(st.permutations(AXES)))


@settings(max_examples=8, deadline=None)
@given(grid=grids())
def test_groups_partition_any_world(grid: tuple[dict[str, int], str]) -> None:
    groups_partition(grid)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(grid=grids())
def test_groups_partition_many_worlds(grid: tuple[dict[str, int], str]) -> None:
    groups_partition(grid)


def groups_partition(grid: tuple[dict[str, int], str]) -> None:
    """Against numpy's idea of the same grid: an array of ranks with the first axis of the order as its last
    dimension."""
    sizes, order = grid
    names = order.split("-")[::-1]
    world = math.prod(sizes.values())
    ranks = np.arange(world).reshape([sizes[name] for name in names])
    for chosen in [*([axis] for axis in AXES), ["dp", "cp"], ["tp", "pp"], []]:
        rest = [i for i, name in enumerate(names) if name not in chosen]
        inside = [i for i, name in enumerate(names) if name in chosen]
        size = math.prod(sizes[name] for name in chosen)
        expected = ranks.transpose(*rest, *inside).reshape(-1, size)
        assert sorted(rank_groups(sizes, chosen, order)) == sorted(map(tuple, expected.tolist()))
    fastest = rank_groups(sizes, [names[-1]], order)
    assert all(group == tuple(range(group[0], group[0] + len(group))) for group in fastest)
    for rank in {0, world // 3, world - 1}:
        assert ranks[tuple(coordinates(rank, sizes, order)[name] for name in names)] == rank


def join_fake_world(rank: int, world_size: int) -> None:
    """Make this process a rank of a world with collectives that do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


@pytest.fixture
def fake_world() -> Iterator[None]:
    yield
    collectives.shutdown()


def check_axes(ctx: context.ParallelContext, rank: int, sizes: dict[str, int], order: str) -> None:
    """Every axis of the context against the pure arithmetic."""
    wanted = {name: rank_groups(sizes, [name], order) for name in AXES}
    wanted["grad"] = rank_groups(sizes, ["dp", "cp"], order)
    wanted["tied"] = [(line[0], line[-1]) if sizes["pp"] > 1 else line for line in wanted["pp"]]
    wanted["world"] = [tuple(range(math.prod(sizes.values())))]
    for name, groups in wanted.items():
        axis: Axis = getattr(ctx, name)
        ranks = next((group for group in groups if rank in group), (rank,))
        assert (axis.name, axis.size, axis.ranks, axis.ranks[axis.rank]) == (name, len(ranks), ranks, rank)
        assert (axis.first, axis.last) == (rank == ranks[0], rank == ranks[-1])
        assert (axis.transport is ALONE) == (axis.size == 1)
        if axis.size > 1:
            assert isinstance(axis.transport, TorchDistributed)
            assert tuple(dist.get_process_group_ranks(axis.transport.group)) == ranks


@pytest.mark.parametrize(
    ("sizes", "order", "chosen"),
    [
        ((4, 2, 2, 4), "tp-cp-dp-pp", range(64)),
        ((2, 1, 16, 2), "dp-tp-pp-cp", range(0, 64, 7)),
        ((8, 1, 1, 8), "tp-cp-dp-pp", (0, 9, 63)),
        ((64, 1, 1, 1), "tp-cp-dp-pp", (0, 63)),
        ((8, 2, 8, 8), "tp-cp-dp-pp", (0, 517, 1023)),
        ((1, 1, 1024, 1), "tp-cp-dp-pp", (1000,)),
    ],
)
def test_create_makes_each_group_once_and_as_computed(
    sizes: tuple[int, ...],
    order: str,
    chosen: range | tuple[int, ...],
    fake_world: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks make the same groups in the same order (else they would wait for each other), none twice."""
    by_axis = dict(zip(AXES, sizes, strict=True))
    world = math.prod(sizes)
    real = dist.new_group
    histories = []
    for rank in chosen:
        made: list[tuple[int, ...]] = []

        def spy(ranks: list[int], made: list[tuple[int, ...]] = made, **options: object) -> dist.ProcessGroup:
            made.append(tuple(ranks))
            return real(ranks, **options)

        monkeypatch.setattr(dist, "new_group", spy)
        join_fake_world(rank, world)
        check_axes(context.create(Grid(**by_axis, order=order)), rank, by_axis, order)
        collectives.shutdown()
        histories.append(made)
    assert all(history == histories[0] for history in histories)
    # Those of gradients, and of layers.
    assert max(Counter(histories[0]).values(), default=1) <= 2
    axes = (["tp"], ["cp"], ["dp"], ["pp"], ["dp", "cp"])
    needed = {group for names in axes for group in rank_groups(by_axis, names, order)}
    needed |= {(line[0], line[-1]) for line in rank_groups(by_axis, ["pp"], order)}
    assert set(histories[0]) == {group for group in needed if 1 < len(set(group)) < world}


GRIDS = [
    (Grid(tp=2, dp=2, pp=2), 3),  # tp, dp, pp; a tied embedding is on the ranks of pp
    (Grid(tp=2, pp=4), 3),  # tp, pp, tied
    (Grid(tp=2, pp=4, tied=()), 2),
    (Grid(tp=2, dp=2, pp=3, tied=()), 3),
    (Grid(dp=8, ep=8, tied=()), 1),  # gradients of dense layers share the group of all ranks with the world
    (Grid(dp=8, ep=4, tied=()), 2),  # ep, expert_grad
    (Grid(cp=8, tied=()), 1),
    (Grid(cp=2, dp=4, tied=()), 2),  # cp, dp; grad has all ranks
    (Grid(tp=8, tied=()), 0),
    (Grid(dp=8, shard_ranks=4, tied=()), 2),
]


@pytest.mark.parametrize(("grid", "calls"), GRIDS, ids=lambda x: str(x) if type(x) is int else None)
def test_one_split_makes_the_groups_of_an_axis(
    grid: Grid, calls: int, fake_world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL does it: all ranks call with the same groups of disjoint ranks, in one order. A stand-in makes them."""
    monkeypatch.setattr(process_groups, "can_split", lambda: True)
    histories = []
    for rank in range(8 if grid.world_size == 8 else 12):
        made: list[list[list[int]]] = []

        def split(
            split_ranks: list[list[int]],
            timeout: object,
            pg_options: object,
            made: list[list[list[int]]] = made,
            rank: int = rank,
        ) -> dist.ProcessGroup | None:
            members = [member for ranks in split_ranks for member in ranks]
            assert len(members) == len(set(members))
            made.append(split_ranks)
            own = [ranks for ranks in split_ranks if rank in ranks]
            return dist.new_group(own[0]) if own else None

        monkeypatch.setattr(dist, "split_group", split)
        join_fake_world(rank, grid.world_size)
        ctx = context.create(grid)
        for axis in ctx.axes:
            if axis.size > 1:
                assert axis.transport.ranks == axis.ranks
                assert tuple(dist.get_process_group_ranks(axis.transport.group)) == axis.ranks, axis.name
        collectives.shutdown()
        histories.append(made)
    assert all(history == histories[0] for history in histories)
    assert len(histories[0]) == calls


@pytest.mark.parametrize(
    "grid", [Grid(dp=8, ep=8), Grid(cp=8), Grid(cp=2, dp=4, ep=2), Grid(dp=8, ep=2, shard_ranks=2)], ids=str
)
def test_no_layer_queues_behind_sums_of_gradients(grid: Grid, fake_world: None) -> None:
    """NCCL runs the operations of a group in order: an all-to-all would wait for the reduce-scatter before it."""
    join_fake_world(3, 8)
    ctx = context.create(grid)
    of_layers = {axis.transport.group for axis in (ctx.tp, ctx.cp, ctx.pp, ctx.ep, ctx.etp) if axis.size > 1}
    gradients = [ctx.grad, ctx.grad.shards, ctx.grad.copies, ctx.expert_grad]
    assert of_layers
    assert not of_layers & {axis.transport.group for axis in gradients if axis.size > 1}


def test_one_process_needs_no_groups() -> None:
    ctx = context.create(Grid())
    assert all((axis.size, axis.rank, axis.transport) == (1, 0, ALONE) for axis in ctx.axes)
    assert ctx.traffic() == {}


def test_sizes_and_orders_that_do_not_fit_are_refused(fake_world: None) -> None:
    join_fake_world(0, 8)
    with pytest.raises(ValueError, match=r"tp\(3\).*= 6, not 8 ranks"):
        context.create(Grid(tp=3, dp=2))
    for order in ("tp-dp-pp", "tp-cp-dp-pp-pp", "tp-cp-dp-ep"):
        with pytest.raises(ValueError, match="must name each of tp, cp, dp and pp once"):
            context.create(Grid(tp=8, order=order))


def test_the_first_and_the_last_stage_hold_a_tied_embedding(fake_world: None) -> None:
    """Ranks between have no partner."""
    found = []
    for dp, pp in product(range(2), range(4)):
        join_fake_world(2 * pp + dp, 8)
        tied = context.create(Grid(dp=2, pp=4)).tied
        collectives.shutdown()
        found.append((tied.ranks, tied.size))
    assert found == [
        ((0, 6), 2), ((2,), 1), ((4,), 1), ((0, 6), 2),
        ((1, 7), 2), ((3,), 1), ((5,), 1), ((1, 7), 2),
    ]  # fmt: skip


# The expert grid


def test_the_expert_grid_factors_the_ranks_of_each_pipeline_rank_anew() -> None:
    """Beside tp x cp x dp: with tp 2 and dp 4, four ranks share eight experts of 2 slices each."""
    sizes = {"tp": 2, "cp": 1, "dp": 4, "pp": 2}
    experts = {"etp": 2, "ep": 2, "expert_grad": 2}
    found = {name: expert_rank_groups(sizes, experts, [name]) for name in experts}
    assert found["etp"] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15)]
    assert found["ep"] == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert found["expert_grad"] == [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)]
    # Pipeline ranks may lie between the others. Their experts stay apart.
    found = {name: expert_rank_groups(sizes, experts, [name], "tp-pp-cp-dp") for name in experts}
    assert found["ep"][:2] == [(0, 4), (1, 5)]
    assert found["expert_grad"][-1] == (7, 15)
    with pytest.raises(ValueError, match="has other ranks than tp, cp and dp"):
        expert_rank_groups(sizes, experts | {"expert_grad": 3}, ["ep"])


@settings(max_examples=8, deadline=None)
@given(grid=grids(), data=st.data())
def test_expert_groups_partition_the_ranks_of_each_pipeline_rank(
    grid: tuple[dict[str, int], str], data: st.DataObject
) -> None:
    expert_groups_partition(grid, data)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(grid=grids(), data=st.data())
def test_expert_groups_partition_many_pipeline_ranks(grid: tuple[dict[str, int], str], data: st.DataObject) -> None:
    expert_groups_partition(grid, data)


def expert_groups_partition(grid: tuple[dict[str, int], str], data: st.DataObject) -> None:
    sizes, order = grid
    ranks_of_stage = sizes["tp"] * sizes["cp"] * sizes["dp"]
    ep = data.draw(st.sampled_from([n for n in range(1, ranks_of_stage + 1) if ranks_of_stage % n == 0]))
    etp = data.draw(st.sampled_from([n for n in range(1, ranks_of_stage + 1) if ranks_of_stage // ep % n == 0]))
    experts = {"etp": etp, "ep": ep, "expert_grad": ranks_of_stage // ep // etp}
    stages = {frozenset(ranks) for ranks in rank_groups(sizes, ["tp", "cp", "dp"], order)}
    for name, size in experts.items():
        groups = expert_rank_groups(sizes, experts, [name], order)
        assert sorted(rank for group in groups for rank in group) == list(range(math.prod(sizes.values())))
        assert all(len(group) == size for group in groups)
        assert all(any(set(group) <= stage for stage in stages) for group in groups)


def test_a_planned_context_has_the_places_that_create_gives(fake_world: None) -> None:
    grid = Grid(tp=2, cp=2, dp=4, pp=2, ep=4, etp=2, order="cp-tp-pp-dp", shard_ranks=2)
    for rank in range(0, 32, 5):
        join_fake_world(rank, 32)
        made = context.create(grid)
        collectives.shutdown()
        planned = context.planned(grid, rank, device=made.device)
        for axis, plan in zip(made.axes, planned.axes, strict=True):
            assert (plan.name, plan.size, plan.rank) == (axis.name, axis.size, axis.rank)
        assert (made.ep.size, made.etp.size, made.expert_grad.size) == (4, 2, 2)
        assert (made.grad.shards.size, made.grad.copies.size) == (2, 4)


def test_a_model_without_experts_has_no_expert_groups(fake_world: None) -> None:
    join_fake_world(0, 8)
    ctx = context.create(Grid(tp=2, dp=4))
    assert [axis.size for axis in (ctx.etp, ctx.ep, ctx.expert_grad)] == [1, 1, 1]
    with pytest.raises(ValueError, match="has other ranks"):
        context.create(Grid(tp=2, dp=4, ep=3))


def test_groups_of_shards_are_neighbors_and_copies_have_one_position() -> None:
    """Gradient ranks of tp 2, dp 6: 0 2 4 6 8 10 and 1 3 5 7 9 11."""
    groups = rank_groups({"tp": 2, "cp": 1, "dp": 6, "pp": 1}, ["dp", "cp"])
    split = Grid(tp=2, dp=6, shard_ranks=2).groups()
    assert split["grad"] == groups
    inner, outer = split["grad_shards"], split["grad_copies"]
    assert inner == [(0, 2), (4, 6), (8, 10), (1, 3), (5, 7), (9, 11)]
    assert outer == [(0, 4, 8), (2, 6, 10), (1, 5, 9), (3, 7, 11)]
    for rank in range(12):
        grad = context.planned(Grid(tp=2, dp=6, shard_ranks=2), rank, device=torch.device("meta")).grad
        (mine,) = (group for group in inner if rank in group)
        (copies,) = (group for group in outer if rank in group)
        assert (grad.shards.size, grad.shards.rank) == (2, mine.index(rank))
        assert (grad.copies.size, grad.copies.rank) == (3, copies.index(rank))
    whole = context.planned(Grid(tp=2, dp=6), 3, device=torch.device("meta")).grad
    assert whole.shards is whole
    assert whole.copies.size == 1
