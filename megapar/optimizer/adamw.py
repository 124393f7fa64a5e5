"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) on this rank's shards of the flat buffers."""

from megapar_kernels.adamw import Decayed, adamw_step
from megapar_kernels.dispatch import Implementation
from torch import Tensor

from megapar.config.options import OptimizerConfig
from megapar.data_parallel.buckets import merge
from megapar.data_parallel.shards import ReducedGradients, Weights
from megapar.optimizer.base import Optimizer, Shard, StateTensor


class AdamW(Optimizer):
    """AdamW with fp32 moments.

    Weight decay applies to the parameters whose spec says so. Padding stays zero, because its gradients and weights
    are zero. `impl` is the implementation of the update.
    """

    STATE = (StateTensor("exp_avg"), StateTensor("exp_avg_sq"))

    def __init__(
        self, weights: Weights, gradients: ReducedGradients, options: OptimizerConfig, impl: Implementation = "torch"
    ):
        super().__init__(weights, gradients, options)
        self._impl: Implementation = impl
        self.takes_found_inf = impl != "apex"  # apex's kernel cannot leave out an update
        # By the start of a shard. Made once: the ranges never change.
        self._decayed = {}
        for shard in self.shards:
            ranges = merge(self.ranges_where_decayed(shard))
            self._decayed[shard.start] = Decayed.of(ranges, shard.stop - shard.start, shard.main.device)

    def update(
        self,
        shard: Shard,
        grad: Tensor,
        params: Tensor | None,
        lr: float,
        clip: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        adamw_step(
            shard.main,
            grad,
            shard.state["exp_avg"],
            shard.state["exp_avg_sq"],
            params,
            lr=lr,
            betas=self.options.betas,
            eps=self.options.eps,
            weight_decay=self.options.weight_decay,
            step=self.step_count,
            decayed=self._decayed[shard.start],
            clip_coefficient=clip,
            found_inf=found_inf,
            impl=self._impl,
        )
