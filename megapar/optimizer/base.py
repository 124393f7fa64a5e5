"""What training asks of an optimizer. Which one a run uses is chosen in `megapar.train.trainer.assemble`."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapar.config import OptimizerConfig
from megapar.data_parallel.layout import FlatLayout, Range, intersect
from megapar.data_parallel.reduce import Gradients
from megapar.data_parallel.weights import FlatWeights
from megapar.params import StateSlice

MAIN = "main"


@dataclass(frozen=True)
class StateTensor:
    """A tensor that an optimizer keeps for every parameter: one element for each of the parameter's, 0 at first."""

    name: str
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Shard:
    """Elements [start, stop) of the flat buffers that this rank updates, with their state: 1-D views by name."""

    start: int
    stop: int
    main: Tensor
    state: Mapping[str, Tensor]


class Optimizer(ABC):
    """Updates this rank's shards of the weights.

    Main weights are fp32. Those of an fp32 model are its parameters themselves; those of a bf16 or fp16 model are kept
    here and rounded into the parameters after each step. `step_count` counts updates; assign it when a checkpoint is
    loaded. A subclass declares its state in `STATE` and updates one shard at a time in `update`.
    """

    STATE: Sequence[StateTensor]

    def __init__(self, weights: FlatWeights, gradients: Gradients, options: OptimizerConfig):
        self.step_count = 0
        self.options = options
        self.layout: FlatLayout = weights.layout
        self._weights = weights
        self._gradients = gradients
        self._aliased = weights.flat.dtype == torch.float32
        self.shards = [self._new_shard(start, stop) for start, stop in self.layout.shards()]

    @abstractmethod
    def update(self, shard: Shard, grad: Tensor, params: Tensor | None, lr: float, clip: Tensor | None) -> None:
        """One update of `shard` by its reduced gradient, times `clip` (0-d fp32 on the device; None means 1).

        `params`, if given, are the 16-bit weights, into which the new main weights are rounded. `grad` may be changed.
        """

    @torch.no_grad()
    def step(self, lr: float, clip_coefficient: Tensor | None = None) -> None:
        """Update the weights with the reduced gradients times `clip_coefficient`, then gather all shards."""
        self.step_count += 1
        for shard in self.shards:
            part = slice(shard.start, shard.stop)
            params = None if self._aliased else self._weights.flat[part]
            self.update(shard, self._gradients.flat[part], params, lr, clip_coefficient)
        self._weights.gather()

    @torch.no_grad()
    def refresh_params_from_main(self) -> None:
        """Round the main weights into the parameters and gather every rank's shards."""
        if not self._aliased:
            for shard in self.shards:
                self._weights.flat[shard.start : shard.stop].copy_(shard.main)
        self._weights.gather()

    @property
    def nbytes(self) -> int:
        """Bytes of state and, for a 16-bit model, main weights on this rank."""
        state = sum(tensor.nbytes for shard in self.shards for tensor in shard.state.values())
        return state if self._aliased else state + sum(shard.main.nbytes for shard in self.shards)

    def slices(self) -> Iterator[StateSlice]:
        """What this rank updates, parameter by parameter in the layout's order: for checkpoints."""
        for slot in self.layout.slots:
            for shard in self.shards:
                for start, stop in intersect([(slot.start, slot.stop)], [(shard.start, shard.stop)]):
                    part = slice(start - shard.start, stop - shard.start)
                    tensors = {MAIN: shard.main[part]} | {name: x[part] for name, x in shard.state.items()}
                    yield StateSlice(slot.param, slot.spec, start - slot.start, stop - slot.start, tensors)

    def ranges_where_decayed(self, shard: Shard) -> list[Range]:
        """The elements of `shard`, counted from its start, whose parameters weight decay applies to."""
        slots = [(slot.start, slot.end) for slot in self.layout.slots if slot.spec.decay]
        inside = intersect(slots, [(shard.start, shard.stop)])
        return [(start - shard.start, stop - shard.start) for start, stop in inside]

    def _new_shard(self, start: int, stop: int) -> Shard:
        params = self._weights.flat[start:stop]
        main = params if self._aliased else params.float()
        state = {field.name: torch.zeros_like(main, dtype=field.dtype) for field in self.STATE}
        return Shard(start, stop, main, state)
