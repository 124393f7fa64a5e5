"""The global gradient norm, every element of the model counted once, and clipping to it."""

import torch
from megapar_kernels.adamw import square_sum
from torch import Tensor

from megapar import comm
from megapar.context import ParallelContext
from megapar.data_parallel.reduce import Gradients


@torch.no_grad()
def grad_norm(gradients: Gradients, ctx: ParallelContext, votes: Tensor | None = None) -> Tensor:
    """L2 norm of the gradient of the global batch: 0-d fp32, equal on all ranks. A collective, after
    `gradients.finish()`.

    Squares are summed in fp64, so that the norm does not depend on how layouts and buckets cut the gradient. It is NaN
    also if a gradient that this rank does not count, its copy of another rank's, is not finite: that copy updates
    weights here. `votes`, a 0-d number, is summed over all ranks in place by the same messages.
    """
    # The votes travel with the sum of squares: no message of their own.
    both = torch.zeros(2, dtype=torch.float64, device=gradients.flat.device)
    both[0] = square_sum(gradients.flat, gradients.impl, gradients.counted)
    # 0 where all copies are finite, which changes no bit of the norm; else NaN.
    both[0] += 0.0 * square_sum(gradients.flat, gradients.impl, gradients.copied)
    if votes is not None:
        both[1] = votes
    # Together these axes reach all ranks, and each element is counted on one of them.
    for axis in (ctx.tp, ctx.pp, ctx.grad):
        comm.all_reduce(both, axis)
    if votes is not None:
        votes.copy_(both[1])
    return both[0].sqrt().float()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are multiplied by so that their norm is at most `max_norm`, 0 meaning any: 0-d, at most 1, NaN if
    the norm is.

    max_norm / (norm + 1e-6), as torch.nn.utils.clip_grad_norm_ has it: so a norm between max_norm - 1e-6 and max_norm
    is scaled down a little as well, and with a max_norm near 1e-6 or below so is any norm.
    """
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
