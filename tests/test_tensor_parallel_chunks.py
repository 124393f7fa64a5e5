"""Linear layers with communication overlapping their products in chunks (parallel.tp_overlap_chunks)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megapar_kernels import onednn
from torch import Tensor

from megapar.base.grid import Grid
from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.comm.pending import Pending
from megapar.declare import context
from megapar.declare.context import ParallelContext
from megapar.declare.sharding import Sharding
from megapar.linear.torch_products import TorchProducts
from megapar.tensor_parallel.chunks import cut_in_chunks
from megapar.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from tests.support.distributed import rank_device, run_ranks
from tests.support.linear_layers import HIDDEN, WIDE, fractions, layers, results, strided, whole_numbers


def sharding_of(ctx: ParallelContext, dtype: torch.dtype, sequence_parallel: bool) -> Sharding:
    return Sharding(ctx.tp, ctx.grad, sequence_parallel, dtype, ctx.device)


def sent(axis: Axis, function: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """The result of `function`, and the bytes sent by it by operation."""
    before = dict(axis.traffic.sent)
    result = function()
    return result, {name: n - before.get(name, 0) for name, n in axis.traffic.sent.items() if n != before.get(name, 0)}


def differences(size: int, shared_memory: bool) -> list[str]:
    """Cases with a value changed by chunks, or the number of bytes sent."""
    ctx = context.create(Grid(tp=size), device=rank_device(dist.get_rank()), use_shared_memory=shared_memory)
    wrong = []
    for sequence_parallel in (False, True):
        whole = sharding_of(ctx, torch.float64, sequence_parallel)
        # One row, fewer tokens than chunks, and numbers of tokens that the chunks do not divide.
        for rows, batch in ((1, 1), (1, 2), (3, 1), (7, 3)):
            expected = sent(ctx.tp, lambda r=rows, b=batch, w=whole: results(w, r, b, whole_numbers))
            for chunks in (2, 3, 5):
                cut = replace(whole, overlap_chunks=chunks)
                found = sent(ctx.tp, lambda r=rows, b=batch, c=cut: results(c, r, b, whole_numbers))
                same = all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
                if not same or found[1] != expected[1]:
                    wrong.append(f"{sequence_parallel=} {rows=} {batch=} {chunks=} {found[1]} {expected[1]}")
    return wrong


@pytest.mark.gpus
@pytest.mark.parametrize(("tp", "shared_memory"), [(2, True), (4, True), (2, False)])
def test_chunks_change_neither_values_nor_bytes(tp: int, shared_memory: bool) -> None:
    """Outputs, gradients of inputs, weights and biases, exactly."""
    for wrong in run_ranks(tp, differences, tp, shared_memory):
        assert not wrong, "\n".join(wrong)


def rounded_differences(size: int) -> list[str]:
    ctx = context.create(Grid(tp=size))
    wrong = []
    for sequence_parallel in (False, True):
        whole = sharding_of(ctx, torch.float32, sequence_parallel)
        for recomputes in (False, True):
            expected = results(whole, 67, 2, fractions, recomputes)
            for chunks in (2, 3):
                found = results(replace(whole, overlap_chunks=chunks), 67, 2, fractions, recomputes)
                same = [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
                if not all(same):
                    wrong.append(f"{sequence_parallel=} {recomputes=} {chunks=} {same}")
    return wrong


@pytest.mark.parametrize(("tp", "by_onednn"), [(2, False), (4, False), (2, True)])
def test_chunks_of_many_tokens_round_as_one_product_does(
    tp: int, by_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 on a CPU: each rank's part of a sum is added there in rank order. Also with recomputed layers."""
    if by_onednn and not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(onednn, "IS_FASTER", by_onednn)
    monkeypatch.setattr(onednn, "MULTIPLE_OF_ROWS", 1)
    monkeypatch.setattr(onednn, "LEAST_MATRIX", 1)
    for wrong in run_ranks(tp, rounded_differences, tp):
        assert not wrong, "\n".join(wrong)


