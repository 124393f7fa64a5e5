"""The gated delta rule with a decay for each channel, in chunks: linear attention whose memory is a state.

For each head, from the state S [d, e] of the token before:

    S <- Diag(exp(g)) S,    u = beta (v - S^T k),    S <- S + k u^T,    o = S^T q

With one decay for all channels it is the gated delta net (Yang et al., arXiv 2412.06464), with one for each channel
Kimi's delta attention (arXiv 2510.26692), and with g = 0 DeltaNet (arXiv 2406.06484).

Within a chunk of C tokens G is the sum of g up to a token. With A_tj = sum over channels of k_t k_j exp(G_t - G_j) for
j < t, and P_tj alike of q_t and k_j for j <= t, all tokens of a chunk follow from the state S in front of it:

    (I + Diag(beta) A) U = Diag(beta) (V - (exp(G) K) S)
    O = (exp(G) Q) S + P U
    S' = Diag(exp(G_C)) S + (exp(G_C - G) K)^T U

No exponent is above 0, however strong the decay. A decay of `NOTHING` at the first token of a document lets nothing
through, so a state never crosses the start.

Shapes: s positions, b samples, n heads, d width of a query and a key, e width of a value, w 1 or d: the decays of a
head, c chunks, C tokens of a chunk.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar_kernels import delta_fused, fla
from megapar_kernels.chunks import CHUNK, in_chunks, joined, sum_before, sum_from_here
from megapar_kernels.delta_fused import Across, map_of_run
from megapar_kernels.dispatch import Implementation, apply_function, chunks_of, given, main_grad_of

__all__ = ["NOTHING", "Across", "delta_rule", "log_decay"]

# exp(-800) is 0 in fp64 too, and sums of several of these still have twelve digits for the decays between.
NOTHING = -800.0
"""The decay g at the first token of a document: nothing of the state stays."""


def delta_rule(
    q_sbnd: Tensor,
    k_sbnd: Tensor,
    v_sbne: Tensor,
    g_sbnw: Tensor,
    beta_sbn: Tensor,
    state_bnde: Tensor | None = None,
    chunk: int = CHUNK,
    impl: Implementation = "torch",
    across: Across | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs o [s, b, n, e] in the dtype of v, and the state after the last token, [b, n, d, e].

    `g_sbnw` are logarithms of decays, at most 0. `state_bnde` is the state before the first token; None: zeros. States,
    decays and beta are fp32, or fp64 if q, k and v are. `chunk` is a power of two. All inputs have gradients.

    Kernels serve the chunk of `CHUNK`, and on a GPU queries and keys of 16 bits: products then have their dtype. torch
    serves all others.

    With `across` the positions are runs of longer samples, and the states in front of them are asked for: `state_bnde`
    is None. flash-linear-attention has no such call.
    """
    inputs = q_sbnd, k_sbnd, v_sbne, g_sbnw, beta_sbn, state_bnde
    if impl == "fla":
        if across is None and fla.serves_rule(q_sbnd, chunk, CHUNK):
            return fla.delta_rule(*inputs)
        impl = "triton" if q_sbnd.is_meta else "torch"  # in a plan, where kernels of both keep their inputs
    if delta_fused.serves(impl, q_sbnd, k_sbnd, v_sbne, chunk):
        o, state = apply_function(delta_fused.FusedDeltaRule, *inputs, across)
        return o, state
    o, state = apply_function(_DeltaRule, *inputs, chunk, across)
    return o, state


