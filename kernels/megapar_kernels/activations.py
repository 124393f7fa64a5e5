"""Activations of the MLP, gated or with a bias, in one pass over memory each.

For each element of a bf16 output the forward moves 6 bytes if gated and 4 if not, the backward 10 and 6. The backward
needs only the input, and does not overwrite it.

A gated activation may have a weight for each row: that of a token's expert. It multiplies the output in the same pass,
and its gradient is a sum over the row in the pass of the backward.

Sources: gated activations, Shazeer, arXiv 2002.05202; GELU, Hendrycks and Gimpel, arXiv 1606.08415; squared ReLU, So et
al., arXiv 2109.08668.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar_kernels.dispatch import (
    LOG2_E,
    Implementation,
    apply_function,
    exp,
    fused,
    launches,
    next_power_of_2,
    programs_at_once,
    tl,
    triton,
)
from megapar_kernels.one_graph import OneGraph
from megapar_kernels.quantize import GROUP, as_packed, has_kernels, packed_width, quantized
from megapar_kernels.quantize_kernels import store_tile

__all__ = [
    *("bias_gelu", "clamped_swiglu", "geglu", "geglu_erf", "gelu", "gelu_erf", "reglu", "reglu_squared", "relu"),
    *("relu_squared", "silu", "swiglu"),
]

Activation = Literal["silu", "gelu", "gelu_erf", "relu", "relu_squared"]


TORCH: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": partial(F.gelu, approximate="tanh"),
    "gelu_erf": F.gelu,
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


@triton.jit
def _sigmoid_and_slope(exponent):  # type: ignore[no-untyped-def]
    """sigmoid(x) and its derivative sigmoid(x) sigmoid(-x), of exponent = x log2(e).

    With e = exp(-|x|) the larger of sigmoid(x) and sigmoid(-x) is 1 / (1 + e), and the smaller e / (1 + e).
    """
    # e is at most 1, so nothing overflows. Neither sigmoid is computed as 1 minus the other, which would cancel.
    small = tl.exp2(-tl.abs(exponent))
    larger = 1.0 / (1.0 + small)
    smaller = small * larger
    return tl.where(exponent < 0.0, smaller, larger), smaller * larger


@triton.jit
def _gelu_exponent(x):  # type: ignore[no-untyped-def]
    """2 t log2(e) with t = sqrt(2 / pi) (x + 0.044715 x^3). GELU's 0.5 (1 + tanh(t)) equals sigmoid(2 t)."""
    # 2 sqrt(2 / pi) log2(e), and 0.044715 times that: one number in place of two factors saves an instruction.
    return x * (2.302208198144325 + 0.1029432395800235 * (x * x))


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activation of fp32 x."""
    # For very negative x the exponential is infinite, and the quotient 0: the right limit.
    if ACTIVATION == "silu":
        return x / (1.0 + exp(-x))
    elif ACTIVATION == "gelu":
        return x / (1.0 + tl.exp2(-_gelu_exponent(x)))
    elif ACTIVATION == "gelu_erf":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        positive = tl.where(x < 0.0, 0.0, x)  # unlike tl.maximum it lets NaN through
        if ACTIVATION == "relu":
            return positive
        return positive * positive


@triton.jit
def _activate_and_derive(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activation of fp32 x, and its derivative."""
    if ACTIVATION == "silu":
        sigmoid, steepness = _sigmoid_and_slope(x * LOG2_E)
        value = x * sigmoid
        slope = sigmoid + x * steepness
    elif ACTIVATION == "gelu":
        sigmoid, steepness = _sigmoid_and_slope(_gelu_exponent(x))
        value = x * sigmoid
        # The derivative of 2 t is 2 sqrt(2 / pi) (1 + 3 * 0.044715 x^2).
        slope = sigmoid + x * steepness * (1.5957691216057308 + 0.2140644488178007 * (x * x))
    elif ACTIVATION == "gelu_erf":
        # The normal distribution and its density, of which 0.3989422804014327 is 1 / sqrt(2 pi).
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * share
        slope = share + x * 0.3989422804014327 * exp(-0.5 * (x * x))
    else:
        positive = tl.where(x < 0.0, 0.0, x)
        if ACTIVATION == "relu":
            value = positive
            slope = tl.where(x > 0.0, 1.0, 0.0)
        else:
            value = positive * positive
            slope = 2.0 * positive
    return value, slope


