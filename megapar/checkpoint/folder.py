"""The folder that checkpoints lie in: one job at a time, checked before the first step, swept and pruned by rank 0."""

import fcntl
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megapar.agreement import on_all_ranks
from megapar.checkpoint.format import checkpoint_folders, is_complete, step_of
from megapar.checkpoint.lineage import complete_plan
from megapar.context import ParallelContext
from megapar.errors import StorageError

LOCK = ".lock"
_LEFT_BEHIND = re.compile(r"\.(tmp|trash|latest|probe)-.*|\.abandoning\..*\.tmp")
_REPLACED = re.compile(r"\.old-(step_\d{8,})-.*")


@contextmanager
def exclusive(run_dir: Path, root: Path, ctx: ParallelContext) -> Iterator[None]:
    """Keep `run_dir` from other jobs, and sweep what killed ones left in `root`, its checkpoints. A collective.

    The kernel gives the lock up with the process that holds it, on whichever machine that was; so none is ever stale.
    Raises StorageError on every rank if the folder cannot be written, or names the process that holds the lock. Ranks
    wait for the sweep, which may take longer than launch.timeout_seconds.
    """

    def take() -> int | None:
        if not ctx.world.first:
            return None
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(run_dir / LOCK)
        sweep(root)
        return descriptor

    descriptor = on_all_ranks(take, ctx, StorageError, f"run folder {run_dir} not usable")
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 500).decode(errors="replace")
        os.close(descriptor)
        raise StorageError(f"{path} is held by another job ({holder}); end it, or choose another --run_dir") from None
    except OSError as error:  # some network file systems have no locks
        logging.getLogger(__name__).warning("%s: not locked (%s): run no second job in this folder", path, error)
    os.truncate(descriptor, 0)
    os.write(descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())
    return descriptor


class Ownership:
    """That a run folder is still the one whose lock this process holds. Only rank 0 asks."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / LOCK
        self._identity = self._look()

    def require(self) -> None:
        """Raise StorageError if the folder was deleted or replaced: another job may have taken the name meanwhile."""
        if self._look() != self._identity:
            raise StorageError(
                f"{self._path} is not the file that this run locked: the run folder was deleted or replaced while the "
                "run used it; start again with another --run_dir, or from a checkpoint elsewhere"
            )

    def _look(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino


def sweep(root: Path) -> None:
    """Complete or remove what killed jobs left.

    A checkpoint that was being replaced comes back, unless its successor is there.
    """
    complete_plan(root)
    for path in list(root.iterdir()) if root.is_dir() else ():
        replaced = _REPLACED.fullmatch(path.name)
        if replaced and not (root / replaced[1]).exists():
            path.rename(root / replaced[1])
        elif replaced or _LEFT_BEHIND.fullmatch(path.name):
            _remove(path)


def check(root: Path, needed: int, ctx: ParallelContext) -> None:
    """Raise StorageError on every rank unless `root` has `needed` bytes free and each rank can write there.

    A collective. Makes the folder.
    """

    def probe() -> None:
        path = root / f".probe-{ctx.world.rank:05d}"
        try:
            path.write_bytes(b"probe")
            path.unlink()
        except FileNotFoundError as error:
            raise StorageError(f"{path}: {error.strerror}; all ranks must see the same folder") from error

    doing = "checkpoints could not be saved"
    on_all_ranks(lambda: require_space(root, needed) if ctx.world.first else None, ctx, StorageError, doing)
    on_all_ranks(probe, ctx, StorageError, doing)


def require_space(root: Path, needed: int) -> None:
    """Make `root`. Raises StorageError if it has fewer than `needed` bytes free."""
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < needed:
        raise StorageError(
            f"{root} has {free:,} bytes free, the checkpoint needs {needed:,}: free some space, "
            "choose another --run_dir, or train without checkpoints (--checkpoint.every 0 --checkpoint.no-save_last)"
        )


@dataclass(frozen=True)
class Keep:
    """Which complete checkpoints stay: the newest `last`, 0 meaning all, and those of every `every`-th step."""

    last: int = 0
    every: int = 0


KEEP_ALL = Keep()


def prune(root: Path, step: int, keep: Keep) -> None:
    """Remove complete checkpoints that `keep` does not name, now that the one of `step` is complete.

    Neither it, nor later ones, which a run that went back has left, nor incomplete ones are touched or counted. One
    that cannot be removed is a warning: what is saved is saved.
    """
    if not keep.last:
        return
    newest = 0
    for folder in checkpoint_folders(root):
        found = step_of(folder)
        milestone = keep.every > 0 and found % keep.every == 0
        if found > step or (milestone and newest == keep.last) or not is_complete(folder):
            continue
        if newest < keep.last:
            newest += 1
            continue
        trash = root / f".trash-{folder.name}"
        try:
            folder.rename(trash)
            _remove(trash)
        except OSError as error:
            logging.getLogger(__name__).warning("old checkpoint %s not removed: %s", folder, error)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
