"""Rotary position embedding (Su et al., arXiv 2104.09864) of queries and keys, both in one pass.

Forward and backward move 4 bytes each for a bf16 element. A head of width d has d/2 pairs of elements, and pair i is
rotated by angle i of its position. In Hugging Face's half layout pair i is (i, i + d/2), in the interleaved layout it
is (2i, 2i + 1). The tables cos and sin [s, d] repeat over both halves and serve both layouts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar_kernels.dispatch import Implementation, fused, launches, next_power_of_2, tl, triton

__all__ = ["rotate", "rotate_qk"]


def _reference(x_sbnd: Tensor, cos_sd: Tensor, sin_sd: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        cos, sin = (t[:, None, None, : t.shape[1] // 2] for t in (cos_sd, sin_sd))
        x = x_sbnd.to(torch.promote_types(x_sbnd.dtype, cos.dtype))
        first = x[..., 0::2]
        second = x[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.flatten(-2).to(x_sbnd.dtype)
    first, second = x_sbnd.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_sbnd * cos_sd[:, None, None, :] + turned * sin_sd[:, None, None, :]).to(x_sbnd.dtype)


@triton.jit
def _rotate_rows(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, cos, sin, valid,
    WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate the heads that begin at the pointers x_ptr [ROWS, 1] by cos and sin [ROWS, PAIRS]; store them at y_ptr."""
    kind = y_ptr.dtype.element_ty
    if INTERLEAVED:
        element = tl.arange(0, 2 * PAIRS)[None, :]
        inside = valid & (element < WIDTH)
        x = tl.load(x_ptr + element, inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, [ROWS, PAIRS, 2]))
        y = tl.join(first * cos - second * sin, second * cos + first * sin)
        tl.store(y_ptr + element, tl.reshape(y, [ROWS, 2 * PAIRS]).to(kind), inside)
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        inside = valid & (pair < WIDTH // 2)
        first = tl.load(x_ptr + pair, inside, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + WIDTH // 2 + pair, inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + pair, (first * cos - second * sin).to(kind), inside)
        tl.store(y_ptr + WIDTH // 2 + pair, (second * cos + first * sin).to(kind), inside)


@triton.jit
def _rotate_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, positions, q_heads, k_heads,
    q_stride_s, q_stride_b, q_stride_n, k_stride_s, k_stride_b, k_stride_n,
    WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    POSITIONS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate a tile. The program is (block of positions, sample, block of heads), with q's heads before k's."""
    row = tl.arange(0, POSITIONS * HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    s = tl.program_id(0).to(tl.int64) * POSITIONS + row // HEADS
    b = tl.program_id(1).to(tl.int64)
    block = tl.program_id(2).to(tl.int64)
    token = s * tl.num_programs(1) + b
    inside = (s < positions) & (pair < WIDTH // 2)
    cos = tl.load(cos_ptr + s * WIDTH + pair, inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + s * WIDTH + pair, inside, other=0.0).to(tl.float32)
    if INVERSE:  # the backward: the transpose of a rotation is its inverse
        sin = -sin
    q_blocks = tl.cdiv(q_heads, HEADS)
    if block < q_blocks:
        head = block * HEADS + row % HEADS
        x_ptr = q_ptr + s * q_stride_s + b * q_stride_b + head * q_stride_n
        y_ptr = q_out_ptr + (token * q_heads + head) * WIDTH
        valid = (s < positions) & (head < q_heads)
        _rotate_rows(x_ptr, y_ptr, cos, sin, valid, WIDTH, INTERLEAVED, POSITIONS * HEADS, PAIRS)
    else:
        head = (block - q_blocks) * HEADS + row % HEADS
        x_ptr = k_ptr + s * k_stride_s + b * k_stride_b + head * k_stride_n
        y_ptr = k_out_ptr + (token * k_heads + head) * WIDTH
        valid = (s < positions) & (head < k_heads)
        _rotate_rows(x_ptr, y_ptr, cos, sin, valid, WIDTH, INTERLEAVED, POSITIONS * HEADS, PAIRS)


def config(heads: int, width: int) -> tuple[int, int, int, int]:
    """The positions, heads and pairs of a program's tile, and its warps. A thread has 8 pairs.

    `heads` is the larger number of q's and k's heads.
    """
    pairs = next_power_of_2(width // 2)
    heads = min(next_power_of_2(heads), max(1, 1024 // pairs))
    return max(1, 1024 // (heads * pairs)), heads, pairs, 4


def _launch(
    q: Tensor, k: Tensor, cos_sd: Tensor, sin_sd: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    # The kernel takes any strides but the last, so that slices of a fused q/k/v projection need no copy.
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    s, b, q_heads, width = q.shape
    k_heads = k.shape[2]
    if launches(q_out) or launches(k_out):
        positions, heads, pairs, warps = config(max(q_heads, k_heads), width)
        grid = triton.cdiv(s, positions), b, triton.cdiv(q_heads, heads) + triton.cdiv(k_heads, heads)
        _rotate_kernel[grid](
            *(q, k, cos_sd, sin_sd, q_out, k_out, s, q_heads, k_heads, *q.stride()[:3], *k.stride()[:3]),
            *(width, interleaved, inverse, positions, heads, pairs),
            num_warps=warps,
        )
    return q_out, k_out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos_sd: Tensor, sin_sd: Tensor, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        cos_sd = cos_sd.contiguous()
        sin_sd = sin_sd.contiguous()
        # Not q and k: the gradient of a rotation does not depend on its input.
        ctx.save_for_backward(cos_sd, sin_sd)
        ctx.interleaved = interleaved
        return _launch(q, k, cos_sd, sin_sd, interleaved, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        cos_sd, sin_sd = ctx.saved_tensors
        return *_launch(grad_q, grad_k, cos_sd, sin_sd, ctx.interleaved, inverse=True), None, None, None


def rotate_qk(
    q_sbnd: Tensor,
    k_sbnd: Tensor,
    cos_sd: Tensor,
    sin_sd: Tensor,
    *,
    interleaved: bool = False,
    impl: Implementation = "torch",
) -> tuple[Tensor, Tensor]:
    """Rotated copies of queries and keys, each in its own dtype.

    q and k may have different numbers of heads and any strides. The tables [s, d] get no gradient, and must repeat over
    both halves. With `-sin` the rotation is the inverse. Raises ValueError for an odd d or tables of another shape.
    """
    s, b, _, d = q_sbnd.shape
    if d % 2 or k_sbnd.shape[:2] != (s, b) or k_sbnd.shape[3] != d or not cos_sd.shape == sin_sd.shape == (s, d):
        raise ValueError(
            f"cannot rotate q {tuple(q_sbnd.shape)} and k {tuple(k_sbnd.shape)} by cos {tuple(cos_sd.shape)} and sin "
            f"{tuple(sin_sd.shape)}: they must be [s, b, n, d] and [s, d] with the same s, b and d, and d even"
        )
    if fused(impl, q_sbnd):
        return _Rotate.apply(q_sbnd, k_sbnd, cos_sd, sin_sd, interleaved)
    return _reference(q_sbnd, cos_sd, sin_sd, interleaved), _reference(k_sbnd, cos_sd, sin_sd, interleaved)


def rotate(x_sbnd: Tensor, cos_sd: Tensor, sin_sd: Tensor, impl: Implementation = "torch") -> Tensor:
    """Rotate each pair of each of n heads of width d, in the half layout, by the angle of its position.

    It is computed in the tables' dtype and returned in x's.
    """
    if fused(impl, x_sbnd):
        # The kernel takes a q and a k: no heads stand for k.
        return rotate_qk(x_sbnd, x_sbnd.detach()[:, :, :0], cos_sd, sin_sd, impl=impl)[0]
    return _reference(x_sbnd, cos_sd, sin_sd, interleaved=False)
