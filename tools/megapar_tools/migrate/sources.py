"""Reads the options of a running job: from a command, or from files of arguments (JSON, YAML, TOML)."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from megapar.base.errors import ConfigError
from megapar.system.regular_files import read_regular
from megapar_tools.migrate.carry import Option
from megapar_tools.migrate.expansion import MARK
from megapar_tools.migrate.job import OFF, plain
from megapar_tools.migrate.rows import OtherFlag
from megapar_tools.migrate.shell import Launch
from megapar_tools.migrate.table import TABLE

LARGEST_FILE = 1 << 20  # bytes of a file of arguments
_DEEPEST = 20  # tables in tables
_LARGEST_NUMBER = 1100  # bits, a little more than those of the largest float


def read_table(file: Path, text: str | None = None) -> dict[str, Any]:
    """Return the table in a file of arguments, or in `text` under that file's name. Raises ConfigError.

    The ending decides: .toml, .yaml or .yml; anything else is JSON.
    """
    try:
        text = read_regular(file, LARGEST_FILE).decode() if text is None else text
        if file.suffix == ".toml":
            table = tomllib.loads(text)
        elif file.suffix in (".yaml", ".yml"):
            table = _yaml(text, file)
        else:
            table = json.loads(text)
    except OSError as error:
        raise ConfigError(f"{file}: {(error.strerror or str(error)).lower()} (a file of arguments is read)") from None
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0] or "nested too deeply"
        kind = file.suffix.removeprefix(".") or "json"
        raise ConfigError(f"{file}: not readable as {kind}: {reason}") from None
    if not isinstance(table, dict) or not table:
        raise ConfigError(f"{file}: holds no arguments by name")
    wrong = _wrong(table)
    if wrong:
        raise ConfigError(f"{file}: {wrong}")
    return table


def _wrong(value: Any, depth: int = 0) -> str:
    """What keeps a value of a file from being read as options: a key that is no text, or a number beyond 64 bits."""
    if depth > _DEEPEST:
        return "tables are nested too deeply"
    if isinstance(value, int) and value.bit_length() > _LARGEST_NUMBER:
        return f"holds a number of more than {_LARGEST_NUMBER} bits"
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                return f"key {_shown(key)} is no name of an option; write it in quotes if it is one"
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next(filter(None, (_wrong(item, depth + 1) for item in items)), "")


def _shown(key: Any) -> str:
    """A key for a message of one line."""
    return "with a very large number" if isinstance(key, int) and key.bit_length() > 64 else repr(key)[:40]


def _yaml(text: str, file: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"{file}: YAML is read with PyYAML: pip install pyyaml, or give JSON") from None
    # An alias repeats what it names. A few lines of them make billions of values.
    if re.search(r"(^|[\s\[,:])[*&][A-Za-z0-9_]", text):
        raise ConfigError(f"{file}: has anchors or aliases, which are not read; write the values out")
    try:
        return yaml.safe_load(text)
    # A number to the base of 60 may be larger than any float. A key may be a list, which Python cannot look up.
    except (yaml.YAMLError, ArithmeticError, TypeError) as error:
        raise ConfigError(f"{file}: not readable as yaml: {' '.join(str(error).split())[:160]}") from None


def words_of(value: Any) -> tuple[str, ...]:
    """A value of JSON, YAML or TOML as words, as a command line has them. A table is one word, of JSON."""
    if value is None:
        return ()
    if isinstance(value, bool):
        return (str(value).lower(),)
    if isinstance(value, dict):
        return (json.dumps(value, default=str),)
    if isinstance(value, list | tuple):
        return tuple(word for item in value for word in words_of(item))
    return (str(value),)


def set_in(table: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a table that have a value: an empty one of YAML, and null of JSON, leave an option unset."""
    return {key: value for key, value in table.items() if value is not None}


def options_of_table(table: Mapping[str, Any], framework: str, launch: Launch | None = None) -> list[Option]:
    """Return the options of nested tables, with dotted names as deep as the rows of a framework go.

    `launch` is the launch of the script that writes the table: it says what keeps a value from being known.
    """
    rows = {plain(row.name): row for row in TABLE[framework]}
    found = _options(table, framework, rows, "")
    return [_told(option, launch) for option in found] if launch else list(found)


def _told(option: Option, launch: Launch) -> Option:
    """Return an option with its values for people, and with what keeps them from being known."""
    unresolved = next(filter(None, map(launch.unresolved, option.words)), "")
    return replace(option, words=tuple(map(readable, option.words)), unresolved=unresolved)


