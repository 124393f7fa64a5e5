"""Writing folders of torch.distributed.checkpoint (DCP) by torch's own writer, a few tensors in memory at a time.

A tensor may be written in pieces: frameworks that store all layers, or all experts, as one tensor get it so, and a
reader of DCP sees one tensor.
"""

import queue
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan, SavePlanner, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from megapar.base.errors import CheckpointError
from megapar.declare.params import Box, Sizes
from megapar_models.convert.stream import check_finite, new_folder

_FILE_BYTES = 1 << 28  # of a file: torch keeps in memory what it wrote until the file is whole


class TensorPiece(NamedTuple):
    """A box of a tensor to be written. `make` returns its values, in the tensor's dtype."""

    box: Box
    make: Callable[[], Tensor]


class _Streaming(DefaultSavePlanner):
    """A save planner that makes each piece only to write it."""

    def __init__(self, pieces: Mapping[str, Sequence[TensorPiece]], advance: Callable[[Tensor], Tensor]):
        super().__init__()
        self._pieces = pieces
        self._advance = advance
        self._at = {(key, piece.box.offset): piece for key, found in pieces.items() for piece in found}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[piece for item in plan.items for piece in self._cut(item)])
        return self.plan

    def _cut(self, item: WriteItem) -> Iterator[WriteItem]:
        """The writing of a tensor as that of its pieces."""
        key, data = item.index.fqn, item.tensor_data
        if key not in self._pieces or data is None:
            yield item
            return
        boxes = [piece.box for piece in self._pieces[key]]
        if sum(box.numel for box in boxes) != data.size.numel():
            raise CheckpointError(f"{key}: its pieces have another number of elements than its shape {list(data.size)}")
        for offset, size in boxes:
            chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
            index = MetadataIndex(key, torch.Size(offset))
            kind = WriteItemType.SHARD if len(boxes) > 1 else WriteItemType.TENSOR
            yield WriteItem(index, kind, tensor_data=replace(data, chunk=chunk))

    def lookup_object(self, index: MetadataIndex) -> Any:
        piece = self._at.get((index.fqn, tuple(index.offset or ())))
        if piece is None:
            return super().lookup_object(index)
        values = piece.make().reshape(piece.box.size)
        return self._advance(check_finite(index.fqn, values))


class _Writer(FileSystemWriter):
    """Torch's writer with files of at most _FILE_BYTES, or one larger piece, in place of one file or thousands."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        files: queue.Queue[tuple[Any, str, list[WriteItem]]] = queue.Queue()
        for number, items in enumerate(_by_file(plan.items)):
            name = f"{plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}"
            files.put((self.fs.concat_path(self.path, name), name, items))
        return self._write_data(planner, files)


def _by_file(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    found: list[list[WriteItem]] = [[]]
    held = 0
    for item in items:
        data = item.tensor_data
        nbytes = data.chunk.sizes.numel() * data.properties.dtype.itemsize if data is not None else 0
        if found[-1] and held + nbytes > _FILE_BYTES:
            found.append([])
            held = 0
        found[-1].append(item)
        held += nbytes
    return found


def write_dcp(
    target: Path,
    state: Mapping[str, Any],
    pieces: Mapping[str, Sequence[TensorPiece]],
    *,
    advance: Callable[[Tensor], Tensor] = lambda values: values,
    finish: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write the nested `state` to the DCP folder `target`, which must not exist. It appears complete or not at all.

    Tensors on the device meta are made of `pieces`, by their names with a dot for each level. Small tensors and plain
    values are written as they are. `advance` is called with each piece before it is written, and returns it. `finish`
    may add files.
    Raises CheckpointError if a value is not finite, ConfigError if the target exists, and StorageError if it cannot be
    written.
    """
    needed = sum(_bytes(value) for value in _leaves(state))
    with new_folder(target, needed) as folder:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch warns that one process saves; no_dist asks for it
                planner = _Streaming(pieces, advance)
                save(dict(state), storage_writer=_Writer(folder), planner=planner, no_dist=True)
        except CheckpointException as error:  # torch's wrapper of the cause is a BaseException, but no Exception
            raise next(cause for cause, _ in error.failures.values()) from None
        finish(folder)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for inside in value.values():
            yield from _leaves(inside)
    else:
        yield value


def _bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0


def meta(shape: Sizes, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of `write_dcp` that is made of pieces."""
    return torch.empty(shape, dtype=dtype, device="meta")


def whole(shape: Sizes, make: Callable[[], Tensor]) -> list[TensorPiece]:
    """A tensor in one piece."""
    return [TensorPiece(Box((0,) * len(shape), shape), make)]
