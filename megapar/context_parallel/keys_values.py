"""Keys and values in one flat tensor, so one message carries both. Their widths may differ."""

from typing import NamedTuple

import torch
from torch import Tensor


class KeysValues(NamedTuple):
    """Keys `k` [b, h, s, d] and values `v` [b, h, s, e] of the same heads: views of `flat`, the keys first."""

    flat: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def copied(cls, k: Tensor, v: Tensor) -> "KeysValues":
        """A copy of k and v, of any strides."""
        return cls.of(torch.cat((k.reshape(-1), v.reshape(-1))), k.shape, v.shape)

    @classmethod
    def of(cls, flat: Tensor, k_shape: torch.Size, v_shape: torch.Size) -> "KeysValues":
        """Keys and values of these shapes in `flat`. Its size is the sum of both."""
        k, v = flat.split((k_shape.numel(), v_shape.numel()))
        return cls(flat, k.view(k_shape), v.view(v_shape))

    def with_flat(self, flat: Tensor) -> "KeysValues":
        """Keys and values of the same shapes in another flat tensor."""
        return KeysValues.of(flat, self.k.shape, self.v.shape)

    def zeros(self, dtype: torch.dtype) -> "KeysValues":
        """Zeros of the same shapes."""
        return self.with_flat(torch.zeros_like(self.flat, dtype=dtype))

    def of_ranks(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The keys [r, b, h, s, d] and the values [r, b, h, s, e] of r ranks. Their flat tensors are joined in `flat`.

        Both are views.
        """
        k, v = flat.view(-1, self.flat.numel()).split((self.k.numel(), self.v.numel()), dim=1)
        return k.unflatten(1, self.k.shape), v.unflatten(1, self.v.shape)
