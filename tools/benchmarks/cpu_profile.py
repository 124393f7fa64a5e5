"""The CPU time of a training step by kind of operation, in one process: megapar beside plain PyTorch.

Each contender trains the model of the benchmark of layouts (layouts.py) on one thread. torch.profiler counts the time
of each operation without the operations within it. The table shows the shortest step.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks import layouts
from benchmarks.contenders import LAYOUTS
from benchmarks.harness import Case, Found, Output
from benchmarks.profiling import Kernel, kind_of, record
from megapar.system import device

KINDS = {
    "matrix products": "aten::(mm|addmm|bmm)|mkldnn::",
    "attention": "flash_attention",
    "copies, concatenations, lookups": "aten::(copy_|cat|index|clone)|embedding",
    "norms": "native_layer_norm|rms_norm|aten::(mean|rsqrt|pow)",
    "loss": "log_softmax|nll_loss|logsumexp|aten::(exp|gather|scatter|amax)",
    "activation": "silu|sigmoid",
    "optimizer and norm of gradients": "adamw|vector_norm|linalg|foreach|square|aten::dot",
    "zeros": "aten::(zero_|fill_)",
    "additions and multiplications": "aten::(mul|add|sub|neg|sum|div)",
}
OTHER = "other, functions written in Python among it"


@dataclass(frozen=True)
class Options(Output):
    """Profile training steps of one process. The default shape is that of the first table of docs/performance.md."""

    hidden: int = 256
    """Width of the model; the MLP is 11/4 as wide."""
    num_hidden_layers: int = 8
    """Transformer layers."""
    steps: int = 5
    """Profiled steps of each contender, after one that warms up."""


def by_kind(operations: Sequence[Kernel]) -> dict[str, float]:
    """Add up the milliseconds of operations of each kind."""
    times: dict[str, float] = defaultdict(float)
    for operation in operations:
        times[kind_of(operation.name, KINDS, OTHER)] += operation.ms
    return times


def measure(options: Options) -> Found:
    """Profile both in turns. The shortest step of each counts."""
    cpu = torch.device("cpu")
    device.prepare(cpu, threads=1, deterministic=False)
    shape = layouts.first_table(options.hidden, options.num_hidden_layers)
    works = {}
    for name in ("megapar", "PyTorch"):
        peer = layouts.build_contender(shape, options.hidden, LAYOUTS["single"], name, cpu)
        step = layouts.steps_of(peer, layouts.make_batches(peer.config, 1 + options.steps))
        works[name] = partial(record, step, cpu)
    turns = Case(works, options.steps, note=lambda _, operations: by_kind(operations)).measure()
    # Without the first step, which warms up.
    least = {name: min(found.notes[1:], key=lambda times: sum(times.values())) for name, found in turns.items()}
    return Found({"milliseconds": {name: {**times, "all": sum(times.values())} for name, times in least.items()}})
