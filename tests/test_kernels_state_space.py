"""The scan of Mamba-2 in chunks against the recurrence, one token after the other, in fp64: values and gradients."""

import math
from typing import Any

import pytest
import torch
from megapar_kernels.delta_rule import NOTHING
from megapar_kernels.state_space import add_skip, state_space, time_steps
from torch import Tensor

from tests.support.sweeps import slow_but

SAMPLES, HEADS, GROUPS, WIDTH, STATE = 2, 6, 3, 5, 7
NAMES = ("x", "dt", "g", "b", "c", "state")


def inputs(length: int, starts: tuple[int, ...] = (), groups: int = GROUPS) -> dict[str, Tensor]:
    """Decays from hardly any to e^-30, and nothing at the starts of documents."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    g = -torch.exp(2.0 * normal(length, SAMPLES, HEADS) - 2.0)
    g[length // 2 :: 7] = -30.0
    g[list(starts)] = NOTHING
    found = {"x": normal(length, SAMPLES, HEADS, WIDTH), "dt": normal(length, SAMPLES, HEADS).exp(), "g": g}
    found |= {"b": normal(length, SAMPLES, groups, STATE), "c": normal(length, SAMPLES, groups, STATE)}
    return found | {"state": normal(SAMPLES, HEADS, STATE, WIDTH)}


def recurrence(x: Tensor, dt: Tensor, g: Tensor, b: Tensor, c: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The definition, by autograd."""
    b, c = (z.repeat_interleave(x.shape[2] // z.shape[2], dim=2) for z in (b, c))
    if state is None:
        state = x.new_zeros(*x.shape[1:3], b.shape[-1], x.shape[-1])
    outputs = []
    for t in range(len(x)):
        state = g[t].exp()[..., None, None] * state + b[t][..., :, None] * (dt[t][..., None] * x[t])[..., None, :]
        outputs.append((state * c[t][..., :, None]).sum(-2))
    return torch.stack(outputs), state


def with_gradients(function: Any, tensors: dict[str, Tensor], dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """Outputs and gradients for random gradients of both outputs."""
    leaves = {name: x.detach().to(dtype, copy=True).requires_grad_() for name, x in tensors.items()}
    found = function(*(leaves.get(name) for name in NAMES), **options)
    generator = torch.Generator().manual_seed(7)
    of_outputs = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(dtype) for y in found]
    torch.autograd.backward(found, of_outputs)
    gradients = {f"gradient of {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert len(gradients) == len(leaves)
    return {"y": found[0].detach(), "last state": found[1].detach(), **gradients}


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return errors as shares of the norm; of zeros as they are."""
    return {name: float((found[name].double() - x).norm() / (x.norm() or 1.0)) for name, x in expected.items()}


# (length, chunk, starts): chunks of one token, lengths below a chunk and that no chunk divides, starts anywhere.
CASES: list[tuple[int, int, tuple[int, ...]]] = [
    *((37, 8, ()), (1, 64, ()), (70, 64, (0, 33, 64)), (29, 1, (5,)), (29, 16, (1, 2, 28)), (129, 32, (100,))),
    *((length, chunk, ()) for length in (2, 63, 64, 65, 131) for chunk in (1, 2, 4, 8, 16, 32, 64)),
]


@pytest.mark.parametrize(("length", "chunk", "starts"), slow_but([0, 2, 4], CASES))
def test_chunks_are_the_recurrence(length: int, chunk: int, starts: tuple[int, ...]) -> None:
    tensors = inputs(length, starts)
    expected = with_gradients(recurrence, tensors, torch.float64)
    wrong = errors(with_gradients(state_space, tensors, torch.float64, chunk=chunk), expected)
    assert max(wrong.values()) <= 1e-12, wrong


@pytest.mark.parametrize("groups", [1, HEADS])
def test_any_number_of_heads_shares_a_group(groups: int) -> None:
    """Without a first state, which has no gradient then."""
    tensors = inputs(21, (4,), groups)
    del tensors["state"]
    expected = with_gradients(recurrence, tensors, torch.float64)
    wrong = errors(with_gradients(state_space, tensors, torch.float64, chunk=8), expected)
    assert max(wrong.values()) <= 1e-12, wrong


@pytest.mark.parametrize("length", slow_but([0], [100, 1000]))
def test_fp32_rounds_little(length: int) -> None:
    tensors = inputs(length, (0, length // 3))
    exact = {name: x.float().double() for name, x in tensors.items()}
    expected = with_gradients(recurrence, exact, torch.float64)
    wrong = errors(with_gradients(state_space, exact, torch.float32), expected)
    assert max(wrong.values()) <= 3e-7, wrong


def test_nothing_crosses_the_start_of_a_document() -> None:
    """Outputs and states behind a start are the same whatever is in front of it."""
    tensors = inputs(50, (20,))
    y, state = state_space(*tensors.values(), chunk=16)
    behind = {name: x[20:] for name, x in tensors.items() if name != "state"}
    y_alone, state_alone = state_space(*behind.values(), chunk=16)
    assert (y[20:] - y_alone).norm() <= 1e-12 * y_alone.norm()
    assert (state - state_alone).norm() <= 1e-12 * state_alone.norm()


@pytest.mark.parametrize("limit", [(0.0, math.inf), (0.3, 2.0)])
def test_time_steps_are_those_of_softplus_within_the_limit(limit: tuple[float, float]) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = ((9, 2, 4), (4,), (4,))
    raw, a_log, bias = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    leaves = [x.requires_grad_() for x in (raw, a_log, bias)]
    expected = (raw + bias).exp().log1p().clamp(*limit)
    weights = torch.randn(2, *expected.shape, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weights[0] - a_log.exp() * expected * weights[1]).sum(), leaves)
    dt, g = time_steps(raw, a_log, bias, limit)
    found = torch.autograd.grad((dt * weights[0] + g * weights[1]).sum(), leaves)
    for ours, theirs in zip((dt, g, *found), (expected, -a_log.exp() * expected, *wanted), strict=True):
        assert (ours - theirs).abs().max() <= 1e-13


def test_a_skip_adds_the_input_of_each_head() -> None:
    x, y = torch.randn(2, 4, 2, 3, 5, dtype=torch.float64).requires_grad_()
    d = torch.randn(3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn_like(x)
    wanted = torch.autograd.grad(((y + d[:, None] * x) * weights).sum(), (x, y, d))
    total = add_skip(y, x, d)
    assert (total - (y + d[:, None] * x)).abs().max() <= 1e-15
    for ours, theirs in zip(torch.autograd.grad((total * weights).sum(), (x, y, d)), wanted, strict=True):
        assert (ours - theirs).abs().max() <= 1e-13


class Total:
    """Keeps what is added to a main gradient."""

    def __init__(self) -> None:
        self.added: list[Tensor] = []

    def add(self, grad: Tensor) -> None:
        self.added.append(grad)


def test_gradients_of_bf16_parameters_are_added_to_their_main_gradients_in_fp32() -> None:
    a_log, bias, d = (torch.randn(4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    for param in (a_log, bias, d):
        param.main_grad = Total()  # type: ignore[attr-defined]
    raw = torch.randn(9, 2, 4, dtype=torch.bfloat16)
    dt, g = time_steps(raw, a_log, bias)
    y = add_skip(torch.randn(9, 2, 4, 5), torch.randn(9, 2, 4, 5, dtype=torch.bfloat16), d)
    torch.autograd.backward((dt.sum() + g.sum(), y.sum()))
    for param in (a_log, bias, d):
        (added,) = param.main_grad.added  # type: ignore[attr-defined]
        assert added.dtype == torch.float32
        assert param.grad is None
