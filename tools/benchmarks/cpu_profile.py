"""The CPU time of a training step by kind of operation, in one process: megapar beside plain PyTorch.

Each contender trains the model of the benchmark of layouts (layouts.py) on one thread. torch.profiler counts the time
of each operation without the operations within it. The table shows the shortest step.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks import layouts
from benchmarks.contenders import LAYOUTS
from benchmarks.counting import in_turn
from benchmarks.profiling import kind_of, record
from benchmarks.report import Report, table
from megapar.observe.provenance import provenance
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
class Options:
    """Profile training steps of one process. The default shape is that of the first table of docs/performance.md."""

    hidden: int = 256
    """Width of the model; the MLP is 11/4 as wide."""
    num_hidden_layers: int = 8
    """Transformer layers."""
    steps: int = 5
    """Profiled steps of each contender, after one that warms up."""
    json: Path | None = None
    """Write all numbers to this file."""


def main(options: Options) -> None:
    """Measure, print the table, write the JSON file."""
    cpu = torch.device("cpu")
    device.prepare(cpu, threads=1, deterministic=False)
    shape = layouts.Options(
        hidden=(options.hidden,),
        num_hidden_layers=options.num_hidden_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        global_batch_size=16,
        micro_batch_size=2,
    )
    names = ("megapar", "PyTorch")
    built = {name: layouts.build_contender(shape, options.hidden, LAYOUTS["single"], name, cpu) for name in names}
    profiles: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number, batch in enumerate(layouts.make_batches(built["megapar"].config, 1 + options.steps)):
        for name in in_turn(names, number):
            times: dict[str, float] = defaultdict(float)
            for kernel in record(partial(built[name].step, *batch), cpu):
                times[kind_of(kernel.name, KINDS, OTHER)] += kernel.ms
            profiles[name].append(times)
    # Without the first step, which warms up.
    least = {name: min(found[1:], key=lambda times: sum(times.values())) for name, found in profiles.items()}
    lines = [(kind, *(f"{least[name].get(kind, 0.0):,.0f}" for name in names)) for kind in (*KINDS, OTHER)]
    lines.append(("all", *(f"{sum(least[name].values()):,.0f}" for name in names)))
    Report(options, provenance(cpu)).finish({"milliseconds": least}, table(lines, ["CPU ms of a step"], names))
