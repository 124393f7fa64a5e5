"""What data, models and pipeline hand each other: a micro-batch of samples, and a pipeline stage that takes it."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class MicroBatch:
    """Letters: b samples, s positions. `weights_bs` scales each target's loss (0 drops it); a step's divisor is their
    sum.

    `sample_ids_b` are positions in the run's global sample order: they key dropout, so no layout changes a mask.
    """

    tokens_bs: Tensor  # int64
    targets_bs: Tensor  # int64
    weights_bs: Tensor  # float32
    sample_ids_b: Tensor  # int64

    @property
    def size(self) -> int:
        return self.tokens_bs.shape[0]

    @property
    def seq_length(self) -> int:
        return self.tokens_bs.shape[1]

    def to(self, device: torch.device) -> "MicroBatch":
        return MicroBatch(
            *(
                x.to(device, non_blocking=True)
                for x in (self.tokens_bs, self.targets_bs, self.weights_bs, self.sample_ids_b)
            )
        )


class TensorSpec(NamedTuple):
    """What one tensor between two pipeline stages looks like; both ends derive it from the micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class PipelineStage(nn.Module):
    """A run of a model's layers: `forward(x, batch)` of what the stage before returned (None on the first) gives hidden
    states, or on the last stage the loss sum, an fp32 scalar."""

    def boundary(self, batch: MicroBatch) -> tuple[TensorSpec, ...]:
        """Shapes and dtypes of the tensors in `x`; empty on the first stage."""
        raise NotImplementedError

    def title(self) -> str:
        """What the stage holds, for people."""
        return type(self).__name__
