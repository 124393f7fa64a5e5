"""Reads options from TOML files and flags, with the source of each value, and writes them as TOML.

A flag (`--section.key value`) wins over a TOML file, and a TOML file (`--config`) wins over the default. The key `base`
of a TOML file names another file to start from. Both may also name a preset: a file known to the program by its name,
or a model of Hugging Face (`megapar.config.chain`). Anything else raises ConfigError: one line with the file and the
option.

A family may have options of its own in the section `model`. So the family is read first, and then everything else.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, field, fields, make_dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from megapar.base.errors import ConfigError
from megapar.config.chain import ConfigFiles, line_of
from megapar.config.derive import layers_of_every
from megapar.config.model_options import ModelConfig
from megapar.config.model_rules import COMMON_OPTIONS, Families, ModelRules
from megapar.config.option_values import convert, expected, fits, is_length_or_steps
from megapar.config.options import Config, Length, default_config, flatten, option_types, unflatten
from megapar.config.unknown import Hint, UnknownOption, nearest

# Options say what they are in docstrings. To look for comments tyro would read the sources, for half of its time.
_TYRO: dict[str, Any] = {"use_underscores": True, "config": (tyro.conf.HelptextFromCommentsOff,)}
ASKS_FOR_COMPLETION = "--tyro-write-completion"  # tyro's own flag, which every tool answers


@dataclass(frozen=True)
class Resolved:
    """A configuration and the source of each value.

    `sources` holds "default", "flag" or the name of a file, by dotted path.
    """

    config: Config
    sources: Mapping[str, str]


@dataclass(frozen=True)
class RunConfig:
    """The options of a run: as the user gave them, with all values filled in, and the source of each value.

    `given` stands in the run folder's config.toml, because it serves other world sizes too. The run reads `derived`.
    """

    given: Config
    derived: Config
    sources: Mapping[str, str]

    def with_parallel(self, source: str, **options: Any) -> "RunConfig":
        """Return these options with others of `parallel`, which `source` has chosen."""

        def chosen(config: Config) -> Config:
            return replace(config, parallel=replace(config.parallel, **options))

        sources = dict.fromkeys((f"parallel.{name}" for name in options), source)
        return RunConfig(chosen(self.given), chosen(self.derived), {**self.sources, **sources})

    def to_toml(self) -> str:
        """Return the options as TOML (`to_toml`)."""
        return to_toml(Resolved(self.given, self.sources), self.derived)


@dataclass(frozen=True)
class _CommandLine(Config):
    """Pretrain a transformer with data, tensor, pipeline, context and expert parallelism."""

    config: str = ""
    """TOML file of options, a preset such as llama3-8b, or a model of Hugging Face: a folder with config.json, or
    ORG/MODEL[@REVISION]. The `base` key of a TOML file may name another. Flags win over files."""


class _Flag(NamedTuple):
    option: str
    words: tuple[str, ...]  # the flag and its values as they were typed


@dataclass(frozen=True)
class _Known:
    """The options of a run: those of all runs, and those of its model's family."""

    families: Families
    family: str
    model: type[ModelConfig]
    hint: Hint = nearest

    def types(self) -> dict[str, Any]:
        """The type annotation of every option, by dotted path."""
        return option_types(self.model)

    def all_types(self) -> dict[str, Any]:
        """`types`, and those of other families."""
        return self.families.types() | self.types()

    def of_others(self, path: str) -> dict[str, Any]:
        """Other families with this option: their names, each with the option's default."""
        return self.families.readers(path)

    def is_default_elsewhere(self, path: str, raw: Any) -> bool:
        """Whether a value from TOML is the default of this option in each of the families with it."""
        for name, default in self.of_others(path).items():
            annotation = option_types(self.families.known[name].options)[path]
            if convert(raw, annotation) != default:
                return False
        return True

    def not_read(self, path: str) -> str:
        """The reason for refusing an option of other families."""
        others = list(self.of_others(path))
        verb = "does" if len(others) == 1 else "do"
        return f"family {self.family} does not read it; {' and '.join(others)} {verb}"


