"""Causal attention: torch's SDPA, and explicit scores where probabilities are dropped out."""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor


def causal_attention(q_sbnd: Tensor, k_sbnd: Tensor, v_sbnd: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d), causal) v as [s, b, n * d]; q may have a multiple of k's and v's heads, dealt in
    runs."""
    q, k, v = (rearrange(x, "s b n d -> b n s d") for x in (q_sbnd, k_sbnd, v_sbnd))
    if q.is_meta:  # SDPA would choose explicit scores; CPUs and GPUs keep q, k, v, the result and a number a row
        y = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
    else:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return rearrange(y, "b n s d -> s b (n d)")


def causal_attention_dropout(q_sbnd: Tensor, k_sbnd: Tensor, v_sbnd: Tensor, keep_bnss: Tensor, p: float) -> Tensor:
    """`causal_attention` with its probabilities multiplied by keep / (1 - p); q, k and v have equally many heads."""
    q, k, v = (rearrange(x, "s b n d -> b n s d") for x in (q_sbnd, k_sbnd, v_sbnd))
    scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    probabilities = scores.masked_fill(future, -math.inf).softmax(-1) * keep_bnss / (1.0 - p)
    return rearrange(probabilities.to(v.dtype) @ v, "b n s d -> s b (n d)")
