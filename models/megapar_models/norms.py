"""The norms of a layer: RMSNorm and LayerNorm over the hidden dimension, by the rule of the family."""

from dataclasses import dataclass
from typing import Literal

import torch
from megapar_kernels.dispatch import Implementation
from megapar_kernels.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from torch import Tensor, nn

from megapar.params import ONES, ZEROS
from megapar.sharding import Sharding
from megapar.tensor_parallel.layers import shared_vector


@dataclass(frozen=True)
class NormRule:
    """How a family normalizes.

    `kind` is RMSNorm or LayerNorm. LayerNorm also subtracts the mean and adds a bias. RMSNorm is x / rms(x) * (`offset`
    + w). The weight w starts at 1 - offset: in Gemma, at 0.

    RMSNorm of 16-bit hidden states is computed in fp32 and rounded once, after the product with the weight. With
    `cast_first` it is rounded before the product, and the product is rounded again, as in Hugging Face's Llama.
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: Literal[0, 1] = 0
    cast_first: bool = False

    def __post_init__(self) -> None:
        if self.kind == "layer" and (self.offset or self.cast_first):
            raise ValueError("NormRule: offset and cast_first are those of RMSNorm; LayerNorm has neither")

    def weight(self, name: str, size: int, sharding: Sharding, *, partial: bool = False) -> nn.Parameter:
        """The weight [size] on every tp rank. `partial` is as in `shared_vector`."""
        init = ZEROS if self.offset else ONES
        return shared_vector(name, size, init, sharding, partial=partial)

    def rms(self, x: Tensor, weight: Tensor, impl: Implementation) -> Tensor:
        """RMSNorm of x [..., size]."""
        if self.cast_first:
            normed = rms_norm(x, torch.ones_like(weight), self.eps, impl)
            return normed * (weight + self.offset)
        return rms_norm(x, self._multiplier(weight), self.eps, impl)

    def add_rms(self, x: Tensor, residual: Tensor, weight: Tensor, impl: Implementation) -> tuple[Tensor, Tensor]:
        """RMSNorm of x + residual, and this sum."""
        if self.cast_first:
            total = x + residual
            return self.rms(total, weight, impl), total
        return add_rms_norm(x, residual, self._multiplier(weight), self.eps, impl)

    def _multiplier(self, weight: Tensor) -> Tensor:
        if not self.offset:
            return weight
        # In fp32: next to 1, bf16 has three digits.
        return weight.to(torch.promote_types(weight.dtype, torch.float32)) + self.offset


class RMSNorm(nn.Module):
    """RMSNorm over the hidden dimension, with weight."""

    def __init__(self, name: str, size: int, rule: NormRule, sharding: Sharding, impl: Implementation):
        super().__init__()
        self.rule = rule
        self.impl = impl
        self.weight = rule.weight(f"{name}.weight", size, sharding)

    def forward(self, x: Tensor) -> Tensor:
        return self.rule.rms(x, self.weight, self.impl)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream and normalize the sum; returns (norm of the sum, sum)."""
        return self.rule.add_rms(x, residual, self.weight, self.impl)


class LayerNorm(nn.Module):
    """LayerNorm over the hidden dimension, with weight and bias."""

    def __init__(self, name: str, size: int, rule: NormRule, sharding: Sharding, impl: Implementation):
        super().__init__()
        self.eps = rule.eps
        self.impl = impl
        self.weight = rule.weight(f"{name}.weight", size, sharding)
        self.bias = shared_vector(f"{name}.bias", size, ZEROS, sharding)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps, self.impl)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream and normalize the sum; returns (norm of the sum, sum)."""
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps, self.impl)


class NoNorm(nn.Module):
    """Takes the place of a norm in a layer without one."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream; returns the sum twice."""
        total = x + residual
        return total, total


Norm = RMSNorm | LayerNorm | NoNorm