@triton.jit
def _tile(rows, columns, ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's rows [ROW_BLOCK, 1] and columns [1, COLUMN_BLOCK], and the mask of elements that exist."""
    # int64: rows times columns may exceed 2^31.
    row = tl.program_id(0).to(tl.int64) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)[:, None]
    column = tl.program_id(1).to(tl.int64) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)[None, :]
    return row, column, (row < rows) & (column < columns)


@triton.jit
def _activation_forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, bias_ptr, weights_ptr, y_ptr, rows, columns,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr = 0,
):  # fmt: skip
    """One tile of y, or with a WIDTH of packed rows of so many bytes."""
    row, column, inside = _tile(rows, columns, ROW_BLOCK, COLUMN_BLOCK)
    source = x_ptr + row * (2 * columns if GATED else columns) + column
    x = tl.load(source, inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column, column < columns, other=0.0).to(tl.float32)
    y = _activate(x, ACTIVATION)
    if GATED:
        y *= tl.load(source + columns, inside, other=0.0).to(tl.float32)
    if weights_ptr is not None:
        y *= tl.load(weights_ptr + row, row < rows, other=0.0).to(tl.float32)
    if WIDTH == 0:
        tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), inside)
    else:
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
        first_row = tl.program_id(0).to(tl.int64) * ROW_BLOCK
        first_column = tl.program_id(1).to(tl.int64) * COLUMN_BLOCK
        store_tile(y_ptr, y, first_row, first_column, rows, columns, WIDTH, ROW_BLOCK, COLUMN_BLOCK)


@triton.jit
def _activation_backward_kernel(  # type: ignore[no-untyped-def]
    grad_y_ptr, x_ptr, grad_x_ptr, rows, columns,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr,
):  # fmt: skip
    row, column, inside = _tile(rows, columns, ROW_BLOCK, COLUMN_BLOCK)
    offset = row * (2 * columns if GATED else columns) + column
    x = tl.load(x_ptr + offset, inside, other=0.0).to(tl.float32)
    value, slope = _activate_and_derive(x, ACTIVATION)
    grad = tl.load(grad_y_ptr + row * columns + column, inside, other=0.0).to(tl.float32)
    kind = grad_x_ptr.dtype.element_ty
    if GATED:
        up = tl.load(x_ptr + offset + columns, inside, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + offset + columns, (grad * value).to(kind), inside)
        grad *= up
    tl.store(grad_x_ptr + offset, (grad * slope).to(kind), inside)


