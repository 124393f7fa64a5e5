"""Types exchanged by data, models and pipeline: a micro-batch of samples, and a pipeline stage that consumes it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megapar.system.device import to_device

PADDING = -1  # id of a sample that fills up a micro-batch of an evaluation: no weight, and counted in no loss


class Targets(NamedTuple):
    """A target of each position: token ids, int64 [b, s], and the weight of each in its loss, fp32 [b, s]."""

    tokens_bs: Tensor
    weights_bs: Tensor

    def columns(self, positions_s: Tensor) -> "Targets":
        """The targets of the columns `positions_s`, int64."""
        return Targets(self.tokens_bs[:, positions_s], self.weights_bs[:, positions_s])


@dataclass
class StepScope:
    """What the stages share in a step or an evaluation, besides samples. One scope serves a rank's micro-batches.

    `grad_scale`, 0-d fp32, multiplies the gradient of every added loss (`add_loss`). It is None outside of training.
    `factors`, 0-d fp32 by name, multiply those of single added losses too.
    `loss_sums`, 0-d fp64 by name, add up the losses besides the main one. `hits`, 0-d fp64, adds up the weights of the
    targets that the model gives the highest logit; only an evaluation has it. With `asks_references` stages compute as
    the base of their adapters, and the last stage returns `Scored.of_answers` in place of the loss.
    """

    grad_scale: Tensor | None = None
    factors: Mapping[str, Tensor] = field(default_factory=dict)
    loss_sums: Mapping[str, Tensor] | None = None
    hits: Tensor | None = None
    asks_references: bool = False


@dataclass(frozen=True)
class MicroBatch:
    """Samples going through the model together. Shapes: b samples, s columns.

    The columns are all positions of the samples, or one context-parallel rank's part of them (`columns`).

    `targets_bs` are the next tokens. `weights_bs` scales the loss of each target; 0 drops the target. The sum of all
    weights of a step is its divisor. `later_targets` are the tokens 2, 3, ... positions ahead, as many as the model
    asks for (`megapar.declare.stage_set.Declared.num_targets`). Their weights do not count in the divisor.
    `sample_ids_b` are positions in the run's global sample order, or PADDING. They key dropout masks, so no layout
    changes a mask. `positions_s` are the positions of the columns inside their samples, for rotary tables, learned
    positions and dropout keys. `sample_length` is the number of positions of a whole sample.
    `starts` is for samples of several documents, without attention between them. It is int32 [documents + 1]: the
    position of each document's start, counted through all whole samples one after the other, and b * sample_length at
    the end. With None each sample is one document. `starts_on_host` are the same numbers for the host. Otherwise it
    would have to wait for a GPU to read them. Only `columns` sets them. `chunk` is the size of the chunks that are in
    the place of documents (`in_chunks`), 0 if none are.
    `references_bd`, fp32 [b, documents], are the log-probabilities of the first documents of each sample by a reference
    model: sums over a document's targets, each times its weight. `scope` is the step's or the evaluation's.
    """

    tokens_bs: Tensor  # int64
    targets_bs: Tensor  # int64
    weights_bs: Tensor  # float32
    sample_ids_b: Tensor  # int64
    positions_s: Tensor  # int64
    sample_length: int
    starts: Tensor | None = None
    starts_on_host: tuple[int, ...] | None = None
    references_bd: Tensor | None = None
    later_targets: tuple[Targets, ...] = ()
    scope: StepScope = field(default_factory=StepScope)
    chunk: int = 0

    @classmethod
    def of_samples(
        cls,
        tokens_bs: Tensor,
        targets_bs: Tensor,
        weights_bs: Tensor,
        sample_ids_b: Tensor,
        starts: Tensor | None = None,
        later_targets: Sequence[Targets] = (),
    ) -> "MicroBatch":
        """A micro-batch of whole samples: the positions are 0, 1, ... s - 1."""
        length = tokens_bs.shape[1]
        positions_s = torch.arange(length, device=tokens_bs.device)
        batch = cls(tokens_bs, targets_bs, weights_bs, sample_ids_b, positions_s, length, starts)
        return replace(batch, later_targets=tuple(later_targets))

    def columns(self, positions_s: Tensor) -> "MicroBatch":
        """The part of whole samples at `positions_s`, int64. Call it before `to`: it reads `starts`."""
        # Targets are cut as tokens are. To shift the cut tokens by one would be wrong where a run of positions ends.
        return replace(
            self,
            tokens_bs=self.tokens_bs[:, positions_s],
            targets_bs=self.targets_bs[:, positions_s],
            weights_bs=self.weights_bs[:, positions_s],
            later_targets=tuple(later.columns(positions_s) for later in self.later_targets),
            positions_s=positions_s,
            starts_on_host=None if self.starts is None else tuple(self.starts.tolist()),
        )

    def in_chunks(self, size: int) -> "MicroBatch":
        """The micro-batch with each document cut into chunks of `size` positions, counted from its start.

        The chunks take the place of documents. So what attends within documents attends within chunks. `starts` may
        have further chunks at the end, without positions: on a device nobody need wait for their number.
        `starts_on_host` has none of these.
        """
        if size >= self.sample_length:
            return self
        end = self.size * self.sample_length
        bounds = range(0, end + 1, self.sample_length) if self.starts is None else self.starts_on_host
        on_host = None
        if bounds is not None:
            on_host = (*chain.from_iterable(range(start, stop, size) for start, stop in pairwise(bounds)), end)
        return replace(self, starts=_starts_of_chunks(self, size), starts_on_host=on_host, chunk=size)

    @property
    def longest_document(self) -> int:
        """What no document is longer than: a sample, or a chunk."""
        return self.chunk or self.sample_length

    def with_pairs(self) -> "MicroBatch":
        """Each sample as a pair: two documents of half its length, and references of 0. For measuring and planning."""
        device = self.positions_s.device
        half = self.sample_length // 2
        firsts = torch.arange(self.size, device=device)[:, None] * self.sample_length
        inner = (firsts + torch.tensor([0, half], device=device)).flatten()
        last = torch.full((1,), self.size * self.sample_length, device=device)
        references_bd = torch.zeros(self.size, 2, device=device)
        return replace(self, starts=torch.cat([inner, last]).int(), references_bd=references_bd)

    @property
    def size(self) -> int:
        """The number of samples."""
        return self.tokens_bs.shape[0]

    @property
    def seq_length(self) -> int:
        """The number of columns."""
        return self.tokens_bs.shape[1]

    def to(self, device: torch.device, scope: StepScope | None = None) -> "MicroBatch":
        """Return the micro-batch with its tensors on `device`, and with `scope`, by default its own."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: to_device(x, device) for name, x in values.items() if isinstance(x, Tensor)}
        later = [Targets(*(to_device(x, device) for x in targets)) for targets in self.later_targets]
        return replace(self, **moved, later_targets=tuple(later), scope=scope or self.scope)

    def targets(self, ahead: int = 1) -> Targets:
        """The tokens `ahead` positions after each column. Raises ValueError if the micro-batch has none."""
        if ahead == 1:
            return Targets(self.targets_bs, self.weights_bs)
        if ahead - 2 >= len(self.later_targets):
            raise ValueError(
                f"the model has a loss of tokens {ahead} ahead, but the micro-batch has targets up to "
                f"{1 + len(self.later_targets)} ahead: give it `later_targets`"
            )
        return self.later_targets[ahead - 2]

    def documents_bs(self) -> Tensor:
        """Index of the document of each column, [b, s]. Documents are counted through all samples. Needs `starts`."""
        assert self.starts is not None
        # right=True: the first position of a document is in that document, not in the one before.
        starts_passed = torch.searchsorted(self.starts, self._positions_bs(), right=True)
        return starts_passed - 1

    def documents_in_samples_bs(self) -> Tensor:
        """Index of the document of each column among those of its sample, [b, s]. Needs `starts`."""
        assert self.starts is not None
        firsts_b = torch.arange(self.size, device=self.positions_s.device) * self.sample_length
        return self.documents_bs() - torch.searchsorted(self.starts, firsts_b)[:, None]

    def last_of_documents_bs(self) -> Tensor:
        """Whether a column is the last position of its document, [b, s]. Needs `starts`."""
        assert self.starts is not None
        return self.starts[self.documents_bs() + 1] == self._positions_bs() + 1

    def document_positions_bs(self) -> Tensor:
        """Position of each token inside its document, [b, s]. Needs `starts`."""
        assert self.starts is not None
        return self._positions_bs() - self.starts[self.documents_bs()]

    def _positions_bs(self) -> Tensor:
        """The positions of the columns, [b, s], counted through all whole samples one after the other, as `starts`."""
        samples = torch.arange(self.size, device=self.positions_s.device)
        return samples[:, None] * self.sample_length + self.positions_s


