"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) on this rank's shards of the flat buffers."""

from dataclasses import dataclass
from typing import Any

from megapar_kernels.adamw import Decayed, adamw_step
from torch import Tensor

from megapar.data_parallel.buckets import merge
from megapar.optimizer.base import Optimizer, Shard, Step
from megapar.params import StateTensor


@dataclass(frozen=True)
class AdamWOptions:
    """The options of AdamW (`OptimizerConfig`)."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float


class AdamW(Optimizer):
    """AdamW with fp32 moments.

    Weight decay applies to a parameter if its spec says so. Padding stays zero, because its gradients and weights are
    zero.
    """

    STATE = (StateTensor("exp_avg"), StateTensor("exp_avg_sq", nonnegative=True))
    OPTIONS = AdamWOptions

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.takes_found_inf = self.impl != "apex"  # apex's kernel cannot leave out an update
        # By the start of a visited part. Made once: the ranges never change.
        self._decayed = {}
        for visit in self.visits:
            shard = visit.shard
            ranges = merge(self.ranges_where_decayed(shard))
            self._decayed[shard.start] = Decayed.of(ranges, shard.stop - shard.start, shard.main.device)

    def update(self, shard: Shard, grad: Tensor, params: Tensor | None, step: Step) -> None:
        adamw_step(
            shard.main,
            grad,
            shard.state["exp_avg"],
            shard.state["exp_avg_sq"],
            params,
            lr=step.lr,
            betas=self.options.betas,
            eps=self.options.eps,
            weight_decay=self.options.weight_decay,
            step=step.number,
            decayed=self._decayed[shard.start],
            clip_coefficient=step.clip,
            found_inf=step.found_inf,
            impl=self.impl,
        )
