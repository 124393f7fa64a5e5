"""FP8 numbers in groups with scales that are powers of two: rows in groups of 1 x 128, matrices in blocks of 128 x 128.

A number is a code of e4m3 times the scale 2^e of its group. With a the largest magnitude of a group, e is the least
exponent with a <= 448 * 2^e, where 448 is the largest number of e4m3. The exponent is read off the bits of a in fp32.
Nothing is divided and nothing computed in fp64, so a CPU and a GPU find the same codes, bit for bit.

Why powers of two (DeepSeek-V3, arXiv 2412.19437, holds some of its scales to them too):

- Each number is exact in bf16 and in fp32. A product of two of them is exact in fp32. So a product by tensor cores is
  the product of the restored numbers, up to the order of its sums.
- A change of scale is exact as long as no code becomes too small: rows may be grouped again along the other direction.
- Quantizing numbers that were quantized in the same groups gives the same numbers.

A scale is stored as e + 127 in a byte, the format e8m0 of OCP's MX specification 1.0.

Shapes: o outputs and i inputs of a matrix, both multiples of 128 (`GROUP`).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megapar_kernels.dispatch import Implementation

GROUP = 128
"""Numbers of a group of a row, and rows and columns of a block of a matrix."""

BIAS = 127
"""What is added to the exponent of a scale, so that it is a byte without a sign."""

LEAST = -117
"""The least exponent of a scale. The least code times 2^-117 is 2^-126, the least normal number of bf16."""

NAN_CODE = 0x7F
"""The code of NaN in e4m3."""


@dataclass(frozen=True)
class Quantized:
    """FP8 numbers: e4m3 codes [..., o, i], and the exponents of their groups, a byte each [..., o / rows, i / columns].

    `group` is (rows, columns). With the layout "plain" the exponent of a group stands at the place of the group.
    Layouts of a GPU's own, such as the swizzled one of MXFP8, are made in front of a product and never sent.
    """

    codes: Tensor
    exponents: Tensor
    group: tuple[int, int]
    layout: Literal["plain"] = "plain"

    def __getitem__(self, index: int | slice) -> "Quantized":
        """The numbers at an index of the first dimension, such as those of an expert."""
        return Quantized(self.codes[index], self.exponents[index], self.group, self.layout)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.exponents.nbytes


def packed_width(features: int) -> int:
    """The bytes of a packed row: a code for each feature, an exponent for each group, and zeros up to 16 bytes."""
    return -(-(features + features // GROUP) // 16) * 16


def features_of(width: int) -> int:
    """The features of a packed row of `width` bytes."""
    return width // (GROUP + 1) * GROUP


def view_packed(packed: Tensor) -> Quantized:
    """The codes [..., i] and exponents [..., i / 128] of packed rows, as views of them."""
    features = features_of(packed.shape[-1])
    codes = packed[..., :features].view(torch.float8_e4m3fn)
    return Quantized(codes, packed[..., features : features + features // GROUP], (1, GROUP))


def exponents_of(largest: Tensor) -> Tensor:
    """The exponents e of groups with the `largest` magnitudes, fp32: int32. Where one is not finite, e is 0."""
    bits = largest.contiguous().view(torch.int32)
    exponent = (bits >> 23) - BIAS - 8 + ((bits & 0x7FFFFF) > 0x600000).int()
    return exponent.clamp_(min=LEAST).masked_fill_((largest == 0) | ~largest.isfinite(), 0)


def power_of_two(exponents: Tensor) -> Tensor:
    """2^e in fp32, from int32 e in [-126, 127]."""
    return ((exponents + BIAS) << 23).view(torch.float32)


def encode(groups: Tensor, largest: Tensor, exponents: Tensor) -> Tensor:
    """The codes of numbers, as uint8. `largest` and `exponents` are those of their groups, and broadcast to `groups`.

    A group that is not finite has the code of NaN for each of its numbers.
    """
    codes = (groups.float() * power_of_two(-exponents)).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill_(~largest.isfinite(), NAN_CODE)


def quantize_rows(x: Tensor, impl: Implementation = "torch") -> Tensor:
    """Return x [..., i] in packed rows, uint8 [..., `packed_width(i)`]: codes, then exponents, then zeros.

    Numbers are rounded to the nearest code, and to the even one of two. Raises ValueError if 128 does not divide i.
    """
    features = x.shape[-1]
    if features % GROUP:
        raise ValueError(f"quantize_rows: rows have {features} numbers; it takes multiples of {GROUP}")
    groups = x.unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1).float()
    exponents = exponents_of(largest)
    packed = x.new_zeros(*x.shape[:-1], packed_width(features), dtype=torch.uint8)
    packed[..., :features] = encode(groups, largest[..., None], exponents[..., None]).flatten(-2)
    packed[..., features : features + features // GROUP] = (exponents + BIAS).to(torch.uint8)
    return packed


def restore_rows(packed: Tensor, dtype: torch.dtype, impl: Implementation = "torch") -> Tensor:
    """Return the numbers of packed rows [..., i] in bf16 or fp32, which are exact."""
    return restore_groups(view_packed(packed), dtype)


def restore_groups(rows: Quantized, dtype: torch.dtype) -> Tensor:
    """Return the numbers of rows in groups of 1 x 128, such as those of `transposed_rows`, in bf16 or fp32."""
    scales = power_of_two(rows.exponents.int() - BIAS)
    return (rows.codes.float().unflatten(-1, (-1, GROUP)) * scales[..., None]).flatten(-2).to(dtype)


def quantize_blocks(weight: Tensor, impl: Implementation = "torch") -> Quantized:
    """Return a matrix [..., o, i] in blocks of 128 x 128. Raises ValueError if 128 does not divide o and i."""
    rows, columns = weight.shape[-2:]
    if rows % GROUP or columns % GROUP:
        raise ValueError(f"quantize_blocks: the matrix is {rows} x {columns}; it takes multiples of {GROUP}")
    blocks = weight.unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))  # [..., o/128, 128, i/128, 128]
    largest = blocks.abs().amax((-3, -1)).float()
    exponents = exponents_of(largest)
    codes = encode(blocks, largest[..., :, None, :, None], exponents[..., :, None, :, None])
    codes = codes.view(weight.shape).view(torch.float8_e4m3fn)
    return Quantized(codes, (exponents + BIAS).to(torch.uint8), (GROUP, GROUP))


def restore_blocks(weight: Quantized, dtype: torch.dtype, impl: Implementation = "torch") -> Tensor:
    """Return the numbers of a matrix in blocks, [..., o, i] in bf16 or fp32, which are exact."""
    scales = power_of_two(weight.exponents.int() - BIAS)
    blocks = weight.codes.float().unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))
    return (blocks * scales[..., :, None, :, None]).view(weight.codes.shape).to(dtype)


def transposed_rows(packed: Tensor) -> Quantized:
    """Return packed rows in groups along positions: codes [b, i, p] and exponents [b, i, p / 128].

    `packed` [s, b, width] has s positions of b samples. A group has 128 consecutive positions of one sample. Zeros fill
    the last one: p is s rounded up. The codes follow from those of the rows, so no number is read in bf16.
    """
    values = restore_rows(packed, torch.float32).permute(1, 2, 0)  # [b, i, s]
    missing = -values.shape[-1] % GROUP
    groups = torch.nn.functional.pad(values, (0, missing)).unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1)
    exponents = exponents_of(largest)
    codes = encode(groups, largest[..., None], exponents[..., None]).flatten(-2).view(torch.float8_e4m3fn)
    return Quantized(codes, (exponents + BIAS).to(torch.uint8), (1, GROUP))
