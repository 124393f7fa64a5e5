"""Documents in files: JSON lines, plain text and parquet. Reports documents without clean text.

A file is cut into spans, to be read apart. A span is a byte range of .jsonl, or of text with a document in each line,
or some row groups of .parquet. Any other file is one span, and so is each compressed file.
"""

import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

from megapar.base.errors import ConfigError, DataError

OnBadLine = Literal["error", "skip", "replace"]
_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_TEXT = (".txt", ".md", ".py", ".txt.gz", ".txt.zst")
_ROWS = (".parquet",)
KNOWN = (*_LINES, *_TEXT, *_ROWS)
_LONGEST = 1 << 30  # bytes; documents must be shorter, since each has to fit into memory
_BLOCK = 1 << 20  # bytes read at a time
_BOM = b"\xef\xbb\xbf"  # the byte order mark in UTF-8
_SHOWN_KEYS = 8  # keys that a message names
_REMEMBERED = 100  # bad documents whose places are kept; all are counted


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a document is, and what happens to one without clean text."""

    text_field: str = "text"
    """Key of the text in lines of .jsonl, its column in .parquet; meta.text is the key text within meta."""
    text_lines: bool = False
    """Each line of a plain text file is a document; otherwise the file is."""
    on_bad_line: OnBadLine = "error"
    """Text with bytes outside UTF-8, NUL, lone surrogates, or a byte order mark elsewhere than at the start of a
    file; lines without JSON or without a text. error stops, skip leaves them out, replace puts U+FFFD if that helps
    and leaves out the others."""


@dataclass(frozen=True)
class FileRange:
    """The documents beginning in bytes [start, stop) of a file, or those in its row groups [start, stop).

    `num_bytes` is the span's share of the file's size.
    """

    path: Path
    start: int
    stop: int
    num_bytes: int


class DocumentPlace(NamedTuple):
    """The position of a document.

    `number` is its line, counted from 1 at the start of the span, and `offset` its byte in the decompressed file. In
    .parquet, `number` is its row, counted from 1 in the row group `offset`.
    """

    span: FileRange
    number: int
    offset: int

    def describe(self, lines_before: int | None = None) -> str:
        """The place in words. `lines_before` is the number of lines before the span.

        If it is None, the file is read up to this place to count them.
        """
        if self.span.path.name.endswith(_ROWS):
            return f"{self.span.path}: row {self.number} (row group {self.offset})"
        number = self.number + (lines_before or 0)
        if lines_before is None and self.span.start:
            number = _newlines(self.span.path, self.offset) + 1
        return f"{self.span.path}: line {number} (byte {self.offset})"


class BadDocument(Exception):  # noqa: N818 (whether it is an error is for `on_bad_line` to say)
    """A document without clean text.

    `reason` is one of a few phrases for counting. `detail` says more. The fault is at byte `at` of the document.
    `way_out` says what the user can do.
    """

    def __init__(
        self, reason: str, detail: object, at: int = 0, way_out: str = "mend it, or see --on_bad_line skip and replace"
    ):
        super().__init__(f"{reason} ({detail})")
        self.reason = reason
        self.at = at
        self.way_out = way_out


@dataclass
class BadDocuments:
    """Numbers of documents left out or mended, by reason, and the places of the first ones."""

    counts: dict[str, int] = field(default_factory=dict)
    first: list[tuple[DocumentPlace, str]] = field(default_factory=list)

    def add(self, position: DocumentPlace, reason: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if len(self.first) < _REMEMBERED:
            self.first.append((position, reason))


def find_files(inputs: Sequence[Path]) -> list[Path]:
    """The files of `inputs`, in their order.

    A folder stands for all files below it with a known suffix, sorted by path.
    Raises DataError for a missing file or an input without files. Raises ConfigError for a file with another suffix.
    """
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            files += sorted(p for p in path.rglob("*") if p.name.endswith(KNOWN) and p.is_file())
        elif not path.is_file():
            raise DataError(f"--input {path}: no such file or folder")
        elif not path.name.endswith(KNOWN):
            raise ConfigError(f"--input {path}: unknown kind of file; use {', '.join(KNOWN)} or a folder of them")
        else:
            files.append(path)
    if not files:
        raise DataError(f"--input {' '.join(map(str, inputs))}: no {', '.join(KNOWN)} file there")
    return files


def cut(files: Iterable[Path], reading: Reading, shard_bytes: int) -> Iterator[list[FileRange]]:
    """Yield shards: lists of spans, in the order of the files. A shard has about `shard_bytes` if it can be cut so."""
    shard: list[FileRange] = []
    num_bytes = 0
    for path in files:
        for span in _spans(path, reading, shard_bytes):
            shard.append(span)
            num_bytes += span.num_bytes
            if num_bytes >= shard_bytes:
                yield shard
                shard = []
                num_bytes = 0
    if shard:
        yield shard


def _spans(path: Path, reading: Reading, shard_bytes: int) -> Iterator[FileRange]:
    """Yield the spans of a file, each of at most about `shard_bytes` if the file can be cut."""
    size = path.stat().st_size
    if path.name.endswith(_ROWS):
        groups = open_parquet(path).num_row_groups
        step = max(groups * shard_bytes // max(size, 1), 1)
        for start in range(0, groups, step):
            stop = min(start + step, groups)
            yield FileRange(path, start, stop, size * stop // groups - size * start // groups)
        return
    by_lines = path.suffix == ".jsonl" or (reading.text_lines and path.name.endswith(_TEXT))
    # A compressed file cannot be read from the middle.
    step = shard_bytes if by_lines and path.suffix not in _DECOMPRESSORS else max(size, 1)
    for start in range(0, size, step):
        stop = min(start + step, size)
        yield FileRange(path, start, stop, stop - start)


class SpanReader:
    """Iterates over the documents of a span, as (place, text).

    While it runs, `lines` and `num_bytes` say how much of the span was read, and `bad` counts the bad documents.
    Raises DataError for a bad document if `reading` says so, and for a damaged or unreadable file.
    """

    def __init__(self, span: FileRange, reading: Reading):
        self.span = span
        self.reading = reading
        self.lines = 0
        self.num_bytes = 0
        self.bad = BadDocuments()
        self._json = span.path.name.endswith(_LINES)
        self._whole = span.path.name.endswith(_TEXT) and not reading.text_lines

    def __iter__(self) -> Iterator[tuple[DocumentPlace, str]]:
        is_parquet = self.span.path.name.endswith(_ROWS)
        documents: Iterator[tuple[DocumentPlace, bytes | None]] = self._rows() if is_parquet else self._lines()
        for position, raw in documents:
            text = self._text(position, raw)
            if text is not None:
                yield position, text
        self.num_bytes = self.span.num_bytes

    def _text(self, position: DocumentPlace, raw: bytes | None) -> str | None:
        """The text of a document, or None if it is bad and left out. `raw` is None for an empty cell."""
        key = self.reading.text_field if self._json else None
        try:
            return parse(raw, key)
        except BadDocument as error:
            if self._whole and raw:  # the document is a file, in which the line of the fault helps more than line 1
                position = DocumentPlace(self.span, raw.count(b"\n", 0, error.at) + 1, error.at)
            policy = self.reading.on_bad_line
            if policy == "error":
                shown = (raw or b"")[:40]
                raise DataError(f"{position.describe()}: {error}, in {shown!r}; {error.way_out}") from None
            text = None
            if policy == "replace":
                with suppress(BadDocument):
                    text = parse(raw, key, mend=True)
            outcome = "left out" if text is None else "mended"
            self.bad.add(position, f"{error.reason}, {outcome}")
            return text

    def _lines(self) -> Iterator[tuple[DocumentPlace, bytes]]:
        """Yield the lines beginning in the span, without blank ones. If the file is one document, yield all of it."""
        span = self.span
        decompress = _DECOMPRESSORS.get(span.path.suffix)
        stop = math.inf if decompress else span.stop
        with _reading(span.path), span.path.open("rb") as raw:
            file = decompress(span.path, raw) if decompress else raw
            offset = span.start
            if offset:
                # The line around `start` belongs to the span before, unless it begins exactly there. Reading from the
                # byte before `start` tells: if that byte ends a line, nothing more is skipped.
                file.seek(offset - 1)
                offset += len(file.readline()) - 1
            while offset < stop:
                line = _all(file) if self._whole else file.readline(_LONGEST)
                if not line:
                    break
                if len(line) == _LONGEST:
                    hint = "--text_lines makes each line a document" if self._whole else "are these lines?"
                    raise DataError(f"{span.path}: byte {offset}: a document of 1 GiB or more; {hint}")
                self.lines += 1
                # Windows editors put a byte order mark at the start of a file. Elsewhere it is damage, such as of files
                # that were joined.
                text = line.removeprefix(_BOM) if offset == 0 else line
                if self._whole:
                    yield DocumentPlace(span, self.lines, offset), text
                elif text and not text.isspace():
                    yield DocumentPlace(span, self.lines, offset), text.removesuffix(b"\n").removesuffix(b"\r")
                offset += len(line)
                self.num_bytes = min(raw.tell() - span.start, span.num_bytes)

    def _rows(self) -> Iterator[tuple[DocumentPlace, bytes | None]]:
        """Yield the cells of the text column in the span's row groups. A cell without text is None."""
        import pyarrow.compute

        span = self.span
        file = open_parquet(span.path)
        column, *inner = _parquet_path(span.path, file.schema_arrow, self.reading.text_field)
        with _reading(span.path):
            for group in range(span.start, span.stop):
                number = 0
                for batch in file.iter_batches(256, row_groups=[group], columns=[".".join((column, *inner))]):
                    cells = batch.column(0)
                    for name in inner:
                        cells = pyarrow.compute.struct_field(cells, name)
                    # Bytes, so that text which is not UTF-8 meets the same policy as in other files.
                    for text in cells.cast(pyarrow.large_binary()).to_pylist():
                        number += 1
                        yield DocumentPlace(span, number, group), text
                self.num_bytes = span.num_bytes * (group + 1 - span.start) // (span.stop - span.start)


