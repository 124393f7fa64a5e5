"""Attention by Triton kernels, for what torch's fused operations lack: windows, caps of scores, sinks, ALiBi, dropout.

Scores exist for a tile of queries and keys at a time (FlashAttention 2, Dao, arXiv 2307.08691). Tiles that nothing
attends are not computed. Those at an edge are masked, and whole ones are not. Two 16-bit factors are multiplied with
sums in fp32. Forward reads q, k and v and keeps the result and the logsumexp of each row. Backward has one kernel for
the gradient of queries and one for keys and values. Nobody adds to a number of another program, so gradients are the
same each time.

Shapes: b samples, n query heads, h key/value heads, q queries, k keys, d width of a query and a key, e width of a
value.

A query attends a run of keys: up to its own position, from the start of its document or its window on. Query i has the
position i + k - q among the keys, so the last query attends the last key.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megapar_kernels.alibi import Alibi
from megapar_kernels.attention_tiles import forward_kernel, keys_values_kernel, queries_kernel
from megapar_kernels.dispatch import Implementation, capability, interpreting, next_power_of_2, on_gpu, triton
from megapar_kernels.dropout import RowDropout, threshold

WIDEST = 512  # head
WIDEST_OF_TORCH = 256  # of its fused operations for GPUs
EDGE = 64  # a query's keys in tiles beyond those that it attends, about
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

    def pairs(self, queries: int, keys: int) -> int:
        """The pairs of a query and a key in the tiles of a head, about.

        They are those attended and EDGE keys a query more. A plan knows no documents, so none are counted.
        """
        if not self.causal:
            return queries * keys
        window = min(self.window or keys, keys)
        first = max(keys - queries, 0) + 1  # keys of the first query
        growing = range(first, window + 1)  # keys of each query that has fewer than the window
        attended = (first + window) * len(growing) // 2 + max(min(queries, keys) - len(growing), 0) * window
        return attended + EDGE * queries


def of_documents(documents_bs: Tensor) -> tuple[Tensor, Tensor]:
    """The `starts` and `stops` of `Attended`, [b, s], from the index of each position's document."""
    documents_bs = documents_bs.contiguous()
    starts = torch.searchsorted(documents_bs, documents_bs, out_int32=True)
    stops = torch.searchsorted(documents_bs, documents_bs, right=True, out_int32=True)
    return starts, stops


def serves(impl: Implementation, q: Tensor, v: Tensor) -> bool:
    """Whether the kernels compute attention of `q` and `v`, if `impl` asks for them.

    On a GPU for 16-bit numbers and heads of 512 at most. On a CPU the kernels are interpreted.
    """
    if impl != "triton" or max(q.shape[-1], v.shape[-1]) > WIDEST:
        return False
    if on_gpu(q, impl):
        return q.dtype.itemsize == 2
    return q.device.type == "cpu" and interpreting() and q.dtype != torch.float64


def serves_alone(impl: Implementation, q: Tensor, v: Tensor) -> bool:
    """Whether the kernels compute attention of heads that are too wide for the fused operations of torch for GPUs.

    Torch would hold all scores in memory.
    """
    return max(q.shape[-1], v.shape[-1]) > WIDEST_OF_TORCH and serves(impl, q, v)


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


NARROW = 128  # a window whose edges are most of it, and take fewer keys in tiles of 32

