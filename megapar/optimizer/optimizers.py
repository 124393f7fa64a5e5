"""The optimizers of a run: each updates the parameters whose spec names it. Then all ranks get the new weights."""

from collections.abc import Iterator

import torch
from megapar_kernels.dispatch import Implementation
from torch import Tensor

from megapar import device
from megapar.config.options import OptimizerConfig
from megapar.context import ParallelContext
from megapar.data_parallel.shards import ReducedGradients, Weights
from megapar.optimizer.base import Optimizer, Step
from megapar.optimizer.table import find
from megapar.params import MAIN, StateSlice


class Optimizers:
    """The optimizers of the parameters of this rank. `each` are sorted by name.

    `step_count` counts updates. Assign it when a checkpoint is loaded.
    """

    def __init__(
        self,
        weights: Weights,
        gradients: ReducedGradients,
        ctx: ParallelContext,
        config: OptimizerConfig,
        impl: Implementation = "torch",
    ):
        """`impl` is the implementation of updates."""
        self.step_count = 0
        self._weights = weights
        self._overlap_param_gather = config.overlap_param_gather
        # Sorted, so that ranks that hold the same parameters start their collectives in the same order, if any.
        names = sorted({slot.spec.optimizer for slot in weights.layout.slots})
        self.each: list[Optimizer] = [find(name)(name, weights, gradients, ctx, config, impl) for name in names]
        self._by_name = {optimizer.name: optimizer for optimizer in self.each}

    @torch.no_grad()
    def step(self, lr: float, clip_coefficient: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Update the weights with the reduced gradients times `clip_coefficient`, then gather all shards.

        `found_inf` is 0-d on the device. Unless it is zero, no weight and no state changes. `step_count` counts the
        update even then. Whoever learns of the skipped update takes the count back.

        With optimizer.overlap_param_gather the gathers only start: the next forward pass waits for them, layer by
        layer. Call `Weights.wait` before weights are read elsewhere.
        """
        self.step_count += 1  # before the update: Adam's bias correction counts updates from 1
        takes_found_inf = all(optimizer.takes_found_inf and not optimizer.ON_HOST for optimizer in self.each)
        reads = not takes_found_inf or not device.is_asynchronous(self._weights.flat.device)
        if found_inf is not None and reads:
            if found_inf.item():
                return
            found_inf = None
        for optimizer in self.each:
            clip = clip_coefficient
            if clip is not None and optimizer.ON_HOST:
                clip = clip.cpu()
            optimizer.step(Step(self.step_count, lr, clip, found_inf))
        if self._overlap_param_gather:
            self._weights.start_gather()
        else:
            self._weights.gather()

    @torch.no_grad()
    def refresh_params_from_main(self) -> None:
        """Round the main weights into the parameters, and gather every rank's shards. For loaded main weights."""
        for optimizer in self.each:
            if not optimizer.aliased:
                for shard in optimizer.shards:
                    self._weights.part(shard.start, shard.stop).copy_(shard.main)
        self._weights.gather()

    @property
    def nbytes(self) -> int:
        """Bytes of optimizer state on this rank's device. For a 16-bit model this includes its main weights."""
        return sum(optimizer.nbytes for optimizer in self.each if not optimizer.ON_HOST)

    @property
    def host_nbytes(self) -> int:
        """Bytes of optimizer state kept in host memory, whatever the device is (`Optimizer.ON_HOST`)."""
        return sum(optimizer.nbytes for optimizer in self.each if optimizer.ON_HOST)

    def slices(self) -> Iterator[StateSlice]:
        """Yield what this rank updates, by parameter in the order of the layout. Checkpoints save these slices."""
        for slot in self._weights.layout.slots:
            optimizer = self._by_name[slot.spec.optimizer]
            # A shard may hold a part of a parameter, or several parameters.
            for shard in optimizer.shards:
                start = max(slot.start, shard.start)
                stop = min(slot.stop, shard.stop)
                if start < stop:
                    part = slice(start - shard.start, stop - shard.start)
                    tensors = {MAIN: shard.main[part]} | {name: x[part] for name, x in shard.state.items()}
                    first = start - slot.start
                    last = stop - slot.start
                    yield StateSlice(slot.param, slot.spec, first, last, tensors, optimizer.STATE)
