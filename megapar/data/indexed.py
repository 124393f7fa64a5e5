"""Tokens on disk: Megatron's .bin/.idx pair. It is checked whenever it is opened, and read when it is used.

`PREFIX.bin` holds the tokens of all sequences and nothing else. `PREFIX.idx` says where sequences and documents begin
(`megapar.data.index_format`).
"""

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megapar.base.errors import DataError, storing
from megapar.data.contents import content_hash
from megapar.data.file_array import DataFile, FileArray
from megapar.data.index_format import HEADER, MAGIC, TOKEN_DTYPES, VERSION, TokenIndex, sequence_pointers
from megapar.system.regular_files import open_new

_FEW = 64  # documents of a sample that are looked up at a time
_BLOCK = 1 << 20  # tokens copied at a time, so that memory is the same for any file


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype of tokens by Megatron's rule: 2 bytes a token below 65,500 ids, else 4."""
    return np.dtype("<u2" if vocab_size < 65_500 else "<i4")


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _close(file: BinaryIO) -> None:
    """Flush a file to the disk and close it. Otherwise a rename could reach the disk before the bytes do."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _hint_of_prefix(prefix: str) -> str:
    """Return what to give in place of a prefix without files."""
    name = prefix.removesuffix(".bin").removesuffix(".idx")
    if prefix.endswith(".npy"):
        return (
            "a .npy file, such as OLMo's and dolma's, holds ids without an index of documents; write a pair of it with "
            "megapar.data.indexed.IndexedWriter, or of the text with megapar preprocess"
        )
    if name != prefix:
        return f"give {name}, without the suffix"
    return "name the part of a .bin/.idx pair before the dot"


class IndexedDataset:
    """A .bin/.idx pair. Both files stay open, and their numbers are read when they are used.

    `tokens` is the whole .bin as one flat array. `lengths`, `pointers` and `document_indices` are the index.
    Raises DataError if a file is missing or damaged, or if the two do not fit each other.
    """

    def __init__(self, prefix: str | Path):
        self.bin_path = Path(f"{prefix}.bin")
        self.idx_path = Path(f"{prefix}.idx")
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise DataError(f"{path} is not a file: {_hint_of_prefix(str(prefix))}")
        index = TokenIndex(self.idx_path)
        self._index = index.file
        self.dtype = index.dtype
        self.lengths = index.lengths
        self.pointers = index.pointers
        self.document_indices = index.document_indices
        self._tokens = DataFile(self.bin_path)
        if self._tokens.size != index.token_bytes:
            raise DataError(
                f"{self.bin_path} has {self._tokens.size} bytes, {self.idx_path} needs {index.token_bytes}: "
                "it is truncated or the two are not a pair; preprocess the text again"
            )
        self.tokens = FileArray(self._tokens, self.dtype)

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.document_indices) - 1

    def document(self, i: int) -> NDArray[np.integer]:
        """The tokens of document `i`."""
        start, stop = self.document_starts(i, i + 1).tolist()
        return self.tokens[start:stop]

    def read_pieces(self, starts: NDArray[np.int64], length: int) -> NDArray[np.integer]:
        """The tokens [len(starts), length] from each position in `starts` on, in the dtype of the file.

        Raises DataError if the files have another size than when they were opened.
        """
        found = self.tokens.rows(starts.tolist(), length)
        # A file that was written anew in its place may be as long at some moment as it was.
        for file in (self._index, self._tokens):
            file.require_whole()
        return found

    def locate(self, token: int) -> tuple[int, int]:
        """(document, offset within it) of the position `token` in the file."""
        sequence = bisect_right(self.pointers, token * self.dtype.itemsize) - 1
        document = bisect_right(self.document_indices, sequence) - 1
        return document, token - self.document_start(document)

    def document_start(self, i: int) -> int:
        """The position in `tokens` of the first token of document `i`, or len(tokens) for i = len(self)."""
        return int(self.document_starts(i, i)[0])

    def document_starts(self, first: int, last: int) -> NDArray[np.int64]:
        """`document_start` of each document from `first` to `last`, both included."""
        sequences = self.document_indices[first : last + 1]
        base = int(sequences[0])
        starts = self.pointers[base : int(sequences[-1]) + 1] // self.dtype.itemsize
        # Behind the last sequence nothing points.
        return np.append(starts, len(self.tokens))[sequences - base]

    def starts_between(self, first: int, last: int) -> list[int]:
        """The positions p in the file, first < p < last, of the starts of documents, each once."""
        document = self.locate(first)[0] + 1
        starts: list[int] = []
        while document <= len(self):
            found = self.document_starts(document, min(document + _FEW, len(self)))
            inside = found[found < last]
            starts += inside.tolist()
            if len(inside) < len(found):
                break
            document += len(found)
        return list(dict.fromkeys(starts))  # a document without tokens starts where the next one does

    def fingerprints(self) -> dict[str, str]:
        """A hash of the contents of each file, by its path (see `content_hash`)."""
        return {str(path): content_hash(path) for path in (self.idx_path, self.bin_path)}


class IndexedWriter:
    """Writes documents to a .bin/.idx pair: `with IndexedWriter(prefix, dtype) as writer: writer.add_document(ids)`.

    The files get their names when the block ends without an error. Otherwise they do not appear.
    Raises DataError for a token outside `dtype`, and StorageError if the bytes cannot be written.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype):
        self.bin_path = Path(f"{prefix}.bin")
        self.idx_path = Path(f"{prefix}.idx")
        self.dtype = np.dtype(dtype)
        self.num_sequences = 0
        self._lengths: list[NDArray[np.int32]] = []
        self._document_ends: list[NDArray[np.int64]] = []

    def __enter__(self) -> "IndexedWriter":
        with storing(self.bin_path):
            self.bin_path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_new(_partial(self.bin_path))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            with storing(self.bin_path):
                _close(self._file)
            if error is None:
                self._finish()
        finally:
            for path in (self.bin_path, self.idx_path):
                _partial(path).unlink(missing_ok=True)

    def add_document(self, tokens: ArrayLike) -> None:
        """Append a document of one sequence. `tokens` are 1-D integers."""
        tokens = np.asarray(tokens)
        self.add_documents(tokens, [len(tokens)])

    def add_documents(self, tokens: NDArray[np.integer], lengths: Sequence[int] | NDArray[np.integer]) -> None:
        """Append documents of one sequence each. `tokens` are those of all documents in a row, `lengths` their counts.

        Raises ValueError if the lengths do not sum to the number of tokens.
        """
        counts = np.asarray(lengths, np.int64)
        if counts.sum() != len(tokens):
            raise ValueError(f"lengths sum to {counts.sum()}, but there are {len(tokens)} tokens")
        self._check(tokens, counts)
        with storing(self.bin_path):
            self._file.write(tokens.astype(self.dtype, copy=False).tobytes())
        self.append_index(counts.astype("<i4"), np.arange(1, len(counts) + 1))

    def extend(self, dataset: IndexedDataset, first: int = 0, last: int | None = None) -> None:
        """Append documents [first, last) of another pair of the same dtype. The default is all of them."""
        if dataset.dtype != self.dtype:
            raise DataError(
                f"{dataset.bin_path} holds {dataset.dtype.name} tokens, {self.bin_path} {self.dtype.name}: "
                "merge files of one tokenizer"
            )
        if last is None:
            last = len(dataset)
        ends = dataset.document_indices[first : last + 1]
        start = dataset.document_start(first)
        stop = dataset.document_start(first + len(ends) - 1)
        with storing(self.bin_path):
            for at in range(start, stop, _BLOCK):
                self._file.write(dataset.tokens[at : min(at + _BLOCK, stop)].tobytes())
        self.append_index(dataset.lengths[int(ends[0]) : int(ends[-1])], ends[1:] - ends[0])

    def append_index(self, lengths: NDArray[np.int32], document_ends: NDArray[np.int64]) -> None:
        """Append sequences to the index alone. The caller must write their tokens.

        `lengths` are the sequences' numbers of tokens. `document_ends` are ends of documents, as numbers
        of sequences before them, counted from the first of these sequences.
        """
        self._lengths.append(lengths)
        self._document_ends.append(self.num_sequences + document_ends)
        self.num_sequences += len(lengths)

    def _check(self, tokens: NDArray[np.integer], counts: NDArray[np.int64]) -> None:
        """Raise DataError for a document or a token id beyond the format."""
        if counts.max(initial=0) > np.iinfo(np.int32).max:
            raise DataError(f"{self.bin_path}: a document of {counts.max()} tokens; the format holds 2^31 - 1 at most")
        limits = np.iinfo(self.dtype)
        for token in (tokens.min(initial=0), tokens.max(initial=0)):
            if not limits.min <= token <= limits.max:
                raise DataError(f"{self.bin_path}: token id {token} does not fit the file's type {self.dtype.name}")

    def _finish(self) -> None:
        """Write the index and give both files their names."""
        lengths = np.concatenate([np.empty(0, "<i4"), *self._lengths]).astype("<i4")
        document_indices = np.concatenate([np.zeros(1, "<i8"), *self._document_ends]).astype("<i8")
        code = next(code for code, dtype in TOKEN_DTYPES.items() if dtype == self.dtype)
        with storing(self.idx_path):
            file = open_new(_partial(self.idx_path))
            file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(document_indices)))
            pointers = sequence_pointers(lengths, self.dtype.itemsize).astype("<i8")
            for part in (lengths, pointers, document_indices):
                file.write(part.tobytes())
            _close(file)
            # The old .idx is deleted before .bin is replaced, and the new .idx is written last: a visible .idx always
            # matches its .bin.
            self.idx_path.unlink(missing_ok=True)
            for path in (self.bin_path, self.idx_path):
                _partial(path).replace(path)


def merge(prefixes: Iterable[str | Path], output: str | Path) -> None:
    """Concatenate .bin/.idx pairs of one dtype, in the order given, into the pair `output`.

    Raises DataError if `prefixes` is empty or the dtypes differ.
    """
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    if not datasets:
        raise DataError(f"{output}: nothing to merge; name at least one .bin/.idx prefix")
    with IndexedWriter(output, datasets[0].dtype) as writer:
        for dataset in datasets:
            writer.extend(dataset)