# By the widest head. The fastest of four to nine tried on an H200 with sinks, caps, windows and documents. No GPU has
# timed those of 512, which are what the registers and the shared memory of all architectures suffice for.
FORWARD = {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 4, 3), 192: Tiles(64, 64, 4, 2), 256: Tiles(128, 64, 8, 2)}
QUERIES = {64: Tiles(64, 64, 4, 3), 128: Tiles(128, 64, 8, 3), 192: Tiles(64, 32, 4, 2), 256: Tiles(128, 32, 8, 2)}
KEYS_VALUES = {64: Tiles(64, 64, 4, 3), 128: Tiles(32, 64, 4, 3), 192: Tiles(32, 64, 4, 2), 256: Tiles(32, 128, 8, 2)}
FORWARD |= {512: Tiles(32, 32, 8, 1)}
QUERIES |= {512: Tiles(32, 32, 8, 1)}
KEYS_VALUES |= {512: Tiles(32, 32, 8, 1)}
# In a narrow window, of heads of 64 at most. The forward takes 0.74 of the time of the tiles above.
OF_NARROW_WINDOWS = Tiles(64, 32, 4, 3)
KEYS_VALUES_OF_NARROW_WINDOWS = Tiles(32, 64, 4, 3)
# What the shared memory and registers of Ampere do not suffice for, there. No GPU has timed these.
QUERIES_OF_AMPERE = QUERIES | {256: Tiles(128, 32, 8, 1)}
KEYS_VALUES_OF_AMPERE = KEYS_VALUES | {192: Tiles(16, 64, 4, 1), 256: Tiles(32, 64, 8, 1), 512: Tiles(16, 32, 8, 1)}


def _widest(width: int, v_width: int) -> int:
    """The entry of the tables above for heads of these widths."""
    return next(widest for widest in FORWARD if max(width, v_width) <= widest)


def _narrow(width: int, v_width: int, window: int) -> bool:
    return _widest(width, v_width) == 64 and 0 < window <= NARROW


def forward_config(width: int, v_width: int, window: int) -> Tiles:
    """The tiles of the forward. The result is held in registers."""
    return OF_NARROW_WINDOWS if _narrow(width, v_width, window) else FORWARD[_widest(width, v_width)]


def queries_config(width: int, v_width: int, window: int, capability: tuple[int, int]) -> Tiles:
    """The tiles of the gradient of queries on a GPU of this capability."""
    if _narrow(width, v_width, window):
        return OF_NARROW_WINDOWS
    return (QUERIES if capability >= (9, 0) else QUERIES_OF_AMPERE)[_widest(width, v_width)]


def keys_values_config(width: int, v_width: int, window: int, capability: tuple[int, int]) -> Tiles:
    """The tiles of the gradients of keys and values on a GPU of this capability.

    Both are held in registers, and those of the widest heads in turn (`keys_values_passes`). Some registers spill.
    Tiles without spills are slower.
    """
    if _narrow(width, v_width, window):
        return KEYS_VALUES_OF_NARROW_WINDOWS
    return (KEYS_VALUES if capability >= (9, 0) else KEYS_VALUES_OF_AMPERE)[_widest(width, v_width)]


