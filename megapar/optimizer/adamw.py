"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) on this rank's shards of the flat buffers."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megapar_kernels.adamw import Decayed, adamw_step
from megapar_kernels.launch import Implementation
from torch import Tensor, nn

from megapar.config import OptimizerConfig
from megapar.data_parallel.grad_buffer import GradBuffer
from megapar.data_parallel.layout import intersect, merge
from megapar.params import ParamSpec


@dataclass(frozen=True)
class ShardSlice:
    """Elements [start, stop) of a parameter, flat, that this rank updates, with their fp32 state as 1-D views."""

    param: nn.Parameter
    spec: ParamSpec
    start: int
    stop: int
    main: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True)
class _Shard:
    """Elements [start, stop) of the buffers and their state, 1-D; `decayed` says which of them weight decay applies
    to."""

    start: int
    stop: int
    main: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    decayed: Decayed

    def cut(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Main weights, first and second moments of the buffers' elements [start, stop)."""
        own = slice(start - self.start, stop - self.start)
        return self.main[own], self.exp_avg[own], self.exp_avg_sq[own]


class AdamW:
    """Moments and main weights are fp32. Main weights of an fp32 model are its parameters themselves; those of a bf16
    or fp16 model are kept here and rounded into the parameters after each step.

    Weight decay applies to parameters whose spec says decay. Padding stays zero, as its gradient and weight are.
    `step_count` counts updates; assign it when a checkpoint is loaded. `how` is the implementation of the update.
    """

    def __init__(self, buffer: GradBuffer, options: OptimizerConfig, how: Implementation = "torch"):
        self.how: Implementation = how
        self.step_count = 0
        self._buffer = buffer
        self._options = options
        self._aliased = buffer.params.dtype == torch.float32
        self._shards = [self._new_shard(start, stop) for start, stop in buffer.shards()]

    @property
    def nbytes(self) -> int:
        """Bytes of moments and, for a 16-bit model, main weights on this rank."""
        return sum(shard.exp_avg.nbytes * (2 if self._aliased else 3) for shard in self._shards)

    @torch.no_grad()
    def step(self, lr: float, clip_coefficient: Tensor | None = None) -> None:
        """Update the weights with the buffer's reduced gradients times `clip_coefficient`, then gather all shards.

        The coefficient is 0-d fp32 on the device, None meaning 1. The gradients may be left multiplied by it.
        """
        options = self._options
        self.step_count += 1
        for shard in self._shards:
            own = slice(shard.start, shard.stop)
            adamw_step(
                shard.main,
                self._buffer.grads[own],
                shard.exp_avg,
                shard.exp_avg_sq,
                None if self._aliased else self._buffer.params[own],
                lr=lr,
                betas=options.betas,
                eps=options.eps,
                weight_decay=options.weight_decay,
                step=self.step_count,
                decayed=shard.decayed,
                clip_coefficient=clip_coefficient,
                how=self.how,
            )
        self._buffer.gather_params()

    @torch.no_grad()
    def refresh_params_from_main(self) -> None:
        """Round the main weights into the parameters and gather every rank's shards."""
        if not self._aliased:
            for shard in self._shards:
                self._buffer.params[shard.start : shard.stop].copy_(shard.main)
        self._buffer.gather_params()

    @torch.no_grad()
    def refresh_main_from_params(self) -> None:
        """Take the main weights from the parameters, after weights were loaded without optimizer state."""
        if not self._aliased:
            for shard in self._shards:
                shard.main.copy_(self._buffer.params[shard.start : shard.stop])

    def slices(self) -> Iterator[ShardSlice]:
        """What this rank updates, parameter by parameter in the buffer's order: for checkpoints."""
        for slot in self._buffer.slots:
            for shard in self._shards:
                for start, stop in intersect([(slot.start, slot.stop)], [(shard.start, shard.stop)]):
                    state = shard.cut(start, stop)
                    yield ShardSlice(slot.param, slot.spec, start - slot.start, stop - slot.start, *state)

    def _new_shard(self, start: int, stop: int) -> _Shard:
        params = self._buffer.params[start:stop]
        main = params if self._aliased else params.float()
        slots = merge((slot.start, slot.end) for slot in self._buffer.slots if slot.spec.decay)
        decayed = [(a - start, b - start) for a, b in intersect(slots, [(start, stop)])]
        moments = torch.zeros_like(main), torch.zeros_like(main)
        return _Shard(start, stop, main, *moments, Decayed.of(decayed, stop - start, main.device))
