"""Attention by Triton kernels, for what torch's fused operations do not have: windows, caps of scores, sinks.

Scores exist for a tile of queries and keys at a time (FlashAttention 2, Dao, arXiv 2307.08691). Tiles that nothing
attends are not computed. Two 16-bit factors are multiplied with sums in fp32. Forward reads q, k and v and keeps the
result and the logsumexp of each row. Backward has one kernel for the gradient of queries and one for keys and values.
Nobody adds to a number of another program, so gradients are the same each time.

Shapes: b samples, n query heads, h key/value heads, q queries, k keys, d width of a query and a key, e width of a
value.

A query attends a run of keys: up to its own position, from the start of its document or its window on. Query i has the
position i + k - q among the keys, so the last query attends the last key.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megapar_kernels.dispatch import LOG2_E, Implementation, interpreting, next_power_of_2, tl, triton

LN_2 = tl.constexpr(0.6931471805599453)
WIDEST = 256  # head
CAPABILITIES = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Of the GPUs that give a program the shared memory of these tiles, 163 KB."""


@dataclass(frozen=True)
class Attended:
    """Which keys a query attends. `window` keys at most; 0: all.

    With documents, `starts` [b, q] is the first key of a query's document, and `stops` [b, k] the first query behind a
    key's document. Both are int32, ascending and contiguous.
    """

    causal: bool = True
    window: int = 0
    starts: Tensor | None = None
    stops: Tensor | None = None


def of_documents(documents_bs: Tensor) -> tuple[Tensor, Tensor]:
    """The `starts` and `stops` of `Attended`, [b, s], from the index of each position's document."""
    documents_bs = documents_bs.contiguous()
    starts = torch.searchsorted(documents_bs, documents_bs, out_int32=True)
    stops = torch.searchsorted(documents_bs, documents_bs, right=True, out_int32=True)
    return starts, stops


def serves(impl: Implementation, q: Tensor, v: Tensor) -> bool:
    """Whether the kernels compute attention of `q` and `v`, if `impl` asks for them.

    On a GPU for 16-bit numbers and heads of 256 at most. On a CPU the kernels are interpreted.
    """
    if impl != "triton" or max(q.shape[-1], v.shape[-1]) > WIDEST or q.dtype == torch.float64:
        return False
    if not q.is_cuda:
        return q.device.type == "cpu" and interpreting()
    return q.dtype.itemsize == 2


