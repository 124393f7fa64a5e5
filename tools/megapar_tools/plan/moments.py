"""When a rank of a pipeline keeps most for its backward passes, from the order of its actions alone.

The moments are the same for all models and layouts with one schedule, so they are found once. `at_peak` weighs them
with bytes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import ge

from megapar.config.options import ParallelConfig
from megapar.observe.kept import DEFERRED, Key
from megapar.pipeline.actions import Kind
from megapar.pipeline.refine import runs_breadth_first
from megapar.pipeline.schedules import make, of
from megapar.pipeline.zero_bubble import ScheduleMemory

WINDOW = 4
"""How many uses of units one after the other decide what is in memory: what stays, what comes and what leaves."""
Step = tuple[Kind, int]
"""The kind of an action, and its stage."""


@dataclass(frozen=True)
class Moment:
    """A moment of a rank's order: how many micro-batches each stage keeps from F, and how many from I to W.

    With `running` the I of so many micro-batches through this stage comes next: a fine stage after the other, each
    frees what it kept from F and keeps something for W.
    """

    kept: tuple[int, ...]
    deferred: tuple[int, ...]
    running: tuple[int, int] | None = None

    def above(self, other: "Moment") -> bool:
        """Whether at no time of `other` more is kept."""
        return (
            self.running == other.running
            and all(map(ge, self.kept, other.kept))
            and all(map(ge, self.deferred, other.deferred))
        )


class Orders:
    """The orders of a schedule for a number of micro-batches, and the moments when most is kept.

    They are without messages, which change no order, and wait in no memory that a plan counts.
    """

    def __init__(self, parallel: ParallelConfig, memory: ScheduleMemory | None, num_microbatches: int):
        schedule = of(parallel, memory)
        self.breadth_first = schedule.breadth_first
        self.actions = make(schedule, parallel.pp, parallel.vpp, num_microbatches)
        """The actions of each rank, in order."""
        self._grouped = runs_breadth_first(schedule.breadth_first, parallel.pp)
        self._num_stages = parallel.pp * parallel.vpp
        self._steps: dict[int, list[Step]] = {}
        self._moments: dict[int, list[Moment]] = {}

    def steps(self, rank: int) -> list[Step]:
        """The actions of a rank."""
        if rank not in self._steps:
            self._steps[rank] = [(action.kind, action.stage) for action in self.actions[rank]]
        return self._steps[rank]

    def in_halves(self, rank: int) -> set[int]:
        """The stages of a rank that run a backward in two halves."""
        return {stage for kind, stage in set(self.steps(rank)) if kind == "I"}

    def moments(self, rank: int) -> list[Moment]:
        """The moments at which a rank may keep most, in the order of time: any other keeps no more than one of them."""
        if rank not in self._moments:
            self._moments[rank] = _highest(self._all_moments(rank))
        return self._moments[rank]

    def _all_moments(self, rank: int) -> list[Moment]:
        kept = [0] * self._num_stages
        deferred = [0] * self._num_stages
        found: dict[Moment, None] = {}
        for (kind, stage), count in self._groups(rank):
            match kind:
                case "F":
                    kept[stage] += count
                    found.setdefault(Moment(tuple(kept), tuple(deferred)))
                case "B":
                    kept[stage] -= count
                case "I":
                    found.setdefault(Moment(tuple(kept), tuple(deferred), (stage, count)))
                    kept[stage] -= count
                    deferred[stage] += count
                case "W":
                    deferred[stage] -= count
        return list(found)

    def _groups(self, rank: int) -> Iterable[tuple[Step, int]]:
        """The actions that fine stages run together (`refine`), and how many micro-batches they are."""
        if not self._grouped:
            return ((step, 1) for step in self.steps(rank))
        return ((step, len(list(group))) for step, group in groupby(self.steps(rank)))


def _highest(moments: Sequence[Moment]) -> list[Moment]:
    """The moments that no other one is above, in their order."""
    highest: dict[tuple[int, int] | None, list[Moment]] = {}
    for moment in moments:
        found = highest.setdefault(moment.running, [])  # no other moment is above it
        if not any(other.above(moment) for other in found):
            found[:] = [other for other in found if not moment.above(other)]
            found.append(moment)
    kept = {moment for found in highest.values() for moment in found}
    return [moment for moment in moments if moment in kept]


def at_peak(
    moments: Sequence[Moment],
    fine: Mapping[int, Sequence[int]],
    kept: Mapping[int, Mapping[str, int]],
    deferred: Mapping[int, int],
) -> Counter[Key]:
    """The bytes by fine stage and kind at the first moment with the largest sum.

    `fine` has the fine stages of each stage. For one micro-batch of a fine stage, `kept` has the bytes kept from F to
    its B or I, by kind, and `deferred` those kept from I to W.
    """
    sums = {number: sum(by_kind.values()) for number, by_kind in kept.items()}
    kept_of = {stage: sum(sums[number] for number in numbers) for stage, numbers in fine.items()}
    deferred_of = {stage: sum(deferred[number] for number in numbers) for stage, numbers in fine.items()}
    peak = 0
    at: Moment | None = None
    changed = 0  # fine stages of the running I that are through
    for moment in moments:
        total = sum(moment.kept[s] * kept_of[s] + moment.deferred[s] * deferred_of[s] for s in fine)
        if total > peak:
            peak = total
            at = moment
            changed = 0
        if moment.running is None:
            continue
        stage, count = moment.running
        for done, number in enumerate(reversed(fine[stage]), start=1):
            total += count * (deferred[number] - sums[number])
            if total > peak:
                peak = total
                at = moment
                changed = done
    found: Counter[Key] = Counter()
    if at is None:
        return found
    for stage, numbers in fine.items():
        for position, number in enumerate(numbers):
            live = at.kept[stage]
            waiting = at.deferred[stage]
            if at.running is not None and at.running[0] == stage and position >= len(numbers) - changed:
                live -= at.running[1]
                waiting += at.running[1]
            for kind, nbytes in kept[number].items():
                found[number, kind] += live * nbytes
            found[number, DEFERRED] += waiting * deferred[number]
    return found


def without_repeats(steps: Sequence[Step], pp: int) -> list[Step]:
    """Fewer steps, in which every few steps one after the other of `steps` follow each other as well.

    Of a pattern that repeats, so many repetitions stay that more would show nothing new. `pp` is the number of pipeline
    ranks: schedules repeat after so many micro-batches.
    """
    found = list(steps)
    num_stages = len(set(steps))  # of each kind
    for period in sorted({1, 2, 3, 4, 2 * pp, 3 * pp, pp * num_stages}):
        enough = 1 + -(-WINDOW // period)
        short: list[Step] = []
        position = 0
        while position < len(found):
            pattern = found[position : position + period]
            repeats = 1
            while found[position + repeats * period : position + (repeats + 1) * period] == pattern:
                repeats += 1
            if repeats > enough:
                short += pattern * enough
                position += repeats * period
            else:
                short.append(found[position])
                position += 1
        found = short
    return found
