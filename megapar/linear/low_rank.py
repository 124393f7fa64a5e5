"""Low-rank products beside the weight of a linear layer (LoRA, arXiv 2106.09685).

A layer's output may have the outputs of several matrices beside each other, such as those of q, k and v. Each of them
with an adapter has a pair of factors of its own: y_j += s B_j A_j x, with A_j [r, in] and B_j [columns, r]. The A_j lie
one below the other in one parameter [n r, in], so all inner vectors z_j = A_j x are one product. The B_j lie one below
the other too, [columns of all, r].

No rank sends anything for it. Where tp cuts a weight by its outputs, A is whole and B is cut alike, and A reads the
input that has entered the layer for the weight. Where tp cuts it by its inputs, A is cut alike and B is whole, and
s B A x is added before the one sum over tp. The gradient of a whole factor is then a part of the sum over tp
(`Piece.partial`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megapar_kernels.dispatch import Implementation, MainGrad, main_grad_of
from megapar_kernels.dropout import dropout
from megapar_kernels.grouped import RowGroups
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.linear.function import InputRegion, KeptWeight, keep_for_backward, linear_backward
from megapar.linear.main_grad import DeferredWeightGradient
from megapar.linear.products import MatrixProducts
from megapar.linear.torch_products import TORCH_PRODUCTS

NORM_BLOCK = 1 << 24
"""Elements of a matrix in fp32 that are in memory while norms of rows are computed; 64 MiB."""


@dataclass(frozen=True)
class LoraRule:
    """The rank r of adapters, and s in y = W x + s B A x.

    In training an input of A is dropped with probability `dropout`; `impl` says what computes that. With `dora` the
    rows of W + s B A get norms of their own (`ScaledColumns`).
    """

    rank: int
    scale: float
    dropout: float = 0.0
    impl: Implementation = "torch"
    dora: bool = False


@dataclass(frozen=True)
class InputDropout:
    """Drops inputs [..., in] of A with probability `p`, and divides the others by 1 - p.

    `keys` are those of the rows of inputs (`megapar_kernels.dropout.keep_mask`). Backward makes the mask again.
    """

    keys: Tensor
    p: float
    impl: Implementation

    def apply(self, x: Tensor) -> Tensor:
        return dropout(x, self.keys.view(x.shape[:-1]), self.p, self.impl)


@dataclass(frozen=True, eq=False)
class FactorProducts(MatrixProducts):
    """The products of A, of inputs that the products of the `layer` have converted, and of which some are dropped.

    A itself is in the dtype of activations: `layer.plain` computes its products of the restored inputs.
    """

    layer: MatrixProducts
    dropped: InputDropout | None = None

    @property
    def converts(self) -> bool:
        return self.layer.converts

    @property
    def plain(self) -> MatrixProducts:
        return self.layer.plain

    def _input(self, x: Tensor) -> Tensor:
        x = self.layer.restore(x)
        return x if self.dropped is None else self.dropped.apply(x)

    def convert_input(self, x: Tensor) -> Tensor:
        return self.layer.convert_input(x)

    def convert_weight(self, weight: Tensor) -> Any:
        return self.plain.convert_weight(weight)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.plain.forward(self._input(x), weight, bias)

    def input_gradient(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        grad_x = self.plain.input_gradient(grad_y, weight)
        return grad_x if self.dropped is None else self.dropped.apply(grad_x)

    def weight_gradient(self, grad_y: Tensor, x: Tensor) -> Tensor:
        return self.plain.weight_gradient(grad_y, self._input(x))

    def add_weight_gradient(self, total: Tensor, grad_y: Tensor, x: Tensor, *, overwrite: bool = False) -> None:
        self.plain.add_weight_gradient(total, grad_y, self._input(x), overwrite=overwrite)

    def grouped_forward(self, x_2d: Tensor, weights_goi: Any, groups: RowGroups) -> Tensor:
        return self.plain.grouped_forward(self._input(x_2d), weights_goi, groups)

    def grouped_input_gradient(self, grad_2d: Tensor, weights_goi: Any, groups: RowGroups) -> Tensor:
        return self.plain.grouped_input_gradient(grad_2d, weights_goi, groups)

    def add_grouped_weight_gradient(
        self, totals_goi: Tensor, grad_2d: Tensor, x_2d: Tensor, groups: RowGroups, *, overwrite: bool = False
    ) -> None:
        x_2d = self._input(x_2d)
        self.plain.add_grouped_weight_gradient(totals_goi, grad_2d, x_2d, groups, overwrite=overwrite)

    def in_one_launch(self, x_2d: Tensor, shape_goi: Sequence[int]) -> bool:
        return self.plain.in_one_launch(x_2d, shape_goi)


@dataclass(frozen=True)
class LowRank:
    """Adds s B_j z_j to some columns of a layer's output: to `columns[j]`. `scale` is s.

    The z_j of a token lie one after the other: z is [..., n r]. The products are in the dtype of activations. `dropped`
    are the inputs of A that are dropped in this pass, if any are. All A_j read the same ones.
    """

    scale: float
    columns: tuple[slice, ...]
    dropped: InputDropout | None = None

    def products_of_a(self, products: MatrixProducts) -> MatrixProducts:
        """The products of A, in a layer with `products`."""
        if self.dropped is None and products.plain is products:
            return products
        return FactorProducts(products, self.dropped)

    def dropped_chunk(self, x: Tensor, slices: int, tokens: slice) -> Tensor:
        """The inputs of A, from those x [slices, tokens, in] of the layer. They are `tokens` of each slice."""
        if self.dropped is None:
            return x
        keys = self.dropped.keys.reshape(slices, -1)[:, tokens].contiguous()
        return replace(self.dropped, keys=keys).apply(x)

    def add(self, y: Tensor, z: Tensor, b: Tensor) -> None:
        """Add s B_j z_j to contiguous y [..., out], in place."""
        y_2d = y.view(-1, y.shape[-1])
        for columns, z_j, b_j in zip(self.columns, self._inner(z), self._split(b), strict=True):
            y_2d[:, columns].addmm_(z_j, b_j.t(), alpha=self.scale)

    def inner_gradient(self, grad_y: Tensor, b: Tensor) -> Tensor:
        """The gradient of z, from grad_y [..., out]."""
        parts = [grad_y[..., columns] @ b_j for columns, b_j in zip(self.columns, self._split(b), strict=True)]
        return torch.cat(parts, dim=-1).mul_(self.scale)

    def b_gradient(self, main_grad: MainGrad | None, grad_y: Tensor, z: Tensor, b: Tensor) -> Tensor | None:
        """The gradient of the B_j, or None if it goes to `main_grad`, now or in W."""
        if main_grad is None:
            total = torch.empty_like(b)
            self._add_b_gradient(total, grad_y, z, True)
            return total
        DeferredWeightGradient(main_grad, grad_y, z, self._add_b_gradient).add_or_defer()
        return None

    def _add_b_gradient(self, total: Tensor, grad_y: Tensor, z: Tensor, overwrite: bool) -> None:
        grad_2d = grad_y.reshape(-1, grad_y.shape[-1])
        scaled = z * self.scale
        for columns, z_j, total_j in zip(self.columns, self._inner(scaled), self._split(total), strict=True):
            TORCH_PRODUCTS.add_weight_gradient(total_j, grad_2d[:, columns], z_j, overwrite=overwrite)

    @torch.no_grad()
    def squared_norms(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the squared norms of the rows of all W_j, and of all W_j + s B_j A_j: [2, rows], in fp32."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        of_weight, of_sum = [], []
        step = max(1, NORM_BLOCK // weight.shape[1])
        for columns, a_j, b_j in zip(self.columns, a.to(wide).chunk(len(self.columns)), self._split(b), strict=True):
            for rows, b_rows in zip(weight[columns].split(step), b_j.split(step), strict=True):
                block = rows.to(wide, copy=True)
                of_weight.append(torch.linalg.vector_norm(block, dim=1))
                block.addmm_(b_rows.to(wide), a_j, alpha=self.scale)
                of_sum.append(torch.linalg.vector_norm(block, dim=1))
        return torch.stack([torch.cat(of_weight), torch.cat(of_sum)]).square_()

    def _inner(self, z: Tensor) -> tuple[Tensor, ...]:
        return z.reshape(-1, z.shape[-1]).chunk(len(self.columns), dim=1)

    def _split(self, b: Tensor) -> tuple[Tensor, ...]:
        return b.split([columns.stop - columns.start for columns in self.columns])


def keep_adapted(
    ctx: Any,
    x: Tensor,
    weights: Sequence[Tensor],
    region: object,
    products: MatrixProducts,
    z: Tensor,
    b: Tensor,
    rule: LowRank,
) -> None:
    """`keep_for_backward` of a layer with an adapter. The saved tensors are x, the weights, z and b."""
    keep_for_backward(ctx, x, weights, region, products, z, b)
    # A is the last of the weights, if it is one of them.
    ctx.kept[1:] = [kept._replace(products=rule.products_of_a(products)) for kept in ctx.kept[1:]]
    ctx.rule = rule
    ctx.main_grad_b = main_grad_of(b)


class AdaptedLinear(torch.autograd.Function):
    """y = region.enter(x) W^T + b + s B z, with z = region.enter(x) A^T: a and b, A and B, are as in `LowRank`.

    x enters once for both products, and its gradient leaves once. Otherwise as
    `megapar.linear.function.LinearFunction`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        region: InputRegion,
        products: MatrixProducts,
        rule: LowRank,
    ) -> Tensor:
        products_of_a = rule.products_of_a(products)
        x = products.as_input(x)
        entered = region.enter(x)
        y = products.forward(entered, KeptWeight.of(weight, products).get(weight), bias)
        z = products_of_a.forward(entered, KeptWeight.of(a, products_of_a).get(a), None)
        rule.add(y, z, b)
        keep_adapted(ctx, x, [weight, a], region, products, z, b, rule)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, z, b = ctx.saved_tensors
        _, needs_weight, needs_bias, needs_a, needs_b = ctx.needs_input_grad[:5]
        # Converted, B reads what ranks could have sent: the same numbers in every layout.
        products = ctx.kept[0].products
        converted = products.as_gradient(grad_y)
        values = products.numbers(converted, like=grad_y)
        grad_z = ctx.rule.inner_gradient(values, b)
        grads = [products.carry(converted, like=grad_y), grad_z]
        grad_x, grad_weights, grad_bias = linear_backward(
            ctx, x, [weight, a], grads, [needs_weight, needs_a], needs_bias
        )
        grad_b = ctx.rule.b_gradient(ctx.main_grad_b, values, z, b) if needs_b else None
        return grad_x, grad_weights[0], grad_bias, grad_weights[1], grad_b, None, None, None


