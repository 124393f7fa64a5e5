"""Checkpoints on disks that only the ranks of one host see.

Each host has the files of its ranks, copies of those of the host before it, and the manifest of the whole. So a
checkpoint is complete as long as no two neighbors are lost together. Before it is loaded, each host gets the files that
its ranks need and that lie on other hosts alone. The format is that of every checkpoint.
"""

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapar.base.errors import CheckpointError, MegaparError, StorageError, storing
from megapar.checkpoint.boxes import logical_boxes, overlap
from megapar.checkpoint.folder import remove, require_space
from megapar.checkpoint.format import (
    MANIFEST,
    Check,
    Manifest,
    check_files,
    checkpoint_folders,
    folder_name,
    open_manifest,
    step_of,
)
from megapar.checkpoint.save import needed_bytes, publish, write_part
from megapar.comm import collectives
from megapar.declare.agreement import from_first, on_all_ranks
from megapar.declare.context import ParallelContext
from megapar.declare.optimizer_state import StateSlice
from megapar.system.regular_files import open_regular

_PIECE = 1 << 26  # bytes that are sent at a time


@dataclass(frozen=True)
class Disks:
    """Which ranks see one folder: `of_rank` has, for each rank, the lowest rank that sees the same."""

    of_rank: tuple[int, ...]

    def leads(self, rank: int) -> bool:
        """Whether `rank` is the one to make and remove folders on its disk."""
        return self.of_rank[rank] == rank

    def copies_to(self, rank: int) -> int:
        """The rank on the next disk that keeps a copy of the file of `rank`."""
        leaders = sorted(set(self.of_rank))
        here = self._on(self.of_rank[rank])
        there = self._on(leaders[(leaders.index(self.of_rank[rank]) + 1) % len(leaders)])
        return there[here.index(rank) % len(there)]

    def _on(self, leader: int) -> list[int]:
        return [rank for rank, other in enumerate(self.of_rank) if other == leader]


def find_disks(root: Path, ctx: ParallelContext) -> Disks:
    """Make the folder `root` on every host, and find out which ranks see the same one. A collective.

    Raises StorageError on every rank if it cannot be made.
    """
    token = from_first(uuid.uuid4().hex, ctx)
    mine = root / f".probe-{token}-{ctx.world.rank}"

    def leave() -> None:
        with storing(root):
            root.mkdir(parents=True, exist_ok=True)
            mine.touch(exist_ok=False)

    def look() -> int:
        return min(int(path.name.rpartition("-")[2]) for path in root.glob(f".probe-{token}-*"))

    doing = f"{root} not usable"
    on_all_ranks(leave, ctx, StorageError, doing)
    lowest = on_all_ranks(look, ctx, StorageError, doing)
    found = Disks(tuple(collectives.gather_json(lowest, ctx.world, ctx.device)))
    on_all_ranks(lambda: mine.unlink(missing_ok=True), ctx, StorageError, doing)  # before anybody sweeps the folder
    return found


def require_room(root: Path, slices: Sequence[StateSlice], ctx: ParallelContext, disks: Disks) -> None:
    """Raise StorageError on every rank unless each disk has room for its share of a checkpoint, and the copies."""
    needed = 2 * needed_bytes(slices, ctx) // len(set(disks.of_rank))
    on_all_ranks(lambda: require_space(root, needed), ctx, StorageError, "checkpoints could not be saved")