def load(
    argv: Sequence[str],
    presets: Mapping[str, Path] | None = None,
    families: Families = COMMON_OPTIONS,
    hint: Hint = nearest,
) -> Resolved:
    """Read options from the flags in `argv` (without the program's name) and from the files of `--config`.

    `presets` maps names to files for `--config` and `base`; a file of that path wins. `families` have the options of
    the section `model`. `hint` says what an unknown flag or key may mean. `--help` prints every option with its value,
    then exits. Raises ConfigError for an unknown flag, key, type, file or family. `validate` checks whether the values
    can run.
    """
    files = ConfigFiles(presets or {}, families, _family_of_flags(argv) or "")
    family = _family(argv, files)
    if ASKS_FOR_COMPLETION in argv:
        words = argv[argv.index(ASKS_FOR_COMPLETION) :]
        flags_of = _CommandLine(model=families.find(family).options())
        tyro.cli(_CommandLine, args=words, default=flags_of, **_TYRO)  # prints and exits
    known = _Known(families, family, families.find(family).options, hint)
    flags = _split(argv, known)
    values = flatten(default_config(known.model))
    sources = dict.fromkeys(values, "default")
    for flag in flags:
        if flag.option == "config":
            for file, text, table in files.read(_file_of(flag)):
                options = _typed(file, text, table, known)
                values |= options
                sources |= dict.fromkeys(options, file)
    config = _parse(flags, unflatten(values, known.model))
    sources |= {flag.option: "flag" for flag in flags if flag.option in values}
    return Resolved(config, sources)


OLD, NEW = "train.recompute_every", "train.recompute_layers"
"""An option's old spelling, which files and flags may still have, and today's."""


def load_earlier(config: Config) -> Config | None:
    """The options of an earlier start in the run folder of `config`. None if there are none.

    They are read with the options of `config`'s family.
    """
    file = Path(config.run_dir) / "config.toml"
    if not file.exists():
        return None
    options = type(config.model)
    families = Families({}, lambda name: ModelRules(name=name, activations=(), options=options))
    try:
        return load(["--config", str(file)], families=families).config
    except ConfigError:  # of another version or family, or damaged: then it says nothing about this run
        return None


def to_toml(resolved: Resolved, derived: Config | None = None) -> str:
    """The configuration as TOML, with the source of each value as a comment. Loading the text gives the same Config.

    `derived` is the result of `validate`. Some values differ there: a 0 may mean "the world size decides". Then the
    comment shows the derived value, and the file keeps the given one, because it serves other world sizes too.
    """
    values = flatten(resolved.config)
    used = flatten(derived or resolved.config)
    lines = {}
    for path, value in values.items():
        # A file's name may hold any letter; a line break in it would end the comment.
        comment = "".join(c if c.isprintable() else "?" for c in resolved.sources[path])
        if used[path] != value:
            comment += f", here {_toml(used[path])}"
        lines[path] = f"{_toml(value)}  # {comment}"
    return _sectioned(lines)


def part_toml(config: Config, parts: Sequence[str]) -> str:
    """The options and sections in `parts`, such as `model` and `data.tokenizer`, as TOML for `--config`."""
    lines = {}
    for path, value in flatten(config).items():
        # The dot keeps `data.train` from matching an option whose name only begins alike.
        if any(f"{path}.".startswith(f"{part}.") for part in parts):
            lines[path] = _toml(value)
    return _sectioned(lines)


def _sectioned(lines: Mapping[str, str]) -> str:
    """Join lines to a TOML text. `lines` holds the text after "key = " of each option, by dotted path."""
    sections: dict[str, list[str]] = {}
    for path, line in lines.items():
        section, _, key = path.rpartition(".")
        sections.setdefault(section, []).append(f"{key} = {line}")
    # Keys without a section come first: TOML would read them as part of the section above them.
    text = sections.pop("", [])
    for name, section_lines in sections.items():
        text += ["", f"[{name}]", *section_lines]
    return "\n".join([*text, ""])


# Flags


def _family(argv: Sequence[str], files: ConfigFiles) -> str:
    """The value of model.family, by the flags, the files of --config or the default.

    Nothing else is looked at. What is wrong with flags and files, `load` finds when it reads them as a whole.
    """
    family = ModelConfig.family
    for flag in _grouped(argv)[0]:
        if flag.option == "config":
            with suppress(ConfigError):
                for _, _, table in files.read(_file_of(flag)):
                    model = table.get("model")
                    if isinstance(model, dict) and isinstance(model.get("family"), str):
                        family = model["family"]
    named = _family_of_flags(argv)
    return family if named is None else named


def _family_of_flags(argv: Sequence[str]) -> str | None:
    """The value of the flag model.family, None without one."""
    given = [_values_of(flag) for flag in _grouped(argv)[0] if flag.option == "model.family"]
    return next((values[0] for values in reversed(given) if len(values) == 1), None)


