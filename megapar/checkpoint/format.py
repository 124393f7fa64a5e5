"""The format of a checkpoint: boxes of logical tensors in safetensors files, and a JSON manifest, written last.

    run/checkpoints/step_00001200/        exists only when complete: renamed from .tmp-step_00001200-<random>
        manifest.json                     {"sha256": ..., "body": {...}}
        rank_00000.safetensors ...        one file for each rank that owns something
    run/checkpoints/latest                the newest name, for people and scripts; nothing here trusts it

Names are logical and know no layout (`main.layers.17.attention.q.weight`). The parts of fused parameters are stored
apart. Vocabulary padding and second copies of tied weights are not stored. So a checkpoint can be read into any layout.
"""

import hashlib
import json
import logging
import math
import os
import re
import stat
import uuid
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError

from megapar.base.errors import CheckpointError
from megapar.checkpoint.boxes import overlap
from megapar.checkpoint.manifest import EntryBytes, encode, index, seal
from megapar.declare.params import MAIN, Sizes
from megapar.system.device import out_of_memory
from megapar.system.regular_files import open_new, open_regular, read_regular

FORMAT = 1
MANIFEST = "manifest.json"
# The first part of a stored name is the tensor's state, which says what the tensor is to its parameter. The optimizer
# names its own states, such as moments, and `Manifest.states` has what it declares of them.
BUFFER = "buffer"  # a tensor that is state but no parameter
TRAINING_STATE = "training"  # such a tensor that the model itself does not need
WEIGHTS = (MAIN, BUFFER)  # states that a checkpoint of weights alone has
BASE = "base"  # the trainer's field that names the base of adapters
# What AdamW declares, for checkpoints of versions before `Manifest.states`.
_UNDECLARED = {
    "exp_avg": {"optimizer": "adamw", "initial": 0.0, "nonnegative": False},
    "exp_avg_sq": {"optimizer": "adamw", "initial": 0.0, "nonnegative": True},
}
MOST = 1 << 60  # counts are below it: a step further, they still fit into 64 bits
_NOT_IN_HEADER = ("tensors", "source")
_FOLDER = re.compile(r"step_(\d{8,})")
_PARSED = 32  # parsed entries that stay in memory
_LARGEST_MANIFEST = 1 << 32  # bytes; that of 70 billion parameters on 4,096 ranks has 83 MB


class StoredChunk(NamedTuple):
    """A stored box: the tensor `key` in `file` holds the elements [offset, offset + size) of a logical tensor."""

    file: str
    key: str
    offset: Sizes
    size: Sizes
    crc32: int


class TensorEntry(NamedTuple):
    """A logical tensor. Its chunks are disjoint and cover it."""

    shape: Sizes
    dtype: str
    chunks: tuple[StoredChunk, ...]


class BoxSource(Protocol):
    """Where the tensors of a manifest lie if no file of the project's own format holds them."""

    @property
    def notes(self) -> Sequence[str]:
        """Lines for the user about what goes on from them."""

    def reader(self, manifest: "Manifest") -> "AbstractContextManager[BoxReader]":
        """Open what reads boxes of the tensors of `manifest`, which is the source's."""


class BoxReader(Protocol):
    """What reads boxes of a checkpoint's tensors, such as `load.Reader`."""

    manifest: "Manifest"

    def fill(self, name: str, offset: Sizes, out: torch.Tensor) -> None:
        """Fill `out` with the box of tensor `name` at `offset`, in the shape of `out`. Values are cast."""


class ForeignCheckpointError(CheckpointError):
    """A checkpoint this version cannot read, although it may be whole. It must not be passed over or replaced."""


