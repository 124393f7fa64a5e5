"""Rows of tokens for their experts: copied, and summed by token with weights."""

from typing import Any

import pytest
import torch
from megapar_kernels import token_rows
from megapar_kernels.token_rows import permuted_rows, rows_of_tokens, sums_of_rows
from torch import Tensor

from tests.support.kernel_checks import DEVICE, compare, needs_triton, poisoned
from tests.support.sweeps import slow_but

pytestmark = [needs_triton, pytest.mark.gpu]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = slow_but([0, 4], [(layout, dtype) for layout in ("guarded", "strided") for dtype in DTYPES])
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


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS, ids=str)
@pytest.mark.parametrize(("tokens", "choices", "hidden"), SHAPES)
def test_rows_and_their_sums(tokens: int, choices: int, hidden: int, dtype: torch.dtype, layout: str) -> None:
    places = choices_of(tokens, choices)
    compare(rows_of_tokens, [random(tokens, hidden), *places], dtype, layout=layout)
    compare(sums_of_rows, [random(tokens * choices, hidden), *places], dtype, layout=layout)


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS, ids=str)
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


def test_all_rows_of_one_expert() -> None:
    compare(sums_of_rows, [random(18, 48), *choices_of(9, 2, experts=1)], torch.bfloat16)


def test_no_token_at_all() -> None:
    places = torch.zeros(0, dtype=torch.int64, device=DEVICE), torch.zeros(0, 2, dtype=torch.int64, device=DEVICE)
    rows = torch.ones(0, 8, device=DEVICE, requires_grad=True)
    with poisoned():
        y = sums_of_rows(rows_of_tokens(rows, *places, impl="triton"), *places, impl="triton")
        y.sum().backward()
    assert y.shape == (0, 8)
    assert rows.grad is not None


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_nan_of_one_token_stays_with_it(impl: Any) -> None:
    token_of_row, row_of_choice = choices_of(5, 2)
    rows = torch.ones(10, 8, device=DEVICE)
    rows[row_of_choice[3, 1]] = float("nan")
    y = sums_of_rows(rows, token_of_row, row_of_choice, impl)
    assert y.isnan().any(1).tolist() == [False, False, False, True, False]


def test_a_double_is_summed_in_double() -> None:
    places = choices_of(3, 2)
    rows = random(6, 8).detach().to(DEVICE)
    assert torch.equal(sums_of_rows(rows, *places, impl="triton"), sums_of_rows(rows, *places))


def test_each_row_is_moved_once_and_none_is_kept() -> None:
    """The fewest bytes: forward reads each row once, backward writes its gradient once. torch's ops pass over sums in
    fp32 k times."""
    moved: list[int] = []
    kept: list[Tensor] = []

    def noted(*tensors: Tensor) -> bool:
        moved.append(sum(x.nbytes for x in tensors if x.is_floating_point()))
        return True

    tokens, choices, hidden = 8, 4, 256
    rows = random(tokens * choices, hidden).detach().to(torch.bfloat16).to(DEVICE).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_rows, "launches", noted)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            y = sums_of_rows(rows, *choices_of(tokens, choices), impl="triton")
        y.sum().backward()
    assert moved == [rows.nbytes + y.nbytes] * 2
    assert not any(x.is_floating_point() for x in kept)
