"""One call of FlashAttention 2 for the documents of a chunk. Its operations have no CPU form, so stand-ins with its
rules are registered for CPUs in torch's dispatcher: causal masks aligned at the last key, the lse of documents [n, t].
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from megapar_kernels import block_attention
from megapar_kernels.attention import packed_causal_attention
from megapar_kernels.backend import Kernels
from megapar_kernels.block_attention import ScoreRule
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megapar.base.grid import Grid
from megapar.comm.axis import Axis
from megapar.context_parallel import deal, partial
from megapar.declare import context
from tests.support.attention_blocks import LENGTH, PACKED, WIDTH, Calls, attend, brute_mask, packed
from tests.support.distributed import run_ranks
from tests.support.kernel_checks import relative_error

FORWARD, BACKWARD = "_flash_attention_forward", "_flash_attention_backward"
DENSE = "_scaled_dot_product_flash_attention"


@settings(max_examples=60, deadline=None)
@given(packed())
def test_documents_together_are_the_mask(case: tuple[int, int, tuple[int, ...]]) -> None:
    """Each pair of a query and a key once, by two calls for a sample at most."""
    cp, length, starts = case
    for rank in range(cp):
        queries, own = deal.positions(length, cp, rank), deal.chunks(length, cp, rank)
        for ranges, keys in (([(0, length)], list(range(length))), (own, queries)):
            found = deal.together(deal.blocks(own, ranges, length, starts))
            assert len(found) <= 4  # two samples of two chunks
            count = torch.zeros(2, length, length, dtype=torch.int)[:, : len(queries), : len(keys)]
            for block in found:
                part = count[block.samples, block.queries, block.keys]
                bounds = block.documents or ((0, part.shape[1]), (0, part.shape[2]))
                for q_start, q_stop, k_start, k_stop in zip(
                    bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False
                ):
                    ones = torch.ones(q_stop - q_start, k_stop - k_start, dtype=torch.int)
                    part[:, q_start:q_stop, k_start:k_stop] += ones.tril(ones.shape[1] - ones.shape[0])
            assert torch.equal(count, brute_mask(length, starts, queries, keys).int())


@pytest.mark.parametrize(("width", "v_width"), [(128, 128), (192, 128), (64, 80)])
def test_documents_have_their_shapes(width: int, v_width: int) -> None:
    with FakeTensorMode():
        q, k, v = (
            torch.empty(1, n, t, d, dtype=torch.bfloat16, device="cuda")
            for n, t, d in ((4, 6, width), (2, 9, width), (2, 9, v_width))
        )
        bounds = [torch.empty(3, dtype=torch.int32, device="cuda") for _ in range(2)]
        documents = block_attention.Documents(*bounds, 4, 6)
        assert block_attention.takes_documents(q, v)
        out, lse = block_attention.attention_documents(q, k, v, documents)
        assert (out.shape, lse.shape, lse.dtype) == ((1, 4, 6, v_width), (1, 4, 6), torch.float32)
        gradients = block_attention.attention_documents_backward(out, q, k, v, out, lse, documents)
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


# The stand-ins


def forward(
    q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, return_debug_mask: bool, *, scale: float | None = None, **rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert (dropout_p, is_causal, return_debug_mask) == (0.0, True, False)
    assert cum_q.dtype == cum_k.dtype == torch.int32
    assert (max_q, max_k) == (cum_q.diff().max(), cum_k.diff().max())
    assert (cum_q[-1], cum_k[-1]) == (len(q), len(k))
    found = []
    for document in zip(*(x.split(c.diff().tolist()) for x, c in ((q, cum_q), (k, cum_k), (v, cum_k))), strict=True):
        rows = (x.transpose(0, 1)[None] for x in document)
        found.append(block_attention.reference(*rows, causal=True, rule=ScoreRule(scale)))
    out = torch.cat([out[0].transpose(0, 1) for out, _ in found])
    unused = torch.empty(0)
    return out, torch.cat([lse[0] for _, lse in found], dim=1), unused, unused, unused


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_q: Tensor, cum_k: Tensor,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor, *,
    scale: float | None = None, **rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert (max_q, max_k, dropout_p, is_causal) == (cum_q.diff().max(), cum_k.diff().max(), 0.0, True)
    assert (lse.shape, lse.is_contiguous()) == ((q.shape[1], len(q)), True)
    found = []
    of_queries, of_keys = cum_q.diff().tolist(), cum_k.diff().tolist()
    columns = [x.split(n) for x, n in ((grad_out, of_queries), (q, of_queries), (k, of_keys), (v, of_keys))]
    for *document, o, lse_nt in zip(*columns, out.split(of_queries), lse.split(of_queries, 1), strict=True):
        rows = (x.transpose(0, 1)[None] for x in (*document, o))
        found.append(block_attention.reference_backward(*rows, lse_nt[None], causal=True, rule=ScoreRule(scale)))
    return tuple(torch.cat([x[0].transpose(0, 1) for x in parts]) for parts in zip(*found, strict=True))


def dense(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False,
    *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    out, lse = block_attention.reference(q, k, v, causal=is_causal, rule=ScoreRule(scale))
    unused = torch.empty(0)
    return out, lse, unused, unused, q.shape[2], k.shape[2], unused, unused, unused


def dense_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_q: Any, cum_k: Any, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, seed: Tensor, offset: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return block_attention.reference_backward(grad_out, q, k, v, out, lse, causal=is_causal, rule=ScoreRule(scale))


def stand_in() -> torch.library.Library:
    """FlashAttention 2 for CPUs, while the result is kept."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in (
        (FORWARD, forward),
        (BACKWARD, backward),
        (DENSE, dense),
        (f"{DENSE}_backward", dense_backward),
    ):
        library.impl(name, function, "CPU")
    block_attention._flash_serves = lambda q, v: True
    partial.takes_earlier_keys = lambda q, k, v, impl: True
    return library


