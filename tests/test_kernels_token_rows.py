"""Rows of tokens for their experts: copied, and summed by token with weights."""

from typing import Any

import pytest
import torch
from megapar_kernels import token_rows
from megapar_kernels.token_rows import permuted_rows, rows_of_tokens, weighted_sum
from torch import Tensor

from tests.support.kernel_checks import DEVICE, compare, needs_triton, poisoned

pytestmark = [needs_triton, pytest.mark.gpu]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Tokens, choices, hidden: one token, odd sizes, several blocks of columns, one choice, no power of two.
SHAPES = [(1, 1, 1), (1, 8, 40), (7, 2, 33), (65, 3, 130), (5, 6, 1025), (3, 8, 4096), (17, 1, 64), (2, 10, 257)]


def choices_of(tokens: int, choices: int, experts: int = 4) -> tuple[Tensor, Tensor]:
    """token_of_row and row_of_choice, with rows sorted by expert. With one expert it gets all rows."""
    generator = torch.Generator().manual_seed(tokens + choices)
    chosen = torch.randint(0, experts, (tokens * choices,), generator=generator)
    order = torch.argsort(chosen, stable=True)
    return (order // choices).to(DEVICE), torch.argsort(order).view(tokens, choices).to(DEVICE)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["guarded", "strided"])
@pytest.mark.parametrize(("tokens", "choices", "hidden"), SHAPES)
def test_rows_and_their_sums(tokens: int, choices: int, hidden: int, dtype: torch.dtype, layout: str) -> None:
    """Weights are fp32, as routers give them."""
    places = choices_of(tokens, choices)
    compare(rows_of_tokens, [random(tokens, hidden), *places], dtype, layout=layout)
    weights = torch.rand(tokens, choices, dtype=torch.float64).requires_grad_()
    compare(weighted_sum, [random(tokens * choices, hidden), weights, *places], dtype, wide=[1], layout=layout)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["guarded", "strided"])
def test_permuted_rows(dtype: torch.dtype, layout: str) -> None:
    """Exact copies in both directions."""
    for tokens, choices, hidden in SHAPES:
        order = choices_of(tokens, choices)[1].flatten()
        compare(permuted_rows, [random(len(order), hidden), order, torch.argsort(order)], dtype, layout=layout)
    order = choices_of(9, 4)[1].flatten()
    x = torch.randn(36, 40, device=DEVICE).to(dtype).requires_grad_()
    for impl in ("torch", "triton"):
        y = permuted_rows(x, order, torch.argsort(order), impl)
        assert torch.equal(y, x[order])
        (grad,) = torch.autograd.grad(y, x, x)
        assert torch.equal(grad[order], x)


def test_all_rows_of_one_expert_and_weights_in_16_bits() -> None:
    places = choices_of(9, 2, experts=1)
    weights = torch.rand(9, 2, dtype=torch.float64).requires_grad_()
    compare(weighted_sum, [random(18, 48), weights, *places], torch.bfloat16)


def test_no_token_at_all() -> None:
    places = torch.zeros(0, dtype=torch.int64, device=DEVICE), torch.zeros(0, 2, dtype=torch.int64, device=DEVICE)
    rows = torch.ones(0, 8, device=DEVICE, requires_grad=True)
    weights = torch.ones(0, 2, device=DEVICE, requires_grad=True)
    with poisoned():
        y = weighted_sum(rows_of_tokens(rows, *places, impl="triton"), weights, *places, impl="triton")
        y.sum().backward()
    assert y.shape == (0, 8)
    assert rows.grad is not None


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_nan_of_one_token_stays_with_it(impl: Any) -> None:
    token_of_row, row_of_choice = choices_of(5, 2)
    rows = torch.ones(10, 8, device=DEVICE)
    rows[row_of_choice[3, 1]] = float("nan")
    y = weighted_sum(rows, torch.ones(5, 2, device=DEVICE), token_of_row, row_of_choice, impl)
    assert y.isnan().any(1).tolist() == [False, False, False, True, False]


def test_a_double_is_summed_in_double() -> None:
    places = choices_of(3, 2)
    rows = random(6, 8).detach().to(DEVICE)
    weights = torch.ones(3, 2, dtype=torch.float64, device=DEVICE)
    assert torch.equal(weighted_sum(rows, weights, *places, impl="triton"), weighted_sum(rows, weights, *places))


def test_a_backward_moves_each_row_twice() -> None:
    """The fewest bytes: every row is read and its gradient written once. torch's ops pass over sums in fp32 k times."""
    moved: list[int] = []

    def noted(*tensors: Tensor) -> bool:
        moved.append(sum(x.nbytes for x in tensors if x.is_floating_point()))
        return True

    tokens, choices, hidden = 8, 4, 256
    places = choices_of(tokens, choices)
    rows = random(tokens * choices, hidden).detach().to(torch.bfloat16).to(DEVICE).requires_grad_()
    weights = torch.rand(tokens, choices, device=DEVICE, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_rows, "launches", noted)
        weighted_sum(rows, weights, *places, impl="triton").sum().backward()
    of_rows, of_tokens, of_weights = rows.nbytes, rows.nbytes // choices, weights.nbytes
    assert moved == [of_tokens + of_rows + of_weights, of_tokens + 2 * of_rows + 2 * of_weights]