class _DeltaRule(torch.autograd.Function):
    """`delta_rule` by torch's products. It keeps its inputs, U, the states in front of all chunks, and the map."""

    @staticmethod
    def forward(
        ctx: Any,
        q_sbnd: Tensor,
        k_sbnd: Tensor,
        v_sbne: Tensor,
        g_sbnw: Tensor,
        beta_sbn: Tensor,
        state_bnde: Tensor | None,
        chunk: int,
        across: Across | None,
    ) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = _chunked(q_sbnd, k_sbnd, v_sbne, g_sbnw, beta_sbn, chunk)
        decays = _Decays(g)
        steps = _Steps(decays, k, beta, decays.products(k, k).tril_(-1))
        sizes = *k.shape[:2], k.shape[-1], v.shape[-1]
        first, run_map = k.new_zeros(sizes) if state_bnde is None else state_bnde, None
        if across is not None:
            last, run_map = map_of_run(partial(steps.over, v), k, sizes)
            first = across(run_map, last, False)
        states, u = k.new_empty(*k.shape[:3], *first.shape[2:]), torch.empty_like(v)
        last = steps.over(v, first, u, states)
        o = (q * decays.from_start) @ states + decays.products(q, k) @ u
        ctx.save_for_backward(q_sbnd, k_sbnd, v_sbne, g_sbnw, beta_sbn, u, states, run_map)
        ctx.chunk, ctx.across = chunk, across
        ctx.has_state = state_bnde is not None
        return joined(o, len(q_sbnd)).to(v_sbne.dtype), last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_sbne: Tensor, dlast_bnde: Tensor) -> tuple[Tensor | None, ...]:
        q_sbnd, k_sbnd, v_sbne, g_sbnw, beta_sbn, u, before, run_map = ctx.saved_tensors
        q, k, v, g, beta = _chunked(q_sbnd, k_sbnd, v_sbne, g_sbnw, beta_sbn, ctx.chunk)
        (do,) = in_chunks(ctx.chunk, k.dtype, do_sbne)
        decays = _Decays(g)
        a, p = decays.products(k, k).tril_(-1), decays.products(q, k)
        steps = _Steps(decays, k, beta, a)
        q_in, du = q * decays.from_start, p.mT @ do
        if ctx.across is not None:
            dlast_bnde = dlast_bnde + ctx.across(run_map.mT, steps.back(q_in, do, du, dlast_bnde), True)
        dx, after = torch.empty_like(v), torch.empty_like(before)  # of E = V - K_in S by beta, of states behind chunks
        dfirst = steps.back(q_in, do, du, dlast_bnde, dx, after)
        de = beta * dx
        dbeta = (dx * (v - steps.k_in @ before - a @ u)).sum(-1, keepdim=True)
        dq, dk, dg = decays.products_backward(q, k, p, (do @ u.mT).tril_(), a, (de @ u.mT).tril_(-1).neg_())
        dq_in = decays.from_start * (do @ before.mT)
        dk_in = decays.from_start * (de @ before.mT)
        dk_out = decays.to_end * (u @ after.mT)
        dg += decays.sum_backward(sum_from_here(q * dq_in - k * dk_in) + sum_before(k * dk_out))
        dg += decays.sum_backward(decays.whole * (before * after).sum(-1)[..., None, :])
        dq += dq_in
        dk += dk_out - dk_in
        length = len(q_sbnd)
        grads = [
            joined(x, length).to(like.dtype) for x, like in ((dq, q_sbnd), (dk, k_sbnd), (de, v_sbne), (dg, g_sbnw))
        ]
        dbeta_sbn = joined(dbeta, length).squeeze(-1).to(beta_sbn.dtype)
        return (*grads, dbeta_sbn, dfirst if ctx.has_state else None, None, None)


class _Steps:
    """How a state passes over chunks with keys k [b, n, c, C, d] and products a of keys, forward and backward."""

    def __init__(self, decays: "_Decays", k: Tensor, beta: Tensor, a: Tensor):
        self._beta, self._lower, self._whole = beta, a * beta, decays.whole.mT
        self.k_in, self._k_out = k * decays.from_start, k * decays.to_end

    def over(self, v: Tensor, state: Tensor, u: Tensor | None = None, states: Tensor | None = None) -> Tensor:
        """Return the state behind all chunks, from that in front of the first. `u` and `states` are filled, if given.

        Columns of a state beyond those of v have values of 0.
        """
        for at in chunks_of(v, v.shape[2]):
            rest = self.k_in[:, :, at] @ state
            rest[..., : v.shape[-1]] -= v[:, :, at]
            u_at = _solve(self._lower[:, :, at], rest.mul_(-self._beta[:, :, at]))
            if u is not None and states is not None:
                u[:, :, at], states[:, :, at] = u_at, state
            state = (self._k_out[:, :, at].mT @ u_at).addcmul_(self._whole[:, :, at], state)
        return state

    def back(
        self,
        q_in: Tensor,
        do: Tensor,
        du: Tensor,
        after: Tensor,
        dx: Tensor | None = None,
        dstates: Tensor | None = None,
    ) -> Tensor:
        """Return the gradient of the state in front of all chunks, from that of the state `after` them.

        `du` is the part of the gradient of U that outputs have. `dx` and `dstates`, of the states behind all chunks,
        are filled, if given.
        """
        for at in chunks_of(du, du.shape[2], backwards=True):
            of_u = (self._k_out[:, :, at] @ after).add_(du[:, :, at])
            dx_at = _solve(self._lower[:, :, at], of_u, transposed=True)
            if dx is not None and dstates is not None:
                dx[:, :, at], dstates[:, :, at] = dx_at, after
            before = q_in[:, :, at].mT @ do[:, :, at]
            before -= self.k_in[:, :, at].mT @ (self._beta[:, :, at] * dx_at)
            after = before.addcmul_(self._whole[:, :, at], after)
        return after


