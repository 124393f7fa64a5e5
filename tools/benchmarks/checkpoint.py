"""Saving and loading beside a plain copy of the same bytes and torch's distributed checkpoint, and what an asynchronous
save costs training.

One process, one model, one folder. In each round all take turns, in an order that is reversed every round, so that the
disk's and the machine's moods hit neighbors alike; a ratio is taken within a round. Every write ends in an fsync;
reads find their file in memory, as it was just written. The bytes are those of main weights and both moments.

- save: megapar's, with a CRC-32 of each chunk; copy: shutil.copyfile of the files that it wrote; DCP: torch's.
- load: megapar's, each CRC compared; read: of the same files into memory; DCP: torch's. What is loaded must be bitwise
  what was saved, or the exit code is 70.
- pause: how long `save` keeps the training thread, when it waits for the disk and when it leaves a copy to a thread;
  and the steps that train meanwhile beside steps that train alone.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
import tyro
from megapar_models.build import build_stages
from megapar_models.registry import validate, weight_options
from rich.console import Console
from rich.progress import track
from rich.table import Table

from megapar import context, device
from megapar.batch import MicroBatch
from megapar.checkpoint.load import load
from megapar.config.options import CheckpointConfig, Config, LaunchConfig, ModelConfig, TrainConfig
from megapar.errors import MegaparError
from megapar.launch.reporting import reported
from megapar.random import initialize
from megapar.system.atomic_files import write_json
from megapar.train.checkpoints import Saver
from megapar.train.provenance import in_a_line, provenance
from megapar.train.state import TrainState
from megapar.train.step import train_step
from megapar.train.trainer import assemble


class BenchmarkError(MegaparError):
    """What was loaded is not what was saved."""


@dataclass(frozen=True)
class Options:
    """Measure checkpoints on this machine."""

    hidden: int = 512
    """Width of the model, a Llama with heads of 64."""
    num_hidden_layers: int = 8
    """Transformer layers."""
    vocab_size: int = 16384
    """Token ids."""
    rounds: int = 5
    """Turns of each contender, after one that warms up."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the state lives."""
    folder: Path | None = None
    """Where to write; the default is a folder of the system's for temporary files, removed afterwards."""
    json: Path | None = None
    """Write all numbers to this file."""


def make_state(options: Options, where: torch.device) -> TrainState:
    """A model whose weights and moments have been through a step."""
    model = ModelConfig(
        hidden_size=options.hidden,
        num_hidden_layers=options.num_hidden_layers,
        num_attention_heads=options.hidden // 64,
        vocab_size=options.vocab_size,
    )
    train = TrainConfig(global_batch_size=1)
    config = validate(Config(model=model, train=train, launch=LaunchConfig(device=options.device)), 1)
    ctx = context.single(where)
    stages = build_stages(config, ctx)
    initialize(stages.values(), 1)
    state = assemble(config, ctx, stages)
    step(state)
    return state


def step(state: TrainState) -> tuple[float, float]:
    """Seconds of a training step of one sample: passed, and of this thread's CPU time, which counts no waiting."""
    config = state.config
    where = state.ctx.device
    generator = torch.Generator().manual_seed(state.step)
    row = torch.randint(config.model.vocab_size, (1, config.train.seq_length + 1), generator=generator)
    batch = MicroBatch.of_samples(
        row[:, :-1], row[:, 1:], torch.ones(1, config.train.seq_length), torch.tensor([state.step])
    )
    began = time.perf_counter()
    busy = time.thread_time()
    train_step(state, [batch.to(where)])
    device.synchronize(where)
    return time.perf_counter() - began, time.thread_time() - busy


def tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """The state as DCP takes it."""
    return {f"{name}.{s.spec.name}": x.detach() for s in state.optimizer.slices() for name, x in s.tensors.items()}


def copy(source: Path, target: Path) -> None:
    """A plain copy of the folder's files, on the disk."""
    target.mkdir()
    for path in source.iterdir():
        with open(shutil.copyfile(path, target / path.name), "rb") as file:
            os.fsync(file.fileno())


def read(source: Path, buffer: bytearray) -> None:
    """The folder's files into memory that is there already, as the tensors that a load fills are."""
    for path in source.iterdir():
        with open(path, "rb", buffering=0) as file:
            file.readinto(buffer)


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def require_equal(state: TrainState, saved: dict[str, torch.Tensor], who: str) -> None:
    """Raise BenchmarkError unless the state is bitwise what it was when saved; then spoil it for the next load."""
    for name, tensor in tensors(state).items():
        if not torch.equal(tensor, saved[name]):
            raise BenchmarkError(f"{who}: {name} is not what was saved")
        tensor.fill_(torch.nan)


