"""Logs how often a rank chooses each expert, by layer and micro-batch: messages and memory follow from it.

run_dir/expert_rows/rank_00003.json is {"layers": {"0": [[...], ...]}}: for each layer of the rank a row for each
micro-batch, with a number for each expert. `megapar simulate --expert_rows` reads it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import Tensor, nn

from megapar.base.errors import storing
from megapar.declare.batch import PipelineStage
from megapar.declare.stage_set import StageSet
from megapar.declare.tally import counting_modules
from megapar.system.atomic_files import write_json

FOLDER = "expert_rows"


def file_of(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank_{rank:05d}.json"


class ExpertRows:
    """What modules with a tally count in each forward pass of a stage. Recomputed passes are not counted again."""

    def __init__(self) -> None:
        self._counted: dict[int, list[Tensor]] = {}  # by layer: the sum of the counts after each forward pass

    @contextmanager
    def noting(self, stages: StageSet[PipelineStage]) -> Iterator[None]:
        """A context around one step."""
        with ExitStack() as hooks:
            for stage in stages.values():
                if counting_modules([stage]):
                    hooks.callback(stage.register_forward_hook(self._note).remove)
            yield

    def _note(self, stage: nn.Module, *_: object) -> None:
        for module in counting_modules([stage]):
            # Kept on the device: the host reads them after the step.
            self._counted.setdefault(module.tally.row, []).append(module.step_counts.clone())

    def write(self, run_dir: Path, rank: int) -> None:
        """Write the file of this rank, if it has experts. Raises StorageError if it cannot be written."""
        layers = {layer: _by_pass(sums) for layer, sums in sorted(self._counted.items())}
        if layers:
            path = file_of(run_dir / FOLDER, rank)
            with storing(path):
                path.parent.mkdir(exist_ok=True)
                write_json(path, {"layers": layers})


def _by_pass(sums: list[Tensor]) -> list[list[int]]:
    """The counts of each pass, out of the sums after it."""
    rows = []
    before = [0] * sums[0].numel()
    for total in sums:
        now = total.tolist()
        rows.append([after - earlier for after, earlier in zip(now, before, strict=True)])
        before = now
    return rows
