"""Rows of the table of other frameworks' flags, which flags/*.toml hold.

A row names a flag as its framework spells it, our option, and how the value becomes ours. A note is words for a person:
it stands in hints and in docs/comparison.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal, get_args

from megapar_tools.migrate import conversions, conversions_models, conversions_others
from megapar_tools.migrate.flag_files import read_flags
from megapar_tools.migrate.job import Job, Ours, Words

Relation = Literal["same", "sets", "choice", "computed", "always", "lacking"]
Convert = Callable[[Job, Words], Ours]
"""Turns the words of a value into options of ours, none if there is nothing to set. Raises NoCounterpart."""

FROM_OTHERS = "from others"
"""A default that follows from other options: `convert` is called without words."""


@dataclass(frozen=True)
class OtherFlag:
    """A flag or key of another framework.

    `relation` says how its value becomes ours:

    - same: our option takes the same value
    - sets: the flag, if it is set, is our option with the value `ours`
    - choice: `choices` has our value for each of theirs
    - computed: `note` says how the value of our option follows
    - always: there is nothing to set. If `choices` has values, this holds for these alone; megapar has no others
    - lacking: megapar has nothing like it; `note` says what there is instead, or what to do

    In flags/*.toml a row is NAME = { RELATION = OPTION, ... }, with `to` for `ours` and `values` for `choices`. The
    words `always` and `lacking` stand before their note.

    `option` is ours by dotted path, such as train.steps, and "" with always and lacking. `convert` computes what
    `note` says. `default` is the value where the flag is not set, if ours differs. `auto` is the field of Hugging
    Face's arguments that stands for "auto" in a ds_config.
    """

    name: str
    relation: Relation
    option: str = ""
    note: str = ""
    ours: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    convert: Convert | None = None
    default: str = ""
    auto: str = ""


def read_rows(framework: str) -> tuple[OtherFlag, ...]:
    """Return the rows in flags/FRAMEWORK.toml, in their order. Raises KeyError for an unknown conversion or note."""
    notes = read_flags("notes")["notes"]
    groups = read_flags(framework)["rows"].values()
    return tuple(row_of(name, {**words}, notes) for group in groups for name, words in group.items())


def row_of(name: str, words: dict[str, Any], notes: Mapping[str, str]) -> OtherFlag:
    """Return a row of a file, by its words.

    Raises KeyError, TypeError or StopIteration for a word, a conversion or a note that is not known.
    """
    relation = next(relation for relation in get_args(Relation) if relation in words)
    option = words.pop(relation)
    if relation in ("always", "lacking"):
        words["note"], option = option, ""
    values = words.pop("values", {})
    return OtherFlag(
        name,
        relation,
        option,
        words.pop("note", "").format_map(notes),
        words.pop("to", ""),
        values if isinstance(values, dict) else dict.fromkeys(values, ""),
        _conversion(words.pop("convert", None)),
        **words,
    )


def _conversion(named: str | list[Any] | None) -> Convert | None:
    """Return the conversion of this name; of a list, the one that a function makes of the words behind its name."""
    if named is None:
        return None
    modules: tuple[ModuleType, ...] = (conversions, conversions_models, conversions_others)
    functions = {name: function for module in modules for name, function in vars(module).items()}
    if isinstance(named, str):
        return functions[named]
    return functions[named[0]](*named[1:])
