"""Options from TOML files and flags, each with its source, and back to TOML.

A value comes from the default, then from a TOML file (`--config`, whose `base` key names a file to start from), then
from a flag (`--section.key value`). What cannot be understood is a ConfigError that says where it stands, in one line.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, fields
from difflib import SequenceMatcher
from io import StringIO
from typing import Any, Literal, NamedTuple, get_args, get_origin

import tyro

from megapar.config import Config, flatten, option_types, unflatten
from megapar.errors import ConfigError


@dataclass(frozen=True)
class Resolved:
    """A configuration and where each of its values came from: "default", a file's name or "flag", by dotted path."""

    config: Config
    sources: Mapping[str, str]


@dataclass(frozen=True)
class _CommandLine(Config):
    """Pretrain a transformer with data, tensor and pipeline parallelism."""

    config: str = ""
    """TOML file of options; its `base` key may name a file to start from. Flags win over files."""


class _Flag(NamedTuple):
    option: str
    words: tuple[str, ...]  # as typed: the flag and its values


def load(argv: Sequence[str]) -> Resolved:
    """Options from the flags in `argv` (without the program's name), above `--config`'s files, above the defaults.

    `--help` prints every option with the value that it would have, and exits. Raises ConfigError for a flag, key, type
    or file that is not understood; `validate` judges what the values mean.
    """
    flags = _split(argv)
    values = flatten(Config())
    sources = dict.fromkeys(values, "default")
    for flag in flags:
        if flag.option == "config":
            for file, options in _read_chain(_file_of(flag), ()):
                values |= options
                sources |= dict.fromkeys(options, file)
    config = _parse(flags, unflatten(values))
    sources |= {flag.option: "flag" for flag in flags if flag.option in values}
    return Resolved(config, sources)


def to_toml(resolved: Resolved, derived: Config | None = None) -> str:
    """The configuration as TOML, each value with its source as a comment; loading it gives the same Config.

    `derived` is what `validate` made of it: where the two differ (a 0 that means "the world size decides") the value
    that the run uses stands in the comment, so the file serves other world sizes too.
    """
    values = flatten(resolved.config)
    used = flatten(derived or resolved.config)
    lines = {}
    for path, value in values.items():
        comment = "".join(c if c.isprintable() else "?" for c in resolved.sources[path])
        if used[path] != value:
            comment += f", here {_toml(used[path])}"
        lines[path] = f"{_toml(value)}  # {comment}"
    return _sectioned(lines)


def part_toml(config: Config, parts: Sequence[str]) -> str:
    """The options and sections in `parts`, such as `model` and `data.tokenizer`, as TOML for `--config`."""
    return _sectioned(
        {p: _toml(v) for p, v in flatten(config).items() if any(f"{p}.".startswith(f"{part}.") for part in parts)}
    )


def _sectioned(lines: Mapping[str, str]) -> str:
    """TOML out of what stands behind "key = " of each option, by dotted path."""
    sections: dict[str, list[str]] = {}
    for path, line in lines.items():
        section, _, key = path.rpartition(".")
        sections.setdefault(section, []).append(f"{key} = {line}")
    top = sections.pop("", [])
    return "\n".join([*top, *(line for name, found in sections.items() for line in ("", f"[{name}]", *found)), ""])


# Flags


def _split(argv: Sequence[str]) -> list[_Flag]:
    """Group `argv` into flags with their values. Raises ConfigError naming every flag that does not exist."""
    types = option_types(_CommandLine)
    options = {path: path for path in types} | {"help": "help"}
    for path, annotation in types.items():
        if annotation is bool:
            section, dot, key = path.rpartition(".")
            options[f"{section}{dot}no_{key}"] = path
    flags: list[_Flag] = []
    problems = []
    for word in argv:
        if word.startswith("--") or word == "-h":
            name = "help" if word == "-h" else word[2:].partition("=")[0].replace("-", "_")
            if name not in options:
                problems.append(f"--{name}: no such flag{_suggestion(name, list(types))}")
            flags.append(_Flag(options.get(name, name), (word,)))
        elif flags:
            flags[-1] = flags[-1]._replace(words=(*flags[-1].words, word))
        elif not problems:
            problems.append(f"{word!r} follows no flag; options look like --section.key value")
    problems += _given_twice(flags)
    if problems:
        raise ConfigError("\n".join(problems))
    return flags


