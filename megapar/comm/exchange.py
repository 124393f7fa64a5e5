"""An all-to-all of rows with a gradient: rows travel between the ranks of an axis, and their gradients travel back.

    function            forward                 backward
    start_exchange      starts the all-to-all   waits for the gradients
    ArrivingRows.wait   waits for the rows      starts the all-to-all of the gradients

What runs between the two functions runs while the rows travel. In backward too: autograd runs what was recorded later
first, so the backward of the work in between runs while the gradients travel.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megapar.comm import collectives
from megapar.comm.pending import Pending
from megapar.context import Axis


class ArrivingRows:
    """Rows on their way to this rank. `start_exchange` makes it, and `wait` returns the rows."""

    def __init__(self, x: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int], axis: Axis):
        # Copies of the counts: backward needs them, and the caller may change its lists.
        self.sent_rows = tuple(sent_rows)
        self.received_rows = tuple(received_rows)
        self.axis = axis
        self.pending = Pending()
        self.gradient: Tensor | None = None  # of the rows that were sent, while backward receives it
        self._memory: Tensor | None = x  # of the rows that arrive
        if axis.size > 1:
            self._memory = _Start.apply(x, self)

    def wait(self) -> Tensor:
        """The rows received: those from position 0, then those from position 1, and so on. Call it once."""
        memory = self._memory
        assert memory is not None, "ArrivingRows.wait() was called twice"
        self._memory = None
        if self.axis.size == 1:
            return memory
        return _Finish.apply(memory, self)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: ArrivingRows) -> Tensor:
        ctx.rows = rows
        memory, rows.pending = collectives.all_to_all_async(x, rows.sent_rows, rows.received_rows, rows.axis)
        return memory

    @staticmethod
    def backward(ctx: Any, placeholder: Tensor) -> tuple[Tensor | None, None]:
        ctx.rows.pending.wait()
        gradient = ctx.rows.gradient
        ctx.rows.gradient = None  # otherwise the graph would keep its memory
        return gradient, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, memory: Tensor, rows: ArrivingRows) -> Tensor:
        ctx.rows = rows
        rows.pending.wait()
        return memory.view_as(memory)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows = ctx.rows
        rows.gradient, rows.pending = collectives.all_to_all_async(grad, rows.received_rows, rows.sent_rows, rows.axis)
        # autograd wants a gradient of the shape of `memory`. The gradients in flight have the shape of what was sent,
        # so they wait in `rows`, and autograd gets zeros that take no memory.
        return grad.new_zeros(()).expand(grad.shape), None


def start_exchange(x: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int], axis: Axis) -> ArrivingRows:
    """Start sending rows of `x` [rows, ...] to every position of `axis`. `ArrivingRows.wait` returns the rows received.

    The first `sent_rows[0]` rows go to position 0, the next `sent_rows[1]` to position 1, and so on. `received_rows[i]`
    rows arrive from position i. Backward sends the gradient of each row back to the sender of the row. Raises
    ValueError unless both have a count for each position and `x` has as many rows as are sent.
    """
    return ArrivingRows(x, sent_rows, received_rows, axis)


def exchange_rows(x: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int], axis: Axis) -> Tensor:
    """Do `start_exchange`, and wait for it. Returns the rows received."""
    return start_exchange(x, sent_rows, received_rows, axis).wait()
