"""Files of torch.save, whole or as a part of a longer file, read without torch.load.

    NAME/data.pkl      a pickle: tensors are calls of `_rebuild_tensor_v2`, and their storages persistent ids
    NAME/data/0 ...    the storages' bytes, stored and not deflated
    NAME/byteorder     little or big

The pickle runs in our own machine (`pickles`). Of the rest only the archive's directory is read: tensors stay where
they are until somebody asks for a box of one.
"""

import math
import mmap
import os
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapar.base.errors import CheckpointError
from megapar.system.regular_files import SMALL, open_regular
from megapar_models.convert.formats.pickles import (
    Inert,
    Left,
    Name,
    PickleError,
    Table,
    left,
    plain,
    plain_names,
    refused,
    unpickled,
)

_LOCAL = struct.Struct("<4s22xHH")  # a local header: its mark, and the lengths of its name and extra field
_AT_ONCE = 1 << 24  # bytes that are read at a time
_SMALL_TENSOR = 1 << 20  # bytes of a tensor among plain values
_DIMS = 64
_OLD_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
}


class FileSpan(NamedTuple):
    """Bytes of a file."""

    start: int
    length: int


class _Storage(NamedTuple):
    """Where a storage's bytes are. Without a dtype it is untyped."""

    span: FileSpan
    dtype: torch.dtype | None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `offset` and `strides` are in elements of the storage at `span`."""

    span: FileSpan
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def repeats(self) -> bool:
        """Whether elements share their bytes, as those of an expanded tensor do."""
        step = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1:
                if stride < step:
                    return True
                step = stride * size
        return False

    def read(self, file: int, offset: Sequence[int], out: Tensor) -> None:
        """Fill `out` with the box at `offset`, in the shape of `out`. Raises EOFError if the file is too short."""
        first = self.offset + sum(o * s for o, s in zip(offset, self.strides, strict=True))
        _fill(file, self.span.start, first, self.strides, out)


def contiguous(span: FileSpan, dtype: torch.dtype, shape: tuple[int, ...]) -> StoredTensor:
    """The tensor of which all bytes of `span` are the elements, the last dimension fastest."""
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return StoredTensor(span, dtype, 0, shape, strides)


def read_exactly(file: int, span: FileSpan) -> bytes:
    """The bytes of a span. Raises EOFError if the file ends before."""
    data = os.pread(file, span.length, span.start)
    if len(data) < span.length and len(data) > 0:  # the system reads 2 GiB at most
        data += read_exactly(file, FileSpan(span.start + len(data), span.length - len(data)))
    if len(data) < span.length:
        raise EOFError(f"ends before byte {span.start + span.length:,}")
    return data


def _fill(file: int, base: int, first: int, strides: Sequence[int], out: Tensor) -> None:
    """Fill `out` with elements of the storage at byte `base`, from element `first` on, with `strides`.

    Where the elements lie close to each other, those between are read too: one long read is faster than many short
    ones. Otherwise the box is halved.
    """
    if not out.numel():
        return
    spread = [(size - 1) * stride for size, stride in zip(out.shape, strides, strict=True)]
    count = 1 + sum(spread)
    size = out.dtype.itemsize
    if count == 1 or (count * size <= _AT_ONCE and (count <= 2 * out.numel() or count * size <= 1 << 14)):
        data = bytearray(read_exactly(file, FileSpan(base + first * size, count * size)))
        values = torch.frombuffer(data, dtype=torch.uint8).view(out.dtype)
        out.copy_(values.as_strided(out.shape, tuple(strides)))
        return
    dim = max(range(len(spread)), key=spread.__getitem__)
    half = out.shape[dim] // 2
    _fill(file, base, first, strides, out.narrow(dim, 0, half))
    _fill(file, base, first + half * strides[dim], strides, out.narrow(dim, half, out.shape[dim] - half))


class _Window:
    """A part of a file, for zipfile. No single read takes more than `SMALL` bytes."""

    def __init__(self, file: int, span: FileSpan):
        self._file = file
        self._span = span
        self._at = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._span.length}[whence]
        if start + offset < 0:
            raise OSError("a position before the beginning")
        self._at = start + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self._span.length - self._at)
        size = rest if size < 0 else min(size, rest)
        if size > SMALL:
            raise zipfile.BadZipFile(f"its directory has {size:,} bytes")
        data = read_exactly(self._file, FileSpan(self._span.start + self._at, size))
        self._at += size
        return data


class Archive:
    """An archive of torch.save, opened: the span of each of its records, and the pickle.

    Raises PickleError, BadZipFile, EOFError and the like: `reading_archive` makes one error of them.
    """

    def __init__(self, file: int, span: FileSpan):
        self.file = file
        self._records: dict[str, FileSpan] = {}
        with zipfile.ZipFile(_Window(file, span)) as archive:
            infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
            ends = [*(info.header_offset for info in infos[1:]), archive.start_dir]
        for info, end in zip(infos, ends, strict=True):
            folder, _, name = info.filename.partition("/")
            if name in self._records or folder != infos[0].filename.partition("/")[0]:
                raise zipfile.BadZipFile(f"holds {info.filename[:80]!r} twice, or another archive's files too")
            self._records[name] = self._span(span, info, end)
        if "byteorder" in self._records and self._record("byteorder", 16) != b"little":
            raise zipfile.BadZipFile("its numbers are not little-endian")

    def _span(self, outer: FileSpan, info: zipfile.ZipInfo, end: int) -> FileSpan:
        """Where a record's bytes are: behind its local header, and before the next one at `end`."""
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise zipfile.BadZipFile(f"{info.filename[:80]!r} is deflated or encrypted, which torch.save never does")
        start = info.header_offset
        if start < 0 or start + _LOCAL.size > end or end > outer.length:
            raise zipfile.BadZipFile(f"the header of {info.filename[:80]!r} lies outside")
        mark, of_name, of_extra = _LOCAL.unpack(read_exactly(self.file, FileSpan(outer.start + start, _LOCAL.size)))
        name = read_exactly(self.file, FileSpan(outer.start + start + _LOCAL.size, of_name))
        if mark != b"PK\x03\x04" or name != info.orig_filename.encode("utf-8", "replace"):
            raise zipfile.BadZipFile(f"has no header of {info.filename[:80]!r} where its directory says")
        start += _LOCAL.size + of_name + of_extra
        if info.compress_size != info.file_size or start + info.file_size > end:
            raise zipfile.BadZipFile(f"the size of {info.filename[:80]!r}, {info.file_size:,}, is not true")
        # A record ends where its descriptor or the next record begins. Otherwise its header has a damaged length.
        stop = start + info.file_size
        behind = read_exactly(self.file, FileSpan(outer.start + stop, min(4, end - stop)))
        if behind != (b"PK\x07\x08" if info.flag_bits & 8 else b"") and stop != end:
            raise zipfile.BadZipFile(f"{info.filename[:80]!r} does not end where its header says")
        return FileSpan(outer.start + start, info.file_size)

    def _record(self, name: str, max_bytes: int) -> bytes:
        span = self._records.get(name)
        if span is None or span.length > max_bytes:
            raise zipfile.BadZipFile(f"has no {name}" if span is None else f"its {name} has {span.length:,} bytes")
        return read_exactly(self.file, span)

    def load(self, table: Table, made: Callable[[StoredTensor], Any] = lambda tensor: tensor) -> Any:
        """The object. `table` knows names beyond those of tensors, and `made` makes what stands for a tensor.

        Raises PickleError if the pickle names what the table lacks, or has a tensor that does not lie within its
        storage.
        """

        def known(text: str) -> Any:
            rebuild = _REBUILDS.get(text)
            if rebuild is not None:
                return Name(text, lambda args: made(rebuild(args)))
            return _TENSOR_NAMES.get(text) or table(text)

        return unpickled(self._record("data.pkl", SMALL), known, self._storage)

    def _storage(self, key: Any) -> _Storage:
        """The storage of a persistent id: ("storage", type, number of the record, device, elements)."""
        kind, dtype, number, _, elements = key
        span = self._records.get(f"data/{number}") if type(number) is str else None
        if kind != "storage" or type(dtype) is not _StorageType or type(elements) is not int or span is None:
            raise PickleError("refers to a storage that its archive lacks")
        itemsize = dtype.dtype.itemsize if dtype.dtype else 1
        if elements * itemsize != span.length:
            raise PickleError(f"a storage has {span.length:,} bytes and should have {elements * itemsize:,}")
        return _Storage(span, dtype.dtype)


