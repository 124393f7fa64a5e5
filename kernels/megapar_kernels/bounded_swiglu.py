"""SwiGLU with bounds: of gate and up in front of the activation (gpt-oss), or behind it (Step-3.5).

torch's ops compute both on every device. `gate_up` [..., 2 f] holds gate, then up; `weights` [..., 1] multiply rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar_kernels.activations import row_sums


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor | None, limit: float, alpha: float) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.limit = limit
        ctx.alpha = alpha
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        y = (gate * (gate * alpha).sigmoid_()).mul_(up.clamp(-limit, limit).add_(1.0))
        return y if weights is None else y.mul_(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        gate_up, weights = ctx.saved_tensors
        limit = ctx.limit
        gate, up = gate_up.chunk(2, dim=-1)
        clamped = gate.clamp(max=limit)
        sigmoid = (clamped * ctx.alpha).sigmoid_()
        up_factor = up.clamp(-limit, limit).add_(1.0)
        grad = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        by_gate = grad_y * clamped * sigmoid
        # A clamped element has no slope.
        torch.mul(by_gate, up.abs() <= limit, out=grad_up)
        slope = sigmoid * (1.0 + ctx.alpha * clamped * (1.0 - sigmoid))
        torch.mul(grad_y * up_factor * slope, gate <= limit, out=grad_gate)
        if weights is None:
            return grad, None, None, None
        grad_weights = row_sums(by_gate.mul_(up_factor), weights.dtype)
        grad.mul_(weights)
        return grad, grad_weights, None, None


def clamped_swiglu(gate_up: Tensor, weights: Tensor | None = None, *, limit: float, alpha: float = 1.702) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), [..., f], as in gpt-oss.

    The gate is at most `limit` here, and up lies between -limit and limit. `gate_up` and `weights` are as in `swiglu`.
    torch's ops compute it on every device.
    """
    return _ClampedSwiGLU.apply(gate_up, weights, limit, alpha)


class _SwiGLUStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor | None, limit: float) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.limit = limit
        gate, up = gate_up.chunk(2, dim=-1)
        y = F.silu(gate).clamp_(max=limit).mul_(up.clamp(-limit, limit))
        return y if weights is None else y.mul_(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gate_up, weights = ctx.saved_tensors
        limit = ctx.limit
        gate, up = gate_up.chunk(2, dim=-1)
        sigmoid = gate.sigmoid()
        activated = gate * sigmoid
        grad = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        by_gate = grad_y * activated.clamp(max=limit)
        up_factor = up.clamp(-limit, limit)
        # A clamped element has no slope.
        torch.mul(by_gate, up.abs() <= limit, out=grad_up)
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        torch.mul(grad_y * up_factor * slope, activated <= limit, out=grad_gate)
        if weights is None:
            return grad, None, None
        grad_weights = row_sums(by_gate.mul_(up_factor), weights.dtype)
        grad.mul_(weights)
        return grad, grad_weights, None


def swiglu_step(gate_up: Tensor, weights: Tensor | None = None, *, limit: float) -> Tensor:
    """silu(gate) * up, [..., f], with silu(gate) at most `limit`, and up between -limit and limit (Step-3.5).

    `gate_up` and `weights` are as in `swiglu`. torch's ops compute it on every device.
    """
    return _SwiGLUStep.apply(gate_up, weights, limit)
