"""Attention of a block of queries over a block of keys.

The results of several blocks of keys are merged by the logarithm of the sum of each row's exponentiated scores, lse
(Dao et al., arXiv 2205.14135, section 3.1; Liu et al., arXiv 2310.01889). With the merged result and its lse the
gradients of a block need nothing of the other blocks.

Shapes: b samples, n query heads, d width of a query and a key, e width of a value, and q queries or k keys of a block.
Queries are [b, n, q, d], keys [b, n, k, d], values [b, n, k, e], the result is [b, n, q, e], and lse is [b, n, q]. Keys
and values may have fewer heads than queries. Then each of their heads serves a run of consecutive query heads.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megapar_kernels import tiled_attention
from megapar_kernels.alibi import Alibi
from megapar_kernels.backend import TORCH, Kernels
from megapar_kernels.dropout import RowDropout
from megapar_kernels.tiled_attention import Attended

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_QUERIES, _KEYS = 256, 2048  # of a block of `largest_scores`; the queries are also those of a compiled graph
_ROWS = 64  # of a block of queries on a CPU, see `in_blocks_of_rows`; with 32 the calls cost as much as that saves


@dataclass(frozen=True)
class ScoreRule:
    """From the product z of a query and a key to their score s: scale * z, and with a `cap` then cap * tanh(s / cap).

    `scale` None is 1 / sqrt(d).
    """

    scale: float | None = None
    cap: float = 0.0

    def factor(self, q: Tensor) -> float:
        """The scale of the products of `q` [..., d], which is not padded."""
        return 1.0 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale


PLAIN_SCORES = ScoreRule()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype for adding the results of blocks: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _flash_serves(q: Tensor, v: Tensor) -> bool:
    """Whether FlashAttention 2, as torch has it, takes the dtype of `q` and the wider of the widths of `q` and `v`."""
    width = max(q.shape[-1], v.shape[-1])
    return q.is_cuda and q.dtype in _FLASH_DTYPES and width % 8 == 0 and width <= 256


def _cudnn_serves(q: Tensor, k: Tensor, v: Tensor, kernels: Kernels) -> bool:
    """Whether `kernels` asks for cuDNN, and it takes the dtype, the widths and the lengths of a block.

    The widths of `q` and `v` may differ. Torch's SDPA refuses single keys with cuDNN, and some versions single queries.
    """
    widths = q.shape[-1], v.shape[-1]
    fits = all(width % 8 == 0 and width <= 128 for width in widths) and min(q.shape[2], k.shape[2]) > 1
    return kernels.attention == "cudnn" and q.is_cuda and q.dtype in _FLASH_DTYPES and fits


Server = Literal["tiles", "cudnn", "flash", "cpu", "scores"]
"""Who computes a block of queries and keys."""
SERVERS: dict[Server, str] = {
    "tiles": "our kernels",
    "cudnn": "cuDNN",
    "flash": "FlashAttention 2",
    "cpu": "torch's fused operation for CPUs",
    "scores": "torch's ops with scores in memory",
}
"""The names of who computes, for people."""


def server_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: ScoreRule = PLAIN_SCORES,
    kernels: Kernels = TORCH,
    *,
    drops: bool,
    biased: bool = False,
) -> Server:
    """Who computes a block of these shapes, with dropout if it `drops`, with a bias of scores if it is `biased`."""
    if drops or biased or rule.cap:
        return "tiles" if tiled_attention.serves(kernels.masked_attention, q, v) else "scores"
    if tiled_attention.serves_alone(kernels.masked_attention, q, v):
        return "tiles"
    if _cudnn_serves(q, k, v, kernels):
        return "cudnn"
    if _flash_serves(q, v):
        return "flash"
    return "scores" if q.is_cuda else "cpu"  # wide numbers, or heads of an odd width


def padded(x: Tensor, width: int) -> Tensor:
    """`x` with columns of zeros up to `width`.

    torch's fused operations take one width for keys and values. Zeros in q and k add nothing to a score. Zeros in v
    give columns of zeros: `_cut` takes them off.
    """
    if x.shape[-1] == width:
        return x
    return F.pad(x, (0, width - x.shape[-1]))


def _cut(x: Tensor, width: int) -> Tensor:
    """The first `width` columns of `x`, in memory of their own, so the padding does not stay in memory."""
    if x.shape[-1] == width:
        return x
    return x.narrow(-1, 0, width).clone()


def takes_earlier_keys(q: Tensor, k: Tensor, v: Tensor, kernels: Kernels = TORCH) -> bool:
    """Whether a causal block of `q` may have more keys than queries. If not, earlier keys need a block of their own.

    cuDNN, and the operation of torch for CPUs, align a causal mask at the first key. FlashAttention 2 aligns it at the
    last one.
    """
    return q.is_cuda and not _cudnn_serves(q, k, v, kernels)


def takes_documents(q: Tensor, v: Tensor, rule: ScoreRule = PLAIN_SCORES) -> bool:
    """Whether `attention_documents` takes these queries and values. It has no dropout and no bias of scores.

    Torch's FlashAttention 2 takes slopes of ALiBi forward alone: its backward has no argument for them.
    """
    return _flash_serves(q, v) and not rule.cap


@dataclass(frozen=True)
class Documents:
    """The bounds of documents among the queries and among the keys of one sample, as FlashAttention takes them.

    Document i has the queries [queries[i], queries[i + 1]), and keys likewise. Both are int32 on the device. Its last
    query attends all its keys, the one before it all but the last, and so on.
    """

    queries: Tensor
    keys: Tensor
    most_queries: int  # of a document
    most_keys: int


def in_a_row(x: Tensor) -> Tensor:
    """[t, n, d] of one sample [1, n, t, d], a view."""
    return x.squeeze(0).transpose(0, 1)


def of_a_sample(x: Tensor) -> Tensor:
    """The inverse of `in_a_row`."""
    return x.transpose(0, 1).unsqueeze(0)


def attention_documents(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: ScoreRule = PLAIN_SCORES
) -> tuple[Tensor, Tensor]:
    """`attention_block`, causal within each of several documents of one sample, by one call of FlashAttention 2."""
    width = max(q.shape[-1], v.shape[-1])
    rows = (in_a_row(padded(x, width)) for x in (q, k, v))
    bounds = documents.queries, documents.keys, documents.most_queries, documents.most_keys
    out, lse_nt, *_ = torch.ops.aten._flash_attention_forward(*rows, *bounds, 0.0, True, False, scale=rule.factor(q))
    return _cut(of_a_sample(out), v.shape[-1]), lse_nt.unsqueeze(0)


def attention_documents_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Documents,
    rule: ScoreRule = PLAIN_SCORES,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. `out` and `lse` are the merged results of all blocks of these queries."""
    width = max(q.shape[-1], v.shape[-1])
    rows = (in_a_row(padded(x, width)) for x in (grad_out, q, k, v, out))
    bounds = documents.queries, documents.keys, documents.most_queries, documents.most_keys
    # Without dropout the states of the random generator are not read.
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)
    grads = torch.ops.aten._flash_attention_backward(
        *rows, lse.squeeze(0).contiguous(), *bounds, 0.0, True, unused, unused, scale=rule.factor(q)
    )
    grad_q, grad_k, grad_v = (of_a_sample(x) for x in grads)
    return _cut(grad_q, q.shape[-1]), _cut(grad_k, k.shape[-1]), _cut(grad_v, v.shape[-1])