class _StorageType(NamedTuple):
    """A storage's class, by the dtype of its elements; None is the untyped one's."""

    dtype: torch.dtype | None


def _tensor(args: tuple[Any, ...], dtype: torch.dtype | None = None) -> StoredTensor:
    """The tensor of the arguments of `_rebuild_tensor_v2`. Raises PickleError if it goes beyond its storage."""
    storage, offset, shape, strides, *_ = args
    if type(storage) is not _Storage or type(shape) is not tuple or type(strides) is not tuple:
        raise PickleError("a tensor has no storage or shape")
    dtype = dtype or storage.dtype
    if dtype is None or len(shape) != len(strides) or len(shape) > _DIMS:
        raise PickleError("a tensor has no dtype or strides")
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in (offset, *shape, *strides)):
        raise PickleError("a tensor's shape, offset or strides are no numbers from 0 on")
    numel = math.prod(shape)
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if numel and ((last + 1) * dtype.itemsize > storage.span.length or numel * dtype.itemsize > storage.span.length):
        raise PickleError(f"a tensor of shape {list(shape)[:8]} goes beyond its storage")
    return StoredTensor(storage.span, dtype, offset, shape, strides)


def _tensor_v3(args: tuple[Any, ...]) -> StoredTensor:
    """The same for `_rebuild_tensor_v3`, whose storage is untyped."""
    if len(args) < 7 or not isinstance(args[6], torch.dtype):
        raise PickleError("a tensor has no dtype")
    return _tensor(args, args[6])


