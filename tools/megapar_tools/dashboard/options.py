"""The options of a run by dotted path, each with its value and where the value came from, out of config.toml."""

import re
import tomllib
from pathlib import PurePath

from megapar.base.errors import DataError
from megapar.checkpoint.load import flatten

_LINE = re.compile(r"(?P<key>[\w-]+) = .*  # (?P<source>.*)")
_HERE = ", here "  # what a run has made of a value such as 0, which means "the world size decides"


def read_options(text: str) -> dict[str, tuple[str, str]]:
    """Return value and source of each option of a config.toml's `text`. Raises DataError if the text is no TOML."""
    try:
        values = {path: _shown(value) for path, value in flatten(tomllib.loads(text)).items()}
    except (ValueError, RecursionError) as error:
        raise DataError(f"config.toml is no TOML: {error}") from error
    sources, section = {}, ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[] ") + "."
        elif found := _LINE.fullmatch(line):
            sources[section + found["key"]] = found["source"]
    options = {}
    for path, value in values.items():
        source, _, derived = sources.get(path, "").partition(_HERE)
        name = PurePath(source).name or source  # a file's folders would fill the table
        options[path] = (f"{value} → {derived}" if derived else value, name)
    return options


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
