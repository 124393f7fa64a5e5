"""Our zero-bubble schedules beside published ones of the same memory: they never take longer.

Published are torch's orders, computed by torch's own code, and those of sail-sg with their lengths in tests/data.
"""

import csv
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from megapar.pipeline import blocks
from megapar.pipeline.actions import Action, Orders, looped, peak, v_shaped
from megapar.pipeline.makespans import Times, makespans
from megapar.pipeline.schedules import SCHEDULES, make
from megapar.pipeline.zero_bubble import Durations, counted_by_stage
from megapar.pipeline.zero_bubble_orders import zb_1p, zb_v

ROOT = Path(__file__).resolve().parents[1]
TIMES = (Times(1, 1, 1, 0), Times(1, 1, 1, 0.1), Times(1, 1.3, 0.7, 0.1), Times(1, 1, 0.5, 0.1), Times(1, 1.5, 1, 0.1))
# The published schedule beside which each of ours stands. Those of torch are named as its classes are.
BESIDE = {
    "zb-h1": "InterleavedZeroBubble",
    "zb-2p": "InterleavedZeroBubble",
    "zb-interleaved": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
    "v-half": "sail-sg V-Half",
    "v-min": "sail-sg V-Min",
}


class Published(NamedTuple):
    """The lengths of a published schedule with each of TIMES, and what a rank keeps, in stages of micro-batches."""

    lengths: list[float]
    keeps: int


def stages_on_a_rank(name: str) -> int:
    return 1 if name in ("zb-h1", "zb-2p") else 2


def halved(orders: Orders) -> Orders:
    """The orders with I and W in place of each B, as long together as B."""
    return [
        [half for a in order for half in ([Action("I", *a[1:]), Action("W", *a[1:])] if a.kind == "B" else [a])]
        for order in orders
    ]


def keeps(orders: Orders) -> int:
    ones = [1.0] * (1 + max(action.stage for order in orders for action in order))
    return int(max(peak(order, ones, ones) for order in orders))


def torch_orders(kind: str, pp: int, vpp: int, m: int) -> Orders | None:
    """The orders of torch's class. None if it takes no such number of micro-batches."""
    if kind == "DualPipeV" and m < 2 * pp:
        return None
    if kind == "InterleavedZeroBubble" and m % max(1, m // pp):
        return None
    letters = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}
    orders = []
    for rank in range(pp):
        schedule: Any = object.__new__(getattr(torch_schedules, f"Schedule{kind}"))
        # What its constructor sets, which would make all ranks' orders for each of them.
        schedule.pp_group_size, schedule.n_local_stages, schedule.rank = pp, vpp, rank
        schedule.num_stages = schedule._num_stages = pp * vpp
        schedule._n_microbatches = m
        schedule.microbatches_per_round = m // max(1, m // pp)
        order = []
        for action in filter(None, schedule._calculate_single_rank_operations(rank)):
            for part in action.sub_actions or [action]:
                order.append(Action(letters[part.computation_type.name], part.stage_index, part.microbatch_index))
        orders.append(order)
    return orders


@cache
def sail_sg() -> dict[tuple[str, int, int], Published]:
    lines = (ROOT / "tests/data/sail_sg_lengths.csv").read_text().splitlines()
    rows = csv.reader(line for line in lines if not line.startswith("#"))
    header = next(rows)
    assert header[4:] == [" ".join(f"{time:g}" for time in times) for times in TIMES]
    return {(name, int(pp), int(m)): Published([*map(float, of)], int(kept)) for name, pp, m, kept, *of in rows}


def published(name: str, pp: int, m: int) -> Published | None:
    """None if there is no such schedule for so many micro-batches."""
    if name in ("v-half", "v-min"):
        return sail_sg().get((name, pp, m))
    vpp = stages_on_a_rank(name)
    orders = torch_orders(BESIDE[name], pp, vpp, m)
    if orders is None:
        return None
    return Published(list(lengths_of(orders, SCHEDULES[name].placement(pp, vpp))), keeps(orders))


