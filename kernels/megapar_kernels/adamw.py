"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) over a flat shard in one pass, and the sum of squares to clip by.

An update moves 30 bytes a parameter: gradient, main weight and two moments of fp32 are read, the last three and a
16-bit copy of the main weight written. The sum of squares reads 4.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megapar_kernels import apex
from megapar_kernels.dispatch import Implementation, fused, tl, triton

UNIT = 64
"""Elements: where weight decay applies is told by a byte for each UNIT, and may change only at multiples of it."""

_CHUNK = 1 << 16  # elements that a CPU widens to fp64 at a time

Range = tuple[int, int]


@dataclass(frozen=True)
class Decayed:
    """The elements of a flat shard that weight decay applies to, as ranges [start, stop), sorted, and all others; and
    the same as bool [elements / UNIT, rounded up] on the device, so that one launch serves a shard of many runs."""

    ranges: tuple[Range, ...]
    others: tuple[Range, ...]
    units: Tensor

    @classmethod
    def of(cls, ranges: Iterable[Range], elements: int, device: torch.device) -> "Decayed":
        """Of a shard of `elements`. `ranges` are sorted and disjoint; ValueError if they are cut within a UNIT."""
        ranges = tuple(ranges)
        others = []
        end = 0
        units = torch.zeros(-(-elements // UNIT), dtype=torch.bool)
        for start, stop in ranges:
            if start % UNIT or (stop % UNIT and stop != elements) or not end <= start < stop <= elements:
                raise ValueError(f"weight decay of elements [{start}, {stop}) of {elements}: need multiples of {UNIT}")
            units[start // UNIT : -(-stop // UNIT)] = True
            others.append((end, start))
            end = stop
        others.append((end, elements))
        return cls(ranges, tuple((start, stop) for start, stop in others if start < stop), units.to(device))


def _torch_step(
    flat: tuple[Tensor, ...], weight_decay: float, decayed: Decayed | None, step: int, clip: Tensor | None,
    found_inf: Tensor | None, *, lr: float, betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    """By torch's fused kernel: on a CPU 3.8 ms for 8 million elements where its foreach takes 18."""
    count = torch.full((), float(step), device=flat[0].device)
    for decay, (mains, grads, exp_avgs, exp_avg_sqs) in _runs(flat, weight_decay, decayed):
        torch._fused_adamw_(
            mains, grads, exp_avgs, exp_avg_sqs, [], [count] * len(mains), lr=lr, beta1=betas[0], beta2=betas[1],
            weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
            grad_scale=None if clip is None else clip.reciprocal(),
            found_inf=None if found_inf is None else (found_inf != 0).float(),
        )  # fmt: skip


def _apex_step(
    flat: tuple[Tensor, ...], weight_decay: float, decayed: Decayed | None, step: int, clip: Tensor | None,
    found_inf: Tensor | None, *, lr: float, betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    """By apex's, which knows neither a coefficient nor an update that is left out: ValueError for the latter."""
    if found_inf is not None:
        raise ValueError("apex's AdamW cannot leave out an update: pass no found_inf, or choose triton or torch")
    if clip is not None:
        flat[1].mul_(clip)
    for decay, runs in _runs(flat, weight_decay, decayed):
        apex.adamw(runs, step, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay})


def _runs(
    flat: tuple[Tensor, ...], weight_decay: float, decayed: Decayed | None
) -> Iterator[tuple[float, list[list[Tensor]]]]:
    """(weight decay, views of each tensor of `flat`) for the elements that decay, then for the others."""
    groups = [(weight_decay, decayed.ranges), (0.0, decayed.others)] if decayed else [(weight_decay, None)]
    for decay, ranges in groups:
        runs = [[x] if ranges is None else [x[start:stop] for start, stop in ranges] for x in flat]
        if runs[0]:
            yield decay, runs


@triton.jit
def _adamw_kernel(  # type: ignore[no-untyped-def]
    main_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, params_ptr, decayed_ptr, clip_ptr, found_inf_ptr, elements,
    decay, momentum, beta2, beta2_rest, eps, step_size, root_correction, UNITS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Without a table everything decays. Pointers that are None stand for no copy, coefficient 1 and found nothing."""
    unit = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    offset = unit[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    inside = offset < elements
    main = tl.load(main_ptr + offset, mask=inside, other=0.0)
    grad = tl.load(grad_ptr + offset, mask=inside, other=0.0)
    exp_avg = tl.load(exp_avg_ptr + offset, mask=inside, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + offset, mask=inside, other=0.0)
    if decayed_ptr is not None:
        decays = tl.load(decayed_ptr + unit, mask=unit * UNIT < elements, other=0)
        main -= tl.where(decays != 0, decay, 0.0)[:, None] * main
    else:
        main -= decay * main
    if clip_ptr is not None:
        grad *= tl.load(clip_ptr)
    if found_inf_ptr is not None:  # looked at only now: the loads above need not wait for it
        inside = offset < tl.where(tl.load(found_inf_ptr) == 0, elements, 0)
    exp_avg += momentum * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + beta2_rest * grad * grad
    main -= step_size * exp_avg / (tl.sqrt(exp_avg_sq) * root_correction + eps)
    tl.store(main_ptr + offset, main, mask=inside)
    tl.store(exp_avg_ptr + offset, exp_avg, mask=inside)
    tl.store(exp_avg_sq_ptr + offset, exp_avg_sq, mask=inside)
    if params_ptr is not None:
        tl.store(params_ptr + offset, main.to(params_ptr.dtype.element_ty), mask=inside)


def config() -> tuple[int, int]:
    """Units and warps of a program: 4 elements a thread, one wide access to each buffer."""
    return 16, 8


def adamw_step(
    main: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, params: Tensor | None, *, lr: float,
    betas: tuple[float, float], eps: float, weight_decay: float, step: int, decayed: Decayed | None = None,
    clip_coefficient: Tensor | None = None, found_inf: Tensor | None = None, impl: Implementation = "torch",
) -> None:  # fmt: skip
    """The `step`-th update (from 1), in place, of fp32 `main` and its moments by fp32 `grad`, and of main's copy
    `params` in the model's dtype (None: the parameter is `main`). All are 1-D and contiguous, else ValueError.

    `decayed` None: weight decay applies everywhere. The gradient counts times `clip_coefficient`, 0-d fp32 on the
    device, and may be left multiplied by it. `found_inf`, 0-d on the device, unless zero forbids the update. Neither is
    read by the host, which for its next `step` must know itself whether there was an update.
    """
    flat = main, grad, exp_avg, exp_avg_sq
    if any(x.shape != main.shape or not x.is_contiguous() or x.dtype != torch.float32 for x in flat) or (
        params is not None and (params.shape != main.shape or not params.is_contiguous())
    ):
        shapes = [(x.dtype, tuple(x.shape)) for x in flat]
        raise ValueError(f"adamw_step: main, gradient and moments are {shapes}: need contiguous fp32 of one shape")
    if not fused(impl, main):
        update = _apex_step if impl == "apex" else _torch_step
        update(flat, weight_decay, decayed, step, clip_coefficient, found_inf, lr=lr, betas=betas, eps=eps)
        if params is not None:
            params.copy_(main)
        return
    units, warps = config()
    if not main.numel():
        return
    _adamw_kernel[(triton.cdiv(main.numel(), units * UNIT),)](
        *flat, params, None if decayed is None else decayed.units, clip_coefficient, found_inf, main.numel(),
        lr * weight_decay, 1 - betas[0], betas[1], 1 - betas[1], eps, lr / (1 - betas[0] ** step),
        1 / math.sqrt(1 - betas[1] ** step), UNITS=units, UNIT=UNIT, num_warps=warps,
    )  # fmt: skip
    torch.autograd.graph.increment_version([x for x in (main, exp_avg, exp_avg_sq, params) if x is not None])


@dataclass(frozen=True)
class FlatRanges:
    """Elements of a flat buffer that a sum counts.

    `ranges` are [start, stop), sorted and disjoint. `tiles` is int64 [programs, 2] on the device: the elements of each
    program of the kernel, so that one launch serves any number of ranges.
    """

    ranges: tuple[Range, ...]
    tiles: Tensor

    @classmethod
    def of(cls, ranges: Iterable[Range], device: torch.device) -> "FlatRanges":
        """Made once: the table is copied to the device."""
        ranges = tuple(ranges)
        steps, block, _ = square_sum_config()
        tiles = [torch.empty(0, 2, dtype=torch.int64)]
        for start, stop in ranges:
            if start < stop:
                # Tiles begin at multiples of UNIT but for the first: then all of their loads are 16 bytes wide.
                second = start // UNIT * UNIT + steps * block
                inner = torch.arange(second, max(second, stop), steps * block)
                edges = torch.cat((torch.tensor([start]), inner, torch.tensor([stop])))
                tiles.append(torch.stack((edges[:-1], edges[1:]), dim=1))
        return cls(ranges, torch.cat(tiles).to(device))


@triton.jit
def _square_sum_kernel(  # type: ignore[no-untyped-def]
    x_ptr, tiles_ptr, partial_ptr, elements, STEPS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Without a table every element counts."""
    program = tl.program_id(0).to(tl.int64)
    first = program * (STEPS * BLOCK)
    last = elements.to(tl.int64)
    if tiles_ptr is not None:
        first = tl.load(tiles_ptr + 2 * program)
        last = tl.load(tiles_ptr + 2 * program + 1)
    # Whole units are loaded, 16 bytes at a time, and what lies outside the tile is dropped after that: the compiler
    # cannot load widely under a mask that may change at any element.
    begin = first // UNIT * UNIT
    end = (last + UNIT - 1) // UNIT * UNIT
    total = tl.zeros([BLOCK], tl.float64)
    for step in tl.static_range(STEPS):
        offset = begin + step * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offset, mask=(offset < end) & (offset < elements), other=0.0)
        x = tl.where((offset >= first) & (offset < last), x, 0.0).to(tl.float64)
        total += x * x
    tl.store(partial_ptr + program, tl.sum(total))


def square_sum_config() -> tuple[int, int, int]:
    """Blocks of a program, their elements, and warps: not by the multiprocessors, so that a sum is the same on all."""
    return 4, 2048, 8


def square_sum(x: Tensor, impl: Implementation = "torch", only: FlatRanges | None = None) -> Tensor:
    """Sum of squares of fp32 `x`, or of the elements of 1-D contiguous `x` that `only` names: 0-d fp64.

    It is the same whenever it is taken. Squares of fp32 are exact in fp64 and so, nearly, is their sum: it hardly
    depends on how a buffer is cut. fp32 sums would (torch's vector_norm of 8 million elements errs by 4e-4 on a CPU).
    On a GPU the number of launches does not grow with the number of ranges, or by one for 320 pieces of 65,536 elements
    where Triton does not serve.
    """
    flat = x.detach().contiguous().view(-1)
    ranges = ((0, flat.numel()),) if only is None else only.ranges
    parts = [flat[start:stop] for start, stop in ranges if start < stop]
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=x.device)
    if not fused(impl, x):
        return _torch_square_sum(parts)
    steps, block, warps = square_sum_config()
    programs = triton.cdiv(flat.numel(), steps * block) if only is None else len(only.tiles)
    partial = torch.empty(programs, dtype=torch.float64, device=x.device)
    tiles = None if only is None else only.tiles
    _square_sum_kernel[(programs,)](
        flat, tiles, partial, flat.numel(), STEPS=steps, BLOCK=block, UNIT=UNIT, num_warps=warps
    )
    return partial.sum()


def _torch_square_sum(parts: list[Tensor]) -> Tensor:
    """By torch's ops, for 1-D fp32 `parts`."""
    if parts[0].device.type != "cpu":
        return _square_sum_in_few_launches(parts)
    # A CPU widens as many elements as its cache holds: writing fp64 copies to memory would take longer than the sums.
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        for chunk in part.split(_CHUNK):
            wide = chunk.double()
            total += wide.dot(wide)
    return total


def _square_sum_in_few_launches(parts: list[Tensor]) -> Tensor:
    """A launch for every 320 pieces of 65,536 elements, whatever the number of parts (torch's multi-tensor apply)."""
    norms = torch._foreach_norm(parts, 2, torch.float64)
    return torch.stack(norms).square().sum()
