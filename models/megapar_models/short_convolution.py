"""Short causal convolutions of layers: each channel by itself, over the positions of all context-parallel ranks.

Shapes: s positions of this context-parallel rank, b micro-batch, c this rank's channels, p positions in front, w width.
"""

import math
from collections.abc import Sequence

import torch
from megapar_kernels.first_use import check_short_conv
from megapar_kernels.short_conv import short_conv
from torch import Tensor, nn

from megapar.context_parallel.states import rows_before, runs_of
from megapar.declare.batch import MicroBatch
from megapar.declare.params import Init
from megapar.tensor_parallel.layers import Columns
from megapar_models.factory import Factory
from megapar_models.first_use import check_once


class ShortConvolution(nn.Module):
    """The causal convolution over each channel of several projections. `columns` are their channels and names.

    With `silu` its output is activated.
    """

    def __init__(
        self, columns: Sequence[Columns], width: int, factory: Factory, *, bias: bool = False, silu: bool = True
    ):
        super().__init__()
        sharding = factory.sharding
        self.cp = sharding.cp
        self.width = width
        self.silu = silu
        self.impl = factory.kernels.linear_attention
        check_once(factory, factory.kernels.linear_attention, check_short_conv, width)
        weights = tuple(c.piece("weight", (c.size, 1, width), sharding.tp) for c in columns)
        self.channels = sum(c.stop - c.start for c in columns)
        # As torch's Conv1d.
        init = Init("uniform", 1 / math.sqrt(width))
        self.weight = sharding.parameter(weights, (self.channels, 1, width), init, decay=True)
        self.bias = None
        if bias:
            biases = tuple(c.piece("bias", (c.size,), sharding.tp) for c in columns)
            self.bias = sharding.parameter(biases, (self.channels,), init, decay=False)

    def forward(self, x_sbc: Tensor, batch: MicroBatch) -> Tensor:
        """Map [s, b, c] to the same shape: a position reads those of its document, on whatever rank they are."""
        if self.cp.size == 1:
            return self.convolved(x_sbc, None, places_sb(batch))
        before = rows_before(x_sbc, self.width - 1, self.cp)
        # Both runs of a rank at once, as if they were samples.
        place = places_sb(batch)
        both = None if place is None else torch.cat(runs_of(place, self.cp), dim=1)
        x = torch.cat(runs_of(x_sbc, self.cp), dim=1)
        y = self.convolved(x, torch.cat(list(before), dim=1), both)
        return torch.cat(y.chunk(2, dim=1))

    def convolved(self, x_sbc: Tensor, before_pbc: Tensor | None, place_sb: Tensor | None) -> Tensor:
        """Return `short_conv` with this layer's weights."""
        return short_conv(x_sbc, self.weight, self.bias, before_pbc, place_sb, silu=self.silu, impl=self.impl)

    def with_cache(self, first_b: Tensor, capacity: int) -> nn.Module:
        """Return the module that takes this one's place while text is generated: it keeps the last inputs."""
        return CachedShortConvolution(self)


class CachedShortConvolution(nn.Module):
    """`ShortConvolution` that keeps the inputs of the last columns, which later columns read."""

    def __init__(self, conv: ShortConvolution):
        super().__init__()
        self.conv = conv
        self.before_pbc: Tensor | None = None

    def forward(self, x_sbc: Tensor, batch: MicroBatch) -> Tensor:
        """Return the outputs of the columns of this call."""
        back = self.conv.width - 1
        before = self.before_pbc
        if before is None:
            before = x_sbc.new_zeros(back, *x_sbc.shape[1:])
        y = self.conv.convolved(x_sbc, before, places_sb(batch))
        seen = torch.cat([before, x_sbc])
        self.before_pbc = seen[len(seen) - back :]
        return y


def places_sb(batch: MicroBatch) -> Tensor | None:
    """Return how many positions of its document are in front of each position. None: all of the sample."""
    return None if batch.starts is None else batch.document_positions_bs().t()
