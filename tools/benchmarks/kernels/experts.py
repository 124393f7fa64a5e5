"""Copies and sums of experts' rows, and the weight gradients of all experts in one launch."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from megapar_kernels import token_rows
from megapar_kernels.backend import Kernels
from megapar_kernels.dispatch import Implementation
from megapar_kernels.grouped import RowGroups
from torch import Tensor

from benchmarks.kernels import peers
from benchmarks.kernels.ops import Case, Maker
from megapar.expert_parallel.row_counts import inverse_of
from megapar.linear.torch_products import TorchProducts


class Model(NamedTuple):
    """Sizes of a layer of experts; `tokens` of one micro-batch."""

    name: str
    tokens: int
    hidden: int
    mlp: int
    experts: int
    chosen: int

    @property
    def rows(self) -> int:
        return self.tokens * self.chosen


# The second one is a rank with one expert: its weight gradient is torch's product.
GPU = (Model("Qwen3 30B-A3B", 8192, 2048, 768, 128, 8), Model("Mixtral 8x7B, one expert", 4096, 4096, 14336, 1, 1))
TINY = (Model("tiny", 8, 32, 24, 4, 2), Model("tiny, one expert", 8, 32, 24, 1, 1))


def cases(model: Model, kernels: Kernels) -> Iterator[Case]:
    if model.experts > 1:
        yield from _row_cases(model, kernels.token_rows)
    for outputs, inputs in ((2 * model.mlp, model.hidden), (model.hidden, model.mlp)):  # gate and up, down
        yield _weight_gradient_case(model, outputs, inputs, kernels.grouped_products)


def _chosen(model: Model, m: Maker) -> Tensor:
    """The expert of each choice of each token, unevenly: [t k]."""
    liked = m.floats(model.experts, dtype=torch.float32, grad=False) / 2
    scores = m.floats(model.tokens, model.experts, dtype=torch.float32, grad=False) + liked
    return scores.topk(model.chosen).indices.flatten()


def _row_cases(model: Model, impl: Implementation) -> Iterator[Case]:
    def inputs(rows: int, m: Maker) -> tuple[Any, ...]:
        choice_of_row = torch.argsort(_chosen(model, m), stable=True)
        row_of_choice = inverse_of(choice_of_row).view(model.tokens, model.chosen)
        return m.floats(rows, model.hidden), choice_of_row // model.chosen, row_of_choice

    least = (2 * (model.tokens + model.rows) * model.hidden,) * 2
    shape = f"{model.tokens}x{model.chosen}x{model.hidden}"
    yield Case(
        "copies for experts", model.name, shape, partial(inputs, model.tokens),
        partial(token_rows.rows_of_tokens, impl=impl), peers.rows_of_tokens, least,
    )  # fmt: skip
    yield Case(
        "sums of experts' rows", model.name, shape, partial(inputs, model.rows),
        partial(token_rows.sums_of_rows, impl=impl), peers.sums_of_rows, least,
        to_compile=peers.sums_of_gathered_rows,
    )  # fmt: skip


def _weight_gradient_case(model: Model, outputs: int, inputs: int, impl: Implementation) -> Case:
    """Added to fp32 buffers. In a dry run the factors are fp32, and for those one expert follows the other."""

    def make(m: Maker) -> tuple[Any, ...]:
        totals = m.floats(model.experts, outputs, inputs, dtype=torch.float32, grad=False)
        grad, x = (m.floats(model.rows, n, grad=False) for n in (outputs, inputs))
        sizes = _chosen(model, m).bincount(minlength=model.experts).tolist()
        return totals, grad, x, RowGroups.of(sizes, m.target)

    def add(products: TorchProducts, totals: Tensor, grad: Tensor, x: Tensor, groups: RowGroups) -> Tensor:
        products.add_grouped_weight_gradient(totals, grad, x, groups)
        return totals

    return Case(
        "weight gradients of experts", model.name, f"{model.experts}x{outputs}x{model.rows}x{inputs}", make,
        partial(add, TorchProducts(grouped=impl)), peers.grouped_weight_gradients,
        (2 * model.rows * outputs * inputs, 0), "flops", directions=("forward",),
        exact=partial(add, TorchProducts()),
        tolerance=1e-3,  # tensor cores do not add quite in fp32
    )  # fmt: skip
