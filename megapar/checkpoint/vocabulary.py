"""Weights of a smaller vocabulary: a run with more ids keeps the old rows, and its new ones begin as their mean."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megapar.checkpoint.format import BoxReader, Manifest
from megapar.comm import collectives
from megapar.declare.context import ParallelContext
from megapar.declare.optimizer_state import StateSlice
from megapar.declare.params import Sizes

_ROWS = 4096  # read at a time; the mean is summed block by block, so it is the same whatever layout wrote the file
_SIZE = "vocab_size"


def growth(
    manifest: Manifest, slices: Iterable[StateSlice], wanted: Mapping[str, tuple[str, Sizes]], ctx: ParallelContext
) -> dict[str, int]:
    """The stored rows of each tensor that has a row for each id, if the checkpoint has fewer. A collective.

    `wanted` has dtype and shape of each tensor of the run by its name in a checkpoint.
    """
    names = {
        f"{state}.{piece.name}"
        for item in slices
        for piece in item.spec.pieces
        if piece.grows
        for state in item.tensors
    }
    for axis in (ctx.tp, ctx.grad, ctx.pp):
        names = {name for others in collectives.gather_json(sorted(names), axis, ctx.device) for name in others}
    found = {}
    for name in sorted(names):
        entry = manifest.tensors.get(name)
        if entry is not None and entry.shape[1:] == wanted[name][1][1:] and entry.shape[0] < wanted[name][1][0]:
            found[name] = entry.shape[0]
    return found


def as_stored(
    manifest: Manifest,
    rows: Mapping[str, int],
    wanted: Mapping[str, tuple[str, Sizes]],
    model_config: Mapping[str, Any],
) -> tuple[dict[str, tuple[str, Sizes]], dict[str, Any]]:
    """`wanted` and `model_config` with the vocabulary of the checkpoint, to compare everything else with it."""
    kinds = dict(wanted)
    for name, count in rows.items():
        dtype, shape = wanted[name]
        kinds[name] = (dtype, (count, *shape[1:]))
    changed = {_SIZE: manifest.model_config[_SIZE]} if rows and _SIZE in manifest.model_config else {}
    return kinds, {**model_config, **changed}


def mean_row(reader: BoxReader, name: str) -> Tensor:
    """The mean of the stored rows of a tensor, in fp32, summed in fp64."""
    rows, *rest = reader.manifest.tensors[name].shape
    total = torch.zeros(rest, dtype=torch.float64)
    for first in range(0, rows, _ROWS):
        block = torch.empty(min(_ROWS, rows - first), *rest)
        reader.fill(name, (first, *(0 for _ in rest)), block)
        total += block.sum(0, dtype=torch.float64)
    return (total / rows).float()


def fill_new_rows(mean: Tensor, rows: int, offset: Sizes, out: Tensor) -> None:
    """Fill what `out`, the box at `offset`, has beyond the stored `rows` with the mean of these."""
    first = max(rows - offset[0], 0)
    if first < out.shape[0]:
        columns = tuple(slice(start, start + size) for start, size in zip(offset[1:], out.shape[1:], strict=True))
        out[first:] = mean[columns]


def whole(reader: BoxReader, name: str, values: Tensor, rows: int) -> Tensor:
    """`values`, a whole stored tensor, with new rows up to `rows`."""
    if values.shape[0] >= rows:
        return values
    out = values.new_empty(rows, *values.shape[1:])
    out[: values.shape[0]] = values
    fill_new_rows(mean_row(reader, name).to(values.dtype), values.shape[0], (0,) * out.ndim, out)
    return out


def grown_note(manifest: Manifest, vocab_size: int) -> list[str]:
    """A line for the user if a run with `vocab_size` ids starts from a checkpoint with fewer."""
    before = manifest.model_config.get(_SIZE)
    if type(before) is not int or before >= vocab_size:
        return []
    return [
        f"model.vocab_size {before:,} -> {vocab_size:,}: embedding and head keep their {before:,} rows, and the "
        f"{vocab_size - before:,} new ones begin as the mean of these"
    ]
