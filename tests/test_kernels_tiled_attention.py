"""Attention in tiles by our kernels, interpreted: beside explicit scores in fp64, by relative norm."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from megapar_kernels import block_attention, tiled_attention
from megapar_kernels.alibi import Alibi
from megapar_kernels.backend import Kernels
from megapar_kernels.block_attention import PLAIN_SCORES, ScoreRule, add_sinks, reference, reference_backward
from megapar_kernels.dropout import RowDropout
from megapar_kernels.tiled_attention import Attended, Tiles, of_documents
from torch import Tensor

from megapar.comm.axis import Axis
from megapar.context_parallel import attention, deal
from megapar.context_parallel.attention import CoreAttention
from megapar.context_parallel.dropout import AttentionDropout
from megapar.context_parallel.partial import Gradient, Places, Result
from megapar.context_parallel.scoring import Scoring
from megapar.context_parallel.whole import whole_attention
from megapar.declare.batch import MicroBatch
from megapar.declare.random import row_keys
from tests.support.kernel_checks import DEVICE, Guarded, needs_triton, poisoned, relative_error, strided
from tests.support.sweeps import slow_but

pytestmark = [needs_triton, pytest.mark.gpu]

ALL_BEFORE = Attended()
# The result in bf16 takes one rounding, gradients those of probabilities and of their gradients, too.
LIMITS = {torch.float32: (2e-6, 4e-6), torch.bfloat16: (4e-3, 8e-3), torch.float16: (6e-4, 1.2e-3)}

# On GPUs the kernels serve 16 bits alone.
DTYPE, BOUND = (torch.bfloat16, 1e-2) if DEVICE.type == "cuda" else (torch.float32, 1e-5)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few numbers have several tiles, of other numbers of queries than of keys. On a GPU they stay."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(tiled_attention, "forward_config", lambda *_: Tiles(32, 16, 4, 1))
        monkeypatch.setattr(tiled_attention, "queries_config", lambda *_: Tiles(16, 32, 4, 1))
        monkeypatch.setattr(tiled_attention, "keys_values_config", lambda *_: Tiles(32, 16, 4, 1))


def random(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Tensor:
    """A tensor [b, n, s, d]: between guards, with gaps in its rows, or [s, b, n, d] in memory."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)
    x = x.to(DEVICE)
    if layout == "strided":
        return strided(x)
    if layout == "sbnd":
        return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    return Guarded(x).tensor


def mask(attended: Attended, b: int, queries: int, keys: int) -> Tensor:
    """Whether a query attends a key, [b, 1, q, k], one by one."""
    query = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)[None, :]
    seen = torch.ones(b, 1, queries, keys, dtype=torch.bool)
    if attended.causal:
        seen &= key <= query
        if attended.window:
            seen &= key > query - attended.window
    if attended.starts is not None:
        seen &= key >= attended.starts.cpu()[:, None, :, None]
    return seen.to(DEVICE)