def _given_twice(flags: Sequence[_Flag]) -> list[str]:
    """A problem for each option that several flags set: which of them was meant is not known."""
    by_option: dict[str, list[str]] = {}
    for flag in flags:
        by_option.setdefault(flag.option, []).append(" ".join(flag.words))
    problems = []
    for option, given in by_option.items():
        if len(given) > 1 and option != "help":
            hint = "; its `base` key may name another file" if option == "config" else ""
            problems.append(f"--{option} is given twice: {' and '.join(given)}; give it once{hint}")
    return problems


def _file_of(flag: _Flag) -> str:
    values = [*flag.words[0].split("=", 1)[1:], *flag.words[1:]]
    if len(values) != 1:
        raise ConfigError(f"{' '.join(flag.words)}: expected one TOML file")
    return values[0]


def _parse(flags: Sequence[_Flag], config: Config) -> Config:
    """`config` with the flags' values on top. Raises ConfigError for values of the wrong type or number."""
    defaults = _CommandLine(**{f.name: getattr(config, f.name) for f in fields(config)})

    def parse(words: Sequence[str]) -> _CommandLine | None:
        # tyro explains a wrong value in a box on stderr and exits; the caller says it in one line.
        try:
            with redirect_stderr(StringIO()):
                return tyro.cli(_CommandLine, args=words, default=defaults, use_underscores=True)
        except SystemExit:
            return None

    if any(flag.option == "help" for flag in flags):
        tyro.cli(_CommandLine, args=["--help"], default=defaults, use_underscores=True)
    parsed = parse([word for flag in flags for word in flag.words])
    if parsed is None:
        wrong = [flag for flag in flags if parse(flag.words) is None]
        raise ConfigError("\n".join(f"{' '.join(flag.words)}: expected {_expected_words(flag)}" for flag in wrong))
    found = Config(**{f.name: getattr(parsed, f.name) for f in fields(config)})
    values = flatten(found)
    absurd = [flag for flag in flags if not _fits(values.get(flag.option))]
    if absurd:
        raise ConfigError("\n".join(f"{' '.join(flag.words)}: expected {_expected_words(flag)}" for flag in absurd))
    return found


def _fits(value: Any) -> bool:
    """Whether whole numbers are within 64 bits, as TOML's are."""
    items = value if isinstance(value, tuple) else (value,)
    return all(-(2**63) <= item < 2**63 for item in items if type(item) is int)


def _expected_words(flag: _Flag) -> str:
    annotation = option_types(_CommandLine)[flag.option]
    if annotation is bool:
        section, dot, key = flag.option.rpartition(".")
        return f"no value (--{flag.option} is yes, --{section}{dot}no_{key} is no)"
    return _expected(annotation)


# TOML


