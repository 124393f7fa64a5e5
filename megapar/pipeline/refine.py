"""Splits the stages of a schedule into fine stages, such as single layers.

With optimizer.zero_stage 2 and 3 a rank gathers weights and reduces gradients one fine stage at a time. A schedule
orders the stages of `parallel.pp` and `parallel.vpp` as always. `refine` then replaces each of its actions by those of
the fine stages. All fine stages of a stage live on one rank, so no message travels between them.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

from megapar.pipeline.schedules import Action


def refine(
    orders: Sequence[Sequence[Action]], fine_stages: Sequence[int], *, breadth_first: bool = False
) -> list[list[Action]]:
    """The orders of the fine stages, for `orders` of a schedule's stages.

    `fine_stages` has the number of fine stages of each stage. Fine stages are numbered through all stages. A forward
    runs through those of its stage upwards, a backward downwards. With `breadth_first`, actions of one kind and stage
    that follow each other go through the fine stages together: each fine stage runs all their micro-batches before the
    next one starts.
    """
    first = [0, *accumulate(fine_stages)]
    refined = []
    for order in orders:
        rank: list[Action] = []
        for kind, stage, microbatches in _runs(order, breadth_first):
            inside = range(first[stage], first[stage + 1])
            for fine in inside if kind == "F" else reversed(inside):
                rank += [Action(kind, fine, m) for m in microbatches]
        refined.append(rank)
    return refined


def _runs(order: Sequence[Action], breadth_first: bool) -> Iterator[tuple]:
    """Yield (kind, stage, micro-batches) of the actions that go through the fine stages together, in order."""
    if not breadth_first:
        for action in order:
            yield action.kind, action.stage, [action.microbatch]
        return
    for (kind, stage), run in groupby(order, key=lambda action: (action.kind, action.stage)):
        yield kind, stage, [action.microbatch for action in run]
