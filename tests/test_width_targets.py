"""A family predicting two tokens ahead: a second loss sharing embedding and head, and state of a whole step."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from megapar_models.factory import Factory
from megapar_models.families.llama import LLAMA as LLAMA_FAMILY
from megapar_models.families.llama import LlamaModel, LlamaStage
from torch import Tensor, nn

from megapar.config.model_options import ModelConfig
from megapar.declare.batch import MicroBatch, add_loss
from megapar.declare.sharding import Sharding
from megapar.declare.stage_set import AddedLoss, Declared
from megapar.declare.tally import Tally
from tests.support.grid import LLAMA
from tests.support.width import in_each_layout, trains_as_one_process


class Rarity(nn.Module):
    """The weight of the second loss: one more than the share of the rarest kind of token in the step before."""

    def __init__(self, sharding: Sharding):
        super().__init__()
        self.tally = Tally("kind", 0, (sharding.grad_axis,))  # tensor ranks see the same tokens
        self.register_buffer("step_counts", torch.zeros(4, dtype=torch.int64, device=sharding.device))
        self.register_buffer("last_counts", self.step_counts.clone())

    def forward(self, tokens_bs: Tensor) -> Tensor:
        if self.training:
            self.step_counts += torch.bincount((tokens_bs**2 % 4).flatten(), minlength=4)
        return 1 + self.last_counts[1] / self.last_counts.sum().clamp(min=1)

    def end_step(self, counts: Tensor, skip_update: Tensor) -> None:
        torch.where(skip_update != 0, self.last_counts, counts, out=self.last_counts)


@dataclass(frozen=True)
class TwoAheadModel(LlamaModel):
    @property
    def embeds_on_last_stage(self) -> bool:
        return True


class TwoAheadStage(LlamaStage):
    @classmethod
    def declared(cls, model: ModelConfig) -> Declared:
        return Declared(2, (AddedLoss("two_ahead"),), {"kind": (1, 4)})

    def __init__(self, model: ModelConfig, factory: Factory, layers: range, *, last: bool, **common: Any):
        super().__init__(model, factory, layers, last=last, **common)
        if last:
            self.second_norm = factory.norm("second_norm", model.hidden_size, self.last_norm(model))
            self.rarity = Rarity(factory.sharding)

    def loss(self, x_sbh: Tensor, batch: MicroBatch) -> Tensor:
        y_sbh = self.second_norm(x_sbh + self.embedding(batch.targets_bs.t()))
        second = self.cross_entropy(y_sbh, batch.targets(ahead=2)) * self.rarity(batch.targets_bs)
        return add_loss(super().loss(x_sbh, batch), second, batch, "two_ahead")


FAMILY = replace(LLAMA_FAMILY, name="two_ahead", options=TwoAheadModel, stage=TwoAheadStage)
MODEL = TwoAheadModel(**vars(replace(LLAMA, family=f"{__name__}:FAMILY")))


@in_each_layout
def test_a_second_token_ahead(sizes: dict[str, object]) -> None:
    trains_as_one_process(MODEL, sizes)
