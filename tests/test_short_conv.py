"""The short convolution beside torch's conv1d in fp64, with documents, and over context-parallel ranks."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megapar_kernels.short_conv import short_conv
from megapar_models.factory import Factory
from megapar_models.short_convolution import ShortConvolution
from torch import Tensor

from megapar.base.grid import Grid
from megapar.context_parallel.deal import positions
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from megapar.declare.params import ONES
from megapar.declare.sharding import Sharding
from megapar.tensor_parallel.layers import Columns
from tests.support.distributed import rank_device, run_ranks
from tests.support.sweeps import slow_but

CHANNELS, SAMPLES = 5, 2
F64 = torch.float64
Tensors = list[Tensor]


def inputs(length: int, width: int, *, bias: bool) -> Tensors:
    """x, the positions in front of x, the weight, and the bias if there is one, in fp64."""
    torch.manual_seed(length * 10 + width)
    shapes: list[tuple[int, ...]] = [(length, SAMPLES, CHANNELS), (width - 1, SAMPLES, CHANNELS), (CHANNELS, 1, width)]
    shapes += [(CHANNELS,)] * bias
    return [torch.randn(shape, dtype=F64) for shape in shapes]


def with_gradients(conv: Callable[..., Tensor], given: Tensors) -> Tensors:
    """The output, and the gradient of each input for a random gradient of the output."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    y = conv(*leaves)
    torch.manual_seed(1)
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.randn(y.shape, dtype=F64))]


def conv1d(x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None = None, *, silu: bool) -> Tensor:
    z = F.conv1d(torch.cat([before, x]).permute(1, 2, 0), weight, bias, groups=CHANNELS).permute(2, 0, 1)
    return F.silu(z) if silu else z


def ours(x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None = None, *, silu: bool) -> Tensor:
    return short_conv(x, weight, bias, before, silu=silu)


