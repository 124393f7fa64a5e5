"""The short causal convolution in front of recurrences: each channel by itself, then SiLU.

    z_t = bias + sum over i < w of weight_i x_{t - w + 1 + i},    y = z sigmoid(z)

x is 0 in front of a sample, and in front of a document. Megatron-LM, Hugging Face and causal-conv1d store the weight as
[channels, 1, w], the newest position last.

Shapes: s positions, b samples, c channels, w width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar_kernels import fla, short_conv_kernels
from megapar_kernels.dispatch import Implementation, apply_function, given, main_grad_of

__all__ = ["short_conv"]


def short_conv(
    x_sbc: Tensor,
    weight_c1w: Tensor,
    bias_c: Tensor | None = None,
    before_pbc: Tensor | None = None,
    place_sb: Tensor | None = None,
    *,
    silu: bool = True,
    impl: Implementation = "torch",
) -> Tensor:
    """Return the convolution of x along s, [s, b, c] in the dtype of x. Sums are fp32, or fp64 for fp64 inputs.

    `before_pbc` are the w - 1 positions in front of x; None: zeros. `place_sb`, of whole numbers, says how many
    positions of its document are in front of each position; None: all that there are belong to it. Triton's kernels
    serve widths up to 8, and torch the others.
    """
    if impl == "fla":  # of documents, and of a part of a sample, it has other forms: our kernels serve them
        if x_sbc.is_cuda and x_sbc.dtype.itemsize == 2 and before_pbc is None and place_sb is None:
            return fla.short_conv(x_sbc, weight_c1w, bias_c, silu)
        impl = "triton"
    y: Tensor = apply_function(_ShortConv, x_sbc, weight_c1w, bias_c, before_pbc, place_sb, silu, impl)
    return y


class _ShortConv(torch.autograd.Function):
    """`short_conv`. It keeps its inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        x_sbc: Tensor,
        weight_c1w: Tensor,
        bias_c: Tensor | None,
        before_pbc: Tensor | None,
        place_sb: Tensor | None,
        silu: bool,
        impl: Implementation,
    ) -> Tensor:
        inputs = x_sbc, weight_c1w, bias_c, before_pbc, place_sb
        ctx.save_for_backward(*inputs)
        ctx.silu, ctx.impl = silu, impl
        ctx.main_grads = main_grad_of(weight_c1w), main_grad_of(bias_c)
        if short_conv_kernels.serves(impl, x_sbc, weight_c1w.shape[-1]):
            return short_conv_kernels.forward(*inputs, silu)
        z = _taps(*inputs)
        return (F.silu(z) if silu else z).to(x_sbc.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_sbc: Tensor) -> tuple[Tensor | None, ...]:
        x_sbc, weight_c1w, bias_c, before_pbc, place_sb = ctx.saved_tensors
        width = weight_c1w.shape[-1]
        before = None
        if short_conv_kernels.serves(ctx.impl, x_sbc, width):
            dx, dweight, dbias = short_conv_kernels.backward(
                dy_sbc, x_sbc, weight_c1w, bias_c, before_pbc, place_sb, ctx.silu
            )
            if before_pbc is not None:  # the first positions alone read it
                first = slice(width - 1)
                places = None if place_sb is None else place_sb[first]
                near = x_sbc[first], weight_c1w, bias_c, before_pbc, places
                before = _gradients(dy_sbc[first], *near, ctx.silu)[0][first]
        else:
            dwide, dweight, dbias = _gradients(dy_sbc, x_sbc, weight_c1w, bias_c, before_pbc, place_sb, ctx.silu)
            dx = dwide[width - 1 :].to(x_sbc.dtype)
            before = None if before_pbc is None else dwide[: width - 1]
        of_weight = given(ctx.main_grads[0], dweight, weight_c1w)
        of_bias = given(ctx.main_grads[1], dbias, bias_c)
        return dx, of_weight, of_bias, None if before is None else before.to(before_pbc.dtype), None, None, None


def _gradients(
    dy_sbc: Tensor,
    x_sbc: Tensor,
    weight_c1w: Tensor,
    bias_c: Tensor | None,
    before_pbc: Tensor | None,
    place_sb: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x behind the positions in front of it, of the weight, and of a bias."""
    wide, weight = _wide(x_sbc, before_pbc, weight_c1w)
    dz = dy_sbc.to(wide.dtype)
    if silu:
        dz = torch.ops.aten.silu_backward(dz, _taps(x_sbc, weight_c1w, bias_c, before_pbc, place_sb))
    length, width = len(x_sbc), weight.shape[-1]
    dwide, dweight = torch.zeros_like(wide), torch.empty_like(weight)
    for tap in range(width):
        of_tap = _seen(dz, place_sb, width - 1 - tap)
        dweight[:, 0, tap] = (of_tap * wide[tap : tap + length]).sum((0, 1))
        dwide[tap : tap + length].addcmul_(of_tap, weight[:, 0, tap])
    return dwide, dweight, dz.sum((0, 1))


def _wide(x_sbc: Tensor, before_pbc: Tensor | None, weight_c1w: Tensor) -> tuple[Tensor, Tensor]:
    """Return x behind the positions in front of it, and the weight: fp32 or fp64."""
    dtype = torch.promote_types(x_sbc.dtype, torch.float32)
    if before_pbc is None:
        before_pbc = x_sbc.new_zeros(weight_c1w.shape[-1] - 1, *x_sbc.shape[1:])
    return torch.cat([before_pbc.to(dtype), x_sbc.to(dtype)]), weight_c1w.to(dtype)


def _taps(
    x_sbc: Tensor, weight_c1w: Tensor, bias_c: Tensor | None, before_pbc: Tensor | None, place_sb: Tensor | None
) -> Tensor:
    """Return z [s, b, c]."""
    wide, weight = _wide(x_sbc, before_pbc, weight_c1w)
    length, width = len(x_sbc), weight.shape[-1]
    z = wide[width - 1 :] * weight[:, 0, -1]
    for tap in range(width - 1):
        z.addcmul_(_seen(wide[tap : tap + length], place_sb, width - 1 - tap), weight[:, 0, tap])
    return z if bias_c is None else z.add_(bias_c)


def _seen(x_sbc: Tensor, place_sb: Tensor | None, back: int) -> Tensor:
    """Return x where the position `back` positions in front is of the same document, else 0."""
    if place_sb is None or not back:
        return x_sbc
    return x_sbc * (place_sb >= back)[..., None]
