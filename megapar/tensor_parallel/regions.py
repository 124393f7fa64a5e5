"""Autograd collectives over the tensor-parallel axis: the f and g of Megatron (Shoeybi et al., arXiv 1909.08053,
section 3) and of sequence parallelism (Korthikanti et al., arXiv 2205.05198, section 4.2).

    function                 forward          backward
    copy_to_tp      (f)      identity         all-reduce
    reduce_from_tp  (f bar)  all-reduce       identity
    gather_sequence (g)      all-gather       reduce-scatter
    scatter_sum     (g bar)  reduce-scatter   all-gather
    scatter_sequence         own slice        all-gather

Gathers and scatters are along dimension 0, the sequence. At tp size 1 all of them are the identity.
"""

from typing import Any

import torch
from torch import Tensor

from megapar import comm
from megapar.context import Axis


def _slice(x: Tensor, tp: Axis) -> Tensor:
    if x.shape[0] % tp.size:
        raise ValueError(f"sequence parallel: length {x.shape[0]} does not divide by tp {tp.size}")
    return x.chunk(tp.size)[tp.rank].contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return comm.all_reduce(grad.clone(), ctx.tp), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        return comm.all_reduce(x.clone(memory_format=torch.contiguous_format), tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return comm.all_gather(x, tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return comm.reduce_scatter(grad, ctx.tp), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return comm.reduce_scatter(x, tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return comm.all_gather(grad, ctx.tp), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return _slice(x, tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return comm.all_gather(grad, ctx.tp), None


def copy_to_tp(x: Tensor, tp: Axis) -> Tensor:
    """The same `x` on every rank enters tensor-parallel work: gradients are summed on the way back."""
    return _Copy.apply(x, tp) if tp.size > 1 else x


def reduce_from_tp(x: Tensor, tp: Axis) -> Tensor:
    """Sum the ranks' partial results."""
    return _Reduce.apply(x, tp) if tp.size > 1 else x


def gather_sequence(x: Tensor, tp: Axis) -> Tensor:
    """[s/tp, ...] to [s, ...] for tensor-parallel work, whose input gradients are partial sums."""
    return _GatherSequence.apply(x, tp) if tp.size > 1 else x


def scatter_sum(x: Tensor, tp: Axis) -> Tensor:
    """Sum the ranks' partial [s, ...] and keep this rank's [s/tp, ...]."""
    return _ScatterSum.apply(x, tp) if tp.size > 1 else x


def scatter_sequence(x: Tensor, tp: Axis) -> Tensor:
    """This rank's [s/tp, ...] of an [s, ...] that is the same on every rank."""
    return _ScatterSequence.apply(x, tp) if tp.size > 1 else x