def assert_equal(found: Tensors, expected: Tensors) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("silu", [False, True], ids=["plain", "silu"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("width", [1, 3, 4, 5, 6, 7])
def test_it_is_conv1d(width: int, bias: bool, silu: bool) -> None:
    """Also of texts shorter than the width, and behind other positions: outputs and the gradient of every input."""
    for length in (1, 2, 13):
        given = inputs(length, width, bias=bias)
        expected = with_gradients(lambda *x: conv1d(*x, silu=silu), given)
        assert_equal(with_gradients(lambda *x: ours(*x, silu=silu), given), expected)


def test_zeros_are_in_front_of_a_sample() -> None:
    x, before, weight, bias = inputs(9, 4, bias=True)
    assert_equal([short_conv(x, weight, bias)], [conv1d(x, before * 0, weight, bias, silu=True)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_16_bit_inputs_are_fp32(dtype: torch.dtype) -> None:
    x, before, weight, bias = (x.to(dtype) for x in inputs(9, 4, bias=True))
    found = short_conv(x, weight, bias, before)
    assert found.dtype == dtype
    wide = short_conv(*(x.float() for x in (x, weight, bias, before)))
    assert torch.equal(found, wide.to(dtype))


# Documents


def places(lengths: Sequence[int]) -> Tensor:
    """How many positions of its document are in front of each: those of a sample of these documents, [s, 1]."""
    return torch.cat([torch.arange(length) for length in lengths])[:, None]


@pytest.mark.parametrize("width", [3, 4, 7])
def test_documents_are_as_each_alone_at_any_cut(width: int) -> None:
    """Documents of one position and more; the second sample is a single document. Gradients too."""
    length = 9
    given = inputs(length, width, bias=True)
    given.pop(1)
    for first in range(1, length):
        for second in range(1, length - first):
            lengths = (first, second, length - first - second)
            place = torch.cat([places(lengths), places([length])], dim=1)
            found = with_gradients(lambda x, w, b, at=place: short_conv(x, w, b, place_sb=at), given)
            expected = with_gradients(lambda x, w, b, of=lengths: apart(x, w, b, of), given)
            assert_equal(found, expected)


def apart(x: Tensor, weight: Tensor, bias: Tensor, lengths: Sequence[int]) -> Tensor:
    """Each document of the first sample by itself, and the whole second sample."""
    documents = [short_conv(part, weight, bias) for part in x[:, :1].split(lengths)]
    return torch.cat([torch.cat(documents), short_conv(x[:, 1:], weight, bias)], dim=1)


# Over context-parallel ranks

# The width, and the positions of each of a rank's two runs: shorter than the width, of a single position too.
RUNS = [(1, 2), (3, 1), (4, 2), (5, 3), (7, 1), (7, 2), (7, 8)]
CASES = [(*run, packed) for run in RUNS for packed in (False, True)]


def batch_of(length: int, packed: bool) -> MicroBatch:
    """Samples of `length` positions. Packed documents begin at the second position, and within and between runs."""
    tokens = torch.zeros(SAMPLES, length, dtype=torch.int64)
    batch = MicroBatch.of_samples(tokens, tokens, tokens.float(), torch.arange(SAMPLES))
    if not packed:
        return batch
    starts = {0, 1, length // 2, length // 2 + 1, length, length + length // 3, 2 * length}
    return MicroBatch.of_samples(tokens, tokens, tokens.float(), batch.sample_ids_b, torch.tensor(sorted(starts)).int())


def over_ranks(cp: int) -> list[list[Any]]:
    """Of each case: the output of this rank's positions, and the gradients of these positions, weight and bias."""
    sharding = Sharding.of(context.create(Grid(cp=cp), device=rank_device(dist.get_rank())), F64)
    return [of_rank(sharding, width, 2 * cp * run, packed) for width, run, packed in CASES]


def random_gradient(length: int) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(length, SAMPLES, CHANNELS, dtype=F64)


def of_rank(sharding: Sharding, width: int, length: int, packed: bool) -> Tensors:
    held = torch.tensor(positions(length, sharding.cp.size, sharding.cp.rank))
    x, _, weight, bias = inputs(length, width, bias=True)
    columns = Columns.even("conv", CHANNELS, sharding.tp)
    conv = ShortConvolution([columns], width, Factory(sharding, ONES, ONES), bias=True)
    assert conv.bias is not None
    with torch.no_grad():
        conv.weight.copy_(weight)
        conv.bias.copy_(bias)
    x = x[held].requires_grad_()
    y = conv(x, batch_of(length, packed).columns(held))
    return [y.detach(), *torch.autograd.grad(y, [x, conv.weight, conv.bias], random_gradient(length)[held])]


def plainly(width: int, length: int, packed: bool) -> Tensors:
    """The same for all positions: conv1d of each document by itself."""
    x, before, weight, bias = inputs(length, width, bias=True)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    starts = batch_of(length, packed).starts
    bounds = range(0, SAMPLES * length + 1, length) if starts is None else starts.tolist()
    in_order = x.transpose(0, 1).flatten(0, 1)[:, None]
    documents = in_order.split([stop - start for start, stop in pairwise(bounds)])
    outputs = [conv1d(document, before[:, :1] * 0, weight, bias, silu=True) for document in documents]
    y = torch.cat(outputs).view(SAMPLES, length, CHANNELS).transpose(0, 1)
    return [y.detach(), *torch.autograd.grad(y, leaves, random_gradient(length))]


@pytest.mark.parametrize("cp", slow_but([0, 3], [1, 2, 3, 4]))
def test_ranks_compute_what_conv1d_does(cp: int) -> None:
    """Outputs and gradients in fp64: of positions by rank, and of weights as a sum over ranks."""
    found = run_ranks(cp, over_ranks, cp)
    for number, (width, run, packed) in enumerate(CASES):
        length = 2 * cp * run
        y, dx, dweight, dbias = plainly(width, length, packed)
        for rank, of_one in enumerate(found):
            held = positions(length, cp, rank)
            assert_equal(of_one[number][:2], [y[held], dx[held]])
        assert_equal([sum(of_one[number][which] for of_one in found) for which in (2, 3)], [dweight, dbias])
