"""From tokens on disk to the micro-batches of one data-parallel rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megapar.batch import MicroBatch
from megapar.data.indexed import IndexedDataset
from megapar.data.order import micro_batch_positions, mix64, permute, sample_ids
from megapar.errors import ConfigError, DataError


class Dataset(Protocol):
    """Samples of seq_length + 1 tokens: inputs and, one to the right, targets."""

    def __len__(self) -> int: ...

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens [len(ids), seq_length + 1] of the samples `ids`, whoever asks and however often."""
        ...


class ChunkDataset:
    """Fixed-length pieces of a .bin/.idx pair: sample i is tokens [i*S, i*S + S] of the file, documents in a row.

    Neighbours share one token, the last target of one and first input of the next. Raises DataError if the files are
    damaged or hold no whole sample and, while reading, for a token outside `vocab_size`.
    """

    def __init__(self, prefix: str | Path, seq_length: int, vocab_size: int):
        self.file = IndexedDataset(prefix)
        self.seq_length, self.vocab_size = seq_length, vocab_size
        self.num_samples = (len(self.file.tokens) - 1) // seq_length
        if self.num_samples < 1:
            raise DataError(
                f"{self.file.bin_path} holds {len(self.file.tokens)} tokens, a sample of train.seq_length={seq_length} "
                f"needs {seq_length + 1}: add text or shorten the sequence"
            )

    def __len__(self) -> int:
        return self.num_samples

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        starts = ids * self.seq_length
        chunks = [self.file.tokens[start : start + self.seq_length + 1] for start in starts]
        samples = np.stack(chunks).astype(np.int64)
        if samples.min() < 0 or samples.max() >= self.vocab_size:
            row, column = np.argwhere((samples < 0) | (samples >= self.vocab_size))[0]
            document, offset = self.file.locate(int(starts[row] + column))
            raise DataError(
                f"{self.file.bin_path}: document {document}, offset {offset}: token id {samples[row, column]} is "
                f"outside the vocabulary of {self.vocab_size}: set data.tokenizer to the one that made this file"
            )
        return samples


class SyntheticDataset:
    """Endless exercise without a file: tokens walk around one fixed cycle of ids, and a tenth of them jump.

    What follows a token is thus learnable: the best loss is about 0.73 nats with 64 ids in the cycle, against
    log(vocab_size) at the start. The cycle depends on `vocab_size` alone, a sample on (seed, id): train and validation
    sets of different seeds are different walks of one language.
    """

    jump_probability = 0.1

    def __init__(self, seq_length: int, vocab_size: int, seed: int, num_samples: int = 1 << 20):
        self.seq_length, self.seed, self.num_samples = seq_length, seed, num_samples
        length = min(vocab_size, 64)
        # Spread over the whole vocabulary, so that every tensor-parallel shard of it meets targets.
        self.cycle = permute(np.arange(length), length, key=(0,)) * vocab_size // length

    def __len__(self) -> int:
        return self.num_samples

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        columns = np.arange(self.seq_length + 1)
        keys = mix64(mix64(np.array([self.seed], np.uint64)) + ids.astype(np.uint64))
        bits = mix64(keys[:, None] + columns.astype(np.uint64))
        jumps = bits < np.uint64(self.jump_probability * 2**64)
        last_jump = np.maximum.accumulate(np.where(jumps, columns, 0), axis=1)
        landed = np.take_along_axis(mix64(bits), last_jump, axis=1) % np.uint64(len(self.cycle))
        return self.cycle[(landed.astype(np.int64) + columns - last_jump) % len(self.cycle)]


def open_dataset(sources: Sequence[str], *, seq_length: int, vocab_size: int, seed: int) -> Dataset:
    """What `data.train` or `data.validation` names: one .bin/.idx prefix, or `synthetic`, which alone uses `seed`."""
    if len(sources) != 1:
        raise ConfigError(
            f"data: {len(sources)} sources ({', '.join(sources)}); name one .bin/.idx prefix or synthetic"
        )
    if sources[0] == "synthetic":
        return SyntheticDataset(seq_length, vocab_size, seed)
    return ChunkDataset(sources[0], seq_length, vocab_size)


class Loader:
    """The micro-batches of one data-parallel rank, step after step, from `consumed_samples` on.

    `seed` shuffles every epoch anew (megapar.data.order); None reads samples in the order of the file, as validation
    does. `consumed_samples` is the whole state: a run that resumes with it, in any layout, goes on where it stopped.
    Draws no random number from anybody's generator. Raises ConfigError if the batch does not divide and DataError if
    the dataset does not fill one global batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int | None,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        consumed_samples: int = 0,
    ):
        if global_batch_size % (micro_batch_size * dp_size):
            raise ConfigError(
                f"train.global_batch_size={global_batch_size} is not a multiple of train.micro_batch_size="
                f"{micro_batch_size} * parallel.dp={dp_size}"
            )
        if len(dataset) < global_batch_size:
            raise DataError(
                f"the dataset holds {len(dataset)} samples, train.global_batch_size={global_batch_size} needs as many "
                "for one step: add text, or shorten train.seq_length or the batch"
            )
        self.dataset, self.seed = dataset, seed
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.consumed_samples = consumed_samples

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one step on each rank."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def next_step(self) -> list[MicroBatch]:
        """This rank's micro-batches of the next step."""
        positions = micro_batch_positions(
            self.consumed_samples, self.global_batch_size, self.micro_batch_size, self.dp_rank, self.dp_size
        )
        batches = [self._read(row) for row in positions]
        self.consumed_samples += self.global_batch_size
        return batches

    def _read(self, positions: NDArray[np.int64]) -> MicroBatch:
        if self.seed is None:
            ids = positions % len(self.dataset)
        else:
            ids = sample_ids(positions, len(self.dataset), self.seed)
        samples = torch.from_numpy(self.dataset.read(ids))
        return MicroBatch(
            tokens_bs=samples[:, :-1].contiguous(),
            targets_bs=samples[:, 1:].contiguous(),
            weights_bs=torch.ones(len(samples), samples.shape[1] - 1),
            sample_ids_b=torch.from_numpy(positions.copy()),
        )
