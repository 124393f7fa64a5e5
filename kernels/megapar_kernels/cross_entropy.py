"""The two halves of vocab-parallel cross entropy that touch all logits: statistics forward, gradient backward.

Logits are [n, columns], a slice of the vocabulary, in any float dtype; statistics and gradients are computed in fp32.
"""

import torch
from torch import Tensor


def statistics(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(max, sum of exp(z - max), z[target], sum of (z - max)) of each row, fp32 [n].

    `target` is the column, or anything outside [0, columns) where another rank holds it (z[target] is then 0).
    A slice without columns gives the least fp32 number, 0, 0, 0.
    """
    rows, columns = logits.shape
    if columns == 0:
        zero = logits.new_zeros(rows, dtype=torch.float32)
        return torch.full_like(zero, torch.finfo(torch.float32).min), zero, zero, zero
    z = logits.float()
    maximum = z.amax(-1)
    mine = (target >= 0) & (target < columns)
    picked = z.gather(-1, torch.where(mine, target, 0)[:, None])[:, 0] * mine
    z = z - maximum[:, None]
    total = z.sum(-1)
    return maximum, z.exp_().sum(-1), picked, total


def gradient(
    logits: Tensor,
    target: Tensor,
    maximum: Tensor,
    exp_sum: Tensor,
    grad_loss: Tensor,
    on_target: float,
    on_all: float,
) -> Tensor:
    """d loss / d logits = grad_loss * (softmax(z) - on_target at the target column - on_all everywhere), in z's dtype.

    softmax(z) = exp(z - maximum) / exp_sum, both over the whole vocabulary.
    """
    grad = (logits.float() - maximum[:, None]).exp_().mul_((grad_loss / exp_sum)[:, None])
    if on_all:
        grad -= (on_all * grad_loss)[:, None]
    if logits.shape[1]:  # no indexing by a mask, for which a GPU would have to wait
        mine = (target >= 0) & (target < logits.shape[1])
        column = torch.where(mine, target, 0)[:, None]
        grad.scatter_(1, column, grad.gather(1, column) - torch.where(mine, on_target * grad_loss, 0.0)[:, None])
    return grad.to(logits.dtype)
