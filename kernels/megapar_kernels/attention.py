"""Causal attention by torch's SDPA, also within documents.

Shapes: s positions, b samples, n heads, d width of a query and a key, e width of a value. The two widths may differ.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from megapar_kernels.backend import FusedAttention, Kernels
from megapar_kernels.block_attention import (
    SERVERS,
    Documents,
    ScoreRule,
    attention_block,
    attention_block_backward,
    attention_documents,
    attention_documents_backward,
    in_a_row,
    in_blocks_of_rows,
    of_a_sample,
    server_of,
    takes_documents,
)

# For Hopper and Blackwell. There cuDNN is about twice as fast as FlashAttention 2, which torch would try first.
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class _OneBlock(torch.autograd.Function):
    """`attention_block` of whole samples: causal attention of [b, n, s, d] with values [b, n, s, e].

    It keeps its inputs, its result and an lse a row.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, impl: FusedAttention) -> Tensor:
        ctx.rule = ScoreRule(scale)
        ctx.kernels = Kernels(attention=impl)
        out, lse = attention_block(q, k, v, causal=True, rule=ctx.rule, kernels=ctx.kernels)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = attention_block_backward(
            grad_out, q, k, v, out, lse, causal=True, rule=ctx.rule, kernels=ctx.kernels
        )
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


