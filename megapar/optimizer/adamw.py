"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) on this rank's shards, by torch's fused kernel."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

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
    """Elements [start, stop) of the buffers and their state, 1-D."""

    start: int
    stop: int
    main: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def cut(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Main weights, first and second moments of the buffers' elements [start, stop)."""
        own = slice(start - self.start, stop - self.start)
        return self.main[own], self.exp_avg[own], self.exp_avg_sq[own]


@dataclass
class _Group:
    """Runs of elements that share a weight decay: what the kernel takes, one view a run."""

    weight_decay: float
    mains: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)


class AdamW:
    """Moments and main weights are fp32. Main weights of an fp32 model are its parameters themselves; those of a bf16
    model are kept here and rounded into the parameters after each step.

    Weight decay applies to parameters whose spec says decay. Padding stays zero, as its gradient and weight are.
    """

    def __init__(self, buffer: GradBuffer, options: OptimizerConfig):
        self._buffer = buffer
        self._options = options
        self._aliased = buffer.params.dtype == torch.float32
        self._shards = [self._new_shard(start, stop) for start, stop in buffer.shards()]
        self._groups = [self._group(True, options.weight_decay), self._group(False, 0.0)]
        self._step_count = 0

    @property
    def nbytes(self) -> int:
        """Bytes of moments and, for a bf16 model, main weights on this rank."""
        return sum(shard.exp_avg.nbytes * (2 if self._aliased else 3) for shard in self._shards)

    @property
    def step_count(self) -> int:
        """Updates so far; assign when a checkpoint is loaded."""
        return self._step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        self._step_count = count
        for group in self._groups:
            for step in group.steps:
                step.fill_(count)

    @torch.no_grad()
    def step(self, lr: float, clip_coefficient: Tensor | None = None) -> None:
        """Update the weights with the buffer's reduced gradients times `clip_coefficient`, then gather all shards.

        The coefficient is 0-d fp32 on the device, None meaning 1. The gradients are left multiplied by it.
        """
        self._step_count += 1
        for group in self._groups:
            adamw(
                group.mains,
                group.grads,
                group.exp_avgs,
                group.exp_avg_sqs,
                [],
                group.steps,
                fused=True,  # on a CPU too: 3.8 ms for 8 million elements where foreach takes 18
                grad_scale=None if clip_coefficient is None else clip_coefficient.reciprocal(),
                amsgrad=False,
                beta1=self._options.betas[0],
                beta2=self._options.betas[1],
                lr=lr,
                weight_decay=group.weight_decay,
                eps=self._options.eps,
                maximize=False,
            )
        self.refresh_params_from_main()

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
        return _Shard(start, stop, main, torch.zeros_like(main), torch.zeros_like(main))

    def _group(self, decay: bool, weight_decay: float) -> _Group:
        group = _Group(weight_decay)
        ranges = merge((slot.start, slot.end) for slot in self._buffer.slots if slot.spec.decay == decay)
        for shard in self._shards:
            for start, stop in intersect(ranges, [(shard.start, shard.stop)]):
                main, exp_avg, exp_avg_sq = shard.cut(start, stop)
                group.mains.append(main)
                group.grads.append(self._buffer.grads[start:stop])
                group.exp_avgs.append(exp_avg)
                group.exp_avg_sqs.append(exp_avg_sq)
                group.steps.append(torch.zeros((), dtype=torch.float32, device=main.device))
        return group
