"""Attention in blocks: results of blocks are merged, and gradients of blocks are added, in fp32 (fp64 for fp64).

Shapes: b samples, n query heads, h key/value heads, s local queries, k keys, d width of a head.
"""

from collections.abc import Sequence

import torch
from megapar_kernels.block_attention import (
    attention_block,
    attention_block_backward,
    merge_block,
    takes_earlier_keys,
    wide,
)
from torch import Tensor

from megapar.context_parallel.deal import Block, Ranges, square
from megapar.context_parallel.dropout import AttentionDropout


class Dropped:
    """The dropout mask of each block of queries and keys. Without dropout there are none."""

    def __init__(self, dropout: AttentionDropout | None, keys: Ranges):
        self._dropout = dropout
        self.p = 0.0
        if dropout is not None:
            self.p = dropout.p
            device = dropout.positions_s.device
            self._keys = torch.cat([torch.arange(start, stop, device=device) for start, stop in keys])

    def keep(self, block: Block) -> Tensor | None:
        if self._dropout is None:
            return None
        return self._dropout.keep(self._keys[block.keys], block.samples, block.queries)


class Result:
    """The result of the blocks so far: `out` [b, n, s, d] and `lse` [b, n, s].

    In memory `out` is [s, b, n, d], as the layer after attention reads it.
    """

    def __init__(self, q: Tensor):
        b, n, s, d = q.shape
        dtype = wide(q.dtype)
        self.out = torch.empty(s, b, n, d, dtype=dtype, device=q.device).permute(1, 2, 0, 3)
        self.lse = torch.empty(b, n, s, dtype=dtype, device=q.device)

    def add(self, q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], dropped: Dropped) -> None:
        """Add what the queries attend in `blocks` of the keys `k` [b, h, k, d].

        The blocks with a query's own position must come first.
        """
        if not takes_earlier_keys(q):
            blocks = square(blocks)
        for block in blocks:
            samples, queries, keys, causal = block
            part, lse = attention_block(
                q[samples, :, queries],
                k[samples, :, keys],
                v[samples, :, keys],
                causal=causal,
                keep=dropped.keep(block),
                p=dropped.p,
            )
            out_rows = self.out[samples, :, queries]
            lse_rows = self.lse[samples, :, queries]
            # A query attends its own position in one block alone, which is causal and comes first.
            if causal:
                out_rows.copy_(part)
                lse_rows.copy_(lse)
            else:
                merge_block(out_rows, lse_rows, part, lse)


class Gradient:
    """The gradient of `q`, and what the blocks need of the forward pass: the merged `out` and its `lse`."""

    def __init__(self, grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor):
        self._grad_out = grad_out
        self._q = q
        self._out = out
        self._lse = lse
        self.q = torch.zeros_like(q, dtype=wide(q.dtype))

    def add(self, kv: Tensor, blocks: Sequence[Block], dropped: Dropped, grad_kv: Tensor) -> None:
        """Add the gradients of `blocks` of the keys and values `kv` [2, b, h, k, d] to `q` and `grad_kv`."""
        if not takes_earlier_keys(self._q):
            blocks = square(blocks)
        for block in blocks:
            samples, queries, keys, causal = block
            grad_q, grad_k, grad_v = attention_block_backward(
                self._grad_out[samples, :, queries],
                self._q[samples, :, queries],
                kv[0, samples, :, keys],
                kv[1, samples, :, keys],
                self._out[samples, :, queries],
                self._lse[samples, :, queries],
                causal=causal,
                keep=dropped.keep(block),
                p=dropped.p,
            )
            self.q[samples, :, queries] += grad_q
            grad_kv[0, samples, :, keys] += grad_k
            grad_kv[1, samples, :, keys] += grad_v
