"""Cross entropy of logits cut by vocabulary over the tensor-parallel axis (arXiv 1909.08053, section 3)."""

from dataclasses import dataclass
from typing import Any

import torch
from megapar_kernels import cross_entropy as kernel
from megapar_kernels.dispatch import Implementation
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.comm import collectives
from megapar.comm.axis import Axis


@dataclass(frozen=True)
class LogitRule:
    """From a product z of the head to a logit y: `multiplier` * z, and with a `cap` then cap * tanh(y / cap).

    Its operations are those of transformers, each rounded to the dtype of the products.
    """

    multiplier: float = 1.0
    cap: float = 0.0

    @property
    def changes(self) -> bool:
        """Whether a logit is anything but the product."""
        return self.multiplier != 1.0 or self.cap != 0.0

    def apply_(self, z: Tensor) -> Tensor:
        """The logits, written over the products."""
        if self.multiplier != 1.0:
            z.mul_(self.multiplier)
        if self.cap:
            z.div_(self.cap).tanh_().mul_(self.cap)
        return z

    def slope(self, y: Tensor) -> Tensor | float:
        """The derivative of the logits `y` by their products. Keep it before `y` is overwritten."""
        if not self.cap:
            return self.multiplier
        return (y / self.cap).square_().neg_().add_(1.0).mul_(self.multiplier)


PLAIN_LOGITS = LogitRule()


class _Ruled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, rule: LogitRule) -> Tensor:
        ctx.rule = rule
        y = rule.apply_(z.clone())
        if rule.cap:
            ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None]:
        y = ctx.saved_tensors[0] if ctx.rule.cap else grad_y
        return grad_y * ctx.rule.slope(y), None


def ruled_logits(z: Tensor, rule: LogitRule) -> Tensor:
    """The logits of the products z [..., v]. For backward it keeps them if they are capped, and nothing otherwise."""
    if not rule.changes:
        return z
    return _Ruled.apply(z, rule)


@dataclass(frozen=True)
class CrossEntropy:
    """The loss function, and this rank's part of the vocabulary.

    The loss of a token with target t, its logits z over the whole vocabulary, and lse = log-sum-exp(z):

        lse - z[t] + z_loss * lse^2

    Rows are tokens. This rank has their logits [rows, width] from id `start` on. The first `columns` of them stand for
    ids, the others are padding. `hits`, bool [rows], is filled by `losses`: whether no logit is above the target's.
    """

    start: int
    columns: int
    z_loss: float
    tp: Axis
    impl: Implementation
    hits: Tensor | None = None

    @classmethod
    def of(
        cls,
        width: int,
        vocab_size: int,
        start: int,
        tp: Axis,
        z_loss: float,
        impl: Implementation,
        hits_sb: Tensor | None = None,
    ) -> "CrossEntropy":
        """The loss for `width` local columns, from id `start` on."""
        # Padding is at the end of the vocabulary. A rank may hold padding alone.
        columns = max(0, min(width, vocab_size - start))
        return cls(start, columns, z_loss, tp, impl, None if hits_sb is None else hits_sb.view(-1))

    def statistics(self, logits: Tensor, target: Tensor) -> Tensor:
        """Statistics of this rank's columns, [3, rows]. `losses` takes them."""
        return kernel.statistics(logits, target - self.start, self.columns, self.impl)

    def losses(self, statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, highest logit and sum of exp(z - highest) of each row. Communicates one max and one sum over tp.

        Changes `statistics`.
        """
        maximum = statistics[0]
        sums = statistics[1:]
        highest = collectives.all_reduce(maximum.clone(), self.tp, "max")
        # The kernel took its sums relative to this rank's maximum. Make them relative to the highest of all ranks.
        shift = maximum - highest
        sums[0] *= shift.exp()
        exp_sum, picked = collectives.all_reduce(sums, self.tp)
        if self.hits is not None:
            # Exact: one rank has the target's logit, and the others add 0.
            torch.eq(picked, highest, out=self.hits)
        # All terms are relative to the highest logit. The loss is a small difference: with large logits, rounding of
        # log-sum-exp itself would lose it.
        loss = exp_sum.log() + (highest - picked)
        if self.z_loss:
            loss += self.z_loss * (highest + exp_sum.log()).square()
        return loss, highest, exp_sum

    def scale(self, highest: Tensor, exp_sum: Tensor, grad_loss: Tensor) -> Tensor:
        """The factor [rows] of exp(z - highest) in the gradient of the logits."""
        scale = grad_loss / exp_sum
        if self.z_loss:
            scale *= 1.0 + 2.0 * self.z_loss * (highest + exp_sum.log())
        return scale

    def gradient(
        self, logits: Tensor, target: Tensor, highest: Tensor, scale: Tensor, grad_loss: Tensor, *, inplace: bool
    ) -> Tensor:
        """Gradient of the logits, [rows, width] in their dtype. It is zero in columns of padding."""
        local = target - self.start
        return kernel.gradient(logits, local, self.columns, highest, scale, grad_loss, self.impl, inplace)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, entropy: CrossEntropy, inplace: bool) -> Tensor:
        loss, highest, exp_sum = entropy.losses(entropy.statistics(logits, target))
        ctx.save_for_backward(logits, target, highest, exp_sum)
        ctx.entropy = entropy
        ctx.inplace = inplace
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None]:
        logits, target, highest, exp_sum = ctx.saved_tensors
        scale = ctx.entropy.scale(highest, exp_sum, grad_loss)
        grad = ctx.entropy.gradient(logits, target, highest, scale, grad_loss, inplace=ctx.inplace)
        return grad, None, None, None


def vocab_parallel_cross_entropy(
    logits_sbv: Tensor,
    targets_sb: Tensor,
    vocab_size: int,
    start: int,
    tp: Axis,
    z_loss: float = 0.0,
    impl: Implementation = "torch",
    inplace: bool = False,
    hits_sb: Tensor | None = None,
) -> Tensor:
    """Loss of each token, fp32 [s, b], as torch's cross_entropy on the whole vocabulary would give it.

    `logits_sbv` are this rank's columns. The first one is token id `start`. Columns for ids at or beyond `vocab_size`
    are padding and take no part. `z_loss` times the squared log-sum-exp is added to the loss of each token (PaLM, arXiv
    2204.02311). `hits_sb`, bool, is filled with whether a target has the highest logit. Communicates one max and one
    sum of [s, b] statistics.

    `inplace` lets the gradient overwrite the logits, for callers that use them nowhere else. autograd then raises
    RuntimeError at a second backward, or if another op needs the logits.
    """
    logits = logits_sbv.reshape(-1, logits_sbv.shape[-1])
    target = targets_sb.reshape(-1)
    entropy = CrossEntropy.of(logits.shape[-1], vocab_size, start, tp, z_loss, impl, hits_sb)
    return _VocabParallelCrossEntropy.apply(logits, target, entropy, inplace).view(targets_sb.shape)
