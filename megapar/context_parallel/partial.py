"""Attention in blocks (`deal.KeyBlock`): merges the results of blocks, and adds their gradients.

Merged results and sums are in fp32, or in fp64 for fp64.

Shapes: b samples, n query heads, h key/value heads, s local queries, k keys, d width of a query and a key, e width of a
value.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from megapar_kernels.alibi import Alibi
from megapar_kernels.block_attention import (
    Documents,
    add_sinks,
    attention_block,
    attention_block_backward,
    attention_documents,
    attention_documents_backward,
    largest_scores,
    merge_block,
    rowsums,
    sink_gradient,
    takes_documents,
    takes_earlier_keys,
    wide,
)
from megapar_kernels.dropout import RowDropout
from torch import Tensor

from megapar.context_parallel.deal import KeyBlock, Ranges, square, together
from megapar.context_parallel.scoring import PLAIN, Scoring
from megapar.system.device import to_device


class Places:
    """What of blocks follows from the positions of queries and keys: dropout, and a bias of scores.

    `keys` are the positions of the keys.
    """

    def __init__(self, scoring: Scoring, keys: Ranges):
        self._dropout = scoring.dropout
        self._alibi = scoring.alibi
        self._keys = keys
        self._keys_k: Tensor | None = None

    def of(self, block: KeyBlock) -> tuple[RowDropout | None, Alibi | None]:
        """Return the dropout and the bias of a block of queries and keys, None without them."""
        dropped = alibi = None
        if self._dropout is not None:
            keys_k = self._positions(self._dropout.positions_s.device)[block.keys]
            dropped = self._dropout.of(keys_k, block.samples, block.queries)
        if self._alibi is not None:
            keys_k = self._positions(self._alibi.queries_q.device)[block.keys]
            alibi = replace(self._alibi, queries_q=self._alibi.queries_q[block.queries], keys_k=keys_k)
        return dropped, alibi

    def _positions(self, device: torch.device) -> Tensor:
        if self._keys_k is None:
            self._keys_k = torch.cat([torch.arange(start, stop, device=device) for start, stop in self._keys])
        return self._keys_k


def _as_served(blocks: Sequence[KeyBlock], q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Sequence[KeyBlock]:
    """The blocks as the operation that computes them takes them."""
    if not takes_earlier_keys(q, k, v, scoring.kernels):
        return square(blocks)
    if takes_documents(q, v, scoring.rule) and scoring.dropout is None and scoring.alibi is None:
        return together(blocks)
    return blocks


def _documents(queries: tuple[int, ...], keys: tuple[int, ...], device: torch.device) -> Documents:
    """The bounds of documents on the device. The host does not wait for the copies."""
    query_bounds, key_bounds = (to_device(torch.tensor(x, dtype=torch.int32), device) for x in (queries, keys))
    most_queries, most_keys = (max(stop - start for start, stop in pairwise(x)) for x in (queries, keys))
    return Documents(query_bounds, key_bounds, most_queries, most_keys)


class Result:
    """The merged result of the blocks so far: `out` [b, n, s, e], and the logsumexp of the scores, `lse` [b, n, s].

    In memory `out` is [s, b, n, e], because the layer after attention reads it in this order. `v_width` is e.
    """

    def __init__(self, q: Tensor, v_width: int, scoring: Scoring = PLAIN):
        self._scoring = scoring
        b, n, s, _ = q.shape
        dtype = wide(q.dtype)
        self.out = torch.empty(s, b, n, v_width, dtype=dtype, device=q.device).permute(1, 2, 0, 3)
        self.lse = torch.empty(b, n, s, dtype=dtype, device=q.device)

    def add(self, q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[KeyBlock], places: Places) -> None:
        """Merge the attention of `blocks` into the result. k is [b, h, k, d] and v [b, h, k, e].

        For each query, the block with its own position must come first: `out` and `lse` are not initialized.
        """
        rule = self._scoring.rule
        largest = self._scoring.largest
        if largest is not None:
            for block in blocks:
                q_rows, k_rows = q[block.samples, :, block.queries], k[block.samples, :, block.keys]
                largest.add(largest_scores(q_rows, k_rows, rule, causal=block.causal))
        for block in _as_served(blocks, q, k, v, self._scoring):
            samples, queries, keys, causal, documents = block
            rows = q[samples, :, queries], k[samples, :, keys], v[samples, :, keys]
            if documents is not None:
                part, lse = attention_documents(*rows, _documents(*documents, q.device), rule)
            else:
                dropped, alibi = places.of(block)
                part, lse = attention_block(
                    *rows, causal=causal, dropped=dropped, alibi=alibi, rule=rule, kernels=self._scoring.kernels
                )
            out_rows = self.out[samples, :, queries]
            lse_rows = self.lse[samples, :, queries]
            # A query has exactly one causal block, the one with its own position. It comes first.
            if causal:
                out_rows.copy_(part)
                lse_rows.copy_(lse)
            else:
                merge_block(out_rows, lse_rows, part, lse)

    def add_sinks(self, sinks_n: Tensor | None) -> None:
        """Add the sinks, if there are any, after all blocks."""
        if sinks_n is not None:
            add_sinks(self.out, self.lse, sinks_n)


class Gradient:
    """The gradient of the queries so far, `q`, and what all blocks need: the merged `out` and `lse` of the forward.

    Both contain the sinks, if there are any.
    """

    def __init__(self, grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, scoring: Scoring = PLAIN):
        self._scoring = scoring
        self._grad_out = grad_out
        self._q = q
        self._out = out
        self._lse = lse
        self.q = torch.zeros_like(q, dtype=wide(q.dtype))

    def add(
        self, k: Tensor, v: Tensor, blocks: Sequence[KeyBlock], places: Places, grad_k: Tensor, grad_v: Tensor
    ) -> None:
        """Add the gradients of `blocks` to `self.q`, and to `grad_k` [b, h, k, d] and `grad_v` [b, h, k, e]."""
        rule = self._scoring.rule
        for block in _as_served(blocks, self._q, k, v, self._scoring):
            samples, queries, keys, causal, documents = block
            grad_out, q, out, lse = (x[samples, :, queries] for x in (self._grad_out, self._q, self._out, self._lse))
            rows = grad_out, q, k[samples, :, keys], v[samples, :, keys], out, lse
            if documents is not None:
                bounds = _documents(*documents, q.device)
                block_grad_q, block_grad_k, block_grad_v = attention_documents_backward(*rows, bounds, rule)
            else:
                dropped, alibi = places.of(block)
                block_grad_q, block_grad_k, block_grad_v = attention_block_backward(
                    *rows, causal=causal, dropped=dropped, alibi=alibi, rule=rule, kernels=self._scoring.kernels
                )
            self.q[samples, :, queries] += block_grad_q
            grad_k[samples, :, keys] += block_grad_k
            grad_v[samples, :, keys] += block_grad_v

    def of_sinks(self, sinks_n: Tensor | None) -> Tensor | None:
        """The gradient of the sinks, [n], from this rank's queries. None without sinks."""
        if sinks_n is None:
            return None
        return sink_gradient(rowsums(self._grad_out, self._out, self._lse.dtype), self._lse, sinks_n)
