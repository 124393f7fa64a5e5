"""Cross entropy over logits whose vocabulary is cut over the tensor-parallel axis (arXiv 1909.08053, section 3)."""

from typing import Any

import torch
from megapar_kernels import cross_entropy as kernel
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar import comm
from megapar.context import Axis

IGNORE_INDEX = -100


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, start: int, vocab_size: int, smoothing: float, tp: Axis
    ) -> Tensor:
        local = target - start
        maximum, exp_sum, picked, total = kernel.statistics(logits, local)
        highest = comm.all_reduce(maximum.clone(), tp, "max")
        shift = maximum - highest
        sums = torch.stack((exp_sum * shift.exp(), picked, total + logits.shape[-1] * shift))
        exp_sum, picked, total = comm.all_reduce(sums, tp)
        ctx.save_for_backward(logits, local, highest, exp_sum, target != IGNORE_INDEX)
        ctx.on_target, ctx.on_all = 1.0 - smoothing, smoothing / vocab_size
        # All logits are taken from the highest one first: log-sum-exp itself would round away the loss of large logits.
        loss = exp_sum.log() + ctx.on_target * (highest - picked) - ctx.on_all * total
        return loss.masked_fill_(target == IGNORE_INDEX, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, local, highest, exp_sum, counts = ctx.saved_tensors
        grad = kernel.gradient(logits, local, highest, exp_sum, grad_loss * counts, ctx.on_target, ctx.on_all)
        return grad, None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits_sbv: Tensor, targets_sb: Tensor, vocab_size: int, start: int, tp: Axis, label_smoothing: float = 0.0
) -> Tensor:
    """Loss of each token, fp32 [s, b], as torch's cross_entropy on the whole vocabulary would give it.

    `logits_sbv` are this rank's columns, of which the first is token id `start`; columns that stand for ids at or
    beyond `vocab_size` are padding and take no part. Targets of -100 give 0. Label smoothing mixes in a uniform
    distribution over the `vocab_size` ids (Szegedy et al., arXiv 1512.00567). Communicates one max and one sum of [s,
    b] statistics.
    """
    columns = max(0, min(logits_sbv.shape[-1], vocab_size - start))
    logits = logits_sbv.reshape(-1, logits_sbv.shape[-1])
    if columns < logits.shape[-1]:
        logits = logits[:, :columns]
    target = targets_sb.reshape(-1)
    loss = _VocabParallelCrossEntropy.apply(logits, target, start, vocab_size, label_smoothing, tp)
    return loss.view(targets_sb.shape)
