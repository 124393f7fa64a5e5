"""Context parallelism in a ring: keys and values go from rank to rank (Ring Attention, arXiv 2310.01889).

In step i a rank holds the keys and values of the rank i before it. It sends them to the next rank while it computes
with them. A rank never holds the keys and values of more than two ranks. In the backward pass they go round again, and
their gradients travel behind them until they are home.

If no query of the remaining ranks attends some keys, because documents end before, they are not sent on. Both ends of a
link know that from the starts of the documents.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megapar_kernels.block_attention import wide
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar import comm
from megapar.comm import Pending
from megapar.context import Axis
from megapar.context_parallel.deal import Block, Ring, blocks, chunks, ring
from megapar.context_parallel.dropout import AttentionDropout
from megapar.context_parallel.partial import Dropped, Gradient, Result


class _Round:
    """One rank's way through the ring: what it attends in each step, and what it sends and receives after it."""

    def __init__(self, length: int, cp: Axis, starts: Sequence[int] | None, dropout: AttentionDropout | None):
        self.cp = cp
        self._ring: Ring = ring(length, cp.size, starts)
        own = chunks(length, cp.size, cp.rank)
        self.blocks: list[list[Block]] = []
        self.dropped: list[Dropped] = []
        for step in range(cp.size):
            keys = chunks(length, cp.size, self.source(step))
            self.blocks.append(blocks(own, keys, length, starts))
            self.dropped.append(Dropped(dropout, keys))

    def source(self, step: int) -> int:
        """The rank whose keys and values this rank holds in `step`."""
        return (self.cp.rank - step) % self.cp.size

    def pass_keys(self, kv: Tensor | None, like: Tensor, step: int) -> tuple[Tensor | None, Pending]:
        """Start sending `kv`, held in `step`, and receiving what is held in the next step, a tensor like `like`."""
        sends = step + 1 < self.cp.size and self._ring.keys_arrive(self.source(step), step + 1)
        receives = step + 1 < self.cp.size and self._ring.keys_arrive(self.source(step + 1), step + 1)
        return self._pass(kv if sends else None, like if receives else None)

    def pass_gradients(self, grad_kv: Tensor | None, like: Tensor, step: int) -> tuple[Tensor | None, Pending]:
        """Start sending on the gradients of the keys held in `step`, and receiving those of the next step.

        After the last step this rank's own gradients arrive.
        """
        sends = self._ring.gradients_leave(self.source(step), step)
        # What arrives in the next step has left the rank before this one, which is as far from home as this step.
        receives = self._ring.gradients_leave(self.source(step + 1), step)
        return self._pass(grad_kv if sends else None, like if receives else None)

    def _pass(self, sent: Tensor | None, like: Tensor | None) -> tuple[Tensor | None, Pending]:
        cp = self.cp
        sends = [] if sent is None else [(sent, (cp.rank + 1) % cp.size)]
        arriving = None
        receives = []
        if like is not None:
            arriving = torch.empty_like(like)
            receives = [(arriving, (cp.rank - 1) % cp.size)]
        return arriving, comm.exchange(sends, receives, cp)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, cp: Axis, starts: Sequence[int] | None, dropout: AttentionDropout | None
    ) -> Tensor:
        way = _Round(q.shape[2] * cp.size, cp, starts, dropout)
        ctx.way = way
        result = Result(q)
        held: Tensor | None = kv
        for step in range(cp.size):
            arriving, pending = way.pass_keys(held, kv, step)
            if held is not None:
                result.add(q, held[0], held[1], way.blocks[step], way.dropped[step])
            pending.wait()
            held = arriving
        out = result.out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, result.lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        way: _Round = ctx.way
        gradient = Gradient(grad_out, q, out, lse)
        # The gradients of this rank's own keys from its own queries. They stay at home.
        home = torch.zeros_like(kv, dtype=wide(kv.dtype))
        held: Tensor | None = kv
        travelling: Tensor | None = None
        travel = Pending()
        for step in range(way.cp.size):
            arriving, pending = way.pass_keys(held, kv, step)
            part = home if step == 0 else None
            if step > 0 and way.blocks[step]:
                part = torch.zeros_like(home)
            if held is not None and part is not None:
                gradient.add(held, way.blocks[step], way.dropped[step], part)
            travel.wait()
            if step > 0:
                travelling = _sum(travelling, part)
                travelling, travel = way.pass_gradients(travelling, home, step)
            pending.wait()
            held = arriving
        travel.wait()
        if travelling is not None:
            home += travelling
        return gradient.q.to(q.dtype), home.to(kv.dtype), None, None, None


def _sum(arrived: Tensor | None, own: Tensor | None) -> Tensor | None:
    if arrived is None:
        return own
    if own is None:
        return arrived
    return arrived.add_(own)


def ring_attention(
    q: Tensor, kv: Tensor, cp: Axis, starts: Sequence[int] | None = None, dropout: AttentionDropout | None = None
) -> Tensor:
    """`gather.gather_attention`, by a ring. The results differ by rounding alone."""
    return _RingAttention.apply(q, kv, cp, starts, dropout)
