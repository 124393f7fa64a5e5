"""What data, models and pipeline hand each other: a micro-batch of samples, and a pipeline stage that takes it."""

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class MicroBatch:
    """Letters: b samples, s positions. `weights_bs` scales each target's loss (0 drops it); a step's divisor is their
    sum.

    `sample_ids_b` are positions in the run's global sample order: they key dropout, so no layout changes a mask.
    `starts` tells samples that are several documents, which do not attend to each other: int32 [documents + 1], where
    each document starts among the positions of all samples, one sample after another, and b * s at the end. None: each
    sample is one document.
    """

    tokens_bs: Tensor  # int64
    targets_bs: Tensor  # int64
    weights_bs: Tensor  # float32
    sample_ids_b: Tensor  # int64
    starts: Tensor | None = None

    @property
    def size(self) -> int:
        return self.tokens_bs.shape[0]

    @property
    def seq_length(self) -> int:
        return self.tokens_bs.shape[1]

    def to(self, device: torch.device) -> "MicroBatch":
        moved = {
            f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self) if f.name != "starts"
        }
        return MicroBatch(**moved, starts=None if self.starts is None else self.starts.to(device, non_blocking=True))

    def documents_bs(self) -> Tensor:
        """Number of the document that each position is in, counted over all samples; needs `starts`."""
        assert self.starts is not None
        place = torch.arange(self.tokens_bs.numel(), dtype=torch.int32, device=self.starts.device)
        return (torch.searchsorted(self.starts, place, right=True) - 1).view(self.tokens_bs.shape)

    def positions_bs(self) -> Tensor:
        """Position of each token in its document; needs `starts`."""
        assert self.starts is not None
        place = torch.arange(self.tokens_bs.numel(), device=self.starts.device).view(self.tokens_bs.shape)
        return place - self.starts[self.documents_bs()]


class TensorSpec(NamedTuple):
    """What one tensor between two pipeline stages looks like; both ends derive it from the micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class PipelineStage(nn.Module):
    """A run of a model's layers: `forward(x, batch)` of what the stage before returned (None on the first) gives hidden
    states, or on the last stage the loss sum, an fp32 scalar."""

    sizes_of_weights: tuple[str, ...] = ()
    """Options by dotted path that are sizes of this model's weights, though not of those of every model."""

    def boundary(self, batch: MicroBatch) -> tuple[TensorSpec, ...]:
        """Shapes and dtypes of the tensors in `x`; empty on the first stage."""
        raise NotImplementedError

    def title(self) -> str:
        """What the stage holds, for people."""
        return type(self).__name__
