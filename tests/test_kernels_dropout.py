"""Dropout-add: the kernel's mask is that of megapar.declare.random in both directions, and its sum rounds once."""

from typing import Any

import pytest
import torch
from megapar_kernels.dropout import dropout_add, keep_mask, mix
from torch import Tensor

from megapar.declare.random import row_keys
from tests.support.kernel_checks import DEVICE, Guarded, compare, needs_triton, poisoned

pytestmark = [needs_triton, pytest.mark.gpu]

# Rows, columns: tiles of one row and of many, whole and cut.
SHAPES = [(1, 1), (5, 7), (3, 127), (4, 129), (2, 1000), (3, 4096), (4097, 2)]


def keys_of(rows: int) -> Tensor:
    samples = torch.tensor([0, 5, 2**32 - 1, 2**40 + 3], device=DEVICE).repeat(rows // 4 + 1)[:rows]
    return row_keys(123456789, 11, samples, torch.arange(rows, device=DEVICE))


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.75, 0.9, 1e-9])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_kernels_mask_is_the_references_to_the_bit(rows: int, columns: int, p: float) -> None:
    """Fault dropout-masks-of-whole-model. Probabilities on both sides of 2^31 and of one in 2^32; keys with and without
    the top bit."""
    keys = keys_of(rows)
    x = torch.ones(rows, columns, device=DEVICE, requires_grad=True)
    y = dropout_add(x, torch.zeros_like(x), keys, p, impl="triton")
    y.backward(torch.ones_like(y))
    assert torch.equal(y != 0, keep_mask(keys, columns, p))
    assert x.grad is not None
    assert torch.equal(x.grad != 0, keep_mask(keys, columns, p))


@pytest.mark.parametrize("more", [0, 1])
def test_a_hash_equal_to_the_threshold_is_kept(more: int) -> None:
    """... and one below it is dropped."""
    keys = keys_of(1)
    x = torch.ones(1, 1, device=DEVICE)
    p = (int(mix(keys)) + more) / 2**32
    for impl in ("torch", "triton"):
        assert bool(dropout_add(x, torch.zeros_like(x), keys, p, impl) != 0) == (more == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_sum_and_gradients(rows: int, columns: int, dtype: torch.dtype) -> None:
    compare(dropout_add, [numbers(rows, columns), numbers(rows, columns), keys_of(rows), 0.1], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_of_wider_rows(dtype: torch.dtype) -> None:
    compare(
        dropout_add, [numbers(2, 3, 129), numbers(2, 3, 129), keys_of(6).view(3, 2).t(), 0.5], dtype, layout="strided"
    )


def test_a_bf16_branch_joins_an_fp32_residual() -> None:
    compare(dropout_add, [numbers(3, 129), numbers(3, 129), keys_of(3), 0.5], torch.bfloat16, wide=[1])


def test_rounds_once() -> None:
    """bf16 sums are those of fp32, rounded; torch's own round x / (1 - p) first."""
    x, residual = (numbers(4, 256).detach().to(DEVICE, torch.bfloat16) for _ in range(2))
    keys = keys_of(4)
    exact = residual.float() + x.float() * keep_mask(keys, 256, 0.1) / (1.0 - 0.1)
    assert torch.equal(dropout_add(x, residual, keys, 0.1, impl="triton"), exact.bfloat16())


@pytest.mark.parametrize("wanted", [(False, True), (True, False)])
def test_only_one_input_wants_a_gradient(wanted: tuple[bool, bool]) -> None:
    inputs: list[Any] = [numbers(3, 127).detach().requires_grad_(w) for w in wanted]
    compare(dropout_add, [*inputs, keys_of(3), 0.5], torch.float32)


def test_leaves_its_inputs_and_their_neighbors_alone() -> None:
    guards = [Guarded(torch.randn(3, 129, device=DEVICE)) for _ in range(2)]
    before = [guard.tensor.clone() for guard in guards]
    with poisoned():
        y = dropout_add(guards[0].tensor, guards[1].tensor, keys_of(3), 0.5, impl="triton")
    assert torch.isfinite(y).all()
    assert not y.requires_grad
    for guard, copy in zip(guards, before, strict=True):
        guard.check()
        assert torch.equal(guard.tensor, copy)


def test_a_second_backward_gives_the_same_gradient_or_raises() -> None:
    x = numbers(3, 127).detach().float().to(DEVICE).requires_grad_()
    y = dropout_add(x, x.detach(), keys_of(3), 0.5, impl="triton").sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 2, 5)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, device=DEVICE, requires_grad=True)
    keys = torch.zeros(shape[:-1], dtype=torch.int64, device=DEVICE)
    y = dropout_add(x, torch.ones_like(x), keys, 0.5, impl="triton")
    y.sum().backward()
    assert y.shape == shape
    assert x.grad is not None
    assert x.grad.shape == shape


def test_without_keys_nothing_is_dropped() -> None:
    x, residual = torch.randn(2, 3, 5, device=DEVICE)
    assert torch.equal(dropout_add(x, residual, None, 0.5, impl="triton"), residual + x)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(("residual", "keys"), [((3, 1), (3,)), ((4, 3), (3,)), ((3, 4), (2,)), ((3, 4), (3, 1))])
def test_other_shapes_are_refused(residual: tuple[int, ...], keys: tuple[int, ...], impl: Any) -> None:
    with pytest.raises(ValueError, match="dropout_add: x, residual and keys"):
        dropout_add(torch.ones(3, 4), torch.ones(residual), torch.zeros(keys, dtype=torch.int64), 0.5, impl)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="not run: needs a GPU")
def test_more_than_two_to_the_31_elements() -> None:
    """Fault tensors-beyond-32-bits."""
    x = torch.ones(2**19 + 1, 4096, dtype=torch.bfloat16, device=DEVICE)
    keys = row_keys(1, 2, torch.arange(x.shape[0], device=DEVICE))
    y = dropout_add(x, torch.zeros_like(x), keys, 0.5, impl="triton")
    for rows in (slice(0, 64), slice(-64, None)):
        assert torch.equal(y[rows] != 0, keep_mask(keys[rows], 4096, 0.5))
