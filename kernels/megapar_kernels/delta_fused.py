"""The gated delta rule by Triton kernels: `delta_rule` has its formulas, the kernels are in `delta_kernels`.

For backward the inputs are kept, and nothing else: T, W, U and the states in front of all chunks are computed again,
as they would take more memory than the inputs. All of them are in the dtype of queries and keys, but A and what is
summed over tokens: fp32. So is a state while it goes from chunk to chunk.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar_kernels import delta_backward_kernels as backward_kernels
from megapar_kernels import delta_kernels as kernels
from megapar_kernels.chunks import CHUNK
from megapar_kernels.dispatch import Implementation, interpreting, launches, next_power_of_2, on_gpu, triton

WIDEST = 256
"""The most channels of a query and a key. A value may have any number."""
Across = Callable[[Tensor, Tensor, bool], Tensor]
"""Takes M [b, n, d, d] and B [b, n, d, e] of runs of positions, each a map S -> M S + B of the state in front of it.
Returns these states. With True it takes the maps of gradients of states, which lead from behind a run to its front, and
returns the gradients of the states behind the runs. The runs of b may be those of a sample, and of other processes."""
CAPABILITIES = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Of the GPUs that give a program the shared memory of these tiles."""


def serves(impl: Implementation, q: Tensor, k: Tensor, v: Tensor, chunk: int) -> bool:
    """Whether the kernels compute the rule, if `impl` asks for them.

    On a GPU queries and keys have 16 bits: the products have their dtype. Values may be fp32.
    """
    if impl != "triton" or chunk != CHUNK or q.shape[-1] > WIDEST or q.dtype != k.dtype:
        return False
    if v.dtype not in (q.dtype, torch.float32) or not v.numel():
        return False
    if on_gpu(q, impl):
        return q.dtype.itemsize == 2
    return q.device.type == "cpu" and interpreting() and q.dtype != torch.float64


