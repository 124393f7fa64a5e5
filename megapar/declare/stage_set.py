"""The pipeline stages of a rank, with what is known of the whole pipeline."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from megapar.declare.batch import PipelineStage

S_co = TypeVar("S_co", bound=PipelineStage, covariant=True)


@dataclass(frozen=True)
class AddedLoss:
    """A loss besides the main one, which a stage adds to it (`megapar.declare.batch.add_loss`).

    With `split_over_tp` each tensor rank adds the loss of its own tokens. Otherwise all of them add the same loss. The
    sum over a step is divided by its number of target tokens or of pairs. With "own" it is divided by the weights of
    the loss's own targets, the tokens `ahead` positions after each. If these have no weight, loss and gradient are 0.
    `weight` is the factor of the loss in what is minimized. The reported value is without it.
    """

    name: str
    split_over_tp: bool = False
    divided_by: Literal["tokens", "pairs", "own"] = "tokens"
    ahead: int = 1
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.weight != 1.0 and self.divided_by != "own":
            raise ValueError(f"AddedLoss.weight of {self.name}: with divided_by own alone; multiply the loss instead")


@dataclass(frozen=True)
class Declared:
    """What every rank must know of a model, whichever stages it has.

    `num_targets` is how many of the tokens after each position the losses are of. `losses` are those besides the main
    one. `tallies` are what modules count during a step (`megapar.declare.tally`): rows and columns of each table, by
    name. `divided_by` is what the main loss of a step is divided by. With pairs each sample is a pair of documents.
    `logits` are the layers and heads of the table of largest logits (`megapar.declare.largest_logits`), if there is
    one. `fp8_products` are the products that are watched (`megapar.linear.fp8_watch`), by name.
    """

    num_targets: int = 1
    losses: Sequence[AddedLoss] = ()
    tallies: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    divided_by: Literal["tokens", "pairs"] = "tokens"
    logits: tuple[int, int] | None = None
    fp8_products: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class StageSet(Mapping[int, S_co], Generic[S_co]):
    """This rank's stages by global stage number. It is read as a mapping of them.

    The other fields describe the whole pipeline, and are the same on every rank. `layers` and `placement` have an entry
    for each stage: its layers, and its pipeline rank. With ZeRO-2 and 3 the stages are fine stages (the embedding, each
    layer, norm and head). `fine_stages` is then how many of them each stage of the schedule has; else it is empty.
    `declared` is what the model declares.
    """

    stages: Mapping[int, S_co]
    layers: Sequence[range]
    placement: Sequence[int]
    fine_stages: Sequence[int] = ()
    declared: Declared = field(default_factory=Declared)

    def __getitem__(self, number: int) -> S_co:
        return self.stages[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)
