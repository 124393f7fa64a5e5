"""A newcomer's schedule, added without editing megapar. It trains in the grid (tests/test_grid.py)."""

from megapar.config.virtual_stages import TWO
from megapar.pipeline.schedules import Action, Schedule


def back_and_forth(pp: int, vpp: int) -> list[int]:
    """Stages go back and forth over the ranks: with an even vpp the first and the last one are on rank 0."""
    return [rank for chunk in range(vpp) for rank in (range(pp) if chunk % 2 == 0 else reversed(range(pp)))]


def all_forwards_first(pp: int, vpp: int, num_microbatches: int) -> list[list[Action]]:
    rank_of = back_and_forth(pp, vpp)
    orders = []
    for rank in range(pp):
        stages = [stage for stage, home in enumerate(rank_of) if home == rank]
        forwards = [Action("F", stage, m) for stage in stages for m in range(num_microbatches)]
        backwards = [Action("B", stage, m) for stage in reversed(stages) for m in range(num_microbatches)]
        orders.append(forwards + backwards)
    return orders


BACK_AND_FORTH = Schedule(all_forwards_first, back_and_forth, TWO)
