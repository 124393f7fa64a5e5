"""Stochastic gradient descent with momentum (Sutskever et al., ICML 2013)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megapar.declare.optimizer_state import StateTensor
from megapar.optimizer.base import Optimizer
from megapar.optimizer.visits import UpdateArgs, UpdateShard


@dataclass(frozen=True)
class SGDOptions:
    """The options of SGD (`OptimizerConfig`)."""

    momentum: float
    nesterov: bool
    weight_decay: float


class SGD(Optimizer):
    """SGD with an fp32 momentum M = mu M + G, and decoupled weight decay as AdamW's."""

    STATE = (StateTensor("momentum"),)
    OPTIONS: ClassVar[type] = SGDOptions
    OFFLOADS = True

    def update(self, shard: UpdateShard, grad: Tensor, params: Tensor | None, step: UpdateArgs) -> None:
        self.follow(shard, self.direction(shard, grad), step)

    def direction(self, shard: UpdateShard, grad: Tensor) -> Tensor:
        """Add the gradient to the momentum. Returns the momentum, or G + mu M with Nesterov's, in memory of `grad`."""
        mu = self.options.momentum
        momentum = shard.state["momentum"].mul_(mu).add_(grad)
        return grad.add_(momentum, alpha=mu) if self.options.nesterov else grad.copy_(momentum)

    def follow(self, shard: UpdateShard, direction: Tensor, step: UpdateArgs) -> None:
        """Decay the weights, and move them by the learning rate against `direction`."""
        self.decay(shard, step)
        shard.main.sub_(direction, alpha=step.lr)
