"""Micro-batches out of the tokens of samples.

Documents of a sample may be trained apart or in a row. In some of them the middle may be moved to the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megapar.data.order import mix64
from megapar.declare.batch import MicroBatch, Targets

SHORTEST = 8  # tokens; a shorter document keeps its order, whatever `fim_rate` says


class MiddleTokens(NamedTuple):
    """The token ids that mark prefix, suffix and middle of a document whose middle is to be filled in."""

    prefix: int
    suffix: int
    middle: int


@dataclass(frozen=True)
class Samples:
    """Samples as sources give them. `tokens` are [n, seq_length + num_targets].

    `starts` has, for each sample, the positions within it at which documents begin. The first is 0. `weights` are those
    of the tokens as targets, of the same shape. None: all are 1. `references` [n, 2] are `MicroBatch.references_bd`.
    """

    tokens: NDArray[np.int64]
    starts: Sequence[Sequence[int]]
    weights: NDArray[np.float32] | None = None
    references: NDArray[np.float32] | None = None

    def rows(self, numbers: NDArray[np.int64]) -> "Samples":
        """The samples of these numbers, copied."""
        weights = None if self.weights is None else self.weights[numbers]
        references = None if self.references is None else self.references[numbers]
        return Samples(self.tokens[numbers], [self.starts[number] for number in numbers], weights, references)


@dataclass(frozen=True)
class Treatment:
    """How the documents of samples are treated.

    `apart`: documents do not attend to each other, and the step over a boundary has no weight in the loss.
    `fim_rate`: the share of documents whose middle is moved to the end (fill-in-the-middle), from 0 to 1. `marks` are
    the token ids for it. Which documents are chosen is a function of `seed` and of the sample's position in the run.
    """

    apart: bool = False
    fim_rate: float = 0.0
    marks: MiddleTokens | None = None  # needed with fim_rate
    seed: int = 0

    @property
    def needs_starts(self) -> bool:
        return self.apart or self.fim_rate > 0.0


def micro_batch(
    samples: Samples, positions: NDArray[np.int64], treatment: Treatment, num_targets: int = 1
) -> MicroBatch:
    """Return inputs, targets and weights, each [b, seq_length], of `samples`.

    The `num_targets` tokens after each position are its targets. `positions` [b] are the samples' positions in the run.
    """
    tokens, starts = samples.tokens, samples.starts
    length = tokens.shape[1] - num_targets
    if treatment.fim_rate and treatment.marks:
        keys = mix64(np.array([treatment.seed], np.uint64)) ^ positions.astype(np.uint64)
        tokens = fill_in_the_middle(tokens, starts, keys, treatment.fim_rate, treatment.marks)

    def targets(ahead: int) -> Targets:
        weights_bs = weights(starts, length, ahead) if treatment.apart else torch.ones(len(tokens), length)
        if samples.weights is not None:
            weights_bs *= torch.from_numpy(samples.weights[:, ahead : ahead + length])
        # The copies are contiguous, and share no memory with the caller's array.
        return Targets(torch.from_numpy(tokens[:, ahead : ahead + length].copy()), weights_bs)

    targets_bs, weights_bs = targets(1)
    batch = MicroBatch.of_samples(
        tokens_bs=torch.from_numpy(tokens[:, :length].copy()),
        targets_bs=targets_bs,
        weights_bs=weights_bs,
        sample_ids_b=torch.from_numpy(positions.copy()),
        starts=packed_starts(starts, length) if treatment.apart else None,
        later_targets=[targets(ahead) for ahead in range(2, num_targets + 1)],
    )
    if samples.references is None:
        return batch
    return replace(batch, references_bd=torch.from_numpy(samples.references.copy()))


def fill_in_the_middle(
    samples: NDArray[np.int64],
    starts: Sequence[Sequence[int]],
    keys: NDArray[np.uint64],
    rate: float,
    marks: MiddleTokens,
) -> NDArray[np.int64]:
    """`samples` [n, tokens] with the middle moved to the end in a share `rate` of the documents.

    Such a document becomes prefix, suffix, middle, or as often suffix, prefix, middle. Each part follows its mark. A
    model then learns to fill in the middle (Bavarian et al., arXiv 2207.14255).
    `starts` holds, for each sample, the positions within it at which documents begin. The first is 0.
    What happens to a document is a function of its sample's key and its number within the sample alone.
    """
    samples = samples.copy()
    for sample, firsts, key in zip(samples, starts, mix64(keys.astype(np.uint64)), strict=True):
        lasts = [*firsts[1:], len(sample)]
        for number, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
            # Each document has four words of its own: whether it is changed, two cuts, and the order of the parts.
            bits: NDArray[np.uint64] = mix64(np.arange(4 * number, 4 * number + 4, dtype=np.uint64) + key)
            if last - first >= SHORTEST and int(bits[0]) < rate * 2.0**64:
                sample[first:last] = _moved(sample[first:last], bits[1:], marks)
    return samples


def _moved(document: NDArray[np.int64], bits: NDArray[np.uint64], marks: MiddleTokens) -> NDArray[np.int64]:
    """`document` with its middle moved to the end. `bits` are three random words."""
    # Three tokens before the last one make room for the marks. So the document keeps its length, and its last token,
    # which may be the end-of-document token.
    text = document[:-4]
    end = document[-1:]
    first_cut, second_cut = sorted(int(b) % (len(text) + 1) for b in bits[:2])
    prefix = text[:first_cut]
    middle = text[first_cut:second_cut]
    suffix = text[second_cut:]
    prefix_mark, suffix_mark, middle_mark = (np.array([mark]) for mark in marks)
    if bits[2] & np.uint64(1):
        return np.concatenate([prefix_mark, prefix, suffix_mark, suffix, middle_mark, middle, end])
    return np.concatenate([prefix_mark, suffix_mark, suffix, middle_mark, prefix, middle, end])


def packed_starts(starts: Sequence[Sequence[int]], length: int) -> Tensor:
    """`MicroBatch.starts`, int32, of samples of `length` positions.

    `starts` holds, for each sample, the positions within it at which documents begin. The first is 0.
    """
    boundaries = []
    for sample, firsts in enumerate(starts):
        # A document may begin at the last token of a sample. That token is a target only, never an input.
        boundaries += [sample * length + first for first in firsts if first < length]
    return torch.tensor([*boundaries, len(starts) * length], dtype=torch.int32)


def weights(starts: Sequence[Sequence[int]], length: int, ahead: int = 1) -> Tensor:
    """The loss weights [n, length], fp32, of n samples whose documents are trained apart.

    A weight is 0 where the target, the token `ahead` positions on, is in a later document: the document of the position
    says nothing about it. All other weights are 1.
    """
    weights_bs = torch.ones(len(starts), length)
    for row, firsts in zip(weights_bs, starts, strict=True):
        for first in firsts:
            if first > 0:
                row[max(first - ahead, 0) : first] = 0.0
    return weights_bs