@triton.jit
def _biased_backward_kernel(  # type: ignore[no-untyped-def]
    grad_y_ptr, x_ptr, bias_ptr, grad_x_ptr, grad_bias_ptr, rows, columns,
    ACTIVATION: tl.constexpr, ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The backward of an activation of x + bias, in a block of columns of every n-th tile of rows.

    n is the number of programs of axis 1. Each of them writes a row of the partial sums [n, columns] of the bias's
    gradient. STAGES - 1 tiles are on their way into shared memory while one is computed.
    """
    column = tl.program_id(0).to(tl.int64) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)[None, :]
    line = tl.program_id(1).to(tl.int64)
    in_column = column < columns
    bias = tl.load(bias_ptr + column, in_column, other=0.0).to(tl.float32)
    grad_bias = tl.zeros((ROW_BLOCK, COLUMN_BLOCK), tl.float32)
    for first in tl.range(line * ROW_BLOCK, rows, tl.num_programs(1) * ROW_BLOCK, num_stages=STAGES):
        row = first + tl.arange(0, ROW_BLOCK)[:, None]
        inside = (row < rows) & in_column
        offset = row * columns + column
        x = tl.load(x_ptr + offset, inside, other=0.0).to(tl.float32) + bias
        grad = tl.load(grad_y_ptr + offset, inside, other=0.0).to(tl.float32)
        _, slope = _activate_and_derive(x, ACTIVATION)
        grad *= slope
        grad_bias += grad  # not yet rounded, unlike torch's sum
        tl.store(grad_x_ptr + offset, grad.to(grad_x_ptr.dtype.element_ty), inside)
    tl.store(grad_bias_ptr + line * columns + column, tl.sum(grad_bias, 0, keep_dims=True), in_column)


@triton.jit
def _weighted_backward_kernel(  # type: ignore[no-untyped-def]
    grad_y_ptr, x_ptr, weights_ptr, grad_x_ptr, grad_weights_ptr, rows, columns,
    ACTIVATION: tl.constexpr, ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr,
):  # fmt: skip
    """The backward of a gated activation with weights. A program has whole rows, whose products it sums."""
    row = tl.program_id(0).to(tl.int64) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)[:, None]
    exists = row < rows
    weight = tl.load(weights_ptr + row, exists, other=0.0).to(tl.float32)
    kind = grad_x_ptr.dtype.element_ty
    products = tl.zeros([ROW_BLOCK, COLUMN_BLOCK], tl.float32)
    for start in range(0, columns, COLUMN_BLOCK):
        column = start + tl.arange(0, COLUMN_BLOCK)[None, :]
        inside = exists & (column < columns)
        offset = row * (2 * columns) + column
        x = tl.load(x_ptr + offset, inside, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + offset + columns, inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_y_ptr + row * columns + column, inside, other=0.0).to(tl.float32)
        value, slope = _activate_and_derive(x, ACTIVATION)
        products += grad * value * up
        grad *= weight
        tl.store(grad_x_ptr + offset, (grad * up * slope).to(kind), inside)
        tl.store(grad_x_ptr + offset + columns, (grad * value).to(kind), inside)
    grad_weights = tl.sum(products, 1)[:, None]
    tl.store(grad_weights_ptr + row, grad_weights.to(grad_weights_ptr.dtype.element_ty), exists)


def config(columns: int) -> tuple[int, int, int]:
    """The rows and columns of a program's tile, and its warps. A thread has 16 elements."""
    column_block = min(next_power_of_2(columns), 1024)
    return 2048 // column_block, column_block, 4


def biased_backward_config(columns: int) -> tuple[int, int, int, int, int]:
    """The rows and columns of a tile, the warps, the stages, and how many programs run on a multiprocessor at a time.

    The fastest of those tried on an H200: 174 us for 8,192 x 14,336 bf16 numbers, 96 % of the speed of a copy. Behind
    products, which lower the clock, it took 244 us. It has had 17 % fewer instructions since.
    """
    row_block, column_block, warps = config(columns)
    return row_block, column_block, warps, 3, 4


def _launch(
    kernel: Any, *tensors: Tensor | None, rows: int, columns: int, activation: Activation, gated: bool, **more: int
) -> None:
    """Launch `kernel` on [rows, columns], if there is anything to compute."""
    if tensors[0] is not None and launches(tensors[0], *tensors[1:]):
        row_block, column_block, warps = config(columns)
        grid = triton.cdiv(rows, row_block), triton.cdiv(columns, column_block)
        kernel[grid](*tensors, rows, columns, activation, gated, row_block, column_block, **more, num_warps=warps)


def _launch_biased_backward(grad_y: Tensor, x: Tensor, bias: Tensor, grad_x: Tensor, activation: Activation) -> Tensor:
    """Write the gradient of x; returns that of the bias, fp32."""
    columns = bias.numel()
    rows = x.numel() // max(columns, 1)
    if not launches(grad_y, x, bias, grad_x):
        return bias.new_zeros(columns, dtype=torch.float32)
    row_block, column_block, warps, stages, each = biased_backward_config(columns)
    blocks = triton.cdiv(columns, column_block)
    lines = min(triton.cdiv(rows, row_block), max(programs_at_once(x.device, each) // blocks, 2))
    partial = x.new_empty(lines, columns, dtype=torch.float32)
    _biased_backward_kernel[(blocks, lines)](
        grad_y, x, bias, grad_x, partial, rows, columns,
        activation, row_block, column_block, stages, num_warps=warps,
    )  # fmt: skip
    return partial.sum(0)  # in a fixed order, so it is the same each time


def _launch_weighted_backward(
    grad_y: Tensor, x: Tensor, weights: Tensor, grad_x: Tensor, grad_weights: Tensor, activation: Activation
) -> None:
    """Write the gradients of x and of the weights, if there are any."""
    if launches(grad_y, x, weights, grad_x, grad_weights):
        rows, columns = weights.numel(), grad_y.shape[-1]
        row_block, column_block, warps = config(columns)
        _weighted_backward_kernel[(triton.cdiv(rows, row_block),)](
            grad_y, x, weights, grad_x, grad_weights, rows, columns,
            activation, row_block, column_block, num_warps=warps,
        )  # fmt: skip


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, weights: Tensor | None, activation: Activation, *form: bool
    ) -> Tensor:
        gated, packs = form
        x = x.contiguous()
        bias = None if bias is None else bias.contiguous()
        weights = None if weights is None else weights.contiguous()
        columns = x.shape[-1]
        if gated:
            columns //= 2
        width = packed_width(columns) if packs else 0
        dtype = torch.uint8 if packs else x.dtype
        y = torch.empty(*x.shape[:-1], width or columns, dtype=dtype, device=x.device)
        rows = x.shape[:-1].numel()
        ctx.settings = {"rows": rows, "columns": columns, "activation": activation, "gated": gated}
        ctx.save_for_backward(x, bias, weights)
        _launch(_activation_forward_kernel, x, bias, weights, y, **ctx.settings, WIDTH=width)
        return as_packed(y, x.dtype, "triton") if packs else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None]:
        x, bias, weights = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        if weights is not None:
            grad_weights = torch.empty_like(weights)
            activation = ctx.settings["activation"]
            _launch_weighted_backward(grad_y.contiguous(), x, weights, grad_x, grad_weights, activation)
            return grad_x, None, grad_weights, None, None, None
        if bias is not None:
            grad_bias = _launch_biased_backward(grad_y.contiguous(), x, bias, grad_x, ctx.settings["activation"])
            return grad_x, grad_bias.to(bias.dtype), None, None, None, None
        _launch(_activation_backward_kernel, grad_y.contiguous(), x, grad_x, **ctx.settings)
        return grad_x, None, None, None, None, None


def _activate_into(out: Tensor, x: Tensor, activation: Activation) -> None:
    """out = the activation of x. Both may be strided."""
    if activation == "silu":
        torch.ops.aten.silu.out(x, out=out)
    elif activation == "gelu":
        torch.ops.aten.gelu.out(x, approximate="tanh", out=out)
    elif activation == "gelu_erf":
        torch.ops.aten.gelu.out(x, approximate="none", out=out)
    else:
        torch.clamp(x, min=0.0, out=out)  # lets NaN through, as F.relu does
        if activation == "relu_squared":
            out.square_()


def _multiply_by_slope(grad: Tensor, x: Tensor, activation: Activation) -> None:
    """grad *= the activation's derivative at x, in place."""
    if activation == "silu":
        torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=grad)
    elif activation == "gelu":
        torch.ops.aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=grad)
    elif activation == "gelu_erf":
        torch.ops.aten.gelu_backward.grad_input(grad, x, approximate="none", grad_input=grad)
    elif activation == "relu":
        grad.mul_(x > 0)
    else:
        grad.mul_(F.relu(x).mul_(2.0))


