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
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from megapar_kernels import quantize_kernels
from megapar_kernels.dispatch import Implementation, apply_function, capability
from megapar_kernels.packed import Packed

GROUP = 128
"""Numbers of a group of a row, and rows and columns of a block of a matrix."""

BIAS = 127
"""What is added to the exponent of a scale, so that it is a byte without a sign."""

LEAST = -117
"""The least exponent of a scale. The least code times 2^-117 is 2^-126, the least normal number of bf16."""

NAN_CODE = 0x7F
"""The code of NaN in e4m3."""


LEAST_CAPABILITY = (8, 9)
"""The oldest GPUs that convert to e4m3 (Ada). On older ones Triton has no such conversion, and torch emulates it."""


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


def has_kernels(impl: Implementation, x: Tensor) -> bool:
    """Return whether Triton's kernels quantize `x`, or what was quantized: not before Ada (sm_89), nor in fp64.

    The size does not matter, as it does to `dispatch.fused`, because torch needs ten launches where a kernel is one.
    """
    return impl == "triton" and x.dtype != torch.float64 and capability(x.device) >= LEAST_CAPABILITY


def quantize_rows(x: Tensor, impl: Implementation = "torch") -> Tensor:
    """Return x [..., i] in packed rows, uint8 [..., `packed_width(i)`]: codes, then exponents, then zeros.

    Numbers are rounded to the nearest code, and to the even one of two. Raises ValueError if 128 does not divide i.
    """
    features = x.shape[-1]
    if features % GROUP:
        raise ValueError(f"quantize_rows: rows have {features} numbers; it takes multiples of {GROUP}")
    if has_kernels(impl, x):
        packed = packed_like(x)
        rows = x.reshape(-1, features)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        quantize_kernels.quantize_rows(rows, packed.view(-1, packed.shape[-1]))
        return packed
    groups = x.unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1).float()
    exponents = exponents_of(largest)
    packed = x.new_zeros(*x.shape[:-1], packed_width(features), dtype=torch.uint8)
    packed[..., :features] = encode(groups, largest[..., None], exponents[..., None]).flatten(-2)
    packed[..., features : features + features // GROUP] = (exponents + BIAS).to(torch.uint8)
    return packed


def restore_rows(packed: Tensor, dtype: torch.dtype, impl: Implementation = "torch") -> Tensor:
    """Return the numbers of packed rows [..., i] in bf16 or fp32, which are exact."""
    if has_kernels(impl, packed):
        restored = packed.new_empty(*packed.shape[:-1], features_of(packed.shape[-1]), dtype=dtype)
        quantize_kernels.restore_rows(
            packed.reshape(-1, packed.shape[-1]).contiguous(), restored.view(-1, restored.shape[-1])
        )
        return restored
    return restore_groups(view_packed(packed), dtype)


def restore_groups(rows: Quantized, dtype: torch.dtype) -> Tensor:
    """Return the numbers of rows in groups of 1 x 128, such as those of `transposed_rows`, in bf16 or fp32."""
    scales = power_of_two(rows.exponents.int() - BIAS)
    return (rows.codes.float().unflatten(-1, (-1, GROUP)) * scales[..., None]).flatten(-2).to(dtype)


def packed_like(x: Tensor) -> Tensor:
    """Return memory for packed rows of the numbers of x [..., i]."""
    return x.new_empty(*x.shape[:-1], packed_width(x.shape[-1]), dtype=torch.uint8)


def as_packed(rows: Tensor, dtype: torch.dtype, impl: Implementation = "torch") -> Packed:
    """Return packed rows as numbers in `dtype`, of which only the bytes are in memory."""
    return Packed(rows, features_of(rows.shape[-1]), dtype, partial(restore_rows, dtype=dtype, impl=impl))


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, impl: Implementation) -> Packed:
        return as_packed(quantize_rows(x, impl), x.dtype, impl)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def quantized(x: Tensor, impl: Implementation = "torch") -> Tensor:
    """Return x [..., i] as a `Packed` of `quantize_rows`. Its gradient is that of x, as if nothing had been rounded."""
    return apply_function(_Quantize, x, impl)


def quantize_blocks(weight: Tensor, impl: Implementation = "torch") -> Quantized:
    """Return a matrix [..., o, i] in blocks of 128 x 128. Raises ValueError if 128 does not divide o and i."""
    rows, columns = weight.shape[-2:]
    if rows % GROUP or columns % GROUP:
        raise ValueError(f"quantize_blocks: the matrix is {rows} x {columns}; it takes multiples of {GROUP}")
    if has_kernels(impl, weight):
        codes = weight.new_empty(weight.shape, dtype=torch.uint8)
        exponents = weight.new_empty(*weight.shape[:-2], rows // GROUP, columns // GROUP, dtype=torch.uint8)
        quantize_kernels.quantize_blocks(weight.contiguous(), codes, exponents)
        return Quantized(codes.view(torch.float8_e4m3fn), exponents, (GROUP, GROUP))
    blocks = weight.unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))  # [..., o/128, 128, i/128, 128]
    largest = blocks.abs().amax((-3, -1)).float()
    exponents = exponents_of(largest)
    codes = encode(blocks, largest[..., :, None, :, None], exponents[..., :, None, :, None])
    codes = codes.view(weight.shape).view(torch.float8_e4m3fn)
    return Quantized(codes, (exponents + BIAS).to(torch.uint8), (GROUP, GROUP))


