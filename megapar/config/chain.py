"""Finds the configuration that `--config` or `base` names, and reads it with the files that it starts from.

A name is a TOML file, a preset, config.json of Hugging Face or the folder with it, or a model at Hugging Face
(ORG/MODEL, `megapar.system.hub`). What is here wins, so nothing is downloaded for the name of a file or a preset.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from megapar.base.errors import ConfigError
from megapar.config.model_rules import Families
from megapar.system.hub import ModelName, fetch
from megapar.system.regular_files import read_regular

HF_CONFIG = "config.json"


class ConfigFile(NamedTuple):
    """A file of options: its name in messages, its text, and its table without the key `base`."""

    name: str
    text: str
    table: dict[str, Any]


class ConfigFiles:
    """Reads configurations by name, each once: a branch at Hugging Face may move between two looks.

    `presets` maps names to files. `families` reads config.json, by the family of the name `family` if that is not "".
    """

    def __init__(self, presets: Mapping[str, Path], families: Families, family: str = ""):
        self._presets = presets
        self._families = families
        self._family = family
        self._read: dict[str, list[ConfigFile]] = {}

    def read(self, name: str) -> list[ConfigFile]:
        """Return the bases of a configuration, the most basic first, then the configuration itself.

        Raises ConfigError if there is none of this name, or if a file cannot be read, and what `hub.fetch` raises.
        """
        if name not in self._read:
            self._read[name] = list(self._chain(self._found(name), ()))
        return self._read[name]

    def _found(self, name: str) -> str:
        """Return the path of a configuration or preset, or the name of a model at Hugging Face.

        Raises ConfigError with presets of similar names if there is none.
        """
        if os.path.isfile(name):
            return name
        # The folder of a run may have the name of a preset, so only a file wins over it.
        if name in self._presets:
            return str(self._presets[name])
        if self._presets and not os.path.lexists(name) and ModelName.parse(name) is None:
            near = get_close_matches(name, self._presets)
            hint = f"did you mean {' or '.join(near)}?" if near else "`megapar presets` lists those that there are"
            raise ConfigError(f"{name}: no such file or preset (--config names a TOML file or a preset); {hint}")
        return name

    def _chain(self, file: str, above: tuple[str, ...]) -> Iterator[ConfigFile]:
        """Yield the bases of `file`, the most basic first, then `file` itself.

        `above` are the files whose `base` led here. Raises ConfigError if they form a circle, or a base does not exist.
        """
        # Messages name the shortest path. Behind a link to a folder, a path with `..` leads elsewhere than its short
        # form.
        short = os.path.normpath(file)
        if os.path.realpath(short) == os.path.realpath(file):
            file = short
        # Compare real paths: a link may close the circle under another name.
        if os.path.realpath(file) in [os.path.realpath(other) for other in above]:
            raise ConfigError(f"{above[-1]}: base leads back to itself: {' -> '.join([*above, file])}")
        if (described := self._described(file)) is not None:
            yield described
            return
        text, table = _read(file)
        base = table.pop("base", None)
        if base is not None:
            if not isinstance(base, str):
                raise ConfigError(f"{file}:{line_of(text, 'base')}: base = {base!r}: expected the path of a TOML file")
            yield from self._chain(self._base(file, text, base), (*above, file))
        yield ConfigFile(file, text, table)

    def _base(self, file: str, text: str, base: str) -> str:
        """Return the path, or the name at Hugging Face, that the key `base` of `file` means. Raises ConfigError."""
        # Relative to the file that names it, so that configs can be used from any folder.
        target = os.path.join(os.path.dirname(file), base)
        if base in self._presets and not os.path.isfile(target):
            return str(self._presets[base])
        if os.path.exists(target):
            return target
        if ModelName.parse(base) is not None:
            return base
        near = get_close_matches(base, self._presets)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"{file}:{line_of(text, 'base')}: base = {base!r}: no such file {target}{hint}")

    def _described(self, file: str) -> ConfigFile | None:
        """Return the model of a config.json of Hugging Face as if it was a TOML file; None if `file` names none."""
        path = Path(file)
        # A folder with both is a native checkpoint, whose config.toml says more.
        if path.is_dir() and (path / HF_CONFIG).is_file() and not (path / "config.toml").exists():
            path /= HF_CONFIG
        name = str(path)
        if path.name != HF_CONFIG or not path.is_file():
            model = ModelName.parse(file)
            if model is None:
                return None
            snapshot = fetch(model, [HF_CONFIG], needed=[HF_CONFIG])
            path, name = snapshot.folder / HF_CONFIG, f"{snapshot.pinned}/{HF_CONFIG}"
        text = self._families.described(path, self._family)
        return ConfigFile(name, text, tomllib.loads(text))


def _of_yaml(file: str) -> str:
    """Return the way on for who has a YAML file, "" for another one."""
    if Path(file).suffix.lower() not in (".yaml", ".yml"):
        return ""
    return (
        "; a config is TOML with the same keys: [train] and below it steps = 3, for `train: {steps: 3}`; "
        "`megapar migrate` makes one of another framework's YAML"
    )


def _read(file: str) -> tuple[str, dict[str, Any]]:
    """Text and parsed table of a TOML file. Raises ConfigError with file and line."""
    try:
        data = read_regular(file)
        text = data.decode()
        table = tomllib.loads(text)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        if os.path.isdir(file):
            reason = "is a folder, not a TOML file"
        raise ConfigError(f"{file}: {reason} (--config names a TOML file)") from None
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{file}:{line}: not valid TOML: byte {data[error.start]:#04x} is not UTF-8") from None
    except ValueError as error:
        # tomllib names no line for a text that ends too early: then it is the last one.
        line_match = re.search(r"line (\d+)", str(error))
        line = int(line_match[1]) if line_match else text.count("\n") + 1
        raise ConfigError(f"{file}:{line}: not valid TOML: {error}{_of_yaml(file)}") from None
    except RecursionError:  # tomllib calls itself for each bracket
        raise ConfigError(f"{file}:1: not valid TOML: lists or tables are nested too deeply") from None
    if not table:
        raise ConfigError(
            f"{file}:1: sets nothing; a config holds sections of options, such as [train] with steps = 100"
        )
    return text, table


def line_of(text: str, path: str) -> int:
    """Number of the line with the key `path`, or else of the line with its table.

    It is 1 if the file is written otherwise than these patterns expect. tomllib keeps no line numbers.
    """
    table = ""
    nearest = 1
    for number, line in enumerate(text.split("\n"), 1):
        header = re.match(r"\s*\[+\s*([\w.-]+)\s*\]", line)
        if header:
            table = header[1] + "."
            if path == header[1] or path.startswith(table):
                nearest = number
            continue
        key = re.match(r"\s*([\w.-]+)\s*=", line)
        # The line may set an inline table that holds `path`: its name then is a prefix of the path.
        if key and (path + ".").startswith(f"{table}{key[1]}."):
            return number
    return nearest
