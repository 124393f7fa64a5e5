"""Causal attention with what torch's fused operations lack: caps of scores, sinks, windows, ALiBi, dropout by keys.

`tiled_attention` computes it where it serves. Elsewhere torch's ops do, for a block of queries at a time, in forward
and in backward. A CPU has a fused operation that takes a block's mask. With a cap or dropout, and on GPUs, scores are
explicit. With a window a block reads its own keys alone, so the time grows with length * window. Kept for backward are
q, k, v, the result, and the logsumexp of a row. The mask of dropout is computed again.

Shapes: s positions, b samples, n heads, d width of a query and a key, e width of a value.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar_kernels import tiled_attention
from megapar_kernels.alibi import Alibi
from megapar_kernels.block_attention import (
    ScoreRule,
    Server,
    add_sinks,
    backward_by_rows,
    forward_by_rows,
    padded,
    reference,
    reference_backward,
    rowsums,
    sink_gradient,
    wide,
)
from megapar_kernels.dispatch import Implementation
from megapar_kernels.dropout import RowDropout
from megapar_kernels.tiled_attention import Attended, of_documents

# Of a block with explicit scores. Fewer skip more keys, and take more calls.
QUERIES = 256
QUERIES_ON_CPU = 64

Drops = Callable[[], RowDropout]
"""Makes the dropout of all queries and keys, once in forward and once in backward."""


def _blocks(q: Tensor, window: int) -> Iterator[tuple[slice, slice]]:
    """The queries of each block, and the keys that some of them attend."""
    length = q.shape[2]
    queries = QUERIES if q.is_cuda else QUERIES_ON_CPU
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


def server_of_rules(q: Tensor, v: Tensor, rule: ScoreRule, impl: Implementation, *, drops: bool) -> Server:
    """Who computes `ruled_attention`, with dropout if it `drops`."""
    if tiled_attention.serves(impl, q, v):
        return "tiles"
    return "cpu" if _is_fused(q, rule, drops=drops) else "scores"


def _is_fused(q: Tensor, rule: ScoreRule, *, drops: bool) -> bool:
    """Whether a CPU's fused operation computes it. The meta device stands for a CPU here."""
    return not (q.is_cuda or rule.cap or drops)


def _as_fused(*inputs: Tensor) -> Iterator[Tensor]:
    """`inputs` of one width, and in the wide dtype: gradients of keys are summed over blocks in it."""
    width = max(x.shape[-1] for x in inputs)
    return (padded(x, width).to(wide(x.dtype)) for x in inputs)


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents_bs: Tensor | None,
    rule: ScoreRule,
    window: int,
    dropped: RowDropout | None,
    alibi: Alibi | None,
) -> tuple[Tensor, Tensor]:
    """The result and its lse, in the wide dtype."""
    out = q.new_empty(*q.shape[:3], v.shape[-1], dtype=wide(q.dtype))
    lse = q.new_empty(q.shape[:3], dtype=wide(q.dtype))
    for queries, keys in _blocks(q, window):
        seen = _seen(queries, keys, window, documents_bs, q.device)
        part = None if dropped is None else dropped.of(queries, keys)
        bias = None if alibi is None else alibi.of(queries, keys)
        out[:, :, queries], lse[:, :, queries] = reference(
            q[:, :, queries], k[:, :, keys], v[:, :, keys], causal=False, dropped=part, alibi=bias, rule=rule, seen=seen
        )
    return out, lse