def document_of(launch: Launch, name: str) -> str | None:
    """Return the text of a file that a script writes, as JSON where its values are not known. None if there is none."""
    written = {readable(file).removeprefix("./"): text for file, text in launch.documents.items()}
    text = written.get(readable(name).removeprefix("./"))
    # A number that only a run knows stands in no quotes.
    return text and re.sub(f"([:\\[,]\\s*)({MARK}+)(\\s*[,}}\\]])", r'\1"\2"\3', text)


def _options(table: Mapping[str, Any], framework: str, rows: Mapping[str, OtherFlag], prefix: str) -> Iterator[Option]:
    if prefix.count(".") > _DEEPEST:
        raise ConfigError(f"{prefix[:60]}: tables are nested too deeply")
    for key, value in set_in(table).items():
        name = f"{prefix}{key}"
        has_keys = any(row.startswith(f"{plain(name)}.") for row in rows)
        if isinstance(value, dict) and (has_keys or (plain(name) not in rows and value)):
            yield from _options(value, framework, rows, f"{name}.")
        elif isinstance(value, dict) and rows[plain(name)].convert is None:
            yield from (Option(framework, f"{name}.{inner}", words_of(item)) for inner, item in set_in(value).items())
        else:
            yield Option(framework, name, words_of(value))


def options_of_words(words: Sequence[str], frameworks: Sequence[str], launch: Launch | None = None) -> list[Option]:
    """The options of a command line: --name value, --name=value. Of an option that is given twice the last counts.

    Each belongs to the first of `frameworks` that knows it, or else to the first.
    """
    grouped: dict[str, list[str]] = {}
    current: list[str] = []
    stray = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            current = [value] if equals else []
            grouped.pop(name, None)
            grouped[name] = current
        elif grouped:
            current.append(word)
        else:
            stray.append(word)
    found = []
    for name, values in grouped.items():
        framework = next((f for f in frameworks if any(plain(r.name) == plain(name) for r in TABLE[f])), frameworks[0])
        unresolved = next(filter(None, (launch.unresolved(word) for word in [name, *values])), "") if launch else ""
        shown = tuple(readable(word) for word in values)
        found.append(Option(framework, readable(name), shown, unresolved))
    for word in stray:
        reason = (launch.unresolved(word) if launch else "") or "it follows no flag"
        found.append(Option(frameworks[0], readable(word), (), reason))
    return found


def readable(word: str) -> str:
    """A word without marks: one that is a mark alone is a question mark."""
    return re.sub(MARK, "", word) or "?"


def world_of(launcher: Sequence[str]) -> int:
    """Ranks that a launcher starts: processes of a node x nodes. 0 if that is not known."""
    text = [word for item in launcher for word in item.split("=", 1)]
    values = {plain(name.lstrip("-")): value for name, value in pairwise(text)}
    each = values.get("nproc_per_node") or values.get("num_gpus") or values.get("num_processes") or ""
    if "include" in values and not each:
        each = str(len(re.findall(r"\d+", values["include"].rpartition(":")[2])))
    nodes = values.get("nnodes") or values.get("num_nodes") or "1"
    if values.get("num_processes"):
        nodes = "1"  # accelerate counts those of all nodes
    return int(each) * int(nodes) if re.fullmatch(r"\d{1,6}", each) and re.fullmatch(r"\d{1,6}", nodes) else 0


def options_of_saved(args: Mapping[str, Any], framework: str, opposites: Mapping[str, str]) -> tuple[list[Option], int]:
    """The options of saved arguments of argparse, and the number of those that are unset, off or at their default.

    A switch --no-x is saved as x, which is then false. `opposites` names further switches by the name that is saved.
    """
    rows = {plain(row.name): row for row in TABLE[framework]}
    found, unset = [], 0
    for name, value in args.items():
        words = words_of(value)
        if value is False and f"no_{name}" in rows:
            found.append(Option(framework, f"no-{name.replace('_', '-')}", ()))
        elif value is False and name in opposites:
            found.append(Option(framework, opposites[name], ()))
        elif (
            value is None
            or value in ([], (), {}, "")
            or " ".join(words).lower() in OFF
            or name in opposites
            or f"no_{name}" in rows
        ):
            unset += 1
        else:
            found.append(Option(framework, name.replace("_", "-"), () if value is True else words))
    return found, unset
