"""Reading a checkpoint into any layout. Each rank reads its own boxes from the files that have them."""

import json
import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megapar.base.errors import CheckpointError
from megapar.checkpoint import vocabulary
from megapar.checkpoint.boxes import logical_boxes, overlap
from megapar.checkpoint.format import (
    WEIGHTS,
    Manifest,
    StoredChunk,
    checkpoint_folders,
    dtype_name,
    dtype_of,
    is_complete,
    open_manifest,
    read_manifest,
    reading,
    step_of,
)
from megapar.checkpoint.values import examine
from megapar.comm import collectives
from megapar.config.messages import counted
from megapar.declare.agreement import from_first, on_all_ranks
from megapar.declare.context import ParallelContext
from megapar.declare.optimizer_state import StateSlice
from megapar.declare.params import AVERAGE, MAIN, Sizes, spec_of

Kind = tuple[str, Sizes]  # dtype and shape of a tensor

_MOST_DIFFERENCES = 40  # lines that a message holds
_DOING = "checkpoint not loaded"


def going_back(path: Path, option: str) -> str:
    """Advice for the end of a message: how to go on from a checkpoint older than the damaged `path`.

    `option` is the option with the checkpoint's name: resume or init_from.
    """
    folders = checkpoint_folders(path.parent)
    step = step_of(path)
    older = next((folder for folder in folders if step_of(folder) < step and is_complete(folder)), None)
    if older is None:
        return "no older checkpoint lies beside it"
    return f"--checkpoint.{option} {older} goes on from the one before"


def _no_reason(_: Manifest) -> str:
    return ""


def load(
    path: Path,
    *,
    slices: Iterable[StateSlice],
    ctx: ParallelContext,
    model_config: Mapping[str, Any],
    why: Callable[[Manifest], str] = _no_reason,
    whole: bool = True,
    manifest: Manifest | None = None,
) -> Manifest:
    """Fill `slices`, all those of this rank, from the checkpoint `path` and return its manifest.

    A collective over `ctx.world`. Any layout may have written the checkpoint. Values are equal bit for bit, and padding
    is as before the first update. The manifest says where the run stood: `step`, `consumed_samples`, `trainer` and
    `data`.

    The caller then refreshes the model's parameters from the main weights: `param = main.to(param.dtype)` in each
    slice, and under ZeRO the all-gather at the end of an optimizer step. The caller also sets step counts, learning
    rate and data position from the manifest.

    Raises CheckpointError on every rank. If names, shapes, dtypes, `model_config` or a parameter's optimizer differ, or
    a file is missing or cut, nothing has been changed then. If a chunk's contents are damaged, slices may be filled in
    part. If a checkpoint does not fit, `why` may give the reason. The message then begins with it. Without `whole` the
    folder may lack files that this host does not need. `manifest` is that of the folder of another framework, on every
    rank.
    """
    return _load(path, list(slices), ctx, model_config, why=why, whole=whole, manifest=manifest)


def load_weights(
    path: Path,
    *,
    slices: Iterable[StateSlice],
    ctx: ParallelContext,
    model_config: Mapping[str, Any],
    why: Callable[[Manifest], str] = _no_reason,
    unused: Collection[str] = (),
    manifest: Manifest | None = None,
) -> Manifest:
    """Load the weights alone, as for evaluation, generation or a new run from old weights. Otherwise as `load`.

    With the optimizer's slices, its main weights are filled and its moments stay. The caller refreshes the parameters
    as after `load`. With `weight_slices(parameters)`, the parameters themselves are filled, cast to their dtype, and
    nothing is left to do. An optimizer must then be made afterwards, or its old main weights would return.
    The checkpoint may hold the weights `unused`, which the run does not have. It may have fewer ids in its vocabulary:
    old rows are kept, and new ones are the mean of these (`megapar.checkpoint.vocabulary`).
    """
    weights = weights_of(slices)
    return _load(path, weights, ctx, model_config, weights_alone=True, why=why, unused=unused, manifest=manifest)


def holds(manifest: Manifest, item: StateSlice) -> bool:
    """Whether a checkpoint has a tensor of `item`."""
    return any(f"{state}.{piece.name}" in manifest.tensors for state in item.tensors for piece in item.spec.pieces)


