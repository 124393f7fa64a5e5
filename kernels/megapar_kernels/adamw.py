"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) over a flat shard in one pass, and the sum of squares for clipping.

An update moves 30 bytes for each parameter. It reads the gradient, the main weight and two moments in fp32. It writes
the main weight, the moments, and a 16-bit copy of the main weight. With moments in bf16 it moves 22 bytes, with main
weights of two 16-bit halves 28, and with both 20. The sum of squares reads 4 bytes.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapar_kernels import apex
from megapar_kernels.dispatch import Implementation, fused, launches, tl, triton
from megapar_kernels.rounding import (
    TILE,
    RandomBits,
    draw_bits,
    join,
    joined,
    round_randomly,
    rounded_randomly,
    split,
    split_bits,
    widened,
)

UNIT = 64
"""Elements. A table says for each UNIT, in one byte, whether weight decay applies.

So weight decay may begin and end only at multiples of UNIT.
"""

_CHUNK = 1 << 16  # elements that a CPU widens at a time
_CHUNK_OF_GPU = 1 << 24  # elements that a GPU widens at a time, where Triton does not serve

Range = tuple[int, int]


@dataclass(frozen=True)
class Decayed:
    """The elements of a flat shard with weight decay.

    `ranges` are [start, stop), sorted, and `others` are all other elements. `units` says the same as bool [elements /
    UNIT, rounded up] on the device: with it one launch serves a shard of any number of ranges.
    """

    ranges: tuple[Range, ...]
    others: tuple[Range, ...]
    units: Tensor

    @classmethod
    def of(cls, ranges: Iterable[Range], elements: int, device: torch.device) -> "Decayed":
        """For a shard of `elements`. `ranges` must be sorted and disjoint; ValueError if one is cut within a UNIT."""
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
    """Update by torch's fused kernel."""
    # On a CPU it takes 3.8 ms for 8 million elements, and torch's foreach 18 ms.
    count = torch.full((), float(step), device=flat[0].device)
    for decay, (mains, grads, exp_avgs, exp_avg_sqs) in _runs(flat, weight_decay, decayed):
        torch._fused_adamw_(
            mains, grads, exp_avgs, exp_avg_sqs, [], [count] * len(mains), lr=lr, beta1=betas[0], beta2=betas[1],
            weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
            grad_scale=None if clip is None else clip.reciprocal(),
            found_inf=None if found_inf is None else (found_inf != 0).float(),
        )  # fmt: skip


def _narrow_step(
    flat: tuple[Tensor, ...], remainder: Tensor | None, bits: RandomBits | None, weight_decay: float,
    decayed: Decayed | None, step: int, clip: Tensor | None, found_inf: Tensor | None, **options: Any,
) -> None:  # fmt: skip
    """`_torch_step` of 16-bit state: on fp32 copies of a few elements at a time."""
    main, grad, *moments = flat
    size = _CHUNK_OF_GPU if main.is_cuda else _CHUNK
    all_ranges = ((0, main.numel()),)
    groups = [(weight_decay, decayed.ranges), (0.0, decayed.others)] if decayed else [(weight_decay, all_ranges)]
    chunks = [
        (decay, first, min(first + size, stop))
        for decay, ranges in groups
        for start, stop in ranges
        for first in range(start, stop, size)
    ]
    for decay, start, stop in chunks:
        part = slice(start, stop)
        wide = main[part] if remainder is None else join(main[part], remainder[part])
        wide_moments = [moment[part].float() for moment in moments]  # views if they are fp32
        _torch_step((wide, grad[part], *wide_moments), decay, None, step, clip, found_inf, **options)
        if remainder is not None:
            main[part], remainder[part] = split(wide)
        if bits is not None:
            drawn = bits.draw(start, stop, step)
            for moment, wide_moment, shift in zip(moments, wide_moments, (0, 16), strict=True):
                moment[part] = round_randomly(wide_moment, drawn >> shift)


def _apex_step(
    flat: tuple[Tensor, ...], weight_decay: float, decayed: Decayed | None, step: int, clip: Tensor | None,
    found_inf: Tensor | None, *, lr: float, betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    """Update by apex's kernel. ValueError if `found_inf` is given: apex cannot leave out an update."""
    if found_inf is not None:
        raise ValueError("apex's AdamW cannot leave out an update: pass no found_inf, or choose triton or torch")
    # Its kernel takes no coefficient either, so the gradient is multiplied in a pass of its own.
    if clip is not None:
        flat[1].mul_(clip)
    for decay, runs in _runs(flat, weight_decay, decayed):
        apex.adamw(runs, step, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay})


