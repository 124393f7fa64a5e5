"""How the tokens of samples become what a model trains on: documents apart or in a row, some of them with the middle
moved to the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megapar.batch import MicroBatch
from megapar.data.order import mix64

SHORTEST = 8  # tokens: shorter documents keep their order


class MiddleTokens(NamedTuple):
    """Ids that mark the parts of a document whose middle is to be filled in."""

    prefix: int
    suffix: int
    middle: int


@dataclass(frozen=True)
class Treatment:
    """What is done to the documents of samples: `apart`, they do not attend to each other and their boundaries weigh
    nothing; a share `fim_rate` of them has its middle moved, keyed by `seed` and position in the run."""

    apart: bool = False
    fim_rate: float = 0.0
    marks: MiddleTokens | None = None  # needed with fim_rate
    seed: int = 0

    @property
    def needs_starts(self) -> bool:
        return self.apart or self.fim_rate > 0.0


def micro_batch(
    samples: NDArray[np.int64],
    positions: NDArray[np.int64],
    starts: Sequence[Sequence[int]],
    treatment: Treatment,
) -> MicroBatch:
    """Samples [b, seq_length + 1] at `positions` [b] of the run, whose documents begin at `starts` within each, as
    inputs, targets and weights."""
    length = samples.shape[1] - 1
    if treatment.fim_rate and treatment.marks:
        keys = mix64(np.array([treatment.seed], np.uint64)) ^ positions.astype(np.uint64)
        samples = fill_in_the_middle(samples, starts, keys, treatment.fim_rate, treatment.marks)
    return MicroBatch(
        tokens_bs=torch.from_numpy(samples[:, :-1].copy()),
        targets_bs=torch.from_numpy(samples[:, 1:].copy()),
        weights_bs=weights(starts, length) if treatment.apart else torch.ones(len(samples), length),
        sample_ids_b=torch.from_numpy(positions.copy()),
        starts=packed_starts(starts, length) if treatment.apart else None,
    )


def fill_in_the_middle(
    samples: NDArray[np.int64],
    starts: Sequence[Sequence[int]],
    keys: NDArray[np.uint64],
    rate: float,
    marks: MiddleTokens,
) -> NDArray[np.int64]:
    """Samples [n, tokens] in which a share `rate` of the documents became prefix, suffix, middle (or suffix, prefix,
    middle, as often), each behind its mark: a model then learns to fill in (Bavarian et al., arXiv 2207.14255).

    `starts` are where documents begin within each sample, from 0; a document gives three tokens before its last for
    the marks, so that lengths stay and an end-of-document token does too. What happens to a document is a function of
    its sample's key and its number alone.
    """
    samples = samples.copy()
    for sample, firsts, key in zip(samples, starts, mix64(keys.astype(np.uint64)), strict=True):
        for number, (first, last) in enumerate(zip(firsts, [*firsts[1:], len(sample)], strict=True)):
            bits: NDArray[np.uint64] = mix64(np.arange(4 * number, 4 * number + 4, dtype=np.uint64) + key)
            if last - first >= SHORTEST and int(bits[0]) < rate * 2.0**64:
                sample[first:last] = _moved(sample[first:last], bits[1:], marks)
    return samples


def _moved(document: NDArray[np.int64], bits: NDArray[np.uint64], marks: MiddleTokens) -> NDArray[np.int64]:
    text = document[:-4]
    end = document[-1:]
    one, two = sorted(int(b) % (len(text) + 1) for b in bits[:2])
    prefix = text[:one]
    middle = text[one:two]
    suffix = text[two:]
    before, after, fill = (np.array([mark]) for mark in marks)
    if bits[2] & np.uint64(1):
        return np.concatenate([before, prefix, after, suffix, fill, middle, end])
    return np.concatenate([before, after, suffix, fill, prefix, middle, end])


def packed_starts(starts: Sequence[Sequence[int]], length: int) -> Tensor:
    """`MicroBatch.starts` of samples of `length` positions whose documents begin at `starts` within each (from 0)."""
    places = [sample * length + first for sample, firsts in enumerate(starts) for first in firsts if first < length]
    return torch.tensor([*places, len(starts) * length], dtype=torch.int32)


def weights(starts: Sequence[Sequence[int]], length: int) -> Tensor:
    """Loss weights [n, length] of samples that are separate documents: 0 where the target is the first token of the
    next document, which the one before says nothing about."""
    weights_bs = torch.ones(len(starts), length)
    for row, firsts in zip(weights_bs, starts, strict=True):
        row[[first - 1 for first in firsts if first > 0]] = 0.0
    return weights_bs
