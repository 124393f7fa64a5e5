"""Micro-batches: the right tokens, the same in every layout, without a touch on anybody's random numbers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megapar.batch import MicroBatch
from megapar.data.entropy import cross_entropies
from megapar.data.indexed import IndexedWriter
from megapar.data.loader import ChunkDataset, Dataset, Loader, SyntheticDataset, open_dataset
from megapar.errors import ConfigError, DataError

S = 8


def token_file(folder: Path, num_tokens: int, first: int = 0) -> Path:
    """Tokens first, first + 1, ... in documents of 10."""
    with IndexedWriter(folder / "t", np.dtype("<u2")) as writer:
        for start in range(0, num_tokens, 10):
            writer.add_document(np.arange(first + start, first + min(start + 10, num_tokens)))
    return folder / "t"


def steps(dataset: Dataset, count: int, *, dp: int = 1, mbs: int = 1, consumed: int = 0) -> list[list[MicroBatch]]:
    """For each step the micro-batches of all dp ranks."""
    options = {"seed": 5, "global_batch_size": 12, "micro_batch_size": mbs, "dp_size": dp, "consumed_samples": consumed}
    loaders = [Loader(dataset, dp_rank=rank, **options) for rank in range(dp)]
    return [[batch for loader in loaders for batch in loader.next_step()] for _ in range(count)]


def rows(batches: list[MicroBatch]) -> dict[int, list[int]]:
    """Position in the run -> tokens and last target."""
    return {
        int(position): [*tokens.tolist(), int(targets[-1])]
        for batch in batches
        for position, tokens, targets in zip(batch.sample_ids_b, batch.tokens_bs, batch.targets_bs, strict=True)
    }


def test_samples_are_chunks_that_share_one_token(tmp_path: Path):
    dataset = ChunkDataset(token_file(tmp_path, 100), S, vocab_size=100)
    assert len(dataset) == (100 - 1) // S
    samples = dataset.read(np.arange(len(dataset)))
    assert samples.dtype == np.int64
    assert samples.tolist() == [list(range(i * S, i * S + S + 1)) for i in range(12)]


def test_a_micro_batch_holds_inputs_targets_weights_and_positions(tmp_path: Path):
    dataset = ChunkDataset(token_file(tmp_path, 200), S, vocab_size=200)
    loader = Loader(dataset, seed=1, global_batch_size=6, micro_batch_size=3, consumed_samples=30)
    assert loader.num_microbatches == 2
    first, second = loader.next_step()
    assert loader.consumed_samples == 36
    assert first.sample_ids_b.tolist() == [30, 31, 32]
    assert second.sample_ids_b.tolist() == [33, 34, 35]
    for x, dtype in zip(vars(first).values(), (torch.int64, torch.int64, torch.float32, torch.int64), strict=True):
        assert x.dtype == dtype
        assert x.is_contiguous()
    assert first.tokens_bs.shape == first.targets_bs.shape == first.weights_bs.shape == (3, S)
    assert torch.equal(first.targets_bs, first.tokens_bs + 1)
    assert bool((first.weights_bs == 1).all())


@pytest.mark.parametrize(("dp", "mbs"), [(1, 2), (2, 1), (3, 4), (4, 3), (6, 2), (12, 1)])
def test_no_layout_changes_what_a_step_holds(tmp_path: Path, dp: int, mbs: int):
    """(row 46) Also after a restart in another layout, across the end of an epoch (24 samples, 12 a step)."""
    dataset = ChunkDataset(token_file(tmp_path, 200), S, vocab_size=200)
    alone = steps(dataset, 6)
    changed = steps(dataset, 2) + steps(dataset, 3, dp=dp, mbs=mbs, consumed=24) + steps(dataset, 1, mbs=6, consumed=60)
    assert [rows(step) for step in changed] == [rows(step) for step in alone]
    for epoch in range(3):
        seen = [row[0] for step in alone[2 * epoch : 2 * epoch + 2] for row in rows(step).values()]
        assert sorted(seen) == [i * S for i in range(24)]


def test_validation_reads_in_file_order(tmp_path: Path):
    dataset = ChunkDataset(token_file(tmp_path, 100), S, vocab_size=100)
    loader = Loader(dataset, seed=None, global_batch_size=4, micro_batch_size=4)
    for first in (0, 4):
        assert loader.next_step()[0].tokens_bs[:, 0].tolist() == [i * S for i in range(first, first + 4)]


def test_loading_draws_no_random_number(tmp_path: Path):
    """(row 20) torch's and numpy's global generators stay where they were."""
    datasets = [ChunkDataset(token_file(tmp_path, 200), S, vocab_size=200), SyntheticDataset(S, 200, seed=3)]
    torch.manual_seed(0)
    np.random.seed(0)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1:3]
    for dataset in datasets:
        steps(dataset, 100, dp=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before[0])
    assert np.random.get_state()[2] == numpy_before[1]


def test_a_token_outside_the_vocabulary_is_placed(tmp_path: Path):
    """(row D7) Tokens 0..99 against 96 ids: token 96 is the seventh of document 9."""
    dataset = ChunkDataset(token_file(tmp_path, 100), S, vocab_size=96)
    dataset.read(np.array([10]))
    with pytest.raises(DataError, match=r"t.bin: document 9, offset 6: token id 96 .* vocabulary of 96"):
        dataset.read(np.array([3, 11]))


def test_too_little_text_is_refused_with_numbers(tmp_path: Path):
    """(rows D1, D2)"""
    with pytest.raises(DataError, match="holds 0 tokens"):
        ChunkDataset(token_file(tmp_path, 0), S, vocab_size=100)
    with pytest.raises(DataError, match=r"holds 8 tokens, a sample of train.seq_length=8 needs 9"):
        ChunkDataset(token_file(tmp_path, 8), S, vocab_size=100)
    three = ChunkDataset(token_file(tmp_path, 3 * S + 1), S, vocab_size=100)
    Loader(three, seed=1, global_batch_size=3, micro_batch_size=1)
    with pytest.raises(DataError, match=r"3 samples, train.global_batch_size=4"):
        Loader(three, seed=1, global_batch_size=4, micro_batch_size=1)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match=r"global_batch_size=12 .*micro_batch_size=4 \* parallel.dp=2"):
        Loader(SyntheticDataset(S, 100, seed=1), seed=1, global_batch_size=12, micro_batch_size=4, dp_size=2)


def test_sources_are_opened_by_name(tmp_path: Path):
    prefix = str(token_file(tmp_path, 100))
    assert isinstance(open_dataset(["synthetic"], seq_length=S, vocab_size=100, seed=1), SyntheticDataset)
    assert isinstance(open_dataset([prefix], seq_length=S, vocab_size=100, seed=1), ChunkDataset)
    for sources in ([], [prefix, prefix]):
        with pytest.raises(ConfigError, match="name one"):
            open_dataset(sources, seq_length=S, vocab_size=100, seed=1)


def test_synthetic_samples_depend_on_seed_and_id_alone():
    dataset = SyntheticDataset(64, 131, seed=1)
    samples = dataset.read(np.array([3, 10**6, 3]))
    assert np.array_equal(samples[0], samples[2])
    assert np.array_equal(samples[1], SyntheticDataset(64, 131, seed=1).read(np.array([10**6]))[0])
    assert not np.array_equal(samples[0], samples[1])
    assert not np.array_equal(samples[0], SyntheticDataset(64, 131, seed=2).read(np.array([3]))[0])
    assert samples[0, :12].tolist() == [22, 124, 10, 112, 57, 75, 88, 47, 57, 120, 81, 67], "frozen"


@pytest.mark.parametrize("vocab_size", [7, 131, 4096])
def test_synthetic_text_can_be_learned(vocab_size: int):
    """Ids stay inside the vocabulary and reach both of its ends; a pair of tokens foretells the next to 0.73 nats."""
    train, held_out = (SyntheticDataset(1000, vocab_size, seed).read(np.arange(100)).ravel() for seed in (1, 2))
    cycle = min(vocab_size, 64)
    assert train.min() == 0
    assert vocab_size * (cycle - 1) // cycle == train.max()
    entropies = cross_entropies(train, held_out, vocab_size)
    assert entropies.unigram == pytest.approx(np.log(cycle), rel=0.02)
    stays, moves = 0.9 + 0.1 / cycle, 0.1 / cycle
    bound = -stays * np.log(stays) - (cycle - 1) * moves * np.log(moves)
    assert bound < entropies.bigram < bound + 0.05
