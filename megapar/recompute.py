"""Activation checkpointing (Chen et al., arXiv 1604.06174): forget activations, run the forward again in the backward
pass.

Dropout masks derive from counters, so there is no random state to save and a second forward gives the same bits.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Recompute:
    """What is recomputed: `selective` core attention (arXiv 2205.05198, section 5), `full` every n-th layer."""

    mode: Literal["none", "selective", "full"] = "none"
    every: int = 1

    def attention(self) -> bool:
        return self.mode == "selective"

    def layer(self, number: int) -> bool:
        """Whether the layer with this global number is recomputed."""
        return self.mode == "full" and number % self.every == 0


def preload() -> None:
    """Import what torch's checkpoint imports at its first call: seconds, which ranks that are forked later need not
    spend each."""
    importlib.import_module("torch._dynamo")


def run(recomputes: bool, function: Callable[..., Tensor], *args: Any) -> Tensor:
    """function(*args), its activations kept or recomputed in the backward pass."""
    if not recomputes:
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
