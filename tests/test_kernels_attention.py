"""Attention by torch's ops: packed documents, windows, caps, sinks, and the order of its backends."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megapar_kernels.attention import causal_attention, masked_causal_attention, packed_causal_attention, sdpa
from megapar_kernels.block_attention import ScoreRule, in_blocks_of_rows, reference, reference_backward
from megapar_kernels.dropout import RowDropout
from megapar_kernels.ruled_attention import ruled_attention
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megapar.declare.random import row_keys
from tests.support.kernel_checks import DEVICE, relative_error

pytestmark = pytest.mark.gpu

ON_GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float64
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}
LENGTHS = (1, 7, 12, 5, 14, 1)  # two samples of 20 positions
# Head widths and dtypes: what FlashAttention serves on a GPU, and what a mask must serve there.
CASES = [(packed_causal_attention, 32, DTYPE)]
CASES += [(masked_causal_attention, width, torch.float32 if ON_GPU else torch.float64) for width in (10, 32)]
if ON_GPU:
    CASES += [(packed_causal_attention, 10, torch.float32), (packed_causal_attention, 10, torch.bfloat16)]
each_case = pytest.mark.parametrize(("attention", "width", "dtype"), CASES)


def packed(kv_heads: int, width: int, dtype: torch.dtype, narrower: int = 0) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the starts of documents. A head of v is `narrower` than one of q and k."""
    torch.manual_seed(kv_heads)
    shapes = [(4, width), (kv_heads, width), (kv_heads, width - narrower)]
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).to(DEVICE, torch.int32)
    length = sum(LENGTHS) // 2
    return [torch.randn(length, 2, *shape, dtype=dtype, device=DEVICE, requires_grad=True) for shape in shapes], starts


def in_a_row(x_sb: Tensor) -> Tensor:
    """Positions of all samples, one sample after another."""
    return x_sb.transpose(0, 1).flatten(0, 1)


@each_case
@pytest.mark.parametrize(("kv_heads", "narrower"), [(1, 0), (2, 0), (4, 0), (2, 3)])
def test_packed_documents_are_attended_to_as_if_each_were_alone(
    attention: Callable[..., Tensor], width: int, dtype: torch.dtype, kv_heads: int, narrower: int
) -> None:
    inputs, starts = packed(kv_heads, width, dtype, narrower)
    found = attention(*inputs, starts)
    alone = zip(*(in_a_row(x).split(LENGTHS) for x in inputs), strict=True)
    expected = torch.cat([causal_attention(*(x[:, None] for x in document))[:, 0] for document in alone])
    expected = expected.unflatten(0, (2, -1)).transpose(0, 1)
    grad = torch.randn_like(expected)
    assert relative_error(found, expected) < TOLERANCE[dtype]
    pairs = zip(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True)
    for mine, theirs in pairs:
        assert relative_error(mine, theirs) < TOLERANCE[dtype]


@each_case
def test_no_gradient_crosses_a_document(attention: Callable[..., Tensor], width: int, dtype: torch.dtype) -> None:
    """Exactly none: a loss on the third document alone."""
    inputs, starts = packed(2, width, dtype)
    third = slice(int(starts[2]), int(starts[3]))
    loss = in_a_row(attention(*inputs, starts))[third].square().sum()
    for grad in map(in_a_row, torch.autograd.grad(loss, inputs)):
        assert grad[third].any()
        assert not grad[: third.start].any()
        assert not grad[third.stop :].any()


