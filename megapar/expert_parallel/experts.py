"""The experts of a rank: MLPs of one size, gated or not, each for its own rows.

These are the weights of the experts of layer N. Sizes are h hidden and f the width of an expert. Experts are dealt over
ep by number, and each expert is cut over etp as a dense MLP is cut over tp:

    layers.N.mlp.experts.E.{gate,up}.weight     [f, h]      cut by output (gate is optional)
    layers.N.mlp.experts.E.down.weight          [h, f]      cut by input
    layers.N.mlp.experts.E.{gate,up}.bias       [f]         cut (optional)
    layers.N.mlp.experts.E.down.bias            [h]         on every etp rank (optional)

An adapter adds further ones to a MATRIX [out, in], with r its rank (`megapar.linear.low_rank`). They are cut as the
matrix:

    layers.N.mlp.experts.E.MATRIX.lora_a        [r, in]     that of down is cut by input
    layers.N.mlp.experts.E.MATRIX.lora_b        [out, r]    those of gate and up are cut by output

A rank holds all its gates and ups in one parameter and all its downs in another. Their numbers of experts need not be
equal on all ranks, and may be 0. Then both parameters have no element, and are in no checkpoint and no buffer.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from megapar_kernels.dispatch import main_grad_of
from megapar_kernels.grouped import RowGroups
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megapar.activations import recompute
from megapar.declare.params import ZEROS, Init, cut
from megapar.declare.sharding import Sharding
from megapar.expert_parallel.balance import Float32Products, halves
from megapar.expert_parallel.expert_parameters import ExpertParameters
from megapar.expert_parallel.row_counts import experts_of
from megapar.linear.convert import converted
from megapar.linear.converted_weight import ConvertedWeight
from megapar.linear.low_rank import FactorProducts, LoraRule
from megapar.linear.main_grad import DeferredWeightGradient
from megapar.linear.meanwhile import Meanwhile
from megapar.linear.products import MatrixProducts
from megapar.linear.torch_products import TORCH_PRODUCTS

ALL = slice(None)
"""All experts of a rank."""


class Experts(nn.Module):
    """w down_e(act(gate_e x) * up_e x) for the rows x of each expert e of this rank, and their weights w.

    The activation multiplies by the weights, because the result is linear in what it returns. So neither the results
    nor another tensor of rows is kept for the gradient of the weights.

    `name` is the name of the logical tensors up to the number of the expert, such as layers.3.mlp.experts. `activation`
    maps [rows, gate then up] and weights [rows, 1] to [rows, f/etp] (`megapar_kernels.activations`). `inner` are the
    matrices in front of the activation: gate and up, or up alone. With `bias` all matrices have biases. `token_share`
    is an expert's share of the tokens if the load is even, for `ParamSpec`. `adapted` are the matrices with an adapter
    by `lora`.
    """

    def __init__(
        self,
        name: str,
        num_experts: int,
        hidden_size: int,
        width: int,
        sharding: Sharding,
        *,
        activation: Callable[[Tensor, Tensor], Tensor],
        init: Init,
        output_init: Init,
        token_share: Fraction = Fraction(1),
        products: MatrixProducts = TORCH_PRODUCTS,
        products_of_down: MatrixProducts | None = None,
        bias: bool = False,
        inner: tuple[str, ...] = ("gate", "up"),
        lora: LoraRule | None = None,
        adapted: Sequence[str] = (),
    ):
        super().__init__()
        self.num_experts = num_experts
        self.expert_numbers = experts_of(num_experts, sharding.ep)
        self.hidden_size = hidden_size
        self.width = width
        self.sharding = sharding
        self.activation = activation
        self.products = products
        self.products_of_down = products_of_down or products
        # Where rows travel, weight gradients are computed while this rank waits for their gradients.
        self.meanwhile = sharding.expert_gradients if sharding.ep.size > 1 else None
        start, stop = cut(width, sharding.etp)
        self.local_width = stop - start
        parameters = ExpertParameters(name, num_experts, self.expert_numbers, width, sharding, token_share)
        quantized = products.in_blocks
        self.inner = inner
        self.gate_up = parameters.make(inner, (width, hidden_size), 0, init, quantized=quantized)
        self.down = parameters.make(("down",), (hidden_size, width), 1, output_init, quantized=quantized)
        self.gate_up_bias = self.down_bias = None
        if bias:
            self.gate_up_bias = parameters.make(inner, (width,), 0, ZEROS)
            self.down_bias = parameters.make(("down",), (hidden_size,), None, ZEROS)
        self.lora_a, self.lora_b = nn.ParameterDict(), nn.ParameterDict()
        self.scale = 0.0
        if lora is not None:
            self.scale = lora.scale
            for matrix in adapted:
                self._add_factors(parameters, matrix, lora.rank)

    def _add_factors(self, parameters: ExpertParameters, matrix: str, rank: int) -> None:
        """Add the adapters of this matrix. The factor that is not cut has a partial gradient."""
        is_down = matrix == "down"
        out_features, in_features = (self.hidden_size, self.width) if is_down else (self.width, self.hidden_size)
        uniform = Init("uniform", 1 / math.sqrt(in_features))
        a_cut, b_cut = (1, None) if is_down else (None, 0)
        self.lora_a[matrix] = parameters.make((matrix,), (rank, in_features), a_cut, uniform, "lora_a")
        self.lora_b[matrix] = parameters.make((matrix,), (out_features, rank), b_cut, ZEROS, "lora_b")

    def forward(self, rows: Tensor, weights: Tensor, groups: RowGroups, experts: slice = ALL) -> Tensor:
        """The results [rows, h] of some of this rank's `experts` for `rows` [rows, h], sorted by expert.

        `weights` [rows, 1] multiply the results. `groups` has the rows of each expert. With etp above 1 the results are
        this rank's parts of the sum.
        """
        width = self.local_width
        gate_up = self._product(rows, self.gate_up, len(self.inner) * width, groups, experts)
        for number, matrix in enumerate(self.inner):
            columns = slice(number * width, (number + 1) * width)
            gate_up = self._adapted(matrix, gate_up, rows, columns, groups, experts)
        gate_up = self._biased(gate_up, self.gate_up_bias, None, self.gate_up, groups, experts, adds=True)
        inner = converted(recompute.remade(self.activation, gate_up, weights), self.products_of_down)
        y = self._product(inner, self.down, self.hidden_size, groups, experts, self.products_of_down)
        y = self._adapted("down", y, inner, slice(0, self.hidden_size), groups, experts)
        # The ranks of etp have parts of a sum, to which the bias is added once.
        return self._biased(y, self.down_bias, weights, self.down, groups, experts, adds=self.sharding.etp.first)

    def _product(
        self,
        rows: Tensor,
        weight: Tensor,
        out_features: int,
        groups: RowGroups,
        experts: slice,
        products: MatrixProducts | None = None,
    ) -> Tensor:
        """The rows of each expert, multiplied by its matrix in `weight`."""
        products = products or self.products
        y: Tensor = _GroupedLinear.apply(rows, weight, out_features, groups, experts, products, self.meanwhile)
        return y

    def _adapted(
        self, matrix: str, y: Tensor, rows: Tensor, columns: slice, groups: RowGroups, experts: slice
    ) -> Tensor:
        """y with s B A `rows` added to the columns of `matrix`, in place, if it has adapters."""
        if matrix not in self.lora_a:
            return y
        b = self.lora_b[matrix]
        plain = self.products.plain
        of_a = self.products if plain is self.products else FactorProducts(self.products)
        z = self._product(rows, self.lora_a[matrix], b.shape[1], groups, experts, of_a)
        added = self._product(z, b, columns.stop - columns.start, groups, experts, plain)
        return _AddToColumns.apply(y, added, columns, self.scale)

    def _biased(
        self,
        y: Tensor,
        bias: Tensor | None,
        weights: Tensor | None,
        matrices: Tensor,
        groups: RowGroups,
        experts: slice,
        *,
        adds: bool,
    ) -> Tensor:
        """y with the bias of each expert added to its rows, in place, if there are biases and this rank `adds` them.

        The bias of a row is multiplied by its weight if there are `weights`. y is a product with `matrices`.
        """
        if bias is None or not groups.number:
            return y
        number = len(self.expert_numbers)
        of_experts = bias.view(number, -1)[experts].flatten()
        at_once = self.products.in_one_launch(y, (groups.number, y.shape[1], matrices.shape[1]))
        return _GroupedBias.apply(y, of_experts, weights, groups, adds, at_once)


class _AddToColumns(torch.autograd.Function):
    """y [rows, out] with s x [rows, columns] added to some columns, in place."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, columns: slice, scale: float) -> Tensor:
        ctx.mark_dirty(y)
        ctx.columns = columns
        ctx.scale = scale
        y[:, columns].add_(x, alpha=scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return grad, grad[:, ctx.columns] * ctx.scale, None, None


class _GroupedBias(torch.autograd.Function):
    """y = x + w b_e, [rows, out], for rows [rows, out] sorted by expert. The bias is [experts * out].

    It is added in place: the product that made the rows does not need them. Without weights w [rows, 1] all are 1. The
    gradient of an expert's bias is summed over its rows in fp32. An expert without rows has the gradient 0. So have all
    if this rank does not add (`adds`).

    `at_once` computes by products with a matrix that has each row's weight in the column of its expert. They take a few
    launches for any number of experts, and the host need not know the numbers of rows.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, bias: Tensor, weights: Tensor | None, groups: RowGroups, adds: bool, at_once: bool
    ) -> Tensor:
        ctx.groups = groups
        ctx.dtype = bias.dtype
        ctx.adds = adds
        ctx.at_once = at_once
        ctx.mark_dirty(rows)
        if weights is not None:
            ctx.save_for_backward(bias, weights)
        if not adds:
            return rows
        biases = bias.view(groups.number, -1)
        if at_once:
            weights_of_experts = _weights_of_experts(rows, weights, groups)
            rows.addmm_(weights_of_experts, biases.repeat(weights_of_experts.shape[1] // groups.number, 1))
            return rows
        factors = [1.0] * len(biases) if weights is None else weights.split(groups.sizes)
        for part, expert_bias, factor in zip(rows.split(groups.sizes), biases, factors, strict=True):
            part += factor * expert_bias
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        groups = ctx.groups
        if not ctx.adds:
            zeros = grad.new_zeros(groups.number * grad.shape[1], dtype=ctx.dtype)
            return grad, zeros, None, None, None, None
        saved = ctx.saved_tensors  # read once: under activation checkpointing a second time is an error
        bias: Any
        bias, weights = saved or (None, None)
        grad_weights = None
        if ctx.at_once:
            sums = _sums_of_experts(grad, weights, groups)
            if weights is not None:
                of_all = Float32Products().forward(grad, bias.view(groups.number, -1), None)
                grad_weights = of_all.gather(1, _expert_of_row(len(grad), groups)).to(weights.dtype)
            return grad, sums.flatten().to(ctx.dtype), grad_weights, None, None, None
        wide = torch.promote_types(ctx.dtype, torch.float32)
        parts = grad.split(groups.sizes)
        if weights is None:
            sums = torch.cat([part.sum(0, dtype=wide) for part in parts])
        else:
            biases = bias.view(len(parts), -1).to(wide)
            factors = weights.split(groups.sizes)
            sums = torch.cat([(part * weight).sum(0) for part, weight in zip(parts, factors, strict=True)])
            of_weights = [(part * expert_bias).sum(1) for part, expert_bias in zip(parts, biases, strict=True)]
            grad_weights = torch.cat(of_weights).view_as(weights).to(weights.dtype)
        return grad, sums.to(ctx.dtype), grad_weights, None, None, None


def _expert_of_row(rows: int, groups: RowGroups) -> Tensor:
    """int64 [rows, 1]: the expert of each row, from their ends on the device."""
    row = torch.arange(rows, dtype=groups.ends.dtype, device=groups.ends.device)
    return torch.searchsorted(groups.ends, row, right=True)[:, None]


def _weights_of_experts(rows: Tensor, weights: Tensor | None, groups: RowGroups) -> Tensor:
    """Zeros but for each row's weight in the column of its expert: [rows, experts] in the dtype of the rows.

    Weights in fp32 are the sum of two bf16 halves, which have columns of their own: [rows, 2 experts].
    """
    if weights is None:
        parts: Sequence[Tensor] = [rows.new_ones(len(rows), 1)]
    else:
        parts = halves(weights) if rows.dtype == torch.bfloat16 else [weights]
    found = rows.new_zeros(len(rows), len(parts) * groups.number)
    expert = _expert_of_row(len(rows), groups)
    for number, part in enumerate(parts):
        found.scatter_(1, expert + number * groups.number, part)
    return found


def _sums_of_experts(rows: Tensor, weights: Tensor | None, groups: RowGroups) -> Tensor:
    """The sum of each expert's rows times their weights, in fp32: [experts, out]."""
    of_experts = _weights_of_experts(rows, weights, groups)
    sums = rows.new_empty(of_experts.shape[1], rows.shape[1], dtype=torch.float32)
    TORCH_PRODUCTS.add_weight_gradient(sums, of_experts, rows, overwrite=True)
    return sums.view(-1, groups.number, rows.shape[1]).sum(0)


class _GroupedLinear(torch.autograd.Function):
    """y = x W_e^T, [rows, out], for rows [rows, in] sorted by expert. The weight is [experts * out, in].

    The rows are those of the slice `experts` of them. The weight gradient goes straight to the main gradient if the
    weight has one. An expert without rows adds nothing to it, and its gradient is zero if it has none from earlier
    micro-batches.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        out_features: int,
        groups: RowGroups,
        experts: slice,
        products: MatrixProducts,
        meanwhile: Meanwhile | None,
    ) -> Tensor:
        ctx.meanwhile = meanwhile
        ctx.shape = (weight.shape[0] // out_features, out_features, weight.shape[1])
        # A rank without experts has no product to compute, but the shapes of the results to say.
        ctx.products = products = products if groups.number else TORCH_PRODUCTS
        rows = products.as_input(rows)
        ctx.save_for_backward(rows, weight)
        ctx.groups = groups
        ctx.experts = experts
        # Read here, not in backward: under activation checkpointing the tensor that backward unpacks has no attributes.
        ctx.converted = ConvertedWeight.of(weight)
        ctx.main_grad = main_grad_of(weight)
        return products.grouped_forward(rows, _converted(ctx, weight), ctx.groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight = ctx.needs_input_grad[:2]
        # The gradient of a sum is expanded, which products of groups may not accept.
        grad = ctx.products.as_gradient(grad).contiguous()
        grad_rows = grad_weight = None
        if needs_rows:
            grad_rows = ctx.products.grouped_input_gradient(grad, _converted(ctx, weight), ctx.groups)
        if needs_weight:
            gradients = _WeightGradients(ctx.products, ctx.shape, ctx.groups, ctx.experts)
            if ctx.main_grad is None:
                total = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
                gradients.add(total, grad, rows, True)
                grad_weight = total.to(weight.dtype)
            else:
                # The rows have been dispatched already, so W communicates nothing.
                add, in_parts = gradients.add, gradients.add_in_parts
                deferred = DeferredWeightGradient(ctx.main_grad, grad, rows, add, add_in_parts=in_parts)
                deferred.add_or_defer(ctx.meanwhile)
        return grad_rows, grad_weight, None, None, None, None, None


def _converted(ctx: Any, weight: Tensor) -> Any:
    """The matrices [experts, out, in] of the chunk's experts, as products get them."""
    return ctx.converted.get(weight.view(ctx.shape), ctx.products, ctx.experts)


@dataclass(frozen=True)
class _WeightGradients:
    """The weight gradients of some `experts` of a parameter [experts, out, in], of this `shape` with all of them."""

    products: MatrixProducts
    shape: tuple[int, int, int]
    groups: RowGroups
    experts: slice

    def add(self, total: Tensor, grad: Tensor, rows: Tensor, overwrite: bool) -> None:
        """Add those of `rows` and `grad`, the gradients of their products, to `total`."""
        totals, overwrite = self._totals(total, overwrite)
        self.products.add_grouped_weight_gradient(totals, grad, rows, self.groups, overwrite=overwrite)

    def add_in_parts(self, total: Tensor, grad: Tensor, rows: Tensor, overwrite: bool) -> Iterator[None]:
        """Do as `add`, one expert after the other, and yield in between."""
        totals, overwrite = self._totals(total, overwrite)
        sizes = self.groups.sizes
        parts = zip(grad.split(sizes), rows.split(sizes), sizes, strict=True)
        for expert, (grad_2d, rows_2d, size) in enumerate(parts):
            if expert:
                yield
            of_one = totals[expert : expert + 1], grad_2d, rows_2d, RowGroups.of([size])
            self.products.add_grouped_weight_gradient(*of_one, overwrite=overwrite)

    def _totals(self, total: Tensor, overwrite: bool) -> tuple[Tensor, bool]:
        """The main gradients of the experts, and whether their values count as zero."""
        totals = total.view(self.shape)
        if overwrite and self.groups.number < len(totals):
            # The other experts' gradients are added later, to zeros.
            totals.zero_()
            overwrite = False
        return totals[self.experts], overwrite
