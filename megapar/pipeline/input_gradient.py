"""The gradient of a stage's input, without the input."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megapar.declare.batch import TensorSpec


class InputGradient:
    """Where the gradient of a stage's input arrives."""

    def __init__(self, x: Tensor):
        self.grad: Tensor | None = None
        self._spec = TensorSpec(tuple(x.shape), x.dtype)
        self._device = x.device

    def begin(self, x: Tensor) -> Tensor:
        """`x` as the stage gets it: its gradient arrives here."""
        found: Tensor = _Beginning.apply(x, self, torch.empty(0, requires_grad=True))
        return found

    def take(self) -> Tensor:
        """The gradient. Zeros if the stage did not use the input, because the other end waits for it."""
        if self.grad is None:
            return torch.zeros(self._spec.shape, dtype=self._spec.dtype, device=self._device)
        return self.grad


def begin_all(
    received: Sequence[Tensor], specs: Sequence[TensorSpec]
) -> tuple[list[InputGradient], tuple[Tensor, ...]]:
    """Return where the gradients of a stage's inputs arrive, and the inputs as the stage gets them.

    Inputs without a gradient (`TensorSpec.has_gradient`) have no such place.
    """
    gradients: list[InputGradient] = []
    begun = []
    for x, spec in zip(received, specs, strict=True):
        if spec.has_gradient:
            gradients.append(InputGradient(x))
            begun.append(gradients[-1].begin(x))
        else:
            begun.append(x)
    return gradients, tuple(begun)


class _Beginning(torch.autograd.Function):
    """Where the graph of a stage begins. A leaf would hold the input, which may be in host memory meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: InputGradient, _needs_gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.gradient.grad = grad.contiguous()
        return None, None, None
