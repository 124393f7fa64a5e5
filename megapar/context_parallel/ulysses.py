"""Context parallelism by exchanging positions for heads (DeepSpeed Ulysses, arXiv 2309.14509).

Between the exchanges a rank has whole samples of a part of the heads, and the attention of one rank runs unchanged.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from einops import rearrange
from megapar_kernels.backend import Kernels
from torch import Tensor, nn

from megapar.batch import MicroBatch
from megapar.context import Axis
from megapar.context_parallel.dropout import AttentionDropout
from megapar.context_parallel.order import to_parts, to_whole
from megapar.context_parallel.whole import are_equal_runs, whole_attention
from megapar.exchange import exchange_rows


class Ulysses(nn.Module):
    """The exchanges of one layer.

    `kv_heads` has the local key/value head of each local query head, ascending. The number of query heads must divide
    by cp. Each rank gets the key/value heads that its query heads read. A head that several ranks read is sent to each,
    and the backward pass sums their gradients of it.
    """

    send_order: Tensor
    kv_index: Tensor | None

    def __init__(self, cp: Axis, kv_heads: Sequence[int], device: torch.device):
        super().__init__()
        self.cp = cp
        self.heads = len(kv_heads) // cp.size  # query heads of a rank between the exchanges
        self._read: list[range] = []  # the key/value heads that each rank reads
        for rank in range(cp.size):
            read = kv_heads[rank * self.heads : (rank + 1) * self.heads]
            self._read.append(range(read[0], read[-1] + 1))
        # The rows of q, k and v, whose heads follow one another, in the order in which they are sent.
        first_k = len(kv_heads)
        first_v = first_k + kv_heads[-1] + 1
        rows: list[int] = []
        for rank, read in enumerate(self._read):
            rows += range(rank * self.heads, (rank + 1) * self.heads)
            rows += [first_k + head for head in read]
            rows += [first_v + head for head in read]
        self._sent = [self.heads + 2 * len(read) for read in self._read]
        # Made here: in the forward pass each copy to the GPU would wait for all queued work.
        self.register_buffer("send_order", torch.tensor(rows, device=device), persistent=False)
        own = self._read[cp.rank]
        kv_of_queries = [head - own.start for head in kv_heads[cp.rank * self.heads : (cp.rank + 1) * self.heads]]
        kv_index = None
        if not are_equal_runs(kv_of_queries):
            kv_index = torch.tensor(kv_of_queries, device=device)
        self.register_buffer("kv_index", kv_index, persistent=False)

    def forward(
        self,
        q_sbnd: Tensor,
        k_sbnd: Tensor,
        v_sbnd: Tensor,
        batch: MicroBatch,
        dropout: AttentionDropout | None,
        kernels: Kernels,
    ) -> Tensor:
        """Causal attention, [s, b, n * d], of this rank's positions s to those of all cp ranks."""
        q, k, v = self._to_heads(q_sbnd, k_sbnd, v_sbnd)
        # Each rank has all positions now.
        everywhere = torch.arange(batch.sample_length, device=q.device)
        if dropout is not None:
            first = dropout.heads.start + self.cp.rank * self.heads
            dropout = replace(dropout, heads=range(first, first + self.heads), positions_s=everywhere)
        y = whole_attention(q, k, v, replace(batch, positions_s=everywhere), dropout, kernels)
        return self._to_positions(y)

    def _to_heads(self, q_sbnd: Tensor, k_sbnd: Tensor, v_sbnd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [cp * s, b, n, d] of this rank's part of the heads."""
        cp = self.cp
        heads = rearrange(torch.cat((q_sbnd, k_sbnd, v_sbnd), dim=2), "s b n d -> n b s d")
        own = self._sent[cp.rank]
        arrived = exchange_rows(heads.index_select(0, self.send_order), self._sent, [own] * cp.size, cp)
        kv = len(self._read[cp.rank])
        parts = arrived.unflatten(0, (cp.size, own)).split([self.heads, kv, kv], dim=1)
        # Each has memory of its own: attention may keep one of them in another order, and the others as they are.
        q, k, v = (rearrange(to_whole(part), "n b s d -> s b n d") for part in parts)
        if self.kv_index is not None:
            k = k.index_select(2, self.kv_index)
            v = v.index_select(2, self.kv_index)
        return q, k, v

    def _to_positions(self, y_sbc: Tensor) -> Tensor:
        """[s, b, n * d] of all heads, from the attention [cp * s, b, n / cp * d] of this rank's heads."""
        cp = self.cp
        parts = to_parts(rearrange(y_sbc, "s b (n d) -> n b s d", n=self.heads), cp.size)
        rows = [self.heads] * cp.size
        # The heads of the ranks arrive in the order of their numbers.
        return rearrange(exchange_rows(parts.flatten(0, 1), rows, rows, cp), "n b s d -> s b (n d)")