def _runs(
    flat: tuple[Tensor, ...], weight_decay: float, decayed: Decayed | None
) -> Iterator[tuple[float, list[list[Tensor]]]]:
    """Yield (weight decay, views of each tensor of `flat`) for the elements with decay, then for the others."""
    # One call has one weight decay, so the two groups need a call each.
    groups = [(weight_decay, decayed.ranges), (0.0, decayed.others)] if decayed else [(weight_decay, None)]
    for decay, ranges in groups:
        runs = [_views(x, ranges) for x in flat]
        if runs[0]:
            yield decay, runs


def _views(x: Tensor, ranges: tuple[Range, ...] | None) -> list[Tensor]:
    """The views of 1-D `x` at `ranges`; None stands for all of it."""
    if ranges is None:
        return [x]
    return [x[start:stop] for start, stop in ranges]


@triton.jit(do_not_specialize=["update"])  # otherwise compiled again for the updates 1, 16, 32 ...
def _adamw_kernel(  # type: ignore[no-untyped-def]
    main_ptr, remainder_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, params_ptr, decayed_ptr, clip_ptr, found_inf_ptr,
    rows_ptr, tiles_ptr, elements, update, decay, momentum, beta2, beta2_rest, eps, step_size, root_correction,
    UNITS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """One AdamW update of UNITS units.

    Without `decayed_ptr` all elements decay. Without `params_ptr` no copy is written. Without `clip_ptr` the
    coefficient is 1. Without `found_inf_ptr` the update always happens. With `remainder_ptr` the main weights are in
    halves. With `rows_ptr` moments are bf16. What is bf16 comes as int16.
    """
    unit = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    offset = unit[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    inside = offset < elements
    main = tl.load(main_ptr + offset, mask=inside, other=0)
    grad = tl.load(grad_ptr + offset, mask=inside, other=0.0)
    exp_avg = tl.load(exp_avg_ptr + offset, mask=inside, other=0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + offset, mask=inside, other=0)
    if remainder_ptr is not None:
        main = joined(main, tl.load(remainder_ptr + offset, mask=inside, other=0))
    if rows_ptr is not None:
        exp_avg = widened(exp_avg)
        exp_avg_sq = widened(exp_avg_sq)
    if decayed_ptr is not None:
        decays = tl.load(decayed_ptr + unit, mask=unit * UNIT < elements, other=0)
        main -= tl.where(decays != 0, decay, 0.0)[:, None] * main
    else:
        main -= decay * main
    if clip_ptr is not None:
        grad *= tl.load(clip_ptr)
    if found_inf_ptr is not None:  # read only here, so that the loads above need not wait for it
        inside = offset < tl.where(tl.load(found_inf_ptr) == 0, elements, 0)
    exp_avg += momentum * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + beta2_rest * grad * grad
    main -= step_size * exp_avg / (tl.sqrt(exp_avg_sq) * root_correction + eps)
    if remainder_ptr is not None:
        main, remainder = split_bits(main)
        tl.store(remainder_ptr + offset, remainder, mask=inside)
    if rows_ptr is not None:
        bits = draw_bits(rows_ptr, tiles_ptr, offset, update, UNITS * UNIT)
        exp_avg = rounded_randomly(exp_avg, bits)
        exp_avg_sq = rounded_randomly(exp_avg_sq, bits >> 16)
    tl.store(main_ptr + offset, main, mask=inside)
    tl.store(exp_avg_ptr + offset, exp_avg, mask=inside)
    tl.store(exp_avg_sq_ptr + offset, exp_avg_sq, mask=inside)
    if params_ptr is not None:
        tl.store(params_ptr + offset, main.to(params_ptr.dtype.element_ty), mask=inside)


def config() -> tuple[int, int]:
    """The units and warps of a program. A thread has 4 elements: one access of 16 bytes to each fp32 buffer."""
    return TILE // UNIT, 8


def adamw_step(
    main: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, params: Tensor | None, *, lr: float,
    betas: tuple[float, float], eps: float, weight_decay: float, step: int, decayed: Decayed | None = None,
    clip_coefficient: Tensor | None = None, found_inf: Tensor | None = None, remainder: Tensor | None = None,
    bits: RandomBits | None = None, impl: Implementation = "torch",
) -> None:  # fmt: skip
    """Make the `step`-th update (from 1) of fp32 `main` and its moments by fp32 `grad`, in place.

    `params` is the copy of `main` in the model's dtype, None if the parameter is `main` itself. All tensors must be 1-D
    and contiguous, else ValueError. If `decayed` is None, weight decay applies to all elements.

    With int16 `remainder`, `main` is the bf16 parameter, `params` is None, and `main` and `remainder` are the fp32 main
    weights (`rounding.split`). With `bits` both moments are bf16. They are updated in fp32 and rounded randomly.

    `clip_coefficient`, 0-d fp32 on the device, multiplies the gradient. It may be left multiplied. `found_inf` is 0-d
    on the device: unless it is zero, nothing is updated. The host reads neither of the two. So the caller must know
    itself whether there was an update, and pass the next `step` accordingly.
    """
    flat = main, grad, exp_avg, exp_avg_sq
    narrow = remainder is not None or bits is not None
    _check(flat, params, remainder, bits)
    if not fused(impl, main):
        options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps}
        if impl == "apex" and narrow:
            raise ValueError("apex's AdamW has no 16-bit moments and no remainders: choose triton or torch")
        if narrow:
            _narrow_step(flat, remainder, bits, weight_decay, decayed, step, clip_coefficient, found_inf, **options)
        else:
            update = _apex_step if impl == "apex" else _torch_step
            update(flat, weight_decay, decayed, step, clip_coefficient, found_inf, **options)
        if params is not None and found_inf is not None:
            # Where no update was made, the copy keeps its bits even if it is not the rounded `main`.
            torch.where(found_inf != 0, params, main.to(params.dtype), out=params)
        elif params is not None:
            params.copy_(main)
        return
    units, warps = config()
    if not launches(main):
        return
    # Bits, because they are what the kernel computes.
    main_bits, *moments = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x for x in (main, exp_avg, exp_avg_sq))
    _adamw_kernel[(triton.cdiv(main.numel(), units * UNIT),)](
        main_bits, remainder, grad, *moments, params, None if decayed is None else decayed.units, clip_coefficient,
        found_inf, None if bits is None else bits.table, None if bits is None else bits.tiles, main.numel(), step,
        lr * weight_decay, 1 - betas[0], betas[1], 1 - betas[1], eps, lr / (1 - betas[0] ** step),
        1 / math.sqrt(1 - betas[1] ** step), UNITS=units, UNIT=UNIT, num_warps=warps,
    )  # fmt: skip
    # Autograd does not see what a Triton kernel writes, so it is told that these tensors have changed.
    written = (main, remainder, exp_avg, exp_avg_sq, params)
    torch.autograd.graph.increment_version([x for x in written if x is not None])


