"""Lion (Chen et al., arXiv 2302.06675): each element moves by the learning rate, by the sign of a momentum."""

from dataclasses import dataclass

from torch import Tensor

from megapar.declare.optimizer_state import StateTensor
from megapar.optimizer.base import Optimizer
from megapar.optimizer.visits import UpdateArgs, UpdateShard


@dataclass(frozen=True)
class LionOptions:
    """The options of Lion (`OptimizerConfig`)."""

    betas: tuple[float, float]
    weight_decay: float


class Lion(Optimizer):
    """Lion with an fp32 momentum, and decoupled weight decay as AdamW's."""

    STATE = (StateTensor("momentum"),)
    OPTIONS = LionOptions
    OFFLOADS = True

    def update(self, shard: UpdateShard, grad: Tensor, params: Tensor | None, step: UpdateArgs) -> None:
        momentum = shard.state["momentum"]
        first, second = self.options.betas
        self.decay(shard, step)
        shard.main.sub_(momentum.lerp(grad, 1 - first).sign_(), alpha=step.lr)
        momentum.lerp_(grad, 1 - second)