def _grouped(argv: Sequence[str]) -> tuple[list[_Flag], list[str]]:
    """Group `argv` into flags and their values. The second list holds the words before the first flag."""
    flags: list[_Flag] = []
    stray = []
    for word in argv:
        if word.startswith("--") or word == "-h":
            name = word[2:].partition("=")[0].replace("-", "_")
            if word == "-h":
                name = "help"
            flags.append(_Flag(name, (word,)))
        elif flags:
            flags[-1] = flags[-1]._replace(words=(*flags[-1].words, word))
        else:
            stray.append(word)
    return flags, stray


def _split(argv: Sequence[str], known: _Known) -> list[_Flag]:
    """The flags in `argv`. Raises ConfigError with every unknown flag."""
    types = {**known.types(), "config": str}
    options = {path: path for path in types} | {"help": "help"}
    # tyro accepts --section.no_key for a boolean option.
    for path, annotation in types.items():
        if annotation is bool:
            section, dot, key = path.rpartition(".")
            options[f"{section}{dot}no_{key}"] = path
    options[OLD] = NEW
    grouped, stray = _grouped(argv)
    # One message is enough for all words before the first flag.
    looks = _as_flags(stray) or "; options look like --section.key value"
    problems = [f"{word!r} follows no flag{looks}" for word in stray[:1]]
    problems += [_no_such_flag(flag, known) for flag in grouped if flag.option not in options]
    flags = [flag._replace(option=options.get(flag.option, flag.option)) for flag in grouped]
    problems += _given_twice(flags)
    if problems:
        raise ConfigError("\n".join(problems))
    return [_in_new_words(flag) for flag in flags]


def _in_new_words(flag: _Flag) -> _Flag:
    """Return `flag` with the words of today's spelling."""
    if flag.words[0].partition("=")[0].replace("-", "_") != f"__{OLD}":
        return flag
    return flag._replace(words=(f"--{NEW}", *layers_of_every(_values_of(flag))))


def _no_such_flag(flag: _Flag, known: _Known) -> str:
    """The line about an unknown flag, in its own spelling."""
    typed = flag.words[0].partition("=")[0]
    section, dot, key = flag.option.rpartition(".")
    # A flag that switches an option off is its name with `no_` before it.
    for path in (flag.option, f"{section}{dot}{key.removeprefix('no_')}"):
        if known.of_others(path):
            return f"{typed}: {known.not_read(path)}"
    unknown = UnknownOption(typed[2:], _values_of(flag), "flag", {**known.all_types(), "config": str})
    return f"{typed}: no such flag{known.hint(unknown)}"


def _values_of(flag: _Flag) -> tuple[str, ...]:
    """The values of `--option VALUE ...` or `--option=VALUE`."""
    _, equals, value = flag.words[0].partition("=")
    if equals:
        return (value, *flag.words[1:])
    return flag.words[1:]


def _as_flags(words: Sequence[str]) -> str:
    """Return how assignments among `words` are written here, "" if there is none: Hydra's users type them so."""
    assigned = (word.partition("=") for word in words if re.fullmatch(r"\+*[a-z_]+(\.[a-z_]+)+=\S+", word))
    flags = " ".join(f"--{name.lstrip('+')} {value}" for name, _, value in assigned)
    return f"; options are flags: {flags}" if flags else ""


def _given_twice(flags: Sequence[_Flag]) -> list[str]:
    """A message for each option set by several flags: nobody knows which one was meant."""
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
    """FILE of `--config FILE` or `--config=FILE`. Raises ConfigError unless there is exactly one."""
    values = _values_of(flag)
    if len(values) != 1:
        raise ConfigError(f"{' '.join(flag.words)}: expected one TOML file{_as_flags(values)}")
    return values[0]


def _parse(flags: Sequence[_Flag], config: Config) -> Config:
    """`config` with the values of the flags. Raises ConfigError for values of the wrong type or number."""
    if any(flag.option == "help" for flag in flags):
        defaults = _CommandLine(**{f.name: getattr(config, f.name) for f in fields(config)})
        tyro.cli(_CommandLine, args=["--help"], default=defaults, **_TYRO)

    def parse(given: Sequence[_Flag]) -> dict[str, Any] | None:
        # For a wrong value tyro prints a box to stderr and exits. Messages must be one line, so the box is dropped.
        try:
            with redirect_stderr(StringIO()):
                return vars(
                    tyro.cli(_sections_of(given, config), args=[w for flag in given for w in flag.words], **_TYRO)
                )
        except SystemExit:
            return None

    parsed = parse(flags)
    if parsed is None:
        # tyro does not say which flags were wrong, so each is parsed by itself.
        wrong = [flag for flag in flags if parse([flag]) is None]
        raise ConfigError(_refused(wrong, config))
    resolved = replace(config, **{name: value for name, value in parsed.items() if name != "config"})
    values = flatten(resolved)
    # Python's integers have no bound, but TOML's have: config.toml must be able to hold every value.
    types = option_types(type(config.model))
    wrong = [flag for flag in flags if not fits(values.get(flag.option))]
    wrong += [f for f in flags if types.get(f.option) == Length and not is_length_or_steps(values[f.option])]
    if wrong:
        raise ConfigError(_refused(wrong, config))
    return resolved