def attended_on_one_rank(heads: int, kv_heads: int, v_width: int) -> tuple[list[Tensor], list[str]]:
    """The output and the gradients of q, k and v of documents of two samples, and the operations that ran."""
    generator = torch.Generator().manual_seed(heads)
    shapes = (heads, WIDTH), (kv_heads, WIDTH), (kv_heads, v_width)
    leaves = [torch.randn(LENGTH, 2, *x, generator=generator, dtype=torch.float64).requires_grad_() for x in shapes]
    starts = torch.tensor([0, LENGTH, LENGTH + 1, LENGTH + 9, 2 * LENGTH], dtype=torch.int32)
    with Calls() as calls:
        y = packed_causal_attention(*leaves, starts, scale=0.3)
        grad = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        gradients = torch.autograd.grad(y, leaves, grad)
    return [y.detach(), *gradients], calls.names


@pytest.mark.parametrize(("heads", "kv_heads", "v_width"), [(4, 4, WIDTH), (4, 2, WIDTH), (4, 1, 4), (2, 2, 10)])
def test_documents_on_one_rank_are_one_call(
    heads: int, kv_heads: int, v_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each head of k and v is read by its queries, and not repeated."""
    expected, _ = attended_on_one_rank(heads, kv_heads, v_width)
    monkeypatch.setattr(block_attention, "_flash_serves", block_attention._flash_serves)  # to restore it
    monkeypatch.setattr(partial, "takes_earlier_keys", partial.takes_earlier_keys)
    library = stand_in()
    found, ran = attended_on_one_rank(heads, kv_heads, v_width)
    del library
    assert ran.count(FORWARD) == ran.count(BACKWARD) == 1
    assert not {"repeat_interleave", "repeat"} & set(ran)
    for mine, theirs in zip(found, expected, strict=True):
        assert relative_error(mine, theirs) < 1e-12


# On real ranks

CASES = [(4, 2, WIDTH, PACKED), (4, 1, 4, PACKED), (4, 4, WIDTH, None)]


def attend_all(cp: int) -> list[Any]:
    library = stand_in()
    axis = context.create(Grid(cp=cp)).cp
    found = [attend(axis, form, *case, Kernels()) for form in ("gather", "ring") for case in CASES]
    del library
    return found


@pytest.mark.parametrize("cp", [2, 3])
def test_documents_together_are_one_process(cp: int) -> None:
    """The output, dQ, dK and dV in fp64, by fewer calls than documents."""
    ranks = run_ranks(cp, attend_all, cp)
    alone = Axis("cp")
    order = torch.tensor([p for rank in range(cp) for p in deal.positions(LENGTH, cp, rank)]).argsort()
    number = 0
    for form in ("gather", "ring"):
        for case in CASES:
            expected, _ = attend(alone, form, *case, Kernels())
            found = [torch.cat(parts)[order] for parts in zip(*(rank[number][0] for rank in ranks), strict=True)]
            for mine, theirs in zip(found, expected, strict=True):
                assert relative_error(mine, theirs) < 1e-12, (form, case)
            for rank, (_, calls) in enumerate(found_rank[number] for found_rank in ranks):
                assert calls.count(FORWARD) == calls.count(BACKWARD)
                if case[3] and form == "gather":
                    alone_each = deal.blocks(deal.chunks(LENGTH, cp, rank), [(0, LENGTH)], LENGTH, case[3])
                    total = calls.count(FORWARD) + calls.count(DENSE)
                    assert total == len(deal.together(alone_each)) < len(alone_each)
            number += 1
    everything = [name for rank in ranks for _, calls in rank for name in calls]
    assert FORWARD in everything
