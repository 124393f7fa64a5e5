"""An average of the weights over the steps of a run (optimizer.ema).

After update t: average_t = decay * average_(t-1) + (1 - decay) * weights_t, from the initial weights on (Polyak and
Juditsky, doi 10.1137/0330046, with weights that decay). It is fp32, and sharded as the main weights are.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megapar.data_parallel.shards import Weights
from megapar.declare.params import AVERAGE
from megapar.optimizer.base import Optimizer
from megapar.optimizer.visits import UpdateShard


class Average:
    """The average of the weights updated by `optimizers`. They keep it as a state of their shards."""

    def __init__(self, optimizers: Iterable[Optimizer], weights: Weights, decay: float):
        self._optimizers = list(optimizers)
        self._weights = weights
        self._decay = decay

    def update(self, found_inf: Tensor | None) -> None:
        """Take the weights of an update into the average, unless `found_inf`, 0-d on the device, is not zero."""
        share: Tensor | float = 1 - self._decay
        if found_inf is not None:
            share = (found_inf == 0).float() * share
        for _, shard in self._shards():
            shard.state[AVERAGE].lerp_(shard.main, share)

    def restart(self) -> None:
        """Begin anew with the weights of now."""
        for _, shard in self._shards():
            shard.state[AVERAGE].copy_(shard.main)

    @contextmanager
    def as_weights(self) -> Iterator[None]:
        """A context in which the parameters are the average, rounded to their dtype. A collective at both ends."""
        self._weights.wait()
        self._exchange()
        try:
            yield
        finally:
            self._weights.wait()
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange the main weights and the average. Round the first into the parameters, and gather every shard."""
        for optimizer, shard in self._shards():
            main = shard.main.clone()
            shard.main.copy_(shard.state[AVERAGE])
            shard.state[AVERAGE].copy_(main)
            if not optimizer.aliased(shard):
                self._weights.part(shard.start, shard.stop).copy_(shard.main)
        self._weights.gather()

    def _shards(self) -> Iterator[tuple[Optimizer, UpdateShard]]:
        for optimizer in self._optimizers:
            for shard in optimizer.shards:
                yield optimizer, shard
