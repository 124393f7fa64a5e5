"""Packs of conversations: nothing lost, nothing torn, nothing trained that is not the assistant's."""

import json
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megapar.base.errors import DataError
from megapar.data.blend import BlendPhase
from megapar.data.loader import Loader, Mixture
from megapar.data.packs import PACKS_VERSION, PackDataset, best_fit
from megapar.data.prepared import weights_path
from megapar.data.samples import Treatment
from megapar.data.sources import ChunkDataset, SyntheticDataset, open_dataset
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from megapar.launch.grid import grid_of
from megapar.train.data import open_loaders
from tests.support import program, tiny_models
from tests.support.close import assert_close
from tests.support.conversations import prepare, write_pair
from tests.support.faults import on_rank
from tests.support.grid import GPT
from tests.support.rules import gradients
from tests.support.runs import assert_bitwise, stored
from tests.support.small_training import make_config

LENGTH = 240
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def conversations(number: int, seed: int = 0, longest: int = 4) -> list[Any]:
    generator = random.Random(seed)

    def text() -> str:
        return " ".join(generator.choices(WORDS, k=generator.randint(1, longest)))

    return [{"prompt": text(), "completion": text()} for _ in range(number)]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("packs"), conversations(40), "talks", "--max_length", str(LENGTH + 1))


def opened(prefix: Path, **options: Any) -> PackDataset:
    return PackDataset(prefix, options.pop("seq_length", LENGTH), 257, **options)


def numbered(prefix: Path, lengths: list[int], trained: Sequence[Sequence[int]] = (), eod: int = 130) -> Path:
    """A pair with tokens 0, 1, 2, ... through all of its conversations."""
    return write_pair(prefix, np.arange(sum(lengths)), lengths, trained, eod)


