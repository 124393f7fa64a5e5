"""Reading a checkpoint into any layout: each rank takes the boxes that it holds from the files that have them."""

import json
import math
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megapar import comm
from megapar.agreement import from_first, on_all_ranks
from megapar.checkpoint.format import (
    BUFFER,
    MAIN,
    MANIFEST,
    Check,
    Chunk,
    ForeignCheckpointError,
    Manifest,
    checkpoint_folders,
    dtype_name,
    dtype_of,
    examine,
    find_complete,
    is_complete,
    logical_boxes,
    open_manifest,
    overlap,
    read_manifest,
    step_of,
)
from megapar.context import ParallelContext
from megapar.errors import CheckpointError
from megapar.params import Sizes, StateSlice, spec_of

Kind = tuple[str, Sizes]  # dtype and shape of a tensor

WEIGHTS = (MAIN, BUFFER)
_MOST_DIFFERENCES = 40
_MOST_NEARBY = 5  # checkpoints that a message names
_DOING = "checkpoint not loaded"


def choose(resume: str, root: Path, ctx: ParallelContext, check: Check | None = None) -> Path | None:
    """The checkpoint that `checkpoint.resume` means, the same on every rank. A collective over `ctx.world`.

    none: None. auto: the newest complete one in `root` that passes `check`; None if there is none of any kind.
    Otherwise a folder's path.
    Raises CheckpointError on every rank if `root` holds checkpoints of which none is complete (a run that lost its
    state must not start over unasked), if the newest is of a later version, or if the path is not a checkpoint's.
    """

    def pick() -> str | None:
        if not ctx.world.first or resume == "none":
            return None
        return _newest(root, check) if resume == "auto" else _named(Path(resume), root)

    mine = on_all_ranks(pick, ctx, CheckpointError, f"--checkpoint.resume {resume}")
    picked = from_first(mine, ctx)
    return None if picked is None else Path(picked)


def _newest(root: Path, check: Check | None) -> str | None:
    try:
        newest = next(find_complete(root, check), None)
    except ForeignCheckpointError as error:
        # Passed over, it would be replaced by this run's own checkpoint of the same step.
        raise CheckpointError(
            f"{error}; read it with the version that wrote it, or name another checkpoint with --checkpoint.resume: "
            "later ones are then set aside"
        ) from None
    if newest is None and (found := checkpoint_folders(root)):
        raise CheckpointError(
            f"{root}: none of {len(found)} checkpoints is complete; --checkpoint.resume none starts afresh"
        )
    return None if newest is None else str(newest)


def _named(path: Path, root: Path) -> str:
    """The path, once it looks like a checkpoint's folder."""
    if os.path.lexists(path / MANIFEST):
        return str(path)
    nearby = next((found for folder in (path, path / root.name, path.parent, root) if (found := _complete(folder))), [])
    names = f"checkpoints: {', '.join(map(str, nearby[:_MOST_NEARBY]))}" if nearby else f"{root} holds none either"
    raise CheckpointError(f"{path}: incomplete or no checkpoint: it has no {MANIFEST}; {names}")


def _complete(root: Path) -> list[Path]:
    return [folder for folder in checkpoint_folders(root) if is_complete(folder)]


def going_back(path: Path, option: str) -> str:
    """How to go on from before the checkpoint `path`, which is damaged: words for the end of a message."""
    folders = checkpoint_folders(path.parent)
    step = step_of(path)
    older = next((folder for folder in folders if step_of(folder) < step and is_complete(folder)), None)
    if older is None:
        return "no older checkpoint lies beside it"
    return f"--checkpoint.{option} {older} goes on from the one before"


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
    return _load(path, list(slices), ctx, model_config)


def load_weights(
    path: Path, *, slices: Iterable[StateSlice], ctx: ParallelContext, model_config: Mapping[str, Any]
) -> Manifest:
    """`load` for the weights alone, as for evaluation, generation or a new run from old weights.

    With the optimizer's slices its main weights are filled and its moments left alone; the caller refreshes the
    parameters as after `load`. With `weight_slices(parameters)` the parameters themselves are filled, cast to their
    dtype, and nothing is left to do; an optimizer must then be made afterwards, or its old main weights return.
    """
    return _load(path, weights_of(slices), ctx, model_config, weights_alone=True)


