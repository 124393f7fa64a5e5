"""The values of a checkpoint: their checksum, and those unfit for further training."""

import math
import zlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megapar.checkpoint.format import dtype_name

_BLOCK = 1 << 16  # elements; 256 KiB of fp32, which stay in the cache between the CRC and the check of values
_INF = 0x7F800000  # the bits of an fp32 infinity


def checksum(values: Tensor) -> int:
    """The CRC-32 of a contiguous CPU tensor's bytes."""
    return zlib.crc32(values.reshape(-1).view(torch.uint8).numpy().data)


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