def _parquet_path(path: Path, schema: Any, text_field: str) -> list[str]:
    """The column of the text, and the fields from there to the text.

    Raises DataError if there is no such column or it holds no text.
    """
    import pyarrow

    # A column's own name may hold a dot, so the whole name is tried first.
    parts = [text_field] if text_field in schema.names else text_field.split(".")
    arrow_type = pyarrow.struct(list(schema))
    for name in parts:
        names = [field.name for field in arrow_type] if pyarrow.types.is_struct(arrow_type) else []
        if name not in names:
            raise DataError(
                f"{path}: no column {text_field}; --text_field names one of {', '.join(schema.names)}, or with a dot a "
                "field within it"
            )
        arrow_type = arrow_type.field(names.index(name)).type
    # Text may be string, large_string, string_view, binary and more, also as the values of a dictionary.
    if pyarrow.types.is_nested(arrow_type) or not any(word in str(arrow_type) for word in ("string", "binary")):
        raise DataError(f"{path}: column {text_field} holds {arrow_type}, no text; --text_field names another")
    return parts


def parse(raw: bytes | None, key: str | None, mend: bool = False) -> str:
    """The text of a line, file or cell. With `key`, `raw` is a JSON object with the text under this key.

    With `mend`, U+FFFD replaces what is not clean. Raises BadDocument if the text is not clean. With `mend` it
    raises only if the text cannot be mended.
    """
    if raw is None:
        raise BadDocument("no text", "null")
    if raw.startswith(_BOM):
        if not mend:
            raise BadDocument("byte order mark", "the bytes EF BB BF come first")
        raw = raw.removeprefix(_BOM)
    try:
        text = raw.decode(errors="replace" if mend else "strict")
    except UnicodeDecodeError as error:
        raise BadDocument("not UTF-8", error.reason, error.start) from error
    if key is not None:
        text = _field(text, key)
    if "\0" in text:
        if not mend:
            raise BadDocument("NUL", f"character {text.index(chr(0))} of the text", raw.find(b"\0"))
        text = text.replace("\0", "\ufffd")
    try:
        text.encode()  # fails for a lone surrogate, which JSON can write as an escape
    except UnicodeEncodeError as error:
        if not mend:
            raise BadDocument("lone surrogate", f"character {error.start} of the text") from error
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _field(line: str, key: str) -> str:
    """The text under `key` of a JSON object. With dots, `key` may be a path through nested objects.

    Raises BadDocument if `line` is no JSON object or has no text there.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadDocument("not JSON", str(error).replace("line 1 column", "column")) from error
    if not isinstance(row, dict):
        raise BadDocument("no text", f"{type(row).__name__} instead of an object")
    # A key may itself hold a dot, so the whole key is tried first.
    path = [key] if key in row else key.split(".")
    value = row
    for name in path:
        if not isinstance(value, dict) or name not in value:
            raise BadDocument("no text", f"no key {key}", way_out=_other_keys(row))
        value = value[name]
    if not isinstance(value, str):
        raise BadDocument("no text", f"{key} is {type(value).__name__}")
    return value


def _other_keys(row: dict[str, Any]) -> str:
    """Advice for a line without the key of the text: the keys it has.

    The advice is not to skip such lines, since all lines may be so.
    """
    keys = [key[:40] for key in row]
    for key, value in row.items():
        if isinstance(value, dict):
            keys += [f"{key}.{inner}"[:40] for inner in value]
    shown = ", ".join(keys[:_SHOWN_KEYS]) or "none"
    return f"--text_field names the key of the text; this line has {shown}"


class _ZstdFile(io.RawIOBase):
    """The decompressed bytes of the zstd frames in a file.

    Raises EOFError for a truncated file. zstandard's own reader does not.
    """

    def __init__(self, path: Path, raw: IO[bytes]):
        try:
            import zstandard
        except ImportError as error:
            raise _missing(path, "zstandard") from error
        self._raw = raw
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._error = zstandard.ZstdError
        self._frame: Any = None
        self._ready = memoryview(b"")
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._rest or self._raw.read(_BLOCK)
            if not block:
                if self._frame is not None:
                    raise EOFError("the last frame is cut short")
                return 0
            self._frame = self._frame or self._new()
            try:
                self._ready = memoryview(self._frame.decompress(block))
                self._rest = b""
            except self._error as error:
                raise ValueError(error) from error
            if self._frame.eof:
                self._rest = self._frame.unused_data
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


_DECOMPRESSORS: dict[str, Callable[[Path, IO[bytes]], IO[bytes]]] = {
    ".gz": lambda path, raw: cast(IO[bytes], gzip.GzipFile(fileobj=raw)),
    ".zst": lambda path, raw: io.BufferedReader(_ZstdFile(path, raw), _BLOCK),
}


def open_parquet(path: Path) -> Any:
    """Return pyarrow's ParquetFile. Raises ConfigError without pyarrow, DataError if the file is damaged."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise _missing(path, "pyarrow") from error
    with _reading(path):
        return ParquetFile(path)


def _missing(path: Path, package: str) -> ConfigError:
    return ConfigError(f"--input {path} needs the package {package}: pip install {package}")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn errors of reading the file `path` in the block into DataError."""
    try:
        yield
    except (OSError, EOFError, ValueError, NotImplementedError, zlib.error) as error:  # pyarrow raises some of these
        text = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path}: damaged, cut short or not readable: {text}") from error


def _all(file: IO[bytes]) -> bytes:
    """The rest of a file, or its first _LONGEST bytes. A small compressed file may have far more."""
    return b"".join(islice(iter(partial(file.read, _BLOCK), b""), _LONGEST // _BLOCK))


def _newlines(path: Path, offset: int) -> int:
    """The number of newlines in the first `offset` bytes of a file."""
    with path.open("rb") as file:
        return sum(file.read(min(_BLOCK, offset - at)).count(b"\n") for at in range(0, offset, _BLOCK))