def load_fitting(
    path: Path,
    *,
    slices: Iterable[StateSlice],
    ctx: ParallelContext,
    model_config: Mapping[str, Any],
    manifest: Manifest | None = None,
) -> list[str]:
    """Load the fitting weights: tensors of the same name and shape, in fp32. All others are left as they are.

    Returns a line for each tensor that does not fit, and for each difference of the models. Otherwise as
    `load_weights`.
    """
    held = weights_of(slices)
    wanted = _wanted_kinds(held, ctx)
    manifest = manifest or verified_manifest(path, ctx)
    rows = vocabulary.growth(manifest, held, wanted, ctx)
    wanted, model_config = vocabulary.as_stored(manifest, rows, wanted, model_config)
    different = _differences(manifest, wanted, ctx, model_config, weights_alone=True)
    fitting = wanted.keys() - {line.partition(": ")[0] for line in different}  # a line begins with the tensor's name
    on_all_ranks(lambda: fill(path, manifest, held, fitting, rows), ctx, CheckpointError, _DOING)
    return different


def weight_slices(parameters: Iterable[Tensor]) -> Iterator[StateSlice]:
    """Yield a slice for each whole local parameter, in its dtype and without optimizer state, for `load_weights`."""
    for param in parameters:
        yield StateSlice(param, spec_of(param), 0, param.numel(), {MAIN: param.detach().view(-1)})


def has_average(manifest: Manifest) -> bool:
    """Whether a checkpoint has an average of the weights (optimizer.ema)."""
    return any(name.startswith(f"{AVERAGE}.") for name in manifest.tensors)


def without_average(item: StateSlice) -> StateSlice:
    """The slice without the average of its weights."""
    return replace(item, tensors={name: tensor for name, tensor in item.tensors.items() if name != AVERAGE})


def weights_of(slices: Iterable[StateSlice]) -> list[StateSlice]:
    """The slices without the optimizer's state."""
    kept = []
    for item in slices:
        weights = {name: tensor for name, tensor in item.tensors.items() if name in WEIGHTS}
        kept.append(replace(item, tensors=weights))
    return kept


def _load(
    path: Path,
    slices: Sequence[StateSlice],
    ctx: ParallelContext,
    model_config: Mapping[str, Any],
    *,
    weights_alone: bool = False,
    why: Callable[[Manifest], str] = _no_reason,
    unused: Collection[str] = (),
    whole: bool = True,
    manifest: Manifest | None = None,
) -> Manifest:
    wanted = _wanted_kinds(slices, ctx)
    manifest = manifest or verified_manifest(path, ctx, whole=whole)
    if not has_average(manifest):
        slices = [without_average(item) for item in slices]
    rows = vocabulary.growth(manifest, slices, wanted, ctx) if weights_alone else {}
    wanted, model_config = vocabulary.as_stored(manifest, rows, wanted, model_config)
    allowed = [f"{MAIN}.{name}: " for name in unused]
    lines = _differences(manifest, wanted, ctx, model_config, weights_alone=weights_alone)
    if has_average(manifest) != any(name.startswith(f"{AVERAGE}.") for name in wanted):
        allowed.append(f"{AVERAGE}.")  # a run may begin to average, or stop
    lines = [line for line in lines if not line.startswith(tuple(allowed))]
    if not weights_alone:
        _require_same_optimizers(path, manifest, slices, ctx)
    if lines:
        stored = {name.split(".")[0] for name in manifest.tensors}
        hint = why(manifest)
        if stored <= {*WEIGHTS} and not weights_alone:
            option = "adapter.init_from" if manifest.base else "checkpoint.init_from"
            hint = f"; it holds weights alone: --{option} starts from them"
        if manifest.base and weights_alone and not hint:
            hint = "; it holds adapters alone, without the weights of their base: megapar convert merge adds them"
        head = f"{path} does not fit this run{hint} (checkpoint | run):"
        raise _everywhere(CheckpointError("\n  ".join([head, *_shortened(lines)])))
    try:
        on_all_ranks(lambda: fill(path, manifest, slices, rows=rows), ctx, CheckpointError, _DOING)
    except CheckpointError as error:
        option = "init_from" if weights_alone else "resume"

        def advise() -> str | None:
            if ctx.world.first:
                return going_back(path, option)
            return None

        advice = on_all_ranks(advise, ctx, CheckpointError, _DOING)
        raise _everywhere(CheckpointError(f"{error}; {from_first(advice, ctx)}")) from error
    return manifest