def _check(flat: tuple[Tensor, ...], params: Tensor | None, remainder: Tensor | None, bits: RandomBits | None) -> None:
    """Raise ValueError unless the tensors of `adamw_step` have the dtypes and shapes that it takes."""
    main, grad, *moments = flat
    of_main = torch.float32 if remainder is None else torch.bfloat16
    of_moments = torch.float32 if bits is None else torch.bfloat16
    expected = [(main, of_main), (grad, torch.float32), *((moment, of_moments) for moment in moments)]
    if remainder is not None:
        expected.append((remainder, torch.int16))
        if params is not None:
            raise ValueError("adamw_step: with a remainder the main weights are the parameters: pass no params")
    if params is not None:
        expected.append((params, params.dtype))
    if all(x.dtype == dtype and x.shape == main.shape and x.is_contiguous() for x, dtype in expected):
        return
    shapes = [(x.dtype, tuple(x.shape)) for x in flat]
    need = "contiguous fp32" if (remainder, bits) == (None, None) else f"contiguous {[dtype for _, dtype in expected]}"
    raise ValueError(f"adamw_step: main, gradient and moments are {shapes}: need {need} of one shape")


@dataclass(frozen=True)
class FlatRanges:
    """The elements of a flat buffer counted by a sum.

    `ranges` are [start, stop), sorted and disjoint. `tiles` is int64 [programs, 2] on the device: the elements [start,
    stop) of each program of the kernel. With it one launch serves any number of ranges.
    """

    ranges: tuple[Range, ...]
    tiles: Tensor

    @classmethod
    def of(cls, ranges: Iterable[Range], device: torch.device) -> "FlatRanges":
        """Make the table of `ranges`. Do it once, because the table is copied to the device."""
        ranges = tuple(ranges)
        steps, block, _ = square_sum_config()
        tiles = [torch.empty(0, 2, dtype=torch.int64)]
        for start, stop in ranges:
            if start < stop:
                # All tiles but the first begin at multiples of UNIT, so that all of their loads are 16 bytes wide.
                second = start // UNIT * UNIT + steps * block
                inner = torch.arange(second, max(second, stop), steps * block)
                edges = torch.cat((torch.tensor([start]), inner, torch.tensor([stop])))
                tiles.append(torch.stack((edges[:-1], edges[1:]), dim=1))
        return cls(ranges, torch.cat(tiles).to(device))


