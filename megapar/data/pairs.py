"""Pairs of answers as samples, for preferences: the conversation with the chosen answer, that with the rejected one.

They come from a pair of files with weights (`megapar preprocess preferences`): documents 2 i and 2 i + 1 are the
two members of pair i. The weights are those of the last turn, the answer.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megapar.base.errors import DataError
from megapar.data.contents import content_hash
from megapar.data.file_array import FileArray
from megapar.data.packs import PackDataset
from megapar.data.scores import read_scores, references_path


class PairDataset(PackDataset):
    """Samples of two conversations, and then of padding. Its first two documents are the chosen and the rejected one.

    `part` is the range of pairs that is read, as fractions of their number. `with_references`: the column
    PREFIX.reference of log-probabilities must be there. Raises DataError as PackDataset does, for a pair longer than
    seq_length, and without the column.
    """

    together = 2

    def __init__(
        self,
        prefix: str | Path,
        seq_length: int,
        vocab_size: int,
        part: tuple[float, float] = (0.0, 1.0),
        num_targets: int = 1,
        *,
        with_references: bool = False,
    ):
        super().__init__(prefix, seq_length, vocab_size, part, num_targets)
        self._references: FileArray | None = None
        if with_references:
            self._references = read_scores(references_path(prefix), self.file)

    def describe(self) -> str:
        return f"{self.name}: {len(self):,} pairs of answers, {self.fullness:.1%} of their samples is no padding"

    def references(self, ids: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """The log-probabilities of both answers of the pairs `ids` by the reference model, [len(ids), 2].

        They are sums over the tokens, each times its weight.
        """
        if self._references is None:
            return None
        sums = np.zeros((len(ids), 2), np.float64)
        for row, pair in zip(sums, ids, strict=True):
            for member, number in enumerate(self._packs[pair]):
                # The first token of a conversation is nobody's target.
                inside = slice(self._starts[number] + 1, self._starts[number + 1])
                row[member] = (self._references[inside] * self._weights[inside]).sum(dtype=np.float64)
        return sums.astype(np.float32)

    def fingerprints(self) -> Mapping[str, str]:
        found = dict(super().fingerprints())
        if self._references is not None:
            path = references_path(self.name)
            found[str(path)] = content_hash(path)
        return found

    def _packed(self, lengths: Sequence[int], seq_length: int) -> list[list[int]]:
        pairs = [[number, number + 1] for number in range(0, len(lengths), 2)]
        for number, (chosen, rejected) in enumerate(pairs):
            length = lengths[chosen] + lengths[rejected]
            if length > seq_length:
                raise DataError(
                    f"{self.file.bin_path}: pair {number} has {length:,} tokens, and a sample of train.seq_length="
                    f"{seq_length} holds both of its answers: raise it, or prepare with --max_length {seq_length} "
                    "--too_long skip"
                )
        return pairs
