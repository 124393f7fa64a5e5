"""What data, models and pipeline hand each other: a micro-batch of samples, and a pipeline stage that takes it."""

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class MicroBatch:
    """Letters: b samples, s positions. `weights_bs` scales each target's loss (0 drops it); a step's divisor is their
    sum.

    `sample_ids_b` are positions in the run's global sample order: they key dropout, so no layout changes a mask.
    `positions_s` are the positions in their samples of the s rows that this rank holds: rotary tables, learned
    positions and dropout keys read them. Unless given, the rank holds whole samples: 0, 1, ... s - 1. `loss_scale`, 0-d
    fp32, multiplies the gradient of every loss (`add_loss`); None outside of training.
    `starts` tells samples that are several documents, which do not attend to each other: int32 [documents + 1], where
    each document starts among the positions of all samples, one sample after another, and b * s at the end. None: each
    sample is one document.
    """

    tokens_bs: Tensor  # int64
    targets_bs: Tensor  # int64
    weights_bs: Tensor  # float32
    sample_ids_b: Tensor  # int64
    starts: Tensor | None = None
    positions_s: Tensor = None  # type: ignore[assignment]  # int64, filled in below
    loss_scale: Tensor | None = None

    def __post_init__(self) -> None:
        if self.positions_s is None:
            whole = torch.arange(self.seq_length, device=self.tokens_bs.device)
            object.__setattr__(self, "positions_s", whole)

    @property
    def size(self) -> int:
        return self.tokens_bs.shape[0]

    @property
    def seq_length(self) -> int:
        return self.tokens_bs.shape[1]

    def to(self, device: torch.device) -> "MicroBatch":
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {name: x.to(device, non_blocking=True) for name, x in tensors.items() if x is not None}
        return replace(self, **moved)

    def documents_bs(self) -> Tensor:
        """Number of the document that each position is in, counted over all samples; needs `starts`."""
        assert self.starts is not None
        place = torch.arange(self.tokens_bs.numel(), dtype=torch.int32, device=self.starts.device)
        return (torch.searchsorted(self.starts, place, right=True) - 1).view(self.tokens_bs.shape)

    def document_positions_bs(self) -> Tensor:
        """Position of each token in its document; needs `starts`."""
        assert self.starts is not None
        place = torch.arange(self.tokens_bs.numel(), device=self.starts.device).view(self.tokens_bs.shape)
        return place - self.starts[self.documents_bs()]


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad, scale, None


def add_loss(x: Tensor, loss: Tensor, batch: MicroBatch) -> Tensor:
    """`x`, whose backward pass also runs that of `loss`, a 0-d fp32 sum over the batch's target tokens.

    So a stage before the last trains on a loss of its own, such as a router's balance, weighted as the step's loss is.
    The value itself is not reported.
    """
    return x if batch.loss_scale is None else _AddLoss.apply(x, loss, batch.loss_scale)


class TensorSpec(NamedTuple):
    """What one tensor between two pipeline stages looks like; both ends derive it from the micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class PipelineStage(nn.Module):
    """A run of a model's layers: `forward(x, batch)` of what the stage before returned (None on the first) gives hidden
    states, or on the last stage the loss sum, an fp32 scalar.

    Each micro-batch may have its own shapes, and a link may carry several tensors (a tuple). Floating-point tensors on
    a link get a gradient (zeros if the taker did not use them), others are only passed on.
    """

    sizes_of_weights: tuple[str, ...] = ()
    """Options by dotted path that are sizes of this model's weights, though not of those of every model."""

    def boundary(self, batch: MicroBatch) -> tuple[TensorSpec, ...]:
        """Shapes and dtypes of the tensors in `x`; empty on the first stage."""
        raise NotImplementedError

    def title(self) -> str:
        """What the stage holds, for people."""
        return type(self).__name__
