"""Zero-bubble orders, the same for all times and limits: those of DualPipe-V, of ZB-V and of ZB-1P.

I and W are the two halves of a backward pass (see `megapar.pipeline.zero_bubble`). Each function returns the actions
of each pipeline rank.
"""

from collections import deque
from collections.abc import Sequence

from megapar.pipeline.actions import Action, Kind, Orders


class _RankOrder:
    """The growing order of one rank. The micro-batches of a stage follow by themselves."""

    def __init__(self, stages: Sequence[int]):
        self._order: list[Action] = []
        # By stage: the micro-batch of its next F, and that of its next B or I.
        self._next_forward = dict.fromkeys(stages, 0)
        self._next_backward = dict.fromkeys(stages, 0)
        self._deferred: deque[Action] = deque()  # each W whose I has been added, the oldest first

    def add(self, kind: Kind, stage: int) -> None:
        """Add the F, B or I of the next micro-batch through `stage`."""
        # B and I count as one sequence, because a micro-batch has either a B or an I in a stage.
        next_microbatch = self._next_forward if kind == "F" else self._next_backward
        microbatch = next_microbatch[stage]
        next_microbatch[stage] += 1
        self._order.append(Action(kind, stage, microbatch))
        if kind == "I":
            self._deferred.append(Action("W", stage, microbatch))

    def add_weights(self, stage: int | None = None) -> None:
        """Add the oldest W that was deferred, in `stage` if one is given."""
        for action in self._deferred:
            if stage in (None, action.stage):
                self._deferred.remove(action)
                self._order.append(action)
                return

    def add_all_weights(self, stage: int | None = None) -> None:
        """Add all W's that were deferred, the oldest first, of `stage` if one is given."""
        for _ in range(len(self._deferred)):
            self.add_weights(stage)

    def finished(self) -> list[Action]:
        """The order. Raises ValueError if a W is missing."""
        if self._deferred:
            raise ValueError(f"no place for {self._deferred[0]}")
        return self._order


