"""The backward Triton kernels of the gated delta rule, after `delta_kernels` have computed a chunk's numbers again.

With dX = T^T dU, the gradient of V is Diag(beta) dX. From the last chunk back

    dU = P^T dO + (exp(G_C - G) K) dS'
    dS = Diag(exp(G_C)) dS' + (exp(G) Q)^T dO - W^T dU

and all else follows from these chunk by chunk. The gradient of a sum of decays is that of a row's factors less that of
a column's. Both are products of the same rounded numbers, so that what cancels in the sum over tokens cancels in fp32.
"""

from megapar_kernels.delta_kernels import (
    load_sums,
    load_tile,
    load_turned,
    load_whole,
    middle_factors,
    pair_decays,
    product,
    store_tile,
)
from megapar_kernels.dispatch import exp, tl, triton


@triton.jit
def state_gradients_kernel(  # type: ignore[no-untyped-def]
    do_ptr, w_ptr, q_in_ptr, k_out_ptr, p_ptr, sums_ptr, starts_ptr, dlast_ptr, du_ptr, dstates_ptr, dstate_ptr,
    heads, length, chunks, do_s, do_b, do_n,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, V_WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr,
    PER_CHANNEL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Some columns of dU, of the gradients of the states behind all chunks of a head, and of the first state's."""
    head = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0).to(tl.int64).to(tl.int32) * V_COLUMNS + tl.arange(0, V_COLUMNS)
    row = tl.arange(0, ROWS)
    token = tl.arange(0, CHUNK)
    kind = w_ptr.dtype.element_ty
    dstate = load_tile(dlast_ptr + head * WIDTH * V_WIDTH, row, V_WIDTH, WIDTH, column, V_WIDTH).to(tl.float32)
    chunk = head * chunks + chunks - 1
    first_row = chunk * CHUNK
    first_token = first_row - head * chunks * CHUNK
    do_ptr += first_token * do_s + head // heads * do_b + head % heads * do_n
    w_ptr += first_row * WIDTH
    q_in_ptr += first_row * WIDTH
    k_out_ptr += first_row * WIDTH
    p_ptr += first_row * CHUNK
    du_ptr += first_row * V_WIDTH
    sums_ptr += first_row * (WIDTH if PER_CHANNEL else 1)
    starts_ptr += first_row
    dstates_ptr += chunk * WIDTH * V_WIDTH
    left = length - first_token
    for _ in range(chunks):
        store_tile(dstates_ptr, dstate, row, V_WIDTH, WIDTH, column, V_WIDTH)
        do = load_tile(do_ptr, token, do_s, left, column, V_WIDTH).to(kind)
        p = load_turned(p_ptr, token, CHUNK, CHUNK, token, CHUNK)
        k_out = load_tile(k_out_ptr, token, WIDTH, CHUNK, row, WIDTH)
        du = product(p, do, tl.zeros([CHUNK, V_COLUMNS], tl.float32))
        du = product(k_out, dstate.to(kind), du)
        store_tile(du_ptr, du, token, V_WIDTH, CHUNK, column, V_WIDTH)
        whole = load_whole(sums_ptr, starts_ptr, row, WIDTH, PER_CHANNEL, CHUNK)
        dstate *= whole[:, None] if PER_CHANNEL else whole
        q_in = load_turned(q_in_ptr, token, WIDTH, CHUNK, row, WIDTH)
        dstate = product(q_in, do, dstate)
        w = load_turned(w_ptr, token, WIDTH, CHUNK, row, WIDTH)
        dstate = product(w, (-du).to(kind), dstate)
        do_ptr -= CHUNK * do_s
        w_ptr -= CHUNK * WIDTH
        q_in_ptr -= CHUNK * WIDTH
        k_out_ptr -= CHUNK * WIDTH
        p_ptr -= CHUNK * CHUNK
        du_ptr -= CHUNK * V_WIDTH
        sums_ptr -= CHUNK * (WIDTH if PER_CHANNEL else 1)
        starts_ptr -= CHUNK
        dstates_ptr -= WIDTH * V_WIDTH
        left += CHUNK
    store_tile(dstate_ptr + head * WIDTH * V_WIDTH, dstate, row, V_WIDTH, WIDTH, column, V_WIDTH)


