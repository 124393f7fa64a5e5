"""The names of number formats of weights and activations, and the loss scale of fp16.

Gradients, main weights, moments and losses are fp32 in every format. `megapar.declare.sharding.model_dtype` has the
dtypes: options name a format, and are read without torch.
"""

from dataclasses import dataclass
from typing import Literal, get_args

Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass
class LossScale:
    """The factor of the loss in the backward pass. It keeps small gradients of fp16 activations from becoming zero.

    Source: Micikevicius et al., arXiv 1710.03740, section 3.2. The scale is a power of two, so dividing by it
    afterwards is exact. A step with overflowing gradients is not applied, and halves a `dynamic` scale. `WINDOW` steps
    in a row without overflow double the scale. bf16 and fp32 need no scale: theirs is 1 and never changes.
    """

    scale: float = 1.0
    dynamic: bool = False
    good_steps: int = 0

    WINDOW = 1000
    LARGEST = 2.0**24

    @classmethod
    def of(cls, precision: Precision) -> "LossScale":
        """The first scale of a run in `precision`."""
        if precision == "fp16":
            return cls(2.0**16, dynamic=True)
        return cls()

    def update(self, finite: bool) -> None:
        """Adjust the scale after a step. `finite` says whether all scaled gradients were finite."""
        if not self.dynamic:
            return
        if not finite:
            self.good_steps = 0
            self.scale = max(self.scale / 2, 1.0)
            return
        self.good_steps += 1
        if self.good_steps % self.WINDOW == 0:
            self.scale = min(self.scale * 2, self.LARGEST)
