"""Zero-bubble schedules (Qi et al., arXiv 2401.10241 and 2405.15362): gradients of weights fill what would be idle.

A rank that waits for the stage after it, or before it, has nothing to do in 1F1B. The backward of a micro-batch is
therefore cut in two: I, the gradient of the stage's input, which the stage before waits for, and W, the gradients of
weights, which nobody waits for. `fill` decides where the W's go. All of these schedules come from it. They differ in
where stages live and in how much memory they may use:

zb-h1           one stage on each rank, the memory of 1F1B
zb-2p           one stage on each rank, twice that memory
zb-interleaved  several stages on each rank, as in interleaved 1F1B, the memory of 1F1B
zb-v            two stages on each rank in the form of a V, the memory of 1F1B, which all ranks use alike
v-half, v-min   the same with about 1/2 and 1/3 of the memory

If F, I and W take equally long, transfers take no time and memory is no limit, ranks idle (p - 1) / (3 v m + p - 1) of
a step (p ranks, v stages on each, m micro-batches). No schedule idles less: the last rank waits for the first
micro-batch, and the optimizer's step waits for all ranks.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megapar.errors import ConfigError
from megapar.pipeline.actions import Action, Kind, Orders
from megapar.pipeline.lowering import length


class Durations(NamedTuple):
    """How long an action of each kind takes, in any unit."""

    F: float = 1.0
    I: float = 1.0  # noqa: E741
    W: float = 1.0


@dataclass(frozen=True)
class Memory:
    """What a rank may keep for the backward passes of its stages.

    `limit` is the most at one time. `forward` is, for each stage, what a forward keeps until its I. `inputs` is what
    is then kept until W: the inputs and the output gradients of matrix products. All are in bytes, or all in any other
    unit.
    """

    limit: float
    forward: Sequence[float]
    inputs: Sequence[float]

    def least(self, stages: Sequence[int]) -> float:
        """The smallest limit with which a rank with `stages` can run: one micro-batch in each stage, and one I."""
        return sum(self.forward[stage] for stage in stages) + self.growth(stages)

    def growth(self, stages: Sequence[int]) -> float:
        """By how much an I may raise what is kept. With recomputation a forward keeps less than a W needs."""
        return max(0.0, *(self.inputs[stage] - self.forward[stage] for stage in stages))


def counted_by_stage(microbatches: float, place: Sequence[int]) -> Memory:
    """A memory of so many micro-batches on each rank, where every stage keeps the same for a micro-batch until its W.

    A limit below one micro-batch in each stage is raised to that.
    """
    vpp = place.count(0)
    ones = [1.0] * len(place)
    return Memory(max(vpp, int(microbatches * vpp)), ones, ones)


def fill(place: Sequence[int], num_microbatches: int, memory: Memory, durations: Durations) -> Orders:
    """The shortest of the schedules that a few rules for forwards give, where actions take `durations`.

    `place` is the rank of each stage. Micro-batches go through each stage in ascending order, in F, in I and in W, so
    the gradients of weights are the same sums in the same order as those of B. Raises ConfigError if `memory` does not
    hold one micro-batch in each stage of a rank. O(stages * micro-batches * ranks).
    """
    for rank in range(max(place) + 1):
        stages = [stage for stage, home in enumerate(place) if home == rank]
        if memory.limit < memory.least(stages):
            raise ConfigError(
                f"parallel.schedule_memory_gb={memory.limit / 2**30:g}: does not hold one micro-batch in each stage of "
                f"pipeline rank {rank}, which needs {memory.least(stages) / 2**30:.3g}; allow that much, or use a "
                "smaller train.micro_batch_size"
            )
    # An order that is made for equal times has more regular rounds. With other times it is shorter now and then.
    made_for = dict.fromkeys((durations, Durations()))
    made = [
        _Filling(place, num_microbatches, memory, times, rule).run()
        for times in made_for
        for rule in _rules(place, memory)
    ]
    cost = durations._asdict()
    # Messages that take a little time tell orders that wait for many of them from orders that wait for few.
    message = durations.F / 64
    return min(made, key=lambda orders: length(orders, len(place), cost, message))


class _Rule(NamedTuple):
    """When a stage prefers forwards, as numbers of its micro-batches in flight: those whose I has not run.

    With fewer than `wanted[stage]` a forward comes before anything else. With `most[stage]` no forward runs.
    """

    wanted: Sequence[float]
    most: Sequence[float]


def _rules(place: Sequence[int], memory: Memory) -> list[_Rule]:
    """The rules that are tried. None of them is best for all durations and limits."""
    num_stages = len(place)
    vpp = place.count(0)
    to_the_end = [num_stages - stage for stage in range(num_stages)]
    as_1f1b = [-(-steps // vpp) for steps in to_the_end]
    backwards_first = [0] * num_stages
    # A micro-batch is in flight the longer, the farther its stage is from the end. If the stages of a rank share its
    # memory accordingly, the first of them cannot take what the later ones need.
    shares = []
    for stage, home in enumerate(place):
        steps_of_rank = sum(to_the_end[other] for other, rank in enumerate(place) if rank == home)
        share = memory.limit * to_the_end[stage] / steps_of_rank
        # Recomputation of everything keeps nothing for a first stage without layers, which gets no limit.
        shares.append(max(1, math.ceil(share / memory.forward[stage])) if memory.forward[stage] else math.inf)
    unlimited = [math.inf] * num_stages
    return [_Rule(wanted, most) for wanted in (as_1f1b, to_the_end, backwards_first) for most in (unlimited, shares)]


class _Choice(NamedTuple):
    """Something that a rank could do next. The least one is done: the earliest, then by `preference`."""

    start: float
    preference: int
    minus_stage: int  # of equals, the later stage: it is nearer to the end of a micro-batch
    action: Action


@dataclass
class _Rank:
    """The state of one rank: its stages, the time, what it keeps, and the W's that it has put off, oldest first."""

    stages: list[int]
    clock: float = 0.0
    kept: float = 0.0
    waiting: deque[Action] = field(default_factory=deque)
    order: list[Action] = field(default_factory=list)


