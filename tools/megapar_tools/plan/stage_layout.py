"""Which stages each rank of a pipeline holds: those of the schedule, or their parts with units of ZeRO-2 and 3."""

from collections.abc import Sequence
from dataclasses import dataclass

from megapar.config.options import Config
from megapar.pipeline.partition import split_finely
from megapar.pipeline.schedules import placement
from megapar.train.doors import Builder
from megapar_tools.plan.parts import BOTH, FIRST, LAST, LayerPart, PartId


@dataclass(frozen=True)
class HeldStage:
    """A stage, or a fine stage: its number, its layers, and whether it has the embedding, or norm and head."""

    number: int
    layers: range
    first: bool
    last: bool

    def parts(self, of_layer: Sequence[LayerPart]) -> list[PartId]:
        """Return the parts of the stage in order, of the part of each layer."""
        ids: list[PartId] = [of_layer[number] for number in self.layers]
        if self.first:
            ids.insert(0, FIRST)
        if self.last:
            ids.append(LAST)
        return ids


class StageLayout:
    """The stages of all pipeline ranks of one layout.

    `stages` has those of each rank. With ZeRO-2 and 3 they are fine: `fine_stages` says into how many parts each stage
    of the schedule is split, and is empty otherwise. `coarse_of` has the stage of the schedule of each stage here.
    """

    def __init__(self, config: Config, builder: Builder):
        parallel = config.parallel
        ranks = placement(parallel.schedule, parallel.pp, parallel.vpp)
        layers = builder.stage_layers(config)
        self.fine_stages: tuple[int, ...] = ()
        if config.optimizer.zero_stage >= 2:
            self.fine_stages, layers, ranks = split_finely(layers, ranks)
        self.stages: list[list[HeldStage]] = [[] for _ in range(parallel.pp)]
        last = len(layers) - 1
        for number, (rank, numbers) in enumerate(zip(ranks, layers, strict=True)):
            self.stages[rank].append(HeldStage(number, numbers, number == 0, number == last))
        self.num_fine = self.fine_stages or (1,) * len(layers)
        self.coarse_of = [stage for stage, count in enumerate(self.num_fine) for _ in range(count)]
        self.ends = [_ends(stages) for stages in self.stages]
        self._builder = builder

    def titles(self, rank: int) -> str:
        """Return what a pipeline rank holds, in words. Of consecutive fine stages, only first and last are named."""
        runs: list[list[HeldStage]] = []
        for stage in self.stages[rank]:
            if runs and self.fine_stages and runs[-1][-1].number == stage.number - 1:
                runs[-1].append(stage)
            else:
                runs.append([stage])
        names = []
        for run in runs:
            first, last = (
                self._builder.title(stage.layers, first=stage.first, last=stage.last) for stage in (run[0], run[-1])
            )
            names.append(first if first == last else f"{first} to {last}")
        return "; ".join(names)


def _ends(stages: Sequence[HeldStage]) -> list[PartId]:
    """The ends of the model on a rank with these stages."""
    if any(stage.first and stage.last for stage in stages):
        return [BOTH]
    first: list[PartId] = [FIRST for stage in stages if stage.first]
    return first + [LAST for stage in stages if stage.last]
