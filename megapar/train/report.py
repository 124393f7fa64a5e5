"""What a run says before its first step, and the resolved configuration that it keeps."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megapar import comm, device
from megapar.config import Config
from megapar.context import ParallelContext
from megapar.errors import storing
from megapar.validate import num_microbatches, warnings


def greet(config: Config, ctx: ParallelContext, parameters: int, notes: Sequence[str], config_toml: str) -> None:
    """Make the run folder, write config.toml and environment.json (hardware, versions, who computes each op), print
    what is about to run and, from `notes`, what was resumed."""
    kernels = device.choose_kernels(config.kernels.backend, ctx.device)
    if ctx.world.first:
        run_dir = Path(config.run_dir)
        hardware, python = device.describe(ctx.device), platform.python_version()
        facts = {"hardware": hardware, "python": python, "kernels": asdict(kernels)}
        with storing(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / "config.toml").write_text(config_toml)
            (run_dir / "environment.json").write_text(json.dumps(facts, indent=1) + "\n")
        parallel, train = config.parallel, config.train
        print(f"{config.model.family}, {parameters:,} parameters, {train.precision}; {hardware}")
        print(
            f"{ctx.world.size} ranks = tp {parallel.tp} x pp {parallel.pp} x dp {parallel.dp}; {parallel.schedule}, "
            f"{num_microbatches(config)} micro-batches of {train.micro_batch_size} a step; "
            f"recompute {train.recompute}; ZeRO stage {config.optimizer.zero_stage}; kernels {kernels}"
        )
        print(
            f"{train.steps:,} steps of {train.global_batch_size * train.seq_length:,} tokens; data "
            f"{' '.join(config.data.train)}; run folder {run_dir}",
            flush=True,
        )
        for line in [*warnings(config), *notes]:
            print(line, flush=True)
    comm.barrier(ctx.world)
