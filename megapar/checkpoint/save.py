"""Writing a checkpoint: each rank the boxes that it owns, rank 0 the manifest; then one rename makes it exist.

All of it happens in threads: a synchronous save waits for them, an asynchronous one gives them a copy of the state.
"""

import math
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megapar import comm
from megapar.checkpoint.agreement import in_one_line, shared_error, together
from megapar.checkpoint.folder import KEEP_ALL, Keep, prune, require_space
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
from megapar.params import ParamSpec, Piece

_PAUSE_SECONDS = 0.01  # between looks at what other ranks have come to
_CHUNK_OVERHEAD = 512  # bytes of a chunk's lines in a file's header and in the manifest, generously


class Save:
    """A checkpoint on its way to disk: each rank's thread writes its part; that of rank 0 awaits all and publishes.

    Threads talk through the store, never through process groups, which training may be using. The tensors of `mine`,
    all that this rank writes, must not change until `finish`. `facts` are the manifest's other fields. Making one is a
    collective over `ctx.world`; its thread first waits for that of the save `after`, so that one at a time writes.

    Raises StorageError on every rank if rank 0 cannot make a folder or has too little space for all ranks' parts.
    """

    def __init__(
        self,
        root: Path,
        mine: Sequence[StateSlice],
        ctx: ParallelContext,
        facts: Mapping[str, Any],
        *,
        keep: Keep = KEEP_ALL,
        after: "Save | None" = None,
    ):
        self.step = int(facts["step"])
        self._root, self._ctx, self._facts, self._keep = root, ctx, facts, keep
        self._published, self._problem = False, ""  # what this rank's thread has come to
        self._given_up = Event()
        needed = needed_bytes(mine, ctx)
        name = together(lambda: _prepare(root, self.step, needed) if ctx.world.first else None, ctx, *self._failure)
        self._temporary = root / comm.gather_json(name, ctx.world, ctx.device)[0]
        self._thread: Thread = Thread(target=self._run, args=(mine, after), daemon=True)
        self._thread.start()

    def join(self, seconds: float | None = None) -> None:
        """Wait for this rank's thread alone. No collective."""
        self._thread.join(seconds)

    def ended(self) -> bool:
        """Whether the checkpoint exists or any rank has failed, the same on every rank. A collective."""
        flag = torch.tensor([int(self._published or self._problem != "")], device=self._ctx.device)
        return bool(comm.all_reduce(flag, self._ctx.world, "max").item())

    def finish(self) -> Path:
        """Wait until the checkpoint exists, and return it. A collective.

        Raises StorageError on every rank if any rank failed; what was complete before is untouched.
        """
        while not self.ended():  # no rank waits within a collective, which would end by its own timeout
            time.sleep(_PAUSE_SECONDS)
        self._given_up.set()
        self.join()
        problems = comm.gather_json(self._problem or None, self._ctx.world, self._ctx.device)
        if error := shared_error(problems, *self._failure):
            if self._ctx.world.first:
                shutil.rmtree(self._temporary, ignore_errors=True)
            raise error
        return self._root / folder_name(self.step)

    @property
    def _failure(self) -> tuple[type[StorageError], str]:
        return StorageError, f"checkpoint of step {self.step} not saved"

    def _run(self, mine: Sequence[StateSlice], after: "Save | None") -> None:
        if after:
            after.join()
        part: dict[str, Any] | None = None
        try:
            part = write_part(self._temporary, self._ctx.world.rank, mine)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            self._problem = in_one_line(error)
        try:
            if not self._ctx.world.first:
                comm.post(self._key(self._ctx.world.rank), {"part": part, "failed": self._problem != ""})
            elif not self._problem and (others := self._others()) is not None:
                publish(self._temporary, self._root, self._facts, [part, *others])
                self._published = True
                prune(self._root, self.step, self._keep)
        except Exception as error:
            self._problem = self._problem or in_one_line(error)

    def _others(self) -> list[dict[str, Any] | None] | None:
        """What the other ranks have written, when all have; None if one of them failed."""
        parts = []
        for rank in range(1, self._ctx.world.size):
            while (answer := comm.collect(self._key(rank))) is None:
                if self._given_up.wait(_PAUSE_SECONDS):
                    return None
            if answer["failed"]:
                return None
            parts.append(answer["part"])
        return parts

    def _key(self, rank: int) -> str:
        return f"{self._temporary.name}/{rank}"


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
    facts = {
        "step": step,
        "consumed_samples": consumed_samples,
        "layout": dict(layout),
        "model_config": dict(model_config),
        "trainer": dict(trainer),
        "data": dict(data),
    }
    return Save(root, share(slices, ctx.grad, replicated), ctx, facts).finish()


@dataclass(frozen=True)
class HostSlice:
    """A slice's state at one moment, in host memory."""

    spec: ParamSpec
    start: int
    stop: int
    main: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def state_numel(slices: Iterable[StateSlice]) -> int:
    return len(STATE) * sum(item.stop - item.start for item in slices)


def snapshot(slices: Iterable[StateSlice], buffer: Tensor) -> list[HostSlice]:
    """Copies of the slices in `buffer`, 1-D fp32 of `state_numel(slices)` elements.

    To be read once the device is synchronised, if the buffer is pinned.
    """
    copies, position = [], 0
    for item in slices:
        length = item.stop - item.start
        parts = buffer[position : position + len(STATE) * length].view(len(STATE), length)
        for part, state in zip(parts, STATE, strict=True):
            part.copy_(getattr(item, state).detach(), non_blocking=True)
        copies.append(HostSlice(item.spec, item.start, item.stop, *parts))
        position += parts.numel()
    return copies


def share(slices: Iterable[StateSlice], grad: Axis, replicated: bool) -> list[StateSlice]:
    """The slices that this rank writes: all, or every n-th of those that all n ranks of `grad` hold."""
    return list(slices)[grad.rank :: grad.size] if replicated else list(slices)


def owned_boxes(item: StateSlice) -> Iterator[tuple[Piece, Box]]:
    """What this rank stores of a slice: each element of a logical tensor is owned by one tensor-parallel rank."""
    for first, last in item.spec.owned_ranges():
        yield from logical_boxes(item.spec, max(first, item.start), min(last, item.stop))


def needed_bytes(mine: Sequence[StateSlice], ctx: ParallelContext) -> int:
    """Disk space that a checkpoint takes in which each rank writes its `mine`, rather too much. A collective."""
    sizes = [math.prod(box.size) for item in mine for _, box in owned_boxes(item)]
    needed = len(STATE) * sum(size * torch.float32.itemsize + _CHUNK_OVERHEAD for size in sizes)
    return sum(comm.gather_json(needed, ctx.world, ctx.device))


def _prepare(root: Path, step: int, needed: int) -> str:
    """Make the temporary folder if there is room for the checkpoint; its name."""
    require_space(root, needed)
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
