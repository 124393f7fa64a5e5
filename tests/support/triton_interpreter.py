"""Repairs of Triton's interpreter (3.6, 3.9) for tests: bf16 rounds to nearest even; bf16 arithmetic, reductions and
dots are right; so are conversions to e4m3 and from it; lanes left undefined by a masked load hold NaN or a huge number,
as if they were a GPU's leftovers.

As it comes, the interpreter truncates to bf16 and computes on the bit patterns; rounding to e4m3 loses the carry into
the exponent, and NaN of e4m3 reads as 480; masked lanes read as zero.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def _to_e4m3(values: np.ndarray) -> np.ndarray:
    """fp32 to codes as a GPU has them: to nearest even, at most 448, 0x7F for NaN. torch itself rounds to nearest."""
    codes = torch.from_numpy(np.clip(values, -448.0, 448.0)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return np.where(np.isnan(values), np.uint8(0x7F), codes)


_OF_CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def _to_bits(values: np.ndarray) -> np.ndarray:
    """fp32 to the bits of bf16, rounded to nearest even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype(np.uint16)


def _from_bits(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def repair() -> None:
    """Patch the interpreter of this process. After TRITON_INTERPRET=1 and the import of triton, before any launch."""
    import triton.language as tl
    from triton.runtime import interpreter

    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder

    def is_bf16(x: Any) -> bool:
        return x.dtype.scalar == tl.bfloat16

    def widen(x: Any) -> Any:
        if x.dtype.scalar == tl.float8e4nv:
            return handle(_OF_CODES[x.data], tl.float32)
        return handle(_from_bits(x.data), tl.float32) if is_bf16(x) else x

    def narrow(values: np.ndarray) -> Any:
        return handle(_to_bits(values), tl.bfloat16)

    _repair_index(interpreter)
    _patch_once_a_launch(interpreter, tl)
    _repair_arithmetic(builder, tl, is_bf16, widen, narrow)
    _repair_e4m3(builder, tl, handle, widen)
    _repair_reductions(interpreter, tl, widen, narrow)
    _show_masked_lanes(builder, interpreter, tl, handle)


def _repair_index(interpreter: Any) -> None:
    """Of triton 3.6: it takes int() of an array of one element, and numpy 2.4 refuses this."""
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor


def _patch_once_a_launch(interpreter: Any, tl: Any) -> None:
    """The interpreter replaces the members of triton.language at each call of a function inside a kernel, tl.sum too.
    These replacements take half of the time. A launch restores them at its end, so once a launch is enough."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[tuple[bool, bool]] = set()

    def patch_lang(fn: Any) -> Any:
        names = fn.__globals__
        modules = (any(value is tl for value in names.values()), any(value is tl.core for value in names.values()))
        if modules in patched:
            return interpreter._LangPatchScope()  # nothing to restore
        patched.add(modules)
        return patch(fn)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, call


def _repair_arithmetic(builder: Any, tl: Any, is_bf16: Callable, widen: Callable, narrow: Callable) -> None:
    cast, binary, unary, dot = builder.cast_impl, builder.binary_op, builder.unary_op, builder.create_dot

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if is_bf16(source) and target.scalar != tl.bfloat16:
            wide = widen(source)
            return wide if target.scalar == tl.float32 else cast(self, wide, target)
        if target.scalar == tl.bfloat16 and not is_bf16(source):
            wide = source if source.dtype.scalar == tl.float32 else cast(self, source, tl.float32)
            return narrow(wide.data.reshape(source.data.shape))
        return cast(self, source, target)

    def binary_op(self: Any, left: Any, right: Any, operation: Callable) -> Any:
        if not is_bf16(left):
            return binary(self, left, right, operation)
        result = operation(widen(left).data, widen(right).data)
        return type(left)(result, tl.bfloat16) if result.dtype == np.bool_ else narrow(result)

    def unary_op(self: Any, x: Any, operation: Callable) -> Any:
        return narrow(operation(widen(x).data)) if is_bf16(x) else unary(self, x, operation)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widen(a), widen(b), *rest)

    builder.cast_impl, builder.binary_op = cast_impl, binary_op
    builder.unary_op, builder.create_dot = unary_op, create_dot


def _repair_e4m3(builder: Any, tl: Any, handle: Any, widen: Callable) -> None:
    convert = builder.create_fp_to_fp

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if tl.float8e4nv not in (source.dtype.scalar, target.scalar):
            return convert(self, source, target, rounding_mode)
        assert tl.float32 in (source.dtype.scalar, target.scalar), "kernels convert between e4m3 and fp32"
        return widen(source) if target.scalar == tl.float32 else handle(_to_e4m3(source.data), tl.float8e4nv)

    builder.create_fp_to_fp = create_fp_to_fp


def _repair_reductions(interpreter: Any, tl: Any, widen: Callable, narrow: Callable) -> None:
    def tensor(handle: Any, kind: Any, shape: Any) -> Any:
        return tl.core.tensor(handle, tl.block_type(kind, list(shape)) if shape else kind)

    def repaired(apply: Callable) -> Callable:
        def apply_impl(self: Any, argument: Any) -> Any:
            inputs = argument if isinstance(argument, tuple) else (argument,)
            narrowed = [x.dtype.scalar == tl.bfloat16 for x in inputs]
            if not any(narrowed):
                return apply(self, argument)
            wide = [
                tensor(widen(x.handle), tl.float32, x.shape) if n else x for x, n in zip(inputs, narrowed, strict=True)
            ]
            results = apply(self, tuple(wide))
            results = results if isinstance(results, tuple | list) else (results,)
            return tuple(
                tensor(narrow(y.handle.data), tl.bfloat16, y.shape) if n and y.dtype.scalar == tl.float32 else y
                for y, n in zip(results, narrowed, strict=True)
            )

        return apply_impl

    for operation in (interpreter.ReduceOps, interpreter.ScanOps):
        operation.apply_impl = repaired(operation.apply_impl)


def _show_masked_lanes(builder: Any, interpreter: Any, tl: Any, handle: Any) -> None:
    load = builder.create_masked_load

    def create_masked_load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        kind = pointers.get_element_ty()
        if other is None and kind.primitive_bitwidth > 8:
            dtype = interpreter._get_np_dtype(kind)
            leftover = (
                np.uint16(0x7FC0) if kind == tl.bfloat16 else np.nan if kind.is_floating() else np.iinfo(dtype).max // 2
            )
            other = handle(np.full(pointers.data.shape, leftover, dtype=dtype), kind)
        return load(self, pointers, mask, other, *rest, **named)

    builder.create_masked_load = create_masked_load