@triton.jit
def _sums_from_here(x, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of x [C] over a token and those behind it."""
    token = tl.arange(0, CHUNK)
    return tl.sum(tl.where(token[None, :] >= token[:, None], x[None, :], 0.0), axis=1)


@triton.jit
def pair_gradients_kernel(  # type: ignore[no-untyped-def]
    do_ptr, v_ptr, beta_ptr, sums_ptr, starts_ptr, a_ptr, p_ptr, inverse_ptr, u_ptr, du_ptr,
    dx_ptr, dv_ptr, dp_ptr, da_ptr, dbeta_ptr, dg_ptr, heads, length, chunks,
    do_s, do_b, do_n, v_s, v_b, v_n, beta_s, beta_b, beta_n, dv_s, dv_b, dv_n,
    V_WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr, PER_CHANNEL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """dX and dV of a chunk, the gradients dP and dA of pairs, and what is in dbeta and dg from pairs.

    For a head with one decay dP and dA are those of pairs without their decays. dg is that of such a head.
    """
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    left = length - chunk * CHUNK
    sample = head // heads
    do_ptr += chunk * CHUNK * do_s + sample * do_b + head % heads * do_n
    v_ptr += chunk * CHUNK * v_s + sample * v_b + head % heads * v_n
    dv_ptr += chunk * CHUNK * dv_s + sample * dv_b + head % heads * dv_n
    beta_ptr += chunk * CHUNK * beta_s + sample * beta_b + head % heads * beta_n
    first_row = (head * chunks + chunk) * CHUNK
    u_ptr += first_row * V_WIDTH
    du_ptr += first_row * V_WIDTH
    dx_ptr += first_row * V_WIDTH
    token = tl.arange(0, CHUNK)
    kind = u_ptr.dtype.element_ty
    beta = tl.load(beta_ptr + token * beta_s, token < left, other=0.0).to(tl.float32)
    inverse = load_turned(inverse_ptr + first_row * CHUNK, token, CHUNK, CHUNK, token, CHUNK)
    dp = tl.zeros([CHUNK, CHUNK], tl.float32)
    da = tl.zeros([CHUNK, CHUNK], tl.float32)
    dbeta = tl.zeros([CHUNK], tl.float32)
    for first in range(0, V_WIDTH, V_COLUMNS):
        column = first + tl.arange(0, V_COLUMNS)
        du = load_tile(du_ptr, token, V_WIDTH, CHUNK, column, V_WIDTH)
        dx = product(inverse, du, tl.zeros([CHUNK, V_COLUMNS], tl.float32))
        store_tile(dx_ptr, dx, token, V_WIDTH, CHUNK, column, V_WIDTH)
        store_tile(dv_ptr, beta[:, None] * dx, token, dv_s, left, column, V_WIDTH)
        v = load_tile(v_ptr, token, v_s, left, column, V_WIDTH).to(tl.float32)
        dbeta += tl.sum(dx * v, axis=1)
        do = load_tile(do_ptr, token, do_s, left, column, V_WIDTH).to(kind)
        u = load_turned(u_ptr, token, V_WIDTH, CHUNK, column, V_WIDTH)
        dp = product(do, u, dp)
        da = product(dx.to(kind), u, da)
    a = load_tile(a_ptr + first_row * CHUNK, token, CHUNK, CHUNK, token, CHUNK)
    dbeta -= tl.sum(da * a, axis=1)
    tl.store(dbeta_ptr + first_row + token, dbeta)
    dp = tl.where(token[:, None] >= token[None, :], dp, 0.0)
    da = tl.where(token[:, None] > token[None, :], -beta[:, None] * da, 0.0)
    if not PER_CHANNEL:
        p = load_tile(p_ptr + first_row * CHUNK, token, CHUNK, CHUNK, token, CHUNK).to(tl.float32)
        pairs = dp * p + da * a
        dsums = tl.sum(pairs, axis=1) - tl.sum(pairs, axis=0)
        tl.store(dg_ptr + first_row + token, _sums_from_here(dsums, CHUNK))
        decays = pair_decays(sums_ptr + first_row, starts_ptr + first_row, CHUNK)
        dp *= decays
        da *= decays
    store_tile(dp_ptr + first_row * CHUNK, dp, token, CHUNK, CHUNK, token, CHUNK)
    store_tile(da_ptr + first_row * CHUNK, da, token, CHUNK, CHUNK, token, CHUNK)


@triton.jit
def _of_states(  # type: ignore[no-untyped-def]
    do_ptr, dx_ptr, u_ptr, states_ptr, dstates_ptr, do_s, left, column,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, V_WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """dO S^T, dX S^T and U dS'^T, [C, columns of d], and the sums of S dS' over e, [columns of d]."""
    token = tl.arange(0, CHUNK)
    kind = u_ptr.dtype.element_ty
    of_q = tl.zeros([CHUNK, COLUMNS], tl.float32)
    of_k_in = tl.zeros([CHUNK, COLUMNS], tl.float32)
    of_k_out = tl.zeros([CHUNK, COLUMNS], tl.float32)
    of_whole = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, V_WIDTH, V_COLUMNS):
        v_column = first + tl.arange(0, V_COLUMNS)
        state = load_turned(states_ptr, column, V_WIDTH, WIDTH, v_column, V_WIDTH)
        dstate = load_turned(dstates_ptr, column, V_WIDTH, WIDTH, v_column, V_WIDTH)
        do = load_tile(do_ptr, token, do_s, left, v_column, V_WIDTH).to(kind)
        of_q = product(do, state, of_q)
        of_k_in = product(load_tile(dx_ptr, token, V_WIDTH, CHUNK, v_column, V_WIDTH), state, of_k_in)
        of_k_out = product(load_tile(u_ptr, token, V_WIDTH, CHUNK, v_column, V_WIDTH), dstate, of_k_out)
        of_whole += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=0)
    return of_q, of_k_in, of_k_out, of_whole


@triton.jit
def _of_halves(  # type: ignore[no-untyped-def]
    q, k, dp_ptr, da_ptr, factors, level, CHUNK: tl.constexpr,
):  # fmt: skip
    """What comes from pairs of both halves of blocks of 2^(level + 1) tokens: to dq, dk and the gradient of sums."""
    kind = dp_ptr.dtype.element_ty
    token = tl.arange(0, CHUNK)
    half = token >> level
    late = (half & 1) == 1
    below = (half[:, None] == half[None, :] + 1) & late[:, None]
    above = (half[:, None] + 1 == half[None, :]) & late[None, :]
    here = token[:, None] * CHUNK + token[None, :]
    turned = token[None, :] * CHUNK + token[:, None]
    q_near = (q * factors).to(kind)
    k_near = (k * factors).to(kind)
    zeros = tl.zeros_like(q)
    of_q = product(tl.where(below, tl.load(dp_ptr + here), 0.0).to(kind), k_near, zeros)
    of_k = product(tl.where(below, tl.load(da_ptr + here), 0.0).to(kind), k_near, zeros)
    of_k = product(tl.where(above, tl.load(dp_ptr + turned), 0.0).to(kind), q_near, of_k)
    of_k = product(tl.where(above, tl.load(da_ptr + turned), 0.0).to(kind), k_near, of_k)
    of_sums = of_q * q_near.to(tl.float32) + tl.where(late[:, None], of_k, -of_k) * k_near.to(tl.float32)
    return of_q * factors, of_k * factors, of_sums


@triton.jit
def _of_pairs_of_channels(  # type: ignore[no-untyped-def]
    q, k, dq, dk, dsums, dp_ptr, da_ptr, sums_ptr, starts_ptr, sums, starts, column,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Add what comes from pairs to dq, dk and the gradient of sums, [C, columns], with a decay for each channel."""
    token = tl.arange(0, CHUNK)
    diagonal = tl.load(dp_ptr + token * (CHUNK + 1)).to(tl.float32)[:, None]
    dq += k * diagonal
    dk += q * diagonal
    for level in range(0, 6):  # not unrolled: the levels' tiles would not fit in registers
        factors = middle_factors(sums_ptr, starts_ptr, sums, starts, column, level, WIDTH, CHUNK)
        of_q, of_k, of_sums = _of_halves(q, k, dp_ptr, da_ptr, factors, level, CHUNK)
        dq += of_q
        dk += of_k
        dsums += of_sums
    return dq, dk, dsums


@triton.jit
def _of_pairs_of_heads(q, k, dq, dk, dp_ptr, da_ptr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add what comes from pairs to dq and dk, [C, columns], with one decay for a head."""
    token = tl.arange(0, CHUNK)
    kind = dp_ptr.dtype.element_ty
    da = load_tile(da_ptr, token, CHUNK, CHUNK, token, CHUNK)
    dp = load_tile(dp_ptr, token, CHUNK, CHUNK, token, CHUNK)
    dq = product(dp, k.to(kind), dq)
    dk = product(da, k.to(kind), dk)
    dk = product(load_turned(dp_ptr, token, CHUNK, CHUNK, token, CHUNK), q.to(kind), dk)
    return dq, product(load_turned(da_ptr, token, CHUNK, CHUNK, token, CHUNK), k.to(kind), dk)


@triton.jit
def _decays(sums_ptr, starts_ptr, column, WIDTH: tl.constexpr, PER_CHANNEL: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """G, the counts of starts, exp(G) and exp(G_C - G), from pointers at a chunk's first token."""
    token = tl.arange(0, CHUNK)
    sums = load_sums(sums_ptr, token, column, WIDTH, PER_CHANNEL)
    last = load_sums(sums_ptr, 0 * token + CHUNK - 1, column, WIDTH, PER_CHANNEL)
    starts = tl.load(starts_ptr + token)
    last_start = tl.load(starts_ptr + CHUNK - 1)
    from_start = tl.where((starts == 0)[:, None], exp(sums), 0.0)
    return sums, starts, from_start, tl.where((starts == last_start)[:, None], exp(last - sums), 0.0)


@triton.jit
def _total(vector):  # type: ignore[no-untyped-def]
    """The sum of a vector, [1]. It is that of a row: triton 3.6 cannot compile a vector's for sm_100."""
    return tl.sum(vector[None, :], axis=1)


@triton.jit
def input_gradients_kernel(  # type: ignore[no-untyped-def]
    do_ptr, q_ptr, k_ptr, beta_ptr, sums_ptr, starts_ptr, dp_ptr, da_ptr, dx_ptr, u_ptr, states_ptr, dstates_ptr,
    dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, heads, length, chunks, all_heads,
    do_s, do_b, do_n, q_s, q_b, q_n, k_s, k_b, k_n, beta_s, beta_b, beta_n,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, V_WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr,
    PER_CHANNEL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Some channels of dq, dk and dg of a chunk, and their part of dbeta. dq, dk and dg are [s, b, n, d].

    A head with one decay has the part of dg from these channels in a row of its own, as dbeta, [tiles, heads, c C].
    """
    tile = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(WIDTH, COLUMNS)
    chunk = tile // tiles
    part = tile % tiles
    column = part.to(tl.int32) * COLUMNS + tl.arange(0, COLUMNS)
    left = length - chunk * CHUNK
    sample = head // heads
    q_ptr += chunk * CHUNK * q_s + sample * q_b + head % heads * q_n
    k_ptr += chunk * CHUNK * k_s + sample * k_b + head % heads * k_n
    do_ptr += chunk * CHUNK * do_s + sample * do_b + head % heads * do_n
    beta_ptr += chunk * CHUNK * beta_s + sample * beta_b + head % heads * beta_n
    first_row = (head * chunks + chunk) * CHUNK
    sums_ptr += first_row * (WIDTH if PER_CHANNEL else 1)
    starts_ptr += first_row
    dp_ptr += first_row * CHUNK
    da_ptr += first_row * CHUNK
    token = tl.arange(0, CHUNK)
    of_state = (head * chunks + chunk) * WIDTH * V_WIDTH
    dq_in, dk_in, dk_out, dwhole = _of_states(
        do_ptr, dx_ptr + first_row * V_WIDTH, u_ptr + first_row * V_WIDTH, states_ptr + of_state,
        dstates_ptr + of_state, do_s, left, column, WIDTH, COLUMNS, V_WIDTH, V_COLUMNS, CHUNK,
    )  # fmt: skip
    sums, starts, from_start, to_end = _decays(sums_ptr, starts_ptr, column, WIDTH, PER_CHANNEL, CHUNK)
    q = load_tile(q_ptr, token, q_s, left, column, WIDTH).to(tl.float32)
    k = load_tile(k_ptr, token, k_s, left, column, WIDTH).to(tl.float32)
    beta = tl.load(beta_ptr + token * beta_s, token < left, other=0.0).to(tl.float32)[:, None]
    dq_in *= from_start
    dk_in *= from_start
    tl.store(dbeta_ptr + part * all_heads * chunks * CHUNK + first_row + token, -tl.sum(dk_in * k, axis=1))
    dk_in *= beta
    dk_out *= to_end
    dwhole *= load_whole(sums_ptr, starts_ptr, column, WIDTH, PER_CHANNEL, CHUNK)
    before = k * dk_out
    dsums = q * dq_in - k * dk_in - before
    dq, dk = dq_in, dk_out - dk_in
    out = chunk * CHUNK * all_heads + head
    if PER_CHANNEL:
        dq, dk, dsums = _of_pairs_of_channels(
            q, k, dq, dk, dsums, dp_ptr, da_ptr, sums_ptr, starts_ptr, sums, starts, column, WIDTH, CHUNK
        )  # fmt: skip
        dg = tl.cumsum(dsums, axis=0, reverse=True) + (tl.sum(before, axis=0) + dwhole)[None, :]
        store_tile(dg_ptr + out * WIDTH, dg, token, all_heads * WIDTH, left, column, WIDTH)
    else:
        dq, dk = _of_pairs_of_heads(q, k, dq, dk, dp_ptr, da_ptr, CHUNK)
        dg = _sums_from_here(tl.sum(dsums, axis=1), CHUNK) + _total(tl.sum(before, axis=0) + dwhole)
        tl.store(dg_ptr + part * all_heads * chunks * CHUNK + first_row + token, dg)
    store_tile(dq_ptr + out * WIDTH, dq, token, all_heads * WIDTH, left, column, WIDTH)
    store_tile(dk_ptr + out * WIDTH, dk, token, all_heads * WIDTH, left, column, WIDTH)
