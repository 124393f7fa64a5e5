"""The matrix products of linear layers in one number format: forward, input gradient and weight gradient.

For another number format, write a subclass of `MatrixProducts`, and name it by `kernels.products`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megapar_kernels.grouped import RowGroups
from torch import Tensor

from megapar.linear.number_format import NumberFormat


class MatrixProducts(NumberFormat):
    """The three products of y = x W^T, by torch's ops in the dtype of the inputs.

    Another number format is a subclass that overrides `convert_input`, `convert_weight`, `forward`, `input_gradient`
    and `weight_gradient`, or some of these five. `kernels.products` names the subclass. The other products follow from
    the five, one after the other; `megapar.linear.torch_products` computes them faster: in place, or several in one
    launch. A format may also convert the gradients of outputs (`convert_gradient`). `megapar.linear.fp8_products` has
    a whole one.

    Products get x, the weight and the gradients of outputs as `NumberFormat` converts them.
    """

    @property
    def plain(self) -> "MatrixProducts":
        """The products in the dtype of activations that compute an adapter's factors beside a matrix in this format."""
        return self

    def forward(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """Return y [..., out], from x [..., in] and weight [out, in]."""
        return F.linear(x, weight, bias)

    def input_gradient(self, grad_y: Tensor, weight: Any) -> Tensor:
        """Return the gradient of x: [..., in], from grad_y [..., out] and weight [out, in]."""
        gradient: Tensor = grad_y @ weight
        return gradient

    def weight_gradient(self, grad_y: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the weight: fp32 [out, in], from grad_y [..., out] and x [..., in].

        The leading dimensions are those of the layer, positions first and then samples, or rows of experts.
        """
        wide = torch.promote_types(grad_y.dtype, torch.float32)
        return as_2d(grad_y).to(wide).t() @ as_2d(x).to(wide)

    # The products that follow from the five methods above.

    def add_weight_gradient(self, total: Tensor, grad_y: Tensor, x: Tensor, *, overwrite: bool = False) -> None:
        """Add the weight gradient to `total`, fp32 [out, in], without rounding it to the inputs' dtype first.

        With `overwrite` the values of `total` count as zero, even if they are NaN.
        """
        gradient = self.weight_gradient(grad_y, x)
        if overwrite:
            total.copy_(gradient)
        else:
            total.add_(gradient)

    def forward_into(self, out: Tensor, x_2d: Tensor, weight: Any) -> Tensor:
        """`forward` of x_2d [tokens, in] without a bias. The result is `out`, overwritten."""
        return out.copy_(self.forward(x_2d, weight, None))

    def forward_slices(self, out: Tensor, x: Tensor, weight: Any, bias: Tensor | None) -> None:
        """`forward` of x [slices, tokens, in] into `out` [slices, tokens, out].

        Each slice is contiguous. The slices of `x` and of `out` may lie apart in memory.
        """
        for part, rows in zip(out, x, strict=True):
            part.copy_(self.forward(rows, weight, bias))

    def input_gradient_into(self, out: Tensor, grad_2d: Tensor, weight: Any) -> Tensor:
        """`input_gradient` of grad_2d [tokens, out]. The result is `out`, overwritten."""
        return out.copy_(self.input_gradient(grad_2d, weight))

    def input_gradient_slices(self, out: Tensor, grad: Tensor, weight: Any) -> None:
        """`input_gradient` of grad [slices, tokens, out] into `out` [slices, tokens, in].

        Each slice is contiguous. The slices of `grad` and of `out` may lie apart in memory.
        """
        for part, rows in zip(out, grad, strict=True):
            part.copy_(self.input_gradient(rows, weight))

    def grouped_forward(self, x_2d: Tensor, weights_goi: Any, groups: RowGroups) -> Tensor:
        """Return y = x W^T with a matrix [out, in] for each group of rows: [tokens, out], from x_2d [tokens, in]."""
        parts = x_2d.split(groups.sizes)
        return torch.cat([self.forward(x, weights_goi[group], None) for group, x in enumerate(parts)])

    def grouped_input_gradient(self, grad_2d: Tensor, weights_goi: Any, groups: RowGroups) -> Tensor:
        """Return the gradient of x in `grouped_forward`: [tokens, in], from grad_2d [tokens, out]."""
        parts = grad_2d.split(groups.sizes)
        return torch.cat([self.input_gradient(grad, weights_goi[group]) for group, grad in enumerate(parts)])

    def add_grouped_weight_gradient(
        self, totals_goi: Tensor, grad_2d: Tensor, x_2d: Tensor, groups: RowGroups, *, overwrite: bool = False
    ) -> None:
        """`add_weight_gradient` of each group of rows in `grouped_forward`.

        A group without rows adds nothing. With `overwrite` its total becomes zero.
        """
        for total, grad, x in zip(totals_goi, grad_2d.split(groups.sizes), x_2d.split(groups.sizes), strict=True):
            if len(grad):
                self.add_weight_gradient(total, grad, x, overwrite=overwrite)
            elif overwrite:
                total.zero_()

    def in_one_launch(self, x_2d: Tensor, shape_goi: Sequence[int]) -> bool:
        """Return whether one launch computes the products of all groups, with matrices of this shape."""
        return False


def as_2d(x: Tensor) -> Tensor:
    """Return x [..., features] as [tokens, features]."""
    return x.reshape(-1, x.shape[-1])
