"""What optimizers cost on a CPU: Muon's Newton-Schulz by rank, and steps with a share of AdamW's state on the host.

Ranks of dp train a Llama with Muon. The CPU time of Newton-Schulz is that of each rank, beside the FLOPs of the
matrices that it owns. Then one process trains with each optimizer.offload, with QK-clip and with Muon, in turns. On a
CPU the host's memory is the device's, so offload shows the time of its pieces and copies alone. The benchmark fails if
losses of AdamW differ in one bit.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megapar_models.registry import validate
from torch import Tensor

from benchmarks.counting import cost, in_turn, ratio
from benchmarks.ranks import BenchmarkError, run_ranks
from benchmarks.report import Report, table
from benchmarks.small_llama import make_batch, make_state, small_llama
from megapar.config.options import Config, OptimizerConfig, ParallelConfig, TrainConfig
from megapar.optimizer import muon, owners
from megapar.train.provenance import provenance
from megapar.train.step import train_step

OFFLOADS = (0.0, 0.5, 1.0)


@dataclass(frozen=True)
class Options:
    """Measure optimizers on this machine."""

    ranks: int = 4
    """Ranks of dp that share the matrices of Muon."""
    layers: int = 4
    """Layers of the Llama."""
    hidden_size: int = 256
    """Its width, a multiple of 128: two query heads of 64 share a key/value head."""
    tokens: int = 1024
    """Tokens of a step of each rank, in samples of 128."""
    rounds: int = 5
    """Rounds that count, after one that warms up."""
    json: Path | None = None
    """Write all numbers to this file."""


def make_config(options: Options, optimizer: OptimizerConfig, ranks: int = 1) -> Config:
    """ZeRO-1 over `ranks`, fp32."""
    model = small_llama(options.hidden_size, options.layers, 128)
    samples = options.tokens // 128
    train = TrainConfig(seq_length=128, global_batch_size=samples * ranks, micro_batch_size=samples)
    return validate(Config(model=model, parallel=ParallelConfig(dp=ranks), train=train, optimizer=optimizer), ranks)


def newton_schulz(config: Config, rounds: int, device: torch.device) -> dict[str, Any]:
    """What this rank spends on Newton-Schulz: the median CPU seconds of a step, and the FLOPs of its matrices."""
    state = make_state(config, device)
    spent = 0.0

    def timed(iterate: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        nonlocal spent
        start = time.thread_time()
        found = iterate(x)
        spent += time.thread_time() - start
        return found

    muon.orthogonalized = partial(timed, muon.orthogonalized)  # in this process, which ends behind the measurement
    batch = make_batch(config)
    seconds, steps = [], []
    for _ in range(rounds + 1):
        spent = 0.0
        step, _ = cost(partial(train_step, state, [batch]))
        seconds.append(spent)
        steps.append(step.cpu)
    (optimizer,) = (each for each in state.optimizer.each if isinstance(each, muon.Muon))
    shapes = [shape for routes in optimizer.routes.values() for shape in routes.shapes.values()]
    flops = muon.ROUNDS * sum(map(owners.cost, shapes))
    return {"seconds": statistics.median(seconds[1:]), "step": statistics.median(steps[1:]), "flops": flops}


def of_ranks(options: Options, per_head: bool) -> dict[str, Any]:
    """The largest of the ranks over their mean: by CPU time, and by FLOPs of the matrices owned."""
    config = make_config(options, OptimizerConfig(name="muon", muon_per_head=per_head), options.ranks)
    found = run_ranks(options.ranks, "cpu", partial(newton_schulz, config, options.rounds))
    over_mean = {
        key: max(rank[key] for rank in found) * len(found) / sum(rank[key] for rank in found)
        for key in ("seconds", "flops")
    }
    share = sum(rank["seconds"] for rank in found) / sum(rank["step"] for rank in found)
    return {"per_head": per_head, "ranks": found, "largest_over_mean": over_mean, "share_of_step": share}


def in_turns(options: Options) -> list[dict[str, Any]]:
    """CPU time of a step with each share on the host, and with Muon, over that of AdamW on the device."""
    optimizers = {f"adamw, offload {share:g}": OptimizerConfig(offload=share) for share in OFFLOADS}
    plain = next(iter(optimizers))
    optimizers["muon"] = OptimizerConfig(name="muon")
    optimizers["muon, per head"] = replace(optimizers["muon"], muon_per_head=True)
    optimizers["adamw, qk_clip 100"] = OptimizerConfig(qk_clip=100.0)
    device = torch.device("cpu")
    states = {name: make_state(make_config(options, optimizer), device) for name, optimizer in optimizers.items()}
    batch = make_batch(states[plain].config)
    seconds: dict[str, list[float]] = {name: [] for name in states}
    for number in range(options.rounds + 1):
        losses = {}
        for name in in_turn(states, number):
            one, result = cost(partial(train_step, states[name], [batch]))
            seconds[name].append(one.cpu)
            losses[name] = result.loss
        if len({loss for name, loss in losses.items() if name.startswith("adamw")}) > 1:
            raise BenchmarkError(f"losses differ: {losses}")
    return [
        {"optimizer": name, "seconds": seconds[name][1:], "time": ratio(seconds[name][1:], seconds[plain][1:])}
        for name in states
    ]


def lines_of_ranks(found: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of the table of ranks."""
    return [
        (
            "heads apart" if one["per_head"] else "whole",
            ", ".join(f"{1e3 * rank['seconds']:.1f}" for rank in one["ranks"]),
            f"{one['largest_over_mean']['seconds']:.2f}",
            f"{one['largest_over_mean']['flops']:.2f}",
            f"{one['share_of_step']:.1%}",
        )
        for one in found
    ]


def main(options: Options) -> None:
    """Measure, print the tables, write the JSON file."""
    torch.set_num_threads(1)
    circumstances = provenance(torch.device("cpu"))
    ranks = [of_ranks(options, per_head) for per_head in (False, True)]
    steps = in_turns(options)
    columns = ["ms of Newton-Schulz by rank", "largest over mean", "by FLOPs", "of the step"]
    of_steps = [
        (row["optimizer"], f"{row['time']['median']:.3f}x", f"{row['time']['min']:.3f}-{row['time']['max']:.3f}")
        for row in steps
    ]
    Report(options, circumstances).finish(
        {"newton_schulz": ranks, "steps": steps},
        table(lines_of_ranks(ranks), ["muon: matrices"], columns),
        table(of_steps, ["one process"], ["CPU time of a step", "range"]),
    )
