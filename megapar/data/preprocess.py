"""Text files to token files, on several processes: documents come out in the order in which they went in.

The input is cut into tasks of about a MiB: byte ranges of .jsonl files, handfuls of whole text files. Each worker gets
one task at a time and sends back its tokens; the parent writes them in order. The cuts do not depend on the number of
workers, so neither does a byte of the output; only a few tasks are in flight, so memory does not grow with the input.
"""

import json
import multiprocessing
import multiprocessing.connection
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from megapar.data.indexed import IndexedWriter, token_dtype
from megapar.data.tokenizer import Tokenizer, load_tokenizer
from megapar.errors import ConfigError, DataError, MegaparError

TEXT_SUFFIXES = (".txt", ".md", ".py")
_TASK_BYTES = 1 << 20


@dataclass(frozen=True)
class Span:
    """The documents that begin in bytes [start, stop) of a file: lines of a .jsonl file, or all of a text file."""

    path: Path
    start: int
    stop: int


@dataclass(frozen=True)
class Chunk:
    """One task's documents: their tokens one after the other and the length of each. `empty` ones are left out."""

    tokens: NDArray[np.integer]
    lengths: NDArray[np.int64]
    empty: int
    num_bytes: int


@dataclass
class Summary:
    """What has been tokenised so far: `num_bytes` of input, `empty` documents that were left out."""

    documents: int = 0
    tokens: int = 0
    num_bytes: int = 0
    empty: int = 0

    def add(self, chunk: Chunk) -> None:
        self.documents += len(chunk.lengths)
        self.tokens += len(chunk.tokens)
        self.num_bytes += chunk.num_bytes
        self.empty += chunk.empty


def preprocess(
    inputs: Sequence[Path],
    output: Path,
    tokenizer_spec: str,
    *,
    workers: int = 1,
    append_eod: bool = False,
    on_progress: Callable[[Summary], None] = lambda summary: None,
) -> Summary:
    """Tokenise `inputs` (see `find_files`) into the .bin/.idx pair `output`, one sequence a document.

    .jsonl files hold a document in the `text` field of each line, text files are one document. `append_eod` ends each
    with the tokenizer's end-of-document id. Documents without text are left out and counted. Raises ConfigError or
    DataError for options or input that cannot be used, naming file, line and byte; then no output appears.
    """
    if workers < 1:
        raise ConfigError(f"--workers {workers}: give at least 1")
    files = find_files(inputs)
    dtype = token_dtype(load_tokenizer(tokenizer_spec).vocab_size)
    summary = Summary()
    with IndexedWriter(output, dtype) as writer, _worker_pool(workers, tokenizer_spec, append_eod) as pool:
        for chunk in _in_order(_tasks(files), pool):
            writer.add_documents(chunk.tokens, chunk.lengths)
            summary.add(chunk)
            on_progress(summary)
        if not summary.tokens:
            raise DataError(f"{', '.join(map(str, inputs))}: 0 tokens: all documents are empty")
    return summary


def find_files(inputs: Sequence[Path]) -> list[Path]:
    """The files that `inputs` name, in their order; a folder stands for those below it with a known suffix, sorted.

    Raises DataError for what is missing and ConfigError for a file whose suffix says neither lines nor text.
    """
    known = (".jsonl", *TEXT_SUFFIXES)
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            files += sorted(p for p in path.rglob("*") if p.suffix in known and p.is_file())
        elif not path.is_file():
            raise DataError(f"--input {path}: no such file or folder")
        elif path.suffix not in known:
            raise ConfigError(f"--input {path}: unknown kind of file; use {', '.join(known)} or a folder of them")
        else:
            files.append(path)
    if not files:
        raise DataError(f"--input {' '.join(map(str, inputs))}: no {', '.join(known)} file there")
    return files


def read_documents(inputs: Sequence[Path]) -> Iterator[str]:
    """The documents of `inputs` as `preprocess` sees them, one after the other."""
    for task in _tasks(find_files(inputs)):
        for span in task:
            yield from _documents(span)


def _tasks(files: Iterable[Path]) -> Iterator[list[Span]]:
    task: list[Span] = []
    num_bytes = 0
    for path in files:
        size = path.stat().st_size
        step = _TASK_BYTES if path.suffix == ".jsonl" else max(size, 1)
        for start in range(0, size, step):
            task.append(Span(path, start, min(start + step, size)))
            num_bytes += task[-1].stop - start
            if num_bytes >= _TASK_BYTES:
                yield task
                task, num_bytes = [], 0
    if task:
        yield task


