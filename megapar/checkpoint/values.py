"""The values of a checkpoint: their checksum, and those unfit for further training."""

import hashlib
import math
import zlib
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megapar.checkpoint.format import dtype_name
from megapar.declare.params import Sizes

_BLOCK = 1 << 16  # elements; 256 KiB of fp32, which stay in the cache between the CRC and the check of values
_MODULUS = 1 << 64
_INF = 0x7F800000  # the bits of an fp32 infinity


def checksum(values: Tensor) -> int:
    """The CRC-32 of a contiguous CPU tensor's bytes."""
    return zlib.crc32(values.reshape(-1).view(torch.uint8).numpy().data)


def content(name: str, shape: Sizes, offset: Sizes, values: Tensor) -> int:
    """Return this box's share of the checksum of tensor `name`. Shares add up mod 2^64, however the tensor is cut.

    `values` is contiguous, on the CPU, and lies at `offset`. The bits of each element are multiplied by odd numbers
    that follow from its place, and by one that follows from the name (multilinear hashing, arXiv 1202.4961). CRCs
    cannot be added up where a cut goes through rows. Both take the same time.
    """
    bits = values.reshape(values.shape or (1,)).view(torch.uint8).numpy().view(f"u{values.itemsize}")
    for axis in reversed(range(bits.ndim)):
        first = offset[axis] if offset else 0
        multipliers = _odd_numbers(axis, first, bits.shape[-1])
        bits = np.einsum("...i,i->...", bits, multipliers, dtype=np.uint64, casting="unsafe")
    named = hashlib.blake2b(repr((name, shape, dtype_name(values.dtype))).encode(), digest_size=8).digest()
    return int(bits) * (int.from_bytes(named, "little") | 1) % _MODULUS


def sum_of_contents(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The contents of parts of a checkpoint, by state, added up."""
    total: dict[str, int] = {}
    for part in parts:
        for state, value in part.items():
            total[state] = (total.get(state, 0) + value) % _MODULUS
    return total


def _odd_numbers(axis: int, first: int, count: int) -> NDArray[np.uint64]:
    """Odd numbers of 64 bits that follow from the places first ... on an axis (splitmix64)."""
    mixed = np.arange(first, first + count, dtype=np.uint64) * np.uint64(8) + np.uint64(axis)
    mixed = (mixed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31)) | np.uint64(1)
    return odd


def examine(name: str, values: Tensor, *, nonnegative: bool = False) -> tuple[int, str]:
    """The CRC-32 of a contiguous CPU tensor, and why no training can go on from its values, or "" if it can.

    Values must be finite, and with `nonnegative` not negative either. `name` is for the message.
    """
    if values.dtype != torch.float32:
        return checksum(values), _problem_of(name, values, nonnegative)
    numbers = values.reshape(-1).numpy()
    # Each block is checked right after its CRC, while it lies in the cache. This quick check may suspect a tensor that
    # is fine, but it never misses one that is not. Only a suspect tensor is read again, by the exact check.
    is_suspect = _may_be_negative_or_not_finite if nonnegative else _may_be_not_finite
    crc32 = 0
    suspect = False
    for first in range(0, len(numbers), _BLOCK):
        block = numbers[first : first + _BLOCK]
        crc32 = zlib.crc32(block.data, crc32)
        suspect = suspect or is_suspect(block)
    problem = _problem_of(name, values, nonnegative) if suspect else ""
    return crc32, problem


def _may_be_not_finite(block: NDArray[np.float32]) -> bool:
    """Whether the block's sum is not finite. It is not if a term is not, or if very large terms overflow it."""
    with np.errstate(over="ignore", invalid="ignore"):
        return not math.isfinite(np.add.reduce(block))


def _may_be_negative_or_not_finite(block: NDArray[np.float32]) -> bool:
    """Whether any value may be negative, infinite or nan, by its bits as an unsigned integer.

    Of positive values, inf and nan have the largest bits. Negative values have the sign bit, so theirs are larger yet.
    """
    return bool(block.view(np.uint32).max() >= _INF)


def _problem_of(name: str, values: Tensor, nonnegative: bool) -> str:
    """Return why no training can go on from `values`, or "" if it can. Exact."""
    if not values.is_floating_point() or not values.numel():
        return ""
    least, largest = (float(limit) for limit in torch.aminmax(values))  # nan if any value is
    if not (math.isfinite(least) and math.isfinite(largest)):
        return f"{name} holds values that are not finite (nan or inf)"
    if nonnegative and least < 0:
        return f"{name} holds a negative value ({least:g}), and its optimizer keeps none there"
    return ""


def rounding_problem(name: str, weights: Tensor, dtype: torch.dtype) -> str:
    """Return why a model of `dtype` cannot take these weights, or "" if it can: rounded to it they must be finite."""
    if not weights.numel():
        return ""
    least, largest = torch.aminmax(weights)
    if torch.stack([least, largest]).to(dtype).isfinite().all():
        return ""
    size = max(abs(float(least)), abs(float(largest)))
    limit = torch.finfo(dtype).max
    return f"{name} holds {size:.6g}, and {dtype_name(dtype)} of train.precision holds {limit:.6g} at most"