class _Decays:
    """The decays of chunks from g [b, n, c, C, w].

    `from_start` are exp(G) [b, n, c, C, w], `to_end` exp(G_C - G), and `whole` exp(G_C) [b, n, c, 1, w].
    """

    def __init__(self, g: Tensor):
        self._dtype = g.dtype
        # In fp64: differences of sums are the exponents, and a sum with a document's start has few digits in fp32.
        self._sums = g.to(torch.float64).cumsum(-2)
        self.from_start = self._sums.exp().to(g.dtype)
        self.to_end = self._exp(self._sums[..., -1:, :] - self._sums)
        self.whole = self.from_start[..., -1:, :]
        self._pairs = None
        if g.shape[-1] == 1:
            self._pairs = self._exp((self._sums - self._sums.mT).tril_()).tril_()

    def _exp(self, exponents: Tensor) -> Tensor:
        return exponents.to(self._dtype).exp_()

    def products(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return x [b, n, c, C, C], the sum over d of rows_t columns_j exp(G_t - G_j) for j <= t, and 0 above."""
        if self._pairs is not None:
            return (rows @ columns.mT).mul_(self._pairs)
        x = torch.zeros(*rows.shape[:-1], rows.shape[-2], dtype=rows.dtype, device=rows.device)
        x.diagonal(dim1=-2, dim2=-1).copy_((rows * columns).sum(-1))
        for half, later, earlier in self._halves():
            lower = _second(rows, half) * later @ (_first(columns, half) * earlier).mT
            _blocks(x, half).copy_(lower)
        return x

    def products_backward(
        self, q: Tensor, k: Tensor, p: Tensor, dp: Tensor, a: Tensor, da: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and g from those of p = products(q, k), and of a = products(k, k).

        `da` and `a` are 0 on the diagonal. The gradient of g at a token is a sum over the pairs of a row at or behind
        the token and a column in front of it: nothing cancels in it but the terms themselves.
        """
        if self._pairs is not None:
            pairs = (dp * p + da * a).flip(-2).cumsum(-2).flip(-2)
            dp, da = dp * self._pairs, da * self._pairs
            return dp @ k, da @ k + dp.mT @ q + da.mT @ k, pairs.tril_(-1).sum(-1, keepdim=True)
        diagonal = dp.diagonal(dim1=-2, dim2=-1)[..., None]
        dq, dk, dg = k * diagonal, q * diagonal, torch.zeros_like(k)
        for half, later, earlier in self._halves():
            dp_block, da_block = _blocks(dp, half), _blocks(da, half)
            q_rows, k_rows, columns = _second(q, half) * later, _second(k, half) * later, _first(k, half) * earlier
            of_q, of_k = dp_block @ columns, da_block @ columns
            of_columns = dp_block.mT @ q_rows + da_block.mT @ k_rows
            _second(dg, half).add_(sum_from_here(of_q * q_rows + of_k * k_rows))
            _first(dg, half).add_(sum_before(of_columns * columns))
            _second(dq, half).addcmul_(of_q, later)
            _second(dk, half).addcmul_(of_k, later)
            _first(dk, half).addcmul_(of_columns, earlier)
        return dq, dk, dg

    def sum_backward(self, x: Tensor) -> Tensor:
        """Return x [b, n, c, C, d], summed over the channels that share a decay."""
        return x if self._pairs is None else x.sum(-1, keepdim=True)

    def _halves(self) -> Any:
        """Yield (half, later, earlier) for blocks of 2 half tokens: how both halves decay towards the middle.

        exp(G_t - G_j) of a token of the second half and one of the first is the product of both, each at most 1.
        """
        half = self._sums.shape[-2] // 2
        while half:
            middle = _first(self._sums, half)[..., -1:, :]
            yield half, self._exp(_second(self._sums, half) - middle), self._exp(middle - _first(self._sums, half))
            half //= 2


def _first(x: Tensor, half: int) -> Tensor:
    """Return the first halves [..., blocks, half, d] of blocks of 2 half rows of [..., C, d]: a view."""
    return x.unflatten(-2, (-1, 2 * half))[..., :half, :]


def _second(x: Tensor, half: int) -> Tensor:
    """Return the second halves, as `_first`."""
    return x.unflatten(-2, (-1, 2 * half))[..., half:, :]


def _blocks(x: Tensor, half: int) -> Tensor:
    """Return the blocks [..., blocks, half, half] of x [..., C, C], of second halves (rows) and first ones: a view."""
    tiles = x.unflatten(-1, (-1, 2 * half)).unflatten(-3, (-1, 2 * half))  # [..., blocks, 2 half, blocks, 2 half]
    return tiles.diagonal(dim1=-4, dim2=-2)[..., half:, :half, :].movedim(-1, -3)


def _solve(lower: Tensor, x: Tensor, *, transposed: bool = False) -> Tensor:
    """Return (I + lower)^-1 x by forward substitution, or with the transposed triangle by backward substitution.

    The diagonal of `lower` is not read.
    """
    if transposed:
        return torch.linalg.solve_triangular(lower.mT, x, upper=True, unitriangular=True)
    return torch.linalg.solve_triangular(lower, x, upper=False, unitriangular=True)


def _chunked(
    q_sbnd: Tensor, k_sbnd: Tensor, v_sbne: Tensor, g_sbnw: Tensor, beta_sbn: Tensor, chunk: int
) -> list[Tensor]:
    dtype = torch.promote_types(k_sbnd.dtype, torch.float32)
    return in_chunks(chunk, dtype, q_sbnd, k_sbnd, v_sbne, g_sbnw, beta_sbn[..., None])


def log_decay(a_sbnw: Tensor, a_log_n: Tensor, dt_bias_nw: Tensor, floor: float = 0.0) -> Tensor:
    """Return g = -exp(A_log) softplus(a + dt_bias), [s, b, n, w], fp32, or fp64 for fp64 inputs.

    With a `floor` below 0 return floor * sigmoid(exp(A_log) (a + dt_bias)), which lies between the floor and 0.
    """
    g: Tensor = apply_function(_LogDecay, a_sbnw, a_log_n, dt_bias_nw, floor)
    return g


class _LogDecay(torch.autograd.Function):
    """`log_decay`. It keeps its inputs, and adds gradients of parameters to their main gradients in fp32."""

    @staticmethod
    def forward(ctx: Any, a_sbnw: Tensor, a_log_n: Tensor, dt_bias_nw: Tensor, floor: float) -> Tensor:
        ctx.save_for_backward(a_sbnw, a_log_n, dt_bias_nw)
        ctx.floor = floor
        ctx.main_grads = main_grad_of(a_log_n), main_grad_of(dt_bias_nw)
        rate, steps = _rate_and_steps(a_sbnw, a_log_n, dt_bias_nw)
        return floor * (rate * steps).sigmoid() if floor else -rate * F.softplus(steps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dg_sbnw: Tensor) -> tuple[Tensor | None, ...]:
        a_sbnw, a_log_n, dt_bias_nw = ctx.saved_tensors
        rate, steps = _rate_and_steps(a_sbnw, a_log_n, dt_bias_nw)
        if ctx.floor:
            share = (rate * steps).sigmoid()
            of_product = dg_sbnw * (ctx.floor * share * (1 - share))  # of rate * steps
            da, of_log = of_product * rate, of_product * rate * steps
        else:
            of_product = -dg_sbnw * rate
            da, of_log = of_product * steps.sigmoid(), of_product * F.softplus(steps)
        of_bias = da.sum((0, 1)).view_as(dt_bias_nw)
        main_of_log, main_of_bias = ctx.main_grads
        a_log, dt_bias = given(main_of_log, of_log.sum((0, 1, 3)), a_log_n), given(main_of_bias, of_bias, dt_bias_nw)
        return da.to(a_sbnw.dtype), a_log, dt_bias, None


def _rate_and_steps(a_sbnw: Tensor, a_log_n: Tensor, dt_bias_nw: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(A_log) [n, 1], and a + dt_bias [s, b, n, w]."""
    dtype = torch.promote_types(a_sbnw.dtype, torch.float32)
    return a_log_n.to(dtype).exp()[:, None], a_sbnw.to(dtype) + dt_bias_nw.to(dtype).view(a_sbnw.shape[2:])
