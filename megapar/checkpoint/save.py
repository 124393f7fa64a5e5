"""Writing a checkpoint.

Each rank writes the boxes it owns, and rank 0 writes the manifest. One rename then makes the checkpoint exist. Threads
do all of it. A synchronous save waits for them. An asynchronous save gives them a copy of the state.
"""

import math
import os
import shutil
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from megapar.base.errors import NumericError, StorageError
from megapar.checkpoint.boxes import FlatBox, logical_boxes
from megapar.checkpoint.folder import KEEP_ALL, Keep, is_own, prune, require_space
from megapar.checkpoint.format import (
    WEIGHTS,
    Manifest,
    StoredChunk,
    TensorEntry,
    check_files,
    check_tensors,
    dtype_name,
    folder_name,
    sync_folder,
    write_latest,
    write_manifest,
)
from megapar.checkpoint.values import content, examine, rounding_problem, sum_of_contents
from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.declare.agreement import Problem, any_rank, from_first, on_all_ranks, relayed, shared_error, until_all
from megapar.declare.context import ParallelContext
from megapar.declare.optimizer_state import StateSlice, StateTensor
from megapar.declare.params import MAIN, Piece
from megapar.system import device

_REMEDY = "a lower optimizer.lr or a longer optimizer.warmup_steps often helps from the newest checkpoint on"
_PAUSE_SECONDS = 0.01  # between two checks of what other ranks have finished
_CHUNK_OVERHEAD = 512  # bytes; more than a chunk takes in a file's header and in the manifest


def _nothing() -> None:
    pass


class _PartExchange:
    """Messages in the job's store that tell rank 0's thread what the threads of the other ranks have written.

    `name` is the name of the temporary folder. No other save has this name.
    """

    # Not through process groups: training may be using them meanwhile.

    def __init__(self, name: str, world: Axis):
        self._name = name
        self._world = world

    def post(self, part: dict[str, Any] | None, *, failed: bool) -> None:
        """Send this rank's part, and whether the rank failed to write the part."""
        collectives.post(self._key(self._world.rank), {"part": part, "failed": failed})

    def collect(self, given_up: Event) -> list[dict[str, Any] | None] | None:
        """Wait for the parts of the other ranks and return them, or None if one of them failed.

        Return None too once `given_up` is set.
        """
        parts = []
        for rank in range(1, self._world.size):
            answer = collectives.collect(self._key(rank))
            while answer is None:
                if given_up.wait(_PAUSE_SECONDS):
                    return None
                answer = collectives.collect(self._key(rank))
            if answer["failed"]:
                return None
            parts.append(answer["part"])
        return parts

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}"