def _documents(span: Span) -> Iterator[str]:
    if span.path.suffix == ".jsonl":
        yield from _json_lines(span)
        return
    try:
        yield span.path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{span.path}: byte {error.start}: not UTF-8 ({error.reason}); convert or remove it") from error


def _json_lines(span: Span) -> Iterator[str]:
    """The texts of the lines that begin inside `span`; blank lines are none."""
    with span.path.open("rb") as file:
        if span.start:
            file.seek(span.start - 1)
            file.readline()
        while (offset := file.tell()) < span.stop and (line := file.readline()):
            if not line.strip():
                continue
            try:
                text = json.loads(line.decode())["text"]
                text.encode()  # a lone surrogate is valid JSON and no text
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                number = _newlines_before(span.path, offset) + 1
                raise DataError(
                    f'{span.path}: line {number} (byte {offset}): expected {{"text": "..."}} in UTF-8, got '
                    f"{line[:40]!r} ({type(error).__name__}: {error})"
                ) from error
            yield text


def _newlines_before(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        return sum(file.read(min(1 << 20, offset - at)).count(b"\n") for at in range(0, offset, 1 << 20))


def _tokenise(task: list[Span], tokenizer: Tokenizer, append_eod: bool) -> Chunk:
    dtype = token_dtype(tokenizer.vocab_size)
    documents: list[NDArray[np.integer]] = []
    empty = 0
    for span in task:
        for text in _documents(span):
            ids = tokenizer.encode(text)
            if not ids:
                empty += 1
                continue
            if append_eod:
                ids.append(tokenizer.eod)
            documents.append(np.array(ids, dtype))
    return Chunk(
        tokens=np.concatenate([np.empty(0, dtype), *documents]),
        lengths=np.array([len(tokens) for tokens in documents], np.int64),
        empty=empty,
        num_bytes=sum(span.stop - span.start for span in task),
    )


def _work(connection: Connection, tokenizer_spec: str, append_eod: bool) -> None:
    """A worker process: a task in, a chunk or an error out, until the parent hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers Ctrl-C and ends its workers
    tokenizer = load_tokenizer(tokenizer_spec)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            connection.send(_tokenise(task, tokenizer, append_eod))
        except MegaparError as error:
            connection.send(error)


@contextmanager
def _worker_pool(count: int, tokenizer_spec: str, append_eod: bool) -> Iterator[dict[Connection, BaseProcess]]:
    """Worker processes by the connection to each, ended with the block. Spawned: a fork could inherit a held lock."""
    spawn = multiprocessing.get_context("spawn")
    pool: dict[Connection, BaseProcess] = {}
    try:
        for number in range(count):
            ours, theirs = spawn.Pipe()
            process: BaseProcess = spawn.Process(
                target=_work, args=(theirs, tokenizer_spec, append_eod), name=f"worker {number}", daemon=True
            )
            process.start()
            theirs.close()
            pool[ours] = process
        yield pool
    finally:
        for connection, process in pool.items():
            connection.close()
            process.terminate()
            process.join()


def _in_order(tasks: Iterator[list[Span]], pool: dict[Connection, BaseProcess]) -> Iterator[Chunk]:
    """The chunks of `tasks` in their order. At most four tasks a worker are out or waiting for an earlier one.

    Raises the error of the earliest bad task, however many workers there are, or DataError when a worker dies.
    """
    numbered = enumerate(tasks)
    running: dict[Connection, int] = {}
    finished: dict[int, Chunk | MegaparError] = {}
    following = 0
    while True:
        idle = [connection for connection in pool if connection not in running]
        room = max(4 * len(pool) - len(running) - len(finished), 0)
        for connection, (number, task) in zip(idle[:room], numbered, strict=False):
            with _alive(pool[connection]):
                connection.send(task)
            running[connection] = number
        if not running:
            return
        for ready in multiprocessing.connection.wait(list(running)):
            connection = cast(Connection, ready)
            with _alive(pool[connection]):
                finished[running.pop(connection)] = connection.recv()
        while following in finished:
            answer = finished.pop(following)
            if isinstance(answer, MegaparError):
                raise answer
            yield answer
            following += 1


@contextmanager
def _alive(process: BaseProcess) -> Iterator[None]:
    """Name the worker whose connection breaks."""
    try:
        yield
    except (EOFError, ConnectionError):
        process.join()
        raise DataError(
            f"{process.name} (pid {process.pid}) died with exit code {process.exitcode}; -9 means killed, often for "
            "memory: try fewer --workers"
        ) from None
