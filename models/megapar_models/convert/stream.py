"""Writing of weights for conversion. One tensor at a time is in memory, and the folder exists only when complete."""

import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError, StorageError
from megapar.checkpoint.format import (
    BASE,
    BUFFER,
    WEIGHTS,
    Manifest,
    Sizes,
    StoredChunk,
    TensorEntry,
    dtype_name,
    dtype_of,
    read_entry,
    sync_folder,
    write_manifest,
)
from megapar.checkpoint.origin import ORIGIN
from megapar.checkpoint.values import checksum, content, sum_of_contents
from megapar.config.options import Config, flatten
from megapar.data.prepared import TEXTS
from megapar.declare.params import MAIN
from megapar_models.registry import weight_options

ACCEPTED = "accepted_fields"
"""Of `Manifest.trainer`: the unknown fields of config.json that the user has taken for harmless."""
FOUND_FP32 = "found_in_fp32"
"""Of `Manifest.trainer`: names of Hugging Face's tensors that had fp32 beside others of 16 bits (`dtypes_of`)."""
SHARD_BYTES = 5_000_000_000  # largest file of weights, unless a single tensor is larger
CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # safetensors' names
_ALL_CODES = CODES | {torch.int64: "I64"}  # counts among the state of a training


class TensorInfo(NamedTuple):
    """Shape and dtype of a future tensor."""

    shape: Sizes
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Plan = Mapping[str, TensorInfo]


