"""A column-parallel and a row-parallel layer, and their outputs and gradients on this rank."""

from collections.abc import Callable

import torch
from torch import Tensor

from megapar.activations.recompute import run
from megapar.declare.params import Init
from megapar.declare.sharding import Sharding
from megapar.linear.products import MatrixProducts
from megapar.linear.torch_products import TORCH_PRODUCTS
from megapar.tensor_parallel.layers import ColumnParallelLinear, Columns, RowParallelLinear

INIT = Init("normal", 0.1)
HIDDEN = 48
WIDE = 96


def whole_numbers(*shape: int, seed: int) -> Tensor:
    """Random whole numbers, small enough for every sum of their products to be exact: equal bits mean equal places."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).double()


def strided(x: Tensor) -> Tensor:
    """The same numbers, first and last dimension swapped in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def fractions(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Draw = Callable[..., Tensor]


def layers(
    sharding: Sharding, draw: Draw, products: MatrixProducts = TORCH_PRODUCTS
) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    columns = [Columns.even("a", WIDE, sharding.tp)]
    column = ColumnParallelLinear(HIDDEN, columns, sharding, init=INIT, bias=True, products=products)
    row = RowParallelLinear("b", WIDE, HIDDEN, sharding, init=INIT, bias=True, products=products)
    with torch.no_grad():
        for number, param in enumerate((*column.parameters(), *row.parameters())):
            seed = 10 * number + sharding.tp.rank
            if param is row.bias:
                seed = 10 * number  # every rank holds the same
            param.copy_(draw(*param.shape, seed=seed))
    return column, row


def results(sharding: Sharding, rows: int, batch: int, draw: Draw, recomputes: bool = False) -> list[Tensor]:
    """Output and gradients of a column-parallel and of a row-parallel layer, on this rank.

    `rows` is the length of the sequence between the layers on this rank.
    """
    tp = sharding.tp
    column, row = layers(sharding, draw)
    length = rows * tp.size if sharding.sequence_parallel else rows
    found: list[Tensor] = []
    for number, (layer, shape) in enumerate(((column, (rows, batch, HIDDEN)), (row, (length, batch, WIDE // tp.size)))):
        # Without sequence parallelism every rank has the same input of the column-parallel layer.
        own = tp.rank if sharding.sequence_parallel or layer is row else 0
        x = draw(*shape, seed=100 + 10 * number + own).to(sharding.device).requires_grad_()
        y = run(recomputes, layer, x)
        own = tp.rank if sharding.sequence_parallel or layer is column else 0
        y.backward(draw(*y.shape, seed=200 + 10 * number + own).to(sharding.device))
        gradients = [x.grad, *(param.grad for param in layer.parameters())]
        found += [y.detach(), *(grad for grad in gradients if grad is not None)]
    assert len(found) == 8
    return found
