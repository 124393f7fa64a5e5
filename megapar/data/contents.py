"""Compares the contents of files of data, at the same cost for every size."""

import hashlib
from pathlib import Path

from megapar.data.file_array import DataFile

# A file up to this size is read whole, a larger one in pieces: corpora have terabytes, and every start reads this much
# of each of their files.
WHOLE = 1 << 22  # bytes
_PIECES = 128  # 1 MiB together
_PIECE = 1 << 13  # bytes


def content_hash(path: str | Path) -> str:
    """A hash of a file's size and bytes: of all bytes up to WHOLE, else of evenly spaced pieces.

    Raises DataError if it cannot be read whole, or is no regular file.
    """
    file = DataFile(Path(path))
    starts = [0]
    length = file.size
    if file.size > WHOLE:
        starts = [(file.size - _PIECE) * number // (_PIECES - 1) for number in range(_PIECES)]
        length = _PIECE
    # All pieces are asked for before the first is waited for, so that the disk reads them side by side.
    for start in starts:
        file.will_need(start, length)
    digest = hashlib.blake2b(str(file.size).encode(), digest_size=8)
    piece = bytearray(length)
    for start in starts:
        file.read(memoryview(piece), start)
        digest.update(piece)
    return digest.hexdigest()
