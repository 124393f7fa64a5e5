"""Folders for one user's processes in a place open to all users, such as /dev/shm.

There anybody may put a FIFO, a link, a device or a folder under any name. So a process makes a folder under a random
name, with mode 0700: other users see its name, and nothing else. The process holds a lock on the folder as long as it
lives. Whoever looks for such a folder takes only folders of the same user, closed to others. Inside, files can then be
opened by their names.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# O_DIRECTORY refuses a FIFO or a device without opening it, so this never waits. O_NOFOLLOW refuses a link.
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def shared_places() -> tuple[Path, ...]:
    """Parents of such folders on this host, the best first."""
    # /dev/shm is memory, but it may be missing, full or closed. A temporary folder may be on a disk, but it works.
    places = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    return tuple(parent for parent in places if os.access(parent, os.W_OK))


class OwnFolder:
    """A new folder in `parent`, called `prefix` and random letters. Raises OSError if it cannot be made."""

    def __init__(self, parent: Path, prefix: str):
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))  # mode 0700, and it never takes what is there
            with suppress(FileNotFoundError):
                self.descriptor = os.open(self.path, _OPEN_FOLDER)
                fcntl.flock(self.descriptor, fcntl.LOCK_EX)
                if os.fstat(self.descriptor).st_nlink:
                    return
                os.close(self.descriptor)
            # Another process has swept the folder away before it was locked: make another one.

    def remove(self) -> None:
        """Remove the folder and all files in it. What the system refuses to remove now is left to `sweep`."""
        # At the limit of open files the folder cannot even be listed. That must not hide the error that ends a run.
        with suppress(OSError):
            _empty(self.descriptor)
            self.path.rmdir()
        os.close(self.descriptor)


def make_own(path: Path) -> bool:
    """Make the folder `path`, closed to others, unless it is there. Whether it is this user's and closed to others.

    A folder of this user that others may only read is closed: nobody else has put anything there. Raises OSError if the
    folder cannot be made.
    """
    with suppress(FileExistsError):
        try:
            path.mkdir(0o700)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(0o700)
    with suppress(OSError):  # another user's
        descriptor = os.open(path, _OPEN_FOLDER)
        try:
            status = os.fstat(descriptor)
            if status.st_uid == os.geteuid() and not status.st_mode & 0o022:
                os.fchmod(descriptor, status.st_mode & 0o700)
        finally:
            os.close(descriptor)
    with opened(path) as own:
        return own is not None


@contextmanager
def opened(path: Path) -> Iterator[int | None]:
    """Yield a descriptor of the folder at `path`, None unless it belongs to this user and is closed to others."""
    try:
        descriptor = os.open(path, _OPEN_FOLDER)
    except OSError:  # it has gone, is no folder, or belongs to another user
        yield None
        return
    try:
        status = os.fstat(descriptor)
        is_own = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        yield descriptor if is_own else None
    finally:
        os.close(descriptor)


def sweep(parent: Path, prefix: str) -> None:
    """Remove this user's folders in `parent` after their processes have ended."""
    for path in parent.glob(f"{prefix}*"):
        with opened(path) as descriptor:
            if descriptor is None:
                continue
            with suppress(OSError):  # its process lives, or another one sweeps it too
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _empty(descriptor)
                path.rmdir()


def _empty(descriptor: int) -> None:
    for name in os.listdir(descriptor):
        with suppress(FileNotFoundError):
            try:
                os.unlink(name, dir_fd=descriptor)
            except IsADirectoryError:
                shutil.rmtree(name, dir_fd=descriptor)
