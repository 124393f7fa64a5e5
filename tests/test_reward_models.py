"""Reward models: a scalar head trained on pairs, from a language model's weights; its files, its scores."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from megapar.checkpoint.format import read_manifest
from megapar.params import MAIN
from tests.support import program
from tests.support.runs import assert_bitwise, stored
from tests.test_data_pairs import ROWS, prepare

SIZES = ("--model.vocab_size", "257", "--train.seq_length", "48", "--log.no-tensorboard")


@pytest.mark.parametrize("tied", [False, True])
def test_a_reward_model_starts_from_a_language_model_learns_and_resumes_bitwise(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is drawn, all other weights are read, and the vocabulary's head is left out."""
    prefix = prepare(monkeypatch, tmp_path, ROWS)
    tie = ["--model.tie_word_embeddings"] if tied else []
    pretrained = program.run(*SIZES, *tie, "--train.steps", "2", cwd=tmp_path)
    assert pretrained.code == 0, pretrained.err
    base = tmp_path / "run/checkpoints/step_00000002"

    reward = [*SIZES, "--train.objective", "reward", "--model.head", "score", "--optimizer.warmup_steps", "0"]
    reward += ["--data.train", str(prefix), "--data.documents", "apart", "--train.global_batch_size", "12"]
    reward += ["--data.validation", str(prefix), "--train.eval_samples", "12"]
    reward += ["--launch.nproc", "2", "--parallel.pp", "2"]
    from_base = ["--checkpoint.init_from", str(base)]
    still = ["--optimizer.lr", "0", "--train.steps", "1"]
    first = program.run(*reward, *from_base, *still, "--run_dir", "first", cwd=tmp_path)
    assert first.code == 0, first.err
    assert "the head is drawn, and the one of the vocabulary is not used" in first.out
    before = stored(base)
    after = stored(tmp_path / "first/checkpoints/step_00000001")
    weights = {name for name in after if name.startswith(f"{MAIN}.")}
    head = f"{MAIN}.score.weight"
    assert weights - {head} == {name for name in before if name.startswith(f"{MAIN}.")} - {f"{MAIN}.head.weight"}
    assert_bitwise({n: after[n] for n in weights - {head}}, {n: before[n] for n in weights - {head}}, "started")
    assert after[head].shape == (1, after[f"{MAIN}.embedding.weight"].shape[1])
    assert 0.015 < after[head].std() < 0.025, "initializer_range"

    learning = [*reward, *from_base, "--train.steps", "6", "--checkpoint.every", "2", "--optimizer.lr", "3e-3"]
    ended = program.run(*learning, "--run_dir", "whole", cwd=tmp_path)
    assert ended.code == 0, ended.err
    lines = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert steps[0]["loss"] == pytest.approx(np.log(2), abs=0.1)
    assert steps[-1]["loss"] < 0.4
    assert steps[-1]["losses"]["accuracy"] > 0.9
    assert steps[-1]["losses"]["reward_margin"] > steps[0]["losses"]["reward_margin"] + 0.5
    assert any("validation_loss" in line for line in lines)

    checkpoints = tmp_path / "resumed/checkpoints"
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    for step in (4, 6):
        shutil.rmtree(checkpoints / f"step_{step:08d}")
    resumed = program.run(*learning, "--run_dir", "resumed", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert "resumed step 2" in resumed.out
    whole = tmp_path / "whole/checkpoints/step_00000006"
    assert_bitwise(stored(checkpoints / "step_00000006"), stored(whole), "resumed")
    assert read_manifest(whole).model_config["head"] == "score"

    # A reward model is no start of a language model, and of another reward model it is one, with its head.
    refused = program.run(*SIZES, "--checkpoint.init_from", str(whole), "--run_dir", "back", cwd=tmp_path)
    assert refused.code != 0
    assert "model.head: score | not stated" in refused.err
    ended = program.run(*reward, *still, "--checkpoint.init_from", str(whole), "--run_dir", "again", cwd=tmp_path)
    assert ended.code == 0, ended.err
    found = stored(tmp_path / "again/checkpoints/step_00000001")
    assert torch.equal(found[head], stored(whole)[head])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--train.objective reward", "train.objective=reward, model.head=vocabulary: the objective is of a head score"),
        (
            "--model.head score",
            "train.objective=cross_entropy, model.head=score: the objective is of a head vocabulary",
        ),
        ("--train.objective reward --model.head score --model.tie_word_embeddings", "use False"),
        ("--train.objective reward --model.head score --kernels.loss_chunk 8", "no logits to compute in chunks; use 0"),
    ],
)
def test_what_does_not_fit_the_head_is_refused(flags: str, words: str, tmp_path: Path) -> None:
    ended = program.run(*SIZES, "--data.documents", "apart", *flags.split(), cwd=tmp_path)
    assert ended.code != 0
    assert words in ended.err
    assert "Traceback" not in ended.err
