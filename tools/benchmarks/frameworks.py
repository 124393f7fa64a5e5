"""Checkpoints of other frameworks, with moments: read into a native checkpoint, written, and read by one rank alone.

A native checkpoint of a Llama with random weights and moments of AdamW is written as the folder of each framework, and
read back. Beside it stand what the frameworks have for the same folder: torch's dcp.load into tensors allocated before,
torch's dcp_to_torch_save (one pickle of all), and Megatron-Core's load_plain_tensors, where it is installed. Each turn
is a process of its own, forked, one thread; its memory is the highest resident size above that before. Files are in
memory, as they were just written. Values read back must be bitwise those written, or the exit code is 70.

A rank of tp 4, pp 2 also fills its own boxes from the folder: bytes that it reads, beside those of its boxes.
"""

import importlib.util
import math
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megapar_models.build import build_stages
from megapar_models.convert.formats.command import AnyToNative, from_native, to_native
from megapar_models.convert.formats.contents import OPTIMIZERS
from megapar_models.convert.formats.detect import Asked, open_folder
from megapar_models.convert.stream import write_checkpoint
from megapar_models.counts import WholeModel
from megapar_models.families.llama import LlamaModel
from megapar_models.registry import validate, weight_options
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from benchmarks.counting import cost, memory, ratio, spread
from benchmarks.harness import Found, Output, progress
from benchmarks.ranks import BenchmarkError
from megapar.base.grid import Grid
from megapar.checkpoint.format import Manifest, TensorEntry, read_manifest
from megapar.checkpoint.load import Reader, fill
from megapar.config.files import part_toml
from megapar.config.options import Config, ParallelConfig, TrainConfig, flatten
from megapar.declare.context import planned
from megapar.declare.optimizer_state import StateSlice
from megapar.declare.params import MAIN, spec_of

