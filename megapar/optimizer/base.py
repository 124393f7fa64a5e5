"""The interface of optimizers. `megapar.train.trainer.assemble` chooses the optimizer of a run."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapar import device
from megapar.config.options import OptimizerConfig
from megapar.data_parallel.buckets import Range, intersect
from megapar.data_parallel.layout import FlatLayout
from megapar.data_parallel.shards import ReducedGradients, Weights
from megapar.params import MAIN, StateSlice


@dataclass(frozen=True)
class StateTensor:
    """A tensor that an optimizer keeps for every parameter: as many elements as the parameter, 0 at first."""

    name: str
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Shard:
    """Elements [start, stop) of the layout that this rank updates.

    `main` are their main weights. `state` are 1-D tensors by name. All have stop - start elements.
    """

    start: int
    stop: int
    main: Tensor
    state: Mapping[str, Tensor]


class Optimizer(ABC):
    """Updates this rank's shards of the weights.

    Main weights are fp32. For an fp32 model they are the parameters themselves. For a bf16 or fp16 model they are kept
    here, and rounded into the parameters after each step. `step_count` counts updates. Assign it when a checkpoint is
    loaded. A subclass declares its state in `STATE` and updates one shard at a time in `update`.
    """

    STATE: Sequence[StateTensor]

    takes_found_inf = False
    """Whether `update` takes `found_inf`. Otherwise `step` reads it before the updates and waits for the device."""

    def __init__(self, weights: Weights, gradients: ReducedGradients, options: OptimizerConfig):
        self.step_count = 0
        self.options = options
        self.layout: FlatLayout = weights.layout
        self._weights = weights
        self._gradients = gradients
        self._aliased = weights.flat.dtype == torch.float32
        self.shards = [self._new_shard(start, stop) for start, stop in self.layout.shards()]
        # The parameters and the gradient of each shard, by its start. Made once: a step would look them up again.
        self._parts = {
            start: (weights.part(start, stop), gradients.part(start, stop)) for start, stop in self.layout.shards()
        }

    @abstractmethod
    def update(
        self,
        shard: Shard,
        grad: Tensor,
        params: Tensor | None,
        lr: float,
        clip: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Update `shard` once with its reduced gradient `grad`, 1-D fp32, which may be changed.

        The gradient is multiplied by `clip`, 0-d fp32 on the device, or by 1 if that is None. `params` are the 16-bit
        weights, into which the new main weights are rounded, or None for an fp32 model. `lr` is the learning rate.
        `found_inf` is None unless `takes_found_inf` is set. Then it is 0-d on the device, and unless it is zero,
        `update` must change none of these tensors.
        """

    @torch.no_grad()
    def step(self, lr: float, clip_coefficient: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Update the weights with the reduced gradients times `clip_coefficient`, then gather all shards.

        `found_inf` is 0-d on the device. Unless it is zero, no weight and no state changes. `step_count` counts the
        update even then: whoever learns that it was left out takes the count back.

        With optimizer.overlap_param_gather the gathers only start: the next forward pass waits for them, layer by
        layer. Call `Weights.wait` before weights are read elsewhere.
        """
        self.step_count += 1  # before the update: Adam's bias correction counts updates from 1
        reads = not self.takes_found_inf or not device.is_asynchronous(self._weights.flat.device)
        if found_inf is not None and reads:
            if found_inf.item():
                return
            found_inf = None
        for shard in self.shards:
            params, grad = self._parts[shard.start]
            self.update(shard, grad, None if self._aliased else params, lr, clip_coefficient, found_inf)
        if self.options.overlap_param_gather:
            self._weights.start_gather()
        else:
            self._weights.gather()

    @torch.no_grad()
    def refresh_params_from_main(self) -> None:
        """Round the main weights into the parameters, and gather every rank's shards. For loaded main weights."""
        if not self._aliased:
            for shard in self.shards:
                self._weights.part(shard.start, shard.stop).copy_(shard.main)
        self._weights.gather()

    @property
    def nbytes(self) -> int:
        """Bytes of optimizer state on this rank. For a 16-bit model this includes its main weights."""
        total = sum(tensor.nbytes for shard in self.shards for tensor in shard.state.values())
        # The main weights of an fp32 model are its parameters, which are counted as weights.
        if not self._aliased:
            total += sum(shard.main.nbytes for shard in self.shards)
        return total

    def slices(self) -> Iterator[StateSlice]:
        """Yield what this rank updates, by parameter in the order of the layout. Checkpoints save these slices."""
        for slot in self.layout.slots:
            # A shard may hold a part of a parameter, or several parameters.
            for shard in self.shards:
                for start, stop in intersect([(slot.start, slot.stop)], [(shard.start, shard.stop)]):
                    part = slice(start - shard.start, stop - shard.start)
                    tensors = {MAIN: shard.main[part]} | {name: x[part] for name, x in shard.state.items()}
                    yield StateSlice(slot.param, slot.spec, start - slot.start, stop - slot.start, tensors)

    def ranges_where_decayed(self, shard: Shard) -> list[Range]:
        """The ranges of `shard`, counted from its start, to which weight decay applies."""
        slots = [(slot.start, slot.end) for slot in self.layout.slots if slot.spec.decay]
        inside = intersect(slots, [(shard.start, shard.stop)])
        return [(start - shard.start, stop - shard.start) for start, stop in inside]

    def _new_shard(self, start: int, stop: int) -> Shard:
        params = self._weights.part(start, stop)
        # A view for an fp32 model, so that an update of the main weights is one of the parameters.
        main = params if self._aliased else params.float()
        state = {field.name: torch.zeros_like(main, dtype=field.dtype) for field in self.STATE}
        return Shard(start, stop, main, state)