class _TorchGated(torch.autograd.Function):
    """act(gate) * up by torch's ops, times the weight of a row if there are weights.

    The backward writes both gradients into one tensor: nothing is concatenated. It computes act(gate) again: the
    forward does not keep it.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor | None, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.activation = activation
        gate, up = gate_up.chunk(2, dim=-1)
        y = torch.empty(up.shape, dtype=up.dtype, device=up.device)
        _activate_into(y, gate, activation)
        y.mul_(up)
        return y if weights is None else y.mul_(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gate_up, weights = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        torch.mul(grad_y, up, out=grad_gate)
        _multiply_by_slope(grad_gate, gate, ctx.activation)
        _activate_into(grad_up, gate, ctx.activation)
        grad_up.mul_(grad_y)
        if weights is None:
            return grad, None, None
        # The output is linear in up: up times its gradient is the output times the upstream gradient.
        grad_weights = row_sums(grad_up * up, weights.dtype)
        grad.mul_(weights)
        return grad, grad_weights, None


def row_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of each row, [..., 1], added in fp32 if x is narrower."""
    return x.sum(-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)).to(dtype)


def _formula(x: Tensor, bias: Tensor | None, activation: Activation, gated: bool) -> Tensor:
    """The activation of x + bias, in fp32 if x is narrower, rounded to x's dtype once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if bias is not None:
        wide = wide + bias
    if not gated:
        return TORCH[activation](wide).to(x.dtype)
    gate, up = wide.chunk(2, dim=-1)
    return (TORCH[activation](gate) * up).to(x.dtype)


def _backward_formula(
    grad_y: Tensor, x: Tensor, bias: Tensor | None, activation: Activation, gated: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x and of the bias, which is summed in the wider dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    grad = grad_y.to(wide.dtype)
    if bias is not None:
        wide = wide + bias
    if gated:
        gate, up = wide.chunk(2, dim=-1)
        grad_x = torch.cat((_slope_times(grad * up, gate, activation), grad * TORCH[activation](gate)), dim=-1)
    else:
        grad_x = _slope_times(grad, wide, activation)
    grad_bias = None if bias is None else grad_x.flatten(0, -2).sum(0).to(bias.dtype)
    return grad_x.to(x.dtype), grad_bias


def _slope_times(grad: Tensor, x: Tensor, activation: Activation) -> Tensor:
    """grad times the activation's derivative at x."""
    if activation == "silu":
        return torch.ops.aten.silu_backward(grad, x)
    if activation in ("gelu", "gelu_erf"):
        approximate = "tanh" if activation == "gelu" else "none"
        return torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
    if activation == "relu":
        return grad * (x > 0)
    return grad * 2.0 * F.relu(x)


