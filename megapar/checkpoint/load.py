"""Reading a checkpoint into any layout: each rank takes the boxes that it holds from the files that have them."""

import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megapar import comm
from megapar.checkpoint.agreement import together
from megapar.checkpoint.format import (
    STATE,
    WEIGHTS,
    Chunk,
    Manifest,
    Sizes,
    StateSlice,
    WeightSlice,
    checkpoint_folders,
    checksum,
    dtype_name,
    dtype_of,
    find_complete,
    logical_boxes,
    overlap,
    read_manifest,
)
from megapar.context import ParallelContext
from megapar.errors import CheckpointError
from megapar.params import ParamSpec, spec_of

_MOST_DIFFERENCES = 40
_DOING = "checkpoint not loaded"


def choose(resume: str, root: Path, ctx: ParallelContext) -> Path | None:
    """The checkpoint that `checkpoint.resume` means, the same on every rank. A collective over `ctx.world`.

    none: None. auto: the newest complete one in `root`; None if there is none of any kind. Otherwise a folder's path.
    Raises CheckpointError on every rank if `root` holds checkpoints of which none is complete: a run that lost its
    state must not start over unasked.
    """

    def pick() -> str | None:
        if not ctx.world.first or resume == "none":
            return None
        if resume != "auto":
            return resume
        newest = next(find_complete(root), None)
        if newest is None and (found := checkpoint_folders(root)):
            raise CheckpointError(
                f"{root}: none of {len(found)} checkpoints is complete; --checkpoint.resume none starts afresh"
            )
        return None if newest is None else str(newest)

    mine = together(pick, ctx, CheckpointError, f"--checkpoint.resume {resume}")
    picked = comm.gather_json(mine, ctx.world, ctx.device)[0]
    return None if picked is None else Path(picked)


def load(
    path: Path, *, slices: Iterable[StateSlice], ctx: ParallelContext, model_config: Mapping[str, Any]
) -> Manifest:
    """Fill `slices`, all that this rank holds, from the checkpoint `path`, whatever layout wrote it, bit for bit;
    padding becomes zero. A collective over `ctx.world`. The manifest says where the run stood: `step`,
    `consumed_samples`, `trainer` and `data`.

    The caller then refreshes the model's parameters from the main weights: `param = main.to(param.dtype)` in each
    slice, and under ZeRO the all-gather that ends an optimizer step. It sets step counts, learning rate and data
    position from the manifest.

    Raises CheckpointError on every rank, before anything is changed if names, shapes, dtypes or `model_config` differ
    or a file is missing or cut, later if a chunk's contents are damaged.
    """
    return _load(path, list(slices), STATE, ctx, model_config)


def load_weights(
    path: Path, *, slices: Iterable[WeightSlice], ctx: ParallelContext, model_config: Mapping[str, Any]
) -> Manifest:
    """`load` for the weights alone, as for evaluation, generation or a new run from old weights.

    With the optimizer's slices its main weights are filled and its moments left alone; the caller refreshes the
    parameters as after `load`. With `weight_slices(parameters)` the parameters themselves are filled, cast to their
    dtype, and nothing is left to do; an optimizer must then be made afterwards, or its old main weights return.
    """
    return _load(path, list(slices), WEIGHTS, ctx, model_config)


def load_fitting(
    path: Path, *, slices: Iterable[WeightSlice], ctx: ParallelContext, model_config: Mapping[str, Any]
) -> list[str]:
    """`load_weights` for what fits: tensors of the same name and shape, in fp32. All others are left as they are; a
    line for each comes back, and for each difference of the models."""
    held = list(slices)
    wanted = _wanted_shapes(held, WEIGHTS, ctx)
    manifest = together(lambda: read_manifest(path), ctx, CheckpointError, _DOING)
    different = differences(manifest, wanted, WEIGHTS, model_config)
    fitting = {name for name in wanted if not any(line.startswith(f"{name}: ") for line in different)}
    together(lambda: fill(path, manifest, held, WEIGHTS, fitting), ctx, CheckpointError, _DOING)
    return different


@dataclass(frozen=True)
class ParameterSlice:
    """A whole local parameter as a slice of weights; `main` is its flat view in its own dtype."""

    spec: ParamSpec
    start: int
    stop: int
    main: Tensor


def weight_slices(parameters: Iterable[Tensor]) -> Iterator[ParameterSlice]:
    """The parameters of a model without an optimizer, for `load_weights`."""
    for param in parameters:
        yield ParameterSlice(spec_of(param), 0, param.numel(), param.detach().view(-1))


def _load(
    path: Path,
    slices: Sequence[WeightSlice],
    states: Sequence[str],
    ctx: ParallelContext,
    model_config: Mapping[str, Any],
) -> Manifest:
    wanted = _wanted_shapes(slices, states, ctx)
    manifest = together(lambda: read_manifest(path), ctx, CheckpointError, _DOING)
    # Every rank compares the same things, so every rank raises or none does.
    lines = differences(manifest, wanted, states, model_config)
    if lines:
        stored = {name.split(".")[0] for name in manifest.tensors}
        alone = "; it holds weights alone: --checkpoint.init_from starts from them" if stored == {*WEIGHTS} else ""
        head = f"{path} does not fit this run{alone if len(states) > 1 else ''} (checkpoint | run):"
        raise CheckpointError("\n  ".join([head, *_shortened(lines)]))
    together(lambda: fill(path, manifest, slices, states), ctx, CheckpointError, _DOING)
    return manifest


