"""Objectives of preferences against TRL's DPOTrainer, in one process, on the same pairs and models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.build import build_stages
from megapar_models.registry import validate
from megapar_tools.verify import logical
from torch import Tensor

from megapar.config.options import Config, DataConfig, OptimizerConfig, TrainConfig
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from megapar.step.step import train_step
from megapar.train.trainer import assemble
from tests.support import close
from tests.support.model_types import TYPES
from tests.support.published import VOCABULARY, converted, logits_of, random_model, weights_of

pytestmark = pytest.mark.slow
trl = pytest.importorskip("trl", reason="not run: needs trl, pip install '.[judges]'")

BETA = 0.3
# Tokens of the prompt, of the chosen and of the rejected answer. The longest pair leaves one token of padding.
PAIRS = ((4, 6, 3), (2, 1, 9), (5, 3, 3))
LENGTH = 22


def examples() -> list[dict[str, list[int]]]:
    """The pairs as TRL tokenizes them."""
    generator = torch.Generator().manual_seed(3)
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    ids = [[torch.randint(VOCABULARY, (size,), generator=generator).tolist() for size in sizes] for sizes in PAIRS]
    return [dict(zip(names, one, strict=True)) for one in ids]


def batch_of(pairs: list[dict[str, list[int]]]) -> MicroBatch:
    """A sample for each pair: prompt and chosen answer, prompt and rejected one, padding."""
    tokens_bs = torch.zeros(len(pairs), LENGTH, dtype=torch.int64)
    weights_bs = torch.zeros(len(pairs), LENGTH)
    starts = []
    for row, pair in enumerate(pairs):
        at = 0
        for answer in ("chosen_ids", "rejected_ids"):
            ids = pair["prompt_ids"] + pair[answer]
            tokens_bs[row, at : at + len(ids)] = torch.tensor(ids)
            starts.append(row * LENGTH + at)
            at += len(ids)
            weights_bs[row, at - len(pair[answer]) - 1 : at - 1] = 1.0
        starts.append(row * LENGTH + at)
    last = torch.tensor([*starts, len(pairs) * LENGTH], dtype=torch.int32)
    return MicroBatch.of_samples(tokens_bs, tokens_bs.roll(-1, 1), weights_bs, torch.arange(len(pairs)), last)


def references(stage: Any, batch: MicroBatch) -> Tensor:
    """The log-probabilities of both answers by another model, [b, 2]."""
    with torch.no_grad():
        log_probs = logits_of(stage, batch).log_softmax(-1).gather(-1, batch.targets_bs[..., None])[..., 0]
    numbers = batch.documents_in_samples_bs()
    return torch.stack([((numbers == n) * log_probs * batch.weights_bs).sum(1) for n in (0, 1)], 1)


def their_trainer(model: Any, reference: Any, kind: str, smoothing: float, folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    datasets = pytest.importorskip("datasets")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0, "<pad>": 1}, unk_token="x"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<pad>")
    options = {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "max_length": None,
        "max_steps": 1,
    }
    arguments = trl.DPOConfig(str(folder), loss_type=[kind], beta=BETA, label_smoothing=smoothing, **options)
    names = ("prompt", "chosen", "rejected")
    # The trainer asks for some. The pairs above go around it, as tokens.
    rows = datasets.table.InMemoryTable.from_pydict({name: ["x"] for name in names})
    rows = datasets.Dataset(rows, fingerprint="x")
    return trl.DPOTrainer(model, reference, args=arguments, train_dataset=rows, processing_class=tokenizer)


@pytest.mark.parametrize(
    ("objective", "kind", "smoothing"),
    [("dpo", "sigmoid", 0.0), ("dpo", "robust", 0.1), ("dpo_norm", "sigmoid_norm", 0.0), ("ipo", "ipo", 0.0)],
)
def test_losses_and_gradients_are_those_of_the_trainer_of_trl(
    objective: str, kind: str, smoothing: float, tmp_path: Path
) -> None:
    case = TYPES["llama"]
    model, reference = (random_model(case.model_type, case.fields) for _ in range(2))
    with torch.no_grad():
        for number, param in enumerate(reference.parameters()):
            param.mul_(1 + 0.1 * (number % 3))
    for name, one in (("model", model), ("reference", reference)):
        one.save_pretrained(tmp_path / name)
    base = converted(tmp_path / "model", tmp_path / "native")
    batch = batch_of(examples())
    references_bd = references(converted(tmp_path / "reference", tmp_path / "other"), batch)

    trainer = their_trainer(model, reference, kind, smoothing, tmp_path / "run")
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(examples()))
    loss.backward()

    train = TrainConfig(
        seq_length=LENGTH,
        steps=1,
        global_batch_size=len(PAIRS),
        micro_batch_size=len(PAIRS),
        objective=objective,
        beta=BETA,
        label_smoothing=smoothing,
    )
    optimizer = OptimizerConfig(clip_grad=0.0, zero_stage=0)
    config = validate(Config(base.model, train=train, optimizer=optimizer, data=DataConfig(documents="apart")), 1)
    ctx = context.single()
    stages = build_stages(config, ctx)
    logical.fill(stages.values(), weights_of(base))
    state = assemble(config, ctx, stages)
    result = train_step(state, [replace(batch, references_bd=references_bd)])

    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    # Their gradients under our names: as the weights of a model that is converted.
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.grad)
    model.save_pretrained(tmp_path / "gradients")
    expected = weights_of(converted(tmp_path / "gradients", tmp_path / "ours"))
    close.assert_close(logical.assemble([logical.held_gradients(state)]), expected)
