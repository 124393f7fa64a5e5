"""Attention by our own kernels: sinks, caps of scores, windows, documents and dropout, at the shapes of models."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from megapar_kernels.attention import causal_attention
from megapar_kernels.backend import Kernels
from megapar_kernels.block_attention import ScoreRule
from megapar_kernels.dispatch import Implementation
from megapar_kernels.ruled_attention import ruled_attention
from torch import Tensor

from benchmarks.kernels import peers
from benchmarks.kernels.ops import Case, Maker
from megapar.context_parallel.dropout import AttentionDropout
from megapar.context_parallel.scoring import Scoring
from megapar.context_parallel.whole import whole_attention
from megapar.declare.batch import MicroBatch


class Model(NamedTuple):
    """Sizes of attention, and its rules, of one sample."""

    op: str
    name: str
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    cap: float = 0.0
    sinks: bool = False
    documents: tuple[int, ...] = ()  # their lengths
    p: float = 0.0  # of dropout, without the rules above
    v_dim: int = 0  # width of a value, without the rules above; 0: head_dim

    @property
    def pairs(self) -> int:
        """Of a query and a key that it attends."""
        windows = [(length, min(length, self.window)) for length in self.documents or (self.tokens,)]
        return sum(length * window - window * (window - 1) // 2 for length, window in windows)


SINKS, CAP, WINDOW, DOCUMENTS, DROPOUT, WIDTHS = (
    f"attention with {what}" for what in ("sinks", "a cap", "a window", "documents", "dropout", "unlike widths")
)
LENGTHS = (3000, 120, 700, 64, 2400, 31, 1100, 777)
MODELS = (
    Model(SINKS, "gpt-oss", 8192, 64, 8, 64, window=128, sinks=True),
    Model(CAP, "Gemma 2 9B", 8192, 16, 8, 256, window=4096, cap=50.0),
    Model(WINDOW, "Mistral 7B", 8192, 32, 8, 128, window=4096),
    Model(DOCUMENTS, "8B", 8192, 32, 8, 128, window=2048, documents=LENGTHS),
    Model(DROPOUT, "GPT-3 2.7B", 8192, 32, 32, 80, window=8192, p=0.1),
    Model(WIDTHS, "DeepSeek-V3, tp 8", 8192, 16, 16, 192, window=8192, v_dim=128),
)
TINY = (
    Model(SINKS, "tiny", 8, 4, 2, 16, window=3, sinks=True),
    Model(CAP, "tiny", 8, 4, 2, 16, window=5, cap=1.0),
    Model(WINDOW, "tiny", 8, 4, 2, 16, window=5),
    Model(DOCUMENTS, "tiny", 8, 4, 2, 16, window=3, documents=(5, 1, 2)),
    Model(DROPOUT, "tiny", 8, 4, 4, 16, window=8, p=0.5),
    Model(WIDTHS, "tiny", 8, 4, 4, 24, window=8, v_dim=16),
)


def cases(models: tuple[Model, ...], impl: Implementation) -> Iterator[Case]:
    for model in models:
        if model.p:
            yield _dropout_case(model, impl)
        elif model.v_dim:
            yield _widths_case(model, impl)
        else:
            yield _case(model, impl)


def _widths_case(model: Model, impl: Implementation) -> Case:
    """Our tiles beside `causal_attention`, which layers take: FlashAttention 2 in columns of zeros."""
    tokens, heads, d, e = model.tokens, model.heads, model.head_dim, model.v_dim

    def make(m: Maker) -> tuple[Any, ...]:
        return tuple(m.floats(tokens, 1, heads, width) for width in (d, d, e))

    def ours(q: Tensor, k: Tensor, v: Tensor, impl: Implementation = "torch") -> Tensor:
        return ruled_attention(q, k, v, ScoreRule(), impl=impl)

    # Forward: scores (d) and results (e). Backward: scores, gradients of q and k (3 d), of v and probabilities (2 e).
    products = 2 * model.pairs * heads
    return Case(
        model.op, model.name, f"{tokens}x{heads}x{d}/{e}", make, partial(ours, impl=impl), causal_attention,
        (products * (d + e), products * (3 * d + 2 * e)), "flops", exact=ours,
        tolerance=None if model in TINY else 1e-2,
    )  # fmt: skip


def _dropout_case(model: Model, impl: Implementation) -> Case:
    """With the random keys of rows, which a layer computes from samples, heads and positions."""
    tokens, heads, d = model.tokens, model.heads, model.head_dim

    def make(m: Maker) -> tuple[Any, ...]:
        return *(m.floats(tokens, 1, heads, d) for _ in "qkv"), torch.arange(1, device=m.target), model.p

    def ours(q: Tensor, k: Tensor, v: Tensor, sample_ids_b: Tensor, p: float, impl: Implementation = "torch") -> Tensor:
        ids = sample_ids_b.new_zeros(1, tokens)
        batch = MicroBatch.of_samples(ids, ids, ids.float(), sample_ids_b)
        dropout = AttentionDropout(p, 1, 2, range(heads), sample_ids_b, batch.positions_s)
        scoring = Scoring(kernels=Kernels(masked_attention=impl), dropout=dropout)
        return whole_attention(q, k, v, batch, scoring)

    forward = 4 * model.pairs * heads * d
    return Case(
        model.op, model.name, f"{tokens}x{heads}x{d}", make, partial(ours, impl=impl), peers.attention_with_dropout,
        (forward, 2.5 * forward), "flops", exact=ours, same=False, tolerance=None if model in TINY else 1e-2,
    )  # fmt: skip


def _case(model: Model, impl: Implementation) -> Case:
    _, name, tokens, heads, kv_heads, d, window, cap, sinks, documents, *_ = model

    def make(m: Maker) -> tuple[Any, ...]:
        qkv = (m.floats(tokens, 1, n, d) for n in (heads, kv_heads, kv_heads))
        documents_s = None
        if documents:
            documents_s = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents)).to(m.target)
        positions = torch.arange(tokens, device=m.target)
        return *qkv, m.floats(heads) if sinks else None, peers.masks(positions, window, documents_s)

    def ours(q: Tensor, k: Tensor, v: Tensor, sinks_n: Tensor | None, masks: peers.Masks) -> Tensor:
        return ruled_attention(
            q, k, v, ScoreRule(cap=cap), sinks_n=sinks_n, documents_bs=masks.documents_bs, window=window, impl=impl
        )

    def flexible(q: Tensor, k: Tensor, v: Tensor, sinks_n: Tensor | None, masks: peers.Masks) -> Tensor:
        return peers.flexible_attention(q, k, v, sinks_n, masks, cap)

    by_scores = partial(peers.attention_by_scores, cap=cap)
    shape = f"{tokens}x{heads}/{kv_heads}x{d}, window {window}"
    if documents:
        shape += f", {len(documents)} documents"
    forward = 4 * model.pairs * heads * d
    return Case(
        model.op, name, shape, make, ours, by_scores if cap or sinks else peers.masked_attention,
        (forward, 2.5 * forward), "flops", exact=partial(peers.attention_by_kv_head, cap=cap), to_compile=flexible,
        tolerance=None if model in TINY else 1e-2,
    )  # fmt: skip
