"""Norms and gated activations that write FP8 codes: the bits of quantizing their results, and the same gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from megapar_kernels import activations, norms, quantize
from megapar_kernels.dispatch import Implementation
from megapar_kernels.packed import Packed
from torch import Tensor

from tests.support.kernel_checks import DEVICE, needs_triton, poisoned
from tests.support.sweeps import slow_but

pytestmark = [needs_triton, pytest.mark.gpu]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE).requires_grad_()


def check(op: Callable[..., Any], inputs: list[Tensor], impl: Implementation) -> None:
    """Compare `op` with packed=True, bit by bit, with a quantization of what it returns without."""
    with poisoned():
        found = op(*inputs, impl=impl, packed=True)
    expected = op(*inputs, impl=impl)
    found, expected = ([x] if isinstance(x, Tensor) else list(x) for x in (found, expected))
    assert isinstance(found[0], Packed)
    assert (found[0].shape, found[0].dtype) == (expected[0].shape, expected[0].dtype)
    rows = quantize.quantize_rows(expected[0].detach())
    assert torch.equal(found[0].rows, rows)
    assert torch.equal(found[0] * 1, quantize.restore_rows(rows, expected[0].dtype))  # any other op gets the numbers
    assert all(torch.equal(x, y) for x, y in zip(found[1:], expected[1:], strict=True))
    grads = [draw(*x.shape, seed=9).detach() for x in expected]
    ours, theirs = (torch.autograd.grad(outputs, inputs, grads) for outputs in (found, expected))
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    with torch.no_grad():
        alone = op(*inputs, impl=impl, packed=True)
    assert torch.equal((alone if isinstance(alone, Tensor) else alone[0]).rows, rows)


# Whole rows in a tile, with columns that do not exist; tiles of several rows; rows that take several warps.
SHAPES = [(5, 2, 384), (35, 128), (3, 4096), (2, 1408)]
OPS = ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"]


@pytest.mark.parametrize(("name", "shape"), slow_but([0, 5, 6, 11], [(o, s) for o in OPS for s in SHAPES]), ids=str)
def test_norms(name: str, shape: tuple[int, ...]) -> None:
    inputs = [draw(*shape, seed=1)]
    inputs += [draw(*shape, seed=2)] if name.startswith("add") else []
    inputs += [draw(shape[-1], seed=3 + i) for i in range(2 if "layer" in name else 1)]
    check(partial(getattr(norms, name), eps=1e-5), inputs, "triton")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["swiglu", "geglu", "reglu_squared"])
def test_gated_activations(name: str, weighted: bool) -> None:
    """Rows of 11 groups, in two blocks of columns: the second ends within a tile."""
    inputs = [draw(5, 2 * 1408, seed=1)] + ([draw(5, 1, seed=2, dtype=torch.float32)] if weighted else [])
    check(getattr(activations, name), inputs, "triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_numbers_are_rounded_to_their_dtype_first(dtype: torch.dtype) -> None:
    check(activations.swiglu, [draw(3, 512, dtype=dtype)], "triton")
    check(partial(norms.rms_norm, eps=1e-5), [draw(3, 256, dtype=dtype), draw(256, dtype=dtype)], "triton")


def test_heads_of_a_fused_projection() -> None:
    """A part of wider rows is normalized where it lies."""
    x = draw(3, 4, 3 * 128).detach().view(3, 4, 3, 128)[..., :2, :].requires_grad_()
    check(partial(norms.rms_norm, eps=1e-5), [x, draw(128, seed=1)], "triton")


def test_what_one_kernel_cannot_do_is_quantized_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows too wide for a tile, torch's ops, and GPUs before Ada."""
    with monkeypatch.context() as patch:
        patch.setattr(norms, "forward_config", lambda columns, adds: None)
        check(partial(norms.rms_norm, eps=1e-5), [draw(3, 256), draw(256, seed=1)], "triton")
    for impl in ("torch", "triton"):
        monkeypatch.setattr(quantize, "capability", lambda device: (8, 0))
        check(activations.swiglu, [draw(3, 512)], impl)
        check(partial(norms.add_rms_norm, eps=1e-5), [draw(3, 256), draw(3, 256, seed=1), draw(256, seed=2)], impl)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_widths_that_do_not_fit_are_refused(impl: Implementation) -> None:
    with pytest.raises(ValueError, match="rows have 100 numbers"):
        norms.rms_norm(draw(3, 100), draw(100), 1e-5, impl, packed=True)
    with pytest.raises(ValueError, match="rows have 100 numbers"):
        activations.swiglu(draw(3, 200), None, impl, packed=True)


def test_nan_in_one_group() -> None:
    x = draw(4, 1024).detach()
    x[2, 130] = float("nan")
    rows = activations.swiglu(x, impl="triton", packed=True)
    assert isinstance(rows, Packed)
    assert rows.restored().isnan().sum() == 128