class ScaledColumns(torch.autograd.Function):
    """The outputs of a DoRA (arXiv 2402.09353): y_i (n_i + d_i) / v_i, from y = W x + s B A x [..., out].

    n_i and v_i are the norms of row i of W and of W + s B A, `norms` [2, rows], and d [rows] is trained. The paper's
    magnitude m is n + d. Its d begins at 0, whatever W is, and in 16 bits an update of d is not lost in m.
    The norms are constants in backward (section 4.3). `columns` are those of y with an adapter.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, d: Tensor, norms: Tensor, columns: Sequence[slice]) -> Tensor:
        # `tiny` avoids 0 / 0: the outputs of a weight row of zeros stay zero.
        norm_of_weight, norm = norms[0], norms[1].clamp(min=torch.finfo(norms.dtype).tiny)
        of_rows = (norm_of_weight + d) / norm
        factors = norms.new_ones(y.shape[-1])
        for place, part in zip(columns, of_rows.split([c.stop - c.start for c in columns]), strict=True):
            factors[place] = part
        ctx.save_for_backward(y, factors, norm)
        ctx.columns = columns
        ctx.dtype = d.dtype
        return torch.mul(y, factors, out=torch.empty_like(y))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y, factors, norm = ctx.saved_tensors
        sums = [(grad[..., c].to(norm.dtype) * y[..., c]).flatten(0, -2).sum(0) for c in ctx.columns]
        grad_y = torch.mul(grad, factors, out=torch.empty_like(grad))
        return grad_y, (torch.cat(sums) / norm).to(ctx.dtype), None, None