def keys_values_passes(width: int, v_width: int) -> tuple[tuple[bool, bool], ...]:
    """Return for each launch whether it computes the gradients of keys, and of values.

    For heads beyond 192 the registers hold one of the two gradients at a time.

    Scores are then computed twice, and still a quarter of the time is saved.
    """
    return ((True, True),) if max(width, v_width) <= 192 else ((True, False), (False, True))


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _rows(x: Tensor) -> Tensor:
    """`x` with the numbers of a row beside each other, as the kernels read it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _of_dropout(dropped: RowDropout | None) -> tuple[Tensor | None, Tensor | None, float, int]:
    """What a kernel takes: the random keys of rows, the numbers of columns, 1 / (1 - p), and the threshold."""
    if dropped is None:
        return None, None, 1.0, 0
    return dropped.keys.contiguous(), dropped.columns.contiguous(), 1.0 / (1.0 - dropped.p), threshold(dropped.p)


def _of_alibi(alibi: Alibi | None, cap: float) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What a kernel takes: the slopes of heads, and the positions of queries and of keys."""
    if alibi is None:
        return None, None, None
    if cap:
        raise ValueError("ALiBi with a cap of scores: no model says which comes first")
    return alibi.slopes_n.contiguous(), alibi.queries_q.contiguous(), alibi.keys_k.contiguous()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    cap: float,
    attended: Attended,
    sinks_n: Tensor | None = None,
    dropped: RowDropout | None = None,
    alibi: Alibi | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scores) v, [b, n, q, e] in q's dtype, and the lse of the scores, [b, n, q] in fp32.

    A score is scale * product, with a `cap` cap * tanh(scale * product / cap). `sinks_n` are further scores of a
    head without a value. `dropped` drops probabilities: the lse is that of all scores. A query that attends nothing has
    zeros and an lse of -inf. `alibi` is added to scores. The result is [q, b, n, e] in memory. Raises ValueError unless
    `scale` is positive, since the kernel takes the greatest product for that of the greatest score, and for `alibi`
    with a `cap`.
    """
    if not scale > 0.0:
        raise ValueError(f"scale {scale} of attention's scores: it must be positive")
    q, k, v = map(_rows, (q, k, v))
    b, n, queries, width = q.shape
    v_width = v.shape[-1]
    out = q.new_empty(queries, b, n, v_width).permute(1, 2, 0, 3)
    lse = q.new_empty(b, n, queries, dtype=torch.float32)
    tiles = forward_config(width, v_width, attended.window)
    random_keys, positions, keep_scale, least_kept = _of_dropout(dropped)
    of_alibi = _of_alibi(alibi, cap)
    if q.is_meta:
        tensors = [x for x in (q, k, v, random_keys, out, lse) if x is not None]
        torch.ops.megapar.tiled_attention(tensors, attended.pairs(queries, k.shape[2]), False)
    elif out.numel():
        forward_kernel[triton.cdiv(queries, tiles.queries), n, b](
            *(q, k, v, sinks_n, attended.starts, random_keys, positions, *of_alibi, out, lse),
            *(n, n // k.shape[1], queries, k.shape[2], attended.window, scale, cap or 1.0, keep_scale),
            *(*_strides(q, k, v, out), width, *columns(width, v_width)[:2], v_width, columns(width, v_width)[2]),
            *(attended.causal, cap > 0.0, least_kept, tiles.queries, tiles.keys),
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
    dropped: RowDropout | None = None,
    alibi: Alibi | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k and v in their dtypes, and rowsum(grad_out * out), [b, n, q] in fp32.

    `out` and `lse` may be those of several blocks, merged. With sinks `lse` has them among the scores.
    `block_attention.sink_gradient` gives their gradient.
    """
    grad_out, q, k, v, out = map(_rows, (grad_out, q, k, v, out))
    lse = lse.contiguous()
    b, n, queries, width = q.shape
    keys, v_width = v.shape[-2:]
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    random_keys, positions, keep_scale, least_kept = _of_dropout(dropped)
    of_alibi = _of_alibi(alibi, cap)
    if q.is_meta:
        inputs = [x for x in (grad_out, q, k, v, random_keys, out, lse) if x is not None]
        tensors = [*inputs, delta, grad_q, grad_k, grad_v]
        torch.ops.megapar.tiled_attention(tensors, attended.pairs(queries, keys), True)
        return grad_q, grad_k, grad_v, delta
    main, rest, v_columns = columns(width, v_width)
    sizes = n, n // k.shape[1], queries, keys, attended.window, scale, cap or 1.0, keep_scale
    constants = width, main, rest, v_width, v_columns, attended.causal, cap > 0.0, least_kept
    generation = capability(q.device)
    if queries and b:
        tiles = queries_config(width, v_width, attended.window, generation)
        queries_kernel[triton.cdiv(queries, tiles.queries), n, b](
            *(grad_out, q, k, v, attended.starts, random_keys, positions, *of_alibi, out, lse, delta, grad_q, *sizes),
            *(*_strides(grad_out, q, k, v, out, grad_q), *constants, tiles.queries, tiles.keys),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    if keys and b:
        tiles = keys_values_config(width, v_width, attended.window, generation)
        for of_keys, of_values in keys_values_passes(width, v_width):
            keys_values_kernel[triton.cdiv(keys, tiles.keys), k.shape[1], b](
                *(grad_out, q, k, v, attended.starts, attended.stops, random_keys, positions, *of_alibi, lse, delta),
                *(grad_k, grad_v, *sizes),
                *(*_strides(grad_out, q, k, v, grad_k, grad_v), *constants, tiles.queries, tiles.keys),
                *(of_keys, of_values),
                num_warps=tiles.warps,
                num_stages=tiles.stages,
            )
    return grad_q, grad_k, grad_v, delta
