"""Torch's matrix products of linear layers: in place, and fused where the machine has it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megapar_kernels import apex, grouped, onednn
from megapar_kernels.dispatch import Implementation
from megapar_kernels.grouped import RowGroups
from torch import Tensor

from megapar.linear.products import MatrixProducts, as_2d


@dataclass(frozen=True)
class TorchProducts(MatrixProducts):
    """The products that all linear layers use, unless kernels.products names others.

    `impl` selects whether torch or apex adds the weight gradient of 16-bit inputs to the fp32 main gradient. If
    `grouped` is triton, one launch serves the experts of a rank: torch's grouped_mm, and for weight gradients our
    kernel. Both take bf16 in rows of a multiple of 16 bytes. A loop over the experts serves all else.
    """

    impl: Implementation = "torch"
    grouped: Implementation = "torch"

    @classmethod
    def serves(cls, name: str) -> bool:
        return True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if onednn.takes(x, weight):
            return onednn.linear(x, weight, bias)
        return F.linear(x, weight, bias)

    def forward_into(self, out: Tensor, x_2d: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(x_2d, weight.t(), out=out)

    def forward_slices(self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        _products_of_slices(out, x, weight, bias)

    def input_gradient(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        if onednn.takes(grad_y, matrix := weight.t()):
            return onednn.linear(grad_y, matrix)
        return grad_y @ weight

    def input_gradient_into(self, out: Tensor, grad_2d: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(grad_2d, weight, out=out)

    def input_gradient_slices(self, out: Tensor, grad: Tensor, weight: Tensor) -> None:
        _products_of_slices(out, grad, weight.t(), None)

    def weight_gradient(self, grad_y: Tensor, x: Tensor) -> Tensor:
        return as_2d(grad_y).t() @ as_2d(x)

    def add_weight_gradient(self, total: Tensor, grad_y: Tensor, x: Tensor, *, overwrite: bool = False) -> None:
        grad_2d, x_2d = as_2d(grad_y), as_2d(x)
        beta = 0.0 if overwrite else 1.0  # addmm multiplies `total` by it, and does not read `total` if it is 0
        if grad_2d.dtype == total.dtype:
            total.addmm_(grad_2d.t(), x_2d, beta=beta)
        elif self.impl == "apex":
            if overwrite:
                total.zero_()  # apex's kernel can only add
            apex.add_weight_gradient(total, grad_2d, x_2d)
        elif not grad_2d.is_cpu:  # on the meta device too, which stands for a GPU
            torch.addmm(total, grad_2d.t(), x_2d, beta=beta, out_dtype=torch.float32, out=total)
        else:
            # On a CPU addmm has no out_dtype, so the inputs are converted.
            total.addmm_(grad_2d.t().float(), x_2d.float(), beta=beta)

    def grouped_forward(self, x_2d: Tensor, weights_goi: Tensor, groups: RowGroups) -> Tensor:
        if self.in_one_launch(x_2d, weights_goi.shape):
            return F.grouped_mm(x_2d, weights_goi.transpose(1, 2), offs=groups.ends)
        y = x_2d.new_empty(x_2d.shape[0], weights_goi.shape[1])
        for part, x, weight in zip(y.split(groups.sizes), x_2d.split(groups.sizes), weights_goi, strict=True):
            self.forward_into(part, x, weight)
        return y

    def grouped_input_gradient(self, grad_2d: Tensor, weights_goi: Tensor, groups: RowGroups) -> Tensor:
        if self.in_one_launch(grad_2d, weights_goi.shape):
            return F.grouped_mm(grad_2d, weights_goi, offs=groups.ends)
        grad_x = grad_2d.new_empty(grad_2d.shape[0], weights_goi.shape[2])
        for part, grad, weight in zip(
            grad_x.split(groups.sizes), grad_2d.split(groups.sizes), weights_goi, strict=True
        ):
            self.input_gradient_into(part, grad, weight)
        return grad_x

    def add_grouped_weight_gradient(
        self, totals_goi: Tensor, grad_2d: Tensor, x_2d: Tensor, groups: RowGroups, *, overwrite: bool = False
    ) -> None:
        if self.in_one_launch(grad_2d, totals_goi.shape) and x_2d.dtype == grad_2d.dtype:
            grouped.add_weight_gradients(totals_goi, grad_2d, x_2d, groups.ends, overwrite=overwrite)
        else:
            super().add_grouped_weight_gradient(totals_goi, grad_2d, x_2d, groups, overwrite=overwrite)

    def in_one_launch(self, x_2d: Tensor, shape_goi: Sequence[int]) -> bool:
        # 8 numbers are 16 bytes. Without rows nothing is multiplied, and the loop fills what has to be zero. One group
        # is one product, which cuBLAS computes faster.
        groups, outputs, inputs = shape_goi
        fits = outputs % 8 == 0 and inputs % 8 == 0 and groups > 1
        return self.grouped == "triton" and x_2d.dtype == torch.bfloat16 and fits and len(x_2d) > 0


TORCH_PRODUCTS = TorchProducts()
"""The products of torch, in the dtype of the inputs. Layers use them by default."""


def _products_of_slices(out: Tensor, x: Tensor, matrix: Tensor, bias: Tensor | None) -> None:
    """out[i] = x[i] W^T + b for each slice i and a matrix [out, in]. The slices are read and written in place.

    One product of all slices would need them side by side, and so a copy of the layer's whole input or output. On a
    GPU one product for each slice would be too small to fill it.
    """
    if onednn.takes(x[0], matrix):  # a layer without chunks is computed so, and chunks have its bits
        for part, rows in zip(out, x, strict=True):
            part.copy_(onednn.linear(rows, matrix, bias))
        return
    matrices = matrix.t().expand(x.shape[0], -1, -1)  # takes no memory: the stride between the matrices is 0
    if bias is None:
        torch.bmm(x, matrices, out=out)
    else:
        torch.baddbmm(bias, x, matrices, out=out)
