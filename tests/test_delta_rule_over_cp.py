"""The delta rule and the convolution in front of it over context-parallel ranks: in fp64, every gradient, to rounding.

Ranks' cuts lie inside of documents, at their starts, and around single tokens.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from megapar.base.grid import Grid
from megapar.comm.axis import Axis
from megapar.context_parallel import deal
from megapar.context_parallel.delta_rule import DeltaRule
from megapar.context_parallel.states import rows_before, runs_of
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from tests.support.distributed import run_ranks
from tests.support.sweeps import slow_but

SAMPLES, KEY_HEADS, HEADS, D, E = 2, 2, 4, 6, 5
# Starts among the positions of two samples of 16: inside of chunks, at their borders, and tokens that are alone.
STARTS = (0, 1, 5, 8, 9, 10, 16, 19, 31, 32)


def batch_of(length: int, starts: tuple[int, ...] | None) -> MicroBatch:
    tokens_bs = torch.zeros(SAMPLES, length, dtype=torch.int64)
    of_samples = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    weights_bs, ids_b = torch.ones(SAMPLES, length), torch.arange(SAMPLES)
    return MicroBatch.of_samples(tokens_bs, tokens_bs, weights_bs, ids_b, of_samples)


def made(length: int, channels: bool) -> list[Tensor]:
    """q, k, v, g and beta of whole samples, and a gradient of the outputs, all fp64."""
    torch.manual_seed(length)
    size = (length, SAMPLES)
    q, k = (torch.nn.functional.normalize(torch.randn(*size, KEY_HEADS, D).double(), dim=-1) for _ in range(2))
    v, do = (torch.randn(*size, HEADS, E, dtype=torch.float64) for _ in range(2))
    g = -torch.rand(*size, HEADS, D if channels else 1, dtype=torch.float64)
    return [q, k, v, g, torch.rand(*size, HEADS, dtype=torch.float64), do]


def outputs_and_gradients(
    cp: Axis, form: str, length: int, channels: bool, starts: tuple[int, ...] | None
) -> list[Tensor]:
    """Of this rank's positions."""
    rule = DeltaRule(cp, form, [0, 0, 1, 1], D, E, torch.device("cpu"))
    own = torch.tensor(deal.positions(length, cp.size, cp.rank))
    *inputs, do = (x[own].requires_grad_() for x in made(length, channels))
    o = rule(*inputs, batch_of(length, starts).columns(own))
    return [o.detach(), *torch.autograd.grad(o, inputs, do)]


def on_a_rank(cp: int, *args: Any) -> list[Tensor]:
    return outputs_and_gradients(context.create(Grid(cp=cp)).cp, *args)


CASES = [
    (cp, form, length, channels, starts)
    for cp, length in ((2, 16), (4, 16), (4, 8), (3, 48))
    for form in ("gather", "ulysses")
    for channels in (False, True)
    for starts in (None, STARTS)
    if starts is None or length == 16
]


@pytest.mark.parametrize(("cp", "form", "length", "channels", "starts"), slow_but([7, 9], CASES))
def test_ranks_compute_what_one_does(cp: int, form: str, length: int, channels: bool, starts: Any) -> None:
    """Faults states-cross-documents, states-over-cp: with 8 ranks' runs of a single token among the cases."""
    expected = outputs_and_gradients(context.single().cp, form, length, channels, starts)
    found = run_ranks(cp, on_a_rank, cp, form, length, channels, starts)
    for rank, of_rank in enumerate(found):
        own = torch.tensor(deal.positions(length, cp, rank))
        for x, whole in zip(of_rank, expected, strict=True):
            assert (x - whole[own]).norm() < 1e-12 * whole.norm()


def rows_on_a_rank(cp: int, length: int, count: int) -> tuple[Tensor, Tensor]:
    """The rows in front of this rank's runs, and the gradient of all its rows for a gradient of 1, 2, ... of those."""
    axis = context.create(Grid(cp=cp)).cp
    own = torch.tensor(deal.positions(length, cp, axis.rank))
    x = (1.0 + own[:, None, None]).requires_grad_()
    before = rows_before(x, count, axis)
    (grad,) = torch.autograd.grad(before, x, torch.ones_like(before))
    return before.detach(), grad


@pytest.mark.parametrize(("cp", "length", "count"), slow_but([0], [(3, 6, 3), (2, 16, 3), (4, 8, 6), (2, 8, 1)]))
def test_rows_before_a_run_may_be_those_of_several_runs(cp: int, length: int, count: int) -> None:
    whole = torch.cat([torch.zeros(count), 1.0 + torch.arange(length)])
    uses = torch.zeros(count + length)
    size = length // (2 * cp)
    for chunk in range(2 * cp):
        uses[chunk * size : chunk * size + count] += 1
    for rank, (before, grad) in enumerate(run_ranks(cp, rows_on_a_rank, cp, length, count)):
        own = torch.tensor(deal.positions(length, cp, rank))
        runs = own.chunk(2)
        assert before.shape == (2, count, 1, 1)
        for found, run in zip(before, runs, strict=True):
            assert found.flatten().tolist() == whole[int(run[0]) : int(run[0]) + count].tolist()
        assert grad.flatten().tolist() == uses[count + own].tolist()
    assert len(runs_of(torch.zeros(4), context.single().cp)) == 1