def restore_blocks(weight: Quantized, dtype: torch.dtype, impl: Implementation = "torch") -> Tensor:
    """Return the numbers of a matrix in blocks, [..., o, i] in bf16 or fp32, which are exact."""
    if has_kernels(impl, weight.codes):
        restored = weight.codes.new_empty(weight.codes.shape, dtype=dtype)
        codes = weight.codes.view(torch.uint8).contiguous()
        quantize_kernels.restore_blocks(codes, weight.exponents.contiguous(), restored)
        return restored
    scales = power_of_two(weight.exponents.int() - BIAS)
    blocks = weight.codes.float().unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))
    return (blocks * scales[..., :, None, :, None]).view(weight.codes.shape).to(dtype)


def transposed_rows(packed: Tensor, impl: Implementation = "torch") -> Quantized:
    """Return packed rows in groups along positions: codes [b, i, p] and exponents [b, i, p / 128].

    `packed` [s, b, width] has s positions of b samples. A group has 128 consecutive positions of one sample. Zeros fill
    the last one: p is s rounded up. The codes follow from those of the rows, so no number is read in bf16. In memory
    they are [i, b, p]: of a feature all positions of all samples are one row, as a product over positions reads it.
    """
    positions, samples, width = packed.shape
    features, blocks = features_of(width), -(-positions // GROUP)
    if has_kernels(impl, packed):
        codes = packed.new_empty(features, samples, blocks * GROUP)
        exponents = packed.new_empty(features, samples, blocks)
        quantize_kernels.transposed_rows(packed.contiguous(), codes, exponents)
    else:
        values = restore_rows(packed, torch.float32).permute(2, 1, 0)  # [i, b, s]
        padded = torch.nn.functional.pad(values, (0, blocks * GROUP - positions))
        groups = padded.contiguous().unflatten(-1, (blocks, GROUP))
        largest = groups.abs().amax(-1)
        found = exponents_of(largest)
        codes = encode(groups, largest[..., None], found[..., None]).flatten(-2)
        exponents = (found + BIAS).to(torch.uint8)
    codes = codes.view(torch.float8_e4m3fn)
    return Quantized(codes.transpose(0, 1), exponents.transpose(0, 1), (1, GROUP))


def transposed_blocks(weight: Quantized, impl: Implementation = "torch") -> Quantized:
    """Return the transpose [..., i, o] of a matrix in blocks [..., o, i], with rows of codes side by side in memory.

    Hopper multiplies FP8 numbers only if those that are summed are neighbours, and an input gradient sums over o.
    """
    codes = weight.codes.view(torch.uint8)
    if has_kernels(impl, codes):
        transposed = codes.new_empty(*codes.shape[:-2], codes.shape[-1], codes.shape[-2])
        quantize_kernels.transposed_bytes(codes.contiguous(), transposed)
    else:
        transposed = codes.mT.contiguous()
    return Quantized(transposed.view(torch.float8_e4m3fn), weight.exponents.mT, weight.group)


def expanded_scales(exponents: Tensor, group: tuple[int, int], impl: Implementation = "torch") -> Tensor:
    """Return the scales of exponents [m, k] in fp32, in the memory order of F.scaled_mm.

    Of groups of 1 x 128 they are [m, k] with strides (1, m). Of blocks of 128 x 128 they are [k4, m] with strides
    (1, k4): k4 is k rounded up to a multiple of 4, with zeros where there is no block.
    """
    rows, columns = exponents.shape
    of_blocks = group[0] > 1
    wide = -(-columns // 4) * 4 if of_blocks else columns
    memory = exponents.new_empty((rows, wide) if of_blocks else (wide, rows), dtype=torch.float32)
    scales = memory if of_blocks else memory.t()
    if has_kernels(impl, exponents):
        quantize_kernels.expanded_scales(exponents, scales)
    else:
        scales.zero_()[:, :columns] = power_of_two(exponents.int() - BIAS)
    return memory.t()


def swizzled_scales(exponents: Tensor, group: tuple[int, int], impl: Implementation = "torch") -> Tensor:
    """Return the scales of exponents [m, k] for products of MXFP8, whose groups are 1 x 32: e8m0, flat.

    A group of 128 is four groups of 32 with the same exponent, and a row of blocks 128 equal rows. The scales of 128
    rows and 4 groups of 32 are 512 bytes side by side: that of row r and group g is at r % 32 * 16 + r // 32 * 4 + g.
    These tiles lie in the order of rows, then groups, and scales of rows that do not exist are zero bytes. The source
    is the section "1D Block Scaling Factors Layout" of the cuBLAS documentation.
    """
    count, columns = exponents.shape
    rows = count * group[0]
    tiles = -(-rows // GROUP)
    if has_kernels(impl, exponents):
        words = exponents.new_empty(tiles * GROUP * columns, dtype=torch.int32)
        quantize_kernels.swizzled_scales(exponents, words, rows, group[0])
        return words.view(torch.float8_e8m0fnu)
    of_rows = exponents.repeat_interleave(group[0], 0)
    padded = torch.nn.functional.pad(of_rows, (0, 0, 0, tiles * GROUP - rows))
    in_tiles = padded.view(tiles, 4, 32, columns).permute(0, 3, 2, 1)  # [tiles, k, 32, 4]
    return in_tiles[..., None].expand(-1, -1, -1, -1, 4).reshape(-1).view(torch.float8_e8m0fnu)
