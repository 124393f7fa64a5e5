"""The folder of a run's checkpoints.

It belongs to one job at a time, and it is checked before the first step. Rank 0 removes what killed jobs and retention
leave to be removed.
"""

import fcntl
import json
import logging
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megapar.base.errors import StorageError, storing
from megapar.checkpoint.format import checkpoint_folders, is_complete, step_of
from megapar.checkpoint.lineage import complete_plan
from megapar.declare.agreement import on_all_ranks
from megapar.declare.context import ParallelContext
from megapar.system.atomic_files import replace_file
from megapar.system.regular_files import open_new, open_regular, read_regular

LOCK = ".lock"
OWNER = ".of-run"  # in a folder of checkpoints behind a link: the inode of the run folder that it belongs to
_LEFT_BEHIND = re.compile(r"\.(tmp|trash|latest|probe)-.*|\.abandoning\..*\.tmp")
_REPLACED = re.compile(r"\.old-(step_\d{8,})-.*")


@contextmanager
def exclusive(run_dir: Path, root: Path, ctx: ParallelContext) -> Iterator[None]:
    """Lock `run_dir` against other jobs for the block, and sweep `root`, its folder of checkpoints. A collective.

    Raises StorageError on every rank if the folder cannot be written, or if another job holds the lock. The message
    then names the other process. Ranks wait for the sweep, even longer than launch.timeout_seconds.
    """

    with ExitStack() as held:  # it closes the lock's file, also if the sweep fails

        def take() -> None:
            if not ctx.world.first:
                return
            run_dir.mkdir(parents=True, exist_ok=True)
            path = run_dir / LOCK
            with storing(path):
                descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            held.callback(os.close, descriptor)
            _lock(path, descriptor)
            _claim(root)
            if is_own(root):
                sweep(root)
            elif root.is_dir():
                text = (
                    "%s: a link to a folder that is not known to be of this run: nothing in it is removed; if it is, "
                )
                text += "say so: echo %d > %s"
                logging.getLogger(__name__).warning(text, root, run_dir.stat().st_ino, root / OWNER)

        on_all_ranks(take, ctx, StorageError, f"run folder {run_dir} not usable")
        yield


def _lock(path: Path, descriptor: int) -> None:
    """Lock the open file `path`, and write host and process to it.

    Raises StorageError if another job holds the lock.
    """
    # A lock of the kernel ends with the process that holds it, on whichever machine that is. So no lock is ever stale.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 500).decode(errors="replace")
        raise StorageError(f"{path} is held by another job ({holder}); end it, or choose another --run_dir") from None
    except OSError as error:  # some network file systems have no locks
        logging.getLogger(__name__).warning("%s: not locked (%s): run no second job in this folder", path, error)
    os.truncate(descriptor, 0)
    os.write(descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())