def _sections_of(flags: Sequence[_Flag], config: Config) -> type:
    """A class with the sections and options of _CommandLine that these flags set, at their values in `config`.

    tyro looks at every option of a class in each call: with all of them it would take six times as long.
    """
    named = {flag.option.partition(".")[0] for flag in flags}
    kept = [f for f in fields(_CommandLine) if f.name in named]
    return make_dataclass("_Flags", [(f.name, f.type, field(default=getattr(config, f.name, ""))) for f in kept])


def _refused(flags: Sequence[_Flag], config: Config) -> str:
    """A line for each flag with a wrong value. It says what kind of value the flag takes."""
    types = {**option_types(type(config.model)), "config": str}
    return "\n".join(f"{' '.join(flag.words)}: expected {_expected_words(flag, types[flag.option])}" for flag in flags)


def _expected_words(flag: _Flag, annotation: Any) -> str:
    """What kind of value a flag takes, in words for messages."""
    if annotation is bool:
        section, dot, key = flag.option.rpartition(".")
        return f"no value (--{flag.option} is yes, --{section}{dot}no_{key} is no)"
    return expected(annotation)


# TOML


def _typed(file: str, text: str, table: Mapping[str, Any], known: _Known) -> dict[str, Any]:
    """Options of a parsed TOML table, by dotted path. Raises ConfigError naming each unknown key and wrong type."""
    types = known.types()
    options: dict[str, Any] = {}
    problems = []
    try:
        entries = list(_paths(table, {path.rpartition(".")[0] for path in types}))
    except RecursionError:  # tomllib reads a dotted name of thousands of parts, `_paths` cannot
        raise ConfigError(f"{file}:1: a name has too many parts; options look like section.key") from None
    for path, raw in entries:
        option_in_file = f"{file}:{line_of(text, path)}: {path}"
        if path == OLD:
            continue
        if any(option.startswith(path + ".") for option in types):
            problems.append(f"{option_in_file}: is a section, not an option: write [{path}]")
            continue
        if path not in types and known.of_others(path):
            # The config.toml of a run may state the options of all families. At their defaults they mean nothing.
            if not known.is_default_elsewhere(path, raw):
                problems.append(f"{option_in_file} = {json.dumps(raw, default=str)}: {known.not_read(path)}")
            continue
        if path not in types:
            items = raw if isinstance(raw, list) else [raw]
            # As TOML writes them: true, not True.
            values = tuple(item if isinstance(item, str) else json.dumps(item, default=str) for item in items)
            unknown = UnknownOption(path, values, "toml", known.all_types())
            problems.append(f"{option_in_file}: no such option{known.hint(unknown)}")
            continue
        value = convert(raw, types[path])
        if value is None:
            problems.append(f"{option_in_file} = {json.dumps(raw, default=str)}: expected {expected(types[path])}")
        else:
            options[path] = value
    old = dict(entries).get(OLD)
    # The config.toml of an older run has both, one of them at its default.
    if old not in (None, 1) and options.get(NEW):
        problems.append(
            f"{file}:{line_of(text, OLD)}: {OLD}: is the old spelling of {NEW}, which is given too; give one"
        )
    elif old is not None and not options.get(NEW):
        options[NEW] = layers_of_every([str(old)])
    if problems:
        raise ConfigError("\n".join(problems))
    return options


def _paths(table: Mapping[str, Any], sections: Collection[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of every key of nested tables."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _paths(value, sections, f"{prefix}{key}.")
        # An empty section is no error. Any other empty table is reported as an unknown option.
        elif value != {} or prefix + key not in sections:
            yield prefix + key, value


def _toml(value: Any) -> str:
    """A value of an option, as TOML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        # A JSON string is a valid TOML string, except that TOML wants the character DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)