def _wanted_shapes(slices: Iterable[WeightSlice], states: Sequence[str], ctx: ParallelContext) -> dict[str, Sizes]:
    """The whole model's tensors. Tensor-parallel ranks hold parts of the same ones, so two axes see them all."""
    shapes = {f"{state}.{piece.name}": piece.shape for item in slices for piece in item.spec.pieces for state in states}
    for axis in (ctx.grad, ctx.pp):
        for others in comm.gather_json(shapes, axis, ctx.device):
            shapes |= {name: tuple(shape) for name, shape in others.items()}
    return shapes


def differences(
    manifest: Manifest, wanted: Mapping[str, Sizes], states: Sequence[str], model_config: Mapping[str, Any]
) -> list[str]:
    """Why the checkpoint does not fit, a line for each reason; empty if it does."""
    stored, ours = flatten(manifest.model_config), flatten(json.loads(json.dumps(model_config)))
    lines = [
        f"model.{key}: {stored.get(key, 'not stated')} | {ours.get(key, 'not stated')}"
        for key in sorted(stored.keys() | ours.keys())
        if stored.get(key) != ours.get(key)
    ]
    held = {name: entry for name, entry in manifest.tensors.items() if name.split(".")[0] in states}
    for name in sorted(held.keys() | wanted.keys()):
        if name not in held:
            lines.append(f"{name}: missing | {list(wanted[name])}")
        elif name not in wanted:
            lines.append(f"{name}: {list(held[name].shape)} | unknown")
        elif held[name].shape != wanted[name]:
            lines.append(f"{name}: shape {list(held[name].shape)} | {list(wanted[name])}")
        elif held[name].dtype != dtype_name(torch.float32):
            lines.append(f"{name}: dtype {held[name].dtype} | {dtype_name(torch.float32)}")
    return lines


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - _MOST_DIFFERENCES
    return lines if more <= 0 else [*lines[:_MOST_DIFFERENCES], f"... and {more} more differences"]


def fill(
    path: Path,
    manifest: Manifest,
    slices: Iterable[WeightSlice],
    states: Sequence[str],
    names: Container[str] | None = None,
) -> None:
    """Read every element that `slices` hold, or those of the tensors `names`; elements of no logical tensor become
    zero. Raises CheckpointError."""
    with Reader(path, manifest) as reader:
        for item in slices:
            for state in states:
                flat: Tensor = getattr(item, state)
                end = item.start
                for piece, box in logical_boxes(item.spec, item.start, item.stop):
                    begin, end = box.position, box.position + math.prod(box.size)
                    name, target = f"{state}.{piece.name}", flat[begin - item.start : end - item.start].view(box.size)
                    if names is None or name in names:
                        reader.fill(name, box.offset, target)
                flat[end - item.start :].zero_()


class Reader:
    """A checkpoint's chunks, each compared with its CRC at its first use. Files are mapped, opened when needed."""

    def __init__(self, path: Path, manifest: Manifest):
        self.path, self.manifest = path, manifest
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._verified: set[tuple[str, str]] = set()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def fill(self, name: str, offset: Sizes, out: Tensor) -> None:
        """Copy the box of `name` that starts at `offset` and has the shape of `out` into `out`, cast to its dtype."""
        for chunk in self.manifest.tensors[name].chunks:
            common = overlap(offset, tuple(out.shape), chunk.offset, chunk.size)
            if common:
                here, there = (
                    tuple(slice(low - o, high - o) for low, high, o in zip(*common, origin, strict=True))
                    for origin in (offset, chunk.offset)
                )
                out[here].copy_(self.chunk(name, chunk)[there])

    def tensor(self, name: str) -> Tensor:
        """A whole logical tensor."""
        entry = self.manifest.tensors[name]
        out = torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
        self.fill(name, (0,) * len(entry.shape), out)
        return out

    def chunk(self, name: str, chunk: Chunk) -> Tensor:
        """One stored box of `name`, mapped from its file: pages are read where they are touched.

        Raises CheckpointError if the file is no safetensors file, or holds another shape, dtype or contents.
        """
        path, expected = self.path / chunk.file, dtype_of(self.manifest.tensors[name].dtype)
        where = f"{path}: chunk {chunk.key}"
        try:
            if chunk.file not in self._files:
                self._files[chunk.file] = self._stack.enter_context(safe_open(path, "pt"))
            values: Tensor = self._files[chunk.file].get_tensor(chunk.key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{where}: not readable as safetensors ({error})") from error
        if (tuple(values.shape), values.dtype) != (chunk.size, expected):
            found = f"{dtype_name(values.dtype)} {list(values.shape)}"
            raise CheckpointError(
                f"{where}: holds {found}, the manifest says {dtype_name(expected)} {list(chunk.size)}"
            )
        if (chunk.file, chunk.key) not in self._verified:
            if checksum(values) != chunk.crc32:
                raise CheckpointError(f"{where}: damaged: its CRC-32 differs from the manifest's")
            self._verified.add((chunk.file, chunk.key))
        return values
