"""The two halves of vocab-parallel cross entropy that touch all logits: statistics forward, gradient backward.

Logits are [rows, width], a slice of the vocabulary in any float dtype, of which the first `columns` are real; what the
others hold is never used and their gradient is exactly zero. Statistics and gradients are computed in fp32 (fp64 for
fp64 logits by torch) and rounded once. At least 2 bytes a bf16 logit are moved forward and 4 backward.

One pass over maximum and sum: Milakov and Gimelshein, arXiv 1805.02867.
"""

import torch
from torch import Tensor

from megapar_kernels.dispatch import Implementation, exp, fused, launches, next_power_of_2, tl, triton

_CACHED = 1 << 16  # elements
_LEAST = tl.constexpr(torch.finfo(torch.float32).min)

__all__ = ["gradient", "gradient_config", "statistics", "statistics_config"]


def _statistics(logits: Tensor, target: Tensor, columns: int, with_total: bool) -> Tensor:
    z = logits[:, :columns]
    wide = torch.promote_types(logits.dtype, torch.float32)
    maximum = z.amax(-1).to(wide).clamp_(min=torch.finfo(torch.float32).min)
    mine = (target >= 0) & (target < columns)
    picked = torch.where(mine, z.gather(-1, torch.where(mine, target, 0)[:, None])[:, 0].to(wide), 0.0)
    exp_sum = torch.empty_like(maximum)
    total = torch.zeros_like(maximum)
    # All rows at once, but on a CPU as many as its cache holds: new pages would cost more than the arithmetic.
    rows = max(_CACHED // columns if z.is_cpu else len(z), 1)
    for block in (slice(first, first + rows) for first in range(0, len(z), rows)):
        shifted = z[block] - maximum[block, None]
        if with_total:
            total[block] = shifted.sum(-1)
        exp_sum[block] = shifted.exp_().sum(-1)
    return torch.stack((maximum, exp_sum, picked, total))


def _gradient(
    logits: Tensor,
    target: Tensor,
    columns: int,
    maximum: Tensor,
    scale: Tensor,
    grad_loss: Tensor,
    on_target: float,
    on_all: float,
    inplace: bool,
) -> Tensor:
    in_logits = inplace and logits.dtype == maximum.dtype
    grad = torch.sub(logits, maximum[:, None], out=logits) if in_logits else logits - maximum[:, None]
    grad.exp_().mul_(scale[:, None])
    if on_all:
        grad -= (on_all * grad_loss)[:, None]
    grad[:, columns:] = 0.0
    if columns:  # no indexing by a mask, for which a GPU would have to wait
        mine = (target >= 0) & (target < columns)
        column = torch.where(mine, target, 0)[:, None]
        grad.scatter_(1, column, grad.gather(1, column) - torch.where(mine, on_target * grad_loss, 0.0)[:, None])
    return logits.copy_(grad) if inplace and not in_logits else grad.to(logits.dtype)


@triton.jit
def _add_tile(  # type: ignore[no-untyped-def]
    z, real, seen, maximum, exp_sum, total, WITH_TOTAL: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Statistics of lanes that have seen `seen` columns each, after one more tile z [STEPS, LANES].

    MASKED: only the elements that are `real` count.
    """
    if MASKED:
        z = tl.where(real, z, -float("inf"))
    higher = tl.maximum(maximum, tl.max(z, 0))
    z -= higher[None, :]
    exp_sum = exp_sum * exp(maximum - higher) + tl.sum(exp(z), 0)
    if WITH_TOTAL:
        # maximum - higher may be -inf, and 0 * -inf is NaN: the least finite number takes its place.
        total += seen * tl.maximum(maximum - higher, _LEAST)
        if MASKED:
            z = tl.where(real, z, 0.0)
        total += tl.sum(z, 0)
    return higher, exp_sum, total


@triton.jit
def _statistics_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, target_ptr, statistics_ptr, rows, columns, width, stride,
    WITH_TOTAL: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A program a row. Every lane keeps its own maximum and sums, so that threads meet once, at the end.

    Whole tiles have a loop without masks, because masks would make it slower than the memory. What is left is masked.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    tile = tl.arange(0, STEPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    maximum = tl.full((LANES,), _LEAST, tl.float32)
    exp_sum = tl.zeros((LANES,), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    whole = columns // (STEPS * LANES) * (STEPS * LANES)
    for first in range(0, whole, STEPS * LANES):
        z = tl.load(logits_ptr + first + tile).to(tl.float32)
        maximum, exp_sum, total = _add_tile(z, None, first // LANES, maximum, exp_sum, total, WITH_TOTAL, False)
    # At most one iteration. As a loop it takes fewer registers than as an `if`.
    for first in range(whole, columns, STEPS * LANES):
        column = first + tile
        # The load is masked by `width`, not by `columns`: the compiler knows that `width` divides by 16, so that the
        # load stays wide.
        z = tl.load(logits_ptr + column, column < width, other=0.0).to(tl.float32)
        seen = first // LANES
        maximum, exp_sum, total = _add_tile(z, column < columns, seen, maximum, exp_sum, total, WITH_TOTAL, True)
    highest = tl.max(maximum, 0)
    tl.store(statistics_ptr + row, highest)
    tl.store(statistics_ptr + rows + row, tl.sum(exp_sum * exp(maximum - highest), 0))
    target = tl.load(target_ptr + row)
    mine = (target >= 0) & (target < columns)
    picked = tl.load(logits_ptr + tl.where(mine, target, 0)).to(tl.float32)
    tl.store(statistics_ptr + 2 * rows + row, tl.where(mine, picked, 0.0))
    if WITH_TOTAL:
        seen = ((columns - tl.arange(0, LANES) + LANES - 1) // LANES).to(tl.float32)
        total += seen * tl.maximum(maximum - highest, _LEAST)
        tl.store(statistics_ptr + 3 * rows + row, tl.sum(total, 0))


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, grad_ptr, target_ptr, maximum_ptr, scale_ptr, grad_loss_ptr,
    columns, width, stride, blocks, on_target, on_all, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    first = program % blocks * BLOCK
    column = tl.arange(0, BLOCK)
    inside = column < (width - first).to(tl.int32)
    z = tl.load(logits_ptr + row * stride + first + column, inside, other=-float("inf")).to(tl.float32)
    grad_loss = tl.load(grad_loss_ptr + row)
    grad = exp(z - tl.load(maximum_ptr + row)) * tl.load(scale_ptr + row) - on_all * grad_loss
    target = tl.load(target_ptr + row) - first
    has_target = (target >= 0) & (target < BLOCK)
    if has_target | (first + BLOCK > columns):
        # At most two blocks of a row come here. All others save the comparison of their columns with two numbers.
        place = tl.where(has_target, target, -1).to(tl.int32)
        grad -= tl.where(column == place, on_target * grad_loss, 0.0)
        grad = tl.where(column < (columns - first).to(tl.int32), grad, 0.0)
    tl.store(grad_ptr + row * stride + first + column, grad.to(grad_ptr.dtype.element_ty), inside)


def statistics_config(columns: int) -> tuple[int, int, int]:
    """Steps and lanes of a tile, and warps: 8 lanes a thread (16 bytes of bf16) and up to 4 loads of them at once."""
    lanes = min(max(next_power_of_2(columns), 256), 1024)
    steps = min(max(next_power_of_2(columns) // lanes, 1), 4)
    return steps, lanes, lanes // 256


def gradient_config(width: int, bytes_a_logit: int) -> tuple[int, int]:
    """Columns and warps of a program: up to 4 loads of 16 bytes a thread."""
    block = min(max(next_power_of_2(width), 128), 8192 // bytes_a_logit)
    return block, max(block * bytes_a_logit // 2048, 1)


def statistics(
    logits: Tensor, target: Tensor, columns: int, with_total: bool = True, impl: Implementation = "torch"
) -> Tensor:
    """[4, rows], of each row: max, sum of exp(z - max), z[target], sum of (z - max) (0 unless `with_total`).

    `target` is the column, or anything outside [0, columns) where another rank holds it (z[target] is then 0). Without
    real columns the maximum is the least fp32 number and the others are 0.
    """
    rows, width = logits.shape
    if rows == 0 or columns == 0:
        nothing = logits.new_zeros(4, rows, dtype=torch.promote_types(logits.dtype, torch.float32))
        nothing[0] = torch.finfo(torch.float32).min
        return nothing
    if not fused(impl, logits):
        return _statistics(logits, target, columns, with_total)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    result = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    if not with_total:
        result[3] = 0.0
    if not launches(logits):
        return result
    steps, lanes, warps = statistics_config(columns)
    _statistics_kernel[(rows,)](
        logits, target.contiguous(), result, rows, columns, width, logits.stride(0),
        with_total, steps, lanes, num_warps=warps,
    )  # fmt: skip
    return result


def gradient(
    logits: Tensor,
    target: Tensor,
    columns: int,
    maximum: Tensor,
    scale: Tensor,
    grad_loss: Tensor,
    on_target: float,
    on_all: float,
    impl: Implementation = "torch",
    inplace: bool = False,
) -> Tensor:
    """scale * exp(z - maximum) - grad_loss * (on_target at the target column + on_all everywhere), in z's dtype.

    `maximum`, `scale` and `grad_loss` are [rows]: with the maximum over the whole vocabulary and scale = d loss / d
    logsumexp * grad_loss / (sum of exp(z - maximum)) this is the gradient of the loss. `inplace`: it takes the place of
    the logits, and autograd is told.
    """
    logits, (rows, width) = logits.detach(), logits.shape
    if not fused(impl, logits):
        return _gradient(logits, target, columns, maximum, scale, grad_loss, on_target, on_all, inplace)
    if not inplace or not logits.is_contiguous():
        logits = logits.contiguous()
    grad = logits if inplace else torch.empty_like(logits)
    block, warps = gradient_config(width, logits.element_size())
    blocks = triton.cdiv(width, block)
    if rows * blocks:
        rowwise = (x.contiguous() for x in (target, maximum, scale, grad_loss))
        _gradient_kernel[(rows * blocks,)](
            logits, grad, *rowwise, columns, width, logits.stride(0), blocks, on_target, on_all, block, num_warps=warps
        )
    if inplace:
        torch.autograd.graph.increment_version(grad)
    return grad
