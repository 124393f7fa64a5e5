"""What each train.recompute and train.offload cost and save: CPU time of a step in turns, and bytes beside their plan.

All modes train the same Llama on the same batches. The benchmark fails if a loss differs in one bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from megapar_models.build import StageBuilder
from megapar_models.registry import validate
from megapar_tools.plan.memory import reports
from megapar_tools.plan.parts import Parts

from benchmarks.counting import ratio
from benchmarks.harness import Case, Found, Output
from benchmarks.ranks import BenchmarkError
from benchmarks.small_llama import make_batch, make_state, small_llama
from megapar.activations.recompute import Mode
from megapar.config.options import BY_LAYER, Config, KernelsConfig, ParallelConfig, TrainConfig
from megapar.declare.batch import MicroBatch
from megapar.observe.kept import KeptBytes
from megapar.step.state import TrainState
from megapar.step.step import train_step

OFFLOAD = ", inputs on the host"
"""Added to a mode: with train.offload 1."""


@dataclass(frozen=True)
class Options(Output):
    """Measure the modes of train.recompute on this machine."""

    lengths: tuple[int, ...] = (256, 2048)
    """Tokens of a sample. In long samples attention takes most of the time."""
    tokens: int = 2048
    """Tokens of a step, in samples of one micro-batch."""
    layers: int = 8
    """Layers of the Llama."""
    hidden_size: int = 256
    """Its width, a multiple of 128: two query heads of 64 share a key/value head."""
    rounds: int = 5
    """Rounds that count, after one that warms up."""


def make_config(options: Options, length: int, mode: str) -> Config:
    """One process, fp32."""
    model = small_llama(options.hidden_size, options.layers, length)
    samples = options.tokens // length
    recompute: Any = mode.removesuffix(OFFLOAD)
    train = TrainConfig(
        recompute=recompute,
        offload=float(mode.endswith(OFFLOAD)),
        seq_length=length,
        global_batch_size=samples,
        micro_batch_size=samples,
    )
    config = Config(model=model, parallel=ParallelConfig(dp=1), train=train, kernels=KernelsConfig(backend="torch"))
    return validate(config, 1)


def kept_bytes(state: TrainState, batch: MicroBatch) -> tuple[int, int]:
    """The bytes that a step keeps for its backward pass on a device with a host beside it, and on that host."""
    kept = KeptBytes(state.stages)
    with kept.counting():
        train_step(state, [batch])
    inputs = state.pipeline.host_inputs
    return kept.peak + inputs.most_on_device, inputs.nbytes


def require_equal(losses: Mapping[str, float]) -> None:
    """Raise BenchmarkError if losses differ in one bit."""
    if len(set(losses.values())) > 1:
        raise BenchmarkError(f"losses differ: {losses}")


def compared(options: Options, length: int, modes: Sequence[str]) -> list[dict[str, Any]]:
    """The modes with samples of one length. Raises BenchmarkError if losses or planned bytes differ."""
    configs = {mode: make_config(options, length, mode) for mode in modes}
    states = {mode: make_state(config) for mode, config in configs.items()}
    batch = make_batch(configs["none"])
    kept = {mode: kept_bytes(state, batch) for mode, state in states.items()}
    steps = {mode: partial(train_step, state, [batch]) for mode, state in states.items()}
    turns = Case(steps, options.rounds, note=lambda _, result: result.loss, check=require_equal).measure()
    rows: list[dict[str, Any]] = []
    for mode in modes:
        device = replace(configs[mode].launch, device="cuda")
        (report,) = reports(replace(configs[mode], launch=device), Parts(StageBuilder()))
        planned = report.activations, report.inputs_on_host
        if planned != kept[mode]:
            raise BenchmarkError(f"{mode}: bytes of device and host are {kept[mode]}, and {planned} planned")
        on_device, on_host = kept[mode]
        time = ratio(turns[mode].cpu, turns["none"].cpu)
        rows.append({"length": length, "mode": mode, "time": time, "kept_bytes": on_device, "host_bytes": on_host})
    return rows


def measure(options: Options) -> Found:
    """Measure all modes with samples of each length."""
    torch.set_num_threads(1)
    modes = [*get_args(Mode), *(f"{mode}{OFFLOAD}" for mode in BY_LAYER)]
    return Found({"rows": [row for length in options.lengths for row in compared(options, length, modes)]})