@triton.jit
def _tile(ptr, rows, stride, limit, FIRST: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """Rows of a head, [rows, COLUMNS], from column FIRST on. Zeros stand for rows from `limit` on, and past WIDTH."""
    column = FIRST + tl.arange(0, COLUMNS)[None, :]
    inside = rows[:, None] < limit
    if FIRST + COLUMNS > WIDTH:
        inside = inside & (column < WIDTH)
    return tl.load(ptr + rows[:, None] * stride + column, inside, other=0.0)


@triton.jit
def _parts(ptr, rows, stride, limit, WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """Rows of a head in two parts, [rows, MAIN] and [rows, REST]; the first twice if REST is 0."""
    main = _tile(ptr, rows, stride, limit, 0, WIDTH, MAIN)
    rest = main
    if REST > 0:
        rest = _tile(ptr, rows, stride, limit, MAIN, WIDTH, REST)
    return main, rest


@triton.jit
def _products(a, a_rest, b, b_rest, REST: tl.constexpr):  # type: ignore[no-untyped-def]
    """a b^T of rows in two parts."""
    products = tl.dot(a, tl.trans(b), input_precision="ieee")
    if REST > 0:
        products = tl.dot(a_rest, tl.trans(b_rest), products, input_precision="ieee")
    return products


@triton.jit
def _write(ptr, x, rows, stride, limit, FIRST: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """Write what `_tile` would read."""
    column = FIRST + tl.arange(0, COLUMNS)[None, :]
    inside = (rows[:, None] < limit) & (column < WIDTH)
    tl.store(ptr + rows[:, None] * stride + column, x.to(ptr.dtype.element_ty), inside)


@triton.jit
def _scores(products, scale, cap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """log2(e) times the scores, so that exp2 gives their exponentials; and their slopes by scale * products."""
    scores = products * scale
    slope = 1.0
    if CAPPED:
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2_E / cap)))
        scores = cap * tanh
        slope = 1.0 - tanh * tanh
    return scores * LOG2_E, slope


@triton.jit
def _seen(query, key, first, queries, keys, window, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether a query attends a key. The arguments broadcast. `first` is the first key of the query's document."""
    position = query + (keys - queries)
    seen = (query < queries) & (key < keys) & (key >= first)
    if CAUSAL:
        seen = seen & (key <= position)
        if window > 0:
            seen = seen & (key > position - window)
    return seen


@triton.jit
def _firsts(starts_ptr, sample, query, queries):  # type: ignore[no-untyped-def]
    """The first key of each query's document: 0 without documents."""
    if starts_ptr is None:
        return tl.zeros_like(query)
    else:  # Triton 3.6 would compile what follows a return, too
        return tl.load(starts_ptr + sample * queries + query, query < queries, other=0)


@triton.jit
def _keys_of(  # type: ignore[no-untyped-def]
    block, starts_ptr, sample, queries, keys, window,
    CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The keys [first, stop) that some query of a block attends; `first` is a multiple of KEYS."""
    first = 0
    stop = keys
    position = block * QUERIES + keys - queries  # of the first query
    if starts_ptr is not None:
        first = tl.load(starts_ptr + sample * queries + block * QUERIES)
    if CAUSAL:
        stop = tl.minimum(keys, position + QUERIES)
        if window > 0:
            first = tl.maximum(first, position - window + 1)
    return first // KEYS * KEYS, stop


@triton.jit
def _queries_of(  # type: ignore[no-untyped-def]
    block, stops_ptr, sample, queries, keys, window,
    CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The queries [start, stop) that attend some key of a block; `start` is a multiple of QUERIES."""
    start = 0
    stop = queries
    earlier = keys - queries
    last_key = tl.minimum(block * KEYS + KEYS, keys) - 1
    if CAUSAL:
        start = tl.maximum(block * KEYS - earlier, 0)
        if window > 0:
            stop = tl.minimum(stop, last_key - earlier + window)
    if stops_ptr is not None:
        stop = tl.minimum(stop, tl.load(stops_ptr + sample * keys + last_key))
    return start // QUERIES * QUERIES, stop


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, sinks_ptr, starts_ptr, out_ptr, lse_ptr, heads, run, queries, keys, window, scale, cap,
    q_stride_b, q_stride_n, q_stride_s, k_stride_b, k_stride_n, k_stride_s, v_stride_b, v_stride_n, v_stride_s,
    out_stride_b, out_stride_n, out_stride_s,
    WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, V_WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr, CAPPED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The result and the lse of a block of queries of a head. The program is (block from the last on, head, sample)."""
    block = (tl.num_programs(0) - 1 - tl.program_id(0).to(tl.int64)).to(tl.int32)  # later queries have more keys
    head = tl.program_id(1).to(tl.int64)
    sample = tl.program_id(2).to(tl.int64)
    first_row = block.to(tl.int64) * QUERIES
    q_ptr += sample * q_stride_b + head * q_stride_n + first_row * q_stride_s
    k_ptr += sample * k_stride_b + (head // run) * k_stride_n
    v_ptr += sample * v_stride_b + (head // run) * v_stride_n
    out_ptr += sample * out_stride_b + head * out_stride_n + first_row * out_stride_s
    row = tl.arange(0, QUERIES)
    query = block * QUERIES + row
    rows_left = queries - block * QUERIES
    first = _firsts(starts_ptr, sample, query, queries)
    start, stop = _keys_of(block, starts_ptr, sample, queries, keys, window, CAUSAL, QUERIES, KEYS)
    q, q_rest = _parts(q_ptr, row, q_stride_s, rows_left, WIDTH, MAIN, REST)
    most = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    out = tl.zeros((QUERIES, V_COLUMNS), tl.float32)
    column = tl.arange(0, KEYS)
    for first_key in range(start, stop, KEYS):
        keys_left = keys - first_key
        k_here = k_ptr + tl.cast(first_key, tl.int64) * k_stride_s
        k, k_rest = _parts(k_here, column, k_stride_s, keys_left, WIDTH, MAIN, REST)
        products = _products(q, q_rest, k, k_rest, REST)
        scores, _ = _scores(products, scale, cap, CAPPED)
        key = first_key + column
        seen = _seen(query[:, None], key[None, :], first[:, None], queries, keys, window, CAUSAL)
        scores = tl.where(seen, scores, float("-inf"))
        most_now = tl.maximum(most, tl.max(scores, 1))
        # A row that has seen nothing has no greatest score.
        shift = tl.where(most_now == float("-inf"), 0.0, most_now)
        probabilities = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(most - shift)
        total = total * decay + tl.sum(probabilities, 1)
        v = _tile(
            v_ptr + tl.cast(first_key, tl.int64) * v_stride_s, column, v_stride_s, keys_left, 0, V_WIDTH, V_COLUMNS
        )
        out = tl.dot(probabilities.to(v.dtype), v, out * decay[:, None], input_precision="ieee")
        most = most_now
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        most_now = tl.maximum(most, sink)
        decay = tl.exp2(most - most_now)
        total = total * decay + tl.exp2(sink - most_now)
        out = out * decay[:, None]
        most = most_now
    attends = total > 0.0
    out = out / tl.where(attends, total, 1.0)[:, None]
    lse = tl.where(attends, (most + tl.log2(tl.where(attends, total, 1.0))) * LN_2, float("-inf"))
    _write(out_ptr, out, row, out_stride_s, rows_left, 0, V_WIDTH, V_COLUMNS)
    tl.store(lse_ptr + (sample * heads + head) * queries + query, lse, query < queries)


@triton.jit
def _queries_kernel(  # type: ignore[no-untyped-def]
    grad_out_ptr, q_ptr, k_ptr, v_ptr, starts_ptr, out_ptr, lse_ptr, delta_ptr, grad_q_ptr,
    heads, run, queries, keys, window, scale, cap,
    grad_out_stride_b, grad_out_stride_n, grad_out_stride_s, q_stride_b, q_stride_n, q_stride_s,
    k_stride_b, k_stride_n, k_stride_s, v_stride_b, v_stride_n, v_stride_s,
    out_stride_b, out_stride_n, out_stride_s, grad_q_stride_b, grad_q_stride_n, grad_q_stride_s,
    WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, V_WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr, CAPPED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries of a head, and delta = rowsum(grad_out * out) for the other kernel."""
    block = (tl.num_programs(0) - 1 - tl.program_id(0).to(tl.int64)).to(tl.int32)
    head = tl.program_id(1).to(tl.int64)
    sample = tl.program_id(2).to(tl.int64)
    first_row = block.to(tl.int64) * QUERIES
    grad_out_ptr += sample * grad_out_stride_b + head * grad_out_stride_n + first_row * grad_out_stride_s
    q_ptr += sample * q_stride_b + head * q_stride_n + first_row * q_stride_s
    k_ptr += sample * k_stride_b + (head // run) * k_stride_n
    v_ptr += sample * v_stride_b + (head // run) * v_stride_n
    out_ptr += sample * out_stride_b + head * out_stride_n + first_row * out_stride_s
    grad_q_ptr += sample * grad_q_stride_b + head * grad_q_stride_n + first_row * grad_q_stride_s
    row = tl.arange(0, QUERIES)
    query = block * QUERIES + row
    rows_left = queries - block * QUERIES
    first = _firsts(starts_ptr, sample, query, queries)
    start, stop = _keys_of(block, starts_ptr, sample, queries, keys, window, CAUSAL, QUERIES, KEYS)
    grad_out = _tile(grad_out_ptr, row, grad_out_stride_s, rows_left, 0, V_WIDTH, V_COLUMNS)
    out = _tile(out_ptr, row, out_stride_s, rows_left, 0, V_WIDTH, V_COLUMNS)
    delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
    row_of_all = (sample * heads + head) * queries + query
    tl.store(delta_ptr + row_of_all, delta, query < queries)
    lse = tl.load(lse_ptr + row_of_all, query < queries, other=0.0) * LOG2_E
    q, q_rest = _parts(q_ptr, row, q_stride_s, rows_left, WIDTH, MAIN, REST)
    grad = tl.zeros((QUERIES, MAIN), tl.float32)
    if REST > 0:
        grad_rest = tl.zeros((QUERIES, REST), tl.float32)
    column = tl.arange(0, KEYS)
    for first_key in range(start, stop, KEYS):
        keys_left = keys - first_key
        k_here = k_ptr + tl.cast(first_key, tl.int64) * k_stride_s
        k, k_rest = _parts(k_here, column, k_stride_s, keys_left, WIDTH, MAIN, REST)
        products = _products(q, q_rest, k, k_rest, REST)
        scores, slope = _scores(products, scale, cap, CAPPED)
        key = first_key + column
        seen = _seen(query[:, None], key[None, :], first[:, None], queries, keys, window, CAUSAL)
        probabilities = tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0)
        v = _tile(
            v_ptr + tl.cast(first_key, tl.int64) * v_stride_s, column, v_stride_s, keys_left, 0, V_WIDTH, V_COLUMNS
        )
        grad_probabilities = tl.dot(grad_out, tl.trans(v), input_precision="ieee")
        grad_scores = (probabilities * (grad_probabilities - delta[:, None]) * slope).to(k.dtype)
        grad = tl.dot(grad_scores, k, grad, input_precision="ieee")
        if REST > 0:
            grad_rest = tl.dot(grad_scores, k_rest, grad_rest, input_precision="ieee")
    _write(grad_q_ptr, grad * scale, row, grad_q_stride_s, rows_left, 0, WIDTH, MAIN)
    if REST > 0:
        _write(grad_q_ptr, grad_rest * scale, row, grad_q_stride_s, rows_left, MAIN, WIDTH, REST)


@triton.jit
def _keys_values_kernel(  # type: ignore[no-untyped-def]
    grad_out_ptr, q_ptr, k_ptr, v_ptr, starts_ptr, stops_ptr, lse_ptr, delta_ptr, grad_k_ptr, grad_v_ptr,
    heads, run, queries, keys, window, scale, cap,
    grad_out_stride_b, grad_out_stride_n, grad_out_stride_s, q_stride_b, q_stride_n, q_stride_s,
    k_stride_b, k_stride_n, k_stride_s, v_stride_b, v_stride_n, v_stride_s,
    grad_k_stride_b, grad_k_stride_n, grad_k_stride_s, grad_v_stride_b, grad_v_stride_n, grad_v_stride_s,
    WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, V_WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr, CAPPED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and values of a head, from all query heads that read it, one after another."""
    block = tl.program_id(0).to(tl.int64).to(tl.int32)
    kv_head = tl.program_id(1).to(tl.int64)
    sample = tl.program_id(2).to(tl.int64)
    first_row = block.to(tl.int64) * KEYS
    k_ptr += sample * k_stride_b + kv_head * k_stride_n + first_row * k_stride_s
    v_ptr += sample * v_stride_b + kv_head * v_stride_n + first_row * v_stride_s
    grad_k_ptr += sample * grad_k_stride_b + kv_head * grad_k_stride_n + first_row * grad_k_stride_s
    grad_v_ptr += sample * grad_v_stride_b + kv_head * grad_v_stride_n + first_row * grad_v_stride_s
    row = tl.arange(0, KEYS)
    key = block * KEYS + row
    keys_left = keys - block * KEYS
    start, stop = _queries_of(block, stops_ptr, sample, queries, keys, window, CAUSAL, QUERIES, KEYS)
    k, k_rest = _parts(k_ptr, row, k_stride_s, keys_left, WIDTH, MAIN, REST)
    v = _tile(v_ptr, row, v_stride_s, keys_left, 0, V_WIDTH, V_COLUMNS)
    grad_k = tl.zeros((KEYS, MAIN), tl.float32)
    grad_v = tl.zeros((KEYS, V_COLUMNS), tl.float32)
    if REST > 0:
        grad_k_rest = tl.zeros((KEYS, REST), tl.float32)
    column = tl.arange(0, QUERIES)
    for head in range(kv_head * run, kv_head * run + run):
        q_head = q_ptr + sample * q_stride_b + head * q_stride_n
        grad_out_head = grad_out_ptr + sample * grad_out_stride_b + head * grad_out_stride_n
        rows_of_head = (sample * heads + head) * queries
        for first_query in range(start, stop, QUERIES):
            rows_left = queries - first_query
            query = first_query + column
            q_here = q_head + tl.cast(first_query, tl.int64) * q_stride_s
            q, q_rest = _parts(q_here, column, q_stride_s, rows_left, WIDTH, MAIN, REST)
            products = _products(k, k_rest, q, q_rest, REST)
            scores, slope = _scores(products, scale, cap, CAPPED)
            first = _firsts(starts_ptr, sample, query, queries)
            seen = _seen(query[None, :], key[:, None], first[None, :], queries, keys, window, CAUSAL)
            lse = tl.load(lse_ptr + rows_of_head + query, query < queries, other=0.0) * LOG2_E
            probabilities = tl.where(seen, tl.exp2(scores - lse[None, :]), 0.0)
            grad_out_here = grad_out_head + tl.cast(first_query, tl.int64) * grad_out_stride_s
            grad_out = _tile(grad_out_here, column, grad_out_stride_s, rows_left, 0, V_WIDTH, V_COLUMNS)
            grad_v = tl.dot(probabilities.to(grad_out.dtype), grad_out, grad_v, input_precision="ieee")
            grad_probabilities = tl.dot(v, tl.trans(grad_out), input_precision="ieee")
            delta = tl.load(delta_ptr + rows_of_head + query, query < queries, other=0.0)
            grad_scores = (probabilities * (grad_probabilities - delta[None, :]) * slope).to(q.dtype)
            grad_k = tl.dot(grad_scores, q, grad_k, input_precision="ieee")
            if REST > 0:
                grad_k_rest = tl.dot(grad_scores, q_rest, grad_k_rest, input_precision="ieee")
    _write(grad_v_ptr, grad_v, row, grad_v_stride_s, keys_left, 0, V_WIDTH, V_COLUMNS)
    _write(grad_k_ptr, grad_k * scale, row, grad_k_stride_s, keys_left, 0, WIDTH, MAIN)
    if REST > 0:
        _write(grad_k_ptr, grad_k_rest * scale, row, grad_k_stride_s, keys_left, MAIN, WIDTH, REST)


@dataclass(frozen=True)
class Tiles:
    """The queries and keys of a program's tile, its warps, and how many tiles are loaded ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


def columns(width: int, v_width: int) -> tuple[int, int, int]:
    """The columns of a query in two parts, powers of two (the second may be 0), and those of a value.

    A width of 192 is 128 and 64. One power of two would be 256. Tensor cores take 16 columns and more.
    """
    main = max(16, 1 << (width.bit_length() - 1))
    rest = max(16, next_power_of_2(width - main)) if width > main else 0
    return main, rest, max(16, next_power_of_2(v_width))


# Chosen by what the compiler makes of them: nothing spills on sm_90 (tests/kernel_table.py).


def forward_config(width: int, v_width: int) -> Tiles:
    """The tiles of the forward. The result is held in registers."""
    if max(width, v_width) <= 64:
        return Tiles(128, 128, 8, 2)
    return Tiles(128, 64 if max(width, v_width) <= 128 else 32, 8, 2)


def queries_config(width: int, v_width: int) -> Tiles:
    """The tiles of the gradient of queries."""
    if max(width, v_width) <= 64:
        return Tiles(64, 64, 4, 2)
    if max(width, v_width) <= 128:
        return Tiles(128, 64, 8, 2)
    return Tiles(128, 32, 8, 1)


def keys_values_config(width: int, v_width: int) -> Tiles:
    """The tiles of the gradients of keys and values. Both are held in registers.

    For heads of 256 a tile has 32 keys. That is too few for the matrix products of Hopper, and those of Ampere run.
    """
    if max(width, v_width) <= 64:
        return Tiles(32, 128, 8, 2)
    if max(width, v_width) <= 128:
        return Tiles(32, 64, 8, 2)
    if width <= 192 and v_width <= 128:
        return Tiles(16, 64, 4, 1)
    return Tiles(32, 32, 8, 1)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _rows(x: Tensor) -> Tensor:
    """`x` with the numbers of a row beside each other, as the kernels read it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, attended: Attended, sinks_n: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(scores) v, [b, n, q, e] in q's dtype, and the lse of the scores, [b, n, q] in fp32.

    A score is scale * product, with a `cap` cap * tanh(scale * product / cap). `sinks_n` are further scores of a
    head without a value. A query that attends nothing has zeros and an lse of -inf. The result is
    [q, b, n, e] in memory.
    """
    q, k, v = map(_rows, (q, k, v))
    b, n, queries, width = q.shape
    v_width = v.shape[-1]
    out = q.new_empty(queries, b, n, v_width).permute(1, 2, 0, 3)
    lse = q.new_empty(b, n, queries, dtype=torch.float32)
    tiles = forward_config(width, v_width)
    if out.numel():
        _forward_kernel[triton.cdiv(queries, tiles.queries), n, b](
            *(q, k, v, sinks_n, attended.starts, out, lse, n, n // k.shape[1], queries, k.shape[2], attended.window),
            *(scale, cap or 1.0, *_strides(q, k, v, out), width, *columns(width, v_width)[:2], v_width),
            *(columns(width, v_width)[2], attended.causal, cap > 0.0, tiles.queries, tiles.keys),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    return out, lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    cap: float,
    attended: Attended,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v in their dtypes. `out` and `lse` may be those of several blocks, merged.

    With sinks `lse` has them among the scores. `block_attention.sink_gradient` gives their gradient.
    """
    grad_out, q, k, v, out = map(_rows, (grad_out, q, k, v, out))
    lse = lse.contiguous()
    b, n, queries, width = q.shape
    keys, v_width = v.shape[-2:]
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    main, rest, v_columns = columns(width, v_width)
    sizes = n, n // k.shape[1], queries, keys, attended.window, scale, cap or 1.0
    constants = width, main, rest, v_width, v_columns, attended.causal, cap > 0.0
    if queries and b:
        tiles = queries_config(width, v_width)
        _queries_kernel[triton.cdiv(queries, tiles.queries), n, b](
            *(grad_out, q, k, v, attended.starts, out, lse, delta, grad_q, *sizes),
            *(*_strides(grad_out, q, k, v, out, grad_q), *constants, tiles.queries, tiles.keys),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    if keys and b:
        tiles = keys_values_config(width, v_width)
        _keys_values_kernel[triton.cdiv(keys, tiles.keys), k.shape[1], b](
            *(grad_out, q, k, v, attended.starts, attended.stops, lse, delta, grad_k, grad_v, *sizes),
            *(*_strides(grad_out, q, k, v, grad_k, grad_v), *constants, tiles.queries, tiles.keys),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    return grad_q, grad_k, grad_v
