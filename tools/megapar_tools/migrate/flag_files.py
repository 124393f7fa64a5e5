"""Reads the files of tools/megapar_tools/migrate/flags: what is known of other frameworks' flags, as data."""

import tomllib
from pathlib import Path
from typing import Any


def read_flags(name: str) -> dict[str, Any]:
    """Return the tables of flags/NAME.toml."""
    return tomllib.loads((Path(__file__).parent / "flags" / f"{name}.toml").read_text(encoding="utf-8"))
