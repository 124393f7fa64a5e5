"""Context parallelism by exchanging positions for heads (DeepSpeed Ulysses, arXiv 2309.14509).

Before attention, an all-to-all gives each rank all positions of a part of the heads. So the attention of a single rank
runs unchanged. After attention, another all-to-all gives each rank its own positions of all heads again.

Shapes: s positions of this rank, b samples, n heads, d width of a query and a key, e width of a value.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from einops import rearrange
from megapar_kernels.alibi import Alibi
from torch import Tensor, nn

from megapar.comm.axis import Axis
from megapar.context_parallel.order import to_parts, to_whole
from megapar.context_parallel.scoring import Scoring
from megapar.context_parallel.whole import are_equal_runs, largest_of_whole, whole_attention
from megapar.declare.batch import MicroBatch
from megapar.expert_parallel.exchange import exchange_rows


class Ulysses(nn.Module):
    """The attention of one layer with the exchanges before and after it.

    `kv_heads[i]` is the local key/value head read by the local query head i, ascending. cp must divide the number of
    query heads. Each rank gets a run of query heads, and the key/value heads they read. A key/value head read by
    several ranks is sent to each of them, and the backward pass sums their gradients of it.
    """

    kv_order: Tensor
    kv_index: Tensor | None

    def __init__(self, cp: Axis, kv_heads: Sequence[int], device: torch.device):
        super().__init__()
        self.cp = cp
        self.heads = len(kv_heads) // cp.size  # query heads of a rank between the exchanges
        self._kv_heads_of_rank: list[range] = []  # the key/value heads that each rank gets
        for rank in range(cp.size):
            read = kv_heads[rank * self.heads : (rank + 1) * self.heads]
            self._kv_heads_of_rank.append(range(read[0], read[-1] + 1))
        # The key/value heads in the order in which they are sent.
        kv_order = [head for heads in self._kv_heads_of_rank for head in heads]
        # Copied to the device here, because in the forward pass each copy would wait for all queued work.
        self.register_buffer("kv_order", torch.tensor(kv_order, device=device), persistent=False)
        # For each query head of this rank between the exchanges, its key/value head among those that arrive.
        first_kv_head = self._kv_heads_of_rank[cp.rank].start
        own_kv_heads = kv_heads[cp.rank * self.heads : (cp.rank + 1) * self.heads]
        arrived_kv_heads = [head - first_kv_head for head in own_kv_heads]
        kv_index = None
        if not are_equal_runs(arrived_kv_heads):
            kv_index = torch.tensor(arrived_kv_heads, device=device)
        self.register_buffer("kv_index", kv_index, persistent=False)

    def forward(
        self,
        q_sbnd: Tensor,
        k_sbnd: Tensor,
        v_sbnd: Tensor,
        batch: MicroBatch,
        scoring: Scoring,
        sinks_n: Tensor | None = None,
    ) -> Tensor:
        """Causal attention, [s, b, n * e], of this rank's positions s to those of all cp ranks.

        `sinks_n` are those of all heads. A rank's gradient of them is that of its heads, and 0 for the others. Noted
        are the largest logits of a rank's heads.
        """
        q, k, v = self._to_heads(q_sbnd, k_sbnd, v_sbnd)
        # This rank now has all positions of its part of the heads.
        all_positions_s = torch.arange(batch.sample_length, device=q.device)
        first = self.cp.rank * self.heads
        if scoring.dropout is not None:
            first_head = scoring.dropout.heads.start + first
            heads = range(first_head, first_head + self.heads)
            dropout = replace(scoring.dropout, heads=heads, positions_s=all_positions_s)
            scoring = replace(scoring, dropout=dropout)
        if scoring.alibi is not None:
            slopes_n = scoring.alibi.slopes_n[first : first + self.heads]
            scoring = replace(scoring, alibi=Alibi(slopes_n, all_positions_s, all_positions_s))
        if sinks_n is not None:
            sinks_n = sinks_n[first : first + self.heads]
        batch = replace(batch, positions_s=all_positions_s)
        if scoring.largest is not None:
            scoring.largest.add(largest_of_whole(q, k, batch, scoring), first)
        y_sbc = whole_attention(q, k, v, batch, scoring, sinks_n)
        return self._to_positions(y_sbc)

    def _to_heads(self, q_sbnd: Tensor, k_sbnd: Tensor, v_sbnd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of all cp * s positions, with this rank's part of the heads."""
        cp = self.cp
        q, k, v = (rearrange(x, "s b n d -> n b s d") for x in (q_sbnd, k_sbnd, v_sbnd))
        kv_counts = [len(heads) for heads in self._kv_heads_of_rank]
        # The heads of each rank, one list each of q, k and v.
        sent = (
            q.split(self.heads),
            k.index_select(0, self.kv_order).split(kv_counts),
            v.index_select(0, self.kv_order).split(kv_counts),
        )
        # One message carries all three. A row of the exchange is a number, because heads of v may have another size.
        messages = [[part[rank].reshape(-1) for part in sent] for rank in range(cp.size)]
        sent_sizes = [sum(part.numel() for part in message) for message in messages]
        received_size = sent_sizes[cp.rank]  # every rank sends the same heads to this one
        flat = torch.cat([part for message in messages for part in message])
        arrived = exchange_rows(flat, sent_sizes, [received_size] * cp.size, cp).view(cp.size, received_size)
        # [cp, heads, b, s, d]: the positions of each rank.
        shapes = [part[cp.rank].shape for part in sent]
        parts = arrived.split([shape.numel() for shape in shapes], dim=1)
        by_rank = [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]
        # `to_whole` gives each its own memory. So if attention keeps one of them for backward in another order, the
        # memory of the others does not stay with it.
        q, k, v = (rearrange(to_whole(part), "n b s d -> s b n d") for part in by_rank)
        if self.kv_index is not None:
            k = k.index_select(2, self.kv_index)
            v = v.index_select(2, self.kv_index)
        return q, k, v

    def _to_positions(self, y_sbc: Tensor) -> Tensor:
        """[s, b, n * e] of all heads, from the attention [cp * s, b, n / cp * e] of this rank's heads."""
        return to_positions(y_sbc.unflatten(-1, (self.heads, -1)), self.cp).flatten(2)


def to_heads(x_sbnd: Tensor, cp: Axis) -> Tensor:
    """Return x [cp * s, b, n / cp, d] of all positions and this rank's heads, from x [s, b, n, d]. cp divides n."""
    x_nbsd = rearrange(x_sbnd, "s b n d -> n b s d")
    rows = [len(x_nbsd) // cp.size] * cp.size
    arrived = exchange_rows(x_nbsd, rows, rows, cp).unflatten(0, (cp.size, -1))  # [cp, heads, b, s, d]
    return rearrange(to_whole(arrived), "n b s d -> s b n d")


def to_positions(y_sbnd: Tensor, cp: Axis) -> Tensor:
    """Return y [s, b, n, d] of this rank's positions and all heads, from y [cp * s, b, n / cp, d]. cp divides n."""
    parts = to_parts(rearrange(y_sbnd, "s b n d -> n b s d"), cp.size)  # [cp, n, b, s, d]: the positions of each rank
    rows = [parts.shape[1]] * cp.size
    # Rank by rank, so all heads arrive in ascending order.
    arrived = exchange_rows(parts.flatten(0, 1), rows, rows, cp)
    return rearrange(arrived, "n b s d -> s b n d")
