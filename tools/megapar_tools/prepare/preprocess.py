"""Preprocessing: text files become token files, on several processes. A killed run can go on.

The input is cut into shards (megapar_tools.prepare.corpus). A worker takes one shard at a time, tokenizes it in batches
and leaves a part in the folder OUTPUT.parts. A part is a .bin/.idx pair, a .hash file with hashes of the texts if
documents are deduplicated, and a .json file. The .json file is written last: then the part is whole. The name of a part
is a hash of all inputs to its bytes. So an existing part need not be made again. In the end the parts are joined in the
order of the input (megapar.data.prepared). Memory does not grow with the text. Each worker holds one batch, and joining
takes tens of bytes a document.
"""

import errno
import hashlib
import json
import os
import shutil
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megapar.base.errors import ConfigError, DataError, storing
from megapar.data.indexed import IndexedWriter, token_dtype
from megapar.data.prepared import START, join, sha256, sidecar_path, write_sidecar
from megapar.data.tokenizer import Tokenizer, fetch_tokenizer, load_tokenizer
from megapar.data.workers import run, worker_pool
from megapar.system.regular_files import open_new, read_regular
from megapar_tools.prepare.corpus import DocumentPlace, FileRange, Reading, SpanReader, cut, find_files
from megapar_tools.prepare.texts import StartToken, start_ids, with_start

_PARTS_VERSION = 1  # raise it when the same input would give other parts
_BATCH_CHARACTERS = 1 << 20  # of text in a batch, about
_SHARD_BYTES = 1 << 22  # larger inputs have larger shards, so that there are some thousand parts and not millions
_NAMED = 100  # the sidecar says where the first bad documents are; all are counted


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions(Reading):
    """All options behind the output, besides the input."""

    tokenizer: str
    """bytes, spm:FILE for a sentencepiece model, hf:FILE for a tokenizer.json, hf:ORG/MODEL[@REVISION] for that of a
    model at Hugging Face, or tiktoken:FILE."""
    special_tokens: Literal["text", "parse"] = "text"
    """Special tokens in a text, such as <|im_start|>: text, or with parse (hf: and spm:) their ids."""
    start_token: StartToken = "auto"
    """The start token in front of each document: auto adds what the tokenizer's files put there, as transformers does;
    bytes, tiktoken: and mostly spm: put none."""
    append_eod: bool = False
    """End each document with the tokenizer's end-of-document id."""
    deduplicate: bool = False
    """Leave out documents with, to the letter, the text of an earlier one."""
    shuffle: int | None = None
    """Write documents in a random order, seeded by this number, instead of the input's."""


