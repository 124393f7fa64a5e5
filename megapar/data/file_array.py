"""Arrays in files, read where they are asked for and never mapped into memory.

A read of a memory map behind the end of a file that was cut short ends the process with SIGBUS, and so does an error of
the disk. Here both are a DataError. A thread that waits for a page of a map also keeps Python's lock meanwhile; one
that waits in `read` lets the training thread go on.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from megapar.base.errors import DataError, reason_of
from megapar.system import limits
from megapar.system.regular_files import open_regular


class DataFile:
    """A file of data that is open for reading. `size` is its number of bytes when it was opened.

    A file that later takes its name changes nothing: the one that was opened is read on.
    Raises DataError if it is missing, or no regular file, and OutOfMemoryError if no more files can be opened.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with limits.named():
                self._descriptor = open_regular(path)
        except OSError as error:
            raise DataError(f"{path}: {reason_of(error)}") from error
        self.size = os.fstat(self._descriptor).st_size
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, into: memoryview, at: int) -> None:
        """Fill the bytes `into` from byte `at` of the file on. Raises DataError if it ends before, or on an error."""
        while into:
            try:
                count = os.preadv(self._descriptor, [into], at)
            except OSError as error:
                raise DataError(f"{self.path}: byte {at}: {reason_of(error)}") from error
            if not count:
                raise self._changed()
            into = into[count:]
            at += count

    def will_need(self, at: int, count: int) -> None:
        """Ask the system to fetch `count` bytes from `at` on, without waiting for them."""
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(self._descriptor, at, count, os.POSIX_FADV_WILLNEED)

    def read_anywhere(self) -> None:
        """Tell the system that reads lie anywhere. Otherwise it would read ahead of each, megabytes at times."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def require_whole(self) -> None:
        """Raise DataError if the file has another size than when it was opened."""
        if os.fstat(self._descriptor).st_size != self.size:
            raise self._changed()

    def _changed(self) -> DataError:
        now = os.fstat(self._descriptor).st_size
        return DataError(
            f"{self.path} has {now:,} bytes, and had {self.size:,} when it was opened: it was cut short or written "
            "anew while it was read; put it back and start again"
        )


class FileArray:
    """`count` numbers of one dtype from byte `offset` of a file on, by default all of them.

    array[i] is a number, array[a:b] a NumPy array of its own memory, np.asarray(array) all. Raises DataError when the
    file cannot be read.
    """

    def __init__(self, file: DataFile, dtype: np.dtype, offset: int = 0, count: int | None = None):
        self.file = file
        self.dtype = dtype
        self.offset = offset
        self._count = (file.size - offset) // dtype.itemsize if count is None else count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> NDArray[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._count)
            assert step == 1, "numbers are read in a row"
            return self._read(start, max(stop - start, 0))
        at = range(self._count)[index]  # IndexError where there is no such number
        return self._read(at, 1)[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def blocks(self, count: int) -> Iterator[NDArray[Any]]:
        """All numbers in a row, `count` at a time."""
        for first in range(0, len(self), count):
            yield self[first : first + count]

    def rows(self, starts: Sequence[int], length: int) -> NDArray[Any]:
        """The numbers [len(starts), length] from each position in `starts` on."""
        self.file.read_anywhere()
        itemsize = self.dtype.itemsize
        # All are asked for before the first is waited for, so that the disk reads them side by side.
        for start in starts:
            self.file.will_need(self.offset + start * itemsize, length * itemsize)
        found = np.empty((len(starts), length), self.dtype)
        for row, start in zip(found.view(np.uint8), starts, strict=True):
            self.file.read(row.data, self.offset + start * itemsize)
        return found

    def _read(self, start: int, count: int) -> NDArray[Any]:
        found = np.empty(count, self.dtype)
        self.file.read(found.view(np.uint8).data, self.offset + start * self.dtype.itemsize)
        return found
