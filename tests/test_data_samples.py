"""What a sample's documents become: apart from each other, or with their middle moved."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapar.base.errors import DataError
from megapar.data.indexed import IndexedWriter
from megapar.data.loader import Loader, Mixture
from megapar.data.samples import SHORTEST, MiddleTokens, Treatment, fill_in_the_middle, packed_starts, weights
from megapar.data.sources import ChunkDataset
from megapar.declare.batch import MicroBatch

MARKS = MiddleTokens(1001, 1002, 1003)


def samples(n: int, tokens: int) -> np.ndarray:
    """Distinct tokens, so every move is seen."""
    return np.arange(n * tokens, dtype=np.int64).reshape(n, tokens)


def test_documents_start_where_the_batch_says_and_boundaries_weigh_nothing() -> None:
    """Two samples of 6 positions (7 tokens): documents at 0 and 2, and at 0, 5 and 6; at 6 only a target begins."""
    starts = [[0, 2], [0, 5, 6]]
    packed = packed_starts(starts, 6)
    assert packed.tolist() == [0, 2, 6, 11, 12]
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    batch = MicroBatch.of_samples(tokens, tokens, torch.ones(2, 6), tokens[:, 0], packed)
    assert batch.documents_bs().tolist() == [[0, 0, 1, 1, 1, 1], [2, 2, 2, 2, 2, 3]]
    assert batch.document_positions_bs().tolist() == [[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0]]
    assert weights(starts, 6).tolist() == [[1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_every_document_or_none_is_moved(rate: float) -> None:
    given_samples = samples(3, 60)
    starts = [[0, 20], [0, 50], [0]]
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
    """The text of a moved document, told by its marks: the other way round."""
    body, end = document[1:-1], document[-1:]
    suffix_at, middle_at = body.index(MARKS.suffix), body.index(MARKS.middle)
    suffix = body[suffix_at + 1 : middle_at]
    prefix, rest = body[:suffix_at], body[middle_at + 1 :]
    whole = prefix + rest  # in the other order the prefix is the beginning of what follows the last mark
    return [*whole, *suffix, *end]


def test_a_share_of_documents_is_moved_in_both_orders_whoever_asks() -> None:
    given_samples = samples(2000, 20)
    keys = np.arange(2000)
    moved = fill_in_the_middle(given_samples, [[0]] * 2000, keys, 0.3, MARKS)
    changed = (moved != given_samples).any(1)
    assert 0.26 < changed.mean() < 0.34
    suffix_first = moved[changed][:, 1] == MARKS.suffix
    assert 0.4 < suffix_first.mean() < 0.65  # an empty prefix looks alike
    again = fill_in_the_middle(given_samples[7:9], [[0]] * 2, keys[7:9], 0.3, MARKS)
    assert np.array_equal(again, moved[7:9])


S = 12


def documents(folder: Path) -> ChunkDataset:
    """240 tokens 0, 1, ... in documents of 1, 2, 3, ..., one of them empty."""
    with IndexedWriter(folder / "t", np.dtype("<u2")) as writer:
        first = 0
        for length in (1, 2, 3, 0, *range(4, 40)):
            writer.add_document(np.arange(first, min(first + length, 240)))
            first = min(first + length, 240)
    return ChunkDataset(folder / "t", S, vocab_size=240)


def read(
    dataset: ChunkDataset, treatment: Treatment, mbs: int, dp: int = 1
) -> dict[int, tuple[list[int], list[int], list[float]]]:
    """Position in the run -> tokens, starts of documents within the sample, weights, of one step of 12 samples."""
    found = {}
    for rank in range(dp):
        samples = Mixture([dataset], seed=3)
        sizes = {"micro_batch_size": mbs, "seq_length": S, "dp_rank": rank, "dp_size": dp, "treatment": treatment}
        for batch in Loader(samples, batch_size=lambda _: 12, **sizes).step_after(24):
            starts = batch.starts if batch.starts is not None else torch.zeros(0)
            for row, position in enumerate(batch.sample_ids_b.tolist()):
                own = [int(x) - row * S for x in starts if row * S <= x < (row + 1) * S]
                tokens = [*batch.tokens_bs[row].tolist(), int(batch.targets_bs[row, -1])]
                found[position] = (tokens, own, batch.weights_bs[row].tolist())
    return found


def test_documents_apart_start_where_the_file_says_in_every_layout(tmp_path: Path) -> None:
    dataset = documents(tmp_path)
    firsts = {dataset.file.document_start(i) for i in range(len(dataset.file))}
    found = read(dataset, Treatment(apart=True), mbs=4)
    assert len(found) == 12
    for tokens, starts, weights_s in found.values():
        assert starts == [0, *(i for i, token in enumerate(tokens[:S]) if i and token in firsts)]
        assert weights_s == [0.0 if target in firsts else 1.0 for target in tokens[1:]]
    assert any(len(starts) > 2 for _, starts, _ in found.values())
    assert read(dataset, Treatment(apart=True), mbs=1, dp=3) == found
    assert all(not starts and min(weights_s) == 1 for _, starts, weights_s in read(dataset, Treatment(), 4).values())


def test_later_targets_follow_in_the_file_and_end_with_the_document(tmp_path: Path) -> None:
    """Three targets of each position, some of them on a context-parallel rank; the first are as of one target."""
    one = documents(tmp_path)
    dataset = ChunkDataset(tmp_path / "t", S, vocab_size=240, num_targets=3)
    firsts = {one.file.document_start(i) for i in range(len(one.file))}
    options = {"batch_size": lambda _: 3, "micro_batch_size": 3, "seq_length": S, "columns": [5, 0, 2]}
    loaders = [
        Loader(Mixture([source], seed=None), **options, treatment=Treatment(apart=True), num_targets=targets)
        for source, targets in ((dataset, 3), (one, 1))
    ]
    ((batch,), (expected,)) = (loader.step_after(0) for loader in loaders)
    for ahead in (1, 2, 3):
        targets = batch.targets(ahead)
        assert torch.equal(targets.tokens_bs, batch.tokens_bs + ahead), "the file counts its tokens"
        between = [[range(t + 1, t + 1 + ahead) for t in row] for row in batch.tokens_bs.tolist()]
        assert targets.weights_bs.tolist() == [[float(firsts.isdisjoint(r)) for r in row] for row in between]
    assert {0.0, 1.0} == set(batch.targets(3).weights_bs.flatten().tolist())
    assert torch.equal(batch.targets_bs, expected.targets_bs)
    assert torch.equal(batch.weights_bs, expected.weights_bs)
    with pytest.raises(ValueError, match="tokens 2 ahead, but the micro-batch has targets up to 1"):
        expected.targets(2)
    with pytest.raises(DataError, match=f"needs {239 + 3}"):
        ChunkDataset(tmp_path / "t", 239, vocab_size=240, num_targets=3)


def test_what_is_filled_in_depends_on_seed_and_position_alone(tmp_path: Path) -> None:
    dataset = documents(tmp_path)
    moved = read(dataset, Treatment(fim_rate=1.0, marks=MARKS, seed=1), mbs=4)
    assert read(dataset, Treatment(fim_rate=1.0, marks=MARKS, seed=1), mbs=2, dp=2) == moved
    assert read(dataset, Treatment(fim_rate=1.0, marks=MARKS, seed=2), mbs=4) != moved
    assert sum(mark in tokens for tokens, _, _ in moved.values() for mark in MARKS) >= 3 * 6


@given(length=st.integers(1, 40), key=st.integers(0, 2**62))
def test_lengths_stay_and_short_documents_too(length: int, key: int) -> None:
    before = samples(1, length)
    after = fill_in_the_middle(before, [[0]], np.array([key]), 1.0, MARKS)
    assert after.shape == before.shape
    assert np.array_equal(after, before) == (length < SHORTEST)
