"""All-to-alls of rows with gradients: rows travel between the ranks of an axis, and their gradients travel back.

    function            forward                    backward
    start_exchanges     starts the all-to-alls     waits for the gradients
    all_arrived         waits for the rows         starts the all-to-alls of the gradients

What runs between the two functions runs while the rows travel. In backward too: autograd runs what was recorded later
first, so the backward of the work in between runs while the gradients travel. Then weight gradients of experts run
until the rows, or their gradients, are here (`megapar.linear.meanwhile`).

Rows may travel in several parts, one all-to-all each. They may start together and be waited for one by one, or start
one by one and be waited for together. No part is copied for that: rows leave from slices of one tensor, and arrive in
slices of one tensor. Rows and gradients may be `Packed`: their bytes travel. Through shared memory rows also arrive
sorted by expert, and leave so (`ExchangedRows`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megapar_kernels.packed import form_of, rows_of, split_rows
from torch import Tensor

from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.comm.pending import Pending
from megapar.comm.transport import ExchangedRows
from megapar.linear.meanwhile import Meanwhile


class ExchangeMemory:
    """Memory for rows of several exchanges: those of the first one, then those of the second one, and so on.

    `counts` are the numbers of their rows. The memory is made when the first exchange starts.
    """

    def __init__(self, counts: Sequence[int]):
        self._counts = list(counts)
        self._whole: Tensor | None = None
        self._form: Callable[[Tensor], Tensor] = rows_of  # makes rows of the bytes in memory: they may be `Packed`

    def part(self, number: int, like: Tensor) -> Tensor:
        """The memory for the rows of one exchange. A row has the shape and dtype of those in memory of `like`."""
        if self._whole is None:
            self._form = form_of(like)
            rows = rows_of(like)
            self._whole = rows.new_empty(sum(self._counts), *rows.shape[1:])
        # `data`, so autograd takes the part for no view of the whole: each has a place of its own in the graph.
        return self._whole.split(self._counts)[number].data

    def take(self) -> Tensor:
        """All of it. Nothing is kept here: the graph would keep it."""
        whole, self._whole = self._whole, None
        assert whole is not None, "ExchangeMemory.take() came before the first exchange"
        return self._form(whole)


class ArrivingRows:
    """Rows on their way to this rank, by one all-to-all. `start_exchanges` makes it."""

    def __init__(
        self,
        counts: ExchangedRows,
        axis: Axis,
        meanwhile: Meanwhile,
        gradients: tuple[ExchangeMemory, int],
        arrivals: tuple[ExchangeMemory, int] | None,
    ):
        # Copies of the lists: backward needs them, and the caller may change its own.
        self.counts = counts._replace(sent=tuple(counts.sent), received=tuple(counts.received))
        self.axis = axis
        self.meanwhile = meanwhile  # weight gradients to compute while the rows travel
        self.pending = Pending()
        self.gradients = gradients  # where the gradients of the rows that were sent arrive
        self.arrivals = arrivals or (ExchangeMemory([sum(counts.received)]), 0)
        self.memory: Tensor | None = None  # of the rows, for autograd

    def post(self, x: Tensor) -> Tensor:
        """Start to send the rows `x`. Returns the memory in which rows arrive, in the form of x."""
        memory, number = self.arrivals
        out, self.pending = collectives.all_to_all_async(rows_of(x), self.counts, self.axis, memory.part(number, x))
        return form_of(x)(out)

    def post_gradient(self, grad: Tensor) -> Tensor:
        """Start to send the gradient of the rows back. Returns what autograd takes for the gradient of `memory`."""
        memory, number = self.gradients
        place = memory.part(number, grad)
        _, self.pending = collectives.all_to_all_async(rows_of(grad), self.counts.back, self.axis, place)
        # autograd wants a gradient of the shape of `memory`. The gradients in flight have the shape of what was sent,
        # so they wait in `gradients`, and autograd gets zeros that take no memory.
        return torch.zeros((), dtype=grad.dtype, device=grad.device).expand(grad.shape)

    def wait(self) -> Tensor:
        """The rows received, in the order of positions or of groups. Call it once."""
        return all_arrived([self])


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Sequence[ArrivingRows]) -> tuple[Tensor, ...]:
        ctx.parts = parts
        ctx.host_waits = x.device.type == "cpu"
        pieces = split_rows(x, [sum(part.counts.sent) for part in parts])
        return tuple(part.post(piece) for part, piece in zip(parts, pieces, strict=True))

    @staticmethod
    def backward(ctx: Any, *placeholders: Tensor) -> tuple[Tensor, None]:
        for part in ctx.parts:
            if ctx.host_waits:
                part.meanwhile.run_until(part.pending.has_arrived)
            else:
                part.meanwhile.run()  # all: a GPU computes them while rows travel, and every rank queues the same
            part.pending.wait()
        return ctx.parts[0].gradients[0].take(), None


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Sequence[ArrivingRows], *memories: Tensor) -> Tensor:
        ctx.parts = parts
        for part in parts:
            # What the last micro-batch's backward has left. On a GPU it leaves nothing.
            part.meanwhile.run_until(part.pending.has_arrived)
            part.pending.wait()
        return parts[0].arrivals[0].take()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pieces = split_rows(grad, [sum(part.counts.received) for part in ctx.parts])
        # Autograd goes backward: it asks for the gradients of the last part first.
        found = [part.post_gradient(piece) for part, piece in zip(ctx.parts[::-1], pieces[::-1], strict=True)]
        return None, *found[::-1]


def start_exchanges(
    x: Tensor,
    counts: Sequence[ExchangedRows],
    axis: Axis,
    arrivals: tuple[ExchangeMemory, int] | None = None,
    meanwhile: Meanwhile | None = None,
) -> list[ArrivingRows]:
    """Start sending the rows of `x` [rows, ...] in consecutive parts, one for each of `counts`, to all ranks of `axis`.

    The first rows of a part go to position 0, the next to position 1, and so on, unless it is in groups. Backward sends
    the gradient of each row back to the sender of the row. A single part may arrive in the part (memory, number) of a
    larger memory. This rank computes the weight gradients of `meanwhile` while rows, or their gradients, travel. On an
    axis of one rank nothing is sent. Raises ValueError unless a part has counts for each position,
    and `x` as many rows as are sent.
    """
    sent_rows = [sum(each.sent) for each in counts]
    gradients, waiting = ExchangeMemory(sent_rows), meanwhile or Meanwhile()
    parts = [ArrivingRows(each, axis, waiting, (gradients, number), arrivals) for number, each in enumerate(counts)]
    memories: Sequence[Tensor] = [x]
    if axis.size > 1:
        memories = _Start.apply(x, parts)
    elif len(counts) > 1:
        memories = x.split(sent_rows)
    for part, memory in zip(parts, memories, strict=True):
        part.memory = memory
    return parts


def all_arrived(parts: Sequence[ArrivingRows]) -> Tensor:
    """The rows of all parts, one part after the other. Call it once.

    Several parts must arrive in one memory, in the order of its parts.
    """
    memories = [part.memory for part in parts]
    for part in parts:
        part.memory = None  # it holds the graph, and the graph holds the part
    first = memories[0]
    assert first is not None, "the rows of an exchange were asked for twice"
    if parts[0].axis.size == 1:
        return first if len(memories) == 1 else torch.cat([x for x in memories if x is not None])
    rows: Tensor = _Arrived.apply(parts, *memories)
    return rows


def exchange_rows(x: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int], axis: Axis) -> Tensor:
    """Send rows of `x` [rows, ...] to every position of `axis`, and wait for those received, as `start_exchanges`."""
    (arriving,) = start_exchanges(x, [ExchangedRows(sent_rows, received_rows)], axis)
    return arriving.wait()
