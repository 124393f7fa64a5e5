"""The gated delta rule in chunks beside its recurrence in fp64, token by token: outputs, states and every gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megapar_kernels.delta_rule import NOTHING, delta_rule, log_decay
from torch import Tensor

from tests.support.sweeps import slow_but

Tensors = list[Tensor]


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What the module says, one token after the other: q and k [s, b, n, d], v [s, b, n, e], g [s, b, n, w]."""
    if state is None:
        state = q.new_zeros(*q.shape[1:], v.shape[-1])
    outputs = []
    for q_t, k_t, v_t, g_t, beta_t in zip(q, k, v, g, beta, strict=True):
        state = g_t.exp()[..., None] * state
        u = beta_t[..., None] * (v_t - torch.einsum("bnde,bnd->bne", state, k_t))
        state = state + k_t[..., None] * u[..., None, :]
        outputs.append(torch.einsum("bnde,bnd->bne", state, q_t))
    return torch.stack(outputs), state


def inputs(length: int, *, channels: bool, d: int = 6, e: int = 5, strength: float = 1.0, starts: Any = ()) -> Tensors:
    """q, k, v, g, beta and a first state in fp64, for two samples and three heads. Documents begin at `starts`."""
    torch.manual_seed(length)
    size = (length, 2, 3)
    q, k = (torch.nn.functional.normalize(torch.randn(*size, d, dtype=torch.float64), dim=-1) for _ in range(2))
    v = torch.randn(*size, e, dtype=torch.float64)
    g = -strength * torch.nn.functional.softplus(torch.randn(*size, d if channels else 1, dtype=torch.float64))
    for start in starts:
        g[start, :1] = NOTHING  # in one sample
    return [q, k, v, g, torch.rand(size, dtype=torch.float64), torch.randn(*size[1:], d, e, dtype=torch.float64)]


def with_gradients(rule: Callable[..., tuple[Tensor, Tensor]], given: Tensors) -> Tensors:
    """The outputs, the last state, and the gradients of all inputs for random gradients of both."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    found = rule(*leaves)
    torch.manual_seed(1)
    grads = [torch.randn(x.shape, dtype=torch.float64).to(x.dtype) for x in found]
    return [*found, *torch.autograd.grad(found, leaves, grads)]


def distances(found: Tensors, expected: Tensors) -> list[float]:
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(found, expected, strict=True)]


CHUNKS = (4, 64, 1, 2, 8, 16, 32)


@pytest.mark.parametrize("channels", [False, True], ids=["equal channels", "own decays"])
@pytest.mark.parametrize("chunk", slow_but([0, 1], CHUNKS))
@pytest.mark.parametrize("length", slow_but([1], (1, 37, 5, 64, 70, 129)))
def test_it_is_the_recurrence(length: int, chunk: int, channels: bool) -> None:
    """With documents that begin at the first and the last token, and on both sides of a chunk's end."""
    starts = {min(start, length - 1) for start in (0, length // 2, length // 2 + 1, chunk, length)}
    given = inputs(length, channels=channels, starts=starts)
    found = with_gradients(lambda *x: delta_rule(*x, chunk=chunk), given)
    expected = with_gradients(recurrence, given)
    found[5], expected[5] = (x.masked_fill(given[3] == NOTHING, 0.0) for x in (found[5], expected[5]))
    assert max(distances(found, expected)) < 1e-12


def test_without_a_first_state() -> None:
    given = inputs(11, channels=True)[:5]
    found = with_gradients(lambda *x: delta_rule(*x, chunk=4), given)
    assert max(distances(found, with_gradients(recurrence, given))) < 1e-12


@pytest.mark.parametrize("channels", [False, True], ids=["equal channels", "own decays"])
@pytest.mark.parametrize("strength", slow_but([0], (8.0, 0.05, 1.0)))
@pytest.mark.parametrize("length", slow_but([0], (200, 1000)))
def test_in_fp32(length: int, strength: float, channels: bool) -> None:
    """Decays so strong that a chunk forgets, and so weak that it keeps all: each as near as a sequential fp32 run."""
    given = [x.float() for x in inputs(length, channels=channels, d=32, e=24, strength=strength, starts=(90, 91, 150))]
    found = with_gradients(delta_rule, given)
    expected = with_gradients(recurrence, [x.double() for x in given])
    found[5], expected[5] = (x.masked_fill(given[3] == NOTHING, 0.0) for x in (found[5], expected[5]))
    assert max(distances(found, expected)) < 4e-7


def test_nothing_passes_the_start_of_a_document() -> None:
    """Bitwise: what is before a start changes neither outputs nor gradients behind it."""
    given = [x.float() for x in inputs(40, channels=False, starts=(17,))]
    other = [x.clone() for x in given]
    for x in other[:5]:
        x[:17, :1] = torch.rand_like(x[:17, :1])
    other[3][:17] *= -1
    found, expected = (delta_rule(*x[:5], chunk=16)[0] for x in (given, other))
    assert torch.equal(found[17:, 0], expected[17:, 0])


@pytest.mark.parametrize("floor", [0.0, -5.0])
@pytest.mark.parametrize("width", [1, 4])
def test_decays_and_their_gradients(width: int, floor: float) -> None:
    torch.manual_seed(0)
    a = torch.randn(5, 2, 3, width, dtype=torch.float64, requires_grad=True)
    a_log, dt_bias = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in (3, 3 * width))
    rate, steps = a_log.exp()[:, None], a + dt_bias.view(3, width)
    expected = floor * torch.sigmoid(rate * steps) if floor else -rate * torch.nn.functional.softplus(steps)
    torch.testing.assert_close(log_decay(a, a_log, dt_bias, floor), expected)
    assert torch.autograd.gradcheck(lambda *x: log_decay(*x, floor), (a, a_log, dt_bias))
