"""Files that whoever reads them finds whole: the old text or the new one, also after a kill."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megapar.errors import storing


def replace_file(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Write `data` beside `path` and rename it to `path`, so that no reader ever finds half of it.

    `sync`: on the disk before the rename, as a file needs it that a power cut must not lose. Raises OSError.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(draft, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


def write_json(path: Path, facts: Mapping[str, Any]) -> None:
    """Replace `path` by `facts` as JSON. Raises StorageError if the disk does not take it."""
    with storing(path):
        replace_file(path, (json.dumps(facts, indent=1) + "\n").encode())