def lengths_of(orders: Orders, rank_of: Sequence[int], times: Sequence[Times] = TIMES) -> Sequence[float]:
    found = makespans(halved(orders), rank_of, times)
    assert found is not None
    return list(found)


def allowed(name: str, pp: int) -> int:
    """What our schedule may keep, in stages of micro-batches."""
    search = SCHEDULES[name].search
    return int(search.microbatches(pp) * stages_on_a_rank(name)) if search else 2 * pp + 1


def worst_ratio(name: str, pp: int, m: int, known: bool) -> float:
    """Our length over the published one, at the worst of TIMES; 0 if none keeps as much.

    With `known`, our orders are made for the times they run with.
    """
    other = published(name, pp, m)
    if other is None or other.keeps > allowed(name, pp):
        return 0
    vpp = stages_on_a_rank(name)
    rank_of = SCHEDULES[name].placement(pp, vpp)
    orders = make(name, pp, vpp, m)
    assert keeps(orders) <= allowed(name, pp)
    ratios = [ours / theirs for ours, theirs in zip(lengths_of(orders, rank_of), other.lengths, strict=True)]
    if known and SCHEDULES[name].search:
        for times, theirs in zip(TIMES, other.lengths, strict=True):
            schedule = SCHEDULES[name].within(durations=Durations(*times[:3]))
            ratios.append(lengths_of(make(schedule, pp, vpp, m), rank_of, [times])[0] / theirs)
    return max(ratios)


# Lengths in the file are rounded to six digits.
ROUNDING = 1e-5


@pytest.mark.parametrize("name", BESIDE)
def test_ours_take_no_longer_than_published_ones_that_keep_as_much(name: str) -> None:
    for pp, m in ((2, 3), (3, 3), (4, 4), (4, 7), (4, 16), (5, 11), (6, 9), (8, 8)):
        assert worst_ratio(name, pp, m, known=pp <= 3) <= 1 + ROUNDING, (name, pp, m)


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("pp", range(2, 17))
def test_ours_take_no_longer_for_any_number_of_micro_batches(name: str, pp: int) -> None:
    """For pp to 8 pp micro-batches; with more than 8 ranks for some of these numbers, as in the file of sail-sg's."""
    numbers: Sequence[int] = range(pp, 8 * pp + 1)
    if pp > 8:
        numbers = sorted(m for name, ranks, m in sail_sg() if name == "v-min" and ranks == pp)
    for m in numbers:
        assert worst_ratio(name, pp, m, known=m in (pp, 2 * pp + 1)) <= 1 + ROUNDING, (name, pp, m)


