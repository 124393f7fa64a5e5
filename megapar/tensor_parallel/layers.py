"""Linear layers and embedding cut over the tensor-parallel axis (arXiv 1909.08053), with sequence parallelism (arXiv
2205.05198).

Shapes: s sequence, b micro-batch, i in, o out, h hidden. With sequence parallel, activations between a row-parallel and
the next column-parallel layer are [s/tp, b, h]. Weight gradients go straight into the fp32 main gradient when the
parameter has one, and the input gradient's communication runs while the weight gradient is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megapar.context import Axis
from megapar.linear import MatrixProducts, linear
from megapar.params import (
    ONES,
    ZEROS,
    Box,
    Init,
    ParamSpec,
    Piece,
    copied,
    cut,
    main_grad_of,
    parameter,
    replicated,
    sharded,
)
from megapar.tensor_parallel.regions import LOCAL, input_region, reduce_from_tp, scatter_sum

VOCAB_MULTIPLE = 128


@dataclass(frozen=True)
class Sharding:
    """What every layer needs to know to build its slice.

    `tp` cuts its weights; over `replicas` its gradients are summed and its optimizer state is sharded.
    """

    tp: Axis
    replicas: Axis
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device
    products: MatrixProducts = field(default_factory=MatrixProducts)

    @property
    def splits_sequence(self) -> bool:
        return self.sequence_parallel and self.tp.size > 1

    def parameter(self, pieces: tuple[Piece, ...], shape: Sequence[int], init: Init, *, decay: bool) -> nn.Parameter:
        """An uninitialized parameter of the local `shape`: `pieces`, one after the other, then padding rows."""
        spec = ParamSpec(pieces, init, decay=decay, replicas=self.replicas)
        return parameter(spec, shape, dtype=self.dtype, device=self.device)


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, sharding: Sharding) -> Tensor:
    """[s or s/tp, b, i] to this rank's columns [s, b, o/tp]."""
    region = input_region(sharding.tp, sharding.sequence_parallel)
    return linear(x, weight, bias, region, sharding.products)


@dataclass(frozen=True)
class Columns:
    """Output rows of one logical matrix `name`.weight [size, in] (and `name`.bias) in a column-parallel layer.

    This rank holds [start, stop) and owns [own_start, own_stop) of them; `shared` when several ranks hold some rows.
    """

    name: str
    size: int
    start: int
    stop: int
    own_start: int
    own_stop: int
    shared: bool = False

    @classmethod
    def even(cls, name: str, size: int, tp: Axis) -> "Columns":
        """`size` outputs dealt evenly over tp."""
        start, stop = cut(size, tp)
        return cls(name, size, start, stop, start, stop)

    def piece(self, kind: Literal["weight", "bias"], shape: tuple[int, ...], tp: Axis) -> Piece:
        """The weight's or the bias's rows; of rows that several ranks hold, each computes a part of the gradient."""
        return replace(
            sharded(f"{self.name}.{kind}", shape, {0: (self.start, self.stop)}),
            owned=Box((self.own_start, *(0 for _ in shape[1:])), (self.own_stop - self.own_start, *shape[1:])),
            partial=(tp,) if self.shared else (),
        )


class ColumnParallelLinear(nn.Module):
    """Several matrices with the same input, fused and each cut by its outputs: y_sbo = x_sbi W^T + b, o this rank's.

    The input is [s, b, i], the same on every rank, or with sequence parallel this rank's [s/tp, b, i]. The output
    concatenates this rank's columns of each matrix in order.
    """

    def __init__(self, in_features: int, columns: Sequence[Columns], sharding: Sharding, *, init: Init, bias: bool):
        super().__init__()
        self.sharding = sharding
        tp = sharding.tp
        rows = sum(c.stop - c.start for c in columns)
        weights = tuple(c.piece("weight", (c.size, in_features), tp) for c in columns)
        self.weight = sharding.parameter(weights, (rows, in_features), init, decay=True)
        self.bias = None
        if bias:
            biases = tuple(c.piece("bias", (c.size,), tp) for c in columns)
            self.bias = sharding.parameter(biases, (rows,), ZEROS, decay=False)

    def forward(self, x_sbi: Tensor) -> Tensor:
        return column_linear(x_sbi, self.weight, self.bias, self.sharding)

    def product(self, x_sbi: Tensor) -> Tensor:
        """The output without the bias, for what adds it in a kernel of its own."""
        return column_linear(x_sbi, self.weight, None, self.sharding)


