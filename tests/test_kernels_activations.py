"""Activations: their values against the formulas, their kernels against torch's in fp64."""

import math
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
from megapar_kernels import activations
from megapar_kernels.activations import bias_gelu, geglu, gelu, reglu_squared, relu_squared, swiglu
from megapar_kernels.bounded_swiglu import clamped_swiglu, swiglu_step
from torch import Tensor

from tests.support.kernel_checks import DEVICE, Guarded, compare, needs_triton, poisoned, relative_error, strided
from tests.support.sweeps import slow_but

pytestmark = pytest.mark.gpu

Op = Callable[..., Tensor]
GATED, PLAIN = (swiglu, geglu, reglu_squared), (relu_squared, gelu, bias_gelu)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(op: Op, *shape: int) -> list[Tensor]:
    """The op's arguments in fp64 for an output of this shape; they require gradients."""
    generator = torch.Generator().manual_seed(3)
    sizes = [(*shape[:-1], 2 * shape[-1] if op in GATED else shape[-1])]
    sizes += [(shape[-1],)] if op is bias_gelu else []
    return [2 * torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]


def formula(op: Op, x: Tensor, *bias: Tensor) -> Tensor:
    """What the op means, written out."""

    def tanh_gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    f = x.shape[-1] // 2
    if op is swiglu:
        return x[..., :f] / (1 + torch.exp(-x[..., :f])) * x[..., f:]
    if op is geglu:
        return tanh_gelu(x[..., :f]) * x[..., f:]
    if op is reglu_squared:
        return x[..., :f].clamp(min=0) ** 2 * x[..., f:]
    return x.clamp(min=0) ** 2 if op is relu_squared else tanh_gelu(x + sum(bias))


@pytest.mark.parametrize("op", GATED + PLAIN)
def test_references_are_the_formulas(op: Op) -> None:
    arguments = inputs(op, 3, 5)
    ours, theirs = op(*arguments), formula(op, *arguments)
    assert relative_error(ours, theirs) < 1e-14
    upstream = torch.randn_like(ours)
    for mine, other in zip(*(torch.autograd.grad(y, arguments, upstream) for y in (ours, theirs)), strict=True):
        assert relative_error(mine, other) < 1e-14


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("op", GATED)
def test_one_buffer_of_gradients_has_the_bits_of_autograd(op: Op, dtype: torch.dtype) -> None:
    """torch's ops, differentiated by autograd, compute the same numbers in the same order. One input has a NaN."""
    activation = activations.TORCH[{swiglu: "silu", geglu: "gelu", reglu_squared: "relu_squared"}[op]]
    for shape in [(3, 5), (2, 3, 127), (0, 4), (64, 129)]:
        x = inputs(op, *shape)[0].detach().to(DEVICE, dtype)
        if x.numel():
            x[0, ..., 1] = float("nan")
        for given in (x, strided(x)):
            given = given.requires_grad_()
            gate, up = given.chunk(2, dim=-1)
            expected = activation(gate) * up
            upstream = torch.randn_like(expected)
            with poisoned():
                y = op(given)
                (grad,) = torch.autograd.grad(y, given, upstream)
            (expected_grad,) = torch.autograd.grad(expected, given, upstream)
            torch.testing.assert_close(y, expected, rtol=0.0, atol=0.0, equal_nan=True)
            torch.testing.assert_close(grad, expected_grad, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("op", GATED)
def test_gated_activation_keeps_its_input_alone(op: Op) -> None:
    x = inputs(op, 3, 8)[0].detach().float().to(DEVICE).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = op(x)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]
    assert y.requires_grad


@needs_triton
@pytest.mark.parametrize("dtype", slow_but([0, 1], DTYPES))
@pytest.mark.parametrize("op", GATED + PLAIN)
def test_kernels_equal_torch(op: Op, dtype: torch.dtype) -> None:
    for shape in [(1, 1), (3, 7), (2, 5, 127), (4, 129), (3, 1000), (129,), (2, 4096)]:
        compare(op, inputs(op, *shape), dtype)


@needs_triton
@pytest.mark.parametrize("op", [geglu, bias_gelu])
def test_many_short_rows_share_programs(op: Op) -> None:
    for rows, columns in [(4097, 7), (513, 24), (4096, 1)]:
        compare(op, inputs(op, rows, columns), torch.bfloat16)


@needs_triton
@pytest.mark.parametrize("op", GATED + PLAIN)
def test_strided_inputs_and_gradients(op: Op) -> None:
    compare(op, inputs(op, 3, 5, 70), torch.bfloat16, layout="strided")

    def transposed(*arguments: Tensor, impl: str) -> Tensor:
        """Its upstream gradient is strided."""
        return op(*arguments, impl=impl).transpose(0, 1)

    compare(transposed, inputs(op, 3, 5, 70), torch.float32)


