"""Files that whoever reads them finds whole: the old text or the new one, also after a kill."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megapar.errors import storing


def write_json(file: Path, facts: Mapping[str, Any]) -> None:
    """Replace `file` at once: whoever reads it, also after a kill, finds the old text or the new, never half of one.

    Raises StorageError if the disk does not take it.
    """
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    with storing(file):
        beside.write_text(json.dumps(facts, indent=1) + "\n")
        os.replace(beside, file)