def _require_same_optimizers(
    path: Path, manifest: Manifest, slices: Iterable[StateSlice], ctx: ParallelContext
) -> None:
    """Raise CheckpointError on every rank if another optimizer updated a parameter before. A collective.

    State of the same name may mean something else to another optimizer.
    """

    def states(optimizer: str) -> str:
        return ", ".join(state for state, declared in manifest.states.items() if declared["optimizer"] == optimizer)

    found = [
        f"{piece.name} was updated by {then}, and this run updates it by {item.optimizer} ({states(then)} would be "
        f"dropped, and {', '.join(state.name for state in item.states)} would be missing)"
        for item in slices
        if item.states  # a frozen parameter has none
        for piece in item.spec.pieces
        if (then := manifest.optimizer_of(piece.name)) not in ("", item.optimizer)
    ]
    gathered = collectives.gather_json(found[:1], ctx.world, ctx.device)
    changed = [text for texts in gathered for text in texts]
    if changed:
        raise _everywhere(
            CheckpointError(
                f"{path} does not fit this run: {changed[0]}: resume with the optimizer of the checkpoint, or start "
                "from its weights with --checkpoint.init_from in another --run_dir"
            )
        )


def verified_manifest(path: Path, ctx: ParallelContext, *, whole: bool = True) -> Manifest:
    """The manifest of a complete checkpoint; without `whole` it may lack files. A collective over `ctx.world`.

    Raises CheckpointError on every rank if the checkpoint is not complete.
    """

    # Rank 0 alone checks every file and chunk, and tells the others where each tensor's text lies in the manifest. If
    # each of thousands of ranks asked for the size of every file, that would be millions of requests. And each copy of
    # the parsed manifest may take a gigabyte.
    def verify() -> Manifest | None:
        if ctx.world.first:
            return read_manifest(path) if whole else open_manifest(path)
        return None

    verified = on_all_ranks(verify, ctx, CheckpointError, _DOING)
    outline_here = verified.outline() if verified else None
    outline = from_first(outline_here, ctx)

    def open_here() -> Manifest:
        if verified:
            return verified
        if outline:
            return Manifest.from_outline(path, outline)
        return open_manifest(path)  # a manifest that is not as `seal` writes it has no outline

    return on_all_ranks(open_here, ctx, CheckpointError, _DOING)


def _differences(
    manifest: Manifest,
    wanted: Mapping[str, Kind],
    ctx: ParallelContext,
    model_config: Mapping[str, Any],
    *,
    weights_alone: bool,
) -> list[str]:
    """Return on every rank the `differences` found by rank 0."""
    lines: list[str] = []
    if ctx.world.first:
        lines = differences(manifest, wanted, model_config, weights_alone=weights_alone)
    lines = from_first(lines, ctx)
    return lines


def _everywhere(error: CheckpointError) -> CheckpointError:
    """Mark the error as raised by all ranks with the same words. Rank 0 alone then prints it."""
    error.everywhere = True
    return error


def _wanted_kinds(slices: Iterable[StateSlice], ctx: ParallelContext) -> dict[str, Kind]:
    """The dtype and shape of every tensor of which any rank holds a part, by its name in a checkpoint. A collective.

    Names are those of the checkpoint, such as main.norm.weight.
    """
    kinds: dict[str, Kind] = {}
    for item in slices:
        for piece in item.spec.pieces:
            for name, tensor in item.tensors.items():
                kinds[f"{name}.{piece.name}"] = (_stored_dtype(name, tensor), piece.shape)
    # One gather along each axis after the other reaches all ranks. Names that many ranks hold are merged on the way.
    for axis in (ctx.tp, ctx.grad, ctx.pp):
        for others in collectives.gather_json(kinds, axis, ctx.device):
            kinds |= {name: (dtype, tuple(shape)) for name, (dtype, shape) in others.items()}
    return kinds


def _stored_dtype(name: str, tensor: Tensor) -> str:
    """The dtype in a checkpoint. Weights are stored in fp32, whatever the model computes in."""
    if name == MAIN:
        return dtype_name(torch.float32)
    return dtype_name(tensor.dtype)


_CAST = {"float32", "bfloat16"}  # dtypes of an optimizer's state cast into each other (optimizer.moments)

# Options of some families that checkpoints of all families once stated, each with its value in the other families.
_ONCE_STATED: Mapping[str, Any] = {"attention_bias": False, "qk_norm": False, "moe.mlp_only_layers": []}


def differences(
    manifest: Manifest, wanted: Mapping[str, Kind], model_config: Mapping[str, Any], *, weights_alone: bool = False
) -> list[str]:
    """A line for each reason why the checkpoint does not fit the run; no line if it fits.

    `wanted` are the dtype and shape of each tensor of the run. State of an optimizer may have another dtype of _CAST:
    it is rounded to nearest, or exact in the wider one. With `weights_alone`, the checkpoint's tensors other than
    weights do not matter.
    """
    ours = flatten(json.loads(json.dumps(model_config)))  # JSON turns tuples into lists, as in the manifest
    stored = flatten(manifest.model_config)
    for name, value in _ONCE_STATED.items():
        if name not in ours and stored.get(name) == value:
            del stored[name]
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
        elif dtype != wanted_dtype and not (
            name.partition(".")[0] in manifest.states and {dtype, wanted_dtype} <= _CAST
        ):
            lines.append(f"{name}: dtype {dtype} | {wanted_dtype}")
    return lines


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one dict with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - _MOST_DIFFERENCES
    if more <= 0:
        return lines
    return [*lines[:_MOST_DIFFERENCES], f"... and {counted(more, 'more difference')}"]


