"""RMSNorm and LayerNorm by torch's ops: in closed form for a CPU, as formulas to be compiled, and as torch has them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megapar_kernels.dispatch import Implementation, on_gpu
from megapar_kernels.one_graph import OneGraph


def closed_form(x: Tensor, weight: Tensor, impl: Implementation) -> bool:
    """Whether `norms` computes the norm by torch's ops one by one. Else autograd differentiates torch's own norm.

    On a CPU F.rms_norm is a chain of elementwise ops. autograd keeps one more tensor of x's size for them, and their
    backward takes three times as long as `torch_backward`.
    """
    # 16-bit inputs are left to torch, which computes their norm in fp32.
    return not on_gpu(x, impl) and x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64)


def torch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return y, the sum of x and residual, the mean (None for RMSNorm) and 1 / std of a norm, by torch's ops."""
    total = x if residual is None else x + residual
    if bias is not None:
        y, mean, rstd = torch.native_layer_norm(total, weight.shape, weight, bias, eps)
        return y, total, mean, rstd
    rstd = torch.linalg.vector_norm(total, dim=-1, keepdim=True).square_().div_(weight.numel()).add_(eps).rsqrt_()
    return (total * rstd).mul_(weight), total, None, rstd


def torch_backward(
    grad_y: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of x, and of weight and bias, of a norm by torch's ops."""
    grad_x, *grads = torch.ops.aten.native_layer_norm_backward.default(
        grad_y,
        x,
        weight.shape,
        torch.zeros_like(rstd) if mean is None else mean,
        rstd,
        weight,
        None if mean is None else weight,  # stands for the bias, whose values are not used
        [True, True, mean is not None],
    )
    if mean is None:
        # With means of 0, LayerNorm's gradient is that of RMSNorm, except that the mean of each row of
        # grad_y * weight * rstd has been subtracted. Add it again. torch has no fused backward of RMSNorm for a CPU.
        shift = (grad_y @ weight)[..., None].mul_(rstd).div_(weight.numel())
        grad_x += shift
    if grad_total is not None:
        grad_x += grad_total
    return grad_x, grads


def formula(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Compute a norm's y, sum, mean and 1 / std, for torch.compile. The sum is None if there is no residual."""
    total = None if residual is None else (x + residual).to(x.dtype)
    wide = (x if total is None else total).to(torch.promote_types(x.dtype, torch.float32))
    if bias is None:
        mean = None
        rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (wide * rstd * weight).to(x.dtype), total, mean, rstd
    variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
    rstd = (variance + eps).rsqrt()
    return ((wide - mean) * rstd * weight + bias).to(x.dtype), total, mean, rstd


def backward_formula(
    grad_y: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Compute the gradients of a norm's x, and of weight and bias, for torch.compile."""
    wide = x.to(rstd.dtype)
    normed = (wide if mean is None else wide - mean) * rstd
    grad_wide = grad_y.to(rstd.dtype)
    product = grad_wide * weight
    grad_x = product - normed * (product * normed).mean(-1, keepdim=True)
    if mean is not None:
        grad_x = grad_x - product.mean(-1, keepdim=True)
    grad_x = grad_x * rstd
    if grad_total is not None:
        grad_x = grad_x + grad_total
    grads = [(grad_wide * normed).flatten(0, -2).sum(0)]
    if mean is not None:
        grads.append(grad_wide.flatten(0, -2).sum(0))
    return grad_x.to(x.dtype), grads


_forward_in_one_graph = OneGraph(formula)


def compiled_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return y, the sum of x and residual, the mean and 1 / std of a norm, by one compiled graph."""
    y, total, mean, rstd = _forward_in_one_graph(x, residual, weight, bias, eps)
    return y, x if total is None else total, mean, rstd


def torch_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """RMSNorm without a bias, LayerNorm with one, by torch's ops."""
    # In the wider of the dtypes, because torch's fused norms take only equal dtypes.
    wide = torch.promote_types(x.dtype, weight.dtype)
    x_wide = x.to(wide)
    weight = weight.to(wide)
    if bias is None:
        return F.rms_norm(x_wide, weight.shape, weight, eps).to(x.dtype)
    return F.layer_norm(x_wide, weight.shape, weight, bias.to(wide), eps).to(x.dtype)


backward_in_one_graph = OneGraph(backward_formula)