def unusual_inputs(size: int) -> list[bool]:
    """Strided inputs, strided gradients, one broadcast number as gradient, and a frozen input or weight."""
    ctx = context.create(Grid(tp=size))
    same = []
    for sequence_parallel in (False, True):
        sharding = replace(sharding_of(ctx, torch.float64, sequence_parallel), overlap_chunks=3)
        for layer, width in zip(layers(sharding, whole_numbers), (HIDDEN, WIDE // size), strict=True):
            x = whole_numbers(4, 2, width, seed=ctx.tp.rank)
            plain = x.clone().requires_grad_()
            turned = strided(x).requires_grad_()
            y = layer(plain)
            grad = whole_numbers(*y.shape, seed=1)
            right = torch.autograd.grad(y, (plain, layer.weight), grad, retain_graph=True)
            found = torch.autograd.grad(layer(turned), (turned, layer.weight), strided(grad))
            same += [torch.equal(a, b) for a, b in zip(found, right, strict=True)]
            ones = torch.autograd.grad(y, plain, torch.ones_like(grad), retain_graph=True)
            spread = torch.autograd.grad(y, plain, grad.new_ones(()).expand(grad.shape))
            same.append(torch.equal(ones[0], spread[0]))
            (weight_alone,) = torch.autograd.grad(layer(x), layer.weight, grad)
            same.append(torch.equal(weight_alone, right[1]))
            layer.weight.requires_grad_(False)
            (input_alone,) = torch.autograd.grad(layer(plain), plain, grad)
            same.append(torch.equal(input_alone, right[0]))
    return same


def test_strided_and_frozen_tensors_in_chunks() -> None:
    """Fault strided-tensors-in-collectives, in chunks."""
    for same in run_ranks(2, unusual_inputs, 2):
        assert same
        assert all(same)


def refusal_of_ten_rows() -> str:
    ctx = context.create(Grid(tp=4))
    _, row = layers(replace(sharding_of(ctx, torch.float64, True), overlap_chunks=2), whole_numbers)
    with pytest.raises(ValueError, match="length 10 does not divide by tp 4") as caught:
        row(torch.zeros(10, 1, WIDE // 4, dtype=torch.float64))
    return str(caught.value)


def test_a_sequence_that_does_not_divide_is_refused_in_chunks_too() -> None:
    assert len(set(run_ranks(4, refusal_of_ten_rows))) == 1


# What runs while what is computed

LONGER = 9  # tokens on this rank, three in a chunk


class Recorder:
    """Takes the place of the collectives and of the matrix products, and notes in `events` when each begins and ends.

    Numbers count the operations of a name from 0. Collectives leave zeros.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.events: list[str] = []
        monkeypatch.setattr(collectives, "all_gather_async", self.all_gather)
        monkeypatch.setattr(collectives, "all_gather_slices_async", lambda *_: self.begin("gather"))
        monkeypatch.setattr(collectives, "all_reduce_async", lambda *_: self.begin("sum"))
        monkeypatch.setattr(collectives, "reduce_scatter_async", lambda x, tp, out=None: (out, self.begin("sum")))

    def number(self, name: str) -> int:
        return sum(event.startswith(f"{name} ") for event in self.events)

    def begin(self, name: str) -> Pending:
        number = self.number(name)
        self.events.append(f"{name} {number}")
        return Pending().followed_by(lambda: self.events.append(f"end of {name} {number}"))

    def all_gather(self, x: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
        return x.new_zeros(axis.size * x.shape[0], *x.shape[1:]), self.begin("gather")

    def products(self) -> TorchProducts:
        recorder = self

        class Recorded(TorchProducts):
            def forward_slices(self, *args: Any) -> None:
                recorder.events.append(f"product {recorder.number('product')}")
                super().forward_slices(*args)

            def input_gradient_slices(self, *args: Any) -> None:
                recorder.events.append(f"product {recorder.number('product')}")
                super().input_gradient_slices(*args)

            def weight_gradient(self, *args: Any) -> Tensor:
                recorder.events.append("weight gradient")
                return super().weight_gradient(*args)

        return Recorded()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def recorded_layers(recorder: Recorder, sequence_parallel: bool) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    two = Axis("tp", 2, 0, (0, 1))
    sharding = Sharding(two, Axis("grad"), sequence_parallel, torch.float64, torch.device("cpu"), overlap_chunks=3)
    return layers(sharding, whole_numbers, recorder.products())


# Each gather but the first begins before the product of the chunk before it, and ends after that product.
GATHERED = [
    *["gather 0", "gather 1", "end of gather 0", "product 0"],
    *["gather 2", "end of gather 1", "product 1"],
    *["end of gather 2", "product 2"],
]
# Each sum but the last begins before the product of the chunk after it, and ends after that product.
SUMMED = [
    *["product 0", "sum 0", "product 1", "sum 1", "product 2", "sum 2"],
    *["end of sum 0", "end of sum 1", "end of sum 2"],
]


def test_a_column_parallel_layer_gathers_a_chunk_under_the_product_of_another(recorder: Recorder) -> None:
    column, _ = recorded_layers(recorder, sequence_parallel=True)
    column(torch.zeros(LONGER, 1, HIDDEN, dtype=torch.float64))
    assert recorder.events == GATHERED


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_row_parallel_layer_sums_a_chunk_under_the_product_of_another(
    recorder: Recorder, sequence_parallel: bool
) -> None:
    _, row = recorded_layers(recorder, sequence_parallel)
    length = 2 * LONGER if sequence_parallel else LONGER
    x = torch.zeros(length, 1, WIDE // 2, dtype=torch.float64, requires_grad=True)
    y = row(x)
    assert recorder.events == SUMMED
    recorder.events.clear()
    y.sum().backward()
    # Without sequence parallelism every rank has the whole gradient. The weight gradient is one product in any case.
    assert recorder.events == [*(GATHERED if sequence_parallel else ["product 0"]), "weight gradient"]


# Without ranks


def test_chunks_cover_all_tokens_and_differ_by_one_at_most() -> None:
    for tokens in range(1, 20):
        for chunks in range(1, 8):
            cut = cut_in_chunks(tokens, chunks)
            lengths = [chunk.stop - chunk.start for chunk in cut]
            assert [i for chunk in cut for i in range(chunk.start, chunk.stop)] == list(range(tokens))
            assert len(cut) == min(tokens, chunks)
            assert max(lengths) - min(lengths) <= 1
    assert cut_in_chunks(0, 3) == [slice(0, 0)]
