"""Products of FP8 numbers in groups by the tensor cores of a GPU, as torch has them (cuBLAS).

    y  = x W^T     groups of 1 x 128, blocks of 128 x 128
    dx = dy W      the same with W^T, whose blocks are those of W; its bytes are transposed first
    dW = dy^T x    groups of 1 x 128 along positions, which follow from the codes of dy and x

Hopper (sm_90) multiplies such groups since CUDA 12.9. Blackwell (sm_100) multiplies groups of 1 x 32 in MXFP8: a group
of 128 is four equal ones, and because a scale is a power of two, the numbers are the same.

Only torch.nn.functional.scaled_mm is called. The older torch._scaled_mm takes scales of blocks of another length than
cuBLAS reads, and computes wrong values (pytorch#166752).

Shapes: o outputs and i inputs of a matrix, s positions, b samples.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from megapar_kernels.dispatch import Implementation, capability
from megapar_kernels.quantize import (
    Quantized,
    expanded_scales,
    swizzled_scales,
    transposed_blocks,
    transposed_rows,
    view_packed,
)

Route = Literal["blocks", "mx"]
"""Groups of 1 x 128 and blocks of 128 x 128 as they are, or as groups of 1 x 32 of MXFP8."""

ROUTES: dict[tuple[int, int], Route] = {(9, 0): "blocks", (10, 0): "mx", (10, 3): "mx"}
LEAST_CUDA = (12, 9)
ALIGNED_ROWS = 4  # scales of a column of groups begin at multiples of 16 bytes


def serves(device: torch.device) -> Route | None:
    """Return how products of FP8 are computed on `device`, or None if torch has none for it."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    if tuple(int(part) for part in torch.version.cuda.split(".")[:2]) < LEAST_CUDA:
        return None
    return ROUTES.get(capability(device))


def forward(
    x_packed: Tensor,
    weight: Quantized,
    bias: Tensor | None,
    dtype: torch.dtype,
    impl: Implementation = "torch",
    route: Route | None = None,
) -> Tensor:
    """Return y = x W^T + b, [..., o] in bf16 or fp32, of packed rows [..., width] and a matrix [o, i] in blocks.

    `route` is that of the device, unless it is given. Raises ValueError if the device has none.
    """
    rows = x_packed.reshape(-1, x_packed.shape[-1])
    if not rows.numel():
        return rows.new_empty(*x_packed.shape[:-1], weight.codes.shape[0], dtype=dtype)
    route = route or _route_of(rows.device)
    # A copy with rows of zeros: of an odd number of tokens alone, such as at the end of an evaluation.
    missing = -rows.shape[0] % ALIGNED_ROWS if route == "blocks" else 0
    aligned = F.pad(rows, (0, 0, 0, missing)) if missing else rows
    y = _product(view_packed(aligned), weight, bias, dtype, impl, route)[: rows.shape[0]]
    return y.view(*x_packed.shape[:-1], y.shape[-1])


def input_gradient(
    dy_packed: Tensor, weight: Quantized, dtype: torch.dtype, impl: Implementation = "torch", route: Route | None = None
) -> Tensor:
    """Return dx = dy W, [..., i], of packed rows [..., width] and a matrix [o, i] in blocks. See `forward`."""
    return forward(dy_packed, transposed_blocks(weight, impl), None, dtype, impl, route)


def weight_gradient(
    dy_packed: Tensor, x_packed: Tensor, impl: Implementation = "torch", route: Route | None = None
) -> Tensor:
    """Return dW = dy^T x, fp32 [o, i], of packed rows [s, b, width] of dy and x. See `forward`."""
    dy, x = (over_positions(transposed_rows(packed, impl)) for packed in (dy_packed, x_packed))
    return _product(dy, x, None, torch.float32, impl, route or _route_of(dy_packed.device))


def over_positions(rows: Quantized) -> Quantized:
    """Return `transposed_rows` [b, i, p] as rows [i, b p] of all positions, which are views."""
    codes, exponents = (part.transpose(0, 1).flatten(1) for part in (rows.codes, rows.exponents))
    return Quantized(codes, exponents, rows.group)


def _route_of(device: torch.device) -> Route:
    route = serves(device)
    if route is None:
        where = f"{device} (sm_{''.join(map(str, capability(device)))})" if device.type == "cuda" else str(device)
        raise ValueError(
            f"products of FP8: torch {torch.__version__} has none on {where}, but on sm_90 and sm_100 with CUDA 12.9; "
            "restore the numbers and multiply in bf16"
        )
    return route


def _product(
    a: Quantized, b: Quantized, bias: Tensor | None, dtype: torch.dtype, impl: Implementation, route: Route
) -> Tensor:
    """a b^T + bias, [m, n] of a [m, k] and b [n, k]."""
    # cuBLAS adds a bias only to results in 16 bits, and only one of their dtype.
    inside = bias if bias is not None and dtype == bias.dtype == torch.bfloat16 else None
    if route == "blocks":
        (scale_a, recipe_a), (scale_b, recipe_b) = (
            (
                expanded_scales(numbers.exponents, numbers.group, impl),
                ScalingType.BlockWise1x128 if numbers.group[0] == 1 else ScalingType.BlockWise128x128,
            )
            for numbers in (a, b)
        )
        swizzle = None
    else:
        scale_a, scale_b = (swizzled_scales(numbers.exponents, numbers.group, impl) for numbers in (a, b))
        recipe_a = recipe_b = ScalingType.BlockWise1x32
        swizzle = SwizzleType.SWIZZLE_32_4_4
    y = F.scaled_mm(
        a.codes, b.codes.t(), scale_a, recipe_a, scale_b, recipe_b, swizzle, swizzle, inside, output_dtype=dtype
    )
    return y if bias is None or inside is not None else y.add_(bias)
