"""Hints about unknown flags and keys: the counterpart of another framework's, or a near name."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from megapar.config.options import Length
from megapar.config.unknown import UnknownOption, joined, nearest, words_of
from megapar_tools.migrate.flag_files import read_flags
from megapar_tools.migrate.job import plain

if TYPE_CHECKING:
    from megapar_tools.migrate.rows import OtherFlag

# Of names with parts, as `training.steps`: only these two have sections, whose keys need no row each.
HAVE_SECTIONS = ("torchtitan", "DeepSpeed")


def hint(unknown: UnknownOption) -> str:
    """A text to follow "no such flag", such as "; it is Megatron-LM's; here: --parallel.tp 8".

    "" if nothing is known.
    """
    name = plain(unknown.name)
    last = name.rpartition(".")[2]
    rows = _rows(name)
    # The last part of a name is less than its whole: an option of ours with it comes first.
    if not rows and all(path.rpartition(".")[2] != last for path in unknown.types):
        rows = _rows_of_a_part(name)
    if rows:
        return f"; {_counterparts(unknown, rows)}"
    words = words_of(name)
    known = read_flags("notes")
    for topic, note in known["topics"].items():
        if words.issuperset(topic.split()):
            return f"; {note.format_map(known['notes'])}"
    return nearest(unknown)


# Other frameworks

Rows = list[tuple[str, "OtherFlag"]]  # a framework, and a row of it


def _every_row() -> Rows:
    """Return the whole table."""
    # Each start of a run imports this file, and only a mistyped flag needs the table: reading it takes 0.06 s of CPU.
    from megapar_tools.migrate.table import TABLE

    return [(framework, row) for framework, rows in TABLE.items() for row in rows]


def _rows(name: str) -> Rows:
    """The rows of this name, or else the rows of the sections around it."""
    every_row = _every_row()
    exact = [(framework, row) for framework, row in every_row if plain(row.name) == name]
    if exact:
        return exact
    return [
        (framework, row)
        for framework, row in every_row
        if framework in HAVE_SECTIONS and name.startswith(f"{plain(row.name)}.")
    ]


def _rows_of_a_part(name: str) -> Rows:
    """Rows with only their last part in common with `name`: `optimizer.learning_rate`, or `offload_optimizer`.

    Empty if they mean different things, or if the part is a single word, such as `enable`.
    """
    last = name.rpartition(".")[2]
    if "_" not in last:
        return []
    found = [
        (framework, row)
        for framework, row in _every_row()
        # One of the two names must be the part alone. Two sections that differ mean different things.
        if last == (plain(row.name) if "." in name else plain(row.name).rpartition(".")[2])
    ]
    meanings = {(row.option, row.relation) for _, row in found}
    if len(meanings) == 1:
        return found
    return []


def _counterparts(unknown: UnknownOption, rows: Rows) -> str:
    """Return whose flag was typed, and what megapar has for it. Frameworks with the same answer are named together."""
    owners: dict[tuple[str, str], list[str]] = {}
    for framework, row in rows:
        subject = "it" if plain(row.name) == plain(unknown.name) else row.name
        owners.setdefault((subject, _here(unknown, row)), []).append(f"{framework}'s")
    return "; ".join(f"{subject} is {joined(whose, 'and')}; {here}" for (subject, here), whose in owners.items())


def _here(unknown: UnknownOption, row: "OtherFlag") -> str:
    """What stands here for a row, with the value if it follows from the given one."""
    # A row of a section speaks of the section: the given value is that of a key in it.
    values = () if plain(unknown.name).startswith(f"{plain(row.name)}.") else unknown.values
    value = " ".join(values)
    if row.relation == "lacking":
        return f"megapar has none: {row.note}"
    if row.relation == "always":
        if value and row.choices and value.lower() not in map(str.lower, row.choices):
            return f"megapar has only {joined([*row.choices], 'or')}: {row.note}"
        return f"leave it out: {row.note}"
    if row.relation == "computed":
        return f"here: {_spelled(row.option, (), unknown)}: {row.note}"
    note = f" ({row.note})" if row.note else ""
    if row.relation == "choice":
        ours = {theirs.lower(): value for theirs, value in row.choices.items()}.get(value.lower())
        if ours is not None:
            return f"here: {_spelled(row.option, (ours,), unknown)}{note}"
        pairs = ", ".join(f"{ours} for {theirs}" for theirs, ours in row.choices.items())
        return f"here: {_spelled(row.option, (), unknown)}: {pairs}{note}"
    if row.relation == "sets":
        is_off = value.lower() in ("false", "0", "no", "off")
        values = () if is_off else (row.ours,)
    return f"here: {_spelled(row.option, values, unknown)}{note}"


def _spelled(option: str, values: Sequence[str], unknown: UnknownOption) -> str:
    """An option of ours with values, in the style of `unknown`. Without values it is the name alone."""
    # A message is one line, whatever was typed.
    if not all(value.isprintable() for value in values):
        values = ()
    annotation = unknown.types.get(option, str)
    if unknown.style == "toml":
        if values:
            return f"{option} = {_toml(values, annotation)}"
        return option
    if annotation is bool and values:
        section, dot, key = option.rpartition(".")
        if values[0].lower() == "true":
            return f"--{option}"
        return f"--{section}{dot}no_{key}"
    return " ".join([f"--{option}", *values])


def _toml(values: Sequence[str], annotation: Any) -> str:
    """Words as a TOML value of an option of this type."""
    if get_origin(annotation) is tuple:
        return f"[{', '.join(_toml((value,), get_args(annotation)[0]) for value in values)}]"
    is_text = annotation is str or (get_origin(annotation) is Literal and isinstance(get_args(annotation)[0], str))
    text = " ".join(values)
    if is_text or (annotation == Length and not text.isdecimal()):
        return json.dumps(text)
    return text
