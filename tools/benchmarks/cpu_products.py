"""fp32 matrix products and attention on this CPU: what megapar may choose beside what torch chooses, in turns.

- Products by oneDNN beside those by MKL. Forward is y = x W^T, and backward the gradient of x. megapar takes oneDNN for
  some of them on AMD's CPUs with AVX-512 (kernels/megapar_kernels/onednn.py).
- Causal attention in blocks of rows (`block_attention.in_blocks_of_rows`) beside torch's SDPA, forward and backward
  together.

Speed is megapar's choice over torch's: the median of the rounds.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megapar_kernels import onednn
from megapar_kernels.attention import sdpa
from torch import Tensor

from benchmarks.harness import Found, Output, tables

_SECONDS = 0.02  # of one product and library in a round, so that a short one is repeated


@dataclass(frozen=True)
class Options(Output):
    """Time products and attention of several shapes."""

    rows: tuple[int, ...] = (64, 512, 4096)
    """Tokens of a micro-batch."""
    matrices: tuple[str, ...] = ("256x256", "1408x256", "256x704", "4096x256", "2816x1024", "1024x1408", "8192x1024")
    """Outputs x inputs."""
    attention: tuple[str, ...] = ("2x8x4x192x32", "2x8x4x256x32", "1x32x8x512x64", "2x16x4x1024x64", "1x16x8x1024x128")
    """Samples x query heads x key/value heads x positions x width of a head."""
    threads: int = 1
    """Threads of each product."""
    rounds: int = 9
    """Times that the two libraries take turns."""


def measure(options: Options) -> Found:
    """Time all products, then attention."""
    torch.set_num_threads(options.threads)
    found: list[dict[str, Any]] = []
    for matrix in options.matrices:
        outputs, inputs = (int(size) for size in matrix.split("x"))
        weight = torch.randn(outputs, inputs)
        for rows in options.rows:
            x, grad = torch.randn(rows, inputs), torch.randn(rows, outputs)
            forward = _speeds(partial(F.linear, x, weight), partial(onednn.linear, x, weight), options.rounds)
            backward = _speeds(
                partial(torch.matmul, grad, weight), partial(onednn.linear, grad, weight.t()), options.rounds
            )
            found.append({"outputs": outputs, "inputs": inputs, "rows": rows, "forward": forward, "backward": backward})
    attention = {shape: _attention_speeds(shape, options.rounds) for shape in options.attention}
    chosen = "megapar takes oneDNN on this CPU" if onednn.IS_FASTER else "megapar leaves this CPU to MKL"
    numbers = {"products": found, "attention": attention}
    return Found(numbers, [*tables(numbers), chosen])


def _attention_speeds(shape: str, rounds: int) -> list[float]:
    """The speed of megapar's causal attention over SDPA's in each round."""
    samples, heads, kv_heads, length, width = (int(size) for size in shape.split("x"))
    q = torch.randn(samples, heads, length, width, requires_grad=True)
    k, v = (torch.randn(samples, kv_heads, length, width, requires_grad=True) for _ in range(2))
    torchs = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=heads != kv_heads)
    return _speeds(partial(_with_backward, torchs, q, k, v), partial(_with_backward, sdpa, q, k, v), rounds)


def _with_backward(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> None:
    torch.autograd.grad(attention(q, k, v), (q, k, v), q.detach())


def _speeds(torchs: Callable[[], Any], ours: Callable[[], Any], rounds: int) -> list[float]:
    """The speed of our choice over torch's in each round."""
    _seconds(ours, 1)  # oneDNN compiles
    shortest = min(_seconds(work, 1) for work in (torchs, ours))
    times = max(1, round(_SECONDS / shortest))
    return [_seconds(torchs, times) / _seconds(ours, times) for _ in range(rounds)]


def _seconds(work: Callable[[], Any], times: int) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        work()
    return time.perf_counter() - begun
