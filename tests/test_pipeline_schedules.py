"""Schedules, plans and partitions as data: no process group, no model."""

import itertools
import random

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
from megapar_tools.trace import timeline
from megapar_tools.trace.colors import PARTS

from megapar.base.errors import ConfigError
from megapar.pipeline.lowering import MessageBatch, lower, lower_one, producer
from megapar.pipeline.partition import explicit, partition
from megapar.pipeline.schedules import Action, Schedule, make, show
from megapar.pipeline.simulation import simulate

GRID = [
    (name, pp, vpp, m)
    for name in ("gpipe", "1f1b", "interleaved")
    for pp in (1, 2, 3, 4, 5, 8)
    for vpp in ((1,) if name == "1f1b" else (1, 2, 3))
    for m in (1, 2, 3, 4, 5, 7, 8, 16)
]


def plans_of(name, pp, vpp, m, forward_only=False):
    orders = make(name, pp, vpp, m)
    if forward_only:
        orders = [[action for action in order if action.kind == "F"] for order in orders]
    return lower(orders, pp * vpp)


def actions(plan):
    return [item for item in plan if isinstance(item, Action)]


def test_1f1b_prints_as_the_textbook_order():
    assert show(make("1f1b", 3, 1, 4)) == (
        "rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n"
        "rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n"
        "rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    )


def test_gpipe_runs_all_forwards_before_the_backwards():
    assert (
        show(make("gpipe", 2, 2, 2))
        == "rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\nrank 1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"
    )


def test_interleaved_equals_megatrons_schedule_table():
    """Megatron-LM's table for 2 ranks, 2 chunks, 4 micro-batches, as (micro-batch, chunk)."""
    table = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    for rank, order in enumerate(make("interleaved", 2, 2, 4)):
        forwards = [(a.microbatch, a.stage // 2) for a in order if a.kind == "F"]
        backwards = [(a.microbatch, 1 - a.stage // 2) for a in order if a.kind == "B"]
        assert forwards == backwards == table
        warmup = 2 * (2 - rank - 1) + 2
        assert "".join(a.kind for a in order) == "F" * warmup + "FB" * (8 - warmup) + "B" * warmup


def test_interleaved_with_more_warmup_than_work_is_all_forwards_first():
    kinds = ["".join(a.kind for a in order) for order in make("interleaved", 4, 2, 4)]
    assert kinds == ["F" * 8 + "B" * 8, "F" * 8 + "B" * 8, "F" * 6 + "FB" * 2 + "B" * 6, "F" * 4 + "FB" * 4 + "B" * 4]


def test_interleaved_leaves_out_micro_batches_that_do_not_exist():
    """Fault ragged-micro-batches."""
    padded = make("interleaved", 4, 2, 8)
    for order, whole in zip(make("interleaved", 4, 2, 5), padded, strict=True):
        assert order == [action for action in whole if action.microbatch < 5]


@pytest.mark.parametrize(("pp", "m"), [(1, 1), (2, 3), (4, 2), (4, 9)])
def test_interleaved_with_one_chunk_is_1f1b(pp, m):
    assert make("interleaved", pp, 1, m) == make("1f1b", pp, 1, m)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1b", 2, 2, 4), ["parallel.vpp 2", "interleaved"]),
        (("dualpipe", 2, 1, 4), ["parallel.schedule=dualpipe", "gpipe, breadth, 1f1b, interleaved"]),
        (("1f1b", 2, 1, 0), ["micro-batches is 0"]),
        (("gpipe", 0, 1, 1), ["parallel.pp is 0"]),
        (("gpipe", 1, 0, 1), ["parallel.vpp is 0"]),
    ],
)
def test_impossible_schedules_are_refused(arguments, words):
    with pytest.raises(ConfigError) as error:
        make(*arguments)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_every_action_stands_once_on_its_rank_and_plans_keep_the_order():
    for name, pp, vpp, m in GRID:
        orders = make(name, pp, vpp, m)
        for rank, (order, plan) in enumerate(zip(orders, lower(orders, pp * vpp), strict=True)):
            expected = {Action(k, s, i) for k in "FB" for s in range(rank, pp * vpp, pp) for i in range(m)}
            assert len(order) == len(expected)
            assert set(order) == expected
            assert actions(plan) == order


def test_every_input_is_received_before_it_is_used_and_sent_after_it_is_made():
    for name, pp, vpp, m in GRID:
        plans = plans_of(name, pp, vpp, m)
        ran_at = {a: (rank, i) for rank, plan in enumerate(plans) for i, a in enumerate(plan) if isinstance(a, Action)}
        sent, received = {}, {}
        for rank, plan in enumerate(plans):
            for i, item in enumerate(plan):
                if isinstance(item, MessageBatch):
                    sent.update({t.consumer: (rank, t.peer, i) for t in item.sends})
                    received.update({t.consumer: (t.peer, rank, i) for t in item.receives})
        crossing = {a for a in ran_at if (p := producer(a, pp * vpp, ran_at)) and ran_at[p][0] != ran_at[a][0]}
        assert set(sent) == set(received) == crossing
        for action in crossing:
            made, used = ran_at[producer(action, pp * vpp, ran_at)], ran_at[action]
            assert sent[action][:2] == received[action][:2] == (made[0], used[0])
            assert sent[action][2] > made[1]
            assert received[action][2] < used[1]


def test_both_ends_of_a_link_have_their_transfers_in_the_same_order():
    """Fault interleaved-on-two-ranks: with two ranks the previous and the next rank are one, and both directions
    share the link."""
    for name, pp, vpp, m in GRID:
        plans = plans_of(name, pp, vpp, m)
        for a, b in itertools.permutations(range(pp), 2):
            sends = [t.consumer for x in plans[a] if isinstance(x, MessageBatch) for t in x.sends if t.peer == b]
            receives = [t.consumer for x in plans[b] if isinstance(x, MessageBatch) for t in x.receives if t.peer == a]
            assert sends == receives


def test_plans_never_lock_up_whatever_the_costs_and_though_batches_run_one_by_one():
    """Fault ragged-micro-batches. `simulate` runs a rank's batches in order and waits for whole batches, as NCCL
    does."""
    draw = random.Random(0)
    for name, pp, vpp, m in GRID:
        costs = [draw.uniform(0.1, 5) for _ in range(pp * vpp)]
        result = simulate(
            plans_of(name, pp, vpp, m), costs, [draw.uniform(0, 3) * c for c in costs], draw.uniform(0, 2)
        )
        assert len(result.events) == 2 * pp * vpp * m


def test_1f1b_holds_at_most_pp_minus_rank_micro_batches():
    for pp, m in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 5, 8, 16)):
        live = simulate(plans_of("1f1b", pp, 1, m), 1, 2).peak_live
        assert live == [min(m, pp - rank) for rank in range(pp)]


def test_the_plan_of_one_rank_is_the_one_among_all():
    for name, pp, vpp, m in (("1f1b", 4, 1, 7), ("interleaved", 3, 2, 5), ("gpipe", 2, 2, 3)):
        orders = make(name, pp, vpp, m)
        plans = lower(orders, pp * vpp)
        assert [lower_one(orders, pp * vpp, rank) for rank in range(pp)] == plans


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_equals_the_formula(name):
    for pp, m in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 7, 8, 16)):
        assert simulate(plans_of(name, pp, 1, m), 1, 2).bubble == pytest.approx((pp - 1) / (m + pp - 1))