def zb_1p(pp: int, vpp: int, num_microbatches: int, group: int) -> Orders:
    """Interleaved 1F1B with backwards in halves, and each W deferred by as many I's as its rank's number (ZB-1P).

    It is the order of torch's ScheduleInterleavedZeroBubble (Qi et al., arXiv 2401.10241). With one stage on each rank
    it is ZB-H1. Groups of `group` micro-batches go through the stages of a rank. If the last group is not full, the
    actions of the missing micro-batches are left out. A valid order stays valid without all actions of a micro-batch.
    """
    orders = []
    rounds = -(-num_microbatches // group)
    for rank in range(pp):
        stages = range(rank, pp * vpp, pp)
        rank_order = _RankOrder(stages)
        forwards = [stage for stage in stages for _ in range(group)] * rounds
        inputs = [stage for stage in reversed(stages) for _ in range(group)] * rounds
        # The first group goes through all stages of the rank but the last. Each later rank needs one forward more.
        warm_up = (vpp - 1) * group + pp - 1 - rank
        for stage in forwards[:warm_up]:
            rank_order.add("F", stage)
        for number, stage in enumerate(inputs):
            if warm_up + number < len(forwards):
                rank_order.add("F", forwards[warm_up + number])
            rank_order.add("I", stage)
            if number >= rank:
                rank_order.add_weights()
        rank_order.add_all_weights()
        orders.append([action for action in rank_order.finished() if action.microbatch < num_microbatches])
    return orders


def zb_v(pp: int, vpp: int, num_microbatches: int) -> Orders:
    """ZB-V with the memory of 1F1B (Qi et al., arXiv 2405.15362), as torch's ScheduleZBVZeroBubble runs it.

    It is made for at least 2 * pp - 1 micro-batches. For fewer, the actions of the missing ones are left out.
    A valid order stays valid without all actions of a micro-batch. `vpp` is 2. A rank keeps up to pp micro-batches.
    """
    orders = []
    for rank in range(pp):
        order = _zb_v_of_rank(rank, pp, max(num_microbatches, 2 * pp - 1))
        orders.append([action for action in order if action.microbatch < num_microbatches])
    return orders


def _zb_v_of_rank(rank: int, pp: int, num_microbatches: int) -> list[Action]:
    """The actions of one rank for at least 2 * pp - 1 micro-batches."""
    first = rank
    second = 2 * pp - 1 - rank
    order = _RankOrder((first, second))
    forwards_left = num_microbatches

    # 1. Forwards of the first half, until the first micro-batch comes back from the turn of the V.
    for _ in range(2 * (pp - rank) - 1):
        order.add("F", first)
        forwards_left -= 1
    # 2. Forwards of both halves, until the first gradient comes.
    for _ in range(rank):
        order.add("F", second)
        order.add("F", first)
        forwards_left -= 1
    # 3. Backwards of the second half, until the first gradient comes back through the first rank.
    for _ in range(pp - rank):
        order.add("F", second)
        order.add("I", second)
        order.add_weights()
    # 4. The steady part: a forward and a backward of each half in turn.
    for _ in range(num_microbatches - pp):
        if forwards_left:
            order.add("F", first)
            forwards_left -= 1
        order.add("I", first)
        order.add_weights()
        order.add("F", second)
        order.add("I", second)
        order.add_weights()
    # 5. No forwards are left. W's are deferred, to fill what would be idle in 6.
    for _ in range(rank):
        order.add("I", first)
        order.add("I", second)
    # 6. The last backwards of the first half, and its oldest W's. Those of the second half come after them.
    for _ in range(pp - rank):
        order.add("I", first)
        order.add_weights(first)
    order.add_all_weights(second)
    order.add_all_weights(first)
    return order.finished()


def dualpipe_v(pp: int, vpp: int, num_microbatches: int) -> Orders:
    """DualPipe-V of DeepSeek (github.com/deepseek-ai/DualPipe): a V; its middle alternates F and B of its two halves.

    It is made for at least 2 * pp micro-batches. For fewer, it is made for 2 * pp, and the actions of the missing
    micro-batches are left out. A valid order stays valid without all actions of a micro-batch. `vpp` is 2. A rank
    keeps up to pp + 1/2 micro-batches. DeepSeek runs a forward and the backward after it at the same time. Here they
    run one after the other.
    """
    orders = []
    for rank in range(pp):
        one_rank = _DualPipeRank(first_stage=rank, second_stage=2 * pp - 1 - rank)
        order = one_rank.order(pp, max(num_microbatches, 2 * pp))
        orders.append([action for action in order if action.microbatch < num_microbatches])
    return orders


class _DualPipeRank(_RankOrder):
    """Makes the order of one rank, with `first_stage` in the first half of the V, `second_stage` in the second."""

    def __init__(self, first_stage: int, second_stage: int):
        super().__init__((first_stage, second_stage))
        self._first_stage = first_stage
        self._second_stage = second_stage

    def order(self, pp: int, num_microbatches: int) -> list[Action]:
        """The actions of the rank, in the eight phases of DeepSeek's code."""
        first = self._first_stage
        second = self._second_stage
        rank = first
        later_ranks = pp - rank - 1
        # 1. Forwards of the first half, until the first micro-batch comes back from the turn of the V.
        for _ in range(2 * later_ranks):
            self.add("F", first)
        # 2. Forwards of both halves.
        for _ in range(rank + 1):
            self.add("F", first)
            self.add("F", second)
        # 3. The first backwards of the second half. The W's fill what would be idle.
        for _ in range(later_ranks):
            self.add("I", second)
            self.add_weights()
            self.add("F", second)
        # 4. The main phase.
        for _ in range(num_microbatches - 2 * pp + rank + 1):
            self.add("F", first)
            self.add("B", second)
            self.add("F", second)
            self.add("B", first)
        # 5. The first half has no forwards left.
        for _ in range(later_ranks):
            self.add("B", second)
            self.add("F", second)
            self.add("B", first)
        # 6. Backwards alone. In the second half of this phase the W's are deferred, to fill what would be idle in 7.
        for number in range(2 * (rank + 1)):
            kind: Kind = "B" if number < rank + 1 else "I"
            self.add(kind, second if number % 2 == 0 else first)
        # 7. The last backwards of the first half, and W's that were deferred.
        for _ in range(later_ranks):
            self.add_weights()
            self.add("I", first)
        # 8. The remaining W's.
        for _ in range(rank + 1):
            self.add_weights()
        return self._order
