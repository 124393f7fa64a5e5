"""Flat AdamW against torch.optim.AdamW, over several steps, and the sum of squares against fp64."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from megapar_kernels import adamw
from megapar_kernels.adamw import UNIT, Decayed, FlatRanges, adamw_step, square_sum
from torch import Tensor

from tests.support.adamw import HYPER, RUNS, gradients, numbers
from tests.support.kernel_checks import DEVICE, Guarded, needs_triton, poisoned, relative_error
from tests.support.sweeps import slow_but

pytestmark = [needs_triton, pytest.mark.gpu]


class Shard:
    """Main weights and moments between guards, and a copy of the weights in `dtype`, all slices of wider buffers."""

    def __init__(self, elements: int, dtype: torch.dtype | None):
        weights = numbers(elements, 1).float().to(DEVICE)
        self.guards = [Guarded(x) for x in (weights, torch.zeros_like(weights), torch.zeros_like(weights))]
        self.main, self.exp_avg, self.exp_avg_sq = (guard.tensor for guard in self.guards)
        self.params = None
        if dtype:
            self.guards.append(Guarded(weights.to(dtype)))
            self.params = self.guards[-1].tensor

    def step(self, grad: Tensor, number: int, impl: Any, **changed: Any) -> None:
        with poisoned():
            adamw_step(
                self.main,
                grad.to(DEVICE),
                self.exp_avg,
                self.exp_avg_sq,
                self.params,
                step=number,
                impl=impl,
                **{**HYPER, **changed},
            )
        for guard in self.guards:
            guard.check()

    def tensors(self) -> list[Tensor]:
        return [x for x in (self.main, self.exp_avg, self.exp_avg_sq, self.params) if x is not None]


def complement(ranges: Sequence[tuple[int, int]], elements: int) -> list[tuple[int, int]]:
    edges = [0, *(edge for run in ranges for edge in run), elements]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def torchs_own(
    elements: int, grads: Sequence[Tensor], dtype: torch.dtype, ranges: Sequence[tuple[int, int]]
) -> list[Tensor]:
    """Weights and moments after torch.optim.AdamW with one parameter a run."""
    weights = numbers(elements, 1).float().to(DEVICE, dtype)
    runs = [(*run, 0.1) for run in ranges] + [(*run, 0.0) for run in complement(ranges, elements)]
    params = [torch.nn.Parameter(weights[start:stop].clone()) for start, stop, _ in runs]
    groups = [{"params": [p], "weight_decay": decay} for p, (_, _, decay) in zip(params, runs, strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=HYPER["lr"], betas=HYPER["betas"], eps=HYPER["eps"], fused=True)
    for grad in grads:
        for p, (start, stop, _) in zip(params, runs, strict=True):
            p.grad = grad[start:stop].to(DEVICE, dtype)
        optimizer.step()
    results = [torch.empty_like(weights) for _ in range(3)]
    for p, (start, stop, _) in zip(params, runs, strict=True):
        state = optimizer.state[p]
        for result, x in zip(results, (p.detach(), state["exp_avg"], state["exp_avg_sq"]), strict=True):
            result[start:stop] = x
    return results


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("elements", [1, 7, 64, 129, 1000, 1024, 4097])
def test_five_steps_as_torchs(elements: int, dtype: torch.dtype | None, impl: Any) -> None:
    grads = gradients(elements, 5)
    shard = Shard(elements, dtype)
    for number, grad in enumerate(grads, 1):
        shard.step(grad, number, impl)
        if shard.params is not None:
            assert torch.equal(shard.params, shard.main.to(shard.params.dtype))
    exact = torchs_own(elements, grads, torch.float64, [(0, elements)])
    theirs = torchs_own(elements, grads, torch.float32, [(0, elements)])
    for mine, torchs, reference in zip(shard.tensors(), theirs, exact, strict=dtype is None):
        assert relative_error(mine, reference) <= min(1e-6, 2 * relative_error(torchs, reference) + 1e-7)
        torch.testing.assert_close(mine, torchs, rtol=2e-6, atol=2e-7 if mine is shard.main else 0)
        if impl == "torch":
            assert torch.equal(mine, torchs)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_weight_decay_of_a_shard_with_many_runs(impl: Any) -> None:
    elements = 4097
    grads = gradients(4097, 3)
    shard = Shard(elements, torch.bfloat16)
    decayed = Decayed.of(RUNS, elements, DEVICE)
    assert [*decayed.others] == complement(RUNS, elements)
    for number, grad in enumerate(grads, 1):
        shard.step(grad, number, impl, decayed=decayed)
    exact = torchs_own(elements, grads, torch.float64, RUNS)
    for mine, reference in zip(shard.tensors()[:3], exact, strict=True):
        # Element by element: a unit that wrongly decays is off by 3e-4 a step.
        torch.testing.assert_close(mine.double(), reference, rtol=2e-6, atol=2e-7 if mine is shard.main else 0)


@pytest.mark.parametrize("ranges", [[(0, 63)], [(1, 64)], [(64, 0)], [(0, 256)], [(64, 128), (0, 64)]])
def test_runs_that_a_table_cannot_tell_are_refused(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=f"need multiples of {UNIT}"):
        Decayed.of(ranges, 129, DEVICE)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("coefficient", [0.0, 1e-3, 1.0])
def test_the_gradient_counts_times_the_clip_coefficient(coefficient: float, impl: Any) -> None:
    (grad,) = gradients(129, 1)
    clipped, plain = Shard(129, torch.bfloat16), Shard(129, torch.bfloat16)
    clipped.step(grad.clone(), 1, impl, clip_coefficient=torch.tensor(coefficient, device=DEVICE))
    plain.step(grad * coefficient, 1, impl)
    for mine, expected in zip(clipped.tensors(), plain.tensors(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("found", [1.0, 3.0, -0.5, math.inf, math.nan, True, 2])
def test_a_found_infinity_forbids_the_update(found: Any, impl: Any) -> None:
    shard = Shard(129, torch.bfloat16)
    shard.step(gradients(129, 1)[0], 1, impl)
    before = [x.clone() for x in shard.tensors()]
    coefficient = torch.tensor(math.nan, device=DEVICE)
    grad = torch.full((129,), math.inf)
    shard.step(grad, 2, impl, found_inf=torch.tensor(found, device=DEVICE), clip_coefficient=coefficient)
    assert all(torch.equal(x, y) for x, y in zip(shard.tensors(), before, strict=True))


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("found", [0.0, -0.0, False, 0])
def test_nothing_found_forbids_nothing(found: Any, impl: Any) -> None:
    (grad,) = gradients(129, 1)
    shard, plain = Shard(129, torch.bfloat16), Shard(129, torch.bfloat16)
    shard.step(grad, 1, impl, found_inf=torch.tensor(found, device=DEVICE))
    plain.step(grad, 1, impl)
    assert all(torch.equal(x, y) for x, y in zip(shard.tensors(), plain.tensors(), strict=True))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_nan_gradient_is_seen_in_the_weights(impl: Any) -> None:
    shard = Shard(129, None)
    shard.step(torch.full((129,), math.nan), 1, impl)
    assert all(torch.isnan(x).all() for x in shard.tensors())


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_padding_stays_zero(impl: Any) -> None:
    flat = [torch.zeros(128, device=DEVICE) for _ in range(4)]
    adamw_step(*flat, None, step=1, impl=impl, **HYPER)
    assert all(not x.any() for x in flat)


def test_what_a_slice_becomes_does_not_depend_on_where_the_buffer_is_cut() -> None:
    (grad,) = gradients(1024, 1)
    whole, cut = Shard(1024, torch.bfloat16), Shard(1024, torch.bfloat16)
    whole.step(grad, 1, "triton")
    for part in (slice(0, 192), slice(192, 1024)):
        main, exp_avg, exp_avg_sq, params = (x[part] for x in cut.tensors())
        adamw_step(main, grad[part].to(DEVICE), exp_avg, exp_avg_sq, params, step=1, impl="triton", **HYPER)
    assert all(torch.equal(x, y) for x, y in zip(whole.tensors(), cut.tensors(), strict=True))


def test_autograd_sees_that_weights_changed() -> None:
    """A backward needing the old ones raises."""
    shard = Shard(129, None)
    x = torch.ones(129, device=DEVICE, requires_grad=True)
    y = (x * shard.main).sum()
    shard.step(gradients(129, 1)[0], 1, "triton")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_shards_that_do_not_fit_are_refused(impl: Any) -> None:
    x = torch.zeros(128, device=DEVICE)
    for flat in ([x, x[:64], x, x, None], [x, x, x.double(), x, None], [torch.zeros(256)[::2], x, x, x, None]):
        with pytest.raises(ValueError, match="need contiguous fp32 of one shape"):
            adamw_step(*flat, step=1, impl=impl, **HYPER)
    with pytest.raises(ValueError, match="need contiguous fp32 of one shape"):
        adamw_step(x, x, x, x, torch.zeros(64, dtype=torch.bfloat16), step=1, impl=impl, **HYPER)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_an_empty_shard(impl: Any) -> None:
    empty = torch.zeros(0, device=DEVICE)
    adamw_step(empty, empty, empty, empty, empty.bfloat16(), step=1, impl=impl, **HYPER)
    adamw_step(empty, empty, empty, empty, None, step=1, decayed=Decayed.of([], 0, DEVICE), impl=impl, **HYPER)
    assert square_sum(empty, impl) == 0


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("elements", slow_but(range(7), [1, 7, 127, 4096, 16384, 16385, 100_003, 1 << 20]))
def test_square_sum(elements: int, impl: Any) -> None:
    x = Guarded(numbers(elements, 5).float().to(DEVICE)).tensor
    with poisoned():
        total = square_sum(x, impl)
    assert total.shape == ()
    assert total.dtype == torch.float64
    assert total.item() == pytest.approx(math.fsum(x.double().square().tolist()), rel=1e-12)
    assert torch.equal(total, square_sum(x, impl))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_square_sum_of_what_fp32_squares_cannot_hold(impl: Any) -> None:
    for size in (1e30, 1e-30):
        x = torch.full((1000,), size, device=DEVICE)
        assert square_sum(x, impl).item() == pytest.approx(1000 * x[0].double().item() ** 2, rel=1e-12)
    assert torch.isnan(square_sum(torch.tensor([1.0, math.nan], device=DEVICE), impl))
    assert square_sum(torch.tensor([1.0, -math.inf], device=DEVICE), impl) == math.inf


# Whole tiles, single elements, starts and stops inside a UNIT, neighbors that are not counted.
RANGES = [(0, 1), (3, 67), (128, 8192), (8193, 8200), (8300, 30_001), (99_999, 100_003)]


@pytest.mark.parametrize("impl", ["torch", "triton", "few launches"])
def test_square_sum_of_ranges_counts_nothing_else(impl: str) -> None:
    values = numbers(100_003, 6).float().to(DEVICE)
    counted = torch.zeros(100_003, dtype=torch.bool, device=DEVICE)
    for start, stop in RANGES:
        counted[start:stop] = True
    x = Guarded(values.masked_fill(~counted, math.nan)).tensor
    ranges = FlatRanges.of(RANGES, DEVICE)
    with poisoned():
        if impl == "few launches":
            total = adamw._square_sum_in_few_launches([x[start:stop] for start, stop in RANGES])
        else:
            total = square_sum(x, impl, ranges)  # type: ignore[arg-type]
    assert (total.shape, total.dtype) == ((), torch.float64)
    assert total.item() == pytest.approx(math.fsum(values[counted].double().square().tolist()), rel=1e-12)
    assert square_sum(x, "torch", FlatRanges.of([], DEVICE)) == 0


def test_square_sum_of_every_other_element() -> None:
    x = torch.arange(20.0, device=DEVICE)
    x[1::2] = math.nan
    assert square_sum(x[::2], "triton") == sum(i * i for i in range(0, 20, 2))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="not run: needs a GPU")
def test_square_sum_of_more_than_two_to_the_31_elements() -> None:
    """Fault tensors-beyond-32-bits."""
    x = torch.zeros(2**31 + 129, device=DEVICE)
    x[0], x[-1] = 2.0, 3.0
    assert square_sum(x, "triton") == 13
