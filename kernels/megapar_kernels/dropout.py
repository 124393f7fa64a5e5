"""Dropout with a mask that the caller derives from counters (megapar.random), so that no layout changes it."""

from torch import Tensor


def dropout_add(x: Tensor, residual: Tensor, keep: Tensor | None, p: float) -> Tensor:
    """residual + x * keep / (1 - p); `keep` None drops nothing."""
    return residual + (x if keep is None else x * keep / (1.0 - p))
