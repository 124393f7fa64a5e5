"""Linear layers and embedding cut over the tensor-parallel axis (arXiv 1909.08053), with sequence parallelism (arXiv
2205.05198).

Shapes: s sequence, b micro-batch, i in, o out, h hidden. With sequence parallel, activations between a row-parallel and
the next column-parallel layer are [s/tp, b, h]. Weight gradients go straight into the fp32 main gradient when the
parameter has one, and the input gradient's communication runs while the weight gradient is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megapar import comm
from megapar.context import Axis
from megapar.params import (
    ONES,
    ZEROS,
    Init,
    ParamSpec,
    Piece,
    cut,
    main_grad_of,
    parameter,
    replicated,
    sharded,
)
from megapar.tensor_parallel.regions import reduce_from_tp, scatter_sum

VOCAB_MULTIPLE = 128


@dataclass(frozen=True)
class Sharding:
    """What every layer needs to know to build its slice."""

    tp: Axis
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def splits_sequence(self) -> bool:
        return self.sequence_parallel and self.tp.size > 1


class _Linear(torch.autograd.Function):
    """y = x W^T + b. `entry` says how x enters tensor-parallel work: `gather` an [s/tp, b, i] slice (sequence
    parallel), `copy` the same x on every rank, `none` when x is already this rank's slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, entry: str, tp: Axis) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.entry, ctx.tp = entry, tp
        ctx.main_grad = main_grad_of(weight)  # now: recompute hands the backward pass a copy without attributes
        return F.linear(comm.all_gather(x, tp) if entry == "gather" else x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gathering, reducing = comm.Pending(), comm.Pending()
        if ctx.entry == "gather" and needs_weight:
            x, gathering = comm.all_gather_async(x, ctx.tp)
        grad_x = grad_weight = None
        if needs_x:
            grad_x = grad_y @ weight
            gathering.wait()
            if ctx.entry == "copy":
                reducing = comm.all_reduce_async(grad_x, ctx.tp)
            elif ctx.entry == "gather":
                grad_x, reducing = comm.reduce_scatter_async(grad_x, ctx.tp)
        gathering.wait()
        grad_2d = grad_y.reshape(-1, grad_y.shape[-1])
        if needs_weight:
            x_2d = x.reshape(-1, x.shape[-1])
            if ctx.main_grad is None:
                grad_weight = grad_2d.t() @ x_2d
            else:
                ctx.main_grad.add_outer(grad_2d, x_2d)
        grad_bias = grad_2d.sum(0) if needs_bias else None
        reducing.wait()
        return grad_x, grad_weight, grad_bias, None, None


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, sharding: Sharding) -> Tensor:
    """[s or s/tp, b, i] to this rank's columns [s, b, o/tp]."""
    entry = "none" if sharding.tp.size == 1 else "gather" if sharding.sequence_parallel else "copy"
    return _Linear.apply(x, weight, bias, entry, sharding.tp)


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

    def piece(self, kind: Literal["weight", "bias"], shape: tuple[int, ...]) -> Piece:
        owned = self.own_start, self.own_stop
        return Piece(f"{self.name}.{kind}", shape, 0, self.start, self.stop, *owned, shared=self.shared)


class ColumnParallelLinear(nn.Module):
    """Several matrices with the same input, fused and each cut by its outputs: y_sbo = x_sbi W^T + b, o this rank's.

    The input is [s, b, i], the same on every rank, or with sequence parallel this rank's [s/tp, b, i]. The output
    concatenates this rank's columns of each matrix in order.
    """

    def __init__(self, in_features: int, columns: Sequence[Columns], sharding: Sharding, *, init: Init, bias: bool):
        super().__init__()
        self.sharding = sharding
        shared = any(c.shared for c in columns)
        rows = sum(c.stop - c.start for c in columns)
        place: dict[str, Any] = {"dtype": sharding.dtype, "device": sharding.device}
        weights = tuple(c.piece("weight", (c.size, in_features)) for c in columns)
        self.weight = parameter(ParamSpec(weights, init, decay=True, tp_sum=shared), (rows, in_features), **place)
        biases = tuple(c.piece("bias", (c.size,)) for c in columns)
        self.bias = parameter(ParamSpec(biases, ZEROS, decay=False, tp_sum=shared), (rows,), **place) if bias else None

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
        place: dict[str, Any] = {"dtype": sharding.dtype, "device": sharding.device}
        weight = sharded(f"{name}.weight", (out_features, in_features), 1, (start, stop))
        self.weight = parameter(ParamSpec((weight,), init, decay=True), (out_features, stop - start), **place)
        self.bias = replicated_vector(f"{name}.bias", out_features, ZEROS, sharding) if bias else None

    def forward(self, x_sbi: Tensor) -> Tensor:
        tp = self.sharding.tp
        partial = _Linear.apply(x_sbi, self.weight, None, "none", tp)
        y = scatter_sum(partial, tp) if self.sharding.sequence_parallel else reduce_from_tp(partial, tp)
        return y if self.bias is None else y + self.bias


def replicated_vector(name: str, size: int, init: Init, sharding: Sharding, *, partial: bool = False) -> nn.Parameter:
    """A vector that every tp rank holds: norm weight or row bias, never decayed.

    Its gradient is a partial sum where the rank sees only its slice of the sequence, or of the heads (`partial`).
    """
    sums = sharding.tp.size > 1 and (partial or sharding.sequence_parallel)
    spec = ParamSpec((replicated(name, (size,), sharding.tp),), init, decay=False, tp_sum=sums)
    return parameter(spec, (size,), dtype=sharding.dtype, device=sharding.device)


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
        ids, rows = local.reshape(-1), grad.masked_fill(outside[..., None], 0).reshape(-1, grad.shape[-1])
        if ctx.main_grad is not None:
            ctx.main_grad.add_rows(ids, rows)
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
    tie: bool = False,
    copy: bool = False,
) -> nn.Parameter:
    """[rows, h] of a vocabulary matrix. `tie`: one of two copies on different stages; `copy`: the one that owns
    nothing."""
    start, stop, rows = vocabulary_cut(vocab_size, sharding.tp)
    piece = sharded(name, (vocab_size, hidden_size), 0, (start, stop))
    if copy:
        piece = replace(piece, own_stop=start)
    spec = ParamSpec((piece,), init, decay=True, tie=tie)
    return parameter(spec, (rows, hidden_size), dtype=sharding.dtype, device=sharding.device)


class VocabParallelEmbedding(nn.Module):
    """Token embedding cut by vocabulary rows: ids [s, b] to [s, b, h], or [s/tp, b, h] with sequence parallel."""

    def __init__(
        self, name: str, vocab_size: int, hidden_size: int, sharding: Sharding, *, init: Init, tie: bool = False
    ):
        super().__init__()
        self.sharding = sharding
        self.start, self.stop, _ = vocabulary_cut(vocab_size, sharding.tp)
        self.weight = vocabulary_parameter(f"{name}.weight", vocab_size, hidden_size, sharding, init=init, tie=tie)

    def forward(self, ids_sb: Tensor) -> Tensor:
        partial = _Lookup.apply(ids_sb - self.start, self.weight, self.stop - self.start)
        tp = self.sharding.tp
        return scatter_sum(partial, tp) if self.sharding.sequence_parallel else reduce_from_tp(partial, tp)
