"""Autograd collectives over the tensor-parallel axis.

Their names are those of Korthikanti et al. (arXiv 2205.05198, section 4.2). The f bar here is the g of Shoeybi et al.
(arXiv 1909.08053, section 3).

    region or function       forward          backward
    Copy            (f)      identity         all-reduce
    reduce_from_tp  (f bar)  all-reduce       identity
    Gather          (g)      all-gather       reduce-scatter
    gather_sequence (g)      all-gather       reduce-scatter
    scatter_sum     (g bar)  reduce-scatter   all-gather

Copy and Gather are objects, because a linear layer overlaps their communication with its products
(`megapar.linear.function`). Gathers and scatters are along dimension 0, the sequence. At tp size 1 every one is the
identity.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.comm.pending import Pending
from megapar.linear.function import LOCAL, InputRegion, Local
from megapar.linear.products import MatrixProducts
from megapar.linear.torch_products import TORCH_PRODUCTS


@dataclass(frozen=True)
class Copy(Local):
    """f: the input is the same on every rank. Each rank's gradient of the input is a part of the sum."""

    tp: Axis

    def leave_async(self, grad_x: Tensor) -> tuple[Tensor, Pending]:
        return grad_x, collectives.all_reduce_async(grad_x, self.tp)


@dataclass(frozen=True)
class Gather:
    """g: each rank has a slice [s/tp, ...] of the input [s, ...]. Each rank's gradient of it is a part of the sum."""

    tp: Axis

    def enter(self, x: Tensor) -> Tensor:
        return collectives.all_gather(x, self.tp)

    def enter_async(self, x: Tensor) -> tuple[Tensor, Pending]:
        return collectives.all_gather_async(x, self.tp)

    def leave_async(self, grad_x: Tensor) -> tuple[Tensor, Pending]:
        return collectives.reduce_scatter_async(grad_x, self.tp)


def input_region(tp: Axis, sequence_parallel: bool) -> InputRegion:
    """The region through which activations between layers enter a column-parallel layer."""
    if tp.size == 1:
        return LOCAL
    if sequence_parallel:
        return Gather(tp)
    return Copy(tp)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        # autograd would take an input that is returned as it is for one that was changed in place. A view is not.
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # The reduction writes into its tensor, and autograd may use `grad` elsewhere too, so reduce a copy.
        return collectives.all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.tp), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        # In place: `x` is the partial result of a product, which nobody keeps. Else autograd would say so.
        ctx.mark_dirty(x)
        return collectives.all_reduce(x, tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Each rank's part enters the sum once, so its gradient is that of the sum.
        return grad, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis, products: MatrixProducts) -> Tensor:
        ctx.tp = tp
        ctx.products = products
        return collectives.reduce_scatter(x, tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        gathered = collectives.all_gather(ctx.products.as_gradient(grad), ctx.tp)
        return ctx.products.carry(gathered, like=grad), None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return collectives.all_gather(x.contiguous(), tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.reduce_scatter(grad.contiguous(), ctx.tp), None


def copy_to_tp(x: Tensor, tp: Axis) -> Tensor:
    """f: `x`, the same on every rank, enters tensor-parallel work. Backward sums the ranks' gradients of it."""
    if tp.size == 1:
        return x
    return _Copy.apply(x, tp)


def reduce_from_tp(x: Tensor, tp: Axis) -> Tensor:
    """f bar: sum the partial results `x` of the ranks in place. Every rank gets the sum."""
    if tp.size == 1:
        return x
    return _Reduce.apply(x, tp)


def scatter_sum(x: Tensor, tp: Axis, products: MatrixProducts = TORCH_PRODUCTS) -> Tensor:
    """g bar: sum the partial results [s, ...] of the ranks. Each rank gets its slice [s/tp, ...] of the sum.

    Backward gathers the gradient as the `products` that made the partial results convert it.
    """
    if tp.size == 1:
        return x
    return _ScatterSum.apply(x, tp, products)


def gather_sequence(x: Tensor, tp: Axis) -> Tensor:
    """g: the slices [s/tp, ...] of all ranks as [s, ...]. Each rank's gradient of it is a part of the sum."""
    if tp.size == 1:
        return x
    return _GatherSequence.apply(x, tp)