def test_orders_of_torch_are_candidates_as_they_are() -> None:
    for pp, m in ((1, 2), (2, 5), (4, 6), (5, 20), (6, 9)):
        assert zb_v(pp, 2, m) == torch_orders("ZBVZeroBubble", pp, 2, m)
        for vpp in (1, 2, 3):
            theirs = torch_orders("InterleavedZeroBubble", pp, vpp, m)
            rounds = max(1, m // pp)
            assert theirs is None or zb_1p(pp, vpp, m, m // rounds) == theirs


@pytest.mark.parametrize("vpp", [1, 2, 4])
def test_a_rest_of_micro_batches_takes_no_longer_than_a_full_group(vpp: int) -> None:
    """Fault last-group-is-slow: 100 on 8 ranks took longer than 104. torch refuses most of these numbers."""
    name = "zb-interleaved" if vpp > 1 else "zb-h1"
    for pp in (3, 4, 8):
        rank_of = looped(pp, vpp)
        for full in (pp, 3 * pp, 5 * pp):
            longest = lengths_of(make(name, pp, vpp, full), rank_of)
            for missing in range(1, pp):
                lengths = lengths_of(make(name, pp, vpp, full - missing), rank_of)
                assert all(a <= b for a, b in zip(lengths, longest, strict=True)), (pp, full, missing)


def test_blocks_keep_what_the_paper_says() -> None:
    """About 1/2 and 1/3 of 1F1B's 2 pp stages of micro-batches, before and after their actions have moved."""
    for pp in (2, 4, 5, 6):
        for m in (pp, 3 * pp):
            half = [keeps(orders) for orders in blocks.v_half(pp, m, lambda _: True)]
            least = [keeps(orders) for orders in blocks.v_min(pp, m, lambda _: True)]
            assert max(half) <= pp + 1 + (pp % 2 == 0)
            assert min(least) <= 2 * ((pp + 1) // 3) + 2
            assert max(least) <= 2 * ((pp + 1) // 3) + 4


def test_a_repeated_period_is_what_a_whole_grid_would_hold() -> None:
    """With more micro-batches than a grid is made for, the steady part is repeated: each takes 6 slots more."""
    equal = [Times(1, 1, 1, 0)]
    for pp in (3, 4):
        rank_of = v_shaped(pp, 2)
        for few, more in zip(
            blocks.v_half(pp, 2 * pp + 8, lambda _: True), blocks.v_half(pp, 2 * pp + 31, lambda _: True), strict=True
        ):
            assert lengths_of(more, rank_of, equal)[0] == lengths_of(few, rank_of, equal)[0] + 23 * 6


def table() -> list[str]:
    """The rows of the table in docs/strategies.md."""
    rows = []
    for name, other in BESIDE.items():
        vpp = stages_on_a_rank(name)
        cells = [f"`{name}`", other]
        for pp, m in ((4, 16), (8, 8), (8, 32)):
            orders = make(name, pp, vpp, m)
            ours = Published(list(lengths_of(orders, SCHEDULES[name].placement(pp, vpp))), keeps(orders))
            cells += [in_words(ours, vpp, m), in_words(published(name, pp, m), vpp, m)]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


RESTS = ((2, 3), (4, 6), (4, 7), (8, 11), (8, 20))
"""Ranks and micro-batches that these do not divide. torch lets more micro-batches than ranks go round at once then."""


def rows_of_rests() -> list[str]:
    """Return the rows of the second table in docs/strategies.md. With the memory of torch's order ours is as short."""
    rows = []
    for pp, m in RESTS:
        rank_of = looped(pp, 2)
        theirs = {name: torch_orders(name, pp, 2, m) for name in ("Interleaved1F1B", "InterleavedZeroBubble")}
        both = theirs["InterleavedZeroBubble"]
        assert both is not None
        as_much = SCHEDULES["zb-interleaved"].within(counted_by_stage(keeps(both) / 2, rank_of))
        orders = [make("interleaved", pp, 2, m), theirs["Interleaved1F1B"], make("zb-interleaved", pp, 2, m), both]
        found = [
            None if order is None else Published(list(lengths_of(order, rank_of)), keeps(order))
            for order in (*orders, make(as_much, pp, 2, m))
        ]
        assert found[4] is not None
        assert found[4].keeps <= keeps(both)
        longer = [ours / other for ours, other in zip(found[4].lengths, lengths_of(both, rank_of), strict=True)]
        assert max(longer) <= 1 + ROUNDING, (pp, m)
        rows.append(f"| {pp} | {m} | {' | '.join(in_words(one, 2, m) for one in found)} |")
    return rows


def in_words(found: Published | None, vpp: int, m: int) -> str:
    if found is None:
        return "-"
    idle = [1 - vpp * m * sum(TIMES[at][:3]) / found.lengths[at] for at in (0, 2)]
    return f"{found.keeps / vpp:g}: {idle[0]:.1%}, {idle[1]:.1%}"


def test_the_table_of_the_documentation_is_what_we_compute() -> None:
    text = (ROOT / "docs/strategies.md").read_text()
    for row in (*table(), *rows_of_rests()):
        assert row in text, row