class _Sizes(NamedTuple):
    """The sizes of one delta rule, and the arguments, grids and memory of kernels that follow from them."""

    length: int
    samples: int
    heads: int
    width: int
    v_width: int
    per_channel: bool

    @classmethod
    def of(cls, k_sbnd: Tensor, v_sbne: Tensor, g_sbnw: Tensor) -> "_Sizes":
        length, samples, heads, width = k_sbnd.shape
        return cls(length, samples, heads, width, v_sbne.shape[-1], g_sbnw.shape[-1] > 1)

    @property
    def state(self) -> tuple[int, int, int, int]:
        return self.samples, self.heads, self.width, self.v_width

    @property
    def all_heads(self) -> int:
        return self.samples * self.heads

    @property
    def chunks(self) -> int:
        return -(-self.length // CHUNK)

    @property
    def numbers(self) -> tuple[int, int, int]:
        return self.heads, self.length, self.chunks

    def note_products(self, like: Tensor, *, backward: bool, passes: bool) -> None:
        """Tell a plan the FLOPs of the products of a pass, which may pass states. `launches` tells their bytes."""
        if not like.is_meta:
            return
        pairs, states = CHUNK**2, CHUNK * self.width * self.v_width
        each = pairs * (3 * self.width + 2 * self.v_width) + 3 * states
        if backward:  # all but the outputs again, and their gradients
            each = pairs * (7 * self.width + 6 * self.v_width) + 9 * states
        if passes and backward:  # the gradients of states once more
            each += pairs * self.v_width + 3 * states
        elif passes:  # the states once more, with those of the map
            each += 2 * CHUNK * self.width * (self.width + self.v_width)
        flops = 2 * each * self.chunks * self.all_heads
        torch.ops.megapar.linear_attention(like, flops, self.width, backward)

    def grid(self, tiles: int = 1) -> tuple[int, int]:
        return self.chunks * tiles, self.all_heads

    def rows(self, columns: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for each token of each chunk of each head, [heads, c C, columns]."""
        shape = self.all_heads, self.chunks * CHUNK, columns
        return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)

    def launch(self, kernel: str) -> dict[str, int]:
        return launch(kernel, self.width, self.per_channel)

    def states(self, like: Tensor) -> Tensor:
        """Return memory for a state of each chunk of each head, [heads, c, d, e], with the columns of `like`."""
        shape = self.all_heads, self.chunks, self.width, like.shape[-1]
        return torch.empty(shape, dtype=like.dtype, device=like.device)


def columns(width: int, widest: int = 64) -> int:
    """Return the channels of a tile: a power of two, at least the 16 that a tensor core takes."""
    return min(max(16, next_power_of_2(width)), widest)


def state_columns(width: int) -> int:
    """Return the columns of a state that a program has in registers, all of its `width` rows."""
    return 64 if width <= 128 else 32


def pair_columns(width: int, per_channel: bool) -> int:
    """Return the channels of a tile where pairs of tokens meet: half as many with a decay for each, for registers."""
    return columns(width, 32 if per_channel else 64)


def launch(kernel: str, width: int, per_channel: bool) -> dict[str, int]:
    """Return the warps of a program of this kernel, and how many tiles are loaded ahead. No GPU has timed others."""
    if kernel == "input gradients":
        return {"num_warps": 8, "num_stages": 1 if per_channel else 2}
    if kernel in ("states", "state gradients"):  # a whole state, and the tiles of a chunk as wide in shared memory
        return {"num_warps": 8 if width > 128 else 4, "num_stages": 1 if width > 128 else 2}
    return {"num_warps": 4, "num_stages": 1 if per_channel and kernel in ("pairs", "solved") else 2}


def map_of_run(over: Callable[[Tensor], Tensor], like: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return B [b, n, d, e] and M [b, n, d, d] of the map S -> M S + B of a run of positions.

    `sizes` are b, n, d and e. `over` leads a state over the run: its first e columns have values, all others have none.
    """
    *heads, width, v_width = sizes
    first = like.new_zeros(*heads, width, v_width + width)
    first[..., v_width:].diagonal(dim1=-2, dim2=-1).fill_(1.0)
    state, run_map = over(first).split([v_width, width], dim=-1)
    return state, run_map.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _lines(x: Tensor) -> Tensor:
    """Return `x` with the channels of a head beside each other, as the kernels read them."""
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


class _Chunks(NamedTuple):
    """What forward and backward know of all chunks; `delta_kernels` says what each is. `u` are T Diag(beta) V."""

    sums: Tensor
    starts: Tensor
    a: Tensor
    p: Tensor
    inverse: Tensor
    w: Tensor
    u: Tensor
    q_in: Tensor
    k_out: Tensor


def _in_chunks(z: _Sizes, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> _Chunks:
    """Compute what all chunks have without a state."""
    w_width = g.shape[-1]
    sums, starts = z.rows(w_width, g, torch.float32), z.rows(1, g, torch.int32)
    if launches(g, sums, starts):
        kernels.sums_kernel[z.grid()](
            g, sums, starts, *z.numbers, *_strides(g), w_width, columns(w_width), CHUNK, **z.launch("sums"),
        )  # fmt: skip
    a, p, inverse = z.rows(CHUNK, q, torch.float32), z.rows(CHUNK, q), z.rows(CHUNK, q)
    width = z.width, pair_columns(z.width, z.per_channel)
    if launches(q, k, sums, starts, a, p):
        kernels.pairs_kernel[z.grid()](
            q, k, sums, starts, a, p, *z.numbers, *_strides(q, k), *width, z.per_channel, CHUNK,
            **z.launch("pairs"),
        )  # fmt: skip
    if launches(a, beta, inverse):
        kernels.inverse_kernel[z.grid()](a, beta, inverse, *z.numbers, *_strides(beta), CHUNK, **z.launch("inverse"))
    w, u, q_in, k_out = (z.rows(x, q) for x in (z.width, z.v_width, z.width, z.width))
    width, v_width = (z.width, columns(z.width)), (z.v_width, columns(z.v_width))
    if launches(v, q, k, beta, sums, starts, inverse, w, u, q_in, k_out):
        kernels.solved_kernel[z.grid()](
            q, k, v, beta, sums, starts, inverse, w, u, q_in, k_out, *z.numbers, *_strides(q, k, v, beta),
            *width, *v_width, z.per_channel, CHUNK, **z.launch("solved"),
        )  # fmt: skip
    return _Chunks(sums, starts, a, p, inverse, w, u, q_in, k_out)


def _states(z: _Sizes, x: _Chunks, u: Tensor, state_bnde: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the states in front of all chunks, and the one behind them. `u`, T Diag(beta) V, becomes U."""
    width = u.shape[-1]
    states = z.states(u)
    last = torch.empty(z.samples, z.heads, z.width, width, dtype=torch.float32, device=u.device)
    if launches(states, x.w, x.k_out, x.sums, x.starts, state_bnde, u, last):
        tile = columns(width, state_columns(z.width))
        kernels.states_kernel[triton.cdiv(width, tile), z.all_heads](
            x.w, x.k_out, x.sums, x.starts, state_bnde, u, states, last, z.chunks,
            z.width, columns(z.width, WIDEST), width, tile, z.per_channel, CHUNK, **z.launch("states"),
        )  # fmt: skip
    return states, last


class FusedDeltaRule(torch.autograd.Function):
    """`delta_rule` by kernels. It keeps its inputs, and with `across` the state and the map that this has asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        q_sbnd: Tensor,
        k_sbnd: Tensor,
        v_sbne: Tensor,
        g_sbnw: Tensor,
        beta_sbn: Tensor,
        state_bnde: Tensor | None,
        across: Across | None,
    ) -> tuple[Tensor, Tensor]:
        q, k, v, g = map(_lines, (q_sbnd, k_sbnd, v_sbne, g_sbnw))
        state, run_map = None if state_bnde is None else state_bnde.contiguous(), None
        z = _Sizes.of(k, v, g)
        z.note_products(q, backward=False, passes=across is not None)
        x = _in_chunks(z, q, k, v, g, beta_sbn)
        if across is not None:
            u = F.pad(x.u, (0, z.width))
            last, run_map = map_of_run(lambda first: _states(z, x, u, first)[1], x.sums, z.state)
            state = across(run_map, last, False)
        ctx.save_for_backward(q, k, v, g, beta_sbn, state, run_map)
        ctx.across = across
        states, last = _states(z, x, x.u, state)
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        tile = columns(z.v_width)
        if launches(o, x.q_in, x.p, x.u, states):
            kernels.outputs_kernel[z.grid(triton.cdiv(z.v_width, tile))](
                x.q_in, x.p, x.u, states, o, *z.numbers, *_strides(o),
                z.width, columns(z.width), z.v_width, tile, CHUNK, **z.launch("outputs"),
            )  # fmt: skip
        return o, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_sbne: Tensor, dlast_bnde: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, state, run_map = ctx.saved_tensors
        z = _Sizes.of(k, v, g)
        z.note_products(q, backward=True, passes=ctx.across is not None)
        x = _in_chunks(z, q, k, v, g, beta)
        states, _ = _states(z, x, x.u, state)
        do, dlast = _lines(do_sbne), dlast_bnde.contiguous()
        if ctx.across is not None:
            dlast = dlast + ctx.across(run_map.mT, _of_states(z, x, do, dlast)[2], True)
        du, dstates, dstate = _of_states(z, x, do, dlast)
        dx, dv, dp, da, dbeta, dg = _of_pairs(z, x, do, du, v, beta)
        grads = _of_inputs(z, x, do, dx, dp, da, states, dstates, q, k, g, beta)
        dq, dk = grads[:2]
        dbeta_sbn = _by_position(z, dbeta + grads[3])
        dg_sbnw = grads[2] if z.per_channel else _by_position(z, dg + grads[2])[..., None]
        has_state = state is not None and ctx.across is None
        return (
            *(dq, dk, dv, dg_sbnw.to(g.dtype), dbeta_sbn.to(beta.dtype)),
            *(dstate.to(state.dtype) if has_state else None, None),
        )


def _by_position(z: _Sizes, x: Tensor) -> Tensor:
    """Return numbers of tokens, [heads, c C], as [s, b, n]."""
    return x.view(z.samples, z.heads, -1)[..., : z.length].permute(2, 0, 1)


def _of_states(z: _Sizes, x: _Chunks, do: Tensor, dlast: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dU, the gradients of the states behind all chunks, and the gradient of the first state."""
    du, dstates, dstate = z.rows(z.v_width, x.u), z.states(x.u), torch.empty_like(dlast)
    if launches(do, x.w, x.q_in, x.k_out, x.p, x.sums, x.starts, dlast, du, dstates, dstate):
        tile = columns(z.v_width, state_columns(z.width))
        backward_kernels.state_gradients_kernel[triton.cdiv(z.v_width, tile), z.all_heads](
            do, x.w, x.q_in, x.k_out, x.p, x.sums, x.starts, dlast, du, dstates, dstate, *z.numbers, *_strides(do),
            z.width, columns(z.width, WIDEST), z.v_width, tile, z.per_channel, CHUNK, **z.launch("state gradients"),
        )  # fmt: skip
    return du, dstates, dstate


def _of_pairs(z: _Sizes, x: _Chunks, do: Tensor, du: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Return dX, dV, dP, dA, and what is in dbeta and dg of pairs."""
    dx, dp, da = z.rows(z.v_width, x.u), z.rows(CHUNK, x.u), z.rows(CHUNK, x.u)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    dbeta, dg = (z.rows(1, x.sums).squeeze(-1) for _ in range(2))
    if launches(do, v, beta, x.sums, x.starts, x.a, x.p, x.inverse, x.u, du, dx, dv, dp, da, dbeta):
        backward_kernels.pair_gradients_kernel[z.grid()](
            do, v, beta, x.sums, x.starts, x.a, x.p, x.inverse, x.u, du, dx, dv, dp, da, dbeta, dg,
            *z.numbers, *_strides(do, v, beta, dv),
            z.v_width, columns(z.v_width), z.per_channel, CHUNK, **z.launch("pair gradients"),
        )  # fmt: skip
    return dx, dv, dp, da, dbeta, dg


def _of_inputs(
    z: _Sizes, x: _Chunks, do: Tensor, dx: Tensor, dp: Tensor, da: Tensor, states: Tensor, dstates: Tensor,
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return dq and dk, dg (of a head with one decay [heads, c C], without that of pairs), and the rest of dbeta."""
    dq, dk = (torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in (q, k))
    tile = pair_columns(z.width, z.per_channel)
    tiles = triton.cdiv(z.width, tile)
    shape = tiles, z.all_heads, z.chunks * CHUNK
    dg, dbeta = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    if z.per_channel:
        dg = torch.empty(g.shape, dtype=torch.float32, device=g.device)
    if launches(q, do, k, beta, x.sums, x.starts, dp, da, dx, x.u, states, dstates, dq, dk, dg, dbeta):
        backward_kernels.input_gradients_kernel[z.grid(tiles)](
            do, q, k, beta, x.sums, x.starts, dp, da, dx, x.u, states, dstates, dq, dk, dg, dbeta,
            *z.numbers, z.all_heads, *_strides(do, q, k, beta),
            z.width, tile, z.v_width, columns(z.v_width), z.per_channel, CHUNK, **z.launch("input gradients"),
        )  # fmt: skip
    return dq, dk, dg if z.per_channel else dg.sum(0), dbeta.sum(0)
