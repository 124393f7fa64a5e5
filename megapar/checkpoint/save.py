"""Writing a checkpoint: each rank the boxes that it owns, rank 0 the manifest; then one rename makes it exist."""

import math
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megapar import comm
from megapar.checkpoint.agreement import together
from megapar.checkpoint.format import (
    STATE,
    Box,
    Chunk,
    Entry,
    Manifest,
    StateSlice,
    checksum,
    dtype_name,
    folder_name,
    logical_boxes,
    read_entry,
    read_manifest,
    sync_folder,
    write_manifest,
)
from megapar.context import Axis, ParallelContext
from megapar.errors import StorageError
from megapar.params import Piece

_CHUNK_OVERHEAD = 512  # bytes of a chunk's lines in a file's header and in the manifest, generously


def save(
    root: Path,
    *,
    slices: Iterable[StateSlice],
    ctx: ParallelContext,
    replicated: bool,
    step: int,
    consumed_samples: int,
    layout: Mapping[str, Any],
    model_config: Mapping[str, Any],
    trainer: Mapping[str, Any],
    data: Mapping[str, Any],
) -> Path:
    """Write `root`/step_<step>, complete or not at all, and return it. A collective over `ctx.world`.

    `slices` are all that this rank holds of the optimizer's state. `replicated` says that all ranks of `ctx.grad` hold
    the same slices in the same order (ZeRO stage 0); each then writes its share of them. The mappings hold JSON types.
    A checkpoint of the same step is replaced once this one is whole.

    Raises StorageError on every rank if any rank fails; what was complete in `root` is untouched.
    """
    doing = f"checkpoint of step {step} not saved"
    mine = share(slices, ctx.grad, replicated)
    needed = sum(comm.gather_json(_stored_bytes(mine), ctx.world, ctx.device))
    name = together(lambda: _prepare(root, step, needed) if ctx.world.first else None, ctx, StorageError, doing)
    temporary = root / comm.gather_json(name, ctx.world, ctx.device)[0]
    facts = {
        "step": step,
        "consumed_samples": consumed_samples,
        "layout": dict(layout),
        "model_config": dict(model_config),
        "trainer": dict(trainer),
        "data": dict(data),
    }
    try:
        part = together(lambda: write_part(temporary, ctx.world.rank, mine), ctx, StorageError, doing)
        parts = comm.gather_json(part, ctx.world, ctx.device)
        together(lambda: publish(temporary, root, facts, parts) if ctx.world.first else None, ctx, StorageError, doing)
    except BaseException:
        if ctx.world.first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return root / folder_name(step)


def share(slices: Iterable[StateSlice], grad: Axis, replicated: bool) -> list[StateSlice]:
    """The slices that this rank writes: all, or every n-th of those that all n ranks of `grad` hold."""
    return list(slices)[grad.rank :: grad.size] if replicated else list(slices)


def owned_boxes(item: StateSlice) -> Iterator[tuple[Piece, Box]]:
    """What this rank stores of a slice: each element of a logical tensor is owned by one tensor-parallel rank."""
    for first, last in item.spec.owned_ranges():
        yield from logical_boxes(item.spec, max(first, item.start), min(last, item.stop))


def _stored_bytes(slices: Sequence[StateSlice]) -> int:
    sizes = [math.prod(box.size) for item in slices for _, box in owned_boxes(item)]
    return len(STATE) * sum(size * torch.float32.itemsize + _CHUNK_OVERHEAD for size in sizes)


def _prepare(root: Path, step: int, needed: int) -> str:
    """Make the temporary folder if there is room for the checkpoint; its name."""
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < needed:
        raise StorageError(f"{root} has {free:,} bytes free, the checkpoint needs {needed:,}: free some space")
    name = f".tmp-{folder_name(step)}-{uuid.uuid4().hex[:8]}"
    (root / name).mkdir()
    return name


def write_part(folder: Path, rank: int, slices: Iterable[StateSlice]) -> dict[str, Any] | None:
    """Write what `slices` own to this rank's file, to the disk; its name, bytes and tensors' entries, as JSON types.

    A rank that owns nothing writes no file and returns None.
    """
    file = f"rank_{rank:05d}.safetensors"
    tensors: dict[str, Tensor] = {}
    entries: dict[str, Entry] = {}
    for item in slices:
        for piece, box in owned_boxes(item):
            begin = box.position - item.start
            for state in STATE:
                name = f"{state}.{piece.name}"
                flat: Tensor = getattr(item, state)[begin : begin + math.prod(box.size)]
                values = flat.detach().view(box.size).cpu()
                entry = entries.setdefault(name, Entry(piece.shape, dtype_name(values.dtype), ()))
                chunk = Chunk(file, f"{name}#{len(entry.chunks)}", box.offset, box.size, checksum(values))
                tensors[chunk.key] = values
                entries[name] = entry._replace(chunks=(*entry.chunks, chunk))
    if not tensors:
        return None
    path = folder / file
    _write_file(path, tensors)
    return {
        "file": file,
        "bytes": path.stat().st_size,
        "tensors": {name: entry._asdict() for name, entry in entries.items()},
    }


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file(tensors, path)
        # safetensors makes files that their owner alone may read; give them the folder's permissions.
        path.chmod(path.parent.stat().st_mode & 0o666)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    except Exception as error:
        needed = sum(values.nbytes for values in tensors.values())
        free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
        shared = "" if path.parent.is_dir() else "; all ranks must see the same folder"
        raise StorageError(f"{path}: {error} ({needed:,} bytes needed, {free:,} free{shared})") from error


def merge_tensors(parts: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, Entry]:
    """All ranks' entries as one. Raises ValueError if two ranks disagree on a tensor."""
    merged: dict[str, Entry] = {}
    chunks: dict[str, list[Chunk]] = {}
    for part in parts:
        for name, value in part.items():
            entry = read_entry(value)
            known = merged.setdefault(name, entry)
            if (known.shape, known.dtype) != (entry.shape, entry.dtype):
                raise ValueError(f"ranks disagree on {name}: {known.shape} {known.dtype}, {entry.shape} {entry.dtype}")
            chunks.setdefault(name, []).extend(entry.chunks)
    return {name: merged[name]._replace(chunks=tuple(chunks[name])) for name in sorted(merged)}


def publish(temporary: Path, root: Path, facts: Mapping[str, Any], parts: Iterable[Mapping[str, Any] | None]) -> None:
    """Make the folder that all ranks wrote their `parts` to the checkpoint of its step: manifest, the checks that a
    load makes, rename, `latest`. `facts` are the manifest's other fields.

    Raises CheckpointError if the parts do not cover every tensor exactly once, ValueError if they disagree on one.
    """
    written = [part for part in parts if part]
    files = {part["file"]: part["bytes"] for part in written}
    manifest = Manifest(**facts, files=files, tensors=merge_tensors(part["tensors"] for part in written))
    write_manifest(temporary, manifest)
    read_manifest(temporary)
    final = root / folder_name(manifest.step)
    if final.exists():
        # No rename replaces a full folder: a crash between these two leaves the old one under its hidden name.
        old = root / f".old-{temporary.name.removeprefix('.tmp-')}"
        final.rename(old)
        temporary.rename(final)
        shutil.rmtree(old)
    else:
        temporary.rename(final)
    sync_folder(root)
    advice = root / f".latest-{uuid.uuid4().hex[:8]}"
    advice.write_text(f"{final.name}\n")
    advice.replace(root / "latest")
