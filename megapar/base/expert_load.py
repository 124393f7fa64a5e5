"""The load of experts in a plan, where no router computes it.

On the meta device tensors have shapes alone. The number of rows of an expert is a value, and the sizes of messages and
of products follow from it. So a plan states the load, as an `ExpertLoad`. A run never asks for it.

Shapes: q positions of etp, p positions of ep, E experts of the layer.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class ExpertLoad(Protocol):
    """Says how often the ranks with parts of the same layer choose each expert."""

    def chosen(self, layer: int, choices: int, num_experts: int, ep_size: int, etp_size: int) -> Tensor:
        """How often the rank at each position of etp and ep chooses each expert: int64 [q, p, E] on the CPU.

        It is asked once for each forward pass of a micro-batch through `layer`, in their order. This rank makes
        `choices` choices there.
        """
        ...


@dataclass(frozen=True)
class EvenLoad:
    """Every rank makes as many choices as this one, spread evenly over the experts."""

    def chosen(self, layer: int, choices: int, num_experts: int, ep_size: int, etp_size: int) -> Tensor:
        return spread(choices, num_experts).expand(etp_size, ep_size, num_experts)


EVEN = EvenLoad()


def spread(rows: int, experts: int) -> Tensor:
    """The rows of each of `experts` experts, int64. The numbers differ by one at most."""
    borders = torch.arange(experts + 1) * rows // max(experts, 1)
    return borders.diff()
