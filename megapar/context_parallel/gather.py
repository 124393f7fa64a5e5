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
from megapar.comm.axis import Axis
from megapar.context_parallel.deal import blocks, chunks
from megapar.context_parallel.keys_values import KeysValues
from megapar.context_parallel.order import whole_of, write_parts
from megapar.context_parallel.partial import Gradient, Places, Result
from megapar.context_parallel.scoring import PLAIN, Scoring


class _GatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cp: Axis,
        starts: Sequence[int] | None,
        scoring: Scoring,
        sinks_n: Tensor | None,
    ) -> Tensor:
        length = q.shape[2] * cp.size
        ctx.cp = cp
        ctx.blocks = blocks(chunks(length, cp.size, cp.rank), [(0, length)], length, starts)
        ctx.places = Places(scoring, [(0, length)])
        kv = KeysValues.copied(k, v)
        ctx.shapes = k.shape, v.shape
        result = Result(q, v.shape[-1], scoring)
        result.add(q, *_gathered(kv, cp), ctx.blocks, ctx.places)
        result.add_sinks(sinks_n)
        out = result.out.to(q.dtype)
        ctx.scoring = scoring
        ctx.save_for_backward(q, kv.flat, out, result.lse, sinks_n)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, flat, out, lse, sinks_n = ctx.saved_tensors
        kv = KeysValues.of(flat, *ctx.shapes)
        k, v = _gathered(kv, ctx.cp)
        grad_k = torch.zeros_like(k, dtype=wide(k.dtype))
        grad_v = torch.zeros_like(v, dtype=wide(v.dtype))
        gradient = Gradient(grad_out, q, out, lse, ctx.scoring)
        gradient.add(k, v, ctx.blocks, ctx.places, grad_k, grad_v)
        # Summed over ranks in the wide dtype, because the rounding of 16-bit sums would grow with the number of ranks.
        parts = grad_k.new_empty(ctx.cp.size * flat.numel())
        k_parts, v_parts = kv.of_ranks(parts)
        write_parts(k_parts, grad_k)
        write_parts(v_parts, grad_v)
        grad_kv = kv.with_flat(collectives.reduce_scatter(parts, ctx.cp).to(flat.dtype))
        grad_sinks = gradient.of_sinks(sinks_n)
        return gradient.q.to(q.dtype), grad_kv.k, grad_kv.v, None, None, None, grad_sinks


def _gathered(kv: KeysValues, cp: Axis) -> tuple[Tensor, Tensor]:
    """Keys [b, h, cp * s, d] and values [b, h, cp * s, e] of all positions in order, from those of this rank."""
    k_parts, v_parts = kv.of_ranks(collectives.all_gather(kv.flat, cp))
    return whole_of(k_parts), whole_of(v_parts)


def gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: Axis,
    starts: Sequence[int] | None = None,
    scoring: Scoring = PLAIN,
    sinks_n: Tensor | None = None,
) -> Tensor:
    """Causal attention [b, n, s, e] of this rank's queries `q` [b, n, s, d] to the keys and values of all cp ranks.

    `k` [b, h, s, d] and `v` [b, h, s, e] are those of this rank. The s positions are those of `deal.chunks` for this
    rank. `starts` are the starts of documents, on the host (`MicroBatch.starts_on_host`). `scoring` has no window. A
    collective over `cp`.
    """
    return _GatherAttention.apply(q, k, v, cp, starts, scoring, sinks_n)
