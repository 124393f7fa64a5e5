"""The loader: it reads the samples of a step and cuts them into the micro-batches of one data-parallel rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megapar.base.errors import DataError
from megapar.data.blend import Blend, BlendPhase
from megapar.data.order import micro_batch_positions, sample_ids
from megapar.data.samples import Samples, Treatment, micro_batch
from megapar.data.sources import Dataset
from megapar.declare.batch import PADDING, MicroBatch, Targets


class Mixture:
    """The samples of a run by position. The blend chooses the source, which gives the next sample of its own order.

    `seed` shuffles every epoch of every source anew (megapar.data.order). With None, sources are read in the order of
    their files, as validation does.
    """

    def __init__(self, sources: Sequence[Dataset], stages: Sequence[BlendPhase] = (), *, seed: int | None):
        self.sources = sources
        self.seed = seed
        self.follow(stages or [BlendPhase(0, (1.0,))])

    def follow(self, stages: Sequence[BlendPhase]) -> None:
        """Let these stages choose the sources from the first position on. Call it before samples are read."""
        self.blend = Blend(stages, self.seed or 0)

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def before_any_repeats(self) -> int:
        """The number of positions from 0 on before some source gives a sample a second time."""
        counts = np.array([len(source) for source in self.sources])
        if len(counts) == 1:
            return int(counts[0])
        few, many = 0, int(counts.sum()) + 1  # `few` positions repeat nothing, and `many` do
        while many - few > 1:
            middle = (few + many) // 2
            if (self.blend.taken(middle) <= counts).all():
                few = middle
            else:
                many = middle
        return few

    def read(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens [len(positions), seq_length + num_targets], int64, of the samples at `positions`."""
        return self.read_documents(positions, with_starts=False).tokens

    def read_documents(self, positions: NDArray[np.int64], *, with_starts: bool) -> Samples:
        """The samples at `positions`, which must not be empty. Without `with_starts` each is one document."""
        chosen, turns = self.blend.locate(positions)
        samples: NDArray[np.int64] | None = None
        weights: NDArray[np.float32] | None = None
        references: NDArray[np.float32] | None = None
        starts: list[list[int]] = [[0]] * len(positions)
        # One read for each source: a source can then ask the system for all of its pieces before it waits.
        for number in np.unique(chosen):
            rows = np.flatnonzero(chosen == number)
            source = self.sources[number]
            ids = self._ids(source, turns[rows])
            tokens = source.read(ids)
            if samples is None:
                samples = np.empty((len(positions), tokens.shape[1]), np.int64)
            samples[rows] = tokens
            of_tokens = source.weights(ids)
            if of_tokens is not None:
                if weights is None:
                    weights = np.ones(samples.shape, np.float32)
                weights[rows] = of_tokens
            of_answers = source.references(ids) if hasattr(source, "references") else None
            if of_answers is not None:
                if references is None:
                    references = np.zeros((len(positions), 2), np.float32)
                references[rows] = of_answers
            if with_starts:
                for row, starts_of_row in zip(rows, source.starts(ids, tokens), strict=True):
                    starts[row] = starts_of_row
        assert samples is not None, "read needs a position"
        return Samples(samples, starts, weights, references)

    def _ids(self, source: Dataset, turns: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids of the samples that `source` gives as its `turns`-th ones, counted from 0 over all epochs."""
        if self.seed is None or not source.shuffled:
            return turns % len(source)
        return sample_ids(turns, len(source), self.seed)

    def started_over(self, first: int, last: int) -> list[str]:
        """A line for each source that begins another epoch between positions `first` and `last`."""
        before = self.blend.taken(first)
        after = self.blend.taken(last)
        lines = []
        for source, old, new in zip(self.sources, before.tolist(), after.tolist(), strict=True):
            # The epoch of the last sample before a position, not of the next one: an epoch begins when it is read.
            epoch = (new - 1) // len(source)
            if epoch > (old - 1) // len(source) and epoch > 0:
                lines.append(f"data: {source.name} starts over: epoch {epoch + 1} of its {len(source):,} samples")
        return lines

    def fingerprints(self) -> Mapping[str, str]:
        merged: dict[str, str] = {}
        for source in self.sources:
            merged |= source.fingerprints()
        return merged


class Loader:
    """The micro-batches of one rank, step by step.

    The micro-batches of a step are a pure function of the number of samples consumed before it.
    `batch_size` takes that number and returns the global batch size of the step, in samples.
    `columns` are the positions of each sample that the rank holds, by default all. Samples are read whole and then cut.
    A rank between the first and the last pipeline stage passes `needs_tokens=False` and gets zeros for tokens and
    targets. It still reads if documents are apart, since it must know where they begin and which targets count.
    `num_targets` is how many of the tokens after each position are targets. The sources must have been opened for as
    many. `held_out` samples are for evaluations alone (`evaluation_step`).
    The loader draws nothing from the global random generators.
    Raises DataError if the samples of a training do not fill one global batch.
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
        columns: Sequence[int] | None = None,
        needs_tokens: bool = True,
        treatment: Treatment | None = None,
        num_targets: int = 1,
        held_out: bool = False,
    ):
        if not held_out and len(samples) < batch_size(0):
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
        self.num_targets = num_targets
        self.needs_tokens = needs_tokens or self.treatment.apart
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.columns = torch.tensor(range(seq_length) if columns is None else columns)

    def step_after(self, consumed_samples: int) -> list[MicroBatch]:
        """This rank's micro-batches of the step that follows `consumed_samples`.

        There are none if the step has fewer micro-batches than replicas, and this replica's turn does not come.
        """
        size = self.batch_size(consumed_samples)
        positions = micro_batch_positions(consumed_samples, size, self.micro_batch_size, self.dp_rank, self.dp_size)
        return self._micro_batches(positions)

    def evaluation_step(self, first: int, count: int) -> list[MicroBatch]:
        """This rank's micro-batches of the samples at the positions [first, first + count), for an evaluation.

        All replicas get whole micro-batches, and the same number of them: padding fills them up. A padding sample has
        the id PADDING, targets without weight, and the tokens of the last sample.
        """
        last = first + count - 1
        size = -(-count // (self.micro_batch_size * self.dp_size)) * self.micro_batch_size * self.dp_size
        positions = micro_batch_positions(first, size, self.micro_batch_size, self.dp_rank, self.dp_size)
        batches = self._micro_batches(np.minimum(positions, last))
        paddings = torch.from_numpy(positions > last)
        return [_without_weight(batch, padding) for batch, padding in zip(batches, paddings, strict=True)]

    def _micro_batches(self, positions: NDArray[np.int64]) -> list[MicroBatch]:
        """The micro-batches of the samples at `positions`, ascending int64 [micro-batches, micro_batch_size]."""
        if not self.needs_tokens:
            empty = [_without_tokens(row, self.seq_length, self.num_targets) for row in positions]
            return [batch.columns(self.columns) for batch in empty]
        if not len(positions):
            return []
        # All samples of the step are read at once, so that their pages are fetched together. Each is read once: a
        # stream that is asked for a sample again begins at its first document.
        read, places = np.unique(positions.ravel(), return_inverse=True)
        samples = self.samples.read_documents(read, with_starts=self.treatment.needs_starts)
        batches = []
        for number, positions_b in enumerate(positions):
            first = number * self.micro_batch_size
            rows = samples.rows(places[first : first + self.micro_batch_size])
            batch = micro_batch(rows, positions_b, self.treatment, self.num_targets)
            batches.append(batch.columns(self.columns))
        return batches


def _without_weight(batch: MicroBatch, padding_b: Tensor) -> MicroBatch:
    """The micro-batch with the samples where `padding_b` is True made padding."""
    later = [
        Targets(targets.tokens_bs, targets.weights_bs.masked_fill(padding_b[:, None], 0.0))
        for targets in batch.later_targets
    ]
    return replace(
        batch,
        weights_bs=batch.weights_bs.masked_fill(padding_b[:, None], 0.0),
        sample_ids_b=batch.sample_ids_b.masked_fill(padding_b, PADDING),
        later_targets=tuple(later),
    )


def _without_tokens(positions: NDArray[np.int64], seq_length: int, num_targets: int) -> MicroBatch:
    """A micro-batch with zeros for tokens and targets.

    Its shapes, weights and positions are right. A stage between the first and the last uses nothing else.
    """
    zeros_bs = torch.zeros(len(positions), seq_length, dtype=torch.int64)
    ones_bs = torch.ones(zeros_bs.shape)
    later = [Targets(zeros_bs, ones_bs)] * (num_targets - 1)
    return MicroBatch.of_samples(zeros_bs, zeros_bs, ones_bs, torch.from_numpy(positions.copy()), later_targets=later)
