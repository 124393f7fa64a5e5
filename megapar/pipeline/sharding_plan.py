"""Inserts the gathers of weights and the reductions of gradients into a rank's plan (ZeRO-2 and 3, arXiv 1910.02054).

A unit is a set of parameters. One collective gathers its weights, one reduces its gradients. A stage
here is a fine stage (see `megapar.pipeline.refine`).

With ZeRO-3 these actions are inserted for each unit:

    gather   starts to gather its weights from all ranks, while the action before the unit's use runs
    wait     waits for the weights, right before the use
    release  frees the memory of the weights, right after the use, unless the next action uses the unit again

With ZeRO-2 and 3 these actions are inserted for each unit:

    open     allocates memory for its gradient, right before the first action that adds to it
    reduce   starts to sum its gradient over all ranks, unless the next action that adds gradients adds to it again
    add      waits for the sum, adds it to this rank's shard, and frees the memory
    copies   starts to sum the shard over its copies, after its last add, if shards have copies (optimizer.shard_ranks)

So nothing hooks into modules or into autograd, and memory and traffic can be computed from the plan.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple

from megapar.pipeline.actions import Action
from megapar.pipeline.lowering import MessageBatch

UnitKind = Literal["gather", "wait", "release", "open", "reduce", "add", "copies"]


class UnitAction(NamedTuple):
    """An action of a unit. The docstring of the module says what each kind does."""

    kind: UnitKind
    unit: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.unit}"


Item = Action | MessageBatch | UnitAction


@dataclass(frozen=True)
class Units:
    """The units of a rank, and `run`, the function for their actions.

    `of_stage[stage]` are the units of a fine stage of this rank. `gathers` is True if weights are sharded
    (ZeRO-3). Without `overlap` a rank waits for each reduction right after its start. `add_in_i` are the fine stages
    whose I adds gradients too. Elsewhere only B and W do. `copied` is True if shards have copies on other ranks.
    """

    of_stage: Mapping[int, Sequence[int]]
    run: Callable[[UnitAction], None]
    gathers: bool
    overlap: bool = True
    add_in_i: Container[int] = ()
    copied: bool = False


class _Insertions:
    """Unit actions to insert into a plan: `before[i]` right before the action with the index i, `after[i]` behind it.

    Messages with the result of an action leave first: the next stage would wait as long as this rank does for a sum of
    gradients. By simulation 1f1b on 4 ranks with ZeRO-2 takes 1.6% less time.
    """

    def __init__(self, plan: Sequence[Item]):
        self._plan = plan
        self.before: list[list[UnitAction]] = [[] for _ in plan]
        self.after: list[list[UnitAction]] = [[] for _ in plan]

    def apply(self) -> list[Item]:
        """The plan with the insertions."""
        result: list[Item] = []
        held: list[UnitAction] = []
        for item, before, after in zip(self._plan, self.before, self.after, strict=True):
            if isinstance(item, MessageBatch):
                result.append(item)
                continue
            result += [*held, *before, item]
            held = after
        return result + held


def insert_unit_actions(plan: Sequence[Item], units: Units, stage_of: Mapping[int, int] | None = None) -> list[Item]:
    """The plan of a rank with the actions of its units. A plan without backwards gets no reductions.

    `stage_of` maps each fine stage to its stage. If it is given, a unit stays in memory during a run: consecutive
    actions of one kind on one stage. This takes the memory of a whole stage, and makes the traffic independent of the
    number of micro-batches.
    """
    insertions = _Insertions(plan)
    # Gathers are inserted first, so that after an action releases come before reductions, which may allocate memory.
    if units.gathers:
        _insert_gathers(plan, units, stage_of, insertions)
    _insert_reductions(plan, units, stage_of, insertions)
    if units.copied:
        return _with_sums_over_copies(insertions.apply())
    return insertions.apply()


def _with_sums_over_copies(plan: Sequence[Item]) -> list[Item]:
    """The plan with one sum over copies for each unit, behind the last of its additions.

    So the copies exchange a shard once a step, however many micro-batches there are, and under the rest of the plan.
    """
    items: list[Item] = []
    summed: set[int] = set()
    for item in reversed(plan):
        if isinstance(item, UnitAction) and item.kind == "add" and item.unit not in summed:
            summed.add(item.unit)
            items.append(UnitAction("copies", item.unit))
        items.append(item)
    items.reverse()
    return items


class _Use(NamedTuple):
    """An action with units.

    `position` is its index in the plan, and `units` are its units. `next_units` are those of the next such action.
    `kept` stay in memory after it: `next_units`, and the units of all later actions of the same run.
    """

    position: int
    units: set[int]
    next_units: set[int]
    kept: set[int]


def _uses(
    plan: Sequence[Item], units: Units, uses_units: Callable[[Action], bool], stage_of: Mapping[int, int] | None
) -> list[_Use]:
    """The uses of the plan, in order: its actions for which `uses_units` is true."""
    uses: list[_Use] = []
    next_action: Action | None = None
    # From the end, because each use needs to know what is used after it.
    for index, action in reversed(list(enumerate(plan))):
        if not isinstance(action, Action) or not uses_units(action):
            continue
        next_units: set[int] = set()
        kept: set[int] = set()
        if next_action is not None:
            next_units = uses[-1].units
            kept = next_units
            if stage_of and _are_one_run(action, next_action, stage_of):
                kept = kept | uses[-1].kept
        uses.append(_Use(index, set(units.of_stage[action.stage]), next_units, kept))
        next_action = action
    uses.reverse()
    return uses


def _are_one_run(action: Action, next_action: Action, stage_of: Mapping[int, int]) -> bool:
    """Whether two consecutive actions belong to the same run (see `insert_unit_actions`)."""
    return action.kind == next_action.kind and stage_of[action.stage] == stage_of[next_action.stage]


def _actions(kind: UnitKind, units: Iterable[int]) -> list[UnitAction]:
    return [UnitAction(kind, unit) for unit in units]


def _insert_gathers(
    plan: Sequence[Item], units: Units, stage_of: Mapping[int, int] | None, insertions: _Insertions
) -> None:
    # W needs no weights: it reads the inputs and output gradients that its I has kept.
    uses = _uses(plan, units, lambda action: action.kind != "W", stage_of)
    present: set[int] = set()  # units whose weights have arrived
    arriving: set[int] = set()  # units whose gather has started
    for use in uses:
        before = insertions.before[use.position]
        missing = use.units - present
        # Only the first use of a plan has units whose gather has not been started by the use before it.
        before += _actions("gather", sorted(missing - arriving))
        before += _actions("wait", sorted(missing))
        present |= use.units
        # The units of the next use are gathered while this action computes. Those of later uses are not gathered yet,
        # because that would take more memory.
        arriving = use.next_units - present
        before += _actions("gather", sorted(arriving))
        insertions.after[use.position] += _actions("release", sorted(present - use.kept))
        present &= use.kept


def _insert_reductions(
    plan: Sequence[Item], units: Units, stage_of: Mapping[int, int] | None, insertions: _Insertions
) -> None:
    def adds_gradients(action: Action) -> bool:
        return action.kind in ("B", "W") or (action.kind == "I" and action.stage in units.add_in_i)

    uses = _uses(plan, units, adds_gradients, stage_of)
    opened: set[int] = set()  # units whose gradient is being collected
    travelling: list[int] = []  # units whose sum has started and has not been added to the shard
    for use in uses:
        before = insertions.before[use.position]
        after = insertions.after[use.position]
        # A unit has memory for one gradient. An earlier sum must leave it before the next gradient is collected there.
        before += _actions("add", [unit for unit in travelling if unit in use.units])
        travelling = [unit for unit in travelling if unit not in use.units]
        before += _actions("open", sorted(use.units - opened))
        opened |= use.units
        complete = sorted(opened - use.kept)
        opened &= use.kept
        if not complete:
            continue
        # The sums of one action travel while the next one computes. More sums at a time would take more memory.
        after += _actions("add", travelling)
        after += _actions("reduce", complete)
        travelling = complete
        if not units.overlap:
            after += _actions("add", travelling)
            travelling = []
    if uses:
        insertions.after[uses[-1].position] += _actions("add", travelling)


def first_microbatches(plan: Sequence[Item], number: int) -> list[Item]:
    """The plan of a replica with only the first `number` micro-batches of `plan`.

    It keeps all unit actions, because the other replicas wait for this one in their collectives. Actions and messages
    of the other micro-batches are left out. All ranks of a replica leave out the same, so no rank waits for a message
    in vain. A valid order stays valid without all actions of a micro-batch.
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


def unit_changes(plan: Sequence[Item], allocates: UnitKind, frees: UnitKind) -> list[tuple[int, int]]:
    """What comes into memory and leaves it, in order: a unit with 1 for an action of `allocates`, -1 of `frees`."""
    signs = {allocates: 1, frees: -1}
    return [(item.unit, signs[item.kind]) for item in plan if isinstance(item, UnitAction) and item.kind in signs]


def most_live(plan: Sequence[Item], size: Callable[[int], int], allocates: UnitKind, frees: UnitKind) -> int:
    """The peak size of units during a plan.

    Actions of kind `allocates` take `size(unit)`, and those of kind `frees` give it back.
    """
    changes = unit_changes(plan, allocates, frees)
    return max(accumulate((sign * size(unit) for unit, sign in changes), initial=0))