def save(
    root: Path,
    slices: Sequence[StateSlice],
    ctx: ParallelContext,
    header: Mapping[str, Any],
    disks: Disks,
    *,
    keep_last: int,
    ready: Callable[[], None],
) -> Path:
    """Write the checkpoint `root`/step_<step> on each disk, and return its folder. A collective.

    `slices` are those written by this rank. `header` has the manifest's fields besides files and tensors. Rank 0 calls
    `ready` before the checkpoint gets its name. The newest `keep_last` stay. Raises StorageError on every rank if one
    fails, and NumericError for a value that is not finite. Older checkpoints are untouched then.
    """
    rank = ctx.world.rank
    step = int(header["step"])
    temporary = root / from_first(f".tmp-{folder_name(step)}-{uuid.uuid4().hex[:8]}", ctx)
    try:
        return _save(root, temporary, slices, ctx, header, disks, keep_last=keep_last, ready=ready)
    except MegaparError:  # on every rank
        if disks.leads(rank):
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _save(
    root: Path,
    temporary: Path,
    slices: Sequence[StateSlice],
    ctx: ParallelContext,
    header: Mapping[str, Any],
    disks: Disks,
    *,
    keep_last: int,
    ready: Callable[[], None],
) -> Path:
    """Do as `save` says, by way of the folder `temporary`. After an error the folder may be left."""
    rank = ctx.world.rank
    step = int(header["step"])
    doing = f"checkpoint of step {step} not saved"
    # With parents: what empties old folders of a disk may have removed them.
    make = partial(temporary.mkdir, parents=True)
    on_all_ranks(lambda: make() if disks.leads(rank) else None, ctx, StorageError, doing)
    part = on_all_ranks(lambda: write_part(temporary, rank, slices), ctx, StorageError, doing)
    parts = collectives.gather_json(part, ctx.world, ctx.device)
    files = {number: (one["file"], one["bytes"]) for number, one in enumerate(parts) if one}
    copies = [(number, disks.copies_to(number), *files[number]) for number in files]
    send_files(temporary, copies, ctx)

    def finish() -> None:
        if ctx.world.first:
            ready()
        if disks.leads(rank):
            publish(temporary, root, header, parts, here=_files_in(temporary))
            # Those before it, complete or not: a folder here never has all files.
            for old in [folder for folder in checkpoint_folders(root) if step_of(folder) <= step][keep_last:]:
                remove(old)

    on_all_ranks(finish, ctx, StorageError, doing)
    return root / folder_name(step)


def send_files(folder: Path, copies: Iterable[tuple[int, int, str, int]], ctx: ParallelContext) -> None:
    """Copy files in `folder` between disks. A collective.

    Each of `copies` has the rank that reads, the rank that writes, the file's name and its bytes. They are the same on
    every rank. Raises StorageError on every rank if a file cannot be read or written.
    """
    rank = ctx.world.rank
    problem = ""
    for source, target, name, size in copies:
        if source == target:
            continue
        for first in range(0, size, _PIECE):
            length = min(_PIECE, size - first)
            try:
                if rank == source:
                    piece = _read(folder / name, first, length).to(ctx.device)
            except OSError as error:  # the target waits for the bytes, so some must come
                problem = problem or f"{folder / name}: {error.strerror or error}"
                piece = torch.zeros(length, dtype=torch.uint8, device=ctx.device)
            if rank == source:
                collectives.exchange([(piece, target)], [], ctx.world).wait()
            elif rank == target:
                piece = torch.empty(length, dtype=torch.uint8, device=ctx.device)
                collectives.exchange([], [(piece, source)], ctx.world).wait()
                try:
                    _append(folder / name, first, piece.cpu())
                except OSError as error:
                    problem = problem or f"{folder / name}: {error.strerror or error}"

    def tell() -> None:
        if problem:
            raise StorageError(problem)

    on_all_ranks(tell, ctx, StorageError, "files not copied between hosts")


