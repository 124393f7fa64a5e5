"""Hand-off of weights: a stream of tensors with Hugging Face's names, from the ranks of any layout, without a file.

The tensors come in buckets. Each rank derives the same plan from the options alone: which tensors a bucket has, and
which rank owns which box of them (`Piece.owned`). So nothing is announced or negotiated. For each bucket, each owner
sends one message with its boxes to each receiver. The receiver puts them where the export to Hugging Face has them
(`megapar_models.convert.recipes`). What arrives is bitwise what `megapar convert native-to-hf` writes.

A receiver needs the memory of a bucket, and of the largest message of one owner. An owner needs that of its message.
With ZeRO-3 each rank also gathers the units of the bucket's weights. What a bf16 file has in fp32 (routers of some
families) comes from the main weights.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from megapar.base.errors import ConfigError
from megapar.base.grid import Grid
from megapar.comm import collectives
from megapar.config.messages import first_few
from megapar.config.options import Config
from megapar.declare.context import ParallelContext, planned
from megapar.declare.optimizer_state import StateSlice
from megapar.declare.params import Box, ParamSpec, Piece, spec_of
from megapar.declare.sharding import model_dtype
from megapar_models.build import build_stages
from megapar_models.convert.exported import hf_infos, hf_recipes
from megapar_models.convert.giving import Giver
from megapar_models.convert.huggingface import write_model
from megapar_models.convert.recipes import Recipe, TensorPart, places
from megapar_models.convert.stream import SHARD_BYTES, TensorInfo
from megapar_models.stage import Stage

BUCKET_BYTES = 64 << 20  # less memory than large ones, and faster on a CPU (docs/handoff.md)
_ALIGNED = 16  # bytes; tensors and boxes begin at multiples of it, whatever their dtypes

Tensors = Mapping[str, Tensor]


class RankWeights(Protocol):
    """The weights of a rank: `TrainState.weights`."""

    def hold(self, params: Iterable[nn.Parameter]) -> None:
        """Let `params` be read until the next call."""


# The plan


@dataclass(frozen=True)
class Theirs:
    """One tensor of Hugging Face in a bucket, from byte `offset` on."""

    name: str
    recipe: Recipe
    info: TensorInfo
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        """The tensor as a view of the bucket `flat`, 1-D uint8."""
        return _view(flat, self.offset, self.info.shape, self.info.dtype)


@dataclass(frozen=True)
class Sent:
    """A box of our tensor `part.name`, from byte `offset` of a message on, and the tensor that it is a part of."""

    part: TensorPart
    theirs: Theirs
    box: Box
    offset: int

    def of(self, message: Tensor) -> Tensor:
        """The box as a view of the message, 1-D uint8."""
        return _view(message, self.offset, self.box.size, self.theirs.info.dtype)

    @property
    def end(self) -> int:
        return _after(self.offset, self.box.numel * self.theirs.info.dtype.itemsize)


@dataclass(frozen=True)
class SentBucket:
    """The tensors of a bucket in order, its bytes, and the boxes of each owner's message by rank, in order."""

    tensors: Sequence[Theirs]
    nbytes: int
    messages: Mapping[int, Sequence[Sent]] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Return the logical names of the bucket's tensors."""
        return {part.name for theirs in self.tensors for part in theirs.recipe.parts}

    def names_of(self, dtype: torch.dtype) -> set[str]:
        """Return the logical names of the bucket's tensors that are handed over in `dtype`."""
        return {part.name for theirs in self.tensors if theirs.info.dtype == dtype for part in theirs.recipe.parts}


