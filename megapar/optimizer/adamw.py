"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) on this rank's shards of the flat buffers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megapar_kernels.adamw import Decayed, adamw_step
from megapar_kernels.rounding import RandomBits
from torch import Tensor

from megapar.config.options import OptimizerConfig
from megapar.data_parallel.buckets import merge
from megapar.declare.optimizer_state import StateTensor
from megapar.declare.params import REMAINDER
from megapar.optimizer.base import Optimizer
from megapar.optimizer.logical_rows import logical_rows
from megapar.optimizer.visits import UpdateArgs, UpdateShard


@dataclass(frozen=True)
class AdamWOptions:
    """The options of AdamW (`OptimizerConfig`)."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    moments: str
    main_weights: str


class AdamW(Optimizer):
    """AdamW with moments in fp32 or bf16, and with main weights in fp32 or as parameters with a remainder.

    Weight decay applies to a parameter if its spec says so. Padding stays zero, because its gradients and weights are
    zero. The update computes in fp32.
    """

    STATE = (StateTensor("exp_avg"), StateTensor("exp_avg_sq", nonnegative=True))
    OPTIONS = AdamWOptions
    OFFLOADS = True
    FUSES = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.takes_found_inf = self.impl != "apex"  # apex's kernel cannot leave out an update
        # By the start of a visited part. Made once: the ranges never change.
        self._decayed = {}
        self._bits = {}
        for visit in self.visits:
            shard = visit.shard
            elements = shard.stop - shard.start
            ranges = merge(self.ranges_where_decayed(shard))
            self._decayed[shard.start] = Decayed.of(ranges, elements, shard.main.device)
            if self.options.moments == "bf16":
                self._bits[shard.start] = RandomBits.of(logical_rows(shard, self.seed), elements, shard.main.device)

    @classmethod
    def states_of(cls, config: OptimizerConfig) -> Sequence[StateTensor]:
        dtype = torch.bfloat16 if config.moments == "bf16" else torch.float32
        states = [replace(tensor, dtype=dtype) for tensor in cls.STATE]
        if config.main_weights == "remainder":
            states.append(StateTensor(REMAINDER, torch.int16))
        return states

    def update(self, shard: UpdateShard, grad: Tensor, params: Tensor | None, step: UpdateArgs) -> None:
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
            remainder=shard.state.get(REMAINDER),
            bits=self._bits.get(shard.start),
            impl="torch" if shard.on_host else self.impl,  # of the kernels, torch's alone runs on CPUs
        )
