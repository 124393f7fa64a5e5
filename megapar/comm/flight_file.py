"""The flight log of a rank started by torchrun or Slurm, as a file for the other ranks of its host."""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megapar.base.errors import StorageError
from megapar.comm.flight import BYTES
from megapar.system.own_folder import OwnFolder, opened, shared_places, sweep

_PREFIX = "megapar-flight-"
_LOG = "log"


class FlightFile:
    """A rank's flight log as a file. Ranks of this host and user find it by the process number, even after its end.

    The file lies in a folder of its own in the first of `places` with room, /dev/shm or a temporary folder by default.
    The folders of ended ranks are removed here, when a rank starts later. Raises StorageError if no place has room.
    """

    def __init__(self, *places: Path):
        self._places = places or shared_places()
        for parent in self._places:
            sweep(parent, _PREFIX)
        self._folder, self.memory = self._make()

    def _make(self) -> tuple[OwnFolder, mmap.mmap]:
        refused = []
        for parent in self._places:
            try:
                return _make_in(parent)
            except OSError as error:
                refused.append(f"{parent}: {error.strerror}")
        raise StorageError(f"no room for a rank's flight log of {BYTES:,} bytes ({'; '.join(refused)}): free some")

    def peer(self, pid: int) -> mmap.mmap | None:
        """The log of process `pid` on this host, None if there is none."""
        with self._folder_of(pid) as folder:
            if folder is None:
                return None
            try:
                descriptor = os.open(_LOG, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
            except FileNotFoundError:  # it is still being made
                return None
        try:
            return mmap.mmap(descriptor, BYTES, access=mmap.ACCESS_READ)
        except ValueError:  # it is still empty
            return None
        finally:
            os.close(descriptor)

    def claim(self, pid: int, what: str = "") -> bool:
        """Whether this call is the first one on this host for `what` in a job.

        `what` is a short text. `pid` is the process of the job's lowest rank on this host. Ranks of one host use this
        to decide which of them reports an error.
        """
        with self._folder_of(pid) as folder:
            if folder is None:  # told twice is better than not at all
                return True
            try:
                # O_EXCL lets exactly one process create the file.
                os.close(os.open(f"{what}.told", os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder))
            except FileExistsError:
                return False
            except OSError:  # no room, or the folder has just been removed
                return True
        return True

    def remove(self) -> None:
        """Remove the file of this process. The log of a rank is not needed after its success."""
        self._folder.remove()

    @contextmanager
    def _folder_of(self, pid: int) -> Iterator[int | None]:
        """A descriptor of the folder of process `pid`, None if this user has none."""
        for parent in self._places:
            for path in parent.glob(f"{_PREFIX}{pid}-*"):
                with opened(path) as descriptor:
                    if descriptor is not None:
                        yield descriptor
                        return
        yield None


def _make_in(parent: Path) -> tuple[OwnFolder, mmap.mmap]:
    folder = OwnFolder(parent, f"{_PREFIX}{os.getpid()}-")
    try:
        descriptor = os.open(_LOG, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder.descriptor)
        try:
            # Reserved now: a place that is full is an error here, and would be a SIGBUS at the first write.
            os.posix_fallocate(descriptor, 0, BYTES)
            return folder, mmap.mmap(descriptor, BYTES)
        finally:
            os.close(descriptor)
    except BaseException:
        folder.remove()
        raise