def _subclass(args: tuple[Any, ...]) -> Any:
    """What `_rebuild_from_type_v2` makes of its first argument, a function, and of the third, its arguments."""
    if len(args) < 3 or type(args[0]) is not Name or type(args[2]) is not tuple:
        raise PickleError("a tensor's class is made of no function")
    return args[0].make(args[2])


_REBUILDS: Mapping[str, Callable[[tuple[Any, ...]], StoredTensor]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
}
_TENSOR_NAMES: Mapping[str, Any] = {
    **{f"torch.{name}Storage": _StorageType(dtype) for name, dtype in _OLD_STORAGES.items()},
    "torch.storage.UntypedStorage": _StorageType(None),
    "torch.UntypedStorage": _StorageType(None),
    "torch._utils._rebuild_parameter": Name("torch._utils._rebuild_parameter", lambda args: args[0]),
    "torch._tensor._rebuild_from_type_v2": Name("torch._tensor._rebuild_from_type_v2", _subclass),
}


# Classes of the objects that frameworks store besides tensors and plain values: their own settings and states, and
# random states. None of them is needed, so none of the classes is imported. Python 3.11.0 to 3.11.3 stores a member of
# an enumeration as a call of getattr, which is not made either.
_LEFT = re.compile(
    r"(megatron|nemo|torchtitan|transformer_engine)\..+|numpy\.(random\..+|_?core\.multiarray\.(_reconstruct|scalar)|ndarray)"
    r"|numpy\.dtype|numpy\.dtypes\.\w+DType|builtins\.getattr|types\.SimpleNamespace|signal\.Signals|_io\.BytesIO"
    r"|torch\.(_C\.Generator|Tensor|nn\.parameter\.(Parameter|Buffer)|torch_version\.TorchVersion)"
)


def names_of_frameworks(text: str) -> Any:
    """The table of what frameworks store with torch.save: small types, and classes whose objects are left out."""
    found = plain_names(text)
    if found is None and _LEFT.fullmatch(text):
        return left(text)
    return found


@contextmanager
def reading_archive(what: object) -> Iterator[None]:
    """Make one CheckpointError of what is raised about an archive in the block. `what` names file and place."""
    try:
        yield
    except PickleError as error:
        raise refused(what, error) from None
    except OSError as error:
        raise CheckpointError(f"{what}: not readable as an archive of torch.save ({error.strerror or error})") from None
    # zipfile lets through what struct and its own arithmetic raise at headers of nonsense.
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, LookupError, struct.error) as error:
        raise CheckpointError(f"{what}: not readable as an archive of torch.save ({error})") from None


def plain_value(archive: Archive, table: Table) -> Any:
    """The archive's object as a plain value, with small tensors. It is None if nothing plain is left of it."""

    def converted(value: Any) -> Any:
        if isinstance(value, StoredTensor) and value.nbytes <= _SMALL_TENSOR:
            out = torch.empty(value.shape, dtype=value.dtype)
            value.read(archive.file, (0,) * len(value.shape), out)
            return out
        if isinstance(value, torch.dtype):
            return str(value)
        return Left()

    value = plain(archive.load(table), converted)
    return None if isinstance(value, (Left, Inert)) else value


def load_mapped(path: Path) -> Any:
    """The object of a whole file of torch.save. Its tensors are mapped: their pages are read when they are touched.

    Containers keep their types, and objects of the frameworks' classes are Left.
    Raises CheckpointError if the file is no such archive, is cut, or names what `names_of_frameworks` lacks.
    """
    with reading_archive(path):
        file = open_regular(path)
        try:
            size = os.fstat(file).st_size
            # Private and writable, as torch's own mapping: nothing that is written goes back to the file.
            mapped = mmap.mmap(file, size, access=mmap.ACCESS_COPY)
            return Archive(file, FileSpan(0, size)).load(names_of_frameworks, lambda tensor: _mapped(mapped, tensor))
        finally:
            os.close(file)


def _mapped(mapped: mmap.mmap, tensor: StoredTensor) -> Tensor:
    """The tensor over the mapped file. It keeps the mapping alive."""
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    span, size = tensor.span, tensor.dtype.itemsize
    data = torch.frombuffer(mapped, dtype=torch.uint8, count=span.length // size * size, offset=span.start)
    if span.start % size:  # torch.save aligns storages; other writers may not
        data = data.clone()
    return data.view(tensor.dtype).as_strided(tensor.shape, tensor.strides, tensor.offset)
