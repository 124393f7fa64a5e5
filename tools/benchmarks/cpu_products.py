"""fp32 matrix products on this CPU by oneDNN, beside those by MKL, in turns.

Forward is y = x W^T, and backward the gradient of x. Speed is oneDNN's over MKL's: the median of the rounds. megapar
takes oneDNN for some of these products on AMD's CPUs with AVX-512 (kernels/megapar_kernels/onednn.py).
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megapar_kernels import onednn

from benchmarks.report import Report, table
from megapar.train.provenance import provenance

_SECONDS = 0.02  # of one product and library in a round, so that a short one is repeated


@dataclass(frozen=True)
class Options:
    """Time products of several shapes."""

    rows: tuple[int, ...] = (64, 512, 4096)
    """Tokens of a micro-batch."""
    matrices: tuple[str, ...] = ("256x256", "1408x256", "256x704", "4096x256", "2816x1024", "1024x1408", "8192x1024")
    """Outputs x inputs."""
    threads: int = 1
    """Threads of each product."""
    rounds: int = 9
    """Times that the two libraries take turns."""
    json: Path | None = None
    """Write all numbers to this file."""


def main(options: Options) -> None:
    """Measure, print the table, write the JSON file."""
    torch.set_num_threads(options.threads)
    found, lines = [], []
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
            lines.append((f"{outputs} x {inputs}", rows, _shown(forward), _shown(backward)))
    shown = table(lines, ["outputs x inputs"], ["rows", "forward", "backward"], "oneDNN's speed over MKL's", sections=1)
    chosen = "megapar takes oneDNN on this CPU" if onednn.IS_FASTER else "megapar leaves this CPU to MKL"
    Report(options, provenance(torch.device("cpu"))).finish({"products": found}, shown, chosen)


def _speeds(mkl: Callable[[], Any], onednn_: Callable[[], Any], rounds: int) -> list[float]:
    """oneDNN's speed over MKL's in each round."""
    _seconds(onednn_, 1)  # compiles
    shortest = min(_seconds(work, 1) for work in (mkl, onednn_))
    times = max(1, round(_SECONDS / shortest))
    return [_seconds(mkl, times) / _seconds(onednn_, times) for _ in range(rounds)]


def _seconds(work: Callable[[], Any], times: int) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        work()
    return time.perf_counter() - begun


def _shown(speeds: list[float]) -> str:
    return f"{statistics.median(speeds):.2f}x ({min(speeds):.2f}-{max(speeds):.2f})"
