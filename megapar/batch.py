"""One micro-batch of training samples, the only thing that data hands to models and pipeline."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


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