@needs_triton
@pytest.mark.parametrize("op", GATED + PLAIN)
def test_kernels_write_their_outputs_alone(op: Op) -> None:
    """Guard bands around all outputs of the kernels, and inputs left as they were."""
    arguments = [x.detach().float().to(DEVICE).requires_grad_() for x in inputs(op, 5, 131)]
    before = [x.detach().clone() for x in arguments]
    guards = []
    empty, empty_like = torch.empty, torch.empty_like

    def guarded(x: Tensor) -> Tensor:
        guards.append(Guarded(x.fill_(float("nan"))))
        return guards[-1].tensor

    with (
        patch.object(torch, "empty", lambda *a, **k: guarded(empty(*a, **k))),
        patch.object(torch, "empty_like", lambda *a, **k: guarded(empty_like(*a, **k))),
    ):
        y = op(*arguments, impl="triton")
        grads = torch.autograd.grad(y, arguments, torch.ones_like(op(*before)))
    assert len(guards) >= 2
    for guard in guards:
        guard.check()
    assert not any(x.isnan().any() for x in (y, *grads))
    assert all(torch.equal(x, old) for x, old in zip(arguments, before, strict=True))


@needs_triton
@pytest.mark.parametrize("op", GATED + PLAIN)
def test_nothing_is_kept_without_gradients(op: Op) -> None:
    frozen = [x.detach().float().to(DEVICE) for x in inputs(op, 3, 9)]
    thawed = [x.clone().requires_grad_() for x in frozen]
    with torch.no_grad():
        silent = op(*thawed, impl="triton")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: pytest.fail("a tensor is saved"), lambda x: x):
        plain = op(*frozen, impl="triton")
    assert silent.grad_fn is None
    assert plain.grad_fn is None
    assert torch.equal(silent, plain)
    assert torch.equal(silent, op(*thawed, impl="triton"))


@needs_triton
@pytest.mark.parametrize("op", GATED + PLAIN)
def test_second_backward_is_caught_or_right(op: Op) -> None:
    arguments = [x.detach().float().to(DEVICE).requires_grad_() for x in inputs(op, 3, 9)]
    y = op(*arguments, impl="triton")
    upstream = torch.randn_like(y)
    first = torch.autograd.grad(y, arguments, upstream, retain_graph=True)
    second = torch.autograd.grad(y, arguments, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, arguments, upstream)


@needs_triton
def test_bias_gradient_alone() -> None:
    x, bias = inputs(bias_gelu, 6, 33)
    compare(bias_gelu, [x.detach(), bias], torch.float32)
    compare(bias_gelu, [x, bias.detach()], torch.float32)


@needs_triton
@pytest.mark.parametrize("op", GATED + PLAIN)
def test_large_values_infinities_and_nan(op: Op) -> None:
    """No overflow in exponentials makes a NaN, and no NaN of the input gets lost: infinities and NaN of the value and
    of its derivative have the same places as torch's on a CPU. (x sigmoid(x) is NaN at -inf there, too: -inf times
    0.)"""
    finite, infinity = [-1e4, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e4], float("inf")
    x = torch.tensor([*finite, -infinity, infinity, float("nan")])
    bias = [torch.zeros(len(x))] if op is bias_gelu else []
    results = []
    for impl, device in (("torch", torch.device("cpu")), ("triton", DEVICE)):
        gate = x.to(device, copy=True).requires_grad_()
        whole = torch.cat((gate, torch.ones_like(gate))) if op in GATED else gate
        y = op(whole[None], *(b.to(device) for b in bias), impl=impl)
        (grad,) = torch.autograd.grad(y.sum(), gate)
        results.append((y.cpu()[0], grad.cpu()))
    torch.testing.assert_close(results[1], results[0], equal_nan=True)
    assert all(torch.isfinite(result[: len(finite)]).all() for result in results[1])
    assert all(result[-1].isnan() for result in results[1])


@needs_triton
def test_no_rows() -> None:
    for shape in [(0, 6), (3, 0)]:
        x = torch.ones(shape, device=DEVICE, requires_grad=True)
        y = swiglu(x, impl="triton")
        assert y.shape == (shape[0], shape[1] // 2)
        assert torch.autograd.grad(y.sum(), x)[0].shape == shape


@pytest.mark.parametrize("limit", [0.2, 3.0])
def test_a_bound_behind_silu_is_that_of_torch(limit: float) -> None:
    """Value and gradient in fp64 are those of silu, two clamps and a product."""
    (x,) = inputs(swiglu, 7, 33)
    gate, up = x.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    found = swiglu_step(x, limit=limit)
    assert relative_error(found, expected) < 1e-14
    upstream = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad(y, x, upstream, retain_graph=True)[0] for y in (found, expected))
    assert relative_error(ours, theirs) < 1e-14


# Weights of rows


