"""Fine stages and the actions of units in plans, without a process."""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from itertools import accumulate, pairwise, product

import pytest

from megapar.pipeline.lowering import MessageBatch, lower
from megapar.pipeline.refine import refine
from megapar.pipeline.schedules import Action, find, make, show
from megapar.pipeline.sharding_plan import Item, UnitAction, Units, first_microbatches, insert_unit_actions, most_live
from megapar.pipeline.simulation import simulate

TIED_UNIT = 1000


def test_a_forward_runs_up_and_a_backward_down_the_fine_stages() -> None:
    (order,) = refine(make("1f1b", 1, 1, 2), [3])
    assert show([order]) == "rank 0: 0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 1B1 0B1"
    two = refine(make("1f1b", 2, 1, 1), [2, 3])
    assert show(two) == "rank 0: 0F0 1F0 1B0 0B0\nrank 1: 2F0 3F0 4F0 4B0 3B0 2B0"


def test_breadth_first_a_fine_stage_runs_all_micro_batches() -> None:
    (order,) = refine(make("gpipe", 1, 1, 2), [3], breadth_first=True)
    assert show([order]) == "rank 0: 0F0 0F1 1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1 0B0 0B1"


def test_halves_of_backwards_run_down_too() -> None:
    halves = [Action("F", 0, 0), Action("I", 0, 0), Action("W", 0, 0)]
    assert show(refine([halves], [2])) == "rank 0: 0F0 1F0 1I0 0I0 1W0 0W0"


def do_nothing(_: UnitAction) -> None:
    pass


def units_of(stages: Sequence[int], num_stages: int, *, gathers: bool = True, overlap: bool = True) -> Units:
    """Two units in each stage; the first and the last one share a third if one rank has both."""
    of_stage = {stage: [2 * stage, 2 * stage + 1] for stage in stages}
    if 0 in stages and num_stages - 1 in stages:
        of_stage[0].append(TIED_UNIT)
        of_stage[num_stages - 1].append(TIED_UNIT)
    # The last stage adds gradients in I, as that of a loss in chunks does.
    return Units(of_stage, do_nothing, gathers, overlap, add_in_i={num_stages - 1}, copied=True)


class Checker:
    """Runs a plan and fails at the use of a missing unit."""

    def __init__(
        self,
        of_stage: Mapping[int, Sequence[int]],
        gathers: bool,
        overlap: bool = True,
        stages: int = 2,
        add_in_i: Container[int] = (),
    ):
        self.of_stage, self.gathers, self.overlap, self.add_in_i = of_stage, gathers, overlap, add_in_i
        self.most = 3 * stages  # units in memory; a stage has three at most
        self.arriving: dict[int, int] = {}  # unit to the number of actions that have run since its gather was posted
        self.present: set[int] = set()
        self.collected: set[int] = set()
        self.travelling: set[int] = set()
        self.added: set[int] = set()  # units whose collected gradient has got something
        self.copied: list[int] = []  # units with their sum over copies, in the order of its start
        self.hidden: list[int] = []  # for each wait, how many actions ran while the unit arrived

    def run(self, plan: Sequence[Item]) -> None:
        for item in plan:
            if isinstance(item, UnitAction):
                getattr(self, f"on_{item.kind}")(item.unit)
            elif isinstance(item, Action):
                self.on_action(item)
        assert (self.arriving, self.present, self.collected, self.travelling) == ({}, set(), set(), set())

    def on_action(self, action: Action) -> None:
        units = set(self.of_stage[action.stage])
        if self.gathers and action.kind != "W":
            assert units <= self.present, action
            assert len(self.present) + len(self.arriving) <= self.most, "more units than planned"
        if action.kind in ("B", "W") or (action.kind == "I" and action.stage in self.add_in_i):
            assert units <= self.collected - self.travelling, action
            self.added |= units
            assert self.overlap or not self.travelling, "a sum travels while an action runs"
            assert len(self.collected) <= self.most, "more units than planned"
        self.arriving = {unit: actions + 1 for unit, actions in self.arriving.items()}

    def on_gather(self, unit: int) -> None:
        assert unit not in self.present | set(self.arriving)
        self.arriving[unit] = 0

    def on_wait(self, unit: int) -> None:
        self.hidden.append(self.arriving.pop(unit))
        self.present.add(unit)

    def on_release(self, unit: int) -> None:
        self.present.remove(unit)

    def on_open(self, unit: int) -> None:
        assert unit not in self.collected
        self.collected.add(unit)

    def on_reduce(self, unit: int) -> None:
        assert unit in self.added & self.collected - self.travelling, "nothing was added"
        self.added.remove(unit)
        self.travelling.add(unit)

    def on_add(self, unit: int) -> None:
        assert unit not in self.copied, "the shard is summed over its copies already"
        self.travelling.remove(unit)
        self.collected.remove(unit)

    def on_copies(self, unit: int) -> None:
        assert unit not in self.collected
        self.copied.append(unit)


