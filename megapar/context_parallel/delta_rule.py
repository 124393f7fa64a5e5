"""The gated delta rule of a layer, with any number of context-parallel ranks.

The ranks of a sample pass states (`states`), and need no number of heads. A run of positions is the map of the state
S -> M S + B. Both come from one call of the rule, whose values have d further columns: with values of 0 and the
identity as their first state, the state of these columns is M, and their outputs are what a token reads of the state in
front of the run. With parallel.cp_attention ulysses, ranks exchange positions for heads where cp divides the heads.

Shapes: s positions of this rank, b samples, n heads, k of them with a key of their own, d width of a query and a key, e
width of a value, w 1 or d: the decays of a head.
"""

from collections.abc import Sequence
from functools import partial

import torch
from megapar_kernels.chunks import CHUNK
from megapar_kernels.delta_rule import delta_rule
from megapar_kernels.dispatch import Implementation
from torch import Tensor, nn

from megapar.activations import recompute
from megapar.comm.axis import Axis
from megapar.context_parallel.states import decays_in_documents, incoming_states, runs_of
from megapar.context_parallel.ulysses import to_heads, to_positions
from megapar.context_parallel.whole import are_equal_runs
from megapar.declare.batch import MicroBatch


class DeltaRule(nn.Module):
    """The outputs of one layer's states, with a part of each sample's positions on each rank of `cp`.

    `form` is the option parallel.cp_attention. `key_heads[i]` is the local key head of the local value head i. `impl`
    computes the rule.
    """

    key_index: Tensor | None

    def __init__(
        self,
        cp: Axis,
        form: str,
        key_heads: Sequence[int],
        key_width: int,
        value_width: int,
        device: torch.device,
        impl: Implementation = "torch",
    ):
        super().__init__()
        self.cp = cp
        self.impl: Implementation = impl
        self.heads = len(key_heads)
        self.key_width = key_width
        self.value_width = value_width
        self.exchanges = cp.size > 1 and form == "ulysses" and self.heads % cp.size == 0
        """Whether ranks exchange positions for heads. Else they pass states."""
        key_index = None
        if list(key_heads) != list(range(self.heads)):
            key_index = torch.tensor(key_heads, device=device)
        self.register_buffer("key_index", key_index, persistent=False)
        self.equal_runs = are_equal_runs(key_heads)

    def forward(
        self, q_sbkd: Tensor, k_sbkd: Tensor, v_sbne: Tensor, g_sbnw: Tensor, beta_sbn: Tensor, batch: MicroBatch
    ) -> Tensor:
        """Return the outputs [s, b, n, e] of the positions of `batch`. g and beta are fp32."""
        q, k = (self._of_values(x) for x in (q_sbkd, k_sbkd))
        over_cp = self._in_one_piece
        if self.cp.size > 1:
            over_cp = self._exchanged if self.exchanges else self._passing_states
        return recompute.kept(partial(over_cp, batch), q, k, v_sbne, g_sbnw, beta_sbn)

    def _of_values(self, x_sbkd: Tensor) -> Tensor:
        """Return the queries or keys of all value heads, [s, b, n, d]."""
        return x_sbkd if self.key_index is None else x_sbkd.index_select(2, self.key_index)

    def _in_one_piece(self, batch: MicroBatch, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return delta_rule(q, k, v, decays_in_documents(g, batch), beta, impl=self.impl)[0]

    def _exchanged(self, batch: MicroBatch, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        # Documents are marked here, where each rank knows those of its own positions.
        gates = torch.cat([decays_in_documents(g, batch), beta[..., None]], dim=-1)
        qkv = to_heads(torch.cat([q, k, v], dim=-1), self.cp)
        gates = to_heads(gates, self.cp)
        q, k, v = qkv.split([self.key_width, self.key_width, self.value_width], dim=-1)
        o, _ = delta_rule(q, k, v, gates[..., :-1], gates[..., -1], impl=self.impl)
        return to_positions(o, self.cp)

    def _passing_states(self, batch: MicroBatch, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        samples, heads = v.shape[1:3]
        dtype, wide = v.dtype, g.dtype
        further = v.new_zeros(*v.shape[:-1], self.key_width, dtype=wide)
        values = torch.cat([v.to(wide), further], dim=-1)
        # Both runs of a rank at once, as if they were samples.
        inputs = (q, k, values, decays_in_documents(g, batch), beta)
        q, k, values, g, beta = (torch.cat(runs_of(x, self.cp), dim=1) for x in inputs)
        sizes = (2 * samples, heads, self.key_width)
        identity = torch.eye(self.key_width, dtype=wide, device=g.device).expand(*sizes, self.key_width)
        first = torch.cat([g.new_zeros(*sizes, self.value_width), identity], dim=-1)
        o, last = delta_rule(q, k, values, g, beta, first, impl=self.impl)
        widths = [self.value_width, self.key_width]
        o_own, o_read = o.split(widths, dim=-1)
        states, maps = (x.unflatten(0, (2, samples)) for x in last.split(widths, dim=-1))
        before = incoming_states(maps, states, self.cp, torch.matmul).flatten(0, 1)
        o = o_own + torch.einsum("sbnd,bnde->sbne", o_read, before)
        return torch.cat(o.chunk(2, dim=1)).to(dtype)

    def with_cache(self, first_b: Tensor, capacity: int) -> nn.Module:
        """Return the module that takes this one's place while text is generated: it keeps the state."""
        return CachedDeltaRule(self)

    def flops_per_token(self, seq_length: int) -> int:
        """Return the FLOPs of the products in chunks for one token, forward."""
        pairs = (CHUNK + 1) / 2  # of a token and those up to it in its chunk, on average
        widths = 2 * self.key_width + 2 * self.value_width  # scores of q and of k, the solution, their product
        return round(2 * self.heads * (pairs * widths + 3 * self.key_width * self.value_width))


class CachedDeltaRule(nn.Module):
    """`DeltaRule` that keeps the state after the columns so far, and begins later columns with it."""

    def __init__(self, rule: DeltaRule):
        super().__init__()
        self.rule = rule
        self.state: Tensor | None = None

    def forward(
        self, q_sbkd: Tensor, k_sbkd: Tensor, v_sbne: Tensor, g_sbnw: Tensor, beta_sbn: Tensor, batch: MicroBatch
    ) -> Tensor:
        """Return the outputs of the columns of this call."""
        q, k = (self.rule._of_values(x) for x in (q_sbkd, k_sbkd))
        chunk = 1 if len(q) == 1 else CHUNK
        g = decays_in_documents(g_sbnw, batch)
        o, self.state = delta_rule(q, k, v_sbne, g, beta_sbn, self.state, chunk, self.rule.impl)
        return o
