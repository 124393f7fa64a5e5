"""The gated delta rule of a layer, with any number of context-parallel ranks.

The ranks of a sample pass states (`states`), and need no number of heads. A run of positions is the map of the state
S -> M S + B. The rule computes the maps of its runs, asks for the state in front of each, and goes on as if it had been
given the states. Backward, it asks for the gradients of the states behind its runs alike. With parallel.cp_attention
ulysses, ranks exchange positions for heads where cp divides the heads.

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
    computes the rule; our kernels do where ranks pass states and it is "fla".
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
        self.heads = len(key_heads)
        self.key_width = key_width
        self.value_width = value_width
        self.exchanges = cp.size > 1 and form == "ulysses" and self.heads % cp.size == 0
        """Whether ranks exchange positions for heads. Else they pass states."""
        # flash-linear-attention passes no states (`megapar_kernels.delta_rule.delta_rule`).
        passes = cp.size > 1 and not self.exchanges
        self.impl: Implementation = "triton" if passes and impl == "fla" else impl
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
        inputs = (q, k, v, decays_in_documents(g, batch), beta)
        # Both runs of a rank at once, as if they were samples.
        q, k, v, g, beta = (torch.cat(runs_of(x, self.cp), dim=1) for x in inputs)
        o, _ = delta_rule(q, k, v, g, beta, impl=self.impl, across=self._across)
        return torch.cat(o.chunk(2, dim=1))

    def _across(self, maps: Tensor, states: Tensor, backwards: bool) -> Tensor:
        """Return the states in front of this rank's runs, or backwards (`megapar_kernels.delta_rule.Across`)."""
        maps, states = (x.unflatten(0, (2, -1)) for x in (maps, states))
        return incoming_states(maps, states, self.cp, torch.matmul, backwards=backwards).flatten(0, 1)

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
