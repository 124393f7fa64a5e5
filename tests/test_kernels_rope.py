"""Rotary embedding: torch's and the kernel's, in both layouts, against multiplication of complex numbers."""

from itertools import product
from unittest.mock import patch

import pytest
import torch
from megapar_kernels.rope import rotate, rotate_qk, split_and_rotate_qkv
from torch import Tensor

from tests.support.kernel_checks import (
    DEVICE,
    TOLERANCE,
    Guarded,
    compare,
    needs_triton,
    poisoned,
    relative_error,
    strided,
)
from tests.support.sweeps import slow_but

pytestmark = pytest.mark.gpu

HOWS = pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=needs_triton)])
# s, b, heads of q, heads of k, width: one block of positions, of heads, and several
SHAPES = [(1, 1, 1, 1, 2), (3, 2, 5, 1, 64), (9, 1, 4, 2, 80), (5, 3, 3, 3, 128), (7, 1, 33, 3, 64), (3, 1, 1, 7, 22)]
SHAPES += [(131, 1, 2, 1, 8)]


def tables(s: int, d: int) -> tuple[Tensor, Tensor]:
    """fp64 cos and sin [s, d] of random angles, repeated over both halves."""
    angles = (6 * torch.rand(s, d // 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)).repeat(1, 2)
    return angles.cos(), angles.sin()


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def heads(s: int, b: int, nq: int, nk: int, d: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments of rotate_qk in fp64; q and k require gradients."""
    return numbers(s, b, nq, d).requires_grad_(), numbers(s, b, nk, d).requires_grad_(), *tables(s, d)


def turned(x_sbnd: Tensor, cos_sd: Tensor, sin_sd: Tensor) -> Tensor:
    """Pairs as complex numbers, times exp(i angle); in fp64."""
    d = x_sbnd.shape[-1]
    first = x_sbnd[..., : d // 2]
    second = x_sbnd[..., d // 2 :]
    factor = torch.complex(cos_sd.double(), sin_sd.double())[:, None, None, : d // 2]
    z = torch.complex(first.double(), second.double()) * factor
    return torch.cat((z.real, z.imag), dim=-1)


@HOWS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_a_complex_product(impl: str, dtype: torch.dtype) -> None:
    """... and its gradient the product with the conjugate."""
    for shape in SHAPES:
        q, k, cos, sin = heads(*shape)
        q, k = (x.detach().to(DEVICE, dtype).requires_grad_() for x in (q, k))
        cos, sin = cos.float().to(DEVICE), sin.float().to(DEVICE)
        outputs = rotate_qk(q, k, cos, sin, impl=impl)
        upstream = [torch.randn_like(y) for y in outputs]
        grads = torch.autograd.grad(outputs, (q, k), upstream)
        for x, y, dy, dx in zip((q, k), outputs, upstream, grads, strict=True):
            assert relative_error(y, turned(x, cos, sin)) < TOLERANCE[dtype]
            assert relative_error(dx, turned(dy, cos, -sin)) < TOLERANCE[dtype]


@needs_triton
@pytest.mark.parametrize("dtype", slow_but([1], [torch.float32, torch.bfloat16, torch.float16]))
def test_kernel_equals_torch(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        compare(rotate_qk, heads(*shape), dtype, wide=(2, 3))
    compare(rotate_qk, heads(3, 2, 5, 1, 20), dtype, wide=(2, 3), layout="strided")


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inverse_restores_the_input(dtype: torch.dtype) -> None:
    q, k, cos, sin = (x.detach().float().to(DEVICE) for x in heads(5, 3, 4, 2, 80))
    q, k = q.to(dtype), k.to(dtype)
    there = rotate_qk(q, k, cos, sin, impl="triton")
    back = rotate_qk(*there, cos, -sin, impl="triton")
    for x, y in zip((q, k), back, strict=True):
        assert relative_error(y, x) < TOLERANCE[dtype]


@HOWS
def test_slices_of_a_fused_projection(impl: str) -> None:
    """Fault tensors-beyond-32-bits: q and k are strided views of one buffer; the buffer stays as it is, and gradients
    arrive in its right columns."""
    s, b, nq, nk, d = 3, 2, 6, 2, 80
    qkv = numbers(s, b, (nq + 2 * nk) * d).float().to(DEVICE).requires_grad_()
    before = qkv.detach().clone()
    q, k, v = (x.unflatten(-1, (-1, d)) for x in qkv.split([nq * d, nk * d, nk * d], dim=-1))
    cos, sin = (x.float().to(DEVICE) for x in tables(s, d))
    outputs = rotate_qk(q, k, cos, sin, impl=impl)
    assert all(y.is_contiguous() for y in outputs)
    upstream = [torch.randn_like(y) for y in outputs]
    (grad,) = torch.autograd.grad([*outputs, v], qkv, [*upstream, torch.full_like(v, 2.0)])
    expected = [turned(dy, cos, -sin).flatten(-2) for dy in upstream] + [torch.full_like(v, 2.0).flatten(-2)]
    assert relative_error(grad, torch.cat(expected, dim=-1)) < TOLERANCE[torch.float32]
    assert torch.equal(qkv, before)


@needs_triton
def test_any_strides() -> None:
    """Heads first, batch first, one head for all, width not innermost, expanded gradients."""
    cos, sin = (x.float().to(DEVICE) for x in tables(3, 6))
    q = numbers(4, 2, 3, 6).permute(2, 1, 0, 3).float().to(DEVICE)
    k = numbers(2, 3, 6, 5).permute(1, 0, 3, 2).float().to(DEVICE)
    assert (q.shape, q.stride(-1), k.shape, k.stride(-1)) == ((3, 2, 4, 6), 1, (3, 2, 5, 6), 5)
    one = q[:, :, :1].expand(-1, -1, 3, -1)
    for x, y in [(q, k), (k, q), (one, q), (q, one)]:
        for given, got in zip((x, y), rotate_qk(x, y, cos, sin, impl="triton"), strict=True):
            assert relative_error(got, turned(given, cos, sin)) < TOLERANCE[torch.float32]
    x = q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(rotate_qk(x, k, cos, sin, impl="triton")[0].sum(), x)
    assert relative_error(grad, turned(torch.ones_like(x), cos, -sin)) < TOLERANCE[torch.float32]


@needs_triton
def test_strided_tables() -> None:
    q, k, cos, sin = (x.detach().float().to(DEVICE) for x in heads(4, 1, 2, 1, 10))
    wide = torch.cat((cos, sin), dim=-1)
    ours = rotate_qk(q, k, wide[:, :10], wide[:, 10:], impl="triton")
    assert relative_error(ours[0], turned(q, cos, sin)) < TOLERANCE[torch.float32]


@needs_triton
def test_kernel_writes_its_outputs_alone() -> None:
    q, k, cos, sin = (x.detach().float().to(DEVICE) for x in heads(3, 2, 5, 3, 22))
    guards = []
    empty = torch.empty

    def guarded(*sizes: object, **options: object) -> Tensor:
        guards.append(Guarded(empty(*sizes, **options).fill_(float("nan"))))
        return guards[-1].tensor

    with patch.object(torch, "empty", guarded):
        outputs = rotate_qk(q, k, cos, sin, impl="triton")
    assert len(guards) == 2
    for guard, y in zip(guards, outputs, strict=True):
        guard.check()
        assert not y.isnan().any()


@needs_triton
def test_one_tensor() -> None:
    x, _, cos, sin = heads(3, 2, 5, 1, 22)
    compare(rotate, (x, cos, sin), torch.bfloat16, wide=(1, 2))


@needs_triton
def test_gradient_of_one_alone() -> None:
    """Of what alone requires one, and of what alone is used."""
    q, k, cos, sin = (x.detach().float().to(DEVICE) for x in heads(3, 2, 4, 2, 16))
    for number, (x, y) in enumerate([(q.clone().requires_grad_(), k), (q, k.clone().requires_grad_())]):
        used, wanted = rotate_qk(x, y, cos, sin, impl="triton")[number], (x, y)[number]
        (grad,) = torch.autograd.grad(used, wanted, torch.ones_like(used))
        assert relative_error(grad, turned(torch.ones_like(used), cos, -sin)) < TOLERANCE[torch.float32]
    q, k = q.requires_grad_(), k.requires_grad_()
    q_out, _ = rotate_qk(q, k, cos, sin, impl="triton")
    assert torch.autograd.grad(q_out.sum(), (q, k), allow_unused=True)[1].eq(0).all()


@needs_triton
def test_nothing_is_kept_without_gradients() -> None:
    q, k, cos, sin = (x.detach().float().to(DEVICE) for x in heads(3, 2, 4, 2, 16))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: pytest.fail("a tensor is saved"), lambda x: x):
        outputs = rotate_qk(q, k, cos, sin, impl="triton")
    with torch.no_grad():
        silent = rotate_qk(q.clone().requires_grad_(), k, cos, sin, impl="triton")
    assert all(y.grad_fn is None for y in (*outputs, *silent))
    assert all(torch.equal(y, z) for y, z in zip(outputs, silent, strict=True))


@needs_triton
def test_second_backward_is_caught_or_right() -> None:
    q, k, cos, sin = (x.detach().float().to(DEVICE) for x in heads(3, 2, 4, 2, 16))
    outputs = rotate_qk(q.requires_grad_(), k.requires_grad_(), cos, sin, impl="triton")
    upstream = [torch.randn_like(y) for y in outputs]
    first = torch.autograd.grad(outputs, (q, k), upstream, retain_graph=True)
    second = torch.autograd.grad(outputs, (q, k), upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(outputs, (q, k), upstream)


@needs_triton
@pytest.mark.parametrize("shape", [(0, 2, 3, 1, 4), (2, 0, 3, 1, 4), (2, 1, 0, 0, 4), (2, 1, 3, 0, 4), (2, 1, 0, 3, 4)])
def test_nothing_to_rotate(shape: tuple[int, ...]) -> None:
    q, k, cos, sin = (x.detach().float().to(DEVICE) for x in heads(*shape))
    for x, y in zip((q, k), rotate_qk(q, k, cos, sin, impl="triton"), strict=True):
        assert x.shape == y.shape
        assert relative_error(y, turned(x, cos, sin)) < TOLERANCE[torch.float32]


@HOWS
def test_shapes_that_do_not_fit_are_refused(impl: str) -> None:
    q, k, cos, sin = (x.detach().float().to(DEVICE) for x in heads(3, 2, 4, 2, 16))
    for wrong in [(q, k, cos[:2], sin), (q, k, cos[:, :8], sin), (q[:2], k, cos, sin), (q, k[:, :1], cos, sin)]:
        with pytest.raises(ValueError, match="cannot rotate"):
            rotate_qk(*wrong, impl=impl)
    with pytest.raises(ValueError, match="an even w of at most d"):
        rotate_qk(q[..., :5], k[..., :5], cos[:, :5], sin[:, :5], impl=impl)


@HOWS
@pytest.mark.parametrize(
    ("layout", "dtype"),
    slow_but([0, 3], product(["contiguous", "strided"], [torch.float32, torch.bfloat16])),
)
def test_split_and_rotation_in_one(impl: str, layout: str, dtype: torch.dtype) -> None:
    """q and k are complex products and v a copy; all of the projection's gradient is written, in its right columns."""
    for s, b, nq, nk, d in [*SHAPES, (0, 2, 3, 1, 4), (2, 0, 3, 1, 4)]:
        qkv = numbers(s, b, (nq + 2 * nk) * d).to(DEVICE, dtype)
        qkv = (strided(qkv) if layout == "strided" else qkv).requires_grad_()
        before = qkv.detach().clone()
        cos, sin = (x.float().to(DEVICE) for x in tables(s, d))
        with poisoned():
            outputs = split_and_rotate_qkv(qkv, nq, nk, cos, sin, impl=impl)
            upstream = [torch.randn_like(y) for y in outputs]
            if layout == "strided":
                upstream = [g.transpose(0, 1).contiguous().transpose(0, 1) for g in upstream]
            (grad,) = torch.autograd.grad(outputs, qkv, upstream)
        q, k, v = (x.unflatten(-1, (-1, d)) for x in qkv.detach().split([nq * d, nk * d, nk * d], dim=-1))
        assert torch.equal(outputs[2], v)
        for x, y in ((q, outputs[0]), (k, outputs[1])):
            assert (y.shape, y.dtype) == (x.shape, dtype)
            assert relative_error(y, turned(x, cos, sin)) < TOLERANCE[dtype]
        expected = [turned(g, cos, -sin) for g in upstream[:2]] + [upstream[2].double()]
        assert grad.is_contiguous()
        assert relative_error(grad, torch.cat([g.flatten(-2) for g in expected], dim=-1)) < TOLERANCE[dtype]
        assert torch.equal(grad[..., (nq + nk) * d :], upstream[2].flatten(-2))
        assert torch.equal(qkv, before)


@HOWS
def test_split_and_rotation_keep_the_tables_alone(impl: str) -> None:
    """The projection is free after the forward pass: no output shares its memory."""
    s, b, nq, nk, d = 5, 2, 4, 2, 16
    qkv = numbers(s, b, (nq + 2 * nk) * d).float().to(DEVICE).requires_grad_()
    cos, sin = (x.float().to(DEVICE) for x in tables(s, d))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        outputs = split_and_rotate_qkv(qkv, nq, nk, cos, sin, impl=impl)
    assert [x.data_ptr() for x in kept] == [cos.data_ptr(), sin.data_ptr()]
    for y in outputs:
        assert y.untyped_storage().data_ptr() != qkv.untyped_storage().data_ptr()
        # a CPU's SDPA reads one head after another, a GPU's one position after another
        assert (y if DEVICE.type == "cuda" else y.permute(1, 2, 0, 3)).is_contiguous()


@HOWS
def test_shapes_that_do_not_fit_are_refused_before_the_split(impl: str) -> None:
    qkv = torch.zeros(3, 2, 8 * 16, device=DEVICE)
    cos = torch.zeros(3, 16, device=DEVICE)
    for wrong in [(qkv, 4, 3, cos, cos), (qkv, 4, 2, cos[:2], cos[:2]), (qkv, 4, 2, cos, cos[:, :8])]:
        with pytest.raises(ValueError, match="cannot split and rotate"):
            split_and_rotate_qkv(*wrong, impl=impl)
    with pytest.raises(ValueError, match="an even w of at most d"):
        split_and_rotate_qkv(qkv[..., : 8 * 15], 4, 2, cos[:, :15], cos[:, :15], impl=impl)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU with 20 GB")
def test_offsets_beyond_2_31() -> None:
    """Fault tensors-beyond-32-bits: a small slice of a buffer with its last rows beyond 2^31 elements by its stride,
    and a large output."""
    s, d = 33000, 64
    qkv = torch.zeros(s, 1, 2**16 + 128, dtype=torch.bfloat16, device=DEVICE)
    qkv[-3:].normal_()
    cos, sin = (x.float().to(DEVICE) for x in tables(s, d))
    k = qkv[..., -128:].unflatten(-1, (2, d))
    q = qkv[..., :-128].unflatten(-1, (1024, d))
    for x, y in zip((q, k), rotate_qk(q, k, cos, sin, impl="triton"), strict=True):
        assert relative_error(y[-3:], turned(x[-3:], cos[-3:], sin[-3:])) < TOLERANCE[torch.bfloat16]