_forward_in_one_graph = OneGraph(_formula)
_backward_in_one_graph = OneGraph(_backward_formula)


class _Compiled(torch.autograd.Function):
    """Compute an activation by one compiled graph forward and one backward, as `_Activation` does by kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, activation: Activation, gated: bool) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.settings = activation, gated
        return _forward_in_one_graph(x, bias, activation, gated)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, bias = ctx.saved_tensors
        return *_backward_in_one_graph(grad_y, x, bias, *ctx.settings), None, None


def _gated(
    gate_up: Tensor, weights: Tensor | None, activation: Activation, impl: Implementation, packed: bool
) -> Tensor:
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate and up: the last dimension of {tuple(gate_up.shape)} is odd; it holds both, 2 f wide")
    if weights is not None and weights.shape != (*gate_up.shape[:-1], 1):
        raise ValueError(f"weights {tuple(weights.shape)} do not fit gate and up {tuple(gate_up.shape)}: one a row")
    if packed:
        if fused(impl, gate_up) and has_kernels(impl, gate_up) and gate_up.shape[-1] % (2 * GROUP) == 0:
            return apply_function(_Activation, gate_up, None, weights, activation, True, True)
        return quantized(_gated(gate_up, weights, activation, impl, False), impl)
    if fused(impl, gate_up):
        return apply_function(_Activation, gate_up, None, weights, activation, True, False)
    if impl == "inductor":
        if weights is not None:
            raise ValueError(
                "an activation with weights is not compiled: choose torch, as Kernels.activation_of_experts"
            )
        return _Compiled.apply(gate_up, None, activation, True)
    return apply_function(_TorchGated, gate_up, weights, activation)


def _plain(x: Tensor, activation: Activation, impl: Implementation) -> Tensor:
    if fused(impl, x):
        return _Activation.apply(x, None, None, activation, False, False)
    if impl == "inductor":
        return _Compiled.apply(x, None, activation, False)
    return TORCH[activation](x)


def swiglu(
    gate_up: Tensor, weights: Tensor | None = None, impl: Implementation = "torch", packed: bool = False
) -> Tensor:
    """silu(gate) * up, [..., f]. `gate_up` [..., 2 f] holds gate, then up; ValueError if its width is odd.

    `weights` [..., 1] multiply the rows of the result, in fp32. ValueError if their shape does not fit. If `packed`,
    the result is a `Packed` of `quantize.quantize_rows`, which takes f of multiples of 128.
    """
    return _gated(gate_up, weights, "silu", impl, packed)


def geglu(
    gate_up: Tensor, weights: Tensor | None = None, impl: Implementation = "torch", packed: bool = False
) -> Tensor:
    """gelu(gate) * up, [..., f], GELU in its tanh form. The arguments are as in `swiglu`."""
    return _gated(gate_up, weights, "gelu", impl, packed)


def reglu_squared(
    gate_up: Tensor, weights: Tensor | None = None, impl: Implementation = "torch", packed: bool = False
) -> Tensor:
    """relu(gate)^2 * up, [..., f]. The arguments are as in `swiglu`."""
    return _gated(gate_up, weights, "relu_squared", impl, packed)


def geglu_erf(
    gate_up: Tensor, weights: Tensor | None = None, impl: Implementation = "torch", packed: bool = False
) -> Tensor:
    """gelu(gate) * up, [..., f], GELU by the error function. The arguments are as in `swiglu`."""
    return _gated(gate_up, weights, "gelu_erf", impl, packed)


def reglu(
    gate_up: Tensor, weights: Tensor | None = None, impl: Implementation = "torch", packed: bool = False
) -> Tensor:
    """relu(gate) * up, [..., f]. The arguments are as in `swiglu`."""
    return _gated(gate_up, weights, "relu", impl, packed)


def silu(x: Tensor, impl: Implementation = "torch") -> Tensor:
    """x * sigmoid(x)."""
    return _plain(x, "silu", impl)


def relu(x: Tensor, impl: Implementation = "torch") -> Tensor:
    """max(x, 0)."""
    return _plain(x, "relu", impl)


def gelu_erf(x: Tensor, impl: Implementation = "torch") -> Tensor:
    """GELU by the error function."""
    return _plain(x, "gelu_erf", impl)


def relu_squared(x: Tensor, impl: Implementation = "torch") -> Tensor:
    """relu(x)^2."""
    return _plain(x, "relu_squared", impl)


def gelu(x: Tensor, impl: Implementation = "torch") -> Tensor:
    """GELU in GPT-2's tanh form."""
    return _plain(x, "gelu", impl)


def bias_gelu(x: Tensor, bias: Tensor, impl: Implementation = "torch") -> Tensor:
    """gelu(x + bias) of x [..., f] and bias [f], in x's dtype. ValueError if their shapes do not fit.

    The gradient of the bias is summed in fp32 in a fixed order.
    """
    if bias.shape != x.shape[-1:]:
        raise ValueError(f"bias {tuple(bias.shape)} does not fit x {tuple(x.shape)}: it must be [{x.shape[-1]}]")
    if fused(impl, x):
        return _Activation.apply(x, bias, None, "gelu", False, False)
    if impl == "inductor":
        return _Compiled.apply(x, bias, "gelu", False)
    return TORCH["gelu"](x + bias).to(x.dtype)
