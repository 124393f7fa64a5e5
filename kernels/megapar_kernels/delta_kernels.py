"""The forward Triton kernels of the gated delta rule (`delta_rule` has its formulas, `delta_fused` launches them).

A chunk has C = CHUNK tokens. `sums` are fp32 sums of decays up to a token of a chunk, [heads, c C, w]. The first token
of a document is counted (`starts`, int32 [heads, c C]) and not added: where counts of two tokens differ, the decay
between them is exactly 0, and the decays beside a start keep their digits. An exponent's error is 6e-8 of
the sum: if all g of a chunk sum to -1,000, the decay between two of its tokens is wrong by 6e-5 of itself.

With a decay for each channel (PER_CHANNEL) pairs are products by halves: a token of the second half of a block and one
of the first decay towards the middle of the block, each by a factor of at most 1 (`middle_factors`).

What has C rows for each chunk lies as [heads, c C, columns], a head being one of a sample. Products multiply numbers of
the dtype of queries and keys, with sums in fp32. None multiplies what was transposed in registers, which Triton 3.4 to
3.7.0 computes wrongly on Hopper: operands are read through transposed pointers.
"""

from megapar_kernels.dispatch import exp, tl, triton

LEAST = tl.constexpr(-128.0)
"""A decay g below which nothing is left in fp32. A token whose decays are all below begins a document."""