def _read_chain(file: str, above: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file, its options by dotted path) of `file` and those that it is based on, the most basic first."""
    file = os.path.normpath(file)
    if os.path.realpath(file) in [os.path.realpath(other) for other in above]:
        raise ConfigError(f"{above[-1]}: base leads back to itself: {' -> '.join([*above, file])}")
    text, table = _read(file)
    base = table.pop("base", None)
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"{file}:{_line(text, 'base')}: base = {base!r}: expected the path of a TOML file")
        target = os.path.join(os.path.dirname(file), base)
        if not os.path.exists(target):
            raise ConfigError(f"{file}:{_line(text, 'base')}: base = {base!r}: no such file {target}")
        yield from _read_chain(target, (*above, file))
    yield file, _typed(file, text, table)


def _read(file: str) -> tuple[str, dict[str, Any]]:
    """Text and parsed table of a TOML file. Raises ConfigError naming file and line."""
    try:
        with open(file, "rb") as stream:
            data = stream.read()
        text = data.decode()
        table = tomllib.loads(text)
    except OSError as error:
        reason = "is a folder, not a TOML file" if os.path.isdir(file) else (error.strerror or str(error)).lower()
        raise ConfigError(f"{file}: {reason} (--config names a TOML file)") from None
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{file}:{line}: not valid TOML: byte {data[error.start]:#04x} is not UTF-8") from None
    except ValueError as error:
        found = re.search(r"line (\d+)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1
        raise ConfigError(f"{file}:{line}: not valid TOML: {error}") from None
    except RecursionError:  # of tomllib, which calls itself for each bracket
        raise ConfigError(f"{file}:1: not valid TOML: lists or tables are nested too deeply") from None
    if not table:
        raise ConfigError(
            f"{file}:1: sets nothing; a config holds sections of options, such as [train] with steps = 100"
        )
    return text, table


def _typed(file: str, text: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a parsed TOML table by dotted path. Raises ConfigError naming every unknown key and wrong type."""
    types = option_types()
    options: dict[str, Any] = {}
    problems = []
    try:
        entries = list(_paths(table))
    except RecursionError:  # a dotted name of thousands of parts, which tomllib does read
        raise ConfigError(f"{file}:1: a name has too many parts; options look like section.key") from None
    for path, raw in entries:
        where = f"{file}:{_line(text, path)}: {path}"
        if any(known.startswith(path + ".") for known in types):
            problems.append(f"{where}: is a section, not an option: write [{path}]")
        elif path not in types:
            problems.append(f"{where}: no such option{_suggestion(path, list(types))}")
        elif (value := _convert(raw, types[path])) is None:
            problems.append(f"{where} = {json.dumps(raw, default=str)}: expected {_expected(types[path])}")
        else:
            options[path] = value
    if problems:
        raise ConfigError("\n".join(problems))
    return options


def _paths(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every key of nested tables."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _paths(value, f"{prefix}{key}.")
        elif value != {} or prefix + key not in _sections():
            yield prefix + key, value


def _sections() -> set[str]:
    return {path.rpartition(".")[0] for path in option_types()}


def _line(text: str, path: str) -> int:
    """Number of the line that sets `path` (or opens its table); the first line if it is written in an unusual way."""
    table = ""
    nearest = 1
    for number, line in enumerate(text.split("\n"), 1):
        if header := re.match(r"\s*\[+\s*([\w.-]+)\s*\]", line):
            table = header[1] + "."
            if path == header[1] or path.startswith(table):
                nearest = number
        elif (key := re.match(r"\s*([\w.-]+)\s*=", line)) and (path + ".").startswith(f"{table}{key[1]}."):
            return number
    return nearest


def _convert(raw: Any, annotation: Any) -> Any:
    """A TOML value as an option's type; None if it has another. A whole number is a float too, nothing else is cast."""
    if get_origin(annotation) is Literal:
        return next((choice for choice in get_args(annotation) if type(choice) is type(raw) and choice == raw), None)
    if get_origin(annotation) is tuple:
        kinds = get_args(annotation)
        if not isinstance(raw, list) or (kinds[-1] is not Ellipsis and len(raw) != len(kinds)):
            return None
        items = [_convert(item, kinds[0]) for item in raw]
        return None if None in items else tuple(items)
    if not _fits(raw):
        return None
    if annotation is float and type(raw) is int:
        return float(raw)
    return raw if type(raw) is annotation else None


def _expected(annotation: Any) -> str:
    """A type in words, for messages."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    if get_origin(annotation) is tuple:
        kinds = get_args(annotation)
        plural = {int: "whole numbers", float: "numbers", str: "strings"}[kinds[0]]
        return plural if kinds[-1] is Ellipsis else f"{len(kinds)} {plural}"
    return words[annotation]


def _toml(value: Any) -> str:
    """A value of one of our option types in TOML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        # A JSON string is a TOML basic string but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _suggestion(name: str, known: Sequence[str]) -> str:
    """'; did you mean X?' for the path in `known` most like `name`, in whole or in its last part; '' if none is."""

    def likeness(path: str) -> float:
        whole = SequenceMatcher(None, name, path).ratio()
        last = SequenceMatcher(None, name.rpartition(".")[2], path.rpartition(".")[2]).ratio()
        return max(whole, last - 0.05)

    best = max(known, key=likeness)
    return f"; did you mean {best}?" if likeness(best) > 0.6 else ""
