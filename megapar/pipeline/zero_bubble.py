"""Zero-bubble schedules (Qi et al., arXiv 2401.10241 and 2405.15362): a rank computes weight gradients while it waits.

In 1F1B a rank is idle while it waits for another stage. These schedules cut the backward of a micro-batch in two:

I   the gradient of the stage's input. The stage before waits for it
W   the gradients of the stage's weights. No stage waits for them

A rank then runs a W instead of being idle. `shortest` makes the following schedules. They differ in the placement of
stages, and in the memory of a rank:

zb-h1           one stage on each rank, the memory of 1F1B
zb-2p           one stage on each rank, twice that memory
zb-interleaved  several stages on each rank, placed as in interleaved 1F1B, the memory of 1F1B
zb-v            two stages on each rank, placed in the form of a V, the memory of 1F1B, the same on all ranks
v-half          as zb-v, with about 1/2 of its memory
v-min           as zb-v, with about 1/3 of its memory

It takes the shortest of two kinds of orders. Those of the papers repeat a building block, and idle little whatever the
times are (`megapar.pipeline.blocks`, `megapar.pipeline.zero_bubble_orders`). Those of
`_Filling` are made one action at a time. They fit any placement, limit and times, and are better if micro-batches are
few.

The bound: with p ranks, v stages on each and m micro-batches, ranks idle (p - 1) / (3 v m + p - 1) of a step, if F, I
and W take equally long, transfers take no time and memory is no limit. No schedule idles less, because the last rank
waits for the first micro-batch, and the optimizer's step waits for all ranks.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megapar.base.errors import ConfigError
from megapar.pipeline.actions import Action, Orders, looped, peak, v_shaped
from megapar.pipeline.blocks import v_half, v_min
from megapar.pipeline.makespans import Makespans, Times
from megapar.pipeline.zero_bubble_orders import zb_1p, zb_v


class Durations(NamedTuple):
    """How long an action of each kind takes, in any unit."""

    F: float = 1.0
    I: float = 1.0  # noqa: E741
    W: float = 1.0


@dataclass(frozen=True)
class ScheduleMemory:
    """A rank's limit for the backward passes of its stages, and what each stage keeps for a micro-batch.

    A rank may keep `limit` at one time. `forward[stage]` is kept from F to I. `inputs[stage]` is kept
    from I to W: the inputs and the output gradients of matrix products. All three have the same unit, such as bytes.
    """

    limit: float
    forward: Sequence[float]
    inputs: Sequence[float]

    def least(self, stages: Sequence[int]) -> float:
        """The smallest possible limit of a rank with `stages`.

        It allows one micro-batch in each stage, and then one I.
        """
        return sum(self.forward[stage] for stage in stages) + self.growth(stages)

    def growth(self, stages: Sequence[int]) -> float:
        """The largest growth of the rank's memory by an I of one of these stages.

        It is above 0 with recomputation: a forward then keeps less than a W needs.
        """
        return max(0.0, *(self.inputs[stage] - self.forward[stage] for stage in stages))


def counted_by_stage(microbatches: float, rank_of: Sequence[int]) -> ScheduleMemory:
    """A limit of `microbatches` micro-batches on each rank. The unit is one micro-batch in one stage.

    Every stage counts as keeping the same for a micro-batch, from F to W. `rank_of` is the rank of each stage. The
    limit is at least one micro-batch in each stage of a rank.
    """
    vpp = rank_of.count(0)
    limit = max(vpp, int(microbatches * vpp))
    ones = [1.0] * len(rank_of)
    return ScheduleMemory(limit, ones, ones)


# What a message takes, in forwards of a stage, where it is not known.
_MESSAGE = 0.1

# Where no times are given, orders are judged by all of these. Attention has an I of more than F and no W, recomputation
# adds an F to I, and frozen weights take from W. Orders that are best for equal times and messages of no time alone may
# idle several times as long with the others.
_LIKELY_TIMES = (
    Times(1, 1, 1, 0),
    Times(1, 1, 1, _MESSAGE),
    Times(1, 1.3, 0.7, _MESSAGE),
    Times(1, 1.5, 1, _MESSAGE),
    Times(1, 2, 1, _MESSAGE),
    Times(1, 1, 0.5, _MESSAGE),
)


def shortest(
    rank_of: Sequence[int], num_microbatches: int, memory: ScheduleMemory, durations: Durations | None = None
) -> Orders:
    """The shortest of the orders that keep to `memory`: those of `_Filling`, and those of the papers.

    `rank_of` is the rank of each stage, `durations` is how long actions take. Without `durations` the order is never
    longer than the papers', whichever of `_LIKELY_TIMES` come true. In each stage F, I and W each take the
    micro-batches in ascending order. So the gradients of weights are the same sums, in the same order, as with
    backwards in one piece. Raises ConfigError if `memory` does not hold one micro-batch in each stage of a rank.
    """
    _check_least(rank_of, memory)
    if durations is None:
        times = list(_LIKELY_TIMES)
    else:
        times = [Times(*durations, message=0), Times(*durations, message=_MESSAGE * durations.F)]
    assumed_durations = [Durations()]
    # Orders that are made for equal durations are more regular, and sometimes shorter also with unequal ones.
    if durations is not None and durations != Durations():
        assumed_durations.append(durations)
    filled = []
    for assumed in assumed_durations:
        for rule in _rules(rank_of, memory):
            filled.append(_Filling(rank_of, num_microbatches, memory, assumed, rule).run())
    return _least(_published(rank_of, num_microbatches, memory), filled, rank_of, times)


def _check_least(rank_of: Sequence[int], memory: ScheduleMemory) -> None:
    """Raise ConfigError if `memory` does not hold one micro-batch in each stage of a rank."""
    for rank in range(max(rank_of) + 1):
        stages = [stage for stage, home in enumerate(rank_of) if home == rank]
        if memory.limit < memory.least(stages):
            raise ConfigError(
                f"parallel.schedule_memory_gb={memory.limit / 2**30:g}: does not hold one micro-batch in each stage of "
                f"pipeline rank {rank}, which needs {memory.least(stages) / 2**30:.3g}; allow that much, or use a "
                "smaller train.micro_batch_size"
            )


def _published(rank_of: Sequence[int], num_microbatches: int, memory: ScheduleMemory) -> list[Orders]:
    """The papers' orders for this placement within `memory`. In a V the fullest of them idle least."""

    def fits(orders: Orders) -> bool:
        return all(peak(order, memory.forward, memory.inputs) <= memory.limit for order in orders)

    pp = max(rank_of) + 1
    vpp = len(rank_of) // pp
    if list(rank_of) == looped(pp, vpp):
        # Groups of pp keep least. If they leave a rest, a few more in each may leave none, as in torch's order.
        even = -(-num_microbatches // max(1, num_microbatches // pp))
        return list(filter(fits, [zb_1p(pp, vpp, num_microbatches, group) for group in sorted({pp, even})]))
    if list(rank_of) != v_shaped(pp, 2):
        return []
    return (
        list(filter(fits, [zb_v(pp, vpp, num_microbatches)]))
        or list(filter(fits, v_half(pp, num_microbatches, fits)))
        or list(filter(fits, v_min(pp, num_microbatches, fits)))
    )


def _least(
    published: Sequence[Orders], filled: Sequence[Orders], rank_of: Sequence[int], times: Sequence[Times]
) -> Orders:
    """The orders with the shortest mean makespan. With none of `times` they take longer than the best published ones.

    Published orders were made for the first of `times`: the best are the shortest there, and then on average. Without
    published orders the best of `filled` take their place.
    """
    timed = [(Makespans(orders, rank_of), orders) for orders in (*published, *filled)]
    num_published = sum(found.can_run for found, _ in timed[: len(published)])
    timed = [(found, orders) for found, orders in timed if found.can_run]
    models = [found for found, _ in timed[:num_published] or timed]
    longest = min(([found.of(one) for one in times] for found in models), key=lambda spans: (spans[0], sum(spans)))
    best = timed[0][1]
    least = math.inf
    for found, orders in timed:
        total = 0.0
        for one, limit in zip(times, longest, strict=True):
            makespan = found.of(one)
            if makespan > limit:
                break
            total += makespan
        else:
            if total < least:
                best, least = orders, total
    return best


class _Rule(NamedTuple):
    """When a stage prefers forwards, by how many of its micro-batches are in flight: F has run, and I has not.

    A rank runs the first ready action. If several can start at the same time, a forward runs first with fewer
    than `wanted[stage]` in flight; with more it runs after an I and before a W. With `at_most[stage]` in flight no
    forward runs.
    """

    wanted: Sequence[float]
    at_most: Sequence[float]


def _rules(rank_of: Sequence[int], memory: ScheduleMemory) -> list[_Rule]:
    """The rules to try. None of them is best for all durations and limits."""
    num_stages = len(rank_of)
    vpp = rank_of.count(0)
    # How many stages a micro-batch passes from here to the end of its forward, this one included.
    stages_to_end = [num_stages - stage for stage in range(num_stages)]
    # With one stage on a rank, this is the number of micro-batches in flight of 1F1B.
    as_in_1f1b = [math.ceil(stages / vpp) for stages in stages_to_end]
    backwards_first = [0] * num_stages
    limits = [[math.inf] * num_stages]
    # With one stage on a rank, its share is all that the memory allows anyway.
    if vpp > 1:
        limits.append(_shares(rank_of, memory, stages_to_end))
    rules = []
    for wanted in (as_in_1f1b, stages_to_end, backwards_first):
        for at_most in limits:
            rule = _Rule(wanted, at_most)
            if rule not in rules:
                rules.append(rule)
    return rules


def _shares(rank_of: Sequence[int], memory: ScheduleMemory, stages_to_end: Sequence[int]) -> list[float]:
    """For each stage, how many micro-batches may be in flight if the stages of a rank share its memory.

    The share of a stage is proportional to `stages_to_end`, because a micro-batch is in flight the longer, the
    more stages it has before it. Without shares the first stage of a rank can take the memory of the later ones.
    """
    sum_on_rank = [0] * (max(rank_of) + 1)
    for stage, rank in enumerate(rank_of):
        sum_on_rank[rank] += stages_to_end[stage]
    shares = []
    for stage, rank in enumerate(rank_of):
        if memory.forward[stage] == 0:
            # With full recomputation, a first stage without layers keeps nothing, so it needs no limit.
            shares.append(math.inf)
            continue
        share = memory.limit * stages_to_end[stage] / sum_on_rank[rank]
        shares.append(max(1, math.ceil(share / memory.forward[stage])))
    return shares


_Choice = tuple[float, int, int, int]
"""A candidate for a rank's next action, as (start, preference, rank, minus its stage). The smallest one runs.

The preference is 0 for a forward that is wanted, 1 for an I, 2 for another forward, and 3 for a W. Of equals the later
stage runs, because it is nearer to the end of a micro-batch.
"""
_NONE: _Choice = (math.inf, 0, 0, 0)


@dataclass
class _Rank:
    """The state of one rank: its stages, the later ones first, the time, and what it keeps for backward passes."""

    number: int
    stages: list[int]
    clock: float = 0.0
    kept: float = 0.0
    deferred: deque[Action] = field(default_factory=deque)
    """Each W after its I, the oldest first."""
    order: list[Action] = field(default_factory=list)


class _Filling:
    """Makes one schedule, one action at a time (list scheduling).

    The next action is always the one with the earliest start on any rank. No rank waits while it has an action to run.
    """

    def __init__(
        self, rank_of: Sequence[int], num_microbatches: int, memory: ScheduleMemory, durations: Durations, rule: _Rule
    ):
        self._rank_of = rank_of
        self._num_microbatches = num_microbatches
        self._memory = memory
        self._durations = durations
        self._rule = rule
        self._last_stage = len(rank_of) - 1
        self._ranks = [_Rank(number, []) for number in range(max(rank_of) + 1)]
        for stage, rank in reversed(list(enumerate(rank_of))):
            self._ranks[rank].stages.append(stage)
        # By stage, the times at which its F's and its I's ended, in the order of micro-batches.
        self._forward_ends: list[list[float]] = [[] for _ in rank_of]
        self._backward_ends: list[list[float]] = [[] for _ in rank_of]
        # By stage, the times at which the inputs of its F's and its I's were there. The first stage needs none, and the
        # last stage computes the loss in its forward, so its I follows its own F.
        self._forward_inputs = [[0.0] * num_microbatches, *self._forward_ends[:-1]]
        self._backward_inputs = [*self._backward_ends[1:], self._forward_ends[-1]]
        self._reserved = self._reserved_for_later_stages()

    def run(self) -> Orders:
        choices = [self._choose(rank) for rank in self._ranks]
        while True:
            choice = min(choices)
            if choice is _NONE:
                return [rank.order for rank in self._ranks]
            number = choice[2]
            action = self._do(self._ranks[number], choice)
            choices[number] = self._choose(self._ranks[number])
            # Of the other ranks, the one that takes the result has a choice more.
            if action.kind == "F" and action.stage < self._last_stage:
                taker = self._rank_of[action.stage + 1]
                choices[taker] = min(choices[taker], self._next_forward(self._ranks[taker], action.stage + 1))
            elif action.kind == "I" and action.stage > 0:
                taker = self._rank_of[action.stage - 1]
                choices[taker] = min(choices[taker], self._next_backward(self._ranks[taker], action.stage - 1))

    def _reserved_for_later_stages(self) -> list[float]:
        """For each stage, the memory to leave free after a forward, so its micro-batch can go on to the end.

        That is one forward in each later stage of the same rank, and the growth of one I. So the foremost
        micro-batch always finds room, and ranks cannot deadlock by waiting for each other's memory.
        """
        reserved = []
        for stage, rank in enumerate(self._rank_of):
            stages = self._ranks[rank].stages
            later_forwards = sum(self._memory.forward[other] for other in stages if other > stage)
            reserved.append(later_forwards + self._memory.growth(stages))
        return reserved

    def _choose(self, rank: _Rank) -> _Choice:
        """The next action of the rank. `_NONE` if none has both its input and its memory."""
        best = _NONE
        if rank.deferred:
            best = (rank.clock, 3, rank.number, 0)
        for preference, next_of in ((0, self._next_forward), (1, self._next_backward)):
            for stage in rank.stages:
                choice = next_of(rank, stage)
                if choice < best:
                    best = choice
                    # None of those that follow starts earlier, or is preferred, or is of a later stage.
                    if best[1] == preference and best[0] == rank.clock:
                        return best
        return best

    def _next_backward(self, rank: _Rank, stage: int) -> _Choice:
        """The next I of the stage. `_NONE` if it cannot run yet."""
        microbatch = len(self._backward_ends[stage])
        inputs = self._backward_inputs[stage]
        if len(inputs) <= microbatch:
            return _NONE
        kept = rank.kept - self._memory.forward[stage] + self._memory.inputs[stage]
        if kept > self._memory.limit:
            return _NONE  # a W must run first; there is one, because each forward has left room for the growth of an I
        return max(inputs[microbatch], rank.clock), 1, rank.number, -stage

    def _next_forward(self, rank: _Rank, stage: int) -> _Choice:
        """The next F of the stage. `_NONE` if it cannot run yet, or if the rule does not let it run."""
        microbatch = len(self._forward_ends[stage])
        inputs = self._forward_inputs[stage]
        if len(inputs) <= microbatch:
            return _NONE
        if rank.kept + self._memory.forward[stage] + self._reserved[stage] > self._memory.limit:
            return _NONE
        in_flight = microbatch - len(self._backward_ends[stage])
        if in_flight >= self._rule.at_most[stage]:
            return _NONE
        preference = 0 if in_flight < self._rule.wanted[stage] else 2
        return max(inputs[microbatch], rank.clock), preference, rank.number, -stage

    def _do(self, rank: _Rank, choice: _Choice) -> Action:
        """Append the chosen action to the rank's order, and update the rank's time and memory."""
        start, preference, _, minus_stage = choice
        stage = -minus_stage
        if preference == 3:
            action = rank.deferred.popleft()
            rank.clock = start + self._durations.W
            rank.kept -= self._memory.inputs[action.stage]
        elif preference == 1:
            action = Action("I", stage, len(self._backward_ends[stage]))
            rank.clock = start + self._durations.I
            self._backward_ends[stage].append(rank.clock)
            rank.kept += self._memory.inputs[stage] - self._memory.forward[stage]
            rank.deferred.append(Action("W", stage, action.microbatch))
        else:
            action = Action("F", stage, len(self._forward_ends[stage]))
            rank.clock = start + self._durations.F
            self._forward_ends[stage].append(rank.clock)
            rank.kept += self._memory.forward[stage]
        rank.order.append(action)
        return action
