"""The .idx file of Megatron's .bin/.idx pair, which is checked when it is opened.

`PREFIX.idx` is little endian. It holds, in this order: a header of 34 bytes (magic, version, dtype code, number of
sequences S, number of document boundaries D), int32 lengths[S] in tokens, int64 pointers[S] in bytes, and int64
document_indices[D] in sequences. The first document index is 0 and the last is S. A document is one or more sequences.
"""

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megapar.base.errors import DataError
from megapar.data.file_array import DataFile, FileArray

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
_DTYPE_CODES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
TOKEN_DTYPES = {code: np.dtype(f"<{name}") for code, name in _DTYPE_CODES.items() if name[0] != "f"}
_BLOCK = 1 << 20  # sequences checked at a time, so that memory is the same for any file


def sequence_pointers(lengths: NDArray[np.int32], itemsize: int) -> NDArray[np.int64]:
    """The first byte of each sequence, int64: the exclusive sum of lengths * itemsize."""
    # int32 would overflow in a file above 2 GiB.
    sizes = lengths.astype(np.int64) * itemsize
    return np.cumsum(sizes) - sizes


class TokenIndex:
    """A checked index. Its numbers are read when they are used.

    `lengths`, `pointers` and `document_indices` are as above. `token_bytes` is the right size of the .bin in bytes.
    Raises DataError if the file is damaged.
    """

    def __init__(self, path: Path):
        self.path = path
        self.file = DataFile(path)
        self.dtype, sequences, boundaries = self._read_header()
        pointers = HEADER.size + 4 * sequences
        self.lengths = FileArray(self.file, np.dtype("<i4"), HEADER.size, sequences)
        self.pointers = FileArray(self.file, np.dtype("<i8"), pointers, sequences)
        self.document_indices = FileArray(self.file, np.dtype("<i8"), pointers + 8 * sequences, boundaries)
        self._check_documents()
        self.token_bytes = self._check_pointers()

    def _read_header(self) -> tuple[np.dtype, int, int]:
        """Return token dtype, number of sequences, and number of document boundaries.

        Raises DataError unless the header fits the size of the file.
        """
        path = self.path
        size = self.file.size
        if size < HEADER.size:
            raise DataError(f"{path} has {size} bytes, its header alone needs {HEADER.size}: it is truncated")
        header = bytearray(HEADER.size)
        self.file.read(memoryview(header), 0)
        magic, version, code, sequences, documents = HEADER.unpack(header)
        if magic != MAGIC:
            raise DataError(f"{path}: offset 0: found {magic!r}, expected {MAGIC!r}: this is no token index")
        if version != VERSION:
            raise DataError(f"{path}: offset 9: index version {version}, expected {VERSION}")
        if code not in TOKEN_DTYPES:
            known = ", ".join(f"{code} ({dtype.name})" for code, dtype in TOKEN_DTYPES.items())
            raise DataError(f"{path}: offset 17: dtype code {code} is no integer type, expected one of {known}")
        needed = HEADER.size + 12 * sequences + 8 * documents
        if sequences and size == needed + sequences:
            raise DataError(f"{path} has a mode for each sequence: multimodal data is not supported, only text")
        if size != needed:
            raise DataError(
                f"{path} has {size} bytes, its header (offset 18: {sequences} sequences, {documents} document "
                f"boundaries) needs {needed}: it is truncated or damaged"
            )
        return TOKEN_DTYPES[code], sequences, documents

    def _check_documents(self) -> None:
        """Raise DataError unless documents begin with the first sequence, end with the last, and never run back."""
        sequences = len(self.lengths)
        boundaries = self.document_indices
        offset = HEADER.size + 12 * sequences
        if not len(boundaries) or boundaries[0] != 0 or boundaries[-1] != sequences:
            span = f"{boundaries[0]} to {boundaries[-1]}" if len(boundaries) else "none"
            raise DataError(
                f"{self.path}: offset {offset}: documents must span sequences 0 to {sequences}, and span {span}: "
                "some programs write such an index when they merge files; merge them again with "
                "megapar preprocess merge"
            )
        for first in range(0, len(boundaries) - 1, _BLOCK):
            falls = np.diff(boundaries[first : first + _BLOCK + 1]) < 0  # blocks overlap by one, so that none is missed
            if falls.any():
                at = first + int(falls.argmax())
                raise DataError(
                    f"{self.path}: offset {offset + 8 * (at + 1)}: document {at} starts at sequence "
                    f"{boundaries[at]} and ends at {boundaries[at + 1]}: the index is damaged"
                )

    def _check_pointers(self) -> int:
        """The right size of the .bin in bytes.

        Raises DataError unless each pointer is the sum of the lengths before it.
        """
        total = 0
        sequences = len(self.lengths)
        for first in range(0, sequences, _BLOCK):
            block = slice(first, first + _BLOCK)
            lengths, pointers = self.lengths[block], self.pointers[block]
            expected = total + sequence_pointers(lengths, self.dtype.itemsize)
            wrong = (lengths < 0) | (pointers != expected)
            if wrong.any():
                at = int(wrong.argmax())
                bad = first + at
                raise DataError(
                    f"{self.path}: offset {HEADER.size + 4 * sequences + 8 * bad}: sequence {bad} (length "
                    f"{lengths[at]}) points to byte {pointers[at]}, expected {expected[at]} from the "
                    "lengths before it: the index is damaged"
                )
            total = int(expected[-1]) + int(lengths[-1]) * self.dtype.itemsize
        return total