@pytest.mark.skipif(ON_GPU, reason="blocks of rows are for a CPU alone")
@pytest.mark.parametrize(("length", "kv_heads", "v_width"), [(192, 4, 10), (200, 2, 10), (257, 1, 10), (1024, 2, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_a_cpu_blocks_of_rows_give_what_explicit_scores_give(
    length: int, kv_heads: int, v_width: int, dtype: torch.dtype
) -> None:
    """Also lengths of no whole number of blocks, and a gradient that is not contiguous."""
    torch.manual_seed(length)
    shapes = [(2, 4, length, 10), (2, kv_heads, length, 10), (2, kv_heads, length, v_width)]
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    grad = torch.randn(length, 2, 4, v_width, dtype=dtype).permute(1, 2, 0, 3)
    assert in_blocks_of_rows(q)
    found = sdpa(q, k, v, scale=0.5)
    mine = torch.autograd.grad(found, (q, k, v), grad)
    wide = [x.double() for x in (q, k, v)]
    expected, lse = reference(*wide, causal=True, rule=ScoreRule(0.5))
    theirs = reference_backward(grad.double(), *wide, expected, lse, causal=True, rule=ScoreRule(0.5))
    for one, other in zip((found, *mine), (expected, *theirs), strict=True):
        assert relative_error(one, other) < (1e-6 if dtype == torch.float32 else 1e-14)


class Scores(TorchDispatchMode):
    """Counts the scores that torch's attention for CPUs is asked for, queries times keys."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.counts["forward"] += args[0].shape[2] * args[1].shape[2]
        elif operation is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            self.counts["backward"] += args[1].shape[2] * args[2].shape[2]
        return operation(*args, **(kwargs or {}))


@pytest.mark.skipif(ON_GPU, reason="blocks of rows are for a CPU alone")
@pytest.mark.parametrize(("length", "seen"), [(256, 5 / 8), (512, 9 / 16)])
def test_on_a_cpu_a_block_of_rows_gets_no_later_keys(length: int, seen: float) -> None:
    """The share of all scores that torch's operations compute, forward and backward."""
    q = torch.randn(1, 1, length, 8, requires_grad=True)
    with Scores() as scores:
        sdpa(q, q, q).sum().backward()
    assert scores.counts == dict.fromkeys(("forward", "backward"), seen * length**2)


@dataclass(frozen=True)
class Ruled:
    """A case of `ruled_attention` by torch's ops. `documents` are the lengths of documents in both samples."""

    length: int = 150
    window: int = 0
    cap: float = 0.0
    sinks: bool = False
    documents: tuple[int, ...] = ()
    kv_heads: int = 2
    v_width: int = 10
    p: float = 0.0


RULED = {
    "window": Ruled(window=70),
    "window of one": Ruled(window=1, sinks=True),
    "window of two": Ruled(window=2),
    "window of a block": Ruled(window=64),
    "window beyond": Ruled(window=500),
    "window of one less": Ruled(window=149),
    "whole blocks": Ruled(length=192, window=64, kv_heads=4),
    "fewer than a block": Ruled(length=17, window=5, kv_heads=1),
    "one position": Ruled(length=1, window=3, sinks=True),
    "sinks": Ruled(sinks=True),
    "window and sinks": Ruled(window=40, sinks=True, v_width=6),
    "window and documents": Ruled(window=40, documents=(1, 90, 59, 75, 75)),
    "sinks and documents": Ruled(sinks=True, documents=(150, 60, 90)),
    "narrower queries": Ruled(window=70, v_width=16),
    "cap": Ruled(window=70, cap=3.0, sinks=True, documents=(1, 90, 59, 150)),
    "dropout": Ruled(length=300, p=0.4),
    "dropout of few": Ruled(length=3, p=0.5, kv_heads=4),
    "all": Ruled(length=300, window=270, cap=3.0, sinks=True, documents=(1, 290, 9, 300), p=0.1),
}


def random_dropout(length: int, p: float) -> RowDropout:
    """Of two samples and four heads."""
    sample, head, position = torch.arange(2)[:, None, None], torch.arange(4)[None, :, None], torch.arange(length)
    return RowDropout(row_keys(3, 7, sample, head, position).to(DEVICE), position.to(DEVICE), p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", RULED.values(), ids=RULED.keys())
def test_windows_caps_sinks_and_dropout_by_torchs_ops_are_explicit_scores(case: Ruled, dtype: torch.dtype) -> None:
    torch.manual_seed(case.length)
    shapes = [(4, 10), (case.kv_heads, 10), (case.kv_heads, case.v_width)]
    sbnd = [torch.randn(case.length, 2, *shape, dtype=dtype, device=DEVICE, requires_grad=True) for shape in shapes]
    sinks_n = torch.randn(4, dtype=dtype, device=DEVICE, requires_grad=True) if case.sinks else None
    documents_bs = None
    if case.documents:
        documents_bs = torch.arange(len(case.documents)).repeat_interleave(torch.tensor(case.documents))
        documents_bs = documents_bs.view(2, case.length).to(DEVICE)
    rule = ScoreRule(0.5, case.cap)
    dropped = random_dropout(case.length, case.p) if case.p else None
    inputs = [*sbnd, sinks_n] if sinks_n is not None else sbnd
    options: dict[str, Any] = {"documents_bs": documents_bs, "window": case.window}
    found = ruled_attention(*sbnd, rule, sinks_n=sinks_n, **options, drops=(lambda: dropped) if dropped else None)
    grad = torch.randn_like(found)
    mine = torch.autograd.grad(found, inputs, grad)

    wide = [x.detach().double().requires_grad_() for x in inputs]
    q, k, v = (x.permute(1, 2, 0, 3).repeat_interleave(4 // x.shape[2], 1) for x in wide[:3])
    scores = q @ k.transpose(-1, -2) * 0.5
    if case.cap:
        scores = case.cap * (scores / case.cap).tanh()
    position = torch.arange(case.length, device=DEVICE)
    behind = position[:, None] - position
    seen = (behind >= 0) & (behind < (case.window or case.length))
    if documents_bs is not None:
        seen = seen & (documents_bs[:, :, None] == documents_bs[:, None, :])[:, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    if case.sinks:
        scores = torch.cat((scores, wide[3].view(1, 4, 1, 1).expand(2, 4, case.length, 1)), -1)
    probabilities = scores.softmax(-1)[..., : case.length]
    if dropped is not None:
        probabilities = probabilities * dropped.keep() / (1.0 - case.p)
    expected = (probabilities @ v).permute(2, 0, 1, 3).flatten(2)
    theirs = torch.autograd.grad(expected, wide, grad.double())
    for one, other in zip((found, *mine), (expected, *theirs), strict=True):
        assert relative_error(one, other) < TOLERANCE[dtype]


@pytest.mark.parametrize("documents", [None, (1, 19, 12, 8)])
def test_one_mask_of_a_window_gives_what_blocks_give(documents: tuple[int, ...] | None) -> None:
    """A GPU without our kernels takes the mask."""
    dtype = torch.float32 if ON_GPU else torch.float64
    inputs, _ = packed(2, 10, dtype)
    starts = documents_bs = None
    if documents:
        starts = torch.tensor([0, *documents]).cumsum(0).to(DEVICE, torch.int32)
        documents_bs = torch.arange(4).repeat_interleave(torch.tensor(documents)).view(2, 20).to(DEVICE)
    found = masked_causal_attention(*inputs, starts, window=5, scale=0.5)
    expected = ruled_attention(*inputs, ScoreRule(0.5), documents_bs=documents_bs, window=5)
    grad = torch.randn_like(expected)
    pairs = zip(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True)
    for mine, theirs in ((found, expected), *pairs):
        assert relative_error(mine, theirs) < TOLERANCE[dtype]


@pytest.mark.skipif(ON_GPU, reason="the fused operation is a CPU's")
def test_on_a_cpu_a_block_of_a_window_gets_its_own_keys_alone() -> None:
    """Each block of 64 queries has the scores of its window and itself, forward and backward."""
    q = torch.randn(512, 1, 2, 8, requires_grad=True)
    with Scores() as scores:
        ruled_attention(q, q, q, ScoreRule(), window=129).sum().backward()
    of_blocks = 64 * (64 + 128 + 6 * 192)
    assert scores.counts == dict.fromkeys(("forward", "backward"), of_blocks)


def test_the_order_of_backends_changes_no_result() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 33, 32, dtype=DTYPE, device=DEVICE) for heads in (4, 2, 2))
    assert relative_error(sdpa(q, k, v, "cudnn"), sdpa(q, k, v)) < TOLERANCE[DTYPE]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dropout_attention_rounds_no_more_than_its_format_or_fused_attention(dtype: torch.dtype) -> None:
    """Fault scores-scaled-before-rounding. Unscaled scores lie beyond fp16's 65504.

    What all keys have in common cancels in the sums of gradients, and leaves roundings. In 16 bits the rounding of the
    result decides, which `exact` repeats. In fp32 the roundings of scores decide, and torch's fused attention without
    dropout has these too.
    """
    torch.manual_seed(0)
    shape = (24, 2, 4, 128)
    near = torch.randn(1, 1, 1, 128, dtype=torch.float64) * 28.0  # what all queries and keys have in common
    q, k, v = (torch.randn(shape, dtype=torch.float64) + common for common in (near, near, 0.0))
    inputs = [x.to(DEVICE, dtype).requires_grad_() for x in (q, k, v)]
    assert (inputs[0][0, 0, 0].double() @ inputs[1][0, 0, 0].double()).abs() > 70_000
    dropped = random_dropout(24, 0.3)
    grad = torch.randn(24, 2, 4 * 128, dtype=torch.float64).to(DEVICE, dtype)

    def exact(kept: Tensor | float, rounded: torch.dtype = torch.float64) -> list[Tensor]:
        """Return result and gradients in fp64, whose backward reads the result in `rounded`."""
        q, k, v, grad_out = (x.detach().double().permute(1, 2, 0, 3) for x in (*inputs, grad.view(shape)))
        future = torch.ones(24, 24, dtype=torch.bool, device=DEVICE).triu(1)
        probabilities = (q @ k.mT / 128**0.5).masked_fill(future, -torch.inf).softmax(-1)
        out = (probabilities * kept @ v).to(rounded)
        rows = (grad_out * out).sum(-1, keepdim=True)
        grad_scores = probabilities * ((grad_out @ v.mT) * kept - rows) / 128**0.5
        grads = grad_scores @ k, grad_scores.mT @ q, (probabilities * kept).mT @ grad_out
        return [x.permute(2, 0, 1, 3).to(rounded) for x in (out, *grads)]

    def errors(found: Tensor, expected: list[Tensor]) -> list[float]:
        results = found.view(shape), *torch.autograd.grad(found, inputs, grad)
        return [relative_error(one, other) for one, other in zip(results, expected, strict=True)]

    kept = dropped.keep() / 0.7
    found = errors(ruled_attention(*inputs, ScoreRule(), drops=lambda: dropped), exact(kept))
    fused = errors(causal_attention(*inputs), exact(1.0))
    of_format = [relative_error(one, other) for one, other in zip(exact(kept, dtype), exact(kept), strict=True)]
    for name, mine, *allowed in zip(("out", "q", "k", "v"), found, fused, of_format, strict=True):
        assert mine < 2 * max(allowed), (name, found, fused, of_format)
