"""Text files to token files, on several processes; a run that was killed goes on where it stood.

The input is cut into shards (megapar.data.corpus). A worker takes one at a time, tokenizes it in batches and leaves a
part in the folder OUTPUT.parts: a .bin/.idx pair, hashes of the texts if duplicates are to go, and a .json that comes
last and says that the part is whole. A part is named after all that decides its bytes, so whoever finds one need not
make it. In the end the parts are joined in the order of the input (megapar.data.prepared), whoever made them and when.
Memory does not grow with the text: a batch in each worker, and tens of bytes a document while parts are joined.
"""

import hashlib
import json
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megapar.data.corpus import Place, Reading, Span, SpanReader, cut, find_files
from megapar.data.indexed import IndexedWriter, token_dtype
from megapar.data.prepared import join, sha256, sidecar_path, write_sidecar
from megapar.data.tokenizer import Tokenizer, load_tokenizer
from megapar.data.workers import run, worker_pool
from megapar.errors import ConfigError, DataError, storing

_PARTS_VERSION = 1  # raise it when the same input would give other parts
_BATCH_BYTES = 1 << 20
_SHARD_BYTES = 1 << 22  # more for large inputs: some thousand parts, not millions
_NAMED = 100  # bad documents whose places the sidecar names; all are counted


@dataclass(frozen=True, kw_only=True)
class Recipe(Reading):
    """What the output depends on, beside the input."""

    tokenizer: str
    """bytes, spm:FILE for a sentencepiece model, hf:FILE for a tokenizer.json, or tiktoken:FILE."""
    special_tokens: Literal["text", "parse"] = "text"
    """Special tokens that stand in a text, such as <|im_start|>: text, or with parse (hf: only) their ids."""
    append_eod: bool = False
    """End each document with the tokenizer's end-of-document id."""
    deduplicate: bool = False
    """Leave out documents whose text is, to the letter, that of an earlier one."""
    shuffle: int | None = None
    """Write documents in a random order that this number names, instead of the input's."""


