"""Packs of whole conversations: a source of samples out of a pair with weights (`tools/preprocess_data.py chat`)."""

import hashlib
import json
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megapar.data.indexed import IndexedDataset
from megapar.data.prepared import read_sidecar, read_weights, sidecar_path
from megapar.errors import DataError


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of at most `capacity` in sum, by best fit decreasing: each length goes where it leaves the least room.

    Returns the numbers of the lengths in each bin. The result is a function of the lengths alone: of equal ones the
    earlier comes first, and of equal bins the older. All lengths are at most `capacity`.
    """
    bins: list[list[int]] = []
    of_room: dict[int, list[int]] = {}  # bins by the room that they have left, the oldest first
    rooms: list[int] = []  # the keys of `of_room`, sorted
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length = lengths[number]
        at = bisect_left(rooms, length)
        if at == len(rooms):
            found, room = len(bins), capacity
            bins.append([])
        else:
            room = rooms[at]
            found = of_room[room].pop(0)
            if not of_room[room]:
                del of_room[room], rooms[at]
        bins[found].append(number)
        left = room - length
        if left not in of_room:
            of_room[left] = []
            insort(rooms, left)
        insort(of_room[left], found)
    return bins


class PackDataset:
    """Samples of whole conversations, one behind the other, and then of padding.

    The documents of a sample are its conversations, and the padding if there is some. The token id of the padding is
    that of the end of a document, and its weights are 0. `part` is the range of conversations that is read, as
    fractions of their number.
    Raises DataError if the files are damaged, hold no conversation, or hold one that is longer than a sample. `read`
    raises it for a token outside `vocab_size`.
    """

    shuffled = True
    together = 1
    """So many conversations in a row stay in one part."""

    def __init__(
        self,
        prefix: str | Path,
        seq_length: int,
        vocab_size: int,
        part: tuple[float, float] = (0.0, 1.0),
        num_targets: int = 1,
    ):
        self.name = str(prefix)
        self.file = IndexedDataset(prefix)
        self.sample_tokens = seq_length + num_targets
        self.vocab_size = vocab_size
        sidecar = read_sidecar(prefix)
        assert sidecar is not None, "open_dataset makes packs of pairs with a sidecar"
        self._padding = int(sidecar["tokenizer"]["eod"])
        self._weights = read_weights(prefix, len(self.file.tokens))
        first, last = (self.together * round(edge * len(self.file) / self.together) for edge in part)
        if first == last:
            raise DataError(f"{self.file.bin_path}: no conversation in its part (data.split)")
        self._starts = np.array([self.file.document_start(number) for number in range(first, last + 1)])
        lengths = np.diff(self._starts)
        if lengths.max() > self.sample_tokens:
            number = int(lengths.argmax())
            raise DataError(
                f"{self.file.bin_path}: conversation {first + number} has {lengths[number]:,} tokens, a sample of "
                f"train.seq_length={seq_length} holds {self.sample_tokens:,}: raise train.seq_length, or prepare with "
                f"--max_length {self.sample_tokens} --too_long skip"
            )
        self._packs = self._bins(lengths.tolist(), seq_length)
        firsts = self._starts[:-1]
        # The first token of a conversation is nobody's target.
        trained = np.add.reduceat(self._weights[: self._starts[-1]], firsts, dtype=np.int64) - self._weights[firsts]
        self._of_samples = trained.mean() / np.maximum(trained, 1)
        self.loss_mean: Literal["token", "sample"] = "token"
        """With "sample" the weights of each conversation have the same sum: the mean number of trained tokens."""
        self.fullness = float(lengths.sum()) / (len(self._packs) * self.sample_tokens)
        """The share of the samples' tokens that is no padding."""

    def __len__(self) -> int:
        return len(self._packs)

    def describe(self) -> str:
        """What the packs hold, for people."""
        conversations = len(self._starts) - 1
        return f"{self.name}: {conversations:,} conversations in {len(self):,} packs, {self.fullness:.1%} full"

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        samples = np.full((len(ids), self.sample_tokens), self._padding, np.int64)
        for sample, pack in zip(samples, ids, strict=True):
            at = 0
            for start, stop in self._spans(pack):
                sample[at : at + stop - start] = self.file.tokens[start:stop]
                at += stop - start
        if samples.min() < 0 or samples.max() >= self.vocab_size:
            wrong = samples[(samples < 0) | (samples >= self.vocab_size)][0]
            raise DataError(
                f"{self.file.bin_path}: token id {wrong} is outside the vocabulary of {self.vocab_size}: set "
                "data.tokenizer to the one that made this file"
            )
        return samples

    def starts(self, ids: NDArray[np.int64], samples: NDArray[np.int64]) -> list[list[int]]:
        found = []
        for pack in ids:
            edges = [0, *np.cumsum([stop - start for start, stop in self._spans(pack)]).tolist()]
            # The last edge is the start of the padding, or the end of the sample.
            found.append([edge for edge in edges if edge < self.sample_tokens])
        return found

    def weights(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        weights = np.zeros((len(ids), self.sample_tokens), np.float32)
        for row, pack in zip(weights, ids, strict=True):
            at = 0
            for number, (start, stop) in zip(self._packs[pack], self._spans(pack), strict=True):
                row[at : at + stop - start] = self._weights[start:stop]
                if self.loss_mean == "sample":
                    row[at : at + stop - start] *= self._of_samples[number]
                at += stop - start
        return weights

    def fingerprints(self) -> Mapping[str, str]:
        found = self.file.fingerprints()
        sidecar = read_sidecar(self.name)
        if sidecar:
            stated = json.dumps(sidecar["sha256"], sort_keys=True).encode()
            found[str(sidecar_path(self.name))] = hashlib.blake2b(stated, digest_size=8).hexdigest()
        return found

    def _bins(self, lengths: Sequence[int], seq_length: int) -> list[list[int]]:
        """The numbers of the conversations in each sample."""
        return best_fit(lengths, self.sample_tokens)

    def _spans(self, pack: np.int64) -> list[tuple[int, int]]:
        """The tokens [start, stop) of each conversation of a pack."""
        return [(int(self._starts[number]), int(self._starts[number + 1])) for number in self._packs[pack]]