def load_fitting(
    path: Path, *, slices: Iterable[StateSlice], ctx: ParallelContext, model_config: Mapping[str, Any]
) -> list[str]:
    """`load_weights` for what fits: tensors of the same name and shape, in fp32. All others are left as they are; a
    line for each comes back, and for each difference of the models."""
    held = weights_of(slices)
    wanted = _wanted_kinds(held, ctx)
    manifest = verified_manifest(path, ctx)
    different = _differences(manifest, wanted, ctx, model_config, weights_alone=True)
    fitting = wanted.keys() - {line.partition(": ")[0] for line in different}
    on_all_ranks(lambda: fill(path, manifest, held, fitting), ctx, CheckpointError, _DOING)
    return different


def weight_slices(parameters: Iterable[Tensor]) -> Iterator[StateSlice]:
    """Whole local parameters without optimizer state, in their own dtype: for `load_weights`."""
    for param in parameters:
        yield StateSlice(param, spec_of(param), 0, param.numel(), {MAIN: param.detach().view(-1)})


def weights_of(slices: Iterable[StateSlice]) -> list[StateSlice]:
    """The slices without the optimizer's state."""
    return [replace(item, tensors={name: x for name, x in item.tensors.items() if name in WEIGHTS}) for item in slices]


def _load(
    path: Path,
    slices: Sequence[StateSlice],
    ctx: ParallelContext,
    model_config: Mapping[str, Any],
    *,
    weights_alone: bool = False,
) -> Manifest:
    wanted = _wanted_kinds(slices, ctx)
    manifest = verified_manifest(path, ctx)
    lines = _differences(manifest, wanted, ctx, model_config, weights_alone=weights_alone)
    if lines:
        stored = {name.split(".")[0] for name in manifest.tensors}
        hint = ""
        if stored <= {*WEIGHTS} and not weights_alone:
            hint = "; it holds weights alone: --checkpoint.init_from starts from them"
        head = f"{path} does not fit this run{hint} (checkpoint | run):"
        raise _everywhere(CheckpointError("\n  ".join([head, *_shortened(lines)])))
    try:
        on_all_ranks(lambda: fill(path, manifest, slices), ctx, CheckpointError, _DOING)
    except CheckpointError as error:
        option = "init_from" if weights_alone else "resume"
        advice = on_all_ranks(
            lambda: going_back(path, option) if ctx.world.first else None, ctx, CheckpointError, _DOING
        )
        raise _everywhere(CheckpointError(f"{error}; {from_first(advice, ctx)}")) from error
    return manifest


def verified_manifest(path: Path, ctx: ParallelContext) -> Manifest:
    """The manifest of a complete checkpoint. A collective over `ctx.world`.

    Rank 0 alone looks at every file and chunk, and tells the others where each tensor's text lies: with thousands of
    ranks, all of them asking for the size of every file would be millions of requests, and every copy of the parsed
    manifest a gigabyte. Raises CheckpointError on every rank.
    """
    mine = on_all_ranks(lambda: read_manifest(path) if ctx.world.first else None, ctx, CheckpointError, _DOING)
    outline = from_first(mine.outline() if mine else None, ctx)

    def open_mine() -> Manifest:
        if mine:
            return mine
        return Manifest.from_outline(path, outline) if outline else open_manifest(path)

    return on_all_ranks(open_mine, ctx, CheckpointError, _DOING)


def _differences(
    manifest: Manifest,
    wanted: Mapping[str, Kind],
    ctx: ParallelContext,
    model_config: Mapping[str, Any],
    *,
    weights_alone: bool,
) -> list[str]:
    """`differences` as rank 0 finds them, on every rank."""
    mine: list[str] = []
    if ctx.world.first:
        mine = differences(manifest, wanted, model_config, weights_alone=weights_alone)
    found: list[str] = from_first(mine, ctx)
    return found


def _everywhere(error: CheckpointError) -> CheckpointError:
    """The error as one that all ranks raise with the same words, so that rank 0 alone prints it."""
    error.everywhere = True
    return error


