"""Compares our adapters with those of other code, in one process: logits, gradients and steps of AdamW."""

from typing import Protocol

import pytest
import torch
import torch.nn.functional as F
from megapar_models import reference as plain
from megapar_models.build import build_stages
from megapar_models.registry import find, validate
from megapar_models.stage import Stage
from megapar_tools.verify import logical
from torch import Tensor

from megapar.config.model_options import ModelConfig
from megapar.config.options import AdapterConfig, Config, OptimizerConfig, TrainConfig
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from megapar.step.state import TrainState
from megapar.step.step import train_step
from megapar.step.trainable import freeze_others
from megapar.train.trainer import assemble
from tests.support import close, tiny_models

STEPS = 5
# An update of AdamW is about g / (|g| + eps). With an eps above the rounding of gradients it is well-conditioned.
ADAMW = OptimizerConfig(lr=5e-2, schedule="constant", eps=1e-2, clip_grad=0.5, zero_stage=0)


class Theirs(Protocol):
    """A model with adapters in other code. `factors` are those of ours by name, and the only tensors to train."""

    factors: dict[str, Tensor]

    def logits(self, tokens_bs: Tensor) -> Tensor:
        """Logits [b, s, v]."""


class Merged:
    """Plain PyTorch: W + s B A in place of W, with s as LoRA and rsLoRA define it.

    With DoRA its rows have the norms of W's plus a magnitude, and are divided by their own as by constants.
    """

    def __init__(self, model: ModelConfig, adapter: AdapterConfig, tensors: dict[str, Tensor]):
        self._model = model
        root = adapter.rank**0.5 if adapter.rslora else adapter.rank
        self._scale = adapter.alpha / root
        self._tensors = {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}
        self.factors = {name: x.clone().requires_grad_() for name, x in tensors.items() if ".lora_" in name}

    def logits(self, tokens_bs: Tensor) -> Tensor:
        merged = dict(self._tensors)
        for name, a in self.factors.items():
            if name.endswith(".lora_a"):
                matrix = name.removesuffix(".lora_a")
                b = self.factors[f"{matrix}.lora_b"]
                weight = merged[f"{matrix}.weight"]
                adapted = weight + self._scale * b @ a
                magnitude = self.factors.get(f"{matrix}.lora_magnitude")
                if magnitude is not None:
                    factors = (weight.norm(dim=1) + magnitude) / adapted.norm(dim=1).detach()
                    adapted = factors[:, None] * adapted
                merged[f"{matrix}.weight"] = adapted
        reference = find(self._model.family).reference or plain.llama_logits
        return reference(self._model, merged, tokens_bs)


def make_state(model: ModelConfig, adapter: AdapterConfig, tensors: dict[str, Tensor]) -> TrainState:
    """The state of a training of adapters in one process, with these weights."""
    train = TrainConfig(seq_length=tiny_models.LENGTH, steps=STEPS, global_batch_size=2, micro_batch_size=2)
    config = validate(Config(model, train=train, optimizer=ADAMW, adapter=adapter), 1)
    ctx = context.single()
    stages = build_stages(config, ctx)
    logical.fill(stages.values(), tensors)
    freeze_others(stages.values(), config.train.trainable, ctx)
    return assemble(config, ctx, stages)


def check(state: TrainState, theirs: Theirs) -> None:
    """Logits differ by at most 1e-6 of their norm, each gradient by 1e-5, and each move of some steps by 1e-4.

    Gradients of later steps are of weights that differ by a little.
    """
    stage: Stage = state.stages[0]  # type: ignore[assignment]
    model = stage.model
    started = {name: factor.detach().clone() for name, factor in theirs.factors.items()}
    # Not the same: PEFT's magnitudes have the norms of W's rows in them.
    begun = {name: factor.clone() for name, factor in logical.assemble([logical.held_weights(state)]).items()}
    names, params = zip(*sorted(theirs.factors.items()), strict=True)
    # Magnitudes are not decayed.
    vectors = [factor for factor in params if factor.ndim == 1]
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": [x for x in params if x.ndim == 2]}]
    optimizer = torch.optim.AdamW(groups, ADAMW.lr, ADAMW.betas, ADAMW.eps, ADAMW.weight_decay)
    for step in range(STEPS):
        batch = tiny_models.batch(model, step)
        expected_bsv = theirs.logits(batch.tokens_bs)
        if step == 0:
            with torch.no_grad():
                found_bsv = stage.logits(stage.hidden_states(None, batch)).transpose(0, 1)[..., : model.vocab_size]
            difference = (found_bsv - expected_bsv).norm() / expected_bsv.norm()
            assert difference <= 1e-6, f"logits differ by {difference:.2g} of their norm"
        result = train_step(state, [batch])
        loss = mean_loss(expected_bsv, batch)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            assert result.loss == pytest.approx(loss.item(), rel=1e-6)
            gradients = {name: param.grad for name, param in zip(names, params, strict=True)}
            norm = torch.stack([x.norm() for x in gradients.values() if x is not None]).norm()
            assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
            clip = min(1.0, ADAMW.clip_grad / norm.item())
            found = logical.assemble([logical.held_gradients(state)])
            close.assert_close(found, {name: x * clip for name, x in gradients.items() if x is not None})
        torch.nn.utils.clip_grad_norm_(params, ADAMW.clip_grad)
        optimizer.step()
    weights = logical.assemble([logical.held_weights(state)])
    moves = {name: weights[name] - begun[name] for name in names}
    close.assert_close(moves, {name: theirs.factors[name].detach() - started[name] for name in names}, rtol=1e-4)
    assert all(move.any() for move in moves.values())


def mean_loss(logits_bsv: Tensor, batch: MicroBatch) -> Tensor:
    losses = F.cross_entropy(logits_bsv.flatten(0, 1), batch.targets_bs.flatten(), reduction="none")
    return (losses * batch.weights_bs.flatten()).sum() / batch.weights_bs.sum()
