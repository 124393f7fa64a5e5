"""Causal attention with what torch's fused operations do not have: caps of scores, sinks, and windows.

`tiled_attention` computes it where it serves. Elsewhere torch's ops do, for a block of queries at a time, in forward
and in backward. A CPU has a fused operation that takes a block's mask. With a cap, and on GPUs, scores are explicit.
With a window a block reads its own keys alone, so the time grows with length * window. Kept for backward are q, k, v,
the result, and the logsumexp of a row.

Shapes: s positions, b samples, n heads, d width of a query and a key, e width of a value.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar_kernels import tiled_attention
from megapar_kernels.block_attention import (
    ScoreRule,
    add_sinks,
    padded,
    reference,
    reference_backward,
    rowsums,
    sink_gradient,
    wide,
)
from megapar_kernels.dispatch import Implementation
from megapar_kernels.tiled_attention import Attended, of_documents

QUERIES = 256
"""Queries of a block with explicit scores."""
_FUSED_QUERIES = 64  # fewer compute fewer scores that the mask hides; with 32 the calls cost as much as that saves


def _is_fused(q: Tensor, rule: ScoreRule) -> bool:
    """Whether torch's fused operation computes a block. On the meta device, which then stands for a CPU, too."""
    return not q.is_cuda and not rule.cap


def _blocks(q: Tensor, rule: ScoreRule, window: int) -> Iterator[tuple[slice, slice]]:
    """The queries of each block, and the keys that some of them attend."""
    length = q.shape[2]
    # A compiled graph has a copy of the loop.
    queries = _FUSED_QUERIES if _is_fused(q, rule) and not torch.compiler.is_compiling() else QUERIES
    for start in range(0, length, queries):
        stop = min(start + queries, length)
        first_key = max(0, start + 1 - window) if window else 0
        yield slice(start, stop), slice(first_key, stop)


def _seen(queries: slice, keys: slice, window: int, documents_bs: Tensor | None, device: torch.device) -> Tensor:
    """Whether a query attends a key: bool [q, k], or [b, 1, q, k] if samples have documents."""
    query = torch.arange(queries.start, queries.stop, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)[None, :]
    seen = key <= query
    if window:
        seen &= key > query - window
    if documents_bs is None:
        return seen
    same = documents_bs[:, queries, None] == documents_bs[:, None, keys]
    return (seen & same)[:, None]


def _block(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, rule: ScoreRule) -> tuple[Tensor, Tensor]:
    """The result of a block and its lse, in the wide dtype. `seen` is True for the keys that a query attends."""
    if not _is_fused(q, rule):
        return reference(q, k, v, causal=False, rule=rule, seen=seen)
    width = max(q.shape[-1], v.shape[-1])
    q_wide, k_wide, v_wide = (padded(x, width).to(wide(x.dtype)) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_wide, k_wide, v_wide, 0.0, False, attn_mask=_added(seen, q_wide), scale=rule.factor(q)
    )
    return out[..., : v.shape[-1]], lse


