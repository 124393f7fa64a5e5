"""The transport of a simulation: the other ranks exist in a plan alone, but every message is counted."""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from megapar.comm.pending import Pending
from megapar.comm.transport import Meta, Transfers


class Simulated(Meta):
    """Results have their shapes and no values. Operations count in the axis's traffic.

    `to_position` has the bytes of messages with a destination, by its position on the axis. Of the other operations,
    rings, all bytes go to the next position.
    """

    name: ClassVar[str] = "simulated"
    sends: ClassVar[bool] = True

    def __init__(self, size: int, position: int, *, sorts_groups: bool = False):
        super().__init__(sorts_groups=sorts_groups)
        self.to_position = [0] * size
        self._position = position

    def all_to_all(self, x: Tensor, out: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Pending:
        row_bytes = x[:1].nbytes
        for position, rows in enumerate(sent_rows):
            if position != self._position:
                self.to_position[position] += rows * row_bytes
        return super().all_to_all(x, out, sent_rows, received_rows)

    def exchange(self, sends: Transfers, receives: Transfers) -> Pending:
        for x, position in sends:
            self.to_position[position] += x.nbytes
        return super().exchange(sends, receives)
