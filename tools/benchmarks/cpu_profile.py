"""Where the CPU time of a training step goes, by kind of operation, in one process: megapar beside plain PyTorch.

Each contender trains the model of the benchmark of layouts (layouts.py) on one thread. torch.profiler counts the time
of each operation without that of the operations within it. The table has the step that took least in all.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.layouts import LAYOUTS, Options, build_contender, make_batches
from benchmarks.peers import Peer
from megapar.launch.reporting import reported

# Tried in this order: the first kind with a part of its name in that of an operation gets its time.
KINDS: Mapping[str, tuple[str, ...]] = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("flash_attention",),
    "copies, concatenations, lookups": ("aten::copy_", "aten::cat", "aten::index", "aten::clone", "embedding"),
    "norms": ("native_layer_norm", "rms_norm", "aten::mean", "aten::rsqrt", "aten::pow"),
    "loss": ("log_softmax", "nll_loss", "aten::exp", "logsumexp", "aten::gather", "aten::scatter", "aten::amax"),
    "activation": ("silu", "sigmoid"),
    "optimizer and norm of gradients": ("adamw", "vector_norm", "linalg", "foreach", "aten::dot", "square"),
    "zeros": ("aten::zero_", "aten::fill_"),
    "additions and multiplications": ("aten::mul", "aten::add", "aten::sub", "aten::neg", "aten::sum", "aten::div"),
}
OTHER = "other, functions written in Python among it"


@dataclass(frozen=True)
class Arguments:
    """Profile training steps of one process. The default shape is that of the first table of docs/performance.md."""

    hidden: int = 256
    """Width of the model; the MLP is 11/4 as wide."""
    num_hidden_layers: int = 8
    """Transformer layers."""
    steps: int = 5
    """Profiled steps of each contender, after one that warms up."""


def kind_of(operation: str) -> str:
    """The kind of an operation, by its name in the profile."""
    return next((kind for kind, parts in KINDS.items() if any(part in operation for part in parts)), OTHER)


def milliseconds_by_kind(contender: Peer, tokens_bs: torch.Tensor, targets_bs: torch.Tensor) -> dict[str, float]:
    """The CPU time of one step."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        contender.step(tokens_bs, targets_bs)
    times: dict[str, float] = defaultdict(float)
    for average in profiler.key_averages():
        times[kind_of(average.key)] += average.self_cpu_time_total / 1e3
    return times


def main(arguments: Arguments) -> None:
    torch.set_num_threads(1)
    options = Options(
        hidden=(arguments.hidden,),
        num_hidden_layers=arguments.num_hidden_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        global_batch_size=16,
        micro_batch_size=2,
    )
    layout = LAYOUTS["single"]
    names = ("megapar", "PyTorch")
    contenders = {name: build_contender(options, arguments.hidden, layout, name, torch.device("cpu")) for name in names}
    batches = make_batches(contenders["megapar"].config, 1 + arguments.steps)
    least: dict[str, dict[str, float]] = {}
    for number, (tokens_bs, targets_bs) in enumerate(batches):
        for name, contender in contenders.items():
            if number == 0:
                contender.step(tokens_bs, targets_bs)  # warms up
                continue
            times = milliseconds_by_kind(contender, tokens_bs, targets_bs)
            if name not in least or sum(times.values()) < sum(least[name].values()):
                least[name] = times
    table = Table("CPU ms of a step", *names)
    for kind in (*KINDS, OTHER):
        table.add_row(kind, *(f"{least[name].get(kind, 0.0):,.0f}" for name in names))
    table.add_row("all", *(f"{sum(least[name].values()):,.0f}" for name in names))
    Console().print(table)


if __name__ == "__main__":
    with reported():
        main(tyro.cli(Arguments, description=__doc__, use_underscores=True))
