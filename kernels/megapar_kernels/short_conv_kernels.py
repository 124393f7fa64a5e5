"""Triton kernels of the short causal convolution (`short_conv` has its formula).

For each element of bf16 the forward moves 4 bytes and the backward 6: what neighbours read again comes from the cache.
The backward computes z again, for each position that reads an input. The gradient of a weight is summed over RUN
positions by each program, and over programs by torch, so it is the same each time.
"""

import torch
from torch import Tensor

from megapar_kernels.dispatch import Implementation, exp, fused, launches, next_power_of_2, tl, triton

COLUMNS = 128
"""Channels of a tile."""
FORWARD_ROWS, FORWARD_WARPS = 32, 4
BACKWARD_ROWS, BACKWARD_WARPS = 16, 8
"""Positions of a tile. No GPU has timed others."""
RUN = 256
"""Positions of which a program of the backward sums the gradient of weights."""
WIDEST = 8
"""The greatest width: the backward's work grows with its square."""


def serves(impl: Implementation, x: Tensor, width: int) -> bool:
    """Whether the kernels compute the convolution, if `impl` asks for them."""
    return fused(impl, x) and width <= WIDEST and x.dtype != torch.float64


@triton.jit
def _inputs(  # type: ignore[no-untyped-def]
    x_ptr, before_ptr, place_ptr, row, back: tl.constexpr, column, front, left, channels, x_s, before_s, place_s,
    TAPS: tl.constexpr,
):  # fmt: skip
    """x at `back` positions in front of each row, [rows, columns] in fp32; zeros where a row does not see it.

    Rows count from the pointers' position: `front` positions of the sample are in front of it, and `left` from it on.
    """
    at = row - back
    inside = (column < channels)[None, :]
    seen = row < left
    if place_ptr is not None and back > 0:
        seen = seen & (tl.load(place_ptr + row * place_s, seen, other=0) >= back)
    of_run = (seen & (at >= -front))[:, None] & inside
    x = tl.load(x_ptr + at[:, None] * x_s + column[None, :], of_run, other=0.0).to(tl.float32)
    if before_ptr is not None and back > 0:
        of_before = (seen & (at < -front))[:, None] & inside
        ahead = (at + front + (TAPS - 1))[:, None] * before_s + column[None, :]
        x += tl.load(before_ptr + ahead, of_before, other=0.0).to(tl.float32)
    return x


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, before_ptr, place_ptr, row, column, front, left, channels, x_s, before_s, place_s,
    TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """z at the rows, [rows, columns] in fp32."""
    z = tl.zeros([ROWS, COLUMNS], tl.float32)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + column, column < channels, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(0, TAPS):
        x = _inputs(
            x_ptr, before_ptr, place_ptr, row, back, column, front, left, channels, x_s, before_s, place_s, TAPS
        )
        weight = tl.load(weight_ptr + (TAPS - 1 - back) * channels + column, column < channels, other=0.0)
        z += x * weight.to(tl.float32)[None, :]
    return z


