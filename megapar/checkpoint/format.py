"""A checkpoint on disk: boxes of logical tensors in safetensors files, and a JSON manifest written last.

    run/checkpoints/step_00001200/        exists only when complete: renamed from .tmp-step_00001200-<random>
        manifest.json                     {"sha256": ..., "body": {...}}
        rank_00000.safetensors ...        one file for each rank that owns something
    run/checkpoints/latest                the newest name, for people and scripts; nothing here trusts it

Names are logical and layout-free (`main.layers.17.attention.q.weight`): fused parameters are stored apart, vocabulary
padding and second copies of tied weights not at all. So no layout is needed to read a checkpoint, and any can.
"""

import hashlib
import json
import logging
import math
import os
import re
import stat
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megapar.errors import CheckpointError
from megapar.params import ParamSpec, Piece

FORMAT = 1
MANIFEST = "manifest.json"
WEIGHTS = ("main",)
STATE = ("main", "exp_avg", "exp_avg_sq")
_FOLDER = re.compile(r"step_(\d{8,})")

Sizes = tuple[int, ...]


class WeightSlice(Protocol):
    """Flat elements [start, stop) of a local parameter; `main` is a 1-D view of their weights."""

    @property
    def spec(self) -> ParamSpec: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def main(self) -> Tensor: ...


class StateSlice(WeightSlice, Protocol):
    """The same elements' Adam moments besides, all fp32."""

    @property
    def exp_avg(self) -> Tensor: ...
    @property
    def exp_avg_sq(self) -> Tensor: ...


class Box(NamedTuple):
    """An axis-aligned box of a tensor; its elements lie in flat order from `position` on."""

    offset: Sizes
    size: Sizes
    position: int


def boxes(shape: Sizes, start: int, stop: int) -> Iterator[Box]:
    """The flat row-major range [start, stop) of a tensor, in order, as at most 2 * len(shape) - 1 boxes."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield Box((start,)[: len(shape)], (stop - start,)[: len(shape)], start)
        return
    row = math.prod(shape[1:])
    first_whole, end_whole = -(-start // row), stop // row

    def within(number: int, low: int, high: int) -> Iterator[Box]:
        for box in boxes(shape[1:], low, high):
            yield Box((number, *box.offset), (1, *box.size), number * row + box.position)

    if end_whole < first_whole:
        yield from within(end_whole, start - end_whole * row, stop - end_whole * row)
        return
    if start < first_whole * row:
        yield from within(first_whole - 1, start - (first_whole - 1) * row, row)
    if first_whole < end_whole:
        whole = (end_whole - first_whole, *shape[1:])
        yield Box((first_whole, *(0 for _ in shape[1:])), whole, first_whole * row)
    if end_whole * row < stop:
        yield from within(end_whole, 0, stop - end_whole * row)


def logical_boxes(spec: ParamSpec, start: int, stop: int) -> Iterator[tuple[Piece, Box]]:
    """Flat elements [start, stop) of the local parameter as boxes of its logical tensors; padding rows are in none.

    Offsets count in the logical tensor, positions in the local parameter.
    """
    for piece, first, last in spec.segments():
        for box in boxes(piece.local_shape, max(start, first) - first, min(stop, last) - first):
            shift = piece.start if piece.dim is not None else 0
            offset = tuple(o + shift * (d == piece.dim) for d, o in enumerate(box.offset))
            yield piece, Box(offset, box.size, first + box.position)


class Chunk(NamedTuple):
    """One stored box: tensor `key` of `file` holds [offset, offset + size) of a logical tensor."""

    file: str
    key: str
    offset: Sizes
    size: Sizes
    crc32: int


class Entry(NamedTuple):
    """A logical tensor: its chunks are disjoint and cover it."""

    shape: Sizes
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. `layout` is what it was written by: information, never needed to read it."""

    step: int
    consumed_samples: int
    layout: dict[str, Any]
    model_config: dict[str, Any]
    trainer: dict[str, Any]
    data: dict[str, Any]
    files: dict[str, int]
    tensors: dict[str, Entry]

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> "Manifest":
        """From JSON. Raises KeyError, TypeError or ValueError where it does not have this format's shape."""
        fields = {name: body[name] for name in cls.__dataclass_fields__}
        counts = (body["step"], body["consumed_samples"], *body["files"].values())
        if any(type(count) is not int or count < 0 for count in counts):
            raise TypeError("step, consumed_samples and file sizes must be integers of at least 0")
        return cls(**fields | {"tensors": {name: read_entry(entry) for name, entry in body["tensors"].items()}})

    def body(self) -> dict[str, Any]:
        """JSON types."""
        tensors = {name: entry._asdict() for name, entry in self.tensors.items()}
        return {"format": FORMAT, **vars(self), "tensors": tensors}


def read_entry(entry: Mapping[str, Any]) -> Entry:
    """From JSON. Raises KeyError, TypeError or ValueError where it does not have this format's shape."""
    chunks = tuple(
        Chunk(str(file), str(key), _sizes(offset), _sizes(size), crc)
        for file, key, offset, size, crc in entry["chunks"]
    )
    return Entry(_sizes(entry["shape"]), str(entry["dtype"]), chunks)


def _sizes(values: Iterable[Any]) -> Sizes:
    sizes = tuple(values)
    if any(type(size) is not int or size < 0 for size in sizes):
        raise TypeError(f"{sizes} should be integers of at least 0")
    return sizes


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Raises ValueError for a name that is no dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