class Ownership:
    """Checks whether the run folder is still the one locked by this process. Only rank 0 uses it."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / LOCK
        self._identity = self._look()

    def require(self) -> None:
        """Raise StorageError if the folder was deleted or replaced. Another job may use its name by now."""
        if self._look() != self._identity:
            raise StorageError(
                f"{self._path} is not the file that this run locked: the run folder was deleted or replaced while the "
                "run used it; start again with another --run_dir, or from a checkpoint elsewhere"
            )

    def is_replaced(self) -> bool:
        """Whether another lock file has the name. A folder that was deleted, or cannot be seen, may come back."""
        with suppress(OSError):
            return self._look() not in (self._identity, None)
        return False

    def _look(self) -> tuple[int, int] | None:
        """The device and inode of the lock file, its identity, or None if it is not there."""
        try:
            status = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino


def sweep(root: Path) -> None:
    """Complete or remove what killed jobs left in `root`.

    A checkpoint that was being replaced gets its name back, unless the new one has it.
    """
    complete_plan(root)
    if not root.is_dir():
        return
    for path in list(root.iterdir()):  # a list, since the loop renames and removes entries of the folder
        replaced = _REPLACED.fullmatch(path.name)
        if replaced and not (root / replaced[1]).exists():
            path.rename(root / replaced[1])
        elif replaced or _LEFT_BEHIND.fullmatch(path.name):
            _remove(path)


def is_own(root: Path) -> bool:
    """Whether a folder of checkpoints is its run's alone, so that what is left over there may be removed.

    Whoever prepared the run folder may have made `root` a link to any folder, also to that of another run. What the
    folder itself says of its run is not theirs.
    """
    if not root.is_symlink():
        return True
    with suppress(OSError):
        return read_regular(root / OWNER, 64, os.O_RDONLY | os.O_NOFOLLOW).split() == [_identity(root)]
    return False


def _claim(root: Path) -> None:
    """Note in the folder behind the link `root` that it belongs to this run folder, if there is nothing in it."""
    if root.is_symlink() and root.is_dir() and not any(root.iterdir()):
        replace_file(root / OWNER, _identity(root) + b"\n")


def _identity(root: Path) -> bytes:
    # It survives a rename of the run folder, and a remount. A copy has another one.
    return str(root.parent.stat().st_ino).encode()


def check(root: Path, needed: int, ctx: ParallelContext) -> None:
    """Raise StorageError on every rank unless `root` has `needed` bytes free and each rank can write there.

    A collective. It makes the folder if it is not there.
    """

    def probe() -> None:
        path = root / f".probe-{ctx.world.rank:05d}-{uuid.uuid4().hex[:8]}"
        try:
            with open_new(path) as file:
                file.write(b"probe")
            path.unlink()
        except FileNotFoundError as error:
            raise StorageError(f"{path}: {error.strerror}; all ranks must see the same folder") from error

    def make_and_measure() -> None:
        if ctx.world.first:
            require_space(root, needed)

    # Rank 0 makes the folder first: a rank that then finds none sees another disk.
    doing = "checkpoints could not be saved"
    on_all_ranks(make_and_measure, ctx, StorageError, doing)
    on_all_ranks(probe, ctx, StorageError, doing)


def require_space(root: Path, needed: int) -> None:
    """Make the folder `root` and raise StorageError if it has fewer than `needed` bytes free."""
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < needed:
        raise StorageError(
            f"{root} has {free:,} bytes free, the checkpoint needs {needed:,}: free some space, "
            "choose another --run_dir, or train without checkpoints (--checkpoint.every 0 --checkpoint.no-save_last)"
        )


@dataclass(frozen=True)
class Keep:
    """The complete checkpoints to keep: the newest `last`, and those of steps divisible by `every`.

    `last` of 0 keeps all. `every` of 0 keeps no others.
    """

    last: int = 0
    every: int = 0


KEEP_ALL = Keep()


def prune(root: Path, step: int, keep: Keep) -> None:
    """Remove the complete checkpoints not named by `keep`, once the one of `step` is complete.

    Incomplete checkpoints are neither removed nor counted. Nor are those of later steps, left over from before a run
    went back.
    A failure to remove a checkpoint is only a warning, because the new one is saved.
    """
    if not keep.last or not is_own(root):
        return
    kept = 0  # newest checkpoints that stay because of `keep.last`
    for folder in checkpoint_folders(root):
        folder_step = step_of(folder)
        is_milestone = keep.every > 0 and folder_step % keep.every == 0
        # `is_complete` reads the disk, so it comes last.
        if folder_step > step or (is_milestone and kept == keep.last) or not is_complete(folder):
            continue
        if kept < keep.last:
            kept += 1
            continue
        # The rename first: a removal that is interrupted must not leave half a checkpoint under its name.
        trash = root / f".trash-{folder.name}"
        try:
            folder.rename(trash)
            _remove(trash)
        except OSError as error:
            logging.getLogger(__name__).warning("old checkpoint %s not removed: %s", folder, error)


def remove(path: Path) -> None:
    """Remove a checkpoint of a faster tier. A failure is a warning."""
    # The rename first: a removal that is interrupted must not leave half a checkpoint under its name.
    trash = path.with_name(f".trash-{path.name}-{os.getpid()}")
    try:
        path.rename(trash)
        _remove(trash)
    except OSError as error:
        logging.getLogger(__name__).warning("step %d: %s not removed: %s", step_of(path), path, error)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
