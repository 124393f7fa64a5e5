"""Replaces files so that a reader finds the whole old text or the whole new text, also after a kill."""

import json
import math
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from megapar.errors import storing
from megapar.system.regular_files import open_regular


def _draft(path: Path) -> Path:
    """A file beside `path`, of this process alone: several hosts may share the folder."""
    return path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")


def _opened(draft: Path) -> BinaryIO:
    return open(open_regular(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb")


def replace_file(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Write `data` to a file beside `path` and rename that file to `path`. No reader ever finds half of it.

    `sync` writes the data to the disk before the rename, so that a power cut does not lose it. Raises OSError.
    """
    draft = _draft(path)
    try:
        with _opened(draft) as file:
            file.write(data)
            # Without this a file system may do the rename first, and leave an empty file after a power cut.
            if sync:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that becomes `path` when the block ends without an error, with all its bytes on the disk. Else it is gone.

    Raises StorageError if it cannot be opened, synced or renamed.
    """
    draft = _draft(path)
    with storing(path):
        file = _opened(draft)
    try:
        with file:
            yield file
            with storing(path):
                file.flush()
                os.fsync(file.fileno())
        with storing(path):
            draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def finite(value: Any) -> Any:
    """The value with None for numbers that JSON has not: NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(part) for key, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list | tuple) else value


def as_json(value: Any, indent: int | None = None) -> str:
    """The value as JSON for any reader: Python alone reads NaN and infinities, so these become null."""
    return json.dumps(finite(value), indent=indent, allow_nan=False)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace the file at `path` by `value` as JSON (`as_json`). Raises StorageError if it cannot be written."""
    with storing(path):
        replace_file(path, (as_json(value, indent=1) + "\n").encode())
