"""Chunks of linear attention: positions in runs of equal length, and sums over the tokens of a run.

Shapes: s positions, b samples, n heads, d any width, c chunks, C tokens of a chunk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk, where a caller says nothing else."""


def in_chunks(chunk: int, dtype: torch.dtype, *inputs: Tensor) -> list[Tensor]:
    """Return the inputs [s, b, n, d] as [b, n, c, C, d], contiguous, with zeros behind the last position."""
    length, samples = inputs[0].shape[:2]
    chunks = -(-length // chunk)
    found = []
    for x in inputs:
        whole = torch.empty(samples, x.shape[2], chunks * chunk, x.shape[-1], dtype=dtype, device=x.device)
        whole[:, :, :length] = x.permute(1, 2, 0, 3)
        whole[:, :, length:] = 0.0
        found.append(whole.unflatten(2, (chunks, chunk)))
    return found


def joined(x: Tensor, length: int) -> Tensor:
    """Return the first `length` positions of x [b, n, c, C, d] as [s, b, n, d]."""
    return x.flatten(2, 3)[:, :, :length].permute(2, 0, 1, 3)


def sum_before(x: Tensor) -> Tensor:
    """Return the sums of x [..., C, d] over the tokens in front of each token."""
    return F.pad(x[..., :-1, :].cumsum(-2), (0, 0, 1, 0))


def sum_from_here(x: Tensor) -> Tensor:
    """Return the sums of x [..., C, d] over each token and those behind it."""
    return x.flip(-2).cumsum(-2).flip(-2)
