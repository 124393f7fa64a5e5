"""Rotary position embedding (Su et al., arXiv 2104.09864) of queries and keys, both in one pass.

Forward and backward move 4 bytes each for a bf16 element. A head of width d has d/2 pairs of elements, and pair i is
rotated by angle i of its position. Pair i is (i, i + d/2), as at Hugging Face. The tables cos and sin [s, d] repeat
over both halves. With tables of width w below d, the first w dimensions of a head are rotated like a head of this
width, and the others stay as they are.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar_kernels.dispatch import (
    Implementation,
    apply_function,
    fused,
    launches,
    next_power_of_2,
    on_gpu,
    tl,
    triton,
)
from megapar_kernels.one_graph import OneGraph

__all__ = ["rotate", "rotate_qk", "split_and_rotate_qkv"]


def _reference(x_sbnd: Tensor, cos_sd: Tensor, sin_sd: Tensor) -> Tensor:
    width = cos_sd.shape[-1]
    if width < x_sbnd.shape[-1]:
        rotated = _reference(x_sbnd[..., :width], cos_sd, sin_sd)
        return torch.cat((rotated, x_sbnd[..., width:]), dim=-1)
    first, second = x_sbnd.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_sbnd * cos_sd[:, None, None, :] + turned * sin_sd[:, None, None, :]).to(x_sbnd.dtype)


@triton.jit
def _rotate_tile(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, cos, sin, valid, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate the heads that begin at the pointers x_ptr [positions, heads, 1]; store them at y_ptr.

    cos and sin [positions, 1, PAIRS] are those of all heads.
    """
    kind = y_ptr.dtype.element_ty
    pair = tl.arange(0, PAIRS)[None, None, :]
    inside = valid & (pair < WIDTH // 2)
    first = tl.load(x_ptr + pair, inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + WIDTH // 2 + pair, inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + pair, (first * cos - second * sin).to(kind), inside)
    tl.store(y_ptr + WIDTH // 2 + pair, (second * cos + first * sin).to(kind), inside)


@triton.jit
def _rotate_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, positions, q_heads, k_heads,
    q_stride_s, q_stride_b, q_stride_n, k_stride_s, k_stride_b, k_stride_n,
    q_out_stride_s, q_out_stride_b, q_out_stride_n, k_out_stride_s, k_out_stride_b, k_out_stride_n,
    WIDTH: tl.constexpr, INVERSE: tl.constexpr,
    POSITIONS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate a tile. The program is (block of heads and of positions, sample), with q's heads before k's.

    All heads of some positions follow one another, as they do in memory.
    """
    program = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    q_blocks = tl.cdiv(q_heads, HEADS)
    blocks = q_blocks + tl.cdiv(k_heads, HEADS)
    block = program % blocks
    s = program // blocks * POSITIONS + tl.arange(0, POSITIONS)[:, None, None]
    pair = tl.arange(0, PAIRS)[None, None, :]
    inside = (s < positions) & (pair < WIDTH // 2)
    cos = tl.load(cos_ptr + s * WIDTH + pair, inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + s * WIDTH + pair, inside, other=0.0).to(tl.float32)
    if INVERSE:  # the backward: the transpose of a rotation is its inverse
        sin = -sin
    of_block = tl.arange(0, HEADS)[None, :, None]
    if block < q_blocks:
        head = block * HEADS + of_block
        x_ptr = q_ptr + s * q_stride_s + b * q_stride_b + head * q_stride_n
        y_ptr = q_out_ptr + s * q_out_stride_s + b * q_out_stride_b + head * q_out_stride_n
        _rotate_tile(x_ptr, y_ptr, cos, sin, (s < positions) & (head < q_heads), WIDTH, PAIRS)
    else:
        head = (block - q_blocks) * HEADS + of_block
        x_ptr = k_ptr + s * k_stride_s + b * k_stride_b + head * k_stride_n
        y_ptr = k_out_ptr + s * k_out_stride_s + b * k_out_stride_b + head * k_out_stride_n
        _rotate_tile(x_ptr, y_ptr, cos, sin, (s < positions) & (head < k_heads), WIDTH, PAIRS)


def config(heads: int, width: int) -> tuple[int, int, int, int]:
    """The positions, heads and pairs of a program's tile, and its warps. A thread has 8 pairs.

    `heads` is the larger number of q's and k's heads. The fastest of 90 tried on an H200, within 1 %.
    """
    pairs = next_power_of_2(width // 2)
    heads = min(next_power_of_2(heads), max(1, 1024 // pairs))
    return max(1, 1024 // (heads * pairs)), heads, pairs, 4


def _launch(
    q: Tensor,
    k: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    cos_sd: Tensor,
    sin_sd: Tensor,
    *,
    inverse: bool,
) -> None:
    """Write the rotated q and k to q_out and k_out by the kernel.

    All are [s, b, n, d], of any strides. Only the stride of the width must be 1 in q_out and k_out.
    """
    # The kernel takes any strides but the last, so that slices of a fused q/k/v projection need no copy.
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    s, b, q_heads, width = q.shape
    k_heads = k.shape[2]
    written = (q_out, k_out) if q_out.numel() else (k_out, q_out)
    if launches(*written, q, k, cos_sd, sin_sd):
        positions, heads, pairs, warps = config(max(q_heads, k_heads), width)
        blocks = triton.cdiv(q_heads, heads) + triton.cdiv(k_heads, heads)
        _rotate_kernel[triton.cdiv(s, positions) * blocks, b](
            *(q, k, cos_sd, sin_sd, q_out, k_out, s, q_heads, k_heads),
            *(stride for x in (q, k, q_out, k_out) for stride in x.stride()[:3]),
            *(width, inverse, positions, heads, pairs),
            num_warps=warps,
        )


def _rotate_formula(q: Tensor, k: Tensor, cos_sd: Tensor, sin_sd: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """Rotated copies of q and k, to be compiled."""
    sin_sd = -sin_sd if inverse else sin_sd
    return _reference(q, cos_sd, sin_sd).contiguous(), _reference(k, cos_sd, sin_sd).contiguous()


_rotate_in_one_graph = OneGraph(_rotate_formula)


def _rotate_contiguous(q: Tensor, k: Tensor, cos_sd: Tensor, sin_sd: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """Rotated copies of q and k by the kernel, contiguous."""
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    _rotate_pair(q, k, q_out, k_out, cos_sd, sin_sd, True, inverse=inverse)
    return q_out, k_out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos_sd: Tensor, sin_sd: Tensor, impl: Implementation
    ) -> tuple[Tensor, Tensor]:
        cos_sd = cos_sd.contiguous()
        sin_sd = sin_sd.contiguous()
        # Not q and k: the gradient of a rotation does not depend on its input.
        ctx.save_for_backward(cos_sd, sin_sd)
        ctx.rotate = _rotate_in_one_graph if impl == "inductor" else _rotate_contiguous
        rotated: tuple[Tensor, Tensor] = ctx.rotate(q, k, cos_sd, sin_sd, False)
        return rotated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        cos_sd, sin_sd = ctx.saved_tensors
        return *ctx.rotate(grad_q, grad_k, cos_sd, sin_sd, True), None, None, None


def rotate_qk(
    q_sbnd: Tensor,
    k_sbnd: Tensor,
    cos_sd: Tensor,
    sin_sd: Tensor,
    *,
    impl: Implementation = "torch",
) -> tuple[Tensor, Tensor]:
    """Rotated copies of queries and keys, each in its own dtype.

    q and k may have different numbers of heads and any strides. The tables [s, w] get no gradient, and must repeat over
    both halves. With `-sin` the rotation is the inverse. Raises ValueError for an odd w or tables that do not fit.
    """
    s, b, _, d = q_sbnd.shape
    width = cos_sd.shape[-1]
    tables_fit = cos_sd.shape == sin_sd.shape == (s, width) and width % 2 == 0 and width <= d
    if not tables_fit or k_sbnd.shape[:2] != (s, b) or k_sbnd.shape[3] != d:
        raise ValueError(
            f"cannot rotate q {tuple(q_sbnd.shape)} and k {tuple(k_sbnd.shape)} by cos {tuple(cos_sd.shape)} and sin "
            f"{tuple(sin_sd.shape)}: they must be [s, b, n, d] and [s, w] with the same s, b and d, and an even w "
            "of at most d"
        )
    if impl == "inductor" or fused(impl, q_sbnd):
        return _Rotate.apply(q_sbnd, k_sbnd, cos_sd, sin_sd, impl)
    return _reference(q_sbnd, cos_sd, sin_sd), _reference(k_sbnd, cos_sd, sin_sd)


def rotate(x_sbnd: Tensor, cos_sd: Tensor, sin_sd: Tensor, impl: Implementation = "torch") -> Tensor:
    """Rotate each pair of each of n heads of width d by the angle of its position.

    It is computed in the tables' dtype and returned in x's.
    """
    if impl == "inductor" or fused(impl, x_sbnd):
        # The kernel takes a q and a k: no heads stand for k.
        return rotate_qk(x_sbnd, x_sbnd.detach()[:, :, :0], cos_sd, sin_sd, impl=impl)[0]
    return _reference(x_sbnd, cos_sd, sin_sd)


def _rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> None:
    """Write x, rotated, to `out` by torch's ops. Both are [s, b, n, d] with any strides.

    cos [s, 1, 1, d] is the whole table, and sin [s, 1, 1, d/2] its first half, which the other one repeats.
    """
    wide = torch.promote_types(x.dtype, cos.dtype)
    x = x.to(wide)
    # A 16-bit `out` would round between the two products.
    y = out if out.dtype == wide else torch.empty_like(x)
    sign = -1 if inverse else 1
    torch.mul(x, cos, out=y)
    x_first, x_second = x.chunk(2, dim=-1)
    y_first, y_second = y.chunk(2, dim=-1)
    y_first.addcmul_(x_second, sin, value=-sign)
    y_second.addcmul_(x_first, sin, value=sign)
    if y is not out:
        out.copy_(y)


def _empty_heads(x_sbnd: Tensor, heads_apart: bool) -> Tensor:
    """An uninitialized tensor [s, b, n, d]. With `heads_apart` the rows of a head follow one another in memory."""
    s, b, n, d = x_sbnd.shape
    if not heads_apart:
        return torch.empty(s, b, n, d, dtype=x_sbnd.dtype, device=x_sbnd.device)
    return torch.empty(b, n, s, d, dtype=x_sbnd.dtype, device=x_sbnd.device).permute(2, 0, 1, 3)


def _heads(qkv_sbc: Tensor, q_heads: int, kv_heads: int, width: int) -> tuple[Tensor, ...]:
    """q, k and v [s, b, n, d] as views of the fused projection."""
    return qkv_sbc.unflatten(-1, (-1, width)).split_with_sizes((q_heads, kv_heads, kv_heads), dim=2)


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_heads: int,
        kv_heads: int,
        cos_sd: Tensor,
        sin_sd: Tensor,
        use_kernel: bool,
        heads_apart: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        cos_sd = cos_sd.contiguous()
        sin_sd = sin_sd.contiguous()
        ctx.save_for_backward(cos_sd, sin_sd)
        ctx.sizes = (q_heads, kv_heads, qkv.shape[2] // (q_heads + 2 * kv_heads))
        ctx.use_kernel = use_kernel
        q, k, v = _heads(qkv, *ctx.sizes)
        q_out, k_out, v_out = (_empty_heads(x, heads_apart) for x in (q, k, v))
        _rotate_pair(q, k, q_out, k_out, cos_sd, sin_sd, use_kernel, inverse=False)
        # v is copied, because a view of the projection would keep all of it in memory until the backward pass.
        v_out.copy_(v)
        return q_out, k_out, v_out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor
    ) -> tuple[Tensor, None, None, None, None, None, None]:
        cos_sd, sin_sd = ctx.saved_tensors
        q_heads, kv_heads, width = ctx.sizes
        s, b = grad_q.shape[:2]
        # All three write into the gradient of the projection, so that nothing is concatenated.
        grad = torch.empty(s, b, (q_heads + 2 * kv_heads) * width, dtype=grad_q.dtype, device=grad_q.device)
        q_out, k_out, v_out = _heads(grad, *ctx.sizes)
        _rotate_pair(grad_q, grad_k, q_out, k_out, cos_sd, sin_sd, ctx.use_kernel, inverse=True)
        v_out.copy_(grad_v)
        return grad, None, None, None, None, None, None


def _split_formula(
    qkv: Tensor, q_heads: int, kv_heads: int, width: int, cos_sd: Tensor, sin_sd: Tensor, heads_apart: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k rotated, and v, in the order of `_empty_heads`. To be compiled."""
    q, k, v = _heads(qkv, q_heads, kv_heads, width)
    rotated = _reference(q, cos_sd, sin_sd), _reference(k, cos_sd, sin_sd), v
    if not heads_apart:
        q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in rotated)
    else:
        apart = (x.permute(1, 2, 0, 3).clone(memory_format=torch.contiguous_format) for x in rotated)
        q, k, v = (x.permute(2, 0, 1, 3) for x in apart)
    return q, k, v


def _joined_formula(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos_sd: Tensor, sin_sd: Tensor) -> Tensor:
    """The gradient of the projection. To be compiled."""
    grads = _reference(grad_q, cos_sd, -sin_sd), _reference(grad_k, cos_sd, -sin_sd), grad_v
    return torch.cat([grad.flatten(2) for grad in grads], dim=-1)


_split_in_one_graph = OneGraph(_split_formula)
_joined_in_one_graph = OneGraph(_joined_formula)


class _CompiledSplitAndRotate(torch.autograd.Function):
    """Split and rotate q, k and v by one compiled graph forward and one backward."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_heads: int, kv_heads: int, cos_sd: Tensor, sin_sd: Tensor, heads_apart: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos_sd, sin_sd)
        width = qkv.shape[2] // (q_heads + 2 * kv_heads)
        return _split_in_one_graph(qkv, q_heads, kv_heads, width, cos_sd, sin_sd, heads_apart)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor
    ) -> tuple[Tensor, None, None, None, None, None]:
        return _joined_in_one_graph(grad_q, grad_k, grad_v, *ctx.saved_tensors), None, None, None, None, None


def _rotate_pair(
    q: Tensor,
    k: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    cos_sd: Tensor,
    sin_sd: Tensor,
    use_kernel: bool,
    *,
    inverse: bool,
) -> None:
    """Write the rotated q and k to q_out and k_out, by the kernel or by torch's ops."""
    width = cos_sd.shape[-1]
    if width < q.shape[-1]:
        for x, out in ((q, q_out), (k, k_out)):
            out[..., width:].copy_(x[..., width:])
        q, k, q_out, k_out = (x[..., :width] for x in (q, k, q_out, k_out))
    if use_kernel:
        _launch(q, k, q_out, k_out, cos_sd, sin_sd, inverse=inverse)
        return
    cos, sin = cos_sd[:, None, None, :], sin_sd[:, None, None, : width // 2]
    _rotate_into(q_out, q, cos, sin, inverse)
    _rotate_into(k_out, k, cos, sin, inverse)


def split_and_rotate_qkv(
    qkv_sbc: Tensor, q_heads: int, kv_heads: int, cos_sd: Tensor, sin_sd: Tensor, impl: Implementation = "torch"
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, each [s, b, n, d], from the fused projection [s, b, c]. q and k are rotated.

    c = (q_heads + 2 * kv_heads) * d: the query heads, then the heads of k, then those of v. The results are in the
    order in memory preferred by torch's SDPA on their device. The tables [s, w] get no gradient. The gradient of the
    projection is written once. Raises ValueError for an odd w, or shapes that do not fit.
    """
    width = cos_sd.shape[-1]
    heads = q_heads + 2 * kv_heads
    columns_fit = qkv_sbc.shape[2] % heads == 0 and width % 2 == 0 and width * heads <= qkv_sbc.shape[2]
    if not columns_fit or not cos_sd.shape == sin_sd.shape == (qkv_sbc.shape[0], width):
        raise ValueError(
            f"cannot split and rotate qkv {tuple(qkv_sbc.shape)} by cos {tuple(cos_sd.shape)} and sin "
            f"{tuple(sin_sd.shape)}: they must be [s, b, ({q_heads} + 2 * {kv_heads}) d] and [s, w], with an even w of "
            "at most d"
        )
    # A CPU's SDPA multiplies the rows of one head at a time: with heads apart in memory it is up to a third faster. A
    # GPU's reads the order [s, b, n, d] as fast.
    heads_apart = not on_gpu(qkv_sbc, impl)
    if impl == "inductor":
        return _CompiledSplitAndRotate.apply(qkv_sbc, q_heads, kv_heads, cos_sd, sin_sd, heads_apart)
    use_kernel = fused(impl, qkv_sbc)
    return apply_function(_SplitAndRotate, qkv_sbc, q_heads, kv_heads, cos_sd, sin_sd, use_kernel, heads_apart)
