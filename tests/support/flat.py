"""Flat weights and gradients around modules, as `megapar.train.trainer.assemble` makes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megapar.config.options import OptimizerConfig
from megapar.data_parallel.buckets import Range
from megapar.data_parallel.layout import FlatLayout, Slot
from megapar.data_parallel.reduce import Gradients
from megapar.data_parallel.weights import FlatWeights
from megapar.declare.context import ParallelContext
from megapar.optimizer.optimizers import Optimizers


@dataclass(frozen=True)
class Flat:
    """A rank's flat buffers; `optimizers` makes the optimizers named by the parameters."""

    ctx: ParallelContext
    layout: FlatLayout
    weights: FlatWeights
    gradients: Gradients

    @property
    def grads(self) -> Tensor:
        return self.gradients.flat

    @property
    def params(self) -> Tensor:
        return self.weights.flat

    @property
    def slots(self) -> list[Slot]:
        return self.layout.slots

    def shards(self) -> list[Range]:
        return self.layout.shards()

    def start_step(self) -> None:
        """gradients.zero() after NaN has been written to every gradient: what is not overwritten shows."""
        for slot in self.slots:
            slot.param.main_grad.tensor.fill_(float("nan"))  # type: ignore[attr-defined]
        self.gradients.zero()

    def check_padding(self) -> None:
        """Fail unless the gradients between and behind the parameters are zero."""
        inside = torch.zeros(self.grads.numel(), dtype=torch.bool)
        for slot in self.slots:
            inside[slot.start : slot.stop] = True
        assert not self.grads[~inside].any(), "the padding of the flat gradients has changed"

    def optimizers(self, options: OptimizerConfig, **named: Any) -> Optimizers:
        return Optimizers(self.weights, self.gradients, self.ctx, options, **named)


def flatten(
    modules: Sequence[nn.Module], ctx: ParallelContext, *, zero_stage: int, bucket_mb: float, overlap: bool = True
) -> Flat:
    layout = FlatLayout(modules, int(bucket_mb * 2**18), sharded=zero_stage > 0)
    weights = FlatWeights(layout, ctx.device)
    return Flat(ctx, layout, weights, Gradients(layout, ctx.device, overlap=overlap))
