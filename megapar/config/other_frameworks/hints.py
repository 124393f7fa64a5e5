"""Hints about unknown flags and keys: the counterpart of another framework's, or a near name.

A misleading hint is worse than none. So a near name must be very near, and of many near names none is proposed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal, get_args, get_origin

from megapar.config.options import Length
from megapar.config.other_frameworks.job import plain
from megapar.config.other_frameworks.rows import (
    EPOCHS,
    NO_FP8,
    NO_NOISE,
    NO_TOKEN_IS_DROPPED,
    OFFLOADS,
    OtherFlag,
)
from megapar.config.other_frameworks.table import TABLE

# What is said of names with all these words, if the table does not have them.
TOPICS: Mapping[tuple[str, ...], str] = {
    ("capacity",): NO_TOKEN_IS_DROPPED,
    ("token", "drop"): NO_TOKEN_IS_DROPPED,
    ("jitter",): NO_NOISE,
    ("wandb",): "log.wandb PROJECT sends the numbers to Weights & Biases",
    ("mlflow",): "log.mlflow URI sends the numbers to an MLflow server",
    ("fp8",): f"megapar has no fp8: {NO_FP8}",
    ("fp4",): f"megapar has no fp4: {NO_FP8}",
    ("offload",): OFFLOADS,
    ("offloading",): OFFLOADS,
    ("epochs",): f"megapar has no epochs: {EPOCHS}",
    ("lora",): "adapters (LoRA) are the options adapter.rank, adapter.alpha and adapter.targets",
}

# Of names with parts, as `training.steps`: only these two have sections, whose keys need no row each.
HAVE_SECTIONS = ("torchtitan", "DeepSpeed")


@dataclass(frozen=True)
class Given:
    """What was typed: a name as it was spelled, and its values as words.

    `style` says how an answer is spelled, and `types` has the annotations of the program's options, by dotted path.
    """

    name: str
    values: tuple[str, ...]
    style: Literal["flag", "toml"]
    types: Mapping[str, Any]


def hint(given: Given) -> str:
    """A text to follow "no such flag", such as "; it is Megatron-LM's; here: --parallel.tp 8".

    "" if nothing is known.
    """
    name = plain(given.name)
    last = name.rpartition(".")[2]
    rows = _rows(name)
    # The last part of a name is less than its whole: an option of ours with it comes first.
    if not rows and all(path.rpartition(".")[2] != last for path in given.types):
        rows = _rows_of_a_part(name)
    if rows:
        return f"; {_counterparts(given, rows)}"
    words = _words(name)
    for topic, note in TOPICS.items():
        if words.issuperset(topic):
            return f"; {note}"
    near = near_names(name, list(given.types))
    if near:
        return f"; did you mean {_joined(near, 'or')}?"
    return ""


# Other frameworks

Rows = list[tuple[str, OtherFlag]]  # a framework, and a row of it


def _rows(name: str) -> Rows:
    """The rows of this name, or else the rows of the sections around it."""
    every_row = [(framework, row) for framework, rows in TABLE.items() for row in rows]
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
        for framework, rows in TABLE.items()
        for row in rows
        # One of the two names must be the part alone. Two sections that differ mean different things.
        if last == (plain(row.name) if "." in name else plain(row.name).rpartition(".")[2])
    ]
    meanings = {(row.option, row.relation) for _, row in found}
    if len(meanings) == 1:
        return found
    return []


def _counterparts(given: Given, rows: Rows) -> str:
    """Whose flag it is, and what there is here. Frameworks with the same answer are named together."""
    owners: dict[tuple[str, str], list[str]] = {}
    for framework, row in rows:
        subject = "it" if plain(row.name) == plain(given.name) else row.name
        owners.setdefault((subject, _here(given, row)), []).append(f"{framework}'s")
    return "; ".join(f"{subject} is {_joined(whose, 'and')}; {here}" for (subject, here), whose in owners.items())


def _here(given: Given, row: OtherFlag) -> str:
    """What stands here for a row, with the value if it follows from the given one."""
    # A row of a section speaks of the section: the given value is that of a key in it.
    values = () if plain(given.name).startswith(f"{plain(row.name)}.") else given.values
    value = " ".join(values)
    if row.relation == "lacking":
        return f"megapar has none: {row.note}"
    if row.relation == "always":
        if value and row.choices and value.lower() not in map(str.lower, row.choices):
            return f"megapar has only {_joined([*row.choices], 'or')}: {row.note}"
        return f"leave it out: {row.note}"
    if row.relation == "computed":
        return f"here: {_spelled(row.option, (), given)}: {row.note}"
    note = f" ({row.note})" if row.note else ""
    if row.relation == "choice":
        ours = {theirs.lower(): value for theirs, value in row.choices.items()}.get(value.lower())
        if ours is not None:
            return f"here: {_spelled(row.option, (ours,), given)}{note}"
        pairs = ", ".join(f"{ours} for {theirs}" for theirs, ours in row.choices.items())
        return f"here: {_spelled(row.option, (), given)}: {pairs}{note}"
    if row.relation == "sets":
        is_off = value.lower() in ("false", "0", "no", "off")
        values = () if is_off else (row.ours,)
    return f"here: {_spelled(row.option, values, given)}{note}"


def _spelled(option: str, values: Sequence[str], given: Given) -> str:
    """An option of ours with values, in the style of `given`. Without values it is the name alone."""
    # A message is one line, whatever was typed.
    if not all(value.isprintable() for value in values):
        values = ()
    annotation = given.types.get(option, str)
    if given.style == "toml":
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


# Names that are near


def near_names(name: str, known: Sequence[str]) -> list[str]:
    """The names in `known` probably meant by `name`, the nearest first. Empty if there are more than three."""
    section, _, last = name.rpartition(".")
    words = _words(last)
    found = []
    for path in known:
        path_section, _, path_last = path.rpartition(".")
        in_section = not section or _likeness(section, path_section) >= 0.75
        is_short = words < _words(path_last)
        if last == path_last or (in_section and (is_short or _is_mistyped(last, path_last))):
            found.append(path)
    # A last part that is written right needs no other that only resembles it, except in the section that was named.
    if any(path.rpartition(".")[2] == last for path in found):
        found = [path for path in found if path.rpartition(".")[2] == last or path.rpartition(".")[0] == section]
    found.sort(key=lambda path: -_likeness(name, path))
    if len(found) <= 3:
        return found
    return []


def _is_mistyped(typed: str, meant: str) -> bool:
    """Whether two last parts differ by a few letters. A part with one more word is another name, not a mistake."""
    if _likeness(typed, meant) >= 0.9:
        return True
    typed_words, meant_words = typed.split("_"), meant.split("_")
    if len(typed_words) != len(meant_words):
        return False
    return all(_is_near(first, second) for first, second in zip(typed_words, meant_words, strict=True))


def _is_near(first: str, second: str) -> bool:
    """Whether two words are alike, or one is the beginning of the other, as seq and sequence."""
    shortest = min(len(first), len(second))
    return _likeness(first, second) >= 0.8 or (shortest >= 3 and first[:shortest] == second[:shortest])


def _likeness(first: str, second: str) -> float:
    """From 0, nothing in common, to 1, equal."""
    matcher = SequenceMatcher(None, first, second)
    # Lengths alone exclude most names, without a look at their letters: a name of thousands takes no time.
    if matcher.real_quick_ratio() >= 0.5:
        return matcher.ratio()
    return 0.0


def _words(name: str) -> set[str]:
    return set(name.replace(".", "_").split("_"))


def _joined(texts: Sequence[str], word: str) -> str:
    """a, b or c."""
    if len(texts) > 1:
        return f" {word} ".join([", ".join(texts[:-1]), texts[-1]])
    return texts[0]
