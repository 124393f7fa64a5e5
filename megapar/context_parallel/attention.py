"""Causal attention of a layer, with any number of context-parallel ranks.

Shapes: s positions of this rank, b samples, n query heads, d width of a query and a key, e width of a value.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from einops import rearrange
from megapar_kernels.alibi import Alibi
from megapar_kernels.backend import Kernels
from megapar_kernels.block_attention import PLAIN_SCORES, SERVERS, ScoreRule, server_of
from torch import Tensor, nn

from megapar.activations import recompute
from megapar.comm.axis import Axis
from megapar.context_parallel.cached_attention import CachedAttention
from megapar.context_parallel.dropout import AttentionDropout
from megapar.context_parallel.gather import gather_attention
from megapar.context_parallel.ring import ring_attention
from megapar.context_parallel.scoring import Scoring
from megapar.context_parallel.ulysses import Ulysses
from megapar.context_parallel.whole import are_equal_runs, largest_of_whole, server_of_whole, way_of, whole_attention
from megapar.declare.batch import MicroBatch
from megapar.declare.largest_logits import LargestLogits


class CoreAttention(nn.Module):
    """softmax(scores of q and k) v of one layer, with a part of each sample's positions on each rank of `cp`.

    `form` is the option parallel.cp_attention. `kv_heads[i]` is the local key/value head read by the local query head
    i. `qk_width` is d and `v_width` is e. A position reads `window` keys at most, its own among them; 0: all up to its
    own. `rule` says how a score follows from a query and a key. `slopes` are those of ALiBi for each local query head,
    or empty without it. With a `chunk` micro-batches must come in chunks of so many positions (`MicroBatch.in_chunks`).
    """

    REWINDS = True
    """Whether what `with_cache` makes can forget its last columns (`rewind`)."""

    kv_index: Tensor | None
    slopes_n: Tensor | None

    def __init__(
        self,
        cp: Axis,
        form: Literal["gather", "ring", "ulysses"],
        kv_heads: Sequence[int],
        kernels: Kernels,
        device: torch.device,
        qk_width: int,
        v_width: int,
        window: int = 0,
        rule: ScoreRule = PLAIN_SCORES,
        slopes: Sequence[float] = (),
        chunk: int = 0,
    ):
        super().__init__()
        if window and cp.size > 1 and form != "ulysses":
            raise ValueError(f"a window of {window} keys with cp_attention {form}: registry.validate() refuses it")
        self.window = window
        self.chunk = chunk
        self.rule = rule
        self.cp = cp
        self.form = form
        self.kernels = kernels
        self.heads = len(kv_heads)
        self.qk_width = qk_width
        self.v_width = v_width
        self.ulysses = None
        kv_index = None
        if cp.size > 1 and form == "ulysses":
            self.ulysses = Ulysses(cp, kv_heads, device)
        elif not are_equal_runs(kv_heads):
            # Copied to the device here, because in the forward pass each copy would wait for all queued work.
            kv_index = torch.tensor(kv_heads, device=device)
        self.register_buffer("kv_index", kv_index, persistent=False)
        slopes_n = torch.tensor(slopes, dtype=torch.float32, device=device) if slopes else None
        self.register_buffer("slopes_n", slopes_n, persistent=False)
        self.server = ""
        """Who has computed the attention of the first forward pass, in words."""

    def forward(
        self,
        q_sbnd: Tensor,
        k_sbnd: Tensor,
        v_sbnd: Tensor,
        batch: MicroBatch,
        dropout: AttentionDropout | None,
        sinks_n: Tensor | None = None,
        largest: LargestLogits | None = None,
    ) -> Tensor:
        """Map q and k of width d and v of width e to [s, b, n * e]. q is [s, b, n, d]; k and v may have fewer heads.

        The s positions are the columns of `batch` on this rank. `sinks_n` has a further score without a value for each
        head of q. `largest` notes the largest logits.
        """
        alibi = None
        if self.slopes_n is not None:
            alibi = Alibi(self.slopes_n, batch.positions_s, batch.positions_s)
        scoring = Scoring(self.rule, self.kernels, self.window, dropout, largest, alibi)
        if 0 < self.chunk < batch.sample_length and batch.chunk != self.chunk:
            raise ValueError(f"attention within chunks of {self.chunk}: give it the micro-batch in_chunks")
        if not self.server:
            self.server = self._server(q_sbnd, k_sbnd, v_sbnd, batch, scoring, sinks_n)
        # Layers that are recomputed may keep what these compute.
        sinks = () if sinks_n is None else (sinks_n,)
        if self.ulysses is not None:
            return recompute.kept(partial(self._exchanged, batch, scoring), q_sbnd, k_sbnd, v_sbnd, *sinks)
        if self.kv_index is not None:
            k_sbnd = k_sbnd.index_select(2, self.kv_index)
            v_sbnd = v_sbnd.index_select(2, self.kv_index)
        if self.cp.size == 1:
            if largest is not None:
                largest.add(largest_of_whole(q_sbnd, k_sbnd, batch, scoring))
            return recompute.kept(partial(self._whole, batch, scoring), q_sbnd, k_sbnd, v_sbnd, *sinks)
        q, k, v = (rearrange(x, "s b n d -> b n s d") for x in (q_sbnd, k_sbnd, v_sbnd))
        y = recompute.kept(partial(self._in_blocks, batch, scoring), q.contiguous(), k, v, *sinks)
        return rearrange(y, "b n s d -> s b (n d)")

    def _server(
        self, q: Tensor, k: Tensor, v: Tensor, batch: MicroBatch, scoring: Scoring, sinks_n: Tensor | None
    ) -> str:
        if self.cp.size > 1 and self.ulysses is None:
            q, k, v = (rearrange(x, "s b n d -> b n s d") for x in (q, k, v))
            kernels = _of_blocks(scoring, batch).kernels
            special = {"drops": scoring.dropout is not None, "biased": scoring.alibi is not None}
            return f"{SERVERS[server_of(q, k, v, self.rule, kernels, **special)]} in blocks"
        return server_of_whole(way_of(q, v, batch, scoring, sinks_n), q, k, v, scoring)

    def _exchanged(
        self, batch: MicroBatch, scoring: Scoring, q: Tensor, k: Tensor, v: Tensor, *sinks_n: Tensor
    ) -> Tensor:
        assert self.ulysses is not None
        y: Tensor = self.ulysses(q, k, v, batch, scoring, *sinks_n)
        return y

    def _whole(self, batch: MicroBatch, scoring: Scoring, q: Tensor, k: Tensor, v: Tensor, *sinks_n: Tensor) -> Tensor:
        return whole_attention(q, k, v, batch, scoring, *sinks_n)

    def _in_blocks(
        self, batch: MicroBatch, scoring: Scoring, q: Tensor, k: Tensor, v: Tensor, *sinks_n: Tensor
    ) -> Tensor:
        attention = ring_attention if self.form == "ring" else gather_attention
        return attention(q, k, v, self.cp, batch.starts_on_host, _of_blocks(scoring, batch), *sinks_n)

    def with_cache(self, first_b: Tensor, capacity: int) -> nn.Module:
        """Return the module that takes this one's place while text is generated: it keeps keys and values.

        Row i begins at column `first_b[i]`. A row has at most `capacity` columns.
        """
        return CachedAttention(self, first_b, capacity)

    def flops_per_token(self, seq_length: int) -> int:
        """The FLOPs of the two products for one token, forward: with the keys it reads, on average."""
        keys = seq_length / 2  # half of the s^2 scores
        if 0 < self.chunk < seq_length:
            whole, rest = divmod(seq_length, self.chunk)
            keys = (whole * self.chunk**2 + rest**2) / (2 * seq_length)
        if 0 < self.window < seq_length:
            keys = self.window - self.window**2 / (2 * seq_length)
        return round(2 * keys * self.heads * (self.qk_width + self.v_width))


def _of_blocks(scoring: Scoring, batch: MicroBatch) -> Scoring:
    # cuDNN compiles a plan for each new shape. The blocks of documents have new shapes in each step.
    if batch.starts_on_host is None:
        return scoring
    return replace(scoring, kernels=replace(scoring.kernels, attention="torch"))
