"""Reward models: a scalar head trained on pairs, from a language model's weights; its files, its scores."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megapar_models.convert.adapters import Merge, NativeToPeft, merge, native_to_peft
from megapar_models.convert.exported import hf_recipes
from megapar_models.convert.recipes import places
from megapar_models.convert.saved import saved_config
from megapar_tools.verify import logical

from megapar.base.errors import ConfigError
from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.load import Reader
from megapar.config.model_options import ModelConfig
from megapar.declare.params import MAIN
from megapar.step.state import StepResult
from megapar.step.step import train_step
from tests.support import program
from tests.support.grid import Layout, make_state, micro_batches
from tests.support.hugging_face import Case, assert_parity, assert_same_tensors, refused, save_rewards
from tests.support.pairs import ROWS, prepare
from tests.support.runs import assert_bitwise, stored
from tests.support.sweeps import slow_but
from tools import generate, score
from tools.convert_checkpoint import HfToNative, NativeToHf, hf_to_native, native_to_hf

SIZES = ("--model.vocab_size", "257", "--train.seq_length", "48", "--log.no-tensorboard")


HEAD = f"{MAIN}.score.weight"
KINDS = [
    Case("llama", {"tie_word_embeddings": True}),
    Case("qwen2"),
    Case("qwen3"),
    Case("mistral", {"sliding_window": 16}),
]


# Transformers


def transformers() -> Any:
    return pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_files_of_transformers_are_converted_bitwise_both_ways(case: Case, tmp_path: Path) -> None:
    theirs = save_rewards(tmp_path / "hf", case)
    hf_to_native(HfToNative(theirs, tmp_path / "native"))
    assert_parity(tmp_path / "native")
    native_to_hf(NativeToHf(tmp_path / "native", tmp_path / "back", verify_tokenizer=False))
    assert_same_tensors(tmp_path / "back", theirs)
    (tmp_path / "native/config.json").unlink()
    # A config.json of our own describes the same model.
    native_to_hf(NativeToHf(tmp_path / "native", tmp_path / "anew", verify_tokenizer=False))
    assert_same_tensors(tmp_path / "anew", theirs)
    assert_parity(tmp_path / "anew")
    written = json.loads((tmp_path / "anew/config.json").read_text())
    expected = json.loads((theirs / "config.json").read_text())
    assert {key: written[key] for key in ("architectures", "id2label", "label2id")} == {
        key: expected[key] for key in ("architectures", "id2label", "label2id")
    }


def our_step(native: Path) -> tuple[StepResult, dict[str, torch.Tensor], list[torch.Tensor]]:
    """A step on random pairs from a checkpoint: the result, every gradient, and the answers in order."""
    manifest = read_manifest(native)
    model = saved_config(manifest).model
    config = Layout(model, micro_batch_size=12, zero_stage=0, objective="reward").config()
    state = make_state(replace(config, optimizer=replace(config.optimizer, clip_grad=0.0)))
    with Reader(native, manifest) as reader:
        weights = {name.removeprefix(f"{MAIN}."): reader.tensor(name) for name in manifest.tensors}
    logical.fill(state.stages.values(), weights)
    (batch,) = micro_batches(config, state.ctx, 0)
    batch = replace(batch, tokens_bs=batch.tokens_bs % 130)  # without the token of padding
    number_bs = batch.documents_in_samples_bs()
    answers = [tokens[number == n] for tokens, number in zip(batch.tokens_bs, number_bs, strict=True) for n in (0, 1)]
    result = train_step(state, [batch])
    return result, logical.assemble([logical.held_gradients(state)]), answers


def assert_gradients(model: ModelConfig, found: dict[str, torch.Tensor], theirs: torch.nn.Module) -> None:
    parameters = dict(theirs.named_parameters())
    sources = places(hf_recipes(model))
    assert found.keys() == sources.keys()
    for name, gradient in found.items():
        ((source, part),) = sources[name]
        expected = part.read(parameters[source].grad)
        assert (gradient - expected).norm() < 1e-6 * expected.norm(), name


def test_losses_and_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    """In fp64, in a batch with padding (fault reward-of-another-token)."""
    folder = save_rewards(tmp_path / "hf", KINDS[0])
    hf_to_native(HfToNative(folder, tmp_path / "native", verify=False))
    result, gradients, answers = our_step(tmp_path / "native")
    theirs = transformers().AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    padded = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=130)
    rewards_b2 = theirs(padded, attention_mask=padded != 130).logits.view(-1, 2)
    loss = -F.logsigmoid(rewards_b2[:, 0] - rewards_b2[:, 1]).mean()
    loss.backward()

    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    margins = (rewards_b2[:, 0] - rewards_b2[:, 1]).detach()
    means = {"reward_chosen": rewards_b2[:, 0].mean(), "reward_margin": margins.mean()}
    means["accuracy"] = (margins > 0).double().mean()
    assert result.losses == pytest.approx({name: value.item() for name, value in means.items()}, rel=1e-5)
    assert 0 < result.losses["accuracy"] < 1
    assert_gradients(saved_config(read_manifest(tmp_path / "native")).model, gradients, theirs)


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_the_trainer_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="not run: needs trl, pip install '.[judges]'")
    datasets = pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    folder = save_rewards(tmp_path / "hf", KINDS[0])
    hf_to_native(HfToNative(folder, tmp_path / "native", verify=False))
    result, gradients, answers = our_step(tmp_path / "native")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0, "<pad>": 130}, unk_token="x"))
    tokenizer = transformers().PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<pad>")
    theirs = transformers().AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    options = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": [], "max_steps": 1}
    # The trainer asks for some. The pairs go around it, as tokens.
    rows = datasets.Dataset(
        datasets.table.InMemoryTable.from_pydict({"chosen": ["x"], "rejected": ["x"]}), fingerprint="x"
    )
    trainer = trl.RewardTrainer(
        theirs, args=trl.RewardConfig(str(tmp_path / "run"), **options), train_dataset=rows, processing_class=tokenizer
    )
    pairs = [
        {"chosen_ids": chosen.tolist(), "rejected_ids": rejected.tolist()}
        for chosen, rejected in zip(answers[::2], answers[1::2], strict=True)
    ]
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(pairs))
    loss.backward()

    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert_gradients(saved_config(read_manifest(tmp_path / "native")).model, gradients, theirs)


@pytest.mark.parametrize(
    ("case", "labels", "words"),
    [
        (KINDS[0], 3, "num_labels is 3, and a head of one number is converted (model.head=score)"),
        (KINDS[0], 2, "num_labels is 2, and a head"),
        (
            Case("gemma"),
            1,
            "of such classes LlamaForSequenceClassification, MistralForSequenceClassification, Qwen2For",
        ),
    ],
)
def test_other_classes_are_refused_in_one_line(case: Case, labels: int, words: str, tmp_path: Path) -> None:
    save_rewards(tmp_path / "hf", case, labels=labels)
    refused(ConfigError, HfToNative(tmp_path / "hf", tmp_path / "native"), words)


# Runs


@pytest.mark.parametrize("tied", slow_but([1], [False, True]))
def test_a_reward_model_starts_from_a_language_model_learns_and_resumes_bitwise(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    assert weights - {HEAD} == {name for name in before if name.startswith(f"{MAIN}.")} - {f"{MAIN}.head.weight"}
    assert_bitwise({n: after[n] for n in weights - {HEAD}}, {n: before[n] for n in weights - {HEAD}}, "started")
    assert after[HEAD].shape == (1, after[f"{MAIN}.embedding.weight"].shape[1])
    assert 0.015 < after[HEAD].std() < 0.025, "initializer_range"

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

    monkeypatch.setattr(sys, "argv", ["generate.py", str(whole), "--prompt", "a"])
    with pytest.raises(SystemExit):
        generate.main()
    assert "model.head=score: the model rates texts and writes none; use score.py" in capsys.readouterr().err

    # A reward model is no start of a language model, and of another reward model it is one, with its head.
    refused = program.run(*SIZES, "--checkpoint.init_from", str(whole), "--run_dir", "back", cwd=tmp_path)
    assert refused.code != 0
    assert "model.head: score | not stated" in refused.err
    ended = program.run(*reward, *still, "--checkpoint.init_from", str(whole), "--run_dir", "again", cwd=tmp_path)
    assert ended.code == 0, ended.err
    found = stored(tmp_path / "again/checkpoints/step_00000001")
    assert torch.equal(found[HEAD], stored(whole)[HEAD])


@pytest.mark.slow
def test_adapters_of_a_reward_model_are_scored_merged_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The drawn head is trained beside the adapters, and lies in their checkpoint."""
    prefix = prepare(monkeypatch, tmp_path, ROWS)
    assert program.run(*SIZES, "--train.steps", "2", cwd=tmp_path).code == 0
    base = tmp_path / "run/checkpoints/step_00000002"
    flags = [*SIZES, "--train.objective", "reward", "--model.head", "score", "--optimizer.warmup_steps", "0"]
    flags += ["--data.train", str(prefix), "--data.documents", "apart", "--train.global_batch_size", "12"]
    flags += ["--adapter.rank", "4", "--optimizer.lr", "3e-2", "--train.steps", "4", "--checkpoint.every", "2"]
    flags += ["--checkpoint.init_from", str(base)]
    tp = ["--launch.nproc", "2", "--parallel.tp", "2"]
    ended = program.run(*flags, *tp, "--run_dir", "whole", cwd=tmp_path)
    assert ended.code == 0, ended.err
    adapted = tmp_path / "whole/checkpoints/step_00000004"
    assert {name for name in stored(adapted) if name.startswith(f"{MAIN}.") and ".lora_" not in name} == {HEAD}
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/step_00000004")
    ended = program.run(*flags, *tp, "--run_dir", "resumed", cwd=tmp_path)
    assert "resumed step 2" in ended.out, ended.err
    assert_bitwise(stored(tmp_path / "resumed/checkpoints/step_00000004"), stored(adapted), "resumed")

    # Norms that were trained too are merged as well.
    trained = ["--train.trainable", "*.lora_*", "*norm*", "score.weight"]
    ended = program.run(*flags, *trained, "--run_dir", "norms", cwd=tmp_path)
    assert ended.code == 0, ended.err
    torch.set_num_threads(1)

    def rewards(checkpoint: Path, *words: str) -> list[float]:
        output = str(tmp_path / "rewards.jsonl")
        monkeypatch.setattr(
            sys, "argv", ["score.py", str(checkpoint), "--input", str(prefix), "--output", output, *words]
        )
        assert score.main() == 0
        return [json.loads(line)["reward"] for line in Path(output).read_text().splitlines()]

    found = []
    for name in ("whole", "norms"):
        checkpoint = tmp_path / name / "checkpoints/step_00000004"
        merge(Merge(checkpoint, base, tmp_path / f"{name}-merged"))
        found.append(rewards(checkpoint))
        np.testing.assert_allclose(rewards(tmp_path / f"{name}-merged"), found[-1], rtol=1e-5, atol=1e-5)
    assert np.abs(np.subtract(*found)).max() > 1e-2
    hf = tmp_path / "hf"
    native_to_hf(NativeToHf(tmp_path / "whole-merged", hf, verify_tokenizer=False))
    assert json.loads((hf / "parity.json").read_text())["prompts"]

    with pytest.raises(SystemExit):
        rewards(adapted, "--adapters_off")
    assert f"--adapters_off: {base} has no head of rewards" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="PEFT's files get no head; merge, then native-to-hf"):
        native_to_peft(NativeToPeft(adapted, tmp_path / "peft"))
    untrained = program.run(*flags, "--train.trainable", "*.lora_*", "--run_dir", "untrained", cwd=tmp_path)
    assert untrained.code != 0
    assert "has no score.weight, and train.trainable=*.lora_* does not train it: add score.weight" in untrained.err


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