def attention_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    dropped: RowDropout | None = None,
    alibi: Alibi | None = None,
    rule: ScoreRule = PLAIN_SCORES,
    kernels: Kernels = TORCH,
) -> tuple[Tensor, Tensor]:
    """softmax(scores) v of a block, [b, n, q, e], and the lse of its scores (`rule`) in fp32 (fp64 for fp64).

    `causal`: the last query attends all keys, the one before it all but the last, and so on. `dropped` drops
    probabilities, and `alibi` is added to scores. Raises ValueError for a causal block with more keys than queries if
    `takes_earlier_keys` is false.
    """
    server = server_of(q, k, v, rule, kernels, drops=dropped is not None, biased=alibi is not None)
    if server == "tiles":
        special: dict[str, Any] = {"dropped": dropped, "alibi": alibi}
        return tiled_attention.forward(q, k, v, rule.factor(q), rule.cap, Attended(causal), **special)
    if server == "scores":
        return reference(q, k, v, causal=causal, dropped=dropped, alibi=alibi, rule=rule)
    if server == "cudnn":
        _check_square(q, k, causal)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, scale=rule.factor(q)
        )
        return out, lse.view(q.shape[:3])  # it is [b, n, q, 1]
    width = max(q.shape[-1], v.shape[-1])
    q_padded, k_padded, v_padded = (padded(x, width) for x in (q, k, v))
    if server == "flash":
        operation = torch.ops.aten._scaled_dot_product_flash_attention
    else:
        _check_square(q, k, causal)
        if causal and in_blocks_of_rows(q):
            out, lse = forward_by_rows(q_padded, k_padded, v_padded, rule.factor(q))
            return _cut(out, v.shape[-1]), lse
        operation = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse, *_ = operation(q_padded, k_padded, v_padded, 0.0, causal, scale=rule.factor(q))
    return _cut(out, v.shape[-1]), lse


