"""Llama with layers of multi-token prediction, and their losses in plain PyTorch."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megapar_models.families.llama import LLAMA as LLAMA_FAMILY
from megapar_models.families.llama import LlamaModel, LlamaStage
from megapar_models.multi_token import MTPRule
from megapar_models.reference import Tensors, attention, mlp, rms_norm
from megapar_models.stage import Stage as ModelStage
from torch import Tensor

from megapar.declare.batch import MicroBatch
from tests.support.grid import LLAMA


class Stage(LlamaStage):
    """The embedding first: DeepSeek-V3's form."""

    @classmethod
    def mtp_rule(cls, model: LlamaModel) -> MTPRule:
        return MTPRule(kind=cls.layer_kind(model, 0))


class OtherStage(Stage):
    """The hidden states first: MiMo-7B's form."""

    @classmethod
    def mtp_rule(cls, model: LlamaModel) -> MTPRule:
        return replace(super().mtp_rule(model), hidden_first=True)


FAMILY = replace(LLAMA_FAMILY, name="multi_token", stage=Stage)
OTHER_FAMILY = replace(LLAMA_FAMILY, name="other_multi_token", stage=OtherStage)
MODEL = replace(LLAMA, family=f"{__name__}:FAMILY", num_hidden_layers=2, num_nextn_predict_layers=2)
OTHER = replace(MODEL, family=f"{__name__}:OTHER_FAMILY", tie_word_embeddings=True)


def plain_losses(model: Any, tensors: Tensors, batch: MicroBatch) -> list[Tensor]:
    """The sums of weight * cross entropy of the tokens 1, 2, ... ahead: of the model, and of each further layer."""

    def norm(name: str, x: Tensor) -> Tensor:
        return rms_norm(model, tensors, name, x)

    def layer(number: int, x: Tensor) -> Tensor:
        name = f"layers.{number}"
        x = x + attention(model, tensors, f"{name}.attention", norm(f"{name}.attention_norm", x))
        return x + mlp(model, tensors, f"{name}.mlp", norm(f"{name}.mlp_norm", x))

    def loss(x: Tensor, ahead: int) -> Tensor:
        tokens_bs, weights_bs = batch.targets(ahead)
        logits = x @ tensors["embedding.weight" if model.tie_word_embeddings else "head.weight"].t()
        losses = F.cross_entropy(logits.flatten(0, 1), tokens_bs.flatten(), reduction="none")
        return (losses * weights_bs.flatten()).sum()

    x = tensors["embedding.weight"][batch.tokens_bs]
    for number in range(model.num_hidden_layers):
        x = layer(number, x)
    hidden = norm("norm", x)
    losses = [loss(hidden, 1)]
    other = model.family == OTHER.family
    for depth in range(1, 1 + model.num_nextn_predict_layers):
        name = f"layers.{model.num_hidden_layers + depth - 1}"
        embedded = norm(f"{name}.enorm", tensors["embedding.weight"][batch.targets(depth).tokens_bs])
        before = norm(f"{name}.hnorm", hidden)
        joined = torch.cat([before, embedded] if other else [embedded, before], -1)
        hidden = layer(int(name.removeprefix("layers.")), joined @ tensors[f"{name}.eh_proj.weight"].t())
        hidden = norm(f"{name}.shared_head_norm", hidden)
        losses.append(loss(hidden, 1 + depth))
    return losses


def logits_of_layers(stage: ModelStage, batch: MicroBatch) -> list[Tensor]:
    """The logits of each layer of multi-token prediction, [b, s, v]. The micro-batch has a scale, as in training."""
    assert stage.mtp is not None
    given: list[Tensor] = []
    for layer in stage.mtp.depths:
        layer.register_forward_hook(lambda module, args, output: given.append(output))
    with torch.no_grad():
        stage(None, batch)
    heads = (stage.head_rule.logits(hidden, stage.head, stage.head_bias) for hidden in given)
    return [logits_sbv.transpose(0, 1)[..., : stage.model.vocab_size] for logits_sbv in heads]
