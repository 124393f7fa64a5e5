"""The scan of Mamba-2 (state space duality, arXiv 2405.21060), in chunks: a state with one decay for each head.

For each head, from the state S [d, p] of the token before:

    S <- exp(g) S + B (dt x)^T,    y = S^T C

Heads come in groups that share B and C. Within a chunk G is the sum of g up to a token, and all tokens of the chunk
follow from the state S in front of it:

    P_tj = C_t B_j exp(G_t - G_j) for j <= t
    Y = P (dt X) + exp(G) C S
    S' = exp(G_C) S + B^T (exp(G_C - G) dt X)

No exponent is above 0, however strong the decay. A decay of `NOTHING` (`megapar_kernels.delta_rule`) at the first token
of a document lets nothing through, so a state never crosses the start.

Shapes: s positions, b samples, n heads, p width of a head, k groups, d width of B and C; within chunks r heads of a
group, c chunks, t and j tokens of a chunk.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar_kernels.chunks import CHUNK, in_chunks, joined, sum_before, sum_from_here
from megapar_kernels.dispatch import apply_function, chunks_of, given, main_grad_of

__all__ = ["Limit", "add_skip", "state_space", "time_steps"]

Limit = tuple[float, float]
"""The least and the largest time step."""


def state_space(
    x_sbnp: Tensor,
    dt_sbn: Tensor,
    g_sbn: Tensor,
    b_sbkd: Tensor,
    c_sbkd: Tensor,
    state_bndp: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return y [s, b, n, p], and the state after the last token, [b, n, d, p]: both fp32, or fp64 for fp64 inputs.

    `g_sbn` are logarithms of decays, at most 0: dt A. `state_bndp` is the state before the first token; None: zeros.
    States, dt and g are fp32, or fp64 if x, B and C are. Each group has as many heads. All inputs have gradients.
    """
    y, state = apply_function(_StateSpace, x_sbnp, dt_sbn, g_sbn, b_sbkd, c_sbkd, state_bndp, chunk)
    return y, state


class _Chunks(NamedTuple):
    """The inputs in chunks, and what both passes make of them. Rows behind the last position are zeros."""

    x: Tensor  # [b, k, r, c, t, p]
    dt: Tensor  # [b, k, r, c, t, 1]
    b: Tensor  # [b, k, c, t, d]
    c: Tensor  # [b, k, c, t, d]
    from_start: Tensor  # exp(G) [b, k, r, c, t, 1]
    to_end: Tensor  # exp(G_C - G) [b, k, r, c, t, 1]
    pairs: Tensor  # exp(G_t - G_j) for j <= t, else 0 [b, k, r, c, t, j]
    scores: Tensor  # C_t B_j [b, k, 1, c, t, j]

    @property
    def whole(self) -> Tensor:
        """exp(G_C) [b, k, r, c, 1, 1]."""
        return self.from_start[..., -1:, :]

    @classmethod
    def of(cls, x_sbnp: Tensor, dt_sbn: Tensor, g_sbn: Tensor, b_sbkd: Tensor, c_sbkd: Tensor, chunk: int) -> "_Chunks":
        dtype = torch.promote_types(x_sbnp.dtype, torch.float32)
        heads = b_sbkd.shape[2], -1
        x, dt = (z.unflatten(1, heads) for z in in_chunks(chunk, dtype, x_sbnp, dt_sbn[..., None]))
        b, c = in_chunks(chunk, dtype, b_sbkd, c_sbkd)
        # In fp64: differences of sums are the exponents, and a sum with a document's start has few digits in fp32.
        (g,) = in_chunks(chunk, torch.float64, g_sbn[..., None])
        sums = g.unflatten(1, heads).cumsum(-2)
        from_start, to_end = (z.to(dtype).exp() for z in (sums, sums[..., -1:, :] - sums))
        pairs = (sums - sums.mT).tril_().to(dtype).exp_().tril_()
        return cls(x, dt, b, c, from_start, to_end, pairs, (c @ b.mT)[:, :, None])


