"""Pairs of answers: from lines of JSON to the first and the last step of DPO, and its resumption."""

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megapar_models.convert.adapters import Merge, merge
from numpy.typing import NDArray

from megapar.base.errors import DataError
from megapar.data.indexed import IndexedDataset
from megapar.data.loader import Loader, Mixture
from megapar.data.pairs import PairDataset
from megapar.data.prepared import merge_prepared, read_sidecar, read_weights, split
from megapar.data.samples import Treatment
from megapar.data.scores import read_scores, references_path, writing_scores
from megapar.data.sources import open_dataset
from tests.support import program
from tests.support.pairs import ROWS, prepare
from tests.support.runs import assert_bitwise, stored
from tools import score


def texts(prefix: Path) -> list[tuple[str, str]]:
    """Each document, and what of it has a weight."""
    dataset = IndexedDataset(prefix)
    weights = read_weights(prefix, len(dataset.tokens))
    found = []
    for number in range(len(dataset)):
        inside = slice(dataset.document_start(number), dataset.document_start(number + 1))
        tokens = np.asarray(dataset.tokens[inside])
        found.append((bytes(tokens.tolist()).decode(), bytes(tokens[weights[inside] == 1].tolist()).decode()))
    return found


# Preparing


def test_members_follow_each_other_with_weights_on_their_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = prepare(monkeypatch, tmp_path, ROWS)
    assert texts(prefix)[:6] == [
        ("<u>2+3;<a>5;", "5;"),
        ("<u>2+3;<a>six;", "six;"),
        ("<u>hi;<a>hello;", "hello;"),
        ("<u>hi;<a>?;", "?;"),
        ("<u>x;<a>y;<u>a;<a>bb;", "bb;"),
        ("<u>x;<a>y;<u>a;<a>cccc;", "cccc;"),
    ]
    sidecar = read_sidecar(prefix)
    assert sidecar is not None
    assert (sidecar["documents"], sidecar["chat"]["pairs"]) == (24, True)
    parts = split(prefix, tmp_path / "part", (0.55, 0.45))
    assert [len(part) for part in parts.values()] == [14, 10], "pairs are not torn"
    merged = merge_prepared([tmp_path / "part_validation", tmp_path / "part_train"], tmp_path / "merged")
    assert len(merged) == 24
    assert texts(tmp_path / "merged")[10:12] == texts(prefix)[:2]

    short = prepare(monkeypatch, tmp_path, ROWS, "--max_length", "28", "--too_long", "skip", name="short")
    assert len(IndexedDataset(short)) < 24
    assert max(len(a) + len(b) for (a, _), (b, _) in zip(texts(short)[::2], texts(short)[1::2], strict=True)) <= 28


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "chosen": "b"}, "line 1: has prompt, chosen; a pair has prompt, chosen and rejected"),
        ({"chosen": "b", "rejected": "c"}, "chosen is a text without a prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "line 1: chosen and rejected are the same"),
        ({"prompt": "a", "chosen": "b" * 99, "rejected": "c"}, "both answers have"),
        ({"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "b"}]}, "assistant"),
    ],
)
def test_what_is_no_pair_is_refused_by_its_line(
    row: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        prepare(monkeypatch, tmp_path, [row], "--max_length", "64")
    error = capsys.readouterr().err
    assert words in error
    assert not list(tmp_path.glob("pairs*"))


# Samples


def test_samples_are_pairs_with_the_references_of_their_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = prepare(monkeypatch, tmp_path, ROWS)
    file = IndexedDataset(prefix)
    with pytest.raises(DataError, match=r"pairs\.reference: no column .*; write it with megapar score CHECKPOINT"):
        PairDataset(prefix, 48, 257, with_references=True)
    column = -np.arange(1, len(file.tokens) + 1, dtype=np.float32) / 8
    with writing_scores(tmp_path / "pairs.reference", file, {}) as output:
        output.write(column.tobytes())
    dataset = PairDataset(prefix, 48, 257, with_references=True)
    loader = Loader(
        Mixture([dataset], seed=None),
        batch_size=lambda _: 4,
        micro_batch_size=4,
        seq_length=48,
        treatment=Treatment(apart=True),
    )
    (batch,) = loader.step_after(0)
    for row in range(4):
        for member in (0, 1):
            text, answer = texts(prefix)[2 * row + member]
            inside = batch.documents_in_samples_bs()[row] == member
            assert bytes(batch.tokens_bs[row, inside].tolist()).decode() == text
            targets = batch.targets_bs[row, inside][batch.weights_bs[row, inside] == 1]
            assert bytes(targets.tolist()).decode() == answer
            stop = file.document_start(2 * row + member + 1)
            expected = column[stop - len(answer) : stop].sum()
            assert batch.references_bd is not None
            assert batch.references_bd[row, member] == pytest.approx(expected)
    padding = batch.documents_in_samples_bs() == 2
    assert padding.any()
    assert not batch.weights_bs[padding].any()
    assert str(tmp_path / "pairs.reference") in dataset.fingerprints()
    columns = batch.columns(torch.tensor([0, 1, 46, 47]))
    assert torch.equal(columns.references_bd, batch.references_bd)

    half = PairDataset(prefix, 48, 257, (0.5, 1.0))
    assert len(half) == 6
    assert (half.read(np.array([0])) == dataset.read(np.array([6]))).all()
    with pytest.raises(DataError, match=r"pair 0 has 26 tokens, and a sample of train\.seq_length=25 holds both"):
        PairDataset(prefix, 25, 257)


def test_pairs_are_for_objectives_of_pairs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = str(prepare(monkeypatch, tmp_path, ROWS))
    options: dict[str, Any] = {"seq_length": 48, "vocab_size": 257, "seed": 1, "tokenizer": "bytes"}
    assert isinstance(open_dataset(prefix, **options, kind="pairs"), PairDataset)
    with pytest.raises(DataError, match=r"has pairs of a chosen and a rejected answer; use train\.objective dpo"):
        open_dataset(prefix, **options)
    with pytest.raises(DataError, match=r"synthetic has no pairs of answers; megapar preprocess preferences"):
        open_dataset("synthetic", **options, kind="pairs")


# Training


def test_dpo_begins_at_log_2_learns_and_resumes_bitwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is the model that the run starts from, scored in another layout: every log-ratio begins at 0."""
    prefix = prepare(monkeypatch, tmp_path, ROWS)
    sizes = ("--model.vocab_size", "257", "--train.seq_length", "48", "--log.no-tensorboard")
    pretrained = program.run(*sizes, "--train.steps", "2", cwd=tmp_path)
    assert pretrained.code == 0, pretrained.err
    checkpoint = tmp_path / "run/checkpoints/step_00000002"
    words = [str(checkpoint), "--input", str(prefix), "--output", f"{prefix}.reference", "--launch.nproc", "2"]
    monkeypatch.setattr(sys, "argv", ["score.py", *words, "--parallel.cp", "2", "--train.seq_length", "60"])
    torch.set_num_threads(1)
    assert score.main() == 0

    dpo = [*sizes, "--train.objective", "dpo", "--train.beta", "0.5", "--checkpoint.init_from", str(checkpoint)]
    dpo += ["--data.train", str(prefix), "--data.documents", "apart", "--train.global_batch_size", "12"]
    dpo += ["--train.steps", "6", "--checkpoint.every", "3", "--optimizer.warmup_steps", "0", "--optimizer.lr", "3e-3"]
    dpo += ["--launch.nproc", "2", "--parallel.pp", "2", "--data.validation", str(prefix), "--train.eval_samples", "12"]
    ended = program.run(*dpo, "--run_dir", "whole", cwd=tmp_path)
    assert ended.code == 0, ended.err
    lines = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[0]["losses"]["reward_margin"] == pytest.approx(0, abs=1e-5)
    assert steps[-1]["loss"] < 0.6
    assert steps[-1]["losses"]["reward_margin"] > 0.2
    assert steps[-1]["losses"]["accuracy"] > 0.9
    (validation,) = (line["validation_loss"] for line in lines if "validation_loss" in line)
    assert validation == pytest.approx(steps[-1]["loss"], rel=1e-4), "the same pairs, after an update of rate 0"
    assert "accuracy" in ended.out

    checkpoints = tmp_path / "resumed/checkpoints"
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(checkpoints / "step_00000006")
    resumed = program.run(*dpo, "--run_dir", "resumed", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert "resumed step 3" in resumed.out
    whole = stored(tmp_path / "whole/checkpoints/step_00000006")
    assert_bitwise(stored(checkpoints / "step_00000006"), whole, "resumed")


def test_three_references_of_adapters_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base, adapters turned off, and other weights: a checkpoint with no adapters that computes the same."""
    prefix = prepare(monkeypatch, tmp_path, ROWS)
    sizes = ("--model.vocab_size", "257", "--train.seq_length", "48", "--log.no-tensorboard", "--train.steps", "2")
    rate = ("--optimizer.warmup_steps", "0", "--optimizer.lr", "3e-2")
    assert program.run(*sizes, "--run_dir", "base", cwd=tmp_path).code == 0
    base = tmp_path / "base/checkpoints/step_00000002"
    tuned = ("--checkpoint.init_from", str(base), "--adapter.rank", "4", *rate)
    ended = program.run(*sizes, *tuned, "--run_dir", "adapted", cwd=tmp_path)
    assert ended.code == 0, ended.err
    adapted = tmp_path / "adapted/checkpoints/step_00000002"
    torch.set_num_threads(1)

    def scored(checkpoint: Path, *flags: str) -> NDArray[np.float32]:
        words = [str(checkpoint), "--input", str(prefix), "--output", f"{prefix}.reference", *flags]
        monkeypatch.setattr(sys, "argv", ["score.py", *words, "--train.seq_length", "60"])
        assert score.main() == 0
        return np.array(read_scores(references_path(prefix), IndexedDataset(prefix)))

    alone = scored(base)
    tp = ("--parallel.tp", "2", "--launch.nproc", "2")
    close = {"rtol": 1e-6, "atol": 1e-6}
    with_adapters = scored(adapted, *tp)
    assert np.abs(with_adapters - alone).max() > 1e-2
    merge(Merge(adapted, base, tmp_path / "merged"))
    np.testing.assert_allclose(scored(tmp_path / "merged"), with_adapters, **close)
    np.testing.assert_allclose(scored(adapted, "--adapters_off", *tp), alone, **close)

    # New adapters change nothing, so all log-ratios begin at 0.
    dpo = [*sizes, *tuned, "--train.objective", "dpo", "--data.train", str(prefix), "--data.documents", "apart"]
    ended = program.run(*dpo, "--run_dir", "dpo", "--train.global_batch_size", "12", cwd=tmp_path)
    assert ended.code == 0, ended.err
    first = json.loads((tmp_path / "dpo/metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)

    # Trained ones beside the column, and turned off in each step without one.
    further = [*dpo, "--train.global_batch_size", "12", "--adapter.init_from", str(adapted)]
    assert program.run(*further, "--run_dir", "stored", cwd=tmp_path).code == 0
    references_path(prefix).unlink()
    further += ["--train.references", "adapters_off", "--launch.nproc", "2", "--parallel.pp", "2"]
    ended = program.run(*further, "--run_dir", "off", cwd=tmp_path)
    assert ended.code == 0, ended.err
    runs = [(tmp_path / name / "metrics.jsonl").read_text().splitlines()[:2] for name in ("stored", "off")]
    stored_losses, off_losses = ([json.loads(line)["loss"] for line in lines] for lines in runs)
    assert abs(stored_losses[0] - math.log(2)) > 1e-4
    assert off_losses == pytest.approx(stored_losses, rel=1e-6)

    with pytest.raises(SystemExit):
        scored(base, "--adapters_off")
    # Another base at the same place is refused.
    shutil.rmtree(base)
    shutil.copytree(tmp_path / "merged", base)
    with pytest.raises(SystemExit):
        scored(adapted)