@triton.jit
def convolved_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, before_ptr, place_ptr, y_ptr, length, channels,
    x_s, x_b, before_s, before_b, place_s, place_b, y_s, y_b,
    TAPS: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of y. Weights are [TAPS, c]."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64).to(tl.int32) * COLUMNS + tl.arange(0, COLUMNS)
    sample = tl.program_id(2).to(tl.int64)
    if before_ptr is not None:
        before_ptr += sample * before_b
    if place_ptr is not None:
        place_ptr += sample * place_b + first * place_s
    left = tl.minimum(length - first, ROWS).to(tl.int32)
    front = tl.minimum(first, TAPS).to(tl.int32)  # more are not read
    z = _sums(
        x_ptr + sample * x_b + first * x_s, weight_ptr, bias_ptr, before_ptr, place_ptr, row, column, front, left,
        channels, x_s, before_s, place_s, TAPS, ROWS, COLUMNS,
    )  # fmt: skip
    if SILU:
        z = z / (1.0 + exp(-z))
    inside = (row < left)[:, None] & (column < channels)[None, :]
    y_ptr += sample * y_b + first * y_s
    tl.store(y_ptr + row[:, None] * y_s + column[None, :], z.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def _gradients_of_sums(  # type: ignore[no-untyped-def]
    dy_ptr, x_ptr, weight_ptr, bias_ptr, before_ptr, place_ptr, row, column, front, left, channels,
    dy_s, x_s, before_s, place_s, TAPS: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient of z at the rows, [rows, columns] in fp32: zeros beyond the last position."""
    inside = (row < left)[:, None] & (column < channels)[None, :]
    dz = tl.load(dy_ptr + row[:, None] * dy_s + column[None, :], inside, other=0.0).to(tl.float32)
    if SILU:
        z = _sums(
            x_ptr, weight_ptr, bias_ptr, before_ptr, place_ptr, row, column, front, left, channels,
            x_s, before_s, place_s, TAPS, ROWS, COLUMNS,
        )  # fmt: skip
        share = 1.0 / (1.0 + exp(-z))
        dz *= share * (1.0 + z * (1.0 - share))
    return dz


@triton.jit
def convolution_gradients_kernel(  # type: ignore[no-untyped-def]
    dy_ptr, x_ptr, weight_ptr, bias_ptr, before_ptr, place_ptr, dx_ptr, partial_ptr, length, channels,
    dy_s, dy_b, x_s, x_b, before_s, before_b, place_s, place_b, dx_s, dx_b,
    TAPS: tl.constexpr, SUMS: tl.constexpr, SILU: tl.constexpr, RUN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx of a run of positions, and the run's sums of the gradients of weights and bias, [samples, runs, TAPS + 1, c].

    SUMS is at least TAPS + 1. The gradient of the positions in front of a sample is not computed.
    """
    run = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64).to(tl.int32) * COLUMNS + tl.arange(0, COLUMNS)
    sample = tl.program_id(2).to(tl.int64)
    first = run * RUN
    x_ptr += sample * x_b + first * x_s
    dy_ptr += sample * dy_b + first * dy_s
    dx_ptr += sample * dx_b + first * dx_s
    if before_ptr is not None:
        before_ptr += sample * before_b
    if place_ptr is not None:
        place_ptr += sample * place_b + first * place_s
    left = tl.minimum(length - first, RUN + TAPS).to(tl.int32)
    front = tl.minimum(first, TAPS).to(tl.int32)  # more are not read
    has_column = column < channels
    number = tl.arange(0, SUMS)[:, None]
    sums = tl.zeros([SUMS, COLUMNS], tl.float32)
    for start in range(0, tl.minimum(left, RUN), ROWS):
        here = start + tl.arange(0, ROWS)
        dz = _gradients_of_sums(
            dy_ptr, x_ptr, weight_ptr, bias_ptr, before_ptr, place_ptr, here, column, front, left, channels,
            dy_s, x_s, before_s, place_s, TAPS, SILU, ROWS, COLUMNS,
        )  # fmt: skip
        sums += tl.where(number == TAPS, tl.sum(dz, axis=0)[None, :], 0.0)
        for back in tl.static_range(0, TAPS):
            x = _inputs(
                x_ptr, before_ptr, place_ptr, here, back, column, front, left, channels, x_s, before_s, place_s, TAPS
            )
            sums += tl.where(number == TAPS - 1 - back, tl.sum(dz * x, axis=0)[None, :], 0.0)
        weight = tl.load(weight_ptr + (TAPS - 1) * channels + column, has_column, other=0.0)
        dx = dz * weight.to(tl.float32)[None, :]
        for ahead in range(1, TAPS):  # not unrolled: the code would grow with the square of TAPS
            row = here + ahead
            dz = _gradients_of_sums(
                dy_ptr, x_ptr, weight_ptr, bias_ptr, before_ptr, place_ptr, row, column, front, left, channels,
                dy_s, x_s, before_s, place_s, TAPS, SILU, ROWS, COLUMNS,
            )  # fmt: skip
            if place_ptr is not None:
                dz = tl.where((tl.load(place_ptr + row * place_s, row < left, other=0) >= ahead)[:, None], dz, 0.0)
            weight = tl.load(weight_ptr + (TAPS - 1 - ahead) * channels + column, has_column, other=0.0)
            dx += dz * weight.to(tl.float32)[None, :]
        inside = (here < left)[:, None] & has_column[None, :]
        tl.store(dx_ptr + here[:, None] * dx_s + column[None, :], dx.to(dx_ptr.dtype.element_ty), inside)
    partial_ptr += (sample * tl.cdiv(length, RUN) + run) * (TAPS + 1) * channels
    kept = (number <= TAPS) & has_column[None, :]
    tl.store(partial_ptr + number * channels + column[None, :], sums, kept)


def _strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


def _lines(x: Tensor) -> Tensor:
    """Return `x` with channels beside each other, as the kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def forward(
    x_sbc: Tensor, weight_c1w: Tensor, bias_c: Tensor | None, before_pbc: Tensor | None, place_sb: Tensor | None,
    silu: bool,
) -> Tensor:  # fmt: skip
    """Return y [s, b, c]."""
    x, before = _lines(x_sbc), None if before_pbc is None else _lines(before_pbc)
    weight, bias = weight_c1w[:, 0].t().contiguous(), None if bias_c is None else bias_c.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    length, samples, channels = x.shape
    if launches(y, x, weight, bias, before, place_sb):
        convolved_kernel[triton.cdiv(length, FORWARD_ROWS), triton.cdiv(channels, COLUMNS), samples](
            x, weight, bias, before, place_sb, y, length, channels,
            *_strides(x), *_strides(before), *_strides(place_sb), *_strides(y),
            len(weight), silu, FORWARD_ROWS, COLUMNS, num_warps=FORWARD_WARPS,
        )  # fmt: skip
    return y


def backward(
    dy_sbc: Tensor, x_sbc: Tensor, weight_c1w: Tensor, bias_c: Tensor | None, before_pbc: Tensor | None,
    place_sb: Tensor | None, silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dx, and in fp32 the gradients of the weight [c, 1, w] and of a bias [c]."""
    dy, x, before = _lines(dy_sbc), _lines(x_sbc), None if before_pbc is None else _lines(before_pbc)
    weight, bias = weight_c1w[:, 0].t().contiguous(), None if bias_c is None else bias_c.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    length, samples, channels = x.shape
    width = len(weight)
    runs = triton.cdiv(length, RUN)
    partial = torch.empty(samples, runs, width + 1, channels, dtype=torch.float32, device=x.device)
    if launches(dx, dy, x, weight, bias, before, place_sb, partial):
        convolution_gradients_kernel[runs, triton.cdiv(channels, COLUMNS), samples](
            dy, x, weight, bias, before, place_sb, dx, partial, length, channels,
            *_strides(dy), *_strides(x), *_strides(before), *_strides(place_sb), *_strides(dx),
            width, next_power_of_2(width + 1), silu, RUN, BACKWARD_ROWS, COLUMNS,
            num_warps=BACKWARD_WARPS,
        )  # fmt: skip
    sums = partial.sum((0, 1))
    return dx, sums[:width].t()[:, None], sums[width]