def test_interleaving_divides_the_bubble_by_the_chunks():
    for pp, vpp, groups in itertools.product((1, 2, 3, 4, 8), (2, 3, 4), (1, 2, 4)):
        result = simulate(plans_of("interleaved", pp, vpp, groups * pp), 1 / vpp, 2 / vpp)
        assert result.bubble == pytest.approx((pp - 1) / (groups * pp * vpp + pp - 1))


@pytest.mark.parametrize("m", [16, 64])
def test_transfers_hide_behind_the_computation_where_the_order_allows(m):
    """A transfer is paid for once a hop, not once a micro-batch, by forwards alone and by interleaved 1F1B."""
    makespan = simulate(plans_of("gpipe", 4, 1, m, forward_only=True), 1, 2, transfer=0.3).makespan
    assert makespan == pytest.approx(m + 3 * 1.3)
    plans = plans_of("interleaved", 4, 2, m)
    exposed = simulate(plans, 1, 2, transfer=0.2).makespan - simulate(plans, 1, 2).makespan
    assert exposed == pytest.approx(0.2 * 2 * 7)


def test_an_order_that_cannot_run_is_refused_with_what_each_rank_waits_for():
    orders = [
        [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)],
        [Action("F", 1, 1), Action("F", 1, 0), Action("B", 1, 0), Action("B", 1, 1)],
    ]
    with pytest.raises(ValueError, match="cannot run") as error:
        lower(orders, 2)
    assert str(error.value) == (
        "schedule cannot run: rank 0 waits at 0B0 for the gradient of 1B0; "
        "rank 1 waits at 1F1 for the activation of 0F1"
    )
    with pytest.raises(ValueError, match="rank 0 waits at 0B0 for its forward 0F0"):
        lower([[Action("B", 0, 0), Action("F", 0, 0)]], 1)
    with pytest.raises(ValueError, match="more than once: 0F0"):
        lower([[Action("F", 0, 0), Action("F", 0, 0)]], 1)


def test_plans_that_lock_each_other_up_are_told_apart():
    """Two ranks, each receiving before it sends: what a plan with split batches would do on NCCL."""
    first, second = plans_of("interleaved", 2, 2, 4)
    batches = [item for item in first if isinstance(item, MessageBatch) and item.receives]
    first.remove(batches[0])
    first.insert(0, batches[0])
    with pytest.raises(ValueError, match="rank 0 at"):
        simulate([first, second], 1, 2)


