"""fp32 products by oneDNN: against fp64, in their places, and in layouts beside one process."""

import pytest
import torch
from megapar_kernels import onednn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megapar.linear.torch_products import TorchProducts
from tests.support import grid
from tests.support.kernel_checks import relative_error, strided
from tests.support.width import in_each_layout, trains_as_one_process

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN counts as faster on any CPU."""
    monkeypatch.setattr(onednn, "IS_FASTER", True)


@pytest.fixture
def chosen_always(chosen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of rows and small matrices too."""
    monkeypatch.setattr(onednn, "MULTIPLE_OF_ROWS", 1)
    monkeypatch.setattr(onednn, "LEAST_MATRIX", 1)


class Calls(TorchDispatchMode):
    """Counts the products of oneDNN."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += func is torch.ops.mkldnn._linear_pointwise.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [(0,), (1,), (64,), (5, 13), (3, 0, 2)])
@pytest.mark.parametrize(("outputs", "inputs"), [(257, 300), (1, 64), (640, 1)])
@pytest.mark.parametrize("biased", [False, True])
def test_product(rows: tuple[int, ...], outputs: int, inputs: int, biased: bool) -> None:
    """Contiguous, strided and transposed: the input, and the matrix."""
    x, matrix = draw(*rows, inputs), draw(outputs, inputs, seed=1)
    bias = draw(outputs, seed=2) if biased else None
    exact = x.double() @ matrix.double().t() + (0.0 if bias is None else bias.double())
    turned = matrix.t().contiguous().t()
    for x_form in (x, strided(x), x.transpose(0, -1).contiguous().transpose(0, -1)):
        for matrix_form in (matrix, strided(matrix), turned):
            y = onednn.linear(x_form, matrix_form, bias)
            assert y.shape == exact.shape
            assert not y._is_view()  # tensor-parallel ranks add their parts in place
            assert not y.numel() or relative_error(y, exact) < 1e-6


@pytest.mark.parametrize(("outputs", "inputs"), [(256, 512), (300, 257), (96, 5000)])
def test_a_row_has_the_same_bits_in_any_chunk(outputs: int, inputs: int) -> None:
    x, matrix = draw(384, inputs), draw(outputs, inputs, seed=1)
    for weight in (matrix, matrix.t().contiguous().t()):
        whole = onednn.linear(x, weight)
        for first, stop in ((0, 64), (64, 192), (320, 384)):
            assert torch.equal(onednn.linear(x[first:stop], weight), whole[first:stop])


def test_what_it_takes(chosen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of whole micro-batches: those of experts and prompts would compile code for each number of rows."""
    matrix, small = draw(256, 256), draw(255, 256)
    x = draw(2, 64, 256)
    assert onednn.takes(x, matrix)
    assert not onednn.takes(x, small)
    assert not onednn.takes(x[:, :63], matrix)
    assert not onednn.takes(x.bfloat16(), matrix.bfloat16())
    assert not onednn.takes(x.double(), matrix.double())
    assert not onednn.takes(x.to("meta"), matrix.to("meta"))
    assert not onednn.takes(x.requires_grad_(), matrix)  # the op has no derivative
    with torch.no_grad():
        assert onednn.takes(x, matrix)
    monkeypatch.setattr(onednn, "IS_FASTER", False)
    assert not onednn.takes(x.detach(), matrix)


@pytest.mark.parametrize("biased", [False, True])
def test_products_of_layers(chosen: None, biased: bool) -> None:
    """Forward and input gradient are oneDNN's, whole and in slices with the same bits. Weight gradients are torch's."""
    products = TorchProducts()
    x, weight, grad = draw(2, 128, 300), draw(257, 300, seed=1), draw(2, 128, 257, seed=2)
    bias = draw(257, seed=3) if biased else None
    with Calls() as calls:
        y = products.forward(x, weight, bias)
        grad_x = products.input_gradient(grad, weight)
    assert calls.number == 2
    assert torch.equal(y, onednn.linear(x, weight, bias))
    assert relative_error(grad_x, grad.double() @ weight.double()) < 1e-6
    with Calls() as calls:
        for tokens in (slice(0, 64), slice(64, 128)):
            y_part, grad_part = torch.full_like(y, torch.nan), torch.full_like(grad_x, torch.nan)
            products.forward_slices(y_part[:, tokens], x[:, tokens], weight, bias)
            products.input_gradient_slices(grad_part[:, tokens], grad[:, tokens], weight)
            assert torch.equal(y_part[:, tokens], y[:, tokens])
            assert torch.equal(grad_part[:, tokens], grad_x[:, tokens])
        assert calls.number == 8  # two slices of two chunks, twice
        products.weight_gradient(grad.flatten(0, 1), x.flatten(0, 1))
        products.forward_into(torch.empty(128, 257), x[0], weight)  # experts' and the head's: any number of rows
        products.input_gradient_into(torch.empty(128, 300), grad[0], weight)
        assert calls.number == 8


@in_each_layout
def test_it_trains_as_one_process(chosen_always: None, sizes: dict[str, object]) -> None:
    with Calls() as calls:
        TorchProducts().forward(draw(3, 16), draw(8, 16), None)
    assert calls.number == 1  # so ranks, which are forked, compute by oneDNN too
    trains_as_one_process(grid.LLAMA, sizes)
