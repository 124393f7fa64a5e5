"""Collectives between CPU ranks over gloo.

Gloo's own algorithms take up to eight times as long as direct messages. So the ranks send each other their slices, and
each rank adds what arrives in rank order. A sum then rounds the same way wherever an element lies in its tensor. A
small all-reduce sends the whole tensor to each rank. A large one uses gloo's all-reduce.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from megapar.comm.pending import Pending
from megapar.comm.transport import fold, put, rows_by_exchange
from megapar.comm.transport_torch import TorchDistributed

_SMALL = 1 << 20  # bytes that a rank may receive in an all-reduce by direct exchange


class Gloo(TorchDistributed):
    """A `Transport` over a gloo group, with direct messages in place of most of gloo's collectives."""

    name: ClassVar[str] = "gloo"

    def all_reduce(self, x: Tensor, op: str) -> Pending:
        size = len(self.ranks)
        if x.nbytes * (size - 1) > _SMALL:
            return super().all_reduce(x, op)
        return self._exchange_and_fold([x] * size, op)

    def all_gather(self, x: Tensor, out: Tensor) -> Pending:
        return self.all_gather_slices(x, out.chunk(len(self.ranks)))

    def all_gather_slices(self, x: Tensor, slices: Sequence[Tensor]) -> Pending:
        own_part = put(x, slices[self.rank])
        return self.exchange(
            [(own_part, peer) for peer in self._peers()], [(slices[peer], peer) for peer in self._peers()]
        )

    def reduce_scatter(self, x: Tensor, out: Tensor) -> Pending:
        slices = list(x.contiguous().chunk(len(self.ranks)))
        # The fold writes its result into this rank's slice, and `x` must stay as it is.
        slices[self.rank] = put(slices[self.rank], out)
        return self._exchange_and_fold(slices, "sum")

    def all_to_all(self, x: Tensor, out: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Pending:
        return rows_by_exchange(self, self.rank, x, out, sent_rows, received_rows)

    def _peers(self) -> list[int]:
        return [position for position in range(len(self.ranks)) if position != self.rank]

    def _exchange_and_fold(self, outgoing: Sequence[Tensor], op: str) -> Pending:
        """Start sending `outgoing[i]` to position i.

        After `wait`, outgoing[self.rank] holds the reduction of all ranks' tensors for this rank, in rank order.
        """
        result = outgoing[self.rank]
        arriving = {peer: torch.empty_like(result) for peer in self._peers()}
        sends = [(outgoing[peer], peer) for peer in arriving]
        receives = [(x, peer) for peer, x in arriving.items()]

        def reduce() -> None:
            parts = [arriving.get(position, result) for position in range(len(self.ranks))]
            # In rank order, so that every rank gets the same bits.
            fold(parts, result, op)

        return self.exchange(sends, receives).followed_by(reduce)
