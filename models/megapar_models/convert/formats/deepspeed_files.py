"""What DeepSpeed's plain and universal checkpoints have in common: files of torch.save, cut tensors, model files."""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megapar.base.errors import CheckpointError
from megapar.config.messages import counted
from megapar.declare.params import Box, Sizes
from megapar.system.regular_files import open_regular, read_regular
from megapar_models.convert.formats.pickles import Inert, Left, inert, left, plain
from megapar_models.convert.formats.torch_files import (
    Archive,
    FileSpan,
    StoredTensor,
    names_of_frameworks,
    reading_archive,
)
from megapar_models.convert.stream import TensorInfo

WEIGHT, FP32 = "weight", "fp32"

NO_VALUES = ("module", "optimizer", "param_shapes", "buffer_names", "frozen_param_shapes", "frozen_param_fragments")
"""What of a model file is no plain value."""
MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")

# Classes of the objects that DeepSpeed, and trainers through it, store besides tensors and plain values.
_KEPT = re.compile(r"deepspeed\..+")
_LEFT = re.compile(
    r"(transformers|accelerate|lightning|pytorch_lightning|omegaconf)\..+|datetime\.(datetime|timedelta)"
)
_SMALL = 1 << 12  # bytes of a tensor among plain values


def _names(text: str) -> Any:
    """The table of names in DeepSpeed's files (`pickles.Table`). Its own objects keep their state."""
    found = names_of_frameworks(text)
    if found is None and _KEPT.fullmatch(text):
        return inert(text)
    return left(text) if found is None and _LEFT.fullmatch(text) else found