class Entries(Mapping[str, TensorEntry]):
    """The entries of a manifest on disk. An entry is parsed when it is asked for: all of them may take a gigabyte."""

    def __init__(self, path: Path, spans: Mapping[str, EntryBytes]):
        """Open the manifest `path`. Raises OSError if it cannot be opened."""
        self.path = path
        self.spans = spans
        self._parsed: dict[str, TensorEntry] = {}
        self._descriptor = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
        weakref.finalize(self, os.close, self._descriptor)

    def __getitem__(self, name: str) -> TensorEntry:
        """The entry of a tensor.

        Raises KeyError for a missing name, CheckpointError if the file is no longer the indexed one.
        """
        if name not in self._parsed:
            span = self.spans[name]
            text = os.pread(self._descriptor, span.stop - span.first, span.first)
            if zlib.crc32(text) != span.crc32:
                raise CheckpointError(f"{self.path}: changed since it was read first, or another file than rank 0's")
            if len(self._parsed) == _PARSED:
                self._parsed.clear()
            self._parsed[name] = _entry_of(self.path, name, text)
        return self._parsed[name]

    def __contains__(self, name: object) -> bool:
        return name in self.spans  # nothing is parsed

    def __iter__(self) -> Iterator[str]:
        return iter(self.spans)

    def __len__(self) -> int:
        return len(self.spans)


def _entry_of(path: Path, name: str, text: bytes) -> TensorEntry:
    """Parse the text of an entry. Raises CheckpointError if it does not have this format's shape."""
    try:
        return read_entry(json.loads(text))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a manifest of format {FORMAT}: tensor {name} ({error!r})") from None


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint's contents.

    `files` maps each file's name to its bytes. `layout` is the layout of the writing job. It is for people and is never
    needed to read the checkpoint. `states` has an object for each state of an optimizer, by its name: the name of the
    `optimizer` (`StateSlice.optimizer`), and what it declares (`StateTensor`). `content` has a number for each state of
    `WEIGHTS`, that of all its tensors in any layout (`megapar.checkpoint.values.content`). `source` is None unless the
    folder is another framework's: then tensors have no chunks, and the source reads them.
    """

    step: int
    consumed_samples: int
    layout: dict[str, Any]
    model_config: dict[str, Any]
    trainer: dict[str, Any]
    data: dict[str, Any]
    files: dict[str, int]
    tensors: Mapping[str, TensorEntry]
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    content: dict[str, int] = field(default_factory=dict)
    source: BoxSource | None = None

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> "Manifest":
        """Make a manifest of a parsed body.

        Raises KeyError, TypeError or ValueError if the body does not have this format's shape.
        """
        return cls.from_header(body, {name: read_entry(entry) for name, entry in body["tensors"].items()})

    @classmethod
    def from_header(cls, header: Mapping[str, Any], tensors: Mapping[str, TensorEntry]) -> "Manifest":
        """Make a manifest of a parsed body without tensors, and of `tensors`.

        Raises KeyError or TypeError if the body does not have this format's shape.
        """
        header = {"states": _UNDECLARED, "content": {}, **header}
        fields = {name: header[name] for name in cls.__dataclass_fields__ if name not in _NOT_IN_HEADER}
        for name, value in fields.items():
            if name not in ("step", "consumed_samples") and type(value) is not dict:
                raise TypeError(f"{name} must be an object")
        # `type`, because True is an instance of int.
        counts = (header["step"], header["consumed_samples"], *header["files"].values())
        if any(type(count) is not int or not 0 <= count < MOST for count in counts):
            raise TypeError("step, consumed_samples and file sizes must be integers of at least 0, below 2^60")
        for name, declared in header["states"].items():
            if type(declared) is not dict or type(declared["optimizer"]) is not str:
                raise TypeError(f"states.{name} must be an object that names its optimizer")
        return cls(**fields, tensors=tensors)

    def is_nonnegative(self, tensor: str) -> bool:
        """Whether a stored tensor may hold no negative value, by the declaration of its state."""
        state, _, _ = tensor.partition(".")
        return self.states.get(state, {}).get("nonnegative") is True

    def optimizer_of(self, name: str) -> str:
        """The optimizer of the logical tensor `name`, or "" if the checkpoint has no state of it."""
        found = (declared["optimizer"] for state, declared in self.states.items() if f"{state}.{name}" in self.tensors)
        return next(found, "")

    @property
    def base(self) -> Any:
        """What the trainer says of the base of adapters; None if the checkpoint holds all weights of a model."""
        return self.trainer.get(BASE) or None

    def weights_digest(self) -> str:
        """A SHA-256 of all weights, the same in whatever layout they were written.

        A checkpoint of a version before `content` has one of names, shapes, and the CRC-32 of each box in its files.
        """
        if self.content:
            return hashlib.sha256(json.dumps(self.content, sort_keys=True).encode()).hexdigest()
        digest = hashlib.sha256()
        for name, entry in sorted(self.tensors.items()):
            if name.partition(".")[0] in WEIGHTS:
                boxes = sorted((chunk.offset, chunk.size, chunk.crc32) for chunk in entry.chunks)
                digest.update(repr((name, entry.shape, boxes)).encode())
        return digest.hexdigest()

    def header(self) -> dict[str, Any]:
        """All fields but the tensors, as JSON types."""
        return {name: value for name, value in vars(self).items() if name not in _NOT_IN_HEADER}

    def body(self) -> dict[str, Any]:
        """All fields and the format, as JSON types."""
        tensors = {name: entry._asdict() for name, entry in self.tensors.items()}
        return {"format": FORMAT, **self.header(), "tensors": tensors}

    def kinds(self) -> dict[str, tuple[str, Sizes]]:
        """Return dtype and shape of each tensor, by name. No chunk is parsed."""
        if isinstance(self.tensors, Entries):
            return {name: (span.dtype, span.shape) for name, span in self.tensors.spans.items()}
        return {name: (entry.dtype, entry.shape) for name, entry in self.tensors.items()}

    def outline(self) -> dict[str, Any] | None:
        """What `from_outline` takes, as JSON types, or None if the manifest's text cannot be read in parts."""
        if not isinstance(self.tensors, Entries):
            return None
        return {"header": self.header(), "spans": self.tensors.spans}

    @classmethod
    def from_outline(cls, folder: Path, outline: Mapping[str, Any]) -> "Manifest":
        """The manifest of `folder` from the `outline` of a process that has verified it.

        Entries are parsed only when asked for. Raises CheckpointError if the manifest cannot be opened.
        """
        spans = {
            name: EntryBytes(first, stop, crc32, dtype, tuple(shape))
            for name, (first, stop, crc32, dtype, shape) in outline["spans"].items()
        }
        try:
            return cls(**outline["header"], tensors=Entries(folder / MANIFEST, spans))
        except OSError as error:
            raise CheckpointError(
                f"{folder / MANIFEST}: {error.strerror}; all ranks must see the same folder"
            ) from None


