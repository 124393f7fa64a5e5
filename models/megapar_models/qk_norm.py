"""Norms of queries and keys: over each head, or over all heads together. `LayerKind.qk_norm_over` says which.

`WidthNorm` is also that of what the last matrix of a branch reads (`LayerKind.sub_norms`).

Shapes: s positions, b micro-batch, n this rank's heads, d width of a head.
"""

import torch
from megapar_kernels.dispatch import Implementation
from torch import Tensor, nn

from megapar.comm.axis import Axis
from megapar.declare.params import ONES, ZEROS
from megapar.declare.sharding import Sharding
from megapar.tensor_parallel.layers import Columns, shared_vector
from megapar.tensor_parallel.regions import copy_to_tp, reduce_from_tp
from megapar_models.factory import Factory
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule


def make_qk_norm(columns: Columns, head_dim: int, kind: LayerKind, factory: Factory) -> nn.Module:
    """The norm of this rank's heads of q or k, [s, b, n, d]. `columns` are those of its projection, with its name.

    Raises ValueError for a norm over all heads other than RMSNorm.
    """
    rule = kind.qk_norm_rule or kind.norm
    impl = factory.kernels.norm
    if kind.qk_norm_over == "head":
        return HeadNorm(columns.name, head_dim, rule, factory.sharding, impl)
    if kind.qk_norm_over == "each_head":
        return EachHeadNorm(columns, rule, factory.sharding, impl)
    return WidthNorm(columns, rule, factory.sharding, impl)


def make_sub_norm(branch: str, width: int, rule: NormRule, factory: Factory) -> "WidthNorm":
    """The norm of what the last matrix of `branch` reads, such as layers.3.mlp: [s, b, columns of this rank].

    Raises ValueError as `WidthNorm` does.
    """
    columns = Columns.even(f"{branch}.sub_norm", width, factory.sharding.tp)
    return WidthNorm(columns, rule, factory.sharding, factory.kernels.norm)


class HeadNorm(nn.Module):
    """A norm over each head, with one weight [d] for all heads."""

    def __init__(self, name: str, head_dim: int, rule: NormRule, sharding: Sharding, impl: Implementation):
        super().__init__()
        self.rule = rule
        self.impl = impl
        self.weight = self.bias = None
        # Each rank has only some heads. So each rank's gradient is a partial sum, with or without sequence parallelism.
        if rule.weighted:
            self.weight = rule.weight(f"{name}.weight", head_dim, sharding, partial=True)
        if rule.has_bias:
            self.bias = shared_vector(f"{name}.bias", head_dim, ZEROS, sharding, partial=True)

    def forward(self, x_sbnd: Tensor) -> Tensor:
        return self.rule.normalize(x_sbnd, self.weight, self.bias, self.impl)


def _weight(columns: Columns, rule: NormRule, sharding: Sharding) -> nn.Parameter:
    """This rank's [n * d] of a weight with a number for each column."""
    piece = columns.piece("weight", (columns.size,), sharding.tp)
    init = ZEROS if rule.offset else ONES
    return sharding.parameter((piece,), piece.local_shape, init, decay=False)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class EachHeadNorm(nn.Module):
    """A norm over each head, with a weight [d] for each, and no bias (StableLM, Cohere)."""

    def __init__(self, columns: Columns, rule: NormRule, sharding: Sharding, impl: Implementation):
        super().__init__()
        if rule.has_bias or not rule.weighted or rule.cast_first:
            raise ValueError("qk_norm_over each_head: a norm with a weight, without a bias and rounded once")
        self.rule = rule
        self.impl = impl
        self.weight = _weight(columns, rule, sharding)

    def forward(self, x_sbnd: Tensor) -> Tensor:
        weight_nd = _wide(self.weight).unflatten(0, x_sbnd.shape[2:]) + self.rule.offset
        # In fp32, so that the product with the weight is rounded and not the norm alone.
        plain = NormRule(self.rule.eps, self.rule.kind, weighted=False, biased=False)
        return (plain.normalize(_wide(x_sbnd), None, None, self.impl) * weight_nd).to(x_sbnd.dtype)


class WidthNorm(nn.Module):
    """RMSNorm over all columns that tp cuts, as over all heads in OLMo 2, with a weight each. Ranks sum their squares.

    Raises ValueError for LayerNorm, and for a norm without a weight.
    """

    def __init__(self, columns: Columns, rule: NormRule, sharding: Sharding, impl: Implementation):
        super().__init__()
        if rule.kind != "rms" or not rule.weighted:
            raise ValueError(f"{columns.name}: a norm over the whole width must be RMSNorm with a weight")
        self.rule = rule
        self.impl = impl
        self.size = columns.size
        self.tp: Axis = sharding.tp
        # The columns of this rank that no earlier rank has: of a head held by two ranks, one adds the squares.
        self.own = slice(columns.own_start - columns.start, columns.own_stop - columns.start)
        self.weight = _weight(columns, rule, sharding)

    def forward(self, x_sbnd: Tensor) -> Tensor:
        """Map [s, b, n, d], or all columns of this rank [s, b, c], to the same shape."""
        x_sbc = x_sbnd.flatten(2)
        if self.tp.size == 1:
            return self.rule.normalize(x_sbc, self.weight, None, self.impl).view_as(x_sbnd)
        wide = _wide(x_sbc)
        squares_sb = wide[..., self.own].square().sum(-1)
        # Each rank divides its own columns by the root of the sum. So in backward the ranks' gradients of the sum add
        # up, before each rank takes them back to its squares.
        total_sb = copy_to_tp(reduce_from_tp(squares_sb, self.tp), self.tp)
        normed = wide * torch.rsqrt(total_sb / self.size + self.rule.eps)[..., None]
        if self.rule.cast_first:
            y = normed.to(x_sbnd.dtype) * (self.weight + self.rule.offset)
        else:
            y = (normed * (_wide(self.weight) + self.rule.offset)).to(x_sbnd.dtype)
        return y.view_as(x_sbnd)
