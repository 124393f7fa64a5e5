"""The pipeline stages of a rank, with what is known of the whole pipeline."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from megapar.batch import PipelineStage

S_co = TypeVar("S_co", bound=PipelineStage, covariant=True)


@dataclass(frozen=True, eq=False)
class StageSet(Mapping[int, S_co], Generic[S_co]):
    """This rank's stages by global stage number. It is read as a mapping of them.

    The other fields describe the whole pipeline, and are the same on every rank. `layers` and `placement` have an entry
    for each stage: its layers, and its pipeline rank. With ZeRO-2 and 3 the stages are fine stages (the embedding, each
    layer, norm and head). `fine_stages` is then how many of them each stage of the schedule has; else it is empty.
    """

    stages: Mapping[int, S_co]
    layers: Sequence[range]
    placement: Sequence[int]
    fine_stages: Sequence[int] = ()

    def __getitem__(self, number: int) -> S_co:
        return self.stages[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)