@contextmanager
def new_folder(final: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield a temporary folder beside `final`. It is renamed to `final` when the block ends, or removed if it fails.

    Raises ConfigError if `final` exists, StorageError if it cannot be written or has no room for `needed_bytes`.
    """
    # Beside it, since a rename cannot cross file systems.
    if final.exists():
        raise ConfigError(f"{final}: exists; name a folder that does not, nothing is overwritten")
    temporary = final.parent / f".tmp-{final.name}-{uuid.uuid4().hex[:8]}"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(final.parent).free
        if free < needed_bytes:
            raise StorageError(f"{final}: needs {needed_bytes:,} bytes, {free:,} are free: free some space")
        temporary.mkdir()
        yield temporary
        sync_folder(temporary)
        temporary.rename(final)
        sync_folder(final.parent)
    except OSError as error:
        raise StorageError(f"{final}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def shards(plan: Plan, limit: int) -> list[dict[str, TensorInfo]]:
    """Cut the plan, in order, into files of at most `limit` bytes. A larger tensor has a file to itself."""
    files: list[dict[str, TensorInfo]] = [{}]
    for name, info in plan.items():
        if files[-1] and sum(i.nbytes for i in files[-1].values()) + info.nbytes > limit:
            files.append({})
        files[-1][name] = info
    return files


def write_file(path: Path, plan: Plan, make: Callable[[str], Tensor]) -> None:
    """Write a safetensors file of the planned tensors and flush it to the disk.

    `make` returns the tensor of a name. It is called for one name after the other, and no tensor is kept.
    Raises CheckpointError for a tensor unlike its plan, or not finite.
    """
    # Not by safetensors' own save_file, which needs all tensors of a file at once.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, info in plan.items():
        start = end
        end = end + info.nbytes
        header[name] = {"dtype": _ALL_CODES[info.dtype], "shape": list(info.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, info in plan.items():
            file.write(_bytes(name, make(name), info))
        file.flush()
        os.fsync(file.fileno())


def _bytes(name: str, values: Tensor, info: TensorInfo) -> memoryview:
    """The bytes of a tensor. Raises CheckpointError if it is not as planned, or not finite."""
    if (tuple(values.shape), values.dtype) != info:
        raise CheckpointError(f"{name}: {dtype_name(values.dtype)} {list(values.shape)}, {info} was planned")
    check_finite(name, values)
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().data


def check_finite(name: str, values: Tensor) -> Tensor:
    """`values`. Raises CheckpointError if one of them is NaN or infinite."""
    # The bounds are NaN if any value is. Unlike `isfinite` of all values, they need no second tensor of this size.
    if values.numel() and not all(bound.isfinite() for bound in values.aminmax()):
        raise CheckpointError(
            f"{name}: holds NaN or infinity as {dtype_name(values.dtype)}: the source is damaged, or its training "
            "diverged, or its values are too large for this dtype"
        )
    return values


def write_weights(
    folder: Path,
    config: Config,
    shapes: Mapping[str, Sizes],
    make: Callable[[str], Tensor],
    *,
    shard_bytes: int,
    buffers: Container[str] = (),
    base: Mapping[str, Any] | None = None,
    texts: Mapping[str, Any] | None = None,
    accepted: Sequence[str] = (),
    found_fp32: Sequence[str] = (),
    origin: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a native checkpoint of step 0 to `folder`: fp32 main weights of a validated `config`, without moments.

    `make` returns the logical tensor of a name in `shapes`, fp32. Those in `buffers` are no parameters. `base` is that
    of adapters (`Manifest.base`), and `texts` the record of the training's texts (`saved.text_record`). `accepted` are
    unknown fields of the config.json beside it (`ACCEPTED`), and `found_fp32` is that of `FOUND_FP32`. `origin` is that
    of the weights (`checkpoint.origin`). With `trainer.weights_only` in the manifest it has no moments, so no run can
    be resumed from it.
    """
    trainer: dict[str, Any] = {"updates": 0, "loss_scale": None, "weights_only": True, "config": flatten(config)}
    if base is not None:
        trainer[BASE] = dict(base)
    if accepted:
        trainer[ACCEPTED] = sorted(accepted)
    if found_fp32:
        trainer[FOUND_FP32] = [*found_fp32]
    if origin:
        trainer[ORIGIN] = dict(origin)
    data: dict[str, Any] = {TEXTS: dict(texts)} if texts else {}
    tensors = {
        f"{BUFFER if name in buffers else MAIN}.{name}": TensorEntry(shape, "float32", ())
        for name, shape in shapes.items()
    }
    manifest = Manifest(0, 0, {}, weight_options(config), trainer, data, {}, tensors)
    write_checkpoint(folder, manifest, lambda name: make(name.partition(".")[2]), shard_bytes=shard_bytes)


class WrittenFiles:
    """The files of a checkpoint that are whole, by name: their bytes, tensors and contents, as JSON types."""

    def __init__(self) -> None:
        self.files: dict[str, Mapping[str, Any]] = {}

    def add(self, entry: Mapping[str, Any]) -> None:
        """Note a file that is whole and on the disk."""
        self.files[entry["file"]] = entry


def write_checkpoint(
    folder: Path,
    manifest: Manifest,
    make: Callable[[str], Tensor],
    *,
    shard_bytes: int = SHARD_BYTES,
    written: WrittenFiles | None = None,
) -> None:
    """Write a native checkpoint of the tensors of `manifest`, which names no files and chunks yet, to `folder`.

    `make` returns the tensor of a name such as main.norm.weight. One tensor at a time is in memory. What `written`
    has is not made again. Raises CheckpointError for a tensor unlike its entry, or not finite.
    """
    written = written or WrittenFiles()
    plan = {name: TensorInfo(entry.shape, dtype_of(entry.dtype)) for name, entry in manifest.tensors.items()}
    kind = "weights" if all(name.partition(".")[0] in WEIGHTS for name in plan) else "states"
    for number, shard in enumerate(shards(plan, shard_bytes)):
        file = f"{kind}_{number:05d}.safetensors"
        if file in written.files:
            continue
        written.add(_write_shard(folder, file, shard, make))
    found = {name: read_entry(entry) for file in written.files.values() for name, entry in file["tensors"].items()}
    total = sum_of_contents(file["content"] for file in written.files.values())
    files = {name: file["bytes"] for name, file in written.files.items()}
    write_manifest(folder, replace(manifest, files=files, tensors=found, content=total))


def _write_shard(folder: Path, file: str, shard: Plan, make: Callable[[str], Tensor]) -> dict[str, Any]:
    """Write a file of a native checkpoint; returns its entry in `WrittenFiles`."""
    tensors: dict[str, Any] = {}
    contents: list[dict[str, int]] = []

    def stored(name: str) -> Tensor:
        values = make(name).contiguous()
        shape = tuple(values.shape)
        origin = (0,) * len(shape)
        chunk = StoredChunk(file, name, origin, shape, checksum(values))
        state = name.partition(".")[0]
        if state in WEIGHTS:
            contents.append({state: content(name, shape, origin, values)})
        tensors[name] = TensorEntry(shape, dtype_name(values.dtype), (chunk,))._asdict()
        return values

    write_file(folder / file, shard, stored)
    nbytes = (folder / file).stat().st_size
    return {"file": file, "bytes": nbytes, "tensors": tensors, "content": sum_of_contents(contents)}
