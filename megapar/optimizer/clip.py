"""The global gradient norm, which counts each element of the model once, and the factor of clipping."""

import torch
from megapar_kernels.adamw import square_sum
from torch import Tensor

from megapar.comm import collectives
from megapar.context import ParallelContext
from megapar.data_parallel.shards import ReducedGradients


@torch.no_grad()
def grad_norm(gradients: ReducedGradients, ctx: ParallelContext, votes: Tensor | None = None) -> Tensor:
    """L2 norm of the gradient of the global batch: 0-d fp32, equal on all ranks.

    This is a collective. Call it after `gradients.finish()`. Squares are summed in fp64, so that the norm does not
    depend on how layouts and buckets cut the gradient. The norm is NaN also if a gradient that this rank does not count
    is not finite: its copy of a gradient that another rank counts. That copy updates weights here. `votes`, a 0-d
    number, is summed over all ranks in place.
    """
    # The votes are in the same tensor as the sum of squares, so they need no message of their own.
    both = torch.zeros(2, dtype=torch.float64, device=gradients.flat.device)
    both[0] = square_sum(gradients.flat, gradients.impl, gradients.norm_ranges)
    # This adds 0, which changes no bit of the norm, or NaN if a copy is not finite (0 * inf is NaN).
    both[0] += 0.0 * square_sum(gradients.flat, gradients.impl, gradients.uncounted_ranges)
    if votes is not None:
        both[1] = votes
    # One sum over each axis in turn reaches all ranks, and each element is counted on one of them.
    for axis in (ctx.tp, ctx.pp, ctx.grad):
        collectives.all_reduce(both, axis)
    if votes is not None:
        votes.copy_(both[1])
    return both[0].sqrt().float()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor that reduces the norm of gradients to at most `max_norm`: 0-d, at most 1, NaN if `norm` is NaN.

    `max_norm` 0 means no limit. The factor is max_norm / (norm + 1e-6), as in torch.nn.utils.clip_grad_norm_. So a norm
    between max_norm - 1e-6 and max_norm is scaled down a little as well. With a max_norm near 1e-6 or below so is any
    norm.
    """
    if max_norm == 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
