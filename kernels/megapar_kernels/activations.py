"""Activations of the MLP."""

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2 f] = gate then up (Shazeer, arXiv 2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu(x: Tensor) -> Tensor:
    """GELU in GPT-2's tanh form (Hendrycks and Gimpel, arXiv 1606.08415, section 2)."""
    return F.gelu(x, approximate="tanh")
