"""Activation checkpointing (Chen et al., arXiv 1604.06174): activations are dropped and computed again in backward.

Dropout masks derive from counters. So there is no random state to save, and a second forward gives the same bits.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Recompute:
    """The part of the model to recompute.

    `selective` recomputes core attention (arXiv 2205.05198, section 5). `full` recomputes every n-th layer.
    """

    mode: Literal["none", "selective", "full"] = "none"
    every: int = 1

    def attention(self) -> bool:
        return self.mode == "selective"

    def layer(self, number: int) -> bool:
        """Whether the layer with this global number is recomputed."""
        return self.mode == "full" and number % self.every == 0


def preload(mode: str) -> None:
    """Import what torch's checkpoint imports at its first call, unless `mode` is none. It takes seconds.

    A launcher calls this before it forks its ranks, so not every rank spends that time.
    """
    if mode != "none":
        importlib.import_module("torch._dynamo")


def run(recomputes: bool, function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return function(*args). `recomputes` says whether its activations are recomputed in backward rather than kept.

    Without a backward pass, as through frozen layers behind the tokens, it is just called.
    """
    if not recomputes or not _needs_gradient(function, *args):
        return function(*args)
    # No random state is preserved: dropout, the one user of randomness, draws from counters.
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def _needs_gradient(function: Callable[..., Tensor], *args: Any) -> bool:
    """Whether a tensor among the arguments, or a parameter of the function if it is a module, needs a gradient."""
    given = [x for x in args if isinstance(x, Tensor)]
    if isinstance(function, nn.Module):
        given += function.parameters()
    return any(x.requires_grad for x in given)
