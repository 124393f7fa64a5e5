"""QK-clip: after an update, rows of queries and keys are scaled down by the largest attention logits of the step.

For a head with the largest logit S above tau the factor is tau / S (Kimi K2, arXiv 2507.20534, section 2.1). The rows
of its queries and of its keys are scaled by the square root, with their biases, so its logits by the factor. Heads that
share a key share the factor of the largest logit among them. Of latent attention the rotated part of the key is shared
by all heads: it stays, and the rotated part of a head's query is scaled by the whole factor. Megatron Core does both
alike (clip_qk of its attention.py and multi_latent_attention.py, core_v0.19.2).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from megapar_kernels.rounding import join, split
from torch import Tensor

from megapar.data_parallel.buckets import Range
from megapar.data_parallel.shards import Weights
from megapar.declare.largest_logits import LargestLogits, ScaledRows, Share
from megapar.declare.params import REMAINDER, Piece
from megapar.optimizer.base import Optimizer
from megapar.optimizer.visits import UpdateShard

_SHARES: tuple[Share, ...] = ("none", "half", "all")


@dataclass(frozen=True)
class _Part:
    """Elements of a tensor updated by this rank: their main weights, and where they lie in its rows.

    The first is element `first` of the tensor as this rank holds it, in rows of `width` elements. `picks` has for each
    row that it begins or continues in, the index of its factor among those of all groups and shares. `params` are the
    16-bit weights, or None if the main weights are the parameters.
    """

    main: Tensor
    remainder: Tensor | None
    params: Tensor | None
    picks: Tensor
    first: int
    width: int

    def scale(self, factors: Tensor) -> None:
        """`factors` are those of all groups and shares, fp32 1-D."""
        by_row = factors.to(self.main.device)[self.picks]
        whole = self.main if self.remainder is None else join(self.main, self.remainder)
        # The first row may have begun before this slice, and the last one may go on behind it.
        head = min(-self.first % self.width, whole.numel())
        body = (whole.numel() - head) // self.width * self.width
        before = int(head > 0)
        whole[:head].mul_(by_row[:before])
        rows = whole[head : head + body].view(-1, self.width)
        rows.mul_(by_row[before : before + len(rows), None])
        whole[head + body :].mul_(by_row[before + len(rows) :])
        if self.remainder is not None:
            upper, lower = split(whole)
            self.main.copy_(upper)
            self.remainder.copy_(lower)
        if self.params is not None:
            self.params.copy_(self.main)


class QKClip:
    """Scales the slices of this rank, which `optimizers` update, by the logits of its layers' `modules`."""

    def __init__(
        self, modules: Sequence[LargestLogits], optimizers: Iterable[Optimizer], weights: Weights, limit: float
    ):
        self._limit = limit
        self._weights = weights
        self._parts: list[tuple[LargestLogits, list[_Part]]] = []
        optimizers = list(optimizers)
        for module in modules:
            parts = [part for rows in module.scaled for part in self._parts_of(rows, optimizers)]
            self._parts.append((module, parts))

    @torch.no_grad()
    def scale(self, logits: Tensor, found_inf: Tensor | None = None) -> None:
        """Scale by the largest logits of the step, fp32 [layers, heads]. Unless `found_inf`, 0-d, is zero: by nothing.

        Call it between the update and the gather of weights.
        """
        for module, parts in self._parts:
            of_group = module.factors(logits[module.layer, : len(module.maxima)], self._limit)
            if found_inf is not None:
                of_group = torch.where(found_inf != 0, 1.0, of_group)
            # A square root is rounded alike everywhere, so copies of a weight stay equal.
            factors = torch.stack([torch.ones_like(of_group), of_group.sqrt(), of_group], dim=1).view(-1)
            for part in parts:
                part.scale(factors)

    def _parts_of(self, rows: ScaledRows, optimizers: Iterable[Optimizer]) -> Iterable[_Part]:
        for optimizer in optimizers:
            for slot in optimizer.slots:
                for piece, begin, end in slot.spec.segments():
                    if piece.name == rows.name:
                        bounds = slot.start + begin, slot.start + end
                        for shard in optimizer.shards:
                            start, stop = max(bounds[0], shard.start), min(bounds[1], shard.stop)
                            if start < stop:
                                yield self._part(rows, piece, bounds[0], optimizer, shard, (start, stop))

    def _part(
        self, rows: ScaledRows, piece: Piece, origin: int, optimizer: Optimizer, shard: UpdateShard, bounds: Range
    ) -> _Part:
        start, stop = bounds
        part = shard.part(start, stop)
        width = piece.held.numel // piece.held.size[0]
        first = start - origin
        held = range(first // width, -(-(stop - origin) // width))
        of_group = [share for count, share in rows.rows for _ in range(count)]
        picks = []
        for row in held:
            group, inside = divmod(piece.held.offset[0] + row, len(of_group))
            picks.append(group * len(_SHARES) + _SHARES.index(of_group[inside]))
        return _Part(
            part.main,
            part.state.get(REMAINDER),
            None if optimizer.aliased(shard) else self._weights.part(start, stop),
            torch.tensor(picks, device=part.main.device),
            first,
            width,
        )