def naive(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best fit decreasing, by looking at every bin."""
    bins: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        rooms = [capacity - sum(lengths[other] for other in one) for one in bins]
        fits = [(room, at) for at, room in enumerate(rooms) if room >= lengths[number]]
        if fits:
            bins[min(fits)[1]].append(number)
        else:
            bins.append([number])
    return bins


@pytest.mark.parametrize("seed", range(6))
def test_bins_are_those_of_best_fit_decreasing(seed: int) -> None:
    generator = random.Random(seed)
    capacity = generator.randint(20, 60)
    lengths = [generator.randint(1, capacity) for _ in range(generator.randint(1, 120))]
    assert best_fit(lengths, capacity) == naive(lengths, capacity)
    assert best_fit([], capacity) == []


def test_packs_of_this_version_are_frozen() -> None:
    """Other bins are another PACKS_VERSION: a resumed run would read other samples."""
    assert PACKS_VERSION == "best-fit-decreasing-v1"
    assert best_fit([3, 7, 5, 5, 2, 8, 1], 10) == [[5, 4], [1, 0], [2, 3], [6]]
    assert best_fit([6, 6, 4, 4, 7, 3], 10) == [[4, 5], [0, 2], [1, 3]]


def test_the_first_packs_are_not_those_of_the_longest(tmp_path: Path) -> None:
    """An evaluation reads the first packs. Best fit decreasing leaves the longest conversations there."""
    lengths = np.random.default_rng(0).integers(2, 60, 200).tolist()
    dataset = PackDataset(numbered(tmp_path / "many", lengths), 63, 1 << 15)
    ids = np.arange(len(dataset))
    longest = [max(b - a for a, b in pairwise([*starts, 64])) for starts in dataset.starts(ids, dataset.read(ids))]
    halves = np.array_split(longest, 2)
    assert abs(halves[0].mean() - halves[1].mean()) < 4 < np.diff(np.quantile(longest, (0.1, 0.9)))


def test_a_changed_weight_is_found(tmp_path: Path) -> None:
    prefix = numbered(tmp_path / "pair", [5, 4, 3])
    before = PackDataset(prefix, 11, 131).fingerprints()
    assert set(before) == {f"{prefix}.{suffix}" for suffix in ("bin", "idx", "json", "weights")}
    with weights_path(prefix).open("r+b") as file:
        file.write(b"\1")
    now = PackDataset(prefix, 11, 131).fingerprints()
    assert [name for name in now if now[name] != before[name]] == [f"{prefix}.weights"]


@pytest.mark.parametrize("num_targets", [1, 2, 3])
def test_every_trained_token_is_a_target_once(tmp_path: Path, num_targets: int) -> None:
    """Fault later-targets-unmasked: with multi-token prediction tokens behind position S are targets of later losses
    alone."""
    lengths = [5, 7, 3, 2, 12, 6, 12]
    prefix = numbered(tmp_path / "pair", lengths)
    dataset = PackDataset(prefix, 11, 131, num_targets=num_targets)
    found = batches(dataset, seq_length=11, num_targets=num_targets)
    firsts = np.cumsum([0, *lengths]).tolist()
    for ahead in range(1, num_targets + 1):
        targets = [batch.targets(ahead) for batch in found]
        seen = sorted(int(token) for one in targets for token in one.tokens_bs[one.weights_bs > 0])
        # The second half of each conversation, without the tokens that have no input so far before them.
        spans = [range(first + max(n // 2, ahead), first + n) for first, n in zip(firsts, lengths, strict=False)]
        assert seen == [token for span in spans for token in span]
    with pytest.raises(
        DataError, match=r"conversation 4 has 12 tokens, a sample of train.seq_length=10 holds 11: raise"
    ):
        PackDataset(prefix, 10, 131, num_targets=num_targets)


def test_conversations_of_a_blend_count_alike(tmp_path: Path) -> None:
    """With train.loss_mean=sample a source of long answers weighs no more than another."""
    sources = [numbered(tmp_path / "short", [4] * 20), numbered(tmp_path / "long", [40] * 20)]
    config = make_config(dp=1)
    train = replace(config.train, loss_mean="sample", seq_length=63, global_batch_size=8)
    data = replace(config.data, train=tuple(map(str, sources)), documents="apart")
    model = replace(config.model, vocab_size=1000)
    loader = open_loaders(replace(config, model=model, train=train, data=data), context.create(grid_of(config)))[
        0
    ].loader
    sums = set()
    for batch in loader.step_after(0):
        assert batch.starts is not None
        row = batch.weights_bs.flatten()
        sums |= {round(float(row[a:b].sum()), 3) for a, b in pairwise(batch.starts.tolist()) if row[a:b].any()}
        sizes = {b - a for a, b in pairwise(batch.starts.tolist())}
        assert sizes & {4, 40}
    assert sums == {11.0}  # half of the tokens of both


def test_text_beside_conversations_is_trained_whole(tmp_path: Path) -> None:
    chat = PackDataset(numbered(tmp_path / "pair", [5, 7, 3]), 11, 131)
    samples = Mixture([chat, SyntheticDataset(11, 131, 0, num_samples=30)], [BlendPhase(0, (0.5, 0.5))], seed=3)
    found = samples.read_documents(np.arange(30), with_starts=True)
    assert found.weights is not None
    of_text = np.array([len(starts) == 1 for starts in found.starts])
    assert of_text.any()
    assert found.weights[of_text].all()
    assert not found.weights[~of_text].all(axis=1).any()


def test_every_conversation_is_in_one_pack_whole_with_its_weights(prefix: Path) -> None:
    dataset = opened(prefix)
    ids = np.arange(len(dataset))
    tokens = dataset.read(ids)
    weights = dataset.weights(ids)
    found = []
    for row, starts, of_row in zip(tokens, dataset.starts(ids, tokens), weights, strict=True):
        for first, last in zip(starts, [*starts[1:], LENGTH + 1], strict=True):
            found.append((tuple(row[first:last]), tuple(of_row[first:last])))
    padding = [item for item in found if not any(item[1])]
    assert all(set(item[0]) == {256} for item in padding)
    file, stated = dataset.file, dataset._weights[:]
    spans = [(file.document_start(number), file.document_start(number + 1)) for number in range(len(file))]
    expected = [(tuple(file.tokens[a:b]), tuple(stated[a:b].astype(np.float32))) for a, b in spans]
    assert sorted(item for item in found if any(item[1])) == sorted(expected)
    assert len(padding) < len(dataset) == len(best_fit([b - a for a, b in spans], LENGTH + 1))
    assert f"40 conversations in {len(dataset)} packs, {dataset.fullness:.1%} full; " in dataset.describe()


def batches(dataset: PackDataset, treatment: Treatment | None = None, **options: Any) -> list[MicroBatch]:
    sizes = {"batch_size": lambda _: len(dataset), "micro_batch_size": 1, "seq_length": LENGTH, **options}
    loader = Loader(Mixture([dataset], seed=7), treatment=treatment or Treatment(apart=True), **sizes)
    return loader.step_after(0)


def trained(found: list[MicroBatch]) -> list[tuple[int, int, float]]:
    """Sample, target and weight of every target with a weight."""
    rows = []
    for batch in found:
        for sample, targets_s, weights_s in zip(batch.sample_ids_b, batch.targets_bs, batch.weights_bs, strict=True):
            kept = weights_s.nonzero().flatten()
            rows += [(int(sample), int(targets_s[at]), float(weights_s[at])) for at in kept]
    return sorted(rows)


def test_targets_with_weight_are_the_answers_in_every_layout(prefix: Path) -> None:
    """Faults first-answer-token-lost, odd-packs-cut: on ranks of dp and cp too, which cut samples anywhere."""
    dataset = opened(prefix)
    whole = trained(batches(dataset))
    text = bytes(target for _, target, _ in whole)
    expected = dataset.file.tokens[:][dataset._weights[:] == 1]
    assert sorted(text) == sorted(expected.tolist())
    by_dp = [batch for rank in range(3) for batch in batches(dataset, dp_rank=rank, dp_size=3)]
    assert trained(by_dp) == whole
    columns = [list(range(0, LENGTH, 3)), list(range(1, LENGTH, 3)), list(range(2, LENGTH, 3))]
    by_cp = [batch for part in columns for batch in batches(dataset, columns=part)]
    assert trained(by_cp) == whole
    assert trained(batches(dataset, needs_tokens=False)) == whole, "stages in the middle know the documents"


# Its positions are learned. Those of LLAMA are angles in fp32, and a pack counts them from its own start.
MODEL = replace(GPT, max_position_embeddings=LENGTH, vocab_size=257, attention_dropout=0.0, hidden_dropout=0.0)


def stage_in_double() -> torch.nn.Module:
    stage = tiny_models.build(tiny_models.config(MODEL), context.single()).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in stage.parameters():
            param.copy_(0.3 * torch.randn(param.shape, generator=generator, dtype=torch.float64))
    return stage


def summed(found: list[MicroBatch]) -> dict[str, torch.Tensor]:
    """The gradients of the sum of the losses of micro-batches."""
    stage = stage_in_double()
    for batch in found:
        stage(None, batch).backward()
    return gradients(stage)


@pytest.mark.parametrize("loss_mean", ["token", "sample"])
def test_packed_gradients_are_those_of_each_conversation_alone(prefix: Path, loss_mean: Any) -> None:
    """Fault micro-batches-of-unlike-targets: however many a micro-batch has, the sums are those of one batch."""
    dataset = opened(prefix)
    if loss_mean == "sample":
        dataset.weigh_alike(float(dataset.targets.mean()))
    packed = batches(dataset, micro_batch_size=len(dataset))
    alone = []
    count = dataset._weights[:].astype(np.int64)
    spans = [(dataset.file.document_start(number), dataset.file.document_start(number + 1)) for number in range(40)]
    mean = sum(int(count[a + 1 : b].sum()) for a, b in spans) / len(spans)
    for first, last in spans:
        tokens = torch.from_numpy(dataset.file.tokens[first:last].astype(np.int64))[None]
        weights = torch.from_numpy(count[first + 1 : last].astype(np.float64))[None]
        if loss_mean == "sample":
            weights = (weights * mean / weights.sum()).float()
        zero = torch.zeros(1, dtype=torch.int64)
        alone.append(MicroBatch.of_samples(tokens[:, :-1], tokens[:, 1:], weights.float(), zero))
    assert_close(summed(packed), summed(alone), rtol=1e-12)


def test_micro_batches_of_one_and_of_many_targets_add_up_to_one_batch(tmp_path: Path) -> None:
    """Packs with a single trained token beside packs of trained tokens alone, in fp64 (fault
    micro-batches-of-unlike-targets)."""
    lengths = [LENGTH + 1] * 4
    every = [[7], list(range(1, LENGTH + 1)), [LENGTH], list(range(100, 150))]
    tokens = np.random.default_rng(0).integers(0, 257, sum(lengths))
    dataset = opened(write_pair(tmp_path / "pair", tokens, lengths, every))
    assert sorted(int(batch.weights_bs.sum()) for batch in batches(dataset)) == [1, 1, 50, LENGTH]
    assert_close(summed(batches(dataset)), summed(batches(dataset, micro_batch_size=4)), rtol=1e-12)


def test_each_conversation_counts_alike_with_loss_mean_sample(prefix: Path) -> None:
    dataset = opened(prefix)
    by_token = trained(batches(dataset))
    dataset.weigh_alike(len(by_token) / 40)
    found = batches(dataset)
    assert [item[:2] for item in trained(found)] == [item[:2] for item in by_token]
    sums = []
    for batch in found:
        assert batch.starts is not None
        edges = [*batch.starts.tolist()]
        row = batch.weights_bs.flatten()
        sums += [float(row[a:b].sum()) for a, b in pairwise(edges) if row[a:b].any()]
    assert len(sums) == 40
    np.testing.assert_allclose(sums, len(by_token) / 40, rtol=1e-5)


def test_what_packs_cannot_hold_is_told(prefix: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"conversation \d+ has \d+ tokens, a sample of train.seq_length=20 holds 21"):
        opened(prefix, seq_length=20)
    with pytest.raises(DataError, match="no conversation in its part"):
        opened(prefix, part=(0.0, 0.001))
    assert isinstance(
        open_dataset(str(prefix), seq_length=LENGTH, vocab_size=257, seed=1, tokenizer="bytes"), PackDataset
    )
    with pytest.raises(DataError, match=r"talks.json: the id of padding, 256, is outside the vocabulary of 256: set"):
        PackDataset(prefix, LENGTH, 256)
    silent = numbered(tmp_path / "silent", [5, 4, 3], [[1], [0], [2]])
    with pytest.raises(DataError, match=r"conversation 1 has no trained token .*prepare the conversations again"):
        PackDataset(silent, 11, 131)
    with pytest.raises(DataError, match=r"conversation 2, offset 1: token id 10 is outside the vocabulary of 10: set"):
        PackDataset(numbered(tmp_path / "ids", [5, 4, 3], eod=0), 11, 10).read(np.arange(1))
    copy = tmp_path / "copy"
    for suffix in ("bin", "idx", "weights", "json"):
        Path(f"{copy}.{suffix}").write_bytes(Path(f"{prefix}.{suffix}").read_bytes())
    with Path(f"{copy}.weights").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(DataError, match=r"copy.weights: has [\d,]+ bytes, and the pair has [\d,]+ tokens"):
        opened(copy)
    Path(f"{copy}.weights").unlink()
    with pytest.raises(DataError, match=r"copy.weights: No such file or directory; .*copy.json says that the pair has"):
        opened(copy)
    assert ChunkDataset(prefix, LENGTH, 257).weights(np.arange(2)) is None


DATA = (
    "--data.documents",
    "apart",
    "--model.max_position_embeddings",
    str(LENGTH),
    "--train.seq_length",
    str(LENGTH),
    "--train.global_batch_size",
    "4",
)


def test_a_run_on_conversations_resumes_bitwise(prefix: Path, tmp_path: Path) -> None:
    """Five steps, and the same ones by a run that is killed in its fourth step; the validation has an accuracy."""
    flags = ("--data.train", str(prefix), "--data.validation", str(prefix), "--data.tokenizer", "bytes", *DATA)
    flags += ("--model.vocab_size", "257", "--train.loss_mean", "sample", "--parallel.dp", "2", "--launch.nproc", "2")
    flags += ("--checkpoint.every", "2", "--train.steps", "5")
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    killed = program.run(*flags, cwd=tmp_path / "parts", plant=on_rank(1, 3, lambda ctx: os.kill(os.getpid(), 9)))
    assert killed.code != 0
    for name in ("whole", "parts"):
        ended = program.run(*flags, cwd=tmp_path / name)
        assert ended.code == 0, ended.err
        assert "40 conversations in " in ended.out
        assert ("resumed step 2 from" in ended.out) == (name == "parts")
    folders = [tmp_path / name / "run" for name in ("whole", "parts")]
    found, expected = (stored(folder / "checkpoints/step_00000005") for folder in folders)
    assert_bitwise(found, expected, "resumed")
    lines = [json.loads(line) for line in (folders[0] / "metrics.jsonl").read_text().splitlines()]
    # The sum of weights of a step is about the number of its trained tokens, whatever the mean is of.
    assert all(20 < line["tokens"] < 4 * LENGTH for line in lines if "loss" in line)
    assert set(lines[-1]) == {"step", "validation_loss", "validation_accuracy"}
    assert 0 <= lines[-1]["validation_accuracy"] < 0.5
    assert all(line["tokens_per_second"] * line["step_seconds"] == pytest.approx(4 * LENGTH) for line in lines[:-1])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--data.documents", "joined"), "packs of them need data.documents=apart, or they read each other"),
        (
            ("--data.fim_rate", "0.5", "--data.fim_tokens", "1", "2", "3"),
            "data.fim_rate=0.5 would tear their turns apart",
        ),
    ],
)
def test_options_that_would_mix_conversations_are_refused(
    prefix: Path, flags: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    own = [word for pair in zip(DATA[::2], DATA[1::2], strict=True) if pair[0] not in flags for word in pair]
    given = ("--data.train", str(prefix), "--data.tokenizer", "bytes", "--model.vocab_size", "257", *own, *flags)
    ended = program.run(*given, cwd=tmp_path)
    assert ended.code != 0
    assert words in ended.err


def test_loss_mean_sample_is_of_conversations_alone(tmp_path: Path) -> None:
    ended = program.run("--train.loss_mean", "sample", cwd=tmp_path)
    assert ended.code != 0
    assert "synthetic has no conversations, whose means train.loss_mean=sample takes; use token" in ended.err
