"""The matrix products of linear layers in FP8, with the same codes in every layout (`train.fp8 blocks`).

Inputs x and gradients dy of outputs are e4m3 in groups of 1 x 128 along features, weights in blocks of 128 x 128, with
scales that are powers of two (`megapar_kernels.quantize`). Each tensor is converted once: the codes of x are what ranks
gather, what is multiplied and what is kept for backward. No scale depends on another rank, on the micro-batch or on
which rows lie beside each other, so equal inputs have equal codes in every layout.

    product             operands
    y  = x W^T          codes of x and W
    dx = dy W           codes of dy and W: a block is a block of the transposed matrix too
    dW = dy^T x         numbers restored from the codes of dy and x, in bf16; or (`regroups`) codes of both, grouped
                        again in 128 x 1 along positions: scales are powers of two, so codes follow from codes

The numbers are exact in bf16, and a product of two in fp32. So where a machine has no FP8, restored numbers are
multiplied in the dtype of activations, and the result is the FP8 product up to the order of its sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from megapar_kernels import quantize, scaled_products, scaled_tiles
from megapar_kernels.dispatch import Implementation, on_gpu
from megapar_kernels.grouped import RowGroups
from megapar_kernels.quantize import Quantized
from megapar_kernels.scaled_products import Route
from torch import Tensor

from megapar.linear.fp8_watch import ProductWatch
from megapar.linear.products import MatrixProducts
from megapar.linear.torch_products import TORCH_PRODUCTS, TorchProducts


@dataclass(frozen=True)
class Fp8Products(MatrixProducts):
    """Products of activations in `dtype`, bf16 or fp32. `plain` computes what is multiplied in this dtype.

    `impl` selects what quantizes and restores. `regroups` decides about the weight gradient of what has positions and
    samples, [s, b, features]: its operands are codes, grouped again along the positions of each sample. It is not
    proven to pay on any GPU yet. Rows of experts never are: their groups would depend on who shares the rank.
    `watch` counts what is lost (log.fp8_every).
    """

    dtype: torch.dtype = torch.bfloat16
    torch_products: TorchProducts = TORCH_PRODUCTS
    impl: Implementation = "torch"
    regroups: bool = False
    watch: ProductWatch | None = field(default=None, compare=False)

    def in_words(self) -> str:
        """Who multiplies."""
        return "restored numbers are multiplied in the dtype of activations: this device has no products of FP8"

    @property
    def plain(self) -> MatrixProducts:
        return self.torch_products

    @property
    def in_blocks(self) -> bool:
        return True

    @property
    def takes_packed(self) -> bool:
        return self.impl == "triton" and self.watch is None  # which reads the numbers too

    def convert_input(self, x: Tensor) -> Tensor:
        codes = quantize.quantize_rows(x, self.impl)
        if self.watch is not None:
            self.watch.note_input(x, codes)
        return codes

    def convert_gradient(self, grad_y: Tensor) -> Tensor:
        codes = quantize.quantize_rows(grad_y, self.impl)
        if self.watch is not None:
            self.watch.note_gradient(grad_y, codes)
        return codes

    def restore(self, converted: Tensor) -> Tensor:
        return quantize.restore_rows(converted, self.dtype, self.impl)

    def convert_weight(self, weight: Tensor) -> Quantized:
        return quantize.quantize_blocks(weight, self.impl)

    def note_weight(self, weight: Tensor | None, converted: Quantized) -> None:
        if self.watch is not None:
            self.watch.note_weight(self, weight, converted)

    def _matrix(self, weight: Quantized) -> Tensor:
        return quantize.restore_blocks(weight, self.dtype, self.impl)

    def forward(self, x: Tensor, weight: Quantized, bias: Tensor | None) -> Tensor:
        return self.plain.forward(self.restore(x), self._matrix(weight), bias)

    def input_gradient(self, grad_y: Tensor, weight: Quantized) -> Tensor:
        return self.plain.input_gradient(self.restore(grad_y), self._matrix(weight))

    def weight_gradient(self, grad_y: Tensor, x: Tensor) -> Tensor:
        return self.plain.weight_gradient(self._along_positions(grad_y), self._along_positions(x))

    def add_weight_gradient(self, total: Tensor, grad_y: Tensor, x: Tensor, *, overwrite: bool = False) -> None:
        grad_y, x = self._along_positions(grad_y), self._along_positions(x)
        self.plain.add_weight_gradient(total, grad_y, x, overwrite=overwrite)

    def _along_positions(self, converted: Tensor) -> Tensor:
        """The operand of a weight gradient: restored numbers [tokens, features], or those of codes grouped again."""
        if not self._regroups(converted):
            return self.restore(converted)
        rows = quantize.transposed_rows(converted, self.impl)
        return quantize.restore_groups(rows, self.dtype).permute(2, 0, 1).flatten(0, 1)

    def _regroups(self, converted: Tensor) -> bool:
        return self.regroups and converted.dim() == 3

    def of_own_positions(self) -> Self:
        return replace(self, regroups=False)

    def grouped_forward(self, x_2d: Tensor, weights_goi: Quantized, groups: RowGroups) -> Tensor:
        return self.plain.grouped_forward(self.restore(x_2d), self._matrix(weights_goi), groups)

    def grouped_input_gradient(self, grad_2d: Tensor, weights_goi: Quantized, groups: RowGroups) -> Tensor:
        return self.plain.grouped_input_gradient(self.restore(grad_2d), self._matrix(weights_goi), groups)

    def add_grouped_weight_gradient(
        self, totals_goi: Tensor, grad_2d: Tensor, x_2d: Tensor, groups: RowGroups, *, overwrite: bool = False
    ) -> None:
        # In bf16 always: groups of an expert's rows would depend on the tokens that share its rank.
        grad_2d, x_2d = self.restore(grad_2d), self.restore(x_2d)
        self.plain.add_grouped_weight_gradient(totals_goi, grad_2d, x_2d, groups, overwrite=overwrite)

    def in_one_launch(self, x_2d: Tensor, shape_goi: Sequence[int]) -> bool:
        return self.plain.in_one_launch(x_2d, shape_goi)


@dataclass(frozen=True)
class ScaledFp8Products(Fp8Products):
    """The products of a GPU that multiplies codes: those of torch, and Triton's for the rows of experts."""

    route: Route = "blocks"

    def in_words(self) -> str:
        how = {"blocks": "1 x 128 by 128 x 128", "mx": "1 x 32 of MXFP8, four equal ones for a group"}[self.route]
        return f"codes are multiplied by the GPU in groups of {how}"

    def forward(self, x: Tensor, weight: Quantized, bias: Tensor | None) -> Tensor:
        return scaled_products.forward(x, weight, bias, self.dtype, self.impl, self.route)

    def input_gradient(self, grad_y: Tensor, weight: Quantized) -> Tensor:
        return scaled_products.input_gradient(grad_y, weight, self.dtype, self.impl, self.route)

    def weight_gradient(self, grad_y: Tensor, x: Tensor) -> Tensor:
        if not self._regroups(x):
            return super().weight_gradient(grad_y, x)
        return scaled_products.weight_gradient(grad_y, x, self.impl, self.route)

    def add_weight_gradient(self, total: Tensor, grad_y: Tensor, x: Tensor, *, overwrite: bool = False) -> None:
        if not self._regroups(x):
            super().add_weight_gradient(total, grad_y, x, overwrite=overwrite)
            return
        codes = (scaled_products.over_positions(quantize.transposed_rows(part, self.impl)) for part in (grad_y, x))
        scaled_tiles.add_weight_gradient(total, *codes, overwrite=overwrite)

    def grouped_forward(self, x_2d: Tensor, weights_goi: Quantized, groups: RowGroups) -> Tensor:
        if not self._groups_rows:
            return super().grouped_forward(x_2d, weights_goi, groups)
        return scaled_tiles.grouped_forward(x_2d, weights_goi, groups, self.dtype)

    def grouped_input_gradient(self, grad_2d: Tensor, weights_goi: Quantized, groups: RowGroups) -> Tensor:
        if not self._groups_rows:
            return super().grouped_input_gradient(grad_2d, weights_goi, groups)
        return scaled_tiles.grouped_input_gradient(grad_2d, weights_goi, groups, self.dtype)

    @property
    def _groups_rows(self) -> bool:
        """Whether one launch of our kernel multiplies the rows of all experts."""
        return self.impl == "triton" and self.torch_products.grouped == "triton"


def fp8_products(
    device: torch.device, dtype: torch.dtype, products: TorchProducts, impl: Implementation
) -> Fp8Products:
    """Return the products in FP8 on `device`. Those in `dtype` are `products`, and `impl` says what quantizes.

    On the meta device they are those of Hopper where kernels are planned for a GPU.
    """
    route = scaled_products.serves(device)
    if device.type == "meta" and on_gpu(torch.empty(0, device=device), impl):
        route = "blocks"
    if route is None:
        return Fp8Products(dtype, products, impl)
    return ScaledFp8Products(dtype, products, impl, route=route)
