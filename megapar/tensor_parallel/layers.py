"""Linear layers and the embedding, cut over the tensor-parallel axis.

Sources: arXiv 1909.08053, and arXiv 2205.05198 for sequence parallelism. Shapes: s sequence, b micro-batch, i in, o
out, h hidden. With sequence parallelism, activations between a row-parallel layer and the next column-parallel layer
are [s/tp, b, h]. Weight gradients are added straight to the fp32 main gradient if the parameter has one. The
communication of an input gradient runs while the weight gradient is computed.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megapar_kernels.dispatch import apply_function, main_grad_of
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megapar.comm.axis import Axis
from megapar.declare.params import VOCAB_MULTIPLE, ZEROS, Init, cut, held_by_all, make_piece, shared_piece
from megapar.declare.random import Tokens
from megapar.declare.sharding import Sharding
from megapar.linear.convert import converted
from megapar.linear.function import LOCAL, LinearFunction
from megapar.linear.low_rank import AdaptedLinear
from megapar.linear.main_grad import DeferredWeightGradient
from megapar.linear.products import MatrixProducts
from megapar.linear.torch_products import TORCH_PRODUCTS
from megapar.tensor_parallel.chunks import ChunkedGather, gather_adapted, gather_linear, linear_reduce, output_region
from megapar.tensor_parallel.columns import Columns
from megapar.tensor_parallel.lora import Lora, reads_codes
from megapar.tensor_parallel.regions import input_region, reduce_from_tp, scatter_sum


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sharding: Sharding,
    products: MatrixProducts = TORCH_PRODUCTS,
    lora: Lora | None = None,
    tokens: Tokens | None = None,
) -> Tensor:
    """This rank's columns of x W^T + b: [s, b, o/tp], from x [s, b, i], or [s/tp, b, i] with sequence parallelism.

    The outputs of the adapter `lora` are added to them. Its dropout needs the tokens [s, b].
    """
    x = converted(x, products)
    chunked = ChunkedGather(sharding.tp, sharding.overlap_chunks)
    in_chunks = sharding.splits_sequence and sharding.overlap_chunks > 1
    region = input_region(sharding.tp, sharding.sequence_parallel)
    if lora is None:
        if in_chunks:
            return gather_linear(x, weight, bias, chunked, products)
        y: Tensor = apply_function(LinearFunction, x, weight, bias, region, products)
        return y
    rule = lora.for_pass(tokens)
    inside = lora.bias_inside(bias)
    if in_chunks:
        y = gather_adapted(x, weight, inside, lora.a, lora.b, chunked, products, rule)
    else:
        y = AdaptedLinear.apply(x, weight, inside, lora.a, lora.b, region, products, rule)
    return lora.scale_output(y, weight, bias)


def local_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    products: MatrixProducts = TORCH_PRODUCTS,
    lora: Lora | None = None,
    tokens: Tokens | None = None,
) -> Tensor:
    """x W^T + b [..., o], and the output of the adapter `lora`, from x [..., i]. Nothing is communicated.

    The adapter's dropout needs the tokens of x.
    """
    x = converted(x, products)
    if lora is None:
        product: Tensor = apply_function(LinearFunction, x, weight, bias, LOCAL, products)
        return product
    rule = lora.for_pass(tokens)
    y = AdaptedLinear.apply(x, weight, lora.bias_inside(bias), lora.a, lora.b, LOCAL, products, rule)
    return lora.scale_output(y, weight, bias)


class ColumnParallelLinear(nn.Module):
    """Several matrices with the same input in one product, each cut by its outputs: y_sbo = x_sbi W^T + b.

    The input is [s, b, i], the same on every rank, or with sequence parallelism this rank's [s/tp, b, i]. The output
    [s, b, o] concatenates this rank's columns of each matrix in order. `lora` are the adapters of some of them, and the
    tokens [s, b] decide what their dropout drops.
    """

    def __init__(
        self,
        in_features: int,
        columns: Sequence[Columns],
        sharding: Sharding,
        *,
        init: Init,
        bias: bool,
        products: MatrixProducts = TORCH_PRODUCTS,
        lora: Lora | None = None,
    ):
        super().__init__()
        self.sharding = sharding
        self.products = products
        self.lora = lora
        tp = sharding.tp
        shape = (sum(c.stop - c.start for c in columns), in_features)
        weights = tuple(c.piece("weight", (c.size, in_features), tp) for c in columns)
        codes = reads_codes(products, lora)
        self.weight = sharding.parameter(weights, shape, init, decay=True, update="matrix", quantized=codes)
        self.bias = None
        if bias:
            biases = tuple(c.piece("bias", (c.size,), tp) for c in columns)
            self.bias = sharding.parameter(biases, shape[:1], ZEROS, decay=False)

    def forward(self, x_sbi: Tensor, tokens: Tokens | None = None) -> Tensor:
        return column_linear(x_sbi, self.weight, self.bias, self.sharding, self.products, self.lora, tokens)

    def product(self, x_sbi: Tensor, tokens: Tokens | None = None) -> Tensor:
        """The output without the bias, for callers adding the bias in a kernel of their own."""
        return column_linear(x_sbi, self.weight, None, self.sharding, self.products, self.lora, tokens)


class RowParallelLinear(nn.Module):
    """A matrix cut by its inputs: y_sbo = (sum over tp of x_sbi W^T) + b.

    The input is this rank's [s, b, i/tp]. The output is [s, b, o] on every rank, or this rank's [s/tp, b, o] with
    sequence parallelism. `lora` is its adapter, and the tokens [s, b] decide what its dropout drops.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        sharding: Sharding,
        *,
        init: Init,
        bias: bool,
        products: MatrixProducts = TORCH_PRODUCTS,
        lora: Lora | None = None,
    ):
        super().__init__()
        self.sharding = sharding
        self.products = products
        self.lora = lora
        start, stop = cut(in_features, sharding.tp)
        weight = make_piece(f"{name}.weight", (out_features, in_features), {1: (start, stop)})
        codes = reads_codes(products, lora)
        shape = weight.local_shape
        self.weight = sharding.parameter((weight,), shape, init, decay=True, update="matrix", quantized=codes)
        self.bias = shared_vector(f"{name}.bias", out_features, ZEROS, sharding) if bias else None

    def forward(self, x_sbi: Tensor, tokens: Tokens | None = None) -> Tensor:
        y = self._product_and_sum(x_sbi, tokens)
        # The bias is added after the sum: before it, it would be added tp times.
        if self.bias is not None and (self.lora is None or self.lora.magnitude is None):
            y = y + self.bias
        return y if self.lora is None else self.lora.scale_output(y, self.weight, self.bias)

    def _product_and_sum(self, x_sbi: Tensor, tokens: Tokens | None) -> Tensor:
        # The input is this rank's slice already, so nothing is communicated before the product.
        x_sbi = converted(x_sbi, self.products)
        sharding = self.sharding
        lora = self.lora
        if sharding.tp.size > 1 and sharding.overlap_chunks > 1:
            region = output_region(sharding.tp, sharding.sequence_parallel, sharding.overlap_chunks)
            if lora is None:
                return linear_reduce(x_sbi, self.weight, region, self.products)
            rule = lora.for_pass(tokens)
            z = LinearFunction.apply(x_sbi, lora.a, None, LOCAL, rule.products_of_a(self.products))
            return linear_reduce(x_sbi, self.weight, region, self.products, z, lora.b, rule)
        if lora is None:
            partial = apply_function(LinearFunction, x_sbi, self.weight, None, LOCAL, self.products)
        else:
            rule = lora.for_pass(tokens)
            partial = AdaptedLinear.apply(x_sbi, self.weight, None, lora.a, lora.b, LOCAL, self.products, rule)
        if sharding.sequence_parallel:
            return scatter_sum(partial, sharding.tp, self.products)
        return reduce_from_tp(partial, sharding.tp)