class _Documents(torch.autograd.Function):
    """`attention_documents` of several samples in a row: causal attention of q [t, n, d], k and v with fewer heads."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None) -> Tensor:
        ctx.documents = documents
        ctx.rule = ScoreRule(scale)
        out, lse = attention_documents(of_a_sample(q), of_a_sample(k), of_a_sample(v), documents, ctx.rule)
        ctx.save_for_backward(q, k, v, out, lse)
        return in_a_row(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = attention_documents_backward(
            of_a_sample(grad_out), of_a_sample(q), of_a_sample(k), of_a_sample(v), out, lse, ctx.documents, ctx.rule
        )
        return in_a_row(grad_q), in_a_row(grad_k), in_a_row(grad_v), None, None


def sdpa(q: Tensor, k: Tensor, v: Tensor, impl: FusedAttention = "torch", scale: float | None = None) -> Tensor:
    """torch's causal scaled_dot_product_attention of [b, n, s, d]. `impl` is the backend torch tries first.

    `scale` is the factor of scores; None is 1 / sqrt(d).

    If the widths d and e differ, `attention_block` computes it: on a device with fused kernels for one width only, such
    as a CPU, SDPA would hold all scores in memory. It does too where it is faster on a CPU.
    """
    if q.shape[-1] != v.shape[-1] or in_blocks_of_rows(q):
        return _OneBlock.apply(q, k, v, scale, impl)
    with sdpa_kernel(CUDNN_FIRST, set_priority=True) if impl == "cudnn" else nullcontext():
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)


def server_of_sdpa(q: Tensor, k: Tensor, v: Tensor, impl: FusedAttention) -> str:
    """Who computes `sdpa`, in words."""
    if q.shape[-1] != v.shape[-1] or not q.is_cuda:
        return SERVERS[server_of(q, k, v, kernels=Kernels(attention=impl), drops=False)]
    # Torch chooses by more than shapes, and says nothing of it.
    return "cuDNN, or FlashAttention 2 where it refuses" if impl == "cudnn" else "torch's SDPA"


def server_of_documents(q: Tensor, v: Tensor) -> str:
    """Who computes `packed_causal_attention`, in words."""
    if takes_documents(q, v):
        return SERVERS["flash"]
    return WITH_A_MASK if q.is_cuda else SERVERS["cpu"]


WITH_A_MASK = "torch's SDPA with a mask"


def for_cpu(q: Tensor, impl: FusedAttention) -> bool:
    """Whether a CPU computes attention of `q`, or will: on the meta device `backend.select` plans for GPUs by cudnn."""
    return q.device.type == "cpu" or (q.is_meta and impl == "torch")


def causal_attention(
    q_sbnd: Tensor,
    k_sbnd: Tensor,
    v_sbnd: Tensor,
    impl: FusedAttention = "torch",
    scale: float | None = None,
) -> Tensor:
    """softmax(scale * q k^T, causal) v as [s, b, n * e]. `scale` None is 1 / sqrt(d).

    q may have a multiple of the heads of k and v. Then each head of k and v serves a run of consecutive heads of q.
    """
    # Not by einops, which takes 10 us each time: all layers come here.
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_sbnd, k_sbnd, v_sbnd))
    if for_cpu(q, impl):
        # A CPU's SDPA is up to a third faster if the rows of a head follow one another. That is worth a copy, which
        # `split_and_rotate_qkv` has made already.
        q, k, v = (x.contiguous() for x in (q, k, v))
    if q.is_meta and q.shape[-1] == v.shape[-1]:
        # On the meta device SDPA would choose explicit scores. On CPUs and GPUs it keeps q, k, v, the result and one
        # number for each row, and so does this op: a plan counts what a run keeps.
        y = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)[0]
    else:
        y = sdpa(q, k, v, impl, scale)
    return y.permute(2, 0, 1, 3).flatten(2)  # [s, b, n * e]


def packed_causal_attention(
    q_sbnd: Tensor, k_sbnd: Tensor, v_sbnd: Tensor, starts: Tensor, scale: float | None = None, longest: int = 0
) -> Tensor:
    """`causal_attention` within each of several documents, as [s, b, n * e].

    The positions of all samples are numbered one sample after another. Document i is [starts[i], starts[i + 1]).
    `starts` is int32 [documents + 1], from 0 to b * s. No document reaches into the next sample. The
    last ones may be empty. None is longer than `longest` positions; 0: than a sample.

    A CPU runs SDPA for each document. A GPU runs FlashAttention 2 once for all if it takes the dtype and widths, else
    one SDPA with a mask. On the meta device, for a plan, each document is as long as `longest`.
    """
    length = q_sbnd.shape[0]
    if q_sbnd.is_meta:
        return _longest_documents(q_sbnd, k_sbnd, v_sbnd, longest or length, scale)
    q, k, v = (rearrange(x, "s b n d -> (b s) n d") for x in (q_sbnd, k_sbnd, v_sbnd))
    if takes_documents(q, v):
        # To know the true length of the longest document, the host would have to wait for the GPU.
        most = min(longest or length, length)
        y: Any = _Documents.apply(q, k, v, Documents(starts, starts, most, most), scale)
    elif q.device.type == "cpu":
        # The host must know the lengths to split the tensors. On a CPU that is free, on a GPU it would have to wait for
        # all queued work.
        lengths = [number for number in starts.diff().tolist() if number]
        parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        documents = []
        for part in parts:
            q_nt, k_nt, v_nt = (rearrange(x, "t n d -> 1 n t d") for x in part)
            documents.append(sdpa(q_nt, k_nt, v_nt, scale=scale))
        y = torch.cat([rearrange(x, "1 n t d -> t n d") for x in documents])
    else:
        return masked_causal_attention(q_sbnd, k_sbnd, v_sbnd, starts, scale=scale)
    return rearrange(y, "(b s) n d -> s b (n d)", s=length)


def _longest_documents(q_sbnd: Tensor, k_sbnd: Tensor, v_sbnd: Tensor, longest: int, scale: float | None) -> Tensor:
    """`causal_attention` within runs of `longest` positions, and within what remains of a sample, as [s, b, n * e]."""
    length, samples = q_sbnd.shape[:2]
    whole = length - length % longest
    parts = []
    for start, stop, run in ((0, whole, longest), (whole, length, length - whole)):
        if start < stop:
            rows = (x[start:stop].unflatten(0, (-1, run)) for x in (q_sbnd, k_sbnd, v_sbnd))
            q, k, v = (x.transpose(0, 1).flatten(1, 2) for x in rows)
            y = causal_attention(q, k, v, scale=scale)
            parts.append(y.unflatten(1, (-1, samples)).transpose(0, 1).flatten(0, 1))
    return torch.cat(parts)


def masked_causal_attention(
    q_sbnd: Tensor,
    k_sbnd: Tensor,
    v_sbnd: Tensor,
    starts: Tensor | None,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """`packed_causal_attention` for any dtype and widths, with a mask of b * s * s booleans.

    With a `window`, each position reads `window` keys at most, its own among them (arXiv 2004.05150). Without `starts`
    each sample is one document. The mask then has s * s booleans.
    """
    length, samples = q_sbnd.shape[:2]
    run = q_sbnd.shape[2] // k_sbnd.shape[2]
    seen = torch.ones(length, length, dtype=torch.bool, device=q_sbnd.device).tril()
    if window:
        seen = seen.triu(1 - window)
    if starts is not None:
        position = torch.arange(samples * length, dtype=starts.dtype, device=starts.device)
        documents_bs = torch.searchsorted(starts, position, right=True).view(samples, length)
        seen = ((documents_bs[:, :, None] == documents_bs[:, None, :]) & seen)[:, None]
    # Heads of k and v are repeated, because SDPA's fused kernels take no mask together with fewer key/value heads.
    k_sbnd = k_sbnd.repeat_interleave(run, 2)
    v_sbnd = v_sbnd.repeat_interleave(run, 2)
    q, k, v = (rearrange(x, "s b n d -> b n s d") for x in (q_sbnd, k_sbnd, v_sbnd))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    return rearrange(y, "b n s d -> s b (n d)")
