"""Attention of whole samples on one rank: of all their heads, or of a part of them."""

from collections.abc import Sequence

from megapar_kernels.attention import causal_attention, causal_attention_dropout, packed_causal_attention
from megapar_kernels.backend import Kernels
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
) -> Tensor:
    """Causal attention, [s, b, n * d], within the documents of `batch`. Its columns are all positions of its samples.

    q may have a multiple of the heads of k and v. Then each head of k and v serves a run of consecutive heads of q.
    """
    if dropout is None:
        if batch.starts is None:
            return causal_attention(q_sbnd, k_sbnd, v_sbnd, kernels.attention)
        return packed_causal_attention(q_sbnd, k_sbnd, v_sbnd, batch.starts)
    # The explicit scores of attention with dropout need a key/value head for each query head.
    queries_per_kv_head = q_sbnd.shape[2] // k_sbnd.shape[2]
    k_sbnd = k_sbnd.repeat_interleave(queries_per_kv_head, 2)
    v_sbnd = v_sbnd.repeat_interleave(queries_per_kv_head, 2)
    keep = dropout.keep(batch.positions_s)
    documents = None
    if batch.starts is not None:
        documents = batch.documents_bs()
    return causal_attention_dropout(q_sbnd, k_sbnd, v_sbnd, keep, dropout.p, documents, kernels.softmax)


def are_equal_runs(kv_heads: Sequence[int]) -> bool:
    """Whether each of the key/value heads 0, 1 ... serves the same number of consecutive query heads.

    `kv_heads` has the key/value head of each query head. torch's attention takes such runs only.
    """
    number = kv_heads[-1] + 1
    run = len(kv_heads) // number
    return len(kv_heads) % number == 0 and all(kv == query // run for query, kv in enumerate(kv_heads))
