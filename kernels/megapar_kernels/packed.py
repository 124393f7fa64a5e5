"""A tensor whose numbers are held in bytes of another form, such as FP8 codes with their exponents.

A rank sends and copies the bytes, where autograd sees the numbers: the shape and the dtype of activations. Functions
that only move rows take the bytes (`moved`). Every other op gets the numbers, restored for it: a function that knows
nothing of `Packed` computes what it would compute of them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_KEEPS_BYTES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class Packed(Tensor):
    """Numbers [..., features] of a dtype, held as rows of bytes [..., any]. `restore(rows)` returns the numbers."""

    rows: Tensor
    restore: Callable[[Tensor], Tensor]

    @staticmethod
    def __new__(cls, rows: Tensor, features: int, dtype: torch.dtype, restore: Callable[[Tensor], Tensor]) -> "Packed":
        shape = (*rows.shape[:-1], features)
        found: Packed = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=rows.device)
        found.rows, found.restore = rows, restore
        return found

    def with_rows(self, rows: Tensor) -> "Packed":
        """Other rows of the same form."""
        return Packed(rows, self.shape[-1], self.dtype, self.restore)

    def restored(self) -> Tensor:
        """The numbers, in memory of their own."""
        return self.restore(self.rows)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Packed({tuple(self.shape)}, {self.dtype}, rows of {self.rows.shape[-1]} bytes)"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _KEEPS_BYTES:
            return args[0].with_rows(args[0].rows)
        args, kwargs = tree_map_only(Packed, Packed.restored, (args, kwargs or {}))
        return func(*args, **kwargs)


def moved(move: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `move(x)` of a function that copies rows as they are. Of a `Packed` the bytes are moved."""
    return x.with_rows(move(x.rows)) if isinstance(x, Packed) else move(x)


def rows_of(x: Tensor) -> Tensor:
    """What is in memory of x: the bytes of a `Packed`, or x itself."""
    return x.rows if isinstance(x, Packed) else x


def form_of(x: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes a tensor like x of the bytes in its memory."""
    if isinstance(x, Packed):
        return partial(Packed, features=x.shape[-1], dtype=x.dtype, restore=x.restore)
    return _itself


def split_rows(x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Return views of consecutive rows of x [rows, features]. Those of a `Packed` are `Packed`."""
    form = form_of(x)
    return [form(part) for part in rows_of(x).split(list(sizes))]


def _itself(x: Tensor) -> Tensor:
    return x