def ahead(batch: MicroBatch, tokens: int) -> MicroBatch:
    """The micro-batch that has in each column the token so many positions ahead, with the targets of that token.

    Positions and documents stay those of the columns. Raises ValueError as `MicroBatch.targets` does.
    """
    targets_bs, weights_bs = batch.targets(tokens + 1)
    tokens_bs = batch.targets(tokens).tokens_bs
    later = batch.later_targets[tokens:]
    return replace(batch, tokens_bs=tokens_bs, targets_bs=targets_bs, weights_bs=weights_bs, later_targets=later)


def _starts_of_chunks(batch: MicroBatch, size: int) -> Tensor:
    """`MicroBatch.starts` of the chunks of documents, int32, computed on the device."""
    device = batch.positions_s.device
    length = batch.sample_length
    end = torch.full((1,), batch.size * length, device=device)
    if batch.starts is None:
        samples = torch.arange(batch.size, device=device)[:, None] * length
        firsts = samples + torch.arange(0, length, size, device=device)
        return torch.cat([firsts.flatten(), end]).int()
    positions = torch.arange(batch.size * length, device=device)
    inside = positions - batch.starts[torch.searchsorted(batch.starts, positions, right=True) - 1]
    # As many as there can be: a document has one chunk more than its positions fill.
    most = len(batch.starts) - 1 + len(positions) // size
    firsts = torch.where(inside % size == 0, positions, end)
    return torch.cat([firsts, end]).sort().values[: most + 1].int()


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor, total: Tensor | None) -> Tensor:
        # Attributes, not saved for backward: a plan counts what is saved, and these are single numbers.
        ctx.scale = scale
        ctx.value = loss.detach()
        ctx.total = total
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        # Here and not in the forward pass, which runs twice if activations are recomputed.
        if ctx.total is not None:
            ctx.total.add_(ctx.value)
        return grad, ctx.scale, None, None