def _explicit_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents_bs: Tensor | None,
    out: Tensor,
    lse: Tensor,
    rule: ScoreRule,
    window: int,
    dropped: RowDropout | None,
    alibi: Alibi | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. That of q has its dtype, the others the wide one."""
    grad_q = torch.empty_like(q)
    grad_k = torch.zeros_like(k, dtype=wide(k.dtype))
    grad_v = torch.zeros_like(v, dtype=wide(v.dtype))
    for queries, keys in _blocks(q, window):
        seen = _seen(queries, keys, window, documents_bs, q.device)
        rows = (x[:, :, queries] for x in (grad_out, q))
        block = (*rows, k[:, :, keys], v[:, :, keys], out[:, :, queries], lse[:, :, queries])
        part = None if dropped is None else dropped.of(queries, keys)
        bias = None if alibi is None else alibi.of(queries, keys)
        grad_q[:, :, queries], part_k, part_v = reference_backward(
            *block, causal=False, dropped=part, alibi=bias, rule=rule, seen=seen
        )
        grad_k[:, :, keys] += part_k
        grad_v[:, :, keys] += part_v
    return grad_q, grad_k, grad_v


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
        drops: Drops | None,
        alibi: Alibi | None,
    ) -> Tensor:
        if _is_fused(q, rule, drops=drops is not None):
            q_wide, k_wide, v_wide = _as_fused(q, k, v)
            wide_out, lse = forward_by_rows(q_wide, k_wide, v_wide, rule.factor(q), window, documents_bs, alibi)
            wide_out = wide_out[..., : v.shape[-1]]
        else:
            wide_out, lse = _explicit(q, k, v, documents_bs, rule, window, drops() if drops else None, alibi)
        if sinks_n is not None:
            add_sinks(wide_out, lse, sinks_n)
        b, n, s, _ = q.shape
        # In the order of the layer after attention.
        out = q.new_empty(s, b, n, v.shape[-1]).permute(1, 2, 0, 3).copy_(wide_out)
        ctx.save_for_backward(q, k, v, sinks_n, documents_bs, out, lse)
        ctx.rule = rule
        ctx.window = window
        ctx.drops = drops
        ctx.alibi = alibi
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_n, documents_bs, out, lse = ctx.saved_tensors
        if _is_fused(q, ctx.rule, drops=ctx.drops is not None):
            inputs = _as_fused(grad_out, q, k, v, out)
            options = {"window": ctx.window, "documents_bs": documents_bs, "alibi": ctx.alibi}
            wide_grads = backward_by_rows(*inputs, lse=lse, scale=ctx.rule.factor(q), **options)
        else:
            rules = ctx.rule, ctx.window, ctx.drops() if ctx.drops else None, ctx.alibi
            wide_grads = _explicit_backward(grad_out, q, k, v, documents_bs, out, lse, *rules)
        grads = (grad[..., : x.shape[-1]].to(x.dtype) for grad, x in zip(wide_grads, (q, k, v), strict=True))
        grad_sinks = None
        if sinks_n is not None:
            grad_sinks = sink_gradient(rowsums(grad_out, out, lse.dtype), lse, sinks_n)
        return *grads, grad_sinks, None, None, None, None, None


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
        drops: Drops | None,
        alibi: Alibi | None,
    ) -> Tensor:
        starts = stops = None
        if documents_bs is not None:
            starts, stops = of_documents(documents_bs)
        attended = Attended(window=window, starts=starts, stops=stops)
        out, lse = tiled_attention.forward(
            q, k, v, rule.factor(q), rule.cap, attended, sinks_n, drops() if drops else None, alibi
        )
        ctx.save_for_backward(q, k, v, sinks_n, starts, stops, out, lse)
        ctx.rule = rule
        ctx.window = window
        ctx.drops = drops
        ctx.alibi = alibi
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_n, starts, stops, out, lse = ctx.saved_tensors
        attended = Attended(window=ctx.window, starts=starts, stops=stops)
        scores = ctx.rule.factor(q), ctx.rule.cap, attended, ctx.drops() if ctx.drops else None, ctx.alibi
        *gradients, rows = tiled_attention.backward(grad_out, q, k, v, out, lse, *scores)
        grad_sinks = None
        if sinks_n is not None:
            grad_sinks = sink_gradient(rows, lse, sinks_n)
        return *gradients, grad_sinks, None, None, None, None, None


def ruled_attention(
    q_sbnd: Tensor,
    k_sbnd: Tensor,
    v_sbnd: Tensor,
    rule: ScoreRule,
    *,
    sinks_n: Tensor | None = None,
    documents_bs: Tensor | None = None,
    window: int = 0,
    drops: Drops | None = None,
    alibi: Alibi | None = None,
    impl: Implementation = "torch",
) -> Tensor:
    """softmax(scores by `rule`, causal) v as [s, b, n * e], in fp32 and rounded once (in fp64 for fp64).

    Our kernels round probabilities to the dtype of v before they multiply them.

    q may have a multiple of the heads of k and v. Then each head of k and v serves a run of consecutive heads of q.
    `sinks_n` is a further score of each head of q without a value. Positions of different `documents_bs` do not attend
    to each other. With a `window` a position reads that many keys at most, its own among them. `drops` drops
    probabilities, and `alibi` is added to scores.
    """
    q, k, v = (rearrange(x, "s b n d -> b n s d") for x in (q_sbnd, k_sbnd, v_sbnd))
    function = _TiledAttention if tiled_attention.serves(impl, q, v) else _RuledAttention
    y: Tensor = function.apply(q, k, v, sinks_n, documents_bs, rule, window, drops, alibi)
    return rearrange(y, "b n s d -> s b (n d)")
