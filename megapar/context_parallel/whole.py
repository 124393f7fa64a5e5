"""Attention of whole samples on one rank: of all their heads, or of a part of them."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from einops import rearrange
from megapar_kernels.attention import (
    WITH_A_MASK,
    causal_attention,
    for_cpu,
    masked_causal_attention,
    packed_causal_attention,
    server_of_documents,
    server_of_sdpa,
)
from megapar_kernels.block_attention import SERVERS, largest_scores
from megapar_kernels.ruled_attention import ruled_attention, server_of_rules
from megapar_kernels.tiled_attention import serves, serves_alone
from torch import Tensor

from megapar.context_parallel.scoring import PLAIN, Scoring
from megapar.declare.batch import MicroBatch

Way = Literal["causal", "documents", "mask", "rules"]
"""How attention of whole samples is computed: causal, within documents, with a mask of booleans, or by rules (windows,
caps, sinks, ALiBi, dropout), or for heads wider than torch's fused operations take."""


def way_of(q_sbnd: Tensor, v_sbnd: Tensor, batch: MicroBatch, scoring: Scoring, sinks_n: Tensor | None) -> Way:
    """How `whole_attention` computes attention of these shapes."""
    kernels = scoring.kernels
    # Else, on a GPU without our kernels, one fused call with a mask: docs/kernels.md has its time beside ours.
    in_blocks = serves(kernels.masked_attention, q_sbnd, v_sbnd) or for_cpu(q_sbnd, kernels.attention)
    beyond_masks = scoring.rule.cap or sinks_n is not None or scoring.dropout is not None or scoring.alibi is not None
    if beyond_masks or (scoring.window and in_blocks) or serves_alone(kernels.masked_attention, q_sbnd, v_sbnd):
        return "rules"
    if scoring.window:
        return "mask"
    return "causal" if batch.starts is None else "documents"


def server_of_whole(way: Way, q_sbnd: Tensor, k_sbnd: Tensor, v_sbnd: Tensor, scoring: Scoring) -> str:
    """Who computes `whole_attention` in this way, in words."""
    if way == "rules":
        impl = scoring.kernels.masked_attention
        return SERVERS[server_of_rules(q_sbnd, v_sbnd, scoring.rule, impl, drops=scoring.dropout is not None)]
    if way == "mask":
        return WITH_A_MASK
    if way == "documents":
        return server_of_documents(q_sbnd, v_sbnd)
    return server_of_sdpa(q_sbnd, k_sbnd, v_sbnd, scoring.kernels.attention)


def whole_attention(
    q_sbnd: Tensor,
    k_sbnd: Tensor,
    v_sbnd: Tensor,
    batch: MicroBatch,
    scoring: Scoring = PLAIN,
    sinks_n: Tensor | None = None,
) -> Tensor:
    """Causal attention, [s, b, n * e], within the documents of `batch`.

    The columns of `batch` are all positions of its samples.
    q [s, b, n, d] may have a multiple of the heads of k and v. Then a run of consecutive heads of q reads each head of
    k and v. The width e of v may differ from d. With `sinks_n` each head has a further score without a value. The
    largest logits are not noted: `largest_of_whole`.
    """
    starts = batch.starts
    rule = scoring.rule
    kernels = scoring.kernels
    way = way_of(q_sbnd, v_sbnd, batch, scoring, sinks_n)
    if way == "rules":
        options: dict[str, Any] = {"window": scoring.window, "impl": kernels.masked_attention, "alibi": scoring.alibi}
        if starts is not None:
            options["documents_bs"] = batch.documents_bs()
        if scoring.dropout is not None:
            options["drops"] = partial(scoring.dropout.of, batch.positions_s)
        return ruled_attention(q_sbnd, k_sbnd, v_sbnd, rule, sinks_n=sinks_n, **options)
    if way == "mask":
        return masked_causal_attention(q_sbnd, k_sbnd, v_sbnd, starts, scoring.window, rule.scale)
    if way == "causal":
        return causal_attention(q_sbnd, k_sbnd, v_sbnd, kernels.attention, rule.scale)
    assert starts is not None
    return packed_causal_attention(q_sbnd, k_sbnd, v_sbnd, starts, rule.scale, batch.longest_document)


def largest_of_whole(q_sbnd: Tensor, k_sbnd: Tensor, batch: MicroBatch, scoring: Scoring) -> Tensor:
    """The largest score of each head of q in `whole_attention`, before a cap, [n]."""
    q, k = (rearrange(x.detach(), "s b n d -> b n s d") for x in (q_sbnd, k_sbnd))
    documents = None if batch.starts is None else batch.documents_bs()
    return largest_scores(q, k, scoring.rule, window=scoring.window, documents_bs=documents)


def are_equal_runs(kv_heads: Sequence[int]) -> bool:
    """Whether runs of equal length of consecutive query heads read the key/value heads 0, 1, and so on.

    `kv_heads[i]` is the key/value head read by query head i. torch's attention takes only such runs.
    """
    num_kv_heads = kv_heads[-1] + 1
    if len(kv_heads) % num_kv_heads:
        return False
    run = len(kv_heads) // num_kv_heads
    return all(kv == query // run for query, kv in enumerate(kv_heads))