def add_loss(x: Tensor, loss: Tensor, batch: MicroBatch, name: str) -> Tensor:
    """Make the backward pass of `x` run that of `loss` too. Returns `x` unchanged.

    `loss` is a 0-d fp32 sum over the batch's target tokens. Any stage adds a loss of its own this way, such as the
    balance of a router. Its gradient has the same weight as the main loss's, unless the step gives the loss a factor
    (`StepScope.factors`). Its value is reported under `name`, declared by the model
    (`megapar.declare.stage_set.AddedLoss`). Outside of training it adds nothing.

    Raises ValueError if the model does not declare the name.
    """
    scope = batch.scope
    if scope.grad_scale is None:
        return x
    total = None
    if scope.loss_sums is not None:
        if name not in scope.loss_sums:
            raise ValueError(f"loss {name!r} is not among those that the model declares: {list(scope.loss_sums)}")
        total = scope.loss_sums[name]
    if total is not None and not (x.requires_grad or loss.requires_grad):
        total.add_(loss.detach())  # no backward pass comes here
        return x
    scale = scope.grad_scale
    if name in scope.factors:
        scale = scale * scope.factors[name]
    return _AddLoss.apply(x, loss, scale, total)


@contextmanager
def scaling_added_losses(batches: Sequence[MicroBatch], grad_scale: Tensor) -> Iterator[None]:
    """Multiply within the block the gradients of added losses by `grad_scale`, 0-d fp32. Outside, none are added."""
    for batch in batches:
        batch.scope.grad_scale = grad_scale
    try:
        yield
    finally:
        for batch in batches:
            batch.scope.grad_scale = None


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor sent from a pipeline stage to the next, and whether its gradient is sent back.

    Both ends derive it from the micro-batch, so no shapes are sent. Numbers other than floating-point ones never have a
    gradient.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool = True

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient of the tensor is sent back."""
        return self.gradient and self.dtype.is_floating_point

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class PipelineStage(nn.Module):
    """Consecutive layers of a model, called as `forward(x, batch)`.

    `x` is what the previous stage returned, None on the first stage. The last stage returns the sum of the losses, an
    fp32 scalar. The other stages return hidden states. Each micro-batch may have its own shapes. A stage may return
    several tensors, as a tuple, and then gets several. Those with `TensorSpec.has_gradient` get a gradient. It is zero
    if the next stage did not use them.
    """

    sizes_of_weights: tuple[str, ...] = ()
    """Options, by dotted path, that set sizes of weights in this model but not in every model."""

    adds_gradients_in_i: bool = False
    """Whether the I of a backward in halves adds gradients of parameters. All others are deferred to W."""

    def boundary(self, batch: MicroBatch) -> tuple[TensorSpec, ...]:
        """What is said of the tensors in `x`. Empty on the first stage."""
        raise NotImplementedError

    def leaving(self, batch: MicroBatch) -> tuple[TensorSpec, ...] | None:
        """What the next stage says in its `boundary`. None: all floating-point tensors have gradients."""
        return None

    def title(self) -> str:
        """Text for people about the contents of the stage."""
        return type(self).__name__
