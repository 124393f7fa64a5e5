"""The numbers of rows in a dispatch, and the chunks in which rows travel.

The experts of each rank are cut into as many chunks of consecutive experts. The rows of a chunk are those for its
experts, on all ranks. They travel in an all-to-all of their own, so the experts work on one chunk while the rows of
others travel. An expert gets all its rows in one chunk, so its products are those without chunks.

Shapes: E experts of the layer, or e experts of this rank; p positions of ep, q positions of etp.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain

import torch
from megapar_kernels.grouped import RowGroups
from torch import Tensor

from megapar.comm.axis import Axis
from megapar.comm.transport import ExchangedRows
from megapar.declare.params import cut


def experts_of(num_experts: int, ep: Axis) -> range:
    """The global numbers of this rank's experts. There may be none."""
    return range(*cut(num_experts, ep))


def _in_chunk(experts: range, number: int, chunks: int) -> range:
    """The experts of one chunk, of a rank's `experts`."""
    return experts[len(experts) * number // chunks : len(experts) * (number + 1) // chunks]


def place_of_expert(num_experts: int, ep: Axis, chunks: int, device: torch.device) -> Tensor | None:
    """int64 [E]: the place of each expert among all, by chunk and then by number. None if that is its number.

    It is made with a layer: a GPU would wait for its copy from the host.
    """
    if chunks == 1:
        return None
    of_ranks = [experts_of(num_experts, replace(ep, rank=position)) for position in range(ep.size)]
    order = chain(*(_in_chunk(experts, number, chunks) for number in range(chunks) for experts in of_ranks))
    place = {expert: at for at, expert in enumerate(order)}
    return torch.tensor([place[expert] for expert in range(num_experts)], device=device)


@dataclass(frozen=True)
class RowCounts:
    """How many rows go where.

    The numbers are on their way to the host. The first use of one waits for them, so a GPU should have work then.
    """

    ep: Axis
    etp: Axis
    num_experts: int
    sent: int
    """The rows sent by this rank to all experts."""
    arriving_qpe: Tensor
    """int64 [q, p, e], on the device: the rows for this rank's e-th expert received by position q of etp from position
    p of ep."""
    numbers: Callable[[], Tensor]
    """Waits for the numbers on the host: int64 [E], the rows sent by this rank to each expert, then `arriving_qpe`."""

    @cached_property
    def on_host(self) -> tuple[Tensor, Tensor]:
        """The rows sent by this rank to each expert, int64 [E], and `arriving_qpe`."""
        sent_e, arriving = self.numbers().split([self.num_experts, self.arriving_qpe.numel()])
        return sent_e, arriving.view(self.arriving_qpe.shape)


@dataclass(frozen=True)
class RowChunk:
    """The rows of one of `chunks` chunks."""

    counts: RowCounts
    number: int
    chunks: int

    @cached_property
    def experts(self) -> slice:
        """The experts of the chunk, by their index among those of this rank."""
        of_rank = _in_chunk(range(self.counts.arriving_qpe.shape[2]), self.number, self.chunks)
        return slice(of_rank.start, of_rank.stop)

    @property
    def _is_known(self) -> bool:
        """Whether all rows of this rank stay on it. Their number is known then without waiting for a GPU."""
        return self.counts.ep.size == self.chunks == 1

    @cached_property
    def sent_rows(self) -> tuple[int, ...]:
        """The number of rows sent by this rank to each position of ep."""
        counts = self.counts
        if self._is_known:
            return (counts.sent,)
        sent_e = counts.on_host[0]
        of_ranks = [experts_of(counts.num_experts, replace(counts.ep, rank=rank)) for rank in range(counts.ep.size)]
        in_chunk = [_in_chunk(experts, self.number, self.chunks) for experts in of_ranks]
        return tuple(int(sent_e[experts.start : experts.stop].sum()) for experts in in_chunk)

    @cached_property
    def _arriving(self) -> Tensor:
        """The part of `RowCounts.arriving_qpe` for the experts of this chunk, on the host."""
        return self.counts.on_host[1][..., self.experts]

    @cached_property
    def received_rows(self) -> tuple[int, ...]:
        """The number of rows received by this rank from each position of ep."""
        if self._is_known:
            return (self.counts.sent,)
        return tuple(self._arriving[self.counts.etp.rank].sum(1).tolist())

    @cached_property
    def to_experts(self) -> ExchangedRows:
        """The numbers of rows on their way to the experts."""
        groups = self._arriving[0].tolist() if self.arrives_sorted else None
        return ExchangedRows(self.sent_rows, self.received_rows, received_groups=groups)

    @cached_property
    def arrives_sorted(self) -> bool:
        """Whether the all-to-all itself puts rows in the order of experts."""
        counts = self.counts
        several = self.experts.stop - self.experts.start > 1
        return several and counts.etp.size == 1 and counts.ep.transport.sorts_groups

    @cached_property
    def brought_rows(self) -> tuple[int, ...]:
        """The number of rows received over ep by each position of etp."""
        if self._is_known and self.counts.etp.size == 1:
            return (self.counts.sent,)
        return tuple(self._arriving.sum((1, 2)).tolist())

    @property
    def rows(self) -> int:
        """The number of rows for this rank's experts to work on."""
        return sum(self.brought_rows)

    @cached_property
    def groups(self) -> RowGroups:
        """The rows of each expert of the chunk. Their numbers on the host are waited for where they are used."""
        of_experts = self.counts.arriving_qpe[..., self.experts].sum((0, 1))
        # Without the chunk itself, which keeps the groups: a circle would stay in memory until the next collection.
        on_host = partial(_rows_of_expert, self.counts, self.experts)
        return RowGroups(len(of_experts), of_experts.cumsum(0, dtype=torch.int32), on_host)

    @cached_property
    def expert_order(self) -> Tensor | None:
        """int64 [rows]: the indices of the arrived rows in the order of experts. None if rows arrive in that order.

        Rows of one expert stay in their order of arrival.
        """
        arriving_qpe = self.counts.arriving_qpe[..., self.experts]
        etp_size, ep_size, experts = arriving_qpe.shape
        if etp_size * ep_size == 1 or experts <= 1 or self.arrives_sorted:
            return None
        expert_qpe = torch.arange(experts, device=arriving_qpe.device).expand(arriving_qpe.shape)
        # The sum is given, because repeat_interleave would otherwise wait for the GPU to read it.
        expert_of_row = torch.repeat_interleave(
            expert_qpe.reshape(-1), arriving_qpe.reshape(-1), output_size=sum(self.brought_rows)
        )
        return torch.argsort(expert_of_row, stable=True)

    @cached_property
    def arrival_order(self) -> Tensor | None:
        """int64 [rows]: the inverse permutation. It brings rows back into their order of arrival."""
        return None if self.expert_order is None else inverse_of(self.expert_order)


def _rows_of_expert(counts: RowCounts, experts: slice) -> list[int]:
    """The number of rows of each of some of this rank's experts."""
    rows: list[int] = counts.on_host[1][..., experts].sum((0, 1)).tolist()
    return rows


def inverse_of(permutation: Tensor) -> Tensor:
    """The inverse of a permutation, both int64 [n]."""
    indices = torch.arange(permutation.numel(), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, indices)
