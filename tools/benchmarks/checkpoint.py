"""Saving and loading beside a plain copy of the same bytes and torch's distributed checkpoint, and the cost of an
asynchronous save to training.

One process, one model, one folder. In each round all take turns. Every round reverses the order, so the disk's and the
machine's moods hit neighbors alike; a ratio is taken within a round. Every write ends in an fsync; reads find their
file in memory, as it was just written. The bytes are those of main weights and both moments.

- save: megapar's, with a CRC-32 of each chunk; copy: shutil.copyfile of megapar's files; DCP: torch's.
- load: megapar's, each CRC compared; read: of the same files into memory; DCP: torch's. Loaded and saved values must be
  bitwise equal, or the exit code is 70.
- pause: how long `save` keeps the training thread, when it waits for the disk and when it leaves a copy to a thread;
  and training steps meanwhile beside training steps alone.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from megapar_models.registry import validate, weight_options

from benchmarks.contenders import Megapar
from benchmarks.counting import Cost, cost, in_turn, ratio, spread
from benchmarks.harness import Found, Output, progress
from benchmarks.layouts import make_batches, make_weights
from benchmarks.ranks import BenchmarkError
from megapar.checkpoint.load import load
from megapar.config.model_options import ModelConfig
from megapar.config.options import CheckpointConfig, Config, LaunchConfig, TrainConfig
from megapar.observe.provenance import provenance
from megapar.step.step import TrainState
from megapar.system import device
from megapar.train.saver import Saver


@dataclass(frozen=True)
class Options(Output):
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


def make_trainer(options: Options, target: torch.device) -> Megapar:
    """A trainer with weights and moments of one training step."""
    model = ModelConfig(
        hidden_size=options.hidden,
        num_hidden_layers=options.num_hidden_layers,
        num_attention_heads=options.hidden // 64,
        vocab_size=options.vocab_size,
    )
    train = TrainConfig(global_batch_size=1)
    config = validate(Config(model=model, train=train, launch=LaunchConfig(device=options.device)), 1)
    trainer = Megapar(config, make_weights(config), target)
    step(trainer)
    return trainer


def step(trainer: Megapar) -> Cost:
    """What a training step of one sample costs; CPU seconds are those of this thread."""
    batch = [x.to(trainer.device) for x in make_batches(trainer.config, 1)[0]]
    return cost(partial(trainer.whole_step, *batch), time.thread_time)[0]


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
    """The folder's files into memory allocated before, like the tensors of a load."""
    for path in source.iterdir():
        with open(path, "rb", buffering=0) as file:
            file.readinto(buffer)


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
    for works in (writes, reads):
        for name in in_turn(works, number):
            if name == "save":
                shutil.rmtree(path)
            found[name] = cost(works[name])[0].wall
            if name.endswith("load"):
                require_equal(state, saved, name)
    for name, tensor in tensors(state).items():
        tensor.copy_(saved[name])
    for folder in (path, copied, foreign):
        shutil.rmtree(folder)
    return found


def pauses(trainer: Megapar, root: Path) -> dict[str, float]:
    """Seconds of the training thread: for a save of either kind, for its steps alone, and for its steps meanwhile."""
    found: dict[str, float] = {}
    state = trainer.state

    def note(name: str, steps: Sequence[Cost]) -> None:
        found[name] = statistics.median(one.wall for one in steps)
        found[f"{name}, CPU time"] = statistics.median(one.cpu for one in steps)

    note("step alone", [step(trainer) for _ in range(3)])
    for kind in ("synchronous", "asynchronous"):
        options = CheckpointConfig(async_save=kind == "asynchronous", keep_last=1)
        given = state.config
        state.config = replace(given, checkpoint=options)
        with Saver(state, root / kind) as saver:
            if options.async_save:  # the first save makes the copy's memory, once in a run
                found["first pause, asynchronous"] = cost(lambda: saver.save(state))[0].wall
                list(saver.completed(wait=True))
                step(trainer)
            found[f"pause, {kind}"] = cost(lambda: saver.save(state))[0].wall
            if options.async_save:
                meanwhile: list[Cost] = []
                while not meanwhile or not list(saver.completed()):
                    meanwhile.append(step(trainer))
                note("step meanwhile", meanwhile)
        state.config = given
        shutil.rmtree(root / kind)
    return found


def summary(rounds: Sequence[dict[str, float]], size: int) -> dict[str, Any]:
    """Medians and ranges; bandwidths in GB/s for turns with the checkpoint's bytes."""
    moved = {"save": "copy", "DCP save": "copy", "copy": "copy", "load": "read", "DCP load": "read", "read": "read"}
    seconds = {name: [one[name] for one in rounds] for name in rounds[0]}
    result: dict[str, Any] = {name: spread(values) for name, values in seconds.items()}
    for name, plain in moved.items():
        rate = size / 1e9 / result[name]["median"]
        result[name] |= {"gb_per_second": rate, f"speed_over_{plain}": ratio(seconds[plain], seconds[name])}
    return result


def measure(options: Options) -> Found:
    """Measure the rounds. Raises BenchmarkError if a load is not what was saved."""
    torch.set_num_threads(1)
    target = device.choose(options.device, 0, 1)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        root = Path(name)
        trainer = make_trainer(options, target)
        state = trainer.state
        size = sum(tensor.nbytes for tensor in tensors(state).values())
        rounds = []
        with Saver(state, root) as saver:
            for number in progress(range(options.rounds + 1)):
                rounds.append(bandwidth(state, saver, root, number) | pauses(trainer, root))
    found = summary(rounds[1:], size)
    return Found({"bytes": size, "summary": found, "rounds": rounds[1:]}, (), (), provenance(target))
