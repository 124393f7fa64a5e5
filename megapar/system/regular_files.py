"""Opens and reads regular files and links to them, and refuses all else: anybody may have put it there.

`open` waits for ever at a FIFO without a writer, and /dev/zero is read until memory ends. This module imports nothing
of ours, so every other one can use it.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

SMALL = 1 << 26  # bytes; descriptions, options and the like are much smaller
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: str | Path, flags: int = os.O_RDONLY, *, folder: int | None = None) -> int:
    """Open a regular file, or a link to one, and return its descriptor. Waits for nobody.

    `flags` are those of os.open. With os.O_NOFOLLOW, links are refused. A relative `path`
    starts from the folder of descriptor `folder`. Raises OSError; its strerror says what else `path` is.
    """
    # Looked at before it is opened, because opening a device may do something, such as rewind a tape.
    try:
        kind = os.stat(path, dir_fd=folder, follow_symlinks=not flags & os.O_NOFOLLOW).st_mode
    except FileNotFoundError:
        kind = stat.S_IFREG  # os.open makes it or raises
    _refuse_others(path, kind)
    # O_NONBLOCK: a FIFO may have taken the file's place meanwhile.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder)
    try:
        _refuse_others(path, os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_new(path: Path) -> BinaryIO:
    """Open a new file for writing, in place of a file or a link under this name. No link is followed.

    Raises OSError, also if somebody puts another file there at that moment.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "wb")


def read_regular(path: str | Path, max_bytes: int | None = SMALL, flags: int = os.O_RDONLY) -> bytes:
    """The bytes of a regular file. Raises OSError, also for more than `max_bytes`; None: any size."""
    with open(open_regular(path, flags), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if max_bytes is not None and size > max_bytes:
            raise OSError(errno.EFBIG, f"has {size:,} bytes, and such a file has {max_bytes:,} at most", str(path))
        return file.read()


def _refuse_others(path: str | Path, mode: int) -> None:
    """Raise OSError unless `mode` means a regular file."""
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, "is a link, and is not followed", str(path))
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"is {kind}, not a regular file", str(path))