@dataclass(frozen=True)
class File:
    """What a file of torch.save holds, with `StoredTensor` for tensors, and its size and time when it was opened."""

    path: Path
    content: Any
    identity: tuple[int, int]

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Return a value of the file. Raises CheckpointError unless the value is of a kind."""
        return typed(self.path, self.content, key, kind)

    def read(self, tensor: StoredTensor, offset: Sequence[int], out: Tensor) -> None:
        """Fill `out` with the box of a tensor at `offset`. Raises CheckpointError if the file has changed."""
        with reading_archive(self.path):
            file = open_regular(self.path)
            try:
                if _identity(file) != self.identity:
                    raise CheckpointError(f"{self.path}: has changed since it was opened")
                tensor.read(file, offset, out)
            finally:
                os.close(file)

    def number(self, value: Any) -> int | None:
        """A count of updates, of a number or of a tensor of one."""
        if isinstance(value, StoredTensor) and math.prod(value.shape) == 1:
            out = torch.empty(value.shape, dtype=value.dtype)
            self.read(value, (0,) * out.dim(), out)
            value = out.item()
        return int(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def plain(self, value: Any) -> Any:
        """Return `value` without objects of classes, and with small tensors alone (`TensorStore.values`)."""

        def converted(item: Any) -> Any:
            if isinstance(item, StoredTensor) and item.nbytes <= _SMALL:
                out = torch.empty(item.shape, dtype=item.dtype)
                self.read(item, (0,) * out.dim(), out)
                return out
            return str(item) if isinstance(item, torch.dtype) else Left()

        with reading_archive(self.path):
            found = plain(value, converted)
        return None if isinstance(found, Left) else found


def typed(path: Path, content: Mapping[Any, Any], key: Any, kind: type | tuple[type, ...]) -> Any:
    """Return `content[key]` of a file. Raises CheckpointError unless the value is of a kind."""
    value = content.get(key)
    if not isinstance(value, kind):
        raise CheckpointError(f"{path}: its {key} is {'missing' if value is None else 'a ' + type(value).__name__}")
    return value


def _identity(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns


def load(path: Path, *, bare: bool = False) -> File:
    """Open a file of torch.save that holds a dict, or with `bare` anything.

    Raises CheckpointError if there is no such file, or if it names what could run code. None has run then.
    """
    with reading_archive(path):
        descriptor = open_regular(path)
        try:
            identity = _identity(descriptor)
            content = Archive(descriptor, FileSpan(0, identity[0])).load(_names)
        finally:
            os.close(descriptor)
    if not bare and not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no dict, as DeepSpeed's files do")
    return File(path, content, identity)


@dataclass(frozen=True)
class Part:
    """Values of a tensor, in row-major order from number `start` on, which lie in a file from `at` in `flat` on."""

    start: int
    numel: int
    file: File
    flat: StoredTensor
    at: int


@dataclass(frozen=True)
class Cut:
    """A tensor that the ranks of `held` hold in parts of a flat vector each, as ZeRO cut it.

    `offset` is the tensor's first value: in the joined vector of all ranks (`joined`, ZeRO-1 and ZeRO-2), of which each
    rank holds `share` values, or else in each rank's vector, which then has `share` values of the tensor (ZeRO-3).
    """

    info: TensorInfo
    held: Sequence[tuple[File, StoredTensor]]
    offset: int
    share: int
    joined: bool

    def parts(self, first: int, end: int) -> Iterator[Part]:
        """Yield what ranks hold of the values `first` to `end`."""
        before = self.offset if self.joined else 0
        for rank in range((before + first) // max(self.share, 1), len(self.held)):
            # The rank holds the values `low` to `high` of the tensor.
            low = rank * self.share - before
            start, stop = max(low, first), min(low + self.share, end)
            if start >= stop:
                return
            file, flat = self.held[rank]
            yield Part(start, stop - start, file, flat, start - low + (0 if self.joined else self.offset))

    def read(self, box: Box) -> Tensor:
        """Return a box of the tensor. Its rows are read, of the files that hold them. Raises CheckpointError."""
        shape = self.info.shape or (1,)
        row = math.prod(shape[1:])
        top, rows = (box.offset[0], box.size[0]) if self.info.shape else (0, 1)
        first, end = top * row, (top + rows) * row
        values = torch.empty(end - first, dtype=self.info.dtype)
        for part in self.parts(first, end):
            part.file.read(part.flat, (part.at,), values[part.start - first :][: part.numel])
        found = values.view(rows, *shape[1:])[(slice(None), *box.slices[1:])]
        return found.reshape(box.size)


@dataclass(frozen=True)
class Whole:
    """A tensor that a file holds as such."""

    info: TensorInfo
    file: File
    stored: StoredTensor

    def read(self, box: Box) -> Tensor:
        """Return a box of the tensor. Raises CheckpointError."""
        values = torch.empty(box.size, dtype=self.info.dtype)
        self.file.read(self.stored, box.offset, values)
        return values


class Place(Protocol):
    """Where a tensor lies."""

    @property
    def info(self) -> TensorInfo:
        """Shape and dtype."""

    def read(self, box: Box) -> Tensor:
        """Return a box of the tensor, with no more in memory. Raises CheckpointError."""


@dataclass(frozen=True)
class DeepSpeedStore:
    """A checkpoint of DeepSpeed, opened. `places` has where each tensor lies, by `STATE/NAME`.

    `values` has what the first model file states (`global_steps`, `global_samples`, `skipped_steps`, `lr_scheduler`,
    `ds_version`, `ds_config`, `dp_world_size`, what the trainer added) and, of the optimizer's files, `zero_stage`,
    `step` (Adam's count of updates), `loss_scale` and `param_groups`. `left_out` are lines about what is not read.
    """

    folder: Path
    places: Mapping[str, Place]
    values: Mapping[str, Any]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of each tensor."""
        return {name: place.info for name, place in self.places.items()}

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Return a box of a tensor, or the whole of it, in its stored dtype. Raises CheckpointError."""
        place = self.places[name]
        return place.read(box or Box((0,) * len(place.info.shape), place.info.shape))


def find(source: Path, latest: str) -> Path:
    """The tag's folder: the one that the file `latest` in `source` names, or else `source` itself.

    Raises CheckpointError if there is no such folder.
    """
    try:
        tag = read_regular(source / latest).decode().strip()
    except FileNotFoundError:
        return source
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{source / latest}: not readable ({error})") from None
    # The word becomes a part of a path, so nothing that leads elsewhere may stand there.
    if not re.fullmatch(r"[\w.+=-]{1,200}", tag) or tag in (".", ".."):
        raise CheckpointError(f"{source / latest}: {tag[:40]!r} is no name of a folder beside it")
    if not (source / tag).is_dir():
        raise CheckpointError(f"{source / latest}: names {tag}, which is no folder in {source}")
    return source / tag


def weights(folder: Path, files: Sequence[File]) -> dict[str, Place]:
    """Return `weight/NAME` of what model files hold as it is: the module's tensors, and cut frozen parameters.

    `files` are those of the data ranks: one, or under ZeRO-3 one of each rank.
    """
    first = files[0]
    module = first.content.get("module")
    # A module of pipeline stages lies in files of its own, whose values are those of the optimizer's files too.
    tensors = module if isinstance(module, Mapping) else {}
    if not first.path.name.startswith("zero_"):
        return wholes(first, tensors)
    for file in files[1:]:
        for key in ("global_steps", "dp_world_size"):
            if file.content.get(key) != first.content.get(key):
                stated = f"{key} is {file.content.get(key)}, and {first.content.get(key)} in {first.path.name}"
                raise CheckpointError(f"{file.path}: {stated}: they are of different checkpoints")
    ranks = first.get("dp_world_size", int)
    if ranks != len(files):
        raise CheckpointError(
            f"{folder}: has model files of {counted(len(files), 'rank')}, and dp_world_size is {ranks}: files are "
            "missing, or left from another run"
        )
    buffers = first.get("buffer_names", list)
    places = wholes(first, {name: tensor for name, tensor in tensors.items() if name in buffers})
    frozen = first.content.get("frozen_param_shapes")
    for name, shape in sizes_of(first, frozen).items() if frozen else ():
        share = -(-math.prod(shape) // ranks)
        held = [(file, flat_vector(file, file.get("frozen_param_fragments", Mapping), name)) for file in files]
        for file, flat in held:
            if flat.shape[0] != share or flat.dtype != held[0][1].dtype:
                raise CheckpointError(f"{file.path}: holds {flat.shape[0]} values of {name}, and {share} are its part")
        places[f"{WEIGHT}/{name}"] = Cut(TensorInfo(shape, held[0][1].dtype), held, 0, share, joined=False)
    return places | shared(first, places)


def wholes(file: File, tensors: Mapping[str, Any]) -> dict[str, Place]:
    """Return `weight/NAME` of the tensors among values of a file."""
    return {
        f"{WEIGHT}/{name}": Whole(TensorInfo(tensor.shape, tensor.dtype), file, tensor)
        for name, tensor in tensors.items()
        if isinstance(tensor, StoredTensor)
    }


def shared(first: File, places: Mapping[str, Place]) -> dict[str, Place]:
    """Return the tensors of parameters under their second names: those of `shared_params`."""
    names = first.content.get("shared_params") or {}
    if not isinstance(names, Mapping):
        raise CheckpointError(f"{first.path}: its shared_params is {type(names).__name__}")
    aliases: dict[str, list[str]] = {}
    for alias, name in names.items():
        aliases.setdefault(str(name), []).append(str(alias))
    return {
        f"{state}/{alias}": place
        for key, place in places.items()
        for state, _, name in [key.partition("/")]
        for alias in aliases.get(name, ())
        if f"{state}/{alias}" not in places
    }


def sizes_of(file: File, shapes: Any) -> dict[str, Sizes]:
    """A dict of names and shapes of a file. Raises CheckpointError if that is none."""
    if not isinstance(shapes, Mapping):
        raise CheckpointError(f"{file.path}: a group of its param_shapes is {type(shapes).__name__}")
    for name, shape in shapes.items():
        good = isinstance(name, str) and isinstance(shape, tuple | list)
        if not good or any(type(size) is not int or not 0 <= size < 2**48 for size in shape):
            raise CheckpointError(f"{file.path}: the shape of {str(name)[:80]} is {str(shape)[:80]}")
    return {name: tuple(shape) for name, shape in shapes.items()}


def zero_stage(state: Mapping[str, Any]) -> int:
    """ZeRO's stage of an optimizer's state. The optimizer of bf16 that states none keeps the files of stage 1."""
    stage = state.get("zero_stage")
    if isinstance(stage, Inert) and stage.args and stage.args[0] in (1, 2, 3):
        return int(stage.args[0])
    return 3 if "fp32_flat_groups" in state else 1


def settings(file: File, state: Mapping[str, Any], groups: Any) -> dict[str, Any]:
    """Plain values for `DeepSpeedStore.values` of an optimizer's state: loss scale and hyperparameters."""
    scaler = state.get("loss_scaler")
    scale = scaler.get("cur_scale") if isinstance(scaler, Inert) else None
    found = [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []
    rates = [{key: value for key, value in group.items() if key != "params"} for group in found]
    return {"zero_stage": zero_stage(state), "loss_scale": file.plain(scale), "param_groups": file.plain(rates)}


def cut_in_turn(file: File) -> bool:
    """Whether the run had `round_robin_gradients`: groups are then joined in another order than the model's.

    `param_shapes` has that order. DeepSpeed 0.19.8 computes param_slice_mappings by the model's order, wrongly, and its
    ds_to_universal.py cuts the tensors by them.
    """
    config = file.content.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return isinstance(zero, Mapping) and bool(zero.get("round_robin_gradients"))


def flat_vector(file: File, content: Any, key: Any) -> StoredTensor:
    """A flat vector in a file. Raises CheckpointError if there is none."""
    value = content[key] if isinstance(content, list) and key < len(content) else None
    if isinstance(content, Mapping):
        value = content.get(key)
    if not isinstance(value, StoredTensor) or len(value.shape) != 1:
        raise CheckpointError(f"{file.path}: its values of {key} are no vector (offloaded to NVMe?)")
    return value