class RowParallelLinear(nn.Module):
    """A matrix cut by its inputs: y_sbo = sum over tp of x_sbi W^T, then the bias, once.

    The input is this rank's [s, b, i/tp]; the output is [s, b, o] on every rank, or [s/tp, b, o] with sequence
    parallel.
    """

    def __init__(self, name: str, in_features: int, out_features: int, sharding: Sharding, *, init: Init, bias: bool):
        super().__init__()
        self.sharding = sharding
        start, stop = cut(in_features, sharding.tp)
        weight = sharded(f"{name}.weight", (out_features, in_features), {1: (start, stop)})
        self.weight = sharding.parameter((weight,), weight.local_shape, init, decay=True)
        self.bias = replicated_vector(f"{name}.bias", out_features, ZEROS, sharding) if bias else None

    def forward(self, x_sbi: Tensor) -> Tensor:
        tp = self.sharding.tp
        partial = linear(x_sbi, self.weight, None, LOCAL, self.sharding.products)
        y = scatter_sum(partial, tp) if self.sharding.sequence_parallel else reduce_from_tp(partial, tp)
        return y if self.bias is None else y + self.bias


def replicated_vector(name: str, size: int, init: Init, sharding: Sharding, *, partial: bool = False) -> nn.Parameter:
    """A vector that every tp rank holds: norm weight or row bias, never decayed.

    Its gradient is a partial sum where the rank sees only its slice of the sequence, or of the heads (`partial`).
    """
    piece = replicated(name, (size,), sharding.tp, partial=partial or sharding.sequence_parallel)
    return sharding.parameter((piece,), (size,), init, decay=False)


def norm_weight(name: str, size: int, sharding: Sharding, *, partial: bool = False) -> nn.Parameter:
    return replicated_vector(name, size, ONES, sharding, partial=partial)


class _Lookup(torch.autograd.Function):
    """Rows of `weight`, zero where `ids` is outside [0, rows); gradients are added to those rows alone."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, rows: int) -> Tensor:
        outside = (ids < 0) | (ids >= rows)
        local = ids.masked_fill(outside, 0)
        ctx.save_for_backward(local, outside, weight)
        ctx.main_grad = main_grad_of(weight)
        if rows == 0:
            return weight.new_zeros(*ids.shape, weight.shape[1])
        return F.embedding(local, weight).masked_fill_(outside[..., None], 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        local, outside, weight = ctx.saved_tensors
        # Zeros are added to row 0 where ids are outside: to leave them out, a GPU would have to wait for their number.
        ids = local.reshape(-1)
        rows = grad.masked_fill(outside[..., None], 0).reshape(-1, grad.shape[-1])
        if ctx.main_grad is not None:
            ctx.main_grad.view.index_add_(0, ids, rows.float())
            ctx.main_grad.added()
            return None, None, None
        return None, torch.zeros_like(weight).index_add_(0, ids, rows), None


def vocabulary_cut(vocab_size: int, tp: Axis) -> tuple[int, int, int]:
    """(first id, last id + 1, physical rows) of this rank. The vocabulary is padded to a multiple of 128, the same in
    every layout, and dealt evenly; rows beyond `vocab_size` are inert: never looked up, not in the softmax, not
    saved."""
    padded = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    start, stop = cut(padded, tp)
    return min(start, vocab_size), min(stop, vocab_size), stop - start


def vocabulary_parameter(
    name: str,
    vocab_size: int,
    hidden_size: int,
    sharding: Sharding,
    *,
    init: Init,
    tied: Axis | None = None,
) -> nn.Parameter:
    """[rows, h] of a vocabulary matrix. `tied`: the axis of pipeline stages that hold copies of it, whose gradients are
    summed; the first of them owns it."""
    start, stop, rows = vocabulary_cut(vocab_size, sharding.tp)
    piece = sharded(name, (vocab_size, hidden_size), {0: (start, stop)})
    if tied is not None:
        piece = copied(piece, tied, partial=True)
    return sharding.parameter((piece,), (rows, hidden_size), init, decay=True)


class VocabParallelEmbedding(nn.Module):
    """Token embedding cut by vocabulary rows: ids [s, b] to [s, b, h], or [s/tp, b, h] with sequence parallel."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        sharding: Sharding,
        *,
        init: Init,
        tied: Axis | None = None,
    ):
        super().__init__()
        self.sharding = sharding
        self.start, self.stop, _ = vocabulary_cut(vocab_size, sharding.tp)
        self.weight = vocabulary_parameter(f"{name}.weight", vocab_size, hidden_size, sharding, init=init, tied=tied)

    def forward(self, ids_sb: Tensor) -> Tensor:
        partial = _Lookup.apply(ids_sb - self.start, self.weight, self.stop - self.start)
        tp = self.sharding.tp
        return scatter_sum(partial, tp) if self.sharding.sequence_parallel else reduce_from_tp(partial, tp)