class _StateSpace(torch.autograd.Function):
    """`state_space` by torch's products. It keeps its inputs, and the states in front of all chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        x_sbnp: Tensor,
        dt_sbn: Tensor,
        g_sbn: Tensor,
        b_sbkd: Tensor,
        c_sbkd: Tensor,
        state_bndp: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        z = _Chunks.of(x_sbnp, dt_sbn, g_sbn, b_sbkd, c_sbkd, chunk)
        u = z.x * z.dt
        new = torch.einsum("bkcjd,bkrcjp->bkrcdp", z.b, u * z.to_end)
        samples, groups, heads, chunks = new.shape[:4]
        states = new.new_empty(samples, groups, heads, chunks + 1, *new.shape[4:])
        states[:, :, :, 0] = 0.0 if state_bndp is None else state_bndp.unflatten(1, (groups, heads))
        for at in chunks_of(new, chunks):
            torch.addcmul(new[:, :, :, at], z.whole[:, :, :, at], states[:, :, :, at], out=states[:, :, :, at + 1])
        y = torch.einsum("bkctd,bkrcdp->bkrctp", z.c, states[:, :, :, :-1]) * z.from_start
        y += (z.scores * z.pairs) @ u
        ctx.save_for_backward(x_sbnp, dt_sbn, g_sbn, b_sbkd, c_sbkd, states)
        ctx.chunk = chunk
        ctx.has_state = state_bndp is not None
        return joined(y.flatten(1, 2), len(x_sbnp)), states[:, :, :, -1].flatten(1, 2).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_sbnp: Tensor, dstate_bndp: Tensor) -> tuple[Tensor | None, ...]:
        x_sbnp, dt_sbn, g_sbn, b_sbkd, c_sbkd, states = ctx.saved_tensors
        z = _Chunks.of(x_sbnp, dt_sbn, g_sbn, b_sbkd, c_sbkd, ctx.chunk)
        (dy,) = in_chunks(ctx.chunk, z.x.dtype, dy_sbnp)
        dy = dy.unflatten(1, z.x.shape[1:3])
        dy_in = dy * z.from_start
        dstates = torch.empty_like(states)
        dstates[:, :, :, -1] = dstate_bndp.unflatten(1, dstates.shape[1:3])
        of_reads = torch.einsum("bkctd,bkrctp->bkrcdp", z.c, dy_in)
        for at in chunks_of(dstates, z.x.shape[3], backwards=True):
            after, here = dstates[:, :, :, at + 1], dstates[:, :, :, at]
            torch.addcmul(of_reads[:, :, :, at], z.whole[:, :, :, at], after, out=here)
        before, after = states[:, :, :, :-1], dstates[:, :, :, 1:]
        u = z.x * z.dt
        u_out = u * z.to_end
        dpairs = (dy @ u.mT).mul_(z.pairs)
        dscores = dpairs.sum(2)
        dc = dscores @ z.b + torch.einsum("bkrctp,bkrcdp->bkctd", dy_in, before)
        db = dscores.mT @ z.c + torch.einsum("bkrcjp,bkrcdp->bkcjd", u_out, after)
        du_out = torch.einsum("bkcjd,bkrcdp->bkrcjp", z.b, after)
        # Sums over the pairs and reads whose decays have g of a token among them: nothing cancels in them.
        over = sum_from_here(dpairs * z.scores).tril_(-1).sum(-1, keepdim=True)
        read = torch.einsum("bkctd,bkrcdp->bkrctp", z.c, before)
        over += sum_from_here((dy_in * read).sum(-1, keepdim=True))
        over += sum_before((u_out * du_out).sum(-1, keepdim=True))
        dg = over + z.whole * (before * after).sum((-2, -1), keepdim=True)
        du = (z.scores * z.pairs).mT @ dy + z.to_end * du_out
        length = len(x_sbnp)
        of_heads = du * z.dt, (du * z.x).sum(-1, keepdim=True), dg
        dx, ddt, dg = (joined(w.flatten(1, 2), length) for w in of_heads)
        db, dc = (joined(w, length).to(b_sbkd.dtype) for w in (db, dc))
        dstate = dstates[:, :, :, 0].flatten(1, 2) if ctx.has_state else None
        ddt, dg = ddt.squeeze(-1).to(dt_sbn.dtype), dg.squeeze(-1).to(g_sbn.dtype)
        return dx.to(x_sbnp.dtype), ddt, dg, db, dc, dstate, None


def time_steps(
    raw_sbn: Tensor, a_log_n: Tensor, dt_bias_n: Tensor, limit: Limit = (0.0, float("inf"))
) -> tuple[Tensor, Tensor]:
    """Return dt = softplus(raw + dt_bias) within the limit, and g = -exp(A_log) dt: [s, b, n], fp32 or fp64."""
    dt, g = apply_function(_TimeSteps, raw_sbn, a_log_n, dt_bias_n, limit)
    return dt, g


class _TimeSteps(torch.autograd.Function):
    """`time_steps`. It keeps its inputs, and adds gradients of parameters to their main gradients in fp32."""

    @staticmethod
    def forward(ctx: Any, raw_sbn: Tensor, a_log_n: Tensor, dt_bias_n: Tensor, limit: Limit) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(raw_sbn, a_log_n, dt_bias_n)
        ctx.limit = limit
        ctx.main_grads = main_grad_of(a_log_n), main_grad_of(dt_bias_n)
        dt = F.softplus(_wide(raw_sbn) + dt_bias_n).clamp(*limit)
        return dt, dt * -_wide(a_log_n).exp()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ddt_sbn: Tensor, dg_sbn: Tensor) -> tuple[Tensor | None, ...]:
        raw_sbn, a_log_n, dt_bias_n = ctx.saved_tensors
        rate = -_wide(a_log_n).exp()
        steps = _wide(raw_sbn) + dt_bias_n
        free = F.softplus(steps)
        least, largest = ctx.limit
        of_log = (dg_sbn * free.clamp(least, largest) * rate).sum((0, 1))
        within = (free >= least) & (free <= largest)
        draw = torch.ops.aten.softplus_backward((ddt_sbn + dg_sbn * rate) * within, steps, 1.0, 20.0)
        of_bias = draw.sum((0, 1))
        main_of_log, main_of_bias = ctx.main_grads
        parameters = given(main_of_log, of_log, a_log_n), given(main_of_bias, of_bias, dt_bias_n)
        return draw.to(raw_sbn.dtype), *parameters, None


def add_skip(y_sbnp: Tensor, x_sbnp: Tensor, d_n: Tensor) -> Tensor:
    """Return y + D x, [s, b, n, p] in the dtype of y. The gradient of D goes to its main gradient in fp32."""
    total: Tensor = apply_function(_AddSkip, y_sbnp, x_sbnp, d_n)
    return total


class _AddSkip(torch.autograd.Function):
    """`add_skip`. It keeps x and D."""

    @staticmethod
    def forward(ctx: Any, y_sbnp: Tensor, x_sbnp: Tensor, d_n: Tensor) -> Tensor:
        ctx.save_for_backward(x_sbnp, d_n)
        ctx.main_grad = main_grad_of(d_n)
        return torch.addcmul(y_sbnp, x_sbnp.to(y_sbnp.dtype), d_n.to(y_sbnp.dtype)[:, None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sbnp: Tensor) -> tuple[Tensor | None, ...]:
        x_sbnp, d_n = ctx.saved_tensors
        dx = grad_sbnp * d_n.to(grad_sbnp.dtype)[:, None]
        dd = (grad_sbnp * x_sbnp).sum((0, 1, 3))
        return grad_sbnp, dx.to(x_sbnp.dtype), given(ctx.main_grad, dd, d_n)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
