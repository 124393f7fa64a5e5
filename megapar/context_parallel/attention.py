"""Causal attention of a layer, for every number of context-parallel ranks."""

from collections.abc import Sequence
from typing import Literal

import torch
from einops import rearrange
from megapar_kernels.backend import Kernels
from torch import Tensor

from megapar.batch import MicroBatch
from megapar.context import Axis
from megapar.context_parallel.dropout import AttentionDropout
from megapar.context_parallel.gather import gather_attention
from megapar.context_parallel.heads import are_equal_runs, select
from megapar.context_parallel.ring import ring_attention
from megapar.context_parallel.ulysses import Ulysses
from megapar.context_parallel.whole import whole_attention


class CoreAttention:
    """softmax(q k^T / sqrt(d)) v of one layer, where each rank of `cp` holds a part of the positions of each sample.

    `kv_heads` has the local key/value head of each local query head. `form` is the option parallel.cp_attention.
    """

    def __init__(
        self,
        cp: Axis,
        form: Literal["gather", "ring", "ulysses"],
        kv_heads: Sequence[int],
        kernels: Kernels,
        device: torch.device,
    ):
        self.cp = cp
        self.form = form
        self.kernels = kernels
        self._ulysses = None
        self.kv_index = None
        if cp.size > 1 and form == "ulysses":
            self._ulysses = Ulysses(cp, kv_heads, device)
        elif not are_equal_runs(kv_heads):
            # Made here: in the forward pass each copy to the GPU would wait for all queued work.
            self.kv_index = torch.tensor(kv_heads, device=device)

    def __call__(
        self, q_sbnd: Tensor, k_sbnd: Tensor, v_sbnd: Tensor, batch: MicroBatch, dropout: AttentionDropout | None
    ) -> Tensor:
        """Map q [s, b, n, d], and k and v with as many heads or fewer, to [s, b, n * d].

        The s positions are the columns of `batch`.
        """
        if self._ulysses is not None:
            return self._ulysses(q_sbnd, k_sbnd, v_sbnd, batch, dropout, self.kernels)
        if self.kv_index is not None:
            k_sbnd = select(k_sbnd, 2, self.kv_index)
            v_sbnd = select(v_sbnd, 2, self.kv_index)
        if self.cp.size == 1:
            return whole_attention(q_sbnd, k_sbnd, v_sbnd, batch, dropout, self.kernels)
        attention = ring_attention if self.form == "ring" else gather_attention
        q = rearrange(q_sbnd, "s b n d -> b n s d").contiguous()
        # Keys and values are one message.
        kv = rearrange([k_sbnd, v_sbnd], "two s b n d -> two b n s d").contiguous()
        y = attention(q, kv, self.cp, batch.starts_on_host, dropout)
        return rearrange(y, "b n s d -> s b (n d)")