@dataclass
class TextCounts:
    """Counts of some input and its output.

    `documents` and `tokens` are written, and `text_bytes` are the UTF-8 bytes of these documents. `num_bytes` of the
    input files were read. `empty` documents were left out. `bad` counts documents left out or mended, by
    reason.
    """

    documents: int = 0
    tokens: int = 0
    num_bytes: int = 0
    text_bytes: int = 0
    empty: int = 0
    bad: dict[str, int] = field(default_factory=dict)

    def add(self, other: "TextCounts") -> None:
        for name in ("documents", "tokens", "num_bytes", "text_bytes", "empty"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, count in other.bad.items():
            self.bad[reason] = self.bad.get(reason, 0) + count


@dataclass(frozen=True)
class PartSpans:
    """The spans of the part `name`."""

    spans: list[FileRange]
    name: str


@dataclass(frozen=True)
class PreparedPart:
    """The content of NAME.json, the description of a finished part.

    `lines` is the number of lines in each span. `bad` holds (span, number, offset, reason) of the first bad documents.
    """

    counts: TextCounts
    lines: list[int]
    bad: list[tuple[int, int, int, str]]
    on_bad_line: str


def preprocess(
    inputs: Sequence[Path],
    output: Path,
    recipe: PreprocessOptions,
    *,
    workers: int = 1,
    on_progress: Callable[[TextCounts], None] = lambda counts: None,
) -> dict[str, Any]:
    """Tokenize `inputs` (see `find_files`) into the .bin/.idx pair `output`, and write and return its sidecar.

    Each document is one sequence. Documents without text are left out and counted.
    `on_progress` is called with the counts so far. The first call has the counts of an earlier run's parts.
    Raises ConfigError or DataError for unusable options or input. The message names file, line and byte. No
    output appears then, and OUTPUT.parts keeps the finished parts.
    """
    if workers < 1 or (recipe.shuffle or 0) < 0:
        raise ConfigError(
            f"--workers {workers} --shuffle {recipe.shuffle}: give at least 1 worker, a shuffle from 0 on"
        )
    recipe = replace(recipe, tokenizer=fetch_tokenizer(recipe.tokenizer))
    tokenizer = _tokenizer(recipe)
    files = find_files(inputs)
    versions = _versions(files)
    shards = list(_shards(files, recipe, tokenizer, versions))
    folder = Path(f"{output}.parts")
    with _parts_folder(folder), _hashing(versions) as hashes:
        done = TextCounts()
        todo = []
        for shard in shards:
            part = _finished(folder, shard, recipe)
            if part:
                done.add(part.counts)
            else:
                todo.append(shard)
        on_progress(done)
        with worker_pool(min(workers, len(todo)), partial(_work, recipe, folder)) as pool:
            for counts in run(todo, pool):
                done.add(counts)
                on_progress(done)
        parts = [_read_part(folder / shard.name) for shard in shards]
        description = _description(shards, parts, recipe, tokenizer)
        if not description["tokens"]:
            _remove_parts(folder)
            raise DataError(f"{', '.join(map(str, inputs))}: 0 tokens: no document has any text")
        description["sources"] = [{"path": str(path), "sha256": digest} for path, digest in hashes.result().items()]
        # Shards may have been read from different versions of a file. No single text would give such an output.
        if _versions(files) != versions:
            raise DataError(f"{', '.join(map(str, inputs))}: changed while they were read; run it again")
        # The old sidecar goes before the pair changes: a kill in between must not leave it beside another pair.
        sidecar_path(output).unlink(missing_ok=True)
        names = [folder / shard.name for shard in shards]
        dtype = token_dtype(tokenizer.vocab_size)
        description["documents"], description["tokens"] = join(
            names, output, dtype, shuffle=recipe.shuffle, deduplicate=recipe.deduplicate
        )
        write_sidecar(output, description)
    shutil.rmtree(folder)
    return description


def read_documents(inputs: Sequence[Path], reading: Reading | None = None) -> Iterator[str]:
    """Yield the documents of `inputs` as `preprocess` reads them, one after the other."""
    reading = reading or Reading()
    for spans in cut(find_files(inputs), reading, _SHARD_BYTES):
        for span in spans:
            yield from (text for _, text in SpanReader(span, reading))


def _versions(files: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Return size in bytes and time of change in ns of each file."""
    versions = {}
    for path in files:
        stat = path.stat()
        versions[path] = (stat.st_size, stat.st_mtime_ns)
    return versions


def _shards(
    files: Sequence[Path], recipe: PreprocessOptions, tokenizer: Tokenizer, versions: dict[Path, tuple[int, int]]
) -> Iterator[PartSpans]:
    """Yield the shards of `files`. The name of each is a hash of all inputs to the bytes of its part."""
    total = sum(size for size, _ in versions.values())
    # Large inputs have 2,048 to 4,096 shards, until a shard would be larger than 1 GiB.
    shard_bytes = max(_SHARD_BYTES, 1 << min((total // 4096).bit_length(), 30))
    common = [_PARTS_VERSION, tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eod, recipe.append_eod]
    common += [recipe.text_field, recipe.text_lines, recipe.deduplicate, recipe.special_tokens]
    common += start_ids(recipe.tokenizer, tokenizer, recipe.start_token)
    for spans in cut(files, recipe, shard_bytes):
        pieces = [[str(span.path), span.start, span.stop, *versions[span.path]] for span in spans]
        yield PartSpans(spans, hashlib.sha256(json.dumps([*common, pieces]).encode()).hexdigest()[:32])


def _finished(folder: Path, shard: PartSpans, recipe: PreprocessOptions) -> PreparedPart | None:
    """The shard's part if an earlier run left it in `folder` and `recipe` can use it."""
    if not Path(f"{folder / shard.name}.json").is_file():
        return None
    part = _read_part(folder / shard.name)
    # `on_bad_line` is not in the part's name: a part without bad documents is the same under each of its values.
    if part.counts.bad and part.on_bad_line != recipe.on_bad_line:
        return None
    return part


def _read_part(name: Path) -> PreparedPart:
    """The description of a finished part. Raises DataError if the file is not one."""
    path = Path(f"{name}.json")
    try:
        fields = json.loads(read_regular(path))
        return PreparedPart(**fields | {"counts": TextCounts(**fields["counts"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: not what an earlier run has left; remove {path.parent}") from error


def _description(
    shards: list[PartSpans], parts: list[PreparedPart], recipe: PreprocessOptions, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The sidecar without its sources and hashes: these are known later.

    The numbers of documents and tokens are those before deduplication.
    """
    total = TextCounts()
    places = list[str]()
    lines_before = 0
    for shard, part in zip(shards, parts, strict=True):
        total.add(part.counts)
        bad = deque(part.bad)
        for number, (span, lines) in enumerate(zip(shard.spans, part.lines, strict=True)):
            if not span.start:
                lines_before = 0  # a new file begins
            while bad and bad[0][0] == number:
                _, line, offset, reason = bad.popleft()
                places.append(f"{DocumentPlace(span, line, offset).describe(lines_before)}: {reason}")
            lines_before += lines
    described: dict[str, Any] = {
        "spec": recipe.tokenizer,
        "sha256": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
    }
    if recipe.special_tokens == "parse":  # only then, so that sidecars of earlier versions describe the same tokenizer
        described["special_tokens"] = "parse"
    return {
        "documents": total.documents,
        "tokens": total.tokens,
        "tokenizer": described,
        "append_eod": recipe.append_eod,
        START: list(start_ids(recipe.tokenizer, tokenizer, recipe.start_token)),
        "shuffle": recipe.shuffle,
        "deduplicate": recipe.deduplicate,
        "documents_before_deduplication": total.documents,
        "empty_documents": total.empty,
        "text_bytes": total.text_bytes,
        "bad_lines": {"on_bad_line": recipe.on_bad_line, "counts": total.bad, "first": places[:_NAMED]},
    }


@contextmanager
def _parts_folder(folder: Path) -> Iterator[None]:
    """Make the folder for parts, and remove it after the block if no part is left in it.

    Drafts of killed workers are removed before and after the block.
    """

    def remove_drafts() -> None:
        for draft in folder.glob("draft-*"):
            draft.unlink(missing_ok=True)

    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        status = folder.lstat()  # in a folder open to all, somebody else could have put parts there
        if stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "is a link, or another user's: remove it, or choose another --output")
        remove_drafts()
    try:
        yield
    finally:
        remove_drafts()
        with suppress(OSError):  # parts are left
            folder.rmdir()


def _remove_parts(folder: Path) -> None:
    """Remove all parts of an input without text. Another run could not use them."""
    for path in folder.iterdir():
        path.unlink()


@contextmanager
def _hashing(files: Iterable[Path]) -> Iterator[Future[dict[Path, str]]]:
    """Yield the future SHA-256 of each file, computed by a thread while the block runs.

    The thread gives up when the block ends.
    """
    stop = threading.Event()

    def hash_all() -> dict[Path, str]:
        return {path: sha256(path, stop) for path in files if not stop.is_set()}

    with ThreadPoolExecutor(1) as thread:
        try:
            yield thread.submit(hash_all)
        finally:
            stop.set()  # an error in the block must not wait until a large input has been read


def _make_part(
    tokenizer: Tokenizer,
    recipe: PreprocessOptions,
    folder: Path,
    shard: PartSpans,
    report: Callable[[TextCounts], None],
) -> None:
    """Write the part of a shard as a draft, then rename it. `report` gets the counts of each batch."""
    # The process id keeps drafts apart from those of workers that were killed.
    draft = folder / f"draft-{shard.name}-{os.getpid()}"
    hashes = bytearray()
    total = TextCounts()
    readers = [SpanReader(span, recipe) for span in shard.spans]
    with IndexedWriter(draft, token_dtype(tokenizer.vocab_size)) as writer:
        for documents, num_bytes in _batches(readers):
            tokens, lengths, kept = encode(documents, tokenizer, recipe)
            writer.add_documents(tokens, lengths)
            new = TextCounts(
                len(lengths), len(tokens), num_bytes - total.num_bytes, empty=len(documents) - len(lengths)
            )
            for text in kept:
                raw = text.encode()
                new.text_bytes += len(raw)
                if recipe.deduplicate:
                    hashes += hashlib.blake2b(raw, digest_size=16).digest()
            total.add(new)
            report(new)
    bad = TextCounts()
    for reader in readers:
        bad.add(TextCounts(bad=reader.bad.counts))
    total.add(bad)
    report(bad)
    places = []
    for number, reader in enumerate(readers):
        places += [(number, position.number, position.offset, reason) for position, reason in reader.bad.first]
    part = PreparedPart(total, [reader.lines for reader in readers], places[:_NAMED], recipe.on_bad_line)
    with storing(folder / shard.name):
        for suffix, content in (("hash", bytes(hashes)), ("json", json.dumps(asdict(part)).encode())):
            with open_new(Path(f"{draft}.{suffix}")) as file:
                file.write(content)
        # The .json comes last, since it says that the part is whole.
        for suffix in ("bin", "idx", "hash", "json"):
            Path(f"{draft}.{suffix}").replace(f"{folder / shard.name}.{suffix}")


def _batches(readers: Iterable[SpanReader]) -> Iterator[tuple[list[tuple[DocumentPlace, str]], int]]:
    """Yield batches of documents with about 2^20 characters, and the bytes of the spans read so far."""
    documents = list[tuple[DocumentPlace, str]]()
    size = 0
    before = 0
    for reader in readers:
        for position, text in reader:
            documents.append((position, text))
            size += len(text)
            if size >= _BATCH_CHARACTERS:
                yield documents, before + reader.num_bytes
                documents = []
                size = 0
        before += reader.num_bytes
    yield documents, before


def encode(
    documents: Sequence[tuple[DocumentPlace, str]], tokenizer: Tokenizer, recipe: PreprocessOptions
) -> tuple[NDArray[np.int64], list[int], list[str]]:
    """The tokens of the documents one after the other, the length of each in tokens, and their texts.

    Documents without tokens are left out. Lengths include the start tokens, and the end-of-document token if the recipe
    appends one.
    Raises DataError for a text refused by the tokenizer, and for an id outside its vocabulary.
    """
    pieces = list[NDArray[np.integer]]()
    lengths = list[int]()
    kept = list[tuple[DocumentPlace, str]]()
    start = start_ids(recipe.tokenizer, tokenizer, recipe.start_token)
    end = np.array([tokenizer.eod] if recipe.append_eod else [], np.int64)
    for position, text in documents:
        try:
            ids = tokenizer.encode(text)
        except (ValueError, RuntimeError, DataError) as error:
            raise DataError(f"{position.describe()}: {recipe.tokenizer} refuses the text: {error}") from error
        if ids.size:
            ids = with_start(ids, start)
            pieces += [ids, end]
            lengths.append(len(ids) + len(end))
            kept.append((position, text))
    tokens = np.concatenate([end[:0], *pieces])  # the empty piece makes the dtype int64, and allows no documents at all
    if tokens.size and (tokens.min() < 0 or tokens.max() >= tokenizer.vocab_size):
        at = int(((tokens < 0) | (tokens >= tokenizer.vocab_size)).argmax())
        document = int(np.searchsorted(np.cumsum(lengths), at, "right"))
        raise DataError(
            f"{kept[document][0].describe()}: offset {at - sum(lengths[:document])}: token id {tokens[at]} is outside "
            f"the vocabulary of {tokenizer.vocab_size} of {recipe.tokenizer}"
        )
    return tokens, lengths, [text for _, text in kept]


def _work(recipe: PreprocessOptions, folder: Path) -> Callable[[PartSpans, Callable[[TextCounts], None]], None]:
    """The maker of a shard's part. It is called in the worker, so each loads its own tokenizer."""
    return partial(_make_part, _tokenizer(recipe), recipe, folder)


def _tokenizer(recipe: PreprocessOptions) -> Tokenizer:
    return load_tokenizer(recipe.tokenizer, parse_special=recipe.special_tokens == "parse")
