"""Splits the stages of a schedule into fine stages, such as single layers.

With optimizer.zero_stage 2 and 3 a rank gathers weights and reduces gradients one fine stage at a time. A schedule
orders the stages of `parallel.pp` and `parallel.vpp`, whatever the ZeRO stage. `refine` then replaces each of its
actions by the actions of the fine stages. All fine stages of a stage live on one rank, so no message travels between
them.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby

from megapar.pipeline.actions import Action, Kind


def refine(
    orders: Sequence[Sequence[Action]], fine_stages: Sequence[int], *, breadth_first: bool = False
) -> list[list[Action]]:
    """The orders of the fine stages, for `orders` of a schedule's stages.

    `fine_stages[stage]` is the number of fine stages of a stage. Fine stages are numbered in ascending order through
    all stages. A forward of a stage runs its fine stages in ascending order, and a backward in descending order.

    With `breadth_first`, consecutive actions of one kind and stage are refined together: each fine stage runs the
    micro-batches of all of them before the next fine stage starts.
    """
    first_fine_stage = [0, *accumulate(fine_stages)]
    refined = []
    for order in orders:
        refined_order: list[Action] = []
        for kind, stage, microbatches in _groups(order, breadth_first):
            ascending = range(first_fine_stage[stage], first_fine_stage[stage + 1])
            for fine_stage in ascending if kind == "F" else reversed(ascending):
                refined_order += [Action(kind, fine_stage, microbatch) for microbatch in microbatches]
        refined.append(refined_order)
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


def _groups(order: Sequence[Action], breadth_first: bool) -> Iterator[tuple[Kind, int, list[int]]]:
    """Yield (kind, stage, micro-batches) of actions refined together, in order."""
    if not breadth_first:
        for action in order:
            yield action.kind, action.stage, [action.microbatch]
        return
    for (kind, stage), group in groupby(order, key=lambda action: (action.kind, action.stage)):
        yield kind, stage, [action.microbatch for action in group]