@dataclass
class Counts:
    """What came of some input: `num_bytes` of its files, `empty` documents left out, `bad` ones left out or mended."""

    documents: int = 0
    tokens: int = 0
    num_bytes: int = 0
    text_bytes: int = 0
    empty: int = 0
    bad: dict[str, int] = field(default_factory=dict)

    def add(self, other: "Counts") -> None:
        for name in ("documents", "tokens", "num_bytes", "text_bytes", "empty"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, count in other.bad.items():
            self.bad[reason] = self.bad.get(reason, 0) + count


@dataclass(frozen=True)
class Shard:
    """Spans whose documents become the part `name`."""

    spans: list[Span]
    name: str


@dataclass(frozen=True)
class Part:
    """What NAME.json says of a finished part: `lines` of each span, and `bad` as (span, number, offset, reason)."""

    counts: Counts
    lines: list[int]
    bad: list[tuple[int, int, int, str]]
    on_bad_line: str


def preprocess(
    inputs: Sequence[Path],
    output: Path,
    recipe: Recipe,
    *,
    workers: int = 1,
    on_progress: Callable[[Counts], None] = lambda counts: None,
) -> dict[str, Any]:
    """Tokenize `inputs` (see `find_files`) into the .bin/.idx pair `output`, one sequence a document, and its sidecar.

    Returns the sidecar. Documents without text are left out and counted. `on_progress` first hears what an earlier run
    has left. Raises ConfigError or DataError for options or input that cannot be used, naming file, line and byte; then
    no output appears, and OUTPUT.parts keeps what is done.
    """
    if workers < 1 or (recipe.shuffle or 0) < 0:
        raise ConfigError(
            f"--workers {workers} --shuffle {recipe.shuffle}: give at least 1 worker, a shuffle from 0 on"
        )
    tokenizer = _tokenizer(recipe)
    files = find_files(inputs)
    versions = _versions(files)
    shards = list(_shards(files, recipe, tokenizer, versions))
    folder = Path(f"{output}.parts")
    with _parts_folder(folder), _hashing(versions) as hashes:
        done = Counts()
        todo = []
        for shard in shards:
            if part := _finished(folder, shard, recipe):
                done.add(part.counts)
            else:
                todo.append(shard)
        on_progress(done)
        with worker_pool(min(workers, len(todo)), partial(_work, recipe, folder)) as pool:
            for counts in run(todo, pool):
                done.add(counts)
                on_progress(done)
        parts = [_read_part(folder / shard.name) for shard in shards]
        facts = _facts(shards, parts, recipe, tokenizer)
        if not facts["tokens"]:
            _remove_parts(folder)
            raise DataError(f"{', '.join(map(str, inputs))}: 0 tokens: no document has any text")
        facts["sources"] = [{"path": str(path), "sha256": digest} for path, digest in hashes.result().items()]
        if _versions(files) != versions:
            raise DataError(f"{', '.join(map(str, inputs))}: changed while they were read; run it again")
        sidecar_path(output).unlink(missing_ok=True)
        names = [folder / shard.name for shard in shards]
        dtype = token_dtype(tokenizer.vocab_size)
        facts["documents"], facts["tokens"] = join(
            names, output, dtype, shuffle=recipe.shuffle, deduplicate=recipe.deduplicate
        )
        write_sidecar(output, facts)
    shutil.rmtree(folder)
    return facts


def read_documents(inputs: Sequence[Path], reading: Reading | None = None) -> Iterator[str]:
    """The documents of `inputs` as `preprocess` sees them, one after the other."""
    reading = reading or Reading()
    for spans in cut(find_files(inputs), reading, _SHARD_BYTES):
        for span in spans:
            yield from (text for _, text in SpanReader(span, reading))


def _versions(files: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Size and time of change of each file."""
    return {path: (stat.st_size, stat.st_mtime_ns) for path in files for stat in [path.stat()]}


def _shards(
    files: Sequence[Path], recipe: Recipe, tokenizer: Tokenizer, versions: dict[Path, tuple[int, int]]
) -> Iterator[Shard]:
    total = sum(size for size, _ in versions.values())
    shard_bytes = max(_SHARD_BYTES, 1 << min((total // 4096).bit_length(), 30))
    common = [_PARTS_VERSION, tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eod, recipe.append_eod]
    common += [recipe.text_field, recipe.text_lines, recipe.deduplicate, recipe.special_tokens]
    for spans in cut(files, recipe, shard_bytes):
        pieces = [[str(span.path), span.start, span.stop, *versions[span.path]] for span in spans]
        yield Shard(spans, hashlib.sha256(json.dumps([*common, pieces]).encode()).hexdigest()[:32])


def _finished(folder: Path, shard: Shard, recipe: Recipe) -> Part | None:
    """The part, if it is there as `recipe` wants it: one without bad documents serves however they are to be met."""
    if not Path(f"{folder / shard.name}.json").is_file():
        return None
    part = _read_part(folder / shard.name)
    return part if not part.counts.bad or part.on_bad_line == recipe.on_bad_line else None


def _read_part(name: Path) -> Part:
    path = Path(f"{name}.json")
    try:
        facts = json.loads(path.read_bytes())
        return Part(**facts | {"counts": Counts(**facts["counts"])})
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: not what an earlier run has left; remove {path.parent}") from error


def _facts(shards: list[Shard], parts: list[Part], recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """The sidecar but for what is known later."""
    total = Counts()
    places = list[str]()
    lines_before = 0
    for shard, part in zip(shards, parts, strict=True):
        total.add(part.counts)
        bad = deque(part.bad)
        for number, (span, lines) in enumerate(zip(shard.spans, part.lines, strict=True)):
            lines_before = lines_before if span.start else 0
            while bad and bad[0][0] == number:
                _, line, offset, reason = bad.popleft()
                places.append(f"{Place(span, line, offset).describe(lines_before)}: {reason}")
            lines_before += lines
    return {
        "documents": total.documents,
        "tokens": total.tokens,
        "tokenizer": {
            "spec": recipe.tokenizer,
            "sha256": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eod": tokenizer.eod,
            **({"special_tokens": "parse"} if recipe.special_tokens == "parse" else {}),
        },
        "append_eod": recipe.append_eod,
        "shuffle": recipe.shuffle,
        "deduplicate": recipe.deduplicate,
        "documents_before_deduplication": total.documents,
        "empty_documents": total.empty,
        "text_bytes": total.text_bytes,
        "bad_lines": {"on_bad_line": recipe.on_bad_line, "counts": total.bad, "first": places[:_NAMED]},
    }


@contextmanager
def _parts_folder(folder: Path) -> Iterator[None]:
    """A folder for parts, without the drafts of workers that were killed; it goes if no part is left in it."""

    def remove_drafts() -> None:
        for draft in folder.glob("draft-*"):
            draft.unlink(missing_ok=True)

    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        remove_drafts()
    try:
        yield
    finally:
        remove_drafts()
        with suppress(OSError):  # parts are left
            folder.rmdir()


def _remove_parts(folder: Path) -> None:
    """Of an input without text: another run could make nothing of them."""
    for path in folder.iterdir():
        path.unlink()


@contextmanager
def _hashing(files: Iterable[Path]) -> Iterator[Future[dict[Path, str]]]:
    """SHA-256 of each file, computed while the block runs; given up if it ends early."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        try:
            yield thread.submit(lambda: {path: sha256(path, stop) for path in files if not stop.is_set()})
        finally:
            stop.set()


def _make_part(
    tokenizer: Tokenizer, recipe: Recipe, folder: Path, shard: Shard, report: Callable[[Counts], None]
) -> None:
    """Write the part of a shard under a name of its own, then give it its name; `report` hears how far it is."""
    draft = folder / f"draft-{shard.name}-{os.getpid()}"
    hashes = bytearray()
    total = Counts()
    readers = [SpanReader(span, recipe) for span in shard.spans]
    with IndexedWriter(draft, token_dtype(tokenizer.vocab_size)) as writer:
        for documents, num_bytes in _batches(readers):
            tokens, lengths, kept = encode(documents, tokenizer, recipe)
            writer.add_documents(tokens, lengths)
            new = Counts(len(lengths), len(tokens), num_bytes - total.num_bytes, empty=len(documents) - len(lengths))
            for text in kept:
                raw = text.encode()
                new.text_bytes += len(raw)
                if recipe.deduplicate:
                    hashes += hashlib.blake2b(raw, digest_size=16).digest()
            total.add(new)
            report(new)
    bad = Counts()
    for reader in readers:
        bad.add(Counts(bad=reader.bad.counts))
    total.add(bad)
    report(bad)
    places = [(i, at.number, at.offset, why) for i, reader in enumerate(readers) for at, why in reader.bad.first]
    part = Part(total, [reader.lines for reader in readers], places[:_NAMED], recipe.on_bad_line)
    with storing(folder / shard.name):
        Path(f"{draft}.hash").write_bytes(hashes)
        Path(f"{draft}.json").write_text(json.dumps(asdict(part)))
        for suffix in ("bin", "idx", "hash", "json"):
            Path(f"{draft}.{suffix}").replace(f"{folder / shard.name}.{suffix}")


def _batches(readers: Iterable[SpanReader]) -> Iterator[tuple[list[tuple[Place, str]], int]]:
    """Documents of about a MiB together, and how many bytes of the files were read so far."""
    documents = list[tuple[Place, str]]()
    size = 0
    before = 0
    for reader in readers:
        for place, text in reader:
            documents.append((place, text))
            size += len(text)
            if size >= _BATCH_BYTES:
                yield documents, before + reader.num_bytes
                documents = []
                size = 0
        before += reader.num_bytes
    yield documents, before


def encode(
    documents: Sequence[tuple[Place, str]], tokenizer: Tokenizer, recipe: Recipe
) -> tuple[NDArray[np.int64], list[int], list[str]]:
    """Tokens of the documents one after the other, the length of each, and their texts; those without tokens left out.

    Raises DataError for a text that the tokenizer refuses, and for an id outside its vocabulary.
    """
    pieces = list[NDArray[np.integer]]()
    lengths = list[int]()
    kept = list[tuple[Place, str]]()
    end = np.array([tokenizer.eod] if recipe.append_eod else [], np.int64)
    for place, text in documents:
        try:
            ids = tokenizer.encode(text)
        except (ValueError, RuntimeError) as error:
            raise DataError(f"{place.describe()}: {recipe.tokenizer} refuses the text: {error}") from error
        if ids.size:
            pieces += [ids, end]
            lengths.append(len(ids) + len(end))
            kept.append((place, text))
    tokens = np.concatenate([end[:0], *pieces])
    if tokens.size and (tokens.min() < 0 or tokens.max() >= tokenizer.vocab_size):
        at = int(((tokens < 0) | (tokens >= tokenizer.vocab_size)).argmax())
        document = int(np.searchsorted(np.cumsum(lengths), at, "right"))
        raise DataError(
            f"{kept[document][0].describe()}: offset {at - sum(lengths[:document])}: token id {tokens[at]} is outside "
            f"the vocabulary of {tokenizer.vocab_size} of {recipe.tokenizer}"
        )
    return tokens, lengths, [text for _, text in kept]


def _work(recipe: Recipe, folder: Path) -> Callable[[Shard, Callable[[Counts], None]], None]:
    """What a worker does with a shard. Called in the worker, which alone needs the tokenizer."""
    return partial(_make_part, _tokenizer(recipe), recipe, folder)


def _tokenizer(recipe: Recipe) -> Tokenizer:
    return load_tokenizer(recipe.tokenizer, parse_special=recipe.special_tokens == "parse")
