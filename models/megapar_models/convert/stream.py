"""Writing of weights for conversion. One tensor at a time is in memory, and the folder exists only when complete."""

import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError, StorageError
from megapar.checkpoint.format import (
    BASE,
    BUFFER,
    Manifest,
    Sizes,
    StoredChunk,
    TensorEntry,
    dtype_name,
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
        header[name] = {"dtype": CODES[info.dtype], "shape": list(info.shape), "data_offsets": [start, end]}
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
    plan = {}
    for name, shape in shapes.items():
        state = BUFFER if name in buffers else MAIN
        plan[f"{state}.{name}"] = TensorInfo(shape, torch.float32)
    tensors: dict[str, TensorEntry] = {}
    files: dict[str, int] = {}
    contents: list[dict[str, int]] = []
    for number, shard in enumerate(shards(plan, shard_bytes)):
        file = f"weights_{number:05d}.safetensors"

        def stored(name: str, file: str = file) -> Tensor:
            values = make(name.partition(".")[2]).contiguous()
            shape = tuple(values.shape)
            origin = (0,) * len(shape)
            chunk = StoredChunk(file, name, origin, shape, checksum(values))
            contents.append({name.partition(".")[0]: content(name, shape, origin, values)})
            tensors[name] = TensorEntry(shape, dtype_name(values.dtype), (chunk,))
            return values

        write_file(folder / file, shard, stored)
        files[file] = (folder / file).stat().st_size
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
    total = sum_of_contents(contents)
    write_manifest(folder, Manifest(0, 0, {}, weight_options(config), trainer, data, files, tensors, content=total))