def read_entry(entry: Mapping[str, Any]) -> TensorEntry:
    """Make an entry of parsed JSON.

    Raises KeyError, TypeError or ValueError if it does not have this format's shape.
    """
    chunks = tuple(
        StoredChunk(str(file), str(key), _sizes(offset), _sizes(size), crc)
        for file, key, offset, size, crc in entry["chunks"]
    )
    return TensorEntry(_sizes(entry["shape"]), str(entry["dtype"]), chunks)


def _sizes(values: Iterable[Any]) -> Sizes:
    sizes = tuple(values)
    # A loop, because `any` takes twice as long, and a checkpoint may have a million chunks.
    for size in sizes:
        if type(size) is not int or size < 0:
            raise TypeError(f"{sizes} should be integers of at least 0")
    return sizes


def dtype_name(dtype: torch.dtype) -> str:
    """The name of `dtype` without "torch.", such as float32."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Torch's dtype of this name, such as float32. Raises ValueError if the name is no dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


def folder_name(step: int) -> str:
    """The name of the folder of the checkpoint at `step`."""
    return f"step_{step:08d}"


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint's folder, or 0 for a folder of another name."""
    match = _FOLDER.fullmatch(folder.name)
    if match:
        return int(match[1])
    return 0


def sync_folder(folder: Path) -> None:
    """Write the folder's names to the disk, so they survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_latest(root: Path, name: str | None) -> None:
    """Write `name` to the file `latest`, or remove the file if `name` is None.

    An OSError is only a warning, because `latest` is for people and scripts and nothing here reads it.
    """
    draft = root / f".latest-{uuid.uuid4().hex[:8]}"
    try:
        if name is None:
            (root / "latest").unlink(missing_ok=True)
        else:
            with open_new(draft) as file:
                file.write(f"{name}\n".encode())
            draft.replace(root / "latest")
    except OSError as error:
        draft.unlink(missing_ok=True)
        logging.getLogger(__name__).warning("%s/latest not written: %s", root, error)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest to the disk. It must be the last file, since it makes the folder a checkpoint."""
    text = seal(manifest.body())
    with open(folder / MANIFEST, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, once the checkpoint is known to be complete.

    It is complete if the manifest is unedited, every file is there in its full size, and every tensor is covered once.
    The contents of the files are not read here; `Reader` compares each chunk with its CRC.
    Raises CheckpointError if it is not complete. The subclass ForeignCheckpointError stands for a checkpoint of a later
    version, or for files turned into links by a tool.
    """
    manifest = open_manifest(folder)
    check_files(folder, manifest.files)
    check_tensors(folder, manifest)
    return manifest


def open_manifest(folder: Path) -> Manifest:
    """The manifest, after a comparison of its text with its SHA-256. The checkpoint's files and chunks are not checked.

    Raises CheckpointError, or ForeignCheckpointError as `read_manifest` does.
    """
    path = folder / MANIFEST
    text = _read_text(folder)
    indexed = index(text)
    try:
        if indexed is None:
            return _parse_whole(path, text)
        _require_our_format(path, indexed.header["format"])
        return Manifest.from_header(indexed.header, Entries(path, indexed.spans))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a manifest of format {FORMAT} ({error!r})") from None


def _read_text(folder: Path) -> bytes:
    """The bytes of the manifest. Raises CheckpointError if it cannot be read."""
    path = folder / MANIFEST
    try:
        return read_regular(path, _LARGEST_MANIFEST, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: incomplete or no checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        error_class = ForeignCheckpointError if path.is_symlink() else CheckpointError
        raise error_class(
            f"{path}: not readable ({error.strerror}): a regular file is needed, links are not followed"
        ) from None


def _parse_whole(path: Path, text: bytes) -> Manifest:
    """Parse a text in another form than `seal` writes. It may be spaced otherwise, edited, damaged or newer.

    Raises CheckpointError unless it is this format's and its SHA-256 is right.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: incomplete: not readable as JSON ({error})") from None
    body = document["body"]
    # The format is checked before the SHA-256, because a later format may take its SHA-256 of something else.
    _require_our_format(path, body["format"])
    if hashlib.sha256(encode(body).encode()).hexdigest() != document["sha256"]:
        raise CheckpointError(f"{path}: edited or damaged: its sha256 differs from the one it states")
    return Manifest.from_body(body)


def _require_our_format(path: Path, stated: object) -> None:
    """Raise unless `stated` is this version's format; ForeignCheckpointError if it is a later one."""
    if stated == FORMAT:
        return
    error_class = ForeignCheckpointError if isinstance(stated, int) and stated > FORMAT else CheckpointError
    raise error_class(f"{path}: written in format {stated!r}, this version reads format {FORMAT}")


def check_files(folder: Path, files: Mapping[str, int]) -> None:
    """Raise CheckpointError unless each of `files` (name to bytes) is in `folder` and has that size."""
    for name, size in files.items():
        if name in ("", ".", "..") or os.path.basename(name) != name or "\0" in name:
            raise CheckpointError(f"{folder / MANIFEST}: names {name!r}, a path outside the checkpoint's folder")
        try:
            status = os.lstat(folder / name)
        except OSError:
            raise CheckpointError(f"{folder / name}: missing, one of {len(files)} files listed") from None
        if not stat.S_ISREG(status.st_mode):
            error_class = ForeignCheckpointError if stat.S_ISLNK(status.st_mode) else CheckpointError
            raise error_class(
                f"{folder / name}: not a regular file (links are not followed): copy the file itself there"
            )
        if status.st_size != size:
            raise CheckpointError(f"{folder / name}: {status.st_size} bytes, the manifest says {size}")


def check_tensors(folder: Path, manifest: Manifest) -> None:
    """Raise CheckpointError unless the chunks cover every tensor once and fit into their files."""
    path = folder / MANIFEST
    stored: dict[str, int] = defaultdict(int)
    for name, entry in manifest.tensors.items():
        problem = _problem(entry, manifest.files)
        if problem:
            raise CheckpointError(f"{path}: tensor {name} of shape {list(entry.shape)}: {problem}")
        itemsize = dtype_of(entry.dtype).itemsize
        for chunk in entry.chunks:
            stored[chunk.file] += math.prod(chunk.size) * itemsize
    for file, size in stored.items():
        if size > manifest.files[file]:
            raise CheckpointError(f"{path}: {file} would hold {size} bytes of chunks in {manifest.files[file]} bytes")


def _problem(entry: TensorEntry, files: Mapping[str, int]) -> str | None:
    """Return why the chunks of `entry` do not cover it exactly once, or None if they do."""
    try:
        dtype_of(entry.dtype)
    except ValueError as error:
        return str(error)
    for chunk in entry.chunks:
        if chunk.file not in files:
            return f"chunk {chunk.key} lies in {chunk.file}, which is not listed"
        if len(chunk.offset) != len(entry.shape) or len(chunk.size) != len(entry.shape):
            return f"chunk {chunk.key} has another number of dimensions"
        for start, size, end in zip(chunk.offset, chunk.size, entry.shape, strict=True):
            if start + size > end:
                return f"chunk {chunk.key} at {list(chunk.offset)} of size {list(chunk.size)} reaches beyond it"
    clash = _overlapping(entry.chunks)
    if clash:
        return f"chunks {clash[0].key} of {clash[0].file} and {clash[1].key} of {clash[1].file} overlap"
    # Chunks that are inside the tensor and do not overlap cover it if they have as many elements.
    covered = sum(math.prod(chunk.size) for chunk in entry.chunks)
    total = math.prod(entry.shape)
    if covered != total:
        return f"chunks cover {covered} of {total} elements"
    return None


def _overlapping(chunks: Iterable[StoredChunk]) -> tuple[StoredChunk, StoredChunk] | None:
    """Two chunks with an element in common, or None. A sweep along dimension 0 finds them."""
    active: list[StoredChunk] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offset):
        # Chunks come in ascending order, so one that ends before this chunk meets none of the later ones either.
        active = [other for other in active if _reach(other) > _start(chunk)]
        for other in active:
            if overlap(other.offset, other.size, chunk.offset, chunk.size):
                return other, chunk
        active.append(chunk)
    return None


