"""Context parallelism by gathering: each rank's queries attend the keys and values of all ranks (arXiv 2407.21783).

Keys and values are gathered for one layer at a time, freed after it, and gathered again in the backward pass. So a rank
keeps only its own part of a layer's activations.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megapar_kernels.block_attention import wide
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.comm import collectives
from megapar.context import Axis
from megapar.context_parallel.deal import blocks, chunks
from megapar.context_parallel.dropout import AttentionDropout
from megapar.context_parallel.order import parts_of, whole_of
from megapar.context_parallel.partial import Dropped, Gradient, Result


class _GatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, cp: Axis, starts: Sequence[int] | None, dropout: AttentionDropout | None
    ) -> Tensor:
        length = q.shape[2] * cp.size
        ctx.cp = cp
        ctx.blocks = blocks(chunks(length, cp.size, cp.rank), [(0, length)], length, starts)
        ctx.dropped = Dropped(dropout, [(0, length)])
        k, v = _gathered(kv, cp)
        result = Result(q)
        result.add(q, k, v, ctx.blocks, ctx.dropped)
        out = result.out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, result.lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        whole = _gathered(kv, ctx.cp)
        grad_whole = torch.zeros_like(whole, dtype=wide(kv.dtype))
        gradient = Gradient(grad_out, q, out, lse)
        gradient.add(whole, ctx.blocks, ctx.dropped, grad_whole)
        # Summed over ranks in the wide dtype, because the rounding of 16-bit sums would grow with the number of ranks.
        grad_kv = collectives.reduce_scatter(parts_of(grad_whole, ctx.cp.size).flatten(0, 1), ctx.cp)
        return gradient.q.to(q.dtype), grad_kv.to(kv.dtype), None, None, None


def _gathered(kv: Tensor, cp: Axis) -> Tensor:
    """Keys and values of all positions in order, [2, b, h, cp * s, d], from this rank's [2, b, h, s, d]."""
    return whole_of(collectives.all_gather(kv, cp).unflatten(0, (cp.size, 2)))


def gather_attention(
    q: Tensor, kv: Tensor, cp: Axis, starts: Sequence[int] | None = None, dropout: AttentionDropout | None = None
) -> Tensor:
    """Causal attention [b, n, s, d] of this rank's queries `q` [b, n, s, d] to the keys and values of all cp ranks.

    `kv` [2, b, h, s, d] are this rank's keys and values. The s positions are those of `deal.chunks` for this rank.
    `starts` are the starts of documents, on the host (`MicroBatch.starts_on_host`). A collective over `cp`.
    """
    return _GatherAttention.apply(q, kv, cp, starts, dropout)
