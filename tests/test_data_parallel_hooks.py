"""When gradients are added and when buckets are reduced: unused and reused parameters, different orders by rank."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapar.base.grid import Grid
from megapar.comm.axis import Axis
from megapar.declare import context
from megapar.declare.context import ParallelContext
from megapar.declare.params import ONES, ParamSpec, parameter, shared_piece
from megapar.declare.sharding import Sharding
from megapar.tensor_parallel.layers import ColumnParallelLinear, Columns, column_linear
from tests.support.distributed import run_ranks
from tests.support.flat import Flat, flatten

TINY, ALL = 1e-4, 64.0
STEPS, MICROBATCHES, WIDTH = 3, 3, 16
Use = Callable[[int, int, int], bool]  # (data-parallel rank, step, micro-batch) -> whether the parameter is used


def plain(name: str, *shape: int, dtype: torch.dtype = torch.float32, grad_axis: Axis | None = None) -> nn.Parameter:
    """A parameter of every tensor rank, drawn from its shape."""
    spec = ParamSpec(
        (shared_piece(name, shape, context.single().tp),), ONES, decay=True, grad_axis=grad_axis or Axis("grad")
    )
    param = parameter(spec, shape, dtype=dtype, device="cpu")
    param.data.copy_(torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) - 0.5)
    return param


class Net(nn.Module):
    """Branches of layers adding weight gradients themselves, a matrix used as embedding and as head, and an optional
    `gate`."""

    def __init__(self, grad_axis: Axis) -> None:
        super().__init__()
        sharding = Sharding(context.single().tp, grad_axis, False, torch.float32, torch.device("cpu"))
        self.sharding = sharding
        self.word = plain("word", 10, WIDTH, grad_axis=grad_axis)
        self.gate = plain("gate", WIDTH, grad_axis=grad_axis)
        columns = [Columns.even(name, WIDTH, sharding.tp) for name in ("left", "right", "twice")]
        self.left, self.right, self.twice = (
            ColumnParallelLinear(WIDTH, [column], sharding, init=ONES, bias=True) for column in columns
        )
        for i, linear in enumerate((self.left, self.right, self.twice)):
            generator = torch.Generator().manual_seed(i)
            for param in linear.parameters():
                param.data.copy_(torch.rand(param.shape, generator=generator) - 0.5)

    def forward(self, ids: Tensor, gated: bool, left_first: bool) -> Tensor:
        x = F.embedding(ids, self.word)
        if gated:
            x = x * self.gate
        if left_first:
            y = self.left(x).tanh()
            y = y + self.right(x).tanh()
        else:
            y = self.right(x).tanh()
            y = y + self.left(x).tanh()
        y = self.twice(self.twice(y).tanh())
        logits = column_linear(y, self.word, None, self.sharding)
        weights = torch.arange(1.0, ids.numel() + 1).view(ids.shape)
        return (weights * F.cross_entropy(logits.transpose(1, 2), (ids + 1) % 10, reduction="none")).sum()


def ids(rank: int, step: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
    return torch.randint(10, (2, 3), generator=generator)


def expected_gradients(ranks: int, step: int, use: Use) -> dict[str, Tensor]:
    """By autograd alone, in one process."""
    net = Net(Axis("grad"))
    for rank in range(ranks):
        for i in range(MICROBATCHES):
            net(ids(rank, step, i), use(rank, step, i), True).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in net.named_parameters()}


def run(ctx: ParallelContext, use: Use, zero_stage: int, bucket_mb: float, overlap: bool) -> list[int]:
    """A few backward passes without updates, compared with one process. Returns each step's early reductions."""
    net = Net(ctx.grad)
    rank = ctx.dp.rank
    buffer = flatten([net], ctx, zero_stage=zero_stage, bucket_mb=bucket_mb, overlap=overlap)
    early = []
    for step in range(STEPS):
        buffer.start_step()
        before = sum(ctx.grad.traffic.calls.values())
        for i in range(MICROBATCHES):
            if i == MICROBATCHES - 1:
                buffer.gradients.begin()
            net(ids(rank, step, i), use(rank, step, i), rank == 0).backward()
        early.append(sum(ctx.grad.traffic.calls.values()) - before)
        buffer.gradients.finish()
        buffer.check_padding()
        for name, want in expected_gradients(ctx.dp.size, step, use).items():
            slot = next(slot for slot in buffer.slots if slot.param is net.get_parameter(name))
            for start, stop in buffer.shards():
                first, last = max(start, slot.start), min(stop, slot.stop)
                got, part = buffer.grads[first:last], want.flatten()[first - slot.start : last - slot.start]
                if first < last:
                    assert (got - part).norm() <= 1e-5 * want.norm(), f"{name}, step {step}, zero {zero_stage}"
        assert all(param.grad is None for param in net.parameters())
    return early


