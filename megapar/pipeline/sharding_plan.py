"""Inserts into a rank's plan when weights are gathered and released, and when gradients are reduced (ZeRO-2 and 3).

A unit is a set of parameters whose weights are gathered, and whose gradients are reduced, in one collective. A stage
here is a fine stage (see `megapar.pipeline.refine`). With ZeRO-3 (arXiv 1910.02054) a plan holds, for each unit,

    gather   start to gather its weights from all ranks, while the action before the unit's use runs
    wait     wait for them, right before the use
    release  free their memory, right after the use, unless the next action uses the unit again

and with ZeRO-2 and 3

    open     allocate memory for its gradient, right before the first action that adds to it
    reduce   start to sum its gradient over all ranks, unless the next action that adds gradients adds to it again
    add      wait for the sum, add it to this rank's shard, and free the memory

As the plan says it all, nothing hooks into modules or into autograd, and memory and traffic can be told from the plan.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from megapar.pipeline.lowering import MessageBatch
from megapar.pipeline.schedules import Action


class UnitAction(NamedTuple):
    """What is done with a unit: see the module."""

    kind: Literal["gather", "wait", "release", "open", "reduce", "add"]
    unit: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.unit}"


Item = Action | MessageBatch | UnitAction


@dataclass(frozen=True)
class Units:
    """The units of a rank, and what runs their actions.

    `of_stage` has the units that each fine stage of this rank uses. `gathers` is True if weights are sharded (ZeRO-3).
    Without `overlap` each reduction is waited for at once. `add_in_i` are the stages that add gradients in I, too.
    """

    of_stage: Mapping[int, Sequence[int]]
    run: Callable[[UnitAction], None]
    gathers: bool
    overlap: bool = True
    add_in_i: Container[int] = ()


class _Insertions:
    """Items to be inserted right before or after the items of a plan, by their index."""

    def __init__(self, plan: Sequence[Item]):
        self._plan = plan
        self.before: list[list[UnitAction]] = [[] for _ in plan]
        self.after: list[list[UnitAction]] = [[] for _ in plan]

    def applied(self) -> list[Item]:
        result: list[Item] = []
        for item, before, after in zip(self._plan, self.before, self.after, strict=True):
            result += [*before, item, *after]
        return result


def insert_unit_actions(plan: Sequence[Item], units: Units, runs_of: Mapping[int, int] | None = None) -> list[Item]:
    """The plan of a rank with the actions of its units. A plan without backwards reduces nothing.

    `runs_of` maps each fine stage to its stage. If it is given, units stay from one action to another of the same run:
    actions of one kind on one stage that follow each other. It takes the memory of a whole stage, and makes the traffic
    independent of the number of micro-batches.
    """
    insertions = _Insertions(plan)
    # Releases come before reductions, which may allocate memory.
    if units.gathers:
        _insert_gathers(plan, units, runs_of or {}, insertions)
    _insert_reductions(plan, units, runs_of or {}, insertions)
    return insertions.applied()


class _Use(NamedTuple):
    """An action that uses units: its place in the plan, its units, those of the next such action, and those to keep.

    Units to keep are those of the next action, and of later ones of the same run.
    """

    place: int
    units: set[int]
    next_units: set[int]
    kept: set[int]


def _uses(
    plan: Sequence[Item], units: Units, counts: Callable[[Action], bool], runs_of: Mapping[int, int]
) -> list[_Use]:
    """The use of each action that `counts`. `runs_of` is as in `insert_unit_actions`."""
    actions = [(place, item) for place, item in enumerate(plan) if isinstance(item, Action) and counts(item)]
    uses: list[_Use] = []
    later: Action | None = None
    for place, action in reversed(actions):
        next_units: set[int] = set()
        kept: set[int] = set()
        if later is not None:
            next_units = uses[-1].units
            kept = next_units
            if runs_of and action.kind == later.kind and runs_of[action.stage] == runs_of[later.stage]:
                kept = kept | uses[-1].kept
        uses.append(_Use(place, set(units.of_stage[action.stage]), next_units, kept))
        later = action
    return uses[::-1]


def _insert_gathers(plan: Sequence[Item], units: Units, runs_of: Mapping[int, int], insertions: _Insertions) -> None:
    # W reads what its I has kept, and no weights.
    uses = _uses(plan, units, lambda action: action.kind != "W", runs_of)
    live: set[int] = set()
    arriving: set[int] = set()
    for place, needed, following, kept in uses:
        before = insertions.before[place]
        before += [UnitAction("gather", unit) for unit in sorted(needed - live - arriving)]  # the first use of all
        before += [UnitAction("wait", unit) for unit in sorted(needed - live)]
        # One unit ahead: the gather runs while this action computes. Further ahead would take memory for another unit.
        live |= needed
        arriving = following - live
        before += [UnitAction("gather", unit) for unit in sorted(arriving)]
        insertions.after[place] += [UnitAction("release", unit) for unit in sorted(live - kept)]
        live &= kept


def _insert_reductions(plan: Sequence[Item], units: Units, runs_of: Mapping[int, int], insertions: _Insertions) -> None:

    def adds(action: Action) -> bool:
        return action.kind in ("B", "W") or (action.kind == "I" and action.stage in units.add_in_i)

    uses = _uses(plan, units, adds, runs_of)
    opened: set[int] = set()
    travelling: list[int] = []
    for place, needed, _, kept in uses:
        before = insertions.before[place]
        after = insertions.after[place]
        # The sum of an earlier action of this unit must leave the memory before another is collected there.
        before += [UnitAction("add", unit) for unit in travelling if unit in needed]
        travelling = [unit for unit in travelling if unit not in needed]
        before += [UnitAction("open", unit) for unit in sorted(needed - opened)]
        opened |= needed
        complete = sorted(opened - kept)
        opened &= kept
        if not complete:
            continue
        # The sums of one action travel while the next one computes. More of them would take more memory.
        after += [UnitAction("add", unit) for unit in travelling]
        after += [UnitAction("reduce", unit) for unit in complete]
        travelling = complete
        if not units.overlap:
            after += [UnitAction("add", unit) for unit in travelling]
            travelling = []
    if uses:
        insertions.after[uses[-1].place] += [UnitAction("add", unit) for unit in travelling]


def first_microbatches(plan: Sequence[Item], number: int) -> list[Item]:
    """The plan of a replica that has only the first `number` micro-batches of the plan.

    It takes part in all collectives of the plan, because the other replicas wait for it there. A valid order stays
    valid without all actions of a micro-batch. All ranks of a replica leave out the same.
    """
    kept: list[Item] = []
    for item in plan:
        if isinstance(item, MessageBatch):
            sends = [message for message in item.sends if message.consumer.microbatch < number]
            receives = [message for message in item.receives if message.consumer.microbatch < number]
            if sends or receives:
                kept.append(replace(item, sends=sends, receives=receives))
        elif isinstance(item, UnitAction) or item.microbatch < number:
            kept.append(item)
    return kept


def most_live(plan: Sequence[Item], size: Callable[[int], int], allocates: str, frees: str) -> int:
    """The most that units take at one time, if `allocates` takes the size of a unit and `frees` gives it back."""
    live = 0
    most = 0
    for item in plan:
        if isinstance(item, UnitAction) and item.kind == allocates:
            live += size(item.unit)
            most = max(most, live)
        elif isinstance(item, UnitAction) and item.kind == frees:
            live -= size(item.unit)
    return most
