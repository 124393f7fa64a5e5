"""Micro-batches: the right tokens, the same in every layout, without a touch on anybody's random numbers."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megapar.base.errors import DataError
from megapar.data.indexed import IndexedWriter
from megapar.data.loader import Loader, Mixture
from megapar.data.sources import ChunkDataset, Dataset, StreamDataset, SyntheticDataset, open_dataset
from megapar.declare.batch import MicroBatch
from tools.entropy import cross_entropies

S = 8


def token_file(folder: Path, num_tokens: int, first: int = 0) -> Path:
    """Tokens first, first + 1, ... in documents of 10."""
    with IndexedWriter(folder / "t", np.dtype("<u2")) as writer:
        for start in range(0, num_tokens, 10):
            writer.add_document(np.arange(first + start, first + min(start + 10, num_tokens)))
    return folder / "t"


def loader(dataset: Dataset, batch: int, mbs: int, seed: int | None = 5, dp_rank: int = 0, dp_size: int = 1) -> Loader:
    options = {"micro_batch_size": mbs, "seq_length": S, "dp_rank": dp_rank, "dp_size": dp_size}
    return Loader(Mixture([dataset], seed=seed), batch_size=lambda _: batch, **options)


def steps(dataset: Dataset, count: int, *, dp: int = 1, mbs: int = 1, consumed: int = 0) -> list[list[MicroBatch]]:
    """For each step the micro-batches of all dp ranks."""
    loaders = [loader(dataset, 12, mbs, dp_rank=rank, dp_size=dp) for rank in range(dp)]
    return [[batch for one in loaders for batch in one.step_after(consumed + 12 * i)] for i in range(count)]


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
    first, second = loader(dataset, 6, 3).step_after(30)
    assert first.sample_ids_b.tolist() == [30, 31, 32]
    assert second.sample_ids_b.tolist() == [33, 34, 35]
    fields = (first.tokens_bs, first.targets_bs, first.weights_bs, first.sample_ids_b)
    for x, dtype in zip(fields, (torch.int64, torch.int64, torch.float32, torch.int64), strict=True):
        assert x.dtype == dtype
        assert x.is_contiguous()
    assert first.tokens_bs.shape == first.targets_bs.shape == first.weights_bs.shape == (3, S)
    assert torch.equal(first.targets_bs, first.tokens_bs + 1)
    assert bool((first.weights_bs == 1).all())


@pytest.mark.parametrize(("dp", "mbs"), [(1, 2), (2, 1), (3, 4), (4, 3), (6, 2), (12, 1)])
def test_no_layout_changes_what_a_step_holds(tmp_path: Path, dp: int, mbs: int):
    """Fault samples-independent-of-layout. Also after a restart in another layout, across the end of an epoch (24
    samples, 12 a step)."""
    dataset = ChunkDataset(token_file(tmp_path, 200), S, vocab_size=200)
    alone = steps(dataset, 6)
    changed = steps(dataset, 2) + steps(dataset, 3, dp=dp, mbs=mbs, consumed=24) + steps(dataset, 1, mbs=6, consumed=60)
    assert [rows(step) for step in changed] == [rows(step) for step in alone]
    for epoch in range(3):
        seen = [row[0] for step in alone[2 * epoch : 2 * epoch + 2] for row in rows(step).values()]
        assert sorted(seen) == [i * S for i in range(24)]


def test_validation_reads_in_file_order(tmp_path: Path):
    dataset = ChunkDataset(token_file(tmp_path, 100), S, vocab_size=100)
    held_out = loader(dataset, 4, 4, seed=None)
    for first in (0, 4):
        assert held_out.step_after(first)[0].tokens_bs[:, 0].tolist() == [i * S for i in range(first, first + 4)]


def test_loading_draws_no_random_number(tmp_path: Path):
    """Fault loading-draws-nothing. torch's and numpy's global generators keep their states."""
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
    """Fault token-ids-beyond-vocabulary. Tokens 0..99 against 96 ids: token 96 is the seventh of document 9."""
    dataset = ChunkDataset(token_file(tmp_path, 100), S, vocab_size=96)
    dataset.read(np.array([10]))
    with pytest.raises(DataError, match=r"t.bin: document 9, offset 6: token id 96 .* vocabulary of 96"):
        dataset.read(np.array([3, 11]))


def test_too_little_text_is_refused_with_numbers(tmp_path: Path):
    """Faults no-tokens, too-few-tokens."""
    with pytest.raises(DataError, match="holds 0 tokens"):
        ChunkDataset(token_file(tmp_path, 0), S, vocab_size=100)
    with pytest.raises(DataError, match=r"holds 8 tokens, a sample of train.seq_length=8 needs 9"):
        ChunkDataset(token_file(tmp_path, 8), S, vocab_size=100)
    three = ChunkDataset(token_file(tmp_path, 3 * S + 1), S, vocab_size=100)
    loader(three, 3, 1)
    with pytest.raises(DataError, match=r"3 samples, a step of train.global_batch_size=4"):
        loader(three, 4, 1)


def test_ranks_between_the_ends_of_a_pipeline_read_nothing(tmp_path: Path):
    dataset = ChunkDataset(token_file(tmp_path, 200), S, vocab_size=200)
    dataset.read = None  # type: ignore[method-assign, assignment]
    options = {"batch_size": lambda _: 6, "micro_batch_size": 3, "seq_length": S, "needs_tokens": False}
    batches = Loader(Mixture([dataset], seed=1), **options).step_after(12)
    assert [batch.sample_ids_b.tolist() for batch in batches] == [[12, 13, 14], [15, 16, 17]]
    assert batches[0].tokens_bs.shape == batches[0].weights_bs.shape == (3, S)
    assert bool((batches[0].weights_bs == 1).all()), "targets are counted as at the ends"


def test_a_split_cuts_between_documents_as_megatron_does(tmp_path: Path):
    """Tokens 0..249 in 25 documents of 10; shares 0.5, 0.3 and 0.2 end at round(12.5) = 12 and 20 documents."""
    prefix = token_file(tmp_path, 250)
    for part, first, last in (((0.0, 0.5), 0, 120), ((0.5, 0.8), 120, 200), ((0.8, 1.0), 200, 250)):
        dataset = ChunkDataset(prefix, S, vocab_size=250, part=part)
        samples = dataset.read(np.arange(len(dataset)))
        assert samples.min() == first
        assert last - S <= samples.max() < last
    with pytest.raises(DataError, match=r"0 tokens in documents 0 to 0 of 25, .*: give data.split"):
        ChunkDataset(prefix, S, vocab_size=250, part=(0.0, 0.01))


def test_fingerprints_tell_contents_apart(tmp_path: Path):
    """Another document's length, one other token among 200, another size; the same content elsewhere is the same."""
    names = ("a", "same", "token", "length", "longer")
    lengths = {"length": [101, 99], "longer": [100, 101]}
    hashes = {}
    for name in names:
        tokens = np.arange(sum(lengths.get(name, [100, 100]))) + (np.arange(200) == 77 if name == "token" else 0)
        with IndexedWriter(tmp_path / name, np.dtype("<u2")) as writer:
            writer.add_documents(tokens, lengths.get(name, [100, 100]))
        found = ChunkDataset(tmp_path / name, S, vocab_size=300).fingerprints()
        assert [Path(file).suffix for file in found] == [".idx", ".bin"]
        hashes[name] = tuple(found.values())
    assert hashes["same"] == hashes["a"]
    for name, (index, tokens) in {"token": (True, False), "length": (False, True), "longer": (False, False)}.items():
        assert [x == y for x, y in zip(hashes[name], hashes["a"], strict=True)] == [index, tokens], name