def bandwidth(state: TrainState, saver: Saver, root: Path, number: int) -> dict[str, float]:
    """Seconds of everybody's save, then of everybody's load."""
    saved = {name: tensor.clone() for name, tensor in tensors(state).items()}
    (path,) = saver.save(state)
    buffer = bytearray(max(file.stat().st_size for file in path.iterdir()))
    copied = root / "copy"
    foreign = root / "dcp"
    model = weight_options(state.config)
    writes = {
        "save": lambda: saver.save(state),
        "copy": lambda: copy(path, copied),
        "DCP save": lambda: dcp.save(tensors(state), checkpoint_id=foreign, no_dist=True),
    }
    reads = {
        "load": lambda: load(path, slices=state.optimizer.slices(), ctx=state.ctx, model_config=model),
        "read": lambda: read(path, buffer),
        "DCP load": lambda: dcp.load(tensors(state), checkpoint_id=foreign, no_dist=True),
    }
    found = {}
    for turns in (writes, reads):
        for name in list(turns)[:: -1 if number % 2 else 1]:
            if name == "save":
                shutil.rmtree(path)
            found[name] = seconds(turns[name])
            if name.endswith("load"):
                require_equal(state, saved, name)
    for name, tensor in tensors(state).items():
        tensor.copy_(saved[name])
    for folder in (path, copied, foreign):
        shutil.rmtree(folder)
    return found


def pauses(state: TrainState, root: Path) -> dict[str, float]:
    """Seconds that the training thread gives to a save of either kind, and of its steps alone and meanwhile."""
    found: dict[str, float] = {}

    def note(name: str, steps: Sequence[tuple[float, float]]) -> None:
        for what, values in zip((name, f"{name}, CPU time"), zip(*steps, strict=True), strict=True):
            found[what] = statistics.median(values)

    note("step alone", [step(state) for _ in range(3)])
    for kind in ("synchronous", "asynchronous"):
        options = CheckpointConfig(async_save=kind == "asynchronous", keep_last=1)
        given = state.config
        state.config = replace(given, checkpoint=options)
        with Saver(state, root / kind) as saver:
            if options.async_save:  # the first save makes the copy's memory, once in a run
                found["first pause, asynchronous"] = seconds(lambda: saver.save(state))
                list(saver.completed(wait=True))
                step(state)
            found[f"pause, {kind}"] = seconds(lambda: saver.save(state))
            if options.async_save:
                meanwhile: list[tuple[float, float]] = []
                while not meanwhile or not list(saver.completed()):
                    meanwhile.append(step(state))
                note("step meanwhile", meanwhile)
        state.config = given
        shutil.rmtree(root / kind)
    return found


def summary(rounds: Sequence[dict[str, float]], size: int) -> dict[str, Any]:
    """Medians and ranges; bandwidths in GB/s where a turn moves the checkpoint's bytes."""
    moved = {"save": "copy", "DCP save": "copy", "copy": "copy", "load": "read", "DCP load": "read", "read": "read"}
    result: dict[str, Any] = {}
    for name in rounds[0]:
        values = sorted(one[name] for one in rounds)
        result[name] = {"median": statistics.median(values), "min": values[0], "max": values[-1]}
        if name in moved:
            ratios = sorted(one[moved[name]] / one[name] for one in rounds)
            result[name] |= {"gb_per_second": size / 1e9 / statistics.median(values)}
            result[name] |= {f"speed_over_{moved[name]}": [statistics.median(ratios), ratios[0], ratios[-1]]}
    return result


def table(found: dict[str, Any], size: int) -> Table:
    shown = Table(title=f"A checkpoint of {size / 1e6:,.0f} MB")
    for column in ("what", "seconds", "range", "GB/s", "speed over the plain copy or read"):
        shown.add_column(column, justify="left" if column == "what" else "right")
    for name, one in found.items():
        ratio = one.get("speed_over_copy") or one.get("speed_over_read")
        rate = f"{one['gb_per_second']:.2f}" if ratio else ""
        against = f"{ratio[0]:.2f}x ({ratio[1]:.2f}-{ratio[2]:.2f})" if ratio else ""
        shown.add_row(name, f"{one['median']:.4f}", f"{one['min']:.4f}-{one['max']:.4f}", rate, against)
    return shown


def main(options: Options) -> None:
    """Measure, print the table, write the JSON file."""
    torch.set_num_threads(1)
    where = device.choose(options.device, 0, 1)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        root = Path(name)
        state = make_state(options, where)
        size = sum(tensor.nbytes for tensor in tensors(state).values())
        rounds = []
        with Saver(state, root) as saver:
            for number in track(range(options.rounds + 1), "measuring", console=Console(stderr=True)):
                rounds.append(bandwidth(state, saver, root, number) | pauses(state, root))
    found = summary(rounds[1:], size)
    console = Console(width=110)
    console.print(table(found, size))
    facts = provenance(where)
    console.print(in_a_line(facts))
    if options.json:
        facts |= {"options": {k: str(v) for k, v in asdict(options).items() if k not in ("json", "folder")}}
        facts |= {"bytes": size, "summary": found, "rounds": rounds[1:]}
        write_json(options.json, facts)


if __name__ == "__main__":
    with reported():
        main(tyro.cli(Options, description=__doc__))