def attention_block_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    dropped: RowDropout | None = None,
    alibi: Alibi | None = None,
    rule: ScoreRule = PLAIN_SCORES,
    kernels: Kernels = TORCH,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v of a block. `out` and `lse` are the merged results of all blocks of these queries."""
    server = server_of(q, k, v, rule, kernels, drops=dropped is not None, biased=alibi is not None)
    if server == "tiles":
        scores = rule.factor(q), rule.cap, Attended(causal), dropped, alibi
        return tiled_attention.backward(grad_out, q, k, v, out, lse, *scores)[:3]
    if server == "scores":
        special: dict[str, Any] = {"dropped": dropped, "alibi": alibi}
        return reference_backward(grad_out, q, k, v, out, lse, causal=causal, **special, rule=rule)
    if server == "cudnn":
        _check_square(q, k, causal)
        if grad_out.stride() != out.stride():
            # cuDNN's plans know the strides of both. Some versions of torch look up a plan without them.
            grad_out = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device).copy_(grad_out)
        # Without dropout the states of the random generator are not read.
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad_out, q, k, v, out, lse.contiguous().unsqueeze(-1), unused, unused, None, None, None,
            q.shape[2], k.shape[2], 0.0, causal, scale=rule.factor(q),
        )  # fmt: skip
        return grads
    width = max(q.shape[-1], v.shape[-1])
    inputs = [padded(x, width) for x in (grad_out, q, k, v, out)]
    if server == "flash":
        # Without dropout the states of the random generator are not read.
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)
        lse = lse.contiguous()  # its strides are not read
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *inputs, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused, scale=rule.factor(q)
        )
    elif causal and in_blocks_of_rows(q):  # the forward pass has checked that the block is square
        grad_q, grad_k, grad_v = backward_by_rows(*inputs, lse=lse, scale=rule.factor(q))
    else:
        _check_square(q, k, causal)
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, lse, 0.0, causal, scale=rule.factor(q)
        )
    return _cut(grad_q, q.shape[-1]), _cut(grad_k, k.shape[-1]), _cut(grad_v, v.shape[-1])


def _check_square(q: Tensor, k: Tensor, causal: bool) -> None:
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"a causal block on {q.device} needs as many keys as queries, not {k.shape[2]}: {q.shape[2]}")


def in_blocks_of_rows(q: Tensor) -> bool:
    """Whether a CPU is faster if causal attention of `q` goes block by block of queries, each with its keys alone.

    torch's operation takes 512 keys at a time, and overwrites the scores of later keys. With one thread and 192 to
    1,024 queries, blocks of 64 take 0.6 to 0.9 of its time, forward and backward. Beyond that little is left to save,
    and below it the calls cost as much. Gradients of keys are added in the dtype of the keys, so 16 bits are left to
    torch. A compiled graph would have a copy of the loop.
    """
    return q.is_cpu and q.dtype.itemsize > 2 and 192 <= q.shape[2] <= 1024 and not torch.compiler.is_compiling()


def _blocks_of_rows(
    q: Tensor, window: int, documents_bs: Tensor | None, alibi: Alibi | None = None
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield the query positions and key positions of each block of queries, and what is added to its scores."""
    length = q.shape[2]
    window = min(window or length, length)
    # A compiled graph has a copy of each turn of the loop: fewer turns there.
    rows = _QUERIES if torch.compiler.is_compiling() else _ROWS
    # A column is a key, and column 0 the first key that the first query of a block may attend. So query i attends the
    # columns i to i + window - 1, in every block.
    unseen = q.new_full((rows, window - 1 + rows), -math.inf)
    unseen = unseen.tril(-1).add_(unseen.triu_(window))
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        first = max(0, start + 1 - window)
        column = first - (start + 1 - window)
        block = unseen[: stop - start, column : column + stop - first]
        mask: Tensor | None = block
        if documents_bs is not None:
            apart = documents_bs[:, start:stop, None] != documents_bs[:, None, first:stop]
            mask = torch.where(apart, -math.inf, block)[:, None]
        elif start == 0 and stop <= window and alibi is None:
            mask = None  # torch's own `causal` is right where keys and queries begin at one position
        if alibi is not None and mask is not None:
            mask = alibi.of(slice(start, stop), slice(first, stop)).bias(q.dtype)[None] + mask
        yield slice(start, stop), slice(first, stop), mask


