"""The Triton kernels of `tiled_attention`: one forward, and two backward.

Tiles at an edge of what a block of queries attends are masked (`_seen`), and whole ones are not. Shapes and names are
those of `tiled_attention`. WIDTH is d, in two parts of MAIN and REST columns; V_WIDTH is e, in V_COLUMNS. With dropout
`random_ptr` has the random keys of rows and `columns_ptr` the numbers of their columns (`dropout.RowDropout`). A tile
computes its own mask from them, forward and backward. With ALiBi `slopes_ptr` has the slopes of heads, `rows_at_ptr`
the positions of queries, and `keys_at_ptr` those of keys (`alibi.Alibi`).
"""

from megapar_kernels.dispatch import LOG2_E, tl, triton
from megapar_kernels.dropout import kept

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    ptr, rows, stride, limit,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Rows of a head, [rows, COLUMNS], from column FIRST on. Zeros stand for rows from `limit` on, and past WIDTH.

    With WHOLE all rows are before `limit`.
    """
    column = FIRST + tl.arange(0, COLUMNS)[None, :]
    pointers = ptr + rows[:, None] * stride + column
    if FIRST + COLUMNS > WIDTH:
        inside = column < WIDTH
        if not WHOLE:
            inside = inside & (rows[:, None] < limit)
        return tl.load(pointers, inside, other=0.0)
    elif WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, rows[:, None] < limit, other=0.0)


@triton.jit
def _parts(ptr, rows, stride, limit, WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """Rows of a head in two parts, [rows, MAIN] and [rows, REST]; the first twice if REST is 0."""
    main = _tile(ptr, rows, stride, limit, 0, WIDTH, MAIN, WHOLE)
    rest = main
    if REST > 0:
        rest = _tile(ptr, rows, stride, limit, MAIN, WIDTH, REST, WHOLE)
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
def _write_parts(ptr, main, rest, rows, stride, limit, WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """Write what `_parts` would read."""
    _write(ptr, main, rows, stride, limit, 0, WIDTH, MAIN)
    if REST > 0:
        _write(ptr, rest, rows, stride, limit, MAIN, WIDTH, REST)


@triton.jit
def _unit(scale, cap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """What `_scores` are multiplied by to be exponents of two.

    The product and the subtraction of the row's greatest score are one multiply-add. Its error grows with the score,
    as that of a score that is scaled first.
    """
    return (cap if CAPPED else scale) * LOG2_E


@triton.jit
def _scores(products, scale, cap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores in units of `scale`, or of `cap`, and their slopes by scale * products."""
    if CAPPED:
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(products * (scale * (2.0 * LOG2_E) / cap)))
        return tanh, 1.0 - tanh * tanh
    else:
        return products, 1.0


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
def _between(start, first, stop):  # type: ignore[no-untyped-def]
    """The whole tiles [first, stop) of those from `start` on; [start, start) if there are none."""
    some = first < stop
    return tl.where(some, first, start), tl.where(some, stop, start)