class _Filling:
    """One schedule in the making. Always the rank that can start something first does so, and no rank ever waits while
    it has something to do."""

    def __init__(self, place: Sequence[int], num_microbatches: int, memory: Memory, durations: Durations, rule: _Rule):
        self._place = place
        self._num_microbatches = num_microbatches
        self._memory = memory
        self._durations = durations
        self._rule = rule
        self._last_stage = len(place) - 1
        ranks = range(max(place) + 1)
        self._ranks = [_Rank([stage for stage, home in enumerate(place) if home == rank]) for rank in ranks]
        # When the forwards and the I's of each stage ended, in the order of micro-batches.
        self._forward_ends: list[list[float]] = [[] for _ in place]
        self._backward_ends: list[list[float]] = [[] for _ in place]
        self._room = self._room_for_later_stages()

    def run(self) -> Orders:
        choices = [self._choose(rank) for rank in self._ranks]
        while any(choices):
            number = min((choice[:2], n) for n, choice in enumerate(choices) if choice)[1]
            choice = choices[number]
            assert choice is not None
            self._do(self._ranks[number], choice)
            # A new result is new to this rank and to the one that takes it. All other ranks can do what they could.
            stage = choice.action.stage
            for other in {number, *(self._place[s] for s in (stage - 1, stage + 1) if 0 <= s <= self._last_stage)}:
                choices[other] = self._choose(self._ranks[other])
        return [rank.order for rank in self._ranks]

    def _room_for_later_stages(self) -> list[float]:
        """For each stage, what must stay free after a forward, so that its micro-batch can go on to the end.

        That is one forward in each later stage of the same rank, and the growth of one I. So the micro-batch that has
        come furthest always finds room, and no circle of ranks can wait for room on each other.
        """
        room = []
        for stage, home in enumerate(self._place):
            stages = self._ranks[home].stages
            later = sum(self._memory.forward[other] for other in stages if other > stage)
            room.append(later + self._memory.growth(stages))
        return room

    def _choose(self, rank: _Rank) -> _Choice | None:
        """The best of what the rank can do next. None if every next action waits for one that is not yet made."""
        choices = []
        for stage in rank.stages:
            choices += self._backward(rank, stage)
            choices += self._forward(rank, stage)
        if rank.waiting:
            choices.append(_Choice(rank.clock, 3, 0, rank.waiting[0]))
        return min(choices, default=None)

    def _backward(self, rank: _Rank, stage: int) -> list[_Choice]:
        microbatch = len(self._backward_ends[stage])
        source = self._forward_ends[stage] if stage == self._last_stage else self._backward_ends[stage + 1]
        if len(source) <= microbatch:
            return []
        kept = rank.kept - self._memory.forward[stage] + self._memory.inputs[stage]
        if kept > self._memory.limit:
            return []  # a W comes first: there is one, because a forward leaves room for the growth of an I
        return [_Choice(max(source[microbatch], rank.clock), 1, -stage, Action("I", stage, microbatch))]

    def _forward(self, rank: _Rank, stage: int) -> list[_Choice]:
        microbatch = len(self._forward_ends[stage])
        if microbatch == self._num_microbatches:
            return []
        arrival = 0.0
        if stage > 0:
            source = self._forward_ends[stage - 1]
            if len(source) <= microbatch:
                return []
            arrival = source[microbatch]
        if rank.kept + self._memory.forward[stage] + self._room[stage] > self._memory.limit:
            return []
        in_flight = microbatch - len(self._backward_ends[stage])
        if in_flight >= self._rule.most[stage]:
            return []
        preference = 0 if in_flight < self._rule.wanted[stage] else 2
        return [_Choice(max(arrival, rank.clock), preference, -stage, Action("F", stage, microbatch))]

    def _do(self, rank: _Rank, choice: _Choice) -> None:
        action = choice.action
        rank.clock = choice.start + getattr(self._durations, action.kind)
        rank.order.append(action)
        if action.kind == "F":
            self._forward_ends[action.stage].append(rank.clock)
            rank.kept += self._memory.forward[action.stage]
        elif action.kind == "I":
            self._backward_ends[action.stage].append(rank.clock)
            rank.kept += self._memory.inputs[action.stage] - self._memory.forward[action.stage]
            rank.waiting.append(Action("W", action.stage, action.microbatch))
        else:
            rank.waiting.popleft()
            rank.kept -= self._memory.inputs[action.stage]