def _start(chunk: StoredChunk) -> int:
    if chunk.offset:
        return chunk.offset[0]
    return 0


def _reach(chunk: StoredChunk) -> int:
    if chunk.offset:
        return chunk.offset[0] + chunk.size[0]
    return 1


def checkpoint_folders(root: Path) -> list[Path]:
    """The folders in `root` named like a checkpoint, complete or not, newest step first."""
    if not root.is_dir():
        return []
    folders = [path for path in root.iterdir() if _FOLDER.fullmatch(path.name)]
    return sorted(folders, key=lambda path: (step_of(path), path), reverse=True)


Check = Callable[[Manifest], object]


def find_complete(root: Path, check: Check | None = None) -> Iterator[Path]:
    """Yield the complete checkpoints in `root`, newest step first.

    Incomplete ones are skipped with a warning, and so are those refused by `check` with CheckpointError. Folders of
    other names, such as those left by a killed save, are no checkpoints.
    Raises ForeignCheckpointError when it comes to such a checkpoint.
    """
    for folder in checkpoint_folders(root):
        try:
            manifest = read_manifest(folder)
            # Another checkpoint's manifest, or a folder that somebody has renamed.
            if manifest.step != step_of(folder):
                raise CheckpointError(f"{folder}: its manifest is of step {manifest.step}")
            if check is not None:
                check(manifest)
        except ForeignCheckpointError:
            raise
        except CheckpointError as error:
            logging.getLogger(__name__).warning("checkpoint skipped: %s", error)
        else:
            yield folder


def is_complete(folder: Path) -> bool:
    """Whether the manifest is unedited and its files are there. Tensors are not checked.

    If not, a warning says why.
    """
    try:
        check_files(folder, open_manifest(folder).files)
    except CheckpointError as error:
        logging.getLogger(__name__).warning("checkpoint skipped: %s", error)
        return False
    return True


@contextmanager
def reading(what: str) -> Iterator[None]:
    """A context to read safetensors files. Raises CheckpointError, with `what`, for what the reader raises.

    safetensors opens a file twice, the second time by torch. If the file is removed in between, torch raises
    RuntimeError.
    """
    try:
        yield
    except (SafetensorError, OSError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        text = " ".join(str(error).split())
        raise CheckpointError(f"{what}: not readable as safetensors ({text})") from error
