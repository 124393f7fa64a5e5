"""Folders of torch.distributed.checkpoint (DCP), read without running anything of them.

    .metadata        a pickle of the index: each tensor's shape, dtype and chunks, and where each chunk lies
    __R_N.distcp     file N of rank R: an archive of torch.save for each chunk or value, one behind the other

Torch's FSDP2, torchtitan, Megatron Core (`torch_dist`, `fsdp_dtensor`) and others write them. The whole index is
checked when the folder is opened: every element of a tensor lies in one chunk, and every chunk in a file that has its
bytes. DCP has no checksums, so a changed value is not found.
"""

import math
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megapar.base.errors import CheckpointError
from megapar.checkpoint.boxes import overlap
from megapar.checkpoint.format import Sizes, dtype_name
from megapar.config.messages import first_few
from megapar.declare.params import Box
from megapar.system.garbage import GarbageCollection
from megapar.system.regular_files import open_regular, read_regular
from megapar_models.convert.formats.pickles import Inert, PickleError, inert, plain_names, refused, unpickled
from megapar_models.convert.formats.torch_files import (
    Archive,
    FileSpan,
    StoredTensor,
    names_of_frameworks,
    plain_value,
    reading_archive,
)
from megapar_models.convert.stream import TensorInfo

INDEX = ".metadata"
_INDEX_BYTES = 1 << 29  # a million chunks have some 150 MB
_MOST_CUTS = 6  # dimensions along which a tensor may be cut
_LARGEST = 1 << 62

