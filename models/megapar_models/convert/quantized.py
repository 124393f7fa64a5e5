"""Weights stored in blocks with a scale each, as fp32: FP8 of DeepSeek-V3 (arXiv 2412.19437) and mxfp4 of gpt_oss.

A quantized tensor is two stored ones, and counts as one of the name without their endings. Nothing is written so.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megapar.checkpoint.format import Sizes

BLOCK = 128
"""Rows and columns of a block of FP8 weights."""
# Magnitudes of fp4 (OCP Microscaling Formats 1.0, section 5.3.3): 1 bit of sign, 2 of exponent, 1 of mantissa.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Form(NamedTuple):
    """Endings of the names of the two stored tensors, and the dtypes of safetensors that these have."""

    values: str
    scales: str
    dtypes: tuple[str, str]


FP8 = Form(".weight", ".weight_scale_inv", ("F8_E4M3", "F32"))
MXFP4 = Form("_blocks", "_scales", ("U8", "U8"))


def fp8_scales_shape(shape: Sizes) -> Sizes:
    """The shape of the scales of an FP8 matrix [rows, columns]. The last blocks may be smaller."""
    return tuple(-(-size // BLOCK) for size in shape)


def fp8(values: Tensor, scales: Tensor) -> Tensor:
    """The matrix, fp32: each value times the scale of its block. Rows of blocks are computed one after the other."""
    out = torch.empty(values.shape, dtype=torch.float32)
    columns = values.shape[1]
    for number, scales_of_row in enumerate(scales):
        rows = slice(number * BLOCK, (number + 1) * BLOCK)
        of_column = scales_of_row.repeat_interleave(BLOCK)[:columns]
        torch.mul(values[rows].to(torch.float32), of_column, out=out[rows])
    return out


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """The matrix [columns, rows], fp32, of blocks [rows, b, 16] and scales [rows, b], both uint8.

    A byte holds two values of a row, the first in its low four bits. A scale is 2^(s - 127). gpt_oss stores the
    transpose of the matrix that multiplies tokens.
    """
    table = torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.float32)
    values = table[torch.stack((blocks & 15, blocks >> 4), dim=-1).to(torch.int64)]  # [rows, b, 16, 2]
    values = values.flatten(-2)
    exponents = (scales.to(torch.int32) - 127)[..., None].expand_as(values)
    return torch.ldexp(values, exponents).flatten(-2).t()