def fill(
    path: Path,
    manifest: Manifest,
    slices: Iterable[StateSlice],
    names: Container[str] | None = None,
    rows: Mapping[str, int] | None = None,
) -> None:
    """Fill `slices` from the checkpoint `path`, or only their elements of the tensors `names`.

    `rows` are the stored rows of tensors that have fewer than the slices: the others are the mean of these.
    Elements outside every logical tensor get their initial value: zero, unless the optimizer declares another one of
    its state. Raises CheckpointError if a chunk cannot be read or is bad.
    """
    rows = rows or {}
    means: dict[str, Tensor] = {}
    with manifest.source.reader(manifest) if manifest.source else Reader(path, manifest) as reader:
        for item in slices:
            initial = {tensor.name: tensor.initial for tensor in item.states}
            for state, flat in item.tensors.items():
                in_halves = state == MAIN and item.remainder is not None
                end = item.start
                for piece, box in logical_boxes(item.spec, item.start, item.stop):
                    begin = box.position
                    end = begin + math.prod(box.size)
                    name = f"{state}.{piece.name}"
                    if names is not None and name not in names:
                        continue
                    values = flat[begin - item.start : end - item.start]
                    if in_halves:
                        values = torch.empty_like(values, dtype=torch.float32)
                    reader.fill(name, box.offset, values.view(box.size))
                    if name in rows and box.offset[0] + box.size[0] > rows[name]:
                        if name not in means:
                            means[name] = vocabulary.mean_row(reader, name)
                        vocabulary.fill_new_rows(means[name], rows[name], box.offset, values.view(box.size))
                    if in_halves:
                        item.assign(state, begin - item.start, values)
                padding = torch.full_like(flat[end - item.start :], initial.get(state, 0.0))
                item.assign(state, end - item.start, padding)  # the padding rows come last


class Reader:
    """Reads a checkpoint's chunks. Each is compared with its CRC at its first use. Files are opened when needed.

    Values unfit for further training, such as nan, are refused too. `judge=False` lets them through, for a tool to show
    them.
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
        """Fill `out` with the box of tensor `name` at `offset`, in the shape of `out`.

        Values are cast to the dtype of `out`.
        """
        for chunk in self.manifest.tensors[name].chunks:
            common = overlap(offset, tuple(out.shape), chunk.offset, chunk.size)
            if common:
                low, high = common
                in_out = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))
                in_chunk = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offset, strict=True))
                out[in_out].copy_(self.chunk(name, chunk)[in_chunk])

    def tensor(self, name: str) -> Tensor:
        """A whole logical tensor in its stored dtype."""
        entry = self.manifest.tensors[name]
        out = torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
        self.fill(name, (0,) * len(entry.shape), out)
        return out

    def chunk(self, name: str, chunk: StoredChunk) -> Tensor:
        """A stored box of tensor `name`, mapped from its file. Pages are read when they are touched.

        Raises CheckpointError if the file is not a safetensors file, if the box has another shape, dtype or CRC than
        the manifest says, or if it holds values unfit for further training.
        """
        path = self.path / chunk.file
        expected = dtype_of(self.manifest.tensors[name].dtype)
        name_in_file = f"{path}: chunk {chunk.key}"
        with reading(name_in_file):
            if chunk.file not in self._files:
                self._files[chunk.file] = self._stack.enter_context(safe_open(path, "pt"))
            values: Tensor = self._files[chunk.file].get_tensor(chunk.key)
        if (tuple(values.shape), values.dtype) != (chunk.size, expected):
            stored = f"{dtype_name(values.dtype)} {list(values.shape)}"
            raise CheckpointError(
                f"{name_in_file}: holds {stored}, the manifest says {dtype_name(expected)} {list(chunk.size)}"
            )
        if (chunk.file, chunk.key) not in self._verified:
            crc32, problem = examine(name, values, nonnegative=self.manifest.is_nonnegative(name))
            if crc32 != chunk.crc32:
                raise CheckpointError(f"{name_in_file}: damaged: its CRC-32 differs from the manifest's")
            if self._judge and problem:
                raise CheckpointError(f"{name_in_file}: {problem}: it was saved so")
            self._verified.add((chunk.file, chunk.key))
        return values
