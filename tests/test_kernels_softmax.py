"""Softmax of explicit scores, causal and by a mask: in fp32 of any dtype, forward and backward."""

import math
from typing import Any

import pytest
import torch
from megapar_kernels import softmax
from megapar_kernels.attention import causal_attention, causal_attention_dropout
from megapar_kernels.softmax import scaled_causal_softmax, scaled_masked_softmax
from torch import Tensor

from tests.support.kernel_checks import DEVICE, compare, needs_triton, poisoned, relative_error
from tests.support.sweeps import slow_but

pytestmark = [needs_triton, pytest.mark.gpu]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CAUSAL = [(1, 1), (1, 7), (7, 7), (5, 127), (129, 129), (3, 1000), (2, 4096), (40, 40)]


def scores_of(*shape: int) -> Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).requires_grad_()


def mask_of(*shape: int) -> Tensor:
    """Some rows see nothing, some all."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.4
    if shape[-2] > 1:
        mask[..., 0, :], mask[..., -1, :] = True, False
    return mask.to(DEVICE)


@pytest.mark.parametrize("dtype", slow_but([0, 1], DTYPES))
@pytest.mark.parametrize(("queries", "columns"), CAUSAL)
def test_causal(queries: int, columns: int, dtype: torch.dtype) -> None:
    compare(scaled_causal_softmax, [scores_of(2, queries, columns), 0.3], dtype)


def test_causal_of_many_rows() -> None:
    compare(scaled_causal_softmax, [scores_of(241, 17, 17), 0.3], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_of_wider_rows(dtype: torch.dtype) -> None:
    compare(scaled_causal_softmax, [scores_of(2, 3, 9, 33), 0.3], dtype, layout="strided")
    compare(scaled_masked_softmax, [scores_of(2, 3, 9, 33), mask_of(2, 3, 9, 33), 0.3], dtype, layout="strided")


MASKS = [(2, 3, 5, 129), (1, 1, 5, 129), (2, 1, 5, 129), (1, 3, 1, 129), (2, 1, 1, 129), (5, 1), (129,), (2, 3, 5, 1)]


@pytest.mark.parametrize("dtype", slow_but([0, 1], DTYPES))
@pytest.mark.parametrize("shape", MASKS)
def test_masks_that_broadcast(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    mask = mask_of(*shape) if len(shape) > 1 else mask_of(1, *shape)[0]
    compare(scaled_masked_softmax, [scores_of(2, 3, 5, 129), mask, 0.3], dtype)


@pytest.mark.parametrize("shape", [(1, 1), (4, 7), (3, 2, 127), (2, 1000), (2, 4096)])
def test_masked_of_fewer_dimensions(shape: tuple[int, ...]) -> None:
    compare(scaled_masked_softmax, [scores_of(*shape), mask_of(*shape), 0.3], torch.float32)


def test_a_transposed_mask() -> None:
    compare(
        scaled_masked_softmax, [scores_of(2, 3, 33, 9), mask_of(3, 2, 9, 33).permute(1, 0, 3, 2), 0.3], torch.float32
    )


def test_a_causal_mask_is_the_causal_softmax() -> None:
    x = scores_of(2, 9, 33).detach().float().to(DEVICE)
    future = torch.ones(9, 33, dtype=torch.bool, device=DEVICE).triu(1 + 33 - 9)
    for impl in ("torch", "triton"):
        assert torch.equal(scaled_masked_softmax(x, future, 0.3, impl), scaled_causal_softmax(x, 0.3, impl))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_what_is_masked_counts_for_nothing(impl: Any) -> None:
    """Infinite and huge scores in masked places; a fully masked row is zeros, with a gradient of zeros."""
    x = torch.randn(3, 40, device=DEVICE)
    mask = mask_of(3, 40)
    dirty = x.masked_fill(mask, math.inf).requires_grad_()
    y = scaled_masked_softmax(dirty, mask, 0.5, impl)
    y.backward(torch.randn(3, 40, device=DEVICE))
    assert torch.equal(y, scaled_masked_softmax(x, mask, 0.5, impl))
    assert not y[mask].any()
    assert not y[0].any()
    assert torch.allclose(y[1:].sum(-1), torch.ones(2, device=DEVICE))
    assert dirty.grad is not None
    assert not dirty.grad[mask].any()
    assert torch.isfinite(dirty.grad).all()


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_huge_scores_do_not_overflow_and_nan_is_seen(impl: Any) -> None:
    x = torch.full((2, 2), 3e38, device=DEVICE)
    assert scaled_causal_softmax(x, 1.0, impl).tolist() == [[1.0, 0.0], [0.5, 0.5]]
    x[1, 0] = math.nan
    y = scaled_causal_softmax(x, 1.0, impl)
    assert y[0].tolist() == [1.0, 0.0]
    assert torch.isnan(y[1]).all()


@pytest.mark.parametrize("scale", [-0.7, 1.0, 1e-3])
def test_scales(scale: float) -> None:
    compare(scaled_causal_softmax, [scores_of(2, 7, 33), scale], torch.float32)


def test_rows_longer_than_a_program_holds_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "LONGEST", 32)
    x, mask = scores_of(2, 33).detach().float().to(DEVICE), mask_of(2, 33)
    assert torch.equal(scaled_causal_softmax(x, 0.3, "triton"), scaled_causal_softmax(x, 0.3))
    assert torch.equal(scaled_masked_softmax(x, mask, 0.3, "triton"), scaled_masked_softmax(x, mask, 0.3))


def test_needs_no_gradient_and_leaves_its_input_alone() -> None:
    x = torch.randn(3, 40, device=DEVICE)
    before = x.clone()
    with poisoned():
        y = scaled_causal_softmax(x, 0.3, "triton")
    assert not y.requires_grad
    assert torch.equal(x, before)


def test_a_second_backward_gives_the_same_gradient_or_raises() -> None:
    x = scores_of(5, 33).detach().float().to(DEVICE).requires_grad_()
    y = scaled_causal_softmax(x, 0.3, "triton")[..., 0].sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x)


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 4), (0, 0)])
def test_empty_scores(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, device=DEVICE, requires_grad=True)
    mask = torch.zeros(shape, dtype=torch.bool, device=DEVICE)
    (scaled_causal_softmax(x, 0.3, "triton").sum() + scaled_masked_softmax(x, mask, 0.3, "triton").sum()).backward()
    assert x.grad is not None
    assert x.grad.shape == shape


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_more_queries_than_positions_are_refused(impl: Any) -> None:
    with pytest.raises(ValueError, match="5 queries of 4 positions"):
        scaled_causal_softmax(torch.ones(5, 4), 0.3, impl)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_attention_with_dropout_that_drops_nothing_is_attention(impl: Any) -> None:
    q, k, v = torch.randn(3, 9, 2, 3, 8, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    keep = torch.ones(2, 3, 9, 9, dtype=torch.bool, device=DEVICE)
    y = causal_attention_dropout(q, k, v, keep, 0.0, impl=impl)
    assert relative_error(y, causal_attention(q.double(), k.double(), v.double())) < 1e-6
