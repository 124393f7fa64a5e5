"""The two parts of vocab-parallel cross entropy that read all logits: statistics forward, gradient backward.

Logits are [rows, width], a slice of the vocabulary in any float dtype. The first `columns` of them are real. The others
are padding: their values are never used, and their gradient is exactly zero. Statistics and gradients are computed in
fp32 and rounded once; torch computes them in fp64 for fp64 logits. For a bf16 logit the forward moves at least 2 bytes
and the backward 4.

Maximum and sum take one pass (Milakov and Gimelshein, arXiv 1805.02867).
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megapar_kernels.dispatch import Implementation, exp, fused, launches, next_power_of_2, tl, triton

_CACHED = 1 << 19  # elements that a CPU's cache holds: 2 MiB of fp32, the fastest of five sizes
_LOG2_E = math.log2(math.e)
# Takes the place of -inf, because -inf - -inf is NaN.
_LEAST = tl.constexpr(torch.finfo(torch.float32).min)

__all__ = ["gradient", "gradient_config", "statistics", "statistics_config"]


def _exp_(x: Tensor) -> Tensor:
    """e^x in place, of a difference.

    On a CPU torch's exp2 takes a third of the time of its exp. The error grows with |x|: some 1e-6 of e^-20 in fp32.
    """
    return x.mul_(_LOG2_E).exp2_() if x.is_cpu else x.exp_()


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Ranges of rows for one op after the other.

    A GPU takes all rows at once. A CPU takes as many as its cache holds: memory would cost more than the arithmetic.
    """
    rows = max(_CACHED // max(logits.shape[1], 1) if logits.is_cpu else len(logits), 1)
    return (slice(first, first + rows) for first in range(0, len(logits), rows))


def _statistics(logits: Tensor, target: Tensor, columns: int) -> Tensor:
    """`statistics` by torch's ops, for at least one row and column."""
    z = logits[:, :columns]
    wide = torch.promote_types(logits.dtype, torch.float32)
    maximum = z.amax(-1).to(wide).clamp_(min=torch.finfo(torch.float32).min)
    is_here = (target >= 0) & (target < columns)
    column = torch.where(is_here, target, 0)[:, None]
    picked = torch.where(is_here, z.gather(-1, column)[:, 0].to(wide), 0.0)
    exp_sum = torch.empty_like(maximum)
    for block in _blocks(z):
        shifted = z[block] - maximum[block, None]
        exp_sum[block] = _exp_(shifted).sum(-1)
    return torch.stack((maximum, exp_sum, picked))


def _gradient(
    logits: Tensor,
    target: Tensor,
    columns: int,
    maximum: Tensor,
    scale: Tensor,
    grad_loss: Tensor,
    inplace: bool,
) -> Tensor:
    """`gradient` by torch's ops."""
    in_logits = inplace and logits.dtype == maximum.dtype
    grad = logits if in_logits else torch.empty_like(logits, dtype=maximum.dtype)
    for block in _blocks(logits):
        torch.sub(logits[block], maximum[block, None], out=grad[block])
        _exp_(grad[block]).mul_(scale[block, None])
    grad[:, columns:] = 0.0
    if columns:
        # Not by a mask as the index: the host would have to wait for the GPU to know how many elements it selects.
        is_here = (target >= 0) & (target < columns)
        column = torch.where(is_here, target, 0)[:, None]
        grad.scatter_(1, column, grad.gather(1, column) - torch.where(is_here, grad_loss, 0.0)[:, None])
    if inplace and not in_logits:
        return logits.copy_(grad)
    return grad.to(logits.dtype)


@triton.jit
def _add_tile(  # type: ignore[no-untyped-def]
    z, real, maximum, exp_sum, MASKED: tl.constexpr
):  # fmt: skip
    """Add a tile z [STEPS, LANES] to the statistics of lanes.

    With MASKED only the elements count whose `real` is true.
    """
    if MASKED:
        z = tl.where(real, z, -float("inf"))
    higher = tl.maximum(maximum, tl.max(z, 0))
    z -= higher[None, :]
    exp_sum = exp_sum * exp(maximum - higher) + tl.sum(exp(z), 0)
    return higher, exp_sum


@triton.jit
def _statistics_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, target_ptr, statistics_ptr, rows, columns, width, stride,
    STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the statistics of one row. Every lane keeps its own maximum and sums, so threads meet only at the end.

    Whole tiles are read in a loop without masks, because masks would make it slower than the memory. The rest is read
    under a mask.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    tile = tl.arange(0, STEPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    maximum = tl.full((LANES,), _LEAST, tl.float32)
    exp_sum = tl.zeros((LANES,), tl.float32)
    whole = columns // (STEPS * LANES) * (STEPS * LANES)
    for first in range(0, whole, STEPS * LANES):
        z = tl.load(logits_ptr + first + tile).to(tl.float32)
        maximum, exp_sum = _add_tile(z, None, maximum, exp_sum, False)
    # This loop has at most one iteration. As a loop it takes fewer registers than as an `if`.
    for first in range(whole, columns, STEPS * LANES):
        column = first + tile
        # The load is masked by `width`, not by `columns`. The compiler knows that `width` is a multiple of 16, so the
        # load stays wide.
        z = tl.load(logits_ptr + column, column < width, other=0.0).to(tl.float32)
        maximum, exp_sum = _add_tile(z, column < columns, maximum, exp_sum, True)
    highest = tl.max(maximum, 0)
    tl.store(statistics_ptr + row, highest)
    tl.store(statistics_ptr + rows + row, tl.sum(exp_sum * exp(maximum - highest), 0))
    target = tl.load(target_ptr + row)
    mine = (target >= 0) & (target < columns)
    picked = tl.load(logits_ptr + tl.where(mine, target, 0)).to(tl.float32)
    tl.store(statistics_ptr + 2 * rows + row, tl.where(mine, picked, 0.0))


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, grad_ptr, target_ptr, maximum_ptr, scale_ptr, grad_loss_ptr,
    columns, width, stride, blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of BLOCK columns of one row."""
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    first = program % blocks * BLOCK
    column = tl.arange(0, BLOCK)
    inside = column < (width - first).to(tl.int32)
    z = tl.load(logits_ptr + row * stride + first + column, inside, other=-float("inf")).to(tl.float32)
    grad_loss = tl.load(grad_loss_ptr + row)
    grad = exp(z - tl.load(maximum_ptr + row)) * tl.load(scale_ptr + row)
    target = tl.load(target_ptr + row) - first
    has_target = (target >= 0) & (target < BLOCK)
    if has_target | (first + BLOCK > columns):
        # At most two blocks of a row come here. The others need not compare their columns with two numbers.
        place = tl.where(has_target, target, -1).to(tl.int32)
        grad -= tl.where(column == place, grad_loss, 0.0)
        grad = tl.where(column < (columns - first).to(tl.int32), grad, 0.0)
    tl.store(grad_ptr + row * stride + first + column, grad.to(grad_ptr.dtype.element_ty), inside)


def statistics_config(columns: int) -> tuple[int, int, int]:
    """The steps and lanes of a tile, and the warps.

    A thread has 8 lanes (16 bytes of bf16) and up to 4 loads of them in flight.
    """
    lanes = min(max(next_power_of_2(columns), 256), 1024)
    steps = min(max(next_power_of_2(columns) // lanes, 1), 4)
    return steps, lanes, lanes // 256


def gradient_config(width: int, bytes_a_logit: int) -> tuple[int, int]:
    """The columns and warps of a program. A thread has up to 4 loads of 16 bytes."""
    block = min(max(next_power_of_2(width), 128), 8192 // bytes_a_logit)
    return block, max(block * bytes_a_logit // 2048, 1)


def statistics(logits: Tensor, target: Tensor, columns: int, impl: Implementation = "torch") -> Tensor:
    """The statistics [3, rows] of each row: max, sum of exp(z - max), and z[target].

    `target` is the column of the target. If another rank holds it, `target` is outside [0, columns), and z[target] is
    0. Without real columns the maximum is the least fp32 number, and the others are 0.
    """
    rows, width = logits.shape
    if rows == 0 or columns == 0:
        nothing = logits.new_zeros(3, rows, dtype=torch.promote_types(logits.dtype, torch.float32))
        nothing[0] = torch.finfo(torch.float32).min
        return nothing
    if not fused(impl, logits):
        return _statistics(logits, target, columns)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    result = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    if not launches(logits, result):
        return result
    steps, lanes, warps = statistics_config(columns)
    _statistics_kernel[(rows,)](
        logits, target.contiguous(), result, rows, columns, width, logits.stride(0),
        steps, lanes, num_warps=warps,
    )  # fmt: skip
    return result


def gradient(
    logits: Tensor,
    target: Tensor,
    columns: int,
    maximum: Tensor,
    scale: Tensor,
    grad_loss: Tensor,
    impl: Implementation = "torch",
    inplace: bool = False,
) -> Tensor:
    """scale * exp(z - maximum), at the target column less grad_loss, in z's dtype.

    `maximum`, `scale` and `grad_loss` are [rows]. This is the gradient of the loss if `maximum` is over the whole
    vocabulary, and scale = d loss / d logsumexp * grad_loss / (sum of exp(z - maximum)). With `inplace` the gradient
    overwrites the logits, and autograd is told so.
    """
    logits = logits.detach()
    rows, width = logits.shape
    if not fused(impl, logits):
        return _gradient(logits, target, columns, maximum, scale, grad_loss, inplace)
    if not inplace or not logits.is_contiguous():
        logits = logits.contiguous()
    grad = logits if inplace else torch.empty_like(logits)
    block, warps = gradient_config(width, logits.element_size())
    blocks = triton.cdiv(width, block)
    if launches(logits, grad):
        rowwise = (x.contiguous() for x in (target, maximum, scale, grad_loss))
        _gradient_kernel[(rows * blocks,)](
            logits, grad, *rowwise, columns, width, logits.stride(0), blocks, block, num_warps=warps
        )
    if inplace:
        # Autograd does not see what a Triton kernel writes.
        torch.autograd.graph.increment_version(grad)
    return grad
