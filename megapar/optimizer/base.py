"""The interface of optimizers. `table` chooses those of a run, `optimizers` holds them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from megapar_kernels.dispatch import Implementation
from torch import Tensor

from megapar.config.options import OptimizerConfig
from megapar.context import ParallelContext
from megapar.data_parallel.buckets import ALIGNMENT, Range, intersect
from megapar.data_parallel.layout import Slot
from megapar.data_parallel.shards import ReducedGradients, Weights
from megapar.params import StateTensor


@dataclass(frozen=True)
class Shard:
    """Elements [start, stop) of the layout, updated by this rank.

    `main` are their main weights. `state` are 1-D tensors by name. All have stop - start elements. `slots` are the
    parameters of these elements.
    """

    start: int
    stop: int
    main: Tensor
    state: Mapping[str, Tensor]
    slots: Sequence[Slot]

    def part(self, start: int, stop: int) -> "Shard":
        """Views of the elements [start, stop) of the layout. They must lie in this shard."""
        inside = slice(start - self.start, stop - self.start)
        state = {name: tensor[inside] for name, tensor in self.state.items()}
        slots = [slot for slot in self.slots if slot.start < stop and start < slot.stop]
        return Shard(start, stop, self.main[inside], state, slots)


@dataclass(frozen=True)
class Step:
    """What the update number `number`, counted from 1, has besides gradients: `lr` is the learning rate.

    The gradient is multiplied by `clip`, 0-d fp32 on the device of the state, or by 1 if `clip` is None. `found_inf` is
    None unless the optimizer takes it (`takes_found_inf`). Then it is 0-d on the device, and unless it is zero, an
    update must change no weight and no state.
    """

    number: int
    lr: float
    clip: Tensor | None = None
    found_inf: Tensor | None = None


@dataclass(frozen=True)
class Visit:
    """A part of a shard updated at one time, and the views of its weights and of its gradient."""

    shard: Shard
    grad: Tensor
    params: Tensor


@dataclass(frozen=True)
class NoOptions:
    """The options of an optimizer without options of its own."""


class Optimizer(ABC):
    """Updates this rank's shards of the parameters whose spec names it (`ParamSpec.optimizer`).

    A subclass declares its state in `STATE`, and updates a part of a shard in `update`. Main weights are fp32. For an
    fp32 model they are the parameters themselves. For a bf16 or fp16 model they are kept here, and rounded into the
    parameters after each step.
    """

    STATE: ClassVar[Sequence[StateTensor]] = ()
    """What it keeps for each element besides the main weight. No other optimizer of the run may use these names."""

    OPTIONS: ClassVar[type] = NoOptions
    """A dataclass. Its fields have the names of the options of OptimizerConfig read by this optimizer alone."""

    WHOLE: ClassVar[bool] = False
    """Whether it needs whole parameters. ZeRO then never cuts one, and `update` is called for one at a time.

    A parameter cut by tensor ranks counts as whole if this rank's part is whole. If sizes differ, its parts may then
    belong to different replicas on different tensor ranks. A collective over tensor ranks in `update` would
    hang there: use one only if all tensor ranks have parts of one size.
    """

    ON_HOST: ClassVar[bool] = False
    """Whether main weights and state are in host memory. The update then runs there, on a copy of the gradient."""

    MOST_ELEMENTS: ClassVar[int] = 0
    """How many elements an update takes at most, 0 for all of a shard. They are a multiple of ALIGNMENT, at least one.

    An elementwise update gives the same bits. So state on the host can be updated piece by piece, while the next piece
    is copied.
    """

    takes_found_inf = False
    """Whether `update` takes `Step.found_inf`. Otherwise the host reads it before the updates, and waits for it."""

    def __init__(
        self,
        name: str,
        weights: Weights,
        gradients: ReducedGradients,
        ctx: ParallelContext,
        config: OptimizerConfig,
        impl: Implementation = "torch",
    ):
        """`name` is that of `ParamSpec.optimizer`. `impl` is the implementation of the update, if there are several."""
        self.name = name
        self.ctx = ctx
        self.options: Any = self.OPTIONS(**{field.name: getattr(config, field.name) for field in fields(self.OPTIONS)})
        self.impl: Implementation = impl
        self.slots = [slot for slot in weights.layout.slots if slot.spec.optimizer == name]
        self.aliased = self.aliases(weights.flat.dtype)
        self.shards = [self._new_shard(weights, start, stop) for start, stop in weights.layout.shards_of(name)]
        # Made once: a step would look up the views again.
        self.visits = [
            Visit(shard.part(start, stop), gradients.part(start, stop), weights.part(start, stop))
            for shard in self.shards
            for start, stop in self._cut(shard)
        ]

    @classmethod
    def aliases(cls, dtype: torch.dtype) -> bool:
        """Whether the main weights of parameters of this dtype are the parameters themselves."""
        return dtype == torch.float32 and not cls.ON_HOST  # on the host they are in other memory

    @classmethod
    def planned_nbytes(cls, elements: int, dtype: torch.dtype) -> int:
        """The `nbytes` of an optimizer for so many elements of weights of `dtype`."""
        main = 0 if cls.aliases(dtype) else torch.float32.itemsize
        return elements * (main + sum(tensor.dtype.itemsize for tensor in cls.STATE))

    @abstractmethod
    def update(self, shard: Shard, grad: Tensor, params: Tensor | None, step: Step) -> None:
        """Update `shard` once with its reduced gradient `grad`, 1-D fp32. The update may change `grad`.

        `params` are the 16-bit weights. The new main weights are rounded into them. `params` is None if the main
        weights are the parameters, and for state on the host: its main weights are copied into the parameters
        afterwards.
        """

    def step(self, step: Step) -> None:
        """Update all shards. An optimizer overrides this if its update takes several passes over them."""
        for visit in self.visits:
            if not self.ON_HOST:
                self.update(visit.shard, visit.grad, None if self.aliased else visit.params, step)
                continue
            self.update(visit.shard, visit.grad.to(visit.shard.main.device), None, step)
            visit.params.copy_(visit.shard.main)

    def ranges_where_decayed(self, shard: Shard) -> list[Range]:
        """The ranges of `shard` with weight decay, counted from its start. Padding is in them."""
        slots = [(slot.start, slot.end) for slot in self.slots if slot.spec.decay]
        inside = intersect(slots, [(shard.start, shard.stop)])
        return [(start - shard.start, stop - shard.start) for start, stop in inside]

    @property
    def nbytes(self) -> int:
        """Bytes of state on this rank. This includes main weights unless they are the parameters themselves."""
        total = sum(tensor.nbytes for shard in self.shards for tensor in shard.state.values())
        if not self.aliased:  # otherwise they are counted as weights
            total += sum(shard.main.nbytes for shard in self.shards)
        return total

    def _new_shard(self, weights: Weights, start: int, stop: int) -> Shard:
        params = weights.part(start, stop)
        device = params.device
        if self.ON_HOST and device.type != "meta":  # a plan has no memory to put it into
            device = torch.device("cpu")
        # A view for an fp32 model, so that an update of the main weights is one of the parameters.
        main = params if self.aliased else params.to(device, torch.float32, copy=True)
        state = {
            tensor.name: torch.full_like(main, tensor.initial, dtype=tensor.dtype, device=device)
            for tensor in self.STATE
        }
        return Shard(start, stop, main, state, self.slots)

    def _cut(self, shard: Shard) -> list[Range]:
        """The ranges of the layout updated at one time."""
        if self.WHOLE:
            return [(slot.start, slot.stop) for slot in self.slots if shard.start <= slot.start < shard.stop]
        length = shard.stop - shard.start
        if self.MOST_ELEMENTS:
            # Whole vectors: the elements behind the last one would be rounded in another way (`ALIGNMENT`).
            length = max(self.MOST_ELEMENTS // ALIGNMENT, 1) * ALIGNMENT
        return [(start, min(start + length, shard.stop)) for start in range(shard.start, shard.stop, length)]
