"""What a run says before its first step."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from megapar import comm, device
from megapar.config import Config
from megapar.context import ParallelContext
from megapar.derive import num_microbatches
from megapar.errors import say, storing
from megapar.files import write_json
from megapar.pipeline.lowering import lower
from megapar.pipeline.schedules import make
from megapar.pipeline.simulation import simulate
from megapar.provenance import provenance


def length_of_run(config: Config) -> str:
    """Steps, tokens of a step and tokens of the whole run, in words."""
    train = config.train
    total = train.samples() * train.seq_length
    first, last = (samples * train.seq_length for samples in (train.batch_size(0), train.global_batch_size))
    tokens = f"{last:,}" if first == last else f"{first:,} to {last:,}"
    return f"{train.steps:,} steps of {tokens} tokens = {total:,} tokens"


def warnings(config: Config) -> list[str]:
    """Lines about a validated config that runs, but not well."""
    parallel = config.parallel
    m = num_microbatches(config)
    lines = []
    left_over = config.train.global_batch_size // config.train.micro_batch_size % parallel.dp
    if left_over:
        lines.append(
            f"parallel.dp={parallel.dp}: {left_over} replicas run {m} micro-batches a step, the others {m - 1} and wait"
        )
    too_few = m < parallel.pp
    ragged = parallel.vpp > 1 and m % parallel.pp > 0
    if parallel.pp == 1 or not (too_few or ragged):
        return lines
    better = 4 * parallel.pp if too_few else -(-m // parallel.pp) * parallel.pp
    batch = better * config.train.micro_batch_size * parallel.dp
    why = "are fewer than the pipeline's ranks" if too_few else "do not fill the interleaved schedule's last round"
    return [
        *lines,
        f"parallel.pp={parallel.pp}, parallel.vpp={parallel.vpp}, "
        f"train.global_batch_size={config.train.global_batch_size}: {m} micro-batches a step {why}, which idle about "
        f"{idle_share(config, m):.0%} of the time; train.global_batch_size={batch} would make it "
        f"{idle_share(config, better):.0%}",
    ]


def idle_share(config: Config, microbatches: int) -> float:
    """Share of all pipeline ranks' time in which they compute nothing, from the plans that would run: all stages cost
    the same, a backward twice a forward, transfers nothing.

    Where pp divides the micro-batches m this is (pp - 1) / (vpp m + pp - 1) (arXiv 2104.04473, section 2.2).
    """
    parallel = config.parallel
    orders = make(parallel.schedule, parallel.pp, parallel.vpp, microbatches)
    return simulate(lower(orders, parallel.pp * parallel.vpp), forward=1, backward=2).bubble


def write_run_header(
    config: Config, ctx: ParallelContext, parameters: int, notes: Sequence[str], config_toml: str
) -> None:
    """Make the run folder, write config.toml and environment.json (`provenance`, and who computes each op), print
    what is about to run and, from `notes`, what was resumed."""
    kernels = device.choose_kernels(config.kernels.backend, ctx.device)
    if ctx.world.first:
        run_dir = Path(config.run_dir)
        facts = provenance(ctx.device) | {"kernels": asdict(kernels)}
        with storing(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / "config.toml").write_text(config_toml)
        write_json(run_dir / "environment.json", facts)
        parallel = config.parallel
        train = config.train
        hardware = f"{facts['hardware']}, torch {torch.__version__}"
        say(f"{config.model.family}, {parameters:,} parameters, {train.precision}; {hardware}")
        say(
            f"{ctx.world.size} ranks = tp {parallel.tp} x pp {parallel.pp} x dp {parallel.dp}; {parallel.schedule}, "
            f"{num_microbatches(config)} micro-batches of {train.micro_batch_size} a step; "
            f"recompute {train.recompute}; ZeRO stage {config.optimizer.zero_stage}; kernels {kernels}"
        )
        say(f"{length_of_run(config)}; data {' '.join(config.data.train)}; run folder {run_dir}")
        unseen = device.unseen_gpu() if config.launch.device == "auto" else ""
        if unseen:
            say(f"trains on the CPU: {unseen}")
        for line in [*warnings(config), *notes]:
            say(line)
    comm.barrier(ctx.world)
