"""Documents out of files: JSON lines, plain text and parquet, whole or by pieces, and what is wrong with them.

A file is cut into spans that can be read apart: byte ranges of .jsonl, and of text whose lines are documents; row
groups of .parquet; everything else is one span.
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

from megapar.errors import ConfigError, DataError

OnBadLine = Literal["error", "skip", "replace"]
_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_TEXT = (".txt", ".md", ".py", ".txt.gz", ".txt.zst")
_ROWS = (".parquet",)
KNOWN = (*_LINES, *_TEXT, *_ROWS)
_LONGEST = 1 << 30  # bytes of a document; it has to fit into memory
_BLOCK = 1 << 20
_BOM = b"\xef\xbb\xbf"
_SHOWN_KEYS = 8
_REMEMBERED = 100  # bad documents whose places are kept; all are counted


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a document is, and what becomes of one that is no clean text."""

    text_field: str = "text"
    """Key of the text in lines of .jsonl, its column in .parquet; meta.text is the key text within meta."""
    text_lines: bool = False
    """Each line of a plain text file is a document; otherwise the file is."""
    on_bad_line: OnBadLine = "error"
    """Text with bytes that are not UTF-8, NUL, lone surrogates, or a byte order mark elsewhere than at the start of a
    file; lines that are not JSON or have no text. error stops, skip leaves them out, replace puts U+FFFD where that
    helps and leaves out the others."""


@dataclass(frozen=True)
class Span:
    """The documents that begin in bytes [start, stop) of a file, or are in its row groups [start, stop).

    `num_bytes` of the file are read for it.
    """

    path: Path
    start: int
    stop: int
    num_bytes: int


class Place(NamedTuple):
    """Where a document stands: line from 1 and byte of the file, decompressed; or row from 1 and its row group.

    Lines are counted from the start of the span, bytes from that of the file.
    """

    span: Span
    number: int
    offset: int

    def describe(self, lines_before: int | None = None) -> str:
        """For people. Reads the file up to here if nobody knows how many lines begin before the span."""
        if self.span.path.name.endswith(_ROWS):
            return f"{self.span.path}: row {self.number} (row group {self.offset})"
        number = self.number + (lines_before or 0)
        if lines_before is None and self.span.start:
            number = _newlines(self.span.path, self.offset) + 1
        return f"{self.span.path}: line {number} (byte {self.offset})"


class BadDocument(Exception):  # noqa: N818 (what it means is for `on_bad_line` to say)
    """No clean text: `reason` is one of a few words to count by, `at` the byte where it shows, `way_out` what helps."""

    def __init__(
        self, reason: str, detail: object, at: int = 0, way_out: str = "mend it, or see --on_bad_line skip and replace"
    ):
        super().__init__(f"{reason} ({detail})")
        self.reason = reason
        self.at = at
        self.way_out = way_out