def shared_vector(name: str, size: int, init: Init, sharding: Sharding, *, partial: bool = False) -> nn.Parameter:
    """A vector on every tp rank, such as a norm weight or a row bias. It is never decayed.

    With `partial` this rank sees only its slice of the heads, so its gradient is a part of the sum. The same holds
    under sequence parallelism: this rank then sees only its slice of the sequence.
    """
    piece = shared_piece(name, (size,), sharding.tp, partial=partial or sharding.sequence_parallel)
    return sharding.parameter((piece,), (size,), init, decay=False)


class _Lookup(torch.autograd.Function):
    """Look up rows of `weight`, zero for `ids` outside [0, rows). Gradients are added to these rows alone."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.rows = rows
        ctx.main_grad = main_grad_of(weight)  # in forward, see MainGrad
        if rows == 0:  # a rank that holds padding alone has no row 0 to look up
            return weight.new_zeros(*ids.shape, weight.shape[1])
        local, outside = _local_ids(ids, rows)
        return F.embedding(local, weight).masked_fill_(outside[..., None], 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        ids, weight = ctx.saved_tensors
        add = partial(_add_rows, ctx.rows)
        if ctx.main_grad is None:
            total = torch.empty_like(weight)
            add(total, grad, ids, True)
            return None, total, None
        DeferredWeightGradient(ctx.main_grad, grad, ids, add).add_or_defer()
        return None, None, None


def _local_ids(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """`ids` with others in place of those outside [0, rows), and where these are."""
    # The remainder spreads them over all rows: a sorted sum takes as long as the longest run of one row.
    return ids.remainder(max(rows, 1)), (ids < 0) | (ids >= rows)


def _add_rows(rows_held: int, total: Tensor, grad: Tensor, ids: Tensor, overwrite: bool) -> None:
    """Add each row of `grad` [..., h] to the row `ids` [...] of `total`. Rows outside [0, rows_held) are left out."""
    if overwrite:
        total.zero_()
    local, outside = _local_ids(ids, rows_held)
    # Where ids are outside, zeros are added. To leave those ids out, the CPU would have to wait until the GPU has
    # counted them.
    rows = grad.masked_fill(outside[..., None], 0).reshape(-1, grad.shape[-1]).to(total.dtype)
    if total.is_cuda:
        # It sorts the rows, so a sum has the same order each time. index_add_ adds by atomics, in any order.
        total.index_put_((local.reshape(-1),), rows, accumulate=True)
    else:
        total.index_add_(0, local.reshape(-1), rows)


def vocabulary_cut(vocab_size: int, tp: Axis) -> tuple[int, int, int]:
    """(first id, last id + 1, physical rows) of this rank.

    The vocabulary is padded to a multiple of 128 in every layout, and dealt evenly over tp. Rows beyond `vocab_size`
    are padding: they are not looked up, not part of the softmax and not saved.
    """
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
    tied_over: Axis | None = None,
) -> nn.Parameter:
    """This rank's [rows, h] of a vocabulary matrix.

    `tied_over` is the axis of the pipeline stages with copies of the matrix. Their gradients are summed. The first
    stage owns the matrix.
    """
    start, stop, rows = vocabulary_cut(vocab_size, sharding.tp)
    piece = make_piece(name, (vocab_size, hidden_size), {0: (start, stop)}, grows=True)
    if tied_over is not None:
        piece = held_by_all(piece, tied_over, partial=True)
    return sharding.parameter((piece,), (rows, hidden_size), init, decay=True)


def vocabulary_bias(name: str, vocab_size: int, sharding: Sharding) -> nn.Parameter:
    """This rank's [rows] of a bias of logits. It begins at 0 and is never decayed."""
    start, stop, rows = vocabulary_cut(vocab_size, sharding.tp)
    piece = make_piece(name, (vocab_size,), {0: (start, stop)}, grows=True)
    return sharding.parameter((piece,), (rows,), ZEROS, decay=False)


class VocabParallelEmbedding(nn.Module):
    """Token embedding cut by vocabulary rows: ids [s, b] to [s, b, h].

    With sequence parallelism the output is this rank's [s/tp, b, h]. With `weight` it uses the matrix of another
    embedding of this rank.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        sharding: Sharding,
        *,
        init: Init,
        tied_over: Axis | None = None,
        weight: nn.Parameter | None = None,
    ):
        super().__init__()
        self.sharding = sharding
        self.start, self.stop, _ = vocabulary_cut(vocab_size, sharding.tp)
        if weight is None:
            weight = vocabulary_parameter(
                f"{name}.weight", vocab_size, hidden_size, sharding, init=init, tied_over=tied_over
            )
        self.weight = weight

    def forward(self, ids_sb: Tensor) -> Tensor:
        partial = _Lookup.apply(ids_sb - self.start, self.weight, self.stop - self.start)
        tp = self.sharding.tp
        # Each id is in the rows of one rank, and the others add zeros.
        if self.sharding.sequence_parallel:
            return scatter_sum(partial, tp)
        return reduce_from_tp(partial, tp)
