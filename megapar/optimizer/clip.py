"""The global gradient norm, counting each element of the model once, and the factor of clipping."""

import torch
from megapar_kernels.adamw import square_sum
from torch import Tensor

from megapar.comm import collectives
from megapar.data_parallel.shards import ReducedGradients
from megapar.declare.context import ParallelContext


def grad_norm(gradients: ReducedGradients, ctx: ParallelContext) -> Tensor:
    """The norm of `reduce_norm` alone."""
    nothing = torch.zeros(0, device=gradients.flat.device)
    return reduce_norm(gradients, ctx, nothing)[0]


@torch.no_grad()
def reduce_norm(gradients: ReducedGradients, ctx: ParallelContext, others: Tensor) -> tuple[Tensor, Tensor]:
    """L2 norm of the gradient of the global batch, 0-d fp32, and the sums of `others` over all ranks, fp64.

    `others` are this rank's numbers, 1-D. This is a collective, and its results are equal on all ranks. Call it after
    `gradients.finish()`. Squares are summed in fp64, so the norm does not depend on how layouts and buckets cut the
    gradient. This rank may hold the copy of a gradient counted by another rank. If this copy is not finite, the norm is
    NaN too, because the copy updates weights here.
    """
    # The other numbers are in the same tensor as the sum of squares, so they need no message of their own.
    sums = torch.zeros(1 + others.numel(), dtype=torch.float64, device=gradients.flat.device)
    sums[0] = square_sum(gradients.flat, gradients.impl, gradients.norm_ranges)
    # This adds 0, which changes no bit of the norm, or NaN if a copy is not finite (0 * inf is NaN).
    sums[0] += 0.0 * square_sum(gradients.flat, gradients.impl, gradients.uncounted_ranges)
    sums[1:] = others
    # One sum over each axis in turn reaches all ranks, and each element is counted on one of them.
    for axis in (ctx.tp, ctx.pp, ctx.grad):
        collectives.all_reduce(sums, axis)
    return sums[0].sqrt().float(), sums[1:]


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor that reduces the norm of gradients to at most `max_norm`: 0-d, at most 1, NaN if `norm` is NaN.

    `max_norm` 0 means no limit. The factor is max_norm / (norm + 1e-6), as in torch.nn.utils.clip_grad_norm_. So a norm
    between max_norm - 1e-6 and max_norm is scaled down a little as well. With a max_norm near 1e-6 or below, any norm
    is scaled down.
    """
    if max_norm == 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