@triton.jit
def product(a, b, total):  # type: ignore[no-untyped-def]
    """total + a b with sums in fp32, never in TF32."""
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def load_tile(ptr, rows, stride, limit, columns, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows below `limit` and columns below WIDTH, as [rows, columns]; zeros beyond."""
    inside = (rows < limit)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(ptr + rows[:, None] * stride + columns[None, :], inside, other=0.0)


@triton.jit
def load_turned(ptr, rows, stride, limit, columns, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """What `load_tile` reads, as [columns, rows]."""
    inside = (columns < WIDTH)[:, None] & (rows < limit)[None, :]
    return tl.load(ptr + rows[None, :] * stride + columns[:, None], inside, other=0.0)


@triton.jit
def store_tile(ptr, x, rows, stride, limit, columns, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write what `load_tile` would read."""
    inside = (rows < limit)[:, None] & (columns < WIDTH)[None, :]
    tl.store(ptr + rows[:, None] * stride + columns[None, :], x.to(ptr.dtype.element_ty), inside)


@triton.jit
def load_sums(sums_ptr, rows, columns, WIDTH: tl.constexpr, PER_CHANNEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of decays at rows of a chunk, [rows, columns], or [rows, 1] for a head with one decay."""
    if PER_CHANNEL:
        inside = ((rows >= 0)[:, None]) & (columns < WIDTH)[None, :]
        return tl.load(sums_ptr + rows[:, None] * WIDTH + columns[None, :], inside, other=0.0)
    else:
        return tl.load(sums_ptr + rows)[:, None]


@triton.jit
def load_turned_sums(sums_ptr, rows, columns, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of decays of channels, [columns, rows]."""
    inside = (columns < WIDTH)[:, None] & (rows >= 0)[None, :]
    return tl.load(sums_ptr + rows[None, :] * WIDTH + columns[:, None], inside, other=0.0)


@triton.jit
def pair_decays(sums_ptr, starts_ptr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """exp(G_t - G_j) of a head with one decay for j <= t, else 0, [C, C]."""
    token = tl.arange(0, CHUNK)
    sums = tl.load(sums_ptr + token)
    starts = tl.load(starts_ptr + token)
    seen = (token[:, None] >= token[None, :]) & (starts[:, None] == starts[None, :])
    return tl.where(seen, exp(tl.where(seen, sums[:, None] - sums[None, :], 0.0)), 0.0)


@triton.jit
def middle_rows(level, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last token of the first half of each token's block of 2^(level + 1) tokens."""
    return ((tl.arange(0, CHUNK) >> (level + 1)) << (level + 1)) + (1 << level) - 1


@triton.jit
def halves_meet(level, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether t is in the second half and j in the first half of the same block of 2^(level + 1) tokens, [C, C]."""
    half = tl.arange(0, CHUNK) >> level
    # Of a block the second half has the odd number.
    return (half[:, None] == half[None, :] + 1) & ((half & 1) == 1)[:, None]


@triton.jit
def middle_factors(  # type: ignore[no-untyped-def]
    sums_ptr, starts_ptr, sums, starts, columns, level, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The decay between each token and the middle of its block of 2^(level + 1) tokens, [C, columns], at most 1."""
    rows = middle_rows(level, CHUNK)
    middle = load_sums(sums_ptr, rows, columns, WIDTH, True)
    same = starts == tl.load(starts_ptr + rows)
    return tl.where(same[:, None], exp(-tl.abs(sums - middle)), 0.0)


@triton.jit
def sums_kernel(  # type: ignore[no-untyped-def]
    g_ptr, sums_ptr, starts_ptr, heads, length, chunks, g_s, g_b, g_n,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum decays, and count starts of documents, up to each token of a chunk."""
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    token = tl.arange(0, CHUNK)
    column = tl.arange(0, COLUMNS)
    left = length - chunk * CHUNK
    g_ptr += chunk * CHUNK * g_s + head // heads * g_b + head % heads * g_n
    first_row = (head * chunks + chunk) * CHUNK
    most = tl.full([CHUNK], -float("inf"), tl.float32)
    for first in tl.static_range(0, WIDTH, COLUMNS):
        g = load_tile(g_ptr, token, g_s, left, first + column, WIDTH).to(tl.float32)
        most = tl.maximum(most, tl.max(tl.where((first + column < WIDTH)[None, :], g, -float("inf")), axis=1))
    begins = most <= LEAST
    starts = tl.sum(tl.where(token[:, None] >= token[None, :], begins[None, :].to(tl.int32), 0), axis=1)
    tl.store(starts_ptr + first_row + token, starts)
    for first in tl.static_range(0, WIDTH, COLUMNS):
        g = load_tile(g_ptr, token, g_s, left, first + column, WIDTH).to(tl.float32)
        sums = tl.cumsum(tl.where(begins[:, None], 0.0, tl.maximum(g, LEAST)), axis=0)
        store_tile(sums_ptr + first_row * WIDTH, sums, token, WIDTH, CHUNK, first + column, WIDTH)


@triton.jit
def _pairs_of_head(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, sums_ptr, starts_ptr, q_s, k_s, left,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A and P of a head with one decay; A has a diagonal."""
    token = tl.arange(0, CHUNK)
    a = tl.zeros([CHUNK, CHUNK], tl.float32)
    p = tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        turned = load_turned(k_ptr, token, k_s, left, column, WIDTH)
        a = product(load_tile(k_ptr, token, k_s, left, column, WIDTH), turned, a)
        p = product(load_tile(q_ptr, token, q_s, left, column, WIDTH), turned, p)
    decays = pair_decays(sums_ptr, starts_ptr, CHUNK)
    return a * decays, p * decays


@triton.jit
def _pairs_of_halves(  # type: ignore[no-untyped-def]
    q, k, turned_k, sums, turned_sums, starts, sums_ptr, starts_ptr, column, level, kind: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The pairs of both halves of blocks of 2^(level + 1) tokens in A and P, from some channels."""
    rows = middle_rows(level, CHUNK)
    factors = middle_factors(sums_ptr, starts_ptr, sums, starts, column, level, WIDTH, CHUNK)
    middle = load_turned_sums(sums_ptr, rows, column, WIDTH)
    same = starts == tl.load(starts_ptr + rows)
    columns = (turned_k * tl.where(same[None, :], exp(-tl.abs(turned_sums - middle)), 0.0)).to(kind)
    meet = halves_meet(level, CHUNK)
    zeros = tl.zeros([CHUNK, CHUNK], tl.float32)
    a = tl.where(meet, product((k * factors).to(kind), columns, zeros), 0.0)
    p = tl.where(meet, product((q * factors).to(kind), columns, zeros), 0.0)
    return a, p


@triton.jit
def _pairs_of_channels(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, sums_ptr, starts_ptr, q_s, k_s, left,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A without its diagonal, and P, of a head with a decay for each channel."""
    kind = k_ptr.dtype.element_ty
    token = tl.arange(0, CHUNK)
    starts = tl.load(starts_ptr + token)
    a = tl.zeros([CHUNK, CHUNK], tl.float32)
    p = tl.zeros([CHUNK, CHUNK], tl.float32)
    diagonal = tl.zeros([CHUNK], tl.float32)
    for first in range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        q = load_tile(q_ptr, token, q_s, left, column, WIDTH).to(tl.float32)
        k = load_tile(k_ptr, token, k_s, left, column, WIDTH).to(tl.float32)
        turned = load_turned(k_ptr, token, k_s, left, column, WIDTH).to(tl.float32)
        sums = load_sums(sums_ptr, token, column, WIDTH, True)
        turned_sums = load_turned_sums(sums_ptr, token, column, WIDTH)
        diagonal += tl.sum(q * k, axis=1)
        for level in range(0, 6):  # not unrolled: the levels' tiles would not fit in registers
            of_k, of_q = _pairs_of_halves(
                q, k, turned, sums, turned_sums, starts, sums_ptr, starts_ptr, column, level, kind, WIDTH, CHUNK
            )
            a += of_k
            p += of_q
    return a, p + tl.where(token[:, None] == token[None, :], diagonal[:, None], 0.0)


@triton.jit
def pairs_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, sums_ptr, starts_ptr, a_ptr, p_ptr, heads, length, chunks, q_s, q_b, q_n, k_s, k_b, k_n,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PER_CHANNEL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A in fp32 and P of a chunk, each [C, C]."""
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    left = length - chunk * CHUNK
    q_ptr += chunk * CHUNK * q_s + head // heads * q_b + head % heads * q_n
    k_ptr += chunk * CHUNK * k_s + head // heads * k_b + head % heads * k_n
    first_row = (head * chunks + chunk) * CHUNK
    starts_ptr += first_row
    token = tl.arange(0, CHUNK)
    if PER_CHANNEL:
        a, p = _pairs_of_channels(
            q_ptr, k_ptr, sums_ptr + first_row * WIDTH, starts_ptr, q_s, k_s, left, WIDTH, COLUMNS, CHUNK
        )
    else:
        a, p = _pairs_of_head(
            q_ptr, k_ptr, sums_ptr + first_row, starts_ptr, q_s, k_s, left, WIDTH, COLUMNS, CHUNK
        )  # fmt: skip
    a = tl.where(token[:, None] > token[None, :], a, 0.0)
    store_tile(a_ptr + first_row * CHUNK, a, token, CHUNK, CHUNK, token, CHUNK)
    store_tile(p_ptr + first_row * CHUNK, p, token, CHUNK, CHUNK, token, CHUNK)


@triton.jit
def _lower(a_ptr, beta, row: tl.constexpr, column: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The block [16, 16] of Diag(beta) A in a row and a column of blocks. `beta` is that of the row."""
    token = tl.arange(0, 16)
    return tl.load(a_ptr + (16 * row + token)[:, None] * CHUNK + 16 * column + token[None, :]) * beta[:, None]


@triton.jit
def _inverses_of_blocks(a_ptr, beta_ptr, beta_s, left, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The inverses of the four blocks [16, 16] on the diagonal of I + Diag(beta) A, row by row: [4, 16, 16]."""
    block = tl.arange(0, 4)[:, None, None]
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    token = 16 * block + row
    beta = tl.load(beta_ptr + token * beta_s, token < left, other=0.0).to(tl.float32)
    lower = tl.load(a_ptr + token * CHUNK + 16 * block + column) * beta
    inverse = tl.where((row == column) & (block >= 0), 1.0, 0.0)
    for number in range(1, 16):
        weights = tl.sum(tl.where(row == number, lower, 0.0), axis=1)
        found = -tl.sum(weights[:, :, None] * inverse, axis=1)
        inverse += tl.where(row == number, found[:, None, :], 0.0)
    return inverse


@triton.jit
def _block_of(inverses, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """One of the blocks [4, 16, 16]."""
    return tl.sum(tl.where(tl.arange(0, 4)[:, None, None] == block, inverses, 0.0), axis=0)


@triton.jit
def _below(inverse, total):  # type: ignore[no-untyped-def]
    """A block of the inverse below the diagonal: -inverse total."""
    return -product(inverse, total, tl.zeros([16, 16], tl.float32))


@triton.jit
def inverse_kernel(  # type: ignore[no-untyped-def]
    a_ptr, beta_ptr, inverse_ptr, heads, length, chunks, beta_s, beta_b, beta_n, CHUNK: tl.constexpr,
):  # fmt: skip
    """T = (I + Diag(beta) A)^-1 of a chunk of four blocks of 16 tokens, by forward substitution in fp32."""
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    first_row = (head * chunks + chunk) * CHUNK
    a_ptr += first_row * CHUNK
    inverse_ptr += first_row * CHUNK
    beta_ptr += chunk * CHUNK * beta_s + head // heads * beta_b + head % heads * beta_n
    token = tl.arange(0, 16)
    left = length - chunk * CHUNK
    beta1 = tl.load(beta_ptr + (token + 16) * beta_s, token + 16 < left, other=0.0).to(tl.float32)
    beta2 = tl.load(beta_ptr + (token + 32) * beta_s, token + 32 < left, other=0.0).to(tl.float32)
    beta3 = tl.load(beta_ptr + (token + 48) * beta_s, token + 48 < left, other=0.0).to(tl.float32)
    inverses = _inverses_of_blocks(a_ptr, beta_ptr, beta_s, left, CHUNK)
    t00 = _block_of(inverses, 0)
    t11 = _block_of(inverses, 1)
    t22 = _block_of(inverses, 2)
    t33 = _block_of(inverses, 3)
    zeros = tl.zeros([16, 16], tl.float32)
    l10 = _lower(a_ptr, beta1, 1, 0, CHUNK)
    l21 = _lower(a_ptr, beta2, 2, 1, CHUNK)
    l32 = _lower(a_ptr, beta3, 3, 2, CHUNK)
    t10 = _below(t11, product(l10, t00, zeros))
    t21 = _below(t22, product(l21, t11, zeros))
    t32 = _below(t33, product(l32, t22, zeros))
    l20 = _lower(a_ptr, beta2, 2, 0, CHUNK)
    l31 = _lower(a_ptr, beta3, 3, 1, CHUNK)
    t20 = _below(t22, product(l20, t00, product(l21, t10, zeros)))
    t31 = _below(t33, product(l31, t11, product(l32, t21, zeros)))
    l30 = _lower(a_ptr, beta3, 3, 0, CHUNK)
    t30 = _below(t33, product(l30, t00, product(l31, t10, product(l32, t20, zeros))))
    for row in tl.static_range(0, 4):
        for column in tl.static_range(row + 1, 4):
            store_tile(inverse_ptr + 16 * row * CHUNK + 16 * column, zeros, token, CHUNK, CHUNK, token, CHUNK)
    store_tile(inverse_ptr, t00, token, CHUNK, CHUNK, token, CHUNK)
    store_tile(inverse_ptr + 16 * CHUNK, t10, token, CHUNK, CHUNK, token, CHUNK)
    store_tile(inverse_ptr + 16 * CHUNK + 16, t11, token, CHUNK, CHUNK, token, CHUNK)
    store_tile(inverse_ptr + 32 * CHUNK, t20, token, CHUNK, CHUNK, token, CHUNK)
    store_tile(inverse_ptr + 32 * CHUNK + 16, t21, token, CHUNK, CHUNK, token, CHUNK)
    store_tile(inverse_ptr + 32 * CHUNK + 32, t22, token, CHUNK, CHUNK, token, CHUNK)
    store_tile(inverse_ptr + 48 * CHUNK, t30, token, CHUNK, CHUNK, token, CHUNK)
    store_tile(inverse_ptr + 48 * CHUNK + 16, t31, token, CHUNK, CHUNK, token, CHUNK)
    store_tile(inverse_ptr + 48 * CHUNK + 32, t32, token, CHUNK, CHUNK, token, CHUNK)
    store_tile(inverse_ptr + 48 * CHUNK + 48, t33, token, CHUNK, CHUNK, token, CHUNK)


@triton.jit
def solved_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, beta_ptr, sums_ptr, starts_ptr, inverse_ptr, w_ptr, u_ptr, q_in_ptr, k_out_ptr,
    heads, length, chunks, q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n, beta_s, beta_b, beta_n,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, V_WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr,
    PER_CHANNEL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """W = T Diag(beta) exp(G) K and T Diag(beta) V of a chunk; beside these exp(G) Q and exp(G_C - G) K."""
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    left = length - chunk * CHUNK
    sample = head // heads
    q_ptr += chunk * CHUNK * q_s + sample * q_b + head % heads * q_n
    k_ptr += chunk * CHUNK * k_s + sample * k_b + head % heads * k_n
    v_ptr += chunk * CHUNK * v_s + sample * v_b + head % heads * v_n
    beta_ptr += chunk * CHUNK * beta_s + sample * beta_b + head % heads * beta_n
    first_row = (head * chunks + chunk) * CHUNK
    sums_ptr += first_row * (WIDTH if PER_CHANNEL else 1)
    token = tl.arange(0, CHUNK)
    kind = w_ptr.dtype.element_ty
    beta = tl.load(beta_ptr + token * beta_s, token < left, other=0.0).to(tl.float32)[:, None]
    starts = tl.load(starts_ptr + first_row + token)
    last_start = tl.load(starts_ptr + first_row + CHUNK - 1)
    inverse = load_tile(inverse_ptr + first_row * CHUNK, token, CHUNK, CHUNK, token, CHUNK)
    for first in range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        q = load_tile(q_ptr, token, q_s, left, column, WIDTH).to(tl.float32)
        k = load_tile(k_ptr, token, k_s, left, column, WIDTH).to(tl.float32)
        sums = load_sums(sums_ptr, token, column, WIDTH, PER_CHANNEL)
        last = load_sums(sums_ptr, 0 * token + CHUNK - 1, column, WIDTH, PER_CHANNEL)
        from_start = tl.where((starts == 0)[:, None], exp(sums), 0.0)
        to_end = tl.where((starts == last_start)[:, None], exp(last - sums), 0.0)
        w = product(inverse, (k * from_start * beta).to(kind), tl.zeros([CHUNK, COLUMNS], tl.float32))
        store_tile(w_ptr + first_row * WIDTH, w, token, WIDTH, CHUNK, column, WIDTH)
        store_tile(q_in_ptr + first_row * WIDTH, q * from_start, token, WIDTH, CHUNK, column, WIDTH)
        store_tile(k_out_ptr + first_row * WIDTH, k * to_end, token, WIDTH, CHUNK, column, WIDTH)
    for first in range(0, V_WIDTH, V_COLUMNS):
        column = first + tl.arange(0, V_COLUMNS)
        v = load_tile(v_ptr, token, v_s, left, column, V_WIDTH).to(tl.float32)
        u = product(inverse, (v * beta).to(kind), tl.zeros([CHUNK, V_COLUMNS], tl.float32))
        store_tile(u_ptr + first_row * V_WIDTH, u, token, V_WIDTH, CHUNK, column, V_WIDTH)


@triton.jit
def load_whole(sums_ptr, starts_ptr, column, WIDTH: tl.constexpr, PER_CHANNEL: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """exp(G_C), the decay over a whole chunk: [columns] or a number, from pointers at the chunk's first token."""
    keeps = tl.load(starts_ptr + CHUNK - 1) == 0
    if PER_CHANNEL:
        sums = tl.load(sums_ptr + (CHUNK - 1) * WIDTH + column, column < WIDTH, other=0.0)
        return tl.where(keeps, exp(sums), 0.0)
    else:
        return tl.where(keeps, exp(tl.load(sums_ptr + CHUNK - 1)), 0.0)


@triton.jit
def states_kernel(  # type: ignore[no-untyped-def]
    w_ptr, k_out_ptr, sums_ptr, starts_ptr, state_ptr, u_ptr, states_ptr, last_ptr, chunks,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, V_WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr,
    PER_CHANNEL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Some columns of the states in front of all chunks of a head, of U in place of T Diag(beta) V, and the last state.

    States are [d, e]. A state is fp32 in registers, and ROWS are at least d.
    """
    head = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0).to(tl.int64).to(tl.int32) * V_COLUMNS + tl.arange(0, V_COLUMNS)
    row = tl.arange(0, ROWS)
    token = tl.arange(0, CHUNK)
    kind = w_ptr.dtype.element_ty
    state = tl.zeros([ROWS, V_COLUMNS], tl.float32)
    if state_ptr is not None:
        state += load_tile(state_ptr + head * WIDTH * V_WIDTH, row, V_WIDTH, WIDTH, column, V_WIDTH)
    w_ptr += head * chunks * CHUNK * WIDTH
    k_out_ptr += head * chunks * CHUNK * WIDTH
    u_ptr += head * chunks * CHUNK * V_WIDTH
    sums_ptr += head * chunks * CHUNK * (WIDTH if PER_CHANNEL else 1)
    starts_ptr += head * chunks * CHUNK
    states_ptr += head * chunks * WIDTH * V_WIDTH
    for _ in range(chunks):
        store_tile(states_ptr, state, row, V_WIDTH, WIDTH, column, V_WIDTH)
        w = load_tile(w_ptr, token, WIDTH, CHUNK, row, WIDTH)
        k_out = load_turned(k_out_ptr, token, WIDTH, CHUNK, row, WIDTH)
        u = load_tile(u_ptr, token, V_WIDTH, CHUNK, column, V_WIDTH).to(tl.float32)
        u -= product(w, state.to(kind), tl.zeros([CHUNK, V_COLUMNS], tl.float32))
        store_tile(u_ptr, u, token, V_WIDTH, CHUNK, column, V_WIDTH)
        whole = load_whole(sums_ptr, starts_ptr, row, WIDTH, PER_CHANNEL, CHUNK)
        state *= whole[:, None] if PER_CHANNEL else whole
        state = product(k_out, u.to(kind), state)
        w_ptr += CHUNK * WIDTH
        k_out_ptr += CHUNK * WIDTH
        u_ptr += CHUNK * V_WIDTH
        sums_ptr += CHUNK * (WIDTH if PER_CHANNEL else 1)
        starts_ptr += CHUNK
        states_ptr += WIDTH * V_WIDTH
    store_tile(last_ptr + head * WIDTH * V_WIDTH, state, row, V_WIDTH, WIDTH, column, V_WIDTH)


@triton.jit
def outputs_kernel(  # type: ignore[no-untyped-def]
    q_in_ptr, p_ptr, u_ptr, states_ptr, o_ptr, heads, length, chunks, o_s, o_b, o_n,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, V_WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Some columns of O = (exp(G) Q) S + P U of a chunk."""
    tile = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(V_WIDTH, V_COLUMNS)
    chunk = tile // tiles
    v_column = (tile % tiles).to(tl.int32) * V_COLUMNS + tl.arange(0, V_COLUMNS)
    token = tl.arange(0, CHUNK)
    first_row = (head * chunks + chunk) * CHUNK
    states_ptr += (head * chunks + chunk) * WIDTH * V_WIDTH
    o = tl.zeros([CHUNK, V_COLUMNS], tl.float32)
    for first in range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        q_in = load_tile(q_in_ptr + first_row * WIDTH, token, WIDTH, CHUNK, column, WIDTH)
        state = load_tile(states_ptr, column, V_WIDTH, WIDTH, v_column, V_WIDTH)
        o = product(q_in, state, o)
    p = load_tile(p_ptr + first_row * CHUNK, token, CHUNK, CHUNK, token, CHUNK)
    u = load_tile(u_ptr + first_row * V_WIDTH, token, V_WIDTH, CHUNK, v_column, V_WIDTH)
    o = product(p, u, o)
    o_ptr += chunk * CHUNK * o_s + head // heads * o_b + head % heads * o_n
    store_tile(o_ptr, o, token, o_s, length - chunk * CHUNK, v_column, V_WIDTH)