def _wanted_kinds(slices: Iterable[StateSlice], ctx: ParallelContext) -> dict[str, Kind]:
    """Dtype and shape of every tensor that any rank holds a part of, by its name in a checkpoint."""
    kinds = {
        f"{name}.{piece.name}": (_stored_dtype(name, tensor), piece.shape)
        for item in slices
        for piece in item.spec.pieces
        for name, tensor in item.tensors.items()
    }
    # Together these axes reach all ranks.
    for axis in (ctx.tp, ctx.grad, ctx.pp):
        for others in comm.gather_json(kinds, axis, ctx.device):
            kinds |= {name: (dtype, tuple(shape)) for name, (dtype, shape) in others.items()}
    return kinds


def _stored_dtype(name: str, tensor: Tensor) -> str:
    """Weights are stored in fp32, whatever the model computes in."""
    return dtype_name(torch.float32 if name == MAIN else tensor.dtype)


def differences(
    manifest: Manifest, wanted: Mapping[str, Kind], model_config: Mapping[str, Any], *, weights_alone: bool = False
) -> list[str]:
    """Why the checkpoint does not fit, a line for each reason; empty if it does.

    `wanted` are the dtype and shape of each tensor that a run asks for. `weights_alone`: what else the checkpoint holds
    does not matter.
    """
    stored = flatten(manifest.model_config)
    ours = flatten(json.loads(json.dumps(model_config)))
    lines = [
        f"model.{key}: {stored.get(key, 'not stated')} | {ours.get(key, 'not stated')}"
        for key in sorted(stored.keys() | ours.keys())
        if stored.get(key) != ours.get(key)
    ]
    held = manifest.kinds()
    if weights_alone:
        held = {name: kind for name, kind in held.items() if name.split(".")[0] in WEIGHTS}
    for name in sorted(held.keys() | wanted.keys()):
        dtype, shape = held.get(name, ("", ()))
        wanted_dtype, wanted_shape = wanted.get(name, ("", ()))
        if name not in held:
            lines.append(f"{name}: missing | {list(wanted_shape)}")
        elif name not in wanted:
            lines.append(f"{name}: {list(shape)} | unknown")
        elif shape != wanted_shape:
            lines.append(f"{name}: shape {list(shape)} | {list(wanted_shape)}")
        elif dtype != wanted_dtype:
            lines.append(f"{name}: dtype {dtype} | {wanted_dtype}")
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
    slices: Iterable[StateSlice],
    names: Container[str] | None = None,
) -> None:
    """Read every element that `slices` hold, or those of the tensors `names`; elements of no logical tensor become
    zero. Raises CheckpointError."""
    with Reader(path, manifest) as reader:
        for item in slices:
            for state, flat in item.tensors.items():
                end = item.start
                for piece, box in logical_boxes(item.spec, item.start, item.stop):
                    begin = box.position
                    end = begin + math.prod(box.size)
                    name = f"{state}.{piece.name}"
                    if names is None or name in names:
                        reader.fill(name, box.offset, flat[begin - item.start : end - item.start].view(box.size))
                flat[end - item.start :].zero_()


class Reader:
    """A checkpoint's chunks, each compared with its CRC at its first use. Files are mapped, opened when needed.

    Values that no training could go on from, such as nan, are refused too, unless `judge` is false: to look at them.
    """

    def __init__(self, path: Path, manifest: Manifest, *, judge: bool = True):
        self.path = path
        self.manifest = manifest
        self._judge = judge
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

        Raises CheckpointError if the file is no safetensors file, holds another shape, dtype or contents, or values
        that are not finite.
        """
        path = self.path / chunk.file
        expected = dtype_of(self.manifest.tensors[name].dtype)
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
            crc32, problem = examine(name, values)
            if crc32 != chunk.crc32:
                raise CheckpointError(f"{where}: damaged: its CRC-32 differs from the manifest's")
            if self._judge and problem:
                raise CheckpointError(f"{where}: {problem}: it was saved so")
            self._verified.add((chunk.file, chunk.key))
        return values
