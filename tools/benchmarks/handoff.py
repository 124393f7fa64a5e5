"""Seconds and memory to hand the weights of a Llama over from tensor-parallel ranks: in buckets, and tensor by tensor.

Tensor by tensor, all ranks gather one weight after the other (all_gather). Then rank 0 keeps it, collects a dictionary
for safetensors' save_file, or sends it to another process as torch.multiprocessing does, and waits for an answer. The
ranks are processes of one thread on this CPU. Both ways take turns in one run, and must hand over the same bits.
"""

import multiprocessing
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing  # tensors then go through a Pipe in shared memory
from megapar_models.build import build_stages
from megapar_models.convert.giving import Giver, Taker
from megapar_models.convert.handoff import Handoff, give, write_safetensors
from megapar_models.registry import validate
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.counting import in_turn, memory, ratio
from benchmarks.harness import Case, Found, Output
from benchmarks.ranks import BenchmarkError, run_ranks, synchronize
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config, ParallelConfig, TrainConfig
from megapar.declare import context
from megapar.declare.params import spec_of
from megapar.declare.random import initialize
from megapar.launch.grid import grid_of

WAYS = ("buckets", "tensor by tensor")
TARGETS = ("rank", "files", "process")
SECONDS = 60.0  # longest wait of a process for another


@dataclass(frozen=True)
class Options(Output):
    """Measure the hand-off of weights on this machine."""

    tp: int = 2
    """Ranks that the matrices are cut over."""
    layers: int = 3
    """Layers of a Llama in bf16; 3 are 0.6 GB with the embedding and the head."""
    hidden_size: int = 2048
    """Its width."""
    bucket_mb: int = 64
    """MiB of a bucket; a run has 512."""
    rounds: int = 3
    """Rounds that count, between one that warms up and one that shows the memory."""


class Whole:
    """Weights that a rank holds whole, without a training around them."""

    def hold(self, params: Any) -> None:
        """Nothing: they may be read at any time."""


def config_of(options: Options) -> Config:
    """A Llama over the ranks."""
    width = options.hidden_size
    model = ModelConfig(
        hidden_size=width,
        num_hidden_layers=options.layers,
        num_attention_heads=width // 64,
        intermediate_size=11 * width // 4,
        vocab_size=32_000,
    )
    train = TrainConfig(precision="bf16")
    return validate(Config(model=model, parallel=ParallelConfig(tp=options.tp), train=train), options.tp)


