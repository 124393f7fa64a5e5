"""V-Half and V-Min (Qi et al., arXiv 2405.15362): schedules made of a repeated building block.

A building block gives each action of one micro-batch a slot. A slot is the time of one action. The block of
the next micro-batch is the same, 6 slots later, because each rank has 6 actions for a micro-batch: F, I and W in each
of its two stages. No two actions may meet in a slot of a rank. V-Min on four ranks; small letters are the second stage
of a rank, on the way back through the V:

    slot    0                   1
            0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6
    rank 0  F . . . . . . f i w . . . . . I W
    rank 1  . F . . . . f . . i w . . . I W .
    rank 2  . . F . . f . . . . i w . I W . .
    rank 3  . . . F f . . . . . . i I w W . .

A rank keeps the micro-batch from F to W. So the block decides how much all ranks keep. V-Half has
the same form. Its F's and i's take two slots for each rank, so it keeps more, and waits for each other less.

The orders are made as in the paper:

1. The block is repeated. W's take the free slots.
2. Between the first I of the first stage and its last F nothing changes. Before that, actions move to earlier free
   slots if the rank then keeps no more. After that, F's and I's move, and take the slots of W's too.

This fills idle time before the first block and after the last one. The papers do not name the best way, so several are
tried: `v_half` and `v_min` return a few orders, and the caller takes the shortest.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megapar.pipeline.actions import Action, Kind, Orders, v_shaped

PERIOD = 6
"""Slots from one micro-batch to the next: the actions of two stages, F, I and W each."""

# How many slots after the first I of the first stage actions stop moving to earlier slots. None is best for all sizes.
_LATER_STARTS = (0, 1, 2, 4, 12)


class MicroBatchSlots(NamedTuple):
    """The slots of one micro-batch: of its F and its I, by stage. W's take free slots."""

    forward: Sequence[int]
    inputs: Sequence[int]


def v_half(pp: int, num_microbatches: int, fits: Callable[[Orders], bool]) -> Iterator[Orders]:
    """Yield orders with about half the memory of 1F1B: pp + 1 stages of micro-batches if pp is odd, else pp + 2.

    Blocks are left out if their orders do not fit before their actions move. After that an order may keep more.
    """
    blocks = []
    for wait in (0, 3):
        forward = [2 * rank for rank in range(pp)] + [2 * pp - 1 + back for back in range(pp)]
        turn = 3 * pp + wait - 1
        inputs = [turn + 3 * pp - 1 - rank for rank in range(pp)] + [turn + 2 * (pp - 1 - back) for back in range(pp)]
        blocks.append(MicroBatchSlots(forward, inputs))
    yield from _orders(blocks, pp, num_microbatches, fits)


def v_min(pp: int, num_microbatches: int, fits: Callable[[Orders], bool]) -> Iterator[Orders]:
    """Yield orders with about a third of the memory of 1F1B: 2 * ((pp + 1) // 3) + 2 stages of micro-batches.

    Some keep 2 more. `fits` is as with `v_half`.
    """
    blocks = []
    for wait in (0, 2, 4):
        forward = list(range(2 * pp))
        turn = 2 * pp + wait
        inputs = [turn + 2 * pp - 1 - stage for stage in range(2 * pp)]
        blocks.append(MicroBatchSlots(forward, inputs))
    yield from _orders(blocks, pp, num_microbatches, fits)


def _orders(
    blocks: Sequence[MicroBatchSlots], pp: int, num_microbatches: int, fits: Callable[[Orders], bool]
) -> Iterator[Orders]:
    """Yield the orders of the fitting blocks without two actions in one slot."""
    rank_of = v_shaped(pp, 2)
    for block in blocks:
        if _meets_itself(block, rank_of):
            continue
        grid = _Grid(block, rank_of, num_microbatches)
        if not fits(grid.orders()):
            continue
        grid.squeeze()
        yield grid.orders()
        for later_start, more in _variants(pp, num_microbatches):
            orders = _reordered(block, rank_of, num_microbatches + more, later_start)
            yield [[action for action in order if action.microbatch < num_microbatches] for order in orders]