@pytest.mark.slow
def test_a_hugging_face_stream_gives_its_text_in_order_and_over_again(tmp_path: Path):
    pytest.importorskip("datasets", reason="needs Hugging Face datasets")
    texts = [f"document {i} " * (i + 1) for i in range(5)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    open_stream = partial(open_dataset, seq_length=S, vocab_size=257, seed=1, tokenizer="bytes")
    dataset = open_stream(f"hf:json:{tmp_path}/t.jsonl")
    assert isinstance(dataset, StreamDataset)
    expected = [token for text in texts for token in [*text.encode(), 256]] * 3
    samples = dataset.read(np.array([0, 1, 5, 30]))
    assert samples.tolist() == [expected[i * S : i * S + S + 1] for i in (0, 1, 5, 30)]
    assert len(expected) < 90 * S
    assert dataset.read(np.array([31, 60])).tolist() == [expected[i * S : i * S + S + 1] for i in (31, 60)]
    assert dataset.read(np.array([5])).tolist() == samples[2:3].tolist(), "back to an earlier one"
    positions = np.arange(100, 112)
    mixed = [Mixture([open_stream(dataset.name)], seed=3).read(positions) for _ in range(2)]
    assert np.array_equal(*mixed)
    assert np.array_equal(mixed[0], open_stream(dataset.name).read(positions)), "a stream is not shuffled"


@pytest.mark.slow
def test_streams_that_cannot_be_read_are_named(tmp_path: Path):
    pytest.importorskip("datasets", reason="needs Hugging Face datasets")
    (tmp_path / "t.jsonl").write_text('{"words": "x"}\n')
    (tmp_path / "short.jsonl").write_text('{"text": "x"}\n')
    for file, said in (("none", "cannot open it"), ("t", "has no text, but words"), ("short", "makes no sample")):
        with pytest.raises(DataError, match=f"{file}.jsonl.*{said}") as caught:
            open_dataset(
                f"hf:json:{tmp_path}/{file}.jsonl", seq_length=S, vocab_size=257, seed=1, tokenizer="bytes"
            ).read(np.array([0]))
        assert "\n" not in str(caught.value)


def test_sources_are_opened_by_name(tmp_path: Path):
    prefix = str(token_file(tmp_path, 100))
    options = {"seq_length": S, "vocab_size": 100, "seed": 1, "tokenizer": "bytes"}
    assert isinstance(open_dataset("synthetic", **options), SyntheticDataset)
    assert isinstance(open_dataset(prefix, **options), ChunkDataset)


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