@torch.no_grad()
def gathered(stages: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its name, gathered alone, on every rank."""
    for param in (param for stage in stages for param in stage.parameters()):
        for piece, first, last in spec_of(param).segments():
            own = param.view(-1)[first:last].view(piece.local_shape)
            if piece.local_shape == piece.shape:
                yield piece.name, own
                continue
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, own)
            cut = next(at for at, size in enumerate(piece.shape) if size != piece.local_shape[at])
            yield piece.name, torch.cat(parts, cut)


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Return the CRC-32 of each tensor's bytes, sorted, because the two ways name the tensors differently."""
    return sorted(zlib.crc32(x.contiguous().view(torch.uint8).numpy().data) for x in tensors)


def keep(held: dict[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into those of a model that generates."""
    for name, tensor in tensors.items():
        held.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


def take(taker: Taker, connection: Any) -> None:
    """The other process. It is told before each stream in which way it comes. At last it answers with checksums."""
    held: dict[str, dict[str, Tensor]] = {way: {} for way in WAYS}
    streams = taker.streams()
    while way := connection.recv():
        if way == WAYS[0]:
            for tensors in next(streams):
                keep(held[way], tensors)
            continue
        while item := connection.recv():
            keep(held[way], dict([item]))
            connection.send(True)
    connection.send({way: checksums(tensors.values()) for way, tensors in held.items()})


class Rank:
    """A rank that hands over. The first one has a giver, the connection to the other process, and what a rank got."""

    def __init__(self, options: Options, folder: Path, path: Path, connection: Any, device: torch.device):
        config = config_of(options)
        grid = grid_of(config)
        ctx = context.create(grid, device=device)
        self.stages = build_stages(config, ctx).values()
        initialize(self.stages, 0)
        self.handoff = Handoff(config, grid, ctx, self.stages, Whole(), (), bucket_bytes=options.bucket_mb << 20)
        self.giver = Giver(path, SECONDS) if self.handoff.receives else None
        self.folder, self.connection = folder, connection
        self.held: dict[str, dict[str, Tensor]] = {way: {} for way in WAYS}
        self.world, self.device = options.tp, device

    def hand_over(self, way: str, target: str) -> None:
        """All weights, until every rank is done."""
        if target == "process" and self.giver:
            self.connection.send(way)
        if way == WAYS[1]:
            self._tensors(target)
        elif target == "rank":
            for tensors in self.handoff.stream():
                keep(self.held[way], tensors)
        elif target == "files":
            folder = self.folder / "buckets"
            folder.mkdir(exist_ok=True)
            write_safetensors(self.handoff, folder)
        else:
            give(self.handoff, self.giver)
        synchronize(self.world, self.device)

    def _tensors(self, target: str) -> None:
        everything = {}
        for name, tensor in gathered(self.stages):
            if not self.giver:
                continue
            if target == "rank":
                keep(self.held[WAYS[1]], {name: tensor})
            elif target == "files":
                everything[name] = tensor
            else:
                self.connection.send((name, tensor))
                self.connection.recv()
        if everything:
            save_file(everything, self.folder / "single.safetensors")
        if target == "process" and self.giver:
            self.connection.send(None)

    def received(self) -> dict[str, dict[str, list[int]]]:
        """On the first rank: the checksums of what each target has got, by way."""
        self.connection.send(None)
        files = {WAYS[0]: self.folder.glob("buckets/*.safetensors"), WAYS[1]: [self.folder / "single.safetensors"]}
        return {
            "rank": {way: checksums(tensors.values()) for way, tensors in self.held.items()},
            "files": {
                way: checksums(x for path in paths for x in load_file(path).values()) for way, paths in files.items()
            },
            "process": self.connection.recv(),
        }


def measure_rank(options: Options, folder: Path, path: Path, connection: Any, device: torch.device) -> dict[str, Any]:
    """Return for each target and way the seconds of each round, and by how many bytes the first rank's memory grew."""
    rank = Rank(options, folder, path, connection, device)
    found: dict[str, Any] = {}
    for target in TARGETS:
        works = {way: partial(rank.hand_over, way, target) for way in WAYS}
        turns = Case(works, options.rounds).measure()
        taken = {way: memory(works[way])[1] for way in in_turn(WAYS, options.rounds + 1)}
        found[target] = {"seconds": {way: turns[way].wall for way in WAYS}, "peak_bytes": taken}
    if rank.giver:
        for target, sums in rank.received().items():
            if sums[WAYS[0]] != sums[WAYS[1]]:
                raise BenchmarkError(f"the two ways handed over other bits to {target}")
    nbytes = sum(theirs.info.nbytes for bucket in rank.handoff.buckets for theirs in bucket.tensors)
    return {"targets": found, "bytes": nbytes, "buckets": len(rank.handoff.buckets)}


def measure(options: Options) -> Found:
    """Hand the weights over to each target, from ranks that are forked together with the process that takes them."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    with tempfile.TemporaryDirectory() as name, Taker(Path(name), SECONDS) as taker:
        other = fork.Process(target=take, args=(taker, theirs), daemon=True)
        other.start()
        found, *_ = run_ranks(options.tp, "cpu", partial(measure_rank, options, Path(name), taker.path, ours))
    for one in found["targets"].values():
        one["speed"] = ratio(*(one["seconds"][way] for way in reversed(WAYS)))
    return Found(found)