def _meets_itself(block: MicroBatchSlots, rank_of: Sequence[int]) -> bool:
    """Whether two actions of a rank run in the same slot, once the block is repeated."""
    taken = set()
    for slots in block:
        taken |= {(rank, slot % PERIOD) for rank, slot in zip(rank_of, slots, strict=True)}
    return len(taken) < 2 * len(rank_of)


def _variants(pp: int, num_microbatches: int) -> list[tuple[int, int]]:
    """How much later the steady part starts, and for how many micro-batches more an order is made.

    The actions of those micro-batches are left out again. With few micro-batches the blocks never get going, and then
    an order for more of them may be shorter.
    """
    variants = [(later_start, 0) for later_start in _LATER_STARTS]
    if num_microbatches < 2 * pp:
        variants.append((-PERIOD, 0))
        for more in sorted({1, pp // 2, 2 * pp - num_microbatches} - {0}):
            variants += [(0, more), (2, more)]
    return variants


def _reordered(block: MicroBatchSlots, rank_of: Sequence[int], num_microbatches: int, later_start: int) -> Orders:
    """The repeated block. Before and after its steady part, actions have moved to earlier slots."""
    # So many have a steady part, of which more are copies.
    few = min(num_microbatches, 2 * max(rank_of) + 10)
    grid = _Grid(block, rank_of, few)
    grid.reorder(later_start)
    end = _end_of_steady_part(grid.slots)
    if few < num_microbatches and end is None:
        grid = _Grid(block, rank_of, num_microbatches)
        grid.reorder(later_start)
    elif few < num_microbatches and end is not None:
        grid.slots = _repeat_period_before(grid.slots, end, num_microbatches - few)
    return grid.orders()


class _Grid:
    """The blocks of all micro-batches on a grid of ranks and slots: `slots` has the slot of each action."""

    def __init__(self, block: MicroBatchSlots, rank_of: Sequence[int], num_microbatches: int):
        self._rank_of = rank_of
        self._num_ranks = max(rank_of) + 1
        self._num_microbatches = num_microbatches
        self.slots = _slots_of_forwards_and_inputs(block, num_microbatches)
        self._num_slots = 2 * max(self.slots.values()) + PERIOD  # W's may run after the last block
        self._put_weights()
        self._limit = max(int(self._kept(rank).max()) for rank in range(self._num_ranks))

    def reorder(self, later_start: int) -> None:
        """Move actions before and after the steady part to earlier slots. No rank keeps more than one does now."""
        first = self.slots[Action("I", 0, 0)] + later_start
        last = self.slots[Action("F", 0, self._num_microbatches - 1)]
        self._move_to_free_slots(first, last)
        self._move_to_slots_of_weights(max(first, last))
        self._put_weights()

    def squeeze(self) -> None:
        """Run all actions anew: in each slot a rank runs the ready action with the earliest old slot.

        F's keep their order on a rank, so no early one takes the memory of a later stage. After the last F of the first
        stage, W's run only on otherwise idle ranks.
        """
        last = self.slots[Action("F", 0, self._num_microbatches - 1)]
        priority = {}
        queues: list[dict[tuple[Kind, int], deque[Action]]] = [{} for _ in range(self._num_ranks)]
        for action in self._in_order_of_slots():
            slot = self.slots[action]
            priority[action] = slot + (self._num_slots if action.kind == "W" and slot > last else 0)
            queue = (action.kind, action.stage if action.kind == "I" else 0)
            queues[self._rank_of[action.stage]].setdefault(queue, deque()).append(action)
        self.slots = {}
        kept = [0] * self._num_ranks
        slot = 0
        while len(self.slots) < len(priority):
            for rank, queues_of_rank in enumerate(queues):
                heads = [(priority[queue[0]], key) for key, queue in queues_of_rank.items() if queue]
                for _, key in sorted(heads):
                    action = queues_of_rank[key][0]
                    if action.kind == "F" and kept[rank] >= self._limit:
                        continue
                    if self._can_start(action, slot):
                        queues_of_rank[key].popleft()
                        self.slots[action] = slot
                        kept[rank] += {"F": 1, "I": 0, "W": -1}[action.kind]
                        break
            slot += 1
            assert slot < 2 * self._num_slots  # no action ends later than before by more than the W's that it passes

    def orders(self) -> Orders:
        """The actions of each rank, in the order of their slots."""
        orders: Orders = [[] for _ in range(self._num_ranks)]
        for action in sorted(self.slots, key=self.slots.__getitem__):
            orders[self._rank_of[action.stage]].append(action)
        return orders

    def _put_weights(self) -> None:
        """Put all W's into the slots left by F's and I's, each as early as possible, in the order of their I's."""
        for rank in range(self._num_ranks):
            by_slot = {}
            for action, slot in self.slots.items():
                if self._rank_of[action.stage] == rank and action.kind != "W":
                    by_slot[slot] = action
            self.slots.update(_free_slots_for_weights(by_slot))

    def _kept(self, rank: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """What the rank keeps after each slot, in stages of micro-batches."""
        change = np.zeros(self._num_slots, np.int64)
        for action, slot in self.slots.items():
            if self._rank_of[action.stage] == rank:
                change[slot] += {"F": 1, "I": 0, "W": -1}[action.kind]
        return change.cumsum()

    def _can_start(self, action: Action, slot: int) -> bool:
        """Whether all the action depends on has a slot before this one."""
        return all(self.slots.get(other, slot) < slot for other in _inputs_of(action, len(self._rank_of)))

    def _after_its_inputs(self, action: Action) -> int:
        """The first slot after all the action depends on."""
        return 1 + max((self.slots[other] for other in _inputs_of(action, len(self._rank_of))), default=-1)

    def _in_order_of_slots(self) -> list[Action]:
        return sorted(self.slots, key=lambda action: (self.slots[action], self._rank_of[action.stage]))

    def _move_to_free_slots(self, first: int, last: int) -> None:
        """Move each action before slot `first` or after slot `last` to the earliest free slot, but no F that raises
        its rank's peak."""
        kept = [self._kept(rank) for rank in range(self._num_ranks)]
        free = np.ones((self._num_ranks, self._num_slots), bool)
        for action in self._in_order_of_slots():
            slot = self.slots[action]
            rank = self._rank_of[action.stage]
            if not first <= slot < last:
                begin = self._after_its_inputs(action)
                if action.kind == "F":
                    full = np.flatnonzero(kept[rank][begin:slot] >= self._limit)
                    begin += int(full[-1]) + 1 if len(full) else 0
                slot = begin + int(free[rank, begin:slot].argmax()) if free[rank, begin:slot].any() else slot
                self._move(action, slot, kept[rank])
            free[rank, slot] = False

    def _move(self, action: Action, slot: int, kept: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
        """Move the action to an earlier slot, and count what its rank keeps from there on."""
        kept[slot : self.slots[action]] += {"F": 1, "I": 0, "W": -1}[action.kind]
        self.slots[action] = slot

    def _move_to_slots_of_weights(self, last: int) -> None:
        """Move each F and I after slot `last` to the earliest slot without another F or I. W's are left out then."""
        for action in [action for action in self.slots if action.kind == "W"]:
            del self.slots[action]
        taken: list[dict[int, Action]] = [{} for _ in range(self._num_ranks)]
        for action, slot in self.slots.items():
            taken[self._rank_of[action.stage]][slot] = action
        for action in self._in_order_of_slots():
            slot = self.slots[action]
            if slot < last:
                continue
            row = taken[self._rank_of[action.stage]]
            del row[slot]
            for earlier in range(self._after_its_inputs(action), slot):
                if earlier not in row and _most_kept({**row, earlier: action}, self._num_slots) <= self._limit:
                    slot = earlier
                    break
            row[slot] = action
            self.slots[action] = slot


def _inputs_of(action: Action, num_stages: int) -> list[Action]:
    """What the action depends on: the producer of its input, and its own kind for the micro-batch before."""
    kind, stage, microbatch = action
    before = [Action(kind, stage, microbatch - 1)] if microbatch else []
    if kind == "F" and stage > 0:
        before.append(Action("F", stage - 1, microbatch))
    elif kind == "I":
        before.append(Action("I", stage + 1, microbatch) if stage < num_stages - 1 else Action("F", stage, microbatch))
    elif kind == "W":
        before.append(Action("I", stage, microbatch))
    return before


def _most_kept(row: Mapping[int, Action], num_slots: int) -> int:
    """The peak of a rank with these F's and I's by slot, if each W runs as early as possible."""
    forwards = np.zeros(num_slots, np.int64)
    inputs = np.zeros(num_slots, np.int64)
    for slot, action in row.items():
        (forwards if action.kind == "F" else inputs)[slot] = 1
    free = (1 - forwards - inputs).cumsum()
    # The number of W's grows with each free slot, except that it cannot pass that of I's.
    weights = free + np.minimum(0, np.minimum.accumulate(inputs.cumsum() - free))
    return int((forwards.cumsum() - weights).max())


def _end_of_steady_part(slots: Mapping[Action, int]) -> int | None:
    """Return the last slot before which each rank repeats a period exactly. None if there is none."""
    by_slot: dict[int, set[Action]] = {}
    for action, slot in slots.items():
        by_slot.setdefault(slot, set()).add(action)
    repeats = 0
    for slot in range(max(by_slot), PERIOD, -1):
        before = {_later(action, 1) for action in by_slot.get(slot - PERIOD, ())}
        repeats = repeats + 1 if before and before == by_slot.get(slot) else 0
        # Two periods: what is deferred in the first one of them is then as much as in the other.
        if repeats == 2 * PERIOD:
            return slot + 2 * PERIOD
    return None


def _repeat_period_before(slots: Mapping[Action, int], end: int, times: int) -> dict[Action, int]:
    """Return `slots` with the period before slot `end` inserted again, each time for the next micro-batch."""
    repeated = {}
    for action, slot in slots.items():
        if slot < end:
            repeated[action] = slot
        else:
            repeated[_later(action, times)] = slot + PERIOD * times
        if end - PERIOD <= slot < end:
            for number in range(1, times + 1):
                repeated[_later(action, number)] = slot + PERIOD * number
    return repeated


def _slots_of_forwards_and_inputs(block: MicroBatchSlots, num_microbatches: int) -> dict[Action, int]:
    slots = {}
    kinds: tuple[Kind, Kind] = ("F", "I")
    for kind, by_stage in zip(kinds, block, strict=True):
        for stage, slot in enumerate(by_stage):
            for microbatch in range(num_microbatches):
                slots[Action(kind, stage, microbatch)] = slot + PERIOD * microbatch
    return slots


def _free_slots_for_weights(by_slot: dict[int, Action]) -> dict[Action, int]:
    """The slots of the W's of a rank with the F's and I's `by_slot`."""
    slots = {}
    deferred: deque[Action] = deque()
    slot = 0
    last = max(by_slot)
    while slot <= last or deferred:
        action = by_slot.get(slot)
        if action is None and deferred:
            slots[deferred.popleft()] = slot
        elif action is not None and action.kind == "I":
            deferred.append(Action("W", action.stage, action.microbatch))
        slot += 1
    return slots


def _later(action: Action, microbatches: int) -> Action:
    return Action(action.kind, action.stage, action.microbatch + microbatches)
