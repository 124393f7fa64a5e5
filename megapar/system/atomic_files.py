"""Replaces files so that a reader finds the whole old text or the whole new text, also after a kill.

The folder may be open to others, who may put a link under any name that can be guessed. No link is followed: text goes
to a new file under a random name, and the rename replaces a link, not the file behind it.
"""

import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from megapar.base.errors import storing
from megapar.system.regular_files import open_new

_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/null")


def _is_stream(path: Path) -> bool:
    """Whether a user has named a stream of this process. Streams are written: root would replace the system's file."""
    return str(path) in _STREAMS or str(path).startswith("/dev/fd/")


def _draft(path: Path) -> Path:
    """A file beside `path` under a name that nobody can guess. Several hosts may share the folder."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")


def replace_file(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Write `data` to a file beside `path` and rename that file to `path`. No reader ever finds half of it.

    `sync` writes the data to the disk before the rename, so that a power cut does not lose it. /dev/stdout and other
    streams are written. Raises OSError.
    """
    if _is_stream(path):
        path.write_bytes(data)
        return
    draft = _draft(path)
    try:
        with open_new(draft) as file:
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

    Streams are written, as by `replace_file`. Raises StorageError if it cannot be opened, synced or renamed.
    """
    if _is_stream(path):
        with storing(path), open(path, "wb") as stream:
            yield stream
        return
    draft = _draft(path)
    with storing(path):
        file = open_new(draft)
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


def write_text(path: Path, text: str) -> None:
    """Replace the file at `path` by `text` in UTF-8. Raises StorageError if it cannot be written."""
    with storing(path):
        replace_file(path, text.encode())


def save_figure(figure: Any, path: Path) -> None:
    """Replace the file at `path` by a figure of matplotlib, in the format of its suffix, such as .svg.

    Raises StorageError if it cannot be written.
    """
    with replacing(path) as file:
        figure.savefig(file, dpi=120, format=path.suffix.removeprefix(".") or None)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace the file at `path` by `value` as JSON (`as_json`). Raises StorageError if it cannot be written."""
    write_text(path, as_json(value, indent=1) + "\n")
