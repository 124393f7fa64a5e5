"""Rotary position embedding (Su et al., arXiv 2104.09864) in Hugging Face's half layout: pairs are (i, i + d/2)."""

import torch
from torch import Tensor


def rotate(x_sbnd: Tensor, cos_sd: Tensor, sin_sd: Tensor) -> Tensor:
    """Rotate each pair of each head (n heads of width d) by its position's angle; cos and sin repeat over both
    halves. Computed in the tables' dtype, returned in x's."""
    first, second = x_sbnd.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_sbnd * cos_sd[:, None, None, :] + turned * sin_sd[:, None, None, :]).to(x_sbnd.dtype)
