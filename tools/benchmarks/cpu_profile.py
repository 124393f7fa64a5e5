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
from benchmarks.harness import Case, Contender, Found, Output
from benchmarks.peers import Peer
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


def build(options: Options, target: torch.device) -> dict[str, Contender]:
    """Make the two that are compared. A turn is one profiled step."""
    shape = layouts.Options(
        hidden=(options.hidden,),
        num_hidden_layers=options.num_hidden_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        global_batch_size=16,
        micro_batch_size=2,
    )

    def profiled(peer: Peer) -> Contender:
        batches = iter(layouts.make_batches(peer.config, 1 + options.steps))
        return Contender(lambda: record(lambda: peer.step(*next(batches)), target), by_kind)

    return {
        name: profiled(layouts.build_contender(shape, options.hidden, LAYOUTS["single"], name, target))
        for name in ("megapar", "PyTorch")
    }


def measure(options: Options) -> Found:
    """Profile both in turns. The shortest step of each counts."""
    device.prepare(torch.device("cpu"), threads=1, deterministic=False)
    turns = Case(partial(build, options), options.steps).measure()
    # Without the first step, which warms up.
    least = {name: min(found.notes[1:], key=lambda times: sum(times.values())) for name, found in turns.items()}
    return Found({"milliseconds": {name: {**times, "all": sum(times.values())} for name, times in least.items()}})
