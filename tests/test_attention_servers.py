"""Who computes attention is chosen by shape, and told in words that are those of the operation that runs."""

from typing import Any

import pytest
import torch
from megapar_kernels import tiled_attention
from megapar_kernels.alibi import Alibi
from megapar_kernels.backend import Kernels
from megapar_kernels.block_attention import ScoreRule
from torch import nn
from torch._subclasses import FakeTensorMode

from megapar.comm.axis import Axis
from megapar.context_parallel.attention import CoreAttention
from megapar.context_parallel.dropout import AttentionDropout
from megapar.context_parallel.scoring import Scoring
from megapar.declare.batch import MicroBatch
from megapar.observe.report import attention_in_words
from tests.support.attention_blocks import Calls

FUSED = Kernels(masked_attention="triton", attention="cudnn")
TORCH = Kernels()
CAPPED = ScoreRule(0.3, 3.0)
SLOPES = (0.5, 0.25, 0.125, 0.0625)
ONE = Axis("cp")


def server(device: str, ranks: int = 1, kernels: Kernels = FUSED, **given: Any) -> str:
    """Who would compute attention of 8 positions with 4 heads that read 2, on one of so many ranks of cp."""
    widths = given.get("widths", (64, 64))
    options = {key: given[key] for key in ("window", "rule", "slopes") if key in given}
    cp = ONE if ranks == 1 else Axis("cp", ranks, 0, tuple(range(ranks)))
    core = CoreAttention(cp, "gather", [0, 0, 1, 1], kernels, torch.device("cpu"), *widths, **options)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    starts = torch.tensor([0, 3, 8], dtype=torch.int32) if given.get("documents") else None
    batch = MicroBatch.of_samples(tokens, tokens, torch.ones(1, 8), torch.arange(1), starts).columns(torch.arange(8))
    with FakeTensorMode(allow_non_fake_inputs=True):
        dtype = given.get("dtype", torch.bfloat16)
        q = torch.empty(8, 1, 4, widths[0], device=device, dtype=dtype)
        k, v = (torch.empty(8, 1, 2, width, device=device, dtype=dtype) for width in widths)
        sinks = torch.empty(4, device=device) if given.get("sinks") else None
        drops = AttentionDropout(0.5, 1, 2, range(4), tokens[:, 0], tokens[0]) if given.get("drops") else None
        alibi = Alibi(core.slopes_n, tokens[0], tokens[0]) if core.slopes_n is not None else None
        scoring = Scoring(core.rule, kernels, core.window, drops, alibi=alibi)
        return core._server(q, k, v, batch, scoring, sinks)


ON_GPUS: list[tuple[dict[str, Any], str]] = [
    ({}, "cuDNN, or FlashAttention 2 where it refuses"),
    ({"kernels": TORCH}, "torch's SDPA"),
    ({"widths": (192, 128)}, "FlashAttention 2"),
    ({"widths": (96, 64)}, "cuDNN"),
    ({"documents": True}, "FlashAttention 2"),
    ({"documents": True, "dtype": torch.float32}, "torch's SDPA with a mask"),
    ({"window": 4}, "our kernels"),
    ({"window": 4, "kernels": TORCH}, "torch's SDPA with a mask"),
    ({"sinks": True, "documents": True}, "our kernels"),
    ({"rule": CAPPED}, "our kernels"),
    ({"rule": CAPPED, "kernels": TORCH}, "torch's ops with scores in memory"),
    ({"rule": CAPPED, "widths": (320, 320)}, "our kernels"),
    ({"rule": CAPPED, "widths": (520, 520)}, "torch's ops with scores in memory"),
    ({"slopes": SLOPES, "documents": True}, "our kernels"),
    ({"slopes": SLOPES, "kernels": TORCH}, "torch's ops with scores in memory"),
    ({"drops": True}, "our kernels"),
    ({"drops": True, "window": 4, "documents": True}, "our kernels"),
    ({"drops": True, "kernels": TORCH}, "torch's ops with scores in memory"),
    ({"drops": True, "window": 4, "kernels": TORCH}, "torch's ops with scores in memory"),
    ({"ranks": 2}, "cuDNN in blocks"),
    ({"ranks": 2, "documents": True}, "FlashAttention 2 in blocks"),
    ({"ranks": 2, "widths": (192, 128)}, "FlashAttention 2 in blocks"),
    ({"ranks": 2, "dtype": torch.float32}, "torch's ops with scores in memory in blocks"),
    ({"ranks": 2, "rule": CAPPED}, "our kernels in blocks"),
    ({"ranks": 2, "rule": CAPPED, "kernels": TORCH}, "torch's ops with scores in memory in blocks"),
    ({"ranks": 2, "slopes": SLOPES, "documents": True}, "our kernels in blocks"),
    ({"ranks": 2, "slopes": SLOPES, "kernels": TORCH}, "torch's ops with scores in memory in blocks"),
    ({"ranks": 2, "drops": True}, "our kernels in blocks"),
    ({"ranks": 2, "drops": True, "dtype": torch.float32}, "torch's ops with scores in memory in blocks"),
]


@pytest.mark.parametrize(("given", "expected"), ON_GPUS)
def test_who_computes_on_a_gpu(given: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton need not be here: the kernels are not launched.
    monkeypatch.setattr(tiled_attention, "on_gpu", lambda q, impl: q.is_cuda)
    assert server("cuda", **given) == expected


ON_CPUS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "torch's fused operation for CPUs", "_flash_attention_for_cpu"),
    ({"widths": (12, 8)}, "torch's fused operation for CPUs", "_flash_attention_for_cpu"),
    ({"documents": True}, "torch's fused operation for CPUs", "_flash_attention_for_cpu"),
    ({"window": 4}, "torch's fused operation for CPUs", "_flash_attention_for_cpu"),
    ({"rule": CAPPED}, "torch's ops with scores in memory", "tanh"),
    ({"drops": True}, "torch's ops with scores in memory", "bitwise_xor"),
]


@pytest.mark.parametrize(("given", "expected", "operation"), ON_CPUS)
def test_what_is_told_is_what_runs(given: dict[str, Any], expected: str, operation: str) -> None:
    widths = given.get("widths", (8, 8))
    options = {key: given[key] for key in ("window", "rule") if key in given}
    core = CoreAttention(ONE, "gather", [0, 0, 1, 1], TORCH, torch.device("cpu"), *widths, **options)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    starts = torch.tensor([0, 3, 8], dtype=torch.int32) if given.get("documents") else None
    batch = MicroBatch.of_samples(tokens, tokens, torch.ones(1, 8), torch.arange(1), starts)
    q, k, v = (torch.randn(8, 1, heads, width) for heads, width in ((4, widths[0]), (2, widths[0]), (2, widths[1])))
    drops = AttentionDropout(0.5, 1, 2, range(4), batch.sample_ids_b, batch.positions_s) if "drops" in given else None
    with Calls() as calls:
        core(q, k, v, batch, drops)
    assert core.server == expected
    assert calls.of(operation)
    other = CoreAttention(ONE, "gather", [0], TORCH, torch.device("cpu"), 8, 8)
    assert attention_in_words([nn.ModuleList([core, core, other])]) == f"attention: 1 layer by {expected}"
    other.server = "cuDNN"
    assert attention_in_words([core, other]) == f"attention: 1 layer by {expected}; 1 layer by cuDNN"