KINDS = ("megatron", "torchtitan", "fsdp2", "deepspeed")
STATES = (MAIN, "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Options(Output):
    """Measure conversions on this machine."""

    hidden: int = 1024
    """Width of the model, a Llama with heads of 64, half as many of them keys and values."""
    num_hidden_layers: int = 5
    """Transformer layers."""
    vocab_size: int = 16384
    """Token ids."""
    rounds: int = 3
    """Turns of each contender."""
    folder: Path | None = None
    """Where to write; the default is a folder of the system's for temporary files, removed afterwards."""


def make_native(options: Options, folder: Path) -> Config:
    """Write a native checkpoint with random weights and moments."""
    heads = options.hidden // 64
    model = LlamaModel(
        hidden_size=options.hidden,
        num_hidden_layers=options.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        vocab_size=options.vocab_size,
    )
    config = validate(Config(model=model, train=TrainConfig(global_batch_size=8)), 1)
    entries = {
        f"{state}.{name}": TensorEntry(piece.shape, "float32", ())
        for state in STATES
        for name, piece in WholeModel(config.model).tensors().items()
    }
    random = torch.Generator().manual_seed(0)

    def make(name: str) -> Tensor:
        values = torch.randn(entries[name].shape, generator=random)
        return values.abs_() if name.startswith("exp_avg_sq.") else values

    trainer = {"updates": 7, "loss_scale": None, "config": flatten(config)}
    states = {name: OPTIMIZERS[name] for name in STATES[1:]}
    folder.mkdir()
    weights = weight_options(config)
    write_checkpoint(folder, Manifest(7, 56, {}, weights, trainer, {}, {}, entries, states), make)
    (folder / "model.toml").write_text(part_toml(config, ("model",)))
    return config


def load_by_torch(folder: Path) -> None:
    """Load all tensors by torch's dcp.load."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)


def load_by_megatron(folder: Path) -> None:
    """Load all tensors by Megatron-Core."""
    from megatron.core.dist_checkpointing import load_plain_tensors

    load_plain_tensors(str(folder))


def contenders(kind: str, folder: Path, native: Path, back: Path) -> dict[str, Callable[[], object]]:
    """What is measured of a folder, by name."""
    config = str(native / "model.toml")
    inside = next(folder.glob("iter_*"), folder)
    works: dict[str, Callable[[], object]] = {
        "read into a native checkpoint": partial(to_native, AnyToNative(folder, back, config=config)),
        "written": partial(from_native, AnyToNative(native, folder.with_name("again"), to=kind)),  # type: ignore[arg-type]
    }
    if kind != "deepspeed":
        works["torch's dcp.load"] = partial(load_by_torch, inside)
        works["torch's dcp_to_torch_save"] = partial(dcp_to_torch_save, inside, folder.with_name("pickle"))
    if kind == "megatron" and importlib.util.find_spec("megatron") is not None:
        works["Megatron-Core's load_plain_tensors"] = partial(load_by_megatron, inside)
    return works


def in_a_fork(work: Callable[[], Any]) -> Any:
    """What `work` returns in a process of its own. Raises BenchmarkError if it fails there."""

    def child(send: Connection) -> None:
        send.send(work())

    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    process = fork.Process(target=child, args=(send,))
    process.start()
    send.close()
    try:
        return receive.recv()
    except EOFError:
        raise BenchmarkError("a contender failed; its words are above") from None
    finally:
        process.join()


def turn(work: Callable[[], object]) -> dict[str, float]:
    """Seconds and bytes of a contender."""
    found: dict[str, float] = {}

    def timed() -> None:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            spent = cost(work)[0]
        found.update(seconds=spent.wall, cpu=spent.cpu)

    _, found["bytes"] = memory(timed)
    return found


def rank_of(config: Config, folder: Path) -> dict[str, float]:
    """Bytes that rank 0 of tp 4, pp 2 reads of a folder to fill its boxes, and bytes of the boxes."""
    parallel = ParallelConfig(tp=4, pp=2)
    layout = validate(Config(model=config.model, parallel=parallel, train=config.train), 8)
    ctx = planned(Grid(tp=4, pp=2), 0, device=torch.device("cpu"))
    slices = []
    for stage in build_stages(layout, ctx).values():
        for param in stage.parameters():
            tensors = {state: torch.empty(param.numel()) for state in STATES}
            slices.append(StateSlice(param, spec_of(param), 0, param.numel(), tensors))
    contents = open_folder(folder, Asked(config.model))
    manifest = contents.manifest(config)
    before = _read_bytes()
    fill(folder, manifest, slices)
    boxes = sum(tensor.nbytes for item in slices for tensor in item.tensors.values())
    return {"read": _read_bytes() - before, "boxes": boxes}


def _read_bytes() -> int:
    """Bytes that this process asked the system for by read calls."""
    text = Path("/proc/self/io").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("rchar")).split()[1])


def require_equal(native: Path, back: Path) -> None:
    """Raise BenchmarkError unless two native checkpoints hold the same bits."""
    ours, theirs = read_manifest(native), read_manifest(back)
    if ours.tensors.keys() != theirs.tensors.keys():
        raise BenchmarkError(f"{back}: other tensors than {native}")
    with Reader(native, ours) as left, Reader(back, theirs) as right:
        for name in ours.tensors:
            if not torch.equal(left.tensor(name), right.tensor(name)):
                raise BenchmarkError(f"{back}: {name} is not what was written")


def summary(turns: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians and ranges of each contender, and its time beside that of ours."""
    first = next(iter(turns))
    found: dict[str, Any] = {}
    for name, each in turns.items():
        numbers = {key: [one[key] for one in each] for key in each[0]}
        found[name] = {key: spread(values) for key, values in numbers.items()}
        found[name]["time_over_ours"] = ratio(numbers["seconds"], [one["seconds"] for one in turns[first]])
    return found


def measure(options: Options) -> Found:
    """Measure all kinds. Raises BenchmarkError if a folder does not give back what was written."""
    torch.set_num_threads(1)
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        root = Path(name)
        native, back = root / "native", root / "back"
        config = make_native(options, native)
        numbers["bytes"] = 12 * sum(math.prod(p.shape) for p in WholeModel(config.model).tensors().values())
        for kind in progress(KINDS):
            folder = root / kind
            in_a_fork(partial(from_native, AnyToNative(native, folder, to=kind)))  # type: ignore[arg-type]
            turns: dict[str, list[dict[str, float]]] = {}
            for _ in range(options.rounds):
                for contender, work in contenders(kind, folder, native, back).items():
                    turns.setdefault(contender, []).append(in_a_fork(partial(turn, work)))
                    if back.exists():
                        require_equal(native, back)
                    for made in (back, root / "again", root / "pickle"):
                        shutil.rmtree(made) if made.is_dir() else made.unlink(missing_ok=True)
            rank = in_a_fork(partial(rank_of, config, folder))
            numbers[kind] = summary(turns) | {"rank 0 of tp 4, pp 2": rank}
            shutil.rmtree(folder)
    return Found(numbers)