def dualpipe_v(pp: int, vpp: int, num_microbatches: int) -> Orders:
    """DeepSeek's DualPipe-V (github.com/deepseek-ai/DualPipe): a V whose middle alternates F and B of its two halves.

    It is made for 2 * pp micro-batches or more. For fewer, the actions of micro-batches that do not exist are left out.
    A valid order stays valid without all actions of a micro-batch. `vpp` is 2. Rank r keeps up to pp + 1/2
    micro-batches. DualPipe-V overlaps a forward with the backward after it. Here they run one after the other.
    """
    orders = []
    for rank in range(pp):
        order = _DualPipeRank(rank, 2 * pp - 1 - rank).order(pp, max(num_microbatches, 2 * pp))
        orders.append([action for action in order if action.microbatch < num_microbatches])
    return orders


class _DualPipeRank:
    """The order of one rank. `down` is its stage in the first half of the V, `up` the one in the second half."""

    def __init__(self, down: int, up: int):
        self._down = down
        self._up = up
        self._order: list[Action] = []
        self._next: dict[tuple[str, int], int] = {}
        self._waiting: deque[Action] = deque()

    def order(self, pp: int, num_microbatches: int) -> list[Action]:
        """The eight phases of DualPipe-V."""
        rank = self._down
        later = pp - rank - 1  # ranks between this one and the turn of the V
        for _ in range(2 * later):
            self._add("F", self._down)
        for _ in range(rank + 1):
            self._add("F", self._down)
            self._add("F", self._up)
        for _ in range(later):
            self._add("I", self._up)
            self._run_weights()
            self._add("F", self._up)
        for _ in range(num_microbatches - 2 * pp + rank + 1):
            self._add("F", self._down)
            self._add("B", self._up)
            self._add("F", self._up)
            self._add("B", self._down)
        for _ in range(later):
            self._add("B", self._up)
            self._add("F", self._up)
            self._add("B", self._down)
        # In the second half of this phase, weights are put off to fill what would be idle in the next one.
        for i in range(2 * (rank + 1)):
            kind: Kind = "B" if i < rank + 1 else "I"
            self._add(kind, self._up if i % 2 == 0 else self._down)
        for _ in range(later):
            self._run_weights()
            self._add("I", self._down)
        for _ in range(rank + 1):
            self._run_weights()
        return self._order

    def _add(self, kind: Kind, stage: int) -> None:
        # I and B are one sequence: each micro-batch goes back through a stage once.
        sequence = ("forward" if kind == "F" else "backward", stage)
        microbatch = self._next.get(sequence, 0)
        self._next[sequence] = microbatch + 1
        self._order.append(Action(kind, stage, microbatch))
        if kind == "I":
            self._waiting.append(Action("W", stage, microbatch))

    def _run_weights(self) -> None:
        self._order.append(self._waiting.popleft())
