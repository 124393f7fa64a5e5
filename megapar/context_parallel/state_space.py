"""The scan of Mamba-2 of a layer, with any number of context-parallel ranks.

The ranks of a sample pass states (`states`), and need no number of heads. A run of positions is the map of the state
S -> m S + B, with a number m for each head: exp of the sum of its decays. With parallel.cp_attention ulysses, ranks
exchange positions for heads where cp divides the heads.

Shapes: s positions of this rank, b samples, n heads, p width of a head, k groups of heads, d width of B and C.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from megapar_kernels.chunks import CHUNK
from megapar_kernels.state_space import state_space
from torch import Tensor, nn

from megapar.activations import recompute
from megapar.comm.axis import Axis
from megapar.context_parallel.states import decays_in_documents, incoming_states, runs_of
from megapar.context_parallel.ulysses import to_heads, to_positions
from megapar.context_parallel.whole import are_equal_runs
from megapar.declare.batch import MicroBatch


class StateSpace(nn.Module):
    """The outputs of one layer's states, with a part of each sample's positions on each rank of `cp`.

    `form` is the option parallel.cp_attention. `groups[i]` is the local group of the local head i.
    """

    group_index: Tensor | None

    def __init__(
        self, cp: Axis, form: str, groups: Sequence[int], head_width: int, state_width: int, device: torch.device
    ):
        super().__init__()
        self.cp = cp
        self.heads = len(groups)
        self.head_width = head_width
        self.state_width = state_width
        self.exchanges = cp.size > 1 and form == "ulysses" and self.heads % cp.size == 0
        """Whether ranks exchange positions for heads. Else they pass states."""
        # Each group has as many heads, or each head a group of its own.
        even = are_equal_runs(groups)
        self.groups = groups[-1] + 1 if even else self.heads
        group_index = None if even else torch.tensor(groups, device=device)
        self.register_buffer("group_index", group_index, persistent=False)

    def forward(
        self, x_sbnp: Tensor, dt_sbn: Tensor, g_sbn: Tensor, b_sbkd: Tensor, c_sbkd: Tensor, batch: MicroBatch
    ) -> Tensor:
        """Return the outputs [s, b, n, p] of the positions of `batch`. dt, g and the outputs are fp32."""
        b, c = (self._of_groups(z) for z in (b_sbkd, c_sbkd))
        over_cp = self._in_one_piece
        if self.cp.size > 1:
            over_cp = self._exchanged if self.exchanges else self._passing_states
        return recompute.kept(partial(over_cp, batch), x_sbnp, dt_sbn, g_sbn, b, c)

    def _of_groups(self, z_sbkd: Tensor) -> Tensor:
        """Return B or C of groups with equal numbers of heads."""
        return z_sbkd if self.group_index is None else z_sbkd.index_select(2, self.group_index)

    def _in_one_piece(self, batch: MicroBatch, x: Tensor, dt: Tensor, g: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return state_space(x, dt, decays_in_documents(g, batch), b, c)[0]

    def _exchanged(self, batch: MicroBatch, x: Tensor, dt: Tensor, g: Tensor, b: Tensor, c: Tensor) -> Tensor:
        # Documents are marked here, where each rank knows those of its own positions.
        gates = to_heads(torch.stack([dt, decays_in_documents(g, batch)], dim=-1), self.cp)
        # A group whose heads go to several ranks goes to each of them.
        copies = math.lcm(b.shape[2], self.cp.size) // b.shape[2]
        b, c = to_heads(torch.cat([b, c], dim=-1).repeat_interleave(copies, dim=2), self.cp).chunk(2, dim=-1)
        return to_positions(state_space(to_heads(x, self.cp), gates[..., 0], gates[..., 1], b, c)[0], self.cp)

    def _passing_states(self, batch: MicroBatch, x: Tensor, dt: Tensor, g: Tensor, b: Tensor, c: Tensor) -> Tensor:
        samples = x.shape[1]
        # Both runs of a rank at once, as if they were samples.
        x, dt, g, b, c = (torch.cat(runs_of(z, self.cp), dim=1) for z in (x, dt, decays_in_documents(g, batch), b, c))
        y, last = state_space(x, dt, g, b, c)
        decays_sbn = g.to(torch.float64).cumsum(0).exp().to(g.dtype)
        maps, states = (z.unflatten(0, (2, samples)) for z in (decays_sbn[-1], last))
        before = incoming_states(maps, states, self.cp, _decayed).flatten(0, 1)
        c = c.repeat_interleave(self.heads // c.shape[2], dim=2)
        y = y + torch.einsum("sbnd,bndp->sbnp", c.to(before.dtype), before) * decays_sbn[..., None]
        return torch.cat(y.chunk(2, dim=1))

    def with_cache(self, first_b: Tensor, capacity: int) -> nn.Module:
        """Return the module that takes this one's place while text is generated: it keeps the state."""
        return CachedStateSpace(self)

    def flops_per_token(self, seq_length: int) -> int:
        """Return the FLOPs of the products in chunks for one token, forward."""
        pairs = (CHUNK + 1) / 2  # of a token and those up to it in its chunk, on average
        of_heads = self.heads * self.head_width * (pairs + 2 * self.state_width)
        return round(2 * (self.groups * pairs * self.state_width + of_heads))


class CachedStateSpace(nn.Module):
    """`StateSpace` that keeps the state after the columns so far, and begins later columns with it."""

    def __init__(self, scan: StateSpace):
        super().__init__()
        self.scan = scan
        self.state: Tensor | None = None

    def forward(
        self, x_sbnp: Tensor, dt_sbn: Tensor, g_sbn: Tensor, b_sbkd: Tensor, c_sbkd: Tensor, batch: MicroBatch
    ) -> Tensor:
        """Return the outputs of the columns of this call."""
        b, c = (self.scan._of_groups(z) for z in (b_sbkd, c_sbkd))
        chunk = 1 if len(x_sbnp) == 1 else CHUNK
        y, self.state = state_space(x_sbnp, dt_sbn, decays_in_documents(g_sbn, batch), b, c, self.state, chunk)
        return y


def _decayed(map_bn: Tensor, state_bndp: Tensor) -> Tensor:
    return map_bn[..., None, None] * state_bndp