def _after(offset: int, nbytes: int) -> int:
    """The next aligned byte behind `nbytes` bytes from `offset` on."""
    return -(-(offset + nbytes) // _ALIGNED) * _ALIGNED


def _view(flat: Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return flat[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


def plan_buckets(config: Config, grid: Grid, bucket_bytes: int = BUCKET_BYTES) -> list[SentBucket]:
    """The buckets of a run, sorted by the tensors' names: the same on every rank.

    A bucket has at most `bucket_bytes` bytes, or one larger tensor. Raises ConfigError if the run has weights that an
    export has not.
    """
    owners = _owners(config, grid)
    wanted = hf_recipes(config.model)
    known = {part.name for recipe in wanted.values() for part in recipe.parts}
    if others := sorted(owners.keys() - known):
        raise ConfigError(
            f"weights cannot be handed over: {first_few(others)} of this run are no part of an export to Hugging Face, "
            "such as adapters, which megapar convert merges or writes as PEFT's files"
        )
    groups: list[list[Theirs]] = []
    end = bucket_bytes
    for name, info in sorted(hf_infos(config.model, model_dtype(config.train.precision)).items()):
        if not groups or end + info.nbytes > bucket_bytes:
            groups.append([])
            end = 0
        groups[-1].append(Theirs(name, wanted[name], info, end))
        end = _after(end, info.nbytes)
    return [_bucket(group, owners) for group in groups]


def _bucket(group: Sequence[Theirs], owners: Mapping[str, Sequence[tuple[int, Box]]]) -> SentBucket:
    messages: dict[int, list[Sent]] = {}
    for theirs in group:
        for part in theirs.recipe.parts:
            for rank, owned in owners[part.name]:
                box = part.inside(owned)
                if box is None:
                    continue
                message = messages.setdefault(rank, [])
                message.append(Sent(part, theirs, box, message[-1].end if message else 0))
    last = group[-1]
    return SentBucket(group, _after(last.offset, last.info.nbytes), dict(sorted(messages.items())))


def _owners(config: Config, grid: Grid) -> dict[str, list[tuple[int, Box]]]:
    """For each logical tensor the ranks that own boxes of it, with the boxes. Of replicas the first one owns.

    Raises RuntimeError if the boxes of a tensor do not cover it.
    """
    owners: dict[str, list[tuple[int, Box]]] = {}
    shapes = {}
    for rank in range(grid.world_size):
        positions = grid.positions(rank)
        if positions["grad"][1] and (not grid.ep or positions["expert_grad"][1]):
            continue  # a later replica of dense weights and of experts
        stages = build_stages(config, planned(grid, rank, device=torch.device("meta"))).values()
        for _, spec in _declared(stages):
            for piece in spec.pieces:
                if piece.owned is not None and piece.owned.numel and spec.grad_axis.first:
                    owners.setdefault(piece.name, []).append((rank, piece.owned))
                    shapes[piece.name] = piece.shape
    for name, boxes in owners.items():
        if sum(box.numel for _, box in boxes) != math.prod(shapes[name]):
            raise RuntimeError(f"{name} {list(shapes[name])}: the boxes {boxes} of its owners do not cover it")
    return owners


def _declared(stages: Iterable[nn.Module]) -> Iterator[tuple[Tensor, ParamSpec]]:
    """The parameters, and the buffers that are a part of the model, each once."""
    seen: set[int] = set()
    for stage in stages:
        for tensor in (*stage.parameters(), *stage.buffers()):
            if id(tensor) in seen or not (isinstance(tensor, nn.Parameter) or hasattr(tensor, "spec")):
                continue
            seen.add(id(tensor))
            spec = spec_of(tensor)
            if not spec.training_state:
                yield tensor, spec


# The stream


@dataclass(frozen=True)
class _Held:
    """This rank's part of a logical tensor: the elements from `start` on of a parameter or buffer."""

    tensor: Tensor
    piece: Piece
    start: int

    def box(self, box: Box) -> Tensor:
        """The values of a box inside of what is held."""
        flat = self.tensor.detach().view(-1)[self.start : self.start + self.piece.held.numel]
        inside = tuple(at - held for at, held in zip(box.offset, self.piece.held.offset, strict=True))
        return flat.view(self.piece.local_shape)[Box(inside, box.size).slices]


class Handoff:
    """Streams the weights of `stages` to the ranks `receivers`, again and again while they are trained.

    `grid` is that of `config` (`megapar.launch.grid.grid_of`), `weights` are `TrainState.weights`, and `slices` are
    those of `TrainState.optimizer`. Making it costs the declarations of one replica of the model, on the meta device.
    """

    def __init__(
        self,
        config: Config,
        grid: Grid,
        ctx: ParallelContext,
        stages: Iterable[nn.Module],
        weights: RankWeights,
        slices: Iterable[StateSlice],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        receivers: Sequence[int] = (0,),
    ):
        self.model = config.model
        self.buckets = plan_buckets(config, grid, bucket_bytes)
        self._ctx = ctx
        self._weights = weights
        self._receivers = receivers
        self._held: dict[str, _Held] = {}
        for tensor, spec in _declared(stages):
            for piece, start, _ in spec.segments():
                self._held[piece.name] = _Held(tensor, piece, start)
        self._slices: dict[int, list[StateSlice]] = {}
        for part in slices:
            self._slices.setdefault(id(part.param), []).append(part)

    @property
    def receives(self) -> bool:
        """Whether this rank is a receiver."""
        return self._ctx.world.rank in self._receivers

    @property
    def most_nbytes(self) -> int:
        """The bytes of the largest bucket."""
        return max(bucket.nbytes for bucket in self.buckets)

    @torch.no_grad()
    def stream(self, memory: Callable[[int], Tensor] | None = None) -> Iterator[Tensors]:
        """Yield the tensors of each bucket by name on receivers, and nothing of each bucket on other ranks.

        A collective over the world: every rank goes through the whole stream. `memory` returns 1-D uint8 memory of so
        many bytes, for each bucket. Without it all buckets take the same memory of the rank's device, so a bucket is
        valid until the next one. Raises CommunicationError if a rank is gone or too late.
        """
        own: Tensor | None = None
        try:
            for bucket in self.buckets:
                held = {name: self._held[name] for name in sorted(bucket.names) if name in self._held}
                self._weights.hold(one.tensor for one in held.values() if isinstance(one.tensor, nn.Parameter))
                held |= self._mains(bucket)
                if not self.receives:
                    self._exchange(bucket, None, held)
                    yield {}
                    continue
                if memory is None and own is None:
                    own = torch.empty(self.most_nbytes, dtype=torch.uint8, device=self._ctx.device)
                flat = memory(bucket.nbytes) if memory is not None else own
                assert flat is not None
                self._exchange(bucket, flat, held)
                yield {theirs.name: theirs.of(flat) for theirs in bucket.tensors}
        finally:
            self._weights.hold(())

    def _mains(self, bucket: SentBucket) -> dict[str, _Held]:
        """The fp32 main weights of those in the bucket that the model rounds and the file does not."""
        found = {}
        for name in sorted(bucket.names_of(torch.float32)):
            held = self._held.get(name)
            if held is None or held.tensor.dtype == torch.float32 or not held.tensor.requires_grad:
                continue  # another stage's, or nothing is rounded, or frozen: then there are no main weights
            param = held.tensor
            main = torch.full((param.numel(),), -math.inf, dtype=torch.float32, device=self._ctx.device)
            for part in self._slices.get(id(param), ()):
                main[part.start : part.stop].copy_(part.main)
            # By the largest, because each element may have several copies, and ranks without one have -inf.
            collectives.all_reduce(main, spec_of(param).grad_axis, "max")
            if main.isneginf().any():
                raise RuntimeError(f"{name}: no rank has main weights of some elements; Handoff needs all `slices`")
            found[name] = _Held(main, held.piece, held.start)
        return found

    def _exchange(self, bucket: SentBucket, flat: Tensor | None, held: Mapping[str, _Held]) -> None:
        """Send this rank's boxes of `held`, and fill the bucket `flat` if this rank receives."""
        rank = self._ctx.world.rank
        # Owners take turns, so that a receiver has one message at a time. In each turn a rank sends or receives, and
        # all have the same turns, so none waits for another in a circle.
        for owner, sent in bucket.messages.items():
            others = [receiver for receiver in self._receivers if receiver != owner]
            message = None
            if rank == owner and others:
                message = self._packed(sent, held)
                collectives.exchange([(message, receiver) for receiver in others], [], self._ctx.world).wait()
            if flat is None:
                continue
            if rank != owner:
                message = torch.empty(sent[-1].end, dtype=torch.uint8, device=self._ctx.device)
                collectives.exchange([], [(message, owner)], self._ctx.world).wait()
            for item in sent:
                values = held[item.part.name].box(item.box) if rank == owner else item.of(message)  # type: ignore[arg-type]
                item.part.put(item.theirs.of(flat), item.box, values)
        if flat is not None:
            for theirs in bucket.tensors:
                if theirs.recipe.constant is not None:
                    theirs.of(flat).fill_(theirs.recipe.constant)
                for part in theirs.recipe.parts:
                    part.turn(theirs.of(flat))

    def _packed(self, sent: Sequence[Sent], held: Mapping[str, _Held]) -> Tensor:
        """The message with this rank's boxes, 1-D uint8."""
        message = torch.zeros(sent[-1].end, dtype=torch.uint8, device=self._ctx.device)
        for item in sent:
            item.of(message).copy_(held[item.part.name].box(item.box))
        return message


# Receivers


def write_safetensors(handoff: Handoff, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the stream to model.safetensors in `folder`, or to shards and their index. A collective.

    A receiver writes, and the other ranks send. Raises CheckpointError for a value that is not finite.
    """
    stream = handoff.stream()
    if not handoff.receives:
        for _ in stream:
            pass
        return
    bucket: dict[str, Tensor] = {}

    def next_tensor(name: str) -> Tensor:
        # Files have the order of the stream.
        if not bucket:
            bucket.update(next(stream))
        return bucket.pop(name)

    infos = {theirs.name: theirs.info for item in handoff.buckets for theirs in item.tensors}
    write_model(folder, infos, next_tensor, shard_bytes=shard_bytes)
    for _ in stream:  # its end frees what was gathered
        pass


def give(handoff: Handoff, giver: Giver | None) -> None:
    """Give the stream to another process of this host (`megapar_models.convert.giving`). A collective.

    A receiver has a `giver`. A bucket is put together in the memory that both processes see.
    """
    for tensors in handoff.stream(giver.memory if giver is not None else None):
        if giver is not None:
            giver.give(tensors)
    if giver is not None:
        giver.end()


class StreamLoader:
    """Puts the tensors of a stream into a whole model in one stage, such as one that generates. Dtypes may differ."""

    def __init__(self, stage: Stage):
        found = places(hf_recipes(stage.model))
        self._held: dict[str, list[tuple[_Held, TensorPart]]] = {}
        for tensor, spec in _declared([stage]):
            for piece, start, _ in spec.segments():
                # An expert's matrices lie in one tensor of theirs.
                for place in found[piece.name]:
                    self._held.setdefault(place.source, []).append((_Held(tensor, piece, start), place.part))

    @torch.no_grad()
    def load(self, tensors: Tensors) -> None:
        """Take over the tensors of a bucket."""
        for name, theirs in tensors.items():
            for ours, part in self._held.get(name, ()):  # a constant is part of no tensor of ours
                ours.box(part.box).copy_(part.read(theirs if part.expert is None else theirs[part.expert]))