class Save:
    """A save in progress. A thread of each rank writes the rank's part. Rank 0's thread waits for all and publishes.

    Making a Save is a collective over `ctx.world`. `own_slices` are all slices written by this rank. Their tensors must
    not change until `finish`. `header` has the manifest's fields besides files and tensors. The thread first waits for
    the thread of the save `after`, so only one save writes at a time. Rank 0 calls `require` before it makes a folder.
    It calls `ready` in its thread, before the checkpoint gets its name.

    Raises StorageError on every rank if rank 0 cannot make a folder or has too little space for all ranks' parts.
    """

    def __init__(
        self,
        root: Path,
        own_slices: Sequence[StateSlice],
        ctx: ParallelContext,
        header: Mapping[str, Any],
        *,
        keep: Keep = KEEP_ALL,
        after: "Save | None" = None,
        require: Callable[[], None] = _nothing,
        ready: Callable[[], None] = _nothing,
    ):
        self.step = int(header["step"])
        self._root = root
        self._ctx = ctx
        self._header = header
        self._keep = keep
        self._after = after
        self._ready = ready
        self._published = False
        self._failed = False  # whether `finish` has found a problem of any rank
        self._problem: Problem | None = None
        self._done = Event()  # set when this rank's thread will no longer change the checkpoint
        self._given_up = Event()
        needed = needed_bytes(own_slices, ctx)

        def prepare() -> str | None:
            if not ctx.world.first:
                return None
            require()
            return self._prepare(needed)

        name = from_first(on_all_ranks(prepare, ctx, StorageError, self._doing), ctx)
        self._temporary = root / name
        self._exchange = _PartExchange(name, ctx.world)
        self._thread: Thread = Thread(target=self._run, args=(own_slices,), daemon=True)
        self._thread.start()

    def join(self, seconds: float | None = None) -> None:
        """Wait for this rank's thread. It may still remove old checkpoints after `finish`. No collective."""
        self._thread.join(seconds)

    def settle(self) -> None:
        """Wait until no rank's thread is running. Old checkpoints are removed then. A collective."""
        while any_rank(self._thread.is_alive(), self._ctx):
            self.join(_PAUSE_SECONDS)

    def ended(self) -> bool:
        """Whether the checkpoint exists or any rank has failed, the same on every rank. A collective."""
        return any_rank(self._published or self._problem is not None, self._ctx)

    def finish(self) -> Path:
        """Wait until the checkpoint exists, and return its folder. A collective.

        Old checkpoints may still be being removed.
        Raises StorageError on every rank if any rank failed, and NumericError if one held a non-finite value. Older
        checkpoints are untouched then.
        """
        # Ranks poll. A rank that waited within a collective for slow writing would run into the collective's timeout.
        while not self.ended():
            time.sleep(_PAUSE_SECONDS)
        self._given_up.set()
        until_all(self._done, self._ctx)
        problems = collectives.gather_json(self._problem, self._ctx.world, self._ctx.device)
        if error := shared_error(problems, StorageError, self._doing):
            self._failed = True
            on_all_ranks(self._remove_temporary, self._ctx, StorageError, self._doing)
            raise error
        return self._root / folder_name(self.step)

    @property
    def _doing(self) -> str:
        return f"checkpoint of step {self.step} not saved"

    def _prepare(self, needed: int) -> str:
        """Make the temporary folder if there is room for the checkpoint, and return the folder's name.

        Raises StorageError if `needed` bytes are not free.
        """
        if self._after is not None and self._after._failed:
            self._after._remove_temporary()  # a disk that could not be written may have refused this too
        try:
            require_space(self._root, needed)
        except StorageError:
            if self._after is None:
                raise
            # The save before may be removing old checkpoints, which makes room.
            self._after.join()
            require_space(self._root, needed)
        name = f".tmp-{folder_name(self.step)}-{uuid.uuid4().hex[:8]}"
        (self._root / name).mkdir()
        return name

    def _remove_temporary(self) -> None:
        if self._ctx.world.first:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _run(self, slices: Sequence[StateSlice]) -> None:
        """Run this rank's thread."""
        try:
            device.set_current(self._ctx.device)
            if self._after:
                self._after.join()
            self._write(slices)
        # `finish` raises it on every rank, whatever it is. Without it, every rank would wait for ever.
        except BaseException as error:
            self._problem = self._problem or relayed(error)
        finally:
            self._after = None  # otherwise each save would keep all saves before it in memory
            self._done.set()
        if self._published:
            # After `_done` is set, so that no rank waits: removing a checkpoint of many files may take long.
            prune(self._root, self.step, self._keep)

    def _write(self, slices: Sequence[StateSlice]) -> None:
        """Write this rank's part. Rank 0 then waits for the other parts and publishes the checkpoint."""
        world = self._ctx.world
        part: dict[str, Any] | None = None
        try:
            part = write_part(self._temporary, world.rank, slices)
        except BaseException as error:  # rank 0 must learn of it, or it would wait for this part
            self._problem = relayed(error)
        if not world.first:
            self._exchange.post(part, failed=self._problem is not None)
            return
        if self._problem:
            return
        others = self._exchange.collect(self._given_up)
        if others is not None:
            self._ready()
            publish(self._temporary, self._root, self._header, [part, *others])
            self._published = True


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
    """Write the checkpoint `root`/step_<step>, complete or not at all, and return its folder.

    A collective over `ctx.world`.
    `slices` are all of the optimizer's state on this rank. With `replicated`, all replicas hold the same slices in the
    same order (ZeRO stage 0). Each replica then writes its share of them. The mappings hold JSON types. A checkpoint of
    the same step is replaced once this one is whole.

    Raises StorageError on every rank if any rank fails. Complete checkpoints in `root` are untouched then.
    """
    header = {
        "step": step,
        "consumed_samples": consumed_samples,
        "layout": dict(layout),
        "model_config": dict(model_config),
        "trainer": dict(trainer),
        "data": dict(data),
    }
    return Save(root, share(slices) if replicated else first_copies(slices), ctx, header).finish()


