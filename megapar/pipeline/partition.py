"""The layers of each pipeline stage."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from megapar.base.errors import ConfigError


def split_finely(layers: Sequence[range], ranks: Sequence[int]) -> tuple[tuple[int, ...], list[range], list[int]]:
    """The fine stages of ZeRO-2 and 3 (`megapar.pipeline.refine`): embedding, each layer, norm and head.

    `layers` and `ranks` are those of each stage. Returns the number of fine stages of each stage, and the layers and
    the rank of each fine stage: no layers for the embedding, and for norm and head.
    """
    parts = []
    for stage, numbers in enumerate(layers):
        fine = [range(number, number + 1) for number in numbers]
        if stage == 0:
            fine.insert(0, range(numbers.start, numbers.start))
        if stage == len(layers) - 1:
            fine.append(range(numbers.stop, numbers.stop))
        parts.append(fine)
    ranks_of_fine = [rank for rank, part in zip(ranks, parts, strict=True) for _ in part]
    return tuple(len(part) for part in parts), [fine for part in parts for fine in part], ranks_of_fine


def partition(layer_costs: Sequence[float], first_cost: float, last_cost: float, num_stages: int) -> list[range]:
    """Choose contiguous layers for each stage, with the most expensive stage as cheap as possible.

    `layer_costs` are in any unit. `first_cost` (embedding) is added to the first stage, `last_cost` (final norm and
    head) to the last. Of equally good cuts, the most even one is taken: the one with the least sum of squared stage
    costs. Of those, the one with fewer layers in front is taken, because 1F1B holds more micro-batches there. The first
    and the last stage may hold no layer, the others hold at least one. Raises ConfigError if there are too few layers.
    """
    _check_enough(len(layer_costs), num_stages)
    # Integers, so that sums that ought to be equal are equal. Floats would break ties by rounding. The unit is so small
    # that rounding to it does not matter.
    unit = (sum(layer_costs) + first_cost + last_cost) / 2**40 or 1.0
    before = [0, *accumulate(round(cost / unit) for cost in layer_costs)]
    first = round(first_cost / unit)
    last = round(last_cost / unit)

    def stage_cost(stage: int, start: int, stop: int) -> int:
        cost = before[stop] - before[start]
        # With one stage both conditions hold.
        if stage == 0:
            cost += first
        if stage == num_stages - 1:
            cost += last
        return cost

    def squares(cost: int, rest: float) -> float:
        # A stage above the least possible maximum rules the cut out.
        if cost <= largest:
            return cost**2 + rest
        return math.inf

    largest, _ = _best_cuts(len(layer_costs), num_stages, stage_cost, max)
    _, cuts = _best_cuts(len(layer_costs), num_stages, stage_cost, squares)
    return [range(start, stop) for start, stop in pairwise((0, *cuts))]


def explicit(sizes: Sequence[int]) -> list[range]:
    """The layers of each stage, given the number of each in `sizes`: parallel.partition, checked by `validate`."""
    return [range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def _check_enough(num_layers: int, num_stages: int) -> None:
    if num_layers < num_stages - 2:
        raise ConfigError(
            f"model.num_hidden_layers {num_layers} is too few for parallel.pp * parallel.vpp = {num_stages} stages: "
            f"each but the first and the last needs a layer, so use at most {num_layers + 2} stages or at least "
            f"{num_stages - 2} layers"
        )


def _best_cuts(
    num_layers: int,
    num_stages: int,
    stage_cost: Callable[[int, int, int], int],
    combine: Callable[[int, float], float],
) -> tuple[float, tuple[int, ...]]:
    """The least value of combine(cost of stage 0, combine(cost of stage 1, ...)), and the stop of each stage.

    `stage_cost` takes stage, first layer and last layer + 1. The result is exact: dynamic programming from the last
    stage back, O(stages * layers^2). Of equal values the smallest stops win.
    """
    # The best value and stops of all later stages, by their first layer.
    best: dict[int, tuple[float, tuple[int, ...]]] = {num_layers: (0, ())}
    for stage in reversed(range(num_stages)):
        at_least = 1 if 0 < stage < num_stages - 1 else 0
        here = {}
        starts = range(num_layers + 1) if stage else range(1)  # the first stage starts at layer 0
        for start in starts:
            options = []
            for stop, (value, _) in best.items():
                if stop >= start + at_least:
                    options.append((combine(stage_cost(stage, start, stop), value), stop))
            if options:
                value, stop = min(options)
                here[start] = value, (stop, *best[stop][1])
        best = here
    return best[0]