def checksum(values: Tensor) -> int:
    """CRC-32 of a contiguous CPU tensor's bytes."""
    return zlib.crc32(values.reshape(-1).view(torch.uint8).numpy().data)


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def _encode(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True)


def sync_folder(folder: Path) -> None:
    """Make the folder's names survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest to disk, last of all files: it is what makes the folder a checkpoint."""
    body = json.loads(_encode(manifest.body()))
    text = _encode({"sha256": hashlib.sha256(_encode(body).encode()).hexdigest(), "body": body})
    with open(folder / MANIFEST, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint: unedited, every file there in its full size, every tensor covered once.

    Contents of the files are not read (`Reader` compares each chunk with its CRC). Raises CheckpointError.
    """
    path = folder / MANIFEST
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with open(descriptor) as file:
            document = json.load(file)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: incomplete or no checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: incomplete: not readable as JSON ({error})") from None
    try:
        body = document["body"]
        if hashlib.sha256(_encode(body).encode()).hexdigest() != document["sha256"]:
            raise CheckpointError(f"{path}: edited or damaged: its sha256 differs from the one it states")
        if body["format"] != FORMAT:
            raise CheckpointError(f"{path}: written in format {body['format']!r}, this version reads format {FORMAT}")
        manifest = Manifest.from_body(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a manifest of format {FORMAT} ({error!r})") from None
    _check_files(folder, manifest)
    _check_tensors(path, manifest)
    return manifest


def _check_files(folder: Path, manifest: Manifest) -> None:
    for name, size in manifest.files.items():
        if name in ("", ".", "..") or os.path.basename(name) != name or "\0" in name:
            raise CheckpointError(f"{folder / MANIFEST}: names {name!r}, a path outside the checkpoint's folder")
        try:
            found = os.lstat(folder / name)
        except OSError:
            raise CheckpointError(f"{folder / name}: missing, one of {len(manifest.files)} files listed") from None
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{folder / name}: not a regular file (links are not followed)")
        if found.st_size != size:
            raise CheckpointError(f"{folder / name}: {found.st_size} bytes, the manifest says {size}")


def _check_tensors(path: Path, manifest: Manifest) -> None:
    stored: dict[str, int] = defaultdict(int)
    for name, entry in manifest.tensors.items():
        problem = _problem(entry, manifest.files)
        if problem:
            raise CheckpointError(f"{path}: tensor {name} of shape {list(entry.shape)}: {problem}")
        for chunk in entry.chunks:
            stored[chunk.file] += math.prod(chunk.size) * dtype_of(entry.dtype).itemsize
    for file, size in stored.items():
        if size > manifest.files[file]:
            raise CheckpointError(f"{path}: {file} would hold {size} bytes of chunks in {manifest.files[file]} bytes")


def _problem(entry: Entry, files: Mapping[str, int]) -> str | None:
    try:
        dtype_of(entry.dtype)
    except ValueError as error:
        return str(error)
    for chunk in entry.chunks:
        if chunk.file not in files:
            return f"chunk {chunk.key} lies in {chunk.file}, which is not listed"
        if len(chunk.offset) != len(entry.shape) or len(chunk.size) != len(entry.shape):
            return f"chunk {chunk.key} has another number of dimensions"
        if any(o + s > n for o, s, n in zip(chunk.offset, chunk.size, entry.shape, strict=True)):
            return f"chunk {chunk.key} at {list(chunk.offset)} of size {list(chunk.size)} reaches beyond it"
    clash = _overlapping(entry.chunks)
    if clash:
        return f"chunks {clash[0].key} of {clash[0].file} and {clash[1].key} of {clash[1].file} overlap"
    covered, total = sum(math.prod(chunk.size) for chunk in entry.chunks), math.prod(entry.shape)
    return f"chunks cover {covered} of {total} elements" if covered != total else None


def _overlapping(chunks: Iterable[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Two chunks that share an element, found by a sweep along dimension 0."""
    active: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offset):
        active = [other for other in active if _reach(other) > _start(chunk)]
        for other in active:
            if overlap(other.offset, other.size, chunk.offset, chunk.size):
                return other, chunk
        active.append(chunk)
    return None


def _start(chunk: Chunk) -> int:
    return chunk.offset[0] if chunk.offset else 0


def _reach(chunk: Chunk) -> int:
    return chunk.offset[0] + chunk.size[0] if chunk.offset else 1


def overlap(offset: Sizes, size: Sizes, other_offset: Sizes, other_size: Sizes) -> tuple[Sizes, Sizes] | None:
    """(first, last + 1) corners of the part that two boxes share, or None if they share nothing."""
    low = tuple(map(max, offset, other_offset))
    high = tuple(min(o + s, p + t) for o, s, p, t in zip(offset, size, other_offset, other_size, strict=True))
    return (low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None


def checkpoint_folders(root: Path) -> list[Path]:
    """Folders named like a checkpoint, newest step first, complete or not."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _FOLDER.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def find_complete(root: Path) -> Iterator[Path]:
    """Complete checkpoints in `root`, newest step first. Incomplete ones are skipped with a warning; folders of other
    names, such as those that a killed save leaves, are no checkpoints."""
    return filter(is_complete, checkpoint_folders(root))


def is_complete(folder: Path) -> bool:
    """Whether `read_manifest` takes it; a warning says why not."""
    try:
        read_manifest(folder)
    except CheckpointError as error:
        logging.getLogger(__name__).warning("checkpoint skipped: %s", error)
        return False
    return True
