"""Packs: samples of whole conversations, out of a pair with weights (`megapar preprocess chat`)."""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megapar.base.errors import DataError
from megapar.data.indexed import IndexedDataset
from megapar.data.order import permute
from megapar.data.prepared import pair_fingerprints, read_sidecar, read_weights

PACKS_VERSION = "best-fit-decreasing-v1"  # names all that decides which conversations share a pack; tests freeze it
_SHUFFLE = (7,)  # the key of the order of packs


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of at most `capacity` in sum, by best fit decreasing: a length goes where it leaves the least room.

    Returns the numbers of the lengths in each bin. All lengths are from 1 to `capacity`. The result is a function of
    the lengths alone: of equal lengths the first one comes first, and of equal bins the oldest is taken.
    """
    bins: list[list[int]] = []
    of_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # bins by the room that is left in them, as heaps
    # Bit r is set if a bin has room r. The lowest bit from a length on is then one operation on an integer, where a
    # search among all open bins would be quadratic.
    rooms = 0
    for number in np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist():
        length = lengths[number]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            found = heappop(of_room[room])
            if not of_room[room]:
                rooms ^= 1 << room
        else:
            room = capacity
            found = len(bins)
            bins.append([])
        bins[found].append(number)
        left = room - length
        if left:
            heappush(of_room[left], found)
            rooms |= 1 << left
    return bins


class PackDataset:
    """Samples of whole conversations one after the other, and then of padding.

    The documents of a sample are its conversations, and its padding if there is some. Padding has the id that ends a
    document, and weight 0. A conversation is never cut. So the packs are a function of the conversations' lengths and
    of `seq_length` alone, and their order is one shuffle of them: the fullest conversations would come first otherwise,
    and an evaluation reads the first packs.
    `part` is the range of conversations that is read, as fractions of their number.
    Raises DataError if the files are damaged, hold no conversation, or hold one that is longer than a sample or has no
    trained token. A token outside `vocab_size` raises it too, in `read`.
    """

    shuffled = True
    holds_conversations = True
    together = 1
    """Conversations that no part of the file divides."""

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
        self.vocab_size = vocab_size
        self.sample_tokens = seq_length + num_targets
        # Every trained token of a pack must be the target of an input. Those behind are targets of later losses alone.
        self.capacity = seq_length + 1
        sidecar = read_sidecar(prefix)
        assert sidecar is not None, "a pair of conversations has a sidecar"
        self._padding = int(sidecar["tokenizer"]["eod"])
        if self._padding >= vocab_size:
            raise DataError(
                f"{prefix}.json: the id of padding, {self._padding}, is outside the vocabulary of {vocab_size}: set "
                "data.tokenizer to the one that made this file"
            )
        self._weights = read_weights(prefix, len(self.file.tokens))
        self._first, last = (self.together * round(edge * len(self.file) / self.together) for edge in part)
        if self._first == last:
            raise DataError(
                f"{self.file.bin_path}: no conversation in its part, {self._first} to {last} of {len(self.file)}: give "
                "data.split other shares, or name other files in data.validation"
            )
        self._starts = self.file.document_starts(self._first, last)
        self._lengths = np.diff(self._starts)
        self._check_lengths(seq_length)
        self.targets = self._count_targets()
        """The number of trained tokens of each conversation. Its first token is no target, whatever its weight."""
        self._weight_of_each: float | None = None
        self._packs = self._packed(self._lengths.tolist(), seq_length)

    def __len__(self) -> int:
        return len(self._packs)

    @property
    def fullness(self) -> float:
        """The share of the packs that is no padding."""
        return float(self._lengths.sum()) / (len(self) * self.capacity)

    def weigh_alike(self, weight: float) -> None:
        """Let the weights of each conversation sum to `weight`. Until then each trained token has weight 1."""
        self._weight_of_each = weight

    def describe(self) -> str:
        """What the packs hold, in words."""
        trained = self.targets.sum() / self._lengths.sum()
        return (
            f"{self.name}: {len(self._lengths):,} conversations in {len(self):,} packs, {self.fullness:.1%} full; "
            f"{trained:.1%} of their tokens are trained"
        )

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        samples = np.full((len(ids), self.sample_tokens), self._padding, np.int64)
        for sample, pack in zip(samples, ids.tolist(), strict=True):
            for number, at in self._places(pack):
                tokens = self.file.tokens[self._starts[number] : self._starts[number + 1]]
                if tokens.min() < 0 or tokens.max() >= self.vocab_size:
                    offset = int(((tokens < 0) | (tokens >= self.vocab_size)).argmax())
                    raise DataError(
                        f"{self.file.bin_path}: conversation {self._first + number}, offset {offset}: token id "
                        f"{tokens[offset]} is outside the vocabulary of {self.vocab_size}: set data.tokenizer to the "
                        "one that made this file, or raise model.vocab_size"
                    )
                sample[at : at + len(tokens)] = tokens
        return samples

    def starts(self, ids: NDArray[np.int64], samples: NDArray[np.int64]) -> list[list[int]]:
        found = []
        for pack in ids.tolist():
            firsts = [at for _, at in self._places(pack)]
            stop = int(self._lengths[self._packs[pack]].sum())
            if stop < self.sample_tokens:  # the padding
                firsts.append(stop)
            found.append(firsts)
        return found

    def weights(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        weights = np.zeros((len(ids), self.sample_tokens), np.float32)
        for row, pack in zip(weights, ids.tolist(), strict=True):
            for number, at in self._places(pack):
                trained = self._weights[self._starts[number] : self._starts[number + 1]]
                row[at : at + len(trained)] = trained
                if self._weight_of_each is not None:
                    row[at : at + len(trained)] *= self._weight_of_each / self.targets[number]
        return weights

    def fingerprints(self) -> Mapping[str, str]:
        return pair_fingerprints(self.file, self.name)

    def _packed(self, lengths: Sequence[int], seq_length: int) -> list[list[int]]:
        """The numbers of the conversations in each sample."""
        packs = best_fit(lengths, self.capacity)
        return [packs[at] for at in permute(np.arange(len(packs)), len(packs), _SHUFFLE).tolist()]

    def _places(self, pack: int) -> list[tuple[int, int]]:
        """The conversations of a pack, each with its place in the sample."""
        numbers = self._packs[pack]
        stops = np.cumsum(self._lengths[numbers]).tolist()
        return list(zip(numbers, [0, *stops[:-1]], strict=True))

    def _check_lengths(self, seq_length: int) -> None:
        longest = int(self._lengths.argmax())
        if self._lengths[longest] > self.capacity:
            raise DataError(
                f"{self.file.bin_path}: conversation {self._first + longest} has {self._lengths[longest]:,} tokens, a "
                f"sample of train.seq_length={seq_length} holds {self.capacity:,}: raise train.seq_length, or prepare "
                f"the conversations with --max_length {self.capacity} --too_long skip"
            )

    def _count_targets(self) -> NDArray[np.int64]:
        first, last = int(self._starts[0]), int(self._starts[-1])
        starts = self._starts[:-1] - first
        trained = self._weights[first:last]
        # reduceat gives an empty part the element at its start, so no conversation may be empty.
        empty = self._lengths == 0
        targets = np.zeros(len(self._lengths), np.int64)
        targets[~empty] = np.add.reduceat(trained, starts[~empty], dtype=np.int64) - trained[starts[~empty]]
        if not targets.all():
            number = self._first + int((targets == 0).argmax())
            raise DataError(
                f"{self.file.bin_path}: conversation {number} has no trained token (PREFIX.weights), so it would teach "
                "nothing: prepare the conversations again without it"
            )
        return targets
