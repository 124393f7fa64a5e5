"""The kernels of flash-linear-attention (github.com/fla-org/flash-linear-attention), used only on request.

They serve the gated delta rule in 16 bits, and short convolutions of whole samples. megapar never installs it.
"""

import importlib.util

import torch
from torch import Tensor

from megapar_kernels.dispatch import capability, triton

_LEAST = -100.0
"""exp(-100) is 0 in fp32, and sums of several of these keep digits that sums of a document's start lose."""


def unusable(device: torch.device) -> str:
    """Return why flash-linear-attention cannot be used on `device`, or "". Imports nothing of it."""
    if device.type != "cuda":
        return f"needs a GPU, and this rank runs on {device.type}"
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed; pip install flash-linear-attention"
    version = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3] if part.isdecimal())
    if capability(device)[0] == 9 and (3, 4) <= version < (3, 7, 1):
        return f"flash-linear-attention refuses Triton {triton.__version__} on Hopper (3.4 to 3.7.0 miscompile it)"
    return ""


def serves_rule(q: Tensor, chunk: int, chunk_of_kernels: int) -> bool:
    """Whether the delta rule of flash-linear-attention computes this call. It takes 16 bits."""
    return q.is_cuda and q.dtype.itemsize == 2 and chunk == chunk_of_kernels


def delta_rule(
    q_sbnd: Tensor, k_sbnd: Tensor, v_sbne: Tensor, g_sbnw: Tensor, beta_sbn: Tensor, state_bnde: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return `delta_rule.delta_rule` by its kernels. Values are rounded to the dtype of queries."""
    inputs = q_sbnd, k_sbnd, v_sbne.to(q_sbnd.dtype), g_sbnw.clamp(min=_LEAST), beta_sbn
    q, k, v, g, beta = (x.transpose(0, 1).contiguous() for x in inputs)
    more = {"scale": 1.0, "initial_state": state_bnde, "output_final_state": True}
    if g.shape[-1] == 1:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        o, state = chunk_gated_delta_rule(q, k, v, g.squeeze(-1), beta, **more)
    else:
        from fla.ops.kda import chunk_kda

        o, state = chunk_kda(q, k, v, g, beta, **more)
    return o.transpose(0, 1).to(v_sbne.dtype), state


def short_conv(x_sbc: Tensor, weight_c1w: Tensor, bias_c: Tensor | None, silu: bool) -> Tensor:
    """Return `short_conv.short_conv` of whole samples by its kernels."""
    from fla.modules.convolution import causal_conv1d

    x = x_sbc.transpose(0, 1).contiguous()
    y, _ = causal_conv1d(x, weight_c1w.squeeze(1), bias_c, activation="silu" if silu else None)
    y_sbc: Tensor = y.transpose(0, 1)
    return y_sbc
