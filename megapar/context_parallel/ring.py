"""Context parallelism in a ring: keys and values go from rank to rank (Ring Attention, arXiv 2310.01889).

In step i a rank holds the keys and values of the i-th rank before it. It sends them to the next rank while it computes
with them. So a rank holds the keys and values of two ranks at most. In the backward pass they travel again. Their
gradients travel behind them, until they are back at the rank of the keys.

Keys are not sent on if no query of the remaining ranks attends them, because their documents end before. Both ranks of
a link compute this from the starts of the documents, so it takes no message.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megapar_kernels.block_attention import wide
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.comm.pending import Pending
from megapar.context_parallel.deal import KeyBlock, Ring, blocks, chunks, ring
from megapar.context_parallel.keys_values import KeysValues
from megapar.context_parallel.partial import Gradient, Places, Result
from megapar.context_parallel.scoring import PLAIN, Scoring


class _Round:
    """One round of the ring, as one rank sees it: what it attends in each step, and what it sends and receives.

    `blocks[step]` and `places[step]` are the blocks and the positions of the keys it holds in `step`.
    """

    def __init__(self, length: int, cp: Axis, starts: Sequence[int] | None, scoring: Scoring):
        self.cp = cp
        self._ring: Ring = ring(length, cp.size, starts)
        own_block = chunks(length, cp.size, cp.rank)
        self.blocks: list[list[KeyBlock]] = []
        self.places: list[Places] = []
        for step in range(cp.size):
            keys = chunks(length, cp.size, self.source(step))
            self.blocks.append(blocks(own_block, keys, length, starts))
            self.places.append(Places(scoring, keys))

    def source(self, step: int) -> int:
        """The rank whose keys and values this rank holds in `step`."""
        return (self.cp.rank - step) % self.cp.size

    def pass_keys(self, kv: KeysValues | None, like: KeysValues, step: int) -> tuple[KeysValues | None, Pending]:
        """Start to send `kv`, the keys and values held in `step`, and to receive those of the next step.

        `kv` is None if no keys have arrived. `like` has the shapes and dtype of what arrives. Returns (what arrives, or
        None if nothing does; what to wait for before it is read).
        """
        next_step = step + 1
        if next_step == self.cp.size:
            return None, Pending()  # the keys have been on all ranks
        # `source(step)` is `step` hops before this rank, and so `next_step` hops before the next rank.
        sends = self._ring.keys_arrive(self.source(step), next_step)
        receives = self._ring.keys_arrive(self.source(next_step), next_step)
        assert kv is not None or not sends, "keys travel only over ranks that they have reached"
        return self._exchange(kv if sends else None, like if receives else None)

    def pass_gradients(
        self, grad_kv: KeysValues | None, like: KeysValues, step: int
    ) -> tuple[KeysValues | None, Pending]:
        """Start to send `grad_kv`, the gradients of the keys held in `step`, and to receive those of the next step.

        The gradients arriving after the last step belong to this rank's own keys. Otherwise as `pass_keys`.
        """
        sends = self._ring.gradients_leave(self.source(step), step)
        # What arrives is sent by the rank before this one. It is `step` hops after `source(step + 1)`.
        receives = self._ring.gradients_leave(self.source(step + 1), step)
        assert grad_kv is not None or not sends, "gradients begin to travel where keys were attended"
        return self._exchange(grad_kv if sends else None, like if receives else None)

    def _exchange(self, sent: KeysValues | None, like: KeysValues | None) -> tuple[KeysValues | None, Pending]:
        """Start to send `sent` to the next rank, and to receive what is like `like` from the one before it.

        With None nothing is sent, or received. Returns (what is received, or None; what to wait for).
        """
        cp = self.cp
        sends = []
        if sent is not None:
            sends.append((sent.flat, (cp.rank + 1) % cp.size))
        receives = []
        arriving = None
        if like is not None:
            arriving = like.with_flat(torch.empty_like(like.flat))
            receives.append((arriving.flat, (cp.rank - 1) % cp.size))
        return arriving, collectives.exchange(sends, receives, cp)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cp: Axis,
        starts: Sequence[int] | None,
        scoring: Scoring,
        sinks_n: Tensor | None,
    ) -> Tensor:
        ring_round = _Round(q.shape[2] * cp.size, cp, starts, scoring)
        ctx.ring_round = ring_round
        kv = KeysValues.copied(k, v)
        ctx.shapes = k.shape, v.shape
        result = Result(q, v.shape[-1], scoring)
        held: KeysValues | None = kv
        for step in range(cp.size):
            arriving, pending = ring_round.pass_keys(held, kv, step)
            if held is not None:
                result.add(q, held.k, held.v, ring_round.blocks[step], ring_round.places[step])
            pending.wait()
            held = arriving
        result.add_sinks(sinks_n)
        out = result.out.to(q.dtype)
        ctx.scoring = scoring
        ctx.save_for_backward(q, kv.flat, out, result.lse, sinks_n)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, flat, out, lse, sinks_n = ctx.saved_tensors
        kv = KeysValues.of(flat, *ctx.shapes)
        ring_round: _Round = ctx.ring_round
        gradient = Gradient(grad_out, q, out, lse, ctx.scoring)
        # The gradients of this rank's own keys from its own queries (step 0). They do not travel.
        own_grad_kv = kv.zeros(wide(flat.dtype))
        held: KeysValues | None = kv
        # The gradients of the keys held in this step, from the ranks where these keys were before.
        arrived_grad: KeysValues | None = None
        grad_pending = Pending()
        for step in range(ring_round.cp.size):
            arriving, pending = ring_round.pass_keys(held, kv, step)
            grad_kv = None
            if step == 0:
                grad_kv = own_grad_kv
            elif ring_round.blocks[step]:
                grad_kv = kv.zeros(own_grad_kv.flat.dtype)
            if held is not None and grad_kv is not None:
                blocks_of_step = ring_round.blocks[step]
                gradient.add(held.k, held.v, blocks_of_step, ring_round.places[step], grad_kv.k, grad_kv.v)
            grad_pending.wait()
            if step > 0:
                leaving = _sum(arrived_grad, grad_kv)
                arrived_grad, grad_pending = ring_round.pass_gradients(leaving, own_grad_kv, step)
                del leaving  # the exchange keeps it until it is sent
            pending.wait()
            held = arriving
        grad_pending.wait()
        if arrived_grad is not None:
            own_grad_kv.flat.add_(arrived_grad.flat)
        rounded = kv.with_flat(own_grad_kv.flat.to(flat.dtype))
        grad_sinks = gradient.of_sinks(sinks_n)
        return gradient.q.to(q.dtype), rounded.k, rounded.v, None, None, None, grad_sinks


def _sum(arrived: KeysValues | None, own_block: KeysValues | None) -> KeysValues | None:
    """The sum of two gradients, where None counts as zero. It may overwrite `arrived`."""
    if arrived is None:
        return own_block
    if own_block is None:
        return arrived
    arrived.flat.add_(own_block.flat)
    return arrived


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: Axis,
    starts: Sequence[int] | None = None,
    scoring: Scoring = PLAIN,
    sinks_n: Tensor | None = None,
) -> Tensor:
    """Return attention over all ranks' keys, passed round a ring. `gather.gather_attention` differs by rounding."""
    return _RingAttention.apply(q, k, v, cp, starts, scoring, sinks_n)