def forward_by_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int = 0,
    documents_bs: Tensor | None = None,
    alibi: Alibi | None = None,
) -> tuple[Tensor, Tensor]:
    """The result of causal attention on a CPU and its lse, block by block of queries, each with its own keys.

    With a `window` a query attends so many keys at most, and with `documents_bs` [b, s] those of its own document.
    `alibi` is added to scores. q, k and v have one width, and 32 or 64 bits.
    """
    samples, heads, length, _ = q.shape
    out = q.new_empty(samples, heads, length, v.shape[-1])  # laid out as torch's: a plan counts on it
    lse = q.new_empty(samples, heads, length)
    for rows, keys, mask in _blocks_of_rows(q, window, documents_bs, alibi):
        out[:, :, rows], lse[:, :, rows] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], 0.0, mask is None, attn_mask=mask, scale=scale
        )
    return out, lse


def backward_by_rows(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    lse: Tensor,
    scale: float,
    window: int = 0,
    documents_bs: Tensor | None = None,
    alibi: Alibi | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v in `forward_by_rows`."""
    grad_q = torch.empty_like(q)
    grad_k = torch.zeros_like(k)
    grad_v = torch.zeros_like(v)
    for rows, keys, mask in _blocks_of_rows(q, window, documents_bs, alibi):
        grad_q[:, :, rows], by_keys, by_values = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows], lse[:, :, rows],
            0.0, mask is None, attn_mask=mask, scale=scale,
        )  # fmt: skip
        grad_k[:, :, keys] += by_keys
        grad_v[:, :, keys] += by_values
    return grad_q, grad_k, grad_v


def merge_block(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge the result of a block of keys into `out` and `lse`, in place. Both are in the wide dtype.

    A row with an lse of -inf has attended nothing.
    """
    # The block's share of the sum of exponentials: 1 / (1 + exp(lse - block_lse)). Two rows of -inf give NaN.
    share = torch.sigmoid(block_lse - lse).nan_to_num_(0.0)
    out.lerp_(block_out.to(out.dtype), share[..., None])
    torch.logaddexp(lse, block_lse.to(lse.dtype), out=lse)


def _scores(
    q: Tensor, k: Tensor, causal: bool, rule: ScoreRule, seen: Tensor | None = None, alibi: Alibi | None = None
) -> tuple[Tensor, Tensor | float]:
    """The scores [b, n, q, k] in the wide dtype, -inf where a query may not attend, and their slopes by the products.

    `seen` is True for the keys that a query attends, and broadcasts to the scores.
    """
    scores = (q.to(wide(q.dtype)) @ _heads_of(q, k).transpose(-1, -2)).mul_(rule.factor(q))
    slope: Tensor | float = rule.factor(q)
    if rule.cap:
        tanh = scores.div_(rule.cap).tanh_()
        scores = tanh * rule.cap
        slope = tanh.square_().neg_().add_(1.0).mul_(slope)
    if alibi is not None:
        scores += alibi.bias(scores.dtype)
    if causal:
        queries, keys = scores.shape[-2:]
        future = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(1 + keys - queries)
        scores.masked_fill_(future, -math.inf)
    if seen is not None:
        scores.masked_fill_(~seen, -math.inf)
    return scores, slope


def _heads_of(q: Tensor, k: Tensor) -> Tensor:
    """Keys or values in the wide dtype, with a head for each query head."""
    return k.to(wide(k.dtype)).repeat_interleave(q.shape[1] // k.shape[1], 1)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    dropped: RowDropout | None = None,
    alibi: Alibi | None = None,
    rule: ScoreRule = PLAIN_SCORES,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention_block` with explicit scores, in the wide dtype. It takes any number of keys, and a mask `seen`."""
    scores, _ = _scores(q, k, causal, rule, seen, alibi)
    lse = scores.logsumexp(-1)
    # Not exp(scores - lse): scores near 10,000 leave an lse rounded by 5e-4, so a row would not sum to 1. The gradient
    # of scores is P (dP - rowsum(dO O)), and rounds P and O alike only if O comes from a row that does.
    probabilities = scores.softmax(-1).nan_to_num_(0.0)
    if dropped is not None:
        probabilities.mul_(dropped.keep()).div_(1.0 - dropped.p)
    return probabilities @ _heads_of(q, v), lse


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), in the memory of `scores`. Rows without a key have an lse of -inf, and zeros."""
    return scores.sub_(lse[..., None]).exp_().nan_to_num_(0.0)


def reference_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    dropped: RowDropout | None = None,
    alibi: Alibi | None = None,
    rule: ScoreRule = PLAIN_SCORES,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_block_backward` with explicit scores, in the wide dtype.

    P are the probabilities, D the dropout factors keep / (1 - p), dO the gradient of the output O, and c the slope of a
    score by its product: dV = (P D)^T dO, dS = c P ((dO V^T) D - rowsum(dO O)), dQ = dS K, dK = dS^T Q.
    """
    dtype = wide(q.dtype)
    scores, slope = _scores(q, k, causal, rule, seen, alibi)
    probabilities = _probabilities(scores, lse)
    grad_out = grad_out.to(dtype)
    grad_probabilities = grad_out @ _heads_of(q, v).transpose(-1, -2)
    kept = probabilities
    if dropped is not None:
        factors = dropped.keep().to(dtype).div_(1.0 - dropped.p)
        kept = probabilities * factors
        grad_probabilities.mul_(factors)
    grad_scores = grad_probabilities.sub_((grad_out * out.to(dtype)).sum(-1, keepdim=True))
    grad_scores.mul_(probabilities).mul_(slope)
    grad_q = grad_scores @ _heads_of(q, k)
    grad_k = grad_scores.transpose(-1, -2) @ q.to(dtype)
    grad_v = kept.transpose(-1, -2) @ grad_out
    run = q.shape[1] // k.shape[1]
    return grad_q, grad_k.unflatten(1, (-1, run)).sum(2), grad_v.unflatten(1, (-1, run)).sum(2)


# The largest scores


@torch.no_grad()
def largest_scores(
    q: Tensor,
    k: Tensor,
    rule: ScoreRule = PLAIN_SCORES,
    *,
    causal: bool = True,
    window: int = 0,
    documents_bs: Tensor | None = None,
) -> Tensor:
    """The largest score of each head before a cap, [n] in the wide dtype, block by block. -inf if none is attended.

    ALiBi is no part of it: it does not follow from weights.
    `causal` is as in `attention_block`. With a `window` a query attends so many keys at most, and with `documents_bs`,
    of all positions, those of its own document.
    """
    queries, keys = q.shape[2], k.shape[2]
    run = q.shape[1] // k.shape[1]
    largest = q.new_full((q.shape[1],), -math.inf, dtype=wide(q.dtype))
    for start in range(0, queries, _QUERIES):
        stop = min(start + _QUERIES, queries)
        # The keys before the last query's own, and within the window of the first.
        end = stop + keys - queries if causal else keys
        begin = max(0, start + keys - queries + 1 - window) if window else 0
        for first in range(begin, end, _KEYS):
            last = min(first + _KEYS, end)
            seen = _seen(range(start + keys - queries, stop + keys - queries), range(first, last), causal, window, q)
            if documents_bs is not None:
                same = (documents_bs[:, start:stop, None] == documents_bs[:, None, first:last])[:, None, None]
                seen = same if seen is None else seen & same
            # Query heads of one key/value head are rows of one product.
            rows = q[:, :, start:stop].unflatten(1, (-1, run)).flatten(2, 3)
            scores = products(rows, k[:, :, first:last]).unflatten(2, (run, -1)).mul_(rule.factor(q))
            if seen is not None:
                scores = scores.masked_fill_(~seen, -math.inf)
            torch.maximum(largest, scores.amax((0, 3, 4)).flatten(), out=largest)
    return largest


def _seen(queries: range, keys: range, causal: bool, window: int, like: Tensor) -> Tensor | None:
    """Whether a query at a position attends a key, bool [q, k]. None if each attends all of these."""
    inside = not window or keys.start > queries[-1] - window
    if not causal or (keys[-1] <= queries.start and inside):
        return None
    query = torch.arange(queries.start, queries.stop, device=like.device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=like.device)[None, :]
    seen = key <= query
    return seen & (key > query - window) if window else seen


def products(q: Tensor, k: Tensor) -> Tensor:
    """q k^T of [b, n, s, d]: in fp32 for 16-bit q and k, in their own dtype for wider ones."""
    if q.dtype.itemsize > 2:
        return q @ k.transpose(-1, -2)
    if not q.is_cuda:  # bmm takes out_dtype on GPUs alone
        return q.float() @ k.float().transpose(-1, -2)
    product = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(-1, -2), out_dtype=torch.float32)
    return product.unflatten(0, q.shape[:2])


# Sinks: a score of each head, a weight, that takes a part of the probability and has no value (gpt-oss).


def add_sinks(out: Tensor, lse: Tensor, sinks_n: Tensor) -> None:
    """Add the score of each head's sink to the softmax, in place: `out` [b, n, q, e] and `lse`, in the wide dtype.

    With the new `lse` and `out`, `attention_block_backward` gives the gradients of q, k and v.
    """
    sink = sinks_n.to(lse.dtype)[None, :, None]
    out.mul_(torch.sigmoid(lse - sink)[..., None])
    torch.logaddexp(lse, sink, out=lse)


def rowsums(grad_out: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """rowsum(grad_out * out), [b, n, q], computed in `dtype`."""
    return (grad_out.to(dtype) * out.to(dtype)).sum(-1)


def sink_gradient(rows: Tensor, lse: Tensor, sinks_n: Tensor) -> Tensor:
    """The gradient of the sinks, [n]: minus the sum over queries of exp(sink - lse) * rowsum(grad_out * out).

    `rows` are these `rowsums` in the dtype of `lse`.
    """
    probability = (sinks_n.to(lse.dtype)[None, :, None] - lse).exp()
    return (probability * rows).sum((0, 2)).neg().to(sinks_n.dtype)
