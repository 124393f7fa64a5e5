"""What a sample's documents become: apart from each other, or with their middle moved."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapar.batch import MicroBatch
from megapar.data.samples import SHORTEST, MiddleTokens, fill_in_the_middle, packed_starts, weights

MARKS = MiddleTokens(1001, 1002, 1003)


def samples(n: int, tokens: int) -> np.ndarray:
    """Distinct tokens, so that what was moved is seen."""
    return np.arange(n * tokens, dtype=np.int64).reshape(n, tokens)


def test_documents_start_where_the_batch_says_and_boundaries_weigh_nothing() -> None:
    """Two samples of 6 positions (7 tokens): documents at 0 and 2, and at 0, 5 and 6, where only a target begins."""
    starts = [[0, 2], [0, 5, 6]]
    packed = packed_starts(starts, 6)
    assert packed.tolist() == [0, 2, 6, 11, 12]
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    batch = MicroBatch(tokens, tokens, torch.ones(2, 6), tokens[:, 0], packed)
    assert batch.documents_bs().tolist() == [[0, 0, 1, 1, 1, 1], [2, 2, 2, 2, 2, 3]]
    assert batch.positions_bs().tolist() == [[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0]]
    assert weights(starts, 6).tolist() == [[1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_every_document_or_none_is_moved(rate: float) -> None:
    given_samples, starts = samples(3, 60), [[0, 20], [0, 50], [0]]
    moved = fill_in_the_middle(given_samples, starts, np.array([5, 6, 7]), rate, MARKS)
    assert moved.shape == given_samples.shape
    if rate == 0:
        assert np.array_equal(moved, given_samples)
        return
    for row, before, firsts in zip(moved, given_samples, starts, strict=True):
        for first, last in zip(firsts, [*firsts[1:], 60], strict=True):
            document = row[first:last]
            assert all((document == mark).sum() == 1 for mark in MARKS)
            assert document[-1] == before[last - 1], "the end of the document stays"
            text = [token for token in document if token not in MARKS]
            assert sorted(text) == [*before[first : last - 4], before[last - 1]]
            restored = restore(document.tolist())
            assert restored == [*before[first : last - 4], before[last - 1]], "prefix, middle, suffix are the text"


def restore(document: list[int]) -> list[int]:
    """The text of a document that was moved, told by its marks: the other way round."""
    body, end = document[1:-1], document[-1:]
    suffix_at, middle_at = body.index(MARKS.suffix), body.index(MARKS.middle)
    suffix = body[suffix_at + 1 : middle_at]
    prefix, rest = body[:suffix_at], body[middle_at + 1 :]
    whole = prefix + rest  # in the other order the prefix is the beginning of what follows the last mark
    return [*whole, *suffix, *end]


def test_a_share_of_documents_is_moved_in_both_orders_whoever_asks() -> None:
    given_samples, keys = samples(2000, 20), np.arange(2000)
    moved = fill_in_the_middle(given_samples, [[0]] * 2000, keys, 0.3, MARKS)
    changed = (moved != given_samples).any(1)
    assert 0.26 < changed.mean() < 0.34
    suffix_first = moved[changed][:, 1] == MARKS.suffix
    assert 0.4 < suffix_first.mean() < 0.65  # an empty prefix looks alike
    again = fill_in_the_middle(given_samples[7:9], [[0]] * 2, keys[7:9], 0.3, MARKS)
    assert np.array_equal(again, moved[7:9])


@given(length=st.integers(1, 40), key=st.integers(0, 2**62))
def test_lengths_stay_and_short_documents_too(length: int, key: int) -> None:
    before = samples(1, length)
    after = fill_in_the_middle(before, [[0]], np.array([key]), 1.0, MARKS)
    assert after.shape == before.shape
    assert np.array_equal(after, before) == (length < SHORTEST)
