"""Updates of state in host memory, piece by piece, while pieces beside it travel (optimizer.offload).

    device    gradient 0   gradient 1    gradient 2    weights 0 ...
    host                   update 0      update 1      update 2

The gradient of a piece goes to a slot in pinned host memory. The host updates its main weights and state there, and
rounds the main weights into a second slot, from which they go to the device. There are two slots of each, made once.
After ZeRO-Offload (Ren et al., arXiv 2101.06840).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megapar.optimizer.visits import UpdateArgs, Visit
from megapar.system import device
from megapar.system.side_stream import Reached, SideStream


class HostUpdates:
    """Updates the pieces `visits`. All of their shards are in host memory.

    `update` is called as `Optimizer.update`, with a copy of the gradient. `dtype` is that of the parameters.
    """

    def __init__(
        self,
        visits: Sequence[Visit],
        update: Callable[[Visit, Tensor, UpdateArgs], None],
        dtype: torch.dtype,
        on: torch.device,
    ):
        self._visits = visits
        self._update = update
        longest, number = _slots([visit.params.numel() for visit in visits])
        self._grads = [_slot(longest, torch.float32, on) for _ in range(number)]
        self._params = [_slot(longest, dtype, on) for _ in range(number)]
        self._left = [Reached() for _ in range(number)]
        self.stream = SideStream(on)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return sum(slot.nbytes for slot in (*self._grads, *self._params))

    @staticmethod
    def planned_nbytes(sizes: Sequence[int], dtype: torch.dtype) -> int:
        """The `nbytes` for pieces of these numbers of elements."""
        longest, number = _slots(sizes)
        return number * longest * (torch.float32.itemsize + dtype.itemsize)

    def run(self, step: UpdateArgs) -> None:
        """Update all pieces. The device's current stream waits for the new weights, and the host does not."""
        if not self._visits:
            return
        arrived = self._fetch(0)
        for number, visit in enumerate(self._visits):
            arrived.synchronize()
            if number + 1 < len(self._visits):
                arrived = self._fetch(number + 1)
            elements = visit.params.numel()
            self._update(visit, self._grads[number % 2][:elements], step)
            self._left[number % 2].synchronize()  # the weights of the piece that used the slot before
            self._params[number % 2][:elements].copy_(visit.shard.main)
            self._left[number % 2] = self._send(number)
        for left in self._left:
            left.wait()

    def _fetch(self, number: int) -> Reached:
        """Start to copy the gradient of a piece to its slot. The update two pieces before has read the slot."""
        grad = self._visits[number].grad
        slot = self._grads[number % 2][: grad.numel()]

        def copy() -> None:
            slot.copy_(grad, non_blocking=True)

        return self.stream.queue(copy)

    def _send(self, number: int) -> Reached:
        """Start to copy the weights of a piece to the device."""
        params = self._visits[number].params
        slot = self._params[number % 2][: params.numel()]

        def copy() -> None:
            params.copy_(slot, non_blocking=True)

        return self.stream.queue(copy)


def _slots(sizes: Sequence[int]) -> tuple[int, int]:
    """The elements of a slot, and how many slots of each kind there are, for pieces of so many elements."""
    return max(sizes, default=0), min(2, len(sizes))


def _slot(elements: int, dtype: torch.dtype, on: torch.device) -> Tensor:
    return device.host_buffer(elements * dtype.itemsize, on).view(dtype)