def in_halves(order: Sequence[Action]) -> list[Action]:
    """Each B as an I, and its W after the next action or at the end."""
    result: list[Action] = []
    waiting: list[Action] = []
    for action in order:
        if action.kind != "B":
            result += [action, *waiting]
            waiting = []
        else:
            result += [action._replace(kind="I"), *waiting]
            waiting = [action._replace(kind="W")]
    return result + waiting


SCHEDULES = [("gpipe", 1), ("gpipe", 3), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]


def fine_plans(name: str, pp: int, vpp: int, m: int, *, breadth: bool, halves: bool) -> tuple[list[list[Item]], int]:
    fine = [2 + number % 3 for number in range(pp * vpp)]
    orders = make(name, pp, vpp, m)
    if halves:
        orders = [in_halves(order) for order in orders]
    refined = refine(lower(orders, pp * vpp), fine, breadth_first=breadth)
    return [list(plan) for plan in refined], sum(fine)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-v", "v-min", "dualpipe-v", "interleaved"])
def test_fine_stages_take_no_longer_than_the_stages_that_they_make_up(name: str) -> None:
    """Fault receives-posted-late: by one fine stage in place of a stage. 1f1b on 8 ranks took 16% longer."""
    vpp = 1 if name in ("1f1b", "gpipe", "zb-h1") else 2
    for pp, m in product((2, 4, 8), (3, 8, 20)):
        # The ends have more fine stages, which take little time: embedding and head.
        numbers = [4 + (stage in (0, pp * vpp - 1)) for stage in range(pp * vpp)]
        costs = [1.0] * sum(numbers)
        costs[0] = costs[-1] = 0.1
        ends = list(accumulate(numbers))
        whole = [sum(costs[end - number : end]) for end, number in zip(ends, numbers, strict=True)]
        plans = lower(make(name, pp, vpp, m), pp * vpp)
        coarse = simulate(plans, whole, [2 * cost for cost in whole], 0.3)
        fine = simulate(refine(plans, numbers), costs, [2 * cost for cost in costs], 0.3)
        assert fine.makespan == pytest.approx(coarse.makespan)


def stages_in(plan: Sequence[Item]) -> list[int]:
    return sorted({item.stage for item in plan if isinstance(item, Action)})


@pytest.mark.parametrize(("name", "vpp"), SCHEDULES)
def test_every_plan_uses_units_only_while_they_are_there(name: str, vpp: int) -> None:
    """Faults zero-tied-weights, zero-with-pipelines. At most the units of two stages are in memory; a gather runs while
    one action does, unless it is the first."""
    for pp, m, breadth, halves in product((1, 2, 3), (1, 2, 5), (False, True), (False, True)):
        plans, num_stages = fine_plans(name, pp, vpp, m, breadth=breadth and pp == 1, halves=halves)
        for plan, gathers, overlap in product(plans, (False, True), (False, True)):
            units = units_of(stages_in(plan), num_stages, gathers=gathers, overlap=overlap)
            checker = Checker(units.of_stage, gathers, overlap, add_in_i=units.add_in_i)
            checker.run(insert_unit_actions(plan, units))
            used = {unit for of_stage in units.of_stage.values() for unit in of_stage}
            assert sorted(checker.copied) == sorted(used), "each shard is summed over its copies once"
            if gathers:
                first = len(units.of_stage[stages_in(plan)[0]])
                assert sorted(checker.hidden)[:first] == [0] * first
                # A W may run between: it needs no weights.
                assert min(sorted(checker.hidden)[first:]) >= 1
                assert halves or set(checker.hidden[first:]) == {1}


@pytest.mark.parametrize(("name", "vpp"), SCHEDULES)
def test_a_result_leaves_before_a_rank_waits_for_a_sum(name: str, vpp: int) -> None:
    sent = 0
    for pp, halves in product((2, 3), (False, True)):
        plans, num_stages = fine_plans(name, pp, vpp, 5, breadth=False, halves=halves)
        for plan in plans:
            full = insert_unit_actions(plan, units_of(stages_in(plan), num_stages))
            for before, item in pairwise(full):
                if isinstance(item, MessageBatch):
                    assert not isinstance(before, UnitAction)
                    sent += len(item.sends)
    assert sent > 0