def brute_force(costs, first, last, stages):
    """(largest cost, sum of squares) of the best of all contiguous cuts."""
    best = None
    for cuts in itertools.combinations_with_replacement(range(len(costs) + 1), stages - 1):
        edges = [0, *cuts, len(costs)]
        sizes = [b - a for a, b in itertools.pairwise(edges)]
        if 0 in sizes[1:-1]:
            continue
        totals = [sum(costs[a:b]) for a, b in itertools.pairwise(edges)]
        totals[0] += first
        totals[-1] += last
        score = (max(totals), sum(t * t for t in totals))
        best = score if best is None else min(best, score)
    return best


def test_every_layer_is_in_exactly_one_stage():
    """Fault layer-in-one-stage."""
    for layers, pp, vpp in itertools.product(range(1, 34), range(1, 9), range(1, 5)):
        stages = pp * vpp
        if layers < stages - 2:
            with pytest.raises(ConfigError) as error:
                partition([1.0] * layers, 0.3, 1.4, stages)
            assert f"num_hidden_layers {layers} " in str(error.value)
            assert f"= {stages} stages" in str(error.value)
        else:
            parts = partition([1.0] * layers, 0.3, 1.4, stages)
            assert len(parts) == stages
            assert list(itertools.chain(*parts)) == list(range(layers))
            assert all(len(part) > 0 for part in parts[1:-1])


def test_partition_is_the_best_of_all_cuts():
    draw = random.Random(1)
    for stages, layers in [(1, 3), (2, 1), (2, 5), (3, 1), (3, 7), (4, 6), (5, 8), (8, 9)]:
        costs = [draw.randint(1, 9) for _ in range(layers)]
        first, last = draw.randint(0, 9), draw.randint(0, 9)
        parts = partition(costs, first, last, stages)
        totals = [sum(costs[i] for i in part) for part in parts]
        totals[0] += first
        totals[-1] += last
        assert (max(totals), sum(t * t for t in totals)) == brute_force(costs, first, last, stages)


def test_embedding_and_head_take_layers_off_the_end_stages():
    sizes = [len(part) for part in partition([1.0] * 14, 1.0, 3.0, 4)]
    assert sizes == [3, 4, 5, 2]
    assert [len(p) for p in partition([1.0] * 5, 0, 0, 4)] == [1, 1, 1, 2]  # of equals, fewer layers in front
    assert [len(p) for p in partition([0.1] * 7, 0.1, 0.1, 3)] == [2, 3, 2]  # sums that ought to be equal are
    assert [len(p) for p in partition([1.0] * 2, 0.0, 9.0, 2)] == [2, 0]


def test_an_explicit_partition_is_obeyed():
    assert explicit((0, 4, 2, 1)) == [range(0), range(4), range(4, 6), range(6, 7)]


def test_the_picture_shows_computation_in_proportion_to_time(tmp_path):
    """Areas of the colors: backward twice forward, idle as large as the bubble says."""
    result = simulate(plans_of("1f1b", 4, 1, 8), 1, 2)
    timeline.draw(result.events, tmp_path / "timeline.png", "1F1B", "forwards")
    pixels = matplotlib.image.imread(tmp_path / "timeline.png")[..., :3]
    colors = {name: PARTS[name].light for name in ("forward", "backward", "idle")}
    near = {k: np.abs(pixels - np.array(matplotlib.colors.to_rgb(c))).max(-1) < 0.01 for k, c in colors.items()}
    area = {k: int(v.sum()) for k, v in near.items()}
    assert area["backward"] / area["forward"] == pytest.approx(2, rel=0.1)
    assert area["idle"] / sum(area.values()) == pytest.approx(result.bubble, rel=0.1)
    with pytest.raises(ValueError, match="no events"):
        timeline.draw([], tmp_path / "none.png", "nothing")


def scattered(pp: int, vpp: int, num_microbatches: int) -> list[list[Action]]:
    return list(reversed(make("gpipe", pp, vpp, num_microbatches)))


SCATTERED = Schedule(scattered)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "tests.test_pipeline_schedules:SCATTERED",
            r"orders stages \[1\] on rank 0, but places the stages on ranks \[0, 1\]",
        ),
        ("tests.test_pipeline_schedules:make", "is function, not a megapar.pipeline.schedules.Schedule"),
        ("tests.test_pipeline_schedules:NOBODY", "cannot be imported"),
        ("no.such.module:X", "cannot be imported"),
        ("zigzag", "unknown; there are gpipe, breadth, 1f1b, .*dualpipe-v, and MODULE:NAME"),
    ],
)
def test_a_schedule_of_ones_own_is_refused_by_name(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^parallel.schedule={name}: {said}"):
        make(name, 2, 1, 4)
