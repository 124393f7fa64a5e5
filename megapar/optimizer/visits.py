"""What an optimizer updates at one time: a part of its shards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megapar.data_parallel.layout import Slot


@dataclass(frozen=True)
class UpdateShard:
    """Elements [start, stop) of the layout, updated by this rank.

    `main` are their main weights, or the upper halves of these if `state` has a REMAINDER. `state` are 1-D tensors by
    name. All have stop - start elements. `slots` are the parameters of these elements. `on_host` tells whether they are
    in host memory beside a device's.
    """

    start: int
    stop: int
    main: Tensor
    state: Mapping[str, Tensor]
    slots: Sequence[Slot]
    on_host: bool = False

    def part(self, start: int, stop: int) -> "UpdateShard":
        """Views of the elements [start, stop) of the layout. They must lie in this shard."""
        inside = slice(start - self.start, stop - self.start)
        state = {name: tensor[inside] for name, tensor in self.state.items()}
        slots = [slot for slot in self.slots if slot.start < stop and start < slot.stop]
        return UpdateShard(start, stop, self.main[inside], state, slots, self.on_host)


@dataclass(frozen=True)
class UpdateArgs:
    """What the update number `number`, counted from 1, has besides gradients: `lr` is the learning rate.

    `clip`, 0-d fp32 on the device of the state, is what the gradient is to be multiplied by; None: by nothing, or it
    has been. `found_inf` is None unless the optimizer takes it (`takes_found_inf`). Then it is 0-d on the device, and
    unless it is zero, an update must change no weight and no state.
    """

    number: int
    lr: float
    clip: Tensor | None = None
    found_inf: Tensor | None = None


@dataclass(frozen=True)
class Visit:
    """A part of a shard updated at one time, and the views of its weights and of its gradient."""

    shard: UpdateShard
    grad: Tensor
    params: Tensor