def test_a_unit_is_collected_again_only_when_its_sum_has_left() -> None:
    """Fault zero-tied-weights. A tied embedding, with all layers between frozen."""
    plan = [*(Action("F", stage, 0) for stage in (0, 1, 2)), *(Action("B", stage, 0) for stage in (2, 1, 0))]
    checker = Checker({0: [7], 1: [], 2: [7]}, True)
    checker.run(insert_unit_actions(plan, Units(checker.of_stage, do_nothing, True)))


def test_without_backwards_nothing_is_reduced() -> None:
    plan = [Action("F", stage, m) for m in range(2) for stage in range(3)]
    checker = Checker({0: [0], 1: [1], 2: [2]}, True)
    full = insert_unit_actions(plan, Units(checker.of_stage, do_nothing, True))
    checker.run(full)
    assert {item.kind for item in full if isinstance(item, UnitAction)} == {"gather", "wait", "release"}


def test_breadth_first_collectives_do_not_depend_on_the_number_of_micro_batches() -> None:
    counts = []
    for m in (1, 2, 7):
        (plan,), num_stages = fine_plans("gpipe", 1, 1, m, breadth=True, halves=False)
        full = insert_unit_actions(plan, units_of(stages_in(plan), num_stages))
        counts.append(Counter(str(item) for item in full if isinstance(item, UnitAction)))
    assert counts[0] == counts[1] == counts[2]
    assert counts[0]["reduce:0"] == 1
    assert counts[0]["gather:0"] == 2  # of the first fine stage, for the forwards and for the backwards


def test_units_of_a_run_stay_until_their_last_use() -> None:
    """Breadth-first over several ranks: collectives do not depend on the number of micro-batches."""
    for pp, vpp in ((2, 1), (2, 2), (3, 2)):
        fine = [2 + number % 3 for number in range(pp * vpp)]
        runs_of = dict(enumerate(stage for stage, number in enumerate(fine) for _ in range(number)))
        counts: dict[int, list[Counter[str]]] = {}
        for m in (1, 2, 7):
            plans, num_stages = fine_plans("gpipe", pp, vpp, m, breadth=False, halves=False)
            for rank, plan in enumerate(plans):
                units = units_of(stages_in(plan), num_stages)
                full = insert_unit_actions(plan, units, runs_of)
                Checker(units.of_stage, True, stages=max(fine) + 1, add_in_i=units.add_in_i).run(full)
                counted = Counter(str(item) for item in full if isinstance(item, UnitAction))
                counts.setdefault(rank, []).append(counted)
        for found in counts.values():
            assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(("name", "vpp"), SCHEDULES)
def test_a_replica_with_fewer_micro_batches_joins_all_collectives(name: str, vpp: int) -> None:
    """Fault zero-ragged-micro-batches. And what its ranks send is what they receive."""
    for pp, number in product((1, 2, 3), (0, 1, 3)):
        plans, num_stages = fine_plans(name, pp, vpp, 4, breadth=False, halves=False)
        full = [insert_unit_actions(plan, units_of(stages_in(plan), num_stages)) for plan in plans]
        fewer = [first_microbatches(plan, number) for plan in full]
        if number:
            simulate(fewer, 1.0, 2.0, 0.3)  # raises ValueError if ranks wait for each other in a circle
        sent, received = set(), set()
        for rank, (mine, most) in enumerate(zip(fewer, full, strict=True)):
            collectives = [item for item in mine if isinstance(item, UnitAction)]
            assert collectives == [item for item in most if isinstance(item, UnitAction)]
            assert {item.microbatch for item in mine if isinstance(item, Action)} == set(range(number))
            for batch in mine:
                if isinstance(batch, MessageBatch):
                    sent |= {(message.consumer, rank, message.peer) for message in batch.sends}
                    received |= {(message.consumer, message.peer, rank) for message in batch.receives}
        assert sent == received
        assert {consumer.microbatch for consumer, _, _ in sent} <= set(range(number))


def test_the_most_memory_of_a_plan() -> None:
    plan = [UnitAction("gather", 0), UnitAction("gather", 1), UnitAction("release", 0), UnitAction("gather", 2)]
    assert most_live(plan, {0: 5, 1: 7, 2: 6}.__getitem__, "gather", "release") == 13
    assert most_live(plan, {0: 5, 1: 7, 2: 6}.__getitem__, "open", "add") == 0


def test_only_schedules_that_say_so_are_breadth_first() -> None:
    assert find("breadth").breadth_first
    assert not any(find(name).breadth_first for name in ("gpipe", "1f1b", "interleaved"))
