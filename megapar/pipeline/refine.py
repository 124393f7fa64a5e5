"""Splits the stages of a schedule into fine stages, such as single layers.

With optimizer.zero_stage 2 and 3 a rank gathers weights and reduces gradients one fine stage at a time. A schedule
orders the stages of `parallel.pp` and `parallel.vpp`, whatever the ZeRO stage. `refine` then replaces each of its
actions by the actions of the fine stages. All fine stages of a stage live on one rank, so no message travels between
them.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import TypeVar

from megapar.pipeline.actions import Action, Kind
from megapar.pipeline.lowering import Message, MessageBatch

Step = TypeVar("Step", Action, Action | MessageBatch)
"""What a plan consists of, or an order of actions alone."""


def refine(
    plans: Sequence[Sequence[Step]], fine_stages: Sequence[int], *, breadth_first: bool = False
) -> list[list[Step]]:
    """The plans of the fine stages, for `plans` of a schedule's stages.

    `fine_stages[stage]` is the number of fine stages of a stage. Fine stages are numbered in ascending order through
    all stages. A forward of a stage runs its fine stages in ascending order, and a backward in descending order.

    Batches of messages stay where they are. If they were made for fine stages, a receive would be posted one layer
    before its use in place of a whole stage: 1f1b on 8 ranks with ZeRO-2 would take 16% longer.

    With `breadth_first`, consecutive actions of one kind and stage are refined together: each fine stage runs the
    micro-batches of all of them before the next fine stage starts.
    """
    first_fine_stage = [0, *accumulate(fine_stages)]

    def in_order(kind: Kind, stage: int) -> Sequence[int]:
        ascending = range(first_fine_stage[stage], first_fine_stage[stage + 1])
        return ascending if kind == "F" else ascending[::-1]

    def for_first(message: Message) -> Message:
        """The message for the fine stage that runs first."""
        kind, stage, microbatch = message.consumer
        return Message(Action(kind, in_order(kind, stage)[0], microbatch), message.peer)

    refined: list[list[Step]] = []
    for plan in plans:
        fine: list[Step] = []
        for item, microbatches in _groups(plan, breadth_first):
            if isinstance(item, MessageBatch):
                fine.append(MessageBatch(list(map(for_first, item.sends)), list(map(for_first, item.receives))))
                continue
            for fine_stage in in_order(item.kind, item.stage):
                fine += [Action(item.kind, fine_stage, microbatch) for microbatch in microbatches]
        refined.append(fine)
    return refined


def runs_breadth_first(breadth_first: bool, pp: int) -> bool:
    """Whether `refine` groups actions, for a schedule with this `breadth_first`.

    Only on one rank: with several, a stage would wait until the stage before has run all micro-batches. There, units
    stay in memory instead (`stages_of_runs`).
    """
    return breadth_first and pp == 1


def stages_of_runs(breadth_first: bool, pp: int, fine_stages: Sequence[int]) -> Mapping[int, int] | None:
    """The stage of each fine stage, if units stay in memory while a stage runs several micro-batches."""
    if not breadth_first or pp == 1:
        return None
    return dict(enumerate(stage for stage, number in enumerate(fine_stages) for _ in range(number)))


def _groups(plan: Sequence[Step], breadth_first: bool) -> Iterator[tuple[Step, list[int]]]:
    """Yield (item, micro-batches): each batch of messages with none, and the first of the actions refined together
    with those of all."""
    if not breadth_first:
        for item in plan:
            yield item, [item.microbatch] if isinstance(item, Action) else []
        return
    for _, group in groupby(plan, key=lambda item: item[:2] if isinstance(item, Action) else id(item)):
        items = list(group)
        yield items[0], [item.microbatch for item in items if isinstance(item, Action)]