@triton.jit
def _whole_keys_of(  # type: ignore[no-untyped-def]
    block, start, starts_ptr, sample, queries, keys, window,
    CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The keys [first, stop), tiles from `start` on, that all queries of a block attend. They need no mask."""
    last = tl.minimum(block * QUERIES + QUERIES, queries) - 1
    earlier = keys - queries
    first = start
    stop = keys
    if starts_ptr is not None:
        first = tl.maximum(first, tl.load(starts_ptr + sample * queries + last))
    if CAUSAL:
        stop = tl.minimum(keys, tl.maximum(block * QUERIES + earlier + 1, 0))
        if window > 0:
            first = tl.maximum(first, last + earlier - window + 1)
    return _between(start, tl.cdiv(first, KEYS) * KEYS, stop // KEYS * KEYS)


@triton.jit
def _whole_queries_of(  # type: ignore[no-untyped-def]
    block, start, stops_ptr, sample, queries, keys, window,
    CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The queries [first, stop), tiles from `start` on, that attend all keys of a block. They need no mask."""
    first_key = block * KEYS
    last_key = tl.minimum(first_key + KEYS, keys) - 1
    earlier = keys - queries
    first = start
    stop = queries
    if CAUSAL:
        first = tl.maximum(first, last_key - earlier)
        if window > 0:
            stop = tl.minimum(stop, tl.maximum(first_key - earlier + window, 0))
    if stops_ptr is not None:
        stop = tl.minimum(stop, tl.load(stops_ptr + sample * keys + first_key))
    return _between(start, tl.cdiv(first, QUERIES) * QUERIES, stop // QUERIES * QUERIES)


@triton.jit
def _edge_tile(number, start, whole_start, whole_stop, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where edge tile `number` begins. Edge tiles are those from `start` on, without the whole ones."""
    before = start + number * TILE
    return tl.where(before < whole_start, before, before + (whole_stop - whole_start))


@triton.jit
def _of_rows(ptr, row, rows, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A number of each row of a tile: 0 from `rows` on, where a tile that is not WHOLE may end."""
    if WHOLE:
        return tl.load(ptr + row)
    else:
        return tl.load(ptr + row, row < rows, other=0)


@triton.jit
def _kept_of_tile(  # type: ignore[no-untyped-def]
    x, random, columns_ptr, first_key, keys, THRESHOLD: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr
):
    """`x` [queries, KEYS] where dropout keeps it, else 0."""
    columns = _of_rows(columns_ptr, first_key + tl.arange(0, KEYS), keys, WHOLE)
    return tl.where(kept(random[:, None], columns[None, :], THRESHOLD), x, 0.0)


@triton.jit
def _bias(slope, position, key_at):  # type: ignore[no-untyped-def]
    """ALiBi, in units of scores. Positions are fp32, which has whole numbers up to 2^24."""
    return slope * (key_at - position)


@triton.jit
def _of_alibi(slopes_ptr, rows_at_ptr, head, query, queries, scale):  # type: ignore[no-untyped-def]
    """The slope of a head in units of scores, and the positions of queries, fp32. Anything without ALiBi."""
    if slopes_ptr is None:
        return 0.0, query
    else:
        return tl.load(slopes_ptr + head) / scale, _of_rows(rows_at_ptr, query, queries, False).to(tl.float32)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    out, highest, total, q, q_rest, k_ptr, v_ptr, k_stride, v_stride, query, first, random, columns_ptr,
    bias_slope, position, keys_at_ptr, first_key, queries, keys, window, scale, cap,
    WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, V_WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr, CAPPED: tl.constexpr, THRESHOLD: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The result of a block of queries, its greatest scores and totals, with a tile of keys more."""
    column = tl.arange(0, KEYS)
    keys_left = keys - first_key
    k_ptr += tl.cast(first_key, tl.int64) * k_stride
    v_ptr += tl.cast(first_key, tl.int64) * v_stride
    k, k_rest = _parts(k_ptr, column, k_stride, keys_left, WIDTH, MAIN, REST, WHOLE)
    scores, _ = _scores(_products(q, q_rest, k, k_rest, REST), scale, cap, CAPPED)
    if keys_at_ptr is not None:
        key_at = _of_rows(keys_at_ptr, first_key + column, keys, WHOLE).to(tl.float32)
        scores += _bias(bias_slope, position[:, None], key_at[None, :])
    if WHOLE:
        most_now = tl.maximum(highest, tl.max(scores, 1))
        shift = most_now
    else:
        key = first_key + column
        seen = _seen(query[:, None], key[None, :], first[:, None], queries, keys, window, CAUSAL)
        scores = tl.where(seen, scores, float("-inf"))
        most_now = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen nothing has no greatest score.
        shift = tl.where(most_now == float("-inf"), 0.0, most_now)
    unit = _unit(scale, cap, CAPPED)
    probabilities = tl.exp2(scores * unit - (shift * unit)[:, None])
    decay = tl.exp2((highest - shift) * unit)
    total = total * decay + tl.sum(probabilities, 1)
    if columns_ptr is not None:  # after the sum: dropout follows the softmax
        probabilities = _kept_of_tile(probabilities, random, columns_ptr, first_key, keys, THRESHOLD, KEYS, WHOLE)
    v = _tile(v_ptr, column, v_stride, keys_left, 0, V_WIDTH, V_COLUMNS, WHOLE)
    out = tl.dot(probabilities.to(v.dtype), v, out * decay[:, None], input_precision="ieee")
    return out, most_now, total


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, sinks_ptr, starts_ptr, random_ptr, columns_ptr, slopes_ptr, rows_at_ptr, keys_at_ptr,
    out_ptr, lse_ptr,
    heads, run, queries, keys, window, scale, cap, keep_scale,
    q_stride_b, q_stride_n, q_stride_s, k_stride_b, k_stride_n, k_stride_s, v_stride_b, v_stride_n, v_stride_s,
    out_stride_b, out_stride_n, out_stride_s,
    WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, V_WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr, CAPPED: tl.constexpr, THRESHOLD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
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
    whole_start, whole_stop = _whole_keys_of(
        block, start, starts_ptr, sample, queries, keys, window, CAUSAL, QUERIES, KEYS
    )
    random = first
    if random_ptr is not None:
        random = _of_rows(random_ptr + (sample * heads + head) * queries, query, queries, False)
    bias_slope, position = _of_alibi(slopes_ptr, rows_at_ptr, head, query, queries, scale)
    q, q_rest = _parts(q_ptr, row, q_stride_s, rows_left, WIDTH, MAIN, REST, False)
    most = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    out = tl.zeros((QUERIES, V_COLUMNS), tl.float32)
    for first_key in range(whole_start, whole_stop, KEYS):
        out, most, total = _attend(
            out, most, total, q, q_rest, k_ptr, v_ptr, k_stride_s, v_stride_s, query, first, random, columns_ptr,
            bias_slope, position, keys_at_ptr, first_key, queries, keys, window, scale, cap,
            WIDTH, MAIN, REST, V_WIDTH, V_COLUMNS, CAUSAL, CAPPED, THRESHOLD, KEYS, True,
        )  # fmt: skip
    for number in range(0, tl.cdiv(stop - start - (whole_stop - whole_start), KEYS)):
        first_key = _edge_tile(number, start, whole_start, whole_stop, KEYS)
        out, most, total = _attend(
            out, most, total, q, q_rest, k_ptr, v_ptr, k_stride_s, v_stride_s, query, first, random, columns_ptr,
            bias_slope, position, keys_at_ptr, first_key, queries, keys, window, scale, cap,
            WIDTH, MAIN, REST, V_WIDTH, V_COLUMNS, CAUSAL, CAPPED, THRESHOLD, KEYS, False,
        )  # fmt: skip
    most *= _unit(scale, cap, CAPPED)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        most_now = tl.maximum(most, sink)
        decay = tl.exp2(most - most_now)
        total = total * decay + tl.exp2(sink - most_now)
        out = out * decay[:, None]
        most = most_now
    attends = total > 0.0
    out = out * (keep_scale / tl.where(attends, total, 1.0))[:, None]
    lse = tl.where(attends, (most + tl.log2(tl.where(attends, total, 1.0))) * LN_2, float("-inf"))
    _write(out_ptr, out, row, out_stride_s, rows_left, 0, V_WIDTH, V_COLUMNS)
    tl.store(lse_ptr + (sample * heads + head) * queries + query, lse, query < queries)


@triton.jit
def _add_to_queries(  # type: ignore[no-untyped-def]
    grad, grad_rest, q, q_rest, grad_out, lse, delta, k_ptr, v_ptr, k_stride, v_stride, query, first, random,
    columns_ptr, bias_slope, position, keys_at_ptr, first_key, queries, keys, window, scale, cap, keep_scale,
    WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, V_WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr, CAPPED: tl.constexpr, THRESHOLD: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries, with a tile of keys more."""
    column = tl.arange(0, KEYS)
    keys_left = keys - first_key
    k_ptr += tl.cast(first_key, tl.int64) * k_stride
    v_ptr += tl.cast(first_key, tl.int64) * v_stride
    k, k_rest = _parts(k_ptr, column, k_stride, keys_left, WIDTH, MAIN, REST, WHOLE)
    v = _tile(v_ptr, column, v_stride, keys_left, 0, V_WIDTH, V_COLUMNS, WHOLE)
    scores, slope = _scores(_products(q, q_rest, k, k_rest, REST), scale, cap, CAPPED)
    if keys_at_ptr is not None:
        key_at = _of_rows(keys_at_ptr, first_key + column, keys, WHOLE).to(tl.float32)
        scores += _bias(bias_slope, position[:, None], key_at[None, :])
    probabilities = tl.exp2(scores * _unit(scale, cap, CAPPED) - lse[:, None])
    if not WHOLE:
        key = first_key + column
        seen = _seen(query[:, None], key[None, :], first[:, None], queries, keys, window, CAUSAL)
        probabilities = tl.where(seen, probabilities, 0.0)
    grad_probabilities = tl.dot(grad_out, tl.trans(v), input_precision="ieee")
    if columns_ptr is not None:
        grad_probabilities = _kept_of_tile(
            grad_probabilities * keep_scale, random, columns_ptr, first_key, keys, THRESHOLD, KEYS, WHOLE
        )
    grad_scores = (probabilities * (grad_probabilities - delta[:, None]) * slope).to(k.dtype)
    grad = tl.dot(grad_scores, k, grad, input_precision="ieee")
    if REST > 0:
        grad_rest = tl.dot(grad_scores, k_rest, grad_rest, input_precision="ieee")
    return grad, grad_rest


@triton.jit
def queries_kernel(  # type: ignore[no-untyped-def]
    grad_out_ptr, q_ptr, k_ptr, v_ptr, starts_ptr, random_ptr, columns_ptr, slopes_ptr, rows_at_ptr, keys_at_ptr,
    out_ptr, lse_ptr, delta_ptr, grad_q_ptr,
    heads, run, queries, keys, window, scale, cap, keep_scale,
    grad_out_stride_b, grad_out_stride_n, grad_out_stride_s, q_stride_b, q_stride_n, q_stride_s,
    k_stride_b, k_stride_n, k_stride_s, v_stride_b, v_stride_n, v_stride_s,
    out_stride_b, out_stride_n, out_stride_s, grad_q_stride_b, grad_q_stride_n, grad_q_stride_s,
    WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, V_WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr, CAPPED: tl.constexpr, THRESHOLD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
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
    whole_start, whole_stop = _whole_keys_of(
        block, start, starts_ptr, sample, queries, keys, window, CAUSAL, QUERIES, KEYS
    )
    grad_out = _tile(grad_out_ptr, row, grad_out_stride_s, rows_left, 0, V_WIDTH, V_COLUMNS, False)
    out = _tile(out_ptr, row, out_stride_s, rows_left, 0, V_WIDTH, V_COLUMNS, False)
    delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
    row_of_all = (sample * heads + head) * queries + query
    tl.store(delta_ptr + row_of_all, delta, query < queries)
    lse = tl.load(lse_ptr + row_of_all, query < queries, other=0.0) * LOG2_E
    random = first
    if random_ptr is not None:
        random = tl.load(random_ptr + row_of_all, query < queries, other=0)
    bias_slope, position = _of_alibi(slopes_ptr, rows_at_ptr, head, query, queries, scale)
    q, q_rest = _parts(q_ptr, row, q_stride_s, rows_left, WIDTH, MAIN, REST, False)
    grad = tl.zeros((QUERIES, MAIN), tl.float32)
    grad_rest = tl.zeros((QUERIES, REST if REST > 0 else 16), tl.float32)
    for first_key in range(whole_start, whole_stop, KEYS):
        grad, grad_rest = _add_to_queries(
            grad, grad_rest, q, q_rest, grad_out, lse, delta, k_ptr, v_ptr, k_stride_s, v_stride_s, query, first,
            random, columns_ptr, bias_slope, position, keys_at_ptr, first_key, queries, keys, window, scale, cap,
            keep_scale,
            WIDTH, MAIN, REST, V_WIDTH, V_COLUMNS, CAUSAL, CAPPED, THRESHOLD, KEYS, True,
        )  # fmt: skip
    for number in range(0, tl.cdiv(stop - start - (whole_stop - whole_start), KEYS)):
        first_key = _edge_tile(number, start, whole_start, whole_stop, KEYS)
        grad, grad_rest = _add_to_queries(
            grad, grad_rest, q, q_rest, grad_out, lse, delta, k_ptr, v_ptr, k_stride_s, v_stride_s, query, first,
            random, columns_ptr, bias_slope, position, keys_at_ptr, first_key, queries, keys, window, scale, cap,
            keep_scale,
            WIDTH, MAIN, REST, V_WIDTH, V_COLUMNS, CAUSAL, CAPPED, THRESHOLD, KEYS, False,
        )  # fmt: skip
    _write_parts(grad_q_ptr, grad * scale, grad_rest * scale, row, grad_q_stride_s, rows_left, WIDTH, MAIN, REST)


@triton.jit
def _add_to_keys(  # type: ignore[no-untyped-def]
    grad_k, grad_k_rest, grad_v, k, k_rest, v, q_ptr, grad_out_ptr, lse_ptr, delta_ptr, q_stride, grad_out_stride,
    starts_ptr, random_ptr, columns, bias_slope, rows_at_ptr, key_at, sample, key, first_query, queries, keys,
    window, scale, cap, keep_scale,
    WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, V_WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr, CAPPED: tl.constexpr, THRESHOLD: tl.constexpr, QUERIES: tl.constexpr,
    OF_KEYS: tl.constexpr, OF_VALUES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and values, with a tile of a head's queries more."""
    column = tl.arange(0, QUERIES)
    query = first_query + column
    rows_left = queries - first_query
    q_ptr += tl.cast(first_query, tl.int64) * q_stride
    grad_out_ptr += tl.cast(first_query, tl.int64) * grad_out_stride
    q, q_rest = _parts(q_ptr, column, q_stride, rows_left, WIDTH, MAIN, REST, WHOLE)
    scores, slope = _scores(_products(k, k_rest, q, q_rest, REST), scale, cap, CAPPED)
    if rows_at_ptr is not None:
        position = _of_rows(rows_at_ptr, query, queries, WHOLE).to(tl.float32)
        scores += _bias(bias_slope, position[None, :], key_at[:, None])
    lse = _of_rows(lse_ptr, query, queries, WHOLE) * LOG2_E
    probabilities = tl.exp2(scores * _unit(scale, cap, CAPPED) - lse[None, :])
    if not WHOLE:
        first = _firsts(starts_ptr, sample, query, queries)
        seen = _seen(query[None, :], key[:, None], first[None, :], queries, keys, window, CAUSAL)
        probabilities = tl.where(seen, probabilities, 0.0)
    grad_out = _tile(grad_out_ptr, column, grad_out_stride, rows_left, 0, V_WIDTH, V_COLUMNS, WHOLE)
    dropped = probabilities
    if random_ptr is not None:
        keeps = kept(_of_rows(random_ptr, query, queries, WHOLE)[None, :], columns[:, None], THRESHOLD)
        dropped = tl.where(keeps, probabilities * keep_scale, 0.0)
    if OF_VALUES:
        grad_v = tl.dot(dropped.to(grad_out.dtype), grad_out, grad_v, input_precision="ieee")
    if OF_KEYS:
        grad_probabilities = tl.dot(v, tl.trans(grad_out), input_precision="ieee")
        if random_ptr is not None:
            grad_probabilities = tl.where(keeps, grad_probabilities * keep_scale, 0.0)
        delta = _of_rows(delta_ptr, query, queries, WHOLE)
        grad_scores = (probabilities * (grad_probabilities - delta[None, :]) * slope).to(q.dtype)
        grad_k = tl.dot(grad_scores, q, grad_k, input_precision="ieee")
        if REST > 0:
            grad_k_rest = tl.dot(grad_scores, q_rest, grad_k_rest, input_precision="ieee")
    return grad_k, grad_k_rest, grad_v


@triton.jit
def keys_values_kernel(  # type: ignore[no-untyped-def]
    grad_out_ptr, q_ptr, k_ptr, v_ptr, starts_ptr, stops_ptr, random_ptr, columns_ptr, slopes_ptr, rows_at_ptr,
    keys_at_ptr, lse_ptr, delta_ptr, grad_k_ptr, grad_v_ptr, heads, run, queries, keys, window, scale, cap,
    keep_scale, grad_out_stride_b, grad_out_stride_n, grad_out_stride_s, q_stride_b, q_stride_n, q_stride_s,
    k_stride_b, k_stride_n, k_stride_s, v_stride_b, v_stride_n, v_stride_s,
    grad_k_stride_b, grad_k_stride_n, grad_k_stride_s, grad_v_stride_b, grad_v_stride_n, grad_v_stride_s,
    WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, V_WIDTH: tl.constexpr, V_COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr, CAPPED: tl.constexpr, THRESHOLD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    OF_KEYS: tl.constexpr, OF_VALUES: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys (OF_KEYS) and values (OF_VALUES) from all query heads that read it, in turn."""
    block = tl.program_id(0).to(tl.int64).to(tl.int32)
    kv_head = tl.program_id(1).to(tl.int64)
    sample = tl.program_id(2).to(tl.int64)
    first_row = block.to(tl.int64) * KEYS
    k_ptr += sample * k_stride_b + kv_head * k_stride_n + first_row * k_stride_s
    v_ptr += sample * v_stride_b + kv_head * v_stride_n + first_row * v_stride_s
    row = tl.arange(0, KEYS)
    key = block * KEYS + row
    keys_left = keys - block * KEYS
    start, stop = _queries_of(block, stops_ptr, sample, queries, keys, window, CAUSAL, QUERIES, KEYS)
    whole_start, whole_stop = _whole_queries_of(
        block, start, stops_ptr, sample, queries, keys, window, CAUSAL, QUERIES, KEYS)  # fmt: skip
    columns = key if columns_ptr is None else _of_rows(columns_ptr, key, keys, False)
    key_at = key if keys_at_ptr is None else _of_rows(keys_at_ptr, key, keys, False).to(tl.float32)
    k, k_rest = _parts(k_ptr, row, k_stride_s, keys_left, WIDTH, MAIN, REST, False)
    v = _tile(v_ptr, row, v_stride_s, keys_left, 0, V_WIDTH, V_COLUMNS, False)
    grad_k = tl.zeros((KEYS, MAIN), tl.float32)
    grad_k_rest = tl.zeros((KEYS, REST if REST > 0 else 16), tl.float32)
    grad_v = tl.zeros((KEYS, V_COLUMNS), tl.float32)
    for head in range(kv_head * run, kv_head * run + run):
        q_head = q_ptr + sample * q_stride_b + head * q_stride_n
        grad_out_head = grad_out_ptr + sample * grad_out_stride_b + head * grad_out_stride_n
        lse_head = lse_ptr + (sample * heads + head) * queries
        delta_head = delta_ptr + (sample * heads + head) * queries
        random_head = None if random_ptr is None else random_ptr + (sample * heads + head) * queries
        bias_slope = 0.0 if slopes_ptr is None else tl.load(slopes_ptr + head) / scale
        for first_query in range(whole_start, whole_stop, QUERIES):
            grad_k, grad_k_rest, grad_v = _add_to_keys(
                grad_k, grad_k_rest, grad_v, k, k_rest, v, q_head, grad_out_head, lse_head, delta_head,
                q_stride_s, grad_out_stride_s, starts_ptr, random_head, columns, bias_slope, rows_at_ptr, key_at,
                sample, key, first_query, queries, keys, window, scale, cap, keep_scale, WIDTH, MAIN, REST, V_WIDTH,
                V_COLUMNS, CAUSAL, CAPPED, THRESHOLD, QUERIES, OF_KEYS, OF_VALUES, True,
            )  # fmt: skip
        for number in range(0, tl.cdiv(stop - start - (whole_stop - whole_start), QUERIES)):
            first_query = _edge_tile(number, start, whole_start, whole_stop, QUERIES)
            grad_k, grad_k_rest, grad_v = _add_to_keys(
                grad_k, grad_k_rest, grad_v, k, k_rest, v, q_head, grad_out_head, lse_head, delta_head,
                q_stride_s, grad_out_stride_s, starts_ptr, random_head, columns, bias_slope, rows_at_ptr, key_at,
                sample, key, first_query, queries, keys, window, scale, cap, keep_scale, WIDTH, MAIN, REST, V_WIDTH,
                V_COLUMNS, CAUSAL, CAPPED, THRESHOLD, QUERIES, OF_KEYS, OF_VALUES, False,
            )  # fmt: skip
    if OF_VALUES:
        grad_v_ptr += sample * grad_v_stride_b + kv_head * grad_v_stride_n + first_row * grad_v_stride_s
        _write(grad_v_ptr, grad_v, row, grad_v_stride_s, keys_left, 0, V_WIDTH, V_COLUMNS)
    if OF_KEYS:
        grad_k_ptr += sample * grad_k_stride_b + kv_head * grad_k_stride_n + first_row * grad_k_stride_s
        _write_parts(
            grad_k_ptr, grad_k * scale, grad_k_rest * scale, row, grad_k_stride_s, keys_left, WIDTH, MAIN, REST
        )