def snapshot_bytes(slices: Iterable[StateSlice]) -> int:
    """The bytes of the buffer for `snapshot`."""
    return sum(_aligned_bytes(tensor) for item in slices for tensor in item.parts())


def snapshot(slices: Iterable[StateSlice], buffer: Tensor) -> list[StateSlice]:
    """Copy the slices' tensors into `buffer` and return slices of the copies.

    `buffer` is 1-D uint8 of `snapshot_bytes(slices)` bytes in host memory. If it is pinned, the copies may be read only
    after the device has been synchronized.
    """
    copies = []
    position = 0

    def copied(tensor: Tensor) -> Tensor:
        nonlocal position
        copy = buffer[position : position + tensor.nbytes].view(tensor.dtype)
        copy.copy_(tensor.detach(), non_blocking=True)
        position += _aligned_bytes(tensor)
        return copy

    for item in slices:
        tensors = {name: copied(tensor) for name, tensor in item.tensors.items()}
        remainder = None if item.remainder is None else copied(item.remainder)
        copies.append(replace(item, tensors=tensors, remainder=remainder))
    return copies


def _aligned_bytes(tensor: Tensor) -> int:
    """The tensor's bytes, rounded up to 8. So the next tensor starts at a multiple of any dtype's size."""
    return -(-tensor.nbytes // 8) * 8


def share(slices: Iterable[StateSlice]) -> list[StateSlice]:
    """The slices this rank writes, of those held by all its replicas: every n-th of n replicas."""
    written = []
    # Counted for each axis of replicas apart, so that each axis divides its own slices evenly.
    counts: Counter[str] = Counter()
    for item in slices:
        grad_axis = item.spec.grad_axis
        if counts[grad_axis.name] % grad_axis.size == grad_axis.rank:
            written.append(item)
        counts[grad_axis.name] += 1
    return written


def first_copies(slices: Iterable[StateSlice]) -> list[StateSlice]:
    """The slices of ZeRO shards this rank writes. Of several ranks with copies, the first one writes."""
    return [item for item in slices if item.spec.grad_axis.copies.first]


def owned_boxes(item: StateSlice) -> Iterator[tuple[Piece, FlatBox]]:
    """Yield the boxes of a slice stored by this rank. One rank of a replica owns each element of a logical tensor."""
    for first, last in item.spec.owned_ranges():
        yield from logical_boxes(item.spec, max(first, item.start), min(last, item.stop))


def needed_bytes(own_slices: Sequence[StateSlice], ctx: ParallelContext) -> int:
    """An upper estimate of a checkpoint's bytes on disk. A collective.

    `own_slices` are the slices written by this rank. The estimate is the sum over all ranks.
    """
    needed = 0
    for item in own_slices:
        for _, box in owned_boxes(item):
            for name in item.tensors:
                needed += math.prod(box.size) * item.dtype(name).itemsize + _CHUNK_OVERHEAD
    return sum(collectives.gather_json(needed, ctx.world, ctx.device))


def write_part(folder: Path, rank: int, slices: Iterable[StateSlice]) -> dict[str, Any] | None:
    """Write the boxes of `slices` owned by this rank to its file in `folder`, and flush the file to the disk.

    Returns the file's name, its bytes, the entries of its tensors, what is declared of their states, and the content of
    its weights, as JSON types.
    A rank that owns nothing writes no file and returns None.
    Raises NumericError, before anything is written, for a value unfit for further training.
    """
    file = f"rank_{rank:05d}.safetensors"
    tensors: dict[str, Tensor] = {}
    entries: dict[str, TensorEntry] = {}
    chunks: dict[str, list[StoredChunk]] = defaultdict(list)
    states: dict[str, dict[str, Any]] = {}
    contents: list[dict[str, int]] = []
    for item in slices:
        declared = {tensor.name: _declaration(item, tensor) for tensor in item.states}
        states |= declared
        for piece, box in owned_boxes(item):
            begin = box.position - item.start
            for state in item.tensors:
                name = f"{state}.{piece.name}"
                values = item.values(state, begin, begin + math.prod(box.size)).view(box.size).cpu()
                nonnegative = state in declared and declared[state]["nonnegative"]
                crc32, problem = examine(name, values, nonnegative=nonnegative)
                # Weights that are finite in fp32 may be infinite in a 16-bit model. Every start from them would fail.
                if not problem and state == MAIN and item.param.dtype != values.dtype:
                    problem = rounding_problem(name, values, item.param.dtype)
                if problem:
                    raise NumericError(f"rank {rank}: {problem}; {_REMEDY}")
                if state in WEIGHTS:
                    contents.append({state: content(name, piece.shape, box.offset, values)})
                chunk = StoredChunk(file, f"{name}#{len(chunks[name])}", box.offset, box.size, crc32)
                tensors[chunk.key] = values
                chunks[name].append(chunk)
                entries.setdefault(name, TensorEntry(piece.shape, dtype_name(values.dtype), ()))
    if not tensors:
        return None
    path = folder / file
    _write_file(path, tensors)
    return {
        "file": file,
        "bytes": path.stat().st_size,
        "tensors": {name: {**entry._asdict(), "chunks": chunks[name]} for name, entry in entries.items()},
        "states": states,
        "content": sum_of_contents(contents),
    }


def _declaration(item: StateSlice, tensor: StateTensor) -> dict[str, Any]:
    """What the manifest says of a state of the slice's parameter (`Manifest.states`)."""
    return {"optimizer": item.optimizer, "initial": tensor.initial, "nonnegative": tensor.nonnegative}


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file and flush it to the disk. Raises StorageError with the bytes needed and free."""
    try:
        save_file(tensors, path)
        # safetensors makes files that only their owner may read. They get the permissions of the folder.
        path.chmod(path.parent.stat().st_mode & 0o666)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # safetensors is written in Rust, whose panics are no subclass of Exception
        needed = sum(values.nbytes for values in tensors.values())
        free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
        # Rank 0 has made the folder. A rank that does not see it is on another disk.
        shared = "" if path.parent.is_dir() else "; all ranks must see the same folder"
        raise StorageError(f"{path}: {error} ({needed:,} bytes needed, {free:,} free{shared})") from error


def merge_tensors(parts: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, TensorEntry]:
    """Merge the entries of all ranks, by name, sorted. Raises ValueError if two ranks disagree on a tensor."""
    merged: dict[str, TensorEntry] = {}
    chunks: dict[str, list[StoredChunk]] = defaultdict(list)
    for part in parts:
        for name, value in part.items():
            shape = tuple(value["shape"])
            dtype = value["dtype"]
            known = merged.setdefault(name, TensorEntry(shape, dtype, ()))
            if (known.shape, known.dtype) != (shape, dtype):
                raise ValueError(f"ranks disagree on {name}: {known.shape} {known.dtype}, {shape} {dtype}")
            for file, key, offset, size, crc32 in value["chunks"]:
                chunks[name].append(StoredChunk(file, key, tuple(offset), tuple(size), crc32))
    return {name: merged[name]._replace(chunks=tuple(chunks[name])) for name in sorted(merged)}


def publish(
    temporary: Path,
    root: Path,
    header: Mapping[str, Any],
    parts: Iterable[Mapping[str, Any] | None],
    here: Container[str] | None = None,
) -> None:
    """Make the folder `temporary`, to which all ranks wrote their `parts`, the checkpoint of its step in `root`.

    `header` has the manifest's fields besides files and tensors. `here` are the files of this folder if others are on
    other hosts.
    Raises CheckpointError if the parts do not cover every tensor exactly once, ValueError if they disagree on one.
    """
    written = [part for part in parts if part]
    files = {part["file"]: part["bytes"] for part in written}
    # Of the same name, all ranks declare the same: no two optimizers of a run use one name.
    states = {name: declared for part in written for name, declared in part["states"].items()}
    tensors = merge_tensors(part["tensors"] for part in written)
    total = sum_of_contents(part["content"] for part in written)
    manifest = Manifest(**header, files=files, tensors=tensors, states=states, content=total)
    # The same checks as when a checkpoint is loaded: one that could not be loaded must not replace an older one.
    check_files(temporary, {name: size for name, size in files.items() if here is None or name in here})
    check_tensors(temporary, manifest)
    write_manifest(temporary, manifest)
    final = root / folder_name(manifest.step)
    if final.exists():
        # A rename cannot replace a folder with files. A crash between these two leaves the old one under its hidden
        # name, and `folder.sweep` gives it its name back.
        old = root / f".old-{temporary.name.removeprefix('.tmp-')}"
        final.rename(old)
        temporary.rename(final)
        if is_own(root):  # else it is left under its hidden name
            shutil.rmtree(old)
    else:
        temporary.rename(final)
    sync_folder(root)
    write_latest(root, final.name)
