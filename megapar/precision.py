"""Number formats: what weights and activations are stored in. Gradients, main weights, moments and losses are fp32
in all."""

from dataclasses import dataclass
from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "fp16"]


def model_dtype(precision: Precision) -> torch.dtype:
    """dtype of weights, activations and pipeline transfers."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


@dataclass
class LossScale:
    """What the loss is multiplied by before the backward pass, so that gradients of fp16 activations do not vanish
    (Micikevicius et al., arXiv 1710.03740, section 3.2). A power of two: dividing by it afterwards is exact.

    A gradient that overflows halves a `dynamic` scale and costs the step's update; `WINDOW` steps in a row without one
    double it. bf16 and fp32 need none: their scale is 1 and stays.
    """

    scale: float = 1.0
    dynamic: bool = False
    good_steps: int = 0

    WINDOW = 1000
    LARGEST = 2.0**24

    @classmethod
    def of(cls, precision: Precision) -> "LossScale":
        """The scale that a run in `precision` starts with."""
        return cls(2.0**16, dynamic=True) if precision == "fp16" else cls()

    def update(self, finite: bool) -> None:
        """After a step whose scaled gradients were `finite` or not."""
        if not self.dynamic:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps % self.WINDOW == 0:
            self.scale = min(self.scale * 2, self.LARGEST)
