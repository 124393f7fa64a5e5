"""Arrays in files: NumPy's numbers at every place, and a line where the file no longer has them."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapar.base.errors import DataError, OutOfMemoryError
from megapar.data.file_array import DataFile, FileArray
from megapar.data.indexed import IndexedDataset, IndexedWriter

NUMBERS = np.arange(1000, 2000, dtype="<i4")


@pytest.fixture(scope="module")
def array(tmp_path_factory: pytest.TempPathFactory) -> FileArray:
    path = tmp_path_factory.mktemp("array") / "numbers"
    path.write_bytes(b"odd" + NUMBERS.tobytes() + b"behind")
    return FileArray(DataFile(path), NUMBERS.dtype, 3, len(NUMBERS))


BOUNDS = st.none() | st.integers(-1100, 1100)


@given(start=BOUNDS, stop=BOUNDS)
def test_slices_are_those_of_numpy(array: FileArray, start: int | None, stop: int | None) -> None:
    np.testing.assert_array_equal(array[start:stop], NUMBERS[start:stop])


def test_numbers_rows_and_blocks_are_those_of_numpy(array: FileArray) -> None:
    assert len(array) == 1000
    assert [array[at] for at in (0, 999, -1, -1000)] == [1000, 1999, 1999, 1000]
    for beyond in (1000, -1001):
        with pytest.raises(IndexError):
            array[beyond]
    starts = [0, 977, 400, 400]
    np.testing.assert_array_equal(array.rows(starts, 23), [NUMBERS[start : start + 23] for start in starts])
    assert array.rows([], 23).shape == (0, 23)
    assert array.rows([5], 0).shape == (1, 0)
    np.testing.assert_array_equal(np.asarray(array), NUMBERS)
    assert [block.tolist() for block in array.blocks(300)] == [
        NUMBERS[i : i + 300].tolist() for i in range(0, 1000, 300)
    ]
    array[0:3][:] = 7
    assert array[0] == 1000, "what was read is the caller's own"


def test_threads_read_one_file(array: FileArray) -> None:
    wrong = []

    def read(first: int) -> None:
        wrong.extend(at for at in range(first, first + 100) if array[at] != 1000 + at)

    threads = [threading.Thread(target=read, args=(first,)) for first in range(0, 1000, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


READS: dict[str, tuple[str, Callable[[IndexedDataset], object]]] = {
    "document": ("bin", lambda pair: pair.document(89)),
    "pieces": ("bin", lambda pair: pair.read_pieces(np.array([0, 8000]), 100)),
    "all tokens": ("bin", lambda pair: np.asarray(pair.tokens)),
    "place of a token": ("idx", lambda pair: pair.locate(8999)),
    "starts of documents": ("idx", lambda pair: pair.starts_between(8000, 8999)),
    "boundaries": ("idx", lambda pair: pair.document_indices[:]),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_behind_the_end_of_a_file_that_was_cut_is_a_line(name: str, tmp_path: Path) -> None:
    """Fault data-cut-while-read: no check comes between, so this is a cut in the middle of a read."""
    suffix, read = READS[name]
    with IndexedWriter(tmp_path / "pair", np.dtype("<u2")) as writer:
        writer.add_documents(np.arange(9000), [100] * 90)
    pair = IndexedDataset(tmp_path / "pair")
    read(pair)
    path = tmp_path / f"pair.{suffix}"
    size = path.stat().st_size
    left = size // 4
    os.truncate(path, left)
    with pytest.raises(DataError) as caught:
        read(pair)
    assert str(caught.value) == (
        f"{path} has {left:,} bytes, and had {size:,} when it was opened: it was cut short or written anew while it "
        "was read; put it back and start again"
    )


def test_a_pair_that_was_renamed_over_is_read_on(tmp_path: Path) -> None:
    for name, value in (("pair", 1), ("other", 2)):
        with IndexedWriter(tmp_path / name, np.dtype("<u2")) as writer:
            writer.add_document(np.full(5, value))
    pair = IndexedDataset(tmp_path / "pair")
    for suffix in ("idx", "bin"):
        (tmp_path / f"other.{suffix}").replace(tmp_path / f"pair.{suffix}")
    assert pair.read_pieces(np.array([0]), 5).tolist() == [[1] * 5]


def test_a_file_is_closed_with_its_last_array(array: FileArray) -> None:
    before = len(os.listdir("/proc/self/fd"))
    again = FileArray(DataFile(array.file.path), np.dtype("u1"))
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del again
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_cannot_be_opened_or_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none: No such file"):
        DataFile(tmp_path / "none")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DataError, match="fifo: is a FIFO, not a regular file"):
        DataFile(tmp_path / "fifo")


def test_too_many_open_files_are_named(array: FileArray, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", fails)
    with pytest.raises(OutOfMemoryError, match=r"may not open more than .* files"):
        DataFile(array.file.path)


def test_an_error_of_the_disk_is_named(array: FileArray, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(DataError, match="numbers: byte 43: Input/output error"):
        array[10]


def test_a_read_in_parts_is_whole(array: FileArray, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may return fewer bytes than were asked for."""
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, into, at: whole(descriptor, [into[0][:7]], at))
    np.testing.assert_array_equal(array[5:50], NUMBERS[5:50])
