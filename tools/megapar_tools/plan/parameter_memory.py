"""The memory of a rank's parameters, their gradients and the optimizer, by the code that lays them out in a run."""

from collections import Counter
from collections.abc import Hashable

from megapar.config.options import Config
from megapar.declare.context import ParallelContext
from megapar_tools.plan.buffers import Buffers
from megapar_tools.plan.parts import Copies, LayerPart, Parts, PlannedStage
from megapar_tools.plan.stage_layout import StageLayout


class ParameterMemory:
    """The buffers of the ranks of one layout. What is computed once is kept in `parts.memory`."""

    def __init__(self, config: Config, parts: Parts, layout: StageLayout):
        self._config = config
        self._parts = parts
        self._layout = layout
        self._kinds: dict[int, dict[LayerPart, None]] = {}

    def shapes(self, ctx: ParallelContext) -> Hashable:
        """Return the shapes of the parameters of a rank: of its ends together, and of each of its kinds of layers."""
        pp = ctx.pp.rank
        if pp not in self._kinds:
            of_layer = self._parts.layer_parts(self._config, ctx)
            layers = [number for stage in self._layout.stages[pp] for number in stage.layers]
            self._kinds[pp] = dict.fromkeys(of_layer[number] for number in layers)
        found = [self._parts.structure(self._config, ctx, part).shapes for part in self._kinds[pp]]
        if self._layout.ends[pp]:
            found.append(self._parts.structure(self._config, ctx, *self._layout.ends[pp]).shapes)
        return tuple(found)

    def _modules(self, ctx: ParallelContext) -> list[PlannedStage]:
        """The parameters of each stage of a rank."""
        of_layer = self._parts.layer_parts(self._config, ctx)
        ends: Copies | None = None
        if self._layout.ends[ctx.pp.rank]:
            ends = self._parts.copies(self._parts.structure(self._config, ctx, *self._layout.ends[ctx.pp.rank]), ctx)
        copies: dict[LayerPart, Copies] = {}
        used: Counter[LayerPart] = Counter()
        members = iter(ends.members if ends else ())
        modules = []
        for stage in self._layout.stages[ctx.pp.rank]:
            params = []
            after = []
            if ends and (stage.first or stage.last):
                member = next(members)
                of_ends = ends.number(0)
                params += [of_ends[index] for index in member.before]
                after = [of_ends[index] for index in member.after]
            for number in stage.layers:
                part = of_layer[number]
                if part not in copies:
                    copies[part] = self._parts.copies(self._parts.structure(self._config, ctx, part), ctx)
                params += copies[part].number(used[part])
                used[part] += 1
            modules.append(PlannedStage([*params, *after]))
        return modules

    def buffers(self, ctx: ParallelContext) -> Buffers:
        """Return the buffers of a rank. Layouts that differ in the order of the schedule alone have the same."""
        options = self._config.optimizer
        modules = self._modules(ctx)
        # The copies of a parameter are the same objects in every plan.
        params = tuple(tuple(map(id, module.params)) for module in modules)
        key = ("buffers", params, options)
        if key not in self._parts.memory:
            self._parts.memory[key] = Buffers.of(options, modules)
        found: Buffers = self._parts.memory[key]
        return found