@triton.jit
def _square_sum_kernel(  # type: ignore[no-untyped-def]
    x_ptr, tiles_ptr, partial_ptr, elements, STEPS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Write the sum of squares of one tile. Without `tiles_ptr` the tiles cover the whole buffer."""
    program = tl.program_id(0).to(tl.int64)
    first = program * (STEPS * BLOCK)
    last = tl.cast(elements, tl.int64)  # elements of 1 are a constant, without methods
    if tiles_ptr is not None:
        first = tl.load(tiles_ptr + 2 * program)
        last = tl.load(tiles_ptr + 2 * program + 1)
    # Whole units are loaded, 16 bytes at a time, and elements outside the tile are dropped afterwards. The compiler
    # cannot make wide loads under a mask that may change at any element.
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
    """The blocks of a program, the elements of a block, and the warps."""
    # They do not depend on the number of multiprocessors, so that a sum is the same on every GPU.
    return 4, 2048, 8


def square_sum(x: Tensor, impl: Implementation = "torch", only: FlatRanges | None = None) -> Tensor:
    """The sum of squares of fp32 `x`, 0-d fp64; with `only`, the sum over these elements of 1-D contiguous `x`.

    The same elements always give the same sum. On a GPU the number of launches does not grow with the number of ranges.
    If Triton does not serve, it grows by one for every 320 pieces of 65,536 elements.
    """
    # Squares of fp32 are exact in fp64, and their sum nearly so. It hardly depends on how a buffer is cut into shards.
    # An fp32 sum would: on a CPU torch's vector_norm of 8 million elements has an error of 4e-4.
    flat = x.detach().contiguous().view(-1)
    ranges = ((0, flat.numel()),) if only is None else only.ranges
    parts = [flat[start:stop] for start, stop in ranges if start < stop]
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=x.device)
    if not fused(impl, x):
        return _torch_square_sum(parts)
    steps, block, warps = square_sum_config()
    if only is None:
        programs = triton.cdiv(flat.numel(), steps * block)
        tiles = None
    else:
        programs = len(only.tiles)
        tiles = only.tiles
    partial = torch.empty(programs, dtype=torch.float64, device=x.device)
    if launches(x):
        _square_sum_kernel[(programs,)](
            flat, tiles, partial, flat.numel(), STEPS=steps, BLOCK=block, UNIT=UNIT, num_warps=warps
        )
    return partial.sum()


def _torch_square_sum(parts: list[Tensor]) -> Tensor:
    """The sum of squares of 1-D fp32 `parts`, by torch's ops."""
    if parts[0].device.type != "cpu":
        return _square_sum_in_few_launches(parts)
    # A CPU converts as many elements at a time as its cache holds. To write fp64 copies of all to memory would take
    # longer than the sums.
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        for chunk in part.split(_CHUNK):
            wide = chunk.double()
            total += wide.dot(wide)
    return total


def _square_sum_in_few_launches(parts: list[Tensor]) -> Tensor:
    """Return the sum of squares by torch's multi-tensor apply: a launch for every 320 pieces of 65,536 elements."""
    norms = torch._foreach_norm(parts, 2, torch.float64)
    return torch.stack(norms).square().sum()