def newest(root: Path, ctx: ParallelContext, disks: Disks, check: Check) -> tuple[int, list[list[str]]] | None:
    """The newest checkpoint of which every file is on some disk. A collective.

    Returns its step, and for each rank the files that it sees. None if there is none.
    """

    def look() -> list[tuple[int, str, list[str], int]]:
        if not disks.leads(ctx.world.rank):
            return []
        found = []
        for folder in checkpoint_folders(root):
            with suppress(CheckpointError):
                manifest = open_manifest(folder)
                check(manifest)
                digest = sha256((folder / MANIFEST).read_bytes()).hexdigest()
                found.append((step_of(folder), digest, _whole_files(folder, manifest), len(manifest.files)))
        return found

    here = on_all_ranks(look, ctx, CheckpointError, "checkpoints not found")
    everywhere = collectives.gather_json(here, ctx.world, ctx.device)
    candidates: dict[tuple[int, str], dict[int, list[str]]] = {}
    counts: dict[tuple[int, str], int] = {}
    for leader, lines in enumerate(everywhere):
        for step, digest, names, count in lines:
            candidates.setdefault((step, digest), {})[leader] = names
            counts[step, digest] = count
    whole = [key for key, seen in candidates.items() if len(set(chain(*seen.values()))) == counts[key]]
    if not whole:
        return None
    best = max(whole)
    seen = candidates[best]
    return best[0], [seen.get(leader, []) for leader in disks.of_rank]


def fetch(
    path: Path, seen: Sequence[Sequence[str]], slices: Sequence[StateSlice], ctx: ParallelContext, disks: Disks
) -> None:
    """Bring the manifest and the files that this host's ranks need to fill `slices` to `path`. A collective.

    `seen` has the files of the checkpoint that each rank sees.
    """
    leaders = sorted(set(disks.of_rank))
    rank = ctx.world.rank
    holder = next(leader for leader in leaders if seen[leader])
    size = from_size(path / MANIFEST, holder, ctx)
    on_all_ranks(lambda: path.mkdir(exist_ok=True) if disks.leads(rank) else None, ctx, StorageError, "no folder")
    send_files(path, [(holder, leader, MANIFEST, size) for leader in leaders if not seen[leader]], ctx)
    manifest = on_all_ranks(lambda: open_manifest(path), ctx, CheckpointError, "checkpoint not loaded")
    needed = sorted(set(needed_files(manifest, slices)))
    copies = []
    for number, names in enumerate(collectives.gather_json(needed, ctx.world, ctx.device)):
        target = disks.of_rank[number]
        for name in names:
            source = next(leader for leader in leaders if name in seen[leader])
            if name not in seen[target]:
                copies.append((source, target, name, manifest.files[name]))
    send_files(path, sorted(set(copies)), ctx)


def from_size(path: Path, holder: int, ctx: ParallelContext) -> int:
    """The bytes of a file that rank `holder` has, on every rank. A collective."""
    here = path.stat().st_size if ctx.world.rank == holder else 0
    return int(max(collectives.gather_json(here, ctx.world, ctx.device)))


def needed_files(manifest: Manifest, slices: Iterable[StateSlice]) -> Iterator[str]:
    """Yield the files with values of `slices`."""
    for item in slices:
        for piece, box in logical_boxes(item.spec, item.start, item.stop):
            for state in item.tensors:
                entry = manifest.tensors.get(f"{state}.{piece.name}")
                for chunk in entry.chunks if entry else ():
                    if overlap(box.offset, box.size, chunk.offset, chunk.size):
                        yield chunk.file


def _files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _whole_files(folder: Path, manifest: Manifest) -> list[str]:
    """The files of the manifest that are in `folder` with all their bytes."""
    whole = []
    for name, size in manifest.files.items():
        with suppress(CheckpointError):
            check_files(folder, {name: size})
            whole.append(name)
    return whole


def _read(path: Path, first: int, length: int) -> Tensor:
    with open(open_regular(path), "rb") as file:
        file.seek(first)
        content = bytearray(file.read(length))
    if len(content) != length:
        raise OSError(0, f"has fewer than {first + length:,} bytes")
    return torch.frombuffer(content, dtype=torch.uint8)


def _append(path: Path, first: int, piece: Tensor) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_TRUNC if first == 0 else 0)
    with open(open_regular(path, flags), "wb") as file:
        file.seek(first)
        file.write(piece.numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())