def use_always(rank: int, step: int, microbatch: int) -> bool:
    return True


def use_never(rank: int, step: int, microbatch: int) -> bool:
    return False


def use_on_one_rank(rank: int, step: int, microbatch: int) -> bool:
    return rank == 0


def use_not_first(rank: int, step: int, microbatch: int) -> bool:
    return microbatch != 0


def skip_last_once(rank: int, step: int, microbatch: int) -> bool:
    return (step, microbatch) != (1, MICROBATCHES - 1)


def skip_last_at_first(rank: int, step: int, microbatch: int) -> bool:
    return (step, microbatch) != (0, MICROBATCHES - 1)


def all_uses() -> dict[str, Any]:
    ctx = context.create(Grid(dp=2))
    uses = (use_always, use_never, use_on_one_rank, use_not_first, skip_last_once)
    early = {
        (use.__name__, zero, bucket, overlap): run(ctx, use, zero, bucket, overlap)
        for use in uses
        for zero, bucket, overlap in [(0, TINY, True), (1, TINY, True), (1, ALL, True), (1, TINY, False)]
    }
    run(ctx, skip_last_at_first, 1, TINY, False)
    with pytest.raises(RuntimeError) as late:
        run(ctx, skip_last_at_first, 1, TINY, True)
    return {"early": early, "late": str(late.value)}


def test_unused_and_reused_parameters_have_their_gradient() -> None:
    """A parameter unused always, on one rank, in one micro-batch (fault unused-parameters); layers used twice and a
    matrix as embedding and head (faults tied-on-one-rank, parameters-used-twice); two ranks with gradients in different
    orders. Overlap on and off."""
    for rank, result in enumerate(run_ranks(2, all_uses)):
        for (use, _, bucket, overlap), early in result["early"].items():
            buckets = 8 if bucket == TINY else 2
            waits = use == "skip_last_once"  # the gate's bucket and those behind it wait for finish()
            second = (6 if bucket == TINY else 1) if waits else buckets
            assert early == ([0, second, buckets] if overlap else [0, 0, 0]), (rank, use, bucket, early)
        assert "gate" in result["late"]
        assert "--optimizer.no_overlap_grad_reduce" in result["late"]


def two_stages_on_a_rank() -> list[list[int]]:
    """The last backward belongs to the first stage alone; the second has been final since before begin()."""
    ctx = context.create(Grid(dp=2))
    first, second = nn.Module(), nn.Module()
    first.weight, second.weight = (
        plain("first", WIDTH, WIDTH, grad_axis=ctx.grad),
        plain("second", WIDTH, grad_axis=ctx.grad),
    )
    buffer = flatten([first, second], ctx, zero_stage=0, bucket_mb=TINY, overlap=True)
    seen = []
    for _ in range(2):
        buffer.start_step()
        hidden = []
        counts = [sum(ctx.grad.traffic.calls.values())]
        for i in range(MICROBATCHES):
            x = torch.full((WIDTH,), float(i + ctx.dp.rank)) @ first.weight
            leaf = x.detach().requires_grad_()
            (leaf.tanh() * second.weight).sum().backward()
            hidden.append((x, leaf.grad))
        for i, (x, grad) in enumerate(hidden):
            if i == MICROBATCHES - 1:
                buffer.gradients.begin()
                counts.append(sum(ctx.grad.traffic.calls.values()))
            x.backward(grad)
        counts.append(sum(ctx.grad.traffic.calls.values()))
        buffer.gradients.finish()
        seen.append([b - a for a, b in itertools.pairwise(counts)])
    return seen