def dropout(b: int, heads: int, queries: int, keys: int, p: float) -> RowDropout:
    """With keys on both sides of 2^31, gaps between them in memory, and a jump between positions, as in a ring."""
    random_keys = row_keys(3, 7, *(torch.arange(size).view(shape) for size, shape in (
        (b, (-1, 1, 1)), (heads, (1, -1, 1)), (2 * queries, (1, 1, -1)),
    )))  # fmt: skip
    positions = torch.cat([torch.arange(keys // 2), torch.arange(keys // 2, keys) + 1000])
    return RowDropout(random_keys[:, :, ::2].to(DEVICE), positions.to(DEVICE), p)


def alibi_of(heads: int, queries: int, keys: int) -> Alibi:
    """With slopes that are no powers of two, and a jump between positions, as in a ring."""
    slopes_n = torch.linspace(0.03, 0.7, heads, device=DEVICE)
    positions = torch.arange(max(queries, keys), device=DEVICE)
    positions = positions + 5 * (positions > keys // 2)
    return Alibi(slopes_n, positions[-queries:], positions[-keys:])


def check(
    heads: tuple[int, int] = (2, 1),
    sizes: tuple[int, int] = (50, 50),
    widths: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.bfloat16,
    rule: ScoreRule = PLAIN_SCORES,
    attended: Attended = ALL_BEFORE,
    sinks: bool = False,
    p: float = 0.0,
    biased: bool = False,
    layout: str = "guarded",
    b: int = 2,
) -> None:
    shapes = [
        (b, heads[0], sizes[0], widths[0]),
        (b, heads[1], sizes[1], widths[0]),
        (b, heads[1], sizes[1], widths[1]),
    ]
    q, k, v = (random(shape, dtype, layout) for shape in shapes)
    grad = random((*shapes[0][:3], widths[1]), dtype, layout)
    sinks_n = torch.linspace(-1, 2, heads[0], device=DEVICE) if sinks else None
    seen = mask(attended, b, *sizes)
    if attended.starts is not None and attended.stops is not None:
        attended = replace(attended, starts=attended.starts.to(DEVICE), stops=attended.stops.to(DEVICE))
    dropped = dropout(b, heads[0], *sizes, p) if p else None
    alibi = alibi_of(heads[0], *sizes) if biased else None
    exact = [x.double() for x in (q, k, v)]
    how: dict[str, Any] = {"causal": False, "dropped": dropped, "alibi": alibi, "rule": rule, "seen": seen}
    out, lse = reference(*exact, **how)
    if sinks_n is not None:
        add_sinks(out, lse, sinks_n.double())
    expected = [out, *reference_backward(grad.double(), *exact, out, lse, **how)]
    scores = rule.factor(q), rule.cap, attended
    with poisoned():
        found, found_lse = tiled_attention.forward(q, k, v, *scores, sinks_n, dropped, alibi)
        *gradients, rows = tiled_attention.backward(grad, q, k, v, found, found_lse, *scores, dropped, alibi)
    attends = seen.any(-1).expand_as(lse)
    if sinks_n is None:
        assert torch.equal(found_lse == -torch.inf, ~attends)
        assert not found[~attends].any()
        found_lse, lse = found_lse[attends], lse[attends]
    assert relative_error(found_lse, lse) < 1e-5
    assert relative_error(rows, (grad.double() * found.double()).sum(-1)) < 1e-5
    for number, (mine, right) in enumerate(zip((found, *gradients), expected, strict=True)):
        assert mine.dtype == dtype
        error = relative_error(mine, right)
        assert error < LIMITS[dtype][number > 0], (("out", "q", "k", "v")[number], error)


def documents(length: int, samples: list[list[int]]) -> Attended:
    """Samples of documents that start at these positions. On the CPU, as this runs while tests are collected."""
    index = torch.zeros(len(samples), length, dtype=torch.long)
    for row, starts in zip(index, samples, strict=True):
        row[starts[1:]] = 1
    starts, stops = of_documents(index.cumsum(1))
    return Attended(starts=starts, stops=stops)


PACKED = [[0, 1, 4, 17, 40], [0, 30]]
WITH_WINDOW = Attended(window=7)
# Tiles lie in the middle of them, at the edge of a window, and over their ends.
LONG_DOCUMENTS = replace(documents(170, [[0, 75], [0, 5, 20, 110]]), window=60)
CASES: dict[str, dict[str, Any]] = {
    "one position": {"sizes": (1, 1)},
    "odd": {"sizes": (17, 17), "dtype": torch.float16},
    "long": {"sizes": (130, 130), "heads": (1, 1), "b": 1},
    "whole tiles in a window": {"sizes": (170, 170), "heads": (2, 1), "b": 1, "attended": Attended(window=100)},
    "whole tiles in documents": {"sizes": (170, 170), "heads": (2, 1), "attended": LONG_DOCUMENTS},
    "whole tiles, more keys": {"sizes": (60, 170), "b": 1, "attended": Attended(window=130)},
    "whole tiles, not causal": {"sizes": (70, 100), "b": 1, "attended": Attended(causal=False)},
    "window": {"attended": WITH_WINDOW, "dtype": torch.float32},
    "window of two": {"attended": Attended(window=2)},
    "window beyond": {"attended": Attended(window=500)},
    "documents": {"attended": documents(50, PACKED)},
    "cap": {"rule": ScoreRule(0.5, 2.0), "dtype": torch.float32},
    "sinks": {"sinks": True, "heads": (4, 2), "dtype": torch.float32},
    "scale": {"rule": ScoreRule(0.11)},
    "latent": {"widths": (192, 128), "b": 1, "sizes": (40, 40)},
    "width 64": {"widths": (64, 64), "sizes": (40, 40)},
    "width 80": {"widths": (80, 80), "sizes": (40, 40), "layout": "strided"},
    "width 6": {"widths": (6, 6)},
    "width 128": {"widths": (128, 128), "b": 1, "sizes": (40, 40)},
    "width 256": {"widths": (256, 256), "b": 1, "sizes": (20, 20)},
    "width 512": {"widths": (512, 512), "b": 1, "sizes": (20, 20)},
    "groups": {"heads": (6, 2), "layout": "sbnd"},
    "more keys": {"sizes": (20, 50)},
    "more queries": {"sizes": (50, 20), "dtype": torch.float32},
    "more keys in a window": {"sizes": (20, 50), "attended": WITH_WINDOW},
    "not causal": {"sizes": (20, 50), "attended": Attended(causal=False)},
    "fp32": {"dtype": torch.float32},
    "dropout": {"p": 0.1, "dtype": torch.float32, "heads": (4, 2)},
    "dropout of most, not causal": {"p": 0.9, "sizes": (20, 50), "attended": Attended(causal=False)},
    "dropout, whole tiles": {"p": 0.5, "sizes": (170, 170), "heads": (2, 1), "b": 1},
    "dropout, width 256": {"p": 0.3, "widths": (256, 256), "b": 1, "sizes": (20, 20)},
    "bias": {"biased": True, "dtype": torch.float32, "heads": (4, 2)},
    "bias, whole tiles in documents": {"biased": True, "sizes": (170, 170), "attended": LONG_DOCUMENTS, "b": 2},
    "bias, not causal, dropout": {"biased": True, "p": 0.3, "sizes": (20, 50), "attended": Attended(causal=False)},
    "bias, sinks, width 192": {"biased": True, "sinks": True, "widths": (192, 128), "b": 1, "sizes": (40, 40)},
    "all": {
        "attended": Attended(window=9, starts=documents(50, PACKED).starts, stops=documents(50, PACKED).stops),
        "rule": ScoreRule(0.3, 3.0),
        "sinks": True,
        "p": 0.2,
        "heads": (4, 2),
        "widths": (24, 10),
        "layout": "sbnd",
    },
}
QUICK = ["odd", "whole tiles in documents", "more queries", "dropout", "bias", "all"]
names = list(CASES)


def test_pairs_of_a_plan_are_those_of_the_mask() -> None:
    for queries, keys, window in (
        (9, 9, 0),
        (9, 9, 4),
        (9, 9, 1),
        (4, 9, 3),
        (4, 9, 7),
        (9, 4, 0),
        (9, 4, 3),
        (5, 5, 8),
    ):
        attended = Attended(window=window)
        seen = mask(attended, 1, queries, keys)
        assert attended.pairs(queries, keys) == int(seen.sum()) + tiled_attention.EDGE * queries
    assert Attended(causal=False).pairs(3, 5) == 15


@pytest.mark.parametrize("name", slow_but([names.index(name) for name in QUICK], names))
def test_it_is_attention_with_explicit_scores(name: str) -> None:
    check(**CASES[name])


@pytest.mark.parametrize(("b", "queries", "keys"), [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_what_is_empty_has_zeros(b: int, queries: int, keys: int) -> None:
    q, k, v = (torch.randn(b, 2, length, 16, device=DEVICE, dtype=DTYPE) for length in (queries, keys, keys))
    with poisoned():
        out, lse = tiled_attention.forward(q, k, v, 0.5, 0.0, Attended(causal=False))
        gradients = tiled_attention.backward(out, q, k, v, out, lse, 0.5, 0.0, Attended(causal=False))
    assert (lse == -torch.inf).all()
    assert not any(x.count_nonzero() for x in (out, *gradients))


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_that_would_turn_the_order_of_scores_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=rf"scale {scale} of attention's scores: it must be positive"):
        check(rule=ScoreRule(scale))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "window"), [("all", tiled_attention.NARROW), ("all", 140), ("latent", 90)])
def test_the_shipped_tiles_are_right(name: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    check(**{**CASES[name], "sizes": (150, 150), "attended": Attended(window=window)})


@pytest.mark.parametrize("attention", ["cap and sinks", "window", "dropout", "bias", "wide heads"])
def test_a_layer_uses_it_and_has_the_gradients_of_explicit_scores(attention: str) -> None:
    """Also of the sinks. q, k and v are slices of a wider row, and the first sample has two documents."""
    with_sinks = attention == "cap and sinks"
    rule = ScoreRule(0.3, 3.0) if with_sinks else PLAIN_SCORES
    window = 9 if attention == "window" else 0
    tokens = torch.zeros(2, 20, dtype=torch.long)
    starts = torch.tensor([0, 7, 20, 40], dtype=torch.int32)
    batch = MicroBatch.of_samples(tokens, tokens, torch.ones(2, 20), torch.arange(2), starts).to(DEVICE)
    drops = None
    if attention == "dropout":  # of the second of two tp ranks
        drops = AttentionDropout(0.3, 11, 5, range(4, 8), batch.sample_ids_b, batch.positions_s)
    alibi = replace(alibi_of(4, 1, 1), queries_q=batch.positions_s, keys_k=batch.positions_s)
    outputs: dict[str, list[Tensor]] = {}
    for impl in ("torch", "triton"):
        kernels = Kernels(masked_attention=impl)  # type: ignore[arg-type]
        width = 272 if attention == "wide heads" else 16  # too wide for torch's fused operations for GPUs
        qkv = random((20, 2, 8, width), torch.bfloat16, "guarded").requires_grad_()
        sinks = torch.linspace(-1, 2, 4, device=DEVICE, requires_grad=True) if with_sinks else None
        q, k, v = qkv.split([4, 2, 2], dim=2)
        scoring = Scoring(rule, kernels, window, drops, alibi=alibi if attention == "bias" else None)
        y = whole_attention(q, k, v, batch, scoring, sinks)
        leaves = [x for x in (qkv, sinks) if x is not None]
        grad = random(tuple(y.shape), torch.bfloat16, "guarded")
        outputs[impl] = [y, *torch.autograd.grad(y, leaves, grad)]
        assert ("_TiledAttention" in str(y.grad_fn.next_functions[0][0].next_functions)) == (impl == "triton")  # type: ignore[union-attr]
    for mine, theirs in zip(outputs["triton"], outputs["torch"], strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        assert relative_error(mine, theirs) < 8e-3


# Capped scores and dropout in blocks, as ranks of cp compute them

CAPPED = ScoreRule(0.3, 3.0)
TILES = Kernels(masked_attention="triton")


@pytest.fixture
def no_scores_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_attention, "reference", None)
    monkeypatch.setattr(block_attention, "reference_backward", None)


SEVERAL = (0, 1, 4, 17, 40, 70, 80)
BIASED = (PLAIN_SCORES, 0.0)
CAP_AND_DROPOUT = [(CAPPED, 0.0), (PLAIN_SCORES, 0.3)]  # and scores with a bias, without a rule or dropout


@pytest.mark.parametrize(
    ("rule", "p", "causal"),
    slow_but([0, 3, 4], [(*how, causal) for how in (*CAP_AND_DROPOUT, BIASED) for causal in (True, False)]),
    ids=["cap, causal", "cap", "dropout, causal", "dropout", "bias, causal", "bias"],
)
@pytest.mark.usefixtures("no_scores_in_memory")
def test_a_block_of_earlier_keys(rule: ScoreRule, p: float, causal: bool) -> None:
    """Fewer queries than keys: the last query attends the last key."""
    q, k, v = (
        random((2, 4, 20, 24), DTYPE, "bnsd"),
        *(random((2, 2, 50, e), DTYPE, "bnsd") for e in (24, 10)),
    )
    how: dict[str, Any] = {"causal": causal, "rule": rule, "dropped": dropout(2, 4, 20, 50, p) if p else None}
    how["alibi"] = alibi_of(4, 20, 50) if (rule, p) == BIASED else None
    wide = [x.double() for x in (q, k, v)]
    expected, expected_lse = reference(*wide, **how)
    out, lse = block_attention.attention_block(q, k, v, **how, kernels=TILES)
    grad = random(out.shape, DTYPE, "bnsd")
    found = block_attention.attention_block_backward(grad, q, k, v, out, lse, **how, kernels=TILES)
    right = reference_backward(grad.double(), *wide, expected, expected_lse, **how)
    for mine, theirs in zip((out, lse, *found), (expected, expected_lse, *right), strict=True):
        assert relative_error(mine, theirs) < BOUND


@pytest.mark.usefixtures("no_scores_in_memory")
def test_a_block_of_wide_heads() -> None:
    """Without a cap, dropout or bias: torch's fused operations for GPUs end at 256."""
    q, k, v = (random((1, heads, 20, 272), DTYPE, "bnsd") for heads in (2, 1, 1))
    expected, expected_lse = reference(*(x.double() for x in (q, k, v)), causal=True)
    out, lse = block_attention.attention_block(q, k, v, causal=True, kernels=TILES)
    assert block_attention.server_of(q, k, v, kernels=TILES, drops=False) == "tiles"
    assert relative_error(out, expected) < BOUND
    assert relative_error(lse, expected_lse) < BOUND


@pytest.mark.parametrize(
    ("rule", "p", "starts"),
    slow_but(
        [1, 2, 5],
        [(*how, starts) for how in (*CAP_AND_DROPOUT, BIASED) for starts in (None, SEVERAL)],
    ),
    ids=["cap", "cap, documents", "dropout", "dropout, documents", "bias", "bias, documents"],
)
@pytest.mark.usefixtures("no_scores_in_memory")
def test_blocks_of_a_rank_are_merged(rule: ScoreRule, p: float, starts: tuple[int, ...] | None) -> None:
    """Rank 1 of cp 2 has the second and third quarter of two samples' queries. Samples may have documents."""
    length = 40
    q, k, v, grad = (random((2, heads, length, 16), DTYPE, "bnsd") for heads in (4, 2, 2, 4))
    held = torch.tensor(deal.positions(length, 2, 1), device=DEVICE)
    everywhere = torch.arange(length, device=DEVICE)
    seen = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()[held]
    if starts is not None:
        document = torch.searchsorted(torch.tensor(starts), torch.arange(2 * length), right=True).view(2, -1).to(DEVICE)
        seen = (seen & (document[:, held, None] == document[:, None, :]))[:, None]
    drops = AttentionDropout(p, 11, 5, range(4), torch.tensor([4, 9], device=DEVICE), held) if p else None
    q, grad = q[:, :, held], grad[:, :, held]
    blocks = deal.blocks(deal.chunks(length, 2, 1), [(0, length)], length, starts)
    alibi = replace(alibi_of(4, 1, 1), queries_q=held, keys_k=held) if (rule, p) == BIASED else None
    scoring = Scoring(rule, TILES, dropout=drops, alibi=alibi)
    places = Places(scoring, [(0, length)])
    result = Result(q, 16, scoring)
    result.add(q, k, v, blocks, places)
    gradient = Gradient(grad, q, result.out.to(DTYPE), result.lse, scoring)
    grad_k, grad_v = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
    gradient.add(k, v, blocks, places, grad_k, grad_v)
    wide = [x.double() for x in (q, k, v)]
    how: dict[str, Any] = {"causal": False, "rule": rule, "dropped": drops.of(everywhere) if drops else None}
    how["alibi"] = replace(alibi, keys_k=everywhere) if alibi else None
    expected, lse = reference(*wide, **how, seen=seen)
    right = reference_backward(grad.double(), *wide, expected, lse, **how, seen=seen)
    for mine, theirs in zip((result.out, gradient.q, grad_k, grad_v), (expected, *right), strict=True):
        assert relative_error(mine, theirs) < BOUND


def test_ranks_of_cp_compute_by_the_kernels_of_the_run() -> None:
    """Blocks of documents leave cuDNN out: they have new shapes in each step."""
    noted: list[Kernels] = []

    def gather(q: Tensor, *others: Any) -> Tensor:
        noted.append(others[4].kernels)
        return q

    kernels = Kernels(attention="cudnn", masked_attention="triton")
    core = CoreAttention(Axis("cp", 2, 0, (0, 1)), "gather", [0, 1], kernels, torch.device("cpu"), 8, 8)
    rows = torch.zeros(4, 1, 2, 8)
    for starts in (None, (0, 3, 8)):
        batch = MicroBatch.of_samples(*[torch.zeros(1, 8)] * 3, torch.arange(1))
        batch = replace(batch, starts_on_host=starts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "gather_attention", gather)
            core(rows, rows, rows, batch, None)
    assert noted == [kernels, replace(kernels, attention="torch")]
