"""Core attention that reads the keys and values of earlier columns from a cache, to generate text.

Shapes: b samples, n query heads, k key/value heads, d width of a query and a key, e width of a value.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megapar_kernels.alibi import Alibi
from megapar_kernels.block_attention import wide
from torch import Tensor, nn

from megapar.context_parallel.dropout import AttentionDropout
from megapar.declare.batch import MicroBatch
from megapar.declare.largest_logits import LargestLogits

if TYPE_CHECKING:
    from megapar.context_parallel.attention import CoreAttention


class CachedAttention(nn.Module):
    """Core attention that keeps the keys and values of `capacity` columns, and reads them again for later columns.

    The first call has the columns of the prompts, and later calls have those behind. Row i begins at column
    `first_b[i]`.
    """

    def __init__(self, core: "CoreAttention", first_b: Tensor, capacity: int):
        super().__init__()
        self.core = core
        self.first_b = first_b
        self.is_ragged = bool(first_b.any())
        self.capacity = capacity
        self.length = 0

    def forward(
        self,
        q_sbnd: Tensor,
        k_sbnd: Tensor,
        v_sbnd: Tensor,
        batch: MicroBatch,
        dropout: AttentionDropout | None,
        sinks_n: Tensor | None = None,
        largest: LargestLogits | None = None,
    ) -> Tensor:
        """Attend to the keys of this call and of earlier calls. `largest` stays as it is, since no update follows."""
        # [b, k, s, d]: the keys of a head follow one another, as they are read.
        keys, values = (x.permute(1, 2, 0, 3) for x in (k_sbnd, v_sbnd))
        if self.length == 0:
            self.keys, self.values = (x.new_empty((*x.shape[:2], self.capacity, x.shape[3])) for x in (keys, values))
        start, self.length = self.length, self.length + len(k_sbnd)
        self.keys[:, :, start : self.length] = keys
        self.values[:, :, start : self.length] = values
        if start == 0:
            y: Tensor = self.core(q_sbnd, k_sbnd, v_sbnd, batch, dropout, sinks_n)
            return y
        of_columns = [self._of_column(q_bnd, sinks_n, start + number) for number, q_bnd in enumerate(q_sbnd, 1)]
        return of_columns[0] if len(of_columns) == 1 else torch.cat(of_columns)

    def rewind(self, length: int) -> None:
        """Forget all columns but the first `length`."""
        self.length = min(self.length, length)

    def _of_column(self, q_bnd: Tensor, sinks_n: Tensor | None, length: int) -> Tensor:
        """The attention of the last of the first `length` columns, [1, b, n * e]."""
        core = self.core
        start = max(length - core.window, 0) if core.window else 0
        first_b, is_ragged = self.first_b, self.is_ragged
        if core.chunk:
            # The first column of the newest token's chunk.
            first_b = length - 1 - (length - 1 - first_b) % core.chunk
            start = max(start, int(first_b.min()))
            is_ragged = bool((first_b > start).any())
        keys, values = (x[:, :, start:length] for x in (self.keys, self.values))
        if core.kv_index is not None:
            keys, values = (x.index_select(1, core.kv_index) for x in (keys, values))
        seen_bs = None
        if is_ragged:
            columns = torch.arange(start, length, device=q_bnd.device)
            seen_bs = (columns >= first_b[:, None])[:, None, None]
        # The query heads of a key head are queries of one head.
        q_bkrd = q_bnd.unflatten(1, (keys.shape[1], -1))
        scale = core.rule.factor(q_bnd)
        bias = None
        if core.slopes_n is not None:
            columns = torch.arange(start, length, device=q_bnd.device)
            bias = Alibi(core.slopes_n, columns[-1:], columns).bias(wide(q_bnd.dtype)).view(1, *q_bkrd.shape[1:3], -1)
        if sinks_n is None and not core.rule.cap and bias is None:
            y = F.scaled_dot_product_attention(q_bkrd, keys, values, seen_bs, scale=scale)
            return y.flatten(1)[None]
        dtype = wide(q_bnd.dtype)
        scores = scale * (q_bkrd.to(dtype) @ keys.to(dtype).transpose(-1, -2))
        if core.rule.cap:
            scores = core.rule.cap * (scores / core.rule.cap).tanh()
        if bias is not None:
            scores = scores + bias
        if seen_bs is not None:
            scores = scores.masked_fill(~seen_bs, float("-inf"))
        if sinks_n is not None:
            sinks = sinks_n.to(dtype).view(1, keys.shape[1], -1, 1).expand(len(q_bnd), -1, -1, -1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., : keys.shape[2]]
        return (weights @ values.to(dtype)).to(q_bnd.dtype).flatten(1)[None]
