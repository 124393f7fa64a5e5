"""Prints and records what a run is about to do, before its first step."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megapar.base.errors import StorageError, storing
from megapar.config.derive import num_microbatches
from megapar.config.messages import counted, layout_in_words
from megapar.config.options import Config
from megapar.config.plugins import named_outside
from megapar.declare.agreement import on_all_ranks
from megapar.declare.context import ParallelContext
from megapar.observe.observer import Observed, Observer
from megapar.observe.provenance import provenance
from megapar.pipeline import schedule_files
from megapar.pipeline.lowering import lower
from megapar.pipeline.schedules import make, of, show
from megapar.pipeline.simulation import simulate
from megapar.step.state import StepResult
from megapar.system import device, numa
from megapar.system.atomic_files import replace_file, write_json
from megapar.system.say import say


def length_of_run(config: Config) -> str:
    """Steps, tokens of a step and tokens of the whole run, in words."""
    train = config.train
    total = train.samples() * train.seq_length
    first = train.batch_size(0) * train.seq_length
    last = train.global_batch_size * train.seq_length
    tokens = f"{last:,}"
    if first != last:  # train.batch_ramp grows the batch
        tokens = f"{first:,} to {last:,}"
    return f"{counted(train.steps, 'step')} of {tokens} tokens = {total:,} tokens"


def warnings(config: Config) -> list[str]:
    """Warnings about a validated config: it runs, but slower than it could."""
    parallel = config.parallel
    m = num_microbatches(config)
    microbatches = counted(m, "micro-batch", "micro-batches")
    lines = []
    left_over = config.train.global_batch_size // config.train.micro_batch_size % parallel.dp
    if left_over:
        some = counted(left_over, "replica runs", "replicas run")
        lines.append(f"parallel.dp={parallel.dp}: {some} {microbatches} a step, the others {m - 1} and wait")
    too_few = m < parallel.pp
    # Interleaved 1F1B works in rounds of pp micro-batches. Other schedules have no rounds.
    ragged = parallel.schedule == "interleaved" and parallel.vpp > 1 and m % parallel.pp > 0
    if parallel.pp == 1 or not (too_few or ragged):
        return lines
    if too_few:
        better = 4 * parallel.pp
        why = "fewer than the pipeline's ranks"
    else:
        better = -(-m // parallel.pp) * parallel.pp  # rounded up to whole rounds
        why = "too few to fill the interleaved schedule's last round"
    batch = better * config.train.micro_batch_size * parallel.dp
    return [
        *lines,
        f"parallel.pp={parallel.pp}, parallel.vpp={parallel.vpp}, "
        f"train.global_batch_size={config.train.global_batch_size}: {microbatches} a step, {why}, which idle about "
        f"{idle_share(config, m):.0%} of the time; train.global_batch_size={batch} would make it "
        f"{idle_share(config, better):.0%}",
    ]


def idle_share(config: Config, microbatches: int) -> float:
    """The idle share of the ranks of a pipeline, simulated from the plans of the run.

    All stages are taken to cost the same, a backward twice a forward, its halves the same, and transfers nothing. If pp
    divides the number m of micro-batches, the share of 1f1b and interleaved is (pp - 1) / (vpp m + pp - 1) (arXiv
    2104.04473, section 2.2).
    """
    parallel = config.parallel
    orders = make(of(parallel), parallel.pp, parallel.vpp, microbatches)
    return simulate(lower(orders, parallel.pp * parallel.vpp), forward=1, backward=2).bubble


def _axes_over_gloo(config: Config, ctx: ParallelContext) -> list[str]:
    """A line about axes without exchange through shared memory, although the config asks for it."""
    if ctx.device.type != "cpu" or config.launch.cpu_exchange != "shared_memory":
        return []
    names = [axis.name for axis in (ctx.tp, ctx.cp, ctx.dp, ctx.pp) if axis.transport.name == "gloo"]
    if not names:
        return []
    return [f"{', '.join(names)} exchange over gloo: their ranks are on several hosts, or cannot share memory"]


class AttentionInWords(Observer):
    """Tells after the first step who computes attention: its shapes are known then."""

    def __init__(self, seen: Observed):
        self._seen = seen
        self._is_told = False

    def after_line(self, result: StepResult, line: dict[str, Any]) -> None:
        if not self._is_told:
            self._is_told = True
            self._seen.say(attention_in_words(self._seen.state.stages.values()))


def attention_in_words(stages: Iterable[nn.Module]) -> str:
    """Say who has computed the attention of this rank's layers: modules have it in their attribute `server`."""
    servers = (getattr(module, "server", "") for stage in stages for module in stage.modules())
    found = Counter(filter(None, servers))
    return "attention: " + "; ".join(f"{counted(number, 'layer')} by {server}" for server, number in found.items())


def write_run_header(
    config: Config,
    ctx: ParallelContext,
    model: tuple[str, Sequence[str], Mapping[str, Any]],
    notes: Sequence[str],
    config_toml: str,
) -> None:
    """Make the run folder, write config.toml and environment.json, and print the header. A collective.

    If parallel.schedule is a file, the folder gets a copy, schedule.txt.

    `model` has the number of parameters in words, and what train.fp8 means: lines to print, and what to record of each
    matrix. environment.json holds this record, `provenance`, the implementation of each op, and the cores of rank 0.
    `notes` are lines to print about what was resumed. Raises StorageError on every rank if rank 0 cannot write the
    folder. Afterwards it exists on every rank.
    """
    parameters, formats, matrices = model
    kernels = device.kernels_of(config.kernels, ctx.device, config.train.precision)
    run_dir = Path(config.run_dir)
    bound = {"cores of rank 0": numa.cores(), device.CONNECTIONS: device.connections()}
    environment = provenance(ctx.device) | {"kernels": asdict(kernels)} | bound | dict(matrices)

    def write_files() -> None:
        if not ctx.world.first:
            return
        with storing(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            replace_file(run_dir / "config.toml", config_toml.encode())
            if schedule_files.is_file(config.parallel.schedule):
                # The file that the option names may change or go. A copy does not.
                orders = schedule_files.read(config.parallel.schedule).orders
                replace_file(run_dir / "schedule.txt", f"{show(orders)}\n".encode())
        write_json(run_dir / "environment.json", environment)

    on_all_ranks(write_files, ctx, StorageError, "run folder not written")
    if ctx.world.first:
        parallel = config.parallel
        train = config.train
        hardware = f"{environment['hardware']}, torch {torch.__version__}"
        say(f"{config.model.family}, {parameters}, {train.precision}; {hardware}")
        microbatches = counted(num_microbatches(config), "micro-batch", "micro-batches")
        say(
            f"{counted(ctx.world.size, 'rank')} = {layout_in_words(parallel)}; "
            f"{parallel.schedule}, {microbatches} of {train.micro_batch_size} a step; "
            f"recompute {train.recompute}; ZeRO stage {config.optimizer.zero_stage}; kernels {kernels}"
        )
        if outside := named_outside(config):
            say(f"of your own: {', '.join(f'{option} {name}' for option, name in outside)}")
        say(f"{length_of_run(config)}; data {' '.join(config.data.train)}; run folder {run_dir}")
        # A GPU that torch cannot use makes auto choose the CPU. The user should learn it before a slow run.
        unseen = ""
        if config.launch.device == "auto":
            unseen = device.unseen_gpu()
        if unseen:
            say(f"trains on the CPU: {unseen}")
        for line in [*formats, *_axes_over_gloo(config, ctx), *warnings(config), *notes]:
            say(line)
