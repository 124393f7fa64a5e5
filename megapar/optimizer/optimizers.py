"""The optimizers of a run: each updates the parameters of one `Update`. Then all ranks get the new weights."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from megapar_kernels.dispatch import Implementation
from torch import Tensor

from megapar.config.options import OptimizerConfig
from megapar.data_parallel.shards import ReducedGradients, Weights
from megapar.declare.context import ParallelContext
from megapar.declare.largest_logits import LargestLogits
from megapar.declare.optimizer_state import StateSlice
from megapar.declare.params import MAIN, REMAINDER
from megapar.optimizer.average import Average
from megapar.optimizer.base import Optimizer
from megapar.optimizer.qk_clip import QKClip
from megapar.optimizer.table import find
from megapar.optimizer.visits import UpdateArgs
from megapar.system import device


class Optimizers:
    """The optimizers of the parameters of this rank. `each` are sorted by their updates.

    `step_count` counts updates. Assign it when a checkpoint is loaded.
    """

    def __init__(
        self,
        weights: Weights,
        gradients: ReducedGradients,
        ctx: ParallelContext,
        config: OptimizerConfig,
        impl: Implementation = "torch",
        seed: int = 0,
        measuring: Sequence[LargestLogits] = (),
    ):
        """`impl` is that of updates, `seed` that of random bits. `measuring` measure logits (optimizer.qk_clip)."""
        self.step_count = 0
        self._weights = weights
        self._overlap_param_gather = config.overlap_param_gather
        # Sorted, so that ranks that hold the same parameters start their collectives in the same order, if any.
        self.each: list[Optimizer] = []
        for updates in weights.layout.updates():
            options = replace(config, weight_decay=config.weight_decay * updates.decay)
            self.each.append(find(updates.optimizer)(updates, weights, gradients, ctx, options, impl, seed))
        self._of = {optimizer.updates: optimizer for optimizer in self.each}
        self.qk_clip = QKClip(measuring, self.each, weights, config.qk_clip)
        self.average = Average(self.each, weights, config.ema) if config.ema else None

    @torch.no_grad()
    def step(
        self,
        lr: float,
        clip_coefficient: Tensor | None = None,
        found_inf: Tensor | None = None,
        largest_logits: Tensor | None = None,
    ) -> None:
        """Update the weights with the reduced gradients times `clip_coefficient`, then gather all shards.

        `largest_logits`, fp32 [layers, heads], are those of the step, for optimizer.qk_clip. `found_inf` is 0-d on the
        device. Unless it is zero, no weight and no state changes. `step_count` counts the update even then. Whoever
        learns of the skipped update takes the count back.

        With optimizer.overlap_param_gather the gathers only start: the next forward pass waits for them, layer by
        layer. Call `Weights.wait` before weights are read elsewhere.
        """
        self.step_count += 1  # before the update: Adam's bias correction counts updates from 1
        takes_found_inf = all(optimizer.takes_found_inf and not optimizer.on_host for optimizer in self.each)
        reads = not takes_found_inf or not device.is_asynchronous(self._weights.flat.device)
        if found_inf is not None and reads:
            if found_inf.item():
                return
            found_inf = None
        for optimizer in self.each:
            optimizer.step(UpdateArgs(self.step_count, lr * optimizer.updates.lr, clip_coefficient, found_inf))
        if largest_logits is not None:
            self.qk_clip.scale(largest_logits, found_inf)
        if self.average is not None:
            self.average.update(found_inf)
        if self._overlap_param_gather:
            self._weights.start_gather()
        else:
            self._weights.gather()

    @torch.no_grad()
    def refresh_params_from_main(self) -> None:
        """Round the main weights into the parameters, and gather every rank's shards. For loaded main weights."""
        for optimizer in self.each:
            for shard in optimizer.shards:
                if not optimizer.aliased(shard):
                    self._weights.part(shard.start, shard.stop).copy_(shard.main)
        self._weights.gather()

    @property
    def nbytes(self) -> int:
        """Bytes of optimizer state on this rank's device. For a 16-bit model this includes its main weights."""
        return sum(optimizer.nbytes(on_host=False) for optimizer in self.each)

    @property
    def host_nbytes(self) -> int:
        """Bytes of optimizer state kept in host memory, whatever the device is (optimizer.offload)."""
        return sum(optimizer.nbytes(on_host=True) for optimizer in self.each)

    def slices(self) -> Iterator[StateSlice]:
        """Yield what this rank updates, by parameter in the order of the layout. Checkpoints save these slices."""
        for slot in self._weights.layout.slots:
            optimizer = self._of[slot.update]
            # A shard may hold a part of a parameter, or several parameters.
            for shard in optimizer.shards:
                start = max(slot.start, shard.start)
                stop = min(slot.stop, shard.stop)
                if start < stop:
                    part = slice(start - shard.start, stop - shard.start)
                    tensors = {MAIN: shard.main[part]} | {name: x[part] for name, x in shard.state.items()}
                    remainder = tensors.pop(REMAINDER, None)
                    states = [tensor for tensor in optimizer.states if tensor.name in tensors]
                    first = start - slot.start
                    last = stop - slot.start
                    name = slot.update.optimizer
                    yield StateSlice(slot.param, slot.spec, first, last, tensors, states, name, remainder)