_TORCH = "torch.distributed.checkpoint"
_OF_METADATA = (
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
    *("BytesStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
# Megatron Core keeps the plans of all ranks beside the index.
_OF_PLANNER = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
_INERT = {
    *(f"{_TORCH}.metadata.{name}" for name in _OF_METADATA),
    *(f"{_TORCH}.planner.{name}" for name in _OF_PLANNER),
    f"{_TORCH}.filesystem._StorageInfo",
    f"{_TORCH}.filesystem._StoragePrefix",
    # Torch 2.0 to 2.2 took them from there.
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    # Megatron Core up to 0.14
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
}


class Chunk(NamedTuple):
    """A box of a tensor, and where it lies."""

    offset: Sizes
    size: Sizes
    file: str
    span: FileSpan


class _Place(NamedTuple):
    file: str
    span: FileSpan


class _BadIndexError(Exception):
    """What is wrong with an index, without the file's name."""


def _index_names(text: str) -> Any:
    return inert(text) if text in _INERT else plain_names(text)


class DcpStore:
    """A DCP folder as a store. Values are read when they are asked for, each alone: `values` may hold thousands."""

    def __init__(
        self, folder: Path, chunks: Mapping[str, list[Chunk]], infos: Mapping[str, TensorInfo], values: "_Values"
    ):
        self._folder = folder
        self._chunks = chunks
        self._infos = infos
        self._values = values
        cut = {name: parts for name, parts in chunks.items() if len(parts) > 1}
        self._tallest = {name: max(chunk.size[0] for chunk in parts) for name, parts in cut.items()}

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    @property
    def values(self) -> Mapping[str, Any]:
        return self._values

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor, joined of its chunks. Of each chunk little more than the common part is read."""
        if name not in self._infos:
            raise CheckpointError(f"{self._folder}: holds no tensor {name}")
        shape, dtype = self._infos[name]
        box = box or Box((0,) * len(shape), tuple(shape))
        out = torch.empty(box.size, dtype=dtype)
        for chunk in self._near(name, box):
            common = overlap(box.offset, box.size, chunk.offset, chunk.size)
            if common:
                low, high = common
                part = out[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, box.offset, strict=True))]
                self._fill(name, chunk, tuple(a - o for a, o in zip(low, chunk.offset, strict=True)), part)
        return out

    def _near(self, name: str, box: Box) -> Sequence[Chunk]:
        """The chunks, sorted by offset, that may have rows of the box."""
        chunks = self._chunks[name]
        if len(chunks) < 2:
            return chunks
        first = bisect_left(chunks, box.offset[0] - self._tallest[name] + 1, key=lambda chunk: chunk.offset[0])
        last = bisect_left(chunks, box.offset[0] + box.size[0], key=lambda chunk: chunk.offset[0])
        return chunks[first:last]

    def _fill(self, name: str, chunk: Chunk, offset: Sizes, out: Tensor) -> None:
        """Fill `out` with the chunk's box at `offset`, after a look whether the file holds what the index says."""
        what = f"{self._folder / chunk.file}: {name} at {list(chunk.offset)} (byte {chunk.span.start:,})"
        with reading_archive(what):
            file = open_regular(self._folder / chunk.file, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                stored = Archive(file, chunk.span).load(plain_names)
                if not isinstance(stored, StoredTensor):
                    raise PickleError("is no tensor")
                if (stored.shape, stored.dtype) != (chunk.size, out.dtype):
                    raise PickleError(
                        f"is {dtype_name(stored.dtype)} {list(stored.shape)}, {INDEX} says {dtype_name(out.dtype)} "
                        f"{list(chunk.size)}"
                    )
                if stored.repeats:  # torch saves each element, so the strides are damaged
                    raise PickleError(f"has strides {list(stored.strides)}, by which elements share their bytes")
                stored.read(file, offset, out)
            finally:
                os.close(file)


class _Values(Mapping[str, Any]):
    """Values by name, read when they are asked for."""

    def __init__(self, folder: Path, places: Mapping[str, _Place]):
        self._folder = folder
        self._places = places

    def __getitem__(self, name: str) -> Any:
        place = self._places[name]
        path = self._folder / place.file
        with reading_archive(f"{path}: {name} (byte {place.span.start:,})"):
            file = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                return plain_value(Archive(file, place.span), names_of_frameworks)
            finally:
                os.close(file)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def open_dcp(folder: Path) -> DcpStore:
    """Open a DCP folder: read and check its index, and look at the sizes of its files.

    Raises CheckpointError, in one line, if the index names a class that it should not, if a tensor's chunks have a hole
    or overlap, or if a file is missing, cut, a link, or no regular file.
    """
    path = folder / INDEX
    try:
        data = read_regular(path, _INDEX_BYTES, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise CheckpointError(f"{path}: no readable index of torch.distributed.checkpoint ({error.strerror})") from None
    try:
        with (
            GarbageCollection()
        ):  # of millions of new objects none is garbage, and looking for some takes half the time
            metadata = unpickled(data, _index_names)
            del data
            if not isinstance(metadata, Inert) or not metadata.kind.endswith("Metadata"):
                raise _BadIndexError("is no index of torch.distributed.checkpoint")
            chunks, infos, values = _entries(metadata)
            _check_files(folder, chunks, values)
    except PickleError as error:
        raise refused(path, error) from None
    except _BadIndexError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return DcpStore(folder, chunks, infos, _Values(folder, values))


def _entries(metadata: Inert) -> tuple[dict[str, list[Chunk]], dict[str, TensorInfo], dict[str, _Place]]:
    """The chunks and infos of all tensors, and the places of all values. Raises _BadIndexError if they do not fit."""
    declared, storage = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if type(declared) is not dict or type(storage) is not dict:
        raise _BadIndexError("has no state_dict_metadata or no storage_data")
    places = _places(storage)
    chunks: dict[str, list[Chunk]] = {}
    infos: dict[str, TensorInfo] = {}
    values: dict[str, _Place] = {}
    for name, entry in declared.items():
        if type(name) is not str or not name.isprintable() or type(entry) is not Inert:
            raise _BadIndexError(f"has an entry {_shown(name)}, which is none of torch's")
        held = places.pop(name, {})
        if entry.kind == "TensorStorageMetadata":
            infos[name] = _info(name, entry)
            chunks[name] = _chunks(name, entry, infos[name], held)
        elif entry.kind == "BytesStorageMetadata" and held.keys() == {None}:
            values[name] = held[None]
        else:
            raise _BadIndexError(f"{name} is a {entry.kind} with {len(held)} stored parts")
    if places:
        raise _BadIndexError(f"says where {first_few(sorted(places))} lies, and not what it is")
    return chunks, infos, values


def _places(storage: dict[Any, Any]) -> dict[str, dict[Sizes | None, _Place]]:
    """Where the parts of each entry lie, by offset. Empties `storage`, whose objects take ten times as much memory."""
    places: dict[str, dict[Sizes | None, _Place]] = {}
    files: dict[str, str] = {}  # one text for each file, not one for each chunk
    while storage:
        index, info = storage.popitem()
        if type(index) is not Inert or type(info) is not Inert:
            raise _BadIndexError(f"its storage_data has a pair of {_shown(index)} and {_shown(info)}")
        name, offset = index.get("fqn"), index.get("offset")
        file, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if type(name) is not str or not name.isprintable():
            raise _BadIndexError("its storage_data has an entry without a name")
        if transforms := info.get("transform_descriptors"):
            first = _shown(transforms[0]) if type(transforms) in (list, tuple) else _shown(transforms)
            raise _BadIndexError(f"{name} is stored through {first}, which is not read: save it without _extensions")
        if type(file) is not str or not file.isprintable() or "/" in file or file in ("", ".", ".."):
            raise _BadIndexError(f"{name} lies in {_shown(file)}, which is no file of the folder")
        if not _are_sizes((start, length)) or (offset is not None and not _are_sizes(offset)):
            raise _BadIndexError(f"{name} has a place or an offset that are no numbers from 0 to 2^62")
        held = places.setdefault(name, {})
        if offset in held:
            raise _BadIndexError(f"{name} has two parts at {list(offset or ())}")
        held[offset] = _Place(files.setdefault(file, file), FileSpan(start, length))
    return places


def _shown(value: Any) -> str:
    """A value of a pickle in a message: a text on one line, and the class of anything else."""
    if type(value) is str:
        return ascii(value)[:80]
    return value.kind if type(value) is Inert else type(value).__name__


def _are_sizes(numbers: Any) -> bool:
    return type(numbers) is tuple and all(type(number) is int and 0 <= number < _LARGEST for number in numbers)


def _info(name: str, entry: Inert) -> TensorInfo:
    """The tensor's shape and dtype. Raises _BadIndexError if it is none that torch could hold."""
    shape, properties = entry.get("size"), entry.get("properties")
    state = properties.state if type(properties) is Inert else None
    # A tuple since torch 2.1, with the layout second.
    dtype, layout = state[:2] if type(state) is tuple and len(state) > 1 else (None, None)
    if type(state) is dict:
        dtype, layout = state.get("dtype"), state.get("layout")
    if not isinstance(dtype, torch.dtype) or layout not in (None, "torch.strided"):
        raise _BadIndexError(f"{name} has no dtype, or is sparse")
    if not _are_sizes(shape) or math.prod(shape) * dtype.itemsize >= _LARGEST:
        raise _BadIndexError(f"{name} has no shape of numbers from 0 on that fit into memory")
    return TensorInfo(shape, dtype)


def _chunks(name: str, entry: Inert, info: TensorInfo, held: dict[Sizes | None, _Place]) -> list[Chunk]:
    """The tensor's chunks that have elements, sorted by offset. Raises _BadIndexError unless they tile it."""
    listed = entry.get("chunks")
    if type(listed) is not list:
        raise _BadIndexError(f"{name} has no chunks")
    chunks, empty = [], []
    for chunk in listed:
        offset: Any = chunk.get("offsets") if type(chunk) is Inert else None
        size: Any = chunk.get("sizes") if type(chunk) is Inert else None
        if not _are_sizes(offset) or not _are_sizes(size) or not len(offset) == len(size) == len(info.shape):
            raise _BadIndexError(f"{name} has a chunk that is no box of {len(info.shape)} dimensions")
        if any(o + s > whole for o, s, whole in zip(offset, size, info.shape, strict=True)):
            where = f"of size {list(size)} at {list(offset)}"
            raise _BadIndexError(f"{name} of shape {list(info.shape)} has a chunk {where}, which goes beyond")
        if 0 in size:
            empty.append(offset)
            continue
        place = held.pop(offset, None)
        if place is None:
            raise _BadIndexError(f"{name} has a chunk at {list(offset)} that lies nowhere, or two of them")
        if place.span.length < math.prod(size) * info.dtype.itemsize:
            raise _BadIndexError(f"{name} at {list(offset)} has more than the {place.span.length:,} bytes of its place")
        chunks.append(Chunk(offset, size, *place))
    for offset in empty:  # all ranks without a row have the same one
        held.pop(offset, None)
    if held:
        raise _BadIndexError(f"{name} lies at {first_few([str(offset) for offset in held])} too, where it has no chunk")
    chunks.sort()
    _check_tiling(name, info.shape, chunks)
    return chunks


def _check_tiling(name: str, shape: Sizes, chunks: Sequence[Chunk]) -> None:
    """Raise _BadIndexError unless every element of the tensor lies in exactly one chunk. The chunks lie within it.

    A box is the sum of steps at its corners: plus one at the lowest corner, and the sign changes with each dimension in
    which a corner lies at the upper end. So chunks tile the tensor exactly if the steps of all chunks, added, are those
    of the whole tensor. That takes time n log n for n chunks. At the lowest corner where they differ, an element is in
    no chunk or in two.
    """
    if 0 in shape or (len(chunks) == 1 and chunks[0].size == shape):
        return
    if not chunks:
        raise _BadIndexError(f"{name} has no chunk")
    lows = np.array([*(chunk.offset for chunk in chunks), (0,) * len(shape)], dtype=np.int64)
    highs = lows + np.array([*(chunk.size for chunk in chunks), shape], dtype=np.int64)
    cut = [dim for dim in range(len(shape)) if (lows[:, dim] > 0).any() or (highs[:, dim] < shape[dim]).any()]
    if len(cut) > _MOST_CUTS:
        raise _BadIndexError(f"{name} is cut along {len(cut)} dimensions, and {_MOST_CUTS} at most are read")
    keys = np.zeros(len(lows), dtype=np.int64)  # the rank of each corner among all
    steps = np.ones(len(lows), dtype=np.int64)
    steps[-1] = -1
    for dim in cut:
        ends, ranks = np.unique(np.concatenate((lows[:, dim], highs[:, dim])), return_inverse=True)
        upper_and_lower = ranks.reshape(2, -1)
        times = len(keys) // len(lows)
        keys = np.concatenate([keys * len(ends) + np.tile(ranks_of, times) for ranks_of in upper_and_lower])
        keys = np.unique(keys, return_inverse=True)[1] if len(cut) > 2 else keys
        steps = np.concatenate((steps, -steps))
    _, firsts, inverse = np.unique(keys, return_index=True, return_inverse=True)
    sums = np.bincount(inverse, weights=steps)
    wrong = np.flatnonzero(sums)
    if len(wrong):
        corner = firsts[wrong[0]]
        box = corner % len(lows)
        element = lows[box].copy()
        for position, dim in enumerate(cut):  # the corners of dimension after dimension were appended
            if corner // len(lows) >> position & 1:
                element[dim] = highs[box, dim]
        where = "two chunks" if sums[wrong[0]] > 0 else "no chunk"
        raise _BadIndexError(f"{name} of shape {list(shape)}: element {element.tolist()} is in {where}")


def _check_files(folder: Path, chunks: Mapping[str, list[Chunk]], values: Mapping[str, _Place]) -> None:
    """Raise unless every file is a regular one in the folder and has the bytes of its parts, which do not overlap."""
    spans: dict[str, list[tuple[FileSpan, str]]] = {}
    for name, parts in chunks.items():
        for part in parts:
            spans.setdefault(part.file, []).append((part.span, name))
    for name, place in values.items():
        spans.setdefault(place.file, []).append((place.span, name))
    for name, parts_of_file in spans.items():
        path = folder / name
        try:
            file = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
            size = os.fstat(file).st_size
            os.close(file)
        except OSError as error:
            raise CheckpointError(f"{path}: {INDEX} names it, and it is not readable ({error.strerror})") from None
        parts_of_file.sort()
        for (span, of), (following, of_following) in pairwise(parts_of_file):
            if span.start + span.length > following.start:
                # So does torch's SerializationFormat.SAFETENSORS, which its own FileSystemReader cannot read.
                at = f"{name}, from {following.start:,}"
                raise _BadIndexError(f"{of} and {of_following} lie in the same bytes of {at}")
        last, of = parts_of_file[-1]
        if last.start + last.length > size:
            raise CheckpointError(f"{path}: cut: has {size:,} bytes, {of} ends at byte {last.start + last.length:,}")
