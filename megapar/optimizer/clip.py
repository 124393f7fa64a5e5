"""The global gradient norm, every element of the model counted once, and clipping to it."""

import torch
from megapar_kernels.adamw import square_sum
from megapar_kernels.launch import Implementation
from torch import Tensor

from megapar import comm
from megapar.context import ParallelContext
from megapar.data_parallel.grad_buffer import GradBuffer


@torch.no_grad()
def grad_norm(
    buffer: GradBuffer, ctx: ParallelContext, how: Implementation = "torch", votes: Tensor | None = None
) -> Tensor:
    """L2 norm of the gradient of the global batch: 0-d fp32, equal on all ranks. A collective, after `buffer.finish()`.

    Squares are summed in fp64, so that the norm does not depend on how layouts and buckets cut the gradient. `votes`, a
    0-d number, is summed in place by the same messages over tp and pp, and over the replicas if their shards differ.
    """
    # The votes travel with the sum of squares: no message of their own.
    both = torch.zeros(2, dtype=torch.float64, device=buffer.grads.device)
    both[0] = square_sum(buffer.grads, how, buffer.counted)
    if votes is not None:
        both[1] = votes
    for axis in (ctx.tp, ctx.pp, ctx.grad) if buffer.sharded else (ctx.tp, ctx.pp):
        comm.all_reduce(both, axis)
    if votes is not None:
        votes.copy_(both[1])
    return both[0].sqrt().float()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are multiplied by so that their norm is at most `max_norm`, 0 meaning any: 0-d, at most 1, NaN if
    the norm is."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