def _block_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Tensor, rule: ScoreRule
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v by a block, in the wide dtype."""
    if not _is_fused(q, rule):
        return reference_backward(grad_out, q, k, v, out, lse, causal=False, rule=rule, seen=seen)
    width = max(q.shape[-1], v.shape[-1])
    inputs = [padded(x, width).to(wide(x.dtype)) for x in (grad_out, q, k, v, out)]
    grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *inputs, lse, 0.0, False, attn_mask=_added(seen, inputs[1]), scale=rule.factor(q)
    )
    return grad_q[..., : q.shape[-1]], grad_k[..., : k.shape[-1]], grad_v[..., : v.shape[-1]]


def _added(seen: Tensor, like: Tensor) -> Tensor:
    """What is added to the scores: 0 where a query attends a key, else -inf."""
    return like.new_zeros(seen.shape).masked_fill_(~seen, -math.inf)


class _RuledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_n: Tensor | None,
        documents_bs: Tensor | None,
        rule: ScoreRule,
        window: int,
    ) -> Tensor:
        b, n, s, _ = q.shape
        # In the order of the layer after attention.
        out = q.new_empty(s, b, n, v.shape[-1]).permute(1, 2, 0, 3)
        lse = q.new_empty(b, n, s, dtype=wide(q.dtype))
        for queries, keys in _blocks(q, rule, window):
            seen = _seen(queries, keys, window, documents_bs, q.device)
            part, part_lse = _block(q[:, :, queries], k[:, :, keys], v[:, :, keys], seen, rule)
            if sinks_n is not None:
                add_sinks(part, part_lse, sinks_n)
            out[:, :, queries] = part
            lse[:, :, queries] = part_lse
        ctx.save_for_backward(q, k, v, sinks_n, documents_bs, out, lse)
        ctx.rule = rule
        ctx.window = window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_n, documents_bs, out, lse = ctx.saved_tensors
        grad_q = torch.empty_like(q)
        grad_k = torch.zeros_like(k, dtype=wide(k.dtype))
        grad_v = torch.zeros_like(v, dtype=wide(v.dtype))
        for queries, keys in _blocks(q, ctx.rule, ctx.window):
            seen = _seen(queries, keys, ctx.window, documents_bs, q.device)
            grad_rows, q_rows, out_rows, lse_rows = (x[:, :, queries] for x in (grad_out, q, out, lse))
            part_q, part_k, part_v = _block_backward(
                grad_rows, q_rows, k[:, :, keys], v[:, :, keys], out_rows, lse_rows, seen, ctx.rule
            )
            grad_q[:, :, queries] = part_q
            grad_k[:, :, keys] += part_k
            grad_v[:, :, keys] += part_v
        grad_sinks = None
        if sinks_n is not None:
            grad_sinks = sink_gradient(rowsums(grad_out, out, lse.dtype), lse, sinks_n)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks, None, None, None


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_n: Tensor | None,
        documents_bs: Tensor | None,
        rule: ScoreRule,
        window: int,
    ) -> Tensor:
        starts = stops = None
        if documents_bs is not None:
            starts, stops = of_documents(documents_bs)
        attended = Attended(window=window, starts=starts, stops=stops)
        out, lse = tiled_attention.forward(q, k, v, rule.factor(q), rule.cap, attended, sinks_n)
        ctx.save_for_backward(q, k, v, sinks_n, starts, stops, out, lse)
        ctx.rule = rule
        ctx.window = window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_n, starts, stops, out, lse = ctx.saved_tensors
        attended = Attended(window=ctx.window, starts=starts, stops=stops)
        *gradients, rows = tiled_attention.backward(
            grad_out, q, k, v, out, lse, ctx.rule.factor(q), ctx.rule.cap, attended
        )
        grad_sinks = None
        if sinks_n is not None:
            grad_sinks = sink_gradient(rows, lse, sinks_n)
        return *gradients, grad_sinks, None, None, None


def ruled_attention(
    q_sbnd: Tensor,
    k_sbnd: Tensor,
    v_sbnd: Tensor,
    rule: ScoreRule,
    *,
    sinks_n: Tensor | None = None,
    documents_bs: Tensor | None = None,
    window: int = 0,
    impl: Implementation = "torch",
) -> Tensor:
    """softmax(scores by `rule`, causal) v as [s, b, n * e], in fp32 and rounded once (in fp64 for fp64).

    Our kernels round probabilities to the dtype of v before they multiply them.

    q may have a multiple of the heads of k and v. Then each head of k and v serves a run of consecutive heads of q.
    `sinks_n` is a further score of each head of q without a value. Positions of different `documents_bs` do not attend
    to each other. With a `window` a position reads that many keys at most, its own among them.
    """
    q, k, v = (rearrange(x, "s b n d -> b n s d") for x in (q_sbnd, k_sbnd, v_sbnd))
    function = _TiledAttention if tiled_attention.serves(impl, q, v) else _RuledAttention
    y: Tensor = function.apply(q, k, v, sinks_n, documents_bs, rule, window)
    return rearrange(y, "b n s d -> s b (n d)")