@dataclass
class BadDocuments:
    """How many were left out or mended, by reason, and the places of the first."""

    counts: dict[str, int] = field(default_factory=dict)
    first: list[tuple[Place, str]] = field(default_factory=list)

    def add(self, place: Place, reason: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if len(self.first) < _REMEMBERED:
            self.first.append((place, reason))


def find_files(inputs: Sequence[Path]) -> list[Path]:
    """The files that `inputs` name, in their order; a folder stands for those below it with a known suffix, sorted.

    Raises DataError for what is missing and ConfigError for a file whose name says nothing about its content.
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


def cut(files: Iterable[Path], reading: Reading, shard_bytes: int) -> Iterator[list[Span]]:
    """Shards: spans in the order of the files, of about `shard_bytes` together where they can be cut."""
    shard: list[Span] = []
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


def _spans(path: Path, reading: Reading, shard_bytes: int) -> Iterator[Span]:
    size = path.stat().st_size
    if path.name.endswith(_ROWS):
        groups = _open_parquet(path).num_row_groups
        step = max(groups * shard_bytes // max(size, 1), 1)
        for start in range(0, groups, step):
            stop = min(start + step, groups)
            yield Span(path, start, stop, size * stop // groups - size * start // groups)
        return
    by_lines = path.suffix == ".jsonl" or (reading.text_lines and path.name.endswith(_TEXT))
    step = shard_bytes if by_lines and path.suffix not in _DECOMPRESSORS else max(size, 1)
    for start in range(0, size, step):
        stop = min(start + step, size)
        yield Span(path, start, stop, stop - start)


class SpanReader:
    """Iterates over the documents of a span. How far it is: `lines` and `num_bytes` of the file, `bad` documents.

    Raises DataError for a bad document if `reading` says so, and for a file that is damaged or cannot be read.
    """

    def __init__(self, span: Span, reading: Reading):
        self.span = span
        self.reading = reading
        self.lines = self.num_bytes = 0
        self.bad = BadDocuments()
        self._json = span.path.name.endswith(_LINES)
        self._whole = span.path.name.endswith(_TEXT) and not reading.text_lines

    def __iter__(self) -> Iterator[tuple[Place, str]]:
        for place, raw in self._rows() if self.span.path.name.endswith(_ROWS) else self._lines():
            text = self._text(place, raw)
            if text is not None:
                yield place, text
        self.num_bytes = self.span.num_bytes

    def _text(self, place: Place, raw: bytes | None) -> str | None:
        key = self.reading.text_field if self._json else None
        try:
            return parse(raw, key)
        except BadDocument as error:
            if self._whole and raw:
                place = Place(self.span, raw.count(b"\n", 0, error.at) + 1, error.at)
            policy = self.reading.on_bad_line
            if policy == "error":
                shown = (raw or b"")[:40]
                raise DataError(f"{place.describe()}: {error}, in {shown!r}; {error.way_out}") from None
            text = None
            if policy == "replace":
                with suppress(BadDocument):
                    text = parse(raw, key, mend=True)
            self.bad.add(place, f"{error.reason}, {'left out' if text is None else 'mended'}")
            return text

    def _lines(self) -> Iterator[tuple[Place, bytes]]:
        """The lines that begin in the span, blank ones left out; or all of the file as if it were one."""
        span = self.span
        decompress = _DECOMPRESSORS.get(span.path.suffix)
        stop = math.inf if decompress else span.stop
        with _reading(span.path), span.path.open("rb") as raw:
            file = decompress(span.path, raw) if decompress else raw
            offset = span.start
            if offset:
                file.seek(offset - 1)
                offset += len(file.readline()) - 1
            while offset < stop and (line := _all(file) if self._whole else file.readline(_LONGEST)):
                if len(line) == _LONGEST:
                    hint = "--text_lines makes each line a document" if self._whole else "are these lines?"
                    raise DataError(f"{span.path}: byte {offset}: a document of 1 GiB or more; {hint}")
                self.lines += 1
                # Editors of Windows put a byte order mark there; elsewhere one is damage, such as of files joined.
                text = line.removeprefix(_BOM) if offset == 0 else line
                if self._whole or not (text.isspace() or not text):
                    text = text if self._whole else text.removesuffix(b"\n").removesuffix(b"\r")
                    yield Place(span, self.lines, offset), text
                offset += len(line)
                self.num_bytes = min(raw.tell() - span.start, span.num_bytes)

    def _rows(self) -> Iterator[tuple[Place, bytes | None]]:
        import pyarrow.compute

        span = self.span
        file = _open_parquet(span.path)
        column, *inner = _parquet_path(span.path, file.schema_arrow, self.reading.text_field)
        with _reading(span.path):
            for group in range(span.start, span.stop):
                number = 0
                for batch in file.iter_batches(256, row_groups=[group], columns=[".".join((column, *inner))]):
                    cells = batch.column(0)
                    for name in inner:
                        cells = pyarrow.compute.struct_field(cells, name)
                    for text in cells.cast(pyarrow.large_binary()).to_pylist():
                        number += 1
                        yield Place(span, number, group), text
                self.num_bytes = span.num_bytes * (group + 1 - span.start) // (span.stop - span.start)


def _parquet_path(path: Path, schema: Any, text_field: str) -> list[str]:
    """The column of the text, and the fields within it. Raises DataError if there is none or it holds no text."""
    import pyarrow

    found = [text_field] if text_field in schema.names else text_field.split(".")
    kind = pyarrow.struct(list(schema))
    for name in found:
        names = [field.name for field in kind] if pyarrow.types.is_struct(kind) else []
        if name not in names:
            raise DataError(
                f"{path}: no column {text_field}; --text_field names one of {', '.join(schema.names)}, or with a dot a "
                "field within it"
            )
        kind = kind.field(names.index(name)).type
    if pyarrow.types.is_nested(kind) or not any(word in str(kind) for word in ("string", "binary")):
        raise DataError(f"{path}: column {text_field} holds {kind}, no text; --text_field names another")
    return found


def parse(raw: bytes | None, key: str | None, mend: bool = False) -> str:
    """The text of a line, file or cell; under `key` of its JSON object if there is a key.

    Raises BadDocument if it is no clean text or, with `mend`, if it cannot be made so.
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
        text.encode()  # fails for a lone surrogate, which JSON can spell
    except UnicodeEncodeError as error:
        if not mend:
            raise BadDocument("lone surrogate", f"character {error.start} of the text") from error
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _field(line: str, key: str) -> str:
    """The text under `key` of a JSON object: a key of its own, or with dots a path through objects within it."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadDocument("not JSON", str(error).replace("line 1 column", "column")) from error
    if not isinstance(found, dict):
        raise BadDocument("no text", f"{type(found).__name__} instead of an object")
    value = found
    for name in [key] if key in found else key.split("."):
        if not isinstance(value, dict) or name not in value:
            raise BadDocument("no text", f"no key {key}", way_out=_other_keys(found))
        value = value[name]
    if not isinstance(value, str):
        raise BadDocument("no text", f"{key} is {type(value).__name__}")
    return value


def _other_keys(found: dict[str, Any]) -> str:
    """What to do about a line without the key of the text. To skip it could skip all lines."""
    keys = [key[:40] for key in found]
    keys += [f"{key}.{inner}"[:40] for key, within in found.items() if isinstance(within, dict) for inner in within]
    shown = ", ".join(keys[:_SHOWN_KEYS]) or "none"
    return f"--text_field names the key of the text; this line has {shown}"


class _ZstdFile(io.RawIOBase):
    """Decompressed bytes of frames that follow each other; unlike zstandard's own reader it tells a file cut short."""

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


def _open_parquet(path: Path) -> Any:
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
    """Around the reading of one file: name it when it is damaged."""
    try:
        yield
    except (OSError, EOFError, ValueError, NotImplementedError, zlib.error) as error:  # pyarrow's are some of these
        text = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path}: damaged, cut short or not readable: {text}") from error


def _all(file: IO[bytes]) -> bytes:
    return b"".join(islice(iter(partial(file.read, _BLOCK), b""), _LONGEST // _BLOCK))


def _newlines(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        return sum(file.read(min(_BLOCK, offset - at)).count(b"\n") for at in range(0, offset, _BLOCK))
