"""cuDNN's attention for the blocks of context parallelism. Its operation has no CPU form, so a stand-in with its rules
is registered for CPUs in torch's dispatcher: a causal mask aligned at the first key, an lse of four dimensions."""

from typing import Any

import pytest
import torch
from megapar_kernels import block_attention
from megapar_kernels.backend import Kernels
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megapar.base.grid import Grid
from megapar.comm.axis import Axis
from megapar.context_parallel import deal
from megapar.declare import context
from tests.support.attention_blocks import LENGTH, PACKED, WIDTH, Calls, attend
from tests.support.distributed import run_ranks
from tests.support.kernel_checks import relative_error

aten = torch.ops.aten
FORWARD = "_scaled_dot_product_cudnn_attention"
CUDNN = Kernels(attention="cudnn")


def on_a_gpu(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize(("width", "v_width"), [(128, 128), (64, 64), (128, 64)])
@pytest.mark.parametrize(("causal", "keys"), [(True, 6), (False, 9)])
def test_a_block_by_cudnn_has_its_shapes(causal: bool, keys: int, width: int, v_width: int) -> None:
    """With tensors without values: torch's own registration of the operation takes the arguments."""
    with FakeTensorMode(), Calls() as calls:
        q, k, v = (on_a_gpu(x) for x in ((2, 4, 6, width), (2, 2, keys, width), (2, 2, keys, v_width)))
        assert not block_attention.takes_earlier_keys(q, k, v, CUDNN)
        out, lse = block_attention.attention_block(q, k, v, causal=causal, kernels=CUDNN)
        assert (out.shape, lse.shape, lse.dtype) == ((2, 4, 6, v_width), q.shape[:3], torch.float32)
        assert out.dtype == q.dtype
        gradients = block_attention.attention_block_backward(out, q, k, v, out, lse, causal=causal, kernels=CUDNN)
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    assert calls.of("attention") == [FORWARD, f"{FORWARD}_backward"]


def test_torch_says_that_the_lse_has_a_column() -> None:
    """The view and the new dimension in `attention_block` rely on it."""
    with FakeTensorMode():
        q = on_a_gpu((2, 4, 6, 64))
        lse = aten._scaled_dot_product_cudnn_attention(q, q, q, None, True, 0.0, True, scale=1.0)[1]
        assert (lse.shape, lse.is_contiguous()) == ((2, 4, 6, 1), True)


@pytest.mark.parametrize(
    ("width", "queries", "keys", "dtype", "impl"),
    [
        (192, 6, 6, torch.bfloat16, "cudnn"),
        (64, 1, 6, torch.bfloat16, "cudnn"),
        (64, 6, 1, torch.bfloat16, "cudnn"),
        (64, 6, 6, torch.bfloat16, "torch"),
    ],
)
def test_flash_attention_has_the_other_blocks(
    width: int, queries: int, keys: int, dtype: torch.dtype, impl: Any
) -> None:
    with FakeTensorMode(), Calls() as calls:
        q, k, v = (on_a_gpu((2, 4, length, width)).to(dtype) for length in (queries, keys, keys))
        out, lse = block_attention.attention_block(q, k, v, causal=False, kernels=Kernels(attention=impl))
        block_attention.attention_block_backward(out, q, k, v, out, lse, causal=False, kernels=Kernels(attention=impl))
    flash = "_scaled_dot_product_flash_attention"
    assert calls.of("attention") == [flash, f"{flash}_backward"]


# The stand-in


def _mask(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    return seen.tril() if causal else seen  # aligned at the first key


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    assert (bias, compute_log_sumexp, dropout_p, return_debug_mask) == (None, True, 0.0, False)
    rule = block_attention.ScoreRule(scale)
    out, lse = block_attention.reference(q, k, v, causal=False, rule=rule, seen=_mask(q, k, is_causal))
    unused = torch.empty(0, dtype=torch.int64)
    return out, lse[..., None], unused, unused, q.shape[2], k.shape[2], unused, unused, torch.empty(0)


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
    bias: Tensor | None, cum_q: Tensor | None, cum_k: Tensor | None, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert lse.shape == (*q.shape[:3], 1)
    assert lse.is_contiguous()
    assert grad_out.stride() == out.stride()
    assert (bias, cum_q, cum_k, max_q, max_k, dropout_p) == (None, None, None, q.shape[2], k.shape[2], 0.0)
    rule = block_attention.ScoreRule(scale)
    seen = _mask(q, k, is_causal)
    return block_attention.reference_backward(
        grad_out, q, k, v, out, lse.squeeze(-1), causal=False, rule=rule, seen=seen
    )


def stand_in() -> torch.library.Library:
    """The operation for CPUs, while the result is kept, and a choice that takes tensors on CPUs for half precision."""
    library = torch.library.Library("aten", "IMPL")
    library.impl(FORWARD, forward, "CPU")
    library.impl(f"{FORWARD}_backward", backward, "CPU")
    block_attention._cudnn_serves = lambda q, k, v, kernels: (
        kernels.attention == "cudnn" and min(q.shape[2], k.shape[2]) > 1
    )
    return library


def test_a_gradient_of_other_strides_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_attention, "_cudnn_serves", block_attention._cudnn_serves)  # to restore it
    library = stand_in()
    q, k, v = (torch.randn(2, 2, 5, 8, dtype=torch.float64) for _ in range(3))
    grad = torch.randn(5, 2, 2, 8, dtype=torch.float64).permute(1, 2, 0, 3)
    out, lse = block_attention.attention_block(q, k, v, causal=True, kernels=CUDNN)
    found = block_attention.attention_block_backward(grad, q, k, v, out, lse, causal=True, kernels=CUDNN)
    expected = block_attention.reference_backward(grad, q, k, v, out, lse, causal=True)
    del library
    for mine, theirs in zip(found, expected, strict=True):
        assert relative_error(mine, theirs) < 1e-12


# On real ranks


CASES = [
    (4, 4, WIDTH, None),
    (4, 2, WIDTH, None),
    (4, 1, 4, None),
    (4, 2, WIDTH, PACKED),
]


def attend_all(cp: int) -> list[Any]:
    library = stand_in()
    axis = context.create(Grid(cp=cp)).cp
    found = [attend(axis, form, *case, CUDNN) for form in ("gather", "ring") for case in CASES]
    del library
    return found


@pytest.mark.parametrize("cp", [2, 3])
def test_context_parallelism_by_cudnn_is_one_process(cp: int) -> None:
    """The output, dQ, dK and dV in fp64, with groups of heads and values of another width; and what is launched."""
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
                # Documents have blocks of new shapes in each step, and cuDNN would compile each of them.
                forwards = [] if case[3] else [FORWARD] * launches(form, cp, rank)
                backwards = [f"{name}_backward" for name in forwards]
                assert [name for name in calls if "cudnn" in name] == forwards + backwards, (form, case, rank)
            number += 1


def launches(form: str, cp: int, rank: int) -> int:
    """Of the forward pass, of samples that are one document: the blocks, with earlier keys in blocks of their own."""
    own = deal.chunks(LENGTH, cp, rank)
    keys = [[(0, LENGTH)]] if form == "gather" else [deal.chunks(LENGTH, cp, source) for source in range(cp)]
    found = sum(len(deal.square(deal.blocks(own, some, LENGTH))) for some in keys)
    # Gathered: two causal blocks and earlier keys of each. The first chunk has none, and the last rank's chunks are one
    # run. In a ring: one a step.
    gathered = 3 if rank == 0 else 2 if rank == cp - 1 else 4
    assert found == {"gather": gathered, "ring": cp}[form]
    return found
