"""Attention of whole samples on one rank: of all their heads, or of a part of them."""

from collections.abc import Sequence

from einops import rearrange
from megapar_kernels.attention import (
    causal_attention,
    causal_attention_dropout,
    for_cpu,
    masked_causal_attention,
    packed_causal_attention,
)
from megapar_kernels.backend import Kernels
from megapar_kernels.block_attention import PLAIN_SCORES, ScoreRule, largest_scores
from megapar_kernels.ruled_attention import ruled_attention
from megapar_kernels.tiled_attention import serves
from torch import Tensor

from megapar.batch import MicroBatch
from megapar.context_parallel.dropout import AttentionDropout


def whole_attention(
    q_sbnd: Tensor,
    k_sbnd: Tensor,
    v_sbnd: Tensor,
    batch: MicroBatch,
    dropout: AttentionDropout | None,
    kernels: Kernels,
    window: int = 0,
    rule: ScoreRule = PLAIN_SCORES,
    sinks_n: Tensor | None = None,
) -> Tensor:
    """Causal attention, [s, b, n * e], within the documents of `batch`.

    The columns of `batch` are all positions of its samples.
    q [s, b, n, d] may have a multiple of the heads of k and v. Then a run of consecutive heads of q reads each head of
    k and v. The width e of v may differ from d. With a `window`, a position reads that many keys at most, its own among
    them. Scores follow `rule`. With `sinks_n` each head has a further score without a value. Attention with a window, a
    cap or sinks takes no dropout.
    """
    documents = None
    impl = kernels.masked_attention
    # Else, on a GPU without our kernels, one fused call with a mask: docs/kernels.md has its time beside ours.
    in_blocks = serves(impl, q_sbnd, v_sbnd) or for_cpu(q_sbnd, kernels.attention)
    if rule.cap or sinks_n is not None or (window and in_blocks):
        if batch.starts is not None:
            documents = batch.documents_bs()
        return ruled_attention(
            q_sbnd, k_sbnd, v_sbnd, rule, sinks_n=sinks_n, documents_bs=documents, window=window, impl=impl
        )
    if window:
        return masked_causal_attention(q_sbnd, k_sbnd, v_sbnd, batch.starts, window, rule.scale)
    if dropout is None:
        if batch.starts is None:
            return causal_attention(q_sbnd, k_sbnd, v_sbnd, kernels.attention, rule.scale)
        return packed_causal_attention(q_sbnd, k_sbnd, v_sbnd, batch.starts, rule.scale)
    # Attention with dropout holds all scores in memory. It needs a key/value head for each query head.
    queries_per_kv_head = q_sbnd.shape[2] // k_sbnd.shape[2]
    k_sbnd = k_sbnd.repeat_interleave(queries_per_kv_head, 2)
    v_sbnd = v_sbnd.repeat_interleave(queries_per_kv_head, 2)
    keep = dropout.keep(batch.positions_s)
    if batch.starts is not None:
        documents = batch.documents_bs()
    return causal_attention_dropout(q_sbnd, k_sbnd, v_sbnd, keep, dropout.p, documents, kernels.softmax, rule.scale)


def largest_of_whole(q_sbnd: Tensor, k_sbnd: Tensor, batch: MicroBatch, window: int, rule: ScoreRule) -> Tensor:
    """The largest score of each head of q in `whole_attention`, before a cap, [n]."""
    q, k = (rearrange(x.detach(), "s b n d -> b n s d") for x in (q_sbnd, k_sbnd))
    documents = None if batch.starts is None else batch.documents_bs()
    return largest_scores(q, k, rule, window=window, documents_bs=documents)


def are_equal_runs(kv_heads: Sequence[int]) -> bool:
    """Whether runs of equal length of consecutive query heads read the key/value heads 0, 1, and so on.

    `kv_heads[i]` is the key/value head read by query head i. torch's attention takes only such runs.
    """
    num_kv_heads = kv_heads[-1] + 1
    if len(kv_heads) % num_kv_heads:
        return False
    run = len(kv_heads) // num_kv_heads
    return all(kv == query // run for query, kv in enumerate(kv_heads))
