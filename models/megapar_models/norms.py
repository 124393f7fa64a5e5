"""The norms of a layer: RMSNorm and LayerNorm over the hidden dimension, by the rule of the family."""

from dataclasses import dataclass
from typing import Literal

import torch
from megapar_kernels.dispatch import Implementation
from megapar_kernels.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from torch import Tensor, nn

from megapar.activations import recompute
from megapar.declare.params import ONES, ZEROS
from megapar.declare.sharding import Sharding
from megapar.tensor_parallel.layers import shared_vector


@dataclass(frozen=True)
class NormRule:
    """How a family normalizes.

    `kind` is RMSNorm or LayerNorm. LayerNorm also subtracts the mean and adds a bias. The factor of both is `offset` +
    w. The weight w starts at 1 - offset: in Gemma and Nemotron, at 0.

    RMSNorm of 16-bit hidden states is computed in fp32 and rounded once, after the product with the weight. With
    `cast_first` it is rounded before the product, and the product is rounded again, as in Hugging Face's Llama.

    Without `weighted` a norm has no weight, as in OLMo's first models. Without `biased` LayerNorm has no bias, as in
    Cohere's models.
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: Literal[0, 1] = 0
    cast_first: bool = False
    weighted: bool = True
    biased: bool = True

    def __post_init__(self) -> None:
        if self.kind == "layer" and self.cast_first:
            raise ValueError("NormRule: cast_first is that of RMSNorm; LayerNorm is rounded once")
        if not self.weighted and (self.offset or self.cast_first):
            raise ValueError("NormRule: offset and cast_first are about a weight, and weighted=False has none")

    @property
    def has_bias(self) -> bool:
        return self.kind == "layer" and self.biased

    def weight(self, name: str, size: int, sharding: Sharding, *, partial: bool = False) -> nn.Parameter:
        """The weight [size] on every tp rank. `partial` is as in `shared_vector`."""
        init = ZEROS if self.offset else ONES
        return shared_vector(name, size, init, sharding, partial=partial)

    def normalize(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, impl: Implementation) -> Tensor:
        """The norm of x [..., size] over its last dimension. `weight` and `bias` are None if the rule has none."""
        if self.kind == "layer":
            return layer_norm(x, *self.affine(x, weight, bias), self.eps, impl)
        if weight is None:
            return rms_norm(x, x.new_ones(x.shape[-1]), self.eps, impl)
        return self.rms(x, weight, impl)

    def rms(self, x: Tensor, weight: Tensor, impl: Implementation, *, packed: bool = False) -> Tensor:
        """RMSNorm of x [..., size]. `packed` is that of `rms_norm`, without `cast_first`."""
        if self.cast_first:
            normed = rms_norm(x, torch.ones_like(weight), self.eps, impl)
            return normed * (weight + self.offset)
        return rms_norm(x, self._multiplier(weight), self.eps, impl, packed)

    def add_rms(
        self, x: Tensor, residual: Tensor, weight: Tensor, impl: Implementation, *, packed: bool = False
    ) -> tuple[Tensor, Tensor]:
        """RMSNorm of x + residual, and this sum. `packed` is as in `rms`."""
        if self.cast_first:
            total = x + residual
            return self.rms(total, weight, impl), total
        return add_rms_norm(x, residual, self._multiplier(weight), self.eps, impl, packed)

    def affine(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """The factor and the summand of LayerNorm, whose kernels take both: ones and zeros if the rule has none."""
        factor = x.new_ones(x.shape[-1]) if weight is None else self._multiplier(weight)
        return factor, torch.zeros_like(factor) if bias is None else bias

    def _multiplier(self, weight: Tensor) -> Tensor:
        if not self.offset:
            return weight
        # In fp32: next to 1, bf16 has three digits.
        return weight.to(torch.promote_types(weight.dtype, torch.float32)) + self.offset


class RMSNorm(nn.Module):
    """RMSNorm over the hidden dimension. Its rule may leave out the weight."""

    weight: nn.Parameter | None

    def __init__(self, name: str, size: int, rule: NormRule, sharding: Sharding, impl: Implementation):
        super().__init__()
        self.rule = rule
        self.impl = impl
        self.weight = rule.weight(f"{name}.weight", size, sharding) if rule.weighted else None
        self.packs = False
        """Whether the result is in FP8 codes, because products alone read it."""

    def pack(self) -> None:
        """Let the kernel write FP8 codes, where one kernel computes the norm."""
        self.packs = self.rule.weighted and not self.rule.cast_first and self.impl == "triton"

    def forward(self, x: Tensor) -> Tensor:
        if self.packs and self.weight is not None:
            return self.rule.rms(x, self.weight, self.impl, packed=True)
        return self.rule.normalize(x, self.weight, None, self.impl)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream and normalize the sum; returns (norm of the sum, sum)."""
        weight = x.new_ones(x.shape[-1]) if self.weight is None else self.weight
        return self.rule.add_rms(x, residual, weight, self.impl, packed=self.packs)


class LayerNorm(nn.Module):
    """LayerNorm over the hidden dimension. Its rule may leave out weight and bias."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, name: str, size: int, rule: NormRule, sharding: Sharding, impl: Implementation):
        super().__init__()
        self.rule = rule
        self.impl = impl
        self.weight = rule.weight(f"{name}.weight", size, sharding) if rule.weighted else None
        self.bias = shared_vector(f"{name}.bias", size, ZEROS, sharding) if rule.has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.rule.normalize(x, self.weight, self.bias, self.impl)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream and normalize the sum; returns (norm of the sum, sum)."""
        return add_layer_norm(x, residual, *self.rule.affine(x, self.weight, self.bias), self.rule.eps, self.impl)


class NoNorm(nn.Module):
    """Takes the place of a norm in a layer without one."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream; returns the sum twice."""
        total = x + residual
        return total, total


Norm = RMSNorm | LayerNorm | NoNorm


def add_and_norm(norm: Norm, x_sbh: Tensor, branch_sbh: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return norm(x + branch) and x + branch, [s, b, h]; without a branch norm(x) and x.

    One kernel adds and normalizes. With train.recompute=light, backward computes the norm again from the sum.
    """
    if branch_sbh is None:
        return recompute.remade(norm, x_sbh), x_sbh
    normed_sbh, sum_sbh = norm.add_and_norm(branch_sbh, residual=x_sbh)
    return recompute.remade_as(normed_sbh, norm, sum_sbh), sum_sbh