def weighted_inputs(rows: int, columns: int) -> list[Tensor]:
    """Gate and up, then a weight for each row; fp64, both with a gradient."""
    weights = torch.rand(rows, 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return [*inputs(swiglu, rows, columns), weights.requires_grad_()]


@pytest.mark.parametrize("op", [*GATED, partial(clamped_swiglu, limit=1.5), partial(swiglu_step, limit=0.5)])
def test_weights_multiply_rows(op: Op) -> None:
    """Values and both gradients are those of a product behind the activation."""
    x, weights = weighted_inputs(7, 33)
    ours, theirs = op(x, weights), op(x) * weights
    assert relative_error(ours, theirs) < 1e-14
    upstream = torch.randn_like(ours)
    for mine, other in zip(*(torch.autograd.grad(y, (x, weights), upstream) for y in (ours, theirs)), strict=True):
        assert relative_error(mine, other) < 1e-14


@needs_triton
@pytest.mark.parametrize(
    ("layout", "dtype"), slow_but([0, 4], [(layout, dtype) for layout in ("guarded", "strided") for dtype in DTYPES])
)
@pytest.mark.parametrize("op", GATED)
def test_kernels_with_weights_equal_torch(op: Op, layout: str, dtype: torch.dtype) -> None:
    """fp32 weights, as routers give them: one row, odd sizes, rows of several blocks, many rows in a program."""
    for rows, columns in [(1, 1), (3, 7), (5, 127), (9, 1025), (9, 2500), (40, 24)]:
        compare(op, weighted_inputs(rows, columns), dtype, wide=[1], layout=layout)


@needs_triton
def test_weights_in_16_bits_and_many_short_rows() -> None:
    compare(swiglu, weighted_inputs(9, 48), torch.bfloat16)
    compare(swiglu, weighted_inputs(4097, 7), torch.bfloat16, wide=[1])
    x, weights = weighted_inputs(9, 48)
    compare(swiglu, [x, weights.detach()], torch.bfloat16, wide=[1])


@needs_triton
def test_kernels_with_weights_write_their_outputs_alone() -> None:
    x, weights = (tensor.detach().float().to(DEVICE).requires_grad_() for tensor in weighted_inputs(5, 1027))
    guards = []
    empty, empty_like = torch.empty, torch.empty_like

    def guarded(tensor: Tensor) -> Tensor:
        guards.append(Guarded(tensor.fill_(float("nan"))))
        return guards[-1].tensor

    with (
        patch.object(torch, "empty", lambda *a, **k: guarded(empty(*a, **k))),
        patch.object(torch, "empty_like", lambda *a, **k: guarded(empty_like(*a, **k))),
    ):
        y = swiglu(x, weights, impl="triton")
        grads = torch.autograd.grad(y, (x, weights), torch.ones(5, 1027, device=DEVICE))
    assert len(guards) == 3
    for guard in guards:
        guard.check()
    assert not any(tensor.isnan().any() for tensor in (y, *grads))


@pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=needs_triton)])
def test_no_rows_with_weights_and_nan_of_one_row(impl: str) -> None:
    """A weight of 0 has a gradient. The NaN of a row reaches neither another row nor its weight."""
    x, weights = (tensor.detach().float().to(DEVICE) for tensor in weighted_inputs(5, 40))
    x[3, 2] = float("nan")
    weights[1] = 0.0
    x.requires_grad_(), weights.requires_grad_()
    with poisoned():
        y = swiglu(x, weights, impl=impl)
        grads = torch.autograd.grad(y.sum(), (x, weights))
        nothing = swiglu(x[:0], weights[:0], impl=impl)
        empty = torch.autograd.grad(nothing.sum(), (x, weights))
    for found in (y, *grads):
        assert found.isnan().any(1).tolist() == [False, False, False, True, False]
    assert grads[1][1].abs() > 0
    assert not grads[0][1].any()
    assert not any(grad.any() for grad in empty)


@pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=needs_triton)])
def test_weights_that_do_not_fit_are_refused(impl: str) -> None:
    with pytest.raises(ValueError, match=r"weights \(2,\) do not fit"):
        swiglu(torch.ones(2, 6, device=DEVICE), torch.ones(2, device=DEVICE), impl=impl)


@pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=needs_triton)])
def test_shapes_that_do_not_fit_are_refused(impl: str) -> None:
    with pytest.raises(ValueError, match="odd"):
        swiglu(torch.ones(2, 5, device=DEVICE), impl=impl)
    with pytest.raises(ValueError, match=r"must be \[5\]"):
        bias_gelu(torch.ones(2, 5, device=DEVICE), torch.ones(1, device=DEVICE), impl=impl)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU with 40 GB")
def test_offsets_beyond_2_31() -> None:
    """Fault tensors-beyond-32-bits: the last rows of inputs, output and gradients beyond 2^31 elements."""
    rows, f = 2**17 + 5, 2**14
    gate_up = torch.zeros(rows, 2 * f, dtype=torch.bfloat16, device=DEVICE)
    gate_up[-3:].normal_()
    gate_up.requires_grad_()
    last = gate_up.detach()[-3:].clone().requires_grad_()
    y, y_last = swiglu(gate_up, impl="triton"), swiglu(last)
    upstream = torch.ones_like(y)
    (grad,) = torch.autograd.grad(y, gate_up, upstream)
    (grad_last,) = torch.autograd.grad(y_last, last, upstream[-3:])
    assert y.numel() > 2**31
    assert relative_error(y[-3:], y_last) < 8e-3
    assert relative_error(grad[-3:], grad_last) < 8e-3
