"""The memory of the units of ZeRO-2 and 3: weights gathered, and gradients collected, at one time of the schedule."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from megapar.config.options import Config
from megapar.declare.context import ParallelContext
from megapar.pipeline.actions import Action
from megapar.pipeline.refine import refine, runs_breadth_first, stages_of_runs
from megapar.pipeline.sharding_plan import UnitAction, UnitKind, Units, insert_unit_actions, unit_changes
from megapar_tools.plan.buffers import Buffers
from megapar_tools.plan.moments import WINDOW, Orders, without_repeats
from megapar_tools.plan.parts import LAST, Parts
from megapar_tools.plan.stage_layout import StageLayout


class UnitMemory:
    """The units in memory on the ranks of one layout. What is computed once is kept in `parts.memory`."""

    def __init__(self, config: Config, parts: Parts, layout: StageLayout):
        self._config = config
        self._parts = parts
        self._layout = layout

    def peak_bytes(self, ctx: ParallelContext, buffers: Buffers, orders: Orders) -> tuple[int, int]:
        """Return the most bytes of gathered weights and of collected gradients at one time."""
        options = self._config.optimizer
        if options.zero_stage < 2:
            return 0, 0
        gathered = 0
        if options.zero_stage == 3:
            gathered = _peak(self._changes(ctx, buffers, orders, "gather", "release"), buffers.unit_gathered)
        collected = _peak(self._changes(ctx, buffers, orders, "open", "add"), buffers.unit_elements)
        return gathered, collected * torch.float32.itemsize

    def most_in_use(self, ctx: ParallelContext, buffers: Buffers, orders: Orders, sizes: Sequence[int]) -> int:
        """Return the largest sum of `sizes` of units whose weights have arrived and are not released (ZeRO-3)."""
        return _peak(self._changes(ctx, buffers, orders, "wait", "release"), sizes)

    def _changes(
        self, ctx: ParallelContext, buffers: Buffers, orders: Orders, allocates: UnitKind, frees: UnitKind
    ) -> Sequence[tuple[int, int]]:
        """What comes into memory and leaves it in a step (`unit_changes`): weights, or gradients if `frees` is add."""
        options = self._config.optimizer
        pp = self._config.parallel.pp
        in_runs = stages_of_runs(orders.breadth_first, pp, self._layout.num_fine) is not None
        shown = self._enough_stages(ctx, all_of_them=in_runs)
        coarse = [self._layout.coarse_of[self._layout.stages[ctx.pp.rank][position].number] for position in shown]
        add_in_i = {new for new, old in enumerate(shown) if self._adds_gradients_in_i(ctx, old)}
        of_stage = {new: buffers.units[old] for new, old in enumerate(shown)}
        # Layouts that differ in the number of shards, or in ZeRO-2 and 3, use their units alike.
        units = tuple(tuple(numbers) for numbers in of_stage.values())
        decides = (id(orders), ctx.pp.rank, tuple(coarse), units, frozenset(add_in_i), options.overlap_grad_reduce)
        key = (allocates, decides)
        if key not in self._parts.memory:
            steps = orders.steps(ctx.pp.rank)
            if frees == "add":
                in_i = {coarse[new] for new in add_in_i}
                used = [step for step in steps if step[0] in ("B", "W") or (step[0] == "I" and step[1] in in_i)]
            else:
                used = [step for step in steps if step[0] != "W"]
            # What gathers is one sequence of steps, and what adds gradients another.
            actions = [Action(kind, stage, number) for number, (kind, stage) in enumerate(without_repeats(used, pp))]
            fine_stages = [coarse.count(stage) for stage in range(len(self._layout.num_fine))]
            (order,) = refine([actions], fine_stages, breadth_first=runs_breadth_first(orders.breadth_first, pp))
            rules = Units(of_stage, _never, frees == "release", options.overlap_grad_reduce, add_in_i)
            plan = insert_unit_actions(order, rules, dict(enumerate(coarse)) if in_runs else None)
            self._parts.memory[key] = unit_changes(plan, allocates, frees)
        found: Sequence[tuple[int, int]] = self._parts.memory[key]
        return found

    def _adds_gradients_in_i(self, ctx: ParallelContext, position: int) -> bool:
        stage = self._layout.stages[ctx.pp.rank][position]
        return stage.last and self._parts.recording(self._config, ctx, LAST).kept.adds_gradients_in_i

    def _enough_stages(self, ctx: ParallelContext, *, all_of_them: bool) -> list[int]:
        """The positions of the fine stages of a rank with which units lie in memory as with all of them.

        Of equal layers one after the other a few show all that there is, unless the units of a stage stay in memory
        while it runs.
        """
        of_layer = self._parts.layer_parts(self._config, ctx)
        shown: list[int] = []
        before: object = None
        same = 0
        for position, stage in enumerate(self._layout.stages[ctx.pp.rank]):
            part = of_layer[stage.layers[0]] if stage.layers else None
            alike = (self._layout.coarse_of[stage.number], part)
            same = same + 1 if part is not None and alike == before else 1
            before = alike
            if all_of_them or same <= 2 * WINDOW:
                shown.append(position)
        return shown


def _peak(changes: Sequence[tuple[int, int]], sizes: Sequence[int]) -> int:
    """The largest sum of the sizes of units in memory. A change is a unit, and 1 if it comes or -1 if it leaves."""
    return max(accumulate((sign * sizes[unit] for unit, sign in changes), initial=0))


def _never(action: UnitAction) -> None:
    raise AssertionError("a plan runs no unit action")
