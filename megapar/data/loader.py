"""From samples by their position in the run to the micro-batches of one data-parallel rank."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from megapar.batch import MicroBatch
from megapar.data.blend import Blend, Stage
from megapar.data.order import micro_batch_positions, sample_ids
from megapar.data.samples import Treatment, micro_batch
from megapar.data.sources import Dataset
from megapar.errors import DataError


class Mixture:
    """The samples of a run by position: a source of the blend's choice, and of that the next in its own order.

    `seed` shuffles every epoch of every source anew (megapar.data.order); None reads sources in the order of their
    files, as validation does.
    """

    def __init__(self, sources: Sequence[Dataset], stages: Sequence[Stage] = (), *, seed: int | None):
        self.sources = sources
        self.seed = seed
        self.blend = Blend(stages or [Stage(0, (1.0,))], seed or 0)

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def read(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens [len(positions), seq_length + 1] of the samples at `positions`."""
        return self.read_documents(positions, with_starts=False)[0]

    def read_documents(
        self, positions: NDArray[np.int64], *, with_starts: bool
    ) -> tuple[NDArray[np.int64], list[list[int]]]:
        """Tokens of the samples, and where documents begin within each (0 alone unless `with_starts`)."""
        chosen, turns = self.blend.locate(positions)
        samples: NDArray[np.int64] | None = None
        starts: list[list[int]] = [[0]] * len(positions)
        for number in np.unique(chosen):
            rows = np.flatnonzero(chosen == number)
            source = self.sources[number]
            ids = self._ids(source, turns[rows])
            tokens = source.read(ids)
            if samples is None:
                samples = np.empty((len(positions), tokens.shape[1]), np.int64)
            samples[rows] = tokens
            for row, found in zip(rows, source.starts(ids, tokens) if with_starts else (), strict=False):
                starts[row] = found
        assert samples is not None, "read needs a position"
        return samples, starts

    def _ids(self, source: Dataset, turns: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.seed is None or not source.shuffled:
            return turns % len(source)
        return sample_ids(turns, len(source), self.seed)

    def started_over(self, first: int, last: int) -> list[str]:
        """A line for each source that begins another epoch between positions `first` and `last`."""
        before = self.blend.taken(first)
        after = self.blend.taken(last)
        lines = []
        for source, old, new in zip(self.sources, before.tolist(), after.tolist(), strict=True):
            if (epoch := (new - 1) // len(source)) > (old - 1) // len(source) and epoch > 0:
                lines.append(f"data: {source.name} starts over: epoch {epoch + 1} of its {len(source):,} samples")
        return lines

    def fingerprints(self) -> Mapping[str, str]:
        return {file: value for source in self.sources for file, value in source.fingerprints().items()}


class Loader:
    """The micro-batches of one data-parallel rank, step by step; a pure function of how many samples came before.

    `batch_size` says how many samples the step after so many consumed ones has, over all ranks. A rank that
    `needs_tokens` not, between the first and the last pipeline stage, gets zeros for tokens and targets, unless
    documents are apart: then it must know where they begin, and which targets count.
    Draws no random number from anybody's generator. Raises DataError if the samples do not fill one global batch.
    """

    def __init__(
        self,
        samples: Mixture,
        *,
        batch_size: Callable[[int], int],
        micro_batch_size: int,
        seq_length: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        needs_tokens: bool = True,
        treatment: Treatment | None = None,
    ):
        if len(samples) < batch_size(0):
            raise DataError(
                f"{', '.join(source.name for source in samples.sources)}: {len(samples)} samples, a step of "
                f"train.global_batch_size={batch_size(0)} needs as many: add text, or shorten train.seq_length or the "
                "batch"
            )
        self.samples = samples
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.treatment = treatment or Treatment()
        self.seq_length = seq_length
        self.needs_tokens = needs_tokens or self.treatment.apart
        self.dp_rank = dp_rank
        self.dp_size = dp_size

    def step_after(self, consumed_samples: int) -> list[MicroBatch]:
        """This rank's micro-batches of the step that follows `consumed_samples`."""
        size = self.batch_size(consumed_samples)
        positions = micro_batch_positions(consumed_samples, size, self.micro_batch_size, self.dp_rank, self.dp_size)
        if not self.needs_tokens:
            return [_without_tokens(row, self.seq_length) for row in positions]
        samples, starts = self.samples.read_documents(positions.ravel(), with_starts=self.treatment.needs_starts)
        rows = (slice(first, first + self.micro_batch_size) for first in range(0, len(samples), self.micro_batch_size))
        return [
            micro_batch(samples[row], own, starts[row], self.treatment)
            for row, own in zip(rows, positions, strict=True)
        ]


def _without_tokens(positions: NDArray[np.int64], seq_length: int) -> MicroBatch:
    """Shapes, weights and positions: all that a stage between the first and the last uses."""
    nothing = torch.zeros(len(positions), seq_length, dtype=torch.int64)
    return MicroBatch(nothing, nothing, torch.ones(nothing.shape), torch.from_numpy(positions.copy()))