def test_parameters_of_other_stages_are_reduced_as_soon_as_the_last_backward_begins() -> None:
    for seen in run_ranks(2, two_stages_on_a_rank):
        assert seen == [[0, 0], [1, 1]]


def accumulate_bf16() -> tuple[Tensor, Tensor]:
    """One gradient of about 1, then 255 of about 1e-3, all bf16, on each of two ranks; the sum, and the same in
    fp64."""
    ctx = context.create(Grid(dp=2))
    module = nn.Module()
    module.weight = plain("weight", 50, dtype=torch.bfloat16, grad_axis=ctx.grad)
    buffer = flatten([module], ctx, zero_stage=1, bucket_mb=ALL, overlap=True)
    exact = torch.zeros(50, dtype=torch.float64)
    for rank in range(2):
        generator = torch.Generator().manual_seed(rank)
        for i in range(256):
            grad = ((torch.rand(50, generator=generator) + 0.5) * (1e-3 if i else 1.0)).bfloat16()
            exact += grad.double()
            if rank == ctx.dp.rank:
                module.weight.backward(grad)
    buffer.gradients.finish()
    start, stop = buffer.shards()[0]
    return buffer.grads[start : min(stop, 50)].clone(), exact[start : min(stop, 50)]


def test_gradients_of_bf16_weights_accumulate_in_fp32() -> None:
    """Fault bf16-gradients-in-fp32: bf16 sums would stay at 1."""
    got, exact = (torch.cat(parts) for parts in zip(*run_ranks(2, accumulate_bf16), strict=True))
    assert got.dtype == torch.float32
    assert got.numel() == 50
    assert ((got - exact) / exact).abs().max() < 1e-5


def buffer_of(*params: nn.Parameter) -> Flat:
    module = nn.Module()
    for i, param in enumerate(params):
        module.register_parameter(f"p{i}", param)
    return flatten([module], context.single(), zero_stage=1, bucket_mb=ALL, overlap=True)


def test_a_parameter_without_a_spec_is_refused_by_name() -> None:
    """Fault norm-counts-elements-once."""
    with pytest.raises(TypeError, match="p1 of shape"):
        buffer_of(plain("a", 3), nn.Parameter(torch.zeros(2)))


def test_a_parameter_that_needs_no_gradient_has_no_place() -> None:
    frozen = plain("b", 2).requires_grad_(False)
    assert [slot.name for slot in buffer_of(plain("a", 3), frozen).slots] == ["a"]
    assert not hasattr(frozen, "main_grad")


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float64, torch.float64)])
def test_mixed_and_other_dtypes_are_refused_by_name(dtypes: Sequence[torch.dtype]) -> None:
    with pytest.raises(TypeError, match=r"(^| and )b is torch\.(bfloat16|float64): "):
        buffer_of(plain("a", 3, dtype=dtypes[0]), plain("b", 3, dtype=dtypes[1]))


def test_calls_out_of_order_are_refused() -> None:
    param = plain("a", 3)
    buffer = buffer_of(param)
    buffer.gradients.begin()
    for call in (buffer.gradients.begin, buffer.gradients.zero):
        with pytest.raises(RuntimeError, match=r"finish\(\)"):
            call()
    buffer.gradients.finish()
    for call in (buffer.gradients.begin, buffer.gradients.finish, (param * 2).sum().backward):
        with pytest.raises(RuntimeError, match=r"zero\(\)"):
            call()


def test_parameters_keep_their_values_and_are_views_of_the_buffer() -> None:
    first, second = plain("a", 3, 5), plain("b", 7)
    values = first.detach().clone(), second.detach().clone()
    buffer = buffer_of(first, second)
    assert torch.equal(first, values[0])
    assert torch.equal(second, values[1])
    buffer.params.fill_(3.0)
    assert first.eq(3).all()
    assert second.eq(3).all()
